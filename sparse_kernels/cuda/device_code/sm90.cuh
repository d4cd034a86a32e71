// What the kernels for Hopper (sm_90a) share: a ring of tiles in shared memory, filled by one warpgroup for two.
//
// A block has three warpgroups of 128 threads. Two consumers multiply with wgmma; the producer fetches what they
// need, up to STAGES stages ahead, so that no arithmetic waits for memory. A slot of the ring holds one stage: a
// piece of the weight, and the rows of x that it meets. The host packs the piece exactly as it must lie.
// Two barriers a slot:
//   full    every producer thread arrives once its copies have landed, and the weight's bytes are counted
//   empty   every consumer warp arrives once it has read the slot
//
// A launch walks over tiles of the result (ROWS x BN) in rounds of one tile a block. Tiles come sorted by falling
// work, and every other round begins with the last block. So a block with the most work gets the least next. Where
// there are fewer tiles than multiprocessors, the stages of a tile are shared out among `splits` blocks. Each writes
// its float sums to a slice of its own of scratch memory, and finish_sm90.cu adds the slices up. Atomic additions
// would need no second launch. But they need zeroed memory and as much traffic, and would sum in another order every
// time.
//
// Macros: ROWS and BN, the tile; BK, rows of x a stage; STAGES; WEIGHT_BYTES a stage; ALIGN. Rows of x and of the
// result are aligned to ALIGN bytes: 16, 8 or 2.
#pragma once
#include "primitives.cuh"

constexpr int WARPGROUP = 128;
constexpr int THREADS = 3 * WARPGROUP;
constexpr int CONSUMER_WARPS = 8;
// A thread's share of the register file: (56 + 2 * 224) * 128 of 65536, in steps of 8.
constexpr int PRODUCER_REGISTERS = 56;
constexpr int CONSUMER_REGISTERS = 224;

constexpr int BLOCK_BYTES = BK * 128;  // 64 columns of x: BK lines
constexpr int STAGE_BYTES = WEIGHT_BYTES + BK * BN * 2;
static_assert(WEIGHT_BYTES % 1024 == 0 && BLOCK_BYTES % 1024 == 0, "swizzled tiles start at multiples of 1024 bytes");

struct Barriers {
  u64 full[STAGES];
  u64 empty[STAGES];
};

DEV void init_barriers(Barriers& barriers) {
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; ++slot) {
      mbarrier_init(&barriers.full[slot], WARPGROUP + 1);  // the producer's threads, and one more for the weight
      mbarrier_init(&barriers.empty[slot], CONSUMER_WARPS);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
}

// Where a warpgroup is in the ring. It goes on from one tile of the result to the next.
struct Position {
  int slot = 0;
  u32 parity = 0;
};

DEV void advance(Position& at) {
  if (++at.slot == STAGES) {
    at.slot = 0;
    at.parity ^= 1;
  }
}

// The next tile of a block: rows from group * ROWS on, columns from `column` on. It is summed over the stages
// `first` to `last` of the group, whose stages begin with `start`.
struct Tile {
  int group, split, start, first, last, column;
};

struct Schedule {
  const int4* work;  // (groups) by falling number of stages: the group, its first stage, how many it has, 0
  int groups, splits, n;
};

DEV int column_tiles(const Schedule& schedule) { return (schedule.n + BN - 1) / BN; }
DEV int tiles(const Schedule& schedule) { return schedule.groups * schedule.splits * column_tiles(schedule); }
// Which tile is this block's in a round. Those from tiles() on do not exist, and then no later round has one.
DEV int number_in(int round) {
  int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  return round * blocks + (round % 2 ? blocks - 1 - block : block);
}
DEV Tile tile_of(const Schedule& schedule, int number) {
  int columns = column_tiles(schedule), part = number / columns;
  int4 work = schedule.work[part / schedule.splits];
  int split = part % schedule.splits, start = work.y, count = work.z;
  return {work.x, split, start, start + count * split / schedule.splits, start + count * (split + 1) / schedule.splits,
          number % columns * BN};
}

// ---- Producer ----

// Each of the producer's warps fills BK / 4 lines; LANES_A_LINE lanes copy a row of x, 16 bytes each: every step moves
// whole rows.
constexpr int LINES_A_WARP = BK / 4;
constexpr int LANES_A_LINE = BN / 8 < 32 ? BN / 8 : 32;
constexpr int LINES_A_STEP = 32 / LANES_A_LINE;

// What a producer's thread copies of every stage of a tile: 8 columns of every LINES_A_STEP-th line of its warp. All
// that does not change from stage to stage is here, so that a test and a multiply-add are left beside each copy.
struct Part {
  u64 x;         // the address of its columns of row 0 of x
  u32 stride;    // bytes from one row of x to the next
  int left;      // how many columns of x there are from its first
  int line;      // the first of its lines
  u32 byte;      // where its 16 bytes of that line lie in a stage's rows of x
};

DEV Part part_of(const u16* x, int first_column, int n) {
  int warp = (threadIdx.x & 127) / 32, lane = threadIdx.x & 31;
  int chunk = lane % LANES_A_LINE, column = first_column + 8 * chunk;
  int line = warp * LINES_A_WARP + lane / LANES_A_LINE;
  u32 byte = chunk / 8 * BLOCK_BYTES + swizzled(line, chunk % 8);
  return {reinterpret_cast<u64>(x + column), 2u * n, n - column, line, byte};
}

// The address of a row of x from that of row 0; that of row -1 is not read.
DEV u64 row_of(u64 x, u32 row, u32 stride) { return x + static_cast<u64>(row) * stride; }

// Copies the line `step` below the part's first from `x`; zeros where the row of x does not exist. Chunks are swizzled
// by the line modulo 8. There the part's first line and `step` have no bit in common: an exclusive or adds them.
DEV void copy_line(unsigned char* tile, const Part& part, int step, u64 x, bool exists) {
  unsigned char* to = tile + (part.byte ^ (step % 8 << 4)) + step * 128;
  copy_8<ALIGN / 2>(to, reinterpret_cast<const u16*>(x), exists ? part.left : 0);
}
static_assert(LINES_A_WARP % 8 == 0 && LINES_A_STEP <= 2, "first lines are 0 or 1 modulo 8, steps even where they are 1");

// This thread's part of the slot is on its way.
DEV void producer_arrive(u64* full) {
#if ALIGN == 2
  fence_proxy_async();
  mbarrier_arrive(full);
#else
  cp_async_mbarrier_arrive_noinc(full);
#endif
}

// Waits until every slot has been read: a thread that ends might take its copies with it.
DEV void producer_finish(Barriers& barriers, Position at) {
  for (int i = 0; i < STAGES; ++i) {
    mbarrier_wait(&barriers.empty[at.slot], at.parity ^ 1);
    advance(at);
  }
}

// ---- Consumer ----

DEV void wait_full(u64* full, u32 parity) {
  mbarrier_wait(full, parity);
  // PTX asks for a fence between cp_async, which counts as an ordinary write, and wgmma, which reads asynchronously.
  fence_proxy_async();
}

DEV void release(u64* empty) {
  if ((threadIdx.x & 31) == 0) mbarrier_arrive(empty);
}

// Four lanes hold a 4 x 4 matrix of words, a row each; afterwards a column each.
DEV void transpose_quad(u32 (&words)[4]) {
  bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    u32 other = __shfl_xor_sync(0xffffffff, odd ? words[i] : words[i + 1], 1);
    (odd ? words[i] : words[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 other = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i + 2], 2);
    (upper ? words[i] : words[i + 2]) = other;
  }
}

// Writes the first `valid` of 8 elements.
DEV void store_chunk(u16* out, const u32 (&words)[4], int valid) {
#if ALIGN == 16
  if (valid > 0) *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
#elif ALIGN == 8
  if (valid > 0) *reinterpret_cast<uint2*>(out) = make_uint2(words[0], words[1]);
  if (valid > 4) *reinterpret_cast<uint2*>(out + 4) = make_uint2(words[2], words[3]);
#else
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (valid > i) out[i] = static_cast<u16>(words[i / 2] >> 16 * (i % 2));
#endif
}

// Where a lane's two rows of a warpgroup's 64 go, and what is added there. Fetched before the products, as one read
// waits for the other.
struct Rows {
  int id[2];
  float shift[2];
};

DEV Rows rows_of(const int* row_ids, const float* bias) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
  Rows rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.id[half] = row_ids[warp * 16 + lane / 4 + half * 8];
    rows.shift[half] = bias && rows.id[half] >= 0 ? bias[rows.id[half]] : 0.0f;
  }
  return rows;
}

// Finishes a warpgroup's 64 x N sums: bias, activation, and each row to its place in the result. So a permutation of
// rows costs nothing. Lanes first exchange columns, so that a quad writes 64 bytes of one row at a time. That needs
// no shared memory, and the ring keeps all of it.
template <int N>
DEV void store_tile(float (&sums)[N / 2], Rows rows, int activation, u16* out, int column, int n) {
  int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    int row = rows.id[0];
#pragma unroll
    for (int j = 0; j < N / 8; j += 4) {
      float values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = sums[4 * (j + i / 2) + i % 2] + rows.shift[0];
      activate(values, activation);
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack2(values[2 * i], values[2 * i + 1]);
      transpose_quad(words);
      int start = column + 8 * (j + lane % 4);
      if (row >= 0) store_chunk(out + static_cast<u64>(row) * n + start, words, n - start);
    }
    // The lower row takes the upper one's registers, so that one piece of code serves both.
    rows.id[0] = rows.id[1];
    rows.shift[0] = rows.shift[1];
#pragma unroll
    for (int i = 0; i < N / 2; i += 4) {
      sums[i] = sums[i + 2];
      sums[i + 1] = sums[i + 3];
    }
  }
}

// Writes a warpgroup's 64 x N sums as they are; `width` floats a row, a multiple of BN.
template <int N>
DEV void store_partial(const float (&sums)[N / 2], float* partial, int width) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x & 127) >> 5;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* row = partial + static_cast<u64>(warp * 16 + lane / 4 + half * 8) * width + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
      *reinterpret_cast<float2*>(row + 8 * j) = make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
  }
}

// Either of the two, for 64 rows from `row` of the tile's group and the columns from `column` of the matrix.
template <int N>
DEV void store(float (&sums)[N / 2], const Schedule& schedule, const Tile& tile, int row, int column,
               const Rows& rows, int activation, u16* out, float* partial) {
  if (partial) {
    int width = column_tiles(schedule) * BN;
    u64 above = (static_cast<u64>(tile.split) * schedule.groups + tile.group) * ROWS + row;
    store_partial<N>(sums, partial + above * width + column, width);
  } else {
    store_tile<N>(sums, rows, activation, out, column, schedule.n);
  }
}
