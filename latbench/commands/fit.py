"""`latbench fit`: a cost model from a table, with what it gets wrong on held-out data."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from cost_models.validation import Figures


class Kind(StrEnum):
    """The cost models that can be fitted."""

    lookup = "lookup"
    boosted = "boosted"


def fit(
    table: Annotated[str, typer.Argument(help="A table: folder of parts or a Parquet file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model file to write (JSON).")],
    estimator: Annotated[
        Kind, typer.Option(help="lookup: interpolates measured shapes; boosted: predicts others too.")
    ] = Kind.lookup,
    backend: Annotated[str | None, typer.Option(help="Learn from this backend's rows alone.")] = None,
    random_state: Annotated[int, typer.Option(min=0, help="Seed of the boosted trees and of their hold-outs.")] = 0,
) -> None:
    """Fit a cost model and say how wrong it is where it did not see the answer, beside the noise of the table."""
    from rich.console import Console

    import cost_models
    from latbench import tables
    from latbench.errors import UsageError

    table_hash = tables.table_hash(table)
    X, y = cost_models.read_training_rows(table, backend)
    model: cost_models.AnchoredLookup | cost_models.Boosted
    if estimator is Kind.boosted:
        backends = sorted(set(X["backend"]))
        if len(backends) > 1:
            raise UsageError(f"a boosted model is of one backend: say --backend {' or '.join(backends)}")
        model = cost_models.Boosted(random_state=random_state)
    else:
        model = cost_models.AnchoredLookup()

    console = Console()
    try:
        saved = cost_models.read(output)
        settings = (type(saved.estimator), saved.estimator.get_params(), saved.table_hash, saved.backend)
        same = settings == (type(model), model.get_params(), table_hash, backend)
    except cost_models.BadModel:
        same = False
    if same:
        validation = saved.validation
    else:
        model.fit(X, y)
        name = "held-out sparsities of measured shapes"
        if isinstance(model, cost_models.AnchoredLookup):
            validation = {name: cost_models.validate(model, X, y)}
        else:
            # The look-up beside it says what measuring six sparsities of a shape would buy.
            look_up = cost_models.AnchoredLookup().fit(X, y)
            validation = {
                "held-out shapes": cost_models.validate(model, X, y),
                f"look-up, {name}": cost_models.validate(look_up, X, y),
            }
        cost_models.save(output, model, table_hash, backend=backend, validation=validation)
    console.print(validation_table(validation))
    shapes = X[["op", "m", "k", "n"]].drop_duplicates().shape[0]
    typer.echo(f"{output}: {'up to date' if same else type(model).__name__}, {len(X)} points of {shapes} shapes")


MEANINGS = {
    "held_out": "held-out points",
    "median": "median error",
    "p90": "90% of errors below",
    "mape": "mean error",
    "within_5": "share within 5%",
    "within_10": "share within 10%",
    "coverage": "share inside the interval",
    "nominal_coverage": "the share it promises",
    "width": "width of the interval",
    "noise_floor": "noise floor (measured)",
}


def validation_table(validation: Mapping[str, Figures]) -> Table:
    """A row a figure, a column a way of holding out."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for method in validation:
        table.add_column(method, justify="right")
    for key, meaning in MEANINGS.items():
        table.add_row(meaning, *(_cell(key, figures.get(key)) for figures in validation.values()))
    return table


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    return str(value) if key == "held_out" else f"{value:.1%}"
