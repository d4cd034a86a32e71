"""Products of float32 by the matrix unit: thirds, tiles, and whole linear layers, emulated and by the unit itself."""

from dataclasses import replace

import numba
import numpy as np
import pytest
from numba import njit

from sparse_kernels import oracle
from sparse_kernels.cpu.codegen import tile_registers
from sparse_kernels.cpu.codegen.bf16_split import TOO_LARGE, has_thirds, split_thirds
from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.kernels import transpose_tiles
from sparse_kernels.cpu.matrix_unit import third_linear
from sparse_kernels.cpu.plans import linear
from sparse_kernels.formats import pack, unpack
from sparse_kernels.patterns import BlockWise, Dense, ShflBW, Unstructured, VectorWise
from sparse_kernels.plan_protocol import BLOCKED_LAYOUTS, LAYOUTS
from sparse_kernels.planner import prepare

by_the_unit = pytest.mark.skipif(not find_cpu_target().matrix, reason="this processor has no matrix unit")
UNITS = [pytest.param(True, id="emulated"), pytest.param(False, id="amx", marks=by_the_unit)]
# What the emulated unit runs, since each takes seconds to compile; the unit itself runs all.
EMULATED = {("token_major", 2), ("feature_major", 1)}


@pytest.fixture(autouse=True)
def all_threads():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


def packed_of(pattern, weight, sparsity=0.7):
    kept = 0 if isinstance(pattern, Dense) else sparsity
    return pack(weight, pattern.mask(weight.astype(float) ** 2, kept), pattern)


def plan_of(packed, layout, emulated=False):
    def refused():
        raise AssertionError("everything has thirds here")

    panels = third_linear.build_linear_panels(packed)
    return third_linear.MatrixPlan(packed.shape, layout, panels, packed.pattern.format, refused, emulated)


def run(plan, x, bias=None, activation=None):
    """y (m, n) of x (k, n) in the plan's layout."""
    n = x.shape[1]
    rows = np.ascontiguousarray(x.T)
    if plan.layout == "feature_major":
        return plan(x, bias, activation)
    if plan.layout == "token_major":
        return plan(rows, bias, activation).T
    if plan.layout == "into_blocks":
        return transpose_tiles.unpack_tiles(plan(rows, bias, activation), n).T
    if plan.layout == "token_blocked":
        return transpose_tiles.unpack_tiles(plan(transpose_tiles.pack_tiles(rows), bias, activation), n).T
    return plan(transpose_tiles.pack_tiles(rows), bias, activation, np.empty((n, plan.shape[0]), np.float32)).T


def bits(value):
    return np.array([value], np.uint32).view(np.float32)


def widened(halves):
    return (halves.astype(np.uint32) << 16).view(np.float32)


# ------------------------------------------------------------------------------------------------ thirds


def test_thirds_add_up_exactly(rng):
    values = rng.standard_normal(10_000).astype(np.float32) * np.float32(2.0) ** rng.integers(-90, 120, 10_000)
    values = np.concatenate([values, [0.0, -0.0, 1.0, np.nextafter(np.float32(1), 2), 3.3e38]]).astype(np.float32)
    assert has_thirds(values)
    high, middle, low = widened(split_thirds(values)).astype(float)
    np.testing.assert_array_equal(high + middle + low, values.astype(float))
    assert (np.abs(middle) <= np.abs(values.astype(float)) * 2.0**-8).all()
    assert (np.abs(low) <= np.abs(values.astype(float)) * 2.0**-16).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, bits(TOO_LARGE)[0], -bits(TOO_LARGE)[0]], ids=str)
def test_what_has_no_thirds_is_told(value):
    assert not has_thirds(np.array([1.0, value], np.float32))
    assert has_thirds(bits(TOO_LARGE - 1))


# ------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize("emulated", UNITS)
@pytest.mark.parametrize("layout", (*LAYOUTS, *BLOCKED_LAYOUTS))
@pytest.mark.parametrize("pattern", [ShflBW(32), VectorWise(16), VectorWise(64), BlockWise(16, 4), Dense()], ids=str)
def test_nothing_is_dropped_repeated_or_rounded(rng, pattern, layout, emulated):
    if (
        emulated
        and (layout, third_linear.count_row_tiles(packed_of(pattern, np.ones((64, 64), np.float32)))) not in EMULATED
    ):
        pytest.skip("the emulated unit runs less: each kernel takes seconds to compile")
    for m, k, n in ((64, 48, 150), (48, 131, 70), (61, 17, 33)):
        weight, x = oracle.build_exact_operands(rng, m, k, n)
        packed = packed_of(pattern, weight)
        if not third_linear.accepts_weight(packed):
            continue
        plan = plan_of(packed, layout, emulated)
        expected = unpack(packed).astype(float) @ x
        for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
            numba.set_num_threads(threads)
            for tokens in (0, 1, 16, 17, 33, n):
                found = run(plan, x[:, :tokens].copy())
                np.testing.assert_array_equal(found, expected[:, :tokens])


@pytest.mark.parametrize("emulated", UNITS)
@pytest.mark.parametrize("layout", (*LAYOUTS, *BLOCKED_LAYOUTS))
@pytest.mark.parametrize("pattern", [ShflBW(32), VectorWise(16)], ids=str)
def test_bias_and_activation_are_those_of_the_oracle(rng, pattern, layout, emulated):
    packed = packed_of(pattern, rng.standard_normal((96, 130)).astype(np.float32))
    if emulated and (layout, third_linear.count_row_tiles(packed)) not in EMULATED:
        pytest.skip("the emulated unit runs less: each kernel takes seconds to compile")
    x = rng.standard_normal((130, 77)).astype(np.float32)
    bias = rng.standard_normal(96).astype(np.float32)
    for b in (None, bias):
        for activation in (None, "relu", "gelu"):
            found = run(plan_of(packed, layout, emulated), x, b, activation)
            oracle.check(found, packed, x, bias=b, activation=activation)


@pytest.mark.parametrize("emulated", UNITS)
def test_groups_without_columns_give_the_bias(rng, emulated):
    weight = rng.standard_normal((96, 40)).astype(np.float32)
    weight[32:64] = 0
    packed = pack(weight, weight != 0, VectorWise(32))
    x, bias = rng.standard_normal((40, 33)).astype(np.float32), rng.standard_normal(96).astype(np.float32)
    found = run(plan_of(packed, "token_major", emulated), x, bias)
    oracle.check(found, packed, x, bias=bias)
    np.testing.assert_array_equal(found[32:64], np.repeat(bias[32:64, None], 33, axis=1))


@pytest.mark.parametrize("emulated", UNITS)
def test_a_product_is_as_exact_as_one_of_float32(rng, emulated):
    weight = np.zeros((32, 64), np.float32)
    weight[:, 3] = rng.uniform(1, 2, 32)  # nothing is added up
    packed = pack(weight, weight != 0, VectorWise(32))
    x = rng.uniform(1, 2, (64, 40)).astype(np.float32)
    found = run(plan_of(packed, "token_major", emulated), x).astype(float)
    expected = unpack(packed).astype(float) @ x.astype(float)
    # The largest of six products is rounded twice, with another one and with the sum of the rest; two are left out.
    assert np.abs(found / expected - 1).max() <= 4 * oracle.UNIT_ROUNDOFF


@pytest.mark.parametrize("columns, narrow", [(1, True), (17, False)], ids=["narrow step", "whole step"])
@pytest.mark.parametrize("third", range(3))
def test_a_third_of_the_weights_that_is_lost_is_caught(third, columns, narrow):
    value = np.float32(1 + 2.0**-9 + 2.0**-17)  # its low third is as large as they come, and has one sign everywhere
    assert (widened(split_thirds(np.array([value]))).ravel() == [1, 2.0**-9 + 2.0**-16, -(2.0**-17)]).all()
    weight, x = np.zeros((32, 64), np.float32), np.full((64, 40), value)
    weight[:, :columns] = value
    packed = pack(weight, weight != 0, VectorWise(32))
    plan = plan_of(packed, "token_major", emulated=not find_cpu_target().matrix)
    oracle.check(run(plan, x), packed, x)
    tiles = plan.panels.values.reshape(3, 2, 16, 16, 2)  # of pairs of thirds, or of columns; bits, so 0 is 0
    if narrow and third == 2:  # a pair of high and low
        tiles[2, ..., 1] = 0
    else:
        tiles[third] = 0
    with pytest.raises(oracle.WrongResult):
        oracle.check(run(plan, x), packed, x)


def test_rows_in_wrong_places_are_caught(rng):
    packed = packed_of(ShflBW(32), rng.standard_normal((64, 48)).astype(np.float32))
    x = rng.standard_normal((48, 40)).astype(np.float32)
    plan = plan_of(packed, "token_major", emulated=not find_cpu_target().matrix)
    plan = replace(plan, panels=replace(plan.panels, positions=np.roll(plan.panels.positions, 1)))
    with pytest.raises(oracle.WrongResult):
        oracle.check(run(plan, x), packed, x)


def test_blocks_of_tokens_give_the_same_bits_as_one(rng, monkeypatch):
    packed = packed_of(VectorWise(32), rng.standard_normal((96, 100)).astype(np.float32))
    x = rng.standard_normal((100, 300)).astype(np.float32)
    whole = run(plan_of(packed, "token_major", emulated=not find_cpu_target().matrix), x)
    for constant in ("CACHED_BYTES", "SECOND_LEVEL_BYTES"):  # one tile at a time, then two
        monkeypatch.setattr(third_linear, constant, 1)
        np.testing.assert_array_equal(
            run(plan_of(packed, "token_major", emulated=not find_cpu_target().matrix), x), whole
        )


@pytest.mark.parametrize("n, threads, tiles", [(33, 1, 2), (65, 2, 2), (80, 2, 2), (64, 2, 1), (1, 1, 1)])
def test_a_thread_has_room_for_all_of_its_tokens(n, threads, tiles):
    packed = packed_of(VectorWise(32), np.ones((32, 32), np.float32))
    assert third_linear.plan_scratch(third_linear.build_linear_panels(packed), 32, n, threads).tiles == tiles


def test_only_the_result_is_written(rng):
    packed = packed_of(ShflBW(32), rng.standard_normal((50, 40)).astype(np.float32))
    plan = plan_of(packed, "token_major", emulated=not find_cpu_target().matrix)
    x = rng.standard_normal((39, 40)).astype(np.float32)
    room = np.full((39 + 2) * 50, 7, np.float32)
    out = room[50:-50].reshape(39, 50)
    oracle.check(plan(x, out=out).T, packed, x.T)
    assert (room[:50] == 7).all() and (room[-50:] == 7).all()


# ------------------------------------------------------------------------------------------------ when it is taken


@by_the_unit
@pytest.mark.parametrize("layout", (*LAYOUTS, *BLOCKED_LAYOUTS))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.float32(3.4e38)], ids=str)
def test_what_has_no_thirds_passes_as_by_vectors(rng, value, layout):
    packed = packed_of(ShflBW(32), rng.standard_normal((96, 70)).astype(np.float32))
    x = rng.standard_normal((70, 130)).astype(np.float32)
    plan = prepare(packed, "numba", layout, 130)
    vectors = linear.build_plan(
        linear.describe_layer(packed, layout, 130),
        linear.choose_vector_kernel(linear.describe_layer(packed, layout, 130)),
    )
    assert ".amx" in plan.kernel
    for row, token in ((0, 0), (69, 129), (33, 64)):
        given = x.copy()
        given[row, token] = value
        found, expected = run(plan, given), run(vectors, given)
        if np.isfinite(expected).all():  # no row keeps that column
            oracle.check(found, packed, x)
        else:
            np.testing.assert_array_equal(found, expected)


@by_the_unit
@pytest.mark.parametrize(
    "weight, value, other",
    [(1.2345e30, 1e20, 0.0), (1.004, 3.3891e38, 0.0), (1.004, 3.3891e38, -3.3891e38), (-1.2345e30, 1e20, 0.0)],
    ids=["infinite", "thirds overflow", "sums overflow", "below"],
)
def test_products_that_overflow_pass_as_by_vectors(weight, value, other):
    kept, x = np.zeros((32, 64), np.float32), np.zeros((64, 40), np.float32)
    kept[:, :2], x[0], x[1] = weight, value, other
    packed = pack(kept, kept != 0, VectorWise(32))
    numba.set_num_threads(1)
    plan = linear.build_plan(
        linear.describe_layer(packed, "token_major", 40),
        linear.choose_matrix_kernel(linear.describe_layer(packed, "token_major", 40)),
    )
    vectors = linear.build_plan(
        linear.describe_layer(packed, "token_major", 40),
        linear.choose_vector_kernel(linear.describe_layer(packed, "token_major", 40)),
    )
    for activation in (None, "relu"):
        np.testing.assert_array_equal(run(plan, x, None, activation), run(vectors, x, None, activation))


def test_tokens_that_fill_up_a_tile_are_zero_for_the_next_layer(rng):
    emulated = not find_cpu_target().matrix
    packed = packed_of(ShflBW(32), rng.standard_normal((64, 64)).astype(np.float32))
    x = rng.standard_normal((70, 64)).astype(np.float32)
    between = np.full((2, 64, 64), np.nan, np.float32)
    plan_of(packed, "into_blocks", emulated)(x, out=between)
    assert (between[1, :, 70 - 64 :] == 0).all()
    plan_of(packed, "token_blocked", emulated)(between)  # whose plan by vectors refuses


@by_the_unit
def test_it_is_taken_where_rows_fill_tiles_and_threads_have_tokens():
    def kernel(pattern, n, threads=1, weight=1.0, precision="float32", layout="token_major", sparsity=0.7, k=64):
        numba.set_num_threads(threads)
        packed = packed_of(pattern, np.ones((96, k), np.float32), sparsity)
        packed = replace(packed, values=packed.values * np.float32(weight))
        return prepare(packed, "numba", layout, n, precision=precision).kernel

    assert kernel(ShflBW(32), 128) == "numba.shflbw.amx32x32"
    assert kernel(VectorWise(16), 32) == "numba.vector.amx16x32"
    assert kernel(Dense(), 64) == "numba.dense.amx32x32"
    assert kernel(ShflBW(32), 1, layout="token_blocked") == "numba.shflbw.amx32x32"
    assert kernel(ShflBW(32), 128, sparsity=0.9) == "numba.shflbw.amx32x32"
    assert ".amx" not in kernel(VectorWise(32), 128, sparsity=0.9)
    assert ".amx" not in kernel(ShflBW(32), 128, k=40)
    assert kernel(ShflBW(32), 512, k=40) == "numba.shflbw.amx32x32"
    assert ".amx" not in kernel(ShflBW(32), 31)
    assert ".amx" not in kernel(VectorWise(8), 128)
    assert ".amx" not in kernel(Unstructured(), 128)
    assert ".amx" not in kernel(ShflBW(32), 128, weight=np.inf)
    assert ".amx" not in kernel(ShflBW(32), 128, precision="bfloat16-weights")
    if numba.config.NUMBA_NUM_THREADS > 1:
        assert ".amx" not in kernel(ShflBW(32), 48, threads=2)


@pytest.mark.parametrize(
    "pattern, m, k, taken",
    [
        (VectorWise(32), 33, 16, True),
        (VectorWise(48), 48, 16, True),
        (VectorWise(24), 48, 16, False),
        (VectorWise(8), 48, 16, False),
        (Dense(), 52, 16, True),
        (Dense(), 52, 15, False),
        (VectorWise(16), 15, 16, False),
    ],
    ids=str,
)
def test_weights_that_are_small_or_would_fill_tiles_with_zeros_are_not_taken(pattern, m, k, taken):
    assert third_linear.accepts_weight(packed_of(pattern, np.ones((m, k), np.float32))) is taken


@by_the_unit
def test_tiles_are_left_configured_as_they_were():
    @njit
    def nested(saved):
        tile_registers.configure_tiles((0,), saved.ctypes.data)
        tile_registers.configure_tiles((0,), saved.ctypes.data + 64)
        tile_registers.restore_tiles((0,), saved.ctypes.data + 64)
        tile_registers.configure_tiles((0,), saved.ctypes.data + 128)
        tile_registers.restore_tiles((0,), saved.ctypes.data + 128)
        tile_registers.restore_tiles((0,), saved.ctypes.data)
        tile_registers.configure_tiles((0,), saved.ctypes.data + 192)
        tile_registers.restore_tiles((0,), saved.ctypes.data + 192)

    saved = np.zeros((4, 64), np.uint8)
    nested(saved)
    assert saved[:, 0].tolist() == [0, 1, 1, 0]
    numba.set_num_threads(1)
    plan_of(packed_of(ShflBW(32), np.ones((64, 64), np.float32)), "token_major")(np.ones((40, 64), np.float32))
    nested(saved)
    assert saved[:, 0].tolist() == [0, 1, 1, 0]
