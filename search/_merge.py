"""Compiled: efficient states of one more layer. A state is (seconds, error); lists rise in one, fall in the other.

Apart from `frontier`, which imports it when it is called, so that importing `search` compiles nothing.
"""

from __future__ import annotations

import numba
import numpy as np

from search.solve import Floats


@numba.njit(cache=True)
def extend(spent: Floats, error: Floats, seconds: Floats, errors: Floats) -> tuple[Floats, Floats]:
    """The efficient sums of a state and an option: one shifted copy of the states an option, merged in turn."""
    front_spent, front_error = spent + seconds[0], error + errors[0]
    for option in range(1, len(seconds)):
        front_spent, front_error = merge(front_spent, front_error, spent + seconds[option], error + errors[option])
    return front_spent, front_error


@numba.njit(cache=True)
def merge(spent_a: Floats, error_a: Floats, spent_b: Floats, error_b: Floats) -> tuple[Floats, Floats]:
    """The efficient states of two lists. No branch depends on the data: half of them would be mispredicted."""
    spent, error = np.empty(len(spent_a) + len(spent_b)), np.empty(len(spent_a) + len(spent_b))
    a, b, count, least = 0, 0, 0, np.inf
    while a < len(spent_a) and b < len(spent_b):
        first = spent_a[a] < spent_b[b] or (spent_a[a] == spent_b[b] and error_a[a] <= error_b[b])
        spent[count] = spent_a[a] if first else spent_b[b]
        error[count] = error_a[a] if first else error_b[b]
        efficient = error[count] < least
        least = error[count] if efficient else least
        a += first
        b += not first
        count += efficient
    # What is left of either list lies above all of the other in seconds.
    for rest_spent, rest_error in ((spent_a[a:], error_a[a:]), (spent_b[b:], error_b[b:])):
        better = rest_error < least
        more = int(np.count_nonzero(better))
        spent[count : count + more] = rest_spent[better]
        error[count : count + more] = rest_error[better]
        count += more
    return spent[:count], error[:count]
