"""Sweeps on a real Slurm: a controller and three nodes on this machine's loopback, no accounting, no munge.

Debian's package is enough (`apt-get install slurm-wlm`); none of its services has to run.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import node_tasks
import pytest

from latbench.errors import EnvironmentUnusable
from latbench.runners import slurm_nodes
from latbench.runners.slurm_nodes import SlurmNodes, list_queued_jobs
from latbench.runners.worker import load_function
from latbench.sweeping.cluster import ClusterSite
from latbench.sweeping.settings import SweepSettings
from latbench.sweeping.sweep import run_sweep_on_cluster
from latbench.tables.table import read_table
from latbench.workloads.points import Point
from sparse_kernels.patterns import VectorWise
from sparse_kernels.shapes import LinearShape

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="no Slurm here: apt-get install slurm-wlm"),
]

TASKS = Path(node_tasks.__file__)
NODES = ("n0", "n1", "n2")
DEVICE = "nvidia-a100-sxm4-80gb"
QUICK = SweepSettings(max_seconds=0.2, round_seconds=0.02, block_points=4)

# Schedules at once; kills what does not end; whoever starts it is its user, and root's key is not asked for.
CONFIGURATION = """
ClusterName=made
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
KillWait=2
ReturnToService=2
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Path]:
    """The cluster's folder."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, port=free_port(), user=pwd.getpwuid(os.geteuid()).pw_name, folder=folder)
    for name in NODES:
        text += f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 RealMemory=100\n"
        (folder / f"spool-{name}").mkdir()
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(f"{text}PartitionName=all Nodes=ALL Default=YES MaxTime=90\n")
    daemons: list[subprocess.Popen[bytes]] = []
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("wb") as log:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("LATBENCH_LOCKS", str(folder / "locks"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        try:
            for command in (["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in NODES)):
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
            until(lambda: said("sinfo", "-h", "-t", "idle", "-o", "%D") == "3", (folder / "log").read_text)
            yield folder
            assert said("squeue", "-h") == ""
        finally:
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGKILL)
                daemon.wait()
            shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def until(condition: Callable[[], bool], otherwise: Callable[[], str] = str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {otherwise()}"
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_nodes, "TICK_SECONDS", 0.5)


def point(m: int, sparsity: float) -> Point:
    return Point(DEVICE, "cupy", "auto", LinearShape(m, 8, 4), VectorWise(8), sparsity, 1)


def test_a_cancelled_job_costs_no_point_and_none_is_there_twice(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [point(m, sparsity) for m in range(1, 16) for sparsity in (0.5, 0.6, 0.75, 0.9)]
    out, cancelled = tmp_path / "out", []

    def cancel_a_busy_one() -> None:
        """The node of the block that was written last is idle now; the others are not."""
        frame = read_table(out)
        if not cancelled and len(frame) >= 16:
            idle = frame["device_uuid_hash"][frame["block"].idxmax()]
            hash_of = load_function(f"{TASKS}:hash_of")
            jobs = [line.split() for line in said("squeue", "-h", "-t", "RUNNING", "-o", "%A %N").splitlines()]
            cancelled.append(next(number for number, node in jobs if hash_of(node) != idle))
            subprocess.run(["scancel", cancelled[0]], check=True)

    told: list[str] = []
    with SlurmNodes(None, ["nodes=3", "partition=all"], told.append) as taken:
        there = ClusterSite(taken, DEVICE, (f"{TASKS}:Machine",), 0, QUICK)
        summary = run_sweep_on_cluster(
            out, lambda table: points, elsewhere=there, settings=QUICK, saved=cancel_a_busy_one
        )
        assert [f"(job {cancelled[0]}) was lost: " in reason for reason in taken.lost.values()] == [True]
    assert list(summary.statuses.values()) == ["ok"] * 60
    frame = read_table(out)
    assert len(frame) == 60 and set(frame["point_id"]) == {each.id for each in points}
    assert frame["device_uuid_hash"].nunique() >= 2 and frame.groupby("block")["env_id"].nunique().eq(1).all()
    until(lambda: not said("squeue", "-h"))
    assert list_queued_jobs(["999999"]) == list_queued_jobs([*cancelled, "999999"]) == {}
    monkeypatch.setenv("SLURM_CONF", "/nowhere")
    assert list_queued_jobs(cancelled) is None


def test_why_slurm_lets_a_job_wait_is_told_and_one_that_ends_in_the_queue_is_given_up(slurm: Path) -> None:
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if "PartitionTimeLimit" in line:
            subprocess.run(["scancel", "--me"], check=True)

    with (
        SlurmNodes(None, ["time=1000"], tell) as taken,
        pytest.raises(EnvironmentUnusable, match=r"job \d+ was lost: it ended before it was heard of"),
    ):
        taken.ask("builtins:len", "four")
    assert "Slurm says why they wait: PartitionTimeLimit (job " in told[-1]


def test_what_slurm_refuses_is_said_in_one_line(slurm: Path) -> None:
    for options, reason in (
        (["partition=moon"], "invalid partition specified: moon"),
        (["constraint=fast"], "Invalid feature specification"),
        (["time=soon"], "Invalid --time specification"),
        (["mem-per-cpu=1G"], "mutually exclusive"),
    ):
        with pytest.raises(EnvironmentUnusable, match=f"Slurm takes no job with --{options[0]}: .*{reason}; `sinfo"):
            SlurmNodes(None, options)
    with pytest.raises(EnvironmentUnusable, match=r"--gres=gpu:a100:1: .*Invalid generic resource"):
        SlurmNodes("a100")


def test_a_sweep_from_the_command_line(slurm: Path, tiny: Path, tmp_path: Path) -> None:
    command = ["-m", "latbench.cli.main", "sweep", "--cpu", "--on", "slurm", "--slurm", "nodes=2", "--workload", tiny]
    command += ["--backends", "numba", "--patterns", "vector:8", "--sparsities", "0.5", "--threads", "1"]
    ended = subprocess.run(
        [sys.executable, *map(str, command), "-o", tmp_path / "out"], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "slurm" not in ended.stderr.replace("latbench: waiting for Slurm", "").lower(), ended.stderr
    assert read_table(tmp_path / "out")["point_id"].nunique() == 7
