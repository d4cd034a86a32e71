"""Problems from frames, tables and timing files, and answers as frames, plots and profiles."""

import itertools
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import cost_models
import search
from cost_models import AnchoredLookup
from latbench import cli, interchange, tables, workloads
from latbench.errors import BadData, UsageError
from latbench.interchange import read_spdy, read_spdy_profile
from latbench.plan import FINE_SPARSITIES, Point
from search import frames
from search.layers import DENSE, Interval, Option
from search.problem import Problem
from search.solve import Infeasible, sum_in_order
from sparse_kernels.patterns import parse
from sparse_kernels.shapes import LinearShape


def frame(rng: np.random.Generator, layers: int = 3) -> pd.DataFrame:
    options = [(DENSE, 0.0), ("vector:8", 0.5), ("vector:8", 0.9), ("nm:2:4", 0.5)]
    rows = [
        (f"fc{i}", pattern, sparsity, (1 - sparsity) * rng.uniform(0.8, 1.2), sparsity**2 * rng.random())
        for i in range(layers)
        for pattern, sparsity in options
    ]
    return pd.DataFrame(rows, columns=["layer", "pattern", "sparsity", "seconds", "error"])


def best(problem: Problem, target: float) -> float:
    """The least error that keeps the promise, by trying all profiles."""
    every = itertools.product(*(range(len(layer.options)) for layer in problem.layers))
    fitting = [choice for choice in every if problem.speedup(problem.predict(choice)).low >= target]
    return min(sum_in_order(e[j] for e, j in zip(problem.errors, c, strict=True)) for c in fitting)


def test_a_frame_is_a_problem(rng: np.random.Generator) -> None:
    given = frame(rng)
    p = Problem.from_frame(given)
    dense = given.loc[given["pattern"] == DENSE, "seconds"].sum()
    assert (p.fixed, p.dense.value) == (Interval(0, 0, 0), pytest.approx(dense))
    solution = p.solve(2.0)
    assert solution.error == solution.bound == best(p, 2.0)
    assert solution.speedup.low >= 2.0


def test_what_else_takes_time_may_be_said(rng: np.random.Generator) -> None:
    given = frame(rng)
    dense = given.loc[given["pattern"] == DENSE, "seconds"].sum()
    assert Problem.from_frame(given, dense_seconds=5.0).fixed.value == pytest.approx(5.0 - dense)
    assert Problem.from_frame(given, fixed_seconds=0.5).dense.value == pytest.approx(0.5 + dense)
    both = Problem.from_frame(given, dense_seconds=Interval(5.0, 4.0, 6.0), fixed_seconds=0.5)
    assert (both.dense, both.fixed.high) == (Interval(5.0, 4.0, 6.0), 0.5)
    sparse = given[given["pattern"] != DENSE]
    with pytest.raises(UsageError, match="layer fc0 has no dense time: give dense_seconds and fixed_seconds"):
        Problem.from_frame(sparse)
    assert len(Problem.from_frame(sparse, dense_seconds=5.0, fixed_seconds=0.0).layers) == 3


def test_a_problem_survives_a_frame_to_the_last_bit(rng: np.random.Generator, tmp_path: Path) -> None:
    given = frame(rng).assign(
        low_seconds=lambda it: it["seconds"] * 0.9, high_seconds=lambda it: it["seconds"] * 1.1,
        tied=np.repeat(["", "both", "both"], 4),
    )  # fmt: skip
    p = Problem.from_frame(given, fixed_seconds=Interval(0.3, 0.2, 0.4))
    assert [len(layer.parts) for layer in p.layers] == [1, 2]
    p.to_frame().to_csv(tmp_path / "options.csv", index=False)
    again = Problem.from_frame(pd.read_csv(tmp_path / "options.csv"), dense_seconds=p.dense, fixed_seconds=p.fixed)
    for target in (1.1, 1.7, 3.0):
        assert again.solve(target) == p.solve(target)
        assert again.solve(target).predicted == p.solve(target).predicted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda it: it.drop(columns="seconds"), "the frame has no column seconds"),
        (lambda it: it.head(0), "the frame has no row"),
        (lambda it: pd.concat([it, it]), "layer fc0 has .* twice"),
        (lambda it: it.assign(seconds=-1.0), "layer fc0 takes -1 s .* as dense: seconds must be finite"),
        (lambda it: it.assign(seconds=np.nan), "layer fc0 takes nan s"),
        (lambda it: it.assign(low_seconds=9.0), "within their interval"),
        (lambda it: it.assign(pattern="rows:8"), "layer fc0: .*rows:8"),
        (lambda it: it.assign(sparsity=0.25), "layer fc0: dense has a sparsity of 0 and no other"),
        (lambda it: it.assign(sparsity="much"), "layer fc0: .*much"),
    ],
)
def test_a_frame_that_is_no_problem_is_refused_by_name(change: Any, said: str, rng: np.random.Generator) -> None:
    with pytest.raises(BadData, match=said):
        Problem.from_frame(change(frame(rng)))


def test_the_frontier_holds_every_speedup_that_pays(rng: np.random.Generator) -> None:
    p = Problem.from_frame(frame(rng).assign(high_seconds=lambda it: it["seconds"] * 1.1), fixed_seconds=0.1)
    every = p.frontier()
    choices = itertools.product(*(range(len(layer.options)) for layer in p.layers))
    pairs = [
        (p.speedup(p.predict(c)).low, sum_in_order(e[j] for e, j in zip(p.errors, c, strict=True))) for c in choices
    ]
    efficient = sorted(
        {(s, e) for s, e in pairs if not any(a >= s and b <= e and (a, b) != (s, e) for a, b in pairs)}, reverse=True
    )
    assert list(zip(every.speedups, every.errors, strict=True)) == efficient
    assert len(every) == len(every.to_frame()) == len(efficient)
    for i in range(len(every)):
        assert (every.profile(i).speedup.low, every.profile(i).error) == efficient[i]
    assert every.at(efficient[1][0]).error == efficient[1][1]
    with pytest.raises(Infeasible, match="the best is"):
        every.at(100.0)


def test_a_profile_is_a_frame_of_layers_and_a_text(rng: np.random.Generator, tmp_path: Path) -> None:
    p = Problem.from_frame(frame(rng))
    solution = p.solve(2.0)
    rows = solution.to_frame()
    assert rows["layer"].tolist() == ["fc0", "fc1", "fc2"]
    assert rows["error"].sum() == pytest.approx(solution.error)
    assert rows["seconds"].sum() == pytest.approx(solution.predicted.value)
    solution.save_spdy(tmp_path / "profile.txt")
    read = read_spdy_profile(tmp_path / "profile.txt")
    assert read == {name: option.sparsity for name, option in solution.options.items()}
    unambiguous = replace(p, layers=tuple(layer.take([0, 1, 2]) for layer in p.layers))
    solution = unambiguous.solve(2.0)
    solution.save_spdy(tmp_path / "profile.txt")
    assert unambiguous.selection(read_spdy_profile(tmp_path / "profile.txt")).choice == solution.choice
    assert p.selection({"fc1": Option("nm:2:4", 0.5)}).choice == (0, 3, 0)
    for profile, said in (
        ({"fc9": 0.5}, "the profile names layer fc9, and the problem has fc0, fc1, fc2"),
        ({"fc0": 0.5}, "layer fc0 has several options of a sparsity of 0.5: say which pattern"),
        ({"fc0": 0.7}, "layer fc0 cannot be had with a sparsity of 0.7: it has dense, "),
    ):
        with pytest.raises(UsageError, match=said):
            p.selection(profile)


def test_tied_layers_need_one_option_in_a_profile(rng: np.random.Generator) -> None:
    p = Problem.from_frame(frame(rng).assign(tied="all"))
    option = Option("vector:8", 0.9)
    assert p.selection(dict.fromkeys(("fc0", "fc1", "fc2"), option)).choice == (2,)
    with pytest.raises(UsageError, match="fc0, fc1, fc2 are tied: they have one option"):
        p.selection({"fc0": option})


@pytest.mark.parametrize("name", ["rn18_unstr", "rn50_unstr", "yolov5s_unstr"])
def test_published_timing_files_are_problems(name: str, data: Path) -> None:
    path = data / "spdy_tables" / f"{name}.txt"
    timings, p = read_spdy(path), Problem.from_spdy(path)
    assert (p.dense.value, p.fixed.value) == (timings.base, timings.base - timings.prunable)
    assert p.errors_known and p.errors[0][0] == 0.0 and max(map(max, p.errors)) == 1.0
    fastest = sum(min(seconds for seconds, _ in points) for points in timings.layers.values())
    ceiling = timings.base / (timings.base - timings.prunable + fastest)
    solution = p.solve(0.99 * ceiling)
    assert solution.bound == solution.error
    seconds = dict.fromkeys(timings.layers, 0.0)
    for layer, option in solution.options.items():
        seconds[layer] = np.median([t for t, sparsity in timings.layers[layer] if sparsity == option.sparsity])
    assert timings.base / (timings.base - timings.prunable + sum(seconds.values())) >= 0.99 * ceiling * (1 - 1e-12)
    with pytest.raises(Infeasible, match=r"the best is .*x; .*of the time is in layers that cannot be pruned"):
        p.solve(1.02 * ceiling)


def test_a_problem_is_a_timing_file_again(rng: np.random.Generator, tmp_path: Path) -> None:
    p = Problem.from_frame(frame(rng), fixed_seconds=0.5)
    with pytest.raises(UsageError, match="layer fc0 has options that differ by their pattern only"):
        p.save_spdy(tmp_path / "t.txt")
    p = replace(p, layers=tuple(layer.take([0, 1, 2]) for layer in p.layers)).with_prior()
    p.save_spdy(tmp_path / "t.txt")
    again = Problem.from_spdy(tmp_path / "t.txt", pattern="vector:8")
    assert again.solve(2.0).options == p.solve(2.0).options
    assert again.fixed.value == pytest.approx(0.5)


@pytest.mark.parametrize("target", [1.5, 2.0, 3.0])
def test_the_time_of_excluded_layers_is_counted_which_the_published_release_forgot(target: float, data: Path) -> None:
    """There a profile for 3x without the first and the last layer really gave 2.2x (their time was in `prunable`)."""
    path = data / "spdy_tables" / "rn18_unstr.txt"
    timings = read_spdy(path)
    solution = Problem.from_spdy(path).limited(excluded=["conv1", "fc"]).solve(target)
    assert not {"conv1", "fc"} & set(solution.options)
    seconds = timings.base - timings.prunable
    for layer, points in timings.layers.items():
        sparsity = solution.options[layer].sparsity if layer in solution.options else 0.0
        seconds += np.median([t for t, level in points if level == sparsity])
    assert target * (1 - 1e-12) <= timings.base / seconds < 1.02 * target


# Tables that latbench measured -------------------------------------------------------------------------------------

A, B = LinearShape(m=32, k=16, n=7), LinearShape(m=64, k=32, n=7)


def swept(*entries: tuple[LinearShape, str, float, float, dict[str, Any]]) -> pd.DataFrame:
    rows = []
    for shape, pattern, sparsity, seconds, changes in entries:
        point = Point("cpu", changes.pop("backend", "numba"), "auto", shape, parse(pattern), sparsity, threads=2)
        rows.append({
            **point.key(), "point_id": point.id, "status": "ok", "started_at": datetime.now(UTC),
            "median_seconds": seconds, "low_seconds": seconds * 0.9, "high_seconds": seconds * 1.1, **changes,
        })  # fmt: skip
    return pd.DataFrame(rows, columns=tables.SCHEMA.names)


def a_table() -> pd.DataFrame:
    return swept(
        (A, "dense", 0.0, 4.0, {}), (A, "vector:8", 0.5, 2.5, {}), (A, "vector:8", 0.75, 1.5, {}),
        (A, "nm:2:4", 0.5, 3.0, {}),
        (B, "dense", 0.0, 8.0, {}), (B, "vector:8", 0.5, 5.0, {}), (B, "vector:8", 0.75, 3.0, {}),
        (A, "dense", 0.0, 3.0, {"backend": "torch"}), (B, "dense", 0.0, 6.0, {"backend": "torch"}),
        (A, "dense", 0.0, 1.0, {"backend": "onnxruntime"}),
    )  # fmt: skip


def test_a_swept_table_gives_layers_by_their_shapes() -> None:
    p = Problem.from_table(a_table(), {"a": A, "b": B, "c": A})
    assert [layer.name for layer in p.layers] == ["a", "b", "c"]
    assert p.layers[0].seconds.tolist() == p.layers[2].seconds.tolist() == [4.0, 3.0, 2.5, 1.5]
    assert p.layers[1].high.tolist() == pytest.approx([8.8, 5.5, 3.3])
    # The fastest engine with a time of every layer: 3 + 6 + 3.
    assert (p.dense, p.dense_engine) == (Interval(12.0, pytest.approx(10.8), pytest.approx(13.2)), "torch")
    p = Problem.from_table(a_table(), {"a": A, "b": B}, patterns=["vector:8"], sparsities=[0.75], dense_seconds=20.0)
    assert [list(map(str, layer.options)) for layer in p.layers] == [["dense", "vector:8 at 0.75"]] * 2
    assert (p.dense.value, p.fixed.value) == (20.0, 8.0)


def test_a_workload_is_its_layers_one_by_one(tmp_path: Path) -> None:
    layers = (workloads.Layer("qkv", A, count=3), workloads.Layer("out", B))
    workloads.save(workloads.Workload("w", "made up", layers), tmp_path / "w.yaml")
    p = Problem.from_table(a_table(), str(tmp_path / "w.yaml"))
    assert [layer.name for layer in p.layers] == ["qkv#1", "qkv#2", "qkv#3", "out"]


def test_a_cost_model_gives_sparsities_that_were_not_measured() -> None:
    table = a_table()
    own = table[table["backend"] == "numba"]
    model = AnchoredLookup().fit(own.drop(columns=["low_seconds", "high_seconds"]), own["median_seconds"])

    class Exact:
        def predict(self, X: pd.DataFrame) -> np.ndarray:
            return model.predict(X)

        def covers(self, X: pd.DataFrame) -> np.ndarray:
            return model.covers(X)

        def predict_interval(self, X: pd.DataFrame, coverage: float) -> tuple[np.ndarray, np.ndarray]:
            return model.predict(X), model.predict(X)

    p = Problem.from_table(table, {"a": A, "b": B}, model=Exact(), sparsities=[0.6, 0.9])
    assert [list(map(str, layer.options)) for layer in p.layers] == [
        ["dense", "nm:2:4 at 0.5", "vector:8 at 0.6"], ["dense", "vector:8 at 0.6"],
    ]  # fmt: skip
    assert 1.5 < p.layers[0].seconds[2] < 2.5


def test_what_a_table_does_not_settle_has_to_be_said() -> None:
    t = a_table()
    both = pd.concat([t, t.assign(threads=1, point_id=lambda it: it["point_id"] + "1")])
    with pytest.raises(UsageError, match=r"the table has threads 1 and 2: say which, threads=\.\.\."):
        Problem.from_table(both, {"a": A})
    assert Problem.from_table(both, {"a": A}, threads=1).layers[0].seconds[0] == 4.0
    with pytest.raises(UsageError, match="the table has no threads 3, but 2"):
        Problem.from_table(t, {"a": A}, threads=3)
    with pytest.raises(UsageError, match="sparse layers were timed on no backend"):
        Problem.from_table(t[t["pattern"] == DENSE], {"a": A})
    with pytest.raises(BadData, match="the table holds no time of layer c: sweep its shape, or give a cost model"):
        Problem.from_table(t, {"a": A, "c": LinearShape(m=1, k=1, n=1)})
    with pytest.raises(UsageError, match=r"layers inside no network: say which, .* or give the shapes"):
        Problem.from_table(t)
    with pytest.raises(BadData, match="no engine's dense times of all layers"):
        Problem.from_table(t[(t["pattern"] != DENSE) | (t["backend"] == "onnxruntime")], {"a": A, "b": B})


def test_layers_timed_inside_a_network_go_by_their_names(data: Path, tmp_path: Path) -> None:
    path = data / "spdy_tables" / "rn18_unstr.txt"
    rows = interchange.spdy_rows(read_spdy(path), network="rn18", pattern="unstructured", device="a-cpu")
    tables.write_part(tmp_path, rows)
    p, expected = Problem.from_table(tmp_path).with_prior(), Problem.from_spdy(path)
    assert [layer.name for layer in p.layers] == [layer.name for layer in expected.layers]
    assert p.dense.value == expected.dense.value
    assert p.fixed.value == pytest.approx(expected.fixed.value, abs=1e-5)  # the file says the sum to five digits
    assert p.solve(2.0).error == pytest.approx(expected.solve(2.0).error, rel=1e-3)
    with pytest.raises(UsageError, match="no layers inside rn50, but inside rn18"):
        Problem.from_table(tmp_path, network="rn50")


def test_every_answer_can_be_looked_at(rng: np.random.Generator) -> None:
    p = search.Problem.from_frame(frame(rng))
    options, chosen, every = p.plot(), p.solve(2.0).plot(), p.frontier().plot()
    assert len(options.data) == 9  # three layers, three patterns
    assert list(chosen.data[0].y) == ["fc0", "fc1", "fc2"]
    assert len(every.data[0].x) == len(p.frontier())
    for figure in (options, chosen, every):
        assert figure.to_json()


def test_whatever_lies_there_is_read(rng: np.random.Generator, tmp_path: Path) -> None:
    given = frame(rng)
    given.to_csv(tmp_path / "f.csv", index=False)
    given.to_parquet(tmp_path / "f.parquet")
    (tmp_path / "t.txt").write_text("base\n0.5\nprunable\n0.25\nfc\n0.2 0.0\n0.1 0.5\n")
    for name in ("f.csv", "f.parquet"):
        assert frames.read(str(tmp_path / name)).solve(2.0) == Problem.from_frame(given).solve(2.0)
    assert frames.read(str(tmp_path / "t.txt"), pattern="vector:8").layers[0].options[1] == Option("vector:8", 0.5)
    with pytest.raises(UsageError, match="is no table that latbench measured: it does not go with threads"):
        frames.read(str(tmp_path / "t.txt"), threads=2)
    (tmp_path / "broken.parquet").write_text("no")
    with pytest.raises(BadData, match=r"broken\.parquet: it cannot be read"):
        frames.read(str(tmp_path / "broken.parquet"))
    with pytest.raises(BadData):
        frames.read(str(tmp_path / "nothing"))


def test_what_is_printed_fits_a_line(rng: np.random.Generator) -> None:
    p = Problem.from_frame(frame(rng), fixed_seconds=1.0)
    assert repr(p).startswith("<Problem of 3 layers with 12 options: ")
    assert repr(p.layers[0]) == "<Layer fc0 with 4 options>"
    assert repr(p.solve(1.5)).endswith("proven least>") and repr(p.selection({})) == (
        "<Selection: 1x, total error 0>"
    )
    assert repr(p.frontier()).endswith("to 1x>")


def test_limits_are_stated_where_they_are_needed(rng: np.random.Generator, tmp_path: Path) -> None:
    p = Problem.from_frame(frame(rng))
    (tmp_path / "limits.yaml").write_text("excluded: [fc0]")
    q = p.limited(tmp_path / "limits.yaml", tied=[["fc*"]])
    assert [[part.name for part in layer.parts] for layer in q.layers] == [["fc1", "fc2"]]
    assert p.limited().layers == p.layers


def test_the_command_solves_a_table_with_its_cost_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    levels = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
    rows = [
        (shape, pattern, s, 1e-3 * shape.m * (1 - s), {})
        for shape in (A, B)
        for pattern, s in [("dense", 0.0), *(("vector:8", level) for level in levels)]
    ]
    columns = [field.name for field in tables.KEY] + ["status", "started_at"]
    made = swept(*rows)[columns].astype(object)
    records = made.where(made.notna(), None).to_dict("records")
    timed = [{**record, "samples_seconds": [row[3]] * 5} for record, row in zip(records, rows, strict=True)]
    table, layers = str(tmp_path / "table"), (workloads.Layer("a", A), workloads.Layer("b", B))
    tables.write_part(table, timed)
    cost_models.save(tmp_path / "m.json", AnchoredLookup(), tables.table_hash(table))
    workloads.save(workloads.Workload("w", "made up", layers), tmp_path / "w.yaml")
    chosen = {}
    for name, more in (
        ("measured", []),
        ("predicted", ["--model", str(tmp_path / "m.json"), "--sparsities", "fine"]),
    ):
        out = tmp_path / f"{name}.csv"
        words = [table, "--workload", str(tmp_path / "w.yaml"), "--target", "3.5", "-o", str(out), *more]
        monkeypatch.setattr(sys, "argv", ["latbench", "solve", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0, capsys.readouterr().err) == (0, "")
        chosen[name] = set(pd.read_csv(out)["sparsity"])
    assert chosen["measured"] <= {0.0, *levels}
    assert chosen["predicted"] <= {0.0, *FINE_SPARSITIES} and not chosen["predicted"] <= {0.0, *levels}
