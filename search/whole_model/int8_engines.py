"""Builders of dense models in eight bits, as OpenVINO's and ONNX Runtime's own tools quantise them after training.

Both tools look at activations of the model on calibration data: OpenVINO's is NNCF (`nncf.quantize`), ONNX Runtime's
`quantize_static`. They decide themselves which operations they round. The data is the task's, in calls of the size of
its example inputs, as the exported file takes no other. How far a result deviates is not tested: it is the score of
the model that says what eight bits cost.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from torch import Tensor, nn

from latbench.errors import UsageError
from search.example_inputs import ExampleInputs, convert_to_tensor_call
from search.task import Task, load_task
from search.whole_model.compiled_module import CompiledModule
from search.whole_model.flexible_onnx import export_flexible_onnx
from search.whole_model.model_engines import Run, SpinningCall, convert_to_arrays, export_once

MOST_CALLS = 64
"""Calls of the model that the tools look at, at most."""


def build_dense_openvino_int8(reference: str, threads: int, shared: str) -> Run:
    """Build the model on OpenVINO's CPU plugin, quantised by NNCF."""
    from latbench.backends.cpu.openvino import compile_on_cpu, read_model

    task = load_task(reference)
    called = convert_to_tensor_call(task.model(), task.example())
    path = _quantize_once(task, Path(shared), "openvino-int8.xml", _quantize_for_openvino)
    request = compile_on_cpu(read_model(path), threads, "f32").create_infer_request()
    arrays = convert_to_arrays(called.tensors)

    def run() -> list[np.ndarray]:
        results = request.infer(arrays, share_inputs=True, share_outputs=True)
        return [results[i] for i in range(len(results))]

    return run


def build_dense_onnxruntime_int8(reference: str, threads: int, shared: str) -> Run:
    """Build the model on ONNX Runtime's CPU provider, quantised by its own tool."""
    import onnxruntime

    from latbench.backends.cpu.onnxruntime import SPINNING_SECONDS

    task = load_task(reference)
    called = convert_to_tensor_call(task.model(), task.example())
    path = _quantize_once(task, Path(shared), "onnxruntime-int8.onnx", _quantize_for_onnxruntime)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    feed = dict(zip(names, convert_to_arrays(called.tensors), strict=True))
    return SpinningCall(lambda: session.run(None, feed), SPINNING_SECONDS)


def can_quantize() -> bool:
    """Return whether OpenVINO and its tool are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("openvino", "nncf"))


def score_dense_int8(reference: str, threads: int) -> float:
    """Return the task's score of the dense model as NNCF quantises it and OpenVINO runs it, in batches of any size.

    Raises UsageError where the exported model takes no other batch size than that of the example.
    """
    from latbench.backends.cpu.openvino import compile_on_cpu, read_model

    task = load_task(reference)
    model, example = task.model(), task.example()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        exported, path = Path(folder) / "model.onnx", Path(folder) / "int8.xml"
        if reason := export_flexible_onnx(model, example, exported):
            raise UsageError(f"the exported model takes one batch size only: {reason}")
        _quantize_for_openvino(exported, path, list_calibration_calls(task, model))
        request = compile_on_cpu(read_model(path), threads, "f32").create_infer_request()

        def run(*arrays: np.ndarray) -> list[np.ndarray]:
            results = request.infer(list(arrays))
            return [results[i] for i in range(len(results))]

        return task.score(CompiledModule(model, example, run))


def _quantize_once(
    task: Task, folder: Path, name: str, quantize: Callable[[Path, Path, Sequence[tuple[Tensor, ...]]], None]
) -> Path:
    """Return the path of the quantised model in `folder`; make it if no process has done so."""
    model = task.model()
    called = convert_to_tensor_call(model, task.example())
    exported, path = export_once(called.model, called.tensors, folder), folder / name
    with filelock.FileLock(path.with_suffix(".lock")):
        if not path.exists():
            calls = list_calibration_calls(task, model)
            with tempfile.TemporaryDirectory(dir=folder) as unfinished, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # advice of the tools to their developers
                quantize(exported, Path(unfinished) / name, calls)
                # The model last, after weights that lie beside it: it says "complete".
                for file in sorted(Path(unfinished).iterdir(), key=lambda file: file.name == name):
                    file.rename(folder / file.name)
    return path


def _quantize_for_openvino(exported: Path, path: Path, calls: Sequence[tuple[Tensor, ...]]) -> None:
    """Quantise an ONNX file by NNCF. Attention is quantised as NNCF does it for transformers."""
    from latbench.backends.cpu.openvino import read_model, save_model, select_for_masks

    logging.getLogger("nncf").setLevel(logging.ERROR)
    import nncf

    model = read_model(exported)
    select_for_masks(model)
    attends = any(operation.get_type_name() == "Softmax" for operation in model.get_ops())
    data = nncf.Dataset(calls, convert_to_arrays)
    quantized = nncf.quantize(
        model, data, subset_size=len(calls), model_type=nncf.ModelType.TRANSFORMER if attends else None
    )
    save_model(quantized, path)


def _quantize_for_onnxruntime(exported: Path, path: Path, calls: Sequence[tuple[Tensor, ...]]) -> None:
    """Quantise an ONNX file by ONNX Runtime's tool, with a scale for each row of a weight."""
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = path.with_name("prepared.onnx")
    quant_pre_process(str(exported), str(prepared))
    quantization.quantize_static(
        str(prepared), str(path), _CalibrationCalls(prepared, calls), quant_format=quantization.QuantFormat.QDQ,
        per_channel=True, activation_type=quantization.QuantType.QUInt8, weight_type=quantization.QuantType.QInt8,
    )  # fmt: skip
    prepared.unlink()


class _CalibrationCalls:
    """Calls of a model, as ONNX Runtime's tool reads them one after the other."""

    def __init__(self, path: Path, calls: Sequence[tuple[Tensor, ...]]) -> None:
        import onnx

        graph = onnx.load(str(path), load_external_data=False).graph
        self._names = [given.name for given in graph.input]
        self._calls = iter(calls)

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        """Return the inputs of the next call by name; None after the last one."""
        tensors = next(self._calls, None)
        return None if tensors is None else dict(zip(self._names, convert_to_arrays(tensors), strict=True))


def list_calibration_calls(task: Task, model: nn.Module, most: int = MOST_CALLS) -> list[tuple[Tensor, ...]]:
    """Return the tensors of the model's calls on the calibration data, in the shapes of the example inputs.

    A batch of several times the example's size is cut into as many calls. Calls of other shapes are left out; where
    all have others, the example inputs are the only call.
    """
    example = task.example()
    wanted = example.tensors()
    calls: list[tuple[Tensor, ...]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.extend(_cut_into_calls(ExampleInputs(args, kwargs).tensors(), wanted))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            for batch in task.calibration():
                task.loss(model, batch)
                if len(calls) >= most:
                    break
    finally:
        handle.remove()
    return calls[:most] or [tuple(wanted)]


def _cut_into_calls(tensors: Sequence[Tensor], wanted: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the calls of the wanted shapes that one call of a larger batch holds."""
    if len(tensors) != len(wanted) or any(
        tensor.ndim != other.ndim or tensor.shape[1:] != other.shape[1:]
        for tensor, other in zip(tensors, wanted, strict=True)
    ):
        return
    times = {len(tensor) // len(other) for tensor, other in zip(tensors, wanted, strict=True) if other.ndim}
    if len(times) == 1:
        for number in range(times.pop()):
            yield tuple(
                tensor[number * len(other) : (number + 1) * len(other)].contiguous() if other.ndim else tensor
                for tensor, other in zip(tensors, wanted, strict=True)
            )
