"""Convolutions in bfloat16, two columns at a time: x is laid out for them, and rounded on the way."""

from dataclasses import replace

import numba
import numpy as np
import pytest
from bfloat16_rounding import nearest
from convolution_cases import by_torch, framed, operands, view

from sparse_kernels import oracle
from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.plans import conv2d
from sparse_kernels.formats import round_packed
from sparse_kernels.patterns import BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.planner import prepare_conv2d
from sparse_kernels.shapes import Conv2dShape

SHAPES = [
    Conv2dShape(2, 4, 7, 9, 5, 3, 3, padding=(1, 1)),
    Conv2dShape(1, 4, 16, 16, 8, 3, 3, padding=(1, 1)),  # a vector a row
    Conv2dShape(2, 4, 6, 57, 8, 3, 3, padding=(1, 1)),  # vectors run over the ends of rows
    Conv2dShape(2, 4, 14, 14, 16, 1, 1),  # would be read in place
    Conv2dShape(2, 4, 16, 16, 8, 1, 1, (2, 2)),
    Conv2dShape(1, 2, 33, 31, 7, 7, 7, (2, 2), (3, 3)),
    Conv2dShape(2, 2, 20, 21, 7, 3, 5, (3, 2), (2, 1), (3, 2)),
    Conv2dShape(1, 2, 5, 5, 3, 3, 3, padding=(4, 3)),
    Conv2dShape(1, 2, 1, 1, 2, 1, 1),
]
VECTORS = VectorWise(8)
PATTERNS = [Dense(), VECTORS, VectorWise(3), ShflBW(8), BlockWise(4, 3)]


@pytest.fixture(autouse=True)
def all_threads():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_it_is_torchs_of_the_nearest_bfloat16(
    rng: np.random.Generator, by: str, shape: Conv2dShape, pattern: Pattern
) -> None:
    packed, x = operands(rng, shape, pattern)
    x *= np.float32(257)  # more bits than bfloat16 keeps, and few enough for exact sums
    packed, expected = round_packed(packed), by_torch(round_packed(packed), shape, nearest(x))
    assert not np.array_equal(nearest(x), x)
    plan = conv2d.build_pair_plan(packed, shape, "nchw")
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        for _ in range(2):  # buffers are used again, and what the first call left in them must not show
            np.testing.assert_array_equal(plan(x), expected)
        other = np.concatenate([x[::-1], x], axis=0)
        np.testing.assert_array_equal(plan(other), np.concatenate([expected[::-1], expected]))


@pytest.mark.parametrize("margins", [(1, 1), (None, 2), (2, None), (2, 3)], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:6], ids=str)
def test_from_frames_to_frames(
    rng: np.random.Generator, by: str, shape: Conv2dShape, margins: tuple[int | None, int | None]
) -> None:
    packed, images = operands(rng, shape, VectorWise(8))
    images *= np.float32(257)
    packed, bias = round_packed(packed), 2**16 * np.arange(shape.c_out, dtype=np.float32)
    expected = by_torch(packed, shape, nearest(images), bias)
    plan = conv2d.build_pair_plan(packed, shape, "nchw")
    x_places, y_places = plan.x_places(shape.batch, margins[0]), plan.y_places(shape.batch, margins[1])
    x, y = framed(images, x_places), framed(np.zeros_like(expected), y_places)
    plan.run_framed(x.array, x_places, bias, "relu", y.array, y_places)
    np.testing.assert_array_equal(view(y.array, y_places), np.maximum(expected, 0))
    np.testing.assert_array_equal(view(x.array, x_places), images)  # what others read too is not rounded
    view(y.array, y_places)[...] = 0
    if y_places.margin is not None:
        assert not y.array.any()  # the frame is as it was


def test_where_a_lane_swaps_its_halves_that_is_caught(rng: np.random.Generator, by: str) -> None:
    packed, x = operands(rng, SHAPES[0], VectorWise(8))
    plan = conv2d.build_pair_plan(round_packed(packed), SHAPES[0], "nchw")
    oracle.check_conv2d(plan(x), round_packed(packed), SHAPES[0], nearest(x))
    values = plan.panels.values.view(np.uint16)
    values[:] = values.reshape(-1, 2)[:, ::-1].ravel()
    with pytest.raises(oracle.WrongResult):
        oracle.check_conv2d(plan(x), round_packed(packed), SHAPES[0], nearest(x))


def test_pairs_are_taken_where_they_pay_and_what_gains_nothing_is_refused(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv2d, "find_cpu_target", lambda: replace(find_cpu_target(), matrix=False, pairs=True))

    def kernel(shape: Conv2dShape, precision: str = "bfloat16", pattern: Pattern = VECTORS) -> str:
        packed, _ = operands(rng, shape, pattern)
        return prepare_conv2d(packed, shape, "numba", precision=precision).kernel.split(".")[3]

    assert kernel(SHAPES[0]).startswith("pairs") and kernel(SHAPES[4]).startswith("pairs")
    assert kernel(SHAPES[3]).startswith("rows")  # it would have to be laid out
    assert kernel(Conv2dShape(1, 4, 9, 9, 8, 3, 3, (1, 3))).startswith("rows")  # no vector reads every third
    assert kernel(SHAPES[0], "float32").startswith("rows")
    with pytest.raises(ValueError, match="bfloat16 is for rows that share columns"):
        kernel(SHAPES[0], pattern=Unstructured())
    with pytest.raises(ValueError, match="precision='bfloat16-weights' is for linear layers, not for convolutions"):
        kernel(SHAPES[0], "bfloat16-weights")
    with pytest.raises(ValueError, match="unknown precision 'int8'"):
        kernel(SHAPES[0], "int8")
    packed, _ = operands(rng, SHAPES[0], VectorWise(8))
    with pytest.raises(ValueError, match="precision='bfloat16' is for backend numba, not reference"):
        prepare_conv2d(packed, SHAPES[0], "reference", precision="bfloat16")
