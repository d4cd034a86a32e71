"""The processors that this process may use: its affinity, the quotas of its control groups, and what Slurm granted.

Every default number of threads comes from here, and every refusal of too many threads. systemd's CPUQuota= and the
limits of containers are quotas of control groups.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from latbench.base.cgroups import list_cgroups, read_text_file
from latbench.errors import UsageError

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
"""Environment variables with which libraries start so many threads."""

SLURM_VARIABLES = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")
"""Processors that Slurm granted; the first is only there if the job asked for it."""

_CPUS = Path("sys/devices/system/cpu")


@dataclass(frozen=True)
class CpuQuota:
    """Time that a control group grants.

    Parameters
    ----------
    processors
        Processors' worth of time.
    file
        The file that says so.
    throttled_periods
        How often the quota was used up; None where that is hidden.
    """

    processors: float
    file: Path
    throttled_periods: int | None = None


@dataclass(frozen=True)
class Processors:
    """What this process may use.

    Parameters
    ----------
    hardware_threads
        Hardware threads that its affinity allows.
    cores
        Cores that they belong to. Two threads of one core count once, because the second adds nothing to a kernel
        that fills the vector units.
    quota
        The tightest quota of its control groups; None without one.
    granted
        Processors that Slurm granted; None outside of Slurm.
    granted_by
        The variable that says so.
    faults
        Sentences on what could not be read.
    """

    hardware_threads: int
    cores: int
    quota: CpuQuota | None = None
    granted: int | None = None
    granted_by: str = ""
    faults: tuple[str, ...] = ()

    @property
    def most_threads(self) -> int:
        """The most threads that can run all the time. A part of a processor counts only where there is no whole."""
        return min(self._limits())

    @property
    def default_threads(self) -> int:
        """Threads of an engine by default: one a core."""
        return min(self.cores, self.most_threads)

    @property
    def reason(self) -> str:
        """What limits `most_threads`, in words."""
        limits = self._limits()
        return limits[min(limits)]

    def _limits(self) -> dict[int, str]:
        """Return {number of threads: what limits it}; of equal limits the one that is easiest to change counts."""
        limits = {self.hardware_threads: "its affinity"}
        if self.quota is not None:
            limits[max(1, int(self.quota.processors))] = (
                f"the quota of {self.quota.processors:g} in {self.quota.file}"
            )
        if self.granted is not None:
            limits[self.granted] = f"{self.granted_by}={self.granted}"
        return limits


def read_processors(
    root: Path = Path("/"), *, allowed: set[int] | None = None, variables: Mapping[str, str] | None = None
) -> Processors:
    """Return what this process may use.

    Parameters
    ----------
    root
        The folder in which /proc and /sys lie.
    allowed
        Hardware threads that the affinity allows; None for those of this process.
    variables
        Environment variables; None for those of this process.
    """
    allowed = list_allowed_processors() if allowed is None else allowed
    topologies = {cpu: root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list" for cpu in allowed}
    cores = {read_text_file(topology) or str(cpu) for cpu, topology in topologies.items()}
    faults: list[str] = []
    quotas = _read_quotas(root, faults)
    name, granted = _read_grant(os.environ if variables is None else variables, faults)
    return Processors(
        len(allowed), len(cores), min(quotas, key=lambda quota: quota.processors, default=None),
        granted, name, tuple(dict.fromkeys(faults)),
    )  # fmt: skip


def list_allowed_processors() -> set[int]:
    """Return the hardware threads that this process's affinity allows."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def count_cores() -> int:
    """Return the number of cores that this process may use, which is the default number of threads."""
    return read_processors().default_threads


def check_threads(threads: int, asked: str, remedy: str | None = None) -> None:
    """Raise UsageError if this process cannot run so many threads at the same time.

    `asked` says who wants them, and `remedy` what to do; None: use fewer.
    """
    here = read_processors()
    most = here.most_threads
    if threads > most:
        processors = "1 processor" if most == 1 else f"{most} processors"
        raise UsageError(
            f"{asked}: this process may use {processors} ({here.reason}), and more threads would only wait; "
            f"{remedy or 'use no more than that'}"
        )


def select_threads(wanted: int | None) -> int:
    """Return the number of threads that --threads asks for; None: one a core. Raises UsageError for too many."""
    if wanted is None:
        return count_cores()
    check_threads(wanted, f"--threads {wanted}")
    return wanted


def limit_default_threads() -> None:
    """Let libraries that this process loads later start no more threads than a quota or Slurm grants.

    They see the affinity, but neither of these. Variables that are set stay.
    """
    here = read_processors()
    if here.most_threads < here.hardware_threads:
        for name in THREAD_VARIABLES:
            os.environ.setdefault(name, str(here.default_threads))


def _read_quotas(root: Path, faults: list[str]) -> list[CpuQuota]:
    """Return the quotas of all control groups of this process; add sentences on bad files to `faults`."""
    _read(root / "proc/self/cgroup", faults)
    found = []
    for group in list_cgroups("cpu", root):
        stat = re.search(r"^nr_throttled (\d+)", read_text_file(group / "cpu.stat") or "", flags=re.M)
        throttled = int(stat[1]) if stat else None
        for file, text in (
            (group / "cpu.max", _read(group / "cpu.max", faults)),
            (group / "cpu.cfs_quota_us", _read_old_quota(group, faults)),
        ):
            if text is None:
                continue
            numbers = re.fullmatch(r"(max|-1|\d+)\s+(\d+)", text, flags=re.A)
            if numbers is None or not int(numbers[2]) or numbers[1] == "0":
                faults.append(
                    f"{file} holds {text[:40]!r}, which is no quota and a period in microseconds: a quota there is "
                    "ignored; give --threads"
                )
            elif numbers[1] not in ("max", "-1"):
                found.append(CpuQuota(int(numbers[1]) / int(numbers[2]), file, throttled))
    return found


def _read_old_quota(group: Path, faults: list[str]) -> str | None:
    """Return the quota and period of a group of version 1 in the words of version 2; None where it has none."""
    quota = _read(group / "cpu.cfs_quota_us", faults)
    period = None if quota is None else _read(group / "cpu.cfs_period_us", faults)
    return None if quota is None or period is None else f"{quota} {period}"


def _read_grant(variables: Mapping[str, str], faults: list[str]) -> tuple[str, int | None]:
    """Return the variable in which Slurm tells the processors of this task, and their number."""
    for name in SLURM_VARIABLES:
        text = variables.get(name, "").strip()
        if re.fullmatch(r"0*[1-9]\d*", text, flags=re.A):
            return name, int(text)
        if text:
            faults.append(f"{name} is {text[:40]!r}, which is no number of processors: it is ignored; give --threads")
    return "", None


def _read(path: Path, faults: list[str]) -> str | None:
    """Return the content of a file, None where there is none; add a sentence to `faults` if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        faults.append(f"{path} cannot be read ({error.strerror}): a quota there is ignored; give --threads")
        return None
