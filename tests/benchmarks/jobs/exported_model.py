"""An exported model beside the converted torch module: time of a call, cold start, and bytes.

    python tests/benchmarks/jobs/exported_model.py [TASK] [--pruned FOLDER] [--pattern vector:16] [--sparsity 0.9]
        [--batch 128] [--threads 1,2] [--rounds 15]

Without a pruned folder all layers but the excluded ones are pruned by magnitude: times do not depend on how layers
were pruned. Each side runs in a process of its own, in turns: a burst of calls, then the other's. Prints the median
of the bursts' medians, and the ratio. Cold starts are whole processes, from their start to the first result on disk;
that of Python imports latbench, loads the pruned folder, and calls it, with kernels that are compiled already.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from search.artifacts.layer_database import hash_model
from search.artifacts.profile import LayerChoice, Profile
from search.export.c_export import export_to_c
from search.export.export_steps import ExportRequest
from search.pruning.storage.model_folder import save_pruned
from search.task import Task, load_task
from sparse_kernels.cpu.export.shared_library import find_compiler
from sparse_kernels.patterns import parse
from sparse_kernels.prunable_layers import set_weight_matrix, survey_layers, weight_matrix

BURST, WARMING, STARTS = 40, 20, 11


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
        manifest = export_to_c(task, pruned, deploy, ExportRequest(batches=[given.batch], threads=threads))
        print(f"export: {time.perf_counter() - began:.0f} s, levels {', '.join(manifest['levels'])}")
        print(", ".join(f"{file} {size / 1e6:.2f} MB" for file, size in manifest["bytes"].items() if size > 1e5))
        print(f"largest difference from the pruned model: {manifest['error']:.1e} of its largest result")
        for count in threads:
            compare_calls(given.task, pruned, deploy, given.batch, count, given.rounds)
        compare_starts(given.task, pruned, deploy, given.batch, folder)


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


def compare_calls(task: str, pruned: Path, deploy: Path, batch: int, threads: int, rounds: int) -> None:
    """Time both in turns, and print the medians."""
    context = get_context("spawn")
    found: dict[str, list[float]] = {}
    workers = {}
    for side, work in (("torch module", serve_module), ("C library", serve_library)):
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, task, pruned, deploy, batch, threads), daemon=True)
        process.start()
        here.recv()
        workers[side], found[side] = here, []
    for _ in range(rounds):
        for side, pipe in workers.items():
            pipe.send(True)
            found[side].append(pipe.recv())
    medians = {side: statistics.median(times) for side, times in found.items()}
    ratios = [c / t for c, t in zip(found["C library"], found["torch module"], strict=True)]
    print(
        f"batch {batch}, {threads} threads: "
        + ", ".join(f"{side} {1e6 * seconds:.1f} us" for side, seconds in medians.items())
        + f"; C / torch {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
    )
    for pipe in workers.values():
        pipe.send(False)


def serve_module(pipe: Connection, task: str, pruned: Path, deploy: Path, batch: int, threads: int) -> None:
    """Time the converted module each time that the pipe asks for it."""
    import latbench as lb

    loaded = load_task(task)
    x = _repeat(loaded, batch)
    module = lb.load(pruned, loaded.model(), x, threads=threads)
    module(x)
    torch.set_num_threads(threads)  # again: when its threads start, OpenMP takes as many as there are cores
    _serve(pipe, lambda: module(x))


def serve_library(pipe: Connection, task: str, pruned: Path, deploy: Path, batch: int, threads: int) -> None:
    """Time the library each time that the pipe asks for it."""
    from sparse_kernels.cpu.export.exported_library import ExportedLibrary

    x = _repeat(load_task(task), batch).numpy()
    library = ExportedLibrary(deploy / "libmodel.so", deploy / "model.latbench")
    outputs = tuple(_read_outputs(deploy))
    _serve(pipe, lambda: library.run(x, outputs, threads))


def _serve(pipe: Connection, call: Any) -> None:
    for _ in range(WARMING):
        call()
    pipe.send(True)
    while pipe.recv():
        times = []
        for _ in range(BURST):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        pipe.send(statistics.median(times))


def compare_starts(task: str, pruned: Path, deploy: Path, batch: int, folder: Path) -> None:
    """Time whole processes, and print the medians."""
    command = [*find_compiler(), "-O2", "-I.", "main.c", "-o", "main", "-L.", "-lmodel", "-Wl,-rpath,$ORIGIN"]
    subprocess.run(command, cwd=deploy, check=True)
    x = _repeat(load_task(task), batch)
    x.numpy().tofile(deploy / "inputs.bin")
    code = (
        "import sys, numpy as np, torch, latbench as lb; from search.task import load_task; "
        "task = load_task(sys.argv[1]); example, = task.example().arguments; "
        "x = torch.from_numpy(np.fromfile('inputs.bin', np.float32)).reshape(-1, *example.shape[1:]); "
        "lb.load(sys.argv[2], task.model(), x)(x).numpy().tofile(sys.argv[3])"
    )
    (deploy / "batch.py").write_text(
        (deploy / "example.py").read_text().rsplit("print(", 1)[0]
        + "y = run(np.fromfile('inputs.bin', np.float32).reshape(-1, *SHAPE))\ny.tofile('outputs.bin')\n".replace(
            "SHAPE", repr(tuple(x.shape[1:]))
        )
    )
    ways = {
        "C": ["./main", "inputs.bin", "outputs.bin", "1"],
        "NumPy and ctypes": [sys.executable, "batch.py"],
        "torch module": [sys.executable, "-P", "-c", code, task, str(pruned), str(folder / "outputs.bin")],
    }
    for way, words in ways.items():
        times = []
        for _ in range(STARTS if way == "C" else 5):
            began = time.perf_counter()
            subprocess.run(words, cwd=deploy, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - began)
        print(f"cold start, {way}: {1e3 * statistics.median(times):.1f} ms")


def _repeat(task: Task, batch: int) -> torch.Tensor:
    """Return the task's example, repeated or cut to a batch."""
    (x,) = task.example().arguments
    repeated: torch.Tensor = x.repeat(-(-batch // len(x)), *[1] * (x.ndim - 1))[:batch]
    return repeated.contiguous()


def _read_outputs(deploy: Path) -> list[int]:
    import json

    outputs: list[int] = json.loads((deploy / "manifest.json").read_text())["output"]
    return outputs


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="digits")
    parser.add_argument("--pruned", type=lambda path: Path(path).resolve())
    parser.add_argument("--pattern", default="vector:16")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


if __name__ == "__main__":
    main()
