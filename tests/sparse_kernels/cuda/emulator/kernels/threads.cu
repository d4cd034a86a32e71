// What threads do together, each with numbers that Python can foretell: x (64,) to out (11, 64). 2 warps.
#include "primitives.cuh"

extern "C" __global__ void __launch_bounds__(64) threads(const u32* x, float* out) {
  DYNAMIC_SHARED(shared);
  __shared__ u32 votes[2];
  __shared__ float sum;
  u32* numbers = reinterpret_cast<u32*>(shared);
  int thread = threadIdx.x, warp = thread / 32;
  u32 mine = x[thread];
  if (thread == 0) sum = 0.0f;
  out[0 * 64 + thread] = __shfl_sync(0xffffffffu, mine, 5);
  out[1 * 64 + thread] = __shfl_xor_sync(0xffffffffu, mine, 3);
  out[2 * 64 + thread] = __shfl_down_sync(0xffffffffu, mine, 6, 16);
  out[3 * 64 + thread] = __shfl_up_sync(0xffffffffu, mine, 6);
  u32 ballot = __ballot_sync(0xffffffffu, mine % 3 == 0);
  if (thread % 32 == 31) votes[warp] = ballot;
  __syncwarp();
  out[4 * 64 + thread] = votes[warp] >> thread % 32 & 1;
  if (thread % 32 < 8) {  // a part of a warp
    out[5 * 64 + thread] = __shfl_xor_sync(0x000000ffu, mine, 1);
  } else {
    out[5 * 64 + thread] = __any_sync(0xffffff00u, mine == 0);
  }
  numbers[thread] = mine;
  __syncthreads();  // between the warps
  out[6 * 64 + thread] = numbers[63 - thread];
  out[7 * 64 + thread] = 0.0f;
  __syncthreads();  // all have read
  atomic_add(&sum, static_cast<float>(mine));
  if (warp == 1) {
    numbers[thread] = mine + 1;
    named_barrier(3, 32);  // one warp meets alone
    out[7 * 64 + thread] = numbers[95 - thread];
  }
  __syncthreads();
  out[8 * 64 + thread] = sum;
  u32 fragment[4];
  ldmatrix_x4(fragment, &shared[thread % 8 * 16]);  // 8 rows of 4 numbers, 4 times
  out[9 * 64 + thread] = fragment[thread % 4];
  ldmatrix_x4_trans(fragment, &shared[thread % 8 * 16]);
  out[10 * 64 + thread] = fragment[0] & 0xffff;
}
