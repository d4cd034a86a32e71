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
    front_spent, front_error = np.empty(0), np.empty(0)
    for option in range(len(seconds)):
        # States that differ may round to equal sums: the first copy goes through the filter too.
        front_spent, front_error = merge(front_spent, front_error, spent + seconds[option], error + errors[option])
    return front_spent, front_error


@numba.njit(cache=True)
def merge(spent_a: Floats, error_a: Floats, spent_b: Floats, error_b: Floats) -> tuple[Floats, Floats]:
    """The efficient states of two lists: in each seconds never fall and errors never rise, but both may stay equal.

    No branch depends on the data while both last: half of them would be mispredicted.
    """
    spent, error = np.empty(len(spent_a) + len(spent_b)), np.empty(len(spent_a) + len(spent_b))
    a, b, count, last, least = 0, 0, 0, -np.inf, np.inf
    while a < len(spent_a) and b < len(spent_b):
        first = spent_a[a] < spent_b[b] or (spent_a[a] == spent_b[b] and error_a[a] <= error_b[b])
        more_spent = spent_a[a] if first else spent_b[b]
        more_error = error_a[a] if first else error_b[b]
        efficient = more_error < least
        count -= efficient and more_spent == last  # overwrites what it beats at equal seconds
        spent[count], error[count] = more_spent, more_error
        last = more_spent if efficient else last
        least = more_error if efficient else least
        a += first
        b += not first
        count += efficient
    # What is left of either list lies above all of the other in seconds.
    for rest_spent, rest_error in ((spent_a[a:], error_a[a:]), (spent_b[b:], error_b[b:])):
        for i in range(len(rest_spent)):
            if rest_error[i] < least:
                count -= rest_spent[i] == last
                last, least = rest_spent[i], rest_error[i]
                spent[count], error[count] = last, least
                count += 1
    return spent[:count], error[:count]
