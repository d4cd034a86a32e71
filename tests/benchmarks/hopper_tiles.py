"""The kernels for Hopper in every tile and split, beside the fastest dense cuBLAS: one table, on a GPU of that kind.

    python tests/benchmarks/hopper_tiles.py [--shape 4096x4096x2048] [--patterns vector:128,nm:2:4] [--sparsities 0.9]

Each form is timed as `latbench sweep --gpu` times a point (rotated copies, a CUDA graph), and what the graph leaves
behind is checked against float64 after it was timed. `*` is the form that the program chooses by itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

import numpy as np

from latbench.backends.gpu import gpu_layers, prepare_gpu_point, torch_gpu
from latbench.backends.gpu.gpu_layers import GpuLayer
from latbench.sweeping import gpu_points
from latbench.sweeping.gpu_points import build_gpu_point
from latbench.timing.gpu_drivers import open_cupy_driver
from latbench.timing.gpu_events import Call, TimingMode, build_event_timer
from latbench.workloads.points import Point
from sparse_kernels.cuda import cuda_plan, nm_sm90, sm90, vector_sm90
from sparse_kernels.cuda.machine import CupyMachine
from sparse_kernels.cuda.program import Launch
from sparse_kernels.formats import NMWeight
from sparse_kernels.patterns import NM, Dense, Pattern, parse
from sparse_kernels.registry import MissingLibrary, NoDevice
from sparse_kernels.shapes import LinearShape

SECONDS = 0.1  # of samples, each form
SPLITS = (1, 2, 4)
MODE = TimingMode("rotated", "graph")


def dense_seconds(shape: LinearShape) -> tuple[float, str]:
    """The fastest of cuBLAS and cuBLASLt in both layouts, and its name."""
    found = []
    for kernel in gpu_points.DENSE:
        point = build_gpu_point("gpu", shape, Dense(), 0.0, kernel)
        engine = torch_gpu.prepare(point, gpu_layers.build_gpu_layer(point))
        timer = build_event_timer(engine.calls, engine.driver, MODE)
        found.append((float(np.median(timer.burst(SECONDS).samples)), engine.kernel))
    return min(found)


def programs_of(layer: GpuLayer, n: int, machine: CupyMachine) -> list[sm90.HopperProgram]:
    """The weight packed for the kernel that runs its pattern; of 2:4 kernels each height packs it in its own way."""
    where = "float16", machine.architecture, n, machine.multiprocessors
    if isinstance(layer.packed, NMWeight):
        return [nm_sm90.build_program(layer.packed, *where, height=height) for height in nm_sm90.HEIGHTS]
    return [vector_sm90.build_program(layer.packed, *where)]


def forms(program: sm90.HopperProgram, n: int) -> Iterator[tuple[str, sm90.HopperKernel, int]]:
    """Every tile and split: its name, the kernel, the splits."""
    chosen = program.choose(n)
    for kernel in program.kernels:
        for splits in sorted({*SPLITS, *([chosen[1]] if kernel is chosen[0] else [])}):
            mark = "*" if (kernel, splits) == chosen else ""
            yield f"{kernel.rows}x{kernel.width}, {kernel.stages} stages, split {splits}{mark}", kernel, splits


def calls_of(
    program: sm90.HopperProgram,
    kernel: sm90.HopperKernel,
    splits: int,
    point: Point,
    layer: GpuLayer,
    machine: CupyMachine,
) -> list[Call]:
    """Calls of one form on copies of their own, each of which returns its result."""
    import cupy

    shape = point.shape
    driver = open_cupy_driver()

    def call() -> Call:
        own = cuda_plan.CudaPlan(
            Chosen(program, kernel, splits), machine, (shape.k, None), (shape.m, None), "float16", kernel.function,
            "feature_major",
        )  # fmt: skip
        x, out = cupy.asarray(layer.x.astype(np.float16)), cupy.empty((shape.m, shape.n), np.float16)
        return lambda: own(x, out=out)

    return [call() for _ in range(prepare_gpu_point.count_gpu_copies(point, layer, program.nbytes, driver))]


class Chosen:
    """A program whose kernel and splits are given."""

    def __init__(self, program: sm90.HopperProgram, kernel: sm90.HopperKernel, splits: int) -> None:
        self.nbytes, self._launches = program.nbytes, program.launches_of
        self._kernel, self._splits = kernel, splits

    def launches(self, n: int, activation: str | None) -> list[Launch]:
        """See Program."""
        return self._launches(self._kernel, self._splits, n, activation)


def report(shape: LinearShape, pattern: Pattern, sparsity: float, dense: float, say: Callable[[str], None]) -> None:
    """A line for each form of one layer. Raises WrongResult."""
    import cupy

    point = build_gpu_point("gpu", shape, pattern, sparsity, gpu_points.OURS[0])
    layer, machine = gpu_layers.build_gpu_layer(point), CupyMachine.current()
    driver = open_cupy_driver()
    weight, x = (cupy.asarray(array).astype(cupy.float64) for array in (layer.weight, layer.x))
    for program in programs_of(layer, shape.n, machine):
        for name, kernel, splits in forms(program, shape.n):
            calls = calls_of(program, kernel, splits, point, layer, machine)
            timer = build_event_timer(calls, driver, MODE)
            seconds = float(np.median(timer.burst(SECONDS).samples))
            results = [call() for call in calls]
            for result in results:
                driver.spoil(result)
            timer.run()
            for result in results:
                gpu_layers.check_product(result.astype(cupy.float64), weight, x, terms=layer.terms, dtype="float16")
            rate = 2 * layer.nnz * shape.n / seconds / 1e12
            say(
                f"{pattern!s:13} {sparsity:4.0%}  {name:32} {seconds * 1e6:8.2f} us {dense / seconds:5.2f}x dense "
                f"{rate:6.0f} TFLOP/s"
            )


def shape_of(text: str) -> LinearShape:
    """MxKxN. Raises ArgumentTypeError, as those below."""
    try:
        return LinearShape(*map(int, text.split("x")))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 4096x4096x2048") from error


def patterns_of(text: str) -> list[Pattern]:
    """Patterns between commas: those that the kernels for Hopper run."""
    try:
        found = [parse(name) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    for pattern in found:
        rows = getattr(pattern, "v", None) or getattr(pattern, "rows", None)
        if pattern != NM(2, 4) and rows not in vector_sm90.HEIGHTS:
            raise argparse.ArgumentTypeError(f"{pattern} is not among them: nm:2:4, and groups of 64 or 128 rows are")
    return found


def sparsities_of(text: str) -> list[float]:
    """Numbers from 0 to below 1 between commas."""
    try:
        found = [float(number) for number in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers such as 0.5,0.75") from error
    if not all(0 <= number < 1 for number in found):
        raise argparse.ArgumentTypeError(f"{text!r}: sparsities are from 0 to below 1")
    return found


def main() -> int:
    """Exit code 0, or 3 where there is no such GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=shape_of, default="4096x4096x2048", help="MxKxN")
    parser.add_argument(
        "--patterns", type=patterns_of, default="vector:128,shflbw:128,block:128x128,vector:64,nm:2:4"
    )
    parser.add_argument("--sparsities", type=sparsities_of, default="0.5,0.75,0.9,0.95")
    arguments = parser.parse_args()
    shape = arguments.shape
    try:
        machine = CupyMachine.current()
    except (MissingLibrary, NoDevice) as error:
        print(error, file=sys.stderr)
        return 3
    if machine.architecture != sm90.ARCHITECTURE:
        print(f"these kernels are for {sm90.ARCHITECTURE}, and this GPU is {machine.architecture}", file=sys.stderr)
        return 3
    dense, name = dense_seconds(shape)
    rate = 2 * shape.m * shape.k * shape.n / dense / 1e12
    print(f"{shape.m}x{shape.k} on {shape.n}: dense {dense * 1e6:.2f} us, {rate:.0f} TFLOP/s, {name}")
    for pattern in arguments.patterns:
        for sparsity in (pattern.sparsity,) if isinstance(pattern, NM) else arguments.sparsities:
            report(shape, pattern, sparsity, dense, print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
