"""A model with one pattern at one sparsity in all of its layers, beside every dense engine: prints a table.

    python tests/benchmarks/whole_model.py tests/tasks/bert_base.py [--pattern shflbw:32] [--sparsity 0.9] [--batch 8]
    python tests/benchmarks/whole_model.py tests/tasks/bert_base.py --pattern block:32x4 --precision int8

Dense engines that round as far as the pruned model are timed beside it.

Masks are random: they take the time that others take. Engines are timed as `latbench verify` does it: each in a
process of its own, in turns, built anew three times. DeepSparse, where `latbench setup deepsparse` has put it, runs
the model dense, and with as many zeros anywhere (unstructured).

The last lines compare the pruned model with the sum of its parts: its layers one by one, each with the activations
that it gets, just written, and cold weights, and what is left of the model when its layers are free. What is timed of
a layer is what a free one does not do; the call of its module belongs to the rest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from latbench.base.engine_registry import FLOAT32, NUMBA, PRECISIONS
from latbench.runners.worker_process import Worker
from latbench.sweeping.core_placement import CorePlacement
from search.deployment import Deployment
from search.problem.layers import Option
from search.task import Task, load_task
from search.traced_layers import list_prunable_layers
from search.whole_model.end_to_end import MAX_BURST_TRIES, EngineBuilder, ModelTimer, RoundSchedule
from search.whole_model.engine_builders import build_dense_engines
from search.whole_model.model_engines import DENSE_ENGINES, build_random_pruned
from search.whole_model.overhead import FREE
from search.whole_model.sessions import OptionsByLayer
from sparse_kernels import nn as sparse
from sparse_kernels.cpu.layouts.padded_images import FramedImages, QuadImages
from sparse_kernels.tensors.torch_tiles import TokenTiles

PRUNED = "pruned"
COVERAGE = 0.9
REPEATED = """
from search.task import Task, load_task
base = load_task({reference!r})
name = base.name
model, calibration, loss, score = base.model, base.calibration, base.loss, base.score
def example():
    return base.example().map_tensors(lambda x: x.repeat({batch}, *[1] * (x.ndim - 1)))
"""


def just_written(x: Any) -> Any:
    """A copy of a layer's input: in a model it comes from the caches, as what was before has just written it."""
    if isinstance(x, TokenTiles):
        return TokenTiles(x.values.clone(), x.lead)
    if isinstance(x, QuadImages):
        quads = QuadImages(x.places, x.input_range)
        quads.array[:] = x.array
        return quads
    if isinstance(x, FramedImages):
        images = FramedImages(x.places)
        images.array[:] = x.array
        if x.in_quads is not None:
            images.in_quads = just_written(x.in_quads)
        return images
    return x.clone()


def timed(layer: nn.Module, seconds: list[float]) -> None:
    """Let a sparse layer note how long each computation takes, which `build_layers_free` makes free."""
    for name in ("_multiply", "_by_address", "_over_frames"):
        if compute := getattr(layer, name, None):

            def noted(*of: Any, compute: Callable[..., Any] = compute) -> Any:
                start = time.perf_counter()
                y = compute(*of)
                seconds.append(time.perf_counter() - start)
                return y

            setattr(layer, name, noted)


def sum_of_layers(reference: str, choices: OptionsByLayer, threads: int) -> float:
    """Seconds that the sparse layers of the pruned model take one by one, in the order of their calls."""
    torch.set_num_threads(threads)
    task = load_task(reference)
    calls: list[tuple[sparse.SparseLayer, Any, dict[str, Any]]] = []
    build = sparse.SparseLayer.__call__
    run = build_random_pruned(reference, threads, NUMBA, choices)
    assert callable(run)

    def noted(layer: nn.Module, x: Any, **how: Any) -> Any:
        calls.append((layer, x, how))  # type: ignore[arg-type]
        return build(layer, x, **how)

    for kind in (sparse.SparseLinear, sparse.SparseConv2d):
        kind.__call__ = noted  # type: ignore[method-assign]
    run()
    for kind in (sparse.SparseLinear, sparse.SparseConv2d):
        del kind.__call__
    del task
    seconds: list[float] = []
    for layer in {layer for layer, _, _ in calls}:
        timed(layer, seconds)

    def a_round() -> list[float]:
        seconds.clear()
        for layer, x, how in calls:
            layer(just_written(x), **how)
        assert len(seconds) == len(calls)
        return [*seconds]

    with torch.inference_mode(), Worker(threads=threads, name="reference") as worker:
        placement = CorePlacement(worker, threads)
        rounds = [placement.together(a_round, MAX_BURST_TRIES)[0] for _ in range(40)]
    return float(np.median(np.array(rounds), axis=0).sum())


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", help="as for latbench search")
    parser.add_argument("--pattern", default="shflbw:32")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--batch", type=int, default=1, help="how often the task's inputs are repeated")
    parser.add_argument("--precision", choices=PRECISIONS, default=FLOAT32, help="in which its layers are multiplied")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--processes", type=int, default=3, help="how often each engine is built anew")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "repeated.py"
        reference = load_task(arguments.task).reference
        path.write_text(REPEATED.format(reference=reference, batch=arguments.batch))
        task = load_task(str(path))
        layers = list_prunable_layers(task, task.model())
        report(task, [*layers], arguments)


def report(task: Task, layers: list[str], arguments: argparse.Namespace) -> None:
    """Time and print."""
    threads, reference, precision = arguments.threads, task.reference, arguments.precision
    choices = dict.fromkeys(layers, Option(arguments.pattern, arguments.sparsity, precision))
    zeros = dict.fromkeys(layers, Option("unstructured", arguments.sparsity))
    engines = build_dense_engines(task, Deployment(threads, "deepsparse")) | build_dense_engines(
        task, Deployment(threads, precisions=tuple(dict.fromkeys((FLOAT32, precision))))
    )
    engines[PRUNED] = EngineBuilder(
        PRUNED, "search.whole_model.model_engines:build_random_pruned", (reference, threads, NUMBA, choices)
    )
    engines["deepsparse, pruned"] = EngineBuilder(
        "deepsparse, pruned",
        "search.whole_model.model_engines:build_random_pruned",
        (reference, threads, "deepsparse", zeros),
    )
    engines[FREE] = EngineBuilder(
        FREE, "search.whole_model.model_engines:build_layers_free", (reference, threads, choices)
    )
    schedule = RoundSchedule(arguments.processes, -(-arguments.rounds // arguments.processes))
    with ModelTimer(threads) as timer:
        timings = timer.time(engines, required=[PRUNED], schedule=schedule)
    fastest = timings.fastest([*DENSE_ENGINES])
    chosen = f"{arguments.pattern} {precision} at {arguments.sparsity:.0%}"
    print(f"{task.name}, {len(layers)} layers {chosen}, {threads} threads")
    for name in sorted(timings.blocks, key=lambda name: -timings.seconds(name, COVERAGE).value):
        seconds, ratio = timings.seconds(name, COVERAGE), timings.speedup(name, fastest, COVERAGE)
        print(
            f"  {name:26} {seconds.value * 1e3:8.2f} ms ({seconds.low * 1e3:.2f}-{seconds.high * 1e3:.2f})"
            f" {ratio.value:6.2f}x ({ratio.low:.2f}-{ratio.high:.2f}) of {fastest}"
        )
    for name, reason in timings.left_out.items():
        print(f"  {name:26} left out: {reason}")
    alone, rest = sum_of_layers(reference, choices, threads), timings.seconds(FREE, COVERAGE).value
    whole = timings.seconds(PRUNED, COVERAGE).value
    print(f"  layers one by one {alone * 1e3:.2f} ms + rest {rest * 1e3:.2f} ms = {(alone + rest) / whole - 1:+.1%}")


if __name__ == "__main__":
    main()
