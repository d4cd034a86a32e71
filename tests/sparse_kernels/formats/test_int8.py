"""Weights in eight bits, and how inputs are read."""

import numpy as np
import pytest

from sparse_kernels import NotOfPattern, parse
from sparse_kernels.formats import unpack
from sparse_kernels.formats.int8 import (
    InputRange,
    fill_up,
    find_scales,
    format_range,
    pack_int8,
    parse_range,
    unpack_int8,
)


def test_weights_are_the_nearest_whole_numbers_of_steps(rng: np.random.Generator) -> None:
    pattern = parse("block:4x4")
    dense = rng.standard_normal((30, 50)).astype(np.float32)
    mask = pattern.mask(dense.astype(float) ** 2, 0.5)
    scales = find_scales(dense)
    weight = pack_int8(dense, mask, pattern, scales)
    whole = unpack(weight.packed)
    assert np.array_equal(whole, np.rint(whole)) and np.abs(whole).max() == 127
    far = np.abs(np.where(mask, dense, 0) - unpack_int8(weight))
    assert (far <= scales[:, None] * 0.5 * (1 + 1e-6)).all()
    assert not unpack_int8(weight)[~mask].any()
    np.testing.assert_array_equal(unpack_int8(fill_up(weight)), unpack_int8(weight))


def test_what_is_beyond_the_steps_becomes_the_last_one() -> None:
    weight = pack_int8(np.array([[300.0, -300.0, 1.0]], np.float32), None, parse("dense"), np.ones(1, np.float32))
    np.testing.assert_array_equal(unpack_int8(weight), [[127, -127, 1]])


def test_a_row_of_zeros_has_a_scale() -> None:
    np.testing.assert_array_equal(find_scales(np.zeros((2, 3), np.float32)), [1, 1])


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_a_scale_is_positive_and_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="needs 2 scales, positive and finite"):
        pack_int8(np.ones((2, 3), np.float32), None, parse("dense"), np.array([1, scale], np.float32))
    with pytest.raises(ValueError, match="positive and finite"):
        InputRange(scale)


def test_rows_whose_sums_may_pass_32_bits_are_refused() -> None:
    k = (2**31 - 1) // (127 * 255)
    one = np.ones(1, np.float32)
    pack_int8(np.ones((1, k), np.float32), None, parse("dense"), one)
    with pytest.raises(ValueError, match=f"{k} are the most"):
        pack_int8(np.ones((1, k + 1), np.float32), None, parse("dense"), one)


def test_a_mask_of_another_pattern_is_refused() -> None:
    mask = np.ones((4, 4), bool)
    mask[0, 0] = False
    with pytest.raises(NotOfPattern):
        pack_int8(np.ones((4, 4), np.float32), mask, parse("block:4x4"), np.ones(4, np.float32))


@pytest.mark.parametrize(("low", "high"), [(-3.0, 5.0), (0.0, 6.0), (-2.0, 0.0), (1.0, 4.0), (-4.0, -1.0)])
def test_a_range_holds_zero_and_its_ends(low: float, high: float) -> None:
    found = InputRange.covering(low, high)
    ends = [found.scale * (q - found.zero) for q in (0, 255)]
    assert 0 <= found.zero <= 255
    for end, wanted in zip(ends, (min(low, 0), max(high, 0)), strict=True):
        assert abs(end - wanted) <= found.scale * 0.5 * (1 + 1e-6)


def test_only_zeros_have_a_range_and_infinity_has_none() -> None:
    assert InputRange.covering(0.0, 0.0) == InputRange(1.0)
    with pytest.raises(ValueError, match="no finite steps"):
        InputRange.covering(-1.0, np.inf)


@pytest.mark.parametrize("scale", [0.1 + 0.2, np.float64(0.1 + 0.2), np.float32(0.25)])
def test_a_range_comes_back_from_its_text(scale: float) -> None:
    reading = InputRange(scale, np.int64(7))  # type: ignore[arg-type]
    assert format_range(reading) == f"{float(scale)!r},7"
    assert parse_range(format_range(reading)) == reading
