// The second launch of a split product on Hopper (sm90.cuh): out (m, n) = activation(sum of the partial sums + bias).
//
// The splits are added in order, so that the same call gives the same result every time. A block writes 256 columns
// (y) of one packed row (x); its threads read and write neighbouring addresses.
#include "primitives.cuh"

// partial float (splits, rows, width). row_ids int32 (rows): the row of `out` each packed row is, -1 for none.
extern "C" __global__ void __launch_bounds__(256)
    finish_sm90(const float* partial, const int* row_ids, const float* bias, u16* out, int rows, int splits,
                int width, int n, int activation) {
  int row = row_ids[blockIdx.x], column = blockIdx.y * 256 + threadIdx.x;
  if (row < 0 || column >= n) return;
  float sum = 0.0f;
  for (int split = 0; split < splits; ++split)
    sum += partial[(static_cast<u64>(split) * rows + blockIdx.x) * width + column];
  float value[1] = {sum + (bias ? bias[row] : 0.0f)};
  activate(value, activation);
  out[static_cast<u64>(row) * n + column] = from_float(value[0]);
}
