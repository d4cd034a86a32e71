"""Limits of the control groups of this process, version 1 and 2 (cgroups(7)).

A container or a batch job may have a fraction of the machine's memory. A process that takes more is killed without a
message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_USUAL = Path("sys/fs/cgroup")


class _Mount(NamedTuple):
    """Where control groups are visible: `folder` shows the group `top` and those inside of it.

    `controllers` is empty for version 2.
    """

    controllers: frozenset[str]
    top: PurePosixPath
    folder: Path


def list_cgroups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the folders of this process's control groups of `controller` (cpu, memory), innermost first."""
    known = list(_list_mounts(root))
    for line in (read_text_file(root / "proc/self/cgroup") or "").splitlines():
        if (found := re.fullmatch(r"\d+:([^:]*):(/.*)", line)) is None:
            continue
        names, path = found[1], PurePosixPath(found[2])
        if names and controller not in names.split(","):
            continue
        mounts = [it for it in known if (controller in it.controllers if names else not it.controllers)]
        for mount in mounts or ([] if known else _list_usual_mounts(names, root)):
            yield from filter(_is_folder, _list_visible(mount, path))


def _list_mounts(root: Path) -> Iterator[_Mount]:
    """Yield the mounts of control groups from /proc/self/mountinfo (proc_pid_mountinfo(5))."""
    for line in (read_text_file(root / "proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        places, kind = before.split(" ")[3:5], after.split(" ")
        if len(places) < 2 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        top, folder = (re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), place) for place in places)
        controllers = kind[2].split(",") if kind[0] == "cgroup" else ()
        yield _Mount(frozenset(controllers), PurePosixPath(top), root / folder.lstrip("/"))


def _list_usual_mounts(names: str, root: Path) -> list[_Mount]:
    """Return where the groups of these controllers usually are, for a process that cannot see its mounts."""
    folders = (names, *names.split(",")) if names else ("", "unified")
    top = PurePosixPath("/")
    return [_Mount(frozenset(), top, root / _USUAL / folder) for folder in dict.fromkeys(folders)]


def _list_visible(mount: _Mount, path: PurePosixPath) -> Iterator[Path]:
    """Yield the folders of the group `path` and of those around it; of a group elsewhere only the top."""
    inside = path.relative_to(mount.top) if path.is_relative_to(mount.top) else path.relative_to("/")
    if ".." in inside.parts:  # outside of the namespace of control groups
        inside = PurePosixPath()
    for group in (inside, *inside.parents):
        yield mount.folder / group


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


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
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
