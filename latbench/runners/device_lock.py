"""One lock per device and machine, because two measurements at a time would disturb each other.

A lock is a file in a folder that all users of the machine share. The kernel holds it as long as its holder lives,
however that ends. The holder writes its name into the file, for those who wait.

This is flock(2) itself, not the package filelock, because `make gpu` runs in the Python of the machine, with any
version of filelock. Up to 3.29.7 a process that waits truncates the file, and so erases the holder's name. From
3.24.0 on, where a file system has no flock, filelock uses a lock file that a killed holder leaves behind. The option
that forbids it came with 3.30.0.
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


FOLDER_VARIABLE = "LATBENCH_LOCKS"  # names a folder that containers of one machine share


def find_lock_folder() -> Path:
    """Return the folder of the locks: LATBENCH_LOCKS, else /tmp, where all users of a machine may write."""
    return Path(os.environ.get(FOLDER_VARIABLE) or "/tmp")


@contextlib.contextmanager
def lock_device(
    device: str,
    unit: str | None = None,
    *,
    wait_seconds: float = WAIT_SECONDS,
    waiting: Callable[[str], None] = lambda holder: None,
) -> Iterator[None]:
    """Lock `device` exclusively for the length of the context.

    Parameters
    ----------
    device
        The device's name in tables.
    unit
        Identifies the device among several of its name in this machine.
    wait_seconds
        Longest wait for another holder.
    waiting
        Is called once with a sentence on the holder, if there is one.

    Raises
    ------
    EnvironmentUnusable
        Another process held the lock for `wait_seconds`, or the lock file cannot be opened.
    """
    path = find_lock_folder() / ("latbench-" + "-".join(filter(None, (device, unit))) + ".lock")
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
                        f"{_holder(handle, device)}; two measurements at a time would disturb each other: "
                        "wait for it or end it"
                    )
                time.sleep(_LOOK_EVERY_SECONDS)
        _sign(handle)
        yield
    finally:
        os.close(handle)  # this unlocks it


def _opened(path: Path) -> int:
    """Open the lock's file, which the first process makes for everybody."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)  # Linux refuses O_CREAT on the files of others in /tmp
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    with contextlib.suppress(PermissionError):  # another user has just created it
        os.fchmod(handle, 0o666)
    return handle


def _taken(handle: int) -> bool:
    """Try to take the lock; return whether it is ours now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(handle: int) -> None:
    """Write into the file who holds it and since when. On a full disk the file stays empty, and locked."""
    command = " ".join([Path(sys.argv[0]).name, *map(hide_secrets, sys.argv[1:])])
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} of {_user()} since {datetime.now():%F %T}: {command}".encode(), 0)


def _holder(handle: int, device: str) -> str:
    """Return who holds the lock, as far as the file says so."""
    note = " ".join(os.pread(handle, 500, 0).decode(errors="replace").split())
    return f"another latbench process measures on {device}" + (f" ({note})" if note else "")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # in a container the user may have no name
        return str(os.getuid())
