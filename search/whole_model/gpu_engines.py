"""Builders of whole models on a GPU, one for each engine. They run in the worker process that times the model.

A builder gets the task's reference and the type of the model, such as float16. The model and its inputs are put on
the GPU in that type. A call becomes a CUDA graph, because the launches of small kernels would take longer than the
kernels. So an engine whose calls cannot be captured is left out, with what the library says. One dense engine is
torch as it is. In another, norms are folded into layers, as in the converted model. torch.compile gets that one, at
its most thorough. TensorRT is the last, where it is installed. This module imports torch: import it late elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from latbench.backends.gpu.prepare_gpu_point import LastResult, TimedPoint, find_watch
from latbench.timing.gpu_drivers import open_torch_driver
from latbench.timing.gpu_events import Driver, NotCaptured, TimingMode, build_event_timer
from search.example_inputs import ExampleInputs, list_tensors
from search.pruning.storage.model_folder import load_pruned
from search.task import load_task
from search.whole_model.convert_model import ForwardAlone, convert_on_gpu, place_inputs, place_model
from search.whole_model.model_engines import compute_once, mask_at_random, prune_from_database
from search.whole_model.sessions import OptionsByLayer
from sparse_kernels.convert import LayerPattern
from sparse_kernels.nn import SparseLayer
from sparse_kernels.oracle import WrongResult
from sparse_kernels.same_results import same_results

HALF_TOLERANCE = 0.1
"""Allowed difference of engines in float16 or bfloat16, as `sparse_kernels.same_results` counts it. Roundings of many
layers stay below it; a wrong input, layout or layer does not."""

MODE = TimingMode("warm", "graph")
"""The caches hold what the last call left, as where a server calls one model again and again."""

Call = Callable[[], Any]


def build_dense_torch_gpu(reference: str, precision: str) -> TimedPoint:
    """Build the model as torch runs it."""
    model, example = _load(reference, precision)
    return _time(lambda: example.call(model), "torch")


def build_dense_torch_gpu_folded(reference: str, precision: str) -> TimedPoint:
    """Build the model with its norms folded into layers, and images in channels last where it allows that."""
    folded, inputs, expected = _fold(reference, precision)
    return _time_checked(lambda: inputs.call(folded), expected, "torch, folded")


def build_dense_torch_gpu_compiled(reference: str, precision: str) -> TimedPoint:
    """Build the folded model with torch.compile, which tries many kernels for each layer. It takes minutes."""
    folded, inputs, expected = _fold(reference, precision)
    # The mode's own graphs would copy inputs and outputs at each call.
    compiled = torch.compile(folded, mode="max-autotune-no-cudagraphs")
    return _time_checked(lambda: inputs.call(compiled), expected, "torch.compile")


def build_dense_tensorrt(reference: str, precision: str) -> TimedPoint:
    """Build the model on TensorRT, by Torch-TensorRT, with its weights in the type that they have."""
    import torch_tensorrt

    model, example = _load(reference, precision)
    arguments, keywords = example.arguments, dict(example.keywords)
    with torch.no_grad():
        exported = torch.export.export(model, arguments, keywords)
        compiled = torch_tensorrt.dynamo.compile(
            # One operation is enough for an engine: what is left to torch is not TensorRT's time.
            exported,
            arg_inputs=list(arguments),
            kwarg_inputs=keywords,
            use_explicit_typing=True,
            min_block_size=1,
        )
    return _time_checked(lambda: example.call(compiled), _compute(model, example), "TensorRT")


def build_random_on_gpu(reference: str, precision: str, choices: OptionsByLayer) -> TimedPoint:
    """Build the pruned model with random masks. Patterns and sparsities decide its time, weights do not."""
    return _time_pruned(*mask_at_random(reference, choices), precision)


def build_database_on_gpu(
    reference: str, precision: str, folder: str, model_hash: str, choices: OptionsByLayer
) -> TimedPoint:
    """Build the model with the weights and masks that the layer database has for these options."""
    return _time_pruned(*prune_from_database(reference, folder, model_hash, choices), precision)


def build_folder_on_gpu(reference: str, precision: str, folder: str) -> TimedPoint:
    """Build the pruned model in `folder`."""
    task = load_task(reference)
    model, choices = load_pruned(Path(folder), task.model())
    return _time_pruned(model, choices, task.example(), precision)


def build_free_on_gpu(reference: str, precision: str, choices: OptionsByLayer) -> TimedPoint:
    """Build the model of `build_random_on_gpu` with searched layers that take no time.

    Each of these layers computes an output once for each shape of its input, and returns it from then on.
    """
    model, swapped, example = mask_at_random(reference, choices)
    converted = convert_on_gpu(model, swapped, example, precision)
    for name in choices:
        layer = converted.get_submodule(name)
        if isinstance(layer, SparseLayer):
            layer._multiply = compute_once(layer._multiply, lambda x, y_shape: tuple(y_shape))  # type: ignore[method-assign]
        else:  # one that stays dense, and torch's own
            layer.forward = compute_once(layer.forward, lambda input: input.shape)
    placed = place_inputs(example, precision)
    return _time(lambda: placed.call(converted), "latbench")


def score_on_gpu(reference: str, precision: str, folder: str) -> tuple[float, float]:
    """Return the task's scores of the dense model and of the pruned one in `folder`, both on the GPU in this type."""
    task = load_task(reference)
    model, choices = load_pruned(Path(folder), task.model())
    pruned = convert_on_gpu(model, choices, task.example(), precision)
    dense = place_model(task.model(), precision)
    return task.score(CalledFromHost(dense, precision)), task.score(CalledFromHost(pruned, precision))


class CalledFromHost(ForwardAlone):
    """A model on a GPU that is called as the one on the CPU: it takes and returns tensors there, floats as float32.

    Parameters
    ----------
    model : Module
        A model that `place_model` or `convert_on_gpu` returned.
    precision : str
        Its type.
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__(model)
        self._precision = precision

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return what the model returns, on the CPU."""
        placed = place_inputs(ExampleInputs(arguments, keywords), self._precision)
        with torch.inference_mode():
            result = placed.call(self.held[0])
        return ExampleInputs((result,)).map_tensors(_bring_back).arguments[0]


def _bring_back(tensor: Tensor) -> Tensor:
    back = tensor.cpu()
    # A copy, because tensors of inference mode take part in nothing that may need a gradient.
    return (back.float() if back.is_floating_point() else back).clone()


def _load(reference: str, precision: str) -> tuple[nn.Module, ExampleInputs]:
    """Return the task's model and example on the GPU, in the type."""
    task = load_task(reference)
    return place_model(task.model(), precision), place_inputs(task.example(), precision)


def _fold(reference: str, precision: str) -> tuple[nn.Module, ExampleInputs, Any]:
    """Return the task's model folded on the GPU, its inputs, and the results of the model as it is.

    Images lie in channels last, as cuDNN prefers them, unless the model refuses: a view of an image may need another
    order. cuDNN tries its algorithms, as users of large batches let it.
    """
    torch.backends.cudnn.benchmark = True
    task = load_task(reference)
    model, example = _load(reference, precision)
    expected = _compute(model, example)

    def fold() -> Any:  # torch's types do not know that a model has a memory format
        return convert_on_gpu(task.model(), {}, task.example(), precision)

    try:
        folded, inputs = fold().to(memory_format=torch.channels_last), example.map_tensors(_order_channels_last)
        _compute(folded, inputs)
    except RuntimeError:
        folded, inputs = fold(), example
    return folded, inputs, expected


def _compute(model: nn.Module, inputs: ExampleInputs) -> Any:
    with torch.inference_mode():
        return inputs.call(model)


def _order_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _time_pruned(
    model: nn.Module, choices: Mapping[str, LayerPattern], example: ExampleInputs, precision: str
) -> TimedPoint:
    converted = convert_on_gpu(model, choices, example, precision)
    placed = place_inputs(example, precision)
    return _time(lambda: placed.call(converted), "latbench")


def _time_checked(call: Call, expected: Any, engine: str) -> TimedPoint:
    """Return the timer of a call, after its results agreed with torch's."""
    with torch.inference_mode():
        found = call()
    if not same_results(list_tensors(found), list_tensors(expected), HALF_TOLERANCE):
        raise WrongResult(f"{engine} and torch compute different outputs")
    return _time(call, engine)


def _time(call: Call, engine: str) -> TimedPoint:
    """Return the timer of a call, by events of the GPU. Raises NotCaptured where it is no CUDA graph."""
    driver: Driver = open_torch_driver()

    def run() -> Any:
        with torch.inference_mode():
            return call()

    try:
        timer = build_event_timer([LastResult(run)], driver, MODE, watch=find_watch())
    except NotCaptured as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise NotCaptured(
            f"a call of the model by {engine} cannot be captured into a CUDA graph: {reason}"
        ) from error
    return TimedPoint(timer, {})
