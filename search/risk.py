"""What a speedup that was measured in a search promises for the next time that the model is built and timed.

The same model built twice differs by some per cent as long as its process lives: its memory lies elsewhere (Kalibera
and Jones 2013, "Rigorous benchmarking in reasonable time"), and minutes later the machine is in another mood. So the
logarithms of its speedups scatter from building to building by a standard deviation `spread`. A search averages n
buildings, a verification PROCESSES others: the difference has the variance spread^2 (1 / n + 1 / PROCESSES).

The spread is the machine's and the engines', more than the profile's. It is pooled over all profiles of a search,
together with what was seen on other machines (`SPREAD`, worth `WEIGHT` more buildings), so that three buildings that
agree by chance do not promise too much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from search.end_to_end import PROCESSES
from search.problem import Interval

SPREAD = 0.0225
WEIGHT = 8


@dataclass(frozen=True)
class Spread:
    """The standard deviation of log speedups between buildings, known as well as from `freedom` + 1 of them."""

    value: float
    freedom: float


def spread(speedups: Sequence[Sequence[float]], buildings: int) -> Spread:
    """Pooled over profiles, each given by its speedups of one building; `buildings` in all have timed them.

    Profiles of one building share its dense engines, so it is the buildings that count as observations.
    """
    logs = [np.log(one) for one in speedups]
    freedom = sum(len(one) - 1 for one in logs)
    squares = sum(float(np.square(one - one.mean()).sum()) for one in logs)
    measured = squares / freedom if freedom else 0.0
    weight = min(freedom, max(buildings - 1, 0))
    return Spread(math.sqrt((WEIGHT * SPREAD**2 + weight * measured) / (WEIGHT + weight)), WEIGHT + weight)


def promise(speedups: Sequence[float], between: Spread, risk: float) -> Interval:
    """The speedup of a profile by those of its buildings, and what a verification does not pass at either end.

    It comes out above the lower end with probability `risk` (0.5 to 1), below the upper one just as likely.
    """
    value = float(np.exp(np.log(speedups).mean()))
    deviation = between.value * math.sqrt(1 / len(speedups) + 1 / PROCESSES)
    room = math.exp(float(stats.t.ppf(risk, between.freedom)) * deviation)
    return Interval(value, value / room, value * room)


def coverage(risk: float) -> float:
    """Of an interval of which neither end is passed with a probability over 1 - `risk`."""
    return 2 * risk - 1
