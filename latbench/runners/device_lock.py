"""One lock a device, machine-wide: two measurements at a time would time each other.

A lock is a file in a folder that all users of the machine share, locked as long as its holder lives, however that
ends. The holder writes into it who it is, for those who wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from latbench.errors import EnvironmentUnusable
from latbench.tables.storage import hide_secrets

WAIT_SECONDS = 600.0
_LOOK_EVERY_SECONDS = 0.2


FOLDER = "LATBENCH_LOCKS"  # the environment variable; containers of one machine have to share such a folder


def lock_folder() -> Path:
    """Where locks lie: LATBENCH_LOCKS, else /tmp, which all users of a machine may write."""
    return Path(os.environ.get(FOLDER) or "/tmp")


@contextlib.contextmanager
def device_lock(
    device: str,
    unit: str | None = None,
    *,
    wait_seconds: float = WAIT_SECONDS,
    waiting: Callable[[str], None] = lambda holder: None,
) -> Iterator[None]:
    """Have `device` for oneself; `unit` tells it from others of its name in this machine, where there may be several.

    Waits for another holder for `wait_seconds`, then raises EnvironmentUnusable. `waiting` is told once, in a
    sentence, who that is, if there is something to wait for.
    """
    path = lock_folder() / ("latbench-" + "-".join(filter(None, (device, unit))) + ".lock")
    try:
        handle = _opened(path)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot lock {device} with {path}: {error.strerror or error}") from error
    try:
        if not _taken(handle):
            waiting(_holder(handle, device))
            end = time.monotonic() + wait_seconds
            while not _taken(handle):
                if time.monotonic() >= end:
                    raise EnvironmentUnusable(
                        f"{_holder(handle, device)}; two at a time would time each other: wait for it or end it"
                    )
                time.sleep(_LOOK_EVERY_SECONDS)
        _sign(handle)
        yield
    finally:
        os.close(handle)  # which unlocks it


def _opened(path: Path) -> int:
    """The lock's file, which whoever came first has made; everybody may lock it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)  # Linux refuses O_CREAT on the files of others in /tmp
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    with contextlib.suppress(PermissionError):  # somebody else made it just now
        os.fchmod(handle, 0o666)
    return handle


def _taken(handle: int) -> bool:
    """Whether it is ours now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(handle: int) -> None:
    """Write into the file who holds it, since when. Where the disk is full it says nothing, and is locked."""
    command = " ".join([Path(sys.argv[0]).name, *map(hide_secrets, sys.argv[1:])])
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} of {_user()} since {datetime.now():%F %T}: {command}".encode(), 0)


def _holder(handle: int, device: str) -> str:
    """Who holds the lock, as far as it says so."""
    said = " ".join(os.pread(handle, 500, 0).decode(errors="replace").split())
    return f"another latbench process measures on {device}" + (f" ({said})" if said else "")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container may run as somebody without a name
        return str(os.getuid())
