"""Compiled: the states of the exact solver, layer by layer. A state is (seconds, error); see `search.solve`.

Apart from `solve` and `frontier`, which import it when they are called, so that importing `search` compiles nothing.
Options and states lie flat, one layer after the other: those of layer l from first[l] to first[l + 1].
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from search.solve import Floats, Places


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
                along = (errors[b] - errors[a]) * (seconds[j] - seconds[a])
                if along < (errors[j] - errors[a]) * (seconds[b] - seconds[a]):
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
def extend_all(spent: Floats, error: Floats, seconds: Floats, errors: Floats) -> tuple[Floats, Floats]:
    """The efficient sums of a state and an option: one shifted copy of the states an option, merged in turn."""
    front_spent, front_error = np.empty(0), np.empty(0)
    for option in range(len(seconds)):
        # States that differ may round to equal sums: the first copy goes through the filter too.
        front_spent, front_error = merge(front_spent, front_error, spent + seconds[option], error + errors[option])
    return front_spent, front_error


@numba.njit(cache=True)
def least_after(x: float, left: Floats, after: Floats, k: int) -> float:
    """The relaxation's error at x seconds left, where `k` is the last with left[k] <= x."""
    if k == len(left) - 1:
        return float(after[k])
    return float(after[k] + (after[k + 1] - after[k]) * ((x - left[k]) / (left[k + 1] - left[k])))


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
) -> tuple[Floats, Floats]:
    """The efficient sums of a state and an option whose completions may end within `horizon`, under `ceiling`.

    (left, after) is the relaxation of the layers to come: the least error within so many seconds.
    """
    front_spent, front_error = np.empty(0), np.empty(0)
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
    return front_spent, front_error


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

    Steps and fastest sums are those of `search.solve.Relaxation`. States of d layers lie from begin[d] to begin[d+1].
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
        spent, error = extend(
            spent, error, seconds[start:stop], errors[start:stop], left[:steps], after[:steps], horizon, ceiling
        )
        if len(spent) > width:
            bound = np.empty(len(spent))
            for i in range(len(spent)):
                x = horizon - spent[i]
                bound[i] = error[i] + least_after(
                    x, left[:steps], after[:steps], np.searchsorted(left[:steps], x, side="right") - 1
                )
            ranked = np.argsort(bound, kind="mergesort")
            least_dropped = min(least_dropped, bound[ranked[width]])
            keep = np.sort(ranked[:width])
            spent, error = spent[keep], error[keep]
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

    A staircase holds the least error for so much of the other: a state is beaten by an earlier one or not at all.
    """
    keep = np.zeros(len(spent), np.bool_)
    stair_other, stair_error = np.empty(len(spent)), np.empty(len(spent))
    height = 0
    for i in range(len(spent)):
        place = np.searchsorted(stair_other[:height], other[i], side="right")
        if place and stair_error[place - 1] <= error[i]:
            continue
        keep[i] = True
        start = place - 1 if place and stair_other[place - 1] == other[i] else place
        stop = start
        while stop < height and stair_error[stop] >= error[i]:
            stop += 1
        rest = height - stop
        moved_other, moved_error = stair_other[stop:height].copy(), stair_error[stop:height].copy()
        stair_other[start], stair_error[start] = other[i], error[i]
        stair_other[start + 1 : start + 1 + rest] = moved_other
        stair_error[start + 1 : start + 1 + rest] = moved_error
        height = start + 1 + rest
    return keep
