// No tensor cores, for every machine.
extern "C" __global__ void plain(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x] * 2.0f + 1.0f; }
