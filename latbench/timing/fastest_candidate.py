"""A search among candidates for the one with the shortest time, as engines search for their parameters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from latbench.timing.gpu_events import Call, Driver
from latbench.timing.sampling import Clock

TUNE_REPEATS = 10

Candidate = TypeVar("Candidate")


def find_fastest(
    candidates: Iterable[Candidate],
    seconds: Callable[[Candidate], float],
    *,
    limit: float,
    clock: Clock = time.monotonic,
) -> Candidate:
    """Find the candidate with the shortest time among those begun before the limit; the first one always is.

    A candidate that raises is out. If all raise, so does this function, with the first error.
    """
    end = clock() + limit
    best: list[Candidate] = []
    shortest, refusal = math.inf, None
    for number, candidate in enumerate(candidates):
        if number and clock() > end:
            break
        try:
            took = seconds(candidate)
        except Exception as error:  # noqa: BLE001 - what Triton raises of its own has no base class in common
            refusal = refusal or error
            continue
        if took < shortest:
            best, shortest = [candidate], took
    if not best:
        raise refusal or ValueError("no candidates")
    return best[0]


def time_briefly(call: Call, driver: Driver) -> float:
    """Return the mean seconds of a few launches of `call`, after one that is not timed."""
    call()
    driver.flush()
    start = driver.mark()
    for _ in range(TUNE_REPEATS):
        call()
    end = driver.mark()
    driver.wait()
    return driver.seconds(start, end) / TUNE_REPEATS
