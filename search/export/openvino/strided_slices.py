"""Every second row and column of images, as shortcuts of residual networks take them: poolings of one element each.

OpenVINO (2026.4) computes a slice with steps element by element. A mean over one element is the same number, infinite
ones and NaN included, in a half to a third of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from latbench.base.quiet_openvino import import_openvino

if TYPE_CHECKING:
    import openvino as ov
else:
    ov = import_openvino()
operators = ov.opset13

_UNBOUNDED = 2**31 - 1  # an end in numbers is no end where a side turns out to be free
_ROWS = 2  # the axis of rows in (batch, channels, rows, columns); that of columns is the next and last


def pool_strided_slices(model: ov.Model) -> int:
    """Replace slices of every s-th row and column from the first on, in place; return how many there were."""
    found = [(node, steps) for node in model.get_ops() if (steps := _find_steps(node)) is not None]
    for node, steps in found:
        pooled = operators.avg_pool(node.input_value(0), steps, [0, 0], [0, 0], [1, 1], True, "floor")
        pooled.set_friendly_name(node.get_friendly_name())
        node.output(0).replace(pooled.output(0))
    return len(found)


def _find_steps(node: ov.Node) -> list[int] | None:
    """Return the steps (rows, columns) of a slice that a pooling can compute; None for any other node."""
    if node.get_type_name() != "Slice" or node.get_input_size() != 5:
        return None
    x = node.input_value(0)
    sides = list(x.get_partial_shape()) if x.get_partial_shape().rank.is_static else []
    given = [_read_constant(node.input_value(i)) for i in range(1, 5)]
    if len(sides) != _ROWS + 2 or x.get_element_type() != ov.Type.f32 or any(each is None for each in given):
        return None
    starts, ends, steps, axes = (each or [] for each in given)
    taken = [1, 1]
    for start, end, step, axis in zip(starts, ends, steps, axes, strict=True):
        place = (axis + len(sides) if axis < 0 else axis) - _ROWS
        if place < 0 or start != 0 or step < 1 or sides[axis].is_dynamic or end < _UNBOUNDED:
            return None
        taken[place] = step
    return taken if max(taken) > 1 else None


def _read_constant(output: ov.Output) -> Sequence[int] | None:
    node = output.get_node()
    return node.get_data().reshape(-1).tolist() if node.get_type_name() == "Constant" else None
