// out = activation(w x + bias) for few columns of x, as a model decodes. The rows of the weight w fall into groups that
// share their kept columns: vector-wise, Shfl-BW and block-wise.
//
// So short a product waits for its weights, which are read once. What counts is that enough of them are asked for at any
// time. So each warp has a ring in shared memory, which asynchronous copies fill some steps ahead. The weights lie in
// the order of m16n8k16's first operand. Each lane reads what it has copied itself, so warps wait for no other.
//
// A block computes PART_ROWS rows of a group. Its warps take the steps of 16 kept columns in turn, and meet once, at the
// end, where their sums are added in shared memory.
//
// x (k, n) comes from the caches, a step before it is multiplied. A lane reads WIDTH neighbouring columns of a kept row
// at once. The product of tile j has columns j, WIDTH + j, 2 WIDTH + j, ...: so what a lane reads is its own part of all
// WIDTH tiles.
//
// Settings (sparse_kernels/cuda/vector_few.py chooses them):
//   ROW_TILES    times 16 rows of a block
//   WIDTH        times 8 columns of x of a block
//   DEPTH        steps of a ring: DEPTH - 1 are under way while one is multiplied
//   MOST_WARPS   of a block: a thread's registers are limited by them
//   ALIGNED      1: rows of x are aligned to WIDTH elements; 0: elements are read one by one
//   BF16         as in primitives.cuh
#include "primitives.cuh"

constexpr int PART_ROWS = 16 * ROW_TILES;
constexpr int COLUMNS = 8 * WIDTH;
constexpr int BK = 32;                          // kept columns of a packed tile
constexpr int WEIGHT_BYTES = ROW_TILES * 512;   // of a step
constexpr int STEP_BYTES = WEIGHT_BYTES + 64;   // and the names of its 16 kept columns
// Sums of a warp's fragment are stored 4 rows of 8 words at once: 8 or 24 words modulo 32 from row to row.
constexpr int PITCH = COLUMNS + (WIDTH > 1 ? 8 : 0);

static_assert(WIDTH == 1 || WIDTH == 2 || WIDTH == 4 || WIDTH == 8, "a lane reads 2 to 16 bytes of x at once");
static_assert(DEPTH >= 3, "one step is multiplied, the names of the next are read, and one is under way");

struct __align__(2 * WIDTH) Elements {
  u16 at[WIDTH];
};

// A lane's columns of x.
struct Reader {
  const u16* start;  // the first of them in row 0
  int n, columns;    // of a row; and those that exist from the first one on, 0 or less where there is none
};

// Elements of row `row`, zeros where there is none.
DEV Elements elements_of(const Reader& x, int row) {
  Elements found = {};
  const u16* at = x.start + static_cast<long long>(row) * x.n;
#if ALIGNED
  if (row >= 0 && x.columns > 0) found = *reinterpret_cast<const Elements*>(at);
#else
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    if (row >= 0 && x.columns > i) found.at[i] = at[i];
  }
#endif
  return found;
}

// What a lane needs of x for a step: rows 2t, 2t + 1, 2t + 8 and 2t + 9 of its 16 kept columns.
struct Gathered {
  Elements row[4];
};

DEV Gathered gather(const Reader& x, const unsigned char* step, int t) {
  const int* names = reinterpret_cast<const int*>(step + WEIGHT_BYTES) + 2 * t;
  Gathered found;
#pragma unroll
  for (int i = 0; i < 4; ++i) found.row[i] = elements_of(x, names[i / 2 * 8 + i % 2]);
  return found;
}

DEV u32 join(u16 low, u16 high) { return low | static_cast<u32>(high) << 16; }

typedef float Sums[ROW_TILES][WIDTH][4];

DEV void multiply(Sums& sums, const unsigned char* step, const Gathered& x, int lane) {
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
    const uint4 held = *reinterpret_cast<const uint4*>(step + i * 512 + lane * 16);
    const u32 a[4] = {held.x, held.y, held.z, held.w};
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      const u32 b[2] = {join(x.row[0].at[j], x.row[1].at[j]), join(x.row[2].at[j], x.row[3].at[j])};
      mma_m16n8k16(sums[i][j], a, b);
    }
  }
}

// Where the steps of a part of a group lie.
struct Part {
  const u16* weights;
  const int* names;
  int stride, steps;  // elements from one step to the next; steps of the group
};

// The copies of a step to a slot of the ring, one group; an empty one past the last step.
DEV void copy_step(unsigned char* slot, const Part& part, int step, int lane) {
  if (step < part.steps) {
    const u16* weights = part.weights + static_cast<long long>(step) * part.stride;
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) cp_async16(slot + i * 512 + lane * 16, weights + i * 256 + lane * 8);
    if (lane < 4) cp_async16(slot + WEIGHT_BYTES + lane * 16, part.names + step * 16 + lane * 4);
  }
  cp_async_commit();
}

// weights    (tiles, BK / 16, V / 16, 512 bytes) in fragment order
// columns    (tiles * BK) the row of x that each kept column meets, -1 for padding
// starts     (groups + 1) the tiles of a group; the groups with most tiles come first
// row_ids    (groups * V) the row of `out` that a packed row is, -1 for padding
// parts      blocks that share the rows of a group: V = parts * PART_ROWS
// Grid: one block for every part of a group and COLUMNS columns. Without the 1 in __launch_bounds__ ptxas spills a few
// registers of some blocks to fit one block more.
extern "C" __global__ void __launch_bounds__(32 * MOST_WARPS, 1)
vector_few(const u16* __restrict__ weights, const int* __restrict__ columns, const int* __restrict__ starts,
           const int* __restrict__ row_ids, const u16* __restrict__ x, u16* __restrict__ out,
           const float* __restrict__ bias, int parts, int n, int activation) {
  DYNAMIC_SHARED(shared);
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // Blocks of the same rows follow each other: the second one finds the weights in a cache.
  const int column_blocks = (n + COLUMNS - 1) / COLUMNS, item = blockIdx.x / column_blocks;
  const int group = item / parts, number = item % parts;
  const int first_column = blockIdx.x % column_blocks * COLUMNS, own_column = first_column + g * WIDTH;
  const int start = starts[group], stride = parts * PART_ROWS * 16;
  const Part part = {weights + static_cast<long long>(start) * (stride * 2) + number * ROW_TILES * 256,
                     columns + static_cast<long long>(start) * BK, stride, (starts[group + 1] - start) * (BK / 16)};
  const Reader reader = {x + own_column, n, n - own_column};
  unsigned char* ring = shared + warp * DEPTH * STEP_BYTES;

  Sums sums = {};
#pragma unroll 1
  for (int ahead = 0; ahead < DEPTH - 1; ++ahead) copy_step(ring + ahead * STEP_BYTES, part, warp + ahead * warps, lane);
  cp_async_wait<DEPTH - 2>();
  __syncwarp();  // the names of the first step, which other lanes have copied
  Gathered next = {};
  if (warp < part.steps) next = gather(reader, ring, t);
  int slot = 0, free_slot = DEPTH - 1;
#pragma unroll 1
  for (int step = warp; step < part.steps; step += warps) {
    const Gathered here = next;
    copy_step(ring + free_slot * STEP_BYTES, part, step + (DEPTH - 1) * warps, lane);
    free_slot = slot;
    const int next_slot = slot + 1 < DEPTH ? slot + 1 : 0;
    cp_async_wait<DEPTH - 2>();
    __syncwarp();  // the names of the next step; and all lanes have read those of the slot that is filled next
    if (step + warps < part.steps) next = gather(reader, ring + next_slot * STEP_BYTES, t);
    multiply(sums, ring + slot * STEP_BYTES, here, lane);
    slot = next_slot;
  }

  __syncthreads();  // the rings make way for the sums
  float* patches = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = i * 16 + g + c / 2 * 8, place = j * 8 + 2 * t + c % 2;
        patches[(warp * PART_ROWS + row) * PITCH + place] = sums[i][j][c];
      }
    }
  }
  __syncthreads();  // all sums are there
  for (int result = threadIdx.x; result < PART_ROWS * COLUMNS; result += blockDim.x) {
    const int row = result / COLUMNS, column = result % COLUMNS;
    const int row_id = row_ids[group * parts * PART_ROWS + number * PART_ROWS + row];
    if (row_id < 0 || first_column + column >= n) continue;
    const float* patch = patches + row * PITCH + column % WIDTH * 8 + column / WIDTH;
    float total[1] = {0.0f};  // as `activate` takes it
    for (int other = 0; other < warps; ++other) total[0] += patch[other * PART_ROWS * PITCH];
    if (bias) total[0] += bias[row_id];
    activate(total, activation);
    out[static_cast<long long>(row_id) * n + first_column + column] = from_float(total[0]);
  }
}
