"""Every efficient trade-off between seconds and error: what `solve` answers for all budgets at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial, reduce

import numpy as np
from numpy.typing import ArrayLike

from latbench import devices
from search.solve import BadProblem, Choice, Floats, efficient_options, solve

# From so many states on, the threads share a layer's options.
WORTH_SHARING = 4096


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


def frontier(seconds: Sequence[ArrayLike], errors: Sequence[ArrayLike], *, max_points: int = 2_000_000) -> Frontier:
    """All efficient pairs of total seconds and total error, summed in layer order as `solve` sums them.

    `seconds` and `errors` hold an array a layer. A published table of 54 layers x 42 options has 42,000 pairs; raises
    BadProblem where there are more than `max_points`, and for what states no problem.
    """
    from search._states import extend_all, merge

    options = efficient_options(seconds, errors)
    spent, error = np.zeros(1), np.zeros(1)
    with ThreadPoolExecutor(cores := devices.cores()) as pool:
        for start, stop in itertools.pairwise(options.first.tolist()):
            threads = min(cores, stop - start) if len(spent) > WORTH_SHARING else 1
            shares = [np.arange(start + i, stop, threads) for i in range(threads)]
            own = ([of[share] for share in shares] for of in (options.seconds, options.errors))
            extended = pool.map(partial(extend_all, spent, error), *own)
            spent, error = reduce(lambda a, b: merge(*a, *b), extended)
            if len(spent) > max_points:
                raise BadProblem(
                    f"there are more than {max_points:,} efficient trade-offs: round the seconds to what can be "
                    "measured, or ask `solve` for the budgets of interest"
                )
    return Frontier(spent, error, (seconds, errors))
