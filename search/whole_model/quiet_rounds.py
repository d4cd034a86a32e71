"""Which rounds of a timing count: those in which no other process slowed this machine.

Three kinds of rounds are disturbed. In the first, other processes took the cores. In the second, the engines together
were much slower than in their fastest rounds: a neighbour on a shared machine slows all by a third, for seconds or
minutes. In the third, the dense engines were much slower than they are known to be. Such rounds slow the engines
unequally. No engine is judged by its own time alone, and the pruned model never by what was predicted for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from latbench.timing.sampling import Burst

Round = Mapping[str, Burst]
"""A burst of each engine, the same engines in each round."""

SLOW_ROUND = 0.2
"""A round is slow if the engines' mean log slowdown is above this: without neighbours it is 0.01 to 0.05. What slows
both engines of a speedup alike does no harm, but the more they are slowed, the less alike."""

DISTURBED_BUILD = 0.25
"""The same limit for the quietest rounds of a build. Its engines run in separate processes, so bad luck of one does
not make all of them slow."""

MIN_QUIET_ROUNDS = 3
"""Quiet rounds that a build needs."""


def compute_slowness(rounds: Sequence[Round], known: Mapping[str, float]) -> NDArray[np.float64]:
    """Return for each round how much slower the engines together were than in the fastest rounds, as a logarithm.

    The fastest rounds are the first MIN_QUIET_ROUNDS by the engines' mean. The least time of each single engine would
    be luck of different rounds: beside it, all rounds look slow where single bursts scatter.

    Parameters
    ----------
    rounds
        The rounds taken so far.
    known
        Engine -> seconds that it took before on a quiet machine. The slowness beside these counts if it is larger.

    Returns
    -------
    ndarray, shape (rounds,)
        At least 0; infinite where other processes took the cores.
    """
    if not rounds:
        return np.zeros(0)
    names = list(rounds[0])
    logs = np.log([[np.median(bursts[name].samples) for name in names] for bursts in rounds])
    alone = np.array([not any(burst.preempted for burst in bursts.values()) for bursts in rounds])
    means = logs.mean(axis=1)
    fast = np.sort(means[alone] if alone.any() else means)[:MIN_QUIET_ROUNDS][-1]
    slow: NDArray[np.float64] = np.maximum(means - fast, 0.0)
    if before := [(names.index(name), seconds) for name, seconds in known.items() if name in names]:
        columns, seconds = zip(*before, strict=True)
        slow = np.maximum(slow, (logs[:, columns] - np.log(seconds)).mean(axis=1))
    slow[~alone] = np.inf
    return slow


def find_undisturbed_builds(rounds: Sequence[Round], builds: Sequence[int], known: Mapping[str, float]) -> list[int]:
    """Return the numbers of the builds whose quietest rounds are not slow beside those of other builds.

    Engines of one build run in processes of their own, so all of them are slow only if the machine is.
    """
    slow, build_of_round = compute_slowness(rounds, known), np.asarray(builds)
    return [
        number
        for number in np.unique(build_of_round).tolist()
        if np.sort(slow[build_of_round == number])[:MIN_QUIET_ROUNDS][-1] <= DISTURBED_BUILD
    ]


def select_quiet_rounds(
    rounds: Sequence[Round], builds: Sequence[int], number: int, known: Mapping[str, float]
) -> list[int]:
    """Return the positions of the quiet rounds of build `number`.

    If the machine never was as quiet as it was known to be, return the quietest rounds.
    """
    own = [i for i, build in enumerate(builds) if build == number]
    for slow in (compute_slowness(rounds, known), compute_slowness(rounds, {})):
        quiet = [i for i in own if slow[i] <= SLOW_ROUND]
        if len(quiet) >= min(MIN_QUIET_ROUNDS, len(own)):
            return quiet
    return sorted(sorted(own, key=lambda i: float(slow[i]))[:MIN_QUIET_ROUNDS])
