"""Progress on stderr for long commands: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from latbench.cli.sweep_points import format_duration
from latbench.cli.verbosity import is_quiet

Tell = Callable[[str, int | None, int | None], None]
"""Told what is done now, and how much of how much, if that is known."""

SECONDS_BETWEEN_LINES = 15.0


@contextmanager
def live(console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[Tell]:
    """Yield a function that shows progress while the context is open; no bar is left behind. --quiet shows none."""
    if is_quiet():
        yield lambda what, done, total: None
        return
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _lines(console, clock)
        return
    columns = (
        BarColumn(20),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=None, count="")

        def tell(what: str, done: int | None, total: int | None) -> None:
            count = "" if done is None or total is None else f"{done}/{total}"
            bars.update(bar, description=what, completed=done or 0, total=total, count=count)

        yield tell


def estimate_left(tell: Tell, clock: Callable[[], float] = time.monotonic) -> Tell:
    """Return a function that shows progress with the time left, estimated from the steps so far of the same kind."""
    kind, began, first = "", 0.0, 0

    def tell_left(what: str, done: int | None, total: int | None) -> None:
        nonlocal kind, began, first
        if what != kind or done is None:
            kind, began, first = what, clock(), done or 0
        elif total is not None and done > first:
            what = f"{what}: about {format_duration((total - done) * (clock() - began) / (done - first))} left"
        tell(what, done, total)

    return tell_left


def _lines(console: Console, clock: Callable[[], float]) -> Tell:
    last, last_what = 0.0, ""

    def tell(what: str, done: int | None, total: int | None) -> None:
        nonlocal last, last_what
        kind = what.partition(":")[0]  # what follows a colon is a figure that moves
        if kind != last_what or clock() - last >= SECONDS_BETWEEN_LINES:
            last, last_what = clock(), kind
            line = what if done is None or total is None else f"{done}/{total} {what}"
            console.print(line, highlight=False, soft_wrap=True, markup=False)

    return tell
