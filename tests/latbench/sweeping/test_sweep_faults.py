"""Real sweeps of a tiny workload, killed, interrupted and out of disk: nothing finished is lost or corrupt."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import short_sweep

from latbench.tables.table import hash_table, read_table

LATBENCH = Path(sys.executable).with_name("latbench")

pytestmark = pytest.mark.slow


@pytest.fixture
def start(own_lock: Path, tiny: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a brief sweep of the tiny workload in a process of its own."""

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            short_sweep.__file__,
            "sweep",
            "--cpu",
            "--workload",
            tiny,
            "-o",
            tmp_path / "out",
            *arguments,
        ]
        return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


# Twenty-eight points in seven blocks; only one engine has to start.
FEW = ("--patterns", "vector:8", "--sparsities", "0.5,0.6,0.75,0.9")


def finished(folder: Path) -> set[str]:
    """The points of the table in `folder`; reading it fails if anything in it is damaged."""
    return set(read_table(folder)["point_id"]) if list(folder.glob("part-*.parquet")) else set()


def parts(folder: Path) -> int:
    """How many blocks it has written."""
    return len(list(folder.glob("part-*.parquet")))


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.timeout(600)
def test_a_killed_sweep_loses_no_finished_point_and_completes(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, tiny: Path, rng: np.random.Generator
) -> None:
    out = tmp_path / "out"
    with start("--patterns", "block:8x8", "--sparsities", "0.5", "-o", tmp_path / "first") as first:
        first.communicate()  # finds the ceilings, which takes seconds and is done once
    began = time.monotonic()
    with start(*FEW, "-o", tmp_path / "whole") as whole:
        until(lambda: parts(tmp_path / "whole") > 0)
        starting = time.monotonic() - began
        _, err = whole.communicate()
    assert whole.returncode == 0, err
    a_block = (time.monotonic() - began - starting) / 6
    wanted = finished(tmp_path / "whole")
    before: set[str] = set()
    killed = 0
    for written in rng.permutation([False] * 3 + [True] * 3):  # while it starts, and when it has written something
        already = parts(out)
        with start(*FEW) as process:
            if written:
                until(lambda: parts(out) > already or process.poll() is not None)  # noqa: B023 - called at once
            try:
                process.wait(timeout=rng.uniform(0, a_block / 2 if written else starting))
            except subprocess.TimeoutExpired:
                workers = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                killed += 1
                process.communicate()
                until(lambda: not any(worker.is_running() for worker in workers))  # noqa: B023 - called at once
        now = finished(out)
        assert before <= now
        before = now
    assert killed > 3  # the others had finished by then
    with start(*FEW) as last:
        _, err = last.communicate()
    assert last.returncode == 0, err
    assert finished(out) == wanted
    validated = subprocess.run([LATBENCH, "validate", out], capture_output=True, text=True, check=False)
    assert validated.returncode == 0, validated.stdout


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_says_so_in_one_line_and_leaves_no_process(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, end: signal.Signals
) -> None:
    with start(*FEW) as process:
        until(lambda: bool(finished(tmp_path / "out")))
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(end)
        _, err = process.communicate()
    assert process.returncode == 4
    said = [line for line in err.splitlines() if line.startswith("latbench: ")]
    assert len(said) == 1 and "the same command goes on from there" in said[0] and "Traceback" not in err
    assert finished(tmp_path / "out")
    assert workers
    until(lambda: not any(worker.is_running() for worker in workers))


def test_a_full_disk_ends_the_sweep_in_one_line_and_harms_nothing(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with start("--patterns", "block:8x8", "--sparsities", "0.5") as process:
        process.communicate()
    before = hash_table(out)
    with start("--patterns", "vector:8", "--sparsities", "0.5") as process:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (8192, 8192))
        _, err = process.communicate()
    assert process.returncode == 3, err
    said = [line for line in err.splitlines() if line.startswith("latbench: ")]
    assert said == [f"latbench: cannot write {said[0].split()[3]} File too large"], err
    assert hash_table(out) == before and not list(out.glob(".*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_file_system_that_is_full_keeps_what_it_has(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        with start("--patterns", "block:8x8", "--sparsities", "0.5", "-o", small / "out") as process:
            process.communicate()
        before = hash_table(small / "out")
        with pytest.raises(OSError, match="No space"), (small / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        with start("--patterns", "vector:8", "--sparsities", "0.5", "-o", small / "out") as process:
            _, err = process.communicate()
        assert process.returncode == 3, err
        assert "No space left on device" in err and "Traceback" not in err
        assert hash_table(small / "out") == before
    finally:
        subprocess.run(["umount", small], check=True)
