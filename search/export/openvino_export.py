"""`latbench export --to openvino`: a pruned folder to a model of OpenVINO whose pruned layers run latbench's kernels.

- model.xml, model.bin: the model, in which each pruned layer is an operation named SparseLayer
- libmodel.so: the extension of OpenVINO with this operation, its kernels for each CPU level, and the runtime
- model.latbench: the packed weights of the pruned layers
- main.cpp, example.py: examples
- manifest.json: levels, threads, versions, inputs, layers and their kernels; bytes and SHA-256 of the other files
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openvino as ov
import torch
from torch import Tensor, nn

from latbench.errors import EnvironmentUnusable, UsageError
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from search.artifacts.profile import read_profile
from search.example_inputs import ExampleInputs, TensorCall, convert_to_tensor_call
from search.export.export_manifest import GRAPH, LIBRARY, OPENVINO, PACKED, write_manifest
from search.export.export_steps import (
    ExportRequest,
    PrunedResults,
    check_for_compiler,
    check_output,
    choose_levels,
    compile_layers,
    explain_writes,
    replace_folder,
    spread_batches,
)
from search.export.model_chain import build_exported_layer
from search.export.openvino_examples import MAIN, PYTHON
from search.export.openvino_graph import LayerCalls, LayerGraph, record_calls
from search.export.openvino_model import LEVEL, name_release
from search.pruning.storage.model_folder import load_pruned
from search.task import Task
from search.user_code import call_user_code
from sparse_kernels.convert import LayerPattern, convert, copy_model
from sparse_kernels.cpu.export.layer_programs import ExportedLayer
from sparse_kernels.cpu.export.level_job import CompiledLevel
from sparse_kernels.cpu.export.library_id import VERSION
from sparse_kernels.cpu.export.packed_weights import build_packed_file
from sparse_kernels.cpu.export.shared_library import EXTENSION, Extension, NoCompiler, find_needed_libc, link_library
from sparse_kernels.prunable_layers import bake_weights

RUN_SECONDS = 600.0
"""Limit of the time in which a deployed model computes the inputs of its check."""


@dataclass(frozen=True)
class _LayersToExport:
    """The pruned layers, the sizes of their calls, and the graph around them."""

    layers: list[ExportedLayer]
    calls: Mapping[str, LayerCalls]
    graph: LayerGraph

    def list_sizes(self) -> dict[str, list[int]]:
        """List the tokens or images for which the kernels of each layer are chosen: one, and those of its calls."""
        return {name: sorted({1, *calls.sizes}) for name, calls in self.calls.items()}


def export_to_openvino(
    task: Task,
    pruned: Path,
    output: Path,
    request: ExportRequest,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Export a pruned model to OpenVINO, check that it computes the same, and return its manifest.

    Parameters
    ----------
    task : Task
        The task whose model was pruned.
    pruned : Path
        Folder from `latbench prune`.
    output : Path
        Folder to write: absent, empty, or an earlier export.
    request : ExportRequest
        CPU levels, batches and threads. The batch of the example is always one of the batches.
    progress : callable
        Told what is done next.

    Returns
    -------
    dict of str to object
        The manifest.

    Raises
    ------
    UsageError
        OpenVINO cannot import the model, no layer of it was pruned, or the request cannot be met.
    EnvironmentUnusable, BadData, RuntimeError
        As `search.export.c_export.export_to_c` does.
    """
    levels = choose_levels(request.levels)
    check_for_compiler()
    check_output(output)
    progress("reading the model")
    model, choices = load_pruned(pruned, task.model())
    bake_weights(model)
    example = task.example()
    called, converted = (convert_to_tensor_call(each, example) for each in (model, _convert(model, choices, example)))
    batches = sorted({example.batch, *(request.batches or ())})
    threads = sorted({1, *(request.threads or (read_profile(pruned / "profile.json").threads,))})
    inputs = spread_batches(called.tensors, batches) if request.batches else [list(called.tensors)]
    progress("importing into OpenVINO")
    found = _import_model(convert_to_tensor_call(copy_model(model), example), choices, inputs)
    compiled = []
    for level in levels:
        progress(f"compiling for {level.name}")
        compiled.append(compile_layers(level, found.layers, found.list_sizes(), threads))
    with replace_folder(output) as folder:
        progress("linking")
        with explain_writes(output):
            _write_files(folder, found.graph, compiled)
        progress("checking results")
        facts = {"form": OPENVINO, "levels": [each.name for each in levels], "batches": batches, "threads": threads}
        error = _check_results(folder, PrunedResults(called.model, converted.model), inputs, facts)
        with explain_writes(output):
            return write_manifest(folder, facts | {"error": error} | _describe_files(folder, found))


def _convert(model: nn.Module, choices: Mapping[str, LayerPattern], example: ExampleInputs) -> nn.Module:
    """Return the converted model: its layers round as the exported ones do."""
    copied = example.map_tensors(lambda each: each.clone())
    try:
        return convert(model, choices, copied.arguments, example_keywords=copied.keywords)
    except ValueError as error:
        raise UsageError(f"the model cannot be exported: {error}") from error


def _import_model(
    called: TensorCall, choices: Mapping[str, LayerPattern], inputs: Sequence[Sequence[Tensor]]
) -> _LayersToExport:
    """Import a copy of the model into OpenVINO, without its pruned layers."""
    names = [called.prefix + name for name in choices]
    modules: dict[str, Any] = {name: called.model.get_submodule(name) for name in names}
    calls = call_user_code("the model, called with these batches,", lambda: record_calls(called, modules, inputs))
    if not calls:
        raise UsageError("the model cannot be exported to OpenVINO: no layer of it was pruned; its ONNX file will do")
    modules = {name: module for name, module in modules.items() if name in calls}
    graph = LayerGraph(called, modules, inputs[0])
    layers = [
        replace(
            build_exported_layer(name, module, choices[name.removeprefix(called.prefix)], calls[name].image or ()),
            activation=graph.activations[name],
        )
        for name, module in modules.items()
    ]
    return _LayersToExport(layers, calls, graph)


def _write_files(folder: Path, graph: LayerGraph, levels: Sequence[CompiledLevel]) -> None:
    package = Path(ov.__file__).parent
    libraries = [_find_library(package / "libs", name) for name in ("libopenvino.so", "libtbb.so")]
    extension = Extension(EXTENSION, [package / "include"], libraries)
    (folder / PACKED).write_bytes(build_packed_file(levels, [extension.source]))
    try:
        link_library(folder / LIBRARY, levels, extension=extension)
    except NoCompiler as error:
        raise EnvironmentUnusable(f"the model cannot be exported: {error}") from None
    graph.save(folder / GRAPH)
    (folder / "main.cpp").write_text(MAIN, encoding="utf-8")
    (folder / "example.py").write_text(PYTHON, encoding="utf-8")


def _find_library(folder: Path, name: str) -> Path:
    """Return the library of this name and any version. Raises EnvironmentUnusable if OpenVINO came without it."""
    if found := sorted(folder.glob(f"{name}.*")):
        return found[0]
    raise EnvironmentUnusable(
        f"the model cannot be exported: {folder} has no {name}; install OpenVINO from PyPI (pip install openvino)"
    )


def _check_results(
    folder: Path, results: PrunedResults, inputs: Sequence[Sequence[Tensor]], facts: dict[str, Any]
) -> float:
    """Return how far deployed results are from the converted model's, as a share of its largest; raise if far.

    Each CPU level runs in a process of its own: this one would go on with a library that it has loaded, wherever that
    file is then. facts: the CPU levels and numbers of threads.
    """
    worst, arrays = 0.0, [[each.numpy() for each in tensors] for tensors in inputs]
    for level in facts["levels"]:
        with Worker(threads=facts["threads"][-1], name=f"checking {level}", environment={LEVEL: level}) as worker:
            for threads in facts["threads"]:
                found = _run(worker, folder, threads, arrays)
                for tensors, given in zip(inputs, found, strict=True):
                    right, apart = results.compare([torch.from_numpy(each) for each in given], tensors)
                    if not right:
                        raise RuntimeError(
                            f"the exported model gives other results than the pruned one at CPU level {level}, with "
                            f"{threads} threads, for inputs of {[tuple(each.shape) for each in tensors]}"
                        )
                    worst = max(worst, apart)
    return worst


def _run(worker: Worker, folder: Path, threads: int, inputs: list[list[Any]]) -> list[list[Any]]:
    """Return the results of the deployed model for each of the inputs."""
    try:
        found: list[list[Any]] = worker.call(
            "search.export.openvino_model:run_model", str(folder), threads, inputs, timeout=RUN_SECONDS
        )
        return found
    except TaskFailed as error:
        raise RuntimeError(f"the exported model does not run: {error.message}") from error
    except WorkerDied as error:
        raise RuntimeError(f"the exported model does not run: {error}") from error


def _describe_files(folder: Path, found: _LayersToExport) -> dict[str, Any]:
    """Return what the manifest says of versions, inputs, outputs and layers."""
    graph = found.graph.model
    layers = {
        layer.name: {
            "shape": layer.weight.shape,
            "pattern": str(layer.weight.pattern),
            "activation": layer.activation,
        }
        for layer in found.layers
    }
    return {
        "version": VERSION,
        OPENVINO: name_release(),
        "libc": find_needed_libc(folder / LIBRARY),
        "inputs": [_describe_port(each) for each in graph.inputs],
        "outputs": [_describe_port(each) for each in graph.outputs],
        "layers": layers,
    }


def _describe_port(port: Any) -> dict[str, str]:
    return {"shape": str(port.get_partial_shape()), "type": str(port.get_element_type().get_type_name())}
