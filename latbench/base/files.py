"""Atomic files: written beside their place, synced, then renamed over it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from latbench.errors import EnvironmentUnusable, UsageError

_LOG = logging.getLogger(__name__)

ABANDONED_SECONDS = 3600.0  # a file takes seconds to write; clocks of machines that share a folder differ by less

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a Path has one slash where a URI has two


def find_cache_folder() -> Path:
    """Return the folder for reproducible data: LATBENCH_CACHE, else `latbench` in XDG_CACHE_HOME or ~/.cache."""
    if given := os.environ.get("LATBENCH_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "latbench"


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write(temporary)` and rename the result to `path`; on any failure `path` keeps its old content.

    Raises EnvironmentUnusable when the disk is full or the folder cannot be written. Raises UsageError for a URI:
    only tables are written to object stores.
    """
    if _URI.match(str(path)):
        raise UsageError(f"cannot write {path}: only tables go to a URI, everything else to a path of this machine")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        hidden = path.name if path.name.startswith(".") else f".{path.name}"
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{hidden}.{os.getpid()}.", suffix=".tmp")
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            # mkstemp makes files private; a table should be as readable as the user's other files.
            umask = os.umask(0)
            os.umask(umask)
            temporary.chmod(0o666 & ~umask)
            temporary.replace(path)
            _LOG.info(f"wrote {path}")
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {path}: {error.strerror or error}") from error


def remove_abandoned(folder: Path) -> None:
    """Remove temporary files that are older than an hour and belong to parts or environments in `folder`.

    Younger ones may belong to a running process, here or on another machine. Raises EnvironmentUnusable where the
    disk refuses.
    """
    try:
        for path in (*folder.glob(".part-*.tmp"), *folder.glob(".env-*.tmp")):
            with contextlib.suppress(FileNotFoundError):  # its writer has just renamed it
                if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {folder}: {error.strerror or error}") from error


def is_left_behind(path: Path) -> bool:
    """Return whether `path` is a temporary file whose process is gone: `.<name>.<process id>.tmp`.

    Only processes of this machine are known, so ask in folders of one machine. This process's own id counts as gone,
    because in a container the next process often has the id of the one before: ask before writing there.
    """
    named = re.search(r"\.(\d{1,9})(\.\w+)?\.tmp$", path.name)
    return named is not None and (int(named[1]) == os.getpid() or not psutil.pid_exists(int(named[1])))


def list_hidden_siblings(folder: Path, ending: str) -> list[Path]:
    """List the hidden files beside the folder: the folder's name between dots, then the regular expression."""
    name = re.compile(rf"\.{re.escape(folder.name)}\.{ending}")
    return [path for path in folder.parent.iterdir() if name.fullmatch(path.name)]


@contextlib.contextmanager
def stage_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, whose files the caller moves into it; remove it at the end.

    The parents are made, and what killed processes left behind is removed. Its name is new each time: a process that
    has loaded a library gets the same one again from the same path. Raises OSError where the disk refuses.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in filter(is_left_behind, list_hidden_siblings(folder, r"\d+(\.\w+)?\.tmp")):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(".tmp", f".{folder.name}.{os.getpid()}.", folder.parent))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_left_behind(folder: Path, name: str = "*") -> None:
    """Remove left-behind files in `folder` whose name matches a glob. Raises EnvironmentUnusable where the disk
    refuses.
    """
    try:
        for path in filter(is_left_behind, folder.glob(f".{name}.*.tmp")):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {folder}: {error.strerror or error}") from error


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP until the context is left, then raise KeyboardInterrupt.

    Outside the main thread it does nothing, because signals do not arrive there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if callable(signal.getsignal(number))  # ignored signals and default actions stay
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all."""
    write_atomically(path, lambda temporary: _write_bytes(temporary, content))


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` as UTF-8, whole or not at all."""
    write_bytes_atomically(path, text.encode("utf-8"))


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def hash_file(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
