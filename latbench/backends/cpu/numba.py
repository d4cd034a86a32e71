"""Numba: the project's own kernels for every pattern, through the plans of `sparse_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from latbench.backends.cpu.prepare_point import OWN_STEPS, Engine, SyntheticLayer, count_copies
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import INT8
from latbench.workloads.points import Point
from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.launch.parallel_kernel import watch_kernels
from sparse_kernels.cpu.plans import conv2d, linear
from sparse_kernels.plan_protocol import Plan
from sparse_kernels.planner import prepare as prepare_linear
from sparse_kernels.planner import prepare_conv2d
from sparse_kernels.registry import UnknownKernel
from sparse_kernels.shapes import Conv2dShape, LinearShape

PRECISIONS = {
    ("float32", "float32"): "float32",
    ("bfloat16", "float32"): "bfloat16-weights",
    ("bfloat16", "bfloat16"): "bfloat16",
}
"""What of a layer is rounded, by the types of its weights and activations."""


def prepare(point: Point, layer: SyntheticLayer) -> Engine:
    """Prepare the layer as a Numba plan of any pattern; the kernel `tuned` is found by measurement."""
    plan: Any
    if point.dtype_w == INT8:
        return _prepare_int8(point, layer)
    precision = PRECISIONS[point.dtype_w, point.dtype_a]
    if precision == "bfloat16" and not (find_cpu_target().pairs or find_cpu_target().matrix):
        raise Unsupported("this processor multiplies no bfloat16: the layer would run in float32")
    check = linear.check_precision if isinstance(point.shape, LinearShape) else conv2d.check_precision
    try:
        check(layer.packed, precision)
    except ValueError as error:
        raise Unsupported(str(error)) from error
    try:
        if isinstance(point.shape, Conv2dShape):
            plan = prepare_conv2d(layer.packed, point.shape, "numba", point.layout, precision=precision)
        else:
            plan = prepare_linear(
                layer.packed, "numba", point.layout, point.shape.n,
                tune=point.kernel == "tuned", precision=precision,
            )  # fmt: skip
    except UnknownKernel as error:
        raise Unsupported(str(error)) from error
    room = plan.room_bytes(point.shape.batch) if isinstance(point.shape, Conv2dShape) else 0
    return _build_engine(plan, layer, room)


def _prepare_int8(point: Point, layer: SyntheticLayer) -> Engine:
    """Prepare the layer as a plan in eight bits."""
    plan: Any
    weight = layer.quantize(point.kernel == OWN_STEPS)
    if isinstance(point.shape, Conv2dShape):
        plan = prepare_conv2d(weight, point.shape, "numba", point.layout)
    else:
        precision = "float32" if point.dtype_a == INT8 else "int8-weights"
        try:
            plan = prepare_linear(weight, "numba", point.layout, point.shape.n, precision=precision)
        except ValueError as error:
            raise Unsupported(str(error)) from error
    return _build_engine(plan, layer)


def _build_engine(plan: Any, layer: SyntheticLayer, room_bytes: int = 0) -> Engine:
    """Return the engine of a plan and of copies of it, with the families of kernels that a call runs."""
    plans = [plan, *(plan.copy() for _ in range(count_copies(plan.nbytes + room_bytes) - 1))]
    calls = [_call(each, layer) for each in plans]
    with watch_kernels() as modules:
        calls[0]()
    families = tuple(sorted(module.rpartition(".")[2] for module in modules))
    return Engine(plan.kernel, plan.nbytes, calls, room_bytes=room_bytes, families=families)


def _call(plan: Plan, layer: SyntheticLayer) -> Callable[[], np.ndarray]:
    x, bias = layer.x, layer.bias
    return lambda: plan(x, bias)
