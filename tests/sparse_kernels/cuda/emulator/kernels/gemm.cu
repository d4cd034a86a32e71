// A plain product, to try the emulator on: out (m, n) = activation(w (m, k) x (k, n) + bias), m and n multiples of 64,
// k of 32. A block of 4 warps makes 64 x 64 of out; two stages of w and x lie in shared memory.
#include "primitives.cuh"

extern "C" __global__ void __launch_bounds__(128)
    gemm(const u16* w, const u16* x, u16* out, const float* bias, int m, int k, int n, int activation) {
  __shared__ __align__(16) u16 w_tile[2][64][40];
  __shared__ __align__(16) u16 x_tile[2][32][72];
  int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int first_row = blockIdx.y * 64, first_column = blockIdx.x * 64;
  int row = warp / 2 * 32, column = warp % 2 * 32;
  float c[2][4][4] = {};

  auto load = [&](int stage, int start) {
#pragma unroll
    for (int i = thread; i < 256; i += 128) {
      cp_async16(&w_tile[stage][i / 4][i % 4 * 8], &w[static_cast<u64>(first_row + i / 4) * k + start + i % 4 * 8]);
      cp_async16(&x_tile[stage][i / 8][i % 8 * 8], &x[static_cast<u64>(start + i / 8) * n + first_column + i % 8 * 8]);
    }
    cp_async_commit();
  };

  load(0, 0);
  for (int step = 0; step < k / 32; step++) {
    int stage = step % 2;
    if (step + 1 < k / 32) load(1 - stage, 32 * (step + 1));
    if (step + 1 < k / 32) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();  // the stage is there
#pragma unroll
    for (int start = 0; start < 32; start += 16) {
      u32 a[2][4], b[4][2];
#pragma unroll
      for (int i = 0; i < 2; i++) ldmatrix_x4(a[i], &w_tile[stage][row + 16 * i + lane % 16][start + lane / 16 * 8]);
#pragma unroll
      for (int j = 0; j < 4; j++) ldmatrix_x2_trans(b[j], &x_tile[stage][start + lane % 16][column + 8 * j]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) mma_m16n8k16(c[i][j], a[i], b[j]);
      }
    }
    __syncthreads();  // the stage is free
  }

#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int to = first_row + row + 16 * i + 8 * half + lane / 4;
      float start = bias ? bias[to] : 0.0f;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        u64 at = static_cast<u64>(to) * n + first_column + column + 8 * j + lane % 4 * 2;
        float two[2] = {c[i][j][2 * half] + start, c[i][j][2 * half + 1] + start};
        activate(two, activation);
        *reinterpret_cast<u32*>(&out[at]) = pack2(two[0], two[1]);
      }
    }
  }
}
