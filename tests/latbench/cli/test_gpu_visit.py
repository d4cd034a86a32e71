"""A whole visit to a GPU, rehearsed without one: from its first command to a table that is valid, and its report."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from latbench.tables.table import read_table

ROOT = Path(__file__).parents[3]
POINTS = 500


@pytest.mark.slow
@pytest.mark.timed  # the first call has to run out of time
def test_a_visit_that_runs_out_of_time_ends_with_a_whole_table_after_the_second_call(tmp_path: Path) -> None:
    command = [sys.executable, "tests/gpu_visit.py", "rehearse", tmp_path, "--points", POINTS]
    seconds = ["--first-seconds", 21, "--second-seconds", 60]
    ran = subprocess.run(
        [*map(str, command), *map(str, seconds)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    codes = [int(code) for code in re.findall(r"^exit code (\d)$", ran.stdout, re.MULTILINE)]
    assert codes == [4, 0, 0, 0, 0, 0]  # session, merge, session, merge, validate, report
    frame = read_table(tmp_path / "measured" / "nvidia-h200")
    assert (frame["status"] == "ok").all() and frame["point_id"].is_unique
    first = read_table(tmp_path / "out-1" / "table.parquet")
    assert 0 < len(first) < len(frame) and set(first["point_id"]) < set(frame["point_id"])
    assert len(frame) >= POINTS and len(list((tmp_path / "out-2").iterdir())) <= 8
    smoke = re.search(r"smoke: passed: (\d+) of (\d+) points timed", ran.stderr)
    assert (
        smoke is not None and smoke[1] == smoke[2] and int(smoke[1]) > 40
    )  # one of each engine, see test_gpu_points.py
    assert re.search(
        r"nm:2:4 +50% cupy +auto +\d\.\d\dx float16 dense +\d\.\d\dx \S+ dense +\d\.\d\dx peer", ran.stderr
    )
    assert "nvidia-h200" in (tmp_path / "report.html").read_text()
