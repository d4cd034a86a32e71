"""Every efficient trade-off between seconds and error: what `solve` answers for all budgets at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from search.solve import BadProblem, Floats, Relaxation, Spare, efficient_options, label, solve, sum_in_order

FEW_STEPS, FEW_STATES, MANY_STATES = 4, 20_000, 100_000
"""Of a window: steps of the relaxation to begin with; twice the steps below so many states, half above."""


@dataclass(frozen=True)
class Frontier:
    """The efficient profiles by rising `seconds` and falling `errors`; `choice(i)` gives the options of one."""

    seconds: Floats
    errors: Floats
    _problem: tuple[Sequence[ArrayLike], Sequence[ArrayLike]] = field(repr=False)

    def choice(self, i: int) -> tuple[int, ...]:
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

    Window after window of seconds is searched as `solve` searches below one budget: what ends in a window has at most
    the error that the one before came down to, and bounds leave few states under that.
    """
    options = efficient_options(seconds, errors)
    relaxation, spare = Relaxation(options), Spare(options)
    ends = relaxation.fastest_seconds[0] + np.cumsum(relaxation.seconds)
    slowest = sum_in_order(options.seconds[options.first[1:] - 1].tolist())
    least = sum_in_order(options.errors[options.first[:-1]].tolist())
    front: list[tuple[Floats, Floats]] = []
    points, step, stride, finished = 0, 0, FEW_STEPS, False
    while not finished:
        step += stride
        finished = step > len(ends)
        end = slowest if finished else min(float(ends[step - 1]), slowest)
        _, (spent, error, begin, dropped) = label(options, relaxation, end, least, spare, max_points)
        spent, error = spent[begin[-2] :], error[begin[-2] :]
        new = (spent <= end) & ((error < least) | (points == 0))
        front.append((spent[new], error[new]))
        points += int(new.sum())
        if points > max_points or dropped < np.inf:
            raise BadProblem(
                f"there are more than {max_points:,} efficient trade-offs: round the seconds to what can be "
                "measured, or ask `solve` for the budgets of interest"
            )
        least = float(error[new][-1]) if new.any() else least
        stride = max(1, stride // 2) if begin[-1] > MANY_STATES else stride * 2 if begin[-1] < FEW_STATES else stride
    all_seconds, all_errors = (np.concatenate(arrays) for arrays in zip(*front, strict=True))
    return Frontier(all_seconds, all_errors, (seconds, errors))
