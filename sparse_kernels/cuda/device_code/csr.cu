// An unstructured weight (compressed sparse rows) times activations on ordinary cores, for every architecture.
//
//   out (m, n) = activation(w (m, k) x (k, n) + bias (m)), row-major
//
// The baseline that structured patterns have to beat. LANES lanes share a row of w and a strip of out's columns.
// Each takes VECTOR neighbouring columns, so that a lane reads x in one wide load. A warp works on 32 / LANES rows.
// Rows come sorted by their number of elements (csr.py): those of a warp are about equally long, and the long ones
// start first. Blocks go through all rows of one strip before the next, so that the strip of x stays in the caches.
//
// What bounds it: every product reads its element of x through the first-level cache, 2 bytes each. It comes from
// the second-level cache where the strip of x (k rows of 128 bytes) does not fit the first. Rows share nothing on
// purpose.
//
// Settings: VECTOR (8, 2, 1: a lane's columns; n is a multiple of it), BF16.
#include "primitives.cuh"

constexpr int THREADS = 128;
constexpr int LANES = VECTOR == 8 ? 8 : 32;
constexpr int STRIP = LANES * VECTOR;  // 64 columns, 32 where n is odd
constexpr int ROWS = THREADS / LANES;

struct alignas(2 * VECTOR) Piece {
  u16 elements[VECTOR];
};

// entries uint2 (elements): column, value as a float's bits; rows in the order of `order`. indptr u64 (m + 1) into
// entries; order (m): which row of w a sorted row is.
extern "C" __global__ void __launch_bounds__(THREADS)
    csr(const u64* __restrict__ indptr, const u32* __restrict__ entries, const int* __restrict__ order,
        const u16* __restrict__ x, const float* __restrict__ bias, u16* __restrict__ out, int m, int n,
        int activation) {
  const int row_blocks = (m + ROWS - 1) / ROWS;
  const int sorted_row = blockIdx.x % row_blocks * ROWS + threadIdx.x / LANES;
  const int column = blockIdx.x / row_blocks * STRIP + threadIdx.x % LANES * VECTOR;
  if (sorted_row >= m || column >= n) return;

  const uint2* elements = reinterpret_cast<const uint2*>(entries);
  const u64 end = indptr[sorted_row + 1];
  x += column;
  float sums[VECTOR] = {};
#pragma unroll 4
  for (u64 i = indptr[sorted_row]; i < end; ++i) {
    const uint2 element = elements[i];
    const float value = __uint_as_float(element.y);
    const Piece piece = *reinterpret_cast<const Piece*>(x + static_cast<u64>(element.x) * n);
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) sums[c] += value * to_float(piece.elements[c]);
  }

  const int row = order[sorted_row];
  const float shift = bias ? bias[row] : 0.0f;
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) sums[c] += shift;
  activate(sums, activation);
  Piece result;
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) result.elements[c] = from_float(sums[c]);
  *reinterpret_cast<Piece*>(out + static_cast<u64>(row) * n + column) = result;
}
