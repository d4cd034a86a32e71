"""The report's frames against hand-computed small ones, and the numbers as text."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest
import report_rows
from hypothesis import given
from hypothesis import strategies as st

from latbench.base.number_format import (
    format_bytes,
    format_count,
    format_percent,
    format_percent_rounded_up,
    format_ratio,
    format_seconds,
)
from latbench.report import point_frames
from latbench.report.pages import overview

row, frame = report_rows.row, report_rows.frame

SMALL = frame(
    row("dense", 0.0, 10.0, "torch"),
    row("dense", 0.0, 8.0, "torch", kernel_requested="mkldnn"),
    row("unstructured", 0.5, 16.0),
    row("unstructured", 0.75, 4.0),
    row("vector:2", 0.5, 8.0),
    row("vector:2", 0.75, 5.0),
    row("vector:2", 0.75, 2.0, kernel_requested="wide", kernel_used="numba.wide"),
)


def test_the_fastest_dense_engine_is_named() -> None:
    dense = point_frames.select_fastest_dense(point_frames.build_points(SMALL))
    assert dense[["dense_engine", "dense_seconds"]].to_numpy().tolist() == [["torch mkldnn", 8.0]]


def test_speedup_is_over_the_fastest_dense_by_the_fastest_kernel() -> None:
    gains = point_frames.build_speedups(point_frames.build_points(SMALL)).set_index(["pattern", "sparsity"])
    assert gains["speedup"].to_dict() == {
        ("unstructured", 0.5): 0.5, ("unstructured", 0.75): 2.0, ("vector:2", 0.5): 1.0, ("vector:2", 0.75): 4.0,
    }  # fmt: skip
    assert gains.loc[("vector:2", 0.75), "kernel"] == "numba.wide"


def test_the_fastest_dense_may_have_its_activations_in_another_order() -> None:
    rows = frame(
        row("dense", 0.0, 8.0, "openvino"),
        row("dense", 0.0, 6.0, "torch", kernel_requested="prepacked", layout="nhwc"),
        row("vector:2", 0.75, 2.0),
    )
    [gain] = point_frames.build_speedups(point_frames.build_points(rows)).to_dict("records")
    assert (gain["dense_engine"], gain["speedup"]) == ("torch prepacked", 3.0)
    assert point_frames.summarise_settings(rows)["layout"] == "nhwc, token_major"


def test_rounded_weights_stand_beside_dense_ones_that_are_not() -> None:
    """They give the same results, and the engine's name tells. Rounded activations are another setting, in which
    dense layers in float32 are rivals all the same.
    """
    exact = {"dtype_w": "float32", "dtype_a": "float32"}
    both = {"dtype_w": "bfloat16", "dtype_a": "bfloat16", "kernel_requested": "bf16"}
    entries = [
        row("dense", 0.0, 8.0, "torch", **exact),
        row("vector:2", 0.75, 2.0, **exact),
        row("vector:2", 0.75, 1.6, kernel_requested="bf16-weights", dtype_w="bfloat16", dtype_a="float32"),
        row("vector:2", 0.9, 1.0, **both),
    ]
    rows = frame(*entries)
    gains = point_frames.build_speedups(point_frames.build_points(rows)).to_dict("records")
    assert [(gain["setting"], gain["engine"], gain["speedup"]) for gain in gains] == [
        ("bfloat16", "numba bf16", 8.0), ("float32", "numba bf16-weights", 5.0)
    ]  # fmt: skip
    assert (
        point_frames.summarise_settings(rows)["dtype_w"] == "bfloat16, float32"
        and point_frames.count_without_dense(point_frames.build_points(rows)) == 0
    )
    faster = frame(*entries, row("dense", 0.0, 3.0, "torch", **both))
    gains = point_frames.build_speedups(point_frames.build_points(faster)).to_dict("records")
    assert [(gain["dense_engine"], gain["speedup"]) for gain in gains] == [("torch bf16", 3.0), ("torch", 5.0)]


def test_speedup_interval_takes_both_times_at_their_worst_and_best() -> None:
    gain = (
        point_frames.build_speedups(point_frames.build_points(SMALL))
        .set_index(["pattern", "sparsity"])
        .loc[("unstructured", 0.75)]
    )
    assert gain["speedup_low"] == pytest.approx((0.9 * 8) / (1.2 * 4))
    assert gain["speedup_high"] == pytest.approx((1.2 * 8) / (0.9 * 4))


def test_times_of_different_settings_are_never_compared() -> None:
    mixed = frame(row("dense", 0.0, 8.0, "torch", threads=1), row("unstructured", 0.9, 1.0, threads=2))
    points = point_frames.build_points(mixed)
    assert point_frames.build_speedups(points).empty
    assert point_frames.count_without_dense(points) == 1
    assert set(points["setting"]) == {"1 thread", "2 threads"}


def test_failed_throttled_and_verification_rows_give_no_point() -> None:
    bad = frame(
        row("dense", 0.0, 8.0, "torch"),
        row("unstructured", 0.5, 1.0, status="incorrect"),
        row("unstructured", 0.75, 1.0, status="throttled"),
        row("dense", 0.0, 1.0, "torch", purpose="verify", op="model"),
    )
    assert point_frames.build_points(bad)["seconds"].tolist() == [8.0]


def test_of_a_point_measured_twice_the_latest_counts() -> None:
    later = datetime(2026, 1, 2, tzinfo=UTC)
    twice = frame(row("unstructured", 0.5, 3.0, started_at=later), row("unstructured", 0.5, 1.0))
    assert point_frames.build_points(twice)["seconds"].tolist() == [3.0]


def test_nothing_is_certain_of_times_without_an_interval() -> None:
    unbounded = {"low_seconds": None, "high_seconds": None}
    points = point_frames.build_points(
        frame(row("dense", 0.0, 8.0, **unbounded), row("vector:2", 0.5, 4.0, **unbounded))
    )
    assert points[["low", "high"]].isna().all(axis=None)
    speedups = point_frames.build_speedups(points)
    assert speedups["speedup"].tolist() == [2.0] and speedups["speedup_low"].isna().all()
    [start] = point_frames.build_break_evens(speedups).to_dict("records")
    assert start["break_even"] == 0.5 and math.isnan(start["certain"])
    fastest = speedups.to_dict("records")
    assert overview.format_verdict([start], fastest) == "Use vector:2 at 50% (not certain: the noise is unknown)."
    [place] = point_frames.list_places(speedups)
    table = overview.build_verdicts(speedups, point_frames.build_break_evens(speedups), [place])
    assert "≈ 2.00×" in [cell.text for cell in table.rows[0]]


def test_break_even_is_interpolated_and_never_is_said() -> None:
    rows = frame(
        row("dense", 0.0, 8.0, "torch"),
        row("unstructured", 0.5, 16.0), row("unstructured", 0.75, 4.0),
        row("vector:2", 0.5, 4.0), row("vector:2", 0.75, 2.0),
        row("nm:2:4", 0.5, 9.0),
    )  # fmt: skip
    starts = point_frames.build_break_evens(point_frames.build_speedups(point_frames.build_points(rows))).set_index(
        "pattern"
    )
    assert starts.loc["unstructured", "break_even"] == pytest.approx(0.625)  # halfway: log 1/2 to log 2
    assert starts.loc["vector:2", ["break_even", "at_lowest"]].tolist() == [0.5, True]
    assert math.isnan(starts.loc["nm:2:4", "break_even"])
    assert starts["best"].to_dict() == {"nm:2:4": 8 / 9, "unstructured": 2.0, "vector:2": 4.0}


def first_to_pay(**curves: list[tuple[float, float]]) -> tuple[str, float, bool]:
    rows = [row(name.replace("_", ":"), s, 8.0 / gain) for name, curve in curves.items() for s, gain in curve]
    [found] = point_frames.build_earliest_starts(
        point_frames.build_speedups(point_frames.build_points(frame(row("dense", 0.0, 8.0, "torch"), *rows)))
    ).to_dict("records")
    return found["pattern"], found["break_even"], found["at_lowest"]


def test_a_pattern_says_nothing_of_sparsities_beyond_its_own() -> None:
    """2:4 gains at 50%; from there to the crossing of the others, at 62.5%, and beyond, only they count."""
    others = [(0.5, 0.5), (0.75, 2.0), (0.9, 4.0)]
    assert first_to_pay(nm_2_4=[(0.5, 1.3)], vector_2=others) == ("nm:2:4", 0.5, True)  # nothing measured loses
    low, high = [(0.5, 0.4), (0.6, 0.5), (0.85, 2.0)], [(0.6, 0.5), (0.9, 0.9)]
    assert first_to_pay(nm_2_4=[(0.5, 1.3)], vector_2=low) == ("vector:2", pytest.approx(0.725), False)
    pattern, start, at_lowest = first_to_pay(nm_2_4=[(0.5, 1.3)], vector_2=high)
    assert (pattern, at_lowest) == ("", False) and math.isnan(start)


def test_where_patterns_take_turns_the_fastest_counts() -> None:
    rising, falling = [(0.5, 0.5), (0.7, 0.5), (0.9, 2.0)], [(0.5, 0.5), (0.7, 2.0), (0.9, 0.5)]
    # Each crosses at 0.6 or 0.8, and at 0.8 the falling one does so, too, on its way down: between 0.7 and 0.9 no
    # measured sparsity loses.
    assert first_to_pay(vector_2=rising, block_2x2=falling) == ("block:2x2", pytest.approx(0.6), False)
    # A line that joins the best of both points would cross before either of them does.
    flat, steep = [(0.5, 0.9), (0.9, 0.9)], [(0.5, 0.25), (0.9, 4.0)]
    assert first_to_pay(vector_2=flat, block_2x2=steep) == ("block:2x2", pytest.approx(0.7), False)
    # One that starts at 75%, where it gains at once.
    assert first_to_pay(vector_2=flat, nm_1_4=[(0.75, 2.0), (0.9, 3.0)]) == ("nm:1:4", 0.75, False)


@given(st.lists(st.lists(st.floats(0.01, 100), min_size=3, max_size=3), min_size=1, max_size=4))
def test_nothing_measured_loses_above_where_a_pattern_pays(gains: list[list[float]]) -> None:
    sparsity = [0.5, 0.75, 0.9]
    curves = {str(i): np.array([*zip(sparsity, own, strict=True)]) for i, own in enumerate(gains)}
    start, pattern, at_lowest = point_frames._first_to_pay(curves)
    best = np.max(gains, axis=0)
    alone = [point_frames.find_crossings(np.array(sparsity), np.array(own), np.array([0]))[0] for own in gains]
    if math.isnan(start):
        assert best[-1] < 1 and not pattern
    else:
        assert (best[np.array(sparsity) > start + 1e-9] >= 1).all()
        assert start <= np.nanmin([1, *alone]) + 1e-9  # never later than any of them alone
        assert at_lowest == bool((best >= 1).all())


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([2.0], 0.5),
        ([0.5], math.nan),
        ([0.5, 2.0], 0.6),
        ([2.0, 0.5, 2.0], 0.8),  # a loss in between: what lies below it does not last
        ([0.5, 2.0, 0.5], math.nan),  # lost again at the top
        ([1.0, 1.0, 1.0], 0.5),
        ([0.5, 1.0, 3.0], 0.7),
    ],
)
def test_crossing_is_the_last_one(gains: list[float], expected: float) -> None:
    sparsity = 0.5 + 0.2 * np.arange(len(gains))
    other = (np.array([0.1, 0.9]), np.array([0.5, 2.0]))  # before and after it, and of no influence on it
    sparsity, both = (np.concatenate([*ends]) for ends in zip(other, (sparsity, gains), other, strict=True))
    found = point_frames.find_crossings(sparsity, both, np.array([0, 2, 2 + len(gains)]))
    assert found == pytest.approx([0.5, expected, 0.5], nan_ok=True)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12))
def test_above_the_break_even_no_measured_sparsity_loses(gains: list[float]) -> None:
    sparsity = np.linspace(0.3, 0.99, len(gains))
    [start] = point_frames.find_crossings(sparsity, np.array(gains), np.array([0]))
    if math.isnan(start):
        assert gains[-1] < 1
    else:
        assert sparsity[0] <= start <= sparsity[-1]
        assert (np.array(gains)[sparsity > start + 1e-9] >= 1).all()


def test_noise_is_the_relative_interval_width() -> None:
    rows = frame(
        row("dense", 0.0, 10.0, "torch"),  # 9 to 12: 0.3
        row("dense", 0.0, 10.0, "torch", m=5, low_seconds=9.9, high_seconds=10.0, status="noisy"),
        row("dense", 0.0, 10.0, "torch", m=6, low_seconds=None, high_seconds=None),
    )
    found = point_frames.build_noise(rows).iloc[0]
    assert found[["backend", "format", "rows", "noisy"]].tolist() == ["torch", "dense", 2, 1]
    assert (found["median"], found["largest"]) == pytest.approx((0.155, 0.3))


def test_failures_are_counted_by_reason() -> None:
    rows = frame(
        row("dense", 0.0, 1.0, "torch"),
        row("nm:2:4", 0.5, math.nan, status="unsupported", error="k must be divisible by 4"),
        row("nm:2:4", 0.5, math.nan, m=5, status="unsupported", error="k must be divisible by 4"),
        row("vector:2", 0.5, math.nan, status="oom"),
    )
    found = point_frames.count_failures(rows)
    assert found["rows"].tolist() == [2, 1]
    assert found["reason"].tolist() == ["k must be divisible by 4", "no reason recorded"]
    assert point_frames.count_statuses(rows).set_index("backend").loc[
        "numba", ["rows", "unsupported", "oom"]
    ].tolist() == [3, 2, 1]


def test_a_convolution_is_named_by_what_is_unusual() -> None:
    conv = {"op": "conv2d", "batch": 1, "c_in": 8, "h": 14, "w": 14, "c_out": 16, "kh": 3, "kw": 3}
    usual = {"stride_h": 1, "stride_w": 1, "padding_h": 1, "padding_w": 1, "dilation_h": 1, "dilation_w": 1}
    rows = frame(
        row("dense", 0.0, 1.0, **conv, **usual),
        row("dense", 0.0, 1.0, **conv, **{**usual, "stride_h": 2, "stride_w": 2, "padding_h": 0, "padding_w": 0}),
        row("dense", 0.0, 1.0),
    )
    assert set(point_frames.build_points(rows)["shape"]) == {
        "conv 3×3, 8 → 16, 14×14, batch 1",
        "conv 3×3, 8 → 16, 14×14, batch 1, stride 2, padding 0",
        "linear 3 → 4, n=2",
    }  # fmt: skip


def test_shown_levels_are_few_and_measured() -> None:
    many = pd.DataFrame({"sparsity": np.linspace(0.4, 0.99, 41), "shape": "a"})
    shown = point_frames.select_levels(many)
    assert len(shown) == 5
    assert set(shown) <= set(many["sparsity"])
    assert point_frames.select_levels(pd.DataFrame({"sparsity": [0.5, 0.7], "shape": "a"})) == [0.5, 0.7]


def verdict(*rows: dict[str, Any], exact: bool = True) -> str:
    table = frame(row("dense", 0.0, 8.0, "torch"), *rows)
    if exact:
        table["low_seconds"] = table["high_seconds"] = table["median_seconds"]
    gains = point_frames.build_speedups(point_frames.build_points(table))
    starts, best = point_frames.build_break_evens(gains), point_frames.select_fastest_patterns(gains)
    return overview.format_verdict(starts.to_dict("records"), best.to_dict("records"))


def test_verdicts_say_what_to_use() -> None:
    slow, fast = row("unstructured", 0.5, 16.0), row("unstructured", 0.75, 4.0)
    assert verdict(slow, fast) == "Use unstructured from 63%."
    vectors = row("vector:2", 0.5, 4.0), row("vector:2", 0.75, 2.0)
    assert verdict(slow, fast, *vectors) == "Use vector:2 at 50% and above; unstructured from 63%."
    assert verdict(slow, *vectors) == "Use vector:2 at 50% and above; unstructured never."
    assert verdict(row("nm:2:4", 0.5, 4.0)) == "Use nm:2:4 at 50%."
    earlier = row("block:2x2", 0.25, 7.0), row("block:2x2", 0.75, 6.0)
    assert verdict(slow, fast, *earlier) == "Use unstructured from 63%; block:2x2 pays at 25% and above."
    # One that gains only below the highest sparsity, and one whose loss there is within the noise.
    relapse = row("unstructured", 0.5, 4.0), row("unstructured", 0.75, 9.0)
    assert verdict(*relapse, *vectors).endswith("; unstructured not throughout, at best 2.00× at 50%.")
    assert verdict(row("unstructured", 0.75, 8.1), *vectors, exact=False).endswith(
        "; unstructured never, within the noise."
    )


def test_verdicts_say_what_is_not_certain() -> None:
    slow, fast = row("unstructured", 0.5, 16.0), row("unstructured", 0.75, 4.0)
    # The lower ends are 9/12 of the speedups: 0.375 and 1.5, whose logarithms cross zero at 0.677.
    assert verdict(slow, fast, exact=False) == "Use unstructured from 63% (certain from 68%)."
    barely = row("unstructured", 0.75, 7.9)
    assert verdict(barely, exact=False) == "Use unstructured at 75% (not certain: within the noise)."


def test_verdicts_say_when_to_stay_dense() -> None:
    assert verdict(row("unstructured", 0.5, 9.0)) == "Stay dense: no pattern is faster."
    assert verdict(row("vector:2", 0.5, 4.0), row("vector:2", 0.75, 9.0)) == (
        "Stay dense: no pattern stays faster up to the highest sparsity; at best vector:2 at 50%, 2.00×."
    )


def test_a_baseline_names_its_type_and_that_of_any_type_is_known_too() -> None:
    half, bytes_ = ({"dtype_w": it, "dtype_a": it, "dtype_out": it} for it in ("float16", "fp8"))
    rows = frame(
        row("dense", 0.0, 8.0, "torch_gpu", kernel_requested="cublas", **half),
        row("dense", 0.0, 5.0, "torch_gpu", kernel_requested="fp8", **bytes_),
        row("dense", 0.0, 1.0, "torch_gpu", kernel_requested="fp8", **bytes_ | {"n": 7}),  # of another shape
        row("vector:2", 0.75, 4.0, "cupy", **half),
        row("nm:2:4", 0.5, 2.5, "torch_sparse", kernel_requested="cusparselt", **bytes_),
    )
    gains = point_frames.build_speedups(point_frames.build_points(rows)).set_index("pattern")
    assert gains["speedup"].to_dict() == {"vector:2": 2.0, "nm:2:4": 2.0}
    assert gains["dense_dtype"].to_dict() == {"vector:2": "float16", "nm:2:4": "fp8"}
    assert (gains["any_dense_seconds"] / gains["seconds"]).to_dict() == {"vector:2": 1.25, "nm:2:4": 2.0}
    assert set(gains["any_dense_engine"]) == {"torch_gpu fp8"} and set(gains["any_dense_dtype"]) == {"fp8"}
    assert point_frames.name_baseline("torch_gpu cublas", "float16") == "torch_gpu cublas in float16"
    assert point_frames.name_baseline("torch_gpu fp8", "fp8") == "torch_gpu fp8"
    assert point_frames.name_baseline("torch", "float32") == "torch"


def test_four_bits_on_a_gpu_are_no_baseline_of_the_type_that_they_multiply() -> None:
    wide = {"dtype_w": "bfloat16", "dtype_a": "bfloat16", "dtype_out": "bfloat16"}
    rows = frame(
        row("dense", 0.0, 8.0, "torch_gpu", kernel_requested="cublas", **wide),
        row("dense", 0.0, 4.0, "torch_gpu", kernel_requested="int4", **wide | {"dtype_w": "int4"}),
        row("vector:2", 0.75, 2.0, "cupy", **wide),
    )
    [gain] = point_frames.build_speedups(point_frames.build_points(rows)).to_dict("records")
    assert (gain["speedup"], gain["dense_dtype"]) == (4.0, "bfloat16")
    assert (gain["any_dense_seconds"], gain["any_dense_dtype"]) == (4.0, "int4")


def test_inside_a_network_layers_of_one_shape_are_told_apart() -> None:
    """A dense time of one layer is no baseline of another."""
    inside = {"context": "network"}
    rows = [
        row(pattern, sparsity, seconds, model=f"net:{name}", **inside)
        for name, dense, sparse in (("conv1", 10.0, 3.0), ("conv2", 4.0, 3.5))
        for pattern, sparsity, seconds in (("dense", 0.0, dense), ("unstructured", 0.5, sparse))
    ]
    gains = point_frames.build_speedups(point_frames.build_points(frame(*rows)))
    assert gains["shape"].str.rpartition(", ")[2].tolist() == ["net:conv1", "net:conv2"]
    assert gains["speedup"].tolist() == pytest.approx([10 / 3, 4 / 3.5])


def test_where_the_fastest_pattern_is_within_the_noise_is_counted() -> None:
    rows = frame(
        row("dense", 0.0, 8.0, "torch"), row("dense", 0.0, 9.0, "openvino"),
        row("unstructured", 0.5, 4.0), row("vector:2", 0.5, 4.1),
        row("unstructured", 0.75, 4.0), row("vector:2", 0.75, 1.0), row("block:2x2", 0.9, 1.0),
    )  # fmt: skip
    gains = point_frames.build_speedups(point_frames.build_points(rows))
    assert point_frames.count_contested(gains) == (1, 0, 2)  # of 50% and 75%; at 90% there is one pattern alone
    assert point_frames.count_contested(gains.assign(low=math.nan, high=math.nan)) == (0, 2, 2)
    assert set(gains["dense_engines"]) == {2}


def test_threads_are_whole_numbers_where_some_rows_lack_them() -> None:
    table = frame(row("dense", 0.0, 8.0), row("vector:2", 0.5, 2.0)).assign(threads=[2.0, None])
    assert point_frames.summarise_settings(table)["threads"] == "2"
    assert set(point_frames.build_points(table)["setting"]) == {"2 threads", "threads unknown"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_percent_rounded_up(0.504), "51%"),
        (format_percent_rounded_up(0.5), "50%"),
        (format_percent_rounded_up(0.50411, 3), "50.5%"),
        (format_seconds(4.123e-4), "412 µs"),
        (format_seconds(4.123e-4, 4.05e-4, 4.2e-4), "412 µs (405–420)"),
        (format_seconds(1.236e-3), "1.24 ms"),
        (format_seconds(9.996e-6), "10.0 µs"),
        (format_seconds(12.0), "12.0 s"),
        (format_seconds(float("nan")), "–"),
        (format_ratio(2.314), "2.31×"),
        (format_ratio(25.71), "25.7×"),
        (format_ratio(None), "–"),
        (format_percent(0.75), "75%"),
        (format_percent(0.984375), "98.4%"),
        (format_percent(0.00421), "0.42%"),
        (format_percent(0.0), "0%"),
        (format_count(12345), "12\u2009345"),
        (format_bytes(32768), "32 KiB"),
        (format_bytes(25_276_502_016), "23.5 GiB"),
    ],
)
def test_numbers_have_the_digits_that_matter(text: str, expected: str) -> None:
    assert text == expected
