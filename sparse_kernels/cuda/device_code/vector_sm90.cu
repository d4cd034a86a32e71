// Vector-wise, Shfl-BW and block-wise product on Hopper: out (m, n) = activation(w (m, k) @ x (k, n) + bias).
//
// The V rows of a group keep the same columns, so a group times x is a small dense product. The group's V x K'
// weights meet the K' rows of x that it names, gathered as they are copied. Roles, ring and schedule: sm90.cuh.
//
// Two consumers share the V x BN tile of the result. With V = 128 each has 64 rows and all columns, with V = 64 all
// rows and half the columns.
//
// Macros: V, 64 or 128; BN, 128 or 256; and those of sm90.cuh.
#define ROWS V
#define BK 64
#define WEIGHT_BYTES (V * 128)
#include "sm90.cuh"

constexpr int ROW_PARTS = V / 64;
constexpr int WIDTH = BN * ROW_PARTS / 2;  // columns of a consumer

// weights elements (stages, V, 64): the shared-memory image of each stage. columns int32 (stages, 64): the rows of x,
// -1 for none. work: Schedule. row_ids int32 (groups * V): the row of `out` each packed row is, -1 for none.
// partial: null, or float (splits, groups * V, columns up to a multiple of BN) for unfinished sums.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    vector_sm90(const u16* weights, const int* columns, const int4* work, const int* row_ids, const u16* x,
                const float* bias, u16* out, float* partial, int groups, int splits, int n, int activation) {
  DYNAMIC_SHARED(shared);
  __shared__ Barriers barriers;
  init_barriers(barriers);
  Schedule schedule{work, groups, splits, n};
  int warpgroup = threadIdx.x / WARPGROUP, lane = threadIdx.x & 31;
  Position at;

  if (warpgroup == 2) {
    register_decrease<PRODUCER_REGISTERS>();
    for (int round = 0; number_in(round) < tiles(schedule); ++round) {
      Tile tile = tile_of(schedule, number_in(round));
      const Part part = part_of(x, tile.column, n);
      const int* names = columns + (threadIdx.x & 127) / 32 * LINES_A_WARP + lane % LINES_A_WARP;
      int next = tile.first < tile.last ? names[tile.first * BK] : -1;
      for (int stage = tile.first; stage < tile.last; ++stage) {
        int mine = next;  // lane i holds the name of this warp's line i; that of the next stage is fetched ahead
        if (stage + 1 < tile.last) next = names[(stage + 1) * BK];
        unsigned char* slot = shared + at.slot * STAGE_BYTES;
        mbarrier_wait(&barriers.empty[at.slot], at.parity ^ 1);
        if (threadIdx.x == 2 * WARPGROUP) {
          mbarrier_expect(&barriers.full[at.slot], WEIGHT_BYTES);
          bulk_load(slot, weights + static_cast<u64>(stage) * (WEIGHT_BYTES / 2), WEIGHT_BYTES,
                    &barriers.full[at.slot]);
        }
#pragma unroll
        for (int step = 0; step < LINES_A_WARP; step += LINES_A_STEP) {
          int row = __shfl_sync(0xffffffff, mine, step + lane / LANES_A_LINE);
          copy_line(slot + WEIGHT_BYTES, part, step, row_of(part.x, row, part.stride), row >= 0);
        }
        producer_arrive(&barriers.full[at.slot]);
        advance(at);
      }
    }
    producer_finish(barriers, at);
  } else {
    register_increase<CONSUMER_REGISTERS>();
    int row = warpgroup % ROW_PARTS * 64, column = warpgroup / ROW_PARTS * WIDTH;
    for (int round = 0; number_in(round) < tiles(schedule); ++round) {
      Tile tile = tile_of(schedule, number_in(round));
      const Rows rows = rows_of(row_ids + tile.group * V + row, bias);
      float sums[WIDTH / 2];
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) sums[i] = 0.0f;
      wgmma_keep_order(sums);
      int read = -1;  // the slot whose products may still be under way
      for (int stage = tile.first; stage < tile.last; ++stage) {
        const unsigned char* slot = shared + at.slot * STAGE_BYTES;
        u64 a = descriptor_k_major(slot + row * 128);
        u64 b = descriptor_mn_major(slot + WEIGHT_BYTES + column / 64 * BLOCK_BYTES, BLOCK_BYTES);
        wait_full(&barriers.full[at.slot], at.parity);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BK / 16; ++step)  // descriptors hold addresses / 16
          wgmma_m64nNk16<WIDTH>(sums, a + step * 32 / 16, b + step * 16 * 128 / 16);
        wgmma_commit();
        wgmma_wait<1>();
        if (read >= 0) release(&barriers.empty[read]);
        read = at.slot;
        advance(at);
      }
      wgmma_wait<0>();
      wgmma_keep_order(sums);
      if (read >= 0) release(&barriers.empty[read]);
      store<WIDTH>(sums, schedule, tile, row, tile.column + column, rows, activation, out, partial);
    }
  }
}
