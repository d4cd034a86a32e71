"""The oracle must pass what float32 can produce and catch each of these wrong kernels."""

import numpy as np
import pytest

from sparse_kernels import (
    NM,
    BlockWise,
    Conv2dShape,
    Dense,
    ShflBW,
    Unstructured,
    VectorWise,
    oracle,
    pack,
    prepare,
    prepare_conv2d,
    unpack,
)
from sparse_kernels.oracle import WrongResult, check, check_conv2d

M, K, N = 29, 46, 5


@pytest.fixture
def operands(rng):
    weight, x, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((M, K), (K, N), M))
    return weight, x, bias


def packed_as(weight, pattern, sparsity=0.5):
    kept = 0 if isinstance(pattern, Dense) else pattern.sparsity if isinstance(pattern, NM) else sparsity
    return pack(weight, pattern.mask(np.abs(weight), kept), pattern)


def right(packed, x, bias=None, activation=None):
    return prepare(packed, "reference", "feature_major", N)(x, bias, activation)


def drops_the_last_group(packed, x):
    y = right(packed, x)
    y[packed.row_ids.reshape(-1, packed.pattern.v)[-1].max() :] = 0
    return y


def forgets_row_ids(packed, x):
    y = np.zeros((M, x.shape[1]), np.float32)
    y[: len(packed.row_ids[: packed.shape[0]])] = right(packed, x)[packed.row_ids[: packed.shape[0]]]
    return y


def drops_the_last_vector(packed, x):
    weight = unpack(packed)
    weight[packed.row_ids[packed.indptr.size - 2 :], packed.indices[-1]] = 0
    return weight @ x


def ignores_offsets(packed, x):
    y = np.zeros((M, x.shape[1]), np.float32)
    for group in range(packed.values.shape[1]):
        for slot in range(packed.pattern.keep):
            y += packed.values[:, group, slot, None] * x[min(group * packed.pattern.of + slot, K - 1)]
    return y


def swaps_block_rows_and_columns(packed, x):
    weight = np.zeros((-(-M // 4) * 4, -(-K // 4) * 4), np.float32)
    for row in range(packed.indptr.size - 1):
        for block in range(packed.indptr[row], packed.indptr[row + 1]):
            column = packed.indices[block]
            weight[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] = packed.values[block].T
    return weight[:M, :K] @ x


def rounds_weights_to_float16(packed, x):
    return unpack(packed).astype(np.float16).astype(np.float32) @ x


def reads_the_next_column(packed, x):
    return unpack(packed) @ np.roll(x, 1, axis=0)


def leaves_the_last_column(packed, x):
    y = right(packed, x)
    y[:, -1] = 0
    return y


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        (VectorWise(8), drops_the_last_group),
        (VectorWise(8), drops_the_last_vector),
        (ShflBW(8), forgets_row_ids),
        (NM(2, 4), ignores_offsets),
        (BlockWise(4, 4), swaps_block_rows_and_columns),
        (Dense(), rounds_weights_to_float16),
        (Unstructured(), rounds_weights_to_float16),
        (Unstructured(), reads_the_next_column),
        (Dense(), leaves_the_last_column),
    ],
    ids=lambda it: getattr(it, "__name__", str(it)),
)
def test_a_wrong_kernel_is_caught(operands, pattern, wrong):
    weight, x, _ = operands
    packed = packed_as(weight, pattern)
    check(right(packed, x), packed, x)
    with pytest.raises(WrongResult, match="results are wrong; the worst is feature"):
        check(wrong(packed, x), packed, x)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_a_wrong_epilogue_is_caught(operands, activation):
    weight, x, bias = operands
    packed = packed_as(weight, VectorWise(8))
    check(right(packed, x, bias, activation), packed, x, bias=bias, activation=activation)
    wrong = [right(packed, x, None, activation), right(packed, x, np.roll(bias, 1), activation)]
    wrong.append(right(packed, x, bias, {None: "relu", "relu": None, "gelu": "relu"}[activation]))
    for y in wrong:
        with pytest.raises(WrongResult):
            check(y, packed, x, bias=bias, activation=activation)


def test_the_tanh_form_of_gelu_is_caught(operands):
    weight, x, _ = operands
    packed = packed_as(weight, Dense())
    z = right(packed, x).astype(np.float64) / 4
    tanh_form = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
    with pytest.raises(WrongResult):
        check(tanh_form.astype(np.float32), packed, x / 4, activation="gelu")


@pytest.mark.parametrize("pattern", [Dense(), Unstructured(), VectorWise(8)], ids=str)
def test_rounding_to_float16_shows_on_whole_numbers_however_long_the_sum(rng, pattern):
    weight, x = oracle.build_exact_operands(rng, 8, 4000, 3)
    packed = packed_as(weight, pattern)
    exact = unpack(packed).astype(np.int64) @ x.astype(np.int64)
    assert np.abs(exact).max() < 2**24
    np.testing.assert_array_equal(right(packed, x), exact)
    assert (rounds_weights_to_float16(packed, x) != exact).mean() > 0.8  # some errors cancel


def test_sums_that_float32_cannot_hold_are_no_exact_operands(rng):
    with pytest.raises(ValueError, match="k is at most 4096"):
        oracle.build_exact_operands(rng, 1, 4097, 1)


def test_the_worst_element_is_named(operands):
    weight, x, _ = operands
    packed = packed_as(weight, Dense())
    y = right(packed, x)
    y[3, 2] += 1
    y[7, 1] -= 100
    said = (
        rf"2 of {M * N} results are wrong; the worst is feature 7, column 1: expected .*, got .*, which is off by 100"
    )
    with pytest.raises(WrongResult, match=said):
        check(y, packed, x)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_caught(operands, wrong):
    weight, x, _ = operands
    packed = packed_as(weight, Dense())
    y = right(packed, x)
    y[3, 2] = wrong
    with pytest.raises(WrongResult, match="the worst is feature 3, column 2"):
        check(y, packed, x)


def test_a_value_that_is_no_number_passes_where_the_oracle_has_none(operands):
    weight, x, _ = operands
    packed = packed_as(weight, Unstructured())
    x[5, 1] = np.nan
    y = right(packed, x)
    check(y, packed, x)
    y[0, 0] = np.nan
    with pytest.raises(WrongResult, match="feature 0, column 0"):
        check(y, packed, x)


def test_a_result_of_another_shape_is_caught(operands):
    weight, x, _ = operands
    packed = packed_as(weight, Dense())
    with pytest.raises(WrongResult, match=r"shape \(29, 4\), expected \(29, 5\)"):
        check(right(packed, x)[:, 1:], packed, x)
    with pytest.raises(WrongResult, match=r"shape \(29, 5\), expected \(5, 29\)"):
        check(right(packed, x), packed, x.T, layout="token_major")


def test_the_worst_order_of_float32_sums_is_within_the_bound(rng):
    k = 4000
    weight = np.sort(rng.uniform(0.5, 1, (3, k)).astype(np.float32), axis=1)[:, ::-1].copy()
    x = np.ones((k, 2), np.float32)
    y = np.zeros((3, 2), np.float32)
    for column in range(k):
        y += weight[:, column, None]
    packed = packed_as(weight, Dense())
    assert check(y, packed, x) < k * 2.0**-24


def test_the_error_is_given_on_the_scale_of_rounding(operands):
    weight, x, _ = operands
    packed = packed_as(weight, Dense())
    assert 0 < check(right(packed, x), packed, x) < K * 2.0**-24
    assert check(np.zeros((M, 0), np.float32), packed, x[:, :0]) == 0


def test_an_empty_weight_allows_no_error(operands):
    weight, x, _ = operands
    packed = packed_as(weight, Unstructured(), sparsity=1)
    assert check(np.zeros((M, N), np.float32), packed, x) == 0
    with pytest.raises(WrongResult):
        check(np.full((M, N), 1e-6, np.float32), packed, x)


def test_a_wrong_convolution_is_caught(rng):
    shape = Conv2dShape(2, 4, 6, 5, 9, 3, 3, padding=(1, 1))
    packed = packed_as(rng.standard_normal((shape.m, shape.k)).astype(np.float32), VectorWise(4))
    x = rng.standard_normal((2, 4, 6, 5)).astype(np.float32)
    y = prepare_conv2d(packed, shape, "reference")(x)
    check_conv2d(y, packed, shape, x)
    edge_left_out = y.copy()
    edge_left_out[:, :, 0] = 0
    for wrong in (edge_left_out, y[::-1], np.roll(y, 1, axis=3)):
        with pytest.raises(WrongResult, match="results are wrong"):
            check_conv2d(wrong, packed, shape, x)
    with pytest.raises(WrongResult, match=r"shape \(1, 9, 6, 5\), expected \(2, 9, 6, 5\)"):
        check_conv2d(y[:1], packed, shape, x)


def test_an_unknown_layout_or_activation_is_refused(operands):
    weight, x, _ = operands
    packed = packed_as(weight, Dense())
    with pytest.raises(ValueError, match="unknown layout 'blocked'"):
        check(right(packed, x), packed, x, layout="blocked")
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        check(right(packed, x), packed, x, activation="tanh")
