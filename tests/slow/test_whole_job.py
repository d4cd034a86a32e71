"""The whole job by the commands a user types, on the bundled task."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]


DEMO = ROOT / "build/demo"


def demo() -> None:
    """Run `make demo`; where other processes disturb the machine a promise may be missed, so it has three tries."""
    for _ in range(3):
        done = subprocess.run(["make", "demo"], cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0:
            return
        (DEMO / "profile.json").unlink(missing_ok=True)
        (DEMO / "database/whole_model.json").unlink(missing_ok=True)
    pytest.fail(f"{done.stdout}\n{done.stderr}")


def test_the_demo_keeps_its_promise_and_a_second_run_reuses_it() -> None:
    demo()
    summary = json.loads((DEMO / "summary.json").read_text())
    assert summary["target"] == 2.0
    assert summary["met"] and summary["measured_speedup"] >= 2.0
    assert summary["predicted_low"] <= summary["predicted_seconds"] <= summary["predicted_high"]
    assert summary["score_pruned"] >= summary["score_dense"] - 0.02

    made = {path: path.stat().st_mtime_ns for path in DEMO.rglob("*") if path.is_file()}
    demo()
    report = {DEMO / name for name in ("report.html", "summary.json")}
    changed = {path for path, when in made.items() if path.stat().st_mtime_ns != when}
    assert changed <= report
