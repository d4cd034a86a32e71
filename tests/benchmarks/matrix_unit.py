"""What the matrix unit (AMX) gains over the vector unit in our layers: prints a line a layer, in a minute or two.

    python tests/benchmarks/matrix_unit.py [--threads 2] [--tokens 128,512] [--patterns shflbw:32,vector:32] [--cold]
        [--workload cpu_kernels] [--int8]

The layers are the distinct ones of a workload: linear ones with so many tokens, convolutions with the images that the
workload says, in frames, as between the layers of a converted model. A star marks what `prepare` leaves to the unit.
Both compute the same plan's float32 results, in turns, a block of calls at a time, of which the least time counts;
printed is the median of the rounds' ratios (least-most), and how far each is from the exact result, in units of
2**-24 |w| @ |x|. --cold: copies of the weights take turns that pass the second-level cache many times, as in a model.
--int8: in eight bits, with one range of inputs; convolutions read bytes in frames, and leave them. Results are
checked, and errors are not printed: they are those of inputs between two steps.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from functools import partial
from typing import Any

import numba
import numpy as np
from cpu_kernels import BLOCK_SECONDS, SPINNING_SECONDS, conv2d_run, least

from latbench.workloads.workload import read_workload
from sparse_kernels import oracle
from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.tile_registers import count_row_tiles
from sparse_kernels.cpu.layouts.image_results import Finish, Leaving, Results
from sparse_kernels.cpu.layouts.padded_images import FramedImages, ImagePlaces, QuadImages
from sparse_kernels.cpu.layouts.panels import count_group_rows
from sparse_kernels.cpu.plans import conv2d, int8_conv2d, int8_linear, linear
from sparse_kernels.cpu.runtime.scratch_buffers import copy_to_cache_line
from sparse_kernels.formats import Packed, pack
from sparse_kernels.formats.int8 import InputRange, Int8Weight, find_scales, pack_int8
from sparse_kernels.int8.int8_oracle import check_int8, check_int8_conv2d
from sparse_kernels.patterns import Dense, parse
from sparse_kernels.plan_protocol import ACTIVATIONS
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

COLD_BYTES = 100e6
UNIT = oracle.UNIT_ROUNDOFF


def linear_pair(packed: Packed, shape: LinearShape, rng: np.random.Generator) -> tuple[Any, ...]:
    """(plans by matrix and by vectors, whether the first is the default, its call, x, errors)."""
    choices = (
        linear.choose_matrix_kernel(linear.describe_layer(packed, "token_major", 40)),
        linear.choose_vector_kernel(linear.describe_layer(packed, "token_major", shape.n)),
    )
    plans = [
        linear.build_plan(linear.describe_layer(packed, "token_major", shape.n), choice)
        for choice in choices
        if choice is not None
    ]
    x = copy_to_cache_line(rng.standard_normal((shape.n, shape.k), np.float32))
    y, bias = copy_to_cache_line(np.zeros((shape.n, shape.m), np.float32)), np.zeros(shape.m, np.float32)
    errors = [oracle.check(plan(x).T, packed, x.T) for plan in plans]
    taken = linear.choose_kernel(linear.describe_layer(packed, "token_major", shape.n)).kernel == "amx"
    return plans, taken, lambda plan: plan(x, bias, None, y), errors


def conv2d_pair(packed: Packed, shape: Conv2dShape, rng: np.random.Generator) -> tuple[Any, ...]:
    """The same of a convolution."""
    plans = [make(packed, shape, "nchw") for make in (conv2d.build_matrix_plan, conv2d.build_vector_plan)]
    # The exact result takes long: of two images at most.
    x = rng.standard_normal((min(shape.batch, 2), shape.c_in, shape.h, shape.w), np.float32)
    errors = [oracle.check_conv2d(plan(x), packed, shape, x) for plan in plans]
    return plans, conv2d.pays_by_matrix(packed, shape), conv2d_run(shape, True, np.zeros(shape.m, np.float32)), errors


def int8_linear_pair(weight: Int8Weight, shape: LinearShape, rng: np.random.Generator) -> tuple[Any, ...]:
    """`linear_pair` in eight bits."""
    tiles = count_row_tiles(count_group_rows(weight.packed))
    assert tiles is not None
    plans = [
        int8_linear.build_matrix_plan(weight, tiles),
        int8_linear.build_vector_plan(weight, "token_major", shape.n),
    ]
    x = copy_to_cache_line(rng.standard_normal((shape.n, shape.k), np.float32))
    y, bias = copy_to_cache_line(np.zeros((shape.n, shape.m), np.float32)), np.zeros(shape.m, np.float32)
    errors = [check_int8(plan(x), weight, x) for plan in plans]
    taken = int8_linear.choose_matrix_tiles(weight, shape.n) is not None
    return plans, taken, lambda plan: plan(x, bias, None, y), errors


def int8_conv2d_pair(weight: Int8Weight, shape: Conv2dShape, rng: np.random.Generator) -> tuple[Any, ...]:
    """`conv2d_pair` in eight bits."""
    tiles = count_row_tiles(count_group_rows(weight.packed))
    assert tiles is not None
    plans = [
        int8_conv2d.build_matrix_plan(weight, shape, "nchw", tiles),
        int8_conv2d.build_vector_plan(weight, shape, "nchw"),
    ]
    x = rng.standard_normal((min(shape.batch, 2), shape.c_in, shape.h, shape.w), np.float32)
    errors = [check_int8_conv2d(plan(x), weight, shape, x) for plan in plans]
    margin, bias = max(1, *shape.padding), np.zeros(shape.m, np.float32)
    assert weight.input_range is not None
    quads = QuadImages(ImagePlaces(shape.batch, shape.c_in, shape.h, shape.w, margin), weight.input_range)
    quads.array.view(np.uint8)[:] = rng.integers(0, 256, quads.array.nbytes, np.uint8)
    y = FramedImages(ImagePlaces(shape.batch, shape.c_out, shape.out_h, shape.out_w, margin))
    left, finish = QuadImages(y.places, weight.input_range), Finish(bias.ctypes.data, ACTIVATIONS.index("relu"))
    bytes_alone = Results(0, y.places, left.address, Leaving(weight.input_range, floats=False))
    leaves = all(plan.can_leave(quads.places, y.places) for plan in plans)
    results = bytes_alone if leaves else Results(y.address, y.places)
    held = quads, y, left, bias  # whose addresses the call has
    taken = int8_conv2d.choose_matrix_tiles(weight) is not None
    return plans, taken, lambda plan, held=held: plan.run_quads(quads.address, quads.places, finish, results), errors


def find_pair(shape: Shape, spec: str, sparsity: float, int8: bool) -> tuple[Any, ...] | None:
    """What `linear_pair` returns; None where the unit does not take this weight."""
    rng, pattern = np.random.default_rng(0), parse(spec)
    if pattern.refuses(shape) is not None:
        return None
    weight = rng.standard_normal((shape.m, shape.k), np.float32)
    mask = pattern.mask(weight.astype(np.float64) ** 2, sparsity)
    packed = pack(weight, mask, pattern)
    if int8:
        if count_row_tiles(count_group_rows(packed)) is None:
            return None
        whole = pack_int8(weight, mask, pattern, find_scales(weight), InputRange.covering(-4.0, 4.0))
        return (
            int8_conv2d_pair(whole, shape, rng)
            if isinstance(shape, Conv2dShape)
            else int8_linear_pair(whole, shape, rng)
        )
    if isinstance(shape, Conv2dShape):
        return conv2d_pair(packed, shape, rng) if conv2d.accepts_weight(packed) else None
    if linear.choose_matrix_kernel(linear.describe_layer(packed, "token_major", 40)) is None:
        return None
    return linear_pair(packed, shape, rng)


def compare(shape: Shape, spec: str, sparsity: float, how: argparse.Namespace) -> tuple[float, bool] | None:
    """Print a line; the ratio and whether it has a star, None where the unit does not take this weight."""
    found = find_pair(shape, spec, sparsity, how.int8)
    if found is None:
        return None
    plans, taken, call, errors = found
    if isinstance(shape, Conv2dShape):
        name = f"{shape.c_in}>{shape.c_out}@{shape.h}x{shape.w}x{shape.batch} {shape.kh}x{shape.kw}/{shape.stride[0]}"
    else:
        name = f"{shape.m}x{shape.k}x{shape.n}"
    calls = []
    for plan in plans:
        copies = max(1, round(COLD_BYTES / plan.nbytes)) if how.cold else 1
        calls.append([partial(call, each) for each in [plan, *(plan.copy() for _ in range(copies - 1))]])
    time.sleep(2 * SPINNING_SECONDS)  # NumPy's threads, which have just computed what is exact
    times = np.array([[least(each, BLOCK_SECONDS, how.threads) for each in calls] for _ in range(how.rounds)])
    ratios, seconds = times[:, 1] / times[:, 0], np.median(times, axis=0)
    print(
        f"{spec:10} {sparsity:4.0%} {name:24} {plans[0].kernel} {seconds[0] * 1e6:.1f} us, {plans[1].kernel} "
        f"{seconds[1] * 1e6:.1f} us: {np.median(ratios):.2f}x ({ratios.min():.2f}-{ratios.max():.2f}){' *' * taken}"
        + ("" if how.int8 else f", errors {errors[0] / UNIT:.1f} and {errors[1] / UNIT:.1f}"),
        flush=True,
    )
    return float(np.median(ratios)), taken


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", default="128,512")
    parser.add_argument("--patterns", default="shflbw:32,vector:32,dense")
    parser.add_argument("--sparsities", default="0.5,0.75,0.9")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workload", default="cpu_kernels")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--int8", action="store_true")
    given = parser.parse_args()
    if not find_cpu_target().matrix:
        sys.exit("this processor has no matrix unit")
    numba.set_num_threads(given.threads)
    shapes = list(dict.fromkeys(layer.shape for layer in read_workload(given.workload).layers))
    for n, spec in itertools.product(map(int, given.tokens.split(",")), given.patterns.split(",")):
        dense = isinstance(parse(spec), Dense)
        for sparsity in [0.0] if dense else [float(each) for each in given.sparsities.split(",")]:
            some = [LinearShape(s.m, s.k, n) if isinstance(s, LinearShape) else s for s in shapes]
            known = [found for shape in some if (found := compare(shape, spec, sparsity, given)) is not None]
            every, taken = [ratio for ratio, _ in known], [ratio for ratio, star in known if star]
            for which, ratios in ("layers", every), ("of them with a star", taken):
                if ratios:
                    of = f"({min(ratios):.2f}-{max(ratios):.2f}) of {len(ratios)} {which}"
                    print(f"  median {np.median(ratios):.2f}x {of}")
            print()


if __name__ == "__main__":
    main()
