"""`latbench compare`: points that became slower or faster, or are missing, between two tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from latbench.cli.json_output import print_json
from latbench.cli.options.common_options import Json
from latbench.cli.options.table_options import (
    AcrossDevices,
    AcrossModes,
    AfterTable,
    BeforeTable,
    CorrectDrift,
    FailOn,
    Rows,
    Threshold,
)

if TYPE_CHECKING:
    import pandas as pd

    from latbench.tables.compare import Change


def compare(
    before: BeforeTable,
    after: AfterTable,
    fail_on: FailOn = None,
    threshold: Threshold = 0.02,
    correct_drift: CorrectDrift = False,
    across_devices: AcrossDevices = False,
    across_modes: AcrossModes = False,
    rows: Rows = 40,
    as_json: Json = False,
) -> None:
    """Judge every point of two tables SAME, FASTER, SLOWER or UNCLEAR. Exit 1 on what --fail-on names."""
    from latbench.cli.options.option_texts import check_positive
    from latbench.errors import PromiseMissed
    from latbench.tables.compare import KINDS, compare_tables, read_compared_rows
    from latbench.tables.storage import hide_secrets
    from latbench.tables.table import hash_table

    wanted = _parse_kinds(fail_on)
    check_positive("--threshold", threshold)
    frames = {path: read_compared_rows(path) for path in (before, after)}
    across = _columns_to_ignore(frames, across_devices, across_modes)
    changes = compare_tables(
        frames[before], frames[after], threshold=threshold, across=across, corrected=correct_drift
    )
    counts = Counter(change.kind for change in changes)
    if as_json:
        document = {
            "before": {"table": hide_secrets(str(before)), "hash": hash_table(before)},
            "after": {"table": hide_secrets(str(after)), "hash": hash_table(after)},
            "threshold": threshold,
            "corrected_for_drift": correct_drift,
            "counts": {kind: counts[kind] for kind in KINDS},
            "points": [vars(change) for change in changes],
        }
        print_json(document)
    else:
        _print_changes(changes, counts, rows)
    if found := [f"{counts[kind]} {kind}" for kind in KINDS if kind in wanted and counts[kind]]:
        asked = ",".join(fail_on or ())
        raise PromiseMissed(
            f"{', '.join(found)} of {len(changes)} points: {hide_secrets(after)} fails --fail-on {asked}"
        )


def _columns_to_ignore(frames: Mapping[str, pd.DataFrame], devices: bool, modes: bool) -> list[str]:
    """Return the columns in which compared points may differ.

    Raises UsageError where the tables differ in one of these columns without the option that allows it.
    """
    from latbench.errors import UsageError
    from latbench.tables.comparability import MODES, describe_device_difference, describe_mode_difference

    values = {
        path: {name: set(frame[name].dropna()) for name in ("device", *MODES)} for path, frame in frames.items()
    }
    across: list[str] = []
    if devices:
        across.append("device")
    elif (unlike := describe_device_difference(values)) is not None:
        raise UsageError(f"{unlike}; --across-devices compares them nevertheless")
    if modes:
        across += MODES
    elif (unlike := describe_mode_difference(values)) is not None:
        raise UsageError(f"{unlike}; --across-modes compares them nevertheless")
    return across


def _parse_kinds(texts: Sequence[str] | None) -> set[str]:
    """Return the kinds of changes that --fail-on names."""
    from latbench.errors import UsageError
    from latbench.tables.compare import KINDS

    named = {text.upper() for text in texts or ()}
    if unknown := named - set(KINDS):
        known = ", ".join(kind.lower() for kind in KINDS)
        raise UsageError(f"--fail-on takes {known}, not {', '.join(sorted(unknown)).lower()}")
    return named


def _print_changes(changes: Sequence[Change], counts: Counter[str], most: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from latbench.base.number_format import format_ratio, format_seconds
    from latbench.tables.compare import KINDS

    listed = [change for change in changes if most == 0 or change.kind != "SAME"][: most or None]
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("verdict", "left"), ("point", "left"), ("before", "right"), ("after", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("after / before", justify="right")
    describe = _point_describer(changes)
    for change in listed:
        ratio = format_ratio(change.ratio, change.low, change.high)
        table.add_row(
            change.kind, describe(change), format_seconds(change.before), format_seconds(change.after),
            ratio if change.ratio is not None else change.reason,
        )  # fmt: skip
    console = Console()
    if listed:
        console.print(table)
    left = len(changes) - len(listed)
    summary = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    console.print(f"{summary}{f'; {left} points are not listed' if left else ''}", highlight=False, soft_wrap=True)


def _point_describer(changes: Sequence[Change]) -> Callable[[Change], str]:
    """Return a function that describes a point by shape, pattern, engine and every column that differs."""
    from latbench.base.number_format import format_percent
    from latbench.report import point_frames

    plain = {*point_frames.SHAPE, "model", "backend", "kernel_requested", "pattern", "sparsity_target"}
    keys = [change.key for change in changes]
    others = [name for name in keys[0] if name not in plain and len({key[name] for key in keys}) > 1]

    def describe(change: Change) -> str:
        key = change.key
        layer = key["model"] or "" if key["op"] == "model" or key["m"] is None else point_frames.format_shape(key)
        sparsity = format_percent(key["sparsity_target"]) if key["sparsity_target"] else ""
        engine = point_frames.format_engine(key["backend"], key["kernel_requested"] or "")
        settings = [f"{key[name]} threads" if name == "threads" else str(key[name]) for name in others]
        return ", ".join(text for text in (layer, f"{key['pattern']} {sparsity}".strip(), engine, *settings) if text)

    return describe
