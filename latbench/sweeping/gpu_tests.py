"""Tests that need a GPU (`-m gpu`), run in a process of their own for a bounded time, and their summary."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from latbench.machines.processors import count_cores
from latbench.timing.sampling import Clock

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/latbench/backends/gpu/test_gpu_device.py", "tests/sparse_kernels/cuda/test_torch_layers.py",
    "tests/sparse_kernels/numba_cuda",
)  # fmt: skip

# pyproject.toml's options need plugins that a GPU machine may lack, and it may have others, so only named plugins are
# loaded. After a minute in one test, the output shows its stack; the test continues.
PYTEST = (
    "-m", "pytest", "-c", os.devnull, "--rootdir", str(ROOT), "--import-mode=importlib", "-p", "no:cacheprovider",
    "-v", "--tb=short", "--maxfail=20", "--continue-on-collection-errors",
    "-o", "faulthandler_timeout=60", "-o", "markers=gpu\ntimed\nslow", *TESTS,
)  # fmt: skip
NO_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
WIDE = {"COLUMNS": "200"}  # room for the reason in the line of a failed test
MOST_SIDE_BY_SIDE = 8  # processes of tests, each with up to four workers on the GPU
UNTIMED_SHARE = 0.7  # of the time; tests that compare times get the rest
_NO_TESTS = 5  # pytest's exit code where nothing was collected
_STATUS = "PASSED|FAILED|ERROR|SKIPPED"
_ENDED = re.compile(
    rf"^(?:\[gw\d+\] \[ *\d+%\] ({_STATUS}) |.*?::.*? ({_STATUS})\b)", re.MULTILINE
)  # xdist's, or pytest's
_SUMMED_UP = re.compile(r"^(?:FAILED|ERROR) \S*\.py.*", re.MULTILINE)


@dataclass(frozen=True)
class GpuTestOutcome:
    """The result of the GPU's tests.

    Parameters
    ----------
    status
        passed, failed, or late if there was no time for all and none failed.
    verdict
        The result in a few words.
    output
        What pytest printed.
    """

    status: str
    verdict: str
    output: str


def build_test_commands() -> list[list[str]]:
    """Return the commands that run the tests.

    Tests that may share the GPU come first, in several processes where xdist is installed. Tests that compare times
    come second and have the GPU to themselves.
    """
    alone = [sys.executable, "-P", *PYTEST, "-m"]
    beside: list[str] = []
    if importlib.util.find_spec("xdist") is not None:
        beside = ["-p", "xdist", "-n", str(min(MOST_SIDE_BY_SIDE, count_cores())), "--dist", "worksteal"]
    return [[*alone, "gpu and not timed", *beside], [*alone, "gpu and timed"]]


def run_all_tests(seconds: float, clock: Clock = time.monotonic) -> GpuTestOutcome:
    """Run the GPU's tests for at most `seconds` altogether."""
    end = clock() + seconds
    untimed, timed = build_test_commands()
    first = run_tests(UNTIMED_SHARE * seconds, untimed)
    return combine_outcomes(first, run_tests(max(0.0, end - clock()), timed, "GPU tests of times"))


def combine_outcomes(first: GpuTestOutcome, second: GpuTestOutcome) -> GpuTestOutcome:
    """Return two runs as one: it failed if one of them did, and was late if one was."""
    statuses = first.status, second.status
    worst = next(status for status in ("failed", "late", "passed") if status in statuses)
    return GpuTestOutcome(worst, f"{first.verdict}; {second.verdict}", f"{first.output.rstrip()}\n\n{second.output}")


def run_tests(seconds: float, command: Sequence[str], name: str = "GPU tests") -> GpuTestOutcome:
    """Run tests for at most `seconds`, in a process of their own, because a kernel may end it."""
    # Children of pytest may outlive it and keep a pipe open, so the output goes to a file.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **NO_PLUGINS, **WIDE},
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            if code is None:  # also where this is interrupted: xdist's processes go on without pytest
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        text = log.read().decode(errors="replace")
    if code is None:
        ended = [match[1] or match[2] for match in _ENDED.finditer(text)]
        failed = ended.count("FAILED") + ended.count("ERROR")
        so_far = f"{ended.count('PASSED')} passed and {failed} failed so far"
        return GpuTestOutcome(
            "failed" if failed else "late", f"{name}: not done after {seconds:.0f} s, {so_far}", text
        )
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
    if code == _NO_TESTS:
        return GpuTestOutcome("failed", f"{name}: there are none", text)
    passed = code == 0 and " passed" in last  # pytest also succeeds when all tests are skipped
    how = "passed" if passed else f"FAILED (exit code {code})"
    return GpuTestOutcome("passed" if passed else "failed", f"{name}: {how}: {last.strip('= ')}", text)


def list_failures(output: str) -> list[str]:
    """Return a line for each failed test: as pytest sums them up, or from its progress where it did not finish."""
    found = _SUMMED_UP.findall(output)
    summed_up = {line.split(" - ")[0].partition(" ")[2] for line in found}
    for match in _ENDED.finditer(output):
        if (match[1] or match[2]) in ("FAILED", "ERROR"):
            line = output[match.start() :].partition("\n")[0].strip()
            if not any(name in line for name in summed_up):
                found.append(line)
    return found
