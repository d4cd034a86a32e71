// An N:M weight times activations on ordinary cores, for any N:M and every architecture.
//
//   out (m, n) = activation(w (m, k) x (k, n) + bias (m)), row-major
//
// Each row of w picks columns of its own, so tensor cores cannot help. A block holds a tile of x (`depth` rows,
// WIDTH columns) in shared memory for 64 rows of w. Each of 8 warps takes 8 rows, and each lane COLUMNS columns of
// out. A kept weight is one word, the same for all lanes (value, row of the tile). A lane reads the COLUMNS elements
// of x that it names and adds COLUMNS products in float.
//
// What bounds it: a product needs 2 bytes of x from shared memory, one conversion to float and one fused
// multiply-add. Shared memory gives 128 bytes a clock. At 8 columns a lane, 8 products take 8 conversions, 8
// multiply-adds, 1 read of x and about 3 instructions for the weight. That is some 50 products a clock on a machine
// that issues 128 lanes a clock. Reading x is amortised over lanes, not over rows. Keeping x in registers would need
// registers indexed by data.
//
// Settings: COLUMNS (8, 4, 2: a lane's columns), BF16.
#include "primitives.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = 8;
constexpr int ROWS = WARPS * WARP_ROWS;
constexpr int WIDTH = 32 * COLUMNS;

struct alignas(2 * COLUMNS) Piece {
  u32 pairs[COLUMNS / 2];
};

// Copies a tile of x, VECTOR elements at a time (rows are aligned to that); zeros outside of x.
template <int VECTOR>
DEV void load_x(u16* tile, const u16* x, int k, int n, int depth, int first_row, int first_column) {
  constexpr int CHUNKS = WIDTH / 8;
#pragma unroll(VECTOR == 8 ? 2 : 1)
  for (int i = threadIdx.x; i < depth * CHUNKS; i += THREADS) {
    int row = first_row + i / CHUNKS, column = first_column + i % CHUNKS * 8;
    int columns = row < k ? n - column : 0;  // how many of x there are from here
    const u16* from = x + static_cast<u64>(row) * n + column;
    copy_8<VECTOR>(tile + 8 * i, from, columns);
  }
}

// Adds to a lane's sums the product of one kept weight: its value in the lower half, its row of the tile in the upper.
DEV void add(float (&sums)[COLUMNS], u32 entry, const u16* tile) {
  const float value = to_float(static_cast<u16>(entry));
  const Piece piece = *reinterpret_cast<const Piece*>(tile + (entry >> 16) * WIDTH);
#pragma unroll
  for (int c = 0; c < COLUMNS; c += 2) {
    sums[c] += value * to_float(static_cast<u16>(piece.pairs[c / 2]));
    sums[c + 1] += value * to_float(static_cast<u16>(piece.pairs[c / 2] >> 16));
  }
}

// Finishes and writes a lane's columns of one row.
DEV void store(u16* out, float (&sums)[COLUMNS], float shift, int activation, int n, int row, int column) {
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) sums[c] += shift;
  activate(sums, activation);
  Piece piece;
#pragma unroll
  for (int c = 0; c < COLUMNS; c += 2) piece.pairs[c / 2] = pack2(sums[c], sums[c + 1]);
  u16* to = out + static_cast<u64>(row) * n + column;
  if (n % COLUMNS == 0) {
    if (column < n) *reinterpret_cast<Piece*>(to) = piece;
  } else {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      if (column + c < n) to[c] = static_cast<u16>(piece.pairs[c / 2] >> (c % 2 * 16));
    }
  }
}

// entries u32 (blocks of 64 rows, tiles of x, 64, slots): slots is even. Tile t holds rows t * depth and on.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    nm(const u32* __restrict__ entries, const u16* __restrict__ x, const float* __restrict__ bias,
       u16* __restrict__ out, int m, int n, int k, int depth, int slots, int activation) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_blocks = (m + ROWS - 1) / ROWS;
  const int row_block = blockIdx.x % row_blocks, first_column = blockIdx.x / row_blocks * WIDTH;
  const int tiles = (k + depth - 1) / depth;
  const int x_bytes = depth * WIDTH * 2, stage_bytes = x_bytes + ROWS * slots * 4;

  auto load = [&](int t) {
    if (t < tiles) {
      unsigned char* stage = shared + t % 2 * stage_bytes;
      const u32* from = entries + (static_cast<u64>(row_block) * tiles + t) * (ROWS * slots);
#pragma unroll 1
      for (int i = threadIdx.x; i < ROWS * slots / 4; i += THREADS) cp_async16(stage + x_bytes + 16 * i, from + 4 * i);
      u16* tile = reinterpret_cast<u16*>(stage);
      if (n % 8 == 0) {
        load_x<8>(tile, x, k, n, depth, t * depth, first_column);
      } else if (n % 2 == 0) {
        load_x<2>(tile, x, k, n, depth, t * depth, first_column);
      } else {
        load_x<1>(tile, x, k, n, depth, t * depth, first_column);
      }
    }
    cp_async_commit();  // an empty group past the end, so that waiting counts alike in every turn
  };

  float sums[WARP_ROWS][COLUMNS] = {};
  load(0);
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    // Into the place of the tile before, which all threads are done with. Before sm_80 this also waits for the copy.
    load(t + 1);
    cp_async_wait<1>();  // tile t has landed, as far as this thread copied it
    __syncthreads();     // so it has for all threads
    const unsigned char* stage = shared + t % 2 * stage_bytes;
    const u16* tile = reinterpret_cast<const u16*>(stage) + lane * COLUMNS;
    const u32* rows = reinterpret_cast<const u32*>(stage + x_bytes) + warp * WARP_ROWS * slots;
#pragma unroll 1
    for (int slot = 0; slot < slots; slot += 2) {
#pragma unroll
      for (int r = 0; r < WARP_ROWS; ++r) {
        const uint2 two = *reinterpret_cast<const uint2*>(rows + r * slots + slot);
        add(sums[r], two.x, tile);
        add(sums[r], two.y, tile);
      }
    }
    __syncthreads();
  }

  const int first_row = row_block * ROWS + warp * WARP_ROWS, last_row = min(first_row + WARP_ROWS, m);
#pragma unroll 1
  for (int row = first_row; row < last_row; ++row) {
    store(out, sums[0], bias ? bias[row] : 0.0f, activation, n, row, first_column + lane * COLUMNS);
    move_up(sums);
  }
}
