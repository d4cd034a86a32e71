"""ONNX Runtime: a model of one node, Gemm or Conv, on its CPU provider.

Its threads spin while they wait for the next call, which is its default: without that a layer of 40 us takes 18 us
more. They spin for 35 ms after the last call, and would slow down what is timed meanwhile: so they get time to rest.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from latbench.backends.cpu.block_steps import BlockSteps
from latbench.backends.cpu.prepare_point import (
    MOST_SESSIONS,
    OWN_STEPS,
    Engine,
    SyntheticLayer,
    count_copies,
    find_block_bits,
)
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import BLOCK, INT8
from latbench.workloads.points import Point
from sparse_kernels.formats import unpack
from sparse_kernels.formats.int8 import InputRange
from sparse_kernels.shapes import Conv2dShape, Shape

SPINNING_SECONDS = 0.04  # measured with ONNX Runtime 1.31: 27 to 41 ms of a core

_OPSET, _IR_VERSION = 17, 8  # old enough for every ONNX Runtime since 2022
_ROUNDS_INPUTS = 4  # the accuracy level of products in eight bits


def prepare(point: Point, layer: SyntheticLayer) -> Engine:
    """Prepare the dense layer in ONNX Runtime. Raises Unsupported for any other pattern."""
    if str(point.pattern) != "dense":
        raise Unsupported(f"onnxruntime runs dense layers, not {point.pattern}")
    bits, in_bytes = find_block_bits(point), point.dtype_w == INT8
    weight_bytes = layer.weight.nbytes // (4 if in_bytes else 1)
    if bits is not None:
        blocks = layer.round_in_blocks(bits)
        model, weight_bytes = _build_block_model(point.shape, blocks, layer), blocks.nbytes
    elif in_bytes:
        model = build_int8_model(point.shape, layer, dynamic=point.kernel == OWN_STEPS)
    else:
        model = build_one_node_model(point.shape, layer)
    copies = count_copies(layer.weight.nbytes, MOST_SESSIONS)
    if copies > 1:
        _share_threads(point.threads)
    shared = _share_threads.cache_info().currsize > 0  # for this layer, or for one before it
    calls = [_call(_session(model, point.threads, shared), layer.x) for _ in range(copies)]
    name = "Conv" if isinstance(point.shape, Conv2dShape) else "Gemm" if bits is None else "MatMulNBits"
    kernel = f"onnxruntime.{name}{'.' + point.kernel if point.kernel != 'auto' else ''}"
    return Engine(kernel, weight_bytes, calls, lambda outputs: outputs[0], SPINNING_SECONDS)


def build_one_node_model(shape: Shape, layer: SyntheticLayer) -> bytes:
    """Return the layer as a serialised ONNX model: input x, output y, weight and bias inside."""
    if isinstance(shape, Conv2dShape):
        weight = layer.weight.reshape(shape.c_out, shape.kh, shape.kw, shape.c_in).transpose(0, 3, 1, 2)
        pads = [*shape.padding, *shape.padding]
        node = helper.make_node(
            "Conv", ["x", "weight", "bias"], ["y"],
            kernel_shape=[shape.kh, shape.kw], strides=shape.stride, pads=pads, dilations=shape.dilation,
        )  # fmt: skip
        y_size = [shape.batch, shape.c_out, shape.out_h, shape.out_w]
    else:
        weight = layer.weight
        node = helper.make_node("Gemm", ["x", "weight", "bias"], ["y"], transB=1)
        y_size = [shape.n, shape.m]
    constants = {"weight": np.ascontiguousarray(weight), "bias": layer.bias}
    return _serialise([node], layer.x.shape, y_size, constants)


def _serialise(
    nodes: Sequence[onnx.NodeProto], x_size: Sequence[int], y_size: Sequence[int], constants: Mapping[str, Any]
) -> bytes:
    """Return the model of these nodes, from x to y."""
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x_size)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y_size)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    domains = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=_IR_VERSION)
    serialised = io.BytesIO()
    onnx.save(model, serialised)
    return serialised.getvalue()


def build_int8_model(shape: Shape, layer: SyntheticLayer, dynamic: bool) -> bytes:
    """Return the layer in eight bits as a serialised ONNX model, as ONNX Runtime's own tools write it.

    Weights have a scale a row. A linear layer's sums become floats. What a convolution returns is read as bytes
    again, or else ONNX Runtime multiplies it in float32. dynamic: all tokens are read by the largest value among
    them.
    """
    weight = layer.quantize(False)
    whole, scales, reading = unpack(weight.packed).astype(np.int8), weight.scales, layer.input_range
    constants = {
        "scales": scales, "zeros": np.zeros(len(scales), np.int8), "bias": layer.bias,
        "step": np.float32(reading.scale), "zero": np.uint8(reading.zero),
    }  # fmt: skip
    if isinstance(shape, Conv2dShape):
        constants["weight"] = np.ascontiguousarray(
            whole.reshape(shape.c_out, shape.kh, shape.kw, shape.c_in).transpose(0, 3, 1, 2)
        )
        result = _estimate_output_range(shape, layer)
        constants |= {"y_step": np.float32(result.scale), "y_zero": np.uint8(result.zero)}
        bias_scales = (scales * np.float32(reading.scale)).astype(np.float32)
        constants |= {
            "bias_scales": bias_scales, "bias_zeros": np.zeros(len(scales), np.int32),
            "bias": np.rint(layer.bias / bias_scales).astype(np.int32),
        }  # fmt: skip
        nodes = [
            *_read_as_bytes("x", "step", "zero", "read"),
            helper.make_node("DequantizeLinear", ["weight", "scales", "zeros"], ["w"], axis=0),
            helper.make_node("DequantizeLinear", ["bias", "bias_scales", "bias_zeros"], ["b"], axis=0),
            helper.make_node(
                "Conv", ["read", "w", "b"], ["sums"], kernel_shape=[shape.kh, shape.kw], strides=shape.stride,
                pads=[*shape.padding, *shape.padding], dilations=shape.dilation,
            ),
            *_read_as_bytes("sums", "y_step", "y_zero", "y"),
        ]  # fmt: skip
        y_size = [shape.batch, shape.c_out, shape.out_h, shape.out_w]
    else:
        constants["weight"], y_size = np.ascontiguousarray(whole.T), [shape.n, shape.m]
        if dynamic:
            nodes = [
                helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "own_step", "own_zero"]),
                helper.make_node("MatMulInteger", ["q", "weight", "own_zero", "zeros"], ["whole"]),
                helper.make_node("Cast", ["whole"], ["floats"], to=TensorProto.FLOAT),
                helper.make_node("Mul", ["own_step", "scales"], ["worth"]),
                helper.make_node("Mul", ["floats", "worth"], ["sums"]),
                helper.make_node("Add", ["sums", "bias"], ["y"]),
            ]
        else:
            nodes = [
                *_read_as_bytes("x", "step", "zero", "read"),
                helper.make_node("DequantizeLinear", ["weight", "scales", "zeros"], ["w"], axis=1),
                helper.make_node("MatMul", ["read", "w"], ["sums"]),
                helper.make_node("Add", ["sums", "bias"], ["y"]),
            ]
    return _serialise(nodes, layer.x.shape, y_size, constants)


def _build_block_model(shape: Shape, weight: BlockSteps, layer: SyntheticLayer) -> bytes:
    """Return a linear layer whose weights have a step for each block, as a serialised ONNX model.

    The level lets ONNX Runtime round each block of inputs to eight bits. Without it, weights of eight bits become
    floats anew in each call, which takes twenty times as long (1.31).
    """
    node = helper.make_node(
        "MatMulNBits", ["x", "weight", "steps"], ["sums"], domain="com.microsoft", K=shape.k, N=shape.m,
        bits=weight.bits, block_size=BLOCK, accuracy_level=_ROUNDS_INPUTS,
    )  # fmt: skip
    constants = {"weight": weight.pack(2 ** (weight.bits - 1)), "steps": weight.steps.reshape(-1), "bias": layer.bias}
    nodes = [node, helper.make_node("Add", ["sums", "bias"], ["y"])]
    return _serialise(nodes, layer.x.shape, [shape.n, shape.m], constants)


def _read_as_bytes(x: str, step: str, zero: str, y: str) -> list[onnx.NodeProto]:
    """Return the pair of nodes by which ONNX Runtime knows that a tensor is read as bytes."""
    return [
        helper.make_node("QuantizeLinear", [x, step, zero], [f"{y}_bytes"]),
        helper.make_node("DequantizeLinear", [f"{y}_bytes", step, zero], [y]),
    ]


def _estimate_output_range(shape: Conv2dShape, layer: SyntheticLayer) -> InputRange:
    """Return a range that holds a convolution's results: x and weights are independent and normal."""
    spread = 6 * float(np.sqrt((layer.weight**2).sum(axis=1).max()) * layer.x.std()) + float(np.abs(layer.bias).max())
    return InputRange.covering(-spread, spread)


@cache
def _share_threads(threads: int) -> None:
    """Make one thread pool for all sessions of this process: separate pools would spin against each other.

    ONNX Runtime allows it once, and then no session of the process may have threads of its own.
    """
    onnxruntime.set_global_thread_pool_sizes(threads, 1)


def _session(model: bytes, threads: int, shared: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = not shared
    if not shared:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _call(session: onnxruntime.InferenceSession, x: np.ndarray) -> Callable[[], list[np.ndarray]]:
    feed = {"x": x}
    return lambda: session.run(None, feed)
