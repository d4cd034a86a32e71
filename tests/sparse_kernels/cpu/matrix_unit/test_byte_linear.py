"""Linear layers in eight bits by the matrix unit: the exact whole numbers, emulated and by the unit itself."""

from dataclasses import replace

import numba
import numpy as np
import pytest
from int8_cases import draw_on_steps, draw_weight

from sparse_kernels import parse
from sparse_kernels.cpu.codegen import tile_registers
from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.layouts.panels import count_group_rows
from sparse_kernels.cpu.matrix_unit import byte_linear
from sparse_kernels.cpu.matrix_unit.byte_linear import MatrixBytePlan
from sparse_kernels.cpu.plans import int8_linear
from sparse_kernels.formats.int8 import InputRange, Int8Weight, find_scales, pack_int8, unpack_int8
from sparse_kernels.int8.int8_oracle import check_int8
from sparse_kernels.oracle import WrongResult

HAS_UNIT = find_cpu_target().matrix
by_the_unit = pytest.mark.skipif(not HAS_UNIT, reason="this processor has no matrix unit")
UNITS = [pytest.param(True, id="emulated"), pytest.param(False, id="amx", marks=by_the_unit)]
SIZES = [(64, 48, 150), (48, 131, 70), (61, 17, 33), (100, 300, 17)]


@pytest.fixture(autouse=True)
def all_threads():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


def plan_of(weight: Int8Weight, emulated: bool = not HAS_UNIT) -> MatrixBytePlan:
    tiles = tile_registers.count_row_tiles(count_group_rows(weight.packed))
    assert tiles is not None
    return int8_linear.build_matrix_plan(weight, tiles, emulated)


@pytest.mark.parametrize("emulated", UNITS)
@pytest.mark.parametrize("reading", [InputRange(0.25, 201), None], ids=str)
@pytest.mark.parametrize("spec", ["block:32x4", "block:16x4", "shflbw:32", "vector:16", "vector:64", "dense"])
def test_sums_are_the_exact_whole_numbers(
    rng: np.random.Generator, spec: str, reading: InputRange | None, emulated: bool
) -> None:
    if emulated and (spec, reading is None) not in {("block:32x4", True), ("shflbw:32", False), ("dense", False)}:
        pytest.skip("the emulated unit runs less: each kernel takes seconds to compile")
    for m, k, n in SIZES:
        weight = draw_weight(rng, parse(spec), m, k, reading)
        x = draw_on_steps(rng, n, k, reading)
        expected = x.astype(float) @ unpack_int8(weight).astype(float).T
        assert np.abs(expected).max(initial=0) < 2**24 * np.abs(x).max(initial=1)  # so that float32 holds them
        plan = plan_of(weight, emulated)
        for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
            numba.set_num_threads(threads)
            for tokens in (0, 1, 9, 16, 17, 33, n):
                found = plan(x[:tokens].copy())
                np.testing.assert_array_equal(found, expected[:tokens].astype(np.float32))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("spec", ["block:32x4", "shflbw:32"])
def test_bias_and_activation_are_those_of_the_oracle(
    rng: np.random.Generator, spec: str, activation: str | None
) -> None:
    x = rng.standard_normal((70, 130)).astype(np.float32) * 3
    weight = draw_weight(rng, parse(spec), 96, 130, InputRange.covering(-4.0, 7.0))  # some lie beyond it
    bias = rng.standard_normal(96).astype(np.float32)
    check_int8(plan_of(weight)(x, bias, activation), weight, x, bias=bias, activation=activation)


def test_rows_without_columns_give_the_bias(rng: np.random.Generator) -> None:
    pattern, whole = parse("block:32x4"), rng.integers(1, 128, (96, 40)).astype(np.float32)
    whole[32:64] = 0
    weight = pack_int8(whole, whole != 0, pattern, find_scales(whole), None)
    x, bias = draw_on_steps(rng, 33, 40, None), rng.standard_normal(96).astype(np.float32)
    found = plan_of(weight)(x, bias)
    check_int8(found, weight, x, bias=bias)
    np.testing.assert_array_equal(found[:, 32:64], np.tile(bias[32:64], (33, 1)))


def test_what_is_no_number_is_read_as_by_vectors(rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, 64)).astype(np.float32)
    x[3, 5], x[4, 5], x[35, 5] = np.inf, -np.inf, np.nan
    for reading in (InputRange.covering(-2.0, 2.0), None):
        weight = draw_weight(rng, parse("block:32x4"), 32, 64, reading)
        expected = int8_linear.build_vector_plan(weight, "token_major", 40)(x)
        np.testing.assert_array_equal(plan_of(weight)(x), expected)
        assert np.isfinite(expected).all() == (reading is not None)


@pytest.mark.parametrize("most", ["CACHED_BYTES", "RUN_BYTES"])
@pytest.mark.parametrize("spec", ["block:32x4", "shflbw:32"])
def test_blocks_and_runs_give_the_same_bits_as_one(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, most: str, spec: str
) -> None:
    weight = draw_weight(rng, parse(spec), 200, 100, None)
    x = rng.standard_normal((150, 100)).astype(np.float32)
    whole = plan_of(weight)(x)
    monkeypatch.setattr(byte_linear, most, 1)
    np.testing.assert_array_equal(plan_of(weight)(x), whole)


WRONG = {
    "a lost step": lambda panels: panels.values.reshape(-1, 256)[-1:].fill(0),
    "quads in reversed order": lambda panels: panels.values.view(np.int8).reshape(-1, 4)[:, ::-1].copy(),
    "columns of another step": lambda panels: np.roll(panels.columns, 16),
    "rows in wrong places": lambda panels: np.roll(panels.positions, 1),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_panel_is_caught(rng: np.random.Generator, fault: str) -> None:
    weight = draw_weight(rng, parse("shflbw:32"), 64, 300, None)
    x = rng.standard_normal((40, 300)).astype(np.float32)
    plan = plan_of(weight)
    check_int8(plan(x), weight, x)
    changed = WRONG[fault](plan.panels)
    if changed is not None:
        target = next(each for each in (plan.panels.values, plan.panels.columns, plan.panels.positions)
                      if each.nbytes == changed.nbytes)  # fmt: skip
        target.view(changed.dtype).reshape(-1)[...] = changed.ravel()
    with pytest.raises(WrongResult):
        check_int8(plan(x), weight, x)


def test_weights_have_a_sign_and_inputs_have_none() -> None:
    largest = np.zeros((16, 16, 4), np.int8)
    largest[:8], largest[8:] = 127, -127
    weight = pack_int8(largest.reshape(16, 64).astype(np.float32), None, parse("dense"), np.ones(16, np.float32),
                       InputRange(1.0, 0))  # fmt: skip
    x = np.full((32, 64), 255, np.float32)
    expected = np.repeat([127 * 255 * 64, -127 * 255 * 64], 8).astype(np.float32)
    for emulated in (True, not HAS_UNIT):
        np.testing.assert_array_equal(plan_of(weight, emulated)(x), np.tile(expected, (32, 1)))


def test_the_unit_is_chosen_where_a_row_keeps_enough(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(find_cpu_target(), matrix=True)
    monkeypatch.setattr(int8_linear, "find_cpu_target", lambda: own)
    monkeypatch.setattr(int8_linear, "count_threads", lambda: 2)

    def chosen(spec: str, k: int, n: int) -> int | None:
        return int8_linear.choose_matrix_tiles(draw_weight(rng, parse(spec), 64, k, None), n)

    assert chosen("block:32x4", 1000, 64) == chosen("shflbw:32", 300, 64) == chosen("dense", 300, 64) == 2
    assert chosen("block:16x4", 1000, 64) == 1
    assert chosen("block:32x4", 300, 64) is chosen("block:32x4", 1000, 63) is chosen("block:4x4", 1000, 64) is None


def test_a_copy_has_weights_of_its_own(rng: np.random.Generator) -> None:
    weight = draw_weight(rng, parse("block:32x4"), 64, 64, None)
    plan = plan_of(weight)
    other, x = plan.copy(), rng.standard_normal((40, 64)).astype(np.float32)
    expected = plan(x)
    plan.panels.values[:] = 0
    plan.quads.scales[:] = 0
    assert not plan(x).any()
    np.testing.assert_array_equal(other(x), expected)
