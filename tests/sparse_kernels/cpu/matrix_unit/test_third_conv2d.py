"""Convolutions by the matrix unit, emulated and by the unit itself."""

from collections import deque
from dataclasses import replace

import numba
import numpy as np
import pytest
import torch
from convolution_cases import by_torch, framed, operands, view
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_kernels import oracle
from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.matrix_unit import third_conv2d, third_linear
from sparse_kernels.cpu.plans import conv2d
from sparse_kernels.cpu.runtime import scratch_buffers
from sparse_kernels.formats import pack, unpack
from sparse_kernels.nn import SparseConv2d
from sparse_kernels.patterns import BlockWise, Dense, ShflBW, Unstructured, VectorWise
from sparse_kernels.planner import prepare_conv2d
from sparse_kernels.shapes import Conv2dShape

by_the_unit = pytest.mark.skipif(not find_cpu_target().matrix, reason="this processor has no matrix unit")
UNITS = [pytest.param(True, id="emulated"), pytest.param(False, id="amx", marks=by_the_unit)]
HERE = not find_cpu_target().matrix  # emulated where there is no unit

PATTERNS = [ShflBW(32), VectorWise(16), BlockWise(16, 4), Dense()]
SHAPES = [
    Conv2dShape(3, 4, 14, 14, 40, 3, 3, padding=(1, 1)),  # vectors run over the ends of rows
    Conv2dShape(2, 3, 6, 57, 48, 3, 3, padding=(1, 1)),
    Conv2dShape(2, 4, 5, 64, 32, 3, 3, padding=(1, 1)),  # vectors a row
    Conv2dShape(3, 7, 9, 9, 33, 1, 1),  # in place, the last vector overlaps
    Conv2dShape(5, 7, 5, 5, 33, 1, 1),  # in place, but smaller than a vector
    Conv2dShape(2, 5, 16, 16, 32, 1, 1, (2, 2)),
    Conv2dShape(1, 3, 33, 31, 39, 7, 7, (2, 2), (3, 3)),
    Conv2dShape(2, 3, 20, 21, 32, 3, 5, (2, 3), (2, 1), (3, 2)),
    Conv2dShape(1, 2, 3, 3, 32, 7, 7, padding=(3, 3)),  # taps reach further than a channel is large
    Conv2dShape(1, 1, 1, 1, 32, 1, 1),
]


@pytest.fixture(autouse=True)
def all_threads():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@pytest.fixture(autouse=True)
def room(monkeypatch):
    """What calls borrow holds NaN, which would pass for what is not finite and be computed again by vectors."""
    borrowed = [np.full(2**20, np.nan, np.float32) for _ in range(2)]  # for split x, and for results to be collected
    monkeypatch.setattr(scratch_buffers, "_free", deque(map(scratch_buffers.ScratchBuffer, borrowed)))
    yield
    assert all(np.isnan(each[-1024:]).all() for each in borrowed)  # nothing needs so much, or writes behind its own


@pytest.fixture(params=[None, 1], ids=["large blocks", "small blocks"])
def blocks(request, monkeypatch):
    """As the cache has it, and one vector at a time."""
    if request.param is not None:
        monkeypatch.setattr(third_conv2d, "CACHED_BYTES", request.param)


def by_the_unit_alone(packed, shape, emulated=HERE):
    """The plan by the unit, which must not need another one."""

    def refused():
        raise AssertionError("everything has thirds here")

    return replace(conv2d.build_matrix_plan(packed, shape, "nchw", emulated), by_vectors=refused)


def each_number_of_threads():
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        yield threads


@pytest.mark.parametrize("emulated", UNITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_convolution_is_that_of_torch(rng, blocks, shape, pattern, emulated):
    packed, x = operands(rng, shape, pattern)
    if not conv2d.accepts_weight(packed):
        pytest.skip("this many rows do not fill tiles")
    expected = by_torch(packed, shape, x)
    plan = by_the_unit_alone(packed, shape, emulated)
    for _ in each_number_of_threads():
        np.testing.assert_array_equal(plan(x), expected)
        np.testing.assert_array_equal(plan(-x), -expected)  # what the first call left in its room must not show
        other = np.concatenate([x[::-1], x], axis=0)
        np.testing.assert_array_equal(plan(other), np.concatenate([expected[::-1], expected]))
        assert plan(x[:0]).shape == (0, *expected.shape[1:])


@pytest.mark.parametrize("emulated", UNITS)
@pytest.mark.parametrize("margins", [(0, 0), (1, 1), (4, 4), (None, 2), (2, None), (2, 3)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_from_frames_to_frames(rng, blocks, shape, margins, emulated):
    packed, images = operands(rng, shape, VectorWise(16))
    bias = np.arange(shape.c_out, dtype=np.float32)
    expected = by_torch(packed, shape, images, bias)
    plan = by_the_unit_alone(packed, shape, emulated)
    x_places, y_places = plan.x_places(shape.batch, margins[0]), plan.y_places(shape.batch, margins[1])
    x, y = framed(images, x_places), framed(0, y_places)
    for _ in each_number_of_threads():
        plan.run_framed(x.array, x_places, bias, "relu", y.array, y_places)
        np.testing.assert_array_equal(view(y.array, y_places), np.maximum(expected, 0))
        if plan.can_add(x_places, y_places):
            added = framed(rng.integers(-9, 9, expected.shape), y_places)
            plan.run_framed(x.array, x_places, bias, None, y.array, y_places, added.array)
            np.testing.assert_array_equal(view(y.array, y_places), expected + view(added.array, y_places))
    view(y.array, y_places)[...] = 0
    if y_places.margin is not None:
        assert not y.array.any()  # the frame is as it was


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 4),
    channels=st.tuples(st.integers(1, 5), st.integers(25, 64)),
    size=st.tuples(st.integers(1, 20), st.integers(1, 70)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pattern=st.sampled_from([VectorWise(16), ShflBW(32)]),
    cached=st.sampled_from([1, 3_000, 30_000, 1_000_000]),
)
def test_any_shape(batch, channels, size, kernel, stride, padding, dilation, pattern, cached):
    sides = zip(size, kernel, padding, dilation, strict=True)
    if any(length + 2 * pad < apart * (taps - 1) + 1 for length, taps, pad, apart in sides):
        return
    shape = Conv2dShape(batch, channels[0], *size, channels[1], *kernel, stride, padding, dilation)
    packed, x = operands(np.random.default_rng([batch, *size, *kernel]), shape, pattern)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(third_conv2d, "CACHED_BYTES", cached)
        y = by_the_unit_alone(packed, shape)(x)
    np.testing.assert_array_equal(y, by_torch(packed, shape, x))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[3], SHAPES[7]], ids=str)
@pytest.mark.parametrize("pattern", [ShflBW(32), VectorWise(16)], ids=str)
def test_bias_and_activation_are_those_of_the_oracle(rng, pattern, shape, activation):
    weight = rng.standard_normal((shape.m, shape.k)).astype(np.float32)
    packed = pack(weight, pattern.mask(weight.astype(float) ** 2, 0.5), pattern)
    x = rng.standard_normal((shape.batch, shape.c_in, shape.h, shape.w)).astype(np.float32)
    bias = rng.standard_normal(shape.c_out).astype(np.float32)
    y = by_the_unit_alone(packed, shape)(x, bias, activation)
    oracle.check_conv2d(y, packed, shape, x, bias=bias, activation=activation)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_vector_reads_or_writes_outside_of_its_array(blocks, shape):
    """Kernels go by address, so nothing else would tell."""
    packed = pack(np.ones((shape.m, shape.k), np.float32), np.ones((shape.m, shape.k), bool), VectorWise(16))
    plan = conv2d.build_matrix_plan(packed, shape, "nchw", HERE)
    for x_margin in (None, 0, 1, 4):
        for y_margin in (None, 0, 1, 4):
            x, y = plan.x_places(shape.batch, x_margin), plan.y_places(shape.batch, y_margin)
            placed = plan._build_placement(shape, x, y)
            at, cut = placed.grid, placed.blocks
            # Of each block's x: nothing before the array, and each run of 32 begins inside of it.
            assert (at.x_starts + cut.before).min() >= 0
            last = at.x_starts.max() + cut.before + (cut.planes - 1) * cut.plane_size
            assert last < (x.size if placed.phase_layout is None else placed.phase_layout.size)
            # Of split x: what a tile reads lies in its plane.
            starts = at.x_starts[: cut.per_image]
            longest = max(int(starts[i : i + cut.size].max()) - int(starts[i]) for i in range(starts.size))
            assert cut.offsets.min() >= 0 and (cut.offsets % cut.plane).max() <= cut.reach
            assert longest + third_conv2d.LANES + cut.reach <= cut.segment
            assert cut.images * cut.segment <= cut.plane
            assert cut.images == 1 or cut.size == cut.per_image
            # Of y: halves of vectors, where any of their positions is kept.
            rows = np.arange(shape.c_out) * at.y_stride
            size = shape.c_out * at.y_stride if at.flat is not None else y.size
            for half in range(2):
                kept = slice(None) if at.keep is None else (at.keep >> 16 * half & 0xFFFF) != 0
                starts = at.y_starts[kept] + 16 * half
                if starts.size:
                    assert starts.min() >= 0 and starts.max() + rows.max() + 16 <= size


def test_what_a_vector_writes_beyond_a_row_is_caught(rng):
    """A known-wrong kernel: it keeps all lanes of its vectors."""
    shape = Conv2dShape(2, 3, 6, 57, 48, 3, 3, padding=(1, 1))
    packed, images = operands(rng, shape, VectorWise(16))
    plan = conv2d.build_matrix_plan(packed, shape, "nchw", HERE)
    x_places, y_places = plan.x_places(2, 2), plan.y_places(2, 2)
    x, y = framed(images, x_places), framed(0, y_places)
    right = plan._find_placement(x_places, y_places)
    plan._placements[2, 2, 2] = replace(right, grid=replace(right.grid, keep=np.full_like(right.grid.keep, -1)))
    plan.run_framed(x.array, x_places, np.ones(48, np.float32), None, y.array, y_places)
    view(y.array, y_places)[...] = 0
    assert y.array.any()
    y.array[:] = 0  # others will get it


def test_a_tap_at_the_wrong_place_is_caught(rng):
    shape = SHAPES[0]
    packed, x = operands(rng, shape, VectorWise(16))
    plan = conv2d.build_matrix_plan(packed, shape, "nchw", HERE)
    plan.panels.columns[2:4] += 1  # in a narrow step both copies of one column
    with pytest.raises(oracle.WrongResult):
        oracle.check_conv2d(plan(x), packed, shape, x)


def test_a_position_that_takes_its_neighbours_x_is_caught(rng):
    shape = SHAPES[3]
    packed, x = operands(rng, shape, VectorWise(16))
    plan = conv2d.build_matrix_plan(packed, shape, "nchw", HERE)
    x_places, y_places = plan.x_places(3), plan.y_places(3)
    right = plan._find_placement(x_places, y_places)
    starts = right.grid.x_starts.copy()
    starts[1] = starts[0]
    plan._placements[3, None, None] = replace(right, grid=replace(right.grid, x_starts=starts))
    with pytest.raises(oracle.WrongResult):
        oracle.check_conv2d(plan(x), packed, shape, x)


# ------------------------------------------------------------------------------------------------ when it is taken


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.float32(3.4e38)], ids=str)
@pytest.mark.parametrize("step", [1, 10**9], ids=["image by image", "all images"])
@pytest.mark.parametrize("margins", [(None, None), (1, 1), (None, 1)], ids=str)
def test_what_has_no_thirds_passes_as_by_vectors(rng, monkeypatch, value, margins, step):
    monkeypatch.setattr(conv2d, "IMAGES_CACHED", step)
    shape = Conv2dShape(4, 4, 14, 14, 40, 3, 3, padding=(1, 1))
    packed, images = operands(rng, shape, ShflBW(32), sparsity=0.0)
    images[2, 1, 7, 13] = value
    found = []
    for plan in (
        conv2d.build_matrix_plan(packed, shape, "nchw", HERE),
        conv2d.build_vector_plan(packed, shape, "nchw"),
    ):
        x_places, y_places = plan.x_places(4, margins[0]), plan.y_places(4, margins[1])
        x, y = framed(images, x_places), framed(0, y_places)
        added = framed(np.ones(y_places.shape), y_places) if plan.can_add(x_places, y_places) else None
        plan.run_framed(x.array, x_places, None, "relu", y.array, y_places, added and added.array)
        found.append(view(y.array, y_places).copy())
    np.testing.assert_array_equal(*found)
    assert not np.isfinite(found[0][2]).all()
    assert np.isfinite(found[0][:2]).all()


def test_finite_sums_that_overflow_are_as_by_vectors(rng):
    shape = Conv2dShape(2, 4, 14, 14, 40, 3, 3, padding=(1, 1))
    packed, images = operands(rng, shape, ShflBW(32), sparsity=0.0)
    images[:] = 3e38
    with np.errstate(over="ignore", invalid="ignore"):
        found = conv2d.build_matrix_plan(packed, shape, "nchw", HERE)(images)
    np.testing.assert_array_equal(found, conv2d.build_vector_plan(packed, shape, "nchw")(images))


def test_groups_without_columns_give_the_bias(rng):
    shape = Conv2dShape(2, 3, 9, 11, 96, 3, 3)
    weight, x = oracle.build_exact_operands(rng, shape.m, shape.k, 2 * 3 * 9 * 11)
    weight[32:64] = 0
    packed, bias = pack(weight, weight != 0, VectorWise(32)), np.arange(96, dtype=np.float32)
    images = x[0].reshape(2, 3, 9, 11).copy()
    found = by_the_unit_alone(packed, shape)(images, bias)
    np.testing.assert_array_equal(found, by_torch(packed, shape, images, bias))
    np.testing.assert_array_equal(found[:, 40], np.full((2, 7, 9), 40))


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[3]], ids=str)
def test_nothing_outside_out_is_written(rng, shape):
    packed, x = operands(rng, shape, ShflBW(32))
    expected = by_torch(packed, shape, x)
    guarded = np.full(3 * expected.size, np.float32(-7))
    out = guarded[expected.size : 2 * expected.size].reshape(expected.shape)
    assert by_the_unit_alone(packed, shape)(x, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert (guarded[: expected.size] == -7).all()
    assert (guarded[2 * expected.size :] == -7).all()


def test_what_adds_can_be_added_by_vectors_too(rng):
    """The plan that steps in for sums that are not finite gets the same `added`."""
    odd = Conv2dShape(1, 4, 4, 52, 32, 3, 3)  # long vectors fit its rows, short ones are better run over their ends
    adding = 0
    for shape in (*SHAPES, odd):
        packed, _ = operands(rng, shape, VectorWise(16))
        matrix_plan, vector_plan = (
            conv2d.build_matrix_plan(packed, shape, "nchw", HERE),
            conv2d.build_vector_plan(packed, shape, ""),
        )
        for x_margin in (None, 0, 1, 4):
            for y_margin in (None, 0, 1, 4):
                x, y = matrix_plan.x_places(shape.batch, x_margin), matrix_plan.y_places(shape.batch, y_margin)
                adding += matrix_plan.can_add(x, y)
                assert vector_plan.can_add(x, y) or not matrix_plan.can_add(x, y)
    assert adding


def test_it_pays_where_splitting_and_finishing_are_worth_it():
    numba.set_num_threads(1)
    shuffled = ShflBW(32)

    def pays(shape, pattern=shuffled, sparsity=0.75):
        ones = np.ones((shape.m, shape.k), np.float32)
        mask = pattern.mask(ones, 0 if isinstance(pattern, Dense) else sparsity)
        return conv2d.pays_by_matrix(pack(ones, mask, pattern), shape)

    deep = Conv2dShape(1, 64, 28, 28, 64, 3, 3, padding=(1, 1))
    assert pays(deep)
    assert pays(deep, Dense())
    assert not pays(deep, sparsity=0.95)  # too little is kept
    assert not pays(deep, VectorWise(16))  # half as many rows use what was gathered
    assert pays(replace(deep, c_in=256, c_out=256), VectorWise(16))
    assert not pays(replace(deep, h=7, w=7))  # few positions for all the weights
    assert pays(replace(deep, batch=4, h=7, w=7), sparsity=0.5)
    assert not pays(replace(deep, batch=0))
    assert not pays(Conv2dShape(1, 64, 28, 28, 64, 1, 1))
    # A 1x1 with stride 2 reads one of four phases, a 3x3 all of them, so each is worth less there.
    assert pays(Conv2dShape(4, 256, 28, 28, 512, 1, 1, (2, 2)))
    assert not pays(Conv2dShape(4, 64, 28, 28, 40, 3, 3, (2, 2), (1, 1)))
    # 3x3 positions fill a vector of 16 and half a long one.
    assert not pays(Conv2dShape(64, 512, 3, 3, 512, 3, 3, padding=(1, 1)))
    # Taps that reach as far as that make a block split far more than it has positions.
    assert not pays(Conv2dShape(1, 2048, 65, 65, 256, 3, 3, (1, 1), (36, 36), (36, 36)))
    if numba.config.NUMBA_NUM_THREADS > 1:
        numba.set_num_threads(2)
        assert not pays(Conv2dShape(1, 512, 5, 5, 512, 3, 3, padding=(1, 1)))  # a vector for two threads


@by_the_unit
def test_it_is_taken_where_it_pays_and_weights_have_thirds():
    shape = Conv2dShape(1, 64, 28, 28, 64, 3, 3, padding=(1, 1))
    numba.set_num_threads(1)

    def kernel(pattern, factor=1.0):
        ones = np.ones((shape.m, shape.k), np.float32)
        packed = pack(ones, pattern.mask(ones, 0 if isinstance(pattern, Dense) else 0.75), pattern)
        return prepare_conv2d(replace(packed, values=packed.values * np.float32(factor)), shape, "numba").kernel

    assert kernel(ShflBW(32)) == "numba.shflbw.conv2d.amx32x32"
    assert kernel(Dense()) == "numba.dense.conv2d.amx32x32"
    assert ".amx" not in kernel(VectorWise(8))
    assert ".amx" not in kernel(Unstructured())
    assert ".amx" not in kernel(ShflBW(32), 3.4e38)


@by_the_unit
def test_a_layer_asks_again_for_many_more_images():
    layer = SparseConv2d.from_dense(torch.nn.Conv2d(128, 128, 3, padding=1), Dense(), None)
    for batch, taken in ((1, False), (64, True), (1, False)):
        with torch.inference_mode():
            layer(torch.ones(batch, 128, 3, 7))
        assert (".amx" in layer.kernel) is taken


def test_a_copy_has_weights_of_its_own(rng):
    packed, x = operands(rng, SHAPES[0], ShflBW(32))
    plan = conv2d.build_matrix_plan(packed, SHAPES[0], "nchw", HERE)
    expected = plan(x)
    copy = plan.copy()
    plan.panels.values[:] = 0
    np.testing.assert_array_equal(copy(x), expected)
    assert copy.kernel == plan.kernel


def test_nbytes_are_those_of_three_thirds(rng):
    packed, _ = operands(rng, Conv2dShape(1, 64, 8, 8, 64, 3, 3), ShflBW(32), 0.0)
    values = conv2d.build_matrix_plan(packed, Conv2dShape(1, 64, 8, 8, 64, 3, 3), "nchw", HERE).panels.values
    assert values.nbytes == 3 * 2 * unpack(packed).size
    assert third_linear.count_row_tiles(packed) == 2
