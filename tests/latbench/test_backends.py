"""Engines: each computes what the oracle says, on odd shapes too, and a wrong one is caught before it is timed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from latbench import backends
from latbench.backends import Engine, Layer, Rotation, Unsupported
from latbench.plan import KERNELS, Point
from sparse_kernels.formats import pack
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

SHAPES: list[Shape] = [
    LinearShape(17, 13, 5),
    LinearShape(1, 1, 1),
    Conv2dShape(3, 5, 9, 7, 6, 3, 2, (2, 1), (1, 0), (1, 2)),
    Conv2dShape(1, 4, 5, 5, 8, 1, 1),
]


def point(backend: str, kernel: str, shape: Shape, pattern: Pattern | None = None, sparsity: float = 0.0) -> Point:
    return Point("cpu", backend, kernel, shape, pattern or Dense(), sparsity, threads=2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("backend", "position"), [("torch", 0), ("torch", 1), ("onnxruntime", 0), ("numba", 0)])
def test_every_engine_runs_dense_layers_and_is_right(backend: str, position: int, shape: Shape) -> None:
    rotation = backends.prepare(point(backend, KERNELS[backend][shape.op][position], shape))
    assert rotation.facts["max_rel_err"] < 1e-5
    assert rotation.facts["nnz"] == shape.m * shape.k and rotation.facts["sparsity_actual"] == 0
    assert rotation.facts["flop_dense"] == rotation.facts["flop_nnz"] == shape.flop
    assert rotation.facts["kernel_used"].startswith(backend)
    assert rotation() is not None


@pytest.mark.parametrize("pattern", [VectorWise(8), ShflBW(8), BlockWise(8, 4), Unstructured(), NM(2, 4)], ids=str)
def test_numba_runs_every_pattern_and_is_right(pattern: Pattern) -> None:
    rotation = backends.prepare(point("numba", "auto", LinearShape(24, 16, 3), pattern, 0.5))
    assert rotation.facts["sparsity_actual"] == pytest.approx(0.5, abs=0.05)
    assert rotation.facts["flop_nnz"] == 2 * rotation.facts["nnz"] * 3


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_a_dense_engine_refuses_a_sparse_point(backend: str) -> None:
    with pytest.raises(Unsupported, match=f"{backend} runs dense layers, not vector:8"):
        backends.prepare(point(backend, "auto", LinearShape(8, 8, 1), VectorWise(8), 0.5))


def test_a_pattern_that_does_not_fit_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="channels"):
        backends.prepare(point("numba", "auto", Conv2dShape(1, 3, 5, 5, 8, 3, 3), NM(2, 4), 0.5))


def _drops_the_last_input(layer: Layer) -> np.ndarray:
    return layer.x[:, :-1] @ layer.weight[:, :-1].T + layer.bias


def _forgets_the_bias(layer: Layer) -> np.ndarray:
    return layer.x @ layer.weight.T


def _rounds_to_half(layer: Layer) -> np.ndarray:
    return (layer.x.astype(np.float16) @ layer.weight.T.astype(np.float16)).astype(np.float32) + layer.bias


@pytest.mark.parametrize("wrong", [_drops_the_last_input, _forgets_the_bias, _rounds_to_half])
@pytest.mark.parametrize("copy", [0, 1])
def test_a_wrong_engine_is_caught_in_any_copy(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Layer], np.ndarray], copy: int
) -> None:
    def prepare(_: Point, layer: Layer) -> Engine:
        right = layer.x @ layer.weight.T + layer.bias
        calls: list[Callable[[], Any]] = [lambda: right, lambda: right]
        calls[copy] = lambda: wrong(layer)
        return Engine("planted", layer.weight.nbytes, calls)

    monkeypatch.setattr("latbench.backends.torch.prepare", prepare)
    with pytest.raises(WrongResult):
        backends.prepare(point("torch", "linear", LinearShape(8, 16, 4)))


def test_copies_take_turns() -> None:
    rotation = Rotation([lambda: "a", lambda: "b", lambda: "c"], {})
    assert [rotation() for _ in range(5)] == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize(
    ("weight_bytes", "copies"), [(0, 8), (1, 8), (2**22, 8), (9 * 2**20, 4), (2**25, 1), (2**25 + 1, 1)]
)
def test_copies_fill_the_caches_and_no_more(weight_bytes: int, copies: int) -> None:
    assert backends.copies_for(weight_bytes) == copies


def test_the_same_point_always_gets_the_same_layer() -> None:
    wanted = point("numba", "auto", LinearShape(16, 24, 3), VectorWise(8), 0.5)
    first, again = backends.synthetic_layer(wanted), backends.synthetic_layer(wanted)
    np.testing.assert_array_equal(first.weight, again.weight)
    np.testing.assert_array_equal(first.x, again.x)
    assert not np.array_equal(first.weight, backends.synthetic_layer(replace(wanted, seed=1)).weight)


@pytest.mark.parametrize("m", [1, 7, 8, 20, 64])
def test_a_shuffled_mask_is_one_that_packs_and_is_not_in_order(rng: np.random.Generator, m: int) -> None:
    mask = backends.synthetic_mask(rng, ShflBW(8), (m, 40), 0.75)
    pack(np.ones((m, 40), np.float32), mask, ShflBW(8))
    if m == 64:
        first = mask.reshape(8, 8, 40)
        assert not (first == first[:, :1]).all()


def test_an_engine_whose_package_is_missing_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.available()["numba"]
    monkeypatch.setitem(backends.BACKENDS, "numba", ("latbench.backends.numba", ("numba", "no-such-package")))
    assert backends.available()["numba"] is None
