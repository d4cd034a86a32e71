"""OpenVINO: a model of one matrix product or convolution with its bias, on its CPU plugin, dense.

By default it computes float32 models in bfloat16 where the processor can. Here the point sets the precision, and the
precision that it then runs is checked. Its feature for sparse weights (CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE) works
only for int8 weights on processors with AMX: zeros of float32 weights are multiplied like any number. The request
reads x where it lies, and y is read where the request keeps it, as in a pipeline without copies. Convolutions are
planned with channels last: any other order would be converted before and after each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latbench.backends.cpu.block_steps import BlockSteps
from latbench.backends.cpu.prepare_point import MOST_SESSIONS, Engine, SyntheticLayer, count_copies, find_block_bits
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import INT4, INT8
from latbench.base.quiet_openvino import import_openvino
from latbench.workloads.points import Point
from sparse_kernels.formats import unpack
from sparse_kernels.formats.int8 import STEPS
from sparse_kernels.shapes import Conv2dShape

if TYPE_CHECKING:
    import openvino
else:
    openvino = import_openvino()
operators = openvino.opset13

PRECISIONS = {"float32": ("f32",), "bfloat16": ("bf16",), "int8": ("u8", "i8"), "int4": ("i4", "u4")}
"""What OpenVINO says that it computes in, by the type of a point's activations."""

HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32"}
"""What it is asked to compute in where a model does not say so itself, as one with steps of eight bits does."""

_LAYERS = ("FullyConnected", "MatMul", "Convolution")
_TO_LAST, _FROM_LAST = (0, 2, 3, 1), (0, 3, 1, 2)  # of the axes batch, channels, height, width


def prepare(point: Point, layer: SyntheticLayer) -> Engine:
    """Prepare the dense layer in OpenVINO.

    Raises Unsupported for any other pattern, and where it would compute in another type than the point's.
    """
    if str(point.pattern) != "dense":
        raise Unsupported(
            f"openvino runs dense layers, not {point.pattern}: zeros of float32 weights cost it as much as other "
            "numbers, it has a sparse format for int8 alone"
        )
    weight_bytes = layer.weight.nbytes // {"bfloat16": 2, INT8: 4, INT4: 8}.get(point.dtype_w, 1)
    copies = [compile_layer(point, layer) for _ in range(count_copies(weight_bytes, MOST_SESSIONS))]
    kernel, precision = find_executed(copies[0])
    narrow = point.dtype_a == "float32" and point.dtype_w in (INT4, INT8)  # OpenVINO names the weight's type then
    if precision not in PRECISIONS[point.dtype_w if narrow else point.dtype_a]:
        raise Unsupported(f"openvino computes this layer in {precision} here, and a {point.dtype_a} time is wanted")
    last = point.layout == "nhwc"
    x = np.ascontiguousarray(layer.x.transpose(_TO_LAST)) if last else layer.x
    output: Callable[[Any], np.ndarray] = lambda y: y[0].transpose(_FROM_LAST) if last else y[0]  # noqa: E731
    return Engine(f"openvino.{kernel}", weight_bytes, [_call(each, x) for each in copies], output)


def compile_layer(point: Point, layer: SyntheticLayer, precision: str = "") -> openvino.CompiledModel:
    """Compile the layer as a model with weights of its own, for the point's threads and precision or a given one."""
    shape, in_bytes = point.shape, point.dtype_w == INT8
    rounds_x = point.dtype_a == INT8
    if isinstance(shape, Conv2dShape):
        x, y = _convolution(shape, layer, last=point.layout == "nhwc", in_bytes=in_bytes)
    else:
        x = operators.parameter(layer.x.shape, np.float32)
        bits = find_block_bits(point)
        weight = (
            _build_weight(layer, None, in_bytes) if bits is None else _build_in_blocks(layer.round_in_blocks(bits))
        )
        read = _read_in_steps(x, layer) if rounds_x else x
        y = operators.add(operators.matmul(read, weight, False, True), layer.bias)
    return compile_on_cpu(openvino.Model([y], [x], "layer"), point.threads, precision or HINTS[point.dtype_a])


def _read_in_steps(x: openvino.Node, layer: SyntheticLayer) -> openvino.Node:
    """Build what tells OpenVINO to read x as bytes: 256 levels of the layer's input range."""
    reading = layer.input_range
    ends = [np.float32(reading.scale * (q - reading.zero)) for q in (0, STEPS)]
    return operators.fake_quantize(x, *ends, *ends, STEPS + 1)


def _build_weight(layer: SyntheticLayer, filters: tuple[int, ...] | None, in_bytes: bool) -> openvino.Node:
    """Build the weight (m, k), or as filters (c_out, kh, kw, c_in) in torch's order; floats, or bytes and scales."""
    weight: np.ndarray = unpack(layer.quantize(False).packed).astype(np.int8) if in_bytes else layer.weight
    if filters is not None:
        weight = np.ascontiguousarray(weight.reshape(filters).transpose(0, 3, 1, 2))
    if not in_bytes:
        return operators.constant(weight)
    scales = layer.quantize(False).scales.reshape(-1, *[1] * (weight.ndim - 1))
    return operators.multiply(operators.convert(operators.constant(weight), np.float32), scales)


def _build_in_blocks(weight: BlockSteps) -> openvino.Node:
    """Build the weight (m, k) from whole numbers of four bits and the steps of their blocks, as NNCF does."""
    m, blocks, size = weight.whole.shape
    packed = weight.pack()  # has to live until it is copied, which a constant does not do by default
    stored = openvino.op.Constant(openvino.Tensor(packed, [m, blocks, size], openvino.Type.i4), shared_memory=False)
    values = operators.multiply(operators.convert(stored, np.float32), weight.steps[..., None])
    return operators.reshape(values, np.array([m, blocks * size]), False)


def read_model(path: Path) -> openvino.Model:
    """Read a model from an ONNX file, or from one of `save_model`."""
    return openvino.Core().read_model(path)


def select_for_masks(model: openvino.Model) -> None:
    """Let numbers that are made of booleans be chosen instead of converted, in place; they are the same numbers.

    A mask such as (1 - present) * -1e9 is converted, subtracted from and multiplied, like weights in eight bits. In a
    model with layers in eight bits, OpenVINO (2026.4) takes it for such, and divides scores by its -1e9: they vanish.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Convert" or node.input_value(0).get_element_type() != openvino.Type.boolean:
            continue
        kind = node.output(0).get_element_type().to_dtype()
        chosen = operators.select(node.input_value(0), *(operators.constant(kind.type(each)) for each in (1, 0)))
        node.output(0).replace(chosen.output(0))
    model.validate_nodes_and_infer_types()


def save_model(model: openvino.Model, path: Path) -> None:
    """Write a model to a file .xml and, beside it, its weights to a file .bin."""
    openvino.save_model(model, path, compress_to_fp16=False)


def compile_on_cpu(model: openvino.Model, threads: int, precision: str = "f32") -> openvino.CompiledModel:
    """Compile a model for a number of threads, and one call at a time."""
    settings = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # else it rounds activations where only weights are bytes
    }
    return openvino.Core().compile_model(model, "CPU", settings)


def _convolution(
    shape: Conv2dShape, layer: SyntheticLayer, last: bool, in_bytes: bool
) -> tuple[openvino.Node, openvino.Node]:
    """Build the model's x and y; with channels last both are transposed, which costs nothing once compiled."""
    size = tuple(layer.x.shape[axis] for axis in _TO_LAST) if last else layer.x.shape
    x = operators.parameter(size, np.float32)
    images = operators.transpose(x, _FROM_LAST) if last else x
    y = operators.convolution(
        _read_in_steps(images, layer) if in_bytes else images,
        _build_weight(layer, (shape.c_out, shape.kh, shape.kw, shape.c_in), in_bytes),
        shape.stride, shape.padding, shape.padding, shape.dilation,
    )  # fmt: skip
    y = operators.add(y, layer.bias.reshape(1, -1, 1, 1))
    return x, operators.transpose(y, _TO_LAST) if last else y


def find_executed(model: openvino.CompiledModel) -> tuple[str, str]:
    """Return what a compiled model runs for its layer: OpenVINO's name of the kernel, and its type."""
    nodes = [node.rt_info for node in model.get_runtime_model().get_ordered_ops()]
    layers = [node for node in nodes if node["layerType"].astype(str) in _LAYERS]

    def said(name: str) -> str:
        return "+".join(dict.fromkeys(node[name].astype(str) for node in layers))

    return said("primitiveType"), said("runtimePrecision")


def _call(model: openvino.CompiledModel, x: np.ndarray) -> Callable[[], Any]:
    request = model.create_infer_request()
    request.set_input_tensor(openvino.Tensor(x, shared_memory=True))
    return partial(_infer, request, x)


def _infer(request: openvino.InferRequest, _: np.ndarray) -> Any:
    """Run the request; `_` is the array that it reads, which the request itself does not keep alive."""
    return request.infer(share_outputs=True)
