"""The whole job by the commands a user types: on the bundled task, and on two models of a user's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LATBENCH = Path(sys.executable).parent / "latbench"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run(*command: object, cwd: Path, code: int = 0) -> str:
    """What the command printed; the test fails with its errors unless it ends with `code`."""
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == code, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_demo_keeps_its_promise_and_a_second_run_reuses_it() -> None:
    run("make", "demo", cwd=ROOT)
    summary = json.loads((ROOT / "build/demo/summary.json").read_text())
    assert summary["target"] == 2.0
    assert summary["met"] and summary["measured_speedup"] >= 2.0
    assert summary["predicted_low"] <= summary["predicted_seconds"] <= summary["predicted_high"]
    assert summary["score_pruned"] >= summary["score_dense"] - 0.02

    made = {path: path.stat().st_mtime_ns for path in (ROOT / "build/demo").rglob("*") if path.is_file()}
    run("make", "demo", cwd=ROOT)
    report = {ROOT / "build/demo" / name for name in ("report.html", "summary.json")}
    changed = {path for path, when in made.items() if path.stat().st_mtime_ns != when}
    assert changed <= report


@pytest.mark.parametrize(("task", "target"), [("resnet20", 1.15), ("minilm", 1.5)])
def test_a_users_own_model_passes_through_the_same_commands(
    task: str, target: float, tmp_path: Path, data: Path
) -> None:
    file = ROOT / "tests/tasks" / f"{task}.py"
    run(LATBENCH, "trace", file, "-o", "workload.yaml", cwd=tmp_path)
    run(LATBENCH, "sweep", "--cpu", "--workload", "workload.yaml", "-o", "table", cwd=tmp_path)
    run(LATBENCH, "fit", "table", "-o", "model.json", cwd=tmp_path)
    from_table = ("--table", "table", "--model", "model.json", "--database", "database")
    run(LATBENCH, "search", file, *from_table, "--target", target, "-o", "profile.json", cwd=tmp_path)
    run(LATBENCH, "prune", file, "--profile", "profile.json", "--database", "database", "-o", "pruned", cwd=tmp_path)
    run(LATBENCH, "verify", file, "pruned", "-o", "verify", cwd=tmp_path)
    shown = ("--model", "model.json", "--profile", "profile.json", "--pruned", "pruned", "--verify", "verify")
    out = run(LATBENCH, "report", "table", *shown, "-o", "report.html", "--summary", "summary.json", cwd=tmp_path)
    assert "report.html" in out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["met"] and summary["measured_speedup"] >= target
    assert summary["score_pruned"] >= summary["score_dense"] - 0.05

    # A target that nothing reaches is refused with what can be reached, and the profile that is there stays.
    before = (tmp_path / "profile.json").read_bytes()
    run(LATBENCH, "search", file, *from_table, "--target", 50, "-o", "profile.json", cwd=tmp_path, code=1)
    assert (tmp_path / "profile.json").read_bytes() == before
