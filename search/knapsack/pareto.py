"""Every efficient trade-off between seconds and error: what `solve` answers for all budgets at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from latbench.machines.devices import count_cores
from search.knapsack.arrays import BadProblem, Choice, Floats
from search.knapsack.one_budget import Options, efficient_options, solve

AT_ONCE = 2**19
"""So many sums of a state and an option are looked at together, about: all at once would take any memory."""

SAMPLED = 2**15
"""Of so many of them it is seen how they spread over the seconds."""

WORTH_SHARING = 4096
"""From so many states on, the threads share the work."""


@dataclass(frozen=True)
class Frontier:
    """The efficient profiles by rising `seconds` and falling `errors`; `choice(i)` gives the options of one."""

    seconds: Floats
    errors: Floats
    _problem: tuple[Sequence[ArrayLike], Sequence[ArrayLike]] = field(repr=False)

    def choice(self, i: int) -> Choice:
        """One option a layer. Solved for on demand: storing all would take layers x trade-offs.

        Raises BadProblem where the solver, cut short by `max_states`, comes out at another trade-off.
        """
        solution = solve(*self._problem, float(self.seconds[i]))
        if (solution.seconds, solution.error) != (self.seconds[i], self.errors[i]):
            raise BadProblem(
                f"the profile of point {i} (error {self.errors[i]:.6g}) was not found: the solver stopped at error "
                f"{solution.error:.6g}, proven above {solution.bound:.6g}; call `solve` with more `max_states`"
            )
        return solution.choice


def frontier(
    seconds: Sequence[ArrayLike],
    errors: Sequence[ArrayLike],
    *,
    resolution: float = 0.0,
    max_points: int = 2_000_000,
) -> Frontier:
    """All efficient pairs of total seconds and total error, summed in layer order as `solve` sums them.

    `seconds` and `errors` hold an array a layer. A published table of 54 layers x 42 options has 42,000 pairs. Times
    that a model predicts, no two alike, have millions: with a `resolution` in seconds, pairs that lie nearer to each
    other become one. Then each profile takes at most the `seconds` that are listed, and at least those less the
    resolution; and each efficient pair has one listed with no larger error, at most the resolution slower. Raises
    BadProblem where there are more than `max_points`, and for what states no problem.
    """
    from search.knapsack.states import extend_between

    if not 0 <= resolution < np.inf:
        raise BadProblem(f"a resolution is a number of seconds, at least 0, not {resolution}")
    options = efficient_options(seconds, errors)
    if resolution:
        seconds = [_rounded_up(np.asarray(own, np.float64), resolution / len(seconds)) for own in seconds]
        options = efficient_options(seconds, errors)
    spent, error = np.zeros(1), np.zeros(1)
    with ThreadPoolExecutor(cores := count_cores()) as pool:
        for start, stop in itertools.pairwise(options.first.tolist()):
            own = options.seconds[start:stop], options.errors[start:stop]
            ends = _ends(spent, own[0], cores)
            found: list[tuple[Floats, Floats]] = []
            points, least = 0, np.inf
            for i in range(0, len(ends) - 1, cores):
                some = ends[i : i + cores + 1]
                for later, wrong in pool.map(partial(extend_between, spent, error, *own), some[:-1], some[1:]):
                    better = wrong < least  # than all that take less
                    found.append((later[better], wrong[better]))
                    points += len(found[-1][0])
                    least = min([least, *wrong[-1:].tolist()])
                if points > max_points:
                    raise BadProblem(
                        f"there are more than {max_points:,} efficient trade-offs: a resolution leaves fewer, such "
                        f"as {_resolution(options):.1g} s; or solve for the targets of interest"
                    )
            spent, error = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return Frontier(spent, error, (seconds, errors))


def _rounded_up(seconds: Floats, step: float) -> Floats:
    """To whole multiples of the largest power of two up to `step`, whose sums are exact."""
    step = 2.0 ** np.floor(np.log2(step))
    return np.asarray(np.ceil(seconds / step) * step, np.float64)


def _resolution(options: Options) -> float:
    """A thousandth of what the slowest profile takes."""
    return float(np.maximum.reduceat(options.seconds, options.first[:-1]).sum()) / 1000


def _ends(spent: Floats, seconds: Floats, cores: int) -> list[float]:
    """Seconds that part the sums of a state and an option into pieces of AT_ONCE, about, from -inf to inf."""
    sums = len(spent) * len(seconds)
    pieces = max(-(-sums // AT_ONCE), cores if len(spent) > WORTH_SHARING else 1)
    sampled = np.sort(np.add.outer(spent[:: -(-sums // SAMPLED)], seconds), axis=None)
    between = sampled[len(sampled) * np.arange(1, pieces) // pieces]
    return [-np.inf, *np.unique(between).tolist(), np.inf]
