"""What the control groups of this process leave it, of either version of them (cgroups(7)).

A container or a batch job may have a fraction of the machine's memory, and ends without a word where it takes more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("sys/fs/cgroup")


def list_cgroups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of this process's control groups of `controller` (cpu, memory), and of those above."""
    for line in (read_text_file(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / _CGROUPS / controllers
        # Inside a container the path may be that of the host, of which only the top is seen.
        for folder in [Path(path), *Path(path).parents]:
            if (group := top / str(folder).lstrip("/")).is_dir():
                yield group


def runs_in_container(root: Path = Path("/")) -> bool:
    """Whether this process runs in a container, as far as the marks of the usual ones tell."""
    marks = (".dockerenv", ".singularity.d", "run/.containerenv", "run/secrets/kubernetes.io")
    own = read_text_file(root / "proc/self/cgroup") or ""
    return any((root / mark).exists() for mark in marks) or bool(re.search("docker|kubepods|containerd|libpod", own))


def read_available_bytes(root: Path = Path("/")) -> float | None:
    """The memory that this process may still take by its control groups; None where none has a limit.

    Pages of files that nothing needs any more count as used there, and make room: they are available.
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
    """A whole number that is all of a file; None for anything else."""
    found = read_text_file(path)
    return None if found is None or not re.fullmatch(r"-?\d+", found) else float(found)


def read_text_file(path: Path) -> str | None:
    """What a file holds; None where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
