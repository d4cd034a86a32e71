"""The GPU's own tests, run from outside: their verdicts, their time, and what is told of failures."""

import contextlib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from latbench.sweeping import gpu_tests
from latbench.sweeping.gpu_tests import (
    GpuTestOutcome,
    build_test_commands,
    combine_outcomes,
    list_failures,
    run_all_tests,
)

PLUGINS = "PYTEST_DISABLE_PLUGIN_AUTOLOAD"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_gpus_tests_are_judged_by_their_exit_code() -> None:
    python = sys.executable
    passed = gpu_tests.run_tests(30.0, [python, "-c", "print('== 3 passed in 1.0s ==')"])
    assert passed.status == "passed" and passed.verdict == "GPU tests: passed: 3 passed in 1.0s"
    failed = gpu_tests.run_tests(30.0, [python, "-c", "print('1 failed'); raise SystemExit(1)"])
    assert failed.status == "failed" and failed.verdict == "GPU tests: FAILED (exit code 1): 1 failed"
    skipped = gpu_tests.run_tests(30.0, [python, "-c", "print('275 skipped')"])
    assert skipped.status == "failed" and "275 skipped" in skipped.verdict
    none = gpu_tests.run_tests(30.0, [python, "-c", "raise SystemExit(5)"])
    assert none.status == "failed" and none.verdict == "GPU tests: there are none"


ALONE = [
    "a.py::test_one[FAILED] PASSED   [ 10%]",
    "a.py::test_two {} [ 20%]",
    "a.py::test_three SKIPPED (it said ERROR and FAILED) [ 30%]",
    "a.py::test_four",
]
SIDE_BY_SIDE = [
    "a.py::test_one[FAILED] ",
    "a.py::test_two ",
    "[gw0] [  5%] PASSED a.py::test_one[FAILED] ",
    "a.py::test_three ",
    "[gw11] [ 20%] {} a.py::test_two ",
    "[gw0] [100%] SKIPPED a.py::test_three ",
    "a.py::test_four ",
]


@pytest.mark.parametrize("lines", [ALONE, SIDE_BY_SIDE], ids=["alone", "xdist"])
@pytest.mark.parametrize(("second", "status"), [("PASSED", "late"), ("FAILED", "failed"), ("ERROR", "failed")])
def test_tests_that_take_too_long_are_stopped_and_fail_only_if_one_did(
    second: str, status: str, lines: list[str]
) -> None:
    lines = [line.format(second) for line in lines]
    code = f"import time; print({chr(10).join(lines)!r}, flush=True); time.sleep(60)"
    stopped = gpu_tests.run_tests(1.0, [sys.executable, "-c", code])
    counts = (2, 0) if second == "PASSED" else (1, 1)
    assert stopped.status == status
    assert stopped.verdict == "GPU tests: not done after 1 s, {} passed and {} failed so far".format(*counts)
    assert stopped.output.splitlines() == lines
    assert list_failures(stopped.output) == (
        [] if second == "PASSED" else [line.strip() for line in lines if f"{second} " in line and "two" in line]
    )


def test_what_tests_have_started_is_stopped_with_them_and_not_waited_for() -> None:
    inner = "import time; print('began', flush=True); time.sleep(60)"
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {inner!r}]).pid, flush=True)"
    stopped = gpu_tests.run_tests(2.0, [sys.executable, "-c", f"{code}; import time; time.sleep(60)"])
    pid = int(stopped.output.split()[0])
    assert stopped.status == "late" and "began" in stopped.output
    end = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.02)


TESTS = """
import os
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", [1, 2])
def test_right(number):
    assert "PYTEST_XDIST_WORKER" in os.environ
    assert number == 2

@pytest.mark.gpu
@pytest.mark.timed
def test_time():
    assert "PYTEST_XDIST_WORKER" not in os.environ

def test_other():
    assert False
"""


def test_only_tests_that_compare_times_have_the_gpu_to_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of the process that this test may run in
    (tmp_path / "test_it.py").write_text(TESTS)
    options = [str(tmp_path) if it == str(gpu_tests.ROOT) else it for it in gpu_tests.PYTEST[: -len(gpu_tests.TESTS)]]
    monkeypatch.setattr(gpu_tests, "PYTEST", [*options, str(tmp_path / "test_it.py")])
    outcome = run_all_tests(60.0)
    assert outcome.status == "failed"
    assert re.fullmatch(
        r"GPU tests: FAILED \(exit code 1\): 1 failed, 1 passed.*; GPU tests of times: passed: 1 passed.*",
        outcome.verdict,
    )
    assert re.search(r"^\[gw\d\] \[ *\d+%\] PASSED .*::test_right\[2\]", outcome.output, re.MULTILINE)
    (told,) = list_failures(outcome.output)
    assert re.match(r"FAILED .*test_it.py::test_right\[1\] - ", told), outcome.output
    monkeypatch.setattr(gpu_tests.importlib.util, "find_spec", lambda name: None)
    assert [("-n" in command, command.count("-m")) for command in build_test_commands()] == [(False, 2)] * 2


@pytest.mark.parametrize(
    ("first", "second", "worst"),
    [
        ("passed", "passed", "passed"),
        ("late", "passed", "late"),
        ("passed", "late", "late"),
        ("late", "failed", "failed"),
    ],
)
def test_two_runs_are_worth_what_the_worse_one_is(first: str, second: str, worst: str) -> None:
    outcome = combine_outcomes(GpuTestOutcome(first, "one", "a"), GpuTestOutcome(second, "two", "b"))
    assert outcome == GpuTestOutcome(worst, "one; two", "a\n\nb")


def test_what_the_first_tests_do_not_need_the_second_have(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, given = Clock(), []

    def run_tests(seconds: float, command: Sequence[str], name: str = "") -> GpuTestOutcome:
        given.append(seconds)
        clock.now += 50.0
        return GpuTestOutcome("passed", name, "")

    monkeypatch.setattr(gpu_tests, "run_tests", run_tests)
    run_all_tests(189.0, clock)
    assert given == [pytest.approx(0.7 * 189), pytest.approx(139)]


def test_the_gpus_tests_run_without_plugins_and_are_those_of_the_device_first() -> None:
    collected = []
    for command in (
        [sys.executable, "-P", *gpu_tests.PYTEST, "-m", which] for which in ("gpu and not timed", "gpu and timed")
    ):
        outcome = gpu_tests.run_tests(60.0, [*command, "--collect-only", "-qq"])
        collected.append([line for line in outcome.output.splitlines() if "::" in line])
    assert len(collected[1]) == 4 and all("test_gpu_device.py::" in line for line in collected[1])
    found = list(dict.fromkeys(line.partition("::")[0] for line in collected[0]))
    # Numba's skip as a file.
    assert found == [
        "tests/latbench/backends/gpu/test_gpu_device.py",
        "tests/sparse_kernels/cuda/test_torch_layers.py",
    ], outcome
    asked = gpu_tests.run_tests(30.0, [sys.executable, "-c", f"import os; print(os.environ[{PLUGINS!r}], 'passed')"])
    assert asked.verdict == "GPU tests: passed: 1 passed"
