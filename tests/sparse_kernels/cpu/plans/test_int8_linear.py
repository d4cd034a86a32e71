"""Linear layers in eight bits: the exact whole numbers, on every way to multiply quads, for every pattern."""

from collections.abc import Callable
from dataclasses import replace

import numba
import numpy as np
import pytest
from int8_cases import draw_on_steps, draw_weight

from sparse_kernels import parse
from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.vector_emitter import (
    QUADS_BY_BYTE,
    QUADS_BY_PAIRS,
    QUADS_BY_SIGNED,
    QUADS_BY_UNIT,
)
from sparse_kernels.cpu.plans import int8_linear
from sparse_kernels.cpu.plans.int8_linear import prepare_int8_linear
from sparse_kernels.formats import unpack
from sparse_kernels.formats.int8 import InputRange, find_scales, pack_int8, unpack_int8
from sparse_kernels.int8.int8_oracle import check_int8
from sparse_kernels.oracle import WrongResult

BY_TOKENS = ["block:32x4", "block:16x4", "shflbw:32", "vector:32", "vectornm:32:2:4", "dense"]
BY_ROWS = ["block:4x4", "block:8x4", "shflbw:4", "vector:3"]
SINGLE = ["block:1x4", "unstructured", "nm:2:4", "nm:1:8"]
SIZES = [(2, 1, 1), (33, 130, 5), (100, 67, 33), (64, 256, 70)]
STAND_INS = {"pairs": QUADS_BY_PAIRS, "signed": QUADS_BY_SIGNED, "bytes": QUADS_BY_BYTE}


@pytest.fixture(autouse=True)
def all_threads():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


@pytest.fixture(params=["unit", *(pytest.param(way, marks=pytest.mark.slow) for way in STAND_INS)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How quads are multiplied: by this processor's unit, or by what stands in for it elsewhere."""
    target = find_cpu_target()
    if request.param == "unit" and target.quads not in (QUADS_BY_SIGNED, QUADS_BY_UNIT):
        pytest.skip("this processor has no unit that multiplies quads of bytes")
    if request.param == "pairs" and target.name == "neon":
        pytest.skip("only x86 multiplies pairs")
    own = replace(target, quads=STAND_INS.get(request.param, target.quads), matrix=False)
    monkeypatch.setattr(int8_linear, "find_cpu_target", lambda: own)
    return str(request.param)


@pytest.mark.parametrize("reading", [InputRange(0.25, 0), InputRange(0.25, 201), None], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("spec", [*BY_TOKENS, *BY_ROWS, *SINGLE])
def test_sums_are_the_exact_whole_numbers(
    rng: np.random.Generator, way: str, spec: str, size: tuple[int, int, int], reading: InputRange | None
) -> None:
    m, k, n = size
    weight = draw_weight(rng, parse(spec), m, k, reading)
    x = draw_on_steps(rng, n, k, reading)
    expected = x.astype(float) @ unpack_int8(weight).astype(float).T
    assert np.abs(expected).max(initial=0) < 2**24 * np.abs(x).max(initial=1)  # so that float32 holds them
    plan = prepare_int8_linear(weight, "token_major", n)
    for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
        numba.set_num_threads(threads)
        np.testing.assert_array_equal(plan(x), expected.astype(np.float32))


@pytest.mark.parametrize("spec", ["block:32x4", "block:4x4", "block:1x4"])
def test_x_less_128_gives_the_same_sums(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    own = replace(find_cpu_target(), quads=QUADS_BY_SIGNED, matrix=False)
    monkeypatch.setattr(int8_linear, "find_cpu_target", lambda: own)
    for reading in (InputRange(0.25, 201), None):
        weight, x = draw_weight(rng, parse(spec), 33, 130, reading), draw_on_steps(rng, 5, 130, reading)
        expected = x.astype(float) @ unpack_int8(weight).astype(float).T
        np.testing.assert_array_equal(prepare_int8_linear(weight, "token_major", 5)(x), expected.astype(np.float32))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("spec", ["block:32x4", "shflbw:32", "block:4x4", "block:1x4", "dense"])
@pytest.mark.parametrize("own", [False, True], ids=["one range", "own steps"])
def test_any_input_is_read_as_its_nearest_step(
    rng: np.random.Generator, spec: str, activation: str | None, own: bool
) -> None:
    x = rng.standard_normal((70, 130)).astype(np.float32) * 3
    reading = None if own else InputRange.covering(-4.0, 7.0)  # some lie beyond it
    pattern, dense = parse(spec), rng.standard_normal((67, 130)).astype(np.float32)
    mask = pattern.mask(dense.astype(float) ** 2, 0.0 if spec == "dense" else 0.75)
    weight = pack_int8(dense, mask, pattern, find_scales(np.where(mask, dense, 0)), reading)
    bias = rng.standard_normal(67).astype(np.float32)
    y = prepare_int8_linear(weight, "token_major", 70)(x, bias, activation)
    check_int8(y, weight, x, bias=bias, activation=activation)


def saturate(weight: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Sums of a unit that adds two neighbouring products in 16 bits."""
    products = q[:, None, :] * weight[None]
    pairs = products[..., 0::2] + products[..., 1::2]
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(axis=-1)


WRONG: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = {
    "saturates": lambda w, q, zero: saturate(w, q) - zero * w.sum(axis=1),
    "takes x for signed": lambda w, q, zero: (np.where(q > 127, q - 256, q) - zero) @ w.T,
    "forgets the zero point": lambda w, q, zero: q @ w.T,
    "is one off in the zero point": lambda w, q, zero: (q - zero - 1) @ w.T,
    "reverses quads": lambda w, q, zero: (q - zero) @ w.reshape(len(w), -1, 4)[:, :, ::-1].reshape(w.shape).T,
    "drops the last quad": lambda w, q, zero: (q - zero)[:, :-4] @ w[:, :-4].T,
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_is_caught(rng: np.random.Generator, fault: str) -> None:
    reading = InputRange(0.5, 93)
    weight = draw_weight(rng, parse("dense"), 32, 64, reading)
    q = rng.integers(100, 256, (9, 64))  # large, so that pairs of products pass 16 bits
    x = ((q - reading.zero) * reading.scale).astype(np.float32)
    whole = unpack(weight.packed).astype(int)

    def result(sums: np.ndarray) -> np.ndarray:
        return (sums * weight.scales * np.float32(reading.scale)).astype(np.float32)

    check_int8(result((q - reading.zero) @ whole.T), weight, x)
    with pytest.raises(WrongResult):
        check_int8(result(WRONG[fault](whole, q, reading.zero)), weight, x)


@pytest.mark.parametrize("spec", ["block:32x4", "block:4x4"])
def test_what_is_no_number_is_read_as_documented(rng: np.random.Generator, spec: str) -> None:
    x = rng.standard_normal((20, 64)).astype(np.float32)
    x[3, 5], x[4, 5], x[5, 5] = np.inf, -np.inf, np.nan
    one = draw_weight(rng, parse(spec), 32, 64, InputRange.covering(-2.0, 2.0))
    least = -one.input_range.zero * one.input_range.scale  # type: ignore[union-attr]
    y = prepare_int8_linear(one, "token_major", 20)(x)
    finite = np.nan_to_num(x, nan=least, posinf=9.0, neginf=-9.0)
    check_int8(y, one, finite)  # infinity is the end of the range, NaN its lower end
    own = replace(one, input_range=None)
    y = prepare_int8_linear(own, "token_major", 20)(x)
    assert not np.isfinite(y[3:6]).any()
    others = [t for t in range(20) if t not in (3, 4, 5)]
    check_int8(y[others], own, x[others])


@pytest.mark.parametrize("reading", [InputRange(0.25, 7), None], ids=str)
@pytest.mark.parametrize("spec", ["block:32x4", "block:4x4", "block:1x4"])
def test_zeros_and_no_tokens_are_right(rng: np.random.Generator, spec: str, reading: InputRange | None) -> None:
    pattern = parse(spec)
    dense = rng.standard_normal((32, 64)).astype(np.float32)
    dense[7] = 0
    mask = pattern.mask(dense.astype(float) ** 2, 0.5)
    weight = pack_int8(dense, mask, pattern, find_scales(np.where(mask, dense, 0)), reading)
    bias = rng.standard_normal(32).astype(np.float32)
    plan = prepare_int8_linear(weight, "token_major", 4)
    assert plan(np.empty((0, 64), np.float32), bias).shape == (0, 32)
    np.testing.assert_array_equal(plan(np.zeros((4, 64), np.float32), bias), np.tile(bias, (4, 1)))
    x = rng.standard_normal((4, 64)).astype(np.float32)
    np.testing.assert_array_equal(plan(x, bias)[:, 7], np.full(4, bias[7]))


def test_one_large_channel_leaves_the_error_of_its_steps(rng: np.random.Generator) -> None:
    x = rng.standard_normal((16, 64)).astype(np.float32)
    x[:, 9] *= 1000
    weight = draw_weight(rng, parse("block:32x4"), 32, 64, None)
    check_int8(prepare_int8_linear(weight, "token_major", 16)(x), weight, x)


def test_a_copy_has_weights_of_its_own(rng: np.random.Generator) -> None:
    weight = draw_weight(rng, parse("block:32x4"), 64, 64, None)
    plan = prepare_int8_linear(weight, "token_major", 8)
    other = plan.copy()
    x = rng.standard_normal((8, 64)).astype(np.float32)
    expected = plan(x)
    np.testing.assert_array_equal(other(x), expected)
    plan.panels.values[:] = 0
    plan.quads.scales[:] = 0
    assert not plan(x).any()
    np.testing.assert_array_equal(other(x), expected)


def test_the_oracle_allows_either_step_between_two_and_its_rounding(rng: np.random.Generator) -> None:
    """Where all else is 0, the other step is the whole result, rounded to float32 as any."""
    scales = rng.uniform(0.5, 2, 200).astype(np.float32)
    weight = pack_int8(np.outer(scales, np.float32([101])), None, parse("dense"), scales, InputRange(0.3, 100))
    x = np.float32([[0.5 * np.float32(0.3)]])
    other = (101 * scales.astype(float) * float(np.float32(0.3))).astype(np.float32)
    check_int8(other[None], weight, x)
    check_int8(np.zeros((1, 200), np.float32), weight, x)
    with pytest.raises(WrongResult):
        check_int8(2 * other[None], weight, x)
