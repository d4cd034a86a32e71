"""`latbench sweep` and `plan`: what they print for machines, how long they go on, and what adaptive ones ask for."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from latbench.backends.cpu.cpu_versions import CpuVersions
from latbench.cli import main
from latbench.cli.options.option_texts import parse_duration
from latbench.cli.sweep_report import print_summary
from latbench.errors import UsageError
from latbench.machines.processors import read_processors
from latbench.sweeping.settings import SweepOptions, SweepStopped, SweepSummary
from latbench.tables.schema import SCHEMA
from latbench.tables.table import read_table
from latbench.tables.writer import write_part
from latbench.workloads.points import Point

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_lock: Path) -> Command:
    """Runs the real command line in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["latbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def version(point: Point) -> str | None:
    return CpuVersions.find().describe(point.backend, ["row_panels"] if point.backend == "numba" else [])


class MadeUpSweep:
    """Stands for latbench.sweeping.sweep.run_sweep: a point takes as long as its density says, until `most` are
    measured."""

    def __init__(self, most: int = 10**6) -> None:
        self.most = most
        self.measured: list[Point] = []
        self.rounds = 0
        self.time_budget: float | None = None

    def __call__(
        self,
        folder: Path,
        choose: Callable[[pd.DataFrame | None], Iterable[Point]],
        *,
        options: SweepOptions,
        **_: Any,
    ) -> SweepSummary:
        self.time_budget = options.time_budget
        table = None
        while fresh := [point for point in choose(table) if point not in self.measured]:
            self.rounds += 1
            fresh = fresh[: self.most - len(self.measured)]
            if fresh:
                rows = [
                    {**p.key(), "status": "ok", "samples_seconds": self.samples(p), "backend_version": version(p)}
                    for p in fresh
                ]
                write_part(folder, rows)
                self.measured += fresh
            table = read_table(folder)
            if len(self.measured) >= self.most:
                stopped = SweepStopped("the time budget is used up: the same command goes on from there")
                stopped.summary = self.summary()
                raise stopped
        return self.summary()

    def samples(self, point: Point) -> list[float]:
        step = 0.5 if point.shape.m == 16 and point.sparsity > 0.7 else 1.0  # of another kernel, say
        return [1e-3 * (1.05 - point.sparsity) * step] * 10

    def summary(self) -> SweepSummary:
        return SweepSummary({point.id: "ok" for point in self.measured}, 0)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MadeUpSweep]:
    def use(**options: Any) -> MadeUpSweep:
        fake = MadeUpSweep(**options)
        monkeypatch.setattr("latbench.sweeping.sweep.run_sweep", fake)
        return fake

    return use


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), (".5 m", 30), ("0", 0)]
)
def test_a_time_budget_has_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_more_threads_than_processors_are_refused(command: Command, tiny: Path, tmp_path: Path) -> None:
    most = read_processors().most_threads
    code, _, err = command(
        "sweep", "--cpu", "--workload", tiny, *ARGUMENTS, "-o", tmp_path / "out", "--threads", most + 1
    )
    assert code == 2 and f"--threads {most + 1}: this process may use {most} processor" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "ten", "-1", "5d", "1e3", "m", "nan"])
def test_a_time_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="such as 90s or 10m"):
        parse_duration(text)


ARGUMENTS = ("--patterns", "dense,vector:8", "--backends", "numba")


def test_a_summary_for_machines_is_all_of_stdout(
    command: Command, made_up: Callable[..., MadeUpSweep], tiny: Path, tmp_path: Path
) -> None:
    fake = made_up()
    arguments = ("sweep", "--cpu", "--workload", tiny, *ARGUMENTS, "-o", tmp_path / "out")
    code, out, _ = command(*arguments, "--time-budget", "2m", "--json")
    document = json.loads(out)
    assert code == 0 and fake.time_budget == 120
    assert document["complete"] is True and document["table"] == str(tmp_path / "out")
    assert document["statuses"] == {"ok": 7 * (1 + 6)} and document["rows"] == 49 and document["skipped"] == 0


def test_a_sweep_that_stops_says_so_to_machines_and_by_its_code(
    command: Command, made_up: Callable[..., MadeUpSweep], tiny: Path, tmp_path: Path
) -> None:
    made_up(most=5)
    code, out, err = command("sweep", "--cpu", "--workload", tiny, *ARGUMENTS, "-o", tmp_path / "out", "--json")
    assert code == 4 and "the time budget is used up" in err
    document = json.loads(out)
    assert document["complete"] is False and document["rows"] == 5


def test_an_adaptive_sweep_anchors_every_curve_and_then_asks_for_more(
    command: Command, made_up: Callable[..., MadeUpSweep], tiny: Path, tmp_path: Path
) -> None:
    fake = made_up()
    arguments = ("sweep", "--cpu", "--workload", tiny, *ARGUMENTS, "--adaptive")
    _, listed, _ = command(*arguments, "--dry-run")
    assert len(listed.splitlines()) == 7 * (1 + 6)
    code, out, _ = command(*arguments, "-o", tmp_path / "out")
    assert code == 0 and "ok" in out
    assert [str(point) for point in fake.measured[: 7 * 7]] == listed.splitlines()
    assert fake.rounds > 1 and len(fake.measured) < 7 * (1 + 20)


def test_an_adaptive_sweep_that_has_its_anchors_when_time_is_over_is_whole(
    command: Command, made_up: Callable[..., MadeUpSweep], tiny: Path, tmp_path: Path
) -> None:
    arguments = ("sweep", "--cpu", "--workload", tiny, *ARGUMENTS, "--adaptive", "--time-budget", "0", "--json")
    made_up(most=49)
    code, out, _ = command(*arguments, "-o", tmp_path / "whole")
    assert code == 0 and json.loads(out)["complete"] is True
    made_up(most=48)
    code, out, _ = command(*arguments, "-o", tmp_path / "part")
    assert code == 4 and json.loads(out)["complete"] is False


def test_points_are_listed_for_machines(command: Command, tiny: Path) -> None:
    _, out, _ = command("sweep", "--cpu", "--workload", tiny, *ARGUMENTS, "--dry-run", "--json")
    points = json.loads(out)["points"]
    assert len(points) == 49 and {point["pattern"] for point in points} == {"dense", "vector:8"}
    assert all(set(point) <= set(SCHEMA.names) for point in points)


def test_a_plan_of_an_adaptive_sweep_counts_its_anchors(command: Command, tiny: Path) -> None:
    _, out, _ = command("plan", "--workload", tiny, *ARGUMENTS, "--adaptive", "--json")
    assert json.loads(out)["points"] == 49
    _, out, _ = command("plan", "--workload", tiny, *ARGUMENTS, "--adaptive")
    assert "what the time budget allows" in " ".join(out.split())


def test_a_failure_of_this_run_is_told_once(
    tmp_path: Path, row: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    times = [pd.Timestamp(2026, 1, day, tz="UTC") for day in (1, 2)]
    failed = row | {"status": "error", "samples_seconds": None}
    write_part(tmp_path, [failed | {"started_at": at, "error": f"on day {at.day}"} for at in times])
    frame = read_table(tmp_path)
    print_summary(tmp_path, [], SweepSummary(dict.fromkeys(frame["point_id"], "error"), 0), frame)
    assert "1 error: on day 2" in (out := capsys.readouterr().out) and "day 1" not in out


def test_a_language_model_is_swept_on_a_cpu_at_each_of_its_token_counts(command: Command) -> None:
    code, said, _ = command(
        "sweep", "--cpu", "--workload", "qwen3-0.6b", "--patterns", "dense", "--dry-run", "--json"
    )
    points = json.loads(said)["points"]
    assert code == 0 and {point["n"] for point in points} == {1, 8, 16, 64, 512, 2048}
    code, said, _ = command("plan", "--workload", "qwen3-0.6b@8", "--patterns", "dense", "--json")
    assert code == 0 and json.loads(said)["shapes"] == 4
