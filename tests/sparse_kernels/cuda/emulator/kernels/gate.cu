// What the compile gate must refuse, and one kernel that it must not.
#include "primitives.cuh"

// 96 numbers a thread where 1024 threads twice leave 32 registers each.
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* in, float* out, int n) {
  float v[96];
#pragma unroll
  for (int i = 0; i < 96; i++) v[i] = in[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < 96; i++) v[i] = v[i] * v[(i * 7 + 3) % 96] + in[k];
  }
#pragma unroll
  for (int i = 0; i < 96; i++) out[i * 1024 + threadIdx.x] = v[i];
}

// An index that only the run knows keeps an array out of the registers.
extern "C" __global__ void has_stack(const int* in, float* out, int n) {
  float v[32];
  for (int i = 0; i < n; i++) v[in[i] & 31] = in[i] * 2.0f;
  out[threadIdx.x] = v[in[threadIdx.x] & 31];
}

extern "C" __global__ void ordinary(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x] * 2.0f; }

extern "C" __global__ void tensor(const u32* in, float* out) {
  u32 a[2] = {in[threadIdx.x], in[threadIdx.x + 32]}, b[1] = {in[threadIdx.x + 64]};
  float c[4] = {};
  mma_m16n8k8(c, a, b);
#pragma unroll
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = c[i];
}
