// The primitives of sparse_kernels/cuda/device_code/primitives.cuh on a CPU, and what is around them in CUDA.
//
// A kernel is compiled by the host's compiler as it is. Each thread of a block is a fiber; what threads do together
// (a barrier, a shuffle, a tensor-core product) is a meeting: all wait for the last, which computes for all. Between
// meetings fibers run in random order, and asynchronous copies land at random times, so that a barrier or a wait that
// is missing shows as a wrong result for some seed. Not seen: bank conflicts, and the memory order of real machines.
#pragma once

// Every kernel of every test is compiled with this file: what would take long stands in products.cpp and emulator.cpp,
// and the standard library's larger headers are left out.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#ifndef BF16
#define BF16 0
#endif
extern "C" float erff(float) noexcept;

typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;

// ---- The language ----

#define DEV static inline
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __constant__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
// All static shared memory lies in one section, which a block finds filled with NaN.
#define __shared__ static __attribute__((section("shared_memory")))
#define DYNAMIC_SHARED(name) unsigned char* const name = emulator::dynamic_shared

struct dim3 {
  unsigned x, y, z;
};
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- The machine: what emulator.cpp offers to the primitives here and in hopper.h ----

namespace emulator {

struct Place {  // of the running thread
  dim3 thread, block, block_size, grid_size;
  int index;  // of the thread in its block
};
extern Place* place;

extern unsigned char* dynamic_shared;  // of the running block, 1024-byte aligned
extern size_t dynamic_shared_bytes;

inline int lane() { return place->index % 32; }

// Ends the launch with an error that names the running thread; printf's format.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Where the kernel called a function of the machine that runs, if one does: errors name its line.
extern const void* caller;

// Random, by the launch's seed.
bool coin();

// A place where threads meet again and again.
struct Meeting;
Meeting& warp_meeting(u32 mask = 0xffffffffu);  // the running thread's warp; one meeting for each mask
Meeting& warpgroup_meeting();                   // the running thread's 128
Meeting& barrier_meeting(int id);               // the block's barriers 0 to 15

// Waits at `meeting` until `expected` threads have come, all for the same `kind` (compared as text; another kind is an
// error). The last one calls operation(arguments), where arguments[slot] is what the thread with that slot brought;
// then all go on. Slots are 0 to 1023; those of threads that take no part are null.
typedef void (*Operation)(void** arguments);
void meet(Meeting& meeting, int expected, int slot, const char* kind, void* argument, Operation operation);
inline void nothing(void**) {}

// Waits until ready() is true, while other threads run. Where no thread can go on the launch fails, saying `what`.
void wait(const char* what, bool (*ready)(void*), void* state);
template <class Ready>
void wait_until(const char* what, Ready ready) {
  wait(what, [](void* state) { return (*static_cast<Ready*>(state))(); }, &ready);
}

// Calls event() at some random later moment of this block, at the latest when all threads wait, or at its end.
void later(void (*event)(void*), void* state);
template <class Event>
void later(Event event) {
  later(
      [](void* state) {
        Event* held = static_cast<Event*>(state);
        (*held)();
        delete held;
      },
      new Event(std::move(event)));
}

// The running thread's asynchronous copies (cp.async): in order, each at a random moment after its issue and before
// its group has been waited for.
void copy_async(void* shared, const void* global, size_t bytes, bool valid);
void commit_copies();
void wait_for_copies(int groups_left);
// Calls event() once all copies that the running thread has issued so far have landed.
void after_copies(void (*event)(void*), void* state);
template <class Event>
void after_copies(Event event) {
  after_copies(
      [](void* state) {
        Event* held = static_cast<Event*>(state);
        (*held)();
        delete held;
      },
      new Event(std::move(event)));
}

// What a kernel holds in 16 bits, as a float.
extern float half_values[65536];

// An instruction that all 32 lanes run together.
inline void warp_meet(const char* kind, void* argument, Operation operation) {
  meet(warp_meeting(), 32, lane(), kind, argument, operation);
}

}  // namespace emulator

#define threadIdx (emulator::place->thread)
#define blockIdx (emulator::place->block)
#define blockDim (emulator::place->block_size)
#define gridDim (emulator::place->grid_size)

// ---- Arithmetic that CUDA has and C++ has not ----

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline u64 min(u64 a, u64 b) { return a < b ? a : b; }
inline u64 max(u64 a, u64 b) { return a > b ? a : b; }
inline float min(float a, float b) { return __builtin_fminf(a, b); }
inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
inline float rsqrtf(float value) { return 1.0f / __builtin_sqrtf(value); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline int __popc(u32 value) { return __builtin_popcount(value); }
inline int __popcll(u64 value) { return __builtin_popcountll(value); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<u32>(value)) : 32; }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline u32 __brev(u32 value) {
  u32 result = 0;
  for (int bit = 0; bit < 32; bit++) result |= (value >> bit & 1) << (31 - bit);
  return result;
}
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  u64 bytes = static_cast<u64>(high) << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    u32 choice = selector >> (4 * i) & 0xf;
    u32 byte = static_cast<u32>(bytes >> (8 * (choice & 7))) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
inline u32 __float_as_uint(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
template <class T>
inline T __ldg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcg(const T* address) {
  return *address;
}

DEV float bfloat16_to_float(u16 element) { return __uint_as_float(static_cast<u32>(element) << 16); }
DEV u16 bfloat16_from_float(float value) {
  u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
DEV u16 half_from_float(float value) {
  _Float16 half = static_cast<_Float16>(value);
  u16 element;
  memcpy(&element, &half, 2);
  return element;
}
DEV float half_to_float(u16 element) { return emulator::half_values[element]; }

#if BF16
DEV float to_float(u16 element) { return bfloat16_to_float(element); }
DEV u16 from_float(float value) { return bfloat16_from_float(value); }
#else
DEV float to_float(u16 element) { return half_to_float(element); }
DEV u16 from_float(float value) { return half_from_float(value); }
#endif
DEV u32 pack2(float lo, float hi) { return from_float(lo) | static_cast<u32>(from_float(hi)) << 16; }

// ---- Between threads ----

DEV void __syncthreads() {
  int threads = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  emulator::meet(emulator::barrier_meeting(0), threads, emulator::place->index, "__syncthreads", nullptr,
                 emulator::nothing);
}
DEV void named_barrier(int id, int threads) {
  if (id < 1 || id > 15) emulator::fail("named_barrier(%d): barriers are 1 to 15", id);
  if (threads % 32 != 0) emulator::fail("named_barrier(%d, %d): whole warps meet", id, threads);
  emulator::meet(emulator::barrier_meeting(id), threads, emulator::place->index, "named_barrier", nullptr,
                 emulator::nothing);
}
DEV void __syncwarp(u32 mask = 0xffffffffu) {
  emulator::meet(emulator::warp_meeting(mask), __popc(mask), emulator::lane(), "__syncwarp", nullptr,
                 emulator::nothing);
}
DEV void __threadfence() {}
DEV void __threadfence_block() {}
[[noreturn]] inline void __trap() { emulator::fail("__trap()"); }

namespace emulator {

template <class T>
struct Shuffle {
  T value;
  int source;  // lane
  T result;
};

// Each lane gets the value of its source lane; a source that takes no part is an error.
template <class T>
T shuffle(u32 mask, T value, int source, const char* kind) {
  if (!(mask >> lane() & 1)) fail("%s: the lane is not in its own mask %08x", kind, mask);
  if (!(mask >> source & 1)) fail("%s: source lane %d is not in the mask %08x", kind, source, mask);
  Shuffle<T> mine{value, source, value};
  meet(warp_meeting(mask), __popc(mask), lane(), kind, &mine, [](void** arguments) {
    for (int i = 0; i < 32; i++) {
      auto* one = static_cast<Shuffle<T>*>(arguments[i]);
      if (one) one->result = static_cast<Shuffle<T>*>(arguments[one->source])->value;
    }
  });
  return mine.result;
}

}  // namespace emulator

template <class T>
inline T __shfl_sync(u32 mask, T value, int source, int width = 32) {
  int start = emulator::lane() / width * width;
  return emulator::shuffle(mask, value, start + (source & (width - 1)), "__shfl_sync");
}
template <class T>
inline T __shfl_xor_sync(u32 mask, T value, int bits, int width = 32) {
  int source = emulator::lane() ^ bits;
  bool inside = source / width <= emulator::lane() / width;
  return emulator::shuffle(mask, value, inside ? source : emulator::lane(), "__shfl_xor_sync");
}
template <class T>
inline T __shfl_down_sync(u32 mask, T value, int distance, int width = 32) {
  int source = emulator::lane() + distance;
  bool inside = source / width == emulator::lane() / width;
  return emulator::shuffle(mask, value, inside ? source : emulator::lane(), "__shfl_down_sync");
}
template <class T>
inline T __shfl_up_sync(u32 mask, T value, int distance, int width = 32) {
  int source = emulator::lane() - distance;
  bool inside = source >= emulator::lane() / width * width;
  return emulator::shuffle(mask, value, inside ? source : emulator::lane(), "__shfl_up_sync");
}
DEV u32 __ballot_sync(u32 mask, bool vote) {
  struct Vote {
    bool vote;
    u32 result;
  } mine{vote, 0};
  emulator::meet(emulator::warp_meeting(mask), __popc(mask), emulator::lane(), "__ballot_sync", &mine,
                 [](void** arguments) {
                   u32 result = 0;
                   for (int i = 0; i < 32; i++) {
                     if (arguments[i] && static_cast<Vote*>(arguments[i])->vote) result |= 1u << i;
                   }
                   for (int i = 0; i < 32; i++) {
                     if (arguments[i]) static_cast<Vote*>(arguments[i])->result = result;
                   }
                 });
  return mine.result;
}
DEV bool __any_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
DEV bool __all_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) == mask; }

// Blocks run one after another and fibers yield only at meetings, so plain arithmetic is atomic.
template <class T>
inline T atomicAdd(T* address, T value) {
  T before = *address;
  *address = before + value;
  return before;
}
template <class T>
inline T atomicExch(T* address, T value) {
  T before = *address;
  *address = value;
  return before;
}
template <class T>
inline T atomicCAS(T* address, T expected, T value) {
  T before = *address;
  if (before == expected) *address = value;
  return before;
}
DEV void atomic_add(float* address, float value) { atomicAdd(address, value); }

// ---- Asynchronous copies ----

DEV u32 shared_address(const void* pointer) {
  return static_cast<u32>(static_cast<const unsigned char*>(pointer) - emulator::dynamic_shared);
}
DEV void cp_async16(void* shared, const void* global, bool valid = true) {
  emulator::copy_async(shared, global, 16, valid);
}
DEV void cp_async8(void* shared, const void* global, bool valid = true) {
  emulator::copy_async(shared, global, 8, valid);
}
DEV void cp_async4(void* shared, const void* global, bool valid = true) {
  emulator::copy_async(shared, global, 4, valid);
}
DEV void cp_async_commit() { emulator::commit_copies(); }
template <int N>
DEV void cp_async_wait() {
  emulator::wait_for_copies(N);
}

// ---- Fragments and tensor-core products: products.cpp computes for all lanes ----

namespace emulator {

struct Fragment {  // what a lane brings to ldmatrix
  u32* registers;
  const void* row;
  int matrices;
  bool transposed;
};
void load_matrices(void** arguments);

inline void load_matrices(u32* registers, const void* row, int matrices, bool transposed, const char* kind) {
  if (lane() < 8 * matrices && reinterpret_cast<uintptr_t>(row) % 16 != 0) {
    fail("%s: the row of lane %d is not aligned to 16 bytes", kind, lane());
  }
  Fragment mine{registers, row, matrices, transposed};
  warp_meet(kind, &mine, load_matrices);
}

struct Product {  // what a lane brings to mma
  float* c;
  const u32* a;
  const u32* b;
  u32 metadata;
  bool bfloat16;
};
void multiply_m16n8k16(void** arguments);
void multiply_m16n8k8(void** arguments);
void multiply_sp_m16n8k32(void** arguments);
void multiply_m8n8k4(void** arguments);

}  // namespace emulator

DEV void ldmatrix_x4(u32 (&r)[4], const void* row) { emulator::load_matrices(r, row, 4, false, "ldmatrix_x4"); }
DEV void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
  emulator::load_matrices(r, row, 4, true, "ldmatrix_x4_trans");
}
DEV void ldmatrix_x2(u32 (&r)[2], const void* row) { emulator::load_matrices(r, row, 2, false, "ldmatrix_x2"); }
DEV void ldmatrix_x2_trans(u32 (&r)[2], const void* row) {
  emulator::load_matrices(r, row, 2, true, "ldmatrix_x2_trans");
}

DEV void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  emulator::Product mine{c, a, b, 0, BF16};
  emulator::warp_meet("mma_m16n8k16", &mine, emulator::multiply_m16n8k16);
}
DEV void mma_m16n8k8(float (&c)[4], const u32 (&a)[2], const u32 (&b)[1]) {
  emulator::Product mine{c, a, b, 0, BF16};
  emulator::warp_meet("mma_m16n8k8", &mine, emulator::multiply_m16n8k8);
}
DEV void mma_sp_m16n8k32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
  emulator::Product mine{c, a, b, metadata, BF16};
  emulator::warp_meet("mma_sp_m16n8k32", &mine, emulator::multiply_sp_m16n8k32);
}
DEV void mma_m8n8k4(float (&c)[8], const u32 (&a)[2], const u32 (&b)[2]) {
  emulator::Product mine{c, a, b, 0, false};
  emulator::warp_meet("mma_m8n8k4", &mine, emulator::multiply_m8n8k4);
}

#include "hopper.h"
