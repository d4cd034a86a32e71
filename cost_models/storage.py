"""A fitted model on disk: JSON of its settings and of the table that it was fitted to, never a pickle.

    {"version": 1, "estimator": "AnchoredLookup", "params": {...}, "backend": null, "columns": [...],
     "table_hash": "...", "validation": {"held-out sparsities of measured shapes": {"median": 0.01, ...}}}

Loading fits it again from that table, which is quick and gives the same model; a table with another hash is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_models.boosted import Boosted
from cost_models.errors import BadModel
from cost_models.hybrid import Hybrid
from cost_models.lookup import AnchoredLookup
from cost_models.roofline import Roofline
from cost_models.rows import KEY, read_training_rows
from cost_models.transfer import Transfer
from cost_models.validation import CostModel, Figures
from latbench import tables
from latbench.files import write_text_atomically
from latbench.places import Place

VERSION = 1
ESTIMATORS: dict[str, type[CostModel]] = {
    kind.__name__: kind for kind in (AnchoredLookup, Roofline, Boosted, Hybrid, Transfer)
}


@dataclass(frozen=True)
class ModelFile:
    """What a model file says. backend: the only one whose rows were used, or None; validation: figures by method."""

    estimator: CostModel
    table_hash: str
    backend: str | None
    validation: Mapping[str, Figures]


def save(
    path: str | Path,
    model: CostModel,
    table_hash: str,
    *,
    backend: str | None = None,
    validation: Mapping[str, Figures] | None = None,
) -> None:
    """Write `model`, fitted to `training_rows(table, backend)` of the table with this hash; whole or not at all."""
    content = {
        "version": VERSION,
        "estimator": type(model).__name__,
        "params": model.get_params(),
        "backend": backend,
        "columns": KEY,
        "table_hash": table_hash,
        "validation": dict(validation or {}),
    }
    write_text_atomically(Path(path), json.dumps(content, indent=2, allow_nan=False) + "\n")


def read(path: str | Path) -> ModelFile:
    """The settings in a model file, unfitted. Raises BadModel for a missing or foreign file or another version."""
    path, advice = Path(path), "make it with latbench fit"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModel(f"{path}: no such cost model; {advice}") from None
    except (OSError, ValueError) as error:
        raise BadModel(f"{path}: not a cost model ({error}); {advice}") from error
    if not isinstance(content, dict) or not {"version", "estimator", "params", "table_hash"} <= content.keys():
        raise BadModel(f"{path}: not a cost model; {advice}")
    if content["version"] != VERSION:
        raise BadModel(f"{path}: cost model version {content['version']}, this latbench reads {VERSION}; {advice}")
    try:
        estimator = ESTIMATORS[content["estimator"]](**content["params"])
    except (KeyError, TypeError) as error:
        raise BadModel(
            f"{path}: estimator {content['estimator']} with {content['params']} is unknown to this latbench; {advice}"
        ) from error
    validation: Any = content.get("validation", {})
    return ModelFile(estimator, str(content["table_hash"]), content.get("backend"), validation)


def load(path: str | Path, table: str | Place) -> CostModel:
    """The model of the file `path`, fitted again to the table at `table`.

    Raises BadModel as `read` does, and for a table other than the one it was fitted to; BadData for no table.
    """
    saved, found = read(path), tables.table_hash(table)
    if saved.table_hash != found:
        raise BadModel(
            f"{path} was fitted to a table with the hash {saved.table_hash}, and {table} has {found}: "
            "fit it again with latbench fit"
        )
    return saved.estimator.fit(*read_training_rows(table, saved.backend))
