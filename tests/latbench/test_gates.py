"""What is no time, and what nothing explains."""

import math

import pytest

from latbench import gates


@pytest.mark.parametrize("sample", [0.0, -1e-9, math.nan, math.inf])
def test_a_time_that_is_none_is_impossible(sample: float) -> None:
    assert "clock" in (gates.impossible([1e-3, sample, 1e-3], None) or "")


def test_faster_than_the_device_is_impossible_and_a_little_above_its_ceilings_is_not() -> None:
    assert gates.impossible([1e-3] * 9, roofline_seconds=1.2e-3) is None
    assert "1.3 times faster than this device can" in (gates.impossible([1e-3] * 9, roofline_seconds=1.3e-3) or "")
    assert gates.impossible([1e-3] * 9, roofline_seconds=None) is None


def test_one_short_sample_is_not_the_point() -> None:
    assert gates.impossible([1e-6, *[1e-3] * 9], roofline_seconds=1e-3) is None


def test_a_spike_lies_above_both_neighbours() -> None:
    assert gates.spikes({0.5: 4.0, 0.75: 9.0, 0.9: 1.0, 0.95: 0.9}) == [0.75]
    assert gates.spikes({0.5: 4.0, 0.75: 5.0, 0.9: 1.0}) == []
    assert gates.spikes({0.95: 9.0, 0.5: 1.0}) == []  # an end has one neighbour
    assert gates.spikes({0.5: 1.0, 0.6: 9.0, 0.7: 1.0, 0.8: 9.0, 0.9: 1.0}) == [0.6, 0.8]
    assert gates.spikes({}) == []
