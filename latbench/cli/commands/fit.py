"""`latbench fit`: a cost model from a table, validated on held-out data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from latbench.cli.json_output import print_json
from latbench.cli.options.common_options import Json, TableArgument
from latbench.cli.options.model_options import (
    Estimator,
    EstimatorName,
    FitBackend,
    FitSeed,
    FitWhere,
    ModelOutput,
    TransferDevice,
)
from latbench.cli.options.option_texts import parse_column_values

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import pandas as pd
    from rich.table import Table

    from cost_models.evaluation.held_out_errors import CostModel, Figures

_LOG = logging.getLogger(__name__)


def fit(
    table: TableArgument,
    output: ModelOutput,
    estimator: EstimatorName = Estimator.lookup,
    backend: FitBackend = None,
    where: FitWhere = None,
    device: TransferDevice = None,
    random_state: FitSeed = 0,
    as_json: Json = False,
) -> None:
    """Fit a cost model, and show its errors on held-out points beside the noise of the table."""
    from rich.console import Console

    from cost_models.model_file import save
    from cost_models.rows.shape_groups import count_shapes
    from cost_models.rows.training_rows import read_training_rows
    from latbench.errors import UsageError
    from latbench.tables.table import hash_table

    if (estimator is Estimator.transfer) != (device is not None):
        raise UsageError("--estimator transfer needs the --device to predict, and no other estimator takes one")
    table_hash = hash_table(table)
    rows = parse_column_values("--where", where) | ({} if backend is None else {"backend": backend})
    X, y = read_training_rows(table, rows)
    _warn_of_versions(X, table)
    backends = sorted(set(X["backend"]))
    if estimator is not Estimator.lookup and len(backends) > 1:
        raise UsageError(f"a {estimator.value} model is of one engine: give --backend {' or '.join(backends)}")
    model = _build_model(estimator, device, random_state)
    validation = _known_validation(output, table, model, rows)
    same = validation is not None
    if validation is None:
        validation = _validate(model.fit(X, y), X, y)
        save(output, model, table_hash, X, where=rows, validation=validation)
    if not any(figures.get("held_out") for way, figures in validation.items() if not way.startswith(OTHERS)):
        _LOG.warning("no point could be held out, so the model's error is unknown: measure more points")
    shapes = count_shapes(X)
    name = type(model).__name__
    if as_json:
        document = {"output": output, "up_to_date": same, "estimator": name, "points": len(X), "shapes": shapes}
        print_json({**document, "table_hash": table_hash, "where": rows, "validation": validation})
        return
    Console().print(validation_table(validation))
    typer.echo(f"{output}: {'up to date' if same else name}, {len(X)} points of {shapes} shapes")


def _known_validation(path: Path, table: str, model: CostModel, rows: dict[str, str]) -> Mapping[str, Figures] | None:
    """Return the validation in the model file if that holds this very model of this table, whole; else None."""
    from cost_models.model_file import find_library_versions, load, read
    from cost_models.refusals import BadModel

    try:
        saved, fitted = read(path), load(path, table)
    except BadModel:
        return None
    settings = (type(fitted), fitted.get_params(), saved.where, saved.libraries)
    same = settings == (type(model), model.get_params(), rows, find_library_versions())
    return saved.validation if same and saved.validation else None


def _warn_of_versions(X: pd.DataFrame, table: str) -> None:
    """Warn of a device and engine with rows of several versions, and of kernels that are not the installed ones."""
    from latbench.backends.cpu.cpu_versions import describe_old_kernels
    from latbench.base.engine_version import describe_mixture

    known = X[["device", "backend", "backend_version"]].astype(object).dropna().drop_duplicates()
    for (device, backend), own in known.groupby(["device", "backend"], sort=True):
        if mixture := describe_mixture(own["backend_version"]):
            _LOG.warning(
                f"times of several versions of {backend} on {device} are used together ({mixture}); "
                "--where backend_version=... selects rows of one text"
            )
    if (old := describe_old_kernels(X.assign(status="ok"), table)) is not None:
        _LOG.warning(old)


def _build_model(estimator: Estimator, device: str | None, random_state: int) -> CostModel:
    from cost_models.estimators.anchored_lookup import AnchoredLookup
    from cost_models.estimators.boosted import Boosted
    from cost_models.estimators.hybrid import Hybrid
    from cost_models.estimators.roofline import Roofline
    from cost_models.estimators.transfer import Transfer

    match estimator:
        case Estimator.lookup:
            return AnchoredLookup()
        case Estimator.roofline:
            return Roofline(random_state=random_state)
        case Estimator.boosted:
            return Boosted(random_state=random_state)
        case Estimator.hybrid:
            return Hybrid(random_state=random_state)
        case Estimator.transfer:
            return Transfer(device or "", random_state=random_state)


def _validate(model: CostModel, X: pd.DataFrame, y: np.ndarray) -> dict[str, Figures]:
    """Return the model's errors by what was held out, beside those of simpler models.

    These are a roofline, and the look-up, which shows what measuring six sparsities of a shape would gain.
    """
    import numpy as np

    from cost_models.estimators.anchored_lookup import AnchoredLookup
    from cost_models.estimators.hybrid import Hybrid
    from cost_models.estimators.roofline import Roofline
    from cost_models.estimators.transfer import Transfer
    from cost_models.evaluation.held_out_errors import evaluate, evaluate_held_out
    from cost_models.evaluation.hold_outs import build_hold_outs

    sparsities = "held-out sparsities of measured shapes"
    if isinstance(model, AnchoredLookup):
        return {sparsities: evaluate(model, X, y)}
    every, times = X, y
    # A transfer holds out anchors of its new device only; the rows of other devices stay.
    ours = X["device"].eq(model.device).to_numpy() if isinstance(model, Transfer) else np.ones(len(X), bool)
    X, y = X[ours].reset_index(drop=True), y[ours]
    found = {"held-out shapes": evaluate(model, X, y)}
    learned = model.learned_ if isinstance(model, Hybrid) else model
    within = {
        name: [np.isin(np.arange(len(ours)), np.flatnonzero(ours)[mask]) for mask in masks]
        for name, masks in build_hold_outs(X).items()
        if name != "shapes"
    }
    # Trees take seconds a fit, and use one core; to start processes takes as long as all fits of a roofline.
    jobs = None if isinstance(learned, Roofline) else -1
    found |= evaluate_held_out(learned, every, times, within, n_jobs=jobs)
    if not isinstance(model, Roofline):
        found[f"{OTHERS[0]}held-out shapes"] = evaluate(Roofline().fit(X, y), X, y)
    found[f"{OTHERS[1]}{sparsities}"] = evaluate(AnchoredLookup().fit(X, y), X, y)
    return found


OTHERS = ("roofline, ", "look-up, ")  # prefixes of the figures of simpler models

COLUMNS = {
    "held_out": "points",
    "median": "median",
    "p90": "p90",
    "mape": "mean",
    "within_5": "≤5%",
    "within_10": "≤10%",
    "coverage": "inside",
    "width": "width",
}


def validation_table(validation: Mapping[str, Figures]) -> Table:
    """Build a table with a row for each hold-out and a column for each figure, explained below it."""
    from rich.table import Table

    first = next(iter(validation.values()))
    nominal, noise = first.get("nominal_coverage"), first.get("noise_floor")
    table = Table(
        box=None,
        pad_edge=False,
        caption_justify="left",
        caption="Errors are |predicted / measured - 1|: median, 90th percentile and mean, then the shares of errors "
        f"up to 5% and 10%. Inside: share inside the {'nominal' if nominal is None else f'{nominal:.0%}'} interval. "
        "Width: its median width, as a share of the prediction. Measured times are not exact, so a perfect model has "
        f"an error, too. This noise floor is {'unknown' if noise is None else f'{noise:.1%}'}. × noise: median error "
        "over the noise floor of these points.",
    )
    table.add_column("")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("× noise", justify="right", no_wrap=True)
    for method, figures in validation.items():
        table.add_row(method, *(_cell(name, figures.get(name)) for name in COLUMNS), _times_noise(figures))
    return table


def _times_noise(figures: Figures) -> str:
    median, floor = figures.get("median"), figures.get("noise_floor")
    return f"{median / floor:.1f}" if median is not None and floor else "-"


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if key == "held_out" else f"{value:.1%}"
