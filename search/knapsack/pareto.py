"""Find every efficient trade-off between seconds and error: the answers of `solve` for all budgets at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from latbench.machines.processors import count_cores
from search.knapsack.arrays import BadProblem, Choice, FlatOptions, Floats
from search.knapsack.one_budget import select_efficient_options, solve

PIECE_SUMS = 2**19
"""Approximate number of sums of a state and an option that are computed together. It limits memory."""

SAMPLED_SUMS = 2**15
"""Number of sums in the sample that shows how they spread over the seconds."""

LEAST_SHARED_STATES = 4096
"""With fewer states than this, one thread does the work."""


@dataclass(frozen=True)
class Frontier:
    """The efficient profiles.

    Attributes
    ----------
    seconds, errors
        Arrays (profiles,): sums over the layers, in layer order. Seconds rise and errors fall.
    """

    seconds: Floats
    errors: Floats
    _problem: tuple[Sequence[ArrayLike], Sequence[ArrayLike]] = field(repr=False)

    def choice(self, i: int) -> Choice:
        """Return the i-th profile: for each layer the index of its option.

        It is solved for on demand: storing all profiles would take layers x profiles numbers.

        Raises
        ------
        BadProblem
            The solver, cut short by `max_states`, found another trade-off.
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
    """Find all efficient pairs of total seconds and total error, summed in layer order as `solve` sums them.

    A published table of 54 layers x 42 options has 42,000 pairs. Predicted times may have millions of them.

    Parameters
    ----------
    seconds
        An array (options,) for each layer: seconds >= 0.
    errors
        Arrays of the same shapes: the error of each option, in any unit.
    resolution
        Seconds. Pairs nearer to each other than this become one. Each profile then takes at most its listed seconds,
        and at least those minus the resolution. Each efficient pair has a listed one with no larger error that is
        slower by at most the resolution.
    max_points
        Limit on the number of pairs.

    Returns
    -------
    Frontier
        Total seconds and errors; profiles follow on demand.

    Raises
    ------
    BadProblem
        The arrays state no problem, or there are more than `max_points` pairs.
    """
    from search.knapsack.states import extend_between

    if not 0 <= resolution < np.inf:
        raise BadProblem(f"the resolution must be a finite number of seconds, at least 0, not {resolution}")
    options = select_efficient_options(seconds, errors)
    if resolution:
        seconds = [_round_up(np.asarray(own, np.float64), resolution / len(seconds)) for own in seconds]
        options = select_efficient_options(seconds, errors)
    spent, error = np.zeros(1), np.zeros(1)
    with ThreadPoolExecutor(cores := count_cores()) as pool:
        for start, stop in itertools.pairwise(options.first.tolist()):
            own = options.seconds[start:stop], options.errors[start:stop]
            ends = _split_seconds(spent, own[0], cores)
            extend = partial(extend_between, spent, error, *own)
            spent, error = _extend_front(extend, ends, pool, cores, max_points)
            if len(spent) > max_points:
                raise BadProblem(
                    f"there are more than {max_points:,} efficient trade-offs: set a resolution to merge some, "
                    f"such as {_suggest_resolution(options):.1g} s; or solve for the targets of interest"
                )
    return Frontier(spent, error, (seconds, errors))


def _extend_front(
    extend: Callable[[float, float], tuple[Floats, Floats]],
    ends: Sequence[float],
    pool: ThreadPoolExecutor,
    workers: int,
    max_points: int,
) -> tuple[Floats, Floats]:
    """Return the efficient sums of all pieces between the ends; stop once there are more than `max_points`."""
    found: list[tuple[Floats, Floats]] = []
    points, least = 0, np.inf
    for i in range(0, len(ends) - 1, workers):
        some = ends[i : i + workers + 1]
        for spent, error in pool.map(extend, some[:-1], some[1:]):
            better = error < least  # than all faster ones
            found.append((spent[better], error[better]))
            points += len(found[-1][0])
            least = min([least, *error[-1:].tolist()])
        if points > max_points:
            break
    all_spent, all_error = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return all_spent, all_error


def _round_up(seconds: Floats, step: float) -> Floats:
    """Round up to multiples of the largest power of two up to `step`. Sums of such multiples are exact."""
    step = 2.0 ** np.floor(np.log2(step))
    return np.asarray(np.ceil(seconds / step) * step, np.float64)


def _suggest_resolution(options: FlatOptions) -> float:
    """Return a thousandth of the seconds of the slowest profile."""
    return float(np.maximum.reduceat(options.seconds, options.first[:-1]).sum()) / 1000


def _split_seconds(spent: Floats, seconds: Floats, cores: int) -> list[float]:
    """Return ends, from -inf to inf, that split the sums of a state and an option into pieces of about PIECE_SUMS."""
    sums = len(spent) * len(seconds)
    pieces = max(-(-sums // PIECE_SUMS), cores if len(spent) > LEAST_SHARED_STATES else 1)
    sampled = np.sort(np.add.outer(spent[:: -(-sums // SAMPLED_SUMS)], seconds), axis=None)
    between = sampled[len(sampled) * np.arange(1, pieces) // pieces]
    return [-np.inf, *np.unique(between).tolist(), np.inf]
