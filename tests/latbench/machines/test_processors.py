"""How many processors a process may use, from made-up files of every kind of control group, and from Slurm."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from latbench.cli import main as entry
from latbench.errors import UsageError
from latbench.machines import processors
from latbench.machines.noise_sources import list_advice, read_host
from latbench.machines.processors import Processors, check_threads, read_processors, select_threads

V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/cpu,cpuacct"
MOUNT_V2 = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNT_V1 = "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
OTHERS = (
    "23 1 8:1 / / rw,relatime - ext4 /dev/vda1 rw\n"
    "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "34 31 0:31 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
    "not a mount\n"
)
EIGHT = set(range(8))


@pytest.fixture(autouse=True)
def outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what Slurm may have granted to these tests."""
    for name in processors.SLURM_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write the files of a made-up machine."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def v1(quota: int, folder: str = V1) -> dict[str, str]:
    """Return the files of a group of version 1 with this quota in microseconds of a period of 100 ms."""
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        # Version 2: the group itself, the group around it, and no limit.
        ({"proc/self/cgroup": "0::/box\n", f"{V2}/box/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/user.slice/user-0.slice/run-1.scope\n",
                f"{V2}/user.slice/cpu.max": "max 100000\n",
                f"{V2}/user.slice/user-0.slice/cpu.max": "200000 100000\n",
                f"{V2}/user.slice/user-0.slice/run-1.scope/cpu.max": "600000 100000\n",
            },
            2,
        ),
        ({"proc/self/cgroup": "0::/box\n", f"{V2}/box/cpu.max": "max 100000\n"}, None),
        # A namespace of control groups: its own group is the top, and there are groups inside of it.
        (
            {
                "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": OTHERS + MOUNT_V2.format(top="/"),
                f"{V2}/cpu.max": "300000 100000\n", f"{V2}/other/cpu.max": "100000 100000\n",
            },
            3,
        ),
        # The same, mounted before the namespace was made: which group is its own cannot be told from the mount.
        (
            {
                "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": MOUNT_V2.format(top="/../.."),
                f"{V2}/box/cpu.max": "100000 100000\n",
            },
            None,
        ),
        # A process that was moved out of its namespace must not read files outside of the mount.
        (
            {
                "proc/self/cgroup": "0::/../other\n", f"{V2}/cpu.max": "400000 100000\n",
                "sys/fs/other/cpu.max": "100000 100000\n",
            },
            4,
        ),
        # A container without a namespace: only its own group is visible, though its path is the host's.
        (
            {
                "proc/self/cgroup": "0::/docker/1/job\n", "proc/self/mountinfo": MOUNT_V2.format(top="/docker/1"),
                f"{V2}/cpu.max": "500000 100000\n", f"{V2}/job/cpu.max": "300000 100000\n",
            },
            3,
        ),
        # Version 1: nested groups, of which the outer one is the tighter; -1 is no limit.
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/box/inner\n", **v1(-1), **v1(150000, f"{V1}/box"),
                **v1(400000, f"{V1}/box/inner"),
            },
            1.5,
        ),
        # CentOS 7 names the controllers in another order than the folder.
        (
            {
                "proc/self/cgroup": "4:cpuacct,cpu:/box\n", "proc/self/mountinfo": OTHERS + MOUNT_V1.format(top="/"),
                **v1(200000, f"{V1}/box"),
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n",
                "proc/self/mountinfo": OTHERS + MOUNT_V1.format(top="/docker/1"), **v1(50000),
            },
            0.5,
        ),
        # Both versions at once: version 2 holds the processes, and version 1 the processors.
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/box\n1:name=systemd:/box\n0::/box\n", **v1(300000, f"{V1}/box"),
                "proc/self/mountinfo": OTHERS + MOUNT_V1.format(top="/")
                + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
                "sys/fs/cgroup/unified/box/cpu.stat": "usage_usec 1\n",
            },
            3,
        ),
        # ... or the other way round; the cpu controller of version 1 has another group.
        (
            {
                "proc/self/cgroup": "4:memory:/box\n0::/box\n", **v1(100000),
                "sys/fs/cgroup/unified/box/cpu.max": "200000 100000\n",
            },
            2,
        ),
        # A mount with a blank in its name.
        (
            {
                "proc/self/cgroup": "0::/box\n",
                "proc/self/mountinfo": "9 1 0:1 / /my\\040groups rw - cgroup2 none rw\n",
                "my groups/box/cpu.max": "600000 100000\n",
            },
            6,
        ),
        ({}, None),
    ],
)  # fmt: skip
def test_the_tightest_quota_counts(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    found = read_processors(write_files(tmp_path, files), allowed=EIGHT, variables={})
    assert (found.quota and found.quota.processors) == quota
    assert found.faults == ()


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max", 8), ("50000", 1), ("100000", 1), ("199000", 1), ("250000", 2), ("800000", 8), ("9900000", 8)],
)
def test_parts_of_a_processor_count_only_where_there_is_no_whole(tmp_path: Path, quota: str, threads: int) -> None:
    files = {"proc/self/cgroup": "0::/box\n", f"{V2}/box/cpu.max": f"{quota} 100000\n"}
    found = read_processors(write_files(tmp_path, files), allowed=EIGHT, variables={})
    assert found.most_threads == found.default_threads == threads


def test_two_threads_of_a_core_are_one_by_default_and_two_at_most(tmp_path: Path) -> None:
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n"
        for cpu in EIGHT
    }
    write_files(tmp_path, siblings)
    found = read_processors(tmp_path, allowed=EIGHT, variables={})
    assert (found.default_threads, found.most_threads, found.reason) == (4, 8, "its affinity")
    assert read_processors(tmp_path, allowed={0, 1, 4}, variables={}).default_threads == 2


@pytest.mark.parametrize(
    ("variables", "threads", "faults"),
    [
        ({"SLURM_CPUS_ON_NODE": "6"}, 6, 0),
        ({"SLURM_CPUS_ON_NODE": "6", "SLURM_CPUS_PER_TASK": "2"}, 2, 0),
        ({"SLURM_CPUS_PER_TASK": "64"}, 8, 0),  # the affinity is tighter
        ({"SLURM_CPUS_PER_TASK": ""}, 8, 0),
        ({"SLURM_CPUS_PER_TASK": "two", "SLURM_CPUS_ON_NODE": "3"}, 3, 1),
        ({"SLURM_CPUS_PER_TASK": "0"}, 8, 1),
        ({"SLURM_CPUS_PER_TASK": "-1"}, 8, 1),
    ],
)
def test_slurm_grants_processors(tmp_path: Path, variables: dict[str, str], threads: int, faults: int) -> None:
    found = read_processors(tmp_path, allowed=EIGHT, variables=variables)
    assert found.most_threads == found.default_threads == threads
    assert len(found.faults) == faults


def test_the_tightest_of_affinity_quota_and_slurm_is_the_reason(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/box\n", f"{V2}/box/cpu.max": "350000 100000\n"}
    root = write_files(tmp_path, files)
    assert read_processors(root, allowed=EIGHT, variables={}).reason == f"the quota of 3.5 in {root / V2}/box/cpu.max"
    slurm = {"SLURM_CPUS_PER_TASK": "2"}
    assert read_processors(root, allowed=EIGHT, variables=slurm).reason == "SLURM_CPUS_PER_TASK=2"
    assert read_processors(root, allowed={5}, variables=slurm).reason == "its affinity"


@pytest.mark.parametrize(
    "text", ["", "max", "50000", "many 100000", "100000 0", "0 100000", "1e5 100000", "-5 100000"]
)
def test_a_file_that_holds_no_quota_is_a_sentence_of_doctor(tmp_path: Path, text: str) -> None:
    root = write_files(tmp_path, {"proc/self/cgroup": "0::/box\n", f"{V2}/box/cpu.max": text})
    assert read_processors(root, allowed=EIGHT, variables={}).default_threads == 8
    host = read_host(root=root, allowed=EIGHT)
    [advice] = [sentence for sentence in list_advice(host) if "cpu.max" in sentence]
    assert advice == f"{root / V2}/box/cpu.max holds {text!r}, which is no quota and a period in microseconds: " + (
        "a quota there is ignored; give --threads"
    )


def test_files_that_cannot_be_read_are_sentences_of_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"proc/self/cgroup": "0::/box/inner\nnonsense\n", f"{V2}/box/cpu.max": "200000 100000\n"}
    root = write_files(tmp_path, files)
    (root / f"{V2}/box/inner/cpu.max").mkdir(parents=True)
    found = read_processors(root, allowed=EIGHT, variables={})
    assert found.default_threads == 2  # of the group that can be read
    [fault] = found.faults
    assert fault == (
        f"{root / V2}/box/inner/cpu.max cannot be read (Is a directory): a quota there is ignored; give --threads"
    )
    read = Path.read_text

    def refuse(path: Path, **how: str) -> str:
        if path.name == "cgroup":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, **how)

    monkeypatch.setattr(Path, "read_text", refuse)
    [fault] = read_processors(root, allowed=EIGHT, variables={}).faults
    assert "proc/self/cgroup cannot be read (Permission denied)" in fault


def test_bytes_that_are_no_text_are_survived(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"proc/self/cgroup": "0::/box\n", f"{V2}/box/cpu.max": ""})
    (root / f"{V2}/box/cpu.max").write_bytes(b"\xff\xfe 100000")
    (root / f"{V2}/box/cpu.stat").write_bytes(b"\xff")
    (root / "proc/self/mountinfo").write_bytes(b"\xff - \xfe\n")
    assert len(read_processors(root, allowed=EIGHT, variables={}).faults) == 1


def test_more_threads_than_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Processors(8, 4, granted=2, granted_by="SLURM_CPUS_PER_TASK")
    monkeypatch.setattr(processors, "read_processors", lambda: here)
    assert (select_threads(None), select_threads(1), select_threads(2)) == (2, 1, 2)
    with pytest.raises(
        UsageError, match=r"^--threads 3: this process may use 2 processors \(SLURM_CPUS_PER_TASK=2\)"
    ):
        select_threads(3)
    with pytest.raises(UsageError, match=r"would only wait; search again$"):
        check_threads(3, "3 threads", "search again")


@pytest.mark.parametrize("command", [["plan"], ["sweep", "--cpu", "-o", "out"]])
def test_commands_refuse_threads_that_the_process_does_not_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.setattr(entry, "limit_default_threads", lambda: None)  # it would outlast this test
    monkeypatch.setattr(sys, "argv", ["latbench", *command, "--threads", "2"])
    with pytest.raises(SystemExit) as left:
        entry.main()
    assert left.value.code == UsageError.exit_code
    assert "--threads 2: this process may use 1 processor (" in capsys.readouterr().err


def test_libraries_start_no_more_threads_than_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in processors.THREAD_VARIABLES:
        monkeypatch.setenv(name, "gone")  # so that it is put back in the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(processors, "read_processors", lambda: Processors(8, 4))
    processors.limit_default_threads()
    assert not set(processors.THREAD_VARIABLES) & set(os.environ)  # they see the affinity themselves
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(processors, "read_processors", lambda: Processors(8, 4, granted=2, granted_by="X"))
    processors.limit_default_threads()
    assert os.environ["OMP_NUM_THREADS"] == "7"  # the user's own
    assert os.environ["NUMBA_NUM_THREADS"] == os.environ["OPENBLAS_NUM_THREADS"] == "2"
