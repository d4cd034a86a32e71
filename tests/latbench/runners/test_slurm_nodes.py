"""Sweeps through submitit's own SlurmExecutor, on a Slurm whose commands are made up: its jobs are processes here."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import node_tasks
import pytest
from pyarrow import parquet

from latbench.errors import EnvironmentUnusable, Incomplete, UsageError
from latbench.runners import slurm_nodes
from latbench.runners.block_scheduler import LostNodes
from latbench.runners.slurm_nodes import SlurmNodes, parse_slurm_options
from latbench.runners.worker import load_function
from latbench.sweeping.cluster import ClusterSite
from latbench.sweeping.settings import SweepSettings, SweepSummary
from latbench.sweeping.sweep import run_sweep, run_sweep_on_cluster
from latbench.tables.table import read_environments, read_table
from latbench.workloads.points import Point
from sparse_kernels.patterns import VectorWise
from sparse_kernels.shapes import LinearShape

TASKS = Path(node_tasks.__file__)
TRIPLE = (f"{TASKS}:tool", 3)
DEVICE = "nvidia-a100-sxm4-80gb"
FINE, KILLS = range(2)  # as in node_tasks.py
QUICK = SweepSettings(max_seconds=0.2, round_seconds=0.02, block_points=4)


class Slurm:
    """The made-up Slurm's books."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def jobs(self) -> list[Path]:
        return sorted(self.folder.glob("job-*"), key=lambda job: int(job.name[4:]))

    def script(self, number: int) -> str:
        return (self.folder / f"job-{number}" / "script").read_text()

    def running(self) -> list[Path]:
        return [job for job in self.jobs() if load_function(f"{TASKS.with_name('slurm_fake.py')}:alive")(job)]

    def kill(self, job: Path) -> None:
        os.killpg(int((job / "pid").read_text()), signal.SIGKILL)

    def hold(self, number: int) -> Path:
        file = self.folder / f"hold-{number}"
        file.touch()
        return file


@pytest.fixture
def slurm(tmp_path: Path, own_lock: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    folder, commands = tmp_path / "slurm", tmp_path / "bin"
    for new in (folder, commands):
        new.mkdir()
    for name in ("sbatch", "squeue", "scancel", "srun"):
        (commands / name).symlink_to(TASKS.with_name("slurm_fake.py"))
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setattr(slurm_nodes, "TICK_SECONDS", 0.5)
    found = Slurm(folder)
    yield found
    for job in found.running():
        with contextlib.suppress(ProcessLookupError):
            found.kill(job)


# What is asked of Slurm --------------------------------------------------------------------------------------------


def test_options_are_those_of_sbatch_but_for_the_number_of_nodes() -> None:
    assert parse_slurm_options([]) == (1, {})
    assert parse_slurm_options(["nodes=4", "partition=gpu", "--mail_type=END", "comment=a=b, c"]) == (
        4,
        {"partition": "gpu", "mail-type": "END", "comment": "a=b, c"},
    )


@pytest.mark.parametrize("option", ["partition", "=gpu", "partition=", "two words=1", "Partition=gpu", "a=b\nc"])
def test_an_option_that_is_none_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match="--slurm takes key=value, such as partition=gpu"):
        parse_slurm_options([option])


def test_options_that_would_undo_a_sweep_are_refused() -> None:
    for option in ("array=0-9", "output=log", "ntasks=2", "ntasks_per_node=2", "exclusive=user", "clusters=b"):
        with pytest.raises(UsageError, match="is not allowed"):
            parse_slurm_options([option])
    for count in ("0", "many", "-1", "1.5"):
        with pytest.raises(UsageError, match="--slurm nodes= takes a number of nodes"):
            parse_slurm_options([f"nodes={count}"])


def test_each_job_is_one_process_with_a_node_and_a_gpu_for_itself(slurm: Slurm) -> None:
    slurm.hold(1), slurm.hold(2)
    with SlurmNodes("a100", ["nodes=2", "partition=gpu", "account=me", "time=2:00:00"]):
        assert len(slurm.running()) == 2
    asked = slurm.script(2)
    for line in (
        "exclusive",
        "no-requeue",
        "gres=gpu:a100:1",
        "mem=0",
        "nodes=1",
        "partition=gpu",
        "account=me",
        "time=2:00:00",
    ):
        assert f"#SBATCH --{line}\n" in asked
    assert "srun" not in asked and len(asked.split("--time")) == 2
    assert not slurm.running()
    assert not list((slurm.folder.parent / "cache" / "latbench" / "slurm").iterdir())


def test_a_gpu_is_asked_of_slurm_as_it_is_typed_without_spaces(slurm: Slurm) -> None:
    slurm.hold(1)
    with SlurmNodes("A100 80GB"):
        assert "#SBATCH --gres=gpu:a100-80gb:1\n" in slurm.script(1)


def test_what_slurm_refuses_is_said_in_one_line(slurm: Slurm, latbench: Any) -> None:
    said = latbench("sweep", "--gpu", "h100", "--on", "slurm").refused(3)
    assert said.startswith("latbench: Slurm takes no job with --gres=gpu:h100:1: Batch job submission failed: ")
    assert "Requested node configuration is not available; `sinfo -o '%P %G'` lists" in said
    said = latbench("sweep", "--cpu", "--on", "slurm", "--slurm", "partition=moon").refused(3)
    assert "Slurm takes no job with --partition=moon: invalid partition specified: moon; `sinfo" in said
    assert not slurm.jobs()


def test_a_job_does_not_inherit_the_processors_of_its_submitter(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    with SlurmNodes(None) as nodes:
        assert list(nodes.ask("os:getenv", "SLURM_CPUS_PER_TASK").values()) == [None]
    assert os.environ["SLURM_CPUS_PER_TASK"] == "1"


def test_options_are_refused_before_anything_is_asked(slurm: Slurm, latbench: Any) -> None:
    assert "--slurm takes key=value" in latbench("sweep", "--cpu", "--on", "slurm", "--slurm", "gpu").refused(2)
    assert "--slurm is for a sweep with --on slurm" in latbench("sweep", "--cpu", "--slurm", "nodes=2").refused(2)
    assert "unknown GPU 'x100'" in latbench("sweep", "--gpu", "x100", "--on", "slurm").refused(2)
    assert not slurm.jobs()


def test_without_submitit_or_slurm_it_says_what_to_do(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no Slurm here, no command sbatch" in latbench("sweep", "--cpu", "--on", "slurm").refused(3)
    monkeypatch.setitem(sys.modules, "submitit", None)
    said = latbench("sweep", "--cpu", "--on", "slurm").refused(3)
    assert said == "latbench: --on slurm needs submitit, it is not installed here: pip install submitit"


# What jobs do ------------------------------------------------------------------------------------------------------


def answers(taken: SlurmNodes, numbers: list[Any], **options: Any) -> dict[Any, Any]:
    return dict(taken.run(TRIPLE, numbers, lambda number: (number,), **options))


@pytest.mark.slow
def test_nodes_answer_as_they_start_and_a_late_one_helps(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    late, told = slurm.hold(2), []
    with SlurmNodes(None, ["nodes=2"], told.append) as taken:
        [(node, four)] = taken.ask("builtins:len", "four").items()
        assert four == 4 and node.name.endswith("(job 1)")
        taken.keep([node])  # what was not asked stays
        assert answers(taken, [1, 2, 3]) == {1: 3, 2: 6, 3: 9}
        late.unlink()
        while not all(job.host for job in taken._jobs.values()):
            assert answers(taken, [4, 5]) == {4: 12, 5: 15}
        assert answers(taken, list(range(20))) == {number: 3 * number for number in range(20)}
        with pytest.raises(RuntimeError, match=r"(?s)job \d.*Traceback.*TypeError"):
            answers(taken, [None])
    # Where the first job takes long to start, why the other one waits is told as well.
    assert told[0] == "waiting for Slurm to start one of 2 jobs: job 1, job 2"
    assert told[1:] in ([], ["Slurm says why they wait: Resources (job 2)"])
    assert capsys.readouterr() == ("", "") and not slurm.running()


@pytest.mark.slow
def test_why_slurm_lets_jobs_wait_is_told(slurm: Slurm) -> None:
    late, told = slurm.hold(1), []

    def tell(line: str) -> None:
        told.append(line)
        if "Resources" in line:
            late.unlink()

    with SlurmNodes(None, [], tell) as taken:
        assert list(taken.ask("builtins:len", "four").values()) == [4]
    assert told == ["waiting for Slurm to start one of 1 jobs: job 1", "Slurm says why they wait: Resources (job 1)"]


@pytest.mark.slow
def test_a_job_that_ends_in_the_queue_is_given_up(slurm: Slurm) -> None:
    slurm.hold(1)
    with SlurmNodes(None) as taken:
        slurm.kill(slurm.jobs()[0])
        with pytest.raises(EnvironmentUnusable, match="job 1 was lost: it ended before it was heard of"):
            taken.ask("builtins:len", "four")


@pytest.mark.slow
def test_a_sweep_that_is_told_to_end_while_it_waits_leaves_no_job_behind(slurm: Slurm) -> None:
    slurm.hold(1)
    command = [sys.executable, "-m", "latbench.cli.main", "sweep", "--cpu", "--on", "slurm"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as one:
        assert one.stderr is not None and "waiting for Slurm" in one.stderr.readline()
        one.terminate()
        assert "latbench: interrupted" in one.stderr.read()
    assert one.returncode == 4 and slurm.jobs() and not slurm.running()


@pytest.mark.slow
def test_a_node_that_refuses_is_named(slurm: Slurm) -> None:
    with SlurmNodes("a100") as taken:
        with pytest.raises(EnvironmentUnusable, match=r"^on node .* \(job 1\): --gpu a100 requested, but "):
            taken.ask(f"{TASKS}:refuse")
        with pytest.raises(EnvironmentUnusable, match=r"\(job 1\): ModuleNotFoundError: No module named 'nowhere'$"):
            taken.ask("nowhere:look")
        with pytest.raises(Incomplete, match="every node that could measure is lost"):
            list(taken.run((f"{TASKS}:refuse",), [1], lambda number: (number,)))
        assert next(iter(taken.lost.values())).endswith("but no NVIDIA driver; it is left out")


@pytest.mark.slow
def test_a_node_whose_disk_is_full_is_done_without_and_its_items_are_not_blamed(slurm: Slurm, tmp_path: Path) -> None:
    with SlurmNodes(None, ["nodes=2"]) as taken:
        prepare = (f"{TASKS}:tool_of_a_full_disk", str(tmp_path), 1)
        found = dict(taken.run(prepare, [1, 2, 3], lambda number: (number,), tries=1))
        assert found == {1: 3, 2: 6, 3: 9} and len(taken.nodes) == 1
        [said] = taken.lost.values()
        assert said.endswith("OSError: [Errno 28] No space left on device; it is left out")


@pytest.mark.slow
def test_a_job_that_ends_before_it_gets_here_is_said(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_nodes.socket, "gethostname", lambda: "no-such-host.invalid")
    with (
        SlurmNodes(None) as taken,
        pytest.raises(EnvironmentUnusable, match=r"cannot reach no-such-host.invalid:\d+"),
    ):
        taken.ask("builtins:len", "four")


@pytest.mark.slow
def test_who_has_no_key_is_not_listened_to(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_nodes, "MESSAGE_SECONDS", 1)
    with SlurmNodes(None) as taken:
        port = taken._server.getsockname()[1]
        with slurm_nodes.socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"\0\0\0\4junk")
            assert list(taken.ask("builtins:len", "four").values()) == [4]


def point(m: int, sparsity: float = 0.5, behaviour: int = FINE) -> Point:
    return Point(DEVICE, "cupy", "auto", LinearShape(m, 8, 4), VectorWise(8), sparsity, 1, seed=behaviour)


def measure(folder: Path, points: list[Point], **options: Any) -> tuple[SweepSummary, dict[str, str]]:
    """What a sweep did, and which nodes it lost."""
    with SlurmNodes("a100", ["nodes=3"]) as taken:
        there = ClusterSite(taken, DEVICE, (f"{TASKS}:Machine",), 0, QUICK)
        return run_sweep_on_cluster(
            folder, lambda table: points, elsewhere=there, settings=QUICK, **options
        ), taken.lost


@pytest.mark.slow
def test_a_killed_job_costs_no_point_and_none_is_there_twice(slurm: Slurm, tmp_path: Path) -> None:
    points = [point(m, sparsity) for m in range(1, 16) for sparsity in (0.5, 0.6, 0.75, 0.9)]
    out, killed = tmp_path / "out", []

    def kill_a_busy_one() -> None:
        """The job of the block that was written last is idle now; the others are not."""
        frame = read_table(out)
        if not killed and len(frame) >= 16:
            last = frame["device_uuid_hash"][frame["block"].idxmax()]
            hash_of = load_function(f"{TASKS}:hash_of")
            killed.append(next(job for job in slurm.jobs() if hash_of(str(job / "cache")) != last))
            slurm.kill(killed[0])

    summary, lost = measure(out, points, saved=kill_a_busy_one)
    assert list(summary.statuses.values()) == ["ok"] * 60
    assert [f"(job {killed[0].name[4:]})" in reason for reason in lost.values()] == [True]
    frame = read_table(out)
    assert len(frame) == 60 and set(frame["point_id"]) == {each.id for each in points}
    environments = read_environments(out).set_index("env_id")
    assert set(frame["env_id"]) <= set(environments.index) and len(environments) >= 3
    assert frame["run_id"].nunique() == 1 and frame.groupby("block")["env_id"].nunique().eq(1).all()
    assert len(slurm.jobs()) == 4 and not slurm.running()  # it was submitted again

    machine = load_function(f"{TASKS}:Machine")()
    run_sweep(tmp_path / "here", lambda table: points[:4], machine=machine, settings=QUICK)
    here, there = (next(folder.glob("part-*.parquet")) for folder in (tmp_path / "here", out))
    assert parquet.read_schema(here).serialize() == parquet.read_schema(there).serialize()
    assert measure(out, points)[0].skipped == 60


@pytest.mark.slow
def test_a_point_that_takes_jobs_down_gets_a_row_with_the_reason(slurm: Slurm, tmp_path: Path) -> None:
    deadly = point(1, 0.75, KILLS)
    points = [point(1), deadly, point(1, 0.9), point(2)]
    summary, _ = measure(tmp_path / "out", points)
    assert summary.statuses == {each.id: "error" if each == deadly else "ok" for each in points}
    row = read_table(tmp_path / "out").set_index("point_id").loc[deadly.id]
    assert "may take nodes down" in row["error"] and "was lost: " in row["error"]


@pytest.mark.slow
def test_jobs_that_end_again_and_again_are_given_up(slurm: Slurm) -> None:
    with SlurmNodes("a100") as taken:
        [(_, answer)] = taken.run((f"{TASKS}:fatal",), [1], lambda number: (number,))
        assert isinstance(answer, LostNodes) and len(answer.reasons) == 2 and taken.nodes == []
        with pytest.raises(Incomplete, match="every node that could measure is lost"):
            answers(taken, [2])
    assert len(slurm.jobs()) == 2


@pytest.mark.slow
def test_a_sweep_from_the_command_line(slurm: Slurm, latbench: Any, tiny: Path, tmp_path: Path) -> None:
    command = ("sweep", "--cpu", "--on", "slurm", "--slurm", "nodes=2", "--workload", tiny, "--backends", "numba")
    ran = latbench(*command, "--patterns", "vector:8", "--sparsities", "0.5", "--threads", 1, "-o", tmp_path / "out")
    assert ran.code == 0, ran.err
    # Points, not rows: what was noisy is measured again.
    assert read_table(tmp_path / "out")["point_id"].nunique() == 7 and not slurm.running()
