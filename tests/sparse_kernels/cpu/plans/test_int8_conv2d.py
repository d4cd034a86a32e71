"""Convolutions in eight bits: the exact whole numbers, and images in frames."""

from dataclasses import replace

import numba
import numpy as np
import pytest
import torch

from sparse_kernels import Conv2dShape, parse
from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.tile_registers import count_row_tiles
from sparse_kernels.cpu.codegen.vector_emitter import QUADS_BY_PAIRS, QUADS_BY_SIGNED
from sparse_kernels.cpu.layouts.image_results import Finish, Leaving, Results
from sparse_kernels.cpu.layouts.panels import count_group_rows
from sparse_kernels.cpu.matrix_unit import byte_conv2d
from sparse_kernels.cpu.plans import conv2d, int8_conv2d
from sparse_kernels.cpu.plans.int8_conv2d import QuadConv2dPlan, prepare_int8_conv2d
from sparse_kernels.cpu.runtime.scratch_buffers import allocate_aligned
from sparse_kernels.formats import pack, unpack
from sparse_kernels.formats.int8 import (
    QUAD,
    InputRange,
    Int8Weight,
    fill_quad,
    find_scales,
    pack_int8,
    unpack_int8,
)
from sparse_kernels.int8.int8_oracle import check_int8_conv2d
from sparse_kernels.patterns import Dense

READING = InputRange(0.25, 77)
SHAPES = {
    "3x3": Conv2dShape(1, 8, 14, 14, 32, 3, 3, (1, 1), (1, 1), (1, 1)),
    "few channels": Conv2dShape(2, 3, 17, 19, 16, 3, 3, (2, 2), (1, 1), (1, 1)),
    "1x1": Conv2dShape(1, 64, 7, 7, 64, 1, 1, (1, 1), (0, 0), (1, 1)),
    "dilated": Conv2dShape(3, 6, 9, 9, 24, 3, 3, (1, 1), (2, 2), (2, 2)),
    "wide": Conv2dShape(1, 5, 8, 40, 7, 5, 5, (1, 1), (2, 2), (1, 1)),
    "strided": Conv2dShape(2, 16, 8, 8, 8, 1, 1, (2, 2), (0, 0), (1, 1)),
    "three apart": Conv2dShape(1, 4, 11, 11, 8, 3, 3, (3, 3), (1, 1), (1, 1)),
}
X86_ALONE = pytest.mark.skipif(find_cpu_target().name == "neon", reason="only x86 multiplies pairs")
SPECS = ["block:4x4", "block:32x4", "block:16x4", "vector:8", "shflbw:16", "dense", "block:1x4", "unstructured"]


@pytest.fixture(autouse=True)
def all_threads():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@pytest.fixture(params=["vectors", "matrix"])
def unit(request: pytest.FixtureRequest) -> str:
    """Which unit of the processor multiplies."""
    return str(request.param)


def plan_of(weight: Int8Weight, shape: Conv2dShape, unit: str) -> QuadConv2dPlan:
    """The plan by this unit; the matrix unit is emulated where there is none, for one pattern, since it takes seconds
    to compile.
    """
    if unit == "vectors":
        return int8_conv2d.build_vector_plan(weight, shape, "nchw")
    tiles, emulated = count_row_tiles(count_group_rows(weight.packed)), not find_cpu_target().matrix
    if tiles is None or (emulated and weight.pattern.format != "dense"):
        pytest.skip("the unit does not multiply this weight, or emulated takes long")
    return int8_conv2d.build_matrix_plan(weight, shape, "nchw", tiles, emulated)


def draw_weight(rng: np.random.Generator, spec: str, shape: Conv2dShape, reading: InputRange | None) -> Int8Weight:
    pattern = parse(spec)
    weight = rng.integers(-127, 128, (shape.m, shape.k)).astype(np.float32)
    mask = pattern.mask(weight.astype(float) ** 2, 0.0 if spec == "dense" else 0.6)
    scales = (2.0 ** rng.integers(-6, 2, shape.m)).astype(np.float32)
    return pack_int8(weight * scales[:, None], mask, pattern, scales, reading)


def draw_images(rng: np.random.Generator, shape: Conv2dShape) -> np.ndarray:
    q = rng.integers(0, 256, (shape.batch, shape.c_in, shape.h, shape.w))
    return ((q - READING.zero) * READING.scale).astype(np.float32)


def convolve(weight: Int8Weight, shape: Conv2dShape, x: np.ndarray) -> np.ndarray:
    """The convolution in float64, by torch."""
    kernel = unpack_int8(weight).reshape(shape.m, shape.kh, shape.kw, shape.c_in).transpose(0, 3, 1, 2)
    operands = (torch.from_numpy(np.ascontiguousarray(each, np.float64)) for each in (x, kernel))
    return torch.conv2d(*operands, None, shape.stride, shape.padding, shape.dilation).numpy()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("spec", SPECS)
def test_sums_are_the_exact_whole_numbers(rng: np.random.Generator, spec: str, name: str, unit: str) -> None:
    shape = SHAPES[name]
    if parse(spec).refuses(shape):
        pytest.skip("the pattern has no place in this layer")
    weight, x = draw_weight(rng, spec, shape, READING), draw_images(rng, shape)
    expected = convolve(weight, shape, x)
    plan = plan_of(weight, shape, unit)
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        for _ in range(2):  # the second time in memory that the first one has used
            np.testing.assert_array_equal(plan(x), expected.astype(np.float32))


@pytest.mark.parametrize("quads", [QUADS_BY_SIGNED, pytest.param(QUADS_BY_PAIRS, marks=X86_ALONE)])
def test_what_stands_in_for_the_unit_is_as_exact(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, quads: int
) -> None:
    own = replace(find_cpu_target(), quads=quads, matrix=False)
    monkeypatch.setattr(int8_conv2d, "find_cpu_target", lambda: own)
    shape = SHAPES["3x3"]
    weight, x = draw_weight(rng, "block:4x4", shape, READING), draw_images(rng, shape)
    np.testing.assert_array_equal(prepare_int8_conv2d(weight, shape, "nchw")(x), convolve(weight, shape, x))


@pytest.mark.parametrize("spec", ["block:4x4", "block:1x4", "block:16x4", "dense"])
def test_any_image_is_read_as_its_nearest_steps(rng: np.random.Generator, spec: str, unit: str) -> None:
    shape = SHAPES["few channels"]
    pattern, dense = parse(spec), rng.standard_normal((shape.m, shape.k)).astype(np.float32)
    mask = pattern.mask(dense.astype(float) ** 2, 0.0 if spec == "dense" else 0.5)
    reading = InputRange.covering(-2.0, 3.0)
    weight = pack_int8(dense, mask, pattern, find_scales(np.where(mask, dense, 0)), reading)
    x = rng.standard_normal((shape.batch, shape.c_in, shape.h, shape.w)).astype(np.float32) * 2
    bias = rng.standard_normal(shape.m).astype(np.float32)
    y = plan_of(weight, shape, unit)(x, bias, "relu")
    check_int8_conv2d(y, weight, shape, x, bias=bias, activation="relu")


def run_framed(plan: QuadConv2dPlan, x: np.ndarray, margins: tuple[int | None, int | None]) -> np.ndarray:
    """y through frames of these margins, or as torch has it."""
    x_at, y_at = plan.x_places(len(x), margins[0]), plan.y_places(len(x), margins[1])
    source, target = allocate_aligned(x_at.size), allocate_aligned(y_at.size)
    inside(source, x_at)[...] = x
    bias = np.zeros(plan.shape.c_out, np.float32)
    plan.run(source.ctypes.data, x_at, Finish(bias.ctypes.data, 0), Results(target.ctypes.data, y_at))
    return inside(target, y_at).copy()


def inside(flat: np.ndarray, places) -> np.ndarray:
    """The positions of images in a flat array."""
    steps = [4 * step for step in (places.image, places.channel, places.row, 1)]
    return np.lib.stride_tricks.as_strided(flat[places.first :], places.shape, steps)


@pytest.mark.parametrize("margins", [(1, None), (None, 1), (1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("spec", ["block:4x4", "block:1x4", "block:32x4", "dense"])
def test_images_may_lie_in_frames(
    rng: np.random.Generator, spec: str, margins: tuple[int | None, int | None], unit: str
) -> None:
    shape = SHAPES["3x3"]
    weight, x = draw_weight(rng, spec, shape, READING), draw_images(rng, shape)
    plan = plan_of(weight, shape, unit)
    expected = convolve(weight, shape, x)
    for _ in range(2):
        np.testing.assert_array_equal(run_framed(plan, x, margins), expected)


NEXT = InputRange(2.0**9, 90)
"""How the next layer reads results: a step is a power of two, so that the nearest one is exact."""

KEEPING = {
    "3x3": SHAPES["3x3"],
    "1x1": SHAPES["1x1"],
    "dilated": SHAPES["dilated"],
    "7 channels": replace(SHAPES["3x3"], batch=3, c_out=7, h=9, w=5),
    "wide": replace(SHAPES["3x3"], h=4, w=37),  # vectors of a row, of which the last one overlaps
    "strided": replace(SHAPES["3x3"], batch=2, h=31, w=66, stride=(2, 2)),
}


@pytest.mark.parametrize("floats", [True, False])
@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("spec", ["block:4x4", "block:1x4", "block:16x4", "dense", "float32"])
def test_results_are_left_as_the_bytes_that_the_next_layer_would_read(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, spec: str, name: str, floats: bool, unit: str
) -> None:
    monkeypatch.setattr(conv2d, "IMAGES_CACHED", 1)  # images that are laid out come in several steps
    shape = KEEPING[name]
    if spec != "float32" and parse(spec).refuses(shape):
        pytest.skip("the pattern has no place in this layer")
    weight, x = draw_weight(rng, spec.replace("float32", "dense"), shape, READING), draw_images(rng, shape)
    if spec == "float32" and unit == "matrix":
        pytest.skip("bytes only")
    if spec == "float32":  # whole numbers small enough that float32 is exact
        weight = replace(weight, packed=pack(np.rint(unpack(weight.packed) / 64), None, Dense()))
        plan = conv2d.build_vector_plan(pack(unpack_int8(weight), None, Dense()), shape, "nchw")
    else:
        plan = plan_of(weight, shape, unit)
    margin = max(shape.padding) + 1
    x_at, y_at = plan.x_places(shape.batch, margin), plan.y_places(shape.batch, margin)
    assert plan.can_leave(x_at, y_at)
    source, added = allocate_aligned(x_at.size), allocate_aligned(y_at.size)
    inside(source, x_at)[...] = x
    inside(added, y_at)[...] = rng.integers(-999, 999, y_at.shape)
    bias = rng.integers(-999, 999, shape.m).astype(np.float32)
    y = convolve(weight, shape, x) + bias[:, None, None] + inside(added, y_at)
    y = np.maximum(y, 0).astype(np.float32)
    for _ in range(2):
        quads, result = allocate_aligned(y_at.quads.size), allocate_aligned(y_at.size)
        quads.view(np.uint32)[:] = fill_quad(NEXT)
        finish = Finish(bias.ctypes.data, 1, added.ctypes.data)
        leaving = Leaving(NEXT, floats)
        results = Results(result.ctypes.data if floats else 0, y_at, quads.ctypes.data, leaving)
        plan.run(source.ctypes.data, x_at, finish, results)
        np.testing.assert_array_equal(result, lay_out(y if floats else 0 * y, y_at))
        np.testing.assert_array_equal(channels_of(quads, y_at), channels_of(read_as_quads(y, y_at), y_at))


def lay_out(images: np.ndarray, places) -> np.ndarray:
    """Images in a frame of zeros."""
    flat = allocate_aligned(places.size)
    inside(flat, places)[...] = images
    return flat


def read_as_quads(images: np.ndarray, places) -> np.ndarray:
    """The quads of images in a frame, as the next layer reads them."""
    steps = np.clip(np.rint(images / NEXT.scale + NEXT.zero), 0, 255).astype(np.uint32)
    flat = allocate_aligned(places.quads.size)
    flat.view(np.uint32)[:] = fill_quad(NEXT)
    quads = inside(flat.view(np.uint32), places.quads)
    quads[...] = 0
    for channel in range(places.channels):
        quads[:, channel // QUAD] |= steps[:, channel] << np.uint32(8 * (channel % QUAD))
    return flat


def channels_of(quads: np.ndarray, places) -> np.ndarray:
    """The bytes of channels that there are, (elements, channels of a quad): others may hold anything."""
    quads = quads.copy().view(np.uint8).reshape(-1, QUAD)
    if beyond := -places.channels % QUAD:
        last = inside(np.arange(len(quads), dtype=np.int32), places.quads)[:, -1].ravel()
        quads[last, QUAD - beyond :] = 0
    return quads


@pytest.mark.parametrize("name", ["3x3", "strided", "few channels", "dilated"])
def test_bytes_that_were_left_are_read_as_those_read_from_floats(
    rng: np.random.Generator, name: str, unit: str
) -> None:
    shape = SHAPES[name]
    spec = "block:4x4" if unit == "vectors" else "dense"
    weight, x = draw_weight(rng, spec, shape, NEXT), 300 * draw_images(rng, shape)
    plan = plan_of(weight, shape, unit)
    x_at, y_at = plan.x_places(shape.batch, 2), plan.y_places(shape.batch, 2)
    bias, quads, found = np.zeros(shape.m, np.float32), read_as_quads(x, x_at), allocate_aligned(y_at.size)
    plan.run_quads(quads.ctypes.data, x_at, Finish(bias.ctypes.data, 0), Results(found.ctypes.data, y_at))
    np.testing.assert_array_equal(inside(found, y_at), run_framed(plan, x, (2, 2)))


def test_rows_in_another_order_leave_no_bytes(rng: np.random.Generator) -> None:
    shape = SHAPES["3x3"]
    plan = prepare_int8_conv2d(draw_weight(rng, "shflbw:16x4", shape, READING), shape, "nchw")
    assert not plan.can_leave(plan.x_places(1, 1), plan.y_places(1, 1))


def test_images_need_one_range(rng: np.random.Generator) -> None:
    shape = SHAPES["3x3"]
    with pytest.raises(ValueError, match="needs an input range"):
        prepare_int8_conv2d(draw_weight(rng, "block:4x4", shape, None), shape, "nchw")


def test_the_matrix_unit_is_chosen_where_a_row_keeps_enough(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(find_cpu_target(), matrix=True)
    monkeypatch.setattr(int8_conv2d, "find_cpu_target", lambda: own)
    shape = SHAPES["3x3"]  # 72 columns, of which 60% are left out

    def chosen(spec: str, shape: Conv2dShape = shape) -> int | None:
        return int8_conv2d.choose_matrix_tiles(draw_weight(rng, spec, shape, READING))

    wider = replace(shape, c_in=16)
    assert chosen("dense") == chosen("block:32x4", wider) == 2
    assert chosen("block:16x4", wider) == 1
    assert chosen("block:32x4") is chosen("block:4x4", wider) is None


@pytest.mark.parametrize("vectors, threads, shares", [
    (8, 2, [(0, 4, 0, 3), (4, 8, 0, 3)]),
    (3, 2, [(0, 2, 0, 3), (2, 3, 0, 3)]),
    (5, 2, [(0, 5, 0, 2), (0, 5, 2, 3)]),
    (1, 2, [(0, 1, 0, 2), (0, 1, 2, 3)]),
    (1, 4, [(0, 0, 0, 3), (0, 0, 0, 3), (0, 0, 0, 3), (0, 1, 0, 3)]),
])  # fmt: skip
def test_threads_share_pairs_of_vectors_or_panels(
    rng: np.random.Generator, vectors: int, threads: int, shares: list[tuple[int, ...]]
) -> None:
    shape = replace(SHAPES["3x3"], c_out=96)
    plan = int8_conv2d.build_matrix_plan(draw_weight(rng, "dense", shape, READING), shape, "nchw", 2, emulated=True)
    found = byte_conv2d.split_work(plan.quads.panels, vectors, threads)
    assert [tuple(int(each) for each in share) for share in found] == shares
