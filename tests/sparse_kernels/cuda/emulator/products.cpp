// Fragments and tensor-core products, each for all threads that meet: layouts as in primitives.cuh and the PTX ISA.
#include <deque>
#include <vector>

#include "emulator.h"

namespace emulator {

namespace {

float element(u16 bits, bool bfloat16) { return bfloat16 ? bfloat16_to_float(bits) : half_to_float(bits); }
float element(u32 pair, int which, bool bfloat16) { return element(static_cast<u16>(pair >> (16 * which)), bfloat16); }

const Product& product(void** arguments, int lane) { return *static_cast<Product*>(arguments[lane]); }

// The places of the 2 of 4 columns that metadata keeps, whose 4 bits are the lowest.
struct Pair {
  u32 first, second;
};
Pair pair_of(u32 bits, const char* kind, int row, int group) {
  Pair pair{bits & 3, bits >> 2 & 3};
  if (pair.first >= pair.second) fail("%s: metadata of row %d, group %d is not in rising order", kind, row, group);
  return pair;
}

// ---- Of a warp ----

// b (8 * Steps x 8) of all lanes as a matrix.
template <int Steps>
void gather_b(void** arguments, float (&b)[8 * Steps][8]) {
  for (int lane = 0; lane < 32; lane++) {
    const Product& mine = product(arguments, lane);
    for (int i = 0; i < Steps; i++) {
      for (int h = 0; h < 2; h++) b[8 * i + lane % 4 * 2 + h][lane / 4] = element(mine.b[i], h, mine.bfloat16);
    }
  }
}

// a (16 x 8 * Steps) of all lanes as a matrix.
template <int Steps>
void gather_a(void** arguments, float (&a)[16][8 * Steps]) {
  for (int lane = 0; lane < 32; lane++) {
    const Product& mine = product(arguments, lane);
    for (int i = 0; i < 2 * Steps; i++) {
      for (int h = 0; h < 2; h++) {
        a[lane / 4 + i % 2 * 8][i / 2 * 8 + lane % 4 * 2 + h] = element(mine.a[i], h, mine.bfloat16);
      }
    }
  }
}

// c += a b, with c (16 x 8) in the registers of all lanes.
template <int Depth>
void multiply(void** arguments, const float (&a)[16][Depth], const float (&b)[Depth][8]) {
  float c[16][8] = {};
  for (int row = 0; row < 16; row++) {
    for (int k = 0; k < Depth; k++) {
      for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0; i < 4; i++) product(arguments, lane).c[i] += c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

// ---- Of a warpgroup ----

struct WarpgroupProduct {
  WarpgroupPart shared;  // what is the same for all threads
  float* d[128];
  u32 metadata[128];
};

struct Warpgroup {
  std::vector<WarpgroupProduct> open;                  // since the last commit
  std::deque<std::vector<WarpgroupProduct>> committed;  // groups, the oldest first
};
Warpgroup warpgroups[8];  // of the running block

Warpgroup& warpgroup() { return warpgroups[place->index / 128]; }

// A tile in shared memory as its descriptor tells it: an element lies at start + offset, the chunk bits 4 to 6 of
// that address xor-ed with bits 7 to 9.
struct SwizzledTile {
  u32 start, leading, stride;
  bool bfloat16;

  SwizzledTile(u64 descriptor, bool of_bfloat16)
      : start((descriptor & 0x3fff) << 4), leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4), bfloat16(of_bfloat16) {
    if (descriptor >> 62 != 1) fail("a wgmma descriptor without 128-byte swizzle: type %d", int(descriptor >> 62));
    if (descriptor >> 49 & 7) fail("a wgmma descriptor with a base offset");
  }
  float at(u32 offset) const {
    u32 address = start + offset;
    address ^= (address >> 7 & 7) << 4;
    if (address + 2 > dynamic_shared_bytes) fail("wgmma reads shared memory at %u, beyond its end", address);
    u16 bits;
    memcpy(&bits, dynamic_shared + address, 2);
    return element(bits, bfloat16);
  }
  float k_major(u32 row, u32 k) const { return at(row / 8 * stride + row % 8 * 128 + k * 2); }
  float mn_major(u32 column, u32 k) const {
    return at(column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2);
  }
};

constexpr int MOST_COLUMNS = 256;

// a is 64 x 16, or 64 x 32 whose tile holds, for every 4 columns, the 2 kept ones; their row's metadata says which.
void run(const WarpgroupProduct& product) {
  const WarpgroupPart& shared = product.shared;
  const SwizzledTile a_tile(shared.a, shared.bfloat16), b_tile(shared.b, shared.bfloat16);
  const int columns = shared.columns, depth = shared.sparse ? 32 : 16;
  static float a[64][32], b[32][MOST_COLUMNS], sums[64][MOST_COLUMNS];
  memset(a, 0, sizeof a);
  memset(sums, 0, sizeof sums);
  for (int row = 0; row < 64; row++) {
    for (int kept = 0; kept < 16; kept++) {
      int k = kept;
      if (shared.sparse) {
        int group = kept / 2;
        u32 word = product.metadata[row / 16 * 32 + row % 8 * 4 + group / 4];
        Pair pair = pair_of(word >> (row / 8 % 2 * 16 + group % 4 * 4), "wgmma_sp", row, group);
        k = 4 * group + static_cast<int>(kept % 2 ? pair.second : pair.first);
      }
      a[row][k] = a_tile.k_major(row, kept);
    }
  }
  for (int k = 0; k < depth; k++) {
    for (int column = 0; column < columns; column++) b[k][column] = b_tile.mn_major(column, k);
  }
  for (int row = 0; row < 64; row++) {
    for (int k = 0; k < depth; k++) {
      for (int column = 0; column < columns; column++) sums[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int thread = 0; thread < 128; thread++) {
    int row = thread / 32 * 16 + thread % 32 / 4;
    for (int i = 0; i < columns / 2; i++) {
      product.d[thread][i] += sums[row + i / 2 % 2 * 8][i / 4 * 8 + thread % 4 * 2 + i % 2];
    }
  }
}

void run_oldest_group(Warpgroup& group) {
  for (auto& product : group.committed.front()) run(product);
  group.committed.pop_front();
}

}  // namespace

// ---- What emulator.h and hopper.h declare ----

void load_matrices(void** arguments) {
  auto* first = static_cast<Fragment*>(arguments[0]);
  for (int matrix = 0; matrix < first->matrices; matrix++) {
    u16 elements[8][8];
    for (int row = 0; row < 8; row++) {
      memcpy(elements[row], static_cast<Fragment*>(arguments[8 * matrix + row])->row, 16);
    }
    for (int lane = 0; lane < 32; lane++) {
      int row = lane / 4, column = lane % 4 * 2;
      u16 low = first->transposed ? elements[column][row] : elements[row][column];
      u16 high = first->transposed ? elements[column + 1][row] : elements[row][column + 1];
      static_cast<Fragment*>(arguments[lane])->registers[matrix] = low | static_cast<u32>(high) << 16;
    }
  }
}

void multiply_m16n8k16(void** arguments) {
  float a[16][16], b[16][8];
  gather_a<2>(arguments, a);
  gather_b<2>(arguments, b);
  multiply(arguments, a, b);
}

void multiply_m16n8k8(void** arguments) {
  float a[16][8], b[8][8];
  gather_a<1>(arguments, a);
  gather_b<1>(arguments, b);
  multiply(arguments, a, b);
}

void multiply_sp_m16n8k32(void** arguments) {
  float kept[16][16], a[16][32] = {}, b[32][8];
  gather_a<2>(arguments, kept);
  gather_b<4>(arguments, b);
  for (int row = 0; row < 16; row++) {
    for (int group = 0; group < 8; group++) {  // of 4 columns, 2 of them kept
      u32 word = product(arguments, row % 8 * 4 + group / 4).metadata;
      Pair pair = pair_of(word >> (row / 8 * 16 + group % 4 * 4), "mma_sp_m16n8k32", row, group);
      a[row][4 * group + pair.first] = kept[row][2 * group];
      a[row][4 * group + pair.second] = kept[row][2 * group + 1];
    }
  }
  multiply(arguments, a, b);
}

void multiply_m8n8k4(void** arguments) {
  for (int quad = 0; quad < 4; quad++) {
    float a[8][4], b[4][8], c[8][8] = {};
    for (int half = 0; half < 2; half++) {
      for (int t = 0; t < 4; t++) {
        const Product& one = product(arguments, 4 * quad + 16 * half + t);
        for (int i = 0; i < 4; i++) {
          a[t + 4 * half][i] = element(one.a[i / 2], i % 2, false);
          b[t][4 * half + i] = element(one.b[i / 2], i % 2, false);
        }
      }
    }
    for (int row = 0; row < 8; row++) {
      for (int k = 0; k < 4; k++) {
        for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
      }
    }
    for (int half = 0; half < 2; half++) {
      for (int t = 0; t < 4; t++) {
        const Product& one = product(arguments, 4 * quad + 16 * half + t);
        for (int i = 0; i < 8; i++) one.c[i] += c[(t & 1) + (i & 2) + 4 * half][(i & 4) + (t & 2) + (i & 1)];
      }
    }
  }
}

void add_product(void** arguments) {
  WarpgroupProduct product{};
  product.shared = *static_cast<WarpgroupPart*>(arguments[0]);
  for (int thread = 0; thread < 128; thread++) {
    auto* part = static_cast<WarpgroupPart*>(arguments[thread]);
    if (part->a != product.shared.a || part->b != product.shared.b) {
      fail("wgmma: the threads of a warpgroup give different descriptors");
    }
    product.d[thread] = part->d;
    product.metadata[thread] = part->metadata;
  }
  warpgroup().open.push_back(product);
}

void commit_products(void**) {
  Warpgroup* group = &warpgroup();
  group->committed.push_back(std::move(group->open));
  group->open.clear();
  if (coin()) return;  // as late as can be: when they are waited for
  if (coin()) {        // at once, and those before them
    while (!group->committed.empty()) run_oldest_group(*group);
    return;
  }
  later([=] {
    if (!group->committed.empty()) run_oldest_group(*group);
  });
}

void wait_for_products(int groups_left) {
  caller = __builtin_return_address(0);
  Warpgroup& group = warpgroup();
  while (group.committed.size() > static_cast<size_t>(groups_left)) run_oldest_group(group);
  caller = nullptr;
}

void forget_products() {
  for (Warpgroup& group : warpgroups) group = {};
}

}  // namespace emulator
