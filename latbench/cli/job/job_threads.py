"""How many threads each engine of a job has: those asked for, those it began with, or the cores that are free."""

from __future__ import annotations

import logging
from pathlib import Path

from latbench.errors import BadData
from latbench.machines.noise_sources import count_free_cores
from latbench.machines.processors import count_cores, select_threads
from latbench.tables.storage import parse_place
from latbench.tables.table import read_table
from search.artifacts.profile import read_profile

SAMPLE_SECONDS = 1.0
"""How long the cores are watched. A program that takes half a core on and off leaves the other half."""

_LOG = logging.getLogger(__name__)


def choose_threads(wanted: int | None, folder: Path) -> int:
    """Choose the threads of each engine, and say so where they are not one a core.

    Where another program keeps a core busy, every call waits for the thread on that core. Calls then take several
    times as long, and scatter so much that a promise can hardly be kept.

    Parameters
    ----------
    wanted
        What --threads asks for; None to choose.
    folder
        The job's folder. A job that was interrupted goes on with the threads that it began with.
    """
    cores = count_cores()
    if wanted is not None:
        return select_threads(wanted)
    if (begun := _read_begun(folder)) is not None and begun <= cores:
        if begun < cores:
            _LOG.warning(f"the job in {folder} goes on with {_name(begun)}, as it began; --threads {cores} uses all")
        return begun
    free = count_free_cores(SAMPLE_SECONDS)
    if free < cores:
        _LOG.warning(
            f"other programs keep {cores - free} of {cores} cores busy: each engine has {_name(free)}, and the "
            f"promise holds for that number of threads; --threads {cores} uses all"
        )
    return free


def _name(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _read_begun(folder: Path) -> int | None:
    """Read the threads of the folder's profile, or else of the newest row of its table; None where it has neither."""
    try:
        return read_profile(folder / "profile.json").threads
    except BadData:
        pass
    try:
        rows = read_table(parse_place(folder / "table"))
    except BadData:
        return None
    newest = rows.sort_values("started_at")["threads"].dropna().tail(1)
    return None if newest.empty else int(newest.item())
