"""Sources of measurement noise on this machine, and advice on each.

Everything is read from /proc and /sys of Linux. A hidden value is None and gives no advice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from latbench.base.cgroups import read_number, read_text_file, runs_in_container
from latbench.machines.processors import list_allowed_processors, read_processors

_CPUS = Path("sys/devices/system/cpu")

# One runnable thread may be this command itself.
_OWN_LOAD = 1.0
_MUCH_TAKEN, _WHOLLY_TAKEN = 0.4, 0.8
_MUCH_STEAL = 0.01
_FEW_CORES = 2


@dataclass(frozen=True)
class Host:
    """How this machine shares its processors.

    Parameters
    ----------
    processors
        Hardware threads that this process may use.
    cores
        Cores that they belong to.
    governor
        Clock governor.
    turbo
        Whether the clock may rise above its base.
    turbo_switch
        The command that forbids it.
    clock_hertz, most_clock_hertz
        Present mean and greatest clock frequency.
    quota_cores
        Cores' worth of time that the control group grants.
    throttled_periods
        How often the quota was used up.
    granted_by_slurm
        Processors that Slurm granted.
    load
        Runnable threads, mean of a minute.
    steal_fraction
        Share of time that the hypervisor gave to others.
    virtual
        Whether this is a virtual machine.
    container
        Whether this is a container; others may run on the same machine.
    faults
        Sentences on files and variables that could not be read.
    """

    processors: int
    cores: int
    governor: str | None = None
    turbo: bool | None = None
    turbo_switch: str | None = None
    clock_hertz: float | None = None
    most_clock_hertz: float | None = None
    quota_cores: float | None = None
    throttled_periods: int | None = None
    granted_by_slurm: int | None = None
    load: float | None = None
    steal_fraction: float | None = None
    virtual: bool | None = None
    container: bool = False
    faults: tuple[str, ...] = ()


def read_host(
    steal_fraction: float | None = None, *, root: Path = Path("/"), allowed: set[int] | None = None
) -> Host:
    """Return this machine's state, or that of /proc and /sys under `root`; `allowed` are the processors in use."""
    if allowed is None:
        allowed = list_allowed_processors()
    there = read_processors(root, allowed=allowed)
    cpus, first = root / _CPUS, root / _CPUS / f"cpu{min(allowed)}" / "cpufreq"
    turbo, switch = _turbo(cpus)
    clocks = [read_number(cpus / f"cpu{cpu}/cpufreq/scaling_cur_freq") for cpu in allowed]
    info = read_text_file(root / "proc/cpuinfo") or ""
    flags = re.search(r"^flags\s*:(.*)$", info, flags=re.M)
    load = read_text_file(root / "proc/loadavg")
    return Host(
        processors=there.hardware_threads,
        cores=there.cores,
        governor=read_text_file(first / "scaling_governor"),
        turbo=turbo,
        turbo_switch=switch,
        clock_hertz=_mean_clock(clocks, info),
        most_clock_hertz=_scaled(read_number(first / "cpuinfo_max_freq"), 1e3),
        quota_cores=there.quota.processors if there.quota else None,
        throttled_periods=there.quota.throttled_periods if there.quota else None,
        granted_by_slurm=there.granted,
        faults=there.faults,
        load=float(load.split()[0]) if load else None,
        steal_fraction=steal_fraction,
        virtual=None if flags is None else "hypervisor" in flags[1].split(),
        container=runs_in_container(root),
    )


def list_advice(host: Host) -> list[str]:
    """Return what could not be read, and advice for less noise, the greatest source first: one sentence each."""
    return [*host.faults, *_taken_away(host), *_clock(host), *_shared(host)]


def _taken_away(host: Host) -> Iterator[str]:
    if (host.steal_fraction or 0) > _MUCH_STEAL:
        yield (
            f"the hypervisor gives {host.steal_fraction:.0%} of the time to others: measure on a dedicated host, or "
            "at a quieter hour"
        )
    if host.quota_cores is not None and host.quota_cores < host.processors:
        stopped = f"; it was stopped {host.throttled_periods} times so far" if host.throttled_periods else ""
        yield (
            f"this container has a quota of {host.quota_cores:g} cores on {host.processors} processors (cgroup "
            f"cpu.max){stopped}: it stops threads in the middle of a call; give it whole processors (--cpuset-cpus)"
        )
    if (load := describe_load(host)) is not None:
        yield load


def describe_load(host: Host) -> str | None:
    """Return advice where other programs take the cores; None where they do not, or where that is unknown."""
    if host.load is None or host.load <= _OWN_LOAD + host.cores / 2:
        return None
    return (
        f"the load is {host.load:.1f} on {host.cores} cores: others take cores and caches; end them, or wait until "
        "they are done"
    )


def describe_load_now(threads: int | None = None) -> str | None:
    """Return advice where other programs take the cores just now, or have for a minute; None where they do not.

    `threads` are those of each engine, None for one a core. Cores beyond these may be taken.
    """
    host, taken = read_host(), measure_taken_cores()
    spare = 0 if threads is None else host.cores - threads
    if taken < _MUCH_TAKEN:
        return describe_load(host)
    if taken < spare + _MUCH_TAKEN:
        return None
    return f"other programs take {taken:.1f} of {host.cores} cores now: end them, or wait until they are done"


def count_free_cores(seconds: float = 0.3) -> int:
    """Return how many threads run undisturbed beside what others take in so many seconds; at least 1."""
    here = read_processors()
    wholly_taken = int(measure_taken_cores(seconds) + 1 - _WHOLLY_TAKEN)
    return max(1, min(here.default_threads, here.cores - wholly_taken))


def measure_taken_cores(seconds: float = 0.3) -> float:
    """Return how many of the allowed processors others keep busy, in the mean of so many seconds."""

    def count() -> tuple[float, float, float]:
        every = psutil.cpu_times(percpu=True)
        allowed = [every[cpu] for cpu in list_allowed_processors() if cpu < len(every)]
        idle = sum(each.idle + getattr(each, "iowait", 0.0) for each in allowed)
        # What guests of this host take counts as `user` already.
        spent = [seconds for each in allowed for name, seconds in each._asdict().items() if "guest" not in name]
        return sum(spent), idle, time.process_time()

    before = count()
    time.sleep(seconds)
    whole, idle, own = (after - earlier for after, earlier in zip(count(), before, strict=True))
    return max(0.0, (whole - idle - own) / seconds)


def _clock(host: Host) -> Iterator[str]:
    if host.governor not in (None, "performance"):
        yield (
            f"the clock governor is {host.governor}: the clock follows the load; "
            "`sudo cpupower frequency-set -g performance` keeps it up"
        )
    if host.turbo and host.turbo_switch:
        yield (
            f"turbo is on: the clock sinks as the chip gets warm; `{host.turbo_switch}` makes times longer, but "
            "steadier"
        )


def _shared(host: Host) -> Iterator[str]:
    if host.processors > host.cores:
        yield (
            f"{host.processors} hardware threads share {host.cores} cores: one slows the other; latbench uses one a "
            "core, but others may not: `echo off | sudo tee /sys/devices/system/cpu/smt/control`"
        )
    if host.cores <= _FEW_CORES:
        cores = "core" if host.cores == 1 else "cores"
        yield (
            f"there are only {host.cores} {cores}: the system's own work disturbs every call; measure on a larger "
            f"machine{', or leave a core to the system with --threads 1' if host.cores > 1 else ''}"
        )


def _turbo(cpus: Path) -> tuple[bool | None, str | None]:
    """Return whether the clock may rise above its base, and the command that forbids it."""
    if (setting := read_text_file(cpus / "intel_pstate/no_turbo")) is not None:
        return setting == "0", "echo 1 | sudo tee /sys/devices/system/cpu/intel_pstate/no_turbo"
    if (setting := read_text_file(cpus / "cpufreq/boost")) is not None:
        return setting == "1", "echo 0 | sudo tee /sys/devices/system/cpu/cpufreq/boost"
    return None, None


def _mean_clock(khz: list[float | None], cpuinfo: str) -> float | None:
    known = [1e3 * value for value in khz if value is not None]
    known = known or [1e6 * float(value) for value in re.findall(r"^cpu MHz\s*: ([\d.]+)", cpuinfo, flags=re.M)]
    return sum(known) / len(known) if known else None


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by
