"""Linear layers in bfloat16, two columns at a time: by the unit for that where there is one, and in its place by
multiply-adds, on any processor.
"""

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from bfloat16_rounding import nearest

from sparse_kernels import oracle
from sparse_kernels.cpu.codegen import cpu_target
from sparse_kernels.cpu.kernels import row_panels, token_blocks, transpose_tiles
from sparse_kernels.cpu.layouts import panels
from sparse_kernels.cpu.plans import autotune, linear
from sparse_kernels.cpu.plans.linear import Choice, RowPlan
from sparse_kernels.formats import Packed, bfloat16, pack, round_packed, unpack
from sparse_kernels.nn import SparseLinear
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.plan_protocol import BLOCKED_LAYOUTS, LAYOUTS
from sparse_kernels.planner import prepare

PATTERNS = [Dense(), VectorWise(32), VectorWise(4), VectorWise(3), ShflBW(32), BlockWise(16, 4)]
# A kernel each: all layouts with panels of 8 rows, all panels with one layout.
PLACES = [
    *((pattern, "token_major") for pattern in PATTERNS),
    *((ShflBW(32), layout) for layout in (*LAYOUTS, *BLOCKED_LAYOUTS) if layout != "token_major"),
]


@pytest.fixture(autouse=True)
def all_threads():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


def packed_of(pattern: Pattern, weight: np.ndarray, sparsity: float = 0.7) -> Packed:
    return pack(
        weight, pattern.mask(weight.astype(float) ** 2, 0 if isinstance(pattern, Dense) else sparsity), pattern
    )


def plan_of(packed: Packed, layout: str, n: int) -> RowPlan:
    tile = (
        *row_panels.choose_tile(panels.count_group_rows(packed), cpu_target.find_cpu_target()),
        cpu_target.find_cpu_target().lanes,
    )
    plan = linear.build_plan(linear.describe_layer(packed, layout, n, "bfloat16"), Choice("pairs", tile, "blocks"))
    assert isinstance(plan, RowPlan) and ".pairs" in plan.kernel
    return plan


def run(packed: Packed, x: np.ndarray, layout: str = "token_major", **given: Any) -> np.ndarray:
    """y (m, n) of x (k, n), through `layout`."""
    n, plan = x.shape[1], plan_of(packed, layout, x.shape[1])
    if layout == "feature_major":
        return plan(x, **given)
    if layout == "token_major":
        return plan(np.ascontiguousarray(x.T), **given).T
    if layout == "out_of_blocks":
        return plan(transpose_tiles.pack_tiles(x.T), **given, out=np.empty((n, packed.shape[0]), np.float32)).T
    laid_out = np.ascontiguousarray(x.T) if layout == "into_blocks" else transpose_tiles.pack_tiles(x.T)
    return transpose_tiles.unpack_tiles(plan(laid_out, **given), n).T


@pytest.mark.parametrize(("pattern", "layout"), PLACES, ids=str)
@pytest.mark.parametrize("size", [(2, 1), (33, 17), (100, 131)], ids=str)
def test_it_is_the_exact_product_of_the_nearest_bfloat16(
    rng: np.random.Generator, by: str, size: tuple[int, int], pattern: Pattern, layout: str
) -> None:
    m, k = size
    x, weight = oracle.build_exact_operands(rng, 50, k, m)  # x has bits that bfloat16 does not keep
    packed = packed_of(pattern, weight.T)
    assert not np.array_equal(nearest(x), x)
    expected = unpack(packed).astype(float) @ nearest(x).T
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        for n in (1, 7, 16, 17, 50):
            np.testing.assert_array_equal(run(packed, x[:n].T.copy(), layout), expected[:, :n])


@pytest.mark.parametrize("pattern", [VectorWise(32), ShflBW(32), VectorWise(3)], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_bias_activation_and_weights_are_those_of_the_oracle(
    rng: np.random.Generator, by: str, pattern: Pattern, activation: str | None
) -> None:
    packed = packed_of(pattern, rng.standard_normal((70, 130)).astype(np.float32))
    bias = rng.standard_normal(70).astype(np.float32)
    for n in (1, 37, 150):
        x = rng.standard_normal((130, n)).astype(np.float32)
        y = run(packed, x, bias=bias, activation=activation)
        oracle.check(y, round_packed(packed), nearest(x), bias=bias, activation=activation)
        oracle.check(y, round_packed(packed), x, bias=bias, activation=activation, roundoff=oracle.BFLOAT16_ROUNDOFF)
        with pytest.raises(oracle.WrongResult):
            oracle.check(y, round_packed(packed), x, bias=bias, activation=activation)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.4e38])
@pytest.mark.parametrize("sparsity", [0.5, 0.7])
def test_what_is_not_finite_reaches_the_rows_that_keep_its_column_and_no_others(
    rng: np.random.Generator, by: str, value: float, sparsity: float
) -> None:
    """Also where it stands alone at the end of an odd number of columns: beside it are zeros, and not itself."""
    packed = packed_of(VectorWise(4), np.abs(rng.standard_normal((48, 31))).astype(np.float32) + 0.1, sparsity)
    counts = np.diff(panels.build_groups(packed).indptr)
    assert (counts % 2 == 1).any()
    for column in range(31):
        x = np.ones((31, 20), np.float32)
        x[column, 3] = value
        y, kept = run(packed, x), unpack(packed)[:, column] != 0
        with np.errstate(invalid="ignore"):
            expected = (unpack(round_packed(packed)) * nearest(x[:, 3])).sum(axis=1, where=unpack(packed) != 0)
        assert not np.isfinite(y[kept, 3]).any() and np.isfinite(y[~kept, 3]).all()
        np.testing.assert_array_equal(y[kept, 3], expected[kept])
        assert np.isfinite(np.delete(y, 3, axis=1)).all()


def test_rounding_is_torchs_for_every_kind_of_number(by: str) -> None:
    """A dense layer of ones in the diagonal, so y is what x was rounded to; subnormal numbers may be taken for 0."""
    bits = np.concatenate([
        np.arange(0x3F7F7F00, 0x3F8100FF, 0x55), np.arange(0x7F7EFFF0, 0x7F7F8010),
        [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x00800000, 0x00810000, 0x0080FFFF],
    ]).astype(np.uint32)  # fmt: skip
    x = np.concatenate([bits, bits | 0x80000000]).astype(np.uint32).view(np.float32)
    y = run(packed_of(Dense(), np.ones((2, 1), np.float32)), x[None])
    np.testing.assert_array_equal(y[0], nearest(x))


def test_many_tokens_fetch_ahead_and_compute_the_same(rng: np.random.Generator, by: str) -> None:
    n, packed = 1100, packed_of(ShflBW(32), rng.integers(-3, 4, (256, 255)).astype(np.float32))
    assert n * (256 + 255) >= token_blocks.FAR
    x = rng.integers(-4, 5, (255, n)).astype(np.float32)
    for layout in ("token_major", "token_blocked"):
        np.testing.assert_array_equal(run(packed, x, layout), unpack(packed).astype(float) @ x)


@pytest.mark.parametrize("mistake", ["swapped halves", "next column", "last column lost", "truncated"])
def test_known_wrong_pairs_are_caught(rng: np.random.Generator, by: str, mistake: str) -> None:
    packed = packed_of(VectorWise(32), rng.standard_normal((64, 47)).astype(np.float32), 0.5)
    x = rng.standard_normal((20, 47)).astype(np.float32)
    plan = plan_of(packed, "token_major", 20)
    assert isinstance(plan.panels, panels.Panels)
    values, table = plan.panels.values, plan.panels.table
    oracle.check(plan(x).T, round_packed(packed), nearest(x).T)
    if mistake == "swapped halves":
        values.view(np.uint16)[:] = values.view(np.uint16).reshape(-1, 2)[:, ::-1].ravel()
    elif mistake == "next column":
        plan.panels.columns[:-1] = plan.panels.columns[1:].copy()
    elif mistake == "last column lost":
        table[-1, 2] -= 1
    else:
        exact = panels.build_panels(panels.build_groups(packed), plan.panels.width)
        bits = exact.values.view(np.uint32) >> 16
        wrong = replace(exact, values=(bits << 16).astype(np.uint32).view(np.float32)).paired()
        values[:] = wrong.values
    with pytest.raises(oracle.WrongResult):
        oracle.check(plan(x).T, round_packed(packed), nearest(x).T)


def test_pairs_lie_where_the_docstring_says(rng: np.random.Generator) -> None:
    packed = packed_of(VectorWise(4), rng.standard_normal((12, 21)).astype(np.float32), 0.6)
    whole = panels.build_panels(panels.build_groups(packed), 2)
    paired = whole.paired()
    bits = bfloat16.round_to_bits(whole.values)
    for panel, (first, start, count) in enumerate(whole.table):
        at, same_start, same_count = paired.table[panel]
        assert (same_start, same_count) == (start, count)
        for c in range(count + count % 2):
            for r in range(2):
                found = paired.values[at + c // 2 * 2 + r : at + c // 2 * 2 + r + 1].view(np.uint16)[c % 2]
                assert found == (bits[first + c * 2 + r] if c < count else 0)
    assert paired.values.nbytes <= whole.values.nbytes / 2 + 4 * 2 * len(whole.table)


def test_many_tokens_are_multiplied_in_pairs_where_the_processor_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_of(VectorWise(32), np.ones((64, 64), np.float32))
    numba.set_num_threads(1)

    def kernel(n: int, precision: str, layout: str = "token_major", **of_host: bool) -> str:
        own = replace(cpu_target.find_cpu_target(), matrix=False, **of_host)
        monkeypatch.setattr(linear, "find_cpu_target", lambda: own)
        return prepare(packed, "numba", layout, n, precision=precision).kernel.split(".")[2]

    assert kernel(128, "bfloat16", pairs=True).startswith("pairs")
    assert kernel(128, "bfloat16", "token_blocked", pairs=True).startswith("pairs")
    assert kernel(2, "bfloat16", pairs=True).startswith("tokens")
    for other in (kernel(128, "bfloat16", pairs=False), kernel(128, "bfloat16-weights", pairs=True)):
        assert other == kernel(128, "bfloat16-weights", pairs=False)
    assert not kernel(128, "float32", pairs=True).startswith("pairs")
    target = replace(cpu_target.find_cpu_target(), matrix=False, pairs=True)
    monkeypatch.setattr(linear, "find_cpu_target", lambda: target)
    kinds = [
        choice.kernel
        for choice in autotune.list_candidates(linear.describe_layer(packed, "token_major", 128, "bfloat16"))
    ]
    assert kinds[0] == "pairs" and len(kinds) > 1


def test_a_dense_layer_of_one_row_has_no_pairs_and_is_no_error(rng: np.random.Generator) -> None:
    packed = packed_of(Dense(), rng.standard_normal((1, 33)).astype(np.float32))
    plan = prepare(packed, "numba", "token_major", 64, precision="bfloat16")
    assert ".pairs" not in plan.kernel
    x = rng.standard_normal((64, 33)).astype(np.float32)
    oracle.check(plan(x).T, round_packed(packed), x.T)


@pytest.mark.skipif(
    not cpu_target.find_cpu_target().pairs, reason="this processor does not multiply pairs of bfloat16"
)
def test_a_torch_layer_has_a_plan_for_few_tokens_and_one_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    target = replace(cpu_target.find_cpu_target(), matrix=False, pairs=True)
    monkeypatch.setattr(linear, "find_cpu_target", lambda: target)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        dense = torch.nn.Linear(64, 64)
        for calls in ((2, 300), (300, 2)):  # whichever comes first
            layer = SparseLinear.from_dense(dense, Dense(), None, precision="bfloat16")
            with torch.no_grad():
                for tokens in calls:
                    layer(torch.ones(tokens, 64))
            kernels = {key[2]: ready.plan.kernel for key, ready in layer._plans.items()}
            assert ".pairs" in kernels[(300).bit_length()] and ".pairs" not in kernels[(2).bit_length()]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("pattern", [Unstructured(), NM(2, 4), VectorWise(1)], ids=str)
def test_rows_that_share_no_columns_are_refused(pattern: Pattern) -> None:
    packed = packed_of(pattern, np.ones((12, 12), np.float32), 0.5)
    with pytest.raises(ValueError, match=f"bfloat16 is for rows that share columns, which those of {pattern} do not"):
        prepare(packed, "numba", "token_major", 64, precision="bfloat16")
