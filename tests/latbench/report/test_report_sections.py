"""The report's sections against small cases that can be computed by hand."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import report_rows
import scipy.stats

from cost_models import AnchoredLookup, Boosted, Transfer
from cost_models.model_file import ModelFile
from latbench.errors import BadData
from latbench.report import figures, point_frames, report_data, report_inputs
from latbench.report.pages import common_sections, comparison, overview, speedup_map
from latbench.report.sections import accuracy, predictions, ranking, roofline_chart, trade_off
from search.artifacts.profile import LayerChoice, Profile
from search.inputs import problem_from_frame

row, frame = report_rows.row, report_rows.frame


def speedups(*rows: dict[str, Any]) -> pd.DataFrame:
    return point_frames.build_speedups(point_frames.build_points(frame(row("dense", 0.0, 8.0, "torch"), *rows)))


# The map -----------------------------------------------------------------------------------------------------------


def map_of(*rows: dict[str, Any]) -> dict[str, Any]:
    shown = report_data.build_report_data(inputs_of(row("dense", 0.0, 8.0, "torch"), *rows))
    return dict(speedup_map.build_slices(shown, shown.places))


def test_the_map_has_a_slice_a_pattern_and_one_a_sparsity() -> None:
    found = map_of(
        row("unstructured", 0.5, 16.0), row("unstructured", 0.75, 4.0), row("vector:2", 0.5, 4.0),
        row("vector:2", 0.75, 2.0), row("nm:2:4", 0.5, 9.0),
    )  # fmt: skip
    assert list(found) == [
        "the fastest pattern, by sparsity", "unstructured, by sparsity", "vector:2, by sparsity",
        "all patterns at 50%", "all patterns at 75%",
    ]  # fmt: skip
    heat, line = found["unstructured, by sparsity"]["data"]
    assert heat["text"] == [["0.50×", "2.00×"]]
    assert heat["z"] == [[-1.0, 1.0]]
    assert line["x"] == [0.5, 0.5]  # between the column that loses and the one that gains
    assert line["y"] == [-0.5, 0.5]
    assert line["text"][0].endswith("breaks even at 62.5%")  # halfway from log 1/2 to log 2
    assert found["the fastest pattern, by sparsity"]["data"][1]["x"] == [-0.5, -0.5]  # vector:2 pays from the lowest
    assert found["all patterns at 50%"]["layout"]["xaxis"]["ticktext"] == ["nm:2:4", "unstructured", "vector:2"]


def test_a_pattern_that_ends_early_does_not_pay_to_the_right_of_its_end() -> None:
    """2:4 has one sparsity: where nothing gains beyond it, nothing stays faster, though it gains itself."""
    rows = row("nm:2:4", 0.5, 4.0), row("vector:2", 0.5, 16.0), row("vector:2", 0.75, 9.0)
    line = map_of(*rows)["the fastest pattern, by sparsity"]["data"][1]
    assert line["x"] == [1.5, 1.5] and "not faster up to the highest" in line["text"][0]
    shown = report_data.build_report_data(inputs_of(row("dense", 0.0, 8.0, "torch"), *rows))
    page = overview.build_table_headline(shown, "cpu")
    assert {tile.label: tile.value for tile in page.tiles}["Pays from"] == "never"
    assert "use nm:2:4 at 1 of 1 layer shape" in page.lead  # at its sparsity, as the verdict says
    [verdict] = [
        cell.text for cell in overview.build_verdicts(shown.speedups, shown.break_evens, shown.places).rows[0][1:2]
    ]
    assert verdict.startswith("Use nm:2:4 at 50%")


def test_what_never_pays_has_its_line_at_the_right_edge() -> None:
    found = map_of(row("unstructured", 0.5, 16.0), row("unstructured", 0.75, 9.0))
    assert found["unstructured, by sparsity"]["data"][1]["x"] == [1.5, 1.5]


# How patterns are drawn ---------------------------------------------------------------------------------------------


def test_patterns_differ_without_colour() -> None:
    names = [
        "unstructured", "nm:1:4", "nm:2:4", *(f"vector:{v}" for v in (1, 2, 4, 8, 16, 32, 64)), "vectornm:16:2:4",
        "shflbw:32", "block:8x8",
    ]  # fmt: skip
    found = figures.assign_looks(names)
    assert len({(look.symbol, look.dash) for look in found.values()}) == len(names)
    assert len({found[name].symbol.split("-open")[0] for name in ("unstructured", "nm:1:4", "block:8x8")}) == 3
    assert len({found[name].hatch for name in names if found[name].colour == found["vector:16"].colour}) == 8
    assert found["vectornm:16:2:4"].colour == found["vector:16"].colour  # a vector pattern, run by the same kernels


def test_bars_of_two_patterns_of_one_format_differ() -> None:
    layers = pd.DataFrame({
        "name": ["a", "b"], "pattern": ["vector:16", "vector:32"], "sparsity": 0.5, "seconds": 1.0,
        "low": 1.0, "high": 1.0,
    })  # fmt: skip
    first, second = (trace["marker"] for trace in figures.draw_profile(layers)["data"])
    assert first["color"] == second["color"] and first["pattern"]["shape"] != second["pattern"]["shape"]


def test_a_short_axis_has_more_ticks_than_one() -> None:
    assert figures.build_log_ticks(0.9, 1.3, "×")["ticktext"].count("1.2×") == 1
    assert [tick for tick in figures.build_log_ticks(0.02, 5, "")["tickvals"] if 0.05 < tick < 0.5] == [0.1, 0.2]


def test_one_sparsity_is_no_beginning_and_a_gain_within_the_noise_is_marked() -> None:
    starts = point_frames.build_break_evens(
        speedups(row("nm:2:4", 0.5, 4.0), row("unstructured", 0.5, 9.0), row("unstructured", 0.7, 7.9))
    )
    cells = {start["pattern"]: common_sections._start_cell(start) for start in starts.to_dict("records")}
    assert cells["nm:2:4"].text == "at 50%"
    assert cells["nm:2:4"].tint > 0
    assert cells["unstructured"].text.startswith("≈ ")  # 1.01 times as fast, and intervals of 10% and 20%
    assert cells["unstructured"].tint == 0


def test_patterns_are_explained_by_name() -> None:
    said = overview.format_glossary(["nm:2:4", "vectornm:8:1:4", "block:32x16", "somebody's own"])
    assert "nm:2:4: 2 of 4 neighbours in a row are kept" in said
    assert "vectornm:8:1:4: 8 rows of a column at once, 1 of 4" in said
    assert "block:32x16: blocks of 32 rows and 16 columns" in said
    assert overview.format_glossary(["somebody's own"]) == ""


# Ranking -----------------------------------------------------------------------------------------------------------


def test_kernels_are_ranked_among_those_of_their_shape_and_sparsity() -> None:
    points = point_frames.build_points(frame(
        row("dense", 0.0, 8.0, "torch"), row("dense", 0.0, 6.0, "onnxruntime"), row("vector:2", 0.75, 2.0),
        row("unstructured", 0.75, 3.0), row("dense", 0.0, 1.0, "torch", m=9), row("vector:2", 0.75, 9.0, m=9),
    ))  # fmt: skip
    found = ranking.rank_kernels(points).set_index(["shape", "pattern", "engine"])
    assert found.loc[("linear 3 → 4, n=2", "dense", "torch"), ["rank", "behind"]].tolist() == [2, 8 / 6]
    assert found.loc[("linear 3 → 4, n=2", "unstructured", "numba"), ["rank", "behind"]].tolist() == [2, 1.5]
    assert found.loc[("linear 3 → 9, n=2", "vector:2", "numba"), "rank"] == 1
    overall = ranking.build_summary(ranking.rank_kernels(points)).set_index(["pattern", "engine"])
    assert overall.loc[("dense", "torch"), ["shapes", "first"]].tolist() == [2, 1]
    assert overall.loc[("dense", "torch"), "behind"] == pytest.approx((8 / 6 + 1) / 2)


# Roofline ----------------------------------------------------------------------------------------------------------


def test_a_point_is_set_beside_its_own_roof() -> None:
    known = {"flop_nnz": 40, "bytes_min": 10, "roofline_seconds": 2.0}
    rows = roofline_chart.build_frame(
        point_frames.build_points(frame(row("dense", 0.0, 8.0, **known), row("vector:2", 0.5, 1.0)))
    )
    [found] = rows.to_dict("records")  # the other's work is not known
    assert (found["flop_per_byte"], found["flop_per_second"], found["roof_flop_per_second"]) == (4.0, 5.0, 20.0)
    assert found["share"] == 0.25
    assert roofline_chart.build_section(rows.iloc[:0]) is None


def test_points_without_a_roof_are_drawn_without_one() -> None:
    rows = roofline_chart.build_frame(
        point_frames.build_points(frame(row("dense", 0.0, 8.0, flop_nnz=40, bytes_min=10)))
    )
    drawn = roofline_chart.build_section(rows)
    assert drawn
    assert "did not measure" in drawn.sentences[1]
    assert [trace["name"] for trace in (drawn.charts[0].figure or {})["data"]] == ["dense"]


# Predictions -------------------------------------------------------------------------------------------------------

SPARSITIES = np.array([0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95])


def swept(shapes: int, rng: np.random.Generator) -> pd.DataFrame:
    """Times that follow the density, with 1% noise and intervals of 4%."""
    rows = []
    for size, sparsity in itertools.product(range(1, shapes + 1), SPARSITIES):
        seconds = 1e-6 * size * (1.05 - sparsity) * math.exp(0.01 * rng.standard_normal())
        rows.append(row(
            "vector:2", float(sparsity), seconds, m=8 * size, low_seconds=0.98 * seconds, high_seconds=1.02 * seconds,
            dtype_a="float32", dtype_out="float32", epilogue="bias", context="isolated", cache_mode="rotated",
            launch_mode="call",
        ))  # fmt: skip
    return frame(*rows)


def test_a_lookup_predicts_sparsities_it_did_not_see(rng: np.random.Generator) -> None:
    found = predictions.build_frame(ModelFile(AnchoredLookup(), ""), swept(12, rng))
    assert len(found) == 12 * (len(SPARSITIES) - 6)  # six anchors of each curve stay
    assert set(found["held_out"]) == {predictions.SPARSITIES}
    # Noise of the point and of its two neighbours, 1% each, so 1.2% together: 6 sigma, and the curve is smooth.
    assert (found["ratio"] - 1).abs().max() < 0.08
    inside = (found["low"] <= found["measured"]) & (found["measured"] <= found["high"])
    assert found["inside"].tolist() == inside.tolist()
    assert predictions.format_coverage(found).startswith(
        "The chart shows 48 held-out points with their 90% intervals. "
    )


def test_a_learned_model_predicts_shapes_it_did_not_see(rng: np.random.Generator) -> None:
    table = swept(15, rng)
    found = predictions.build_frame(
        ModelFile(Boosted(max_iter=10, min_samples_leaf=2), "", {"backend": "numba"}), table
    )
    assert set(found["held_out"]) == {predictions.SHAPES}
    assert 0 < found["shape"].nunique() <= 3  # a fifth, less those at the ends, which it refuses
    assert found.groupby("shape").size().eq(len(SPARSITIES)).all()


def test_a_long_table_is_represented_by_whole_shapes(rng: np.random.Generator, monkeypatch: Any) -> None:
    monkeypatch.setattr(predictions, "ROWS", 50)
    found = predictions.build_frame(ModelFile(AnchoredLookup(), ""), swept(12, rng))
    assert found.groupby("shape").size().tolist() == [len(SPARSITIES) - 6] * 4  # as many as 50 rows hold, less one


def test_one_shape_alone_leaves_nothing_to_hold_out(rng: np.random.Generator) -> None:
    model = ModelFile(Boosted(), "", {"backend": "numba"}, {"by hand": {"median": 0.1}})
    assert predictions.build_frame(model, swept(1, rng)).empty
    page = common_sections.build_cost_model(model, None)  # figures of another way of judging lack most of ours
    assert "No point could be held out" in page.sentences[1]
    assert page.tables[0][1].rows[0][1].text == "10%" and page.tables[0][1].rows[1][1].text == "–"


def test_rows_of_no_known_shape_are_not_predicted(rng: np.random.Generator) -> None:
    """Imported times may tell a layer's name alone; the others are as they would be without."""
    table, model = swept(12, rng), ModelFile(AnchoredLookup(), "")
    named = table.iloc[:20].assign(m=math.nan, model="net:conv1", point_id=[f"named{i}" for i in range(20)])
    both = predictions.build_frame(model, pd.concat([table, named], ignore_index=True))
    pd.testing.assert_frame_equal(both, predictions.build_frame(model, table))


def test_a_transfer_predicts_shapes_of_its_own_device(rng: np.random.Generator, monkeypatch: Any) -> None:
    """And learns from every other device's, however few of its own there are."""
    ours, theirs = swept(30, rng).assign(device="mine"), swept(40, rng)
    ours["point_id"] = [f"mine{i}" for i in range(len(ours))]
    ours = ours[ours["m"] % 24 == 0]
    model = ModelFile(Transfer("mine", max_iter=10), "", {"backend": "numba"})
    found = predictions.build_frame(model, pd.concat([theirs, ours], ignore_index=True))
    assert len(found) and set(found["held_out"]) == {predictions.SHAPES}
    assert set(found["measured"]) <= set(ours["median_seconds"])
    monkeypatch.setattr(predictions, "ROWS", 90)  # of each: fewer rows than either has
    assert len(predictions.build_frame(model, pd.concat([theirs, ours], ignore_index=True)))


# Error at each speedup --------------------------------------------------------------------------------------------


def profile_of(layers: dict[str, LayerChoice], **given: Any) -> Profile:
    fixed: dict[str, Any] = {
        "task": "t", "layers": layers, "backend": "numba", "threads": 2, "batch": 1, "device": "cpu", "target": 2.0,
        "confidence": 0.9, "dense_engine": "torch", "dense_seconds": 20.0, "dense_seconds_low": 20.0,
        "dense_seconds_high": 20.0, "fixed_seconds": 1.0, "fixed_seconds_low": 1.0, "fixed_seconds_high": 1.0,
        "predicted_seconds": 10.0, "predicted_low": 9.0, "predicted_high": 11.0, "loss": 0.1, "error": 0.3,
        "bound": 0.3, "ceiling": 20.0, "additivity_before": 0.0, "additivity_after": 0.0, "strategy": "s", "seed": 0,
        "table_hash": "", "model_hash": "", "inputs": "",
    }  # fmt: skip
    return Profile(**fixed | given)


def test_the_frontier_is_that_of_all_mixtures_and_goes_through_the_prediction() -> None:
    options = [("dense", 0.0, 4.0, 0.0), ("vector:2", 0.5, 2.5, 0.1), ("vector:2", 0.75, 1.0, 0.3)]
    problem = problem_from_frame(
        pd.DataFrame(
            [(name, *option) for name in ("a", "b") for option in options],
            columns=["layer", "pattern", "sparsity", "seconds", "error"],
        ),
        dense_seconds=20.0, fixed_seconds=1.0,
    )  # fmt: skip
    # The search found layers to take 1.5 times what the table says.
    chosen = {
        "a": LayerChoice("vector:2", 0.75, 1.5, 1.5, 1.5, 0.3),
        "b": LayerChoice("dense", 0.0, 6.0, 6.0, 6.0, 0.0),
    }
    found = trade_off.build_frame(problem, profile_of(chosen))
    efficient = found[found["kind"] == "efficient"]
    sums = [
        (1 + 1.5 * (a[2] + b[2]), a[3] + b[3]) for a, b in itertools.product(options, options)
    ]  # fmt: skip
    best = [(t, e) for t, e in sums if not any((u <= t and f < e) or (u < t and f <= e) for u, f in sums)]
    pairs = sorted(zip(efficient["seconds"], efficient["error"], strict=True))
    assert np.array(pairs) == pytest.approx(np.array(sorted(set(best))))
    assert efficient["speedup"].tolist() == pytest.approx((20.0 / efficient["seconds"]).tolist())
    uniform = found[found["kind"] == "uniform"].set_index("name")
    assert uniform.loc["vector:2 at 0.5", ["seconds", "error"]].tolist() == pytest.approx([1 + 1.5 * 5.0, 0.2])


def test_each_precision_has_a_line_of_its_own_beside_all_mixtures() -> None:
    options = [
        ("dense", 0.0, "float32", 4.0, 0.0), ("vector:2", 0.75, "float32", 1.5, 0.3),
        ("dense", 0.0, "int8", 2.0, 0.01), ("vector:2", 0.75, "int8", 0.5, 0.35),
    ]  # fmt: skip
    columns = ["layer", "pattern", "sparsity", "precision", "seconds", "error"]
    frame = pd.DataFrame([(name, *option) for name in ("a", "b") for option in options], columns=columns)
    problem = problem_from_frame(frame, dense_seconds=20.0, fixed_seconds=1.0)
    chosen = {name: LayerChoice("dense", 0.0, 2.0, 2.0, 2.0, 0.01, "int8") for name in ("a", "b")}
    found = trade_off.build_frame(problem, profile_of(chosen))
    alone = found[found["kind"] == "alone"]
    assert list(dict.fromkeys(alone["name"])) == ["float32", "int8"]
    fastest = {name: own["seconds"].min() for name, own in alone.groupby("name")}
    assert fastest == {"float32": pytest.approx(4.0), "int8": pytest.approx(2.0)}
    assert (alone["error"] == 0.0).groupby(alone["name"]).any().all()  # layers may stay as they are
    verdict = SimpleNamespace(measured_seconds=5.0, measured_low=4.9, measured_high=5.1, over_int8=(3.0, 0.6))
    figure = trade_off.draw_figure(found, profile_of(chosen), verdict, 10.0)  # type: ignore[arg-type]
    assert [each["text"] for each in figure["layout"]["annotations"]] == ["target", "dense int8"]
    assert [trace["name"] for trace in figure["data"]][:3] == ["least error", "in float32 alone", "in int8 alone"]
    section = trade_off.build_section(found, profile_of(chosen), None)
    assert "and precisions; broken lines are of float32, int8 alone" in section.sentences[0]


# Accuracy ----------------------------------------------------------------------------------------------------------


def results(**columns: Any) -> pd.DataFrame:
    base = {"pattern": "vector:2", "method": "gmp", "speedup": 2.0, "accuracy": 0.9, "seed": 0, "sparsity": 0.5}
    length = max((len(values) for values in columns.values()), default=1)
    return pd.DataFrame({**{name: [value] * length for name, value in base.items()}, **columns})


def test_seeds_are_one_point_with_students_interval() -> None:
    values = [0.90, 0.91, 0.95]
    [point] = accuracy.build_frame(results(accuracy=values, speedup=[2.0, 2.1, 2.4], seed=[0, 1, 2])).to_dict(
        "records"
    )
    low, high = scipy.stats.t.interval(0.95, 2, loc=np.mean(values), scale=scipy.stats.sem(values))
    assert (point["low"], point["high"]) == pytest.approx((low, high))
    assert (point["seeds"], point["speedup"], point["speedup_low"], point["speedup_high"]) == (3, 2.1, 2.0, 2.4)


def test_one_seed_has_no_interval_and_unlike_speedups_without_sparsity_are_points_apart() -> None:
    points = accuracy.build_frame(results(speedup=[2.0, 3.0]).drop(columns="sparsity"))
    assert points["seeds"].tolist() == [1, 1]
    assert points["low"].isna().all()
    assert points["sparsity"].isna().all()


def test_the_fastest_that_keeps_the_accuracy_is_named() -> None:
    points = accuracy.build_frame(results(
        pattern=["dense", "vector:2", "vector:2", "unstructured"], speedup=[1.0, 2.0, 3.0, 1.5],
        accuracy=[0.92, 0.915, 0.90, 0.92], sparsity=[0.0, 0.5, 0.9, 0.5],
    ))  # fmt: skip
    assert (
        "The fastest point that loses at most one percentage point on average is vector:2 with gmp: 2.00× at 91.50%, "
        "92.00% dense." in accuracy.build_section(points).sentences
    )


def test_profiles_are_paired_with_the_uniform_one_of_the_same_target_and_seed() -> None:
    """Seeds differ by more than profiles do: only pairs show the difference."""
    uniform, searched = [0.80, 0.85, 0.90], [0.82, 0.86, 0.92]
    frame = results(
        pattern=[*["uniform"] * 3, *["searched"] * 4], accuracy=[*uniform, *searched, 0.5],
        seed=[0, 1, 2, 0, 1, 2, 7], speedup=[2.0] * 3 + [2.0, 2.04, 2.0, 2.0], target=[2.0] * 7,
    ).drop(columns="sparsity")  # fmt: skip
    [pair] = accuracy.build_pairs(frame).to_dict("records")
    differences = np.subtract(searched, uniform)
    low, high = scipy.stats.t.interval(0.95, 2, loc=differences.mean(), scale=scipy.stats.sem(differences))
    assert (pair["pattern"], pair["pairs"]) == ("searched", 3)  # nothing is paired with seed 7
    assert (pair["difference"], pair["low"], pair["high"]) == pytest.approx((differences.mean(), low, high))
    assert (pair["time_low"], pair["time_high"]) == pytest.approx((2 / 2.04, 1.0))
    points = accuracy.build_frame(frame)
    assert points["seeds"].tolist() == [4, 3]  # of one target, although speedups differ
    found = accuracy.build_section(points, accuracy.build_pairs(frame))
    [table] = [content for title, content in found.tables if title.startswith("Against the uniform")]
    assert [cell.text for cell in table.rows[0]][2:4] == [
        "searched",
        f"+1.67 ({100 * low:+.2f} to {100 * high:+.2f})",
    ]
    assert accuracy.build_pairs(frame.drop(columns="target")).empty
    assert len(accuracy.build_section(points, accuracy.build_pairs(frame[frame["pattern"] == "uniform"])).tables) == 1


def test_methods_and_patterns_can_each_be_set_side_by_side() -> None:
    points = accuracy.build_frame(results(
        pattern=["dense", *["vector:2"] * 3, "unstructured"], method=["gmp", "gmp", "gmp", "acdc", "gmp"],
        speedup=[1.0, 2.0, 3.0, 4.0, 1.5], accuracy=[0.92, 0.915, 0.80, 0.75, 0.925],
        sparsity=[0.0, 0.5, 0.9, 0.5, 0.5],
    ))  # fmt: skip
    found = accuracy.build_section(points)
    assert [name for name, _ in found.charts[0].choices] == [
        "acdc, every pattern", "gmp, every pattern", "unstructured, every method", "vector:2, every method",
    ]  # fmt: skip
    lines = [trace["name"] for trace in found.charts[0].choices[3][1]["accuracy"]["data"]]
    assert lines == ["acdc", "gmp", "dense"]
    kept, every = (content for _, content in found.tables)
    assert [column.title for column in kept.columns] == ["pattern", "acdc", "gmp"]
    assert [[cell.text for cell in row] for row in kept.rows] == [
        ["unstructured", "–", "1.50×"], ["vector:2", "none", "2.00×"]
    ]  # fmt: skip
    against = [column.title for column in every.columns].index("against dense, percentage points")
    assert {row[0].text + row[3].text: row[against].text for row in every.rows}["vector:23.00×"] == "-12.00"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("pattern,method\na,b\n", "no column speedup, accuracy, seed"),
        ("pattern,method,speedup,accuracy,seed\n", "holds no result"),
        (
            "pattern,method,speedup,accuracy,seed\nvector:2,gmp,fast,0.9,0\n",
            "speedup, accuracy are numbers, such as 0.75",
        ),
        ("pattern,method,speedup,accuracy,seed,sparsity\nvector:2,gmp,2,0.9,0,50%\n", "sparsity are numbers"),
        ("pattern,method,speedup,accuracy,seed,sparsity\nvector:2,gmp,2,0.9,0,75\n", "a share from 0 to 1, .*not 75"),
        ("pattern,method,speedup,accuracy,seed\nvector:2,gmp,-1,0.9,0\n", "speedups above 0"),
        (None, "does not exist"),
    ],
)
def test_results_that_are_none_are_refused(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "results.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadData, match=expected):
        accuracy.read_results(path)


# The first page ----------------------------------------------------------------------------------------------------


def inputs_of(*rows: dict[str, Any]) -> report_inputs.ReportInputs:
    return report_inputs.ReportInputs(table=frame(*rows), table_hash="", environments=[])


def test_the_first_page_counts_what_to_use_as_the_verdicts_do() -> None:
    shown = report_data.build_report_data(inputs_of(
        row("dense", 0.0, 8.0, "torch"), row("vector:2", 0.5, 4.0), row("vector:2", 0.75, 2.0),
        row("unstructured", 0.75, 4.0),
        row("dense", 0.0, 8.0, "torch", m=5), row("vector:2", 0.75, 9.0, m=5),
        row("dense", 0.0, 8.0, "torch", m=6), row("unstructured", 0.75, 2.0, m=6),
    ))  # fmt: skip
    assert overview.count_favourites(shown) == {"vector:2": 1, "dense": 1, "unstructured": 1}
    page = overview.build_table_headline(shown, "cpu")
    assert page.title == "At 75% sparsity, layers run 4.00× as fast as dense (0.889× to 4.00×)"
    assert "and stay dense at 1 (the table below gives the sparsities)" in page.lead
    assert "At 75%, 2 of 3 shapes gain, 2 of them with certainty" in page.lead


def test_the_first_page_says_when_nothing_pays() -> None:
    shown = report_data.build_report_data(inputs_of(row("dense", 0.0, 8.0, "torch"), row("vector:2", 0.75, 9.0)))
    page = overview.build_table_headline(shown, "cpu")
    assert page.title == "At 75% sparsity, layers run 0.889× as fast as dense"
    assert "stay dense, because no pattern stays faster up to the highest sparsity" in page.lead


def test_the_first_page_says_where_one_dense_engine_alone_was_timed() -> None:
    shown = report_data.build_report_data(inputs_of(
        row("dense", 0.0, 8.0, "torch"), row("dense", 0.0, 9.0, "openvino"), row("vector:2", 0.75, 4.0),
        row("dense", 0.0, 8.0, m=5), row("vector:2", 0.75, 4.0, m=5),
    ))  # fmt: skip
    said = "At 1 of 2 shapes numba is the only dense engine that was timed; others may be faster."
    assert said in overview.build_table_headline(shown, "cpu").lead


def test_a_table_whose_times_are_none_is_refused() -> None:
    for wrong in ({"low_seconds": 0.0}, {"high_seconds": math.inf}, {"roofline_seconds": 0.0}):
        with pytest.raises(BadData, match="1 rows contain invalid times, such as vector:2 at linear 3 → 4"):
            report_data.build_report_data(
                inputs_of(row("dense", 0.0, 8.0, "torch"), row("vector:2", 0.75, 9.0, **wrong))
            )


def test_how_slow_the_machine_was_is_said() -> None:
    rows = [row("dense", 0.0, 8.0, "torch", reference_ratio=1.0, flags="in_cache"),
            row("vector:2", 0.75, 4.0, reference_ratio=1.3, flags="in_cache+spike")]  # fmt: skip
    given = inputs_of(*rows)
    [said] = [
        line
        for line in common_sections.build_noise(given, report_data.build_report_data(given)).sentences
        if "Fixed work" in line
    ]
    assert "took 1.15× as long as usual at the median point, and 1.30× at most. Beside 1 of 2" in said
    assert point_frames.count_flags(given.table) == {"in_cache": 2, "spike": 1}
    assert common_sections.build_environment(given).tables[0][1].rows[-2][0].text == "points that carry a flag"


# Two tables --------------------------------------------------------------------------------------------------------


def two(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> tuple[comparison.Side, comparison.Side]:
    source = (
        report_inputs.SourceFile("table", Path("first"), ""),
        report_inputs.SourceFile("table", Path("second"), ""),
    )
    made = [
        report_inputs.ReportInputs(frame(*rows), "", [], sources=(one,))
        for rows, one in zip((first, second), source, strict=True)
    ]
    return comparison.build_sides(made[0], made[1])


def test_two_devices_are_compared_by_the_fastest_kernel_of_each() -> None:
    first, second = two(
        [row("dense", 0.0, 4.0, "torch"), row("dense", 0.0, 2.0, "onnxruntime"), row("vector:2", 0.75, 1.0)],
        [row("dense", 0.0, 6.0, "cublas", device="gpu", threads=None), row("vector:2", 0.5, 1.0, device="gpu")],
    )
    assert (first.name, second.name) == ("cpu", "gpu")
    [pair] = comparison.build_pairs(first, second).to_dict("records")
    assert (pair["pattern"], pair["ratio"]) == ("dense", 3.0)
    assert (pair["first_engine"], pair["second_engine"]) == ("onnxruntime", "cublas")
    assert (pair["low"], pair["high"]) == pytest.approx((0.9 * 6 / (1.2 * 2), 1.2 * 6 / (0.9 * 2)))


def test_the_title_tells_dense_and_sparse_apart() -> None:
    sides = two(
        [row("dense", 0.0, 4.0, "torch"), row("vector:2", 0.75, 1.0)],
        [row("dense", 0.0, 2.0, "cublas", device="gpu"), row("vector:2", 0.75, 3.0, device="gpu")],
    )
    page = comparison.build_page(*sides, None, [])
    assert page["headline"].title == "gpu is 2.00× as fast as cpu, dense; cpu is 3.00× as fast, sparse"
    assert "Sparse, cpu is faster at 1 of 1 points, gpu at 0." in page["headline"].lead


def test_the_fastest_pattern_of_either_device_may_be_another() -> None:
    first, second = two(
        [row("dense", 0.0, 4.0), row("vector:2", 0.75, 1.0), row("unstructured", 0.75, 2.0)],
        [row("dense", 0.0, 4.0, device="gpu"), row("vector:2", 0.75, 9.0, device="gpu"),
         row("unstructured", 0.75, 3.0, device="gpu")],
    )  # fmt: skip
    [found] = comparison.select_best(comparison.build_pairs(first, second), 0.75).to_dict("records")
    assert (found["pattern"], found["second_pattern"], found["ratio"]) == ("vector:2", "unstructured", 3.0)
    assert (found["low"], found["high"]) == pytest.approx((0.9 * 3 / 1.2, 1.2 * 3 / 0.9))


def test_break_evens_of_two_devices_are_set_side_by_side() -> None:
    def device(name: str, *gains: tuple[int, float, float]) -> list[dict[str, Any]]:
        dense = [row("dense", 0.0, 4.0, m=m, device=name) for m in (4, 5, 6)]
        return dense + [row("vector:2", sparsity, 4.0 / gain, m=m, device=name) for m, sparsity, gain in gains]

    first, second = two(
        device("cpu", (4, 0.5, 2.0), (4, 0.9, 4.0), (5, 0.5, 0.5), (5, 0.9, 2.0), (6, 0.5, 0.5), (6, 0.9, 0.7)),
        device("gpu", (4, 0.5, 2.0), (4, 0.9, 4.0), (5, 0.5, 2.0), (5, 0.9, 2.0), (6, 0.5, 0.5), (6, 0.9, 2.0)),
    )
    found = comparison.build_starts(first, second).set_index("shape")
    ends = {shape.split(" → ")[1][0]: (one, other) for shape, one, other in found[["first", "second"]].itertuples()}
    assert ends == {"4": (0.5, 0.5), "5": (pytest.approx(0.7), 0.5), "6": (math.inf, pytest.approx(0.7))}
    [said] = [
        text for text in comparison.build_page(first, second, None, [])["sections"][0].sentences if "earlier" in text
    ]
    assert said.startswith("Sparsity pays earlier on cpu at 0 of 3 shapes and on gpu at 2. ")


def test_a_start_is_rounded_up_and_levels_are_those_that_were_measured() -> None:
    """Just below a break-even dense is faster: 66.1% is told as 67%. Where nothing was timed at 75%, 80% stands."""

    def device(name: str) -> list[dict[str, Any]]:
        rows = [row("dense", 0.0, 4.0, device=name), row("vector:2", 0.8, 2.0, device=name)]
        return [*rows, row("vector:2", 0.5, 8.9, device=name)]

    first, second = two(device("cpu"), device("gpu"))
    assert comparison._start(first) == comparison._pattern_start(first, "vector:2").text == "67%"  # 66.1%
    page = comparison.build_page(first, second, None, [])
    [shapes] = [part for part in page["sections"] if part.anchor == "pays"]
    assert "the ratio at 80% is that of the fastest" in shapes.sentences[0]
    assert shapes.tables[0][1].rows[0][4].text == "≈ 1.00×"


def test_points_without_an_interval_do_not_hide_what_the_others_show() -> None:
    unknown = {"low_seconds": None, "high_seconds": None}
    ours = [row("dense", 0.0, 1.0, m=m, device="cpu") for m in (4, 5, 6)]
    theirs = [row("dense", 0.0, 3.0, m=m, device="gpu") for m in (4, 5, 6)]
    for lacking, said in (
        (1, "Dense, cpu is faster at 2 of 3 shapes, gpu at 0; the noise of 1 is unknown."),
        (
            3,
            "Dense, cpu is faster at 3 of 3 shapes, gpu at 0; the certainty is unknown, because the noise of no",
        ),
    ):
        page = comparison.build_page(
            *two([one | unknown for one in ours[:lacking]] + ours[lacking:], theirs), None, []
        )
        assert page["headline"].title == "cpu is 3.00× as fast as gpu, dense"
        assert said in page["headline"].lead


def test_one_device_measured_twice_keeps_its_thread_counts_apart() -> None:
    first, second = two(
        [row("dense", 0.0, 4.0, "torch", threads=1), row("dense", 0.0, 2.0, "torch", threads=2)],
        [row("dense", 0.0, 4.0, "torch", threads=1)],
    )
    assert (first.name, second.name) == ("first", "second")
    assert comparison.build_pairs(first, second)["ratio"].tolist() == [1.0]


def test_times_of_other_threads_are_no_baseline_on_either_device() -> None:
    ours = [row("dense", 0.0, 6.0, "torch", threads=1), row("dense", 0.0, 4.0, "torch", threads=2),
            row("vector:2", 0.75, 3.0, threads=1)]  # fmt: skip
    first, _ = two(ours, [row("dense", 0.0, 4.0, device="gpu")])
    assert first.speedups["speedup"].tolist() == [2.0]
    with pytest.raises(BadData, match="one side is of several devices, cpu, other: compare tables of one device"):
        two([*ours, row("dense", 0.0, 6.0, device="other")], [row("dense", 0.0, 4.0, device="gpu")])


def test_nobody_wins_within_the_noise_and_the_order_does_not_matter() -> None:
    def device(name: str, *times: float) -> list[dict[str, Any]]:
        return [row("dense", 0.0, time, m=m, device=name) for m, time in enumerate(times, start=4)]

    close = comparison.build_page(*two(device("cpu", 2.0), device("gpu", 2.001)), None, [])
    assert close["headline"].title == "cpu and gpu are about equally fast, dense"
    far = device("cpu", 1.0, 4.5), device("gpu", 4.5, 1.0)
    for sides in (far, far[::-1]):
        assert "about equally fast" in comparison.build_page(*two(*sides), None, [])["headline"].title


def test_tables_of_dense_times_alone_are_compared() -> None:
    page = comparison.build_page(*two([row("dense", 0.0, 4.0)], [row("dense", 0.0, 8.0, device="gpu")]), None, [])
    assert page["headline"].title == "cpu is 2.00× as fast as gpu, dense"
    assert [caption for caption, _ in page["sections"][0].tables] == [
        "Dense times, and the pattern that is fastest most often"
    ]


def test_tables_with_nothing_in_common_are_refused() -> None:
    with pytest.raises(BadData, match="nothing can be compared"):
        comparison.build_pairs(*two([row("dense", 0.0, 4.0)], [row("dense", 0.0, 4.0, m=9)]))


def test_a_pruned_model_that_was_saved_without_stages_has_its_weights_alone() -> None:
    """As a user's own training saves it."""
    layer = {"weights": 200, "kept_weights": 50, "packed_bytes": 240}
    found = common_sections.build_pruned({"layers": {"fc": layer}})
    assert found.sentences == [
        "50 of 200 weights are kept in 1 layers (75% pruned); packed they take 240 bytes, dense 800 bytes."
    ]
    assert not found.tables


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.97, 1.04, ["-3%", "-2%", "-1%", "exact", "+1%", "+2%", "+3%", "+4%"]),
        (0.55, 1.95, ["-40%", "-20%", "exact", "+20%", "+40%", "+60%", "+80%"]),
        (0.3, 2.5, ["0.5×", "exact", "2×"]),
        (0.7, 60.0, ["exact", "2×", "5×", "10×", "20×", "50×"]),
    ],
)
def test_an_axis_of_errors_has_ticks_on_both_sides(low: float, high: float, texts: list[str]) -> None:
    ticks = predictions._ratio_ticks(low, high)
    assert ticks["ticktext"] == texts and len(ticks["tickvals"]) == len(texts)
    assert all(low <= value <= high for value in ticks["tickvals"])


def test_a_legend_shows_a_point_whose_interval_holds_where_there_is_one(rng: np.random.Generator) -> None:
    found = predictions.build_frame(ModelFile(AnchoredLookup(), ""), swept(12, rng))
    inside = np.ones(len(found), bool)
    inside[:3] = False
    for trace in predictions.draw_figure(found.assign(inside=inside))["data"]:
        assert trace["marker"]["symbol"][0] != "x"
    assert (
        sum(
            trace["marker"]["symbol"].count("x")
            for trace in predictions.draw_figure(found.assign(inside=inside))["data"]
        )
        == 3
    )
