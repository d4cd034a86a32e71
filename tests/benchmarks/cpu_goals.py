"""How far the CPU kernels are from what latbench means them to reach: one table, every engine in turns.

    python tests/benchmarks/cpu_goals.py [--threads 2,1] [--rounds 5] [--only linear,few,resnet50]

linear      the five layers of `cpu_kernels` with 128 and 2,048 tokens, warm, as torch has its tensors (token-major):
            over the fastest dense engine, and over DeepSparse with as many zeros, single ones (it runs each layer
            alone, hot; inside a network it is slower)
few         the same with 1 and 8 tokens, weights from memory: beside a plain sum over as many bytes
resnet50    its 1x1 and 3x3 convolutions with 1 and 16 images, in the frames in which a converted model keeps them
int8        (only where --int8 is given) linear layers and convolutions in eight bits, over the fastest dense engine
            in eight bits, and over our own layers of the same pattern and sparsity in float32

A line is a figure: the median of the layers (least-most), what is asked, and whether the median reaches it; of linear
layers every one is asked. Engines, turns, rounds and medians are those of cpu_kernels.py, which shows one shape in
detail.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
from cpu_kernels import BASELINES, INT8, Key, Measured, engines, measure

from latbench.workloads.workload import read_workload
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape


@dataclass(frozen=True)
class Goal:
    """What is asked of a pattern at a sparsity, over `peer` (the fastest dense engine by default)."""

    key: Key
    least: float
    peer: str | None = None


def shuffled(at_75: float, at_90: float) -> list[Goal]:
    """The goals of both widths of Shfl-BW; vector:32, the same without a shuffle, stands beside them."""
    specs = ("shflbw:32", "shflbw:64", "vector:32")
    return [Goal((spec, s), least) for spec in specs for s, least in ((0.75, at_75), (0.9, at_90))]


OVER_DEEPSPARSE = [
    Goal(("shflbw:32", 0.75), 2.0, "DeepSparse 75%"),
    Goal(("shflbw:32", 0.9), 2.0, "DeepSparse 90%"),
    Goal(("unstructured", 0.9), 1.0, "DeepSparse 90%"),
]
OF_128 = [
    *shuffled(3.8, 9.0), Goal(("vector:4", 0.75), 3.0), Goal(("vector:4", 0.9), 7.5),
    Goal(("nm:1:4", 0.75), 1.5), Goal(("nm:2:4", 0.5), 0.9), *OVER_DEEPSPARSE,
]  # fmt: skip
LINEAR = {128: OF_128, 2048: [*shuffled(3.5, 8.0), *OVER_DEEPSPARSE]}
INT8_LINEAR = [
    Goal(("block:32x4 int8", 0.75), 2.7), Goal(("block:32x4 int8", 0.9), 5.5), Goal(("shflbw:32x4 int8", 0.75), 2.7),
    Goal(("shflbw:32x4 int8", 0.9), 5.5), Goal(("dense int8", 0.0), 0.9),
    Goal(("dense int8", 0.0), 0.9, "OpenVINO int8"),
    Goal(("block:1x4 int8", 0.9), 1.0), Goal(("block:4x4 int8", 0.9), 1.0),
    Goal(("block:1x4 int8", 0.9), 1.0, "DeepSparse int8 90%"),
    Goal(("block:32x4 int8", 0.9), 1.5, "DeepSparse int8 90%"),
    Goal(("dense int8", 0.0), 0.9, "DeepSparse int8"),
]  # fmt: skip
INT8_CONV = [Goal((f"block:{size}x4 int8", 0.75), 2.0) for size in (4, 8, 16, 32)]
FEW_TOKENS = (1, 8)
FEW_SPECS = ("shflbw:32", "shflbw:64", "vector:4", "unstructured")
OF_READING = 0.8
CONV_SPECS = ("shflbw:32", "vector:32", "vector:8")
CONV_GOALS = [Goal((spec, s), least) for spec in CONV_SPECS for s, least in ((0.75, 2.5), (0.9, 5.0))]


def line(what: str, values: Sequence[float], least: float, each: bool) -> None:
    """One figure; `each` of the values must reach it, or their median."""
    reached = (min(values) if each else float(np.median(values))) >= least
    verdict = "reached" if reached else f"{np.median(values) / least:.0%} of it in the median"
    if each and not reached:
        verdict += f", {sum(value >= least for value in values)} of {len(values)} layers reach it"
    print(
        f"  {what:34} {np.median(values):5.2f} ({min(values):.2f}-{max(values):.2f})  asked {least:<4g} {verdict}",
        flush=True,
    )


def over_peers(found: list[Measured], goals: Sequence[Goal], each: bool) -> None:
    """A line a goal, and which dense engines were the fastest."""
    for engines_of in (BASELINES, [*INT8]) if any("int8" in goal.key[0] for goal in goals) else (BASELINES,):
        names = [one.fastest(engines_of) for one in found]
        print("  dense: " + ", ".join(f"{name} in {names.count(name)}" for name in dict.fromkeys(names)))
    for goal in goals:
        known = [one for one in found if goal.key in one.ours and (goal.peer is None or goal.peer in one.peers)]
        if known:
            over = f" over {goal.peer}" if goal.peer else ""
            speedups = [one.speedup(goal.key, goal.peer) for one in known]
            line(f"{goal.key[0]} {goal.key[1]:.0%}{over}", speedups, goal.least, each)


def linear_shapes(tokens: int) -> list[LinearShape]:
    """The layers of the bundled workload, with so many tokens."""
    shapes = [layer.shape for layer in read_workload("cpu_kernels").layers]
    return [LinearShape(shape.m, shape.k, tokens) for shape in shapes]


def convolutions(workload: str) -> list[Shape]:
    """The distinct 1x1 and 3x3 layers."""
    shapes = dict.fromkeys(layer.shape for layer in read_workload(workload).layers)
    return [shape for shape in shapes if isinstance(shape, Conv2dShape) and shape.kh in (1, 3)]


def measure_int8(only: str, warm: argparse.Namespace, framed: argparse.Namespace) -> None:
    """Print the figures of layers in eight bits."""
    with engines(warm.threads, int8=True) as peers:
        for tokens in (128, 2048) if "linear" in only else ():
            print(f"{tokens} tokens, {warm.threads} threads, eight bits", flush=True)
            specs = list(dict.fromkeys(goal.key[0].split()[0] for goal in INT8_LINEAR))
            found = [measure(s, peers, specs, warm) for s in linear_shapes(tokens)]
            over_peers(found, INT8_LINEAR, each=True)
            for spec, sparsity in dict.fromkeys(goal.key for goal in INT8_LINEAR):
                own = (spec.split()[0], sparsity)
                ratios = [float(np.median(np.divide(one.ours[own], one.ours[spec, sparsity]))) for one in found]
                line(f"{spec} {sparsity:.0%} over float32", ratios, 2.5, each=True)
        for workload in ("resnet50", "resnet50-batch16") if "resnet50" in only else ():
            print(f"{workload}, 1x1 and 3x3, {warm.threads} threads, eight bits", flush=True)
            specs = [goal.key[0].split()[0] for goal in INT8_CONV]
            found = [measure(s, peers, specs, framed) for s in convolutions(workload)]
            over_peers(found, INT8_CONV, each=False)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="2,1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="linear,few,resnet50")
    parser.add_argument("--int8", action="store_true", help="only layers in eight bits")
    given = parser.parse_args()
    for threads in map(int, given.threads.split(",")):
        numba.set_num_threads(threads)
        plain = {
            "threads": threads, "rounds": given.rounds, "layout": "token_major", "bf16": False, "int8": given.int8,
        }  # fmt: skip
        warm = argparse.Namespace(**plain, frames=False, cold=False)
        cold = argparse.Namespace(**plain, frames=False, cold=True)
        framed = argparse.Namespace(**plain, frames=True, cold=False)
        if given.int8:
            measure_int8(given.only, warm, framed)
            continue
        with engines(threads) as peers:
            for tokens, goals in LINEAR.items() if "linear" in given.only else ():
                print(f"{tokens} tokens, {threads} threads", flush=True)
                specs = list(dict.fromkeys(goal.key[0] for goal in goals))
                over_peers([measure(s, peers, specs, warm) for s in linear_shapes(tokens)], goals, each=True)
            for tokens in FEW_TOKENS if "few" in given.only else ():
                print(f"{tokens} tokens, {threads} threads: share of the speed of reading", flush=True)
                found = [measure(s, peers, FEW_SPECS, cold) for s in linear_shapes(tokens)]
                for key in found[0].ours:
                    shares = [one.share_of_reading(key) for one in found]
                    line(f"{key[0]} {key[1]:.0%}", shares, OF_READING, each=True)
            for workload in ("resnet50", "resnet50-batch16") if "resnet50" in given.only else ():
                print(f"{workload}, 1x1 and 3x3, {threads} threads", flush=True)
                found = [measure(s, peers, CONV_SPECS, framed) for s in convolutions(workload)]
                over_peers(found, CONV_GOALS, each=False)


if __name__ == "__main__":
    main()
