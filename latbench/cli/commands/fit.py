"""`latbench fit`: a cost model from a table, with what it gets wrong on held-out data."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latbench import MOST_SEED

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from rich.table import Table

    from cost_models import CostModel
    from cost_models.evaluation.held_out_errors import Figures


class Kind(StrEnum):
    """The cost models that can be fitted."""

    lookup = "lookup"
    roofline = "roofline"
    boosted = "boosted"
    hybrid = "hybrid"
    transfer = "transfer"


def fit(
    table: Annotated[str, typer.Argument(help="A table: folder of parts or a Parquet file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file to write (JSON).")],
    estimator: Annotated[
        Kind,
        typer.Option(
            help="lookup: interpolates measured shapes; roofline: sums of work at fitted rates; boosted: learns what "
            "they miss, for other shapes; hybrid: lookup where measured, else boosted; transfer: a new device from a "
            "few of its rows and many of others (merge --allow-mixed)."
        ),
    ] = Kind.lookup,
    backend: Annotated[str | None, typer.Option(help="Learn from this backend's rows alone.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="COLUMN=VALUE: learn from these rows alone, such as dtype_w=float32; repeatable."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="transfer: the device to predict.")] = None,
    random_state: Annotated[
        int, typer.Option(min=0, max=MOST_SEED, help="Seed of learned models and of their hold-outs.")
    ] = 0,
) -> None:
    """Fit a cost model and say how wrong it is where it did not see the answer, beside the noise of the table."""
    from rich.console import Console

    import cost_models
    from cost_models.model_file import find_library_versions
    from cost_models.rows.shape_groups import count_shapes
    from latbench.cli.commands.options import values_by_column
    from latbench.errors import UsageError
    from latbench.tables.table import hash_table

    if (estimator is Kind.transfer) != (device is not None):
        raise UsageError("--estimator transfer needs a --device to predict, and no other estimator takes one")
    table_hash = hash_table(table)
    rows = values_by_column("--where", where) | ({} if backend is None else {"backend": backend})
    X, y = cost_models.read_training_rows(table, rows)
    _warn_of_versions(X)
    backends = sorted(set(X["backend"]))
    if estimator is not Kind.lookup and len(backends) > 1:
        raise UsageError(f"a {estimator.value} model is of one backend: say --backend {' or '.join(backends)}")
    model = _model(estimator, device, random_state)

    console = Console()
    try:
        saved = cost_models.read(output)
        settings = (type(saved.estimator), saved.estimator.get_params(), saved.table_hash, saved.where)
        same = (
            settings == (type(model), model.get_params(), table_hash, rows)
            and saved.libraries == find_library_versions()
        )
        same = same and bool(saved.validation)
    except cost_models.BadModel:
        same = False
    if same:
        validation = saved.validation
    else:
        validation = _validation(model.fit(X, y), X, y)
        cost_models.save(output, model, table_hash, where=rows, validation=validation)
    console.print(validation_table(validation))
    if not any(figures.get("held_out") for way, figures in validation.items() if not way.startswith(OTHERS)):
        typer.echo(
            "latbench: nothing could be held out, so nobody knows how wrong the model is: measure more", err=True
        )
    shapes = count_shapes(X)
    typer.echo(f"{output}: {'up to date' if same else type(model).__name__}, {len(X)} points of {shapes} shapes")


def _warn_of_versions(X: pd.DataFrame) -> None:
    """A key does not hold the version of a backend, so that a table may be swept on after an upgrade."""
    known = X[["device", "backend", "backend_version"]].astype(object).dropna().drop_duplicates()
    for (device, backend), own in known.groupby(["device", "backend"], sort=True):
        if len(own) > 1:
            versions = " and ".join(sorted(own["backend_version"]))
            typer.echo(
                f"latbench: times of {backend} {versions} on {device} are learned from as one; --where "
                "backend_version=... takes those of one",
                err=True,
            )


def _model(estimator: Kind, device: str | None, random_state: int) -> CostModel:
    import cost_models

    match estimator:
        case Kind.lookup:
            return cost_models.AnchoredLookup()
        case Kind.roofline:
            return cost_models.Roofline(random_state=random_state)
        case Kind.boosted:
            return cost_models.Boosted(random_state=random_state)
        case Kind.hybrid:
            return cost_models.Hybrid(random_state=random_state)
        case Kind.transfer:
            return cost_models.Transfer(device or "", random_state=random_state)


def _validation(model: CostModel, X: pd.DataFrame, y: np.ndarray) -> dict[str, Figures]:
    """What the model gets wrong, by what was held out, and what simpler ones do: a roofline, and the look-up, which
    says what measuring six sparsities of a shape would buy.
    """
    import numpy as np

    import cost_models
    from cost_models import AnchoredLookup, Hybrid, Roofline, Transfer

    sparsities = "held-out sparsities of measured shapes"
    if isinstance(model, AnchoredLookup):
        return {sparsities: cost_models.evaluate(model, X, y)}
    every, times = X, y
    # Of a new device, what is held out of its anchors; the other devices' rows stay.
    ours = X["device"].eq(model.device).to_numpy() if isinstance(model, Transfer) else np.ones(len(X), bool)
    X, y = X[ours].reset_index(drop=True), y[ours]
    found = {"held-out shapes": cost_models.evaluate(model, X, y)}
    learned = model.learned_ if isinstance(model, Hybrid) else model
    within = {
        name: [np.isin(np.arange(len(ours)), np.flatnonzero(ours)[mask]) for mask in masks]
        for name, masks in cost_models.build_hold_outs(X).items()
        if name != "shapes"
    }
    # Trees take seconds a fit, and use one core; to start processes takes as long as all fits of a roofline.
    jobs = None if isinstance(learned, Roofline) else -1
    found |= cost_models.evaluate_held_out(learned, every, times, within, n_jobs=jobs)
    if not isinstance(model, Roofline):
        found[f"{OTHERS[0]}held-out shapes"] = cost_models.evaluate(Roofline().fit(X, y), X, y)
    found[f"{OTHERS[1]}{sparsities}"] = cost_models.evaluate(AnchoredLookup().fit(X, y), X, y)
    return found


OTHERS = ("roofline, ", "look-up, ")  # how figures of models begin that stand beside the one fitted

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
    """A row a way of holding out, a column a figure and the median over the noise floor; what they mean, below."""
    from rich.table import Table

    first = next(iter(validation.values()))
    nominal, noise = first.get("nominal_coverage"), first.get("noise_floor")
    table = Table(
        box=None,
        pad_edge=False,
        caption_justify="left",
        caption="Errors |predicted / measured - 1|: median, 90th percentile, mean, shares of at most 5% and 10%; "
        f"the share inside the {'nominal' if nominal is None else f'{nominal:.0%}'} interval, and its width. Noise "
        "floor, about what a model that knew every true time would get, since measured ones are not exact: "
        f"{'unknown' if noise is None else f'{noise:.1%}'}; × noise: the median over that of the points held out.",
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
