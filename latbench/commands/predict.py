"""`latbench predict`: how long a layer takes, with an interval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd


def predict(
    model: Annotated[Path, typer.Argument(help="A model file that latbench fit wrote.")],
    table: Annotated[str, typer.Option(help="The table it was fitted to.")],
    pattern: Annotated[str, typer.Option(help="Such as dense, shflbw:32 or nm:2:4.")],
    shape: Annotated[str, typer.Option(help="m x k x n: output features, input features, tokens; 768x768x128.")],
    sparsity: Annotated[float | None, typer.Option(help="The share of weights dropped, such as 0.75.")] = None,
    kind: Annotated[str, typer.Option(help="linear, or conv2d (k: kh*kw*c_in, n: output positions).")] = "linear",
    backend: Annotated[str | None, typer.Option(help="Needed if the table holds several for this layer.")] = None,
    kernel: Annotated[
        str | None, typer.Option(help="The kernel that was requested, where there are several.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads, where the table holds several.")] = None,
    coverage: Annotated[float, typer.Option(help="How sure the interval is to hold a measurement.")] = 0.9,
    allow_extrapolation: Annotated[
        bool, typer.Option("--allow-extrapolation", help="Predict outside the measured range too.")
    ] = False,
) -> None:
    """Print the microseconds of one layer with their interval; what nothing measured anchors is refused (exit 5)."""
    import pandas as pd

    import cost_models
    from latbench import plan
    from latbench.errors import LatbenchError, UsageError

    [parsed] = plan.parse_patterns([pattern])
    own = plan.sparsities_of(parsed, () if sparsity is None else (sparsity,))
    if not own:
        raise UsageError(f"{pattern} needs a --sparsity")
    if sparsity is not None and abs(own[0] - sparsity) > 1e-6:
        raise UsageError(f"{pattern} has a sparsity of {own[0]:g} and no other, not {sparsity:g}")
    if not 0 < coverage < 1:
        raise UsageError(f"--coverage lies between 0 and 1, not {coverage:g}")
    fitted = cost_models.load(model, table).set_params(allow_extrapolation=allow_extrapolation)
    given = {"op": kind, **_sizes(shape), "pattern": str(parsed), "sparsity_target": own[0]}
    device = fitted.device if isinstance(fitted, cost_models.Transfer) else None
    choices = {"backend": backend, "device": device, "kernel_requested": kernel, "threads": threads}
    asked = given | {name: value for name, value in choices.items() if value is not None}
    measured, _ = cost_models.read_training_rows(table, cost_models.read(model).backend)
    query = pd.DataFrame([_settled(measured, asked) | asked])
    try:
        [seconds] = fitted.predict(query)
        text = f"{kind} {shape} {pattern} at {own[0]:.0%}: {seconds * 1e6:.2f} µs"
        try:
            [low], [high] = fitted.predict_interval(query, coverage)
            typer.echo(f"{text} ({low * 1e6:.2f} to {high * 1e6:.2f} with {coverage:.0%})")
        except cost_models.Uncalibrated as reason:
            typer.echo(text)
            typer.echo(f"latbench: no interval: {reason}", err=True)
        if not isinstance(fitted, cost_models.AnchoredLookup):
            _flag(max(float(octaves[0]) for octaves in fitted.octaves_outside(query).values()))
    except LatbenchError:
        raise
    except ValueError as error:
        raise UsageError(f"{error}: the table holds several, say which") from error


def _flag(octaves: float) -> None:
    """Say that a prediction is an extrapolation."""
    if octaves > 0:
        typer.echo(f"latbench: extrapolated: {octaves:.1f} octaves outside the measured range; measure it", err=True)


def _sizes(text: str) -> dict[str, int]:
    from latbench.errors import UsageError

    try:
        m, k, n = (int(number) for number in text.split("x"))
    except ValueError:
        raise UsageError(f"--shape is m x k x n, such as 768x768x128, not {text!r}") from None
    if min(m, k, n) < 1:
        raise UsageError(f"--shape needs numbers of at least 1, not {text}")
    return {"m": m, "k": k, "n": n}


def _settled(measured: pd.DataFrame, asked: dict[str, Any]) -> dict[str, Any]:
    """The key columns that are the same in all measured rows of this operation, pattern and backend (if it is given).

    They need no asking: a table of one device, say, answers for that device.
    """
    from latbench import tables

    rows = measured
    for name in ("op", "backend", "pattern"):
        fitting = rows[rows[name] == asked[name]] if name in asked else rows
        rows = fitting if len(fitting) else rows
    names = [field.name for field in tables.KEY if field.name not in asked]
    return {name: rows[name].iloc[0] for name in names if rows[name].nunique(dropna=False) == 1}
