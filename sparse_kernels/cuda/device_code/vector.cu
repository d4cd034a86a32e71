// out = activation(w x + bias) on tensor cores by mma.sync. The rows of the weight w fall into groups that share
// their kept columns: vector-wise, Shfl-BW and block-wise. Huang et al., "Shfl-BW", DAC 2022, section 5.
//
// A block computes one group (V rows) times BN columns of x. The kept columns of the group, BK at a time, name rows
// of x. These are gathered beside each other into shared memory. From there on the product is a dense one:
//
//     kept columns of the group          rows of x they name, gathered
//     [ V x BK, fragment order ]    x    [ BK x BN ]                        tile by tile, accumulated in float32
//
// A Shfl-BW weight's row order costs nothing: a finished row is written to the row of `out` that it belongs to.
//
// x is (k, n) and out (m, n). With CONV 1 the same kernel is a convolution by implicit GEMM: x is (c_in, h, w,
// batch), out (c_out, out_h, out_w, batch). A column of the product is an output position and an image, and a kept
// column names an input channel and a tap. Only the address of an element of x differs.
//
// Settings (sparse_kernels/cuda/vector.py chooses them):
//   V, BN, BK    the tile: rows of a group, columns of x, kept columns a step
//   WARPS_M, WARPS_N   how the warps share the V x BN results
//   STAGES       tiles in shared memory at once: STAGES - 1 are under way while one is multiplied
//   COPY         elements copied at once: 8 where rows of x are aligned to 16 bytes, 1 for any n
//   ASYNC        1: copied by cp.async (sm_80 and later, COPY 8); 0: through registers, with STAGES 2
//   MMA_K        16: m16n8k16 (sm_80); 8: m16n8k8 (sm_75); 4: m8n8k4 of the quad pairs (sm_70)
//   CONV         0: linear layer, 1: convolution
//   BF16         as in primitives.cuh
#include "primitives.cuh"

constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int WARP_ROWS = V / WARPS_M;
constexpr int WARP_COLUMNS = BN / WARPS_N;
constexpr int ROW_TILES = WARP_ROWS / 16;         // products of 16 rows, a warp
constexpr int COLUMN_TILES = WARP_COLUMNS / 16;   // and of 16 columns

constexpr int X_BYTES = BK * BN * 2;
constexpr int WEIGHT_BYTES = V * BK * 2;
constexpr int STAGE_BYTES = X_BYTES + WEIGHT_BYTES;

static_assert(ROW_TILES * 16 * WARPS_M == V && COLUMN_TILES * 16 * WARPS_N == BN, "warps must share the tile evenly");
static_assert(BN % 64 == 0 && BK % 16 == 0, "x lies in blocks of 64 columns, and a product takes 16 kept columns");
static_assert(ASYNC ? COPY == 8 : STAGES == 2, "cp.async copies 16 bytes; registers serve two buffers");

// ---- Which part of a tile a thread copies ----
// Every thread copies the same columns of x in every tile, and ROWS rows of the tile that follow each other. So one
// wide load fetches the places of all of them, and 8 neighbouring lanes write 128 neighbouring bytes. No two of the
// 8 share a bank, whatever the swizzle below does to their order.

constexpr int PIECES = BN / COPY;                 // threads to a row of x
constexpr int ROWS = BK * PIECES / THREADS;       // rows of a tile to a thread
constexpr int WEIGHT_PIECES = (WEIGHT_BYTES / 16 + THREADS - 1) / THREADS;

static_assert(THREADS % PIECES == 0 && ROWS * THREADS == BK * PIECES, "threads must share the rows of x evenly");

struct __align__(16) Bytes16 {
  u32 word[4];
};
struct __align__(8) Bytes8 {
  u32 word[2];
};
struct __align__(8) Float2 {
  float at[2];
};
#if COPY == 8
typedef Bytes16 Piece;
#else
typedef u16 Piece;
#endif

// Where the kept columns of a thread's rows lie in x. A place is a row of the matrix, or a pixel of a convolution's
// input relative to the first tap of channel 0. -1 is padding: zeros, and nothing is read.
struct __align__(ROWS % 4 == 0 ? 16 : 4 * ROWS) Places {
  int at[ROWS];
};

// The receptive field of the thread's column in x.
struct Column {
  const u16* start;  // where offset 0 lies; outside of x where a convolution's padding is, and not read there
  bool inside;       // false past the last column
  int stride;        // elements from one offset to the next
#if CONV
  int top, left;     // input row and column of the first tap
#endif
};

// A convolution, in elements; n = positions * batch.
struct Image {
  int batch, h, w, out_w, stride_h, stride_w, pad_h, pad_w;
};

DEV Column column_of(const u16* x, int column, int n, const Image& image) {
  Column own;
  own.inside = column < n;
#if CONV
  const int position = column / image.batch;
  own.top = position / image.out_w * image.stride_h - image.pad_h;
  own.left = position % image.out_w * image.stride_w - image.pad_w;
  own.stride = image.batch;
  const long long pixel = static_cast<long long>(own.top) * image.w + own.left;
  own.start = x + pixel * image.batch + column % image.batch;
#else
  own.stride = n;
  own.start = x + column;
#endif
  return own;
}

// The tap of a kept column: (row << 16) + column, both in input pixels.
DEV bool within(const Column& own, int offset, int tap, const Image& image) {
#if CONV
  const u32 row = own.top + (tap >> 16), column = own.left + (tap & 0xffff);
  return own.inside && offset >= 0 && row < static_cast<u32>(image.h) && column < static_cast<u32>(image.w);
#else
  return own.inside && offset >= 0;
#endif
}

DEV const u16* address_of(const Column& own, int offset) {
  return own.start + static_cast<long long>(offset) * own.stride;
}

// Byte of an element of x in its stage: blocks of 64 columns (128 bytes a row) whose 16-byte chunks are swizzled by
// the row. ldmatrix reads one chunk of 8 rows: chunk ^ 0 ... chunk ^ 7 are all different, so the 8 reads cover all 32
// banks. Rows of 2 * BN bytes without the swizzle would start all 8 in the same bank.
DEV int x_byte(int row, int column) {
  const int chunk = column % 64 / 8;
  return column / 64 * (BK * 128) + row * 128 + ((chunk ^ (row & 7)) << 4) + column % 8 * 2;
}

// ---- One step of a product: 16 kept columns of a tile, from shared memory ----
// Weights lie in the order in which lanes need them, 512 bytes for every 16 x 16. So 8 lanes read 128 neighbouring
// bytes, which are in different banks.

#if MMA_K == 4
// The quad pairs of a warp (q) compute quarters: rows 8 (q % 2) and up of 16, and 8 columns. These are in the left
// half of the warp's columns for q < 2, else in the right. Left and right together read 4 rows of 2 chunks of x at
// once. In a warp of 64 columns the chunks are 4 apart. The swizzle of 4 neighbouring rows leaves that bit alone, so
// all 8 lie in different banks. In one of 32 they are 2 apart, which the swizzle mixes: two lie in the same banks,
// and the read takes twice as long.
typedef float RowTile[COLUMN_TILES][8];
typedef RowTile Accumulators[ROW_TILES];

DEV void multiply(Accumulators& sums, const unsigned char* x, int step, int warp_m, int warp_n) {
  const unsigned char* weights = x + X_BYTES;
  const int lane = threadIdx.x % 32, quad_pair = lane % 16 / 4, upper = lane / 16;
  Bytes16 a[ROW_TILES][2];
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
    const unsigned char* tile = weights + (step * (V / 16) + warp_m * ROW_TILES + i) * 512;
    a[i][0] = *reinterpret_cast<const Bytes16*>(tile + (lane % 8 + 8 * upper) * 16);
    a[i][1] = *reinterpret_cast<const Bytes16*>(tile + 256 + (lane % 8 + 8 * upper) * 16);
  }
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j) {
      const int row = step * 16 + quarter * 4 + lane % 4;
      const int column = warp_n * WARP_COLUMNS + quad_pair / 2 * (WARP_COLUMNS / 2) + j * 8 + upper * 4;
      const Bytes8 piece = *reinterpret_cast<const Bytes8*>(x + x_byte(row, column));
      const u32 b[2] = {piece.word[0], piece.word[1]};
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        const Bytes16& half = a[i][quarter / 2];
        const u32 fragment[2] = {half.word[quarter % 2 * 2], half.word[quarter % 2 * 2 + 1]};
        mma_m8n8k4(sums[i][j], fragment, b);
      }
    }
  }
}
#else
typedef float RowTile[2 * COLUMN_TILES][4];
typedef RowTile Accumulators[ROW_TILES];

DEV void mma_16x16(float (&c)[4], const u32 (&a)[4], u32 b_low, u32 b_high) {
#if MMA_K == 16
  const u32 b[2] = {b_low, b_high};
  mma_m16n8k16(c, a, b);
#else
  const u32 a_low[2] = {a[0], a[1]}, a_high[2] = {a[2], a[3]}, low[1] = {b_low}, high[1] = {b_high};
  mma_m16n8k8(c, a_low, low);
  mma_m16n8k8(c, a_high, high);
#endif
}

DEV void multiply(Accumulators& sums, const unsigned char* x, int step, int warp_m, int warp_n) {
  const unsigned char* weights = x + X_BYTES;
  const int lane = threadIdx.x % 32;
  Bytes16 a[ROW_TILES];
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
    const int tile = step * (V / 16) + warp_m * ROW_TILES + i;
    a[i] = *reinterpret_cast<const Bytes16*>(weights + tile * 512 + lane * 16);
  }
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; ++j) {
    // Lanes 0 to 15 name the 16 rows of 8 columns, lanes 16 to 31 those of the next 8.
    u32 b[4];
    const int row = step * 16 + lane % 16, column = warp_n * WARP_COLUMNS + j * 16 + lane / 16 * 8;
    ldmatrix_x4_trans(b, x + x_byte(row, column));
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      mma_16x16(sums[i][2 * j], a[i].word, b[0], b[1]);
      mma_16x16(sums[i][2 * j + 1], a[i].word, b[2], b[3]);
    }
  }
}
#endif

// ---- Results ----
// The fragments of a lane lie scattered. So 16 rows of a warp at a time go through its own patch of shared memory,
// as float32, and leave it in whole rows. 16 lanes write 4 rows of 8 words of a 16 x 8 fragment at once. The patch's
// pitch is 8 or 24 modulo 32 words, so that these words fall into different banks. (Volta's 8 x 8 fragments lie
// otherwise: 2 or 4 of their words share a bank.)

constexpr int PATCH_PITCH = WARP_COLUMNS + 8;
constexpr int PATCH_BYTES = 16 * PATCH_PITCH * 4;
constexpr int WIDTH = COPY == 1 ? 1 : 4;  // results that a lane writes at once

struct __align__(4 * WIDTH) Sums {
  float at[WIDTH];
};

DEV void to_patch(float* patch, const RowTile& sums) {
  const int lane = threadIdx.x % 32;
#if MMA_K == 4
  const int quad_pair = lane % 16 / 4, upper = lane / 16;
  const int row = quad_pair % 2 * 8 + upper * 4 + (lane & 1);
  const int column = quad_pair / 2 * (WARP_COLUMNS / 2) + (lane & 2);
#pragma unroll
  for (int j = 0; j < COLUMN_TILES; ++j) {
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      float* pair = patch + (row + (c & 2)) * PATCH_PITCH + column + j * 8 + (c & 4);
      *reinterpret_cast<Float2*>(pair) = Float2{{sums[j][c], sums[j][c + 1]}};
    }
  }
#else
  const int row = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < 2 * COLUMN_TILES; ++j) {
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      float* pair = patch + (row + c * 4) * PATCH_PITCH + j * 8 + column;
      *reinterpret_cast<Float2*>(pair) = Float2{{sums[j][c], sums[j][c + 1]}};
    }
  }
#endif
}

// row_ids: the 16 rows' own, -1 for a row that pads the group. out: column 0 of the warp's results in row 0.
DEV void write_rows(const float* patch, const int* row_ids, u16* out, int n, int columns_left, const float* bias,
                    int activation) {
#pragma unroll 1
  for (int piece = threadIdx.x % 32; piece < 16 * WARP_COLUMNS / WIDTH; piece += 32) {
    const int row = piece / (WARP_COLUMNS / WIDTH), column = piece % (WARP_COLUMNS / WIDTH) * WIDTH;
    const int row_id = row_ids[row];
    if (row_id < 0 || column >= columns_left) continue;
    const float added = bias ? bias[row_id] : 0.0f;
    Sums sums = *reinterpret_cast<const Sums*>(patch + row * PATCH_PITCH + column);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sums.at[i] += added;
    activate(sums.at, activation);
    u16* results = out + static_cast<long long>(row_id) * n + column;
#if COPY == 1
    results[0] = from_float(sums.at[0]);
#else
    *reinterpret_cast<Bytes8*>(results) = Bytes8{{pack2(sums.at[0], sums.at[1]), pack2(sums.at[2], sums.at[3])}};
#endif
  }
}

// ---- Copies ----

// What a thread needs to know to copy its part of any tile.
struct Copier {
  const u16* weights;  // of the group's first tile
  const int* offsets;  // of its kept columns, from the thread's first row on
  const int* taps;     // likewise; null for a linear layer
  Column column;
  int row, first_column;  // of the tile
};

DEV Places places_of(const int* of_tiles, int tile) {
  return *reinterpret_cast<const Places*>(of_tiles + static_cast<long long>(tile) * BK);
}

struct Sources {
  Places offsets;
#if CONV
  Places taps;
#endif
};

DEV Sources sources_of(const Copier& copier, int tile) {
  Sources sources;
  sources.offsets = places_of(copier.offsets, tile);
#if CONV
  sources.taps = places_of(copier.taps, tile);
#endif
  return sources;
}

DEV bool reads(const Copier& copier, const Sources& sources, int i, const Image& image) {
#if CONV
  return within(copier.column, sources.offsets.at[i], sources.taps.at[i], image);
#else
  return within(copier.column, sources.offsets.at[i], 0, image);
#endif
}

DEV const u16* weights_of(const Copier& copier, int tile, int piece) {
  return copier.weights + static_cast<long long>(tile) * (V * BK) + piece * 8;
}

#if ASYNC
DEV void copy(unsigned char* stage, const Copier& copier, int tile, const Sources& sources, const Image& image) {
#pragma unroll
  for (int i = 0; i < WEIGHT_PIECES; ++i) {
    const int piece = i * THREADS + threadIdx.x;
    if (piece < WEIGHT_BYTES / 16) cp_async16(stage + X_BYTES + piece * 16, weights_of(copier, tile, piece));
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    cp_async16(stage + x_byte(copier.row + i, copier.first_column),
               address_of(copier.column, sources.offsets.at[i]), reads(copier, sources, i, image));
  }
}
#else
// A thread's part of a tile on its way from global to shared memory.
struct Held {
  Piece x[ROWS];
  Bytes16 weights[WEIGHT_PIECES];
};

DEV void take(Held& held, const Copier& copier, int tile, const Sources& sources, const Image& image) {
#pragma unroll
  for (int i = 0; i < WEIGHT_PIECES; ++i) {
    const int piece = i * THREADS + threadIdx.x;
    if (piece < WEIGHT_BYTES / 16) {
      held.weights[i] = *reinterpret_cast<const Bytes16*>(weights_of(copier, tile, piece));
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    held.x[i] = Piece{};
    if (reads(copier, sources, i, image)) {
      held.x[i] = *reinterpret_cast<const Piece*>(address_of(copier.column, sources.offsets.at[i]));
    }
  }
}

DEV void put(unsigned char* stage, const Held& held, const Copier& copier) {
#pragma unroll
  for (int i = 0; i < WEIGHT_PIECES; ++i) {
    const int piece = i * THREADS + threadIdx.x;
    if (piece < WEIGHT_BYTES / 16) *reinterpret_cast<Bytes16*>(stage + X_BYTES + piece * 16) = held.weights[i];
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    *reinterpret_cast<Piece*>(stage + x_byte(copier.row + i, copier.first_column)) = held.x[i];
  }
}
#endif

// ---- The kernel ----
// weights    (tiles, BK / 16, V / 16, 512 bytes) in fragment order
// offsets    (tiles * BK) where each kept column's row of x lies, -1 for padding
// taps       (tiles * BK) of a convolution: the tap of each kept column
// starts     (groups + 1) the tiles of a group; the groups with most tiles come first
// row_ids    (groups * V) the row of `out` that a packed row is, -1 for padding
// n          columns of the product; x and out lie as said at the top. bias (m) or null.
// Grid: one block for every group and BN columns, the groups of the same columns beside each other. They read the
// same rows of x at about the same time, so these come from the second-level cache. Without the 1 in
// __launch_bounds__ ptxas spills a few registers of some tiles to fit one block more.
#if CONV
extern "C" __global__ void __launch_bounds__(THREADS, 1)
vector_conv2d(const u16* __restrict__ weights, const int* __restrict__ offsets, const int* __restrict__ taps,
              const int* __restrict__ starts, const int* __restrict__ row_ids, const u16* __restrict__ x,
              u16* __restrict__ out, const float* __restrict__ bias, int groups, int n, int batch, int h, int w,
              int out_w, int stride_h, int stride_w, int pad_h, int pad_w, int activation) {
  const Image image = {batch, h, w, out_w, stride_h, stride_w, pad_h, pad_w};
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
vector_matmul(const u16* __restrict__ weights, const int* __restrict__ offsets, const int* __restrict__ starts,
              const int* __restrict__ row_ids, const u16* __restrict__ x, u16* __restrict__ out,
              const float* __restrict__ bias, int groups, int n, int activation) {
  const int* taps = nullptr;
  const Image image = {};
#endif
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, warp_m = warp / WARPS_N, warp_n = warp % WARPS_N;
  const int group = blockIdx.x % groups, first_column = blockIdx.x / groups * BN;
  const int start = starts[group], tiles = starts[group + 1] - start;

  Copier copier;
  copier.row = threadIdx.x / PIECES * ROWS;
  copier.first_column = threadIdx.x % PIECES * COPY;
  copier.column = column_of(x, first_column + copier.first_column, n, image);
  copier.weights = weights + static_cast<long long>(start) * (V * BK);
  copier.offsets = offsets + static_cast<long long>(start) * BK + copier.row;
#if CONV
  copier.taps = taps + static_cast<long long>(start) * BK + copier.row;
#else
  copier.taps = taps;
#endif

  Accumulators sums = {};

#if ASYNC
  // The places of a tile are fetched one tile before its copies start, these STAGES - 1 tiles before its product.
  Sources first[STAGES - 1], next;
#pragma unroll
  for (int tile = 0; tile < STAGES - 1; ++tile) {
    if (tile < tiles) first[tile] = sources_of(copier, tile);
  }
#pragma unroll
  for (int tile = 0; tile < STAGES - 1; ++tile) {
    if (tile < tiles) copy(shared + tile * STAGE_BYTES, copier, tile, first[tile], image);
    cp_async_commit();
  }
  if (STAGES - 1 < tiles) next = sources_of(copier, STAGES - 1);

  int stage = 0, free_stage = STAGES - 1;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<STAGES - 2>();  // this thread's part of `tile` has landed,
    __syncthreads();              // that of all others too; and all are done with the stage before: it is free
    const unsigned char* landed = shared + stage * STAGE_BYTES;
    const int ahead = tile + STAGES - 1;
#pragma unroll
    for (int step = 0; step < BK / 16; ++step) {
      multiply(sums, landed, step, warp_m, warp_n);
      if (step > 0) continue;
      // The next copies start here, so that their address arithmetic runs beside the tensor cores.
      if (ahead < tiles) copy(shared + free_stage * STAGE_BYTES, copier, ahead, next, image);
      cp_async_commit();  // an empty group where nothing is left, so that the wait still counts right
      if (ahead + 1 < tiles) next = sources_of(copier, ahead + 1);
    }
    free_stage = stage;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
#else
  Held held;
  if (tiles > 0) {
    take(held, copier, 0, sources_of(copier, 0), image);
    put(shared, held, copier);
  }
  Sources next;
  if (tiles > 1) next = sources_of(copier, 1);
  __syncthreads();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const bool more = tile + 1 < tiles;
    if (more) take(held, copier, tile + 1, next, image);  // under way while this tile is multiplied
    if (tile + 2 < tiles) next = sources_of(copier, tile + 2);
#pragma unroll
    for (int step = 0; step < BK / 16; ++step) multiply(sums, shared + tile % 2 * STAGE_BYTES, step, warp_m, warp_n);
    if (more) put(shared + (tile + 1) % 2 * STAGE_BYTES, held, copier);
    __syncthreads();
  }
#endif

  __syncthreads();  // the patches lie where other warps may still read the last tile
  float* patch = reinterpret_cast<float*>(shared + warp * PATCH_BYTES);
  const int* rows = row_ids + static_cast<long long>(group) * V + warp_m * WARP_ROWS;
  const int column = first_column + warp_n * WARP_COLUMNS;
#pragma unroll 1
  for (int i = 0; i < ROW_TILES; ++i) {
    to_patch(patch, sums[0]);
    __syncwarp();
    write_rows(patch, rows + 16 * i, out + column, n, n - column, bias, activation);
    __syncwarp();  // before the next 16 rows overwrite it
    move_up(sums);
  }
}
