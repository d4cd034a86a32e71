"""`latbench predict`: the time of one layer, with a prediction interval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from latbench.cli.options.model_options import (
    AllowExtrapolation,
    Coverage,
    Dilation,
    FittedTable,
    InputSize,
    Kind,
    LayerKind,
    ModelArgument,
    OnePattern,
    OneSparsity,
    Padding,
    PredictBackend,
    PredictKernel,
    PredictThreads,
    PredictWhere,
    ShapeText,
    Stride,
)
from latbench.cli.options.option_texts import check_share, parse_column_values, parse_sizes

if TYPE_CHECKING:
    import pandas as pd

    from cost_models.evaluation.held_out_errors import CostModel
    from sparse_kernels.patterns import Pattern
    from sparse_kernels.shapes import Shape


def predict(
    model: ModelArgument,
    table: FittedTable,
    pattern: OnePattern,
    shape: ShapeText,
    sparsity: OneSparsity = None,
    kind: Kind = LayerKind.linear,
    image: InputSize = None,
    stride: Stride = None,
    padding: Padding = None,
    dilation: Dilation = None,
    backend: PredictBackend = None,
    kernel: PredictKernel = None,
    threads: PredictThreads = None,
    where: PredictWhere = None,
    coverage: Coverage = 0.9,
    allow_extrapolation: AllowExtrapolation = False,
) -> None:
    """Print the microseconds of one layer with their interval. Exit 5 where no measurement supports a prediction."""
    from cost_models.estimators.transfer import Transfer
    from cost_models.model_file import load, read
    from cost_models.rows.training_rows import read_training_rows
    from latbench.workloads.points import format_shape

    layer = _parse_layer(
        pattern, sparsity, kind, shape, image, {"stride": stride, "padding": padding, "dilation": dilation}
    )
    check_share("--coverage", coverage)
    fitted = load(model, table).set_params(allow_extrapolation=allow_extrapolation)
    measured, _ = read_training_rows(table, read(model).where)
    device = fitted.device if isinstance(fitted, Transfer) else None
    choices = {"backend": backend, "device": device, "kernel_requested": kernel, "threads": threads}
    query = _build_query(layer, measured, choices, parse_column_values("--where", where))
    name = f"linear {shape}" if kind is LayerKind.linear else format_shape(layer.shape)
    _print_prediction(fitted, query, f"{name} {pattern}", coverage)


class _Layer(NamedTuple):
    """A layer that the options describe."""

    pattern: Pattern
    sparsity: float
    shape: Shape


def _parse_layer(
    text: str, sparsity: float | None, kind: LayerKind, shape: str, image: str | None, pairs: dict[str, str | None]
) -> _Layer:
    """Return the layer that the options describe; `text` names its pattern. Raises UsageError if there is none."""
    from latbench.errors import UsageError
    from latbench.workloads.points import parse_patterns, select_sparsities

    if sparsity is not None:
        check_share("--sparsity", sparsity, zero=True)
    [pattern] = parse_patterns([text])
    own = select_sparsities(pattern, () if sparsity is None else (sparsity,))
    if not own:
        raise UsageError(f"{text} needs a --sparsity")
    if sparsity is not None and abs(own[0] - sparsity) > 1e-6:
        raise UsageError(f"{text} has a sparsity of {own[0]:g} and no other, not {sparsity:g}")
    layer = _parse_shape(kind, shape, image, pairs)
    if (reason := pattern.refuses(layer)) is not None:
        raise UsageError(f"this layer cannot be {text}: {reason}")
    return _Layer(pattern, own[0], layer)


def _build_query(
    layer: _Layer, measured: pd.DataFrame, choices: dict[str, Any], where: dict[str, str]
) -> pd.DataFrame:
    """Build the one row that a cost model predicts; columns that nobody gave come from the measured rows."""
    from cost_models.rows.build_rows import build_rows

    given = {name: value for name, value in choices.items() if value is not None} | _values(measured, where)
    return build_rows(
        shape=layer.shape, pattern=layer.pattern, sparsity=layer.sparsity, measured=measured, **given
    )  # fmt: skip


def _print_prediction(model: CostModel, query: pd.DataFrame, name: str, coverage: float) -> None:
    """Print the predicted time and its interval. Raises UsageError where the query is ambiguous."""
    from cost_models.refusals import Uncalibrated
    from latbench.base.number_format import format_percent
    from latbench.errors import LatbenchError, UsageError

    try:
        [seconds] = model.predict(query)
        text = f"{name} at {format_percent(query['sparsity_target'].iloc[0])}: {seconds * 1e6:.2f} µs"
        try:
            [low], [high] = model.predict_interval(query, coverage)
            certainty = f"with {coverage * 100:g}%" if model.covers(query)[0] else "with unknown coverage"
            typer.echo(f"{text} ({low * 1e6:.2f} to {high * 1e6:.2f} {certainty})")
        except Uncalibrated as reason:
            typer.echo(text)
            typer.echo(f"latbench: no interval: {reason}", err=True)
        _warn_of_extrapolation(model, query)
    except LatbenchError:
        raise
    except ValueError as error:
        raise UsageError(f"{error}: the table holds several, so choose one with --where COLUMN=VALUE") from error


def _warn_of_extrapolation(model: CostModel, query: pd.DataFrame) -> None:
    """Warn where a prediction is an extrapolation, and in which feature."""
    from cost_models.estimators.anchored_lookup import AnchoredLookup
    from cost_models.estimators.hybrid import Hybrid
    from cost_models.features.measured_ranges import find_furthest

    if isinstance(model, AnchoredLookup):
        outside = "" if model.covers(query)[0] else "this sparsity lies outside the measured range"
    elif isinstance(model, Hybrid) and model.lookup_.covers(query)[0]:
        outside = ""
    else:
        learned = model.learned_ if isinstance(model, Hybrid) else model
        [(name, octaves)] = find_furthest(query, learned.ranges_)
        outside = f"{name} is {octaves:.1f} octaves outside the measured range" if octaves > 0 else ""
    if outside:
        typer.echo(f"latbench: extrapolated: {outside}; measure it", err=True)


def _parse_shape(kind: LayerKind, shape: str, image: str | None, pairs: dict[str, str | None]) -> Shape:
    """Return the shape that the options describe. Raises UsageError if they describe none."""
    from latbench.errors import UsageError
    from sparse_kernels.shapes import Conv2dShape, LinearShape

    if kind is LayerKind.linear:
        if image is not None or any(text is not None for text in pairs.values()):
            raise UsageError("--input, --stride, --padding and --dilation are for --kind conv2d")
        return LinearShape(*parse_sizes("--shape", "m x k x n, such as 768x768x128", shape, 3))
    if image is None:
        raise UsageError("--kind conv2d needs --input, batch x h x w, such as 1x56x56")
    c_out, c_in, kh, kw = parse_sizes("--shape", "c_out x c_in x kh x kw, such as 64x64x3x3", shape, 4)
    batch, h, w = parse_sizes("--input", "batch x h x w, such as 1x56x56", image, 3)
    usual = {"stride": (1, 1), "padding": (kh // 2, kw // 2), "dilation": (1, 1)}
    given = {name: usual[name] if text is None else _pair(name, text) for name, text in pairs.items()}
    try:
        return Conv2dShape(batch, c_in, h, w, c_out, kh, kw, **given)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _pair(name: str, text: str) -> tuple[int, int]:
    """Return the values for h and w of a text such as 2 or 2x1."""
    from latbench.errors import UsageError

    try:
        numbers = [int(number) for number in text.split("x")]
        first, second = numbers * 2 if len(numbers) == 1 else numbers
    except ValueError:
        raise UsageError(f"--{name} takes one whole number, or two joined by x, not {text!r}") from None
    return first, second


def _values(measured: pd.DataFrame, where: dict[str, str]) -> dict[str, Any]:
    """Return the columns of `where` with the measured values of these texts. Raises UsageError for an unknown one."""
    from cost_models.rows.row_keys import normalize_key_value
    from latbench.errors import UsageError
    from latbench.tables.schema import KEY_COLUMNS

    found = {}
    for name, text in where.items():
        if name not in (known := [field.name for field in KEY_COLUMNS]):
            raise UsageError(f"--where {name}: this column is not part of a point's key: {', '.join(known)}")
        values = {str(normalize_key_value(value)): value for value in measured[name].dropna().unique()}
        if text not in values:
            raise UsageError(f"--where {name}={text}: no measured row has it; known are {', '.join(sorted(values))}")
        found[name] = values[text]
    return found
