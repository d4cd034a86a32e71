"""Which rows to put together, so that groups of v rows can share their columns at the least loss of score (Shfl-BW).

Two steps, repeated from several starts while the work allows:
1. `cluster`: balanced k-means over the binary rows of the unstructured mask, clusters of exactly v rows (Huang et
   al., Shfl-BW: Accelerating Deep Neural Network Inference with Tensor-Core Aware Weight Pruning, DAC 2022).
2. `exchange`: every group lends one row, and an assignment problem gives the rows back where they retain the most
   score (a local search with very large neighbourhoods: Ahuja et al., Discrete Applied Mathematics 123, 2002).

The second step sees the scores, which the binary mask hides. On convolutions of a trained ResNet32 it gains several
times what the first step does. Where rows fall into clear clusters, the first step does nearly all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.top_units import Scores, select_top, select_top_vectors

Order = NDArray[np.int64]

STARTS = 8
SWEEPS = 12
LEAST_GAIN = 1e-3  # of the retained score: a sweep that gains less is the last of its start
WORK = 6e8  # element operations of all sweeps together, about a second; the first start may take more
OVERHEAD = 40  # element operations on every score in a sweep, besides one for each group in the batch
BATCH = 128  # groups that lend rows to each other at a time: the cost of an assignment grows with its square and more


def group_rows(scores: Scores, v: int, sparsity: float, rng: np.random.Generator) -> Order:
    """Return an order (m,) of the rows of scores (m, k): each v rows are one group; the last group may be smaller.

    Never worse than the order they have: of all groupings tried, consecutive rows among them, the one whose best
    vectors (`top_units.select_top_vectors`) retain the most score. The same scores and generator state give the same
    order.
    """
    m, k = scores.shape
    best = np.arange(m)
    kept, totals, _ = select_top_vectors(scores, v, sparsity)
    retained = float(np.sum(totals, where=kept))
    if v == 1 or m <= v or kept.all() or retained == 0:
        return best  # nothing to choose
    scaled = scores / scores.max()
    scaled = (scaled / scaled.mean()).astype(np.float32)
    work = WORK
    sweep_work = m * k * (min(BATCH, -(-m // v)) + OVERHEAD)
    for start in _starts(scaled, v, sparsity, rng):
        last = 0.0
        for order in exchange(scaled, start, v, sparsity, rng):
            now = _retained(scores, order, v, sparsity)
            if now > retained:
                best, retained = order, now
            work -= sweep_work
            if now < last * (1 + LEAST_GAIN):
                break
            last = now
        if work < sweep_work:
            break
    return best


def cluster(rows: NDArray[np.float32], v: int, rng: np.random.Generator, rounds: int = 8) -> Order:
    """Return an order of rows float32 (m, k) that puts like rows together: balanced k-means, clusters of v rows.

    The last cluster has m mod v rows where m is no multiple of v. Centres start as rows drawn by rng, far from one
    another (k-means++: Arthur and Vassilvitskii, SODA 2007).
    """
    m = len(rows)
    sizes = _group_sizes(m, v)
    centres = rows[_spread(rows, len(sizes), rng)]
    order = np.arange(m)
    for _ in range(rounds):
        nearness = 2 * rows @ centres.T - np.sum(centres**2, axis=1)
        order = np.argsort(_assign(nearness, sizes), kind="stable")
        first = np.cumsum(sizes) - sizes
        centres = (np.add.reduceat(rows[order], first, axis=0) / sizes[:, None]).astype(np.float32)
    return order


def exchange(
    scores: NDArray[np.float32], order: Order, v: int, sparsity: float, rng: np.random.Generator
) -> Iterator[Order]:
    """Better and better orders of the rows of scores float32 (m, k), one after each sweep; at most SWEEPS.

    In a sweep every row is lent once. A vector counts for what its score exceeds the price of keeping it, the score
    of the last vector kept: With the price fixed, groups can be judged one by one. To give each row back where it was
    is one of the assignments, so no step loses.
    """
    from scipy.optimize import linear_sum_assignment  # here, so that `import sparse_kernels` stays light

    m, k = scores.shape
    sizes = _group_sizes(m, v)
    places = np.full((len(sizes), v), -1)
    places.ravel()[:m] = order
    ones = np.ones(k, np.float32)
    for _ in range(SWEEPS):
        kept, exact_totals, _ = select_top_vectors(scores[places[places >= 0]], v, sparsity)
        price = (_price(exact_totals / sizes[:, None], kept) * sizes[:, None]).astype(np.float32)
        totals = exact_totals.astype(np.float32)
        for group, size in zip(places, sizes, strict=True):
            rng.shuffle(group[:size])
        for place in range(v):
            lenders = rng.permutation(np.flatnonzero(sizes > place))
            for groups in np.array_split(lenders, -(-len(lenders) // BATCH)):
                lent = places[groups, place]
                without = totals[groups] - scores[lent]
                # max(a, 0) = (a + |a|) / 2, and the sum of a is the same for every assignment
                gain = np.stack([np.abs(scores[lent] + rest) @ ones for rest in without - price[groups]])
                taker, row = linear_sum_assignment(gain, maximize=True)
                places[groups[taker], place] = lent[row]
                totals[groups[taker]] = without[taker] + scores[lent[row]]
        yield places[places >= 0]


def _starts(scores: NDArray[np.float32], v: int, sparsity: float, rng: np.random.Generator) -> Iterator[Order]:
    kept = select_top(scores.ravel(), round((1 - sparsity) * scores.size)).reshape(scores.shape).astype(np.float32)
    yield cluster(kept, v, rng)
    yield np.arange(len(scores))
    for _ in range(STARTS - 2):
        yield cluster(kept, v, rng)


def _price(means: NDArray[np.float64], kept: NDArray[np.bool_]) -> float:
    """Between the least kept and the largest dropped mean score of a vector's element."""
    return float(means[kept].min() + means[~kept].max()) / 2


def _spread(rows: NDArray[np.float32], count: int, rng: np.random.Generator) -> list[int]:
    """`count` rows, each drawn with a chance in proportion to its squared distance from those drawn before."""
    lengths = np.sum(rows**2, axis=1)
    drawn = [int(rng.integers(len(rows)))]
    distance = np.full(len(rows), np.inf)
    while len(drawn) < count:
        to_last = lengths + lengths[drawn[-1]] - 2 * rows @ rows[drawn[-1]]
        distance = np.minimum(distance, np.maximum(to_last, 0))
        reach = np.cumsum(distance)
        if reach[-1] > 0:
            drawn.append(min(int(np.searchsorted(reach, rng.random() * reach[-1], side="right")), len(rows) - 1))
        else:
            drawn.append(int(rng.integers(len(rows))))  # every row equals one that is drawn
    return drawn


def _assign(value: NDArray[np.float32], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the group (m,) of each row, `sizes` rows in each, for much of value (m, groups) in sum; greedy.

    In rounds: every row left asks for its best group with room, and a group that too many ask for takes those of most
    value to it.
    """
    m, groups = value.shape
    room = sizes.copy()
    group_of = np.empty(m, np.int64)
    left = np.arange(m)
    while left.size:
        open_value = np.where(room > 0, value[left], -np.inf)
        asked = np.argmax(open_value, axis=1)
        by_group = np.lexsort((-open_value.max(axis=1), asked))
        ranks = np.arange(left.size) - np.searchsorted(asked[by_group], np.arange(groups))[asked[by_group]]
        taken = by_group[ranks < room[asked[by_group]]]
        group_of[left[taken]] = asked[taken]
        room -= np.bincount(asked[taken], minlength=groups)
        left = np.delete(left, taken)
    return group_of


def _group_sizes(m: int, v: int) -> NDArray[np.int64]:
    return np.minimum(v, m - np.arange(0, m, v))


def _retained(scores: Scores, order: Order, v: int, sparsity: float) -> float:
    kept, totals, _ = select_top_vectors(scores[order], v, sparsity)
    return float(np.sum(totals, where=kept))
