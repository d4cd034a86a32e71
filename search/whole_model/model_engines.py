"""Whole models as engines run them: each function builds one, in the worker process that times it.

A builder gets the task's reference and the number of threads, and returns a callable that runs the model once on the
task's example inputs. Dense engines are what a pruned model must beat: torch as it is, torch with every Linear and
Conv2d through oneDNN (on some machines twice as fast), ONNX Runtime, OpenVINO where it is installed, latbench's own
kernels with nothing pruned, and DeepSparse where the pruned model runs there. A model pruned for bfloat16 must beat
those that compute in it, too. Imports torch: only for worker processes and functions that need it anyway.
"""

from __future__ import annotations

import fcntl
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from latbench.backends.cpu import deepsparse, deepsparse_environment
from latbench.backends.cpu.prepare_point import build_synthetic_mask
from latbench.base.engine_registry import is_deepsparse
from latbench.workloads.workload import trace_model
from search.artifacts.layer_database import Database
from search.artifacts.onnx_export import export
from search.pruning.storage.model_folder import load_pruned, set_precision
from search.task import load
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.nn import SparseConv2d, SparseLinear, set_weight_matrix, weight_matrix
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import Dense, parse

Run = Callable[[], Any]
Choices = Mapping[str, tuple[str, float]]
"""Layer name -> (pattern, sparsity)."""

# Of the largest output. Adding in other orders, and Winograd's convolutions, stay far below it through many layers;
# a wrong batch, layout or layer does not. How far bfloat16 leads through many layers is no matter here.
SAME, SAME_IN_BFLOAT16 = 1e-3, 0.5

DENSE_ENGINES = {
    "torch": "search.whole_model.model_engines:dense_torch",
    "torch-mkldnn": "search.whole_model.model_engines:dense_mkldnn",
    "onnxruntime": "search.whole_model.model_engines:dense_onnxruntime",
    "openvino": "search.whole_model.model_engines:dense_openvino",
    "numba": "search.whole_model.model_engines:dense_numba",
    "deepsparse": "search.whole_model.model_engines:dense_deepsparse",
    "torch-bf16": "search.whole_model.model_engines:dense_torch_bf16",
    "openvino-bf16": "search.whole_model.model_engines:dense_openvino_bf16",
    "numba-bf16": "search.whole_model.model_engines:dense_numba_bf16",
}
"""The builder of each engine of `latbench.base.engine_registry.MODEL_ENGINES`.

Builders of engines that share an exported file also take the folder where they find it, or leave it for others.
"""


def dense_torch(reference: str, threads: int) -> Run:
    """The model as torch runs it."""
    task = load(reference)
    return _inference(task.model(), task.example(), threads)


def dense_mkldnn(reference: str, threads: int) -> Run:
    """The model with each Linear and Conv2d in oneDNN's own weight order; plain tensors in between."""
    from torch.utils import mkldnn

    task = load(reference)
    model = task.model()
    for name, module in list(model.named_modules()):
        if type(module) in (nn.Linear, nn.Conv2d) and getattr(module, "padding_mode", "zeros") == "zeros":
            if not name:
                model = mkldnn.to_mkldnn(module)
                break
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, mkldnn.to_mkldnn(module))
    return _inference(model, task.example(), threads)


def dense_onnxruntime(reference: str, threads: int, shared: str) -> Run:
    """The model exported to ONNX, on ONNX Runtime's CPU provider; its threads spin between calls, as by default."""
    import onnxruntime

    from latbench.backends.cpu.onnxruntime import SPINNING_SECONDS

    task = load(reference)
    inputs = task.example()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    path = exported_once(task.model(), inputs, Path(shared))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    feed = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return Restless(lambda: session.run(None, feed), SPINNING_SECONDS)


def exported_once(model: nn.Module, inputs: tuple[torch.Tensor, ...], folder: Path) -> Path:
    """The model as an ONNX file in `folder`: exporting takes seconds, and every process that times it needs the same.

    The first process exports; others wait for it, and try themselves if it failed.
    """
    path = folder / "model.onnx"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as unfinished, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the exporter's advice to its own developers
                logging.getLogger("torch.onnx").setLevel(logging.ERROR)
                torch.onnx.export(model, inputs, str(Path(unfinished) / path.name), dynamo=True, verbose=False)
                # The model last, after the weights that the exporter may have put beside it: it says "complete".
                for file in sorted(Path(unfinished).iterdir(), key=lambda file: file.name == path.name):
                    file.rename(folder / file.name)
    return path


def dense_openvino(reference: str, threads: int, shared: str) -> Run:
    """The model exported to ONNX, on OpenVINO's CPU plugin, in float32 as the others."""
    return _openvino(reference, threads, shared, "f32", SAME)


def dense_openvino_bf16(reference: str, threads: int, shared: str) -> Run:
    """The same as OpenVINO computes it in bfloat16, from float32 to float32."""
    return _openvino(reference, threads, shared, "bf16", SAME_IN_BFLOAT16)


def _openvino(reference: str, threads: int, shared: str, precision: str, same: float) -> Run:
    from latbench.backends.cpu import openvino

    task = load(reference)
    model, inputs = task.model(), task.example()
    path = exported_once(model, inputs, Path(shared))
    compiled = openvino.compile_on_cpu(openvino.read_model(path), threads, precision)
    request, arrays = compiled.create_infer_request(), [x.numpy() for x in inputs]

    def run() -> list[np.ndarray]:
        results = request.infer(arrays, share_inputs=True, share_outputs=True)
        return [results[i] for i in range(len(results))]

    with torch.inference_mode():
        check_outputs(run(), tensors(model(*inputs)), "OpenVINO", same)
    return run


def dense_torch_bf16(reference: str, threads: int) -> Run:
    """The model as torch runs it in bfloat16, what it returns too; float32 inputs are rounded in the call."""
    task = load(reference)
    model, inputs = task.model().bfloat16(), task.example()

    def narrow(*given: torch.Tensor) -> Any:
        return model(*(x.bfloat16() if x.is_floating_point() else x for x in given))

    return _inference(narrow, inputs, threads)


def dense_numba(reference: str, threads: int) -> Run:
    """The model converted as a pruned one is, with every layer dense."""
    return _dense_numba(reference, threads, "numba")


def dense_numba_bf16(reference: str, threads: int) -> Run:
    """The same in bfloat16."""
    return _dense_numba(reference, threads, "numba-bf16")


def _dense_numba(reference: str, threads: int, backend: str) -> Run:
    task = load(reference)
    model, inputs = task.model(), task.example()
    traced, _ = trace_model(model, inputs)
    choices = set_precision({layer.name: LayerPattern(Dense()) for layer in traced.layers}, backend)
    return _inference(convert(model, choices, inputs), inputs, threads)


@dataclass(frozen=True)
class Restless:
    """A call after which threads go on spinning for so long: see `measure.WallClock`."""

    run: Run
    rest_seconds: float

    def __call__(self) -> Any:
        """The result of the call."""
        return self.run()


def random_pruned(reference: str, threads: int, backend: str, choices: Choices) -> Run | deepsparse.Model:
    """The model on `backend` with random masks of these patterns and sparsities: what counts for its time."""
    model, swapped, inputs = _with_random_masks(reference, choices)
    return _on(backend, model, swapped, inputs, threads)


def layers_free(reference: str, threads: int, backend: str, choices: Choices) -> Run:
    """The model of `random_pruned` on latbench's own kernels, its sparse layers free: only what is left takes time.

    Each returns what it computed when it was first asked for such an output.
    """
    model, swapped, inputs = _with_random_masks(reference, choices)
    converted = convert(model, set_precision(swapped, backend), inputs)
    for layer in converted.modules():
        if isinstance(layer, SparseLinear | SparseConv2d):
            layer._multiply = _once(layer._multiply, tuple)  # type: ignore[method-assign]
        if isinstance(layer, SparseLinear):
            layer._by_address = _once(layer._by_address, lambda *of: of[1:])  # type: ignore[method-assign]
        if isinstance(layer, SparseConv2d):
            layer._over_frames = _once(layer._over_frames, lambda *of: of[:2])  # type: ignore[method-assign]
    return _inference(converted, inputs, threads)


def _once(compute: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """What computes once for each `key` of its arguments but the first, which is the input."""
    kept: dict[Any, Any] = {}

    def remembered(x: Any, *of: Any) -> Any:
        known = key(*of)
        if known not in kept:
            kept[known] = compute(x, *of)
        return kept[known]

    return remembered


def _with_random_masks(
    reference: str, choices: Choices
) -> tuple[nn.Module, dict[str, LayerPattern], tuple[torch.Tensor, ...]]:
    """The model with random masks of these patterns and sparsities, how its layers become sparse, and its inputs."""
    task = load(reference)
    model = task.model()
    rng = np.random.default_rng(0)
    swapped = {}
    for name, (spec, sparsity) in choices.items():
        module = model.get_submodule(name)
        matrix = weight_matrix(module)
        pattern = parse(spec)
        mask = None
        if not isinstance(pattern, Dense):
            mask = build_synthetic_mask(rng, pattern, (matrix.shape[0], matrix.shape[1]), sparsity)
            set_weight_matrix(module, matrix * torch.from_numpy(mask))
        swapped[name] = LayerPattern(pattern, mask)
    return model, swapped, task.example()


def database_pruned(
    reference: str, threads: int, backend: str, folder: str, model_hash: str, choices: Choices
) -> Run | deepsparse.Model:
    """The model on `backend` with the weights and masks that the layer database has for these choices."""
    from search.pruning.one_shot.stitch import stitch

    task = load(reference)
    model = task.model()
    masks = stitch(model, choices, Database(Path(folder), model_hash))
    swapped = {
        name: LayerPattern(parse(spec), masks[name].numpy() if name in masks else None)
        for name, (spec, _) in choices.items()
    }
    return _on(backend, model, swapped, task.example(), threads)


def folder_pruned(reference: str, threads: int, backend: str, folder: str, exported: str) -> Run | deepsparse.Model:
    """The pruned model in `folder` on `backend`; for DeepSparse it is written to the ONNX file `exported` first."""
    task = load(reference)
    model, choices = load_pruned(Path(folder), task.model())
    return _on(backend, model, choices, task.example(), threads, Path(exported))


def dense_deepsparse(reference: str, threads: int) -> deepsparse.Model:
    """The model exported to ONNX, on DeepSparse."""
    task = load(reference)
    return _on_deepsparse(task.model(), task.example(), threads)


def scores(reference: str, threads: int, backend: str, folder: str) -> tuple[float, float]:
    """The task's score of the dense model, and of the pruned model in `folder` as it is deployed on `backend`.

    DeepSparse takes batches of one size only: there it is torch that runs the pruned weights, with the same results.
    """
    torch.set_num_threads(threads)
    task = load(reference)
    model, choices = load_pruned(Path(folder), task.model())
    pruned = model
    if not is_deepsparse(backend):
        pruned = convert(model, set_precision(choices, backend), task.example())
    with torch.inference_mode():
        return task.score(task.model()), task.score(pruned)


def _on(
    backend: str,
    model: nn.Module,
    choices: Mapping[str, LayerPattern],
    inputs: tuple[torch.Tensor, ...],
    threads: int,
    exported: Path | None = None,
) -> Run | deepsparse.Model:
    """The pruned model as `backend` runs it: its layers converted to `choices`, or as it is."""
    if is_deepsparse(backend):
        return _on_deepsparse(model, inputs, threads, exported)
    return _inference(convert(model, set_precision(choices, backend), inputs), inputs, threads)


def _on_deepsparse(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], threads: int, exported: Path | None = None
) -> deepsparse.Model:
    """The model on DeepSparse, its ONNX file kept as `exported`; checked once against what torch computes."""
    with tempfile.TemporaryDirectory(prefix="latbench-onnx-") as folder:
        path = exported or Path(folder) / "model.onnx"
        export(model, inputs, path)
        arrays = [x.numpy() for x in inputs]
        compiled = deepsparse.load_model(
            path, arrays, threads=threads, environment=deepsparse_environment.find_environment()
        )
    with torch.inference_mode():
        check_outputs(compiled.outputs(), tensors(model(*inputs)), "DeepSparse")
    return compiled


def tensors(output: Any) -> list[np.ndarray]:
    """The tensors in what a model returns, in order, as arrays."""
    if torch.is_tensor(output):
        return [output.numpy()]
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return [array for part in parts for array in tensors(part)]


def check_outputs(
    found: Sequence[np.ndarray], expected: Sequence[np.ndarray], engine: str, same: float = SAME
) -> None:
    """Raise WrongResult unless every output is within `same` of the expected one, relative to its largest value."""
    if [y.shape for y in found] != [y.shape for y in expected]:
        raise WrongResult(f"{engine} returns shapes {[y.shape for y in found]}, torch {[y.shape for y in expected]}")
    for y, wanted in zip(found, expected, strict=True):
        largest = float(np.abs(wanted).max(initial=0.0))
        off = float(np.abs(y - wanted).max(initial=0.0))
        if not off <= same * largest:
            raise WrongResult(f"{engine} computes something else than torch: off by {off:.3g} of {largest:.3g}")


def _inference(model: Callable[..., Any], inputs: tuple[torch.Tensor, ...], threads: int) -> Run:
    torch.set_num_threads(threads)

    def run() -> Any:
        with torch.inference_mode():
            return model(*inputs)

    return run
