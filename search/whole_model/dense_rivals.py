"""Which dense engines may still be the fastest one, by all sessions in which they were timed.

A speedup is over the fastest dense engine. Engines that are certainly slower need no more time. One noisy session
proves nothing, so an engine is left out only if the interval of its paired rounds says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from latbench.base.engine_registry import TORCH
from search.whole_model.model_engines import DENSE_ENGINES
from search.whole_model.timings import Timings

MAX_SLOWDOWN = 1.1
"""A dense engine is left out if it takes more than this many times as long as the fastest one."""

COVERAGE = 0.95
"""Probability of the interval that an engine has to be outside of."""


def find_known_seconds(sessions: Sequence[Timings]) -> dict[str, float]:
    """Return dense engine -> its median seconds in the session with the most rounds of it, the last of such."""
    known: dict[str, float] = {}
    rounds: dict[str, int] = {}
    for timings in sessions:
        for name in DENSE_ENGINES:
            if name in timings.blocks and len(timings.blocks[name]) >= rounds.get(name, 0):
                rounds[name] = len(timings.blocks[name])
                known[name] = timings.seconds(name, COVERAGE).value
    return known


def find_slower_engines(sessions: Sequence[Timings]) -> set[str]:
    """Return the dense engines that are certainly more than MAX_SLOWDOWN times slower than the fastest one known."""
    known = find_known_seconds(sessions)
    fastest = find_fastest_dense(sessions)
    return {name for name in known if name != fastest and _is_certainly_slower(name, fastest, sessions)}


def find_fastest_dense(sessions: Sequence[Timings]) -> str:
    """Return the fastest dense engine by `find_known_seconds`; torch, which runs every model, if none was timed."""
    known = find_known_seconds(sessions)
    return min(known, key=known.__getitem__, default=TORCH)


def _is_certainly_slower(name: str, fastest: str, sessions: Sequence[Timings]) -> bool:
    """Return whether the paired rounds of all sessions that timed both engines leave no doubt."""
    both = [timings for timings in sessions if {name, fastest} <= timings.blocks.keys()]
    if not both:
        return False
    blocks = {engine: [block for timings in both for block in timings.blocks[engine]] for engine in (name, fastest)}
    builds: list[tuple[int, int]] = []
    for i, timings in enumerate(both):
        builds += [(i, build) for build in timings.builds or [0] * len(timings.blocks[name])]
    numbers = {build: number for number, build in enumerate(dict.fromkeys(builds))}
    pooled = Timings(blocks, {}, [numbers[build] for build in builds])
    return pooled.speedup(name, fastest, COVERAGE).high < 1 / MAX_SLOWDOWN
