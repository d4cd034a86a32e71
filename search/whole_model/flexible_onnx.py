"""Export a model to an ONNX file that takes any batch size, where the model allows it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from latbench.base.files import write_bytes_atomically
from latbench.errors import LatbenchError
from search.artifacts.onnx_export import export_onnx
from search.example_inputs import ExampleInputs, convert_to_tensor_call, list_tensors
from search.user_code import describe_error
from search.whole_model.model_engines import check_outputs, convert_to_arrays
from sparse_kernels.oracle import WrongResult


def export_flexible_onnx(model: nn.Module, example: ExampleInputs, path: Path) -> str | None:
    """Write the model to one ONNX file whose batch size is open, or that of the example if the model needs it.

    A file with an open batch is run by ONNX Runtime with other batch sizes, and its outputs compared with torch's.

    Parameters
    ----------
    model, example, path
        The model, inputs of it, and the file. Inputs have the names of the keywords, else input_1, input_2, ...

    Returns
    -------
    str or None
        Why the batch size is fixed; None if it is open.

    Raises
    ------
    LatbenchError
        torch cannot export the model at all.
    EnvironmentUnusable
        The file cannot be written.
    """
    called = convert_to_tensor_call(model, example)
    batch = example.batch
    names = example.name_tensors()
    flexible = {
        name: tensor.ndim > 0 and len(tensor) == batch for name, tensor in zip(names, called.tensors, strict=True)
    }
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder) / "model.onnx"
        try:
            export_onnx(called.model, called.tensors, trial, names=flexible)
            reason = _find_fault(called.model, called.tensors, flexible, batch, trial)
        except LatbenchError as error:
            reason = str(error)
        if reason is None:
            write_bytes_atomically(path, trial.read_bytes())
            return None
    export_onnx(called.model, called.tensors, path, names=dict.fromkeys(flexible, False))
    return " ".join(reason.split())


def _find_fault(
    model: nn.Module, tensors: tuple[Tensor, ...], flexible: Mapping[str, bool], batch: int, path: Path
) -> str | None:
    """Return what is wrong with the file at other batch sizes; None if its outputs are torch's."""
    try:
        import onnxruntime
    except ImportError:
        return "onnxruntime is not installed, so other batch sizes cannot be checked"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it refuses becomes the reason
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    needed = {given.name for given in session.get_inputs()}  # the exporter drops an input that nothing reads
    for size in sorted({1, batch + 1} - {batch}):
        rows = torch.arange(size) % batch
        changed = [tensor[rows] if own else tensor for tensor, own in zip(tensors, flexible.values(), strict=True)]
        try:
            with torch.inference_mode():
                expected = convert_to_arrays(list_tensors(model(*changed)))
        except Exception as error:  # noqa: BLE001 - the user's model may raise anything
            return f"the model raises {describe_error(error)} for a batch of {size}"
        feed = dict(zip(flexible, convert_to_arrays(changed), strict=True))
        try:
            found = session.run(None, {name: array for name, array in feed.items() if name in needed})
            check_outputs(found, expected, "ONNX Runtime")
        except WrongResult as error:
            return f"its export is wrong for a batch of {size}: {error}"
        except Exception as error:  # noqa: BLE001 - the classes of ONNX Runtime's errors have no common name
            return f"ONNX Runtime refuses its export for a batch of {size}: {describe_error(error)}"
    return None
