"""Linear layers whose weights are bytes and whose inputs stay float32: for few tokens."""

import numpy as np
import pytest

from sparse_kernels.formats.int8 import Int8Weight, find_scales, pack_int8, unpack_int8
from sparse_kernels.oracle import UNIT_ROUNDOFF
from sparse_kernels.patterns import parse
from sparse_kernels.planner import prepare

PATTERNS = ["dense", "vector:32", "shflbw:32", "block:32x4"]


def draw(rng: np.random.Generator, spec: str, m: int, k: int, sparsity: float = 0.6) -> Int8Weight:
    weight, pattern = rng.standard_normal((m, k)).astype(np.float32), parse(spec)
    mask = pattern.mask(weight.astype(float) ** 2, 0.0 if spec == "dense" else sparsity)
    return pack_int8(weight, mask, pattern, find_scales(np.where(mask, weight, 0)))


def check(y: np.ndarray, weight: Int8Weight, x: np.ndarray, bias: np.ndarray, relu: bool) -> None:
    """Whole numbers times x, summed in any order, then a scale and the bias: k + 3 roundings (Higham 2002, 3.1)."""
    exact, k = unpack_int8(weight).astype(float), weight.shape[1]
    before = x.astype(float) @ exact.T + bias
    scale = np.abs(x).astype(float) @ np.abs(exact).T + np.abs(bias)
    gamma = (k + 3) * UNIT_ROUNDOFF / (1 - (k + 3) * UNIT_ROUNDOFF)
    # The float32 weight that `unpack_int8` gives is one rounding off.
    assert (np.abs(y - (np.maximum(before, 0) if relu else before)) <= (gamma + UNIT_ROUNDOFF) * scale).all()


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("spec", PATTERNS)
@pytest.mark.parametrize(("m", "k", "n"), [(64, 96, 1), (100, 77, 3), (96, 64, 8), (192, 1030, 19)])
def test_results_are_those_of_the_rounded_weights(
    rng: np.random.Generator, backend: str, spec: str, m: int, k: int, n: int
) -> None:
    weight, bias = draw(rng, spec, m, k), rng.standard_normal(m).astype(np.float32)
    x = rng.standard_normal((n, k)).astype(np.float32) * 100  # no range of inputs limits it
    plan = prepare(weight, backend, "token_major", n, precision="int8-weights")
    for activation in (None, "relu"):
        check(plan(x, bias, activation), weight, x, bias, activation == "relu")
    assert plan.copy()(x, bias).tobytes() == plan(x, bias).tobytes()


def test_a_weight_takes_a_byte(rng: np.random.Generator) -> None:
    weight = draw(rng, "vector:32", 512, 512)
    narrow, wide = (prepare(weight, "numba", "token_major", 1, precision="int8-weights"),
                    prepare(weight.packed, "numba", "token_major", 1))  # fmt: skip
    assert narrow.nbytes == wide.nbytes - 3 * weight.packed.nnz + 4 * 512
    assert ".int8weights." in narrow.kernel


def test_what_gains_nothing_is_refused(rng: np.random.Generator) -> None:
    for spec, layout in (("unstructured", "token_major"), ("nm:2:4", "token_major"), ("vector:32", "feature_major")):
        with pytest.raises(ValueError, match="they would gain nothing"):
            prepare(draw(rng, spec, 64, 64, 0.5), "numba", layout, 1, precision="int8-weights")
    with pytest.raises(ValueError, match="no backend 'cupy' for int8-weights linear"):
        prepare(draw(rng, "dense", 64, 64), "cupy", "token_major", 1, precision="int8-weights")
    with pytest.raises(ValueError, match="takes neither tune=True nor another precision than int8-weights"):
        prepare(draw(rng, "dense", 64, 64), "numba", "token_major", 1, precision="bfloat16")
