// One tensor-core product of one warp, its fragments as they lie in registers: a, b (registers, 32 lanes), metadata
// (32), and c += a b (32 lanes, registers of c). PRODUCT says which.
#include "primitives.cuh"

extern "C" __global__ void __launch_bounds__(32)
    product(const u32* a, const u32* b, const u32* metadata, float* out) {
  int lane = threadIdx.x;
#if PRODUCT == 16816
  u32 x[4] = {a[lane], a[lane + 32], a[lane + 64], a[lane + 96]}, y[2] = {b[lane], b[lane + 32]};
  float c[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  mma_m16n8k16(c, x, y);
  const int count = 4;
#elif PRODUCT == 1688
  u32 x[2] = {a[lane], a[lane + 32]}, y[1] = {b[lane]};
  float c[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  mma_m16n8k8(c, x, y);
  const int count = 4;
#elif PRODUCT == 16832
  u32 x[4] = {a[lane], a[lane + 32], a[lane + 64], a[lane + 96]};
  u32 y[4] = {b[lane], b[lane + 32], b[lane + 64], b[lane + 96]};
  float c[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  mma_sp_m16n8k32(c, x, y, metadata[lane]);
  const int count = 4;
#else
  u32 x[2] = {a[lane], a[lane + 32]}, y[2] = {b[lane], b[lane + 32]};
  float c[8] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  mma_m8n8k4(c, x, y);
  const int count = 8;
#endif
#pragma unroll
  for (int i = 0; i < count; i++) out[lane * count + i] = c[i];
}
