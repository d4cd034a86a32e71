"""A worker process: what goes wrong in it is reported, and stays in it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import worker_tasks

from latbench.runners import worker_process
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied

TASKS = Path(worker_tasks.__file__)


def task(name: str) -> str:
    return f"{TASKS}:{name}"


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker(threads=1, name="test") as worker:
        yield worker


def gone(pid: int) -> bool:
    """Whether the process is no more, or will be within a few seconds."""
    end = time.monotonic() + 10
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
    return True


def test_a_call_gives_its_result_from_another_process(worker: Worker) -> None:
    assert worker.call(task("add"), 2, 3) == 5
    assert worker.call("os:getpid") not in (None, os.getpid())


def test_each_worker_has_its_own_thread_settings() -> None:
    with Worker(threads=3, environment={"LATBENCH_TEST": "here"}) as worker:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
            assert worker.call(task("environment"), name) == "3"
        assert worker.call(task("environment"), "LATBENCH_TEST") == "here"


def test_a_worker_imports_what_its_parent_imports_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_module.py").write_text("def answer(): return 42\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "json.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with Worker(threads=1) as worker:
        assert worker.call("users_module:answer") == 42
        assert worker.call("json:dumps", [1]) == "[1]"


def test_what_is_prepared_stays_and_is_sampled(worker: Worker) -> None:
    first, second = worker.prepare(task("make_counter"), 0), worker.prepare(task("make_counter"), 100)
    assert first.facts == {"start": 0} and second.facts == {"start": 100}
    assert first.inner_loops > 1  # it takes far less than the clock can tell
    samples = worker.sample(first, 0.01)
    assert len(samples) > 5 and all(0 < sample < 1e-3 for sample in samples)
    worker.drop([first])
    with pytest.raises(TaskFailed):
        worker.sample(first, 0.01)
    assert worker.sample(second, 0.0)


def test_a_renewed_worker_is_a_new_process_that_imports_nothing_again(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import os, pathlib\n"
        "with (pathlib.Path(__file__).parent / 'imported').open('a') as file: file.write(f'{os.getpid()} ')\n"
        "def counted(seen=[]): seen.append(0); return len(seen)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before, prepared = worker.call("os:getpid"), worker.prepare(task("make_counter"), 0)
    pids = []
    for _ in range(3):
        worker.renew("slow_to_import:counted")
        assert worker.call("slow_to_import:counted") == 1  # nothing is left of the process before
        assert worker.call("slow_to_import:counted") == 2
        pids.append(worker.call("os:getpid"))
        assert not worker.holds(prepared)
        prepared = worker.prepare(task("make_counter"), 0)
        assert worker.sample(prepared, 0.0)
    [imported_by] = map(int, (tmp_path / "imported").read_text().split())
    assert len({before, imported_by, *pids}) == 5
    assert all(gone(pid) for pid in (before, *pids[:-1]))
    worker.close()
    assert gone(pids[-1]) and gone(imported_by)


def test_what_cannot_be_imported_renews_nothing(worker: Worker) -> None:
    for _ in range(2):
        with pytest.raises(TaskFailed, match="nowhere"):
            worker.renew("nowhere:nothing")
        assert worker.call(task("add"), 1, 1) == 2


def test_an_exception_is_reported_and_the_worker_lives(worker: Worker) -> None:
    pid = worker.call("os:getpid")
    with pytest.raises(TaskFailed, match="ValueError: math domain error") as caught:
        worker.call("math:sqrt", -1)
    assert caught.value.kind == "ValueError" and "Traceback" in caught.value.details
    with pytest.raises(TaskFailed) as caught:
        worker.call("sys:exit", 3)
    assert caught.value.kind == "SystemExit"
    with pytest.raises(TaskFailed, match="nowhere"):
        worker.call("nowhere:nothing")
    with pytest.raises(TaskFailed):
        worker.call(task("unpicklable"))
    assert worker.call("os:getpid") == pid


def test_running_out_of_memory_has_one_name(worker: Worker) -> None:
    with pytest.raises(TaskFailed) as caught:
        worker.call(task("ask_for_too_much"))
    assert caught.value.kind == "MemoryError"


DEATHS = {
    "crash": ("crash", "exit code 7: the last words"),
    "segfault": ("crash", "by signal SIGSEGV"),
    "killed_for_memory": ("oom", "memory ran out"),
    "end_well": ("crash", "exit code 0"),
    "die_of_a_real_time_signal": ("crash", "by signal 40"),
    "write_garbage": ("crash", "an invalid answer"),
    "announce_too_much": ("crash", "closed its connection but still runs"),
    "announce_what_never_comes": ("crash", "closed its connection but still runs"),
    "die_within_an_answer": ("crash", "exit code 9"),
    "hang_up": ("crash", "closed its connection but still runs"),
}
OF_A_FORK = ("crash", "segfault", "killed_for_memory", "end_well", "hang_up")


@pytest.mark.parametrize(
    ("name", "forked"), [*((name, False) for name in DEATHS), *((name, True) for name in OF_A_FORK)]
)
def test_a_death_is_told_with_its_reason_and_the_next_call_works(
    worker: Worker, name: str, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "END_SECONDS", 0.1)
    monkeypatch.setattr(worker_process, "MESSAGE_SECONDS", 0.1)
    if forked:
        worker.renew(task("add"))
    prepared = worker.prepare(task("make_counter"), 0)
    reason, words = DEATHS[name]
    with pytest.raises(WorkerDied, match=words) as caught:
        worker.call(task(name))
    assert caught.value.reason == reason
    assert not worker.holds(prepared)
    assert worker.call(task("add"), 1, 1) == 2
    with pytest.raises(WorkerDied):
        worker.sample(prepared, 0.01)


@pytest.mark.parametrize(("left", "reason"), [(0.3, "late"), (-5.0, "late"), (60.0, "timeout"), (None, "timeout")])
def test_a_request_ends_with_the_time_that_its_caller_has(
    worker: Worker, left: float | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "LEAST_SECONDS", 0.1)
    assert worker.call(task("add"), 1, 1) == 2
    worker.seconds_left = lambda: left
    began = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        worker.call(task("hang"), timeout=0.8)
    assert caught.value.reason == reason
    assert time.monotonic() - began < (0.7 if reason == "late" else 10)
    worker.seconds_left = lambda: None
    assert worker.call(task("add"), 1, 1) == 2


def test_another_thread_may_kill_the_process_that_a_request_waits_for(worker: Worker) -> None:
    assert worker.call(task("add"), 1, 1) == 2
    timer = threading.Timer(0.2, worker.kill)
    timer.start()
    with pytest.raises(WorkerDied) as caught:
        worker.call(task("hang"), timeout=30.0)
    assert caught.value.reason == "oom"  # which nobody can tell from it
    assert worker.call(task("add"), 1, 1) == 2
    worker.close()
    worker.kill()  # nothing is left to kill


def test_a_hang_ends_with_its_timeout(worker: Worker) -> None:
    pid = worker.call("os:getpid")
    with pytest.raises(WorkerDied, match=r"no answer for 0\.2 s") as caught:
        worker.call(task("hang"), timeout=0.2)
    assert caught.value.reason == "timeout"
    assert gone(pid)
    assert worker.call(task("add"), 1, 1) == 2


def test_a_worker_that_is_stopped_is_a_hang(worker: Worker) -> None:
    pid = worker.call("os:getpid")
    with pytest.raises(WorkerDied, match="no answer") as caught:
        worker.call(task("stop"), timeout=0.2)
    assert caught.value.reason == "timeout"
    assert gone(pid)


def test_of_a_long_log_only_the_end_is_read(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_QUOTED_BYTES", 20)
    with pytest.raises(WorkerDied, match="exit code 7: the last words"):
        worker.call(task("crash"))


def test_noise_on_stdout_does_not_break_the_protocol(worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
    assert worker.call(task("shout")) == "done"
    assert worker.call(task("add"), 1, 1) == 2
    assert capfd.readouterr() == ("", "")


def test_closing_takes_what_the_worker_started_along() -> None:
    with Worker(threads=1) as worker:
        pid, child = worker.call("os:getpid"), worker.call(task("start_grandchild"))
    assert gone(pid) and gone(child)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("begin", ["", f"worker.renew({task('add')!r})"])
def test_no_worker_outlives_its_parent(end: signal.Signals, begin: str) -> None:
    script = (
        "import sys, time\n"
        "from latbench.runners.worker_process import Worker\n"
        "worker = Worker(threads=1)\n"
        f"{begin}\n"
        "sys.stdout.write(f'{worker.call(\"os:getpid\")}\\n')\n"
        "sys.stdout.flush()\n"
        f"worker.call({task('hang')!r})\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        parent.send_signal(end)
    assert gone(pid)
