"""`latbench export --to openvino`: a pruned folder to a model of OpenVINO whose pruned layers run latbench's kernels.

- model.xml, model.bin: the model, in which each pruned layer is an operation named SparseLayer
- libmodel.so: the extension of OpenVINO with this operation, its kernels for each CPU level, and the runtime
- model.latbench: the packed weights of the pruned layers
- main.cpp, example.py: examples
- profile.json, expected.npz: the promise, and results for the task's example; `latbench verify` reads them
- manifest.json: levels, threads, versions, inputs, layers and their kernels; bytes and SHA-256 of the other files
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latbench.base.deployed_forms import OPENVINO
from latbench.base.quiet_openvino import import_openvino
from latbench.errors import EnvironmentUnusable
from search.example_inputs import ExampleInputs, TensorCall, convert_to_tensor_call
from search.export.export_manifest import GRAPH, LIBRARY, write_manifest
from search.export.export_steps import (
    ExportRequest,
    PrunedResults,
    check_for_compiler,
    check_output,
    choose_levels,
    compile_levels,
    describe_request,
    explain_writes,
    replace_folder,
    spread_batches,
    write_library,
    write_promise,
)
from search.export.free_sides import try_other_sizes
from search.export.layer_calls import describe_layers, find_called_layers
from search.export.model_to_export import ModelToExport
from search.export.openvino.openvino_examples import PYTHON, generate_main
from search.export.openvino.openvino_graph import OPSET, LayerGraph
from search.export.openvino.openvino_model import name_release
from search.export.result_check import ResultCheck
from sparse_kernels.convert import copy_model
from sparse_kernels.cpu.export.layer_programs import ExportedLayer
from sparse_kernels.cpu.export.level_job import CompiledLevel
from sparse_kernels.cpu.export.library_id import VERSION
from sparse_kernels.cpu.export.shared_library import OPENVINO_LAYER, Extension, find_needed_libc

RUNNER = "search.export.openvino.openvino_model"
"""Module that runs a deployed model."""


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
    called, converted = (convert_to_tensor_call(each, example) for each in (given.pruned, given.convert()))
    batches, threads = request.list_batches(example.batch, example.batch), request.list_threads(given.threads)
    inputs = spread_batches(called.tensors, batches)[:-1] if request.batches else [list(called.tensors)]
    progress("importing into OpenVINO")
    copied = convert_to_tensor_call(copy_model(model), example)
    found = find_called_layers(copied, choices, inputs)
    graph = LayerGraph(copied, found.modules, inputs[0])
    graph.name_ports(example.name_tensors(), _name_results(converted))
    layers = found.build_layers(choices, graph.activations)
    compiled = compile_levels(levels, layers, found.list_sizes(), threads, progress)
    facts = describe_request(OPENVINO, levels, batches, threads)
    with replace_folder(output) as folder:
        progress("linking")
        with explain_writes(output):
            opset = _write_files(folder, compiled, example)
        progress("checking results")
        results = PrunedResults(called.model, converted.model)
        check = ResultCheck(folder, f"{RUNNER}:run_model", results, facts["levels"], threads)

        def save(free: Sequence[int]) -> None:
            with explain_writes(output):
                graph.set_free_axes(called.tensors, free)
                graph.save(folder / GRAPH, opset)
                write_manifest(folder, facts | _describe_files(folder, graph, layers, given.example))

        _free_sides(check, save, {} if request.only_timed else try_other_sizes(called.model, called.tensors))
        error = check.run(inputs)
        with explain_writes(output):
            facts |= {"error": error} | write_promise(folder, given.folder, results.compute(called.tensors))
            return write_manifest(folder, facts | _describe_files(folder, graph, layers, example))


def check_openvino() -> None:
    """Raise EnvironmentUnusable unless OpenVINO has what extensions need, and there is a compiler."""
    check_for_compiler(_find_extension("unnamed", 0))


def _name_results(called: TensorCall) -> list[str]:
    """Return the names of a model's results; none unless it returns a mapping of tensors."""
    with torch.no_grad():
        results = called.model(*(each.clone() for each in called.tensors))
    named = isinstance(results, Mapping) and all(isinstance(each, Tensor) for each in results.values())
    return [str(name) for name in results] if named else []


def _write_files(folder: Path, levels: Sequence[CompiledLevel], example: ExampleInputs) -> str:
    """Write the library, the packed file and the examples; return the opset of the export."""
    number = write_library(folder, levels, OPENVINO_LAYER, _find_extension)
    shapes = [tuple(each.shape) for each in example.tensors()]
    (folder / "main.cpp").write_text(generate_main(shapes), encoding="utf-8")
    (folder / "example.py").write_text(PYTHON, encoding="utf-8")
    return f"{OPSET}_{number}"


def _find_extension(number: str, checksum: int) -> Extension:
    """Return what makes a library an extension of the installed OpenVINO. Raises EnvironmentUnusable."""
    package = Path(import_openvino().__file__).parent
    libraries = [_find_library(package / "libs", name) for name in ("libopenvino.so", "libtbb.so")]
    definitions = {"EXPORT_OPSET": f'"{OPSET}_{number}"', "EXPORT_CHECKSUM": f"{checksum:#x}ULL"}
    return Extension(OPENVINO_LAYER, [package / "include"], libraries, definitions)


def _find_library(folder: Path, name: str) -> Path:
    """Return the library of this name and any version. Raises EnvironmentUnusable if OpenVINO came without it."""
    if found := sorted(folder.glob(f"{name}.*")):
        return found[0]
    raise EnvironmentUnusable(
        f"the model cannot be exported: {folder} has no {name}; install OpenVINO from PyPI (pip install openvino)"
    )


def _free_sides(
    check: ResultCheck, save: Callable[[Sequence[int]], None], others: Mapping[int, list[Tensor]]
) -> None:
    """Write the graph with those sides free along which the `others`, inputs of other sizes, work."""
    save([*others])
    free = [axis for axis, tensors in others.items() if check.agrees(tensors)]
    if len(free) < len(others):
        save(free)


def _describe_files(
    folder: Path, graph: LayerGraph, layers: Sequence[ExportedLayer], example: ExampleInputs
) -> dict[str, Any]:
    """Return what the manifest says of versions, inputs, outputs and layers."""
    return {
        "version": VERSION,
        OPENVINO: name_release(),
        "libc": find_needed_libc(folder / LIBRARY),
        "inputs": [
            _describe_port(port) | {"example": list(tensor.shape)}
            for port, tensor in zip(graph.model.inputs, example.tensors(), strict=False)
        ],
        "outputs": [_describe_port(each) for each in graph.model.outputs],
        "layers": {name: said | {"adds": name in graph.sums} for name, said in describe_layers(layers).items()},
    }


def _describe_port(port: Any) -> dict[str, Any]:
    return {
        "name": port.get_any_name() if port.get_names() else "",
        "shape": str(port.get_partial_shape()),
        "type": port.get_element_type().get_type_name(),
    }
