// What the kernels ask of the machine beyond C++: asynchronous copies, fragment loads, tensor-core products.
//
// All inline PTX of the project is in this file; a kernel calls these functions only. With HOST_EMULATOR defined the
// same names come from the emulator of the tests (tests/sparse_kernels/cuda/emulator), which runs them on a CPU.
// Nothing here needs a CUDA header. Fragments and instructions: PTX ISA, "Matrix multiply-accumulate operation using
// mma instruction".
//
// An element is 16 bits: a half, or a bfloat16 where the macro BF16 is 1.
#pragma once

#ifndef BF16
#define BF16 0
#endif

#ifdef HOST_EMULATOR
#include "emulator.h"
#else

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEV __device__ __forceinline__

// Dynamic shared memory, aligned for Hopper's swizzled tiles.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

#if BF16
#define ELEMENT "bf16"
#else
#define ELEMENT "f16"
#endif

// A shared-memory pointer as the 32-bit address that PTX wants.
DEV u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// ---- Asynchronous copies, global to shared memory ----
// Both addresses are aligned to the size. Where `valid` is false nothing is read and zeros are written. A thread's
// copies up to a commit are one group; wait<N> leaves at most N of its newest groups under way. Other threads see them
// after a barrier. Before sm_80 there is no such instruction: the copy is done at once, through registers.

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800

DEV void cp_async16(void* shared, const void* global, bool valid = true) {
  *static_cast<uint4*>(shared) = valid ? *static_cast<const uint4*>(global) : make_uint4(0, 0, 0, 0);
}
DEV void cp_async8(void* shared, const void* global, bool valid = true) {
  *static_cast<uint2*>(shared) = valid ? *static_cast<const uint2*>(global) : make_uint2(0, 0);
}
DEV void cp_async4(void* shared, const void* global, bool valid = true) {
  *static_cast<u32*>(shared) = valid ? *static_cast<const u32*>(global) : 0;
}
DEV void cp_async_commit() {}
template <int N>
DEV void cp_async_wait() {}

#else

// .cg: only in the second-level cache, as every block reads its piece once.
DEV void cp_async16(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
DEV void cp_async8(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 8 : 0)
               : "memory");
}
DEV void cp_async4(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 4 : 0)
               : "memory");
}
DEV void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N>
DEV void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

#endif

// ---- Fragments from shared memory (sm_75) ----
// 8x8 matrices of elements. Lane 8i + j gives the 16-byte aligned address of row j of matrix i (x2: lanes 0 to 15).
// Lane l receives, for each matrix, row l / 4, columns 2 (l % 4) and the next; with _trans, of the transposed matrix.

DEV void ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
DEV void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
DEV void ldmatrix_x2(u32 (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
DEV void ldmatrix_x2_trans(u32 (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}

// ---- Tensor-core products of a warp: c += a b, accumulated in float ----
// With g = lane / 4 and t = lane % 4 (the lower element of a register comes first):
//   c (16x8)   c[0], c[1]: row g, columns 2t, 2t + 1; c[2], c[3]: row g + 8
//   a (16xK)   a[0]: row g, columns 2t, 2t + 1; a[1]: row g + 8; a[2], a[3]: the same, 8 columns further
//   b (Kx8)    b[i]: rows 2t + 8i, 2t + 1 + 8i, column g

// sm_80
DEV void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// sm_75 for halves, sm_80 for bfloat16
DEV void mma_m16n8k8(float (&c)[4], const u32 (&a)[2], const u32 (&b)[1]) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." ELEMENT "." ELEMENT
               ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// sm_80. a is 16x32 with at most 2 of every 4 columns kept: its registers hold the 16 kept columns of a row as
// above. Metadata says which: 2 bits an element, in rising order within a group of 4. Lane 4g + h (h = 0, 1) holds
// those of columns 16h to 16h + 15. Bits 0 to 15 are of the 8 kept elements of row g, bits 16 to 31 of row g + 8.
// Lanes with t = 2, 3 are not read.
DEV void mma_sp_m16n8k32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[4], u32 metadata) {
  asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." ELEMENT "." ELEMENT
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0x0;\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
                 "r"(metadata));
}

// Volta (sm_70) only: later machines compile it into ordinary arithmetic. Halves only. Four products at once, one by
// each quad pair. Pair q (0 to 3) is lanes 4q to 4q + 3 and 4q + 16 to 4q + 19.
// With h = lane / 16 (0 or 1), t = lane % 4:
//   a (8x4)    row t + 4h, columns 0, 1 in a[0] and 2, 3 in a[1]
//   b (4x8)    row t, columns 4h, 4h + 1 in b[0] and 4h + 2, 4h + 3 in b[1] (row-major, as x lies in memory)
//   c (8x8)    c[i]: row (lane & 1) + (i & 2) + 4h, column (i & 4) + (lane & 2) + (i & 1)
DEV void mma_m8n8k4(float (&c)[8], const u32 (&a)[2], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, "
               "{%0,%1,%2,%3,%4,%5,%6,%7};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
               : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
}

// ---- Elements and floats ----

#if BF16
DEV float to_float(u16 element) { return __uint_as_float(static_cast<u32>(element) << 16); }
#else
DEV float to_float(u16 element) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(element));
  return value;
}
#endif

// To the nearest, ties to even.
#if BF16 && defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
DEV u16 from_float(float value) {
  u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // not a number
  return static_cast<u16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
#else
DEV u16 from_float(float value) {
  u16 element;
  asm("cvt.rn." ELEMENT ".f32 %0, %1;" : "=h"(element) : "f"(value));
  return element;
}
#endif

// Two elements in one register, `lo` in the lower half: first in memory.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
DEV u32 pack2(float lo, float hi) { return from_float(lo) | static_cast<u32>(from_float(hi)) << 16; }
#else
DEV u32 pack2(float lo, float hi) {
  u32 pair;
  asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
}
#endif

// ---- Between threads ----

DEV void atomic_add(float* address, float value) { atomicAdd(address, value); }

// `threads` threads of a block, whole warps, meet at barrier `id` (1 to 15; 0 is __syncthreads).
DEV void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

#endif  // HOST_EMULATOR

// ---- Copies of 8 elements, however rows are aligned ----

// Copies 8 elements to shared memory, of which the first `count` exist (all of none where count is not positive);
// the others become 0. Rows are aligned to AT_ONCE elements. 8, 4 or 2 at a time are copied asynchronously. No
// machine does that with less than 4 bytes, so 1 at a time goes through registers.
template <int AT_ONCE>
DEV void copy_8(void* shared, const u16* global, int count) {
  unsigned char* to = static_cast<unsigned char*>(shared);
  if constexpr (AT_ONCE == 8) {
    cp_async16(to, global, count > 0);
  } else if constexpr (AT_ONCE == 4) {
    cp_async8(to, global, count > 0);
    cp_async8(to + 8, global + 4, count > 4);
  } else if constexpr (AT_ONCE == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) cp_async4(to + 4 * i, global + 2 * i, count > 2 * i);
  } else {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = count > 2 * i ? global[2 * i] : 0;
      if (count > 2 * i + 1) pairs[i] |= static_cast<u32>(global[2 * i + 1]) << 16;
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// ---- Epilogue ----

// Moves rows of sums up by one: a loop that takes row 0 and moves needs one piece of code for all of them. An index
// that is known only at run time would put the sums into memory. A copy of the code for each row takes long to
// compile.
template <class Row, int ROWS_OF_SUMS>
DEV void move_up(Row (&rows)[ROWS_OF_SUMS]) {
  constexpr int COUNT = sizeof(Row) / sizeof(float);
  float* sums = reinterpret_cast<float*>(rows);
#pragma unroll
  for (int i = 0; i < (ROWS_OF_SUMS - 1) * COUNT; ++i) sums[i] = sums[i + COUNT];
}

// The fused activation: 0 none, 1 relu, 2 gelu in its exact form, with erf. NaN stays NaN, as in torch. It is the same
// for all threads, so that choosing it as the kernel runs costs a jump; several values a call share it.
template <int N>
DEV void activate(float (&values)[N], int activation) {
  if (activation == 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = values[i] < 0.0f ? 0.0f : values[i];
  } else if (activation == 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = 0.5f * values[i] * (1.0f + erff(values[i] * 0.70710678f));
  }
}

#ifndef HOST_EMULATOR

// ---- Hopper ----
// PTX ISA, "mbarrier", "cp.async.bulk" and "Asynchronous warpgroup level matrix instructions"; sm_90a only.

// -- Barriers in shared memory --
// A barrier is in a phase, which completes once `count` threads have arrived and every expected byte has landed.
// Then the next phase begins with the same count. Phases are told apart by parity: the first is 0. A wait for parity
// 1 on a fresh barrier returns at once: the phase before the first counts as complete.

DEV void mbarrier_init(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// Makes the initial state of barriers known to asynchronous copies; __syncthreads makes it known to the threads.
DEV void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }
// Arrives, and makes the phase wait for so many bytes of bulk copies.
DEV void mbarrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
DEV void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}
// Waits until the phase of this parity is complete.
DEV void mbarrier_wait(u64* barrier, u32 parity) {
  u32 complete = 0;
  while (!complete)
    asm volatile(
        "{ .reg .pred complete; mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
        "selp.u32 %0, 1, 0, complete; }\n"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}
// The calling thread arrives once all its cp_async copies so far have landed; does not wait for them. "noinc": the
// arrival is one of those that the barrier counts, not one on top of them.
DEV void cp_async_mbarrier_arrive_noinc(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}

// -- Bulk copy, global to shared memory --
// By one thread for all; addresses and bytes are multiples of 16. Landed bytes count towards the barrier's phase.
DEV void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Orders what threads wrote to shared memory (cp_async too) before what wgmma and bulk copies do with it.
DEV void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// -- Registers a thread, moved from one warpgroup to another; all its 128 threads call. N is a multiple of 8. --
template <int N>
DEV void register_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(N));
}
template <int N>
DEV void register_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(N));
}

// -- Products of a warpgroup: d (64 x N) += a b, float, a and b in shared memory, described below --
// All 128 threads of four warps from a multiple of 4 call. Products run on by themselves. A fence comes before the
// first. Commit makes a group of those since the last commit, and wait<N> leaves at most N groups under way. Until
// then neither d nor the tiles may be touched.
// With g = lane / 4 and t = lane % 4, warp w of the four holds rows 16w to 16w + 15:
//   d[4j], d[4j + 1]: row 16w + g, columns 8j + 2t, 8j + 2t + 1;   d[4j + 2], d[4j + 3]: row 16w + g + 8

DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int N>
DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}

// To the compiler, sums are ready when wgmma returns, and it may use them before the wait. Called after the wait and
// before the first product, this keeps what is done to them on its side.
template <int N>
DEV void wgmma_keep_order(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The names of the first 32, 64, 128 operands, and those operands.
#define NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
  NAMES_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128 \
  NAMES_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)
#define SUMS_64 SUMS_32(0), SUMS_32(32)
#define SUMS_128 SUMS_64, SUMS_32(64), SUMS_32(96)

// The operands after d: descriptors a and b, (metadata, selector 0,) whether to add to d (always), and signs of a
// and b. Then how they lie: a K-major (0), b MN-major (1). The 1 comes in a register, as wgmma takes a predicate.
#define WGMMA(columns, names, sums, a_name, b_name, one)                                                        \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, " one ", 0;\n"                                               \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." ELEMENT "." ELEMENT " {" names "}, "        \
               a_name ", " b_name ", add, 1, 1, 0, 1; }\n"                                                       \
               : sums                                                                                           \
               : "l"(a), "l"(b), "r"(1))
#define WGMMA_SP(columns, names, sums, a_name, b_name, metadata_name, one)                                       \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, " one ", 0;\n"                                               \
               "wgmma.mma_async.sp.sync.aligned.m64n" columns "k32.f32." ELEMENT "." ELEMENT " {" names "}, "     \
               a_name ", " b_name ", " metadata_name ", 0, add, 1, 1, 0, 1; }\n"                                 \
               : sums                                                                                           \
               : "l"(a), "l"(b), "r"(metadata), "r"(1))

template <int N>
DEV void wgmma_m64nNk16(float (&d)[N / 2], u64 a, u64 b) {
  static_assert(N == 64 || N == 128 || N == 256, "64, 128 or 256 columns");
  if constexpr (N == 64) WGMMA("64", NAMES_32, SUMS_32(0), "%32", "%33", "%34");
  if constexpr (N == 128) WGMMA("128", NAMES_64, SUMS_64, "%64", "%65", "%66");
  if constexpr (N == 256) WGMMA("256", NAMES_128, SUMS_128, "%128", "%129", "%130");
}

// The same with a 64 x 32 that keeps 2 of every 4 columns. Its tile holds the 16 kept columns of a row. Metadata as
// for mma_sp_m16n8k32: each warp's 16 rows, lanes with t = 0 and 1.
template <int N>
DEV void wgmma_sp_m64nNk32(float (&d)[N / 2], u64 a, u64 b, u32 metadata) {
  static_assert(N == 64 || N == 128 || N == 256, "64, 128 or 256 columns");
  if constexpr (N == 64) WGMMA_SP("64", NAMES_32, SUMS_32(0), "%32", "%33", "%34", "%35");
  if constexpr (N == 128) WGMMA_SP("128", NAMES_64, SUMS_64, "%64", "%65", "%66", "%67");
  if constexpr (N == 256) WGMMA_SP("256", NAMES_128, SUMS_128, "%128", "%129", "%130", "%131");
}

#endif  // HOST_EMULATOR

// -- Tiles in shared memory, as wgmma reads them: 128-byte swizzle --
// A tile is made of lines of 128 bytes (64 elements) from an address that is a multiple of 1024. Eight chunks of 16
// bytes lie in line i in the order c ^ (i & 7). So reading one column of chunks touches every bank.
//   K-major   line i is row i of a (m x k); 64 columns; the next 8 rows are 1024 bytes further
//   MN-major  line i is row i of b (k x n); 64 columns; the next 64 columns are `columns_stride` bytes further
// A tile may be read from a later k: 32 bytes further for 16 columns of a, 128 bytes for each row of b.
// Descriptor: address / 16 in bits 0-13, offsets / 16 in bits 16-29 (leading) and 32-45 (stride), 1 in bits 62-63.

DEV u32 swizzled(u32 line, u32 chunk) { return line * 128 + ((chunk ^ (line & 7)) << 4); }

DEV u64 swizzled_descriptor(const void* tile, u32 leading, u32 stride) {
  return (shared_address(tile) & 0x3ffff) >> 4 | static_cast<u64>(leading >> 4) << 16 |
         static_cast<u64>(stride >> 4) << 32 | static_cast<u64>(1) << 62;
}
// The leading offset is not used for swizzled K-major tiles; 16 is what it would be.
DEV u64 descriptor_k_major(const void* tile) { return swizzled_descriptor(tile, 16, 1024); }
DEV u64 descriptor_mn_major(const void* tile, u32 columns_stride) {
  return swizzled_descriptor(tile, columns_stride, 1024);
}
