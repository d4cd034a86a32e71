// The primitives of Hopper (the section at the end of sparse_kernels/cuda/primitives.cuh) on a CPU.
//
// What runs asynchronously on the machine does so here: a bulk copy lands in pieces at random moments, and a wgmma
// runs at some random moment between its commit and the end of its wait, and reads shared memory then, through its
// descriptors. So a slot that is filled or given back too early shows as a wrong result, and one that never is as
// threads that wait for ever. Not seen: a missing proxy fence or wgmma_fence.
#pragma once

#include <deque>
#include <vector>

namespace emulator {

// ---- Barriers ----

struct __attribute__((may_alias)) Barrier {
  u16 count;         // arrivals a phase needs
  u16 missing : 15;  // of this phase
  u16 parity : 1;    // of this phase
  int32_t bytes;     // expected and not landed
};
static_assert(sizeof(Barrier) == sizeof(u64), "a barrier is a u64");

constexpr int MOST_BYTES = (1 << 20) - 1;  // that a barrier can expect

inline Barrier& barrier_at(u64* address) {
  auto* barrier = reinterpret_cast<Barrier*>(address);
  if (barrier->count == 0xffff) fail("an mbarrier is used before mbarrier_init");
  return *barrier;
}

inline void complete_phase(Barrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes != 0) return;
  barrier.parity ^= 1;
  barrier.missing = barrier.count;
}

inline void arrive(Barrier& barrier) {
  if (barrier.missing == 0) fail("more than %d arrivals at an mbarrier in one phase", barrier.count);
  barrier.missing--;
  complete_phase(barrier);
}

inline void expect(Barrier& barrier, int bytes) {
  barrier.bytes += bytes;
  if (barrier.bytes > MOST_BYTES) fail("an mbarrier expects %d bytes, more than it can count", barrier.bytes);
}

inline void land(Barrier& barrier, int bytes) {
  barrier.bytes -= bytes;
  if (barrier.bytes < -MOST_BYTES) fail("%d bytes more landed than the mbarrier expects", -barrier.bytes);
  complete_phase(barrier);
}

// ---- Products of a warpgroup ----

struct WarpgroupProduct {
  void (*run)(const WarpgroupProduct&);
  u64 a, b;
  float* d[128];
  u32 metadata[128];
};

struct Warpgroup {
  std::vector<WarpgroupProduct> open;                  // since the last commit
  std::deque<std::vector<WarpgroupProduct>> committed;  // groups, the oldest first
};
inline Warpgroup warpgroups[8];  // of the running block

inline Warpgroup& warpgroup() { return warpgroups[place->index / 128]; }

inline void run_oldest_group(Warpgroup& group) {
  for (auto& product : group.committed.front()) product.run(product);
  group.committed.pop_front();
}

// A tile in shared memory as its descriptor tells it: an element lies at start + offset, the chunk bits 4 to 6 of
// that address xor-ed with bits 7 to 9.
struct SwizzledTile {
  u32 start, leading, stride;

  explicit SwizzledTile(u64 descriptor)
      : start((descriptor & 0x3fff) << 4), leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) fail("a wgmma descriptor without 128-byte swizzle: type %d", int(descriptor >> 62));
    if (descriptor >> 49 & 7) fail("a wgmma descriptor with a base offset");
  }
  float at(u32 offset) const {
    u32 address = start + offset;
    address ^= (address >> 7 & 7) << 4;
    if (address + 2 > dynamic_shared_bytes) fail("wgmma reads shared memory at %u, beyond its end", address);
    u16 element;
    memcpy(&element, dynamic_shared + address, 2);
    return to_float(element);
  }
  float k_major(u32 row, u32 k) const { return at(row / 8 * stride + row % 8 * 128 + k * 2); }
  float mn_major(u32 column, u32 k) const {
    return at(column / 64 * leading + k / 8 * stride + k % 8 * 128 + column % 64 * 2);
  }
};

// d += a b with a (64 x Depth) and b as its descriptor says.
template <int N, int Depth>
void multiply_tiles(const WarpgroupProduct& product, const float (&a)[64][Depth]) {
  SwizzledTile tile(product.b);
  static float b[Depth][N], sums[64][N];
  for (int k = 0; k < Depth; k++) {
    for (int column = 0; column < N; column++) b[k][column] = tile.mn_major(column, k);
  }
  memset(sums, 0, sizeof sums);
  for (int row = 0; row < 64; row++) {
    for (int k = 0; k < Depth; k++) {
      for (int column = 0; column < N; column++) sums[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int thread = 0; thread < 128; thread++) {
    int row = thread / 32 * 16 + thread % 32 / 4;
    for (int i = 0; i < N / 2; i++) {
      product.d[thread][i] += sums[row + i / 2 % 2 * 8][i / 4 * 8 + thread % 4 * 2 + i % 2];
    }
  }
}

template <int N>
void run_dense(const WarpgroupProduct& product) {
  SwizzledTile tile(product.a);
  static float a[64][16];
  for (int row = 0; row < 64; row++) {
    for (int k = 0; k < 16; k++) a[row][k] = tile.k_major(row, k);
  }
  multiply_tiles<N>(product, a);
}

// The tile of a holds, for every 4 columns, the 2 kept ones; the metadata of their row says which.
template <int N>
void run_sparse(const WarpgroupProduct& product) {
  SwizzledTile tile(product.a);
  static float a[64][32];
  memset(a, 0, sizeof a);
  for (int row = 0; row < 64; row++) {
    for (int group = 0; group < 8; group++) {
      u32 word = product.metadata[row / 16 * 32 + row % 8 * 4 + group / 4];
      u32 pair = word >> (row / 8 % 2 * 16 + group % 4 * 4) & 0xf;
      u32 first = pair & 3, second = pair >> 2;
      if (first >= second) fail("wgmma_sp: metadata of row %d, group %d is not in rising order", row, group);
      a[row][4 * group + first] = tile.k_major(row, 2 * group);
      a[row][4 * group + second] = tile.k_major(row, 2 * group + 1);
    }
  }
  multiply_tiles<N>(product, a);
}

struct WarpgroupPart {  // what one thread brings
  void (*run)(const WarpgroupProduct&);
  u64 a, b;
  float* d;
  u32 metadata;
};

inline void open_product(WarpgroupPart mine, const char* kind) {
  meet(warpgroup_meeting(), 128, place->index % 128, kind, &mine, [](void** arguments) {
    WarpgroupProduct product{};
    for (int thread = 0; thread < 128; thread++) {
      auto* part = static_cast<WarpgroupPart*>(arguments[thread]);
      if (thread > 0 && (part->a != product.a || part->b != product.b)) {
        fail("wgmma: the threads of a warpgroup give different descriptors");
      }
      product.run = part->run;
      product.a = part->a;
      product.b = part->b;
      product.d[thread] = part->d;
      product.metadata[thread] = part->metadata;
    }
    warpgroup().open.push_back(product);
  });
}

}  // namespace emulator

DEV void mbarrier_init(u64* barrier, int count) {
  // A block that has barriers initialises them first: what an earlier launch that failed has left is dropped here.
  for (auto& warpgroup : emulator::warpgroups) warpgroup = {};
  if (count < 1 || count >= 0x7fff) emulator::fail("mbarrier_init: a count of %d", count);
  *reinterpret_cast<emulator::Barrier*>(barrier) = {u16(count), u16(count), 0, 0};
}
DEV void mbarrier_fence_init() {}
DEV void mbarrier_expect(u64* barrier, u32 bytes) {
  emulator::expect(emulator::barrier_at(barrier), static_cast<int>(bytes));
  emulator::arrive(emulator::barrier_at(barrier));
}
DEV void mbarrier_arrive(u64* barrier) { emulator::arrive(emulator::barrier_at(barrier)); }
DEV void mbarrier_wait(u64* barrier, u32 parity) {
  if (parity > 1) emulator::fail("mbarrier_wait: a parity of %u", parity);
  emulator::wait_until("mbarrier_wait", [=] { return emulator::barrier_at(barrier).parity != parity; });
}
DEV void cp_async_mbarrier_arrive_noinc(u64* barrier) {
  emulator::after_copies([=] { emulator::arrive(emulator::barrier_at(barrier)); });
}

DEV void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
  u32 start = shared_address(shared);
  if (start % 16 || reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16) {
    emulator::fail("bulk_load: addresses and bytes must be multiples of 16");
  }
  if (static_cast<size_t>(start) + bytes > emulator::dynamic_shared_bytes) {
    emulator::fail("bulk_load: %u bytes from %u pass the end of shared memory", bytes, start);
  }
  constexpr u32 PIECES = 4;
  for (u32 piece = 0; piece < PIECES; piece++) {
    u32 from = bytes / 16 * piece / PIECES * 16, to = bytes / 16 * (piece + 1) / PIECES * 16;
    emulator::later([=] {
      memcpy(static_cast<char*>(shared) + from, static_cast<const char*>(global) + from, to - from);
      emulator::land(emulator::barrier_at(barrier), static_cast<int>(to - from));
    });
  }
}
DEV void fence_proxy_async() {}

template <int N>
DEV void register_increase() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "multiples of 8 from 24 to 256");
}
template <int N>
DEV void register_decrease() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "multiples of 8 from 24 to 256");
}

DEV void wgmma_fence() {}
template <int N>
DEV void wgmma_keep_order(float (&)[N]) {}
DEV void wgmma_commit() {
  emulator::meet(emulator::warpgroup_meeting(), 128, emulator::place->index % 128, "wgmma_commit", nullptr,
                 [](void**) {
                   emulator::Warpgroup* group = &emulator::warpgroup();
                   group->committed.push_back(std::move(group->open));
                   group->open.clear();
                   if (emulator::coin()) return;  // as late as can be: when they are waited for
                   if (emulator::coin()) {        // at once, and those before them
                     while (!group->committed.empty()) emulator::run_oldest_group(*group);
                     return;
                   }
                   emulator::later([=] {
                     if (!group->committed.empty()) emulator::run_oldest_group(*group);
                   });
                 });
}
template <int N>
DEV void wgmma_wait() {
  auto& group = emulator::warpgroup();
  while (group.committed.size() > N) emulator::run_oldest_group(group);
}

template <int N>
DEV void wgmma_m64nNk16(float (&d)[N / 2], u64 a, u64 b) {
  emulator::open_product({emulator::run_dense<N>, a, b, d, 0}, "wgmma");
}
template <int N>
DEV void wgmma_sp_m64nNk32(float (&d)[N / 2], u64 a, u64 b, u32 metadata) {
  emulator::open_product({emulator::run_sparse<N>, a, b, d, metadata}, "wgmma_sp");
}
