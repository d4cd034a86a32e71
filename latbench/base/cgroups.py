"""Limits of the control groups of this process, version 1 and 2 (cgroups(7)).

A container or a batch job may have a fraction of the machine's memory. A process that takes more is killed without a
message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("sys/fs/cgroup")


def list_cgroups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's control groups of `controller` (cpu, memory), innermost first."""
    for line in (read_text_file(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / _CGROUPS / controllers
        # Inside a container the path may be the host's, of which only the top is visible.
        for folder in [Path(path), *Path(path).parents]:
            if (group := top / str(folder).lstrip("/")).is_dir():
                yield group


def runs_in_container(root: Path = Path("/")) -> bool:
    """Return whether this process runs in a container, by the marks of the usual container engines."""
    marks = (".dockerenv", ".singularity.d", "run/.containerenv", "run/secrets/kubernetes.io")
    own = read_text_file(root / "proc/self/cgroup") or ""
    return any((root / mark).exists() for mark in marks) or bool(re.search("docker|kubepods|containerd|libpod", own))


def read_available_bytes(root: Path = Path("/")) -> float | None:
    """Return the memory in bytes that the control groups still grant this process; None without a limit.

    Inactive file pages count as used there but can be reclaimed, so they are available.
    """
    left = []
    for group in list_cgroups("memory", root):
        for most, used, unneeded in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = read_number(group / most), read_number(group / used)
            stat = re.search(rf"^{unneeded} (\d+)", read_text_file(group / "memory.stat") or "", flags=re.M)
            if limit is not None and usage is not None:
                left.append(limit - usage + (float(stat[1]) if stat else 0.0))
    return max(0.0, min(left)) if left else None


def read_number(path: Path) -> float | None:
    """Return the whole number that a file consists of; None for any other content."""
    found = read_text_file(path)
    return None if found is None or not re.fullmatch(r"-?\d+", found) else float(found)


def read_text_file(path: Path) -> str | None:
    """Return the content of a file without surrounding blanks; None where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
