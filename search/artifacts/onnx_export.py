"""Export a torch model to an ONNX file for DeepSparse, and find the layer that computes each value of that file.

The export uses torch's older exporter at opset 14, the first opset with scaled_dot_product_attention. DeepSparse
reads up to opset 19. But opset 14 still writes norms as single operations, which DeepSparse compiles, while opset
17's LayerNormalization splits its graph (all-MiniLM-L6-v2, 32 sentences of 16 tokens: 36 ms, and 43 ms by torch's
newer exporter).
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from latbench.base.files import write_atomically
from latbench.errors import LatbenchError
from search.artifacts.onnx_weights import list_weight_shapes, remove_copies, store_transposes_once
from sparse_kernels.prunable_layers import is_layer

OPSET = 14
MAX_BYTES = 2**31 - 2**20  # a protobuf message holds 2 GiB; the graph takes less than the rest
_WITH_WEIGHT = ("Conv", "Gemm", "MatMul")


def export_onnx(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    path: Path,
    *,
    transposes_once: bool = True,
    names: Mapping[str, bool] | None = None,
) -> None:
    """Write the model to one ONNX file; pruned weights are zeros in it. Shapes are those of the inputs.

    Equal weights are stored once.

    Parameters
    ----------
    model, inputs, path
        The model, inputs of it, and the file.
    transposes_once
        Store a matrix once that is also read transposed, such as that of an embedding tied to the output. False where
        an engine must find the weight of each layer stored as the layer reads it.
    names
        The name of each input, and whether its first dimension is a batch of any size. None: the exporter's own
        names, and no such dimension.

    Raises
    ------
    LatbenchError
        torch cannot export the model, or its weights exceed what one file can hold.
    EnvironmentUnusable
        The file cannot be written.
    """
    import onnx

    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    if size > MAX_BYTES:
        raise LatbenchError(
            f"the model cannot be exported to ONNX: it has {size / 1e9:.2f} GB of weights, and one file can hold "
            f"{MAX_BYTES / 1e9:.2f} GB at most"
        )

    def write(temporary: Path) -> None:
        _export(model, inputs, temporary, names)
        written = onnx.load(temporary)
        remove_copies(written.graph)
        if transposes_once:
            store_transposes_once(written.graph)
        onnx.save(written, temporary)

    try:
        write_atomically(path, write)
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
        first = str(error).strip().split("\n")[0]
        raise LatbenchError(f"the model cannot be exported to ONNX: {type(error).__name__}: {first}") from error


def _export(model: nn.Module, inputs: tuple[Tensor, ...], path: Path, names: Mapping[str, bool] | None) -> None:
    """Write what torch's older exporter makes of the model, without its messages."""
    axes = {name: {0: "batch"} for name, flexible in (names or {}).items() if flexible}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's advice to its users and its developers
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        # Verbose or not, an exporter that fails prints the whole graph to stdout.
        with mock.patch.object(torch._C, "_jit_onnx_log", create=True):
            torch.onnx.export(
                model, inputs, str(path), opset_version=OPSET, dynamo=False, verbose=False,
                input_names=None if names is None else list(names), dynamic_axes=axes or None,
            )  # fmt: skip


def find_layer_values(model: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> dict[str, str]:
    """Return {value: layer}: the layer of `model` that computes each value of its export in `path`.

    The file lists operations in the order of the calls. The name of an operation lists the modules that it ran in,
    from the outside in: /blocks/blocks.0/fc1/Gemm. A layer that these names do not identify is left out.
    """
    import onnx

    calls = _layer_calls(model, inputs)
    graph = onnx.load(path).graph
    sizes = list_weight_shapes(graph)
    found: dict[str, str] = {}
    at = 0
    for node in graph.node:
        if node.op_type not in _WITH_WEIGHT or node.input[1] not in sizes:
            continue
        scope = node.name.split("/")[1:-1]
        for position in range(at, len(calls)):
            name, modules, size = calls[position]
            if _same_place(scope, modules) and sizes[node.input[1]] in (size, size[::-1]):
                found[node.output[0]] = name
                at = position + 1
                break
    return found


def _layer_calls(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[tuple[str, list[str], list[int]]]:
    """Return (name, names of the module and those around it, shape of its weight) of each call of a layer."""
    calls: list[tuple[str, list[str], list[int]]] = []
    running: list[str] = []

    def enter(name: str, module: nn.Module, _: Any) -> None:
        running.append(name.rpartition(".")[2])
        if is_layer(module):
            weight = module.weight
            assert isinstance(weight, Tensor)
            calls.append((name, running[:], list(weight.shape)))

    def leave(*_: Any) -> None:
        running.pop()

    handles = []
    try:
        for name, module in model.named_modules():
            if name:
                handles += [
                    module.register_forward_pre_hook(partial(enter, name)),
                    module.register_forward_hook(leave),
                ]
        with torch.inference_mode():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _same_place(scope: Sequence[str], modules: Sequence[str]) -> bool:
    """Return whether an operation's scope names these modules.

    A part of the scope may begin with the container's name (blocks.0) and end with a count of repetitions (fc_1).
    """
    return len(scope) == len(modules) and all(
        re.fullmatch(rf"{re.escape(module)}(_\d+)?", part.rpartition(".")[2])
        for part, module in zip(scope, modules, strict=True)
    )
