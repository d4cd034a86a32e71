"""`latbench predict`: how long a layer takes, with an interval."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd

    from cost_models import CostModel
    from sparse_kernels.shapes import Shape


class Kind(StrEnum):
    """The layers that can be asked for."""

    linear = "linear"
    conv2d = "conv2d"


def predict(
    model: Annotated[Path, typer.Argument(help="A model file that latbench fit wrote.")],
    table: Annotated[str, typer.Option(help="The table it was fitted to.")],
    pattern: Annotated[str, typer.Option(help="Such as dense, shflbw:32 or nm:2:4.")],
    shape: Annotated[
        str,
        typer.Option(
            help="A linear layer's m x k x n (output features, input features, tokens), such as 768x768x128; a "
            "convolution's weight c_out x c_in x kh x kw, such as 64x64x3x3."
        ),
    ],
    sparsity: Annotated[float | None, typer.Option(help="The share of weights dropped, such as 0.75.")] = None,
    kind: Annotated[Kind, typer.Option(help="What --shape is the shape of.")] = Kind.linear,
    image: Annotated[
        str | None, typer.Option("--input", help="conv2d: batch x h x w of its input, such as 1x56x56.")
    ] = None,
    stride: Annotated[str | None, typer.Option(help="conv2d: 2, or 2x1 for h and w. Default: 1.")] = None,
    padding: Annotated[
        str | None, typer.Option(help="conv2d: likewise. Default: kh/2 and kw/2, rounded down, which keep h and w.")
    ] = None,
    dilation: Annotated[str | None, typer.Option(help="conv2d: likewise. Default: 1.")] = None,
    backend: Annotated[str | None, typer.Option(help="Needed if the table holds several for this layer.")] = None,
    kernel: Annotated[
        str | None, typer.Option(help="The kernel that was requested, where there are several.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads, where the table holds several.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="COLUMN=VALUE: likewise of any other column, such as dtype_w=float32; repeatable."),
    ] = None,
    coverage: Annotated[
        float,
        typer.Option(help="How sure the interval is to hold a measurement, or where one was made, the true time."),
    ] = 0.9,
    allow_extrapolation: Annotated[
        bool, typer.Option("--allow-extrapolation", help="Predict outside the measured range too.")
    ] = False,
) -> None:
    """Print the microseconds of one layer with their interval; what nothing measured anchors is refused (exit 5)."""
    import pandas as pd

    import cost_models
    from latbench.base.number_format import format_percent
    from latbench.cli.commands.options import values_by_column
    from latbench.errors import LatbenchError, UsageError
    from latbench.workloads.points import convert_shape_to_columns, format_shape, parse_patterns, select_sparsities

    if sparsity is not None and not 0 <= sparsity < 1:
        raise UsageError(f"--sparsity is a share from 0 up to but not 1, not {sparsity:g}")
    [parsed] = parse_patterns([pattern])
    own = select_sparsities(parsed, () if sparsity is None else (sparsity,))
    if not own:
        raise UsageError(f"{pattern} needs a --sparsity")
    if sparsity is not None and abs(own[0] - sparsity) > 1e-6:
        raise UsageError(f"{pattern} has a sparsity of {own[0]:g} and no other, not {sparsity:g}")
    if not 0 < coverage < 1:
        raise UsageError(f"--coverage lies between 0 and 1, not {coverage:g}")
    layer = _layer(kind, shape, image, {"stride": stride, "padding": padding, "dilation": dilation})
    if (reason := parsed.refuses(layer)) is not None:
        raise UsageError(f"no such layer can be {pattern}: {reason}")
    fitted = cost_models.load(model, table).set_params(allow_extrapolation=allow_extrapolation)
    given = {**convert_shape_to_columns(layer), "pattern": str(parsed), "sparsity_target": own[0]}
    device = fitted.device if isinstance(fitted, cost_models.Transfer) else None
    measured, _ = cost_models.read_training_rows(table, cost_models.read(model).where)
    choices = {"backend": backend, "device": device, "kernel_requested": kernel, "threads": threads}
    asked = given | {name: value for name, value in choices.items() if value is not None}
    asked |= _values(measured, values_by_column("--where", where))
    query = pd.DataFrame([_settled(measured, asked) | asked])
    try:
        [seconds] = fitted.predict(query)
        name = f"linear {shape}" if kind is Kind.linear else format_shape(layer)
        text = f"{name} {pattern} at {format_percent(own[0])}: {seconds * 1e6:.2f} µs"
        try:
            [low], [high] = fitted.predict_interval(query, coverage)
            sure = f"with {coverage * 100:g}%" if fitted.covers(query)[0] else "without a promise"
            typer.echo(f"{text} ({low * 1e6:.2f} to {high * 1e6:.2f} {sure})")
        except cost_models.Uncalibrated as reason:
            typer.echo(text)
            typer.echo(f"latbench: no interval: {reason}", err=True)
        _flag(fitted, query)
    except LatbenchError:
        raise
    except ValueError as error:
        raise UsageError(f"{error}: the table holds several, say which with --where COLUMN=VALUE") from error


def _flag(model: CostModel, query: pd.DataFrame) -> None:
    """Say that a prediction is an extrapolation, and in what."""
    from cost_models import AnchoredLookup, Hybrid, frontier

    if isinstance(model, AnchoredLookup):
        outside = "" if model.covers(query)[0] else "this sparsity lies outside the measured range"
    elif isinstance(model, Hybrid) and model.lookup_.covers(query)[0]:
        outside = ""
    else:
        learned = model.learned_ if isinstance(model, Hybrid) else model
        [(name, octaves)] = frontier.furthest(query, learned.ranges_)
        outside = f"{name} is {octaves:.1f} octaves outside the measured range" if octaves > 0 else ""
    if outside:
        typer.echo(f"latbench: extrapolated: {outside}; measure it", err=True)


def _layer(kind: Kind, shape: str, image: str | None, pairs: dict[str, str | None]) -> Shape:
    """The layer that the options describe."""
    from latbench.errors import UsageError
    from sparse_kernels.shapes import Conv2dShape, LinearShape

    if kind is Kind.linear:
        if image is not None or any(text is not None for text in pairs.values()):
            raise UsageError("--input, --stride, --padding and --dilation are for --kind conv2d")
        return LinearShape(*_counts("--shape", "m x k x n, such as 768x768x128", shape, 3))
    if image is None:
        raise UsageError("--kind conv2d needs --input, batch x h x w, such as 1x56x56")
    c_out, c_in, kh, kw = _counts("--shape", "c_out x c_in x kh x kw, such as 64x64x3x3", shape, 4)
    batch, h, w = _counts("--input", "batch x h x w, such as 1x56x56", image, 3)
    usual = {"stride": (1, 1), "padding": (kh // 2, kw // 2), "dilation": (1, 1)}
    given = {name: usual[name] if text is None else _pair(name, text) for name, text in pairs.items()}
    try:
        return Conv2dShape(batch, c_in, h, w, c_out, kh, kw, **given)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _counts(option: str, form: str, text: str, count: int) -> list[int]:
    from latbench.errors import UsageError

    try:
        numbers = [int(number) for number in text.split("x")]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise UsageError(f"{option} is {form}, not {text!r}") from None
    if min(numbers) < 1:
        raise UsageError(f"{option} needs numbers of at least 1, not {text}")
    return numbers


def _pair(name: str, text: str) -> tuple[int, int]:
    from latbench.errors import UsageError

    try:
        numbers = [int(number) for number in text.split("x")]
        first, second = numbers * 2 if len(numbers) == 1 else numbers
    except ValueError:
        raise UsageError(f"--{name} is one whole number, or two joined by x, not {text!r}") from None
    return first, second


def _values(measured: pd.DataFrame, where: dict[str, str]) -> dict[str, Any]:
    """The columns of `where` with the values that measured rows have for these texts. UsageError where none has."""
    from cost_models.rows import plain
    from latbench.errors import UsageError
    from latbench.tables.schema import KEY_COLUMNS

    found = {}
    for name, text in where.items():
        if name not in (known := [field.name for field in KEY_COLUMNS]):
            raise UsageError(f"--where {name}: points are not told apart by it, only by {', '.join(known)}")
        values = {str(plain(value)): value for value in measured[name].dropna().unique()}
        if text not in values:
            raise UsageError(f"--where {name}={text}: nothing measured is so, only {', '.join(sorted(values))}")
        found[name] = values[text]
    return found


def _settled(measured: pd.DataFrame, asked: dict[str, Any]) -> dict[str, Any]:
    """The key columns that are the same in all measured rows that are as asked in all but sizes and sparsity.

    They need no asking: a table of one device, say, answers for that device.
    """
    from cost_models.rows import SHAPE
    from latbench.tables.schema import KEY_COLUMNS

    rows = measured
    for name in (name for name in asked if name == "op" or name not in (*SHAPE, "sparsity_target")):
        fitting = rows[rows[name] == asked[name]]
        rows = fitting if len(fitting) else rows
    names = [field.name for field in KEY_COLUMNS if field.name not in asked]
    return {name: rows[name].iloc[0] for name in names if rows[name].nunique(dropna=False) == 1}
