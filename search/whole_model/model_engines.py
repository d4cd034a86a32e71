"""Builders of whole models, one for each engine. They run in the worker process that times the model.

A builder gets the task's reference and the number of threads. It returns a callable that runs the model once on the
task's example inputs. A pruned model must beat the fastest dense engine. Dense engines are torch as it is, and torch
with every Linear and Conv2d through oneDNN, which is twice as fast on some machines. Others are ONNX Runtime,
OpenVINO where it is installed, and latbench's own kernels with nothing pruned. DeepSparse is one where the pruned
model runs there. A model that may round to bfloat16 or to eight bits must beat the dense engines that do, too. This
module imports torch: import it late elsewhere.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from torch import nn

from latbench.backends.cpu import deepsparse, deepsparse_environment
from latbench.backends.cpu.prepare_point import build_synthetic_mask
from latbench.base.engine_registry import BFLOAT16, FLOAT32, INT8, MODEL_ENGINES, ModelEngine, is_deepsparse
from latbench.workloads.workload import trace_model
from search.artifacts.layer_database import Database
from search.artifacts.onnx_export import export_onnx
from search.example_inputs import ExampleInputs, convert_to_tensor_call, list_tensors
from search.pruning.storage.model_folder import build_layer_pattern, load_pruned
from search.task import load_task
from search.whole_model.convert_model import convert_for_example
from search.whole_model.sessions import OptionsByLayer
from sparse_kernels.convert import LayerPattern
from sparse_kernels.formats.int8 import InputRange, Quantization, find_scales
from sparse_kernels.nn import SparseConv2d, SparseLayer, SparseLinear
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import Dense, parse
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

Run = Callable[[], Any]
ModelRun = Run | deepsparse.Model

TOLERANCE, BFLOAT16_TOLERANCE = 1e-3, 0.5
"""Allowed differences, relative to the largest output. Other orders of adding, and Winograd's convolutions, stay far
below it through many layers; a wrong batch, layout or layer does not. How far bfloat16 deviates is not tested."""

ANY_RANGE = InputRange(1.0)
"""A range for inputs of layers of which only the time counts."""


def _name_builder(engine: ModelEngine) -> str:
    """Return the function that builds a dense model on an engine; it has the engine's name."""
    kind = "gpu" if engine.on_gpu else "int8" if engine.precision == INT8 else "model"
    return f"search.whole_model.{kind}_engines:build_dense_{engine.name.replace('-', '_')}"


DENSE_ENGINES = {name: _name_builder(engine) for name, engine in MODEL_ENGINES.items() if engine.runs_dense}
"""Engine of `latbench.base.engine_registry.MODEL_ENGINES` that runs dense models -> its builder.

Builders of engines that share an exported file also take the folder that has it, or will have it.
"""


def build_dense_torch(reference: str, threads: int) -> Run:
    """Build the model as torch runs it."""
    task = load_task(reference)
    return _run_model(task.model(), task.example(), threads)


def build_dense_torch_mkldnn(reference: str, threads: int) -> Run:
    """Build the model with each Linear and Conv2d in oneDNN's own weight order, and plain tensors in between."""
    from torch.utils import mkldnn

    task = load_task(reference)
    model = task.model()
    for name, module in list(model.named_modules()):
        if type(module) in (nn.Linear, nn.Conv2d) and getattr(module, "padding_mode", "zeros") == "zeros":
            if not name:
                model = mkldnn.to_mkldnn(module)
                break
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, mkldnn.to_mkldnn(module))
    return _run_model(model, task.example(), threads)


def build_dense_onnxruntime(reference: str, threads: int, shared: str) -> Run:
    """Build the model on ONNX Runtime's CPU provider, by ONNX. Its threads spin between calls, as by default."""
    import onnxruntime

    from latbench.backends.cpu.onnxruntime import SPINNING_SECONDS

    task = load_task(reference)
    called = convert_to_tensor_call(task.model(), task.example())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    path = export_once(called.model, called.tensors, Path(shared))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    feed = dict(zip(names, convert_to_arrays(called.tensors), strict=True))
    return SpinningCall(lambda: session.run(None, feed), SPINNING_SECONDS)


def export_once(model: nn.Module, inputs: tuple[torch.Tensor, ...], folder: Path) -> Path:
    """Return the path of the model's ONNX file in `folder`; export it if no process has done so.

    Exporting takes seconds, and several engines need the same file. The first process exports. Others wait for it,
    and export themselves if it failed.
    """
    path = folder / "model.onnx"
    with filelock.FileLock(path.with_suffix(".lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as unfinished, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the exporter's advice to its own developers
                logging.getLogger("torch.onnx").setLevel(logging.ERROR)
                torch.onnx.export(model, inputs, str(Path(unfinished) / path.name), dynamo=True, verbose=False)
                # The model last, after the weights that the exporter may have put beside it: it says "complete".
                for file in sorted(Path(unfinished).iterdir(), key=lambda file: file.name == path.name):
                    file.rename(folder / file.name)
    return path


def build_dense_openvino(reference: str, threads: int, shared: str) -> Run:
    """Build the model on OpenVINO's CPU plugin, by ONNX, in float32."""
    return _build_openvino(reference, threads, shared, "f32", TOLERANCE)


def build_dense_openvino_bf16(reference: str, threads: int, shared: str) -> Run:
    """Build the model on OpenVINO's CPU plugin, which computes in bfloat16 from float32 to float32."""
    return _build_openvino(reference, threads, shared, "bf16", BFLOAT16_TOLERANCE)


def _build_openvino(reference: str, threads: int, shared: str, precision: str, tolerance: float) -> Run:
    from latbench.backends.cpu.openvino import compile_on_cpu, read_model

    task = load_task(reference)
    called = convert_to_tensor_call(task.model(), task.example())
    path = export_once(called.model, called.tensors, Path(shared))
    compiled = compile_on_cpu(read_model(path), threads, precision)
    request, arrays = compiled.create_infer_request(), convert_to_arrays(called.tensors)

    def run() -> list[np.ndarray]:
        results = request.infer(arrays, share_inputs=True, share_outputs=True)
        return [results[i] for i in range(len(results))]

    with torch.inference_mode():
        check_outputs(run(), convert_to_arrays(list_tensors(called.model(*called.tensors))), "OpenVINO", tolerance)
    return run


def build_dense_torch_bf16(reference: str, threads: int) -> Run:
    """Build the model in bfloat16, outputs included, as torch runs it; each call rounds its float32 inputs."""
    task = load_task(reference)
    model, example = task.model().bfloat16(), task.example()

    def narrow() -> Any:
        return example.map_tensors(lambda x: x.bfloat16() if x.is_floating_point() else x).call(model)

    return _run_in_inference_mode(narrow, threads)


def build_dense_numba(reference: str, threads: int) -> Run:
    """Build the model on latbench's own kernels, converted as a pruned model is, with every layer dense."""
    return _build_dense_numba(reference, threads, FLOAT32)


def build_dense_numba_bf16(reference: str, threads: int) -> Run:
    """Build the model on latbench's own kernels in bfloat16, with every layer dense."""
    return _build_dense_numba(reference, threads, BFLOAT16)


def _build_dense_numba(reference: str, threads: int, precision: str) -> Run:
    task = load_task(reference)
    model, example = task.model(), task.example()
    traced, _ = trace_model(model, example.arguments, keywords=example.keywords)
    choices = {layer.name: LayerPattern(Dense(), precision=precision) for layer in traced.layers}
    return _run_model(convert_for_example(model, choices, example), example, threads)


@dataclass(frozen=True)
class SpinningCall:
    """A call after which threads spin for `rest_seconds`: `latbench.timing.sampling` waits for them."""

    run: Run
    rest_seconds: float

    def __call__(self) -> Any:
        """Return the result of the call."""
        return self.run()


def build_random_pruned(reference: str, threads: int, backend: str, choices: OptionsByLayer) -> ModelRun:
    """Build the model on `backend` with random masks. Patterns and sparsities decide its time, weights do not."""
    model, swapped, example = mask_at_random(reference, choices)
    return _build_on(backend, model, swapped, example, threads)


def build_layers_free(reference: str, threads: int, choices: OptionsByLayer) -> Run:
    """Build the model of `build_random_pruned` on latbench's own kernels, with sparse layers that take no time.

    Each of these layers computes an output once, and returns it from then on.
    """
    model, swapped, example = mask_at_random(reference, choices)
    converted = convert_for_example(model, swapped, example)
    for name in choices:
        layer = converted.get_submodule(name)
        if isinstance(layer, SparseLayer):
            layer._multiply = compute_once(layer._multiply, lambda x, y_shape: tuple(y_shape))  # type: ignore[method-assign]
        if isinstance(layer, SparseLinear):
            layer._by_address = compute_once(layer._by_address, lambda x, *rest: rest[1:])  # type: ignore[method-assign]
        if isinstance(layer, SparseConv2d):
            layer._over_frames = compute_once(layer._over_frames, lambda x, *rest: rest[:2])  # type: ignore[method-assign]
    return _run_model(converted, example, threads)


def compute_once(compute: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes once for each `key` of its arguments."""
    results: dict[Any, Any] = {}

    def cached(*given: Any, **named: Any) -> Any:
        wanted = key(*given, **named)
        if wanted not in results:
            results[wanted] = compute(*given, **named)
        return results[wanted]

    return cached


def mask_at_random(
    reference: str, choices: OptionsByLayer
) -> tuple[nn.Module, dict[str, LayerPattern], ExampleInputs]:
    """Return the model with random masks, the pattern and mask of each of its layers, and its inputs."""
    task = load_task(reference)
    model = task.model()
    rng = np.random.default_rng(0)
    swapped = {}
    for name, option in choices.items():
        module = model.get_submodule(name)
        matrix = weight_matrix(module)
        pattern = parse(option.pattern)
        mask = quantization = None
        if not isinstance(pattern, Dense):
            mask = build_synthetic_mask(rng, pattern, (matrix.shape[0], matrix.shape[1]), option.sparsity)
            matrix = matrix * torch.from_numpy(mask)
            set_weight_matrix(module, matrix)
        if option.precision == INT8:
            quantization = Quantization(find_scales(matrix.contiguous().numpy()), ANY_RANGE)
        swapped[name] = build_layer_pattern(option.pattern, option.precision, mask, quantization)
    return model, swapped, task.example()


def build_database_pruned(
    reference: str, threads: int, backend: str, folder: str, model_hash: str, choices: OptionsByLayer
) -> ModelRun:
    """Build the model on `backend` with the weights and masks that the layer database has for these options."""
    model, swapped, example = prune_from_database(reference, folder, model_hash, choices)
    return _build_on(backend, model, swapped, example, threads)


def prune_from_database(
    reference: str, folder: str, model_hash: str, choices: OptionsByLayer
) -> tuple[nn.Module, dict[str, LayerPattern], ExampleInputs]:
    """Return the model with weights of the layer database, the pattern and mask of each layer, and its inputs."""
    from search.pruning.one_shot.stitch import stitch

    task = load_task(reference)
    model = task.model()
    stitched = stitch(model, choices, Database(Path(folder), model_hash))
    masks = {name: mask.numpy() for name, mask in stitched.masks.items()}
    swapped = {
        name: build_layer_pattern(option.pattern, option.precision, masks.get(name), stitched.quantizations.get(name))
        for name, option in choices.items()
    }
    return model, swapped, task.example()


def build_folder_pruned(reference: str, threads: int, backend: str, folder: str, exported: str) -> ModelRun:
    """Build the pruned model in `folder` on `backend`; DeepSparse gets it as the ONNX file `exported`."""
    task = load_task(reference)
    model, choices = load_pruned(Path(folder), task.model())
    return _build_on(backend, model, choices, task.example(), threads, Path(exported))


def build_dense_deepsparse(reference: str, threads: int) -> deepsparse.Model:
    """Build the model on DeepSparse, by ONNX."""
    task = load_task(reference)
    return _build_on_deepsparse(task.model(), task.example(), threads)


def score_models(reference: str, threads: int, backend: str, folder: str) -> tuple[float, float]:
    """Return the task's scores of the dense model, and of the pruned model in `folder` as deployed on `backend`.

    DeepSparse takes batches of one size only. For it, torch runs the pruned weights, with the same results.
    """
    torch.set_num_threads(threads)
    task = load_task(reference)
    model, choices = load_pruned(Path(folder), task.model())
    pruned = model
    if not is_deepsparse(backend):
        pruned = convert_for_example(model, choices, task.example())
    return task.score(task.model()), task.score(pruned)


def _build_on(
    backend: str,
    model: nn.Module,
    choices: Mapping[str, LayerPattern],
    example: ExampleInputs,
    threads: int,
    exported: Path | None = None,
) -> ModelRun:
    """Build the pruned model as `backend` runs it: with its layers converted to `choices`, or as it is."""
    if is_deepsparse(backend):
        return _build_on_deepsparse(model, example, threads, exported)
    return _run_model(convert_for_example(model, choices, example), example, threads)


def _build_on_deepsparse(
    model: nn.Module, example: ExampleInputs, threads: int, exported: Path | None = None
) -> deepsparse.Model:
    """Build the model on DeepSparse, keep its ONNX file as `exported`, and check its outputs against torch."""
    with tempfile.TemporaryDirectory(prefix="latbench-onnx-") as folder:
        path = exported or Path(folder) / "model.onnx"
        called = convert_to_tensor_call(model, example)
        export_onnx(called.model, called.tensors, path, transposes_once=False)
        arrays = convert_to_arrays(called.tensors)
        compiled = deepsparse.load_model(
            path, arrays, threads=threads, environment=deepsparse_environment.find_environment()
        )
    with torch.inference_mode():
        check_outputs(compiled.outputs(), convert_to_arrays(list_tensors(example.call(model))), "DeepSparse")
    return compiled


def convert_to_arrays(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return the tensors as arrays."""
    return [tensor.detach().numpy() for tensor in tensors]


def check_outputs(
    found: Sequence[np.ndarray], expected: Sequence[np.ndarray], engine: str, tolerance: float = TOLERANCE
) -> None:
    """Raise WrongResult unless every output agrees within `tolerance`, relative to the largest expected value."""
    if [y.shape for y in found] != [y.shape for y in expected]:
        raise WrongResult(
            f"{engine} returns outputs of shapes {[y.shape for y in found]}, torch {[y.shape for y in expected]}"
        )
    for y, wanted in zip(found, expected, strict=True):
        largest = float(np.abs(wanted).max(initial=0.0))
        difference = float(np.abs(y - wanted).max(initial=0.0))
        if not difference <= tolerance * largest:
            raise WrongResult(
                f"{engine} and torch compute different outputs: they differ by {difference:.3g} where the largest "
                f"output is {largest:.3g}"
            )


def _run_model(model: nn.Module, example: ExampleInputs, threads: int) -> Run:
    return _run_in_inference_mode(lambda: example.call(model), threads)


def _run_in_inference_mode(function: Run, threads: int) -> Run:
    torch.set_num_threads(threads)

    def run() -> Any:
        with torch.inference_mode():
            return function()

    return run
