"""Eight digits that stand for the kernels of a format: they change with the Python code that Numba compiles.

The code of the format's file and of what it imports from this folder counts; comments, docstrings, imports and white
space do not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

DIGITS = 8
FOLDER = Path(__file__).parent

MODULES = {
    "dense": "dense", "vector": "vector", "shflbw": "vector", "vectornm": "vector", "block": "block", "nm": "nm",
    "unstructured": "csr",
}  # fmt: skip
"""The file of each format's kernels."""

# Every call runs through these: launches, and the transposition of token-major activations.
_ALWAYS = ("numba_cuda_plan", "transpose")


@functools.cache
def fingerprint_module(module: str) -> str:
    """Return the fingerprint of the kernels in a file of this folder (``vector``, without ``.py``).

    Returns
    -------
    str
        Eight hexadecimal digits.
    """
    found = hashlib.sha256()
    for name in sorted({module, *_imported(module), *_ALWAYS}):
        found.update(read_code(FOLDER / f"{name}.py").encode() + b"\0")
    return found.hexdigest()[:DIGITS]


def read_code(file: Path) -> str:
    """Return a Python file without comments, docstrings and imports, in the same layout on every Python."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [each for each in body if not _is_no_code(each)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_no_code(node: ast.stmt) -> bool:
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or isinstance(node, ast.Import | ast.ImportFrom)


def _imported(module: str) -> Iterator[str]:
    """Yield the files of this folder that a file imports, and those that they import."""
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(__package__ or ""):
            inside = (node.module or "").removeprefix(__package__ or "").removeprefix(".")
            names = [inside] if inside else [alias.name for alias in node.names]
            for name in names:
                yield name
                yield from _imported(name)
