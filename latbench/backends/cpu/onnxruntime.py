"""ONNX Runtime: a model of one node, Gemm or Conv, on its CPU provider.

Its threads spin while they wait for the next call, which is its default: without that a layer of 40 us takes 18 us
more. They spin for 35 ms after the last call, and would slow down what is timed meanwhile: so they get time to rest.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from latbench.backends.cpu.prepare_point import MOST_SESSIONS, Engine, SyntheticLayer, count_copies
from latbench.backends.installed_engines import Unsupported
from latbench.workloads.points import Point
from sparse_kernels.shapes import Conv2dShape, Shape

SPINNING_SECONDS = 0.04  # measured with ONNX Runtime 1.31: 27 to 41 ms of a core

_OPSET, _IR_VERSION = 17, 8  # old enough for every ONNX Runtime since 2022


def prepare(point: Point, layer: SyntheticLayer) -> Engine:
    """Prepare the dense layer in ONNX Runtime. Raises Unsupported for any other pattern."""
    if str(point.pattern) != "dense":
        raise Unsupported(f"onnxruntime runs dense layers, not {point.pattern}")
    model = build_one_node_model(point.shape, layer)
    copies = count_copies(layer.weight.nbytes, MOST_SESSIONS)
    if copies > 1:
        _share_threads(point.threads)
    shared = _share_threads.cache_info().currsize > 0  # for this layer, or for one before it
    calls = [_call(_session(model, point.threads, shared), layer.x) for _ in range(copies)]
    name = "Conv" if isinstance(point.shape, Conv2dShape) else "Gemm"
    return Engine(f"onnxruntime.{name}", layer.weight.nbytes, calls, lambda outputs: outputs[0], SPINNING_SECONDS)


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
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, layer.x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y_size)],
        [
            numpy_helper.from_array(np.ascontiguousarray(weight), "weight"),
            numpy_helper.from_array(layer.bias, "bias"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    serialised = io.BytesIO()
    onnx.save(model, serialised)
    return serialised.getvalue()


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
