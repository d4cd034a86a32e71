// A 2:4 weight times activations on sparse tensor cores (mma.sp, sm_80 and later).
//
//   out (m, n) = activation(w (m, k) x (k, n) + bias (m)), row-major
//
// w keeps at most 2 of every 4 columns. One instruction multiplies 16 rows and 32 columns of w with 32 rows and 8
// columns of x. It reads the 16 kept columns only, and so does twice the work of a dense instruction in the same
// time.
//
// A block computes a tile of ROWS x COLUMNS of out. It goes through k in stages of DEPTH = 64. The stage's weights,
// metadata and rows of x are copied to shared memory asynchronously, STAGES - 1 stages ahead of the arithmetic.
// Weights and metadata come packed in the order in which lanes hold them (nm.py: `pack_fragments`), so they are
// copied and read in straight lines. x is turned into fragments by ldmatrix.
//
// Settings: ROWS, COLUMNS, WARPS_M, WARPS_N (warps along rows and columns of the tile), STAGES, BF16.
#include "primitives.cuh"

constexpr int DEPTH = 64;
constexpr int STEPS = DEPTH / 32;  // instructions along a stage
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int GROUPS = ROWS / 32;  // of 32 rows, in a block: the unit in which weights lie
constexpr int WARP_TILES = ROWS / 16 / WARPS_M;  // of 16 rows: one instruction
constexpr int WARP_CHUNKS = COLUMNS / 8 / WARPS_N;  // of 8 columns

constexpr int WEIGHT_PIECES = 2 * STEPS * 32;  // of 16 bytes, of a group in a stage: tiles, steps, lanes
constexpr int METADATA_PIECES = 2 * STEPS * 16 / 4;  // tiles, steps, a word for each of lanes 4g and 4g + 1
constexpr int X_BYTES = DEPTH * COLUMNS * 2;
constexpr int WEIGHT_BYTES = GROUPS * WEIGHT_PIECES * 16;
constexpr int METADATA_BYTES = GROUPS * METADATA_PIECES * 16;
constexpr int STAGE_BYTES = X_BYTES + WEIGHT_BYTES + METADATA_BYTES;

constexpr int PITCH = COLUMNS + 8;  // elements of a row of the result in shared memory: 8 rows fall into all banks
constexpr int RASTER = 8;  // tile rows that are gone through before the next tile column

static_assert(ROWS % (16 * WARPS_M) == 0 && ROWS % 32 == 0, "warps share rows, and groups fill the tile, evenly");
static_assert(COLUMNS % (8 * WARPS_N) == 0 && COLUMNS % 64 == 0, "warps share columns, and x's 64, evenly");
static_assert(WEIGHT_PIECES == THREADS, "a thread copies one piece of every group");
static_assert(ROWS * PITCH * 2 <= STAGES * STAGE_BYTES, "the result passes through the stages' memory");

// Blocks that run at the same time should share weights and columns of x in the second-level cache. So they fill
// RASTER tile rows of one tile column before the next.
DEV void find_tile(int block, int tile_rows, int tile_columns, int& tile_row, int& tile_column) {
  int first = block / (RASTER * tile_columns) * RASTER;
  int height = tile_rows - first < RASTER ? tile_rows - first : RASTER;
  int place = block - first * tile_columns;
  tile_row = first + place % height;
  tile_column = place / height;
}

// Byte in a stage of x's row `row`, columns 8 chunk to 8 chunk + 7. 64 columns (128 bytes) lie together, and the row
// says how their chunks are exchanged. So 8 rows of one chunk, which ldmatrix reads at once, fall into all banks.
DEV int x_offset(int row, int chunk) {
  return (chunk / 8) * (DEPTH * 128) + row * 128 + ((chunk ^ row) & 7) * 16;
}

// Copies a stage of x, VECTOR elements at a time (rows are aligned to that); zeros outside of x. A thread copies 8
// columns of every ROWS_AT_ONCE-th row.
template <int VECTOR>
DEV void load_x(unsigned char* stage, const u16* x, int k, int n, int first_row, int first_column) {
  constexpr int CHUNKS = COLUMNS / 8, ROWS_AT_ONCE = THREADS / CHUNKS;
  const int chunk = threadIdx.x % CHUNKS, top = threadIdx.x / CHUNKS;
  const int column = first_column + 8 * chunk;
  const u16* from = x + static_cast<u64>(first_row + top) * n + column;
#pragma unroll(VECTOR == 8 ? DEPTH / ROWS_AT_ONCE : 1)
  for (int row = top; row < DEPTH; row += ROWS_AT_ONCE, from += static_cast<u64>(ROWS_AT_ONCE) * n) {
    const int columns = first_row + row < k ? n - column : 0;  // how many of x there are from here
    copy_8<VECTOR>(stage + x_offset(row, chunk), from, columns);
  }
}

// Copies one stage of the weights and metadata of a block's row groups. A group past the end repeats the last:
// metadata must be valid everywhere, and the repeated rows are not stored.
DEV void load_weights(unsigned char* stage, const u32* weights, const u32* metadata, int first_group, int groups,
                      int index, int stages) {
  unsigned char* to_weights = stage + X_BYTES;
  unsigned char* to_metadata = to_weights + WEIGHT_BYTES;
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    const int group = first_group + i < groups ? first_group + i : groups - 1;
    const u64 place = static_cast<u64>(group) * stages + index;
    const int piece = threadIdx.x;
    cp_async16(to_weights + 16 * (i * WEIGHT_PIECES + piece), weights + place * (4 * WEIGHT_PIECES) + 4 * piece);
    if (piece < METADATA_PIECES) {
      cp_async16(to_metadata + 16 * (i * METADATA_PIECES + piece),
                 metadata + place * (4 * METADATA_PIECES) + 4 * piece);
    }
  }
}

// Adds one stage's products to a warp's sums.
DEV void multiply(const unsigned char* stage, int warp_m, int warp_n, float (&sums)[WARP_TILES][WARP_CHUNKS][4]) {
  const int lane = threadIdx.x % 32;
  const uint4* weights = reinterpret_cast<const uint4*>(stage + X_BYTES);
  const u32* metadata = reinterpret_cast<const u32*>(stage + X_BYTES + WEIGHT_BYTES);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    u32 a[WARP_TILES][4], kept[WARP_TILES];
#pragma unroll
    for (int i = 0; i < WARP_TILES; ++i) {
      int place = (warp_m * WARP_TILES + i) * STEPS + step;
      uint4 piece = weights[place * 32 + lane];
      a[i][0] = piece.x, a[i][1] = piece.y, a[i][2] = piece.z, a[i][3] = piece.w;
      kept[i] = metadata[place * 16 + lane / 4 * 2 + lane % 2];  // lanes 4g + 2, 4g + 3 read along, unused
    }
#pragma unroll
    for (int j = 0; j < WARP_CHUNKS; ++j) {
      u32 b[4];
      ldmatrix_x4_trans(b, stage + x_offset(step * 32 + lane, warp_n * WARP_CHUNKS + j));
#pragma unroll
      for (int i = 0; i < WARP_TILES; ++i) mma_sp_m16n8k32(sums[i][j], a[i], b, kept[i]);
    }
  }
}

// Bias and activation; the tile as elements in shared memory, row by row.
DEV void finish(u16* tile, const float* bias, int activation, int first_row, int m, int warp_m, int warp_n,
                float (&sums)[WARP_TILES][WARP_CHUNKS][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < WARP_TILES; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = (warp_m * WARP_TILES + i) * 16 + half * 8 + lane / 4;
      float shift = bias && first_row + row < m ? bias[first_row + row] : 0.0f;
      float values[2 * WARP_CHUNKS];
#pragma unroll
      for (int j = 0; j < WARP_CHUNKS; ++j) {
        values[2 * j] = sums[0][j][2 * half] + shift;
        values[2 * j + 1] = sums[0][j][2 * half + 1] + shift;
      }
      activate(values, activation);
      u16* to = tile + row * PITCH + warp_n * WARP_CHUNKS * 8 + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < WARP_CHUNKS; ++j) {
        *reinterpret_cast<u32*>(to + 8 * j) = pack2(values[2 * j], values[2 * j + 1]);
      }
    }
    move_up(sums);
  }
}

// Writes the tile in whole rows, 16 bytes a thread where rows of out are aligned to that.
DEV void store(const u16* tile, u16* out, int m, int n, int first_row, int first_column) {
  constexpr int CHUNKS = COLUMNS / 8;
  const bool aligned = n % 8 == 0;
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    int row = i / CHUNKS, column = i % CHUNKS * 8;
    int columns = first_row + row < m ? n - first_column - column : 0;
    const u16* from = tile + row * PITCH + column;
    u16* to = out + static_cast<u64>(first_row + row) * n + first_column + column;
    if (aligned) {
      if (columns > 0) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < 8 && e < columns; ++e) to[e] = from[e];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    nm24(const u32* __restrict__ weights, const u32* __restrict__ metadata, const u16* __restrict__ x,
         const float* __restrict__ bias, u16* __restrict__ out, int m, int n, int k,
         int activation) {
  DYNAMIC_SHARED(shared);
  const int warp_m = threadIdx.x / 32 % WARPS_M, warp_n = threadIdx.x / 32 / WARPS_M;
  const int stages = (k + DEPTH - 1) / DEPTH;
  int tile_row, tile_column;
  find_tile(blockIdx.x, (m + ROWS - 1) / ROWS, (n + COLUMNS - 1) / COLUMNS, tile_row, tile_column);

  auto load = [&](int index) {
    if (index < stages) {
      unsigned char* stage = shared + index % STAGES * STAGE_BYTES;
      load_weights(stage, weights, metadata, tile_row * GROUPS, (m + 31) / 32, index, stages);
      const int row = index * DEPTH, column = tile_column * COLUMNS;
      if (n % 8 == 0) {
        load_x<8>(stage, x, k, n, row, column);
      } else if (n % 2 == 0) {
        load_x<2>(stage, x, k, n, row, column);
      } else {
        load_x<1>(stage, x, k, n, row, column);
      }
    }
    cp_async_commit();  // an empty group past the end, so that waiting counts alike in every turn
  };

  float sums[WARP_TILES][WARP_CHUNKS][4] = {};
#pragma unroll 1
  for (int index = 0; index < STAGES - 1; ++index) load(index);
#pragma unroll 1
  for (int index = 0; index < stages; ++index) {
    cp_async_wait<STAGES - 2>();  // this stage has landed, as far as this thread copied it
    __syncthreads();              // so it has for all threads, and all are done with the stage before
    load(index + STAGES - 1);     // into the place of the stage before
    multiply(shared + index % STAGES * STAGE_BYTES, warp_m, warp_n, sums);
  }
  __syncthreads();
  u16* tile = reinterpret_cast<u16*>(shared);
  finish(tile, bias, activation, tile_row * ROWS, m, warp_m, warp_n, sums);
  __syncthreads();
  store(tile, out, m, n, tile_row * ROWS, tile_column * COLUMNS);
}
