"""The weights that an ONNX file stores, and the operations through which others read them.

torch's older exporter stores equal weights once, and copies them by Identity operations that come before all others.
A tied weight it stores twice where one place reads it transposed: for an embedding, and for MatMul.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

_WORTH_BYTES = 1024  # a Transpose takes about a hundred bytes


def list_weight_shapes(graph: Any) -> dict[str, list[int]]:
    """Return the shape of each value of the graph that is a stored weight, an equal one, or its transpose."""
    shapes = {weight.name: list(weight.dims) for weight in graph.initializer}
    for node in graph.node:
        if node.op_type in ("Identity", "Transpose") and node.input[0] in shapes:
            shape = shapes[node.input[0]]
            if node.op_type == "Identity":
                shapes[node.output[0]] = shape
            elif len(shape) == 2:
                shapes[node.output[0]] = shape[::-1]
    return shapes


def remove_copies(graph: Any) -> None:
    """Let all operations read a stored weight itself, without the Identity operations that copy it."""
    stored = {weight.name for weight in graph.initializer}
    outputs = {output.name for output in graph.output}
    weights: dict[str, str] = {}
    kept = []
    for node in graph.node:
        source = weights.get(node.input[0], node.input[0]) if node.op_type == "Identity" else ""
        if source in stored and node.output[0] not in outputs:
            weights[node.output[0]] = source
        else:
            kept.append(node)
    if weights:
        for node in _list_nodes(kept):
            node.input[:] = [weights.get(name, name) for name in node.input]
        del graph.node[:]
        graph.node.extend(kept)


def store_transposes_once(graph: Any) -> None:
    """Replace a matrix that is stored a second time, transposed, by a Transpose of the first one.

    Only where all who read it are MatMul operations: engines transpose a constant once, when they load the file.
    """
    from onnx import helper, numpy_helper

    readers: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for node in _list_nodes(graph.node):
        for place, name in enumerate(node.input):
            readers[name].append((node.op_type, place))
    matrices = {it.name: numpy_helper.to_array(it) for it in graph.initializer if len(it.dims) == 2}
    matrices = {name: matrix for name, matrix in matrices.items() if matrix.nbytes >= _WORTH_BYTES}
    by_content = {_hash_matrix(matrix): name for name, matrix in matrices.items()}
    read: set[str] = set()
    transposes = {}
    for name, matrix in matrices.items():
        source = by_content.get(_hash_matrix(matrix.T))
        if source is None or source == name or name in read or source in transposes:
            continue
        if readers[name] and all(reader == ("MatMul", 1) for reader in readers[name]):
            transposes[name] = source
            read.add(source)
    if not transposes:
        return
    nodes = [
        helper.make_node("Transpose", [source], [name], f"Transpose_{name}", perm=[1, 0])
        for name, source in transposes.items()
    ]
    nodes += graph.node
    left = [weight for weight in graph.initializer if weight.name not in transposes]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(left)
    graph.node.extend(nodes)


def _list_nodes(nodes: Any) -> Iterator[Any]:
    """Yield the operations, and those of graphs inside of them."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _list_nodes(attribute.g.node)


def _hash_matrix(matrix: Any) -> tuple[object, ...]:
    return matrix.shape, matrix.dtype.str, hashlib.sha256(matrix.tobytes()).digest()
