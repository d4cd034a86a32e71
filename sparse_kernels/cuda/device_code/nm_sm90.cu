// 2:4 product on Hopper: out (m, n) = activation(w (m, k) @ x (k, n) + bias), at most 2 of every 4 columns of w kept.
//
// The tensor cores multiply the kept weights only (wgmma.sp): metadata, 2 bits a weight, tells them which elements of
// x to take. Rows of x come whole, one after the other, so a stage of 64 kept columns meets 128 rows of x. Roles,
// ring and schedule: sm90.cuh. Each of the two consumers computes half the rows of the ROWS x BN tile, 64 at a time.
//
// wgmma.sp reads its metadata from registers for as long as it runs. So a stage's products must end before the next
// stage's metadata are fetched, as in CUTLASS's sparse main loops. The other consumer keeps the tensor cores busy
// meanwhile. Letting one group run on, as the dense kernel does, gave wrong results on an H200. The emulator takes
// metadata when a product is issued, so it cannot tell the two apart.
//
// Macros: ROWS, 128 or 256; BN, 128; and those of sm90.cuh.
#define BK 128
#define WEIGHT_BYTES (ROWS * 128 + ROWS * 16)
#include "sm90.cuh"

constexpr int PARTS = ROWS / 128;  // of 64 rows, a consumer
constexpr int STEPS = BK / 32;     // products of 32 rows of x, a stage

// weights bytes (stages, WEIGHT_BYTES): the shared-memory image of each stage. First 64 kept weights of each row,
// swizzled. Then the words that lane 4g + h needs for each step (wgmma_sp_m64nNk32): for each 16 rows, g = 0 to 7 and
// h = 0, 1.
// work: Schedule. row_ids int32 (groups * ROWS): the row of `out` each packed row is, -1 for none.
// partial: null, or float (splits, groups * ROWS, columns up to a multiple of BN) for unfinished sums.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    nm_sm90(const unsigned char* weights, int k, const int4* work, const int* row_ids, const u16* x,
            const float* bias, u16* out, float* partial, int groups, int splits, int n, int activation) {
  DYNAMIC_SHARED(shared);
  __shared__ Barriers barriers;
  init_barriers(barriers);
  Schedule schedule{work, groups, splits, n};
  int warpgroup = threadIdx.x / WARPGROUP, warp = (threadIdx.x & 127) / 32, lane = threadIdx.x & 31;
  Position at;

  if (warpgroup == 2) {
    register_decrease<PRODUCER_REGISTERS>();
    for (int round = 0; number_in(round) < tiles(schedule); ++round) {
      Tile tile = tile_of(schedule, number_in(round));
      const Part part = part_of(x, tile.column, n);
      for (int stage = tile.first; stage < tile.last; ++stage) {
        unsigned char* slot = shared + at.slot * STAGE_BYTES;
        mbarrier_wait(&barriers.empty[at.slot], at.parity ^ 1);
        if (threadIdx.x == 2 * WARPGROUP) {
          mbarrier_expect(&barriers.full[at.slot], WEIGHT_BYTES);
          bulk_load(slot, weights + static_cast<u64>(stage) * WEIGHT_BYTES, WEIGHT_BYTES, &barriers.full[at.slot]);
        }
        int row = (stage - tile.start) * BK + part.line, rows_left = k - row;
        u64 rows = row_of(part.x, row, part.stride);
#pragma unroll
        for (int step = 0; step < LINES_A_WARP; step += LINES_A_STEP)
          copy_line(slot + WEIGHT_BYTES, part, step, row_of(rows, step, part.stride), step < rows_left);
        producer_arrive(&barriers.full[at.slot]);
        advance(at);
      }
    }
    producer_finish(barriers, at);
  } else {
    register_increase<CONSUMER_REGISTERS>();
    int first_row = warpgroup * (ROWS / 2);
    for (int round = 0; number_in(round) < tiles(schedule); ++round) {
      Tile tile = tile_of(schedule, number_in(round));
      Rows rows[PARTS];
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        rows[part] = rows_of(row_ids + tile.group * ROWS + first_row + part * 64, bias);
      float sums[PARTS][BN / 2];
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[part][i] = 0.0f;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) wgmma_keep_order(sums[part]);
      for (int stage = tile.first; stage < tile.last; ++stage) {
        const unsigned char* slot = shared + at.slot * STAGE_BYTES;
        const unsigned char* words = slot + ROWS * 128 + (lane / 4 * 2 + lane % 2) * 16;
        u64 b = descriptor_mn_major(slot + WEIGHT_BYTES, BLOCK_BYTES);
        wait_full(&barriers.full[at.slot], at.parity);
        u32 metadata[PARTS][STEPS];
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          int rows_16 = first_row / 16 + part * 4 + warp;
          uint4 word = *reinterpret_cast<const uint4*>(words + rows_16 * 256);
          metadata[part][0] = word.x;
          metadata[part][1] = word.y;
          metadata[part][2] = word.z;
          metadata[part][3] = word.w;
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
          for (int part = 0; part < PARTS; ++part) {
            u64 a = descriptor_k_major(slot + (first_row + part * 64) * 128);
            wgmma_sp_m64nNk32<BN>(sums[part], a + step * 32 / 16, b + step * 32 * 128 / 16, metadata[part][step]);
          }
        wgmma_commit();
        wgmma_wait<0>();
        release(&barriers.empty[at.slot]);
        advance(at);
      }
#pragma unroll
      for (int part = 0; part < PARTS; ++part) wgmma_keep_order(sums[part]);
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        store<BN>(sums[part], schedule, tile, first_row + part * 64, tile.column, rows[part], activation, out, partial);
    }
  }
}
