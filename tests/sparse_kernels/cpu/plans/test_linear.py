import copy
import itertools
import pickle
import threading
from collections import deque
from dataclasses import replace

import numba
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparse_kernels import oracle
from sparse_kernels.cpu.codegen import cpu_target
from sparse_kernels.cpu.codegen.register_tiles import AHEAD
from sparse_kernels.cpu.kernels import (
    row_panels,
    token_blocks,
    transpose_tiles,
)
from sparse_kernels.cpu.kernels import (
    small_batch as few,
)
from sparse_kernels.cpu.kernels import (
    token_major as tokens,
)
from sparse_kernels.cpu.kernels import (
    unstructured_rows as single,
)
from sparse_kernels.cpu.layouts import panels
from sparse_kernels.cpu.layouts import vector_grid as vectors
from sparse_kernels.cpu.plans import linear
from sparse_kernels.cpu.runtime import scratch_buffers
from sparse_kernels.formats import pack, round_packed, unpack
from sparse_kernels.patterns import NM, BlockWise, Dense, ShflBW, Unstructured, VectorWise, parse
from sparse_kernels.plan_protocol import BLOCKED_LAYOUTS, LAYOUTS
from sparse_kernels.planner import prepare

ALL_LAYOUTS = (*LAYOUTS, *BLOCKED_LAYOUTS)

PATTERNS = [
    Dense(),
    Unstructured(),
    NM(2, 4),
    NM(1, 4),
    BlockWise(32, 32),
    BlockWise(3, 5),
    BlockWise(16, 4),
    VectorWise(32),
    VectorWise(16),
    VectorWise(8),
    VectorWise(3),
    ShflBW(32),
    ShflBW(4),
]


@pytest.fixture(autouse=True)
def all_threads():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


def avx512(**how: bool) -> cpu_target.CpuTarget:
    """Intel's: shared; AMD's Zen 4: halves; AMD's Zen 5: neither."""
    return cpu_target.CpuTarget("avx512", 16, 32, fused=True, **how)


INTEL, ZEN_4, ZEN_5 = avx512(shared=True), avx512(halves=True), avx512()


def packed_of(pattern, weight, sparsity=0.7):
    kept = 0 if isinstance(pattern, Dense) else pattern.sparsity if isinstance(pattern, NM) else sparsity
    return pack(weight, pattern.mask(weight.astype(float) ** 2, kept), pattern)


def run(packed, x, layout, *, n=None, bias=None, activation=None, out=None, precision="float32"):
    """y (m, n) of x (k, n), through `layout`."""
    plan = prepare(packed, "numba", layout, x.shape[1] if n is None else n, precision=precision)
    if layout == "feature_major":
        return plan(x, bias, activation, out)
    if layout in BLOCKED_LAYOUTS:
        n = x.shape[1]
        if layout == "out_of_blocks":
            return plan(
                transpose_tiles.pack_tiles(x.T), bias, activation, np.empty((n, packed.shape[0]), np.float32)
            ).T
        given = np.ascontiguousarray(x.T) if layout == "into_blocks" else transpose_tiles.pack_tiles(x.T)
        return transpose_tiles.unpack_tiles(plan(given, bias, activation, out), n).T
    return plan(np.ascontiguousarray(x.T), bias, activation, out).T


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (33, 17), (100, 131)], ids=str)
def test_nothing_is_dropped_repeated_or_rounded(rng, size, pattern, layout):
    m, k = size
    weight, x = oracle.build_exact_operands(rng, m, k, 50)
    packed = packed_of(pattern, weight)
    expected = unpack(packed).astype(float) @ x
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        for n in (0, 1, 7, 16, 17, 50):
            np.testing.assert_array_equal(run(packed, x[:, :n].copy(), layout), expected[:, :n])


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_bias_and_activation_are_those_of_the_oracle(rng, activation, pattern, layout):
    m, k, n = 70, 130, 37
    packed = packed_of(pattern, rng.standard_normal((m, k)).astype(np.float32))
    x = rng.standard_normal((k, n)).astype(np.float32)
    bias = rng.standard_normal(m).astype(np.float32)
    for b in (None, bias, np.repeat(bias, 2)[::2]):
        y = run(packed, x, layout, bias=b, activation=activation)
        oracle.check(y, packed, x, bias=b, activation=activation)


@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    m=st.integers(1, 90),
    k=st.integers(1, 90),
    n=st.integers(0, 70),
    hint=st.sampled_from([0, 1, 64]),
    pattern=st.sampled_from(PATTERNS),
    layout=st.sampled_from(ALL_LAYOUTS),
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_any_shape(m, k, n, hint, pattern, layout, sparsity):
    rng = np.random.default_rng([m, k, n])
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    packed = packed_of(pattern, weight, sparsity)
    np.testing.assert_array_equal(run(packed, x, layout, n=hint), unpack(packed).astype(float) @ x)


@pytest.mark.parametrize("pattern", [Unstructured(), NM(1, 4), VectorWise(32), ShflBW(32)], ids=str)
@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_columns_in_several_stages_and_chunks(rng, layout, pattern):
    weight, x = oracle.build_exact_operands(rng, 40, 2500, 150)
    packed = packed_of(pattern, weight)
    np.testing.assert_array_equal(run(packed, x, layout), unpack(packed).astype(float) @ x)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_more_rows_than_keep_their_sums_in_the_cache(rng, layout):
    weight, x = oracle.build_exact_operands(rng, 1700, 60, 100)
    packed = packed_of(Unstructured(), weight)
    np.testing.assert_array_equal(run(packed, x, layout), unpack(packed).astype(float) @ x)


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("pattern", [Dense(), Unstructured(), NM(2, 4), VectorWise(32), ShflBW(8)], ids=str)
def test_nan_and_infinity_reach_exactly_the_outputs_that_read_them(rng, pattern, layout):
    weight = np.abs(rng.standard_normal((64, 40))).astype(np.float32) + 1
    packed = packed_of(pattern, weight)
    kept = unpack(packed) != 0
    for special in (np.nan, np.inf):
        for activation in (None, "relu", "gelu"):
            x = np.abs(rng.standard_normal((40, 21))).astype(np.float32)
            x[5, 3], x[39, 20] = special, special
            y = run(packed, x, layout, activation=activation)
            expected = np.zeros(y.shape, bool)
            expected[:, 3], expected[:, 20] = kept[:, 5], kept[:, 39]
            np.testing.assert_array_equal(~np.isfinite(y), expected)
            assert np.isnan(y[expected]).all() if np.isnan(special) else np.isposinf(y[expected]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", [Unstructured(), VectorWise(32), ShflBW(32), BlockWise(3, 5)], ids=str)
def test_nothing_outside_out_is_written(rng, pattern, layout):
    m, k, n = 37, 50, 19
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    packed = packed_of(pattern, weight)
    guarded = np.full(3 * m * n, np.float32(-7))
    out = guarded[m * n : 2 * m * n].reshape((m, n) if layout == "feature_major" else (n, m))
    y = run(packed, x, layout, out=out)
    assert np.shares_memory(y, out)
    np.testing.assert_array_equal(y, unpack(packed).astype(float) @ x)
    assert (guarded[: m * n] == -7).all()
    assert (guarded[2 * m * n :] == -7).all()


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65])
def test_tiles_of_tokens_are_the_tokens(rng, n):
    x = rng.standard_normal((n, 37)).astype(np.float32)
    tiles, tokens = transpose_tiles.pack_tiles(x), transpose_tiles.count_tile_tokens()
    assert tiles.shape == (-(-n // tokens), 37, tokens)
    np.testing.assert_array_equal(tiles.swapaxes(1, 2).reshape(-1, 37)[:n], x)
    assert (tiles.swapaxes(1, 2).reshape(-1, 37)[n:] == 0).all()
    np.testing.assert_array_equal(transpose_tiles.unpack_tiles(tiles, n), x)
    with pytest.raises(ValueError, match="cannot hold"):
        transpose_tiles.unpack_tiles(tiles, len(tiles) * tokens + 1)
    with pytest.raises(ValueError, match="cannot hold"):
        transpose_tiles.unpack_tiles(tiles[:, :, 1:], n)


@pytest.mark.parametrize("layout", BLOCKED_LAYOUTS)
def test_only_numba_takes_tiles_of_tokens(layout):
    packed = packed_of(VectorWise(32), np.ones((32, 4), np.float32))
    with pytest.raises(ValueError, match=f"layout {layout} is for backend numba, not reference"):
        prepare(packed, "reference", layout, 64)


def test_tiles_that_do_not_hold_the_tokens_wanted_are_refused():
    packed, tokens = packed_of(VectorWise(32), np.ones((32, 4), np.float32)), transpose_tiles.count_tile_tokens()
    plan = prepare(packed, "numba", "out_of_blocks", tokens)
    assert plan(np.ones((2, 4, tokens), np.float32)).shape == (2 * tokens, 32)
    for n in (tokens, 2 * tokens + 1):
        with pytest.raises(ValueError, match=rf"out must be of shape \({2 * tokens}, 32\), not"):
            plan(np.ones((2, 4, tokens), np.float32), out=np.empty((n, 32), np.float32))
    for layout, x in (("into_blocks", np.ones(4)), ("out_of_blocks", np.ones((2, 4)))):
        with pytest.raises(ValueError, match="x must be of shape"):
            prepare(packed, "numba", layout, tokens)(x.astype(np.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_x_is_copied_and_wrong_calls_are_refused(rng, layout):
    weight, x = oracle.build_exact_operands(rng, 32, 20, 24)
    packed = packed_of(VectorWise(32), weight)
    plan = prepare(packed, "numba", layout, 24)
    given_x = x if layout == "feature_major" else np.ascontiguousarray(x.T)
    wide = np.repeat(given_x, 2, axis=1)
    np.testing.assert_array_equal(plan(wide[:, ::2]), plan(given_x))
    with pytest.raises(TypeError, match="float32 array, not float64"):
        plan(given_x.astype(np.float64))
    with pytest.raises(ValueError, match="x must be of shape"):
        plan(np.ones((3, 3), np.float32))
    with pytest.raises(ValueError, match="unknown activation"):
        plan(given_x, None, "tanh")
    with pytest.raises(ValueError, match="bias must be of shape"):
        plan(given_x, np.ones(5, np.float32))


def test_a_copy_has_weights_of_its_own(rng):
    weight, x = oracle.build_exact_operands(rng, 64, 30, 24)
    for pattern in (VectorWise(32), ShflBW(8)):
        plan = prepare(packed_of(pattern, weight), "numba", "token_major", 24)
        copy = plan.copy()
        assert (copy.kernel, copy.layout, copy.nbytes) == (plan.kernel, plan.layout, plan.nbytes)
        assert not np.shares_memory(copy.panels.values, plan.panels.values)
        rows_of_x = np.ascontiguousarray(x.T)
        expected = plan(rows_of_x)
        plan.panels.values[:] = 0
        np.testing.assert_array_equal(copy(rows_of_x), expected)


def test_the_kernel_says_what_runs(monkeypatch):
    monkeypatch.setattr(linear, "find_cpu_target", lambda: replace(cpu_target.find_cpu_target(), matrix=False))
    weight = np.ones((64, 64), np.float32)
    name = cpu_target.find_cpu_target().name
    vector = packed_of(VectorWise(32), weight)
    assert prepare(vector, "numba", "token_major", 64).kernel.startswith("numba.vector.tokens")
    assert prepare(vector, "numba", "feature_major", 64).kernel.startswith("numba.vector.rows")
    assert prepare(vector, "numba", "token_major", 64).kernel.endswith(name)
    single = packed_of(Unstructured(), weight)
    assert prepare(single, "numba", "token_major", 50).kernel.startswith("numba.unstructured.rows1x")
    assert prepare(single, "numba", "token_major", 3).kernel == f"numba.unstructured.few1x4.{name}"
    assert prepare(single, "numba", "token_blocked", 3).kernel.startswith("numba.unstructured.rows1x")


def test_few_tokens_take_vectors_as_short_as_hold_them(rng):
    weight = rng.standard_normal((64, 90)).astype(np.float32)
    lines, permuted = (
        panels.build_panels(panels.build_groups(packed_of(VectorWise(4), weight)), 4),
        packed_of(ShflBW(4), weight),
    )
    vector, odd = (
        single.build_single_rows(panels.build_groups(packed_of(Unstructured(), weight)), 90, n) for n in (16, 48)
    )
    assert [few.choose_lanes(n, ZEN_5) for n in (1, 4, 5, 8, 9, 16, 17)] == [4, 4, 8, 8, 16, 16, 16]
    for weights in (lines, panels.build_panels(panels.build_groups(permuted), 4), vector):
        assert few.accepts_batch(weights, "token_major", 16, ZEN_5) and not few.accepts_batch(
            weights, "token_major", 17, ZEN_5
        )
        # As x lies, a whole vector of them is at hand.
        assert few.accepts_batch(weights, "feature_major", 15, ZEN_5) and not few.accepts_batch(
            weights, "feature_major", 16, ZEN_5
        )
        assert not few.accepts_batch(weights, "token_blocked", 1, ZEN_5)
    assert not few.accepts_batch(odd, "token_major", 1, ZEN_5)  # whose places halvings do not bring to one vector


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", [Unstructured(), NM(1, 4), VectorWise(4), ShflBW(4)], ids=str)
def test_a_plan_for_one_token_is_right_for_any_and_any_for_one(monkeypatch, rng, pattern, layout):
    monkeypatch.setattr(few, "WORTH_SHARING", 0)  # threads share the second step
    m, k, n = 45, 2000, 40
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    packed, bias = packed_of(pattern, weight), rng.integers(-4, 4, m).astype(np.float32)
    expected = np.maximum(unpack(packed).astype(float) @ x + bias[:, None], 0)
    for threads, prepared_for in itertools.product((1, min(2, numba.config.NUMBA_NUM_THREADS)), (1, 16, 64)):
        numba.set_num_threads(threads)
        plan = linear.prepare_linear(packed, layout, prepared_for)
        for tokens_given in (1, 3, 6, 13, 16, 17, n):
            given = x[:, :tokens_given].T if layout == "token_major" else x[:, :tokens_given]
            y = plan(np.ascontiguousarray(given), bias, "relu")
            np.testing.assert_array_equal(y.T if layout == "token_major" else y, expected[:, :tokens_given])


def test_x_of_few_tokens_is_cut_into_fewer_stages(rng):
    packed = packed_of(Unstructured(), rng.standard_normal((32, 1800)).astype(np.float32), 0.9)
    assert [len(linear.prepare_linear(packed, "token_major", n).panels.table) for n in (1, 8, 16)] == [1, 2, 4]


@pytest.mark.parametrize(("n", "k", "parts"), [(128, 2048, 2), (128, 3072, 3), (2048, 2048, 2), (40, 4096, 2)])
def test_threads_share_tokens_evenly_where_one_chunk_is_not_enough(n, k, parts):
    width, tile = 32, 8
    packed = pack(np.ones((64, k), np.float32), np.ones((64, k), bool), VectorWise(width))
    chunk, _ = tokens.choose_chunks(
        tile, k, n, panels.build_panels(panels.build_groups(packed), width), parts, own=False, permuted=False
    )
    most = -(-n // chunk) / parts * chunk  # of chunks that count alike
    assert most <= 1.02 * tile * -(-n // tile // parts)


def test_weights_come_to_the_first_level_where_vectors_would_wait_for_the_second():
    assert [tokens.choose_prefetch(n, 8, INTEL).close for n in (1, 8, 63, 64, 128)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert not tokens.choose_prefetch(128, 8, ZEN_4).close and tokens.choose_prefetch(8, 8, ZEN_5).close


def test_amd_reads_the_weights_of_one_or_two_tokens_without_being_told():
    for amd in (ZEN_4, ZEN_5):
        assert [tokens.choose_prefetch(n, 8, amd).ahead for n in (1, 2, 3, 128)] == [0, 0, AHEAD, AHEAD]
    assert [tokens.choose_prefetch(n, 8, INTEL).ahead for n in (1, 2, 3, 128)] == [AHEAD] * 4


def test_tiles_fetch_the_next_block_where_the_first_one_of_it_would_wait_on_amd_alone():
    for amd in (ZEN_4, ZEN_5):
        assert [tokens.choose_prefetch(n, 8, amd).coming for n in (8, 9, 256, 257)] == [False, True, True, False]
    assert not tokens.choose_prefetch(128, 8, INTEL).coming


def test_what_is_there_is_not_fetched_where_that_costs_time():
    assert [tokens.choose_prefetch(n, 8, ZEN_5).once for n in (8, 9, 2048)] == [False, True, True]
    assert not tokens.choose_prefetch(128, 8, ZEN_4).once and not tokens.choose_prefetch(128, 8, INTEL).once


def test_what_fetches_and_when_changes_nothing(monkeypatch, rng):
    """Chunks of several tiles, or of one; blocks of few panels."""
    monkeypatch.setattr(tokens, "CACHED", 2_000)
    monkeypatch.setattr(tokens, "ONE_BLOCK", 0)
    m, k = 200, 57
    for n, ways in itertools.product((12, 150), itertools.product((False, True), repeat=2)):
        weight, x = oracle.build_exact_operands(rng, m, k, n)
        packed = packed_of(ShflBW(32), weight)
        tile, expected = (
            linear.choose_token_tile(packed, cpu_target.find_cpu_target()),
            unpack(packed).astype(float) @ x,
        )
        if tile is None:  # a vector is wider than a group here
            return
        monkeypatch.setattr(
            tokens, "choose_prefetch", lambda *a, ways=ways: tokens.WeightPrefetch(AHEAD, False, *ways)
        )
        for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
            numba.set_num_threads(threads)
            plan = linear.build_plan(linear.describe_layer(packed, "token_major", n), linear.Choice("tokens", tile))
            chunk, block = tokens.choose_chunks(tile[0], k, n, plan.panels, threads, own=True, permuted=True)
            assert block < len(plan.panels.table) and (chunk == tile[0]) == (n == 12 and threads == 2)
            np.testing.assert_array_equal(plan(np.ascontiguousarray(x.T)).T, expected)


def test_few_weights_are_one_block_where_their_sums_stay_near(rng):
    weights = (rng.standard_normal((m, 512), np.float32) for m in (768, 1024))
    few, many = (
        panels.build_panels(panels.build_groups(packed_of(VectorWise(32), weight)), 32) for weight in weights
    )
    assert few.values.size <= tokens.ONE_BLOCK < many.values.size

    def at_once(weights, n, own, permuted):
        return tokens.choose_chunks(8, 512, n, weights, 2, own, permuted)[1] >= len(weights.table)

    assert at_once(few, 128, own=True, permuted=True) and at_once(few, 2048, own=True, permuted=False)
    assert not at_once(few, 128, own=True, permuted=False) and not at_once(few, 128, own=False, permuted=True)
    assert not at_once(many, 128, own=True, permuted=True)


@pytest.mark.parametrize("stages", [1, 3])
def test_what_comes_next_is_all_that_a_part_multiplies_after_its_first_block(stages):
    """Item by item as the kernel goes: 7 panels, blocks of 3, from the fifth panel of one chunk into the third."""
    panels_, block, item, end = 7, 3, 4, 16
    multiplied, told = [], []
    while item < end:
        first = item % panels_
        stop = min(first + block, panels_, first + end - item)
        item += stop - first
        for stage in range(stages):
            multiplied.append((first + stage * panels_, stop + stage * panels_))
            here = tokens.PanelBlock(first, stop, item, end, block)
            told.append(tokens.find_next_panels.py_func(here, stage, stages, panels_))
    assert told[:-1] == multiplied[1:]
    assert told[-1][0] == told[-1][1]


def test_threads_have_chunks_of_their_own_where_tokens_make_up_for_reading_all_weights():
    assert [tokens.gives_own_chunks(n, 2, False, ZEN_4) for n in (8, 63, 64)] == [False, False, True]
    assert not tokens.gives_own_chunks(128, 2, False, INTEL)
    assert tokens.gives_own_chunks(8, 2, True, INTEL) and tokens.gives_own_chunks(8, 2, True, ZEN_4)


def test_calls_share_room_one_after_the_other_and_never_at_once():
    first = scratch_buffers.borrow(100)
    other = scratch_buffers.borrow(50)
    assert abs(first.address - other.address) >= 50 * 4
    scratch_buffers.give_back(first)
    again = scratch_buffers.borrow(80)
    assert again.address == first.address
    scratch_buffers.give_back(again)
    assert scratch_buffers.borrow(10**6).size >= 10**6
    assert first.address % scratch_buffers.ALIGNMENT == 0


@pytest.mark.parametrize("way", ["", "pass"])
def test_no_product_is_formed_of_what_an_earlier_call_left(rng, monkeypatch, way):
    packed = packed_of(VectorWise(8), rng.standard_normal((64, 40)).astype(np.float32))
    choice = linear.Choice("rows", linear.choose_row_tile(linear.describe_layer(packed, "feature_major", 1)), way)
    plan = linear.build_plan(linear.describe_layer(packed, "feature_major", 1), choice)
    lanes, vectors = (cpu_target.find_cpu_target().lanes, plan.tile[1]) if way else (cpu_target.NARROWEST, 1)
    room = np.full(10**5, np.nan, np.float32)
    monkeypatch.setattr(scratch_buffers, "_free", deque([scratch_buffers.ScratchBuffer(room)]))
    x = rng.standard_normal((40, 1)).astype(np.float32)
    oracle.check(plan(x), packed, x)
    multiplied = room[: 40 * vectors * lanes].reshape(40, -1)[:, :lanes]
    np.testing.assert_array_equal(multiplied, np.pad(x, ((0, 0), (0, lanes - 1))))


def test_threads_may_share_a_plan(rng):
    weight, _ = oracle.build_exact_operands(rng, 64, 40, 1)
    packed = packed_of(ShflBW(8), weight)
    plan = prepare(packed, "numba", "token_major", 64)
    inputs = [oracle.build_exact_operands(rng, 1, 40, n)[1] for n in (64, 33, 5, 48)]
    wrong = []

    def work(x):
        rows_of_x = np.ascontiguousarray(x.T)
        expected = x.T.astype(float) @ unpack(packed).T
        for _ in range(50):
            if not np.array_equal(plan(rows_of_x), expected):
                wrong.append(x.shape)

    workers = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize("n", [5, 24])
@pytest.mark.parametrize("mistake", ["last column", "last row", "offsets", "half"])
def test_known_wrong_panels_are_caught(rng, mistake, n):
    m, k = 32, 64
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    packed = packed_of(VectorWise(8), weight)
    plan = linear.prepare_linear(packed, "feature_major", n)
    table, columns = plan.panels.table, plan.panels.columns
    if mistake == "last column":
        table[-1, 2] -= 1
    elif mistake == "last row":
        plan.panels.row_ids[-1] = -1
    elif mistake == "offsets":
        columns[:-1] = columns[1:].copy()
    elif mistake == "half":
        plan.panels.values[:] = plan.panels.values.astype(np.float16)
    with pytest.raises(oracle.WrongResult):
        oracle.check(plan(x, out=np.zeros((m, n), np.float32)), packed, x)


# Rows that fill a vector of every machine, of whole panels and not.
ROUNDED = [Dense(), VectorWise(32), VectorWise(16), ShflBW(32), ShflBW(64), BlockWise(32, 32), BlockWise(48, 5)]


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@pytest.mark.parametrize("pattern", ROUNDED, ids=str)
@pytest.mark.parametrize("size", [(1, 1), (33, 17), (100, 131)], ids=str)
def test_weights_of_bfloat16_are_the_nearest_ones_and_nothing_else_is_rounded(rng, size, pattern, layout):
    m, k = size
    weight, x = oracle.build_exact_operands(rng, m, k, 50)
    packed = packed_of(pattern, weight)
    nearest = torch.from_numpy(unpack(packed)).bfloat16().double().numpy()
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        for n in (0, 1, 2, 7, 8, 17, 50):
            y = run(packed, x[:, :n].copy(), layout, precision="bfloat16-weights")
            np.testing.assert_array_equal(y, nearest @ x[:, :n])


@pytest.mark.parametrize("pattern", [VectorWise(32), ShflBW(32)], ids=str)
def test_rounded_weights_come_with_bias_activation_and_special_numbers(rng, pattern):
    packed = packed_of(pattern, rng.standard_normal((70, 130)).astype(np.float32))
    bias = rng.standard_normal(70).astype(np.float32)
    for n in (1, 9, 40):
        x = rng.standard_normal((130, n)).astype(np.float32)
        for activation in (None, "relu", "gelu"):
            y = run(packed, x, "token_major", bias=bias, activation=activation, precision="bfloat16-weights")
            oracle.check(y, round_packed(packed), x, bias=bias, activation=activation)
        with pytest.raises(oracle.WrongResult):
            oracle.check(run(packed, x, "token_major", precision="bfloat16-weights"), packed, x)
        x[7, 0] = np.inf
        reached = ~np.isfinite(run(packed, x, "token_major", precision="bfloat16-weights"))
        np.testing.assert_array_equal(reached[:, 0], unpack(packed)[:, 7] != 0)
        assert not reached[:, 1:].any()


@pytest.mark.parametrize("mistake", ["truncated", "swapped", "last column"])
def test_known_wrong_halves_are_caught(rng, mistake):
    weight, x = oracle.build_exact_operands(rng, 64, 48, 5)
    packed = packed_of(VectorWise(32), weight)
    plan, rows_of_x = (
        prepare(packed, "numba", "token_major", 5, precision="bfloat16-weights"),
        np.ascontiguousarray(x.T),
    )
    values = plan.panels.values
    oracle.check(plan(rows_of_x).T, round_packed(packed), x)
    if mistake == "truncated":
        whole = linear.prepare_linear(packed, "token_major", 5).panels.values
        values[:] = whole.view(np.uint32) >> 16
    elif mistake == "swapped":
        values[:] = values.reshape(-1, 2)[:, ::-1].ravel()
    elif mistake == "last column":
        plan.panels.table[-1, 2] -= 1
    with pytest.raises(oracle.WrongResult):
        oracle.check(plan(rows_of_x).T, round_packed(packed), x)


def test_weights_of_bfloat16_take_half_the_bytes_where_few_tokens_read_them():
    packed = packed_of(VectorWise(32), np.ones((256, 512), np.float32))
    whole, half = (
        prepare(packed, "numba", "token_major", 4, precision=each) for each in ("float32", "bfloat16-weights")
    )
    assert whole.panels.values.nbytes == 2 * half.panels.values.nbytes == 4 * packed.nnz
    assert (
        half.kernel
        == whole.kernel.removesuffix(cpu_target.find_cpu_target().name) + f"bf16.{cpu_target.find_cpu_target().name}"
    )
    assert half.copy().kernel == half.kernel
    assert not np.shares_memory(half.copy().panels.values, half.panels.values)


@pytest.mark.parametrize("pattern", [Unstructured(), NM(2, 4), VectorWise(3), BlockWise(1, 4)], ids=str)
def test_weights_that_would_gain_nothing_are_not_rounded(pattern):
    packed = packed_of(pattern, np.ones((12, 12), np.float32))
    with pytest.raises(ValueError, match=f"fill vectors of .* which those of {pattern} do not"):
        prepare(packed, "numba", "token_major", 1, precision="bfloat16-weights")


def test_weights_of_other_types_are_refused():
    packed = packed_of(VectorWise(32), np.full((32, 4), 3.4e38, np.float32))
    with pytest.raises(ValueError, match=r"unknown precision 'int8': known are float32, bfloat16-weights, bfloat16$"):
        prepare(packed, "numba", "token_major", 1, precision="int8")
    with pytest.raises(ValueError, match="precision='bfloat16-weights' is for backend numba, not reference"):
        prepare(packed, "reference", "token_major", 1, precision="bfloat16-weights")
    with pytest.raises(ValueError, match=r"bfloat16 cannot hold the weight 3.4e\+38"):
        prepare(packed, "numba", "token_major", 1, precision="bfloat16-weights")


def rows_of(singles, k):
    """(stage, row, {column: weight}) in the order of the stream of single rows, read word by word."""
    words, at = singles.stream.tolist(), 0
    weights, halves = singles.stream.view(np.float32), singles.stream.view(np.uint16).tolist()
    for stage, (first, end) in enumerate(itertools.pairwise(singles.bounds.tolist())):
        for _ in range(singles.m):
            count, row = words[at], words[at + 1]
            kept, at = {}, at + 2
            for four in range(count // 4):
                for c in range(4):
                    kept[halves[2 * (at + 6 * four + 4) + c]] = weights[at + 6 * four + c]
            at += count // 4 * 6
            for _ in range(count % 4):
                kept[words[at + 1]] = weights[at]
                at += 2
            assert len(kept) == count
            columns = {first + place // singles.stride: weight for place, weight in kept.items()}
            assert all(first <= column < end for column in columns)
            yield stage, row, columns
    assert at == len(words)


@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (70, 900), (3, 5000)], ids=str)
def test_a_stream_holds_every_weight_once_in_the_stage_of_its_column(rng, shape):
    weight = rng.standard_normal(shape).astype(np.float32)
    packed = packed_of(Unstructured(), weight, 0.6)
    singles = single.build_single_rows(panels.build_groups(packed), shape[1], 64)
    assert len(singles.table) == (1 if shape[1] < 100 else -(-shape[1] * 64 // single.CLOSE))
    found, lengths = np.zeros(shape, np.float32), []
    for stage, row, columns in rows_of(singles, shape[1]):
        for column, value in columns.items():
            assert found[row, column] == 0
            found[row, column] = value
        lengths.append((stage, row // single.BUNDLE, len(columns)))
    np.testing.assert_array_equal(found, unpack(packed))
    assert lengths == sorted(lengths)


def test_rows_with_few_columns_far_apart_have_places_that_16_bits_can_tell(rng):
    weight = np.zeros((3, 5000), np.float32)
    weight[:, [600, 900, 950, 999, 1000, 4999]] = rng.standard_normal((3, 6))
    singles = single.build_single_rows(panels.build_groups(packed_of(Unstructured(), weight, 1 - 6 / 5000)), 5000, 64)
    assert np.diff(singles.bounds).max() * 64 <= single.FARTHEST
    found = np.zeros_like(weight)
    for _, row, columns in rows_of(singles, 5000):
        for column, value in columns.items():
            found[row, column] = value
    np.testing.assert_array_equal(found, weight)
    weight = np.rint(4 * weight)
    packed, x = packed_of(Unstructured(), weight, 1 - 6 / 5000), rng.integers(-4, 4, (64, 5000)).astype(np.float32)
    for n in (1, 64):
        y = linear.prepare_linear(packed, "token_major", n)(x[:n])
        np.testing.assert_array_equal(y, x[:n] @ unpack(packed).T)


@pytest.mark.parametrize("mistake", ["column", "row", "place", "half"])
@pytest.mark.parametrize("pattern", [Unstructured(), NM(2, 4)], ids=str)
@pytest.mark.parametrize("n", [5, 24])
def test_known_wrong_streams_are_caught(rng, n, pattern, mistake):
    m, k = 40, 64
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    packed = packed_of(pattern, weight)
    plan = linear.prepare_linear(packed, "feature_major", n)
    stream = plan.panels.stream
    if mistake == "column":
        stream[2] = 0
    elif mistake == "row":
        stream[1] = (stream[1] + 1) % m
    elif mistake == "place":
        halves = stream.view(np.uint16)
        halves[12] = (halves[12] + plan.panels.stride) % (k * plan.panels.stride)
    elif mistake == "half":
        stream[2:6] = stream[2:6].view(np.float32).astype(np.float16).astype(np.float32).view(np.int32)
    with pytest.raises(oracle.WrongResult):
        oracle.check(plan(x, out=np.zeros((m, n), np.float32)), packed, x)


def test_a_tile_wastes_as_few_rows_as_possible():
    assert row_panels.choose_tile(32, ZEN_5) == (8, 2)
    assert row_panels.choose_tile(4, ZEN_5) == (4, 4)
    assert row_panels.choose_tile(3, ZEN_5)[0] == 4
    assert row_panels.choose_tile(9, ZEN_5)[0] in (2, 4)
    assert np.prod(row_panels.choose_tile(32, cpu_target.CpuTarget("avx2", 8, 16, fused=True))) == 8


def test_a_tile_is_as_wide_as_leaves_the_fewest_vectors_over():
    assert [row_panels.choose_width((8, 2), together, ZEN_5) for together in (0, 1, 2, 3, 4, 5, 6, 9)] == [
        2,
        2,
        2,
        3,
        2,
        2,
        2,
        3,
    ]
    assert [row_panels.choose_width((4, 4), together, ZEN_5) for together in (1, 2, 3, 4, 5, 6)] == [4, 2, 3, 4, 4, 3]
    assert (
        row_panels.choose_width((8, 1), 4, cpu_target.CpuTarget("avx2", 8, 16, fused=True)) == 1
    )  # others would not fit the registers


def test_a_tile_takes_the_fewest_passes_where_a_pass_costs_more_than_its_multiply_adds():
    assert [row_panels.choose_width((8, 2), together, INTEL) for together in (1, 2, 3, 4, 6, 8, 64)] == [
        2,
        2,
        3,
        2,
        3,
        2,
        3,
    ]
    assert [row_panels.choose_width((4, 4), together, INTEL) for together in (1, 3, 4, 5, 64)] == [4, 3, 4, 4, 4]


@pytest.mark.parametrize(
    ("pattern", "kept"), [(VectorWise(3), True), (BlockWise(16, 4), True), (ShflBW(4), False)], ids=str
)
def test_rows_are_put_in_their_places_early_only_where_their_order_is_kept(rng, pattern, kept):
    m, k, n = 3 * token_blocks.RUN - 48, 40, 100
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    # Rows with equal columns lie apart, so that Shfl-BW has to permute them.
    packed = packed_of(pattern, weight * (np.arange(k) % 3 == np.arange(m)[:, None] % 3))
    assert panels.build_panels(panels.build_groups(packed), 4).in_order == kept
    expected = unpack(packed).astype(float) @ x
    for layout in ("token_major", "out_of_blocks"):
        for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
            numba.set_num_threads(threads)
            np.testing.assert_array_equal(run(packed, x, layout), expected)


@pytest.mark.parametrize("layout", ["token_major", "token_blocked"])
def test_what_tiles_fetch_for_the_next_block_changes_nothing(monkeypatch, rng, layout):
    monkeypatch.setattr(token_blocks, "FAR", 0)
    monkeypatch.setattr(token_blocks, "CACHED", 1)  # as many blocks as there are tiles
    numba.set_num_threads(1)
    m, k, n = 70, 90, 333
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    packed = packed_of(ShflBW(4), weight)
    np.testing.assert_array_equal(run(packed, x, layout), unpack(packed).astype(float) @ x)


def test_long_x_is_multiplied_in_stages_where_it_would_come_slowly_from_the_second_level():
    assert [tokens.count_stages(8, k, 0.25, 8, INTEL) for k in (1536, 1537, 3072)] == [1, 3, 4]
    assert [tokens.count_stages(8, k, 0.1, 128, ZEN_5) for k in (1536, 1537, 2048, 3072)] == [1, 2, 2, 3]
    assert tokens.count_stages(8, 3072, 0.25, 128, ZEN_5) == tokens.count_stages(8, 3072, 0.1, 63, ZEN_5) == 1
    assert tokens.count_stages(8, 3072, 0.1, 128, ZEN_4) == 1


def test_permuted_rows_need_no_blocks_where_vectors_are_whole_and_each_thread_has_several(monkeypatch, rng):
    monkeypatch.setattr(linear, "find_cpu_target", lambda: ZEN_5)
    monkeypatch.setattr(linear, "count_threads", lambda: 2)
    packed = packed_of(ShflBW(32), rng.standard_normal((768, 768), np.float32))
    kernels = [
        linear.choose_vector_kernel(linear.describe_layer(packed, "token_major", n)).kernel
        for n in (8, 32, 96, 100, 128, 2048)
    ]
    assert kernels == ["tokens", "rows", "rows", "tokens", "tokens", "tokens"]


@pytest.mark.parametrize("pattern", [VectorWise(32), ShflBW(32), BlockWise(32, 32), Dense()], ids=str)
@pytest.mark.parametrize("precision", ["float32", "bfloat16-weights"])
def test_stages_add_up(monkeypatch, rng, pattern, precision):
    monkeypatch.setattr(tokens, "FIRST_LEVEL", 128)
    monkeypatch.setattr(linear, "find_cpu_target", lambda: replace(cpu_target.find_cpu_target(), shared=True))
    m, k = 83, 101
    for n in (1, 3, 8, 77):
        weight, x = oracle.build_exact_operands(rng, m, k, n)
        packed = packed_of(pattern, weight, sparsity=0.9)
        plan = prepare(packed, "numba", "token_major", n, precision=precision)
        if plan.kernel.split(".")[2].startswith("tokens"):  # where a vector is as wide as it can be there
            assert plan.panels.stages == -(-plan.tile[0] * k // 64) > 6
        bias = rng.integers(-4, 4, m).astype(np.float32)
        expected = np.maximum(
            unpack(round_packed(packed) if precision != "float32" else packed).astype(float) @ x + bias[:, None], 0
        )
        out = np.full((n, m), np.nan, np.float32)  # is not looked at before the first stage
        np.testing.assert_array_equal(plan(np.ascontiguousarray(x.T), bias, "relu", out).T, expected)


@pytest.mark.parametrize("pattern", [VectorWise(32), ShflBW(32)], ids=str)
def test_stages_add_up_where_threads_have_several_tiles_of_tokens(monkeypatch, rng, pattern):
    monkeypatch.setattr(tokens, "count_stages", lambda *a: 5)
    m, k, n = 160, 101, 77
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    packed = packed_of(pattern, weight)
    tile, expected = linear.choose_token_tile(packed, cpu_target.find_cpu_target()), unpack(packed).astype(float) @ x
    if tile is None:  # a vector is wider than a group here
        return
    plan = linear.build_plan(linear.describe_layer(packed, "token_major", n), linear.Choice("tokens", tile))
    assert plan.panels.stages == 5
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        np.testing.assert_array_equal(plan(np.ascontiguousarray(x.T)).T, expected)


@pytest.mark.parametrize(("m", "n"), [(96, 1), (96, 5), (2080, 8), (544, 31), (544, 47)])
def test_permuted_rows_go_to_their_places_whoever_puts_them_there(rng, m, n):
    """One thread, each its rows, each its tokens; tokens one by one, or in fours."""
    weight, x = oracle.build_exact_operands(rng, m, 33, n)
    packed = packed_of(ShflBW(32), weight)
    assert not np.array_equal(packed.row_ids, np.arange(m))
    bias = rng.integers(-4, 4, m).astype(np.float32)
    expected = np.maximum(unpack(packed).astype(float) @ x + bias[:, None], 0)
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        tile = linear.choose_token_tile(packed, cpu_target.find_cpu_target())
        if tile is not None:  # a vector is as wide as it can be here
            for tokens_at_once in (tile[0], 6):
                plan = linear.build_plan(
                    linear.describe_layer(packed, "token_major", n),
                    linear.Choice("tokens", (tokens_at_once, *tile[1:])),
                )
                np.testing.assert_array_equal(plan(np.ascontiguousarray(x.T), bias, "relu").T, expected)


@pytest.mark.parametrize("pattern", [VectorWise(32), ShflBW(32)], ids=str)
@pytest.mark.parametrize("precision", ["float32", "bfloat16-weights"])
def test_few_tokens_of_long_rows_are_laid_out_side_by_side(monkeypatch, rng, pattern, precision):
    monkeypatch.setattr(tokens, "LONG_ROW", 50)
    laid = []
    monkeypatch.setattr(
        tokens, "packs_tokens", lambda *a, known=tokens.packs_tokens: laid.append(known(*a)) or laid[-1]
    )
    m, k = 83, 301
    for n in (5, 7, 8, 9):
        weight, x = oracle.build_exact_operands(rng, m, k, n)
        packed = packed_of(pattern, weight, sparsity=0.9)
        tile = linear.choose_token_tile(packed, cpu_target.find_cpu_target())
        if tile is None:  # a vector is wider than a group here
            return
        plan = linear.build_plan(
            linear.describe_layer(packed, "token_major", n, precision), linear.Choice("tokens", tile)
        )
        bias = rng.integers(-4, 4, m).astype(np.float32)
        product = unpack(round_packed(packed) if precision != "float32" else packed).astype(float) @ x
        expected = np.maximum(product + bias[:, None], 0)
        for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
            numba.set_num_threads(threads)
            np.testing.assert_array_equal(plan(np.ascontiguousarray(x.T), bias, "relu").T, expected)
    assert laid.count(True) >= (3 if tile[0] == 8 and not cpu_target.find_cpu_target().shared else 0)


def test_x_is_laid_out_where_its_lines_hold_few_columns_that_are_kept():
    def laid(n, k, density, tokens_at_once=8, host=ZEN_4):
        return tokens.packs_tokens(n, tokens_at_once, k, density, host)

    assert [laid(n, 3072, 0.1) for n in (1, 4, 5, 8, 9, 128)] == [False, False, True, True, False, False]
    assert not laid(8, 768, 0.1) and not laid(8, 3072, 0.25) and not laid(2, 3072, 0.1, tokens_at_once=2)
    assert not laid(8, 3072, 0.1, host=INTEL)


def test_panels_in_stages_hold_every_weight_once(rng):
    weight = rng.standard_normal((64, 90)).astype(np.float32)
    whole = panels.build_panels(panels.build_groups(packed_of(VectorWise(16), weight)), 16)
    cut = whole.in_stages(4, 90)
    assert cut.table.shape == (16, 3) and cut.table[:, 2].sum() == whole.table[:, 2].sum()
    for row, (first, start, count) in enumerate(cut.table):
        stage, panel = divmod(row, 4)
        own = cut.columns[start : start + count]
        assert np.all((own >= 90 * stage // 4) & (own < 90 * (stage + 1) // 4))
        values, before = (
            cut.values[first : first + count * 16],
            whole.table[panel, 0] + (start - whole.table[panel, 1]) * 16,
        )
        np.testing.assert_array_equal(values, whole.values[before : before + count * 16])
    assert cut.table[0, 0] == 0 and np.array_equal(cut.table[1:, 0], np.cumsum(16 * cut.table[:-1, 2]))


@pytest.mark.parametrize("m", [32, 3200])
def test_weights_start_at_a_cache_line_also_in_copies(rng, m):
    packed = packed_of(VectorWise(32), rng.standard_normal((m, 40)).astype(np.float32))
    cut = panels.build_panels(panels.build_groups(packed), 32)
    for some in (cut, cut.copy(), cut.narrowed(), cut.narrowed().copy()):
        assert some.values.ctypes.data % 64 == 0
    np.testing.assert_array_equal(cut.copy().values, cut.values)


def test_blocks_are_even_and_no_larger_than_the_cache():
    for total in range(1, 60):
        for tile in (1, 2, 4):
            for cached in (1, 5, 16):
                for threads in (1, 2, 3):
                    for own in (False, True):
                        count, tiles = row_panels.count_blocks(total, tile, cached, threads, own), -(-total // tile)
                        assert 1 <= -(-tiles // count) <= max(1, cached // tile)
    assert row_panels.count_blocks(8, 2, 100, 2, True) == 2  # two threads, a block each
    assert row_panels.count_blocks(26, 2, 5, 2, True) == 8  # where blocks are many, each thread has as many
    assert row_panels.split_vectors(13, 2, 2).tolist() == [0, 6, 13]


def test_threads_have_blocks_of_their_own_where_these_come_out_even_or_x_is_long(rng):
    packed = packed_of(VectorWise(8), rng.standard_normal((64, 40)).astype(np.float32))
    cut = panels.build_panels(panels.build_groups(packed), 8)

    def own(tiles, columns):
        return row_panels.gives_own_blocks(cut, 2, 2 * tiles, columns, 2)

    assert own(4, 64) and own(9, 64)
    assert not own(3, 64) and not own(7, 127)  # threads share panels
    assert own(7, 128) and not own(3, 128)  # four tiles and three; two and one


@pytest.mark.parametrize("spec", ["vector:32", "shflbw:32", "vector:4", "unstructured"])
def test_a_plan_that_was_called_can_be_copied(rng, spec):
    pattern = parse(spec)
    weight = rng.standard_normal((64, 48), np.float32)
    packed = pack(weight, pattern.mask(weight**2, 0.5), pattern)
    plan = linear.build_plan(
        linear.describe_layer(packed, "token_major", 5),
        linear.choose_vector_kernel(linear.describe_layer(packed, "token_major", 5)),
    )
    x = rng.standard_normal((5, 48), np.float32)
    expected = plan(x)
    copies = plan.copy(), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))
    assert not any(np.shares_memory(copied.panels.arrays[0], plan.panels.arrays[0]) for copied in copies)
    for weights in (array for array in plan.panels.arrays if array.dtype == np.float32):
        weights[:] = np.nan
    for copied in copies:
        np.testing.assert_array_equal(copied(x), expected)


def test_tiles_are_even_and_cover_all_vectors():
    for total in range(1, 40):
        for most in (1, 3, 4):
            firsts = vectors.split_tiles(total, most)
            sizes = np.diff(firsts)
            assert (firsts[0], firsts[-1]) == (0, total)
            assert sizes.max() <= most
            assert sizes.max() - sizes.min() <= 1
            assert sizes.size == -(-total // most)
