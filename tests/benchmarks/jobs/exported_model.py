"""An exported model beside the converted torch module: time of a call, cold start, memory, and bytes.

    python tests/benchmarks/jobs/exported_model.py [TASK] [--to c] [--pruned FOLDER] [--pattern vector:16]
        [--sparsity 0.9] [--batch COUNT] [--threads 1,2] [--rounds 15]

Without a pruned folder all layers but the excluded ones are pruned by magnitude: times do not depend on how layers
were pruned. Each side runs in a process of its own, in turns: a burst of calls, then the other's. Prints the median
of the bursts' medians, the ratio, and the memory that each process has of its own. Cold starts are whole processes,
from their start to the first result on disk; that of torch imports latbench, loads the pruned folder, and calls it,
with kernels that are compiled already.

Memory: what a process that has called the exported model has of its own, beyond one that has called the same engine
with one small dense layer. Beside it stand the bytes of the weights: packed ones of one CPU level, and the others.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from latbench.base.deployed_forms import EXPORTED_FORMS, OPENVINO, TORCH_PACKAGE, C
from search.artifacts.layer_database import hash_model
from search.artifacts.profile import LayerChoice, Profile
from search.example_inputs import ExampleInputs
from search.export.export_model import export_model
from search.export.export_steps import ExportRequest, spread_batches
from search.export.model_to_export import read_pruned_model
from search.pruning.storage.model_folder import save_pruned
from search.task import Task, load_task
from sparse_kernels.cpu.export.shared_library import find_compiler
from sparse_kernels.patterns import parse
from sparse_kernels.prunable_layers import set_weight_matrix, survey_layers, weight_matrix

BURST_SECONDS, WARMING, STARTS = 0.1, 20, 11


def main() -> None:
    """Prune where nothing is pruned yet, export, time, print."""
    given = _arguments()
    if given.task.endswith(".py"):
        given.task = str(Path(given.task).resolve())  # programs run in other folders
    task = load_task(given.task)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pruned = given.pruned or prune_by_magnitude(folder / "pruned", task, given.pattern, given.sparsity)
        deploy, threads = folder / "deploy", [int(each) for each in given.threads.split(",")]
        began = time.perf_counter()
        batches = None if given.batch is None else [given.batch]
        request = ExportRequest(batches=batches, threads=threads)
        manifest = export_model(given.to, partial(read_pruned_model, task, pruned), deploy, request)
        print(f"export: {time.perf_counter() - began:.0f} s, levels {', '.join(manifest['levels'])}")
        print(", ".join(f"{file} {size / 1e6:.2f} MB" for file, size in manifest["bytes"].items() if size > 1e5))
        print(f"largest difference from the pruned model: {manifest['error']:.1e} of its largest result")
        for count in threads:
            compare_calls(Sides(given.task, pruned, deploy, given.to, given.batch, count), given.rounds)
        compare_starts(Sides(given.task, pruned, deploy, given.to, given.batch, 1), folder)
        compare_memory(deploy, given.to, folder / "inputs.npz", manifest)


class Sides(NamedTuple):
    """What is compared: a task's pruned folder and its exported one, at a batch and a number of threads."""

    task: str
    pruned: Path
    deploy: Path
    form: str
    batch: int | None
    threads: int

    def read_example(self) -> ExampleInputs:
        """Return the task's example, with the batch."""
        example = load_task(self.task).example()
        if self.batch is None:
            return example
        left = iter(spread_batches(example.tensors(), [self.batch])[0])
        return example.map_tensors(lambda _: next(left))


def prune_by_magnitude(folder: Path, task: Task, pattern: str, sparsity: float) -> Path:
    """Return the folder of the task's model, pruned to one option."""
    model = task.model()
    layers = [name for name in survey_layers(model).taken if name not in task.limits.excluded]
    masks = {}
    for name in layers:
        module = model.get_submodule(name)
        matrix = weight_matrix(module)
        masks[name] = torch.from_numpy(parse(pattern).mask(matrix.square().numpy(), sparsity))
        set_weight_matrix(module, torch.where(masks[name], matrix, 0.0))
    choices = {name: LayerChoice(pattern, sparsity, 1e-3, 1e-3, 1e-3, 0.0) for name in layers}
    facts: dict[str, Any] = dict.fromkeys([  # of a search that there was not
        "dense_seconds", "dense_seconds_low", "dense_seconds_high", "fixed_seconds", "fixed_seconds_low",
        "fixed_seconds_high", "predicted_seconds", "predicted_low", "predicted_high", "loss", "error", "bound",
        "confidence", "additivity_before", "additivity_after", "target",
    ], 1.0)  # fmt: skip
    facts |= dict.fromkeys(["device", "dense_engine", "strategy", "table_hash", "inputs"], "none")
    profile = Profile(
        task=task.name, layers=choices, backend="numba", threads=torch.get_num_threads(), batch=1, ceiling=None,
        seed=0, model_hash=hash_model(model), **facts,
    )  # fmt: skip
    save_pruned(folder, model, masks, profile, {"task": task.name})
    return folder


def compare_calls(sides: Sides, rounds: int) -> None:
    """Time both in turns, and print the medians."""
    context = get_context("spawn")
    found: dict[str, list[float]] = {}
    workers, bytes_used = {}, {}
    for side, work in (("torch module", serve_module), (sides.form, serve_exported)):
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, sides), daemon=True)
        process.start()
        here.recv()
        workers[side], found[side] = here, []
        bytes_used[side] = psutil.Process(process.pid).memory_full_info().uss
    for _ in range(rounds):
        for side, pipe in workers.items():
            pipe.send(True)
            found[side].append(pipe.recv())
    medians = {side: statistics.median(times) for side, times in found.items()}
    ratios = [c / t for c, t in zip(found[sides.form], found["torch module"], strict=True)]
    print(
        f"batch {sides.batch or 'of the example'}, {sides.threads} threads: "
        + ", ".join(f"{side} {1e6 * seconds:.1f} us" for side, seconds in medians.items())
        + f"; {sides.form} / torch {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}); own memory "
        + ", ".join(f"{side} {size / 1e6:.0f} MB" for side, size in bytes_used.items())
    )
    for pipe in workers.values():
        pipe.send(False)


def serve_module(pipe: Connection, sides: Sides) -> None:
    """Time the converted module each time that the pipe asks for it."""
    import latbench as lb

    example = sides.read_example()
    given = dict(example.keywords) if example.keywords else example.arguments
    module = lb.load(sides.pruned, load_task(sides.task).model(), given, threads=sides.threads)
    example.call(module)
    torch.set_num_threads(sides.threads)  # again: when its threads start, OpenMP takes as many as there are cores
    _serve(pipe, lambda: example.call(module))


def serve_exported(pipe: Connection, sides: Sides) -> None:
    """Time the exported model each time that the pipe asks for it."""
    import latbench as lb

    arrays = [each.numpy() for each in sides.read_example().tensors()]
    model: Any = lb.load(sides.deploy, threads=sides.threads)
    _serve(pipe, lambda: model(*arrays))


def _serve(pipe: Connection, call: Any) -> None:
    for _ in range(WARMING):
        call()
    pipe.send(True)
    while pipe.recv():
        times: list[float] = []
        while sum(times) < BURST_SECONDS:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        pipe.send(statistics.median(times))


def compare_starts(sides: Sides, folder: Path) -> None:
    """Time whole processes, and print the medians."""
    arrays = [each.numpy() for each in sides.read_example().tensors()]
    np.savez(folder / "inputs.npz", *arrays)
    read = "import sys, numpy as np, latbench as lb; x = [*np.load('inputs.npz').values()]; "
    exported = read + "y = lb.load(sys.argv[1])(*x); np.save('y', y[0] if isinstance(y, tuple) else y)"
    module = (
        "import sys, torch, numpy as np, latbench as lb; from search.task import load_task; "
        "task = load_task(sys.argv[2]); example = task.example(); x = example.tensors(); "
        "given = dict(example.keywords) if example.keywords else example.arguments; "
        "from search.example_inputs import list_tensors; "
        "y = example.call(lb.load(sys.argv[1], task.model(), given)); np.save('y', list_tensors(y)[0].numpy())"
    )
    ways = {
        f"{sides.form}, in Python": [sys.executable, "-P", "-c", exported, str(sides.deploy)],
        "torch module": [sys.executable, "-P", "-c", module, str(sides.pruned), sides.task],
        **_build_program(sides, arrays),
    }
    for way, words in ways.items():
        times = []
        for _ in range(STARTS if way.endswith("C") else 5):
            began = time.perf_counter()
            subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - began)
        print(f"cold start, {way}: {1e3 * statistics.median(times):.1f} ms")


LAYER_ALONE = {
    OPENVINO: "import openvino as ov; o = ov.opset13; x = o.parameter([8, 8], np.float32); "
    "from search.export.openvino.openvino_model import OpenVINOModel; "
    "y = o.matmul(x, o.constant(np.ones((8, 8), np.float32)), False, False); "
    "run = ov.compile_model(ov.Model([y], [x], 'alone'), 'CPU'); run([np.ones((8, 8), np.float32)])",
    TORCH_PACKAGE: "import torch; from search.export.torch_package.torch_model import TorchModel; "
    "torch.nn.Linear(8, 8)(torch.ones(8, 8))",
    C: "from search.export.c_library.exported_model import ExportedModel",
}
"""What a process does that has an engine and no model."""


def compare_memory(deploy: Path, form: str, inputs: Path, manifest: dict[str, Any]) -> None:
    """Print the memory of the exported model, and the bytes of its weights."""
    start = "import sys, psutil, numpy as np, latbench as lb; "
    tell = "; print(psutil.Process().memory_full_info().uss)"
    whole = "x = [*np.load(sys.argv[2]).values()]; model = lb.load(sys.argv[1]); [model(*x) for _ in range(9)]"
    both = []
    for work in (whole, LAYER_ALONE[form]):
        words = [sys.executable, "-P", "-c", start + work + tell, str(deploy), str(inputs)]
        both.append(int(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
    sizes = manifest["bytes"]
    packed = sizes["model.latbench"] / len(manifest["levels"])
    rest = sum(sizes.get(name, 0) for name in ("model.bin", "model.pt2"))
    used = both[0] - both[1]
    print(
        f"memory of the model: {used / 1e6:.1f} MB beyond {both[1] / 1e6:.1f} MB of the engine; its weights: "
        f"{packed / 1e6:.1f} MB packed, {rest / 1e6:.1f} MB others; memory / weights {used / (packed + rest):.2f}"
    )


def _build_program(sides: Sides, arrays: list[np.ndarray]) -> dict[str, list[str]]:
    """Compile the example in C, and return its command; none for another form."""
    if sides.form != C:
        return {}
    command = [*find_compiler(), "-O2", "-I.", "main.c", "-o", "main", "-L.", "-lmodel", "-Wl,-rpath,$ORIGIN"]
    subprocess.run(command, cwd=sides.deploy, check=True)
    arrays[0].tofile(sides.deploy / "inputs.bin")
    run = f"cd {sides.deploy} && ./main inputs.bin outputs.bin 1"
    return {"C": ["sh", "-c", run]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="digits")
    parser.add_argument("--pruned", type=lambda path: Path(path).resolve())
    parser.add_argument("--pattern", default="vector:16")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--to", choices=EXPORTED_FORMS, default=C)
    parser.add_argument("--batch", type=int, help="default: that of the task's example")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    main()
