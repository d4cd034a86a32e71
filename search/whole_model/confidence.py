"""What a speedup that was measured in a search promises for the next time that the model is built and timed.

The same model built twice differs by some per cent as long as its process lives: its memory lies elsewhere (Kalibera
and Jones 2013, "Rigorous benchmarking in reasonable time"). So the logarithms of its speedups scatter from building
to building by a standard deviation `spread`, and all buildings of a session are moved by the mood that the machine is
in then (`MOOD`). A search averages n buildings of S sessions, a verification PROCESSES of one: the difference has the
variance spread^2 (1 / n + 1 / PROCESSES) + MOOD^2 (1 / S + 1).

The spread is the machine's and the engines', more than the profile's. It is pooled over all profiles of a search,
together with what is usual (`SPREAD`, worth `WEIGHT` more buildings), so that three buildings that agree by chance do
not promise too much. On a machine with another mood every minute promises are kept less often than they say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from search.problem.layers import Interval
from search.whole_model.end_to_end import PROCESSES

SPREAD, WEIGHT = 0.0225, 4
MOOD = 0.01
"""36 promises for three models on two virtual cores left 1.6 to 2.4% and, between sessions, 0.3 to 2.0% more.

`python tests/benchmarks/guarantee.py` prints in its last line what `scatter` makes of all that a task's searches and
verifications left.
"""


@dataclass(frozen=True)
class Spread:
    """The standard deviation of log speedups between buildings, known as well as from `freedom` + 1 of them."""

    value: float
    freedom: float


def spread(speedups: Sequence[Sequence[float]], buildings: int) -> Spread:
    """Pooled over groups: the speedups of one profile in the buildings of one session.

    `buildings` is how many are free to differ, all sessions together, each session's first left out: profiles of one
    building share its dense engines, so it is buildings that count as observations.
    """
    logs = [np.log(one) for one in speedups]
    freedom = sum(len(one) - 1 for one in logs)
    squares = sum(float(np.square(one - one.mean()).sum()) for one in logs)
    measured = squares / freedom if freedom else 0.0
    weight = min(freedom, buildings)
    return Spread(math.sqrt((WEIGHT * SPREAD**2 + weight * measured) / (WEIGHT + weight)), WEIGHT + weight)


def promise(sessions: Sequence[Sequence[float]], between: Spread, risk: float) -> Interval:
    """The speedup of a profile by those of its buildings in each session, and what a verification does not pass.

    It comes out above the lower end with probability `risk` (0.5 to 1), below the upper one just as likely.
    """
    logs = np.log(np.concatenate([np.asarray(one, np.float64) for one in sessions]))
    value = math.exp(float(logs.mean()))
    variance = between.value**2 * (1 / len(logs) + 1 / PROCESSES) + MOOD**2 * (1 / len(sessions) + 1)
    room = math.exp(float(stats.t.ppf(risk, between.freedom)) * math.sqrt(variance))
    return Interval(value, value / room, value * room)


def scatter(profiles: Sequence[Sequence[Sequence[float]]]) -> tuple[Spread, Spread]:
    """(spread, mood) as they were: speedups of each profile in each of its sessions, building by building.

    The standard deviations of logarithms between buildings of one session, and of what sessions have in common beyond
    that: an analysis of variance with random effects (Searle, Casella, McCulloch 1992, "Variance Components", section
    3.6). NaN where nothing was repeated.
    """
    within = between = weight = 0.0
    free_within = free_between = 0
    for speedups in profiles:
        logs = [np.log(one) for one in speedups]
        counts, means = np.array([len(one) for one in logs]), np.array([one.mean() for one in logs])
        within += sum(float(np.square(one - mean).sum()) for one, mean in zip(logs, means, strict=True))
        between += float(counts @ np.square(means - counts @ means / counts.sum()))
        free_within += int((counts - 1).sum())
        free_between += len(logs) - 1
        weight += counts.sum() - counts @ counts / counts.sum()
    variance = within / free_within if free_within else math.nan
    common = (between - free_between * variance) / weight if weight else math.nan
    common = 0.0 if common < 0 else common  # it cannot be told from none
    return Spread(math.sqrt(variance), free_within), Spread(math.sqrt(common), free_between)


def coverage(risk: float) -> float:
    """Of an interval of which neither end is passed with a probability over 1 - `risk`."""
    return 2 * risk - 1
