"""`latbench export --to torch`: a pruned folder to a package of torch whose pruned layers run latbench's kernels.

- model.pt2: the model, compiled ahead of time by AOTInductor; each pruned layer is a call of an operator
- libmodel.so: this operator, through torch's stable interface, its kernels for each CPU level, and the runtime
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

from latbench.base.deployed_forms import TORCH_PACKAGE
from latbench.errors import EnvironmentUnusable
from search.example_inputs import ExampleInputs, TensorCall, convert_to_tensor_call
from search.export.export_manifest import LIBRARY, PACKAGE, write_manifest
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
from search.export.free_sides import list_along, try_other_sizes
from search.export.layer_calls import CalledLayers, describe_layers, find_called_layers
from search.export.model_to_export import ModelToExport
from search.export.result_check import ResultCheck
from search.export.torch_package.torch_examples import PYTHON, generate_main
from search.export.torch_package.torch_graph import NAMESPACE, PackageProgram
from search.export.torch_package.torch_model import name_torch_release
from sparse_kernels.convert import copy_model
from sparse_kernels.cpu.export.cpu_levels import CpuLevel, list_host_levels
from sparse_kernels.cpu.export.library_id import VERSION
from sparse_kernels.cpu.export.shared_library import TORCH_LAYER, Extension, find_needed_libc

RUNNER = "search.export.torch_package.torch_model"
"""Module that runs a deployed model."""

LEAST_TORCH = 0x020A000000000000
"""The stable interface of torch 2.10, as its headers name it: the first that shares work among torch's threads."""

Others = Mapping[int, Sequence[Tensor]]


def export_to_torch(
    read_model: Callable[[], ModelToExport],
    output: Path,
    request: ExportRequest,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Export a pruned model to a package of torch, as `search.export.export_model.export_model` does.

    The batch of the example is always one of the batches.
    """
    levels = choose_levels(request)
    check_output(output)
    check_torch()
    progress("reading the model")
    given = read_model()
    called, converted = (convert_to_tensor_call(each, given.example) for each in (given.pruned, given.convert()))
    own = given.example.batch
    batches, threads = request.list_batches(own, own), request.list_threads(given.threads)
    inputs = spread_batches(called.tensors, batches)[:-1] if request.batches else [list(called.tensors)]
    progress("tracing the model")
    others = try_other_sizes(called.model, called.tensors)
    found, program = _trace_layers(given, inputs, others)
    layers = found.build_layers(given.choices, program.activations)
    compiled = compile_levels(levels, layers, found.list_sizes(), threads, progress)
    facts = describe_request(TORCH_PACKAGE, levels, batches, threads)
    with replace_folder(output) as folder:
        progress("linking")
        with explain_writes(output):
            number = write_library(folder, compiled, TORCH_LAYER, _find_extension)
            _write_examples(folder, given.example)
        facts |= {"namespace": f"{NAMESPACE}_{number}", "layers": describe_layers(layers)}
        results = PrunedResults(called.model, converted.model)
        check = ResultCheck(folder, f"{RUNNER}:run_package", results, facts["levels"], threads)

        def write(program: PackageProgram) -> None:
            progress("compiling the rest of the model")
            with explain_writes(output):
                program.compile(number, folder / PACKAGE, *_choose_processor(request, levels))
                write_manifest(folder, facts | _describe_files(folder, program, given.example))

        write(program)
        progress("checking results")
        if not request.only_timed and len(kept := _keep_right(check, others)) < len(others):
            _, program = _trace_layers(given, inputs, kept)
            write(program)
        error = check.run(inputs)
        with explain_writes(output):
            facts |= {"error": error} | write_promise(folder, given.folder, results.compute(called.tensors))
            return write_manifest(folder, facts | _describe_files(folder, program, given.example))


def check_torch() -> None:
    """Raise EnvironmentUnusable unless torch has the headers of its stable interface, and there is a compiler."""
    check_for_compiler(_find_extension("unnamed", 0))


def _trace_layers(
    given: ModelToExport, inputs: Sequence[Sequence[Tensor]], others: Others
) -> tuple[CalledLayers, PackageProgram]:
    """Return the layers that the model calls, and the program of a copy of it, free along the axes of `others`."""
    copied: TensorCall = convert_to_tensor_call(copy_model(given.model), given.example)
    found = find_called_layers(copied, given.choices, inputs)
    return found, PackageProgram(copied, found.modules, inputs[0], others)


def _keep_right(check: ResultCheck, others: Others) -> Others:
    """Return those of the `others`, inputs of other sizes, for which the export gives the model's results.

    One along the axis is tried, too: torch.export never traces it.
    """
    kept = {}
    for axis, tensors in others.items():
        along = list_along(tensors, axis)
        single = [x.narrow(axis, 0, 1).contiguous() if has else x for x, has in zip(tensors, along, strict=True)]
        if check.agrees(tensors) and check.agrees(single):
            kept[axis] = tensors
    return kept


def _choose_processor(request: ExportRequest, levels: Sequence[CpuLevel]) -> tuple[str, int]:
    """Return the processor for which g++ compiles what is not a layer, and its bits: it is one for all levels.

    What is only timed must be what will be deployed, for all levels of this machine.
    """
    least = (list_host_levels() if request.only_timed else levels)[0]
    wide = "avx512f" in least.features
    return ("x86-64-v4", 512) if wide else ("x86-64-v3", 256)


def _write_examples(folder: Path, example: ExampleInputs) -> None:
    (folder / "main.cpp").write_text(generate_main(example.tensors()), encoding="utf-8")
    (folder / "example.py").write_text(PYTHON, encoding="utf-8")


def _find_extension(number: str, checksum: int) -> Extension:
    """Return what makes a library an operator of the installed torch. Raises EnvironmentUnusable."""
    package = Path(torch.__file__).parent
    headers, library = package / "include", package / "lib" / "libtorch_cpu.so"
    for each in (headers / "torch/csrc/stable/library.h", library):
        if not each.is_file():
            raise EnvironmentUnusable(
                f"the model cannot be exported: there is no {each}; install torch 2.10 or later from its wheel"
            )
    definitions = {
        "EXPORT_NAMESPACE": f"{NAMESPACE}_{number}", "EXPORT_CHECKSUM": f"{checksum:#x}ULL",
        "TORCH_TARGET_VERSION": f"{LEAST_TORCH:#x}",
    }  # fmt: skip
    return Extension(TORCH_LAYER, [headers], [library], definitions, standard="c++20")


def _describe_files(folder: Path, program: PackageProgram, example: ExampleInputs) -> dict[str, Any]:
    """Return what the manifest says of versions, inputs and outputs."""
    tensors, free = example.tensors(), program.list_free_axes()
    named = [*example.name_tensors()]
    return {
        "version": VERSION,
        TORCH_PACKAGE: name_torch_release(),
        "libc": find_needed_libc(folder / LIBRARY),
        "inputs": [
            {
                "name": named[i] if i < len(named) else f"input{i}",
                "shape": [None if axis in axes else side for axis, side in enumerate(tensor.shape)],
                "type": str(tensor.dtype).removeprefix("torch."),
                "example": list(tensor.shape),
            }
            for i, (tensor, axes) in enumerate(zip(tensors, free, strict=True))
        ],
        "outputs": program.describe_results(),
    }
