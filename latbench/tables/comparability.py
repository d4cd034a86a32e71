"""Whether tables may be set side by side: times of unlike devices, or taken in unlike ways, are not of one kind."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from itertools import combinations
from typing import TypeVar

# How a time was taken. A table may hold several of each (two thread counts, say); tables are unlike in a column of
# which they share no value.
MODES = ("context", "cache_mode", "launch_mode", "threads", "timer", "l2_flush_bytes", "pinning")

Named = TypeVar("Named", bound=Hashable)
ColumnValues = Mapping[str, Collection[Hashable]]
"""Column -> the values that a table has in it, nulls left out."""


def describe_device_difference(tables: Mapping[Named, ColumnValues]) -> str | None:
    """What sets the devices of the tables apart, in a sentence; None if all hold the same ones."""
    each = {path: _listed(values["device"]) for path, values in tables.items()}
    if len(set(each.values())) < 2:
        return None
    return "unlike devices: " + "; ".join(f"{path} is of {devices}" for path, devices in each.items())


def describe_mode_difference(tables: Mapping[Named, ColumnValues]) -> str | None:
    """In which modes two tables have nothing in common, in a sentence; None if there is no such mode."""
    for name in MODES:
        seen: dict[Named, set[Hashable]] = {
            path: set(values[name]) for path, values in tables.items() if values[name]
        }
        for first, second in combinations(seen, 2):
            if seen[first].isdisjoint(seen[second]):
                ours, theirs = _listed(seen[first]), _listed(seen[second])
                return f"unlike modes: {name} is {ours} in {first}, and {theirs} in {second}"
    return None


def _listed(values: Collection[Hashable]) -> str:
    return ", ".join(sorted(map(str, values)))
