"""`latbench solve`: a table of times in, a profile or the frontier out, and what limits a target that is too high."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from latbench.cli import main
from latbench.importers.text_formats import read_spdy_profile
from latbench.tables.writer import write_part
from latbench.workloads.points import Point
from search.inputs import problem_from_spdy
from search.problem.layers import Option
from search.problem.packed_bytes import count_weight_bytes
from sparse_kernels.patterns import parse
from sparse_kernels.shapes import LinearShape

Run = Callable[..., tuple[int, str, str]]

TIMINGS = "base\n1.0\nprunable\n0.8\nconv\n0.5 0.0\n0.3 0.5\n0.1 0.9\nfc\n0.3 0.0\n0.2 0.5\n0.05 0.9\n"


def swept_rows() -> list[dict[str, Any]]:
    """Rows of one layer: dense in float32 and int8, and vectors in both."""
    shape, rows = LinearShape(m=64, k=64, n=8), []
    for pattern, sparsity, kind, seconds in (
        ("dense", 0.0, "float32", 4.0), ("dense", 0.0, "int8", 1.5),
        ("vector:8", 0.75, "float32", 1.8), ("vector:8", 0.75, "int8", 1.0),
    ):  # fmt: skip
        types = {"dtype_w": kind, "dtype_a": kind}
        point = Point("cpu", "numba", "auto", shape, parse(pattern), sparsity, threads=2, **types)
        rows.append({
            **point.key(), "status": "ok", "run_id": "r", "env_id": "e", "block": 0, "seq": len(rows),
            "samples_seconds": [seconds] * 5, "burst_error": 0.0,
        })  # fmt: skip
    return rows


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text(TIMINGS)

    def outcome(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["latbench", "solve", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return outcome


def test_a_timing_file_gives_a_profile_in_the_same_project_s_format(run: Run) -> None:
    code, out, err = run("t.txt", "--target", "2", "-o", "profile.txt")
    assert (code, err) == (0, "")
    # By hand: 0.3 s are left for both; 0.1 + 0.2 costs 1 + 1/4, and with conv at 50% nothing is left for fc.
    assert read_spdy_profile(Path("profile.txt")) == {"conv": 0.9, "fc": 0.5}
    assert (
        "2.00× over the dense model: 500 ms instead of 1.00 s; total error 1.25, and no profile as fast has less"
        in out
    )
    assert out.endswith("profile.txt is written\n")


def test_without_a_target_it_prints_the_frontier(run: Run) -> None:
    code, out, _ = run("t.txt")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["1.00×", "1.25×"]
    assert f"of {len(problem_from_spdy('t.txt').frontier())} efficient profiles" in out
    code, out, _ = run("t.txt", "-o", "frontier.csv")
    assert code == 0 and out.endswith("frontier.csv is written\n")
    every = problem_from_spdy("t.txt").frontier().to_frame()
    pd.testing.assert_frame_equal(pd.read_csv("frontier.csv"), every)
    assert run("t.txt", "-o", "frontier.parquet")[0] == 0
    pd.testing.assert_frame_equal(pd.read_parquet("frontier.parquet"), every)
    code, _, err = run("t.txt", "-o", "p.txt")
    assert code == 2 and "without a --target the output is a frontier, in a file .csv or .parquet, not p.txt" in err
    assert run("t.txt", "--most-bytes", "9")[0] == 2


def test_a_target_out_of_reach_says_what_limits_it(run: Run) -> None:
    code, out, err = run("t.txt", "--target", "4")
    assert (code, out) == (1, "")
    assert err == (
        "latbench: target 4x is infeasible: the best is 2.86x; 20% of the time is in layers that cannot be pruned; "
        "15% is left in the others at their fastest: 10% in conv (unstructured at 0.9), "
        "5% in fc (unstructured at 0.9).\n"
    )


def test_limits_and_errors_are_a_user_s(run: Run) -> None:
    Path("limits.yaml").write_text("excluded: [fc]\n")
    assert (
        "target 2x is infeasible: the best is 1.67x; 50% of"
        in run("t.txt", "--target", "2", "--limits", "limits.yaml")[2]
    )
    rows = [(name, "unstructured", s, e) for name in ("conv", "fc") for s, e in ((0.5, 1.0), (0.9, 1.5))]
    pd.DataFrame(rows, columns=["layer", "pattern", "sparsity", "error"]).to_csv("errors.csv", index=False)
    code, _, _ = run("t.txt", "--target", "1.5", "--errors", "errors.csv", "-o", "profile.csv")
    assert code == 0
    assert dict(zip(*pd.read_csv("profile.csv")[["layer", "sparsity"]].to_numpy().T, strict=True)) == {
        "conv": 0.9,
        "fc": 0.0,
    }


def test_a_frame_is_a_table_too(run: Run) -> None:
    rows = [
        ("a", "dense", 0.0, 1.0),
        ("a", "vector:8", 0.5, 0.5),
        ("b", "dense", 0.0, 1.0),
        ("b", "nm:2:4", 0.5, 0.6),
    ]
    pd.DataFrame(rows, columns=["layer", "pattern", "sparsity", "seconds"]).to_csv("f.csv", index=False)
    code, out, _ = run("f.csv", "--target", "1.2", "--fixed-seconds", "0.5", "-o", "p.parquet")
    assert code == 0 and "1.25×" in out
    assert pd.read_parquet("p.parquet")["pattern"].tolist() == ["vector:8", "dense"]
    assert run("f.csv", "--network", "net")[0] == 2
    assert run("none.txt")[0] == 5


def test_the_precision_of_each_layer_is_chosen_by_errors_that_know_of_it(run: Run, tmp_path: Path) -> None:
    write_part(tmp_path / "table", swept_rows())
    Path("w.yaml").write_text("name: w\nsource: made up\nlayers:\n  - {name: fc, op: linear, m: 64, k: 64, n: 8}\n")
    asked = "table", "--workload", "w.yaml", "--fixed-seconds", "0", "--target", "1"  # over dense layers of each type
    assert run(*asked)[0] == 0
    code, _, err = run(*asked, "--precision", "int8")
    assert code == 2 and "rounding to int8 would cost nothing: give --errors a file with the columns layer" in err
    options = ("vector:8", 0.75, "float32", 0.4), ("vector:8", 0.75, "int8", 0.5), ("dense", 0.0, "int8", 0.1)
    errors = pd.DataFrame(options, columns=["pattern", "sparsity", "precision", "error"]).assign(layer="fc")
    errors.to_csv("errors.csv", index=False)
    code, out, err = run(*asked, "--precision", "int8", "--errors", "errors.csv", "-o", "p.csv")
    assert (code, err) == (0, "") and "total error 0.1, and no profile as fast has less" in out
    assert pd.read_csv("p.csv")[["pattern", "precision"]].to_numpy().tolist() == [["dense", "int8"]]
    code, _, err = run(*asked, "--precision", "int4")
    assert code == 2 and "unknown precision 'int4': known are float32, bfloat16, int8" in err
    assert "does not take precisions" in run("t.txt", "--precision", "int8")[2]


def test_the_weights_may_have_a_budget_too(run: Run) -> None:
    Path("w.yaml").write_text(
        "name: w\nsource: made up\nlayers:\n"
        "  - {name: conv, op: linear, m: 64, k: 64, n: 1}\n  - {name: fc, op: linear, m: 64, k: 64, n: 1}\n"
    )
    dense = 4 * 64 * 64
    code, out, err = run(
        "t.txt", "--target", "1", "--workload", "w.yaml", "--most-bytes", str(dense + 1), "-o", "p.txt"
    )
    assert (code, err) == (0, "")
    options = [Option("unstructured" if s else "dense", s) for s in read_spdy_profile(Path("p.txt")).values()]
    used = sum(count_weight_bytes(it, LinearShape(m=64, k=64, n=1)) for it in options)
    assert used <= dense + 1 and f"weights take {used:,.0f} of {dense + 1:,} bytes" in out
    assert "no profile within both budgets has less" in out
    code, _, err = run("t.txt", "--target", "1", "--workload", "w.yaml", "--most-bytes", "9")
    assert code == 1 and "no profile that reaches 1x keeps bytes of weights, 9: the least that one takes is" in err
    code, _, err = run("t.txt", "--target", "1", "--most-bytes", "9")
    assert (code, err) == (
        2, "latbench: bytes of weights: the shape of layer conv is unknown; give a workload that has it\n",
    )  # fmt: skip


def test_a_target_may_be_kept_on_a_second_device(run: Run) -> None:
    Path("slow.txt").write_text(TIMINGS.replace("0.1 0.9", "0.29 0.9").replace("0.05 0.9", "0.01 0.9"))
    alone = run("t.txt", "--target", "2", "-o", "alone.txt")
    code, out, err = run("t.txt", "--target", "2", "--also", "slow.txt", "--also-with", "target=1.8", "-o", "p.txt")
    assert (alone[0], code, err) == (0, 0, "")
    # By hand: on the slow one 0.5556 s are for all, 0.3556 of them for both layers: conv at 50 or 90%, fc at 90%.
    assert read_spdy_profile(Path("alone.txt")) == {"conv": 0.9, "fc": 0.5}
    assert read_spdy_profile(Path("p.txt")) == {"conv": 0.9, "fc": 0.9}
    assert "slow.txt: 2.00× over the dense model: 500 ms instead of 1.00 s" in out
    code, _, err = run("t.txt", "--target", "2", "--also", "slow.txt", "--also-with", "target=3")
    assert code == 1 and err.startswith("latbench: slow.txt: target 3x is infeasible: the best is 2.00x")
    Path("other.txt").write_text(TIMINGS.replace("0.1 0.9\n", ""))
    code, _, err = run("t.txt", "--target", "2", "--also", "other.txt", "--also-with", "target=1.5")
    assert code == 2 and "the cost of layer conv as unstructured at 0.9 is unknown; leave that option out" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--most-bytes", "9"], "they need a --target"),
        (["--target", "2", "--most-bytes", "9", "--also", "t.txt"], "a profile can have only one"),
        (["--target", "2", "--also-with", "batch=2"], "describes --also, which is missing"),
        (["--target", "2", "--also", "t.txt", "--also-with", "size=2"], "as in batch=16, not 'size=2'"),
        (["--target", "2", "--also", "t.txt", "--also-with", "batch=many"], "not 'batch=many'"),
        (["--device", "gpu"], "it does not take device"),
    ],
)
def test_second_budgets_that_do_not_go_together_are_refused(words: list[str], said: str, run: Run) -> None:
    code, _, err = run("t.txt", *words)
    assert code == 2 and said in err and err.count("\n") == 1


def test_layers_that_take_no_time_are_shown_and_dense_models_that_take_none_refused(run: Run) -> None:
    free = [("a layer", "dense", 0.0, 1.0, ""), ("a layer", "vector:8", 0.5, 0.0, 2.0)]
    columns = ["layer", "pattern", "sparsity", "seconds", "error"]
    pd.DataFrame(free, columns=columns).to_csv("f.csv", index=False)
    code, out, err = run("f.csv")
    assert (code, err) == (0, "") and out.splitlines()[2].split()[1:3] == ["0", "ns"]
    assert run("f.csv", "--target", "9", "-o", "p.csv")[0] == 0
    code, _, err = run("f.csv", "--target", "9", "-o", "p.txt")
    assert code == 5 and "a SPDY profile cannot hold a layer called 'a layer'" in err and err.count("\n") == 1
    for seconds in ("0", "-1"):
        code, _, err = run("f.csv", "--target", "2", "--dense-seconds", seconds, "--fixed-seconds", "0")
        assert code == 5 and "the time of the dense model must be finite and above 0, not" in err
    pd.DataFrame([("a", "dense", 0.0, 0.0), ("a", "vector:8", 0.5, 0.0)], columns=columns[:4]).to_csv("f.csv")
    assert run("f.csv", "--target", "2")[0] == 5


def test_a_blank_error_is_named_not_guessed(run: Run) -> None:
    rows = [("a", "dense", 0.0, 1.0, 0.0), ("a", "vector:8", 0.5, 0.5, 1.0), ("a", "vector:8", 0.9, 0.1, None)]
    frame = pd.DataFrame(rows, columns=["layer", "pattern", "sparsity", "seconds", "error"])
    frame.to_csv("f.csv", index=False)
    for words in (["f.csv"], ["t.txt", "--errors", "f.csv"]):
        code, _, err = run(*words, "--target", "2")
        assert (
            code == 5
            and "layer a has no error as vector:8 at 0.9: write inf for an option that cannot be used" in err
        )
