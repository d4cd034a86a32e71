"""Runs that may be stopped, go on anywhere, and are done by several processes at once: a JSON line each.

A run is known by its key, a dict that its line contains. Lines are appended whole; one that was cut off is none.
"""

from __future__ import annotations

import fcntl
import json
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The finished runs."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def add_row(path: Path, row: Row) -> None:
    """Append in one write, on a line of its own whatever was cut off before it."""
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("ab", buffering=0) as file:
        file.write((("" if whole else "\n") + json.dumps(row) + "\n").encode())


def missing(keys: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The keys of the runs that have no row."""
    return [key for key in keys if not any(key.items() <= row.items() for row in rows)]


def run_missing(
    path: Path,
    keys: Sequence[Row],
    run: Callable[[Row, list[Row]], Row],
    hours: float,
    *,
    ready: Callable[[Row, list[Row]], bool] = lambda key, rows: True,
    wait_seconds: float = 10.0,
) -> bool:
    """Do what is missing in the order of `keys`, for so long; returns whether nothing was left.

    `run` and `ready` are given a key and the rows so far. A run that another process is at, or that is not ready
    before another's is done, is passed over. A process has its run locked (a byte of PATH.lock, by its key) for as
    long as it lives: what was killed is free again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 3600 * hours
    with path.with_suffix(".lock").open("w") as locks:

        def claimed(key: Row) -> bool:
            place = zlib.crc32(json.dumps(key, sort_keys=True).encode())
            try:
                fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except OSError:
                return False
            return True

        while time.monotonic() < until:
            rows = read_rows(path)
            left = missing(keys, rows)
            if not left:
                return True
            for key in left:
                # It may have been done since, by one that has ended.
                if ready(key, rows) and claimed(key) and missing([key], read_rows(path)):
                    add_row(path, run(key, rows))
                    break
            else:
                time.sleep(wait_seconds)
    return False
