"""`latbench predict`: the time of one layer, with a prediction interval."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from latbench.base.number_format import format_percent
from latbench.cli.json_output import print_json
from latbench.cli.options.common_options import Json
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
    from latbench.errors import LatbenchError
    from sparse_kernels.patterns import Pattern
    from sparse_kernels.shapes import Shape

_LOG = logging.getLogger(__name__)


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
    as_json: Json = False,
) -> None:
    """Print the microseconds of one layer with their interval. Exit 5 where no measurement supports a prediction."""
    from cost_models.estimators.transfer import Transfer
    from cost_models.model_file import load, read
    from cost_models.rows.build_rows import build_rows
    from cost_models.rows.training_rows import read_training_rows
    from latbench.workloads.points import format_shape

    check_share("--coverage", coverage)
    measured, _ = read_training_rows(table, read(model).where)
    pairs = {"stride": stride, "padding": padding, "dilation": dilation}
    layer = _parse_layer(pattern, sparsity, kind, shape, image, pairs, measured)
    fitted = load(model, table).set_params(allow_extrapolation=allow_extrapolation)
    choices = {"backend": backend, "kernel_requested": kernel, "threads": threads}
    given: dict[str, Any] = {name: value for name, value in choices.items() if value is not None}
    given |= _values(measured, parse_column_values("--where", where))
    device: dict[str, Any] = {"device": fitted.device} if isinstance(fitted, Transfer) else {}
    query = build_rows(**layer._asdict(), measured=measured, **(device | given))
    try:
        found = _predict(fitted, query, coverage)
    except ValueError as error:
        raise _explain(error, fitted, measured, query, list(given)) from error
    if as_json:
        print_json({**query.iloc[0].to_dict(), **found._asdict()})
    else:
        name = f"linear {shape}" if kind is LayerKind.linear else format_shape(layer.shape)
        _print_prediction(found, f"{name} {pattern} at {format_percent(layer.sparsity)}")


class _Prediction(NamedTuple):
    """A predicted time and its interval in seconds; None where the interval is unknown.

    `coverage` is the probability that the interval holds a measurement, None where that is unknown. `extrapolated`
    says how the layer lies outside the measured range, `no_interval` why there is none.
    """

    predicted_seconds: float
    low_seconds: float | None = None
    high_seconds: float | None = None
    coverage: float | None = None
    extrapolated: str | None = None
    no_interval: str | None = None


class _Layer(NamedTuple):
    """A layer that the options describe."""

    pattern: Pattern
    sparsity: float
    shape: Shape


def _parse_layer(
    text: str,
    sparsity: float | None,
    kind: LayerKind,
    shape: str,
    image: str | None,
    pairs: dict[str, str | None],
    measured: pd.DataFrame,
) -> _Layer:
    """Return the layer that the options describe; `text` names its pattern. Raises UsageError if there is none."""
    from latbench.cli.predict_advice import describe_sparsities
    from latbench.errors import UsageError
    from latbench.workloads.points import parse_patterns, select_sparsities

    if sparsity is not None:
        check_share("--sparsity", sparsity, zero=True)
    [pattern] = parse_patterns([text])
    own = select_sparsities(pattern, () if sparsity is None else (sparsity,))
    if not own:
        raise UsageError(f"{text} needs a --sparsity{describe_sparsities(measured, str(pattern))}")
    if sparsity is not None and abs(own[0] - sparsity) > 1e-6:
        raise UsageError(f"{text} has a sparsity of {own[0]:g} and no other, not {sparsity:g}")
    layer = _parse_shape(kind, shape, image, pairs)
    if (reason := pattern.refuses(layer)) is not None:
        raise UsageError(f"this layer cannot be {text}: {reason}")
    return _Layer(pattern, own[0], layer)


def _predict(model: CostModel, query: pd.DataFrame, coverage: float) -> _Prediction:
    """Predict the one row. Raises ValueError where the query is ambiguous or unsupported."""
    from cost_models.refusals import Uncalibrated

    [seconds] = model.predict(query)
    outside = _describe_extrapolation(model, query)
    try:
        [low], [high] = model.predict_interval(query, coverage)
    except Uncalibrated as reason:
        return _Prediction(seconds, extrapolated=outside, no_interval=str(reason))
    return _Prediction(seconds, low, high, coverage if model.covers(query)[0] else None, outside)


def _explain(
    error: ValueError, model: CostModel, measured: pd.DataFrame, query: pd.DataFrame, given: list[str]
) -> LatbenchError:
    """Return the error for the user: which option to add or to change, and its known values."""
    from cost_models.refusals import Ambiguous, MissingColumns, Unanchored
    from cost_models.rows.row_keys import describe_point
    from latbench.cli import predict_advice
    from latbench.errors import LatbenchError, UsageError

    asked = query.iloc[0].to_dict()
    ways: Sequence[Mapping[str, Any]] = error.ways if isinstance(error, Ambiguous) else []
    if isinstance(error, MissingColumns):
        ways = predict_advice.list_ways(measured, asked, error.columns)
    if len(ways) > 1:
        advice = predict_advice.describe_ways(ways)
        return UsageError(f"{describe_point(asked)} was measured in several ways: {advice}")
    if isinstance(error, Unanchored):
        if str(error).endswith("allow extrapolation"):
            return Unanchored(f"{error} by --allow-extrapolation")
        unmeasured = predict_advice.describe_unmeasured(measured, asked, [*given, "pattern"])
        return Unanchored(unmeasured or f"{error}{predict_advice.suggest_estimator(model)}")
    return error if isinstance(error, LatbenchError) else UsageError(str(error))


def _print_prediction(found: _Prediction, name: str) -> None:
    """Print the predicted time and its interval, and note what makes it less certain."""
    text = f"{name}: {found.predicted_seconds * 1e6:.2f} µs"
    if found.low_seconds is not None and found.high_seconds is not None:
        known = found.coverage is not None
        certainty = f"with {found.coverage * 100:g}%" if known else "with unknown coverage"  # type: ignore[operator]
        text += f" ({found.low_seconds * 1e6:.2f} to {found.high_seconds * 1e6:.2f} {certainty})"
    typer.echo(text)
    if found.no_interval is not None:
        _LOG.warning(f"no interval: {found.no_interval}")
    if found.extrapolated is not None:
        _LOG.warning(f"extrapolated: {found.extrapolated}; measure it")


def _describe_extrapolation(model: CostModel, query: pd.DataFrame) -> str | None:
    """Return how the query lies outside what was measured, and in which feature; None if it lies inside."""
    from cost_models.estimators.anchored_lookup import AnchoredLookup
    from cost_models.estimators.hybrid import Hybrid
    from cost_models.features.measured_ranges import LARGEST_GAP, count_gap_octaves, find_furthest

    if isinstance(model, AnchoredLookup):
        return None if model.covers(query)[0] else "this sparsity lies outside the measured range"
    if isinstance(model, Hybrid) and model.lookup_.covers(query)[0]:
        return None
    learned = model.learned_ if isinstance(model, Hybrid) else model
    [(name, octaves)] = find_furthest(query, learned.ranges_)
    if octaves > 0:
        return f"{name} is {octaves:.1f} octaves outside the measured range"
    gap = max(float(away[0]) for away in count_gap_octaves(query, learned.column_counts_).values())
    return f"n is {gap:.1f} octaves from the nearest measured one of this operation" if gap > LARGEST_GAP else None


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
