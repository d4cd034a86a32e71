"""Compiled: the states of the exact solver, layer by layer. A state is (seconds, error); see
`search.knapsack.one_budget`.

Apart from `solve` and `frontier`, which import it when they are called, so that importing `search` compiles nothing.
Options and states lie flat, one layer after the other: those of layer l from first[l] to first[l + 1].
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from search.knapsack.arrays import Floats, Places

ROOM = 2**18
"""So many sums of a layer, or four times as many as shall be left, are held before the less promising ones go."""


@numba.njit(cache=True)
def lower_hull(seconds: Floats, errors: Floats, first: Places) -> Places:
    """The options on each layer's lower convex hull, for rising seconds, falling errors (Andrew's monotone chain)."""
    hull = np.empty(len(seconds), np.intp)
    count = 0
    for layer in range(len(first) - 1):
        base = count
        for j in range(first[layer], first[layer + 1]):
            while count > base + 1:
                a, b = hull[count - 2], hull[count - 1]
                # Slopes, not their products with both differences, which may be too small to tell apart.
                slope = (errors[b] - errors[a]) / (seconds[b] - seconds[a])
                if slope < (errors[j] - errors[a]) / (seconds[j] - seconds[a]):
                    break
                count -= 1
            hull[count] = j
            count += 1
    return hull[:count]


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
def below(spent: Floats, seconds: float, end: float) -> int:
    """How many sums of a state and `seconds` are below `end`: the first ones, because they rise."""
    low, high = 0, len(spent)
    while low < high:
        middle = (low + high) // 2
        if spent[middle] + seconds < end:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(cache=True, nogil=True)
def extend_between(
    spent: Floats, error: Floats, seconds: Floats, errors: Floats, start: float, end: float
) -> tuple[Floats, Floats]:
    """The efficient ones among the sums of a state and an option that take from `start` to below `end` seconds.

    Most sums lie far above the front. They are looked at twice, in intervals of equal length: the first time for the
    least error in each; the second time those are kept that no earlier interval beats, and few are left to be sorted.
    """
    options = len(seconds)
    begin, stop = np.empty(options, np.int64), np.empty(options, np.int64)
    least_spent, most_spent, count = np.inf, -np.inf, 0
    for option in range(options):
        low, high = below(spent, seconds[option], start), below(spent, seconds[option], end)
        begin[option], stop[option] = low, high
        if low < high:
            least_spent = min(least_spent, spent[low] + seconds[option])
            most_spent = max(most_spent, spent[high - 1] + seconds[option])
        count = max(count, high - low)  # neighbours of one option seldom share an interval
    scale = 0.0
    if most_spent > least_spent and (count - 1) / (most_spent - least_spent) < np.inf:
        scale = (count - 1) / (most_spent - least_spent)

    # Places are unsigned: those that may be negative would be checked each time.
    least = np.full(count, np.inf)
    for option in range(options):
        own_spent, own_error = spent[begin[option] : stop[option]], error[begin[option] : stop[option]]
        for i in range(len(own_spent)):
            interval = np.uint32((own_spent[i] + seconds[option] - least_spent) * scale)
            if own_error[i] + errors[option] < least[interval]:
                least[interval] = own_error[i] + errors[option]
    before = np.inf
    for i in range(count):
        before, least[i] = min(before, least[i]), before

    kept_spent, kept_error, kept = np.empty(2 * count), np.empty(2 * count), 0
    for option in range(options):
        own_spent, own_error = spent[begin[option] : stop[option]], error[begin[option] : stop[option]]
        if kept + len(own_spent) > len(kept_spent):
            room = np.empty(len(kept_spent) + len(own_spent))
            kept_spent, kept_error = np.append(kept_spent, room), np.append(kept_error, room)
        for i in range(len(own_spent)):
            s, e = own_spent[i] + seconds[option], own_error[i] + errors[option]
            if e < least[np.uint32((s - least_spent) * scale)]:
                kept_spent[kept], kept_error[kept] = s, e
                kept += 1
    return efficient_of(kept_spent[:kept], kept_error[:kept])


@numba.njit(cache=True, nogil=True)
def efficient_of(spent: Floats, error: Floats) -> tuple[Floats, Floats]:
    """The efficient ones of states in any order, by rising seconds."""
    front_spent, front_error = np.empty(len(spent)), np.empty(len(spent))
    count, last, least = 0, -np.inf, np.inf
    for i in np.argsort(spent):
        if error[i] < least:
            count -= spent[i] == last  # overwrites what it beats at equal seconds
            last, least = spent[i], error[i]
            front_spent[count], front_error[count] = last, least
            count += 1
    return front_spent[:count], front_error[:count]


@numba.njit(cache=True)
def least_after(x: float, left: Floats, after: Floats, k: int) -> float:
    """The relaxation's error at x seconds left, where `k` is the last with left[k] <= x."""
    if k == len(left) - 1:
        return float(after[k])
    return float(after[k] + (after[k + 1] - after[k]) * ((x - left[k]) / (left[k + 1] - left[k])))


@numba.njit(cache=True)
def most_promising(
    spent: Floats, error: Floats, left: Floats, after: Floats, horizon: float, width: int
) -> tuple[Floats, Floats, float]:
    """The `width` states of least bound, of equal ones those of fewer seconds; and the least bound of the others."""
    bound = np.empty(len(spent))
    k = len(left) - 1
    for i in range(len(spent)):
        x = horizon - spent[i]
        while left[k] > x:
            k -= 1
        bound[i] = error[i] + least_after(x, left, after, k)
    limit = np.partition(bound, width)[width]
    equal = width - np.sum(bound < limit)
    keep = np.empty(width, np.intp)
    count = 0
    for i in range(len(spent)):
        if bound[i] < limit or (bound[i] == limit and equal > 0):
            equal -= bound[i] == limit
            keep[count] = i
            count += 1
    return spent[keep], error[keep], limit


@numba.njit(cache=True)
def extend(
    spent: Floats,
    error: Floats,
    seconds: Floats,
    errors: Floats,
    left: Floats,
    after: Floats,
    horizon: float,
    ceiling: float,
    width: int,
) -> tuple[Floats, Floats, float]:
    """The efficient sums of a state and an option whose completions may end within `horizon`, under `ceiling`.

    (left, after) is the relaxation of the layers to come: the least error within so many seconds. At most `width` of
    the sums, the most promising ones, and the least bound of those dropped for that.
    """
    front_spent, front_error = np.empty(0), np.empty(0)
    least_dropped = np.inf
    more_spent, more_error = np.empty(len(spent)), np.empty(len(spent))
    for option in range(len(seconds)):
        count = 0
        # Seconds rise along the states, so what is left of the horizon falls, and the place in the curve with it.
        k = np.searchsorted(left, horizon - (spent[0] + seconds[option]), side="right") - 1 if len(spent) else -1
        for i in range(len(spent)):
            s, e = spent[i] + seconds[option], error[i] + errors[option]
            x = horizon - s
            while k >= 0 and left[k] > x:
                k -= 1
            if k < 0:
                break
            if e + least_after(x, left, after, k) <= ceiling:
                more_spent[count], more_error[count] = s, e
                count += 1
        if count:
            front_spent, front_error = merge(front_spent, front_error, more_spent[:count], more_error[:count])
        if len(front_spent) > (width if option == len(seconds) - 1 else max(4 * width, ROOM)):
            front_spent, front_error, least = most_promising(front_spent, front_error, left, after, horizon, width)
            least_dropped = min(least_dropped, least)
    return front_spent, front_error, least_dropped


@numba.njit(cache=True)
def label(
    first: Places,
    seconds: Floats,
    errors: Floats,
    step_layer: Places,
    step_seconds: Floats,
    step_gain: Floats,
    fastest_seconds: Floats,
    fastest_error: Floats,
    horizon: float,
    ceiling: float,
    width: int,
) -> tuple[Floats, Floats, NDArray[np.int64], float]:
    """The states after each layer, at most `width`, and the least bound of those dropped for that.

    Steps and fastest sums are those of `search.knapsack.one_budget.Relaxation`. States of d layers lie from begin[d]
    to begin[d+1].
    """
    layers = len(first) - 1
    begin = np.zeros(layers + 2, np.int64)
    begin[1] = 1
    all_spent, all_error = np.zeros(4096), np.zeros(4096)
    spent, error = np.zeros(1), np.zeros(1)
    left, after = np.empty(len(step_layer) + 1), np.empty(len(step_layer) + 1)
    least_dropped = np.inf
    for depth in range(1, layers + 1):
        left[0], after[0] = fastest_seconds[depth], fastest_error[depth]
        steps = 1
        for i in range(len(step_layer)):
            if step_layer[i] >= depth:
                left[steps] = left[steps - 1] + step_seconds[i]
                after[steps] = after[steps - 1] - step_gain[i]
                steps += 1
        start, stop = first[depth - 1], first[depth]
        spent, error, dropped = extend(
            spent,
            error,
            seconds[start:stop],
            errors[start:stop],
            left[:steps],
            after[:steps],
            horizon,
            ceiling,
            width,
        )
        least_dropped = min(least_dropped, dropped)
        begin[depth + 1] = begin[depth] + len(spent)
        if begin[depth + 1] > len(all_spent):
            room = np.empty(begin[depth + 1])
            all_spent = np.concatenate((all_spent[: begin[depth]], room))
            all_error = np.concatenate((all_error[: begin[depth]], room))
        all_spent[begin[depth] : begin[depth + 1]] = spent
        all_error[begin[depth] : begin[depth + 1]] = error
    return all_spent[: begin[-1]], all_error[: begin[-1]], begin, least_dropped


@numba.njit(cache=True)
def trace_back(
    first: Places,
    seconds: Floats,
    errors: Floats,
    all_spent: Floats,
    all_error: Floats,
    begin: NDArray[np.int64],
    spent: float,
    error: float,
) -> Places:
    """The options that lead to the last state (spent, error). The same additions give the same floats."""
    layers = len(first) - 1
    taken = np.empty(layers, np.intp)
    for depth in range(layers, 0, -1):
        found = False
        for j in range(first[depth - 1], first[depth]):
            for i in range(begin[depth - 1], begin[depth]):
                if all_spent[i] + seconds[j] == spent and all_error[i] + errors[j] == error:
                    taken[depth - 1], found = j, True
                    spent, error = all_spent[i], all_error[i]
                    break
            if found:
                break
    return taken


@numba.njit(cache=True)
def efficient_in_three(spent: Floats, other: Floats, error: Floats) -> NDArray[np.bool_]:
    """Which states none beats in all three; of equal ones the first. They come by rising seconds, other, error.

    Places of a Fenwick tree hold the least error for so much of the other: a state is beaten by an earlier one or not
    at all. Source: Fenwick 1994, "A new data structure for cumulative frequency tables".
    """
    keep = np.zeros(len(spent), np.bool_)
    rank = np.searchsorted(np.unique(other), other) + 1
    least = np.full(len(other) + 1, np.inf)
    for i in range(len(spent)):
        place, best = rank[i], np.inf
        while place > 0:
            best = min(best, least[place])
            place &= place - 1
        if best <= error[i]:
            continue
        keep[i] = True
        place = rank[i]
        while place < len(least):
            least[place] = min(least[place], error[i])
            place += place & -place
    return keep
