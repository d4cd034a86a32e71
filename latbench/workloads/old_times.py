"""Times of a table that other versions of the engines took: which to take again, and how they have moved.

A table may have thousands of old times. A few of each group, timed again, tell whether the others still hold. A group
is an engine and an operation; of latbench's own kernels also the kind of kernel that ran, such as `rows`. A machine
may be busier than it was, or another one of its kind. So engines that are the same as then are timed again, too: what
they changed is the machine's part.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latbench.base.engine_registry import CPU_ENGINES, GPU_ENGINES
from latbench.base.median_interval import bound_median
from latbench.tables.compare import Change
from latbench.tables.point_ids import hash_key
from latbench.tables.significance import FASTER, SAME, SLOWER, UNCLEAR
from latbench.tables.table import select_timed
from latbench.workloads.points import Point
from sparse_kernels.patterns import parse
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

POINTS_OF_GROUP = 9
"""Points of a group that are timed again, at most: the fewest of which one may be wrong (`bound_median`)."""

LEAST_MOVE = 0.05
"""A group has moved if its median point changed by more than this share."""

_KIND = re.compile(r"\.((?:int8)?[a-z]+)\d+x\d+|^cuda\.([^.+]+)")
"""`rows` of numba.block.conv2d.rows8x2.avx512, and `vector_sm90` of cuda.vector_sm90+sum.sm_90a."""


@dataclass(frozen=True)
class Move:
    """How the times of a group have moved.

    Attributes
    ----------
    group
        Its name.
    old
        Old times of the group in the table.
    timed
        Points that were timed again.
    ratio, low, high
        Median of new over old seconds over these points, without the machine's part, and an interval with that part's
        interval in it. Each is a 95% interval; with fewer than six points, the extremes. NaN without a point.
    verdict
        FASTER, SLOWER, SAME, or UNCLEAR where the interval allows more than one of these, or points are few.
    """

    group: str
    old: int
    timed: int
    ratio: float
    low: float
    high: float
    verdict: str


def read_point(row: Mapping[Hashable, Any]) -> Point | None:
    """Return the point that a row of a table timed; None for a row that no sweep of this version would name."""
    try:
        found = Point(
            device=row["device"], backend=row["backend"], kernel=row["kernel_requested"], shape=_read_shape(row),
            pattern=parse(row["pattern"]), sparsity=row["sparsity_target"], threads=int(row["threads"]),
            seed=int(row["pattern_seed"]), purpose=row["purpose"], epilogue=row["epilogue"], context=row["context"],
            cache_mode=row["cache_mode"], launch_mode=row["launch_mode"], dtype=row["dtype_out"],
            layout=row["layout"], dtype_w=row["dtype_w"], dtype_a=row["dtype_a"],
        )  # fmt: skip
    except (ValueError, TypeError):  # of a published table, say
        return None
    return found if found.id == row["point_id"] else None


def _read_shape(row: Mapping[Hashable, Any]) -> Shape:
    if row["op"] != Conv2dShape.op:
        return LinearShape(int(row["m"]), int(row["k"]), int(row["n"]))
    batch, c_in, h, w, c_out, kh, kw = (int(row[name]) for name in ("batch", "c_in", "h", "w", "c_out", "kh", "kw"))
    pairs = ((int(row[f"{name}_h"]), int(row[f"{name}_w"])) for name in ("stride", "padding", "dilation"))
    return Conv2dShape(batch, c_in, h, w, c_out, kh, kw, *pairs)


def name_group(row: Mapping[Hashable, Any]) -> str:
    """Return the group of a row: its engine, its operation, and for latbench's kernels the kind that ran.

    A weight of another type than the result is named, too.
    """
    name = f"{row['backend']} {row['op']}"
    if row["dtype_w"] != row["dtype_out"]:
        name = f"{name} {row['dtype_w']}"
    engine = CPU_ENGINES.get(row["backend"]) or GPU_ENGINES.get(row["backend"])
    if engine is None or not engine.ours or not isinstance(row["kernel_used"], str):
        return name
    kind = _KIND.search(row["kernel_used"])
    return f"{name} {kind[1] or kind[2]}" if kind else name


def select_old_times(rows: pd.DataFrame, current: NDArray[np.bool_]) -> pd.DataFrame:
    """Return the rows that readers take (`select_timed`) although other versions took these times.

    A noisy time of the installed versions does not replace an old one that is settled. Rows of whole models are left
    out: their engines are timed together, each time anew.

    Parameters
    ----------
    rows
        Rows of a table, with point_id, op, status and started_at.
    current
        bool (rows,), whether a row timed the versions that are installed.
    """
    timed = select_timed(rows.assign(_current=current))
    return timed[~timed["_current"] & timed["op"].ne("model")].drop(columns="_current").reset_index(drop=True)


def sample_old_points(old: pd.DataFrame, seed: int) -> list[Point]:
    """Return up to POINTS_OF_GROUP points of each group of old rows, drawn at random; the same for the same seed.

    Parameters
    ----------
    old
        Rows with an old time, one a point, with the key columns, point_id and kernel_used.
    seed
        Random seed.
    """
    groups: dict[str, list[Point]] = {}
    shuffled = old.sort_values("point_id").sample(frac=1, random_state=seed)
    for row in shuffled.to_dict("records"):
        group = groups.setdefault(name_group(row), [])
        if len(group) < POINTS_OF_GROUP and (point := read_point(row)) is not None:
            group.append(point)
    return [point for name in sorted(groups) for point in groups[name]]


def sample_unchanged_points(rows: pd.DataFrame, current: NDArray[np.bool_], seed: int) -> list[Point]:
    """Return up to POINTS_OF_GROUP points that the installed versions timed, drawn at random.

    Parameters
    ----------
    rows
        Rows of a table, with the key columns, point_id, status and started_at.
    current
        bool (rows,), whether a row timed the versions that are installed.
    seed
        Random seed.
    """
    timed = select_timed(rows[current])
    shuffled = timed[timed["op"].ne("model")].sort_values("point_id").sample(frac=1, random_state=seed)
    found = (point for row in shuffled.to_dict("records") if (point := read_point(row)) is not None)
    return list(itertools.islice(found, POINTS_OF_GROUP))


def find_machine_part(changes: Sequence[Change]) -> tuple[float, float, float] | None:
    """Return by how much unchanged engines moved: the median ratio and its interval; None without a point.

    Parameters
    ----------
    changes
        The points of `sample_unchanged_points`, compared with their old rows.
    """
    ratios = [change.ratio for change in changes if change.ratio is not None]
    return _find_median(ratios)[:3] if ratios else None


def judge_moves(
    old: pd.DataFrame, changes: Sequence[Change], machine: tuple[float, float, float] | None = None
) -> list[Move]:
    """Return how each group has moved, those with most old times first.

    Parameters
    ----------
    old
        The old rows of which `sample_old_points` took some.
    changes
        The points that were timed again, compared with these rows.
    machine
        The machine's part, of `find_machine_part`; None for none.
    """
    groups = {row["point_id"]: name_group(row) for row in old.to_dict("records")}
    ratios: dict[str, list[float]] = {name: [] for name in groups.values()}
    for change in changes:
        if change.ratio is not None:
            ratios[groups[hash_key(change.key)]].append(change.ratio)
    counts = Counter(groups.values())
    order = sorted(ratios, key=lambda name: (-counts[name], name))
    return [_judge(name, counts[name], ratios[name], machine or (1.0, 1.0, 1.0)) for name in order]


def _find_median(ratios: Sequence[float]) -> tuple[float, float, float, bool]:
    """Return the median of some ratios, its interval, and whether they are too few for a 95% interval."""
    ordered = np.sort(ratios)
    low, high = bound_median(ordered)
    if low is None or high is None:
        return float(np.median(ordered)), float(ordered[0]), float(ordered[-1]), True
    return float(np.median(ordered)), low, high, False


def _judge(group: str, old: int, ratios: Sequence[float], machine: tuple[float, float, float]) -> Move:
    if not ratios:
        return Move(group, old, 0, math.nan, math.nan, math.nan, UNCLEAR)
    ratio, low, high, few = _find_median(ratios)
    ratio, low, high = ratio / machine[0], low / machine[2], high / machine[1]
    verdict = UNCLEAR
    if not few and high < 1 / (1 + LEAST_MOVE):
        verdict = FASTER
    elif not few and low > 1 + LEAST_MOVE:
        verdict = SLOWER
    elif not few and low >= 1 / (1 + LEAST_MOVE) and high <= 1 + LEAST_MOVE:
        verdict = SAME
    return Move(group, old, len(ratios), ratio, low, high, verdict)
