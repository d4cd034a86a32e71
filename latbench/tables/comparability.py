"""Whether tables can be compared: times of different devices, or measured in different modes, cannot."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from itertools import combinations
from typing import TypeVar

# The columns of the measurement mode. A table may hold several values of each, such as two thread counts. Tables
# differ in a column if they share no value of it.
MODES = ("context", "cache_mode", "launch_mode", "threads", "timer", "l2_flush_bytes", "pinning")

Named = TypeVar("Named", bound=Hashable)
ColumnValues = Mapping[str, Collection[Hashable]]
"""The values of a table by column, without nulls."""


def describe_device_difference(tables: Mapping[Named, ColumnValues]) -> str | None:
    """Return a sentence on the different devices of tables; None if all tables have the same ones."""
    each = {path: _listed(values["device"]) for path, values in tables.items()}
    if len(set(each.values())) < 2:
        return None
    return "unlike devices: " + "; ".join(f"{path} is of {devices}" for path, devices in each.items())


def describe_mode_difference(tables: Mapping[Named, ColumnValues]) -> str | None:
    """Return a sentence on the first mode in which two tables share no value; None if there is none."""
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
