"""`latbench solve`: a table of times in, a profile or the frontier out, and what limits a target that is too high."""

import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from latbench import cli
from latbench.interchange import read_spdy_profile
from search.problem import Problem

Run = Callable[..., tuple[int, str, str]]

TIMINGS = "base\n1.0\nprunable\n0.8\nconv\n0.5 0.0\n0.3 0.5\n0.1 0.9\nfc\n0.3 0.0\n0.2 0.5\n0.05 0.9\n"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text(TIMINGS)

    def outcome(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["latbench", "solve", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return outcome


def test_a_timing_file_gives_a_profile_in_the_same_project_s_format(run: Run) -> None:
    code, out, err = run("t.txt", "--target", "2", "-o", "profile.txt")
    assert (code, err) == (0, "")
    # By hand: 0.3 s are left for both; 0.1 + 0.2 costs 1 + 1/4, and with conv at 50% nothing is left for fc.
    assert read_spdy_profile(Path("profile.txt")) == {"conv": 0.9, "fc": 0.5}
    assert (
        "2.00× over the dense model: 500 ms instead of 1.00 s; total error 1.25, and no profile so fast has less"
        in out
    )
    assert out.endswith("profile.txt is written\n")


def test_without_a_target_it_prints_the_frontier(run: Run) -> None:
    code, out, _ = run("t.txt")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["1.00×", "1.25×"]
    assert f"of {len(Problem.from_spdy('t.txt').frontier())} efficient profiles" in out
    assert run("t.txt", "-o", "p.txt")[0] == 2


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
