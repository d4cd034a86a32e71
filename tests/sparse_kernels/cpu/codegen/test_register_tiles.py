import ctypes
import math
import mmap
from itertools import pairwise

import numpy as np
import pytest
import torch
from numba import njit

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.register_tiles import copy_every_other, copy_run, lanes_to_tokens, tokens_to_lanes
from sparse_kernels.cpu.codegen.tile_operands import Matrix
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS
from sparse_kernels.cpu.runtime.work_split import find_part_begin
from sparse_kernels.formats import pack
from sparse_kernels.patterns import Dense
from sparse_kernels.planner import prepare


def activated(x, activation, layout):
    """activation(x) for x (n,), through a kernel whose weight is 1."""
    one = np.ones((1, 1), np.float32)
    plan = prepare(pack(one, one > 0, Dense()), "numba", layout, x.size)
    return plan(x[:, None] if layout == "token_major" else x[None], activation=activation).ravel()


@pytest.mark.parametrize("layout", ["token_major", "feature_major"])
def test_gelu_is_within_its_bound_of_the_exact_one(layout):
    x = np.concatenate([np.linspace(-14, 14, 40_001), np.linspace(-1e-3, 1e-3, 2_001), [1e-30, -1e-30, 1e30, -1e30]])
    x = x.astype(np.float32)
    exact = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.astype(float)])
    error = np.abs(activated(x, "gelu", layout) - exact)
    assert (error <= 3e-7 + np.abs(x) * 2.0**-24).all()
    assert (error <= np.abs(x) * 4 * 2.0**-23).all()


@pytest.mark.parametrize("layout", ["token_major", "feature_major"])
def test_special_values_of_the_activations(layout):
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0] * 4, np.float32)
    np.testing.assert_array_equal(activated(x, "relu", layout), torch.relu(torch.from_numpy(x)).numpy())
    gelu = activated(x, "gelu", layout)[:5]
    assert np.isnan(gelu[0])
    assert gelu[1] == np.inf
    np.testing.assert_allclose(gelu[2:], 0, atol=1e-19)  # the limit at -inf, where dense code may say NaN


@pytest.mark.parametrize("lanes", sorted({4, 8, 16, find_cpu_target().lanes}))
@pytest.mark.parametrize("features", [1, 3, 16, 37])
def test_tokens_go_to_lanes_and_back(lanes, features):

    @njit
    def to_lanes(source, tokens, target):
        features = source.shape[1]
        target_rows = Matrix(target.ctypes.data, target.shape[1])
        tokens_to_lanes((lanes, FLOATS), Matrix(source.ctypes.data, features), target_rows, tokens, features)

    @njit
    def to_tokens(source, tokens, target):
        features = target.shape[1]
        source_rows = Matrix(source.ctypes.data, source.shape[1])
        lanes_to_tokens((lanes, FLOATS), source_rows, Matrix(target.ctypes.data, features), tokens, features)

    for tokens in (1, 3, lanes):
        source = np.arange(tokens * features, dtype=np.float32).reshape(tokens, features)
        target = np.full((features + 1, lanes + 2), np.float32(-1))
        to_lanes(source, tokens, target)
        repeated = source[np.minimum(np.arange(lanes), tokens - 1)]
        np.testing.assert_array_equal(target[:features, :lanes], repeated.T)
        assert (target[features] == -1).all()
        assert (target[:, lanes:] == -1).all()
        back = np.full((lanes + 1, features), np.float32(-1))
        to_tokens(target, tokens, back)
        np.testing.assert_array_equal(back[:tokens], source)
        assert (back[tokens:] == -1).all()


def test_copied_runs_end_where_they_must():
    lanes = find_cpu_target().lanes

    @njit
    def copy(source, target, count):
        copy_run(lanes, FLOATS, source.ctypes.data, target.ctypes.data, count)

    source = np.arange(100, dtype=np.float32)
    for count in (0, 1, lanes - 1, lanes, lanes + 1, 3 * lanes + 2):
        target = np.full(100, np.float32(-1))
        copy(source, target, count)
        np.testing.assert_array_equal(target[:count], source[:count])
        assert (target[count:] == -1).all()


def before_a_forbidden_page(count: int) -> np.ndarray:
    """0, 1, 2, ... at the end of a page; the process dies of a read beyond them."""
    page = mmap.PAGESIZE
    pages = np.frombuffer(mmap.mmap(-1, 2 * page), np.float32)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(pages.ctypes.data + page), ctypes.c_size_t(page), 0) == 0
    numbers = pages[page // 4 - count : page // 4]
    numbers[:] = np.arange(count)
    return numbers


def test_every_other_element_is_copied_and_nothing_else_read():
    lanes = find_cpu_target().lanes

    @njit
    def copy(source, target, count):
        copy_every_other(lanes, FLOATS, source.ctypes.data, target.ctypes.data, count)

    for count in (0, 1, lanes // 2, lanes - 1, lanes, lanes + 1, 3 * lanes + 2):
        source = before_a_forbidden_page(max(0, 2 * count - 1))
        target = np.full(100, np.float32(-1))
        copy(source, target, count)
        np.testing.assert_array_equal(target[:count], source[::2])
        assert (target[count:] == -1).all()


@pytest.mark.parametrize("repeats", [1, 3, 8])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_shares_are_all_the_work_and_even(rng, repeats, parts):
    costs = rng.integers(0, 20, 37)
    work = np.concatenate([[0], np.cumsum(costs)])
    bounds = [find_part_begin(work, repeats, part, parts) for part in range(parts + 1)]
    assert bounds[0] == 0
    assert bounds[-1] == repeats * costs.size
    assert bounds == sorted(bounds)
    each = [np.tile(costs, repeats)[a:b].sum() for a, b in pairwise(bounds)]
    assert max(each) - min(each) <= 2 * costs.max() + 1


def test_shares_begin_at_the_nearest_item():
    work = np.array([0, 9, 18, 28, 38])  # two and two, though the first two are less than half
    assert [find_part_begin(work, 1, part, 2) for part in range(3)] == [0, 2, 4]


def test_no_work_is_shared_too():
    work = np.zeros(4, np.int64)
    assert [find_part_begin(work, 2, part, 3) for part in range(4)] == [0, 2, 4, 6]
