"""Comparing tables: points by their keys, verdicts by their samples, and how the command ends in CI."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latbench.tables.compare import KINDS, compare_tables, read_compared_rows
from latbench.tables.schema import TIMED
from latbench.tables.table import hash_table, read_table
from latbench.tables.writer import write_part

CONV = {
    "op": "conv2d", "m": 16, "k": 72, "n": 196, "batch": 1, "c_in": 8, "h": 14, "w": 14, "c_out": 16,
    "kh": 3, "kw": 3, "stride_h": 1, "stride_w": 1, "padding_h": 1, "padding_w": 1, "dilation_h": 1, "dilation_w": 1,
}  # fmt: skip


@pytest.fixture
def at(row: dict[str, Any], rng: np.random.Generator) -> Any:
    """Makes a row whose time is about so many seconds, with samples that scatter by a share of it."""

    def make(seconds: float, scatter: float = 0.002, **columns: Any) -> dict[str, Any]:
        return row | {"samples_seconds": list(seconds * rng.lognormal(0, scatter, 48))} | columns

    return make


@pytest.fixture
def table(tmp_path: Path) -> Any:
    """Writes rows as a table of the given name."""

    def write(name: str, *rows: dict[str, Any]) -> Path:
        write_part(tmp_path / name, rows)
        return tmp_path / name

    return write


def test_what_is_read_in_pieces_is_judged_as_the_whole(table: Any, at: Any, rng: np.random.Generator) -> None:
    """Points that were measured again and again, also as something else than a time."""
    moments = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=int(hour)) for hour in rng.permutation(40)]
    kinds = ("ok", "noisy", "error", "timeout")
    rows = [
        at(1e-3 * (1 + 0.1 * number), m=number % 6 + 1, started_at=moment, status=kinds[number % 7 % 4])
        | ({} if kinds[number % 7 % 4] in TIMED else {"samples_seconds": None, "error": f"reason {number}"})
        for number, moment in enumerate(moments)
    ]
    before, after = table("before", *rows[:20]), table("after", *rows[20:], at(1e-3, m=9))
    whole = compare_tables(read_table(before), read_table(after))
    assert compare_tables(read_compared_rows(before), read_compared_rows(after)) == whole
    assert {change.kind for change in whole} > {"NEW"} and len(whole) >= 6


def test_points_are_matched_by_key_and_the_most_slowed_come_first(latbench: Any, table: Any, at: Any) -> None:
    unchanged = [at(1e-3, m=m) for m in range(20, 30)]  # most points tell how runs differ
    before = table(
        "before",
        *unchanged, at(1e-3, m=2), at(1e-3, m=3), at(1e-3, 0.3, m=4), at(1e-3, m=5), at(1e-3, **CONV),
    )  # fmt: skip
    after = table(
        "after",
        at(1e-3, m=6), at(2e-3, **CONV), at(1.05e-3, 0.3, m=4), at(0.5e-3, m=3), at(1.2e-3, m=2), *unchanged,
    )  # fmt: skip
    ran = latbench("compare", before, after)
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()[1:7]] == [
        "SLOWER", "SLOWER", "UNCLEAR", "FASTER", "MISSING", "NEW",
    ]  # fmt: skip
    assert "conv 3×3, 8 → 16, 14×14, batch 1, vector:32 75%, numba" in ran.out.splitlines()[1]
    assert "not in the second table" in ran.out and "no time in the first table" in ran.out
    assert ran.out.splitlines()[-1] == (
        "2 SLOWER, 1 MISSING, 1 UNCLEAR, 1 FASTER, 10 SAME, 1 NEW; 10 points are not listed"
    )
    document = json.loads(latbench("compare", before, after, "--json").out)
    assert document["counts"] == {"SLOWER": 2, "MISSING": 1, "UNCLEAR": 1, "FASTER": 1, "SAME": 10, "NEW": 1}
    assert document["before"] == {"table": str(before), "hash": hash_table(before)}
    points = {(point["key"]["op"], point["key"]["m"]): point for point in document["points"]}
    assert points["linear", 2]["kind"] == "SLOWER" and points["linear", 2]["ratio"] == pytest.approx(1.2, rel=0.01)
    assert points["linear", 2]["low"] < points["linear", 2]["ratio"] < points["linear", 2]["high"]
    assert points["linear", 20]["key"]["batch"] is None and points["linear", 5]["ratio"] is None
    assert [point["ratio"] for point in document["points"][:14]] == sorted(
        (point["ratio"] for point in document["points"][:14]), reverse=True
    )


@pytest.mark.parametrize(
    ("fail_on", "code"),
    [("slower", 1), ("missing", 1), ("Slower, missing", 1), ("faster", 0), ("unclear,new", 0), ("same", 1)],
)
def test_it_fails_on_what_it_was_told_to(latbench: Any, table: Any, at: Any, fail_on: str, code: int) -> None:
    before = table("before", at(1e-3, m=1), at(1e-3, m=2), at(1e-3, m=3))
    after = table("after", at(1e-3, m=1), at(2e-3, m=2))
    ran = latbench("compare", before, after, "--fail-on", fail_on)
    assert ran.code == code
    if fail_on == "slower":
        assert ran.refused(1) == f"latbench: 1 SLOWER of 3 points: {after} fails --fail-on slower"


def test_a_point_that_fails_now_is_missing_and_says_why(latbench: Any, table: Any, at: Any) -> None:
    before = table("before", at(1e-3, m=1), at(1e-3, m=2))
    crash = {"status": "error", "samples_seconds": None, "error": "the worker died"}
    after = table("after", at(1e-3, m=1), at(1e-3, m=2) | crash)
    ran = latbench("compare", before, after, "--fail-on", "missing")
    ran.refused(1)
    assert "error: the worker died" in ran.out


def test_the_threshold_decides_what_is_no_change(latbench: Any, table: Any, at: Any) -> None:
    before, after = table("before", at(1e-3)), table("after", at(1.1e-3))
    assert "1 SLOWER" in latbench("compare", before, after).out
    assert "1 SAME" in latbench("compare", before, after, "--threshold", "0.2").out
    assert "positive share" in latbench("compare", before, after, "--threshold", "0").refused(2)


def test_unlike_devices_are_refused_unless_told(latbench: Any, table: Any, at: Any) -> None:
    before, after = table("before", at(2e-3)), table("after", at(1e-3, device="amd-epyc-9655"))
    refused = latbench("compare", before, after).refused(2)
    assert f"unlike devices: {before} is of amd-epyc-9b14; {after} is of amd-epyc-9655; --across-devices" in refused
    ran = latbench("compare", before, after, "--across-devices", "--fail-on", "slower,missing")
    assert ran.code == 0 and "1 FASTER" in ran.out
    both = table("both", at(1e-3), at(1e-3, device="amd-epyc-9655"))
    assert "several points that differ only in device" in latbench("compare", both, both, "--across-devices").refused(
        2
    )


@pytest.mark.parametrize(("column", "value"), [("cache_mode", "warm"), ("threads", 1), ("timer", "cuda_event")])
def test_unlike_modes_are_refused_unless_told(
    latbench: Any, table: Any, at: Any, column: str, value: str | int
) -> None:
    before, after = table("before", at(1e-3, timer="perf_counter")), table("after", at(1e-3, **{column: value}))
    if column == "timer":
        assert latbench("compare", before, before).code == 0
    refused = latbench("compare", before, after).refused(2)
    assert f"unlike modes: {column} is" in refused and f"{value} in {after}" in refused
    assert "1 SAME" in latbench("compare", before, after, "--across-modes").out


def test_a_point_timed_in_another_way_gets_no_verdict_unless_told(latbench: Any, table: Any, at: Any) -> None:
    """Where the tables as wholes have modes in common."""
    before = table("before", at(1e-3, m=1, pinning="none"), at(1e-3, m=2, pinning="cores"))
    after = table("after", at(1e-3, m=1, pinning="none"), at(2e-3, m=2, pinning="none"))
    document = json.loads(latbench("compare", before, after, "--json").out)
    assert document["counts"] == dict.fromkeys(KINDS, 0) | {"UNCLEAR": 1, "SAME": 1}
    assert document["points"][0]["reason"] == "timed in another way: pinning was cores, and is none"
    told = json.loads(latbench("compare", before, after, "--across-modes", "--json").out)
    assert told["counts"]["SLOWER"] == 1


def test_a_mode_that_both_tables_have_is_compared(latbench: Any, table: Any, at: Any) -> None:
    before = table("before", at(1e-3, threads=1), at(1e-3, threads=2))
    after = table("after", at(1e-3, threads=2))
    ran = latbench("compare", before, after)
    assert "1 MISSING, 1 SAME" in ran.out and "1 threads" in ran.out


def test_tables_without_a_common_point_are_no_praise(latbench: Any, table: Any, at: Any) -> None:
    before, after = table("before", at(1e-3, m=1)), table("after", at(1e-3, m=2))
    assert "no point with a time in common" in latbench("compare", before, after, "--fail-on", "slower").refused(5)


def test_a_damaged_or_missing_table_is_bad_data(latbench: Any, table: Any, at: Any, tmp_path: Path) -> None:
    before, after = table("before", at(1e-3)), table("after", at(1e-3))
    assert "no such table" in latbench("compare", before, tmp_path / "nowhere").refused(5)
    [part] = after.glob("part-*.parquet")
    part.write_bytes(part.read_bytes()[:-5])
    assert part.name in latbench("compare", before, after).refused(5)


def test_an_unknown_word_is_a_wrong_request(latbench: Any, table: Any, at: Any) -> None:
    before = table("before", at(1e-3))
    assert "--fail-on takes slower, missing" in latbench("compare", before, before, "--fail-on", "slow").refused(2)
    # A variable that is empty in a CI script must not pass for "fail on nothing".
    assert "--fail-on has an empty value" in latbench("compare", before, before, "--fail-on", "").refused(2)


def test_too_few_samples_are_unclear_whatever_they_say(latbench: Any, table: Any, at: Any) -> None:
    before, after = table("before", at(1e-3)), table("after", at(1e-3, samples_seconds=[1.0, 2.0]))
    assert "1 UNCLEAR" in latbench("compare", before, after, "--fail-on", "slower").out


def test_a_published_table_is_the_same_as_itself(latbench: Any, tmp_path: Path) -> None:
    """Its times have one sample each. Another time of a point, as in a corrected file, is no change for certain."""
    text = "base\n0.02\nprunable\n0.0158\nconv1\n0.0138 0.0\n0.0120 0.5\nconv2\n0.002 0.0\n"
    for name, content in (("one", text), ("other", text.replace("0.0120", "0.0121"))):
        (tmp_path / f"{name}.txt").write_text(content)
        told = "--network", "net", "-o", tmp_path / name
        assert latbench("import", "spdy", tmp_path / f"{name}.txt", *told).code == 0
    counts = json.loads(latbench("compare", tmp_path / "one", tmp_path / "one", "--json").out)["counts"]
    assert counts == dict.fromkeys(KINDS, 0) | {"SAME": 4}
    counts = json.loads(latbench("compare", tmp_path / "one", tmp_path / "other", "--json").out)["counts"]
    assert counts == dict.fromkeys(KINDS, 0) | {"SAME": 3, "UNCLEAR": 1}


@pytest.mark.parametrize("flag", ["preempted", "in_cache+slow_spell"])
def test_what_was_disturbed_in_every_try_is_no_measure_of_a_change(
    latbench: Any, table: Any, at: Any, flag: str
) -> None:
    before, after = table("before", at(1e-3)), table("after", at(2e-3, flags=flag))
    ran = latbench("compare", before, after, "--fail-on", "slower", "--json")
    [point] = json.loads(ran.out)["points"]
    assert (ran.code, point["kind"]) == (0, "UNCLEAR")
    assert point["reason"] == f"disturbed in every try: {flag.rpartition('+')[2]}"
    assert latbench("compare", before, table("other", at(2e-3, flags="in_cache")), "--fail-on", "slower").code == 1


def test_a_disturbed_table_is_the_same_as_itself(latbench: Any, table: Any, at: Any) -> None:
    own = table("own", at(1e-3, flags="preempted"))
    assert "1 SAME" in latbench("compare", own, own).out


def test_drift_is_corrected_only_if_asked(latbench: Any, table: Any, at: Any) -> None:
    before = table("before", at(1e-3, reference_seconds=1.0, reference_usual_seconds=1.0))
    after = table("after", at(1.3e-3, reference_seconds=1.3, reference_usual_seconds=1.0))
    assert "1 SLOWER" in latbench("compare", before, after).out
    document = json.loads(latbench("compare", before, after, "--correct-drift", "--json").out)
    assert document["counts"]["SAME"] == 1 and document["corrected_for_drift"]
    assert document["points"][0]["after"] == pytest.approx(1e-3, rel=0.01)
    # What is usual was measured anew since, in a slow hour: the same reference tells all the same.
    anew = table("anew", at(1e-3, reference_seconds=1.0, reference_usual_seconds=1.2))
    assert "1 SAME" in latbench("compare", before, anew, "--correct-drift").out
    unknown = table("unknown", at(1e-3))
    assert "has no reference_ratio" in latbench("compare", before, unknown, "--correct-drift").refused(5)


def test_how_unlike_two_runs_are_is_learned_from_all_points(latbench: Any, table: Any, at: Any) -> None:
    # Each point's own samples hardly scatter, but every ratio is another: a run's luck, not a change.
    ratios = [0.9, 0.94, 0.97, 1.0, 1.03, 1.07, 1.1]
    before = table("before", *(at(1e-3, m=m) for m in range(1, 8)))
    after = table("after", *(at(1e-3 * ratio, m=m) for m, ratio in enumerate(ratios, start=1)))
    ran = latbench("compare", before, after, "--fail-on", "slower,faster")
    assert ran.code == 0 and "UNCLEAR" in ran.out


def test_of_many_points_those_that_luck_moved_are_no_news(latbench: Any, table: Any, at: Any) -> None:
    rng = np.random.default_rng(11)
    ratios = [*np.exp(0.03 * rng.normal(size=200)), 1.6]
    before = table("before", *(at(1e-3, m=m) for m in range(1, 202)))
    after = table("after", *(at(1e-3 * ratio, m=m) for m, ratio in enumerate(ratios, start=1)))
    document = json.loads(latbench("compare", before, after, "--json").out)
    assert [
        (point["key"]["m"], point["kind"]) for point in document["points"] if point["kind"] in ("SLOWER", "FASTER")
    ] == [(201, "SLOWER")]
    assert sum(point["low"] > 1.02 or point["high"] < 1 / 1.02 for point in document["points"]) > 1
