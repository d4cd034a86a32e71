"""Compiled loops of the exact solver. A state is a pair (seconds, error) of the first layers.

`search.knapsack.one_budget` describes the method. `solve` and `frontier` import this module when they are called, so
`import search` compiles nothing. Options and states of all layers share flat arrays: those of layer l lie from
first[l] to first[l + 1]. Python calls these functions with plain tuples: looking up the type of a named one takes
Numba 5 us at each call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from search.knapsack.arrays import Floats, Indices, OptionArrays, RelaxationArrays
from sparse_kernels.cpu.runtime.kernel_cache import compile_cached

MOST_STATES = 2**18
"""A layer may hold this many states, or four times as many as it keeps, before it drops the least promising ones."""


class States(NamedTuple):
    """Efficient states: the seconds `spent` rise, `error` falls."""

    spent: Floats
    error: Floats


class LeastError(NamedTuple):
    """The relaxation of the layers to come: corners of the convex curve of least `error` within `seconds`."""

    seconds: Floats
    error: Floats


StateTable = tuple[Floats, Floats, NDArray[np.int64]]
"""Seconds and error of the states after each number of layers: those of d layers from begin[d] to begin[d + 1]."""


@compile_cached
def find_lower_hull(seconds: Floats, errors: Floats, first: Indices) -> Indices:
    """Return the options on each layer's lower convex hull (Andrew's monotone chain).

    Within a layer seconds rise and errors fall.
    """
    hull = np.empty(len(seconds), np.intp)
    count = 0
    for layer in range(len(first) - 1):
        base = count
        for j in range(first[layer], first[layer + 1]):
            while count > base + 1:
                a, b = hull[count - 2], hull[count - 1]
                # Compare slopes: products with both differences may underflow.
                slope = (errors[b] - errors[a]) / (seconds[b] - seconds[a])
                if slope < (errors[j] - errors[a]) / (seconds[j] - seconds[a]):
                    break
                count -= 1
            hull[count] = j
            count += 1
    return hull[:count]


@compile_cached
def merge_states(spent_a: Floats, error_a: Floats, spent_b: Floats, error_b: Floats) -> tuple[Floats, Floats]:
    """Return the efficient states of two sorted lists.

    In each list seconds never fall and errors never rise; neighbours may be equal. The main loop has no branch that
    depends on the data: half of them would be mispredicted.
    """
    spent, error = np.empty(len(spent_a) + len(spent_b)), np.empty(len(spent_a) + len(spent_b))
    a, b, count, last, least = 0, 0, 0, -np.inf, np.inf
    while a < len(spent_a) and b < len(spent_b):
        first = spent_a[a] < spent_b[b] or (spent_a[a] == spent_b[b] and error_a[a] <= error_b[b])
        more_spent = spent_a[a] if first else spent_b[b]
        more_error = error_a[a] if first else error_b[b]
        efficient = more_error < least
        count -= efficient and more_spent == last  # overwrites the state that it beats at equal seconds
        spent[count], error[count] = more_spent, more_error
        last = more_spent if efficient else last
        least = more_error if efficient else least
        a += first
        b += not first
        count += efficient
    # The rest of one list is slower than all of the other list.
    for rest_spent, rest_error in ((spent_a[a:], error_a[a:]), (spent_b[b:], error_b[b:])):
        for i in range(len(rest_spent)):
            if rest_error[i] < least:
                count -= rest_spent[i] == last
                last, least = rest_spent[i], rest_error[i]
                spent[count], error[count] = last, least
                count += 1
    return spent[:count], error[:count]


@compile_cached
def count_below(spent: Floats, seconds: float, end: float) -> int:
    """Return how many sums of a state and `seconds` are below `end`. They are the first ones, because sums rise."""
    low, high = 0, len(spent)
    while low < high:
        middle = (low + high) // 2
        if spent[middle] + seconds < end:
            low = middle + 1
        else:
            high = middle
    return low


@compile_cached
def extend_between(
    spent: Floats, error: Floats, seconds: Floats, errors: Floats, start: float, end: float
) -> tuple[Floats, Floats]:
    """Return the efficient sums of a state and an option that take from `start` to below `end` seconds.

    Most sums lie far above the front. Two passes over intervals of equal length avoid sorting them: the first finds
    the least error of each interval, the second keeps the sums that no earlier interval beats. Few are left to sort.
    """
    options = len(seconds)
    begin, stop = np.empty(options, np.int64), np.empty(options, np.int64)
    least_spent, most_spent, count = np.inf, -np.inf, 0
    for option in range(options):
        low, high = count_below(spent, seconds[option], start), count_below(spent, seconds[option], end)
        begin[option], stop[option] = low, high
        if low < high:
            least_spent = min(least_spent, spent[low] + seconds[option])
            most_spent = max(most_spent, spent[high - 1] + seconds[option])
        count = max(count, high - low)  # neighbours of one option seldom share an interval
    scale = 0.0
    if most_spent > least_spent and (count - 1) / (most_spent - least_spent) < np.inf:
        scale = (count - 1) / (most_spent - least_spent)

    # Unsigned indices: Numba checks signed ones for negative values at each access.
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
    return select_efficient(kept_spent[:kept], kept_error[:kept])


@compile_cached
def select_efficient(spent: Floats, error: Floats) -> tuple[Floats, Floats]:
    """Return the efficient states of a list in any order, by rising seconds."""
    front_spent, front_error = np.empty(len(spent)), np.empty(len(spent))
    count, last, least = 0, -np.inf, np.inf
    for i in np.argsort(spent):
        if error[i] < least:
            count -= spent[i] == last  # overwrites the state that it beats at equal seconds
            last, least = spent[i], error[i]
            front_spent[count], front_error[count] = last, least
            count += 1
    return front_spent[:count], front_error[:count]


@compile_cached
def interpolate_error(x: float, curve: LeastError, k: int) -> float:
    """Return the curve's error within x seconds, where `k` is its last corner with at most x seconds."""
    seconds, error = curve
    if k == len(seconds) - 1:
        return float(error[k])
    return float(error[k] + (error[k + 1] - error[k]) * ((x - seconds[k]) / (seconds[k + 1] - seconds[k])))


@compile_cached
def select_most_promising(
    states: States, curve: LeastError, horizon: float, width: int
) -> tuple[Floats, Floats, float]:
    """Return the `width` states of least bound, and the least bound of the others.

    Of states with equal bounds the faster ones are selected.
    """
    spent, error = states
    bound = np.empty(len(spent))
    k = len(curve.seconds) - 1
    for i in range(len(spent)):
        x = horizon - spent[i]
        while curve.seconds[k] > x:
            k -= 1
        bound[i] = error[i] + interpolate_error(x, curve, k)
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


@compile_cached
def extend_states(
    states: States, seconds: Floats, errors: Floats, curve: LeastError, horizon: float, ceiling: float, width: int
) -> tuple[Floats, Floats, float]:
    """Return the efficient sums of a state and an option of the next layer, and the least bound of those dropped.

    Sums whose completion cannot stay within `horizon` (seconds) and `ceiling` (error) are left out; `curve` bounds
    the completions. At most `width` sums are kept, the most promising ones.
    """
    spent, error = states
    front_spent, front_error = np.empty(0), np.empty(0)
    least_dropped = np.inf
    more_spent, more_error = np.empty(len(spent)), np.empty(len(spent))
    for option in range(len(seconds)):
        count = 0
        # Seconds rise along the states, so the rest of the horizon shrinks, and so does the position on the curve.
        most = horizon - (spent[0] + seconds[option]) if len(spent) else -np.inf
        k = int(np.searchsorted(curve.seconds, most, side="right")) - 1
        for i in range(len(spent)):
            s, e = spent[i] + seconds[option], error[i] + errors[option]
            x = horizon - s
            while k >= 0 and curve.seconds[k] > x:
                k -= 1
            if k < 0:
                break
            if e + interpolate_error(x, curve, k) <= ceiling:
                more_spent[count], more_error[count] = s, e
                count += 1
        if count:
            front_spent, front_error = merge_states(front_spent, front_error, more_spent[:count], more_error[:count])
        if len(front_spent) > (width if option == len(seconds) - 1 else max(4 * width, MOST_STATES)):
            front = States(front_spent, front_error)
            front_spent, front_error, least = select_most_promising(front, curve, horizon, width)
            least_dropped = min(least_dropped, least)
    return front_spent, front_error, least_dropped


@compile_cached
def build_states(
    options: OptionArrays, relaxation: RelaxationArrays, horizon: float, ceiling: float, width: int
) -> tuple[StateTable, float]:
    """Return the states of all layers, at most `width` a layer, and the least bound of those dropped for that."""
    all_seconds, all_errors, first = options
    step_layer, step_seconds, step_gain, fastest_seconds, fastest_error = relaxation
    layers = len(first) - 1
    begin = np.zeros(layers + 2, np.int64)
    begin[1] = 1
    all_spent, all_error = np.zeros(4096), np.zeros(4096)
    spent, error = np.zeros(1), np.zeros(1)
    curve_seconds, curve_error = np.empty(len(step_layer) + 1), np.empty(len(step_layer) + 1)
    least_dropped = np.inf
    for depth in range(1, layers + 1):
        curve_seconds[0], curve_error[0] = fastest_seconds[depth], fastest_error[depth]
        corners = 1
        for i in range(len(step_layer)):
            if step_layer[i] >= depth:
                curve_seconds[corners] = curve_seconds[corners - 1] + step_seconds[i]
                curve_error[corners] = curve_error[corners - 1] - step_gain[i]
                corners += 1
        start, stop = first[depth - 1], first[depth]
        curve = LeastError(curve_seconds[:corners], curve_error[:corners])
        seconds, errors = all_seconds[start:stop], all_errors[start:stop]
        spent, error, dropped = extend_states(States(spent, error), seconds, errors, curve, horizon, ceiling, width)
        least_dropped = min(least_dropped, dropped)
        begin[depth + 1] = begin[depth] + len(spent)
        if begin[depth + 1] > len(all_spent):
            room = np.empty(begin[depth + 1])
            all_spent = np.concatenate((all_spent[: begin[depth]], room))
            all_error = np.concatenate((all_error[: begin[depth]], room))
        all_spent[begin[depth] : begin[depth + 1]] = spent
        all_error[begin[depth] : begin[depth + 1]] = error
    return (all_spent[: begin[-1]], all_error[: begin[-1]], begin), least_dropped


@compile_cached
def trace_back(options: OptionArrays, states: StateTable, last: int) -> Indices:
    """Return the options that lead to the state with index `last`. Equal additions give equal floats."""
    seconds, errors, first = options
    all_spent, all_error, begin = states
    spent, error = all_spent[last], all_error[last]
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


@compile_cached
def find_efficient_in_three(spent: Floats, other: Floats, error: Floats) -> NDArray[np.bool_]:
    """Return which states no other state beats in all three values; of equal states the first.

    States come by rising seconds, other, error, so only an earlier state can beat a later one. Nodes of a Fenwick
    tree hold the least error up to an amount of the other. Source: Fenwick 1994, "A new data structure for cumulative
    frequency tables".
    """
    keep = np.zeros(len(spent), np.bool_)
    rank = np.searchsorted(np.unique(other), other) + 1
    least = np.full(len(other) + 1, np.inf)
    for i in range(len(spent)):
        node, best = rank[i], np.inf
        while node > 0:
            best = min(best, least[node])
            node &= node - 1
        if best <= error[i]:
            continue
        keep[i] = True
        node = rank[i]
        while node < len(least):
            least[node] = min(least[node], error[i])
            node += node & -node
    return keep
