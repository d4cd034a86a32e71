"""Bytes of weights as a second budget."""

import numpy as np
import pytest

from search.layers import DENSE, Interval, Layer, Option
from search.problem import Problem
from search.weight_bytes import weight_bytes
from sparse_kernels.formats import pack
from sparse_kernels.patterns import parse
from sparse_kernels.shapes import LinearShape


@pytest.mark.parametrize("spec", ["unstructured", "vector:4", "shflbw:4", "block:4x4", "nm:2:4", "vectornm:4:2:4"])
@pytest.mark.parametrize(("m", "k"), [(16, 24), (13, 7)])
def test_bytes_are_those_of_any_mask_of_the_pattern(spec: str, m: int, k: int, rng: np.random.Generator) -> None:
    sparsity, zeros, pattern = 0.5, np.zeros(1), parse(spec)
    layer = Layer("a", (Option(spec, sparsity),), zeros, zeros, zeros, zeros)
    weight = rng.standard_normal((m, k)).astype(np.float32)
    mask = pattern.mask(weight.astype(np.float64) ** 2, sparsity)
    packed = pack(weight * mask, mask, pattern).nbytes
    assert weight_bytes(layer, LinearShape(m=m, k=k, n=3)) == {layer.options[0]: pytest.approx(packed, abs=16)}


def test_the_lightest_profile_is_found_within_both_budgets() -> None:
    options = (Option(DENSE, 0.0), Option("unstructured", 0.5), Option("vector:4", 0.75))
    t, e = np.array([4.0, 1.0, 1.0]), np.array([0.0, 1.0, 3.0])
    layers = tuple(Layer(name, options, t, t, t, e) for name in ("a", "b"))
    p = Problem(layers, Interval(0, 0, 0), Interval(8, 8, 8), "torch")
    shapes = {name: LinearShape(m=16, k=16, n=1) for name in ("a", "b")}
    heavy = 2 * weight_bytes(layers[0], shapes["a"])[options[1]]
    assert p.solve(4.0).options == dict.fromkeys("ab", options[1])
    assert p.solve(4.0, also=p.bytes_within(heavy, shapes)).error == 2.0
    light = p.solve(4.0, also=p.bytes_within(heavy - 1, shapes))
    assert sorted(str(option) for option in light.options.values()) == ["unstructured at 0.5", "vector:4 at 0.75"]
