"""Two-dimensional convolutions on the CPU, NCHW in and out: any pattern, without im2col.

The rows of the weight are output channels, and the vector runs along output positions. A column of the weight,
channel and tap together, is an element offset from the position. Where positions start:

- In place: 1x1, stride 1, no padding. x and y stay as they lie; each image is a run of positions.
- Row by row: images are laid out (`image_layout`). A vector never leaves a row of the output, and is stored directly.
- Flat: images are laid out. Vectors run over the ends of rows; the valid positions are collected afterwards.

`row_panels` multiplies them, `unstructured_rows` where rows share no columns, or the matrix unit (`third_conv2d`)
where that pays. Where numbers may be rounded to bfloat16, and the processor multiplies pairs of them, `row_panels`
takes pairs of columns: x is always laid out then, and rounded on the way.

x and y may also lie in frames (`padded_images`). A convolution that keeps the size of its images then reads x in
place and writes y directly. Vectors that run over the ends of rows write zeros there. For convolutions in eight
bits it may leave y as quads, with floats or in their place (`Leaving`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.bf16_split import has_thirds
from sparse_kernels.cpu.codegen.cpu_target import CpuTarget, find_cpu_target
from sparse_kernels.cpu.codegen.row_results import LEAVES_BOTH, LEAVES_QUADS
from sparse_kernels.cpu.codegen.tile_registers import ROWS
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS, PAIRS, PAIRS_BY_UNIT
from sparse_kernels.cpu.kernels import image_layout, row_panels, unstructured_rows
from sparse_kernels.cpu.kernels.image_layout import ImageCopyCall, ImageCopyLayer, ImageSteps
from sparse_kernels.cpu.kernels.product_settings import ProductSettings
from sparse_kernels.cpu.kernels.row_panels import PanelReading
from sparse_kernels.cpu.kernels.unstructured_rows import SingleRows, build_single_rows
from sparse_kernels.cpu.launch.linear_call import Product, convert_arguments
from sparse_kernels.cpu.layouts.image_results import Finish, Leaving, Results
from sparse_kernels.cpu.layouts.padded_images import ImagePlaces
from sparse_kernels.cpu.layouts.panels import Groups, Panels, build_groups, build_panels, count_group_rows
from sparse_kernels.cpu.layouts.quads import FLOATS_ONLY, QuadArrays, QuadLayout, build_reading
from sparse_kernels.cpu.layouts.vector_grid import TILE, VectorGrid, build_column_offsets
from sparse_kernels.cpu.matrix_unit import byte_conv2d, third_conv2d, third_linear
from sparse_kernels.cpu.matrix_unit.byte_panels import BytePanels
from sparse_kernels.cpu.matrix_unit.third_linear import MatrixPanels
from sparse_kernels.cpu.plans import linear
from sparse_kernels.cpu.runtime.scratch_buffers import Pool, borrow, find_address, give_back
from sparse_kernels.cpu.runtime.threads import count_threads
from sparse_kernels.formats import Packed, round_packed
from sparse_kernels.formats.int8 import fill_quad
from sparse_kernels.plan_protocol import ACTIVATIONS, Array
from sparse_kernels.shapes import Conv2dShape

# Factors on the time, measured on Zen 4. The first is of collecting valid positions afterwards. The second is of
# vectors of half the width, where the unit works in halves anyway.
COLLECTING, HALF_WIDTH = 1.05, 1.12

# Elements of x and y of the images that are computed at a time: 2 MB, the second-level caches of two cores.
IMAGES_CACHED = 500_000

# The matrix unit runs a layer where SPLIT_COST / a + 1 / b is at most MOST_COST. Here a is the weights kept for each
# plane of x, and b those for each row of y. A plane costs splitting, a row finishing. Each thread also fetches all
# weights, 6 bytes each, which does not pay for only a few vectors of positions. So the limit is at most COST_A_VECTOR
# times their number, and with fewer than LEAST_VECTORS nothing pays. ONE_TILE: factor on the limit where panels have
# one tile of rows, so that half as many rows use what was gathered. Measured on Granite Rapids.
SPLIT_COST, MOST_COST, COST_A_VECTOR, LEAST_VECTORS, ONE_TILE = 1.5, 1 / 29, 1 / 200, 2, 0.3

# Most elements of all copies of x that threads lay out for themselves, each as large as all of x: 256 MB. Threads
# touch little more of a copy than they need where a channel is larger than a page. Larger copies are laid out once
# for all threads.
MOST_COPIED = 2**26

# Number of batch sizes whose placement a plan remembers.
REMEMBERED = 8


@dataclass(frozen=True, eq=False)
class Positions(VectorGrid):
    """The vectors of positions.

    flat: (image, pitch) of the flat y that is collected afterwards; None where y is written directly.
    """

    flat: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class BatchPlacement:
    """What a plan knows about one batch: where everything lies.

    weights: panels with offsets for columns; single rows as they are. offsets: int32 (k,), how far behind a vector of
    positions each column lies. phase_layout: of x, None if x is read in place. grid: vectors of positions. columns:
    how many vectors of x a vector may read. prefetched: for panels, see `ProductLayer`. blocks: for the matrix unit.
    """

    weights: Panels | SingleRows | MatrixPanels | BytePanels
    offsets: NDArray[np.int32]
    phase_layout: image_layout.PhaseLayout | None
    grid: Positions
    columns: int
    prefetched: NDArray[np.int64] = field(default_factory=lambda: row_panels.NOTHING)
    blocks: third_conv2d.Blocks | None = None


@dataclass(frozen=True, eq=False)
class CpuConv2dPlan:
    """A convolution's plan: weights as panels, and what it knows of each batch it has met.

    by_vectors: for the matrix unit, makes the plan that computes y again where sums are not finite; it is kept from
    then on. So the plan holds on to the packed weight, 4 bytes a number that `nbytes` does not count. numbers: what
    is multiplied. With quads an element of x is four channels. quads: what their sums are worth. padding: the 32
    bits of an element outside of an image.
    """

    shape: Conv2dShape
    panels: Panels | SingleRows | MatrixPanels | BytePanels
    tile: tuple[int, int]  # rows, vectors
    target: CpuTarget
    kernel: str
    layout: str
    by_vectors: Callable[[], CpuConv2dPlan] | None = None
    emulated: bool = False
    numbers: int = FLOATS
    quads: QuadArrays = FLOATS_ONLY
    padding: int = 0
    _pool: Pool = field(default_factory=Pool)
    _placements: dict[tuple[int, int | None, int | None], BatchPlacement] = field(default_factory=dict)
    _calls: dict[tuple[int, int | None, int | None, int, Leaving | None], list[tuple[range, Product]]] = field(
        default_factory=dict
    )

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernel reads them."""
        return self.panels.nbytes

    def room_bytes(self, batch: int) -> int:
        """Bytes that the plan keeps for so many images, laid out; 0 where x is read in place."""
        placement = self._find_first_placement(self.x_places(batch), self.y_places(batch))
        threads = count_threads()
        return (
            0
            if placement.phase_layout is None
            else 4 * placement.phase_layout.size * self._count_copies(placement, threads)
        )

    def __getstate__(self) -> dict[str, object]:
        # Leave out compiled kernels and buffers: copies and pickles make them again.
        return {**self.__dict__, "_calls": {}, "_pool": Pool(self.padding)}

    def __call__(
        self, x: Array, bias: Array | None = None, activation: str | None = None, out: Array | None = None
    ) -> Array:
        """activation(convolution of x + bias), as `Plan` says; x that is not C-contiguous is copied."""
        s = self.shape
        y_shape = (None, s.c_out, s.out_h, s.out_w)
        x, y, bias, code = convert_arguments(x, (None, s.c_in, s.h, s.w), bias, activation, out, y_shape, s.c_out)
        if y.size:
            batch = x.shape[0]
            x_address, bias_address, y_address = find_address(x), find_address(bias), find_address(y)
            self.run(
                x_address, self.x_places(batch), Finish(bias_address, code), Results(y_address, self.y_places(batch))
            )
        return y

    def x_places(self, batch: int, margin: int | None = None) -> ImagePlaces:
        """Return the places of x of a batch, in frames of this margin or as torch has it."""
        return ImagePlaces(batch, self.shape.c_in, self.shape.h, self.shape.w, margin)

    def y_places(self, batch: int, margin: int | None = None) -> ImagePlaces:
        """Return the places of y of a batch, in frames of this margin or as torch has it."""
        return ImagePlaces(batch, self.shape.c_out, self.shape.out_h, self.shape.out_w, margin)

    def can_add(self, x: ImagePlaces, y: ImagePlaces) -> bool:
        """Return whether `run_framed` can add something to y on the way: if it writes y, in frames, directly.

        So must the plan that computes y again where sums are not finite, whose vectors are shorter.
        """
        if y.margin is None or self._find_first_placement(x, y).grid.flat is not None:
            return False
        if not isinstance(self.panels, MatrixPanels):
            return True
        shape = replace(self.shape, batch=x.batch)
        return choose_positions(shape, self.target, True, x.margin, y.margin).flat is None

    def can_leave(self, x: ImagePlaces, y: ImagePlaces) -> bool:
        """Return whether `run` can leave results as quads: it writes y, in frames, directly, and four rows of a quad
        together.
        """
        panels = self.panels
        if isinstance(panels, MatrixPanels) or y.margin is None:
            return False
        if self._find_first_placement(x, y).grid.flat is not None:
            return False
        return isinstance(panels, SingleRows) or panels.has_quads

    def run_framed(
        self,
        x: Array,
        x_places: ImagePlaces,
        bias: Array | None,
        activation: str | None,
        y: Array,
        y_places: ImagePlaces,
        added: Array | None = None,
    ) -> None:
        """y = activation(convolution of x + bias + added), images lying where the places say, in flat arrays.

        x_places and y_places are this plan's for the same batch. added lies as y does, in other memory; only where it
        `can_add`.
        """
        bias = np.zeros(self.shape.c_out, np.float32) if bias is None else bias
        there = 0 if added is None else find_address(added)
        x_address, bias_address, y_address = find_address(x), find_address(bias), find_address(y)
        finish = Finish(bias_address, ACTIVATIONS.index(activation), there)
        self.run(x_address, x_places, finish, Results(y_address, y_places))

    def run(self, x: int, x_at: ImagePlaces, finish: Finish, y: Results) -> None:
        """Do the same for addresses of arrays that are right. Quads are left only where it `can_leave` them."""
        threads, y_at = count_threads(), y.places
        key = x_at.batch, x_at.margin, y_at.margin, threads, y.leaving
        steps = self._calls.get(key)
        if steps is None:
            for oldest in list(self._calls)[: 1 - REMEMBERED]:
                self._calls.pop(oldest, None)
            steps = self._calls[key] = self._bind_steps(x_at, y_at, threads, y.leaving)
        self._run_steps(steps, x_at, y_at, x, y.address, finish, y.quads)

    def bind_run(
        self, x_at: ImagePlaces, y_at: ImagePlaces, leaving: Leaving | None, threads: int, from_quads: bool = False
    ) -> Product:
        """Return what `run` does for images at these places, by so many threads, for those who keep it themselves.

        It is called with addresses as a `Product` is. from_quads: x is quads already; a plan of floats is not asked.
        """
        steps = self._bind_steps(x_at, y_at, threads, leaving)
        if len(steps) == 1 and self.by_vectors is None:
            return steps[0][1]

        def run(x: int, y: int, bias: int, activation: int, added: int, quads: int) -> bool:
            self._run_steps(steps, x_at, y_at, x, y, Finish(bias, activation, added), quads)
            return True

        return run

    def _run_steps(
        self,
        steps: list[tuple[range, Product]],
        x_at: ImagePlaces,
        y_at: ImagePlaces,
        x: int,
        y: int,
        finish: Finish,
        quads: int,
    ) -> None:
        """Run what `_bind_steps` found; where sums were not finite, compute them again by vectors."""
        for some, product in steps:
            x_here, behind = x + 4 * some.start * x_at.image, 4 * some.start * y_at.image
            added = finish.added and finish.added + behind
            quads_here = quads and quads + 4 * some.start * y_at.quads.image
            if not product(x_here, y + behind, finish.bias, finish.activation, added, quads_here):
                results = Results(y + behind, y_at.of_batch(len(some)))
                self._vector_plan.run(x_here, x_at.of_batch(len(some)), finish._replace(added=added), results)

    def copy(self) -> CpuConv2dPlan:
        """Return the same plan with weights of its own."""
        return replace(self, panels=self.panels.copy(), _pool=Pool(self.padding), _placements={}, _calls={})

    def _bind_steps(
        self, x_at: ImagePlaces, y_at: ImagePlaces, threads: int, leaving: Leaving | None
    ) -> list[tuple[range, Product]]:
        """Return which images at these places are run together by so many threads, and how.

        Products know nothing of the plan: one that knew it would keep it, and gigabytes with it, until Python looks
        for circles.
        """
        batch, step = x_at.batch, self._count_images_at_a_time(x_at, y_at, threads)
        together = [range(first, min(first + step, batch)) for first in range(0, batch, step)]
        sizes = {len(some) for some in together}
        products = {
            size: self._bind_product(x_at.of_batch(size), y_at.of_batch(size), threads, leaving) for size in sizes
        }
        return [(some, products[len(some)]) for some in together]

    def _count_images_at_a_time(self, x_at: ImagePlaces, y_at: ImagePlaces, threads: int) -> int:
        """Return how many images one step takes: few, so that the next step finds what it writes in the cache."""
        by_matrix = isinstance(self.panels, MatrixPanels)  # it takes as much at a time as its cache holds
        read = not self._pairs and reads_frames(self.shape, x_at.margin)
        if read or (by_matrix and stays_in_place(self.shape, self._wide, x_at, y_at)):
            return x_at.batch
        rounds = -(-x_at.batch * (x_at.image + y_at.image) // IMAGES_CACHED)
        return -(-x_at.batch // (rounds * threads)) * threads

    def _bind_product(self, x_at: ImagePlaces, y_at: ImagePlaces, threads: int, leaving: Leaving | None) -> Product:
        """Images laid out where they have to be, multiplied, and results collected where they were not written."""
        placement = self._find_placement(x_at, y_at)
        phase_layout, grid, batch, c_out = placement.phase_layout, placement.grid, x_at.batch, self.shape.c_out
        settings = ProductSettings(self.target.fused, threads, self.numbers, self.quads)
        if leaving is not None:
            left, leaves = _lay_out_quads(leaving, grid, y_at)
            settings = settings._replace(left=left, leaves=leaves)
        if phase_layout is None and grid.flat is None:
            return self._bind_multiply(placement, x_at.size, settings)
        # Where threads have positions of their own, each lays out the rows that it reads, and those around them.
        begins, ends = image_layout.split_rows(batch * self.shape.h, threads)
        copies = self._count_copies(placement, threads)
        if phase_layout is not None and copies == threads:
            shares = row_panels.split_vectors(grid.x_starts.size, self.tile[1], threads)
            begins, ends = image_layout.find_rows_read(
                replace(self.shape, batch=batch), phase_layout, grid.x_starts, grid.lanes, shares
            )
        apart = 0 if phase_layout is None or copies == 1 else phase_layout.size
        size = x_at.size if phase_layout is None else phase_layout.size
        product = self._bind_multiply(placement, size, settings, apart)
        x_first, y_first, pool = 4 * x_at.first, 4 * y_at.first, self._pool
        if phase_layout is not None:
            laid_out = ImageCopyLayer(
                x_steps=image_layout.build_image_steps(x_at),
                y_steps=ImageSteps(phase_layout.image, phase_layout.plane, phase_layout.pitch,
                self.shape.c_in * phase_layout.plane), phases=phase_layout.phases,
                padding=self.shape.padding, shape=x_at.shape, begins=begins, ends=ends, part_stride=apart,
                parts=threads,
            )  # fmt: skip
            numbers = self.numbers if self._pairs else FLOATS
            copy = image_layout.build_kernel(self.target.lanes, numbers, self.shape.stride)
            lay_out = copy.bind(ImageCopyCall, laid_out)
        if grid.flat is not None:
            begins, ends = image_layout.split_rows(batch * self.shape.out_h, threads)
            collected = ImageCopyLayer(
                x_steps=ImageSteps(grid.flat[0], grid.y_stride, grid.flat[1], 0),
                y_steps=image_layout.build_image_steps(y_at), phases=image_layout.ONE_PHASE, padding=(0, 0),
                shape=y_at.shape, begins=begins, ends=ends, part_stride=0, parts=threads,
            )  # fmt: skip
            collect = image_layout.build_kernel(self.target.lanes, FLOATS, (1, 1)).bind(ImageCopyCall, collected)

        def call(x: int, y: int, bias: int, activation: int, added: int, quads: int) -> bool:
            source, result = x, y
            if phase_layout is not None:
                laid = pool.take(phase_layout.size * copies, batch)
                source = laid.address
                lay_out(x + x_first, source)
            if grid.flat is not None:
                flat = borrow(c_out * grid.y_stride)
                result = flat.address
            finite = product(source, result, bias, activation, added, quads)
            if grid.flat is not None:
                collect(result, y + y_first)
                give_back(flat)
            if phase_layout is not None:
                pool.give_back(laid, batch)
            return finite

        return call

    def _count_copies(self, placement: BatchPlacement, threads: int) -> int:
        """Return how many of the threads lay out images for themselves: all, or one for all."""
        phase_layout, weights = placement.phase_layout, placement.weights
        if phase_layout is None or phase_layout.size * threads > MOST_COPIED:
            return 1
        total, own = placement.grid.x_starts.size, False
        if isinstance(weights, Panels):
            own = row_panels.gives_own_blocks(weights, self.tile[1], total, placement.columns, threads)
        elif isinstance(weights, BytePanels):
            own = byte_conv2d.gives_own_vectors(weights, total, threads)
        return threads if own else 1

    def _bind_multiply(
        self, placement: BatchPlacement, x_size: int, settings: ProductSettings, apart: int = 0
    ) -> Product:
        weights, grid = placement.weights, placement.grid
        if isinstance(weights, SingleRows):
            return unstructured_rows.bind_product(weights, grid, placement.offsets, settings)
        if isinstance(weights, MatrixPanels):
            assert placement.blocks is not None
            return third_conv2d.bind_product(weights, placement.blocks, grid, x_size, settings.threads, self.emulated)
        reading = PanelReading(self.tile[1], placement.columns, apart)
        if isinstance(weights, BytePanels):
            return byte_conv2d.bind_product(weights, grid, reading, settings, self.emulated)
        return row_panels.bind_product(weights, grid, reading, settings, lambda: placement.prefetched)

    @property
    def _pairs(self) -> bool:
        """Whether pairs of bfloat16 are multiplied, for which x is always laid out."""
        return self.numbers in (PAIRS, PAIRS_BY_UNIT)

    @cached_property
    def _vector_plan(self) -> CpuConv2dPlan:
        assert self.by_vectors is not None
        return self.by_vectors()

    @property
    def _wide(self) -> CpuTarget:
        """The target with vectors as long as those of positions."""
        return widen(self.target) if isinstance(self.panels, MatrixPanels) else self.target

    def _find_first_placement(self, x: ImagePlaces, y: ImagePlaces) -> BatchPlacement:
        """Return the placement of the images that are computed together first."""
        some = min(self._count_images_at_a_time(x, y, count_threads()), x.batch)
        return self._find_placement(x.of_batch(some), y.of_batch(some))

    def _find_placement(self, x: ImagePlaces, y: ImagePlaces) -> BatchPlacement:
        key = x.batch, x.margin, y.margin
        placement = self._placements.get(key)
        if placement is None:
            for oldest in list(self._placements)[: 1 - REMEMBERED]:
                self._placements.pop(oldest, None)
            placement = self._placements[key] = self._build_placement(replace(self.shape, batch=x.batch), x, y)
        return placement

    def _build_placement(self, shape: Conv2dShape, x: ImagePlaces, y: ImagePlaces) -> BatchPlacement:
        """Everything for this shape's batch."""
        target, by_rows = self._wide, not isinstance(self.panels, SingleRows)
        always = self._pairs
        column_places = locate_columns(shape, target, x, y, always)
        grid = choose_positions(shape, target, by_rows, x.margin, y.margin, always)
        if isinstance(self.panels, SingleRows):
            return BatchPlacement(
                self.panels, column_places.offsets, column_places.phase_layout, grid, column_places.count
            )
        if isinstance(self.panels, MatrixPanels):
            cut = third_conv2d.cut_blocks(
                grid.x_starts, shape.batch, column_places.planes, column_places.taps, column_places.plane_size
            )
            return BatchPlacement(
                self.panels.placed(cut.offsets),
                column_places.offsets,
                column_places.phase_layout,
                grid,
                column_places.count,
                blocks=cut,
            )
        # The last tap of a plane reads elements that those before it have not read.
        prefetched = np.unique(
            column_places.planes[self.panels.columns]
        ) * column_places.plane_size + column_places.taps.max(initial=0)
        return BatchPlacement(
            self.panels.placed(column_places.offsets),
            column_places.offsets,
            column_places.phase_layout,
            grid,
            column_places.count,
            prefetched,
        )


def _lay_out_quads(leaving: Leaving, grid: VectorGrid, y_at: ImagePlaces) -> tuple[QuadLayout, int]:
    """Return where vectors of quads start, which lie as y does with a quarter of the channels, and what is left."""
    image = (grid.y_starts - y_at.first) // y_at.image
    starts = grid.y_starts - image * (y_at.image - y_at.quads.image)
    layout = QuadLayout(starts, build_reading(leaving.input_range), fill_quad(leaving.input_range))
    return layout, LEAVES_BOTH if leaving.floats else LEAVES_QUADS


def prepare_conv2d(packed: Packed, shape: Conv2dShape, layout: str, precision: str = "float32") -> CpuConv2dPlan:
    """Return the plan of a convolution for about shape.batch images. Raises ValueError for a precision that the
    pattern cannot gain from.
    """
    check_precision(packed, precision)
    packed = packed if precision == "float32" else round_packed(packed)
    if find_cpu_target().matrix and accepts_weight(packed) and pays_by_matrix(packed, shape):
        return build_matrix_plan(packed, shape, layout)
    if precision == "bfloat16" and find_cpu_target().pairs and pays_by_pairs(shape):
        return build_pair_plan(packed, shape, layout)
    return build_vector_plan(packed, shape, layout)


def check_precision(packed: Packed, precision: str) -> None:
    """Raise ValueError unless this precision is float32, or bfloat16 and rows share columns."""
    if precision == "bfloat16-weights":
        raise ValueError("precision='bfloat16-weights' is for linear layers, not for convolutions")
    linear.check_precision(packed, precision)


def pays_by_pairs(shape: Conv2dShape) -> bool:
    """Return whether pairs of bfloat16 are multiplied faster than float32: x must be laid out for them.

    ResNet50's convolutions with several taps or strides are 1.0 to 1.5 times as fast with one image. With 16 images
    they are 1.2 to 1.7 times as fast (Shfl-BW, 75% and 90%, Zen 4). With one tap and no stride x would have to be
    laid out, which took longer than the product does.
    """
    several = shape.kh * shape.kw > 1 or shape.stride != (1, 1)
    return several and shape.stride[1] <= 2


def accepts_weight(packed: Packed) -> bool:
    """Return whether the matrix unit can multiply this weight, if there is one: its rows fill tiles, it has
    thirds."""
    return third_linear.count_row_tiles(packed) is not None and has_thirds(packed.values)


def pays_by_matrix(packed: Packed, shape: Conv2dShape) -> bool:
    """Return whether the matrix unit multiplies this weight faster than vectors, with about shape.batch images.

    ResNet50's convolutions of 16 images with 3x3 taps are 1.2 to 2.2 times as fast at 75% sparsity and 0.8 to 1.9 at
    90%, those with one tap 0.6 to 1.5 and 0.2 to 1.2.
    """
    x = ImagePlaces(1, shape.c_in, shape.h, shape.w)
    y = ImagePlaces(1, shape.c_out, shape.out_h, shape.out_w)
    one, target = replace(shape, batch=1), find_cpu_target()
    grid, shorter = choose_positions(one, widen(target)), choose_positions(one, target)
    column_places = locate_columns(one, widen(target), x, y)
    cut = third_conv2d.cut_blocks(
        grid.x_starts, 1, column_places.planes, column_places.taps, column_places.plane_size
    )
    vectors = shape.batch * grid.x_starts.size / count_threads()
    if vectors < LEAST_VECTORS or 3 * cut.third_bytes > third_linear.SECOND_LEVEL_BYTES:
        return False
    # The gain is twice the speed at most. It is less where longer vectors cover the image less well, or reach beyond
    # its end.
    gain = 2 - grid.x_starts.size * grid.lanes / (shorter.x_starts.size * shorter.lanes)
    split = (
        column_places.count * cut.segment / (cut.size * grid.lanes)
    )  # split again where taps reach from one block into the next
    cost = (SPLIT_COST * split + shape.c_out) / max(packed.nnz, 1)
    limit = min(MOST_COST, COST_A_VECTOR * vectors) * (ONE_TILE if third_linear.count_row_tiles(packed) == 1 else 1)
    return cost <= gain * limit


def build_matrix_plan(packed: Packed, shape: Conv2dShape, layout: str, emulated: bool = False) -> CpuConv2dPlan:
    """Return the plan by the matrix unit, for a weight that `accepts_weight`."""
    tiles = third_linear.count_row_tiles(packed)
    assert tiles is not None
    weights = third_linear.build_matrix_panels(order_by_channel(build_groups(packed), shape), tiles, shape.c_out)
    size = tiles * ROWS
    name = f"numba.{packed.pattern.format}.conv2d.amx{size}x{third_conv2d.LANES}"
    return CpuConv2dPlan(
        shape, weights, (size, third_conv2d.LANES // ROWS), find_cpu_target(), name, layout,
        lambda: build_vector_plan(packed, shape, layout), emulated,
    )  # fmt: skip


def build_vector_plan(packed: Packed, shape: Conv2dShape, layout: str) -> CpuConv2dPlan:
    """Return the plan by the vector unit."""
    target = find_cpu_target()
    height = count_group_rows(packed)
    by_channel = order_by_channel(build_groups(packed), shape)
    weights: Panels | SingleRows
    if height == 1:
        some = replace(shape, batch=max(1, shape.batch))
        tile_rows, vectors = 1, min(TILE, choose_positions(some, target, halves=False).x_starts.size)
        weights = build_single_rows(by_channel, shape.k, vectors * target.lanes)
    else:
        tile_rows, vectors = row_panels.choose_tile(height, target)
        weights = build_panels(by_channel, tile_rows)
    name = f"numba.{packed.pattern.format}.conv2d.rows{tile_rows}x{vectors}.{target.name}"
    return CpuConv2dPlan(shape, weights, (tile_rows, vectors), target, name, layout)


def build_pair_plan(packed: Packed, shape: Conv2dShape, layout: str) -> CpuConv2dPlan:
    """Return the plan by pairs of bfloat16, for a weight that is rounded to it."""
    target = find_cpu_target()
    size, vectors = row_panels.choose_tile(count_group_rows(packed), target)
    weights = build_panels(order_by_channel(build_groups(packed), shape), size).paired()
    name = f"numba.{packed.pattern.format}.conv2d.pairs{size}x{vectors}.{target.name}"
    numbers = PAIRS_BY_UNIT if target.pairs else PAIRS
    return CpuConv2dPlan(shape, weights, (size, vectors), target, name, layout, numbers=numbers)


def order_by_channel(groups: Groups, shape: Conv2dShape) -> Groups:
    """Return the groups with columns numbered by channel, then tap: taps of a channel read nearly the same of x."""
    numbers = groups.columns % shape.c_in * (shape.kh * shape.kw) + groups.columns // shape.c_in
    group = np.repeat(np.arange(groups.indptr.size - 1), np.diff(groups.indptr))
    order = np.lexsort((numbers, group))
    return replace(groups, columns=numbers[order], values=groups.values[order])


def widen(target: CpuTarget) -> CpuTarget:
    """Return a target with vectors as long as those of the matrix unit."""
    return replace(target, lanes=third_conv2d.LANES, halves=False)


@dataclass(frozen=True, eq=False)
class ColumnPlacement:
    """Where the columns of a weight lie, by channel, then tap.

    where: how images are laid out, None if x is read in place. offsets: int32 (k,), elements from a position of the
    output. planes: int64 (k,), in which plane of x, plane_size elements each: a channel, or a phase of one.
    """

    phase_layout: image_layout.PhaseLayout | None
    offsets: NDArray[np.int32]
    planes: NDArray[np.int64]
    plane_size: int

    @property
    def taps(self) -> NDArray[np.int64]:
        """How far each column lies from the position in its own plane."""
        return self.offsets - self.planes * self.plane_size

    @property
    def count(self) -> int:
        """Planes."""
        return int(self.planes.max()) + 1


def locate_columns(
    shape: Conv2dShape, target: CpuTarget, x: ImagePlaces, y: ImagePlaces, always: bool = False
) -> ColumnPlacement:
    """Return where the columns lie for vectors of this target, and x and y of shape.batch images at these places.

    always: x is laid out anyway.
    """
    channels = np.repeat(np.arange(shape.c_in), shape.kh * shape.kw)
    if not always and reads_frames(shape, x.margin):
        return ColumnPlacement(None, locate_columns_in_frames(shape, x), channels, x.channel)
    if not always and stays_in_place(shape, target, x, y):
        return ColumnPlacement(None, build_column_offsets(shape.c_in, shape.h * shape.w), channels, shape.h * shape.w)
    phase_layout = build_phase_layout(shape, target, y)
    offsets = phase_layout.offsets.reshape(-1, shape.c_in).T.ravel()
    return ColumnPlacement(phase_layout, offsets, offsets.astype(np.int64) // phase_layout.plane, phase_layout.plane)


def stays_in_place(shape: Conv2dShape, target: CpuTarget, x: ImagePlaces, y: ImagePlaces) -> bool:
    """Return whether x and y stay as they lie: no frames, one tap, no padding, and room for a vector in an image."""
    plain = x.margin is None and y.margin is None
    unpadded = shape.kh == shape.kw == 1 and shape.stride == (1, 1) and shape.padding == (0, 0)
    return plain and unpadded and target.lanes <= shape.h * shape.w < 2**31 // shape.c_in


def reads_frames(shape: Conv2dShape, margin: int | None) -> bool:
    """Return whether x in frames of this margin is read as it lies: the output is as large as the input, step by
    step."""
    if margin is None or max(shape.padding) > margin:
        return False
    return shape.stride == (1, 1) and (shape.out_h, shape.out_w) == (shape.h, shape.w)


def build_phase_layout(shape: Conv2dShape, target: CpuTarget, y: ImagePlaces) -> image_layout.PhaseLayout:
    """Return how images are laid out that are not read where they lie: in rows as long as those of y in frames."""
    phase_layout = image_layout.build_layout(shape, target.lanes)
    wider = y.margin is not None and phase_layout.pitch < y.row
    return image_layout.build_layout(shape, target.lanes, y.row) if wider else phase_layout


def locate_columns_in_frames(shape: Conv2dShape, x: ImagePlaces) -> NDArray[np.int32]:
    """Return the offsets of columns, by channel, then tap, from an output's position to what it reads of x in
    frames."""
    down = np.arange(shape.kh) * shape.dilation[0] - shape.padding[0]
    right = np.arange(shape.kw) * shape.dilation[1] - shape.padding[1]
    offsets = np.arange(shape.c_in)[:, None, None] * x.channel + down[:, None] * x.row + right
    if int(offsets.max()) >= 2**31:
        raise ValueError(f"images are too large for this convolution: {shape}")
    return offsets.ravel().astype(np.int32)


@lru_cache(maxsize=256)
def choose_positions(
    shape: Conv2dShape,
    target: CpuTarget,
    halves: bool = True,
    x_margin: int | None = None,
    y_margin: int | None = None,
    always: bool = False,
) -> Positions:
    """Return the cheapest vectors that cover all output positions; halves: of half the width too, where that pays.

    x_margin, y_margin: of the frames that x and y lie in; None for none. always: as `locate_columns` takes it.
    """
    widths = (target.lanes, target.lanes // 2) if target.halves and halves else (target.lanes,)
    choices = [choice for lanes in widths for choice in _coverings(shape, lanes, target, x_margin, y_margin, always)]

    def cost(grid: Positions) -> float:
        collected = 1.0 if grid.flat is None else COLLECTING
        return grid.x_starts.size * grid.lanes * collected * (HALF_WIDTH if grid.lanes < target.lanes else 1.0)

    return min(choices, key=cost)


def _coverings(
    shape: Conv2dShape, lanes: int, target: CpuTarget, x_margin: int | None, y_margin: int | None, always: bool
) -> list[Positions]:
    """Return the ways to cover the output with vectors of `lanes`."""
    b = np.arange(shape.batch)[:, None]
    x = ImagePlaces(shape.batch, shape.c_in, shape.h, shape.w, x_margin)
    y = ImagePlaces(shape.batch, shape.c_out, shape.out_h, shape.out_w, y_margin)
    if not always and stays_in_place(shape, target, x, y):
        size = shape.out_h * shape.out_w
        run = _start_vectors(size, lanes)
        return [Positions(lanes, _flat(b * shape.c_in * size + run), 1, _flat(b * y.image + run), size)]
    if not always and reads_frames(shape, x_margin):
        x_first, x_image, pitch = x.first, x.image, x.row
    else:
        phase_layout = build_phase_layout(shape, target, y)
        x_first, x_image, pitch = 0, phase_layout.image, phase_layout.pitch
    length = (shape.out_h - 1) * pitch + shape.out_w
    vectors = np.arange(-(-length // lanes)) * lanes
    x_starts = _flat(x_first + b * x_image + vectors)
    if y_margin is not None and pitch == y.row:
        row, column = np.divmod(vectors[:, None] + np.arange(lanes), pitch)
        bits = ((row < shape.out_h) & (column < shape.out_w)) << np.arange(lanes)
        keep = np.tile(bits.sum(axis=1), shape.batch)
        flat = Positions(lanes, x_starts, 1, _flat(y.first + b * y.image + vectors), y.channel, keep)
    else:
        image = vectors.size * lanes
        flat = Positions(lanes, x_starts, 1, _flat(b * image + vectors), shape.batch * image, flat=(image, pitch))
    if shape.out_w < lanes:
        return [flat]
    b, i, run = b[:, :, None], np.arange(shape.out_h)[:, None], _start_vectors(shape.out_w, lanes)
    x_starts = _flat(x_first + b * x_image + i * pitch + run)
    y_starts = _flat(y.first + b * y.image + i * y.row + run)
    keep_all = None if y_margin is None else np.full(x_starts.size, -1)
    return [flat, Positions(lanes, x_starts, 1, y_starts, y.channel, keep_all)]


def _start_vectors(length: int, lanes: int) -> NDArray[np.int64]:
    """Return starts of vectors that cover `length` >= lanes positions and nothing else: the last one overlaps."""
    return np.minimum(np.arange(-(-length // lanes), dtype=np.int64) * lanes, length - lanes)


def _flat(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    return starts.ravel().astype(np.int64)
