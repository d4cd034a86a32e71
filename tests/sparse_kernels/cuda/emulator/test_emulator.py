"""The emulator computes what the PTX ISA says, and refuses or shows what no kernel may do."""

from pathlib import Path

import emulator
import numpy as np
import pytest

from sparse_kernels.cuda.program import Launch, Operand, Variant

KERNELS = Path(emulator.__file__).parent / "kernels"
SHAPE = (128, 96, 64)  # m, k, n

GEMM = Variant(str(KERNELS / "gemm.cu"), "gemm", {"BF16": 0}, ("sm_80",))
BF16_GEMM = Variant(GEMM.source, "gemm", {"BF16": 1}, ("sm_80",))


def gemm_launch(variant, w, n):
    m, k = w.shape
    relu = np.int32(not variant.defines["BF16"])
    arguments = (w, Operand.X, Operand.OUT, Operand.BIAS, np.int32(m), np.int32(k), np.int32(n), relu)
    return Launch(variant, (n // 64, m // 64, 1), (128, 1, 1), 0, arguments)


def gemm_case(rng):
    m, k, n = SHAPE
    w, x = rng.standard_normal((m, k)).astype(np.float16), rng.standard_normal((k, n)).astype(np.float16)
    bias = rng.standard_normal(m).astype(np.float32)
    exact = w.astype(np.float64) @ x.astype(np.float64) + bias[:, None]
    absolute = np.abs(w.astype(np.float64)) @ np.abs(x.astype(np.float64)) + np.abs(bias)[:, None]
    # k + 1 additions in float32, then one rounding to a half.
    bound = (k + 1) * np.finfo(np.float32).eps * absolute + np.finfo(np.float16).eps * np.abs(exact)
    return w, x, bias, np.maximum(exact, 0), bound


def gemm(rng, seed, mutate=None):
    """The largest excess over the bound; NaN where something was never written."""
    w, x, bias, exact, bound = gemm_case(rng)
    out = np.empty(exact.shape, np.float16)
    emulator.run([gemm_launch(GEMM, w, x.shape[1])], x, out, bias, seed=seed, mutate=mutate)
    return (np.abs(out - exact) - bound).max()


@pytest.mark.parametrize("seed", range(4))
def test_a_right_kernel_is_right_in_any_order_of_threads(rng, seed):
    assert gemm(rng, seed) <= 0


def test_bfloat16_is_the_upper_half_of_a_float(rng):
    m, k, n = SHAPE
    w, x = rng.integers(-8, 9, (m, k)).astype(np.float32), rng.integers(-8, 9, (k, n)).astype(np.float32)
    out = np.empty((m, n), np.uint16)
    upper_halves = [(array.view(np.uint32) >> 16).astype(np.uint16) for array in (w, x)]
    emulator.run([gemm_launch(BF16_GEMM, upper_halves[0], n)], upper_halves[1], out, seed=0)
    exact = (w @ x).astype(np.float64)  # whole numbers below 2^24
    found = (out.astype(np.uint32) << 16).view(np.float32)
    assert (np.abs(found - exact) <= np.abs(exact) * 2.0**-8).all()


RACES = {
    "a stage is read before it landed": ("cp_async_wait<0>()", "cp_async_wait<1>()"),
    "other threads' copies are not awaited": ("__syncthreads();  // the stage is there", ""),
    "a stage is overwritten while it is read": ("__syncthreads();  // the stage is free", ""),
    "a group is never committed": ("    cp_async_commit();\n", ""),
    "some of out is never written": ("j < 4; j++) {\n        u64 at", "j < 3; j++) {\n        u64 at"),
}


@pytest.mark.parametrize("edit", RACES.values(), ids=RACES)
def test_a_race_gives_a_wrong_result_for_some_seed(rng, edit):
    assert any(not gemm(rng, seed, edit) <= 0 for seed in range(8))


REFUSED = {
    "reads past x": ("&x[", "&x[8 * n + ", r"gemm.cu:\d+: touches \d+ bytes past argument 1"),
    "reads before w": ("&w[", "&w[-64 * k + ", "bytes before argument 0"),
    "writes past out": ("&out[at]", "&out[at + 64]", "bytes past argument 2"),
    "writes just before out": ("&out[at]", "&out[at - 2]", "writes 4 bytes before argument 2|touches 4 bytes before"),
    "writes its weights": (
        "load(0, 0);\n",
        "load(0, 0);\n  const_cast<u16*>(w)[0] = 0;\n",
        "argument 0, which is for read",
    ),
    "misaligned copy": ("first_column + i % 8 * 8]", "first_column + i % 8 * 8 + 1]", "not aligned to 16 bytes"),
    "misaligned store": ("lane % 4 * 2;", "lane % 4 * 2 + 1;", "misaligned access"),
    "past a static array": ("&w_tile[stage][i / 4]", "&w_tile[stage][i / 4 + 32]", "outside of an array"),
    "half a warp": ("load(0, 0);\n", "if (lane < 16) __syncwarp();\n  load(0, 0);\n", "deadlock|threads part"),
    "a thread leaves": (
        "load(0, 0);\n",
        "if (thread == 5) return;\n  load(0, 0);\n",
        "deadlock: of 128 threads 1 have",
    ),
    "lanes part": (
        "load(0, 0);\n",
        "if (lane < 16) __syncwarp(); else __shfl_sync(0xffffffffu, 1, 0);\n  load(0, 0);\n",
        "threads part: some are at __s.* some at __s",
    ),
    "a trap": ("load(0, 0);\n", "if (blockIdx.y == 1) __trap();\n  load(0, 0);\n", "__trap.*of block .0,1,0"),
    "no such barrier": ("load(0, 0);\n", "named_barrier(16, 128);\n  load(0, 0);\n", "barriers are 1 to 15"),
}


@pytest.mark.parametrize(("old", "new", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_kernel_may_do_is_refused_with_its_place(rng, old, new, message):
    with pytest.raises(emulator.EmulatorError, match=message):
        gemm(rng, 0, (old, new))


def test_after_an_error_the_same_kernel_still_runs(rng):
    with pytest.raises(emulator.EmulatorError):
        gemm(rng, 0, ("load(0, 0);\n", "if (thread == 5) return;\n  load(0, 0);\n"))
    assert gemm(rng, 0) <= 0


def test_an_edit_that_changes_nothing_is_refused(rng):
    with pytest.raises(ValueError, match="no source of these launches holds 'no such text'"):
        gemm(rng, 0, ("no such text", ""))


def test_a_source_that_does_not_compile_shows_the_compilers_message(rng):
    with pytest.raises(emulator.CompilationError, match="no_such_function"):
        gemm(rng, 0, ("load(0, 0);", "no_such_function();"))


def test_arguments_of_another_size_than_the_parameters_are_refused(rng):
    w, x, bias, exact, _ = gemm_case(rng)
    right = gemm_launch(GEMM, w, x.shape[1])
    out = np.empty(exact.shape, np.float16)
    too_few = Launch(GEMM, right.grid, right.block, 0, right.arguments[:-1])
    with pytest.raises(emulator.EmulatorError, match="has 8 parameters, the launch gives 7"):
        emulator.run([too_few], x, out, bias, seed=0)
    wide = Launch(GEMM, right.grid, right.block, 0, (*right.arguments[:-1], np.int64(64)))
    with pytest.raises(emulator.EmulatorError, match="argument 7 has 8 bytes, the parameter 4"):
        emulator.run([wide], x, out, bias, seed=0)


def product_of(kind, a, b, metadata=None):
    """c of one warp: a, b halves (registers, 32 lanes, 2)."""
    variant = Variant(str(KERNELS / "products.cu"), "product", {"PRODUCT": kind}, ("sm_80",))
    packed = [np.ascontiguousarray(it.astype(np.float16)).view(np.uint32).reshape(-1, 32) for it in (a, b)]
    if metadata is None:
        metadata = np.zeros(32, np.uint32)
    out = np.empty((32, 8 if kind == 884 else 4), np.float32)
    launch = Launch(variant, (1, 1, 1), (32, 1, 1), 0, (*packed, metadata, Operand.OUT))
    emulator.run([launch], np.zeros(1, np.float16), out, seed=3)
    return out


LANE = np.arange(32)
GROUP, IN_GROUP = LANE // 4, LANE % 4
WHICH = np.arange(2)


def lay_out_a(a):
    """(16, K) as its lanes hold it: PTX ISA, fragments of mma.m16n8k16 and m16n8k8. (K / 4, 32, 2)."""
    registers = np.arange(a.shape[1] // 4)[:, None, None]
    rows = GROUP[:, None] + 8 * (registers % 2) + 0 * WHICH
    columns = 2 * IN_GROUP[:, None] + WHICH + 8 * (registers // 2)
    return a[rows, columns]


def lay_out_b(b):
    """(K, 8) as its lanes hold it. (K / 8, 32, 2)."""
    registers = np.arange(b.shape[0] // 8)[:, None, None]
    return b[2 * IN_GROUP[:, None] + WHICH + 8 * registers, GROUP[:, None] + 0 * WHICH + 0 * registers]


def lay_out_c(c):
    """(16, 8) as its lanes hold it. (32, 4)."""
    i = np.arange(4)
    return c[GROUP[:, None] + 8 * (i // 2), 2 * IN_GROUP[:, None] + i % 2]


@pytest.mark.parametrize(("kind", "depth"), [(16816, 16), (1688, 8)])
def test_mma_multiplies_its_fragments(rng, kind, depth):
    a, b = rng.integers(-8, 9, (16, depth)), rng.integers(-8, 9, (depth, 8))
    np.testing.assert_array_equal(product_of(kind, lay_out_a(a), lay_out_b(b)), lay_out_c(a @ b + 1))


def test_sparse_mma_places_kept_elements_by_its_metadata(rng):
    kept, b = rng.integers(1, 9, (16, 16)), rng.integers(-8, 9, (32, 8))
    places = np.sort(np.array([rng.permutation(4)[:2] for _ in range(16 * 8)]), axis=1).reshape(16, 8, 2)
    a = np.zeros((16, 8, 4), np.int64)
    np.put_along_axis(a, places, kept.reshape(16, 8, 2), axis=2)
    # PTX ISA, metadata of m16n8k32: 4 groups of a row in 16 bits, rows g and g + 8 in a word, columns 0-15 in lane 4g
    # and 16-31 in the next.
    nibbles = places[:, :, 0] | places[:, :, 1] << 2
    halves = (nibbles.reshape(16, 2, 4) << np.array([0, 4, 8, 12])).sum(axis=2)
    metadata = np.full((8, 4), 0xFFFFFFFF, np.uint32)  # lanes 2 and 3 of a group are not read
    metadata[:, :2] = halves[:8] | halves[8:] << 16
    found = product_of(16832, lay_out_a(kept), lay_out_b(b), metadata.reshape(32))
    np.testing.assert_array_equal(found, lay_out_c(a.reshape(16, 32) @ b + 1))


def test_sparse_mma_refuses_metadata_that_does_not_rise(rng):
    ones = np.ones((4, 32, 2))
    with pytest.raises(emulator.EmulatorError, match="not in rising order"):
        product_of(16832, ones, ones, np.zeros(32, np.uint32))


def test_voltas_mma_makes_four_products_by_quad_pairs(rng):
    a, b = rng.integers(-8, 9, (4, 8, 4)), rng.integers(-8, 9, (4, 4, 8))
    pair, half, t = LANE % 16 // 4, LANE // 16, LANE % 4
    # PTX ISA, fragments of mma.m8n8k4: a row-major, b row-major.
    element = 2 * np.arange(2)[:, None, None] + WHICH
    lanes_a = a[pair[:, None], (t + 4 * half)[:, None], element]
    lanes_b = b[pair[:, None], t[:, None], element + 4 * half[:, None]]
    i = np.arange(8)
    rows = (LANE & 1)[:, None] + (i & 2) + 4 * half[:, None]
    columns = (i & 4) + (LANE & 2)[:, None] + (i & 1)
    exact = (a @ b + 1)[pair[:, None], rows, columns]
    np.testing.assert_array_equal(product_of(884, lanes_a, lanes_b), exact)


THREADS = Variant(str(KERNELS / "threads.cu"), "threads", {}, ("sm_80",))


def run_threads(numbers, seed, mutate=None):
    out = np.empty((11, 64), np.float32)
    launch = Launch(THREADS, (1, 1, 1), (64, 1, 1), 256, (Operand.X, Operand.OUT))
    emulator.run([launch], numbers, out, seed=seed, mutate=mutate)
    return out


@pytest.mark.parametrize("seed", range(3))
def test_shuffles_votes_and_barriers(rng, seed):
    numbers = rng.integers(1, 1000, 64).astype(np.uint32)
    out = run_threads(numbers, seed)
    warps, lane = numbers.reshape(2, 32), np.arange(32)
    in_16 = np.where(lane % 16 + 6 < 16, lane + 6, lane)
    expected = [
        np.repeat(warps[:, 5:6], 32, axis=1),
        warps[:, lane ^ 3],
        warps[:, in_16],
        warps[:, np.where(lane >= 6, lane - 6, lane)],
        warps % 3 == 0,
        np.where(lane < 8, warps[:, lane ^ 1], 0),
        numbers[::-1],
        np.where(np.arange(64) < 32, 0, np.roll(numbers[::-1] + 1, 32)),
        np.full(64, numbers.sum()),
    ]
    for row, want in enumerate(expected):
        np.testing.assert_array_equal(out[row], np.reshape(want, 64), err_msg=f"row {row}")


def test_ldmatrix_gives_lane_l_two_neighbours_of_row_l_div_4(rng):
    numbers = rng.integers(1, 1000, 64).astype(np.uint32)
    out = run_threads(numbers, 0)
    shared = np.concatenate([numbers[:32], numbers[32:] + 1]).astype(np.uint32)
    matrix = shared[:32].reshape(8, 4)  # 8 rows of 16 bytes
    np.testing.assert_array_equal(out[9], np.tile(matrix[GROUP, IN_GROUP], 2))
    elements = matrix.view(np.uint16)
    np.testing.assert_array_equal(out[10], np.tile(elements[2 * IN_GROUP, GROUP], 2))


BARRIERS = (
    "__syncwarp();",
    "__syncthreads();  // between the warps",
    "__syncthreads();  // all have read",
    "named_barrier(3, 32);",
)


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_missing_barrier_shows_for_some_seed(rng, barrier):
    numbers = rng.integers(1, 1000, 64).astype(np.uint32)
    right = run_threads(numbers, 0)
    assert any(not np.array_equal(run_threads(numbers, seed, (barrier, "")), right) for seed in range(8))


def test_shared_memory_past_what_the_launch_asked_for_is_refused(rng):
    numbers = rng.integers(1, 1000, 64).astype(np.uint32)
    with pytest.raises(emulator.EmulatorError, match="beyond its 256 bytes of dynamic shared memory"):
        run_threads(numbers, 0, ("numbers[thread] = mine;", "numbers[thread] = mine; numbers[thread + 64] = 1;"))
    with pytest.raises(emulator.EmulatorError, match=r"touches byte 1\d\d\d of 256 bytes of dynamic"):
        run_threads(numbers, 0, ("numbers[thread] = mine;", "numbers[thread] = mine; numbers[thread + 256] = 1;"))


def counted(*restarts):
    """The count after launches of which some start afresh."""
    variant = Variant(str(KERNELS / "scratch.cu"), "count", {}, ("sm_80",))
    arguments = (Operand.SCRATCH, Operand.OUT, Operand.BIAS)
    launches = [
        Launch(variant, (1, 1, 1), (32, 1, 1), 0, (*arguments, np.int32(it)), scratch_bytes=4) for it in restarts
    ]
    out = np.empty(1, np.float32)
    emulator.run(launches, np.zeros(1, np.float16), out, seed=0)
    return out[0]


def test_launches_of_one_call_share_scratch():
    assert counted(True, False) == 64


def test_scratch_holds_no_number_before_the_first_launch():
    assert np.isnan(counted(False))
