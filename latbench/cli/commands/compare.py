"""`latbench compare`: what became slower, faster or got lost between two tables; for people and for CI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd

    from latbench.tables.compare import Change


def compare(
    before: Annotated[str, typer.Argument(help="The table to compare with: a folder of parts, a file or a URI.")],
    after: Annotated[str, typer.Argument(help="The table that is judged.")],
    fail_on: Annotated[
        str, typer.Option(help="Exit 1 if a point is so: any of slower,missing,unclear,faster,same,new.")
    ] = "",
    threshold: Annotated[float, typer.Option(help="A smaller change is none: a share, 0.02 is 2%.")] = 0.02,
    correct_drift: Annotated[
        bool, typer.Option("--correct-drift", help="Divide times by how much slower than usual a reference was then.")
    ] = False,
    across_devices: Annotated[
        bool, typer.Option("--across-devices", help="Compare points of unlike devices all the same.")
    ] = False,
    across_modes: Annotated[
        bool, typer.Option("--across-modes", help="Compare unlike cache and launch modes, threads, timers too.")
    ] = False,
    rows: Annotated[int, typer.Option(min=0, help="How many points to list at most; 0 lists all.")] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, of every point, instead of a table.")] = False,
) -> None:
    """Judge every point of two tables SAME, FASTER, SLOWER or UNCLEAR; exit 1 on what --fail-on names."""
    import json
    import math

    from latbench.errors import PromiseMissed, UsageError
    from latbench.tables.comparability import MODES, describe_device_difference, describe_mode_difference
    from latbench.tables.compare import KINDS, compare_tables, read_compared_rows
    from latbench.tables.storage import hide_secrets
    from latbench.tables.table import hash_table

    wanted = _kinds(fail_on)
    if not 0 < threshold < math.inf:
        raise UsageError(f"--threshold is a positive share such as 0.02, not {threshold:g}")
    frames = {path: read_compared_rows(path) for path in (before, after)}
    values = {path: _values(frame) for path, frame in frames.items()}
    across: list[str] = []
    if across_devices:
        across.append("device")
    elif (unlike := describe_device_difference(values)) is not None:
        raise UsageError(f"{unlike}; --across-devices compares them all the same")
    if across_modes:
        across += MODES
    elif (unlike := describe_mode_difference(values)) is not None:
        raise UsageError(f"{unlike}; --across-modes compares them all the same")
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
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    else:
        _show(changes, counts, rows)
    if found := [f"{counts[kind]} {kind}" for kind in KINDS if kind in wanted and counts[kind]]:
        raise PromiseMissed(f"of {len(changes)} points {', '.join(found)}: {hide_secrets(after)} fails on {fail_on}")


def _kinds(text: str) -> set[str]:
    """What --fail-on names."""
    from latbench.errors import UsageError
    from latbench.tables.compare import KINDS

    named = {word.strip().upper() for word in text.split(",") if word.strip()}
    if unknown := named - set(KINDS):
        known = ", ".join(kind.lower() for kind in KINDS)
        raise UsageError(f"--fail-on knows {known}, not {', '.join(sorted(unknown)).lower()}")
    return named


def _values(frame: pd.DataFrame) -> dict[str, set[Any]]:
    from latbench.tables.comparability import MODES

    return {name: set(frame[name].dropna()) for name in ("device", *MODES)}


def _show(changes: Sequence[Change], counts: Counter[str], most: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from latbench.base.number_format import format_ratio, format_seconds
    from latbench.tables.compare import KINDS

    listed = [change for change in changes if most == 0 or change.kind != "SAME"][: most or None]
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("verdict", "left"), ("point", "left"), ("before", "right"), ("after", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("after / before", justify="right")
    words = _words(changes)
    for change in listed:
        ratio = format_ratio(change.ratio, change.low, change.high)
        table.add_row(
            change.kind, words(change), format_seconds(change.before), format_seconds(change.after),
            ratio if change.ratio is not None else change.reason,
        )  # fmt: skip
    console = Console()
    if listed:
        console.print(table)
    left = len(changes) - len(listed)
    said = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    console.print(f"{said}{f'; {left} points are not listed' if left else ''}", highlight=False, soft_wrap=True)


def _words(changes: Sequence[Change]) -> Callable[[Change], str]:
    """A function that tells a point from the others: its shape, pattern and engine, and what else differs."""
    from latbench.base.number_format import format_percent
    from latbench.report import frames as data

    plain = {*data.SHAPE, "model", "backend", "kernel_requested", "pattern", "sparsity_target"}
    keys = [change.key for change in changes]
    others = [name for name in keys[0] if name not in plain and len({key[name] for key in keys}) > 1]

    def words(change: Change) -> str:
        key = change.key
        what = key["model"] or "" if key["op"] == "model" or key["m"] is None else data.shape_label(key)
        sparsity = format_percent(key["sparsity_target"]) if key["sparsity_target"] else ""
        engine = data.engine_name(key["backend"], key["kernel_requested"] or "")
        also = [f"{key[name]} threads" if name == "threads" else str(key[name]) for name in others]
        return ", ".join(text for text in (what, f"{key['pattern']} {sparsity}".strip(), engine, *also) if text)

    return words
