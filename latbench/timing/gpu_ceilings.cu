// Kernels that do one thing as fast as a GPU can: multiply-adds in registers, and reads. They find its ceilings.
//
// Both leave a number a thread behind: it tells whether all was done, and nothing of it can be left out by a compiler.
//
// Settings: THREADS (of a block), CHAINS (sums of a thread).
#include "primitives.cuh"

// results (threads of the grid): the sum of CHAINS chains of `steps` multiply-adds, s = s * factor + factor. Each chain
// starts at another number: equal ones would be computed once.
extern "C" __global__ void __launch_bounds__(THREADS) multiply_adds(float* __restrict__ results, int steps, float factor) {
  float sums[CHAINS];
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) sums[c] = static_cast<float>(c);
#pragma unroll 16
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int c = 0; c < CHAINS; ++c) sums[c] = __fmaf_rn(sums[c], factor, factor);
  }
  float total = 0.0f;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) total += sums[c];
  results[blockIdx.x * THREADS + threadIdx.x] = total;
}

// results (threads of the grid): the sum of the words that a thread reads, `count` pieces of 16 bytes of `words`, one
// from every stretch as long as the grid, again from the start after 2^n = mask + 1 pieces. Past the first-level cache
// (ld.global.cg), which no kernel finds filled.
extern "C" __global__ void __launch_bounds__(THREADS)
    read_pieces(const u32* __restrict__ words, u32* __restrict__ results, u32 mask, int count) {
  const uint4* pieces = reinterpret_cast<const uint4*>(words);
  const u32 thread = blockIdx.x * THREADS + threadIdx.x;
  const u32 threads = gridDim.x * THREADS;
  u32 place = thread;
  u32 total = 0;
#pragma unroll 4
  for (int i = 0; i < count; ++i, place += threads) {
    const uint4 piece = __ldcg(pieces + (place & mask));
    total += piece.x + piece.y + piece.z + piece.w;
  }
  results[thread] = total;
}
