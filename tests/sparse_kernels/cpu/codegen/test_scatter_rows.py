from functools import cache

import numpy as np
import pytest
from numba import njit

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.scatter_rows import scatter_rows
from sparse_kernels.cpu.codegen.tile_operands import WORTH_OF_FLOATS, Epilogue, TokenRows, WaitingSums
from sparse_kernels.cpu.layouts.panels import Panels, build_groups, build_panels
from sparse_kernels.formats import pack
from sparse_kernels.patterns import ShflBW
from sparse_kernels.plan_protocol import ACTIVATIONS

LANES = sorted({4, 8, 16, find_cpu_target().lanes})


@cache
def placing(lanes):
    """scatter_rows of one token and of four, by how many, compiled for vectors of so many lanes."""
    fused = int(find_cpu_target().fused)

    def of(together):
        @njit
        def put(sums, places, tokens, y, bias, activation):
            waiting = WaitingSums(sums.ctypes.data, places.ctypes.data, bias.size)
            rows = TokenRows(y.ctypes.data, y.shape[1], tokens)
            scatter_rows(
                (together, lanes, fused), waiting, rows, Epilogue(bias.ctypes.data, activation, WORTH_OF_FLOATS)
            )

        return put

    return {together: of(together) for together in (1, 4)}


def sums_and_places(rng, count, waiting=70):
    """Sums of four tokens at `waiting` places, some special, and which `count` of the places are wanted."""
    sums = rng.integers(-9, 9, (waiting, 4)).astype(np.float32)
    sums.ravel()[:3] = np.nan, np.inf, -np.inf
    return sums, rng.permutation(waiting)[:count].astype(np.uint32), rng.integers(-4, 4, count).astype(np.float32)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize("count", [1, 3, 16, 37, 70])
def test_sums_go_to_the_rows_of_their_tokens(rng, lanes, together, count):
    sums, places, bias = sums_and_places(rng, count)
    for activation in (None, "relu"):
        expected = sums[places].T + bias
        expected = np.where(expected < 0, 0, expected) if activation else expected
        for tokens in range(1, together + 1):
            y = np.full((tokens + 1, count + 2), np.float32(-77))
            given = sums[:, :together].copy()
            placing(lanes)[together](given, places, tokens, y, bias, ACTIVATIONS.index(activation))
            np.testing.assert_array_equal(y[:tokens, :count], expected[:tokens])
            assert (y[tokens] == -77).all() and (y[:, count:] == -77).all()


@pytest.mark.parametrize("lanes", LANES)
def test_rows_of_a_vector_wait_in_the_order_of_transposed_fours(rng, lanes):
    """Every fourth row, from the first, the second, the third and the fourth on."""
    pattern, weight = ShflBW(32), rng.standard_normal((83, 40)).astype(np.float32)
    cut: Panels = build_panels(build_groups(pack(weight, pattern.mask(weight.astype(float) ** 2, 0.5), pattern)), 32)
    vectors = cut.row_ids.reshape(-1, lanes)
    waiting = np.concatenate([vector[j::4] for vector in vectors for j in range(4)])
    places = cut.positions_in_fours(lanes)
    np.testing.assert_array_equal(waiting[places], np.arange(83))
    assert places.dtype == np.uint32
