"""One at a time on a device, whoever they are; who waits is told for whom."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from latbench.errors import EnvironmentUnusable
from latbench.runners import device_lock
from latbench.runners.device_lock import find_lock_folder, lock_device

pytestmark = pytest.mark.usefixtures("own_lock")


def test_a_device_is_measured_by_one_at_a_time() -> None:
    refused = pytest.raises(EnvironmentUnusable, match="another latbench process measures on cpu")
    waits: list[str] = []
    with lock_device("cpu"), lock_device("another"), lock_device("cpu", "the second in this machine"):
        with refused, lock_device("cpu", wait_seconds=0.0, waiting=waits.append):
            pass
        assert len(waits) == 1
    with lock_device("cpu", wait_seconds=0, waiting=waits.append):
        assert len(waits) == 1


def test_who_waits_is_told_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/latbench", "sweep", "--cpu", "-o", "here"])
    waits: list[str] = []
    refusal = pytest.raises(EnvironmentUnusable)
    with lock_device("cpu"), refusal as refused, lock_device("cpu", wait_seconds=0, waiting=waits.append):
        pass
    holder = rf"another latbench process measures on cpu \(process {os.getpid()} of \S+ since "
    holder += r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: latbench sweep --cpu -o here\)"
    [said] = waits
    assert re.fullmatch(holder, said)
    assert str(refused.value) == f"{said}; two measurements at a time would disturb each other: wait for it or end it"


def test_a_wait_ends_when_the_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = lock_device("cpu")
    holder.__enter__()
    monkeypatch.setattr(device_lock.time, "sleep", lambda seconds: holder.__exit__(None, None, None))
    with lock_device("cpu"):
        pass


def test_the_lock_of_a_killed_process_is_free() -> None:
    script = (
        "from latbench.runners.device_lock import lock_device\n"
        "with lock_device('cpu'):\n    print(flush=True); input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(EnvironmentUnusable, match=f"process {other.pid} "), lock_device("cpu", wait_seconds=0):
            pass
        other.kill()
        other.wait()
        with lock_device("cpu", wait_seconds=0):
            pass


def test_what_is_secret_in_the_holders_command_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["latbench", "sweep", "--output=abfs://me@bucket/t?sig=hidden", "s3://me:hidden@b/t"]
    )
    with lock_device("cpu"), pytest.raises(EnvironmentUnusable) as refused, lock_device("cpu", wait_seconds=0):
        pass
    assert "latbench sweep --output=abfs://me@bucket/t s3://me@b/t)" in str(refused.value)


def test_a_lock_is_everybodys() -> None:
    with lock_device("cpu"):
        [file] = find_lock_folder().iterdir()
        assert file.stat().st_mode & 0o777 == 0o666


def test_a_folder_that_takes_no_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LATBENCH_LOCKS", str(tmp_path / "file" / "folder"))
    with pytest.raises(EnvironmentUnusable, match=r"cannot lock cpu with .*Not a directory"), lock_device("cpu"):
        pass
