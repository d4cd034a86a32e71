import copy
import gc
import itertools
import pickle
import weakref
from dataclasses import replace

import numba
import numpy as np
import pytest
from convolution_cases import by_torch, framed, operands, view
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_kernels import oracle
from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.kernels import image_layout as images
from sparse_kernels.cpu.kernels import row_panels as rows
from sparse_kernels.cpu.kernels import unstructured_rows
from sparse_kernels.cpu.plans import conv2d
from sparse_kernels.formats import pack
from sparse_kernels.patterns import NM, BlockWise, Dense, ShflBW, Unstructured, VectorWise
from sparse_kernels.planner import prepare_conv2d
from sparse_kernels.shapes import Conv2dShape

PATTERNS = [Dense(), Unstructured(), NM(1, 2), BlockWise(4, 3), VectorWise(8), VectorWise(3), ShflBW(8)]
SHAPES = [
    Conv2dShape(2, 4, 7, 9, 5, 3, 3, padding=(1, 1)),
    Conv2dShape(1, 4, 16, 16, 8, 3, 3, padding=(1, 1)),  # a vector a row
    Conv2dShape(3, 4, 8, 8, 8, 3, 3, padding=(1, 1)),  # half a vector a row
    Conv2dShape(2, 4, 6, 57, 8, 3, 3, padding=(1, 1)),  # vectors run over the ends of rows
    Conv2dShape(2, 4, 14, 14, 16, 1, 1),  # in place
    Conv2dShape(3, 4, 3, 3, 16, 1, 1),  # in place, but smaller than a vector
    Conv2dShape(2, 4, 16, 16, 8, 1, 1, (2, 2)),
    Conv2dShape(1, 2, 33, 31, 7, 7, 7, (2, 2), (3, 3)),
    Conv2dShape(2, 2, 20, 21, 7, 3, 5, (2, 3), (2, 1), (3, 2)),
    Conv2dShape(1, 2, 5, 5, 3, 3, 3, padding=(4, 3)),
    Conv2dShape(2, 2, 6, 9, 3, 2, 2, (4, 3), (1, 2)),
    Conv2dShape(1, 2, 1, 17, 3, 1, 3, padding=(0, 1)),
    Conv2dShape(1, 2, 1, 1, 1, 1, 1),
]


@pytest.fixture(autouse=True)
def all_threads():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_convolution_is_that_of_torch(rng, shape, pattern):
    packed, x = operands(rng, shape, pattern)
    expected = by_torch(packed, shape, x)
    plan = prepare_conv2d(packed, shape, "numba")
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        # Twice: buffers are used again, and what the first call left in them must not show.
        np.testing.assert_array_equal(plan(x), expected)
        np.testing.assert_array_equal(plan(x), expected)
        other = np.concatenate([x[::-1], x], axis=0)
        np.testing.assert_array_equal(plan(other), np.concatenate([expected[::-1], expected]))
        assert plan(x[:0]).shape == (0, *expected.shape[1:])


def added_case(rng, shape, batch, margin):
    """(plan, x as torch has it, y in frames, what is added, the sum) for 1x1 that writes rows of frames directly."""
    packed, images = operands(rng, replace(shape, batch=batch), VectorWise(8))
    plan = prepare_conv2d(packed, shape, "numba")
    y = framed(0, plan.y_places(batch, margin))
    added = framed(rng.integers(-9, 9, y.places.shape), y.places)
    expected = by_torch(packed, shape, images) + view(added.array, added.places)
    return plan, images, y, added, expected


@pytest.mark.parametrize("step", [1, 10**9])
def test_what_is_added_comes_image_by_image(rng, monkeypatch, step):
    monkeypatch.setattr(conv2d, "IMAGES_CACHED", step)
    plan, images, y, added, expected = added_case(rng, Conv2dShape(1, 4, 32, 32, 8, 1, 1), 5, 1)
    x_places = plan.x_places(5)
    assert plan.can_add(x_places, y.places)
    plan.run_framed(images.reshape(-1), x_places, None, None, y.array, y.places, added.array)
    np.testing.assert_array_equal(view(y.array, y.places), expected)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_no_vector_reads_or_writes_outside_of_its_array(lanes):
    """Kernels go by address, so nothing else would tell."""
    target = replace(find_cpu_target(), lanes=lanes, halves=lanes == 16)
    for shape in SHAPES:
        for x_margin, y_margin in itertools.product((None, 0, 1, 4), repeat=2):
            packed = pack(np.ones((shape.m, shape.k), np.float32), np.ones((shape.m, shape.k), bool), VectorWise(8))
            plan = replace(prepare_conv2d(packed, shape, "numba"), target=target)
            x, y = plan.x_places(shape.batch, x_margin), plan.y_places(shape.batch, y_margin)
            placed = plan._build_placement(shape, x, y)
            at, where = placed.grid, placed.phase_layout
            first = at.x_starts[:, None] + placed.offsets
            assert first.min() >= 0
            assert first.max() + at.lanes <= (x.size if where is None else where.size)
            rows = np.arange(shape.c_out) * at.y_stride
            size = shape.c_out * at.y_stride if at.flat is not None else y.size
            assert (at.y_starts[:, None] + rows).min() >= 0
            assert (at.y_starts[:, None] + rows).max() + at.lanes <= size


@pytest.mark.parametrize("margins", [(1, 1), (4, 4), (None, 2), (2, None), (2, 3)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", [VectorWise(8), Unstructured()], ids=str)
def test_from_frames_to_frames(rng, pattern, shape, margins):
    packed, images = operands(rng, shape, pattern)
    bias = np.arange(shape.c_out, dtype=np.float32)
    expected = by_torch(packed, shape, images, bias)
    plan = prepare_conv2d(packed, shape, "numba")
    x_places, y_places = plan.x_places(shape.batch, margins[0]), plan.y_places(shape.batch, margins[1])
    x, y = framed(images, x_places), framed(np.zeros_like(expected), y_places)
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        plan.run_framed(x.array, x_places, bias, "relu", y.array, y_places)
        np.testing.assert_array_equal(view(y.array, y_places), np.maximum(expected, 0))
        if plan.can_add(x_places, y_places):
            added = framed(rng.integers(-9, 9, expected.shape), y_places)
            plan.run_framed(x.array, x_places, bias, None, y.array, y_places, added.array)
            np.testing.assert_array_equal(view(y.array, y_places), expected + view(added.array, y_places))
    view(y.array, y_places)[...] = 0
    if y_places.margin is not None:
        assert not y.array.any()  # the frame is as it was


def test_what_a_vector_writes_beyond_a_row_is_caught(rng):
    """A known-wrong kernel: it keeps all lanes of its vectors."""
    shape = SHAPES[3]
    packed, images = operands(rng, shape, VectorWise(8))
    plan = prepare_conv2d(packed, shape, "numba")
    x_places, y_places = plan.x_places(2, 1), plan.y_places(2, 1)
    x, y = framed(images, x_places), framed(0, y_places)
    assert plan.can_add(x_places, y_places)
    right = plan._find_placement(x_places, y_places)
    wrong = replace(right.grid, keep=np.full_like(right.grid.keep, -1))
    plan._placements[2, 1, 1] = replace(right, grid=wrong)
    plan.run_framed(x.array, x_places, np.ones(8, np.float32), None, y.array, y_places)
    np.testing.assert_array_equal(view(y.array, y_places), by_torch(packed, shape, images, np.ones(8)))
    view(y.array, y_places)[...] = 0
    assert y.array.any()
    y.array[:] = 0  # others will get it


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 10)),
    size=st.tuples(st.integers(1, 20), st.integers(1, 40)),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    pattern=st.sampled_from([Dense(), Unstructured(), VectorWise(8), ShflBW(4)]),
)
def test_any_shape(batch, channels, size, kernel, stride, padding, dilation, pattern):
    sides = zip(size, kernel, padding, dilation, strict=True)
    if any(length + 2 * pad < apart * (taps - 1) + 1 for length, taps, pad, apart in sides):
        return
    shape = Conv2dShape(batch, channels[0], *size, channels[1], *kernel, stride, padding, dilation)
    packed, x = operands(np.random.default_rng([batch, *size, *kernel]), shape, pattern)
    y = prepare_conv2d(packed, shape, "numba")(x)
    np.testing.assert_array_equal(y, by_torch(packed, shape, x))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[4], SHAPES[8]], ids=str)
@pytest.mark.parametrize("pattern", [VectorWise(4), Unstructured()], ids=str)
def test_bias_and_activation_are_those_of_the_oracle(rng, pattern, shape, activation):
    weight = rng.standard_normal((shape.m, shape.k)).astype(np.float32)
    packed = pack(weight, pattern.mask(weight.astype(float) ** 2, 0.5), pattern)
    x = rng.standard_normal((shape.batch, shape.c_in, shape.h, shape.w)).astype(np.float32)
    bias = rng.standard_normal(shape.c_out).astype(np.float32)
    y = prepare_conv2d(packed, shape, "numba")(x, bias, activation)
    oracle.check_conv2d(y, packed, shape, x, bias=bias, activation=activation)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3], SHAPES[4]], ids=str)
@pytest.mark.parametrize("pattern", [VectorWise(8), Unstructured()], ids=str)
def test_nan_stays_where_a_tap_reads_it(rng, pattern, shape):
    packed, x = operands(rng, shape, pattern, sparsity=0.0)
    x[0, 1, shape.h // 2, shape.w // 2] = np.nan
    plan = prepare_conv2d(packed, shape, "numba")
    np.testing.assert_array_equal(np.isnan(plan(x, activation="relu")), np.isnan(by_torch(packed, shape, x)))
    clean = np.ones_like(x)
    assert np.isfinite(plan(clean)).all()


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[4]], ids=str)
@pytest.mark.parametrize("pattern", [VectorWise(8), Unstructured()], ids=str)
def test_nothing_outside_out_is_written(rng, pattern, shape):
    packed, x = operands(rng, shape, pattern)
    expected = by_torch(packed, shape, x)
    guarded = np.full(3 * expected.size, np.float32(-7))
    out = guarded[expected.size : 2 * expected.size].reshape(expected.shape)
    assert prepare_conv2d(packed, shape, "numba")(x, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert (guarded[: expected.size] == -7).all()
    assert (guarded[2 * expected.size :] == -7).all()


@pytest.mark.parametrize(
    "shape",
    [
        Conv2dShape(2, 40, 14, 14, 45, 3, 3, padding=(1, 1)),  # vectors run over the ends of rows
        Conv2dShape(1, 40, 5, 20, 45, 3, 3, padding=(1, 1)),  # the last vector of a row overlaps
        Conv2dShape(2, 300, 5, 5, 45, 1, 1),  # in place, overlapping too
    ],
    ids=str,
)
@pytest.mark.parametrize("pattern", [Unstructured(), NM(2, 4)], ids=str)
def test_columns_in_several_stages(rng, monkeypatch, shape, pattern):
    monkeypatch.setattr(unstructured_rows, "CLOSE", 1000)
    packed, x = operands(rng, shape, pattern)
    plan = prepare_conv2d(packed, shape, "numba")
    assert len(plan.panels.table) > 1
    np.testing.assert_array_equal(plan(x), by_torch(packed, shape, x))
    np.testing.assert_array_equal(plan(x[:1]), by_torch(packed, shape, x[:1]))


def test_fetching_ahead_is_of_the_channels_that_are_read_and_changes_nothing(rng, monkeypatch):
    shape = Conv2dShape(3, 6, 20, 20, 8, 3, 3, padding=(1, 1))
    weight, x = oracle.build_exact_operands(rng, shape.m, shape.k, shape.batch * shape.c_in * shape.h * shape.w)
    x = x[0].reshape(shape.batch, shape.c_in, shape.h, shape.w).copy()
    mask = np.zeros((shape.m, shape.k), bool)
    mask[:, [4, 1, 1 + 2 * 6, 4 + 8 * 6]] = True  # taps of channels 1 and 4: columns are by tap, then channel
    packed = pack(weight, mask, VectorWise(8))
    monkeypatch.setattr(rows, "CACHED", 6 * find_cpu_target().lanes * 8)  # several blocks for each thread
    plan = conv2d.build_vector_plan(packed, shape, "nchw")
    usual = plan(x)
    monkeypatch.setattr(rows, "LARGE", 0)
    again = plan.copy()
    np.testing.assert_array_equal(again(x), usual)
    places = again.x_places(shape.batch), again.y_places(shape.batch)
    placed = again._find_placement(*places)
    last_tap = 2 * placed.phase_layout.pitch + 2
    assert placed.prefetched.tolist() == [channel * placed.phase_layout.plane + last_tap for channel in (1, 4)]


def test_many_images_go_a_few_at_a_time(rng, monkeypatch):
    monkeypatch.setattr(conv2d, "IMAGES_CACHED", 1)
    shape = Conv2dShape(5, 4, 9, 9, 8, 3, 3, padding=(1, 1))
    packed, x = operands(rng, shape, ShflBW(4))
    np.testing.assert_array_equal(prepare_conv2d(packed, shape, "numba")(x), by_torch(packed, shape, x))


def test_wrong_calls_are_refused(rng):
    shape = SHAPES[0]
    packed, x = operands(rng, shape, VectorWise(8))
    plan = prepare_conv2d(packed, shape, "numba")
    with pytest.raises(TypeError, match="float32"):
        plan(x.astype(np.float64))
    with pytest.raises(ValueError, match="x must be of shape"):
        plan(x[:, :, :-1])
    np.testing.assert_array_equal(plan(np.repeat(x, 2, axis=3)[..., ::2]), plan(x))


def test_a_copy_has_weights_of_its_own(rng):
    packed, x = operands(rng, SHAPES[0], VectorWise(8))
    plan = prepare_conv2d(packed, SHAPES[0], "numba")
    expected = plan(x)
    copy = plan.copy()
    plan.panels.values[:] = 0
    np.testing.assert_array_equal(copy(x), expected)
    assert copy.kernel == plan.kernel
    assert "conv2d" in plan.kernel


@pytest.mark.parametrize("pattern", [VectorWise(8), Unstructured()], ids=str)
def test_a_plan_that_was_called_goes_with_its_last_name_and_can_be_copied(rng, pattern):
    shape = Conv2dShape(2, 4, 9, 8, 8, 3, 3, (2, 2), (1, 1))
    packed, x = operands(rng, shape, pattern)
    plan = prepare_conv2d(packed, shape, "numba")
    expected = plan(x)
    for copied in (plan.copy(), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        np.testing.assert_array_equal(copied(x), expected)
        assert not np.shares_memory(copied.panels.arrays[0], plan.panels.arrays[0])
        (mine,), (its,) = ({room.address for _, room in one._pool._free} for one in (copied, plan))
        assert mine != its
    gone = weakref.ref(plan)
    gc.disable()
    try:
        del plan
        assert gone() is None  # a sweep makes thousands, and counts on their memory
    finally:
        gc.enable()


def test_a_tap_at_the_wrong_place_is_caught(rng):
    shape = SHAPES[1]
    packed, x = operands(rng, shape, VectorWise(8))
    plan = prepare_conv2d(packed, shape, "numba")
    plan.panels.columns[3] += 1
    with pytest.raises(oracle.WrongResult):
        oracle.check_conv2d(plan(x), packed, shape, x)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "shape",
    [
        Conv2dShape(3, 2, 9, 8, 3, 3, 3, (2, 2), (1, 1)),
        Conv2dShape(2, 2, 20, 33, 3, 5, 1, (3, 1), (2, 0), (2, 1)),
        Conv2dShape(2, 2, 5, 5, 3, 3, 3, (1, 1), (4, 3)),  # images end before their outputs do
        Conv2dShape(1, 2, 4, 4, 3, 1, 1, (2, 2), (0, 0)),
    ],
    ids=str,
)
def test_each_part_lays_out_the_rows_that_its_positions_read(shape, parts):
    at, where = conv2d.choose_positions(shape, find_cpu_target()), images.build_layout(shape, find_cpu_target().lanes)
    shares = at.x_starts.size * np.arange(parts + 1) // parts
    begins, ends = images.find_rows_read(shape, where, at.x_starts, at.lanes, shares)
    per_image = at.x_starts.size // shape.batch
    for part in range(parts):
        read = set()
        for v in range(shares[part], shares[part + 1]):
            b = v // per_image
            row, column = np.divmod(at.x_starts[v] - b * where.image + np.arange(at.lanes), where.pitch)
            for i in row[(row < shape.out_h) & (column < shape.out_w)]:
                taps = i * shape.stride[0] + np.arange(shape.kh) * shape.dilation[0] - shape.padding[0]
                read.update(b * shape.h + taps[(taps >= 0) & (taps < shape.h)])
        assert read <= set(range(begins[part], ends[part]))
    assert begins.min() >= 0 and ends.max() <= shape.batch * shape.h


def test_rows_share_their_zeros():
    shape = Conv2dShape(1, 1, 8, 8, 1, 3, 3, padding=(1, 1))
    where = images.build_layout(shape, 0)
    assert (where.pitch, where.image) == (9, 81)
    wide = images.build_layout(Conv2dShape(1, 1, 8, 8, 1, 1, 1, (2, 2)), 0)
    assert where.offsets.size == 9
    assert (wide.phases >= 0).sum() == 1  # a 1x1 kernel reads one phase of four
