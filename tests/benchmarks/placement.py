"""What it costs when a host moves this machine's cores to where they share no cache: both states, side by side.

    python tests/benchmarks/placement.py [--seconds 60] [--threads 2]

In turns: what one core hands on to the next (`latbench.sweeping.core_placement`), and a 1x1 convolution of stride 2,
256 channels of 56x56 to 512, Shfl-BW at 95% sparsity, whose threads read what the others laid out. On a machine whose
cores stay where they are there is one state.
"""

from __future__ import annotations

import argparse
import time

import numba
import numpy as np

from latbench.backends.cpu.prepare_point import build_synthetic_layer
from latbench.runners.worker_process import Worker
from latbench.sweeping.core_placement import CorePlacement
from latbench.workloads.points import Point
from sparse_kernels.patterns import parse
from sparse_kernels.planner import prepare_conv2d
from sparse_kernels.shapes import Conv2dShape

SHAPE = Conv2dShape(1, 256, 56, 56, 512, 1, 1, (2, 2))
CALLS = 100


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    numba.set_num_threads(given.threads)
    layer = build_synthetic_layer(Point("cpu", "numba", "auto", SHAPE, parse("shflbw:16"), 0.95, given.threads))
    plan = prepare_conv2d(layer.packed, SHAPE, "numba")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    changes, before = 0, False
    with Worker(threads=given.threads, name="reference") as worker:
        placement = CorePlacement(worker, given.threads)
        end = time.perf_counter() + given.seconds
        while time.perf_counter() < end:
            calls = []
            for _ in range(CALLS):
                start = time.perf_counter()
                plan(layer.x, layer.bias)
                calls.append(time.perf_counter() - start)
            time.sleep(0.005)  # until threads no longer spin
            apart = placement.apart()
            seconds[apart].append(float(np.median(calls)))
            changes, before = changes + (apart != before), apart
    for apart, found in seconds.items():
        if found:
            print(f"cores {'apart' if apart else 'together'}: {len(found)} times, {np.median(found) * 1e6:.0f} us")
    print(f"{changes} changes in {given.seconds:g} s")


if __name__ == "__main__":
    main()
