// Counts threads of all blocks and launches in scratch; out (1) is the count so far. The bias must be null.
#include "primitives.cuh"

extern "C" __global__ void __launch_bounds__(32) count(float* scratch, float* out, const float* bias) {
  if (bias) __trap();
  atomic_add(scratch, 1.0f);
  __syncthreads();
  out[0] = scratch[0];
}
