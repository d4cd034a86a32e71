"""One at a time on a device, whoever they are; who waits is told for whom."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from latbench.errors import EnvironmentUnusable
from latbench.runners import device_lock as lock
from latbench.runners.device_lock import device_lock

pytestmark = pytest.mark.usefixtures("own_lock")


def test_a_device_is_measured_by_one_at_a_time() -> None:
    refused = pytest.raises(EnvironmentUnusable, match="another latbench process measures on cpu")
    waits: list[str] = []
    with device_lock("cpu"), device_lock("another"), device_lock("cpu", "the second in this machine"):
        with refused, device_lock("cpu", wait_seconds=0.0, waiting=waits.append):
            pass
        assert len(waits) == 1
    with device_lock("cpu", wait_seconds=0, waiting=waits.append):
        assert len(waits) == 1


def test_who_waits_is_told_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/latbench", "sweep", "--cpu", "-o", "here"])
    waits: list[str] = []
    refusal = pytest.raises(EnvironmentUnusable)
    with device_lock("cpu"), refusal as refused, device_lock("cpu", wait_seconds=0, waiting=waits.append):
        pass
    holder = rf"another latbench process measures on cpu \(process {os.getpid()} of \S+ since "
    holder += r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: latbench sweep --cpu -o here\)"
    [said] = waits
    assert re.fullmatch(holder, said)
    assert str(refused.value) == f"{said}; two at a time would time each other: wait for it or end it"


def test_a_wait_ends_when_the_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = device_lock("cpu")
    holder.__enter__()
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: holder.__exit__(None, None, None))
    with device_lock("cpu"):
        pass


def test_the_lock_of_a_killed_process_is_free() -> None:
    script = (
        "from latbench.runners.device_lock import device_lock\n"
        "with device_lock('cpu'):\n    print(flush=True); input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(EnvironmentUnusable, match=f"process {other.pid} "), device_lock("cpu", wait_seconds=0):
            pass
        other.kill()
        other.wait()
        with device_lock("cpu", wait_seconds=0):
            pass


def test_what_is_secret_in_the_holders_command_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["latbench", "sweep", "--output=abfs://me@bucket/t?sig=hidden", "s3://me:hidden@b/t"]
    )
    with device_lock("cpu"), pytest.raises(EnvironmentUnusable) as refused, device_lock("cpu", wait_seconds=0):
        pass
    assert "latbench sweep --output=abfs://me@bucket/t s3://me@b/t)" in str(refused.value)


def test_a_lock_is_everybodys() -> None:
    with device_lock("cpu"):
        [file] = lock.lock_folder().iterdir()
        assert file.stat().st_mode & 0o777 == 0o666


def test_a_folder_that_takes_no_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LATBENCH_LOCKS", str(tmp_path / "file" / "folder"))
    with pytest.raises(EnvironmentUnusable, match=r"cannot lock cpu with .*Not a directory"), device_lock("cpu"):
        pass
