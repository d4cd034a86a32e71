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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latbench.base.deployed_forms import C
from latbench.errors import EnvironmentUnusable, UsageError
from search.example_inputs import ExampleInputs
from search.export.c_library.chain_source import MAIN, generate_chain, generate_header, generate_python_example
from search.export.c_library.model_chain import ModelChain, trace_chain
from search.export.export_manifest import LIBRARY, PACKED, write_manifest
from search.export.export_steps import (
    ExportRequest,
    PrunedResults,
    check_for_compiler,
    check_output,
    choose_levels,
    compile_levels,
    describe_request,
    explain_refusals,
    explain_writes,
    replace_folder,
    spread_batches,
    write_promise,
)
from search.export.model_to_export import ModelToExport
from search.task import Task
from sparse_kernels.cpu.export.exported_library import ExportedLibrary
from sparse_kernels.cpu.export.level_job import CompiledLevel
from sparse_kernels.cpu.export.library_id import VERSION
from sparse_kernels.cpu.export.packed_weights import build_packed_file
from sparse_kernels.cpu.export.shared_library import HEADER, NoCompiler, find_needed_libc, link_library


def export_to_c(
    read_model: Callable[[], ModelToExport],
    output: Path,
    request: ExportRequest,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Export a pruned model as a C library, as `search.export.export_model.export_model` does."""
    levels = choose_levels(request)
    check_for_compiler()
    check_output(output)
    progress("reading the model")
    given = read_model()
    x = _read_example(given.task, given.example)
    given = replace(given, example=ExampleInputs((x,)))
    chain = trace_chain(given.model, given.choices, x)
    results = PrunedResults(given.pruned, given.convert())
    batches, threads = request.list_batches(len(x), 1), request.list_threads(given.threads)
    compiled = compile_levels(levels, chain.layers, _count_tokens(chain, batches), threads, progress)
    facts = describe_request(C, levels, batches, threads)
    inputs = spread_batches([x], batches)[: len(batches) if request.only_timed else None]
    with replace_folder(output) as folder:
        progress("linking")
        with explain_writes(output):
            _write_files(folder, chain, compiled)
        progress("checking results")
        error = _check_results(folder, chain, results, inputs, facts)
        with explain_writes(output):
            facts |= {"error": error} | write_promise(folder, given.folder, results.compute([x]))
            return _describe_export(folder, chain, facts)


def check_chain(task: Task) -> None:
    """Raise UsageError if the task's model is no chain of supported layers."""
    trace_chain(task.model(), {}, _read_example(task.name, task.example()))


def _read_example(task: str, example: ExampleInputs) -> Tensor:
    tensors = [*example.arguments, *example.keywords.values()]
    if len(tensors) != 1 or not isinstance(tensors[0], Tensor) or tensors[0].dtype != torch.float32:
        raise UsageError(f"task {task} cannot be exported to C: its example is not one float32 tensor")
    return tensors[0]


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
