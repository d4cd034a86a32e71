"""`latbench export --to openvino`: a pruned folder to a model of OpenVINO whose pruned layers run latbench's kernels.

- model.xml, model.bin: the model, in which each pruned layer is an operation named SparseLayer
- libmodel.so: the extension of OpenVINO with this operation, its kernels for each CPU level, and the runtime
- model.latbench: the packed weights of the pruned layers
- main.cpp, example.py: examples
- profile.json, expected.npz: the promise, and results for the task's example; `latbench verify` reads them
- manifest.json: levels, threads, versions, inputs, layers and their kernels; bytes and SHA-256 of the other files
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latbench.base.deployed_forms import OPENVINO
from latbench.base.quiet_openvino import import_openvino
from latbench.errors import EnvironmentUnusable, UsageError
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from search.example_inputs import ExampleInputs, TensorCall, convert_to_tensor_call
from search.export.export_manifest import GRAPH, LIBRARY, PACKED, write_manifest
from search.export.export_steps import (
    ExportRequest,
    PrunedResults,
    check_for_compiler,
    check_output,
    choose_levels,
    compile_levels,
    explain_writes,
    replace_folder,
    spread_batches,
    write_promise,
)
from search.export.model_chain import build_exported_layer
from search.export.model_to_export import ModelToExport
from search.export.openvino.free_sides import try_other_sizes
from search.export.openvino.openvino_examples import PYTHON, generate_main
from search.export.openvino.openvino_graph import OPSET, LayerCalls, LayerGraph, record_calls
from search.export.openvino.openvino_model import LEVEL, name_release
from search.user_code import call_user_code
from sparse_kernels.convert import LayerPattern, copy_model
from sparse_kernels.cpu.export.layer_programs import ExportedLayer
from sparse_kernels.cpu.export.level_job import CompiledLevel
from sparse_kernels.cpu.export.library_id import VERSION
from sparse_kernels.cpu.export.packed_weights import build_packed_file, read_checksum
from sparse_kernels.cpu.export.shared_library import EXTENSION, Extension, NoCompiler, find_needed_libc, link_library

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
    read_model: Callable[[], ModelToExport],
    output: Path,
    request: ExportRequest,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Export a pruned model to OpenVINO, as `search.export.export_model.export_model` does.

    The batch of the example is always one of the batches.
    """
    levels = choose_levels(request)
    check_output(output)
    check_openvino()
    progress("reading the model")
    given = read_model()
    model, choices, example = given.model, given.choices, given.example
    called, converted = (convert_to_tensor_call(each, example) for each in (model, given.convert()))
    batches, threads = request.list_batches(example.batch, example.batch), request.list_threads(given.threads)
    inputs = spread_batches(called.tensors, batches)[:-1] if request.batches else [list(called.tensors)]
    progress("importing into OpenVINO")
    found = _import_model(convert_to_tensor_call(copy_model(model), example), choices, inputs)
    found.graph.name_ports(example.name_tensors(), _name_results(converted))
    compiled = compile_levels(levels, found.layers, found.list_sizes(), threads, progress)
    facts = {"form": OPENVINO, "levels": [each.name for each in levels], "batches": batches, "threads": threads}
    with replace_folder(output) as folder:
        progress("linking")
        with explain_writes(output):
            opset = _write_files(folder, compiled, example)
        progress("checking results")
        deployed = _Deployed(folder, found.graph, opset, PrunedResults(called.model, converted.model))
        others = {} if request.only_timed else try_other_sizes(called.model, called.tensors)
        error = deployed.check(called.tensors, others, inputs, facts)
        with explain_writes(output):
            facts |= {"error": error} | write_promise(folder, given.folder, deployed.results.compute(called.tensors))
            return write_manifest(folder, facts | _describe_files(folder, found, example))


def check_openvino() -> None:
    """Raise EnvironmentUnusable unless OpenVINO has what extensions need, and there is a compiler."""
    check_for_compiler(_find_extension("unnamed", 0))


def _import_model(
    called: TensorCall, choices: Mapping[str, LayerPattern], inputs: Sequence[Sequence[Tensor]]
) -> _LayersToExport:
    """Import a copy of the model into OpenVINO, without its pruned layers."""
    modules: dict[str, Any] = {name: called.model.get_submodule(called.prefix + name) for name in choices}
    calls = call_user_code("the model, called with these batches,", lambda: record_calls(called, modules, inputs))
    if not calls:
        raise UsageError("the model cannot be exported to OpenVINO: no layer of it was pruned; its ONNX file will do")
    modules = {name: module for name, module in modules.items() if name in calls}
    images = {name: calls[name].find_image(name) for name in modules}
    graph = LayerGraph(called, modules, inputs[0])
    layers = [
        replace(build_exported_layer(name, module, choices[name], images[name]), activation=graph.activations[name])
        for name, module in modules.items()
    ]
    return _LayersToExport(layers, calls, graph)


def _name_results(called: TensorCall) -> list[str]:
    """Return the names of a model's results; none unless it returns a mapping of tensors."""
    with torch.no_grad():
        results = called.model(*(each.clone() for each in called.tensors))
    named = isinstance(results, Mapping) and all(isinstance(each, Tensor) for each in results.values())
    return [str(name) for name in results] if named else []


def _write_files(folder: Path, levels: Sequence[CompiledLevel], example: ExampleInputs) -> str:
    """Write the library, the packed file and the examples; return the opset of the export."""
    packed = build_packed_file(levels, [EXTENSION])
    opset = f"{OPSET}_{hashlib.sha256(packed).hexdigest()[:16]}"
    (folder / PACKED).write_bytes(packed)
    try:
        link_library(folder / LIBRARY, levels, extension=_find_extension(opset, read_checksum(packed)))
    except NoCompiler as error:
        raise EnvironmentUnusable(f"the model cannot be exported: {error}") from None
    shapes = [tuple(each.shape) for each in example.tensors()]
    (folder / "main.cpp").write_text(generate_main(shapes), encoding="utf-8")
    (folder / "example.py").write_text(PYTHON, encoding="utf-8")
    return opset


def _find_extension(opset: str, checksum: int) -> Extension:
    """Return what makes a library an extension of the installed OpenVINO. Raises EnvironmentUnusable."""
    package = Path(import_openvino().__file__).parent
    libraries = [_find_library(package / "libs", name) for name in ("libopenvino.so", "libtbb.so")]
    definitions = {"EXPORT_OPSET": f'"{opset}"', "EXPORT_CHECKSUM": f"{checksum:#x}ULL"}
    return Extension(EXTENSION, [package / "include"], libraries, definitions)


def _find_library(folder: Path, name: str) -> Path:
    """Return the library of this name and any version. Raises EnvironmentUnusable if OpenVINO came without it."""
    if found := sorted(folder.glob(f"{name}.*")):
        return found[0]
    raise EnvironmentUnusable(
        f"the model cannot be exported: {folder} has no {name}; install OpenVINO from PyPI (pip install openvino)"
    )


@dataclass(frozen=True)
class _Deployed:
    """An exported folder whose graph is not written yet, and what it must compute."""

    folder: Path
    graph: LayerGraph
    opset: str
    results: PrunedResults

    def check(
        self, example: Sequence[Tensor], others: Mapping[int, Sequence[Tensor]], inputs: Sequence[Sequence[Tensor]],
        facts: dict[str, Any],
    ) -> float:  # fmt: skip
        """Write the graph; return how far its results are from the converted model's, as a share of its largest.

        Sides along which the `others`, inputs of other sizes, work stay free. Each CPU level runs in a process of
        its own, which takes its kernels from the environment. Raises RuntimeError for other results than the model's.

        facts: the CPU levels and numbers of threads.
        """
        self._save(example, [*others])
        free = [axis for axis, tensors in others.items() if self._agrees(tensors, facts)]
        if len(free) < len(others):
            self._save(example, free)
        worst = 0.0
        for level in facts["levels"]:
            with Worker(threads=facts["threads"][-1], name=f"checking {level}", environment={LEVEL: level}) as worker:
                for threads in facts["threads"]:
                    right, apart = self._compare(worker, threads, inputs)
                    if not right:
                        raise RuntimeError(
                            f"the exported model gives other results than the pruned one at CPU level {level}, with "
                            f"{threads} threads"
                        )
                    worst = max(worst, apart)
        return worst

    def _save(self, example: Sequence[Tensor], free: Sequence[int]) -> None:
        self.graph.set_free_axes(example, free)
        with explain_writes(self.folder):
            self.graph.save(self.folder / GRAPH, self.opset)

    def _agrees(self, tensors: Sequence[Tensor], facts: dict[str, Any]) -> bool:
        """Return whether inputs of another size give the model's results. An importer may have fixed what it read."""
        with Worker(threads=1, name="checking sizes", environment={LEVEL: facts["levels"][-1]}) as worker:
            try:
                return self._compare(worker, 1, [tensors])[0]
            except RuntimeError:
                return False

    def _compare(self, worker: Worker, threads: int, inputs: Sequence[Sequence[Tensor]]) -> tuple[bool, float]:
        """Return whether the results for all of the inputs are right, and how far they lie from the model's."""
        arrays = [[each.numpy() for each in tensors] for tensors in inputs]
        function = "search.export.openvino.openvino_model:run_model"
        try:
            found = worker.call(function, str(self.folder), threads, arrays, timeout=RUN_SECONDS)
        except TaskFailed as error:
            raise RuntimeError(f"the exported model does not run: {error.message}") from error
        except WorkerDied as error:
            raise RuntimeError(f"the exported model does not run: {error}") from error
        compared = [
            self.results.compare([torch.from_numpy(each) for each in given], tensors)
            for given, tensors in zip(found, inputs, strict=True)
        ]
        return all(right for right, _ in compared), max(apart for _, apart in compared)


def _describe_files(folder: Path, found: _LayersToExport, example: ExampleInputs) -> dict[str, Any]:
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
        "inputs": [
            _describe_port(port) | {"example": list(tensor.shape)}
            for port, tensor in zip(graph.inputs, example.tensors(), strict=False)
        ],
        "outputs": [_describe_port(each) for each in graph.outputs],
        "layers": layers,
    }


def _describe_port(port: Any) -> dict[str, Any]:
    return {
        "name": port.get_any_name() if port.get_names() else "",
        "shape": str(port.get_partial_shape()),
        "type": port.get_element_type().get_type_name(),
    }
