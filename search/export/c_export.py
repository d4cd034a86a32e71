"""`latbench export --to c`: a pruned folder to a folder that is deployed without Python.

- libmodel.so: the kernels of the model for each CPU level, the runtime, and the chain of model.c
- latbench.h, model.h: what programs include
- model.latbench: the packed weights
- model.c: the chain; it is part of libmodel.so
- main.c, example.py: examples, which call the library
- profile.json, expected.npz: the promise, and results for the task's example; `latbench verify` reads them
- manifest.json: levels, batches, threads, layers and their kernels; bytes and SHA-256 of the other files
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from latbench.errors import EnvironmentUnusable, UsageError
from search.artifacts.profile import read_profile
from search.deployment import C
from search.export.chain_source import MAIN, generate_chain, generate_header, generate_python_example
from search.export.export_manifest import LIBRARY, PACKED, write_manifest
from search.export.export_steps import (
    ExportRequest,
    PrunedResults,
    check_for_compiler,
    check_output,
    choose_levels,
    compile_levels,
    explain_refusals,
    explain_writes,
    replace_folder,
    spread_batches,
    write_promise,
)
from search.export.model_chain import ModelChain, trace_chain
from search.pruning.storage.model_folder import load_pruned
from search.task import Task
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.cpu.export.exported_library import ExportedLibrary
from sparse_kernels.cpu.export.level_job import CompiledLevel
from sparse_kernels.cpu.export.library_id import VERSION
from sparse_kernels.cpu.export.packed_weights import build_packed_file
from sparse_kernels.cpu.export.shared_library import HEADER, NoCompiler, find_needed_libc, link_library
from sparse_kernels.prunable_layers import bake_weights


def export_to_c(
    task: Task,
    pruned: Path,
    output: Path,
    request: ExportRequest,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Export a pruned model as a C library, check that it computes the same, and return its manifest.

    Parameters
    ----------
    task : Task
        The task whose model was pruned.
    pruned : Path
        Folder from `latbench prune`.
    output : Path
        Folder to write: absent, empty, or an earlier export.
    request : ExportRequest
        CPU levels, batches and threads.
    progress : callable
        Told what is done next.

    Returns
    -------
    dict of str to object
        The manifest.

    Raises
    ------
    UsageError
        The model is no chain of supported layers, or the request cannot be met.
    EnvironmentUnusable
        There is no C compiler, or this machine lacks a CPU level, memory or disk.
    BadData
        The pruned folder is damaged or of another model.
    RuntimeError
        The exported model does not run, or gives other results: a fault of latbench.
    """
    levels = choose_levels(request.levels)
    check_for_compiler()
    check_output(output)
    model, choices = load_pruned(pruned, task.model())
    bake_weights(model)
    x = _read_example(task)
    chain, results = trace_chain(model, choices, x), PrunedResults(model, _convert(model, choices, x))
    batches = sorted({1, *(request.batches or (len(x),))})
    threads = sorted({1, *(request.threads or (read_profile(pruned / "profile.json").threads,))})
    compiled = compile_levels(levels, chain.layers, _count_tokens(chain, batches), threads, progress)
    facts = {"form": C, "levels": [each.name for each in levels], "batches": batches, "threads": threads}
    with replace_folder(output) as folder:
        progress("linking")
        with explain_writes(output):
            _write_files(folder, chain, compiled)
        progress("checking results")
        error = _check_results(folder, chain, results, spread_batches([x], batches), facts)
        with explain_writes(output):
            facts |= {"error": error} | write_promise(folder, pruned, results.compute([x]))
            return _describe_export(folder, chain, facts)


def _read_example(task: Task) -> Tensor:
    example = task.example()
    given = [*example.arguments, *example.keywords.values()]
    if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dtype != torch.float32:
        raise UsageError(f"task {task.name} cannot be exported to C: its example is not one float32 tensor")
    return given[0]


def _convert(model: nn.Module, choices: Mapping[str, LayerPattern], x: Tensor) -> nn.Module:
    """Return the converted model: its layers round as the exported ones do."""
    try:
        return convert(model, choices, (x.clone(),))
    except ValueError as error:
        raise UsageError(f"the model cannot be exported: {error}") from error


def _count_tokens(chain: ModelChain, batches: Sequence[int]) -> dict[str, list[int]]:
    """Return the tokens or images of each layer's calls. A layer may see several tokens of an input."""
    floats = {step.layer: chain.count_floats(step.output) for step in chain.steps}
    sizes = {}
    for layer in chain.layers:
        tokens = floats[layer.name] // layer.weight.shape[0] if layer.image is None else 1
        sizes[layer.name] = sorted({1, *(batch * tokens for batch in batches)})
    return sizes


def _write_files(folder: Path, chain: ModelChain, levels: Sequence[CompiledLevel]) -> None:
    texts = {
        "model.h": generate_header(chain), "model.c": generate_chain(chain), "main.c": MAIN,
        "example.py": generate_python_example(chain), HEADER.name: HEADER.read_text(encoding="utf-8"),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    sources = [folder / "model.h", folder / "model.c"]
    (folder / PACKED).write_bytes(build_packed_file(levels, sources))
    try:
        link_library(folder / LIBRARY, levels, sources)
    except NoCompiler as error:
        raise EnvironmentUnusable(f"the model cannot be exported: {error}") from None


def _check_results(
    folder: Path, chain: ModelChain, results: PrunedResults, inputs: Sequence[Sequence[Tensor]], facts: dict[str, Any]
) -> float:
    """Return how far deployed results are from the converted model's, as a share of its largest; raise if far.

    facts: the CPU levels and numbers of threads.
    """
    worst = 0.0
    for level in facts["levels"]:
        with explain_refusals():
            library = ExportedLibrary(folder / LIBRARY, folder / PACKED, level)
        for threads, (x,) in itertools.product(facts["threads"], inputs):
            with explain_refusals():
                found = torch.from_numpy(library.run(x.numpy(), chain.shapes[chain.result], threads))
            right, apart = results.compare([found], [x])
            if not right:
                raise RuntimeError(
                    f"the exported model gives other results than the pruned one at CPU level {level}, with "
                    f"{threads} threads, for a batch of {len(x)}"
                )
            worst = max(worst, apart)
    return worst


def _describe_export(folder: Path, chain: ModelChain, facts: dict[str, Any]) -> dict[str, Any]:
    """Write what was exported, and return it."""
    library = ExportedLibrary(folder / LIBRARY, folder / PACKED)
    batch, threads = facts["batches"][-1], facts["threads"][-1]
    layers = {
        layer.name: {
            "shape": layer.weight.shape,
            "pattern": str(layer.weight.pattern),
            "activation": layer.activation,
            "kernel": library.name_kernel(layer.name, batch, threads),
        }
        for layer in chain.layers
    }
    return write_manifest(
        folder,
        {"version": VERSION, **facts, "libc": find_needed_libc(folder / LIBRARY), "input": chain.shapes[0],
         "output": chain.shapes[chain.result], "layers": layers},
    )  # fmt: skip
