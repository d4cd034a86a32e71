"""What a speedup that a search measured promises for the next time that the model is built and timed.

The same model built twice differs by some per cent as long as its process lives: its memory lies elsewhere (Kalibera
and Jones 2013, "Rigorous benchmarking in reasonable time"). So the logarithms of its speedups scatter from build to
build by a standard deviation. All builds of a session share the state of the machine (`SESSION_SPREAD`). A search
averages n builds of S sessions, a verification averages BUILDS builds of one session. The difference has the variance
build_spread^2 (1 / n + 1 / BUILDS) + SESSION_SPREAD^2 (1 / S + 1). A verification also has an interval of its own,
from the scatter of its rounds. The promise is kept where the lower end of that reaches the target.

The spread between builds belongs to the machine and the engines more than to the profile. It is pooled over all
profiles of a search, together with a usual value (`BUILD_SPREAD`, worth `PRIOR_BUILDS` more builds). Otherwise three
builds that agree by chance would promise too much. On a machine whose state changes every few minutes, promises are
kept less often than they say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from search.problem.layers import Interval
from search.whole_model.end_to_end import BUILDS, DEFAULT_SCHEDULE

BUILD_SPREAD, PRIOR_BUILDS = 0.0225, 4
SESSION_SPREAD = 0.01
VERDICT_COVERAGE = 0.95  # of the interval with which a verification judges its own rounds
"""36 promises for three models on two virtual cores left 1.6 to 2.4% and, between sessions, 0.3 to 2.0% more.

`python tests/benchmarks/jobs/guarantee.py` prints in its last line the `estimate_spreads` of everything that a task's
searches and verifications left.
"""


@dataclass(frozen=True)
class Spread:
    """A standard deviation of log speedups, known as well as from `freedom` + 1 observations."""

    value: float
    freedom: float


def pool_build_spread(speedups: Sequence[Sequence[float]], builds: int) -> Spread:
    """Return the spread between builds, pooled over groups and with the usual value.

    Parameters
    ----------
    speedups
        Groups: the speedups of one profile in the builds of one session.
    builds
        Builds that are free to differ: all sessions together, without the first build of each. Profiles of one build
        share its dense engines, so builds count as observations, not profiles.
    """
    logs = [np.log(group) for group in speedups]
    freedom = sum(len(group) - 1 for group in logs)
    squares = sum(float(np.square(group - group.mean()).sum()) for group in logs)
    measured = squares / freedom if freedom else 0.0
    weight = min(freedom, builds)
    variance = (PRIOR_BUILDS * BUILD_SPREAD**2 + weight * measured) / (PRIOR_BUILDS + weight)
    return Spread(math.sqrt(variance), PRIOR_BUILDS + weight)


def estimate_verdict_width(speedup: Interval, rounds: int) -> float:
    """Return the log distance from a verification's speedup to its lower end, from a timing of `rounds` rounds."""
    wanted = DEFAULT_SCHEDULE.rounds * BUILDS
    return math.log(speedup.value / speedup.low) * math.sqrt(rounds / wanted)


def predict_verified_speedup(
    sessions: Sequence[Sequence[float]], build_spread: Spread, confidence: float, verdict_width: float = 0.0
) -> Interval:
    """Return the mean speedup of a profile, and the interval in which a verification will find it.

    A verification's own lower end is above the lower end with probability `confidence`. Its upper end is below the
    upper end just as likely.

    Parameters
    ----------
    sessions
        Speedups of the profile in each session, build by build.
    build_spread
        The spread between builds.
    confidence
        Probability from 0.5 to 1.
    verdict_width
        Log distance from a verification's speedup to the ends of its own interval.
    """
    logs = np.log(np.concatenate([np.asarray(session, np.float64) for session in sessions]))
    value = math.exp(float(logs.mean()))
    variance = build_spread.value**2 * (1 / len(logs) + 1 / BUILDS) + SESSION_SPREAD**2 * (1 / len(sessions) + 1)
    margin = math.exp(float(stats.t.ppf(confidence, build_spread.freedom)) * math.sqrt(variance) + verdict_width)
    return Interval(value, value / margin, value * margin)


def estimate_spreads(profiles: Sequence[Sequence[Sequence[float]]]) -> tuple[Spread, Spread]:
    """Return the standard deviations of log speedups (between builds of a session, between sessions beyond that).

    This is an analysis of variance with random effects (Searle, Casella, McCulloch 1992, "Variance Components",
    section 3.6). A value is NaN where nothing was repeated.

    Parameters
    ----------
    profiles
        Speedups of each profile in each of its sessions, build by build.
    """
    within = between = weight = 0.0
    free_within = free_between = 0
    for speedups in profiles:
        logs = [np.log(session) for session in speedups]
        counts, means = np.array([len(session) for session in logs]), np.array([session.mean() for session in logs])
        within += sum(float(np.square(session - mean).sum()) for session, mean in zip(logs, means, strict=True))
        between += float(counts @ np.square(means - counts @ means / counts.sum()))
        free_within += int((counts - 1).sum())
        free_between += len(logs) - 1
        weight += counts.sum() - counts @ counts / counts.sum()
    variance = within / free_within if free_within else math.nan
    common = (between - free_between * variance) / weight if weight else math.nan
    common = 0.0 if common < 0 else common  # too small to be told from zero
    return Spread(math.sqrt(variance), free_within), Spread(math.sqrt(common), free_between)


def convert_to_coverage(confidence: float) -> float:
    """Return the coverage of an interval, each end of which is passed with probability 1 - `confidence`."""
    return 2 * confidence - 1
