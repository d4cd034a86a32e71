"""Attention in eight bits: exact on whole numbers, near float attention elsewhere, and wrong readings are caught."""

from collections import deque

import numpy as np
import pytest

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.vector_emitter import QUADS_BY_UNIT
from sparse_kernels.cpu.kernels.attention import attention
from sparse_kernels.cpu.kernels.int8_attention import MOST_KEYS
from sparse_kernels.cpu.runtime import scratch_buffers

pytestmark = pytest.mark.skipif(
    find_cpu_target().quads != QUADS_BY_UNIT, reason="attention rounds only where a unit multiplies bytes"
)

# batch, heads, queries, keys, width of keys, width of values
SIZES = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 37, 19, 20, 20),
    (1, 2, 8, 70, 64, 33),
    (3, 1, 9, 33, 99, 7),
    (1, 1, 130, 16, 16, 48),
]
GRID = 2.0**-5


def draw_whole(rng, rows, width):
    """Whole numbers whose rows and columns reach 127 or are 0, in pairs of rows with opposite signs: no mean."""
    half = rng.integers(-127, 128, (rows // 2, width))
    half[:, rng.integers(width)] = 127
    half[:1] = 127  # the largest of each column
    return np.concatenate([half, -half, np.zeros((rows % 2, width), int)])


def draw(rng, size):
    """q, k and v as whole numbers of 1/32, and room for the result."""
    batch, heads, n, keys, d, e = size

    def each(rows, width, make):
        whole = [[make(rows, width) for _ in range(heads)] for _ in range(batch)]
        return np.array(whole).transpose(0, 2, 1, 3).copy().swapaxes(1, 2)

    def draw_queries(rows, width):
        whole = rng.integers(-127, 128, (rows, width))
        whole[np.arange(rows), rng.integers(width, size=rows)] = 127
        return whole

    q = each(n, d, draw_queries)
    k, v = (each(keys, width, lambda rows, w: draw_whole(rng, rows, w)) for width in (d, e))
    return q, k, v


def run(q, k, v, scale):
    out = np.full((*q.shape[:3], v.shape[3]), np.nan, np.float32)
    q, k, v = ((whole * GRID).astype(np.float32) for whole in (q, k, v))
    return attention(q, k, v, out, scale, may_round=True)


def compute_exactly(q, k, v, scale):
    """The result and, for each query, how far a byte that lies between two whole numbers may move it."""
    scores = np.einsum("bhnd,bhkd->bhnk", q, k) * (GRID * GRID * scale)
    exact = 255 * np.exp(scores - scores.max(axis=-1, keepdims=True))
    # A score of s is known to 2**-21 * |s|, and exp to 1.2e-4 of it.
    doubt = exact * (np.abs(scores).max(axis=-1, keepdims=True) * 2.0**-20 + 1.2e-4) + 2.0**-14
    shares = np.rint(exact)
    near = (np.abs(exact - np.floor(exact) - 0.5) <= doubt).sum(axis=-1)
    total = shares.sum(axis=-1)
    moved = (2 * near / total)[..., None] * np.abs(v).max() * GRID
    return np.einsum("bhnk,bhke->bhne", shares, v) * GRID / total[..., None], moved + 1e-5


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("scale", [0.001, 0.02, 1.0, -0.3, 0.0])
def test_whole_numbers_are_multiplied_exactly(rng, size, scale):
    q, k, v = draw(rng, size)
    wanted, doubt = compute_exactly(q, k, v, scale)
    assert (np.abs(run(q, k, v, scale) - wanted) <= doubt).all()


@pytest.mark.parametrize("fault", ["zero", "quads", "short sums", "total"])
def test_a_wrong_kernel_is_caught(rng, fault):
    q, k, v = draw(rng, (1, 2, 24, 40, 32, 16))
    result = run(q, k, v, 0.001)
    if fault == "zero":  # of keys: 127 in place of 128
        result, _ = compute_exactly(q, k + 1, v + 1, 0.001)
    elif fault == "quads":  # values in another order than probabilities
        result, _ = compute_exactly(q, k, v[:, :, np.arange(40) ^ 1], 0.001)
    elif fault == "short sums":
        products = np.clip(q[..., :2].sum(-1, keepdims=True), -100, 100)
        result, _ = compute_exactly(np.where(np.arange(32) < 2, products, q), k, v, 0.001)
    else:
        result = result * np.float32(255 / 256)
    wanted, doubt = compute_exactly(q, k, v, 0.001)
    assert not (np.abs(result - wanted) <= doubt).all()


@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_results_are_near_those_of_floats(rng, shift):
    """Of normal numbers, scores are known to 1%, probabilities to 1% of a common one, and values to 0.7%.

    What all keys share changes nothing, and what all values share is kept exactly.
    """
    shape = 2, 4, 128, 64
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    k, v = k + np.float32(shift) * rng.standard_normal(64).astype(np.float32), v + np.float32(shift)
    floats, rounded = (attention(q, k, v, np.empty_like(q), may_round=each) for each in (False, True))
    error, size = rounded - floats, floats - floats.mean(axis=2, keepdims=True)
    assert 1e-4 < np.sqrt((error**2).mean() / (size**2).mean()) < 0.03


def test_nan_and_infinity_leave_no_finite_result_that_they_touch(rng):
    q, k, v = (rng.standard_normal((1, 3, 20, 16)).astype(np.float32) for _ in range(3))
    q[0, 0, 3, 2], k[0, 1, 5, 5], v[0, 2, 7, 4] = np.inf, np.nan, np.nan
    out = attention(q, k, v, np.empty_like(q), may_round=True)
    wrong = np.zeros(out.shape, bool)
    wrong[0, 0, 3], wrong[0, 1], wrong[0, 2, :, 4] = True, True, True
    np.testing.assert_array_equal(np.isfinite(out), ~wrong)


def test_with_many_keys_nothing_is_rounded(rng):
    q, k, v = (rng.standard_normal((1, 1, n, 8)).astype(np.float32) for n in (4, MOST_KEYS + 1, MOST_KEYS + 1))
    results = [attention(q, k, v, np.empty_like(q), may_round=each) for each in (False, True)]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_an_earlier_call_left_in_the_shared_room_is_not_read(rng, monkeypatch, size):
    q, k, v = draw(rng, size)
    wanted = run(q, k, v, 0.02)
    for left in (np.nan, 1e-40):
        room = scratch_buffers.ScratchBuffer(np.full(2**20, left, np.float32))
        monkeypatch.setattr(scratch_buffers, "_free", deque([room]))
        np.testing.assert_array_equal(run(q, k, v, 0.02), wanted)
