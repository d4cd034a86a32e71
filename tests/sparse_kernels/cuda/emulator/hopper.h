// The primitives of Hopper (the section at the end of sparse_kernels/cuda/device_code/primitives.cuh) on a CPU.
//
// What runs asynchronously on the machine does so here: a bulk copy lands in pieces at random moments, and a wgmma
// runs at some random moment between its commit and the end of its wait, and reads shared memory then, through its
// descriptors. So a slot that is filled or given back too early shows as a wrong result, and one that never is as
// threads that wait for ever. Not seen: a missing proxy fence or wgmma_fence.
#pragma once

namespace emulator {

// ---- Barriers ----

struct __attribute__((may_alias)) Barrier {
  u16 count;         // arrivals a phase needs
  u16 missing : 15;  // of this phase
  u16 parity : 1;    // of this phase
  int32_t bytes;     // expected and not landed
};
static_assert(sizeof(Barrier) == sizeof(u64), "a barrier is a u64");

constexpr int MOST_BYTES = (1 << 20) - 1;  // that a barrier can expect

inline Barrier& barrier_at(u64* address) {
  auto* barrier = reinterpret_cast<Barrier*>(address);
  if (barrier->count == 0xffff) fail("an mbarrier is used before mbarrier_init");
  return *barrier;
}

inline void complete_phase(Barrier& barrier) {
  if (barrier.missing > 0 || barrier.bytes != 0) return;
  barrier.parity ^= 1;
  barrier.missing = barrier.count;
}

inline void arrive(Barrier& barrier) {
  if (barrier.missing == 0) fail("more than %d arrivals at an mbarrier in one phase", barrier.count);
  barrier.missing--;
  complete_phase(barrier);
}

inline void expect(Barrier& barrier, int bytes) {
  barrier.bytes += bytes;
  if (barrier.bytes > MOST_BYTES) fail("an mbarrier expects %d bytes, more than it can count", barrier.bytes);
}

inline void land(Barrier& barrier, int bytes) {
  barrier.bytes -= bytes;
  if (barrier.bytes < -MOST_BYTES) fail("%d bytes more landed than the mbarrier expects", -barrier.bytes);
  complete_phase(barrier);
}

// ---- Products of a warpgroup: products.cpp ----

struct WarpgroupPart {  // what a thread brings to wgmma
  u64 a, b;
  float* d;
  u32 metadata;
  int columns;
  bool sparse, bfloat16;
};
void add_product(void** arguments);  // to the group that is not committed
void commit_products(void** arguments);
void wait_for_products(int groups_left);
void forget_products();

inline void warpgroup_meet(const char* kind, void* argument, Operation operation) {
  meet(warpgroup_meeting(), 128, place->index % 128, kind, argument, operation);
}

}  // namespace emulator

DEV void mbarrier_init(u64* barrier, int count) {
  // A block that has barriers initialises them first: what an earlier launch that failed has left is dropped here.
  emulator::forget_products();
  if (count < 1 || count >= 0x7fff) emulator::fail("mbarrier_init: a count of %d", count);
  *reinterpret_cast<emulator::Barrier*>(barrier) = {u16(count), u16(count), 0, 0};
}
DEV void mbarrier_fence_init() {}
DEV void mbarrier_expect(u64* barrier, u32 bytes) {
  emulator::expect(emulator::barrier_at(barrier), static_cast<int>(bytes));
  emulator::arrive(emulator::barrier_at(barrier));
}
DEV void mbarrier_arrive(u64* barrier) { emulator::arrive(emulator::barrier_at(barrier)); }
DEV void mbarrier_wait(u64* barrier, u32 parity) {
  if (parity > 1) emulator::fail("mbarrier_wait: a parity of %u", parity);
  emulator::wait_until("mbarrier_wait", [=] { return emulator::barrier_at(barrier).parity != parity; });
}
DEV void cp_async_mbarrier_arrive_noinc(u64* barrier) {
  emulator::after_copies([=] { emulator::arrive(emulator::barrier_at(barrier)); });
}

DEV void bulk_load(void* shared, const void* global, u32 bytes, u64* barrier) {
  u32 start = shared_address(shared);
  if (start % 16 || reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16) {
    emulator::fail("bulk_load: addresses and bytes must be multiples of 16");
  }
  if (static_cast<size_t>(start) + bytes > emulator::dynamic_shared_bytes) {
    emulator::fail("bulk_load: %u bytes from %u pass the end of shared memory", bytes, start);
  }
  constexpr u32 PIECES = 4;
  for (u32 piece = 0; piece < PIECES; piece++) {
    u32 from = bytes / 16 * piece / PIECES * 16, to = bytes / 16 * (piece + 1) / PIECES * 16;
    emulator::later([=] {
      memcpy(static_cast<char*>(shared) + from, static_cast<const char*>(global) + from, to - from);
      emulator::land(emulator::barrier_at(barrier), static_cast<int>(to - from));
    });
  }
}
DEV void fence_proxy_async() {}

template <int N>
DEV void register_increase() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "multiples of 8 from 24 to 256");
}
template <int N>
DEV void register_decrease() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "multiples of 8 from 24 to 256");
}

DEV void wgmma_fence() {}
template <int N>
DEV void wgmma_keep_order(float (&)[N]) {}
DEV void wgmma_commit() { emulator::warpgroup_meet("wgmma_commit", nullptr, emulator::commit_products); }
template <int N>
DEV void wgmma_wait() {
  emulator::wait_for_products(N);
}

template <int N>
DEV void wgmma_m64nNk16(float (&d)[N / 2], u64 a, u64 b) {
  emulator::WarpgroupPart mine{a, b, d, 0, N, false, BF16};
  emulator::warpgroup_meet("wgmma", &mine, emulator::add_product);
}
template <int N>
DEV void wgmma_sp_m64nNk32(float (&d)[N / 2], u64 a, u64 b, u32 metadata) {
  emulator::WarpgroupPart mine{a, b, d, metadata, N, true, BF16};
  emulator::warpgroup_meet("wgmma_sp", &mine, emulator::add_product);
}
