"""Vector-wise, Shfl-BW and block-wise products for Hopper: their packing, their launches, and all of it emulated."""

import emulator
import numpy as np
import pytest
from sm90_cases import case_of, packed_of, run
from vector_cases import bits, drawn

from sparse_kernels.cuda import sm90, vector_sm90
from sparse_kernels.cuda.program import DTYPES, NotSupported, Operand
from sparse_kernels.formats import pack, unpack
from sparse_kernels.patterns import NM, BlockWise, ShflBW, VectorWise

ALL_HEIGHTS = [VectorWise(64), VectorWise(128), ShflBW(64), ShflBW(128), BlockWise(64, 16), BlockWise(128, 40)]


# ---- Packing ----


def unpacked(program, k):
    """The bits (m, k) that a program's arrays stand for, found as the tensor cores would: chunk by chunk."""
    weights, columns = program.own
    height = weights.shape[1]
    dense = np.zeros((program.counts.size, height, k), np.uint16)
    for group, first, count, _ in program.work:
        for stage in range(first, first + count):
            memory = weights[stage].tobytes()
            for row in range(height):
                for column in np.flatnonzero(columns[stage] >= 0):
                    address = row * 128 + column * 2
                    address ^= (address >> 7 & 7) << 4  # the 128-byte swizzle of PTX
                    element = np.frombuffer(memory, np.uint16, 1, address)[0]
                    dense[group, row, columns[stage, column]] = element
    found = np.zeros((program.row_ids.max() + 1, k), np.uint16)
    rows = program.row_ids >= 0
    found[program.row_ids[rows]] = dense.reshape(-1, k)[rows]
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ALL_HEIGHTS, ids=str)
def test_the_image_of_shared_memory_holds_the_weight(rng, pattern, dtype):
    packed = packed_of(rng, pattern, 200, 150, dtype=dtype)
    program = vector_sm90.build_program(packed, dtype, "sm_90a", 8)
    np.testing.assert_array_equal(unpacked(program, 150), bits(unpack(packed), dtype))


def test_places_without_a_weight_have_weight_zero_and_no_row_of_x(rng):
    program = vector_sm90.build_program(packed_of(rng, VectorWise(64), 100, 90), "float16", "sm_90a", 8)
    weights, columns = program.own
    filled = np.argwhere(columns < 0)
    assert filled.size
    for stage, column in filled:
        assert not sm90.swizzle(weights)[stage, :, column].any()


def test_groups_with_most_work_come_first(rng):
    mask = np.repeat(np.arange(300) < [[65], [0], [300], [64]], 64, axis=0)
    weight = rng.standard_normal(mask.shape).astype(np.float32)
    program = vector_sm90.build_program(pack(weight, mask, VectorWise(64)), "float16", "sm_90a", 8)
    assert program.counts.tolist() == [2, 0, 5, 1]
    assert program.work.tolist() == [[2, 2, 5, 0], [0, 0, 2, 0], [3, 7, 1, 0], [1, 2, 0, 0]]


@pytest.mark.parametrize(
    ("pattern", "dtype", "architecture", "said"),
    [
        (VectorWise(32), "float16", "sm_90a", "64 or 128 rows"),
        (BlockWise(16, 64), "float16", "sm_90a", "64 or 128 rows"),
        (VectorWise(64), "float16", "sm_80", "for sm_90a, not sm_80"),
        (VectorWise(64), "float32", "sm_90a", "not float32"),
        (NM(2, 4), "float16", "sm_90a", "nm:2:4"),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_in_a_sentence(rng, pattern, dtype, architecture, said):
    weight = rng.standard_normal((64, 64)).astype(np.float32)
    packed = pack(weight, pattern.mask(weight.astype(float) ** 2, 0.5), pattern)
    with pytest.raises(NotSupported, match=said):
        vector_sm90.build_program(packed, dtype, architecture, 8)


# ---- Launches ----


def filled(m, k, v=128):
    return vector_sm90.build_program(pack(np.ones((m, k), np.float32), None, VectorWise(v)), "float16", "sm_90a", 8)


def test_no_columns_need_no_launch():
    assert filled(128, 64).launches(0, "relu") == []


def test_a_smaller_machine_gets_fewer_blocks():
    packed = pack(np.ones((4096, 64), np.float32), None, VectorWise(128))
    (launch,) = vector_sm90.build_program(packed, "float16", "sm_90a", 2048, 114).launches(2048, None)
    assert launch.grid == (114, 1, 1)


def test_a_product_with_many_tiles_is_not_split():
    (launch,) = filled(4096, 512).launches(2048, "gelu")
    assert launch.grid == (132, 1, 1)
    assert launch.scratch_bytes == 0
    assert launch.variant.defines["BN"] == 256


def test_few_long_tiles_are_shared_out_and_added_up():
    first, second = filled(256, 8192).launches(256, "gelu")
    splits = first.arguments[-3]
    assert splits > 1
    width = -(-256 // first.variant.defines["BN"]) * first.variant.defines["BN"]
    assert first.scratch_bytes == second.scratch_bytes == splits * 256 * width * 4
    assert any(argument is Operand.SCRATCH for argument in first.arguments)
    assert second.variant.function == "finish_sm90"
    assert second.arguments[-1] == 2


def test_short_tiles_are_not_split_as_a_second_launch_costs_more():
    assert len(filled(256, 64).launches(256, None)) == 1


@pytest.mark.parametrize("n", [8, 100, 129, 5000])
def test_every_launch_is_among_the_variants_that_the_gate_compiles(n):
    known = [variant.name for variant in vector_sm90.VARIANTS]
    for v in (64, 128):
        for m, k in ((128, 4096), (4096, 128)):
            for launch in filled(m, k, v).launches(n, "relu"):
                assert launch.variant.name in known


@pytest.mark.parametrize("kernel", vector_sm90.KERNELS, ids=lambda kernel: f"{kernel.rows}x{kernel.width}")
def test_the_ring_fits_shared_memory_and_holds_enough_to_look_ahead(kernel):
    assert kernel.stages >= 4
    assert kernel.stages * kernel.stage_bytes + 2048 <= 227 * 1024


# ---- The kernel ----


@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", [VectorWise(64), ShflBW(128)], ids=str)
@pytest.mark.parametrize("shape", [(64, 64, 8), (129, 200, 264), (300, 70, 136)], ids=str)
def test_a_layer_is_multiplied(rng, shape, pattern, dtype, width):
    m, k, n = shape
    packed = packed_of(rng, pattern, m, k, dtype=dtype)
    run(case_of(rng, packed, n, dtype=dtype, width=width, activation="gelu"))


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("n", [8, 7])
def test_other_activations(rng, activation, n):
    run(case_of(rng, packed_of(rng, VectorWise(64), 64, 64), n, activation=activation))


@pytest.mark.parametrize("pattern", [BlockWise(64, 16), BlockWise(128, 40)], ids=str)
def test_blocks_are_groups_whose_columns_come_in_runs(rng, pattern):
    run(case_of(rng, packed_of(rng, pattern, 260, 150), 72, activation="gelu"))


@pytest.mark.parametrize("n", [1, 7, 12, 98, 129, 132])
@pytest.mark.parametrize("pattern", [VectorWise(64), VectorWise(128)], ids=str)
def test_rows_of_x_that_are_not_aligned(rng, pattern, n):
    packed = packed_of(rng, pattern, 70, 90, dtype="bfloat16")
    run(case_of(rng, packed, n, dtype="bfloat16", activation="relu"))


@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("n", [40, 37])
def test_a_split_product_adds_up(rng, n, splits):
    run(case_of(rng, packed_of(rng, ShflBW(64), 130, 400, sparsity=0.2), n, activation="relu", splits=splits))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("v", [64, 128])
def test_whatever_the_order_of_threads_and_copies(rng, v, seed):
    """More stages than the ring holds, so that every slot is used again."""
    run(case_of(rng, packed_of(rng, VectorWise(v), v, 900, sparsity=0), 8, activation="gelu", width=256), seed)


@pytest.mark.parametrize("v", [64, 128])
def test_one_block_computes_many_tiles_one_after_the_other(rng, v):
    """Tiles of unequal work, with none at all among them, walk the ring on from where the last one stopped."""
    mask = np.repeat(np.arange(520) < np.array([[520], [0], [1], [130], [64]]), v, axis=0)
    packed = pack(drawn(rng, mask.shape, "float16"), mask, VectorWise(v))
    run(case_of(rng, packed, 264, activation="relu", blocks=2), seed=3)


def test_without_bias(rng):
    run(case_of(rng, packed_of(rng, VectorWise(64), 64, 100), 64, bias=False, width=256))


def test_a_weight_without_kept_columns_leaves_bias_and_activation(rng):
    packed = pack(np.ones((100, 40), np.float32), np.zeros((100, 40), bool), VectorWise(64))
    run(case_of(rng, packed, 16, activation="gelu"))


def test_infinite_activations_of_dropped_columns_are_not_read():
    """Places without a weight take zeros, not some row of x times a zero weight, which would be NaN here."""
    mask = np.zeros((64, 40), bool)
    mask[:, [3, 17]] = True
    program = vector_sm90.build_program(
        pack(np.ones((64, 40), np.float32), mask, VectorWise(64)), "float16", "sm_90a", 8
    )
    x = np.full((40, 8), np.inf, np.float16)
    x[[3, 17]] = 1
    out = np.empty((64, 8), np.float16)
    emulator.run(program.launches(8, None), x, out, seed=1)
    np.testing.assert_array_equal(out, 2)


def test_no_product_is_dropped_or_repeated(rng):
    """Small whole numbers, whose sums float16 holds: any error is a whole unit."""
    weight = rng.integers(1, 4, (128, 150)).astype(np.float32)
    x = rng.integers(-2, 3, (150, 24)).astype(np.float16)
    program = vector_sm90.build_program(pack(weight, None, VectorWise(128)), "float16", "sm_90a", 24)
    out = np.empty((128, 24), np.float16)
    emulator.run(program.launches(24, None), x, out, seed=2)
    np.testing.assert_array_equal(out, weight @ x.astype(np.float32))
