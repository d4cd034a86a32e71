"""Before a fork, threads of libraries come to rest: a child would have a lock that one of them holds for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from search.export import fork_gate

REST = " 1 2 3 0 -1 4194560 100 0"


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system says of the threads of this process: that of the test runs."""
    monkeypatch.setattr(fork_gate, "_TASKS", tmp_path)
    add(tmp_path, os.getpid(), "R")
    return tmp_path


def add(tasks: Path, number: int, state: str, name: str = "python") -> None:
    (tasks / str(number)).mkdir(exist_ok=True)
    (tasks / str(number) / "stat").write_text(f"{number} ({name}) {state}{REST}")


def test_a_thread_that_runs_or_waits_is_seen_and_one_of_python_is_not(tasks: Path) -> None:
    assert not fork_gate._runs_any_library_thread()
    add(tasks, 7, "S")
    (tasks / "8").mkdir()  # it has ended
    assert not fork_gate._runs_any_library_thread()
    for state in "RDT":
        add(tasks, 9, state)
        assert fork_gate._runs_any_library_thread()
    add(tasks, 9, "S", "odd) R (name")
    assert not fork_gate._runs_any_library_thread()
    add(tasks, 9, "R", "odd) S (name")
    assert fork_gate._runs_any_library_thread()


def test_two_quiet_looks_in_a_row_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Iterator[bool] = iter([True, False, True, False, False, True])
    monkeypatch.setattr(fork_gate, "_runs_any_library_thread", lambda: next(looks))
    fork_gate.wait_until_library_threads_sleep()
    assert [*looks] == [True]


@pytest.mark.parametrize("tells", [True, False])
def test_the_wait_ends_where_a_thread_never_sleeps_or_nothing_tells(
    tells: bool, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tasks, 9, "R")
    if not tells:
        monkeypatch.setattr(fork_gate, "_TASKS", tasks / "none")
    monkeypatch.setattr(fork_gate, "SETTLE_SECONDS", 0.05)
    began = time.monotonic()
    fork_gate.wait_until_library_threads_sleep()
    assert time.monotonic() - began >= 0.05
