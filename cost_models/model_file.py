"""A fitted model on disk: JSON of its settings and of the table that it was fitted to, never a pickle.

    {"version": 4, "libraries": {"scikit-learn": "1.7.2", "scipy": "1.16.3"}, "estimator": "AnchoredLookup",
     "params": {...}, "where": {"backend": "numba"}, "table_hash": "...",
     "validation": {"held-out sparsities of measured shapes": {"median": 0.01, ...}}}

Loading fits it again from that table, which is quick and gives the same model. So it refuses a table with another
hash, and other libraries than it was validated with: what they fit may differ, and have other errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.estimators.boosted import Boosted
from cost_models.estimators.hybrid import Hybrid
from cost_models.estimators.roofline import Roofline
from cost_models.estimators.transfer import Transfer
from cost_models.evaluation.held_out_errors import CostModel, Figures
from cost_models.refusals import BadModel
from cost_models.rows.row_keys import read_training_rows
from latbench.base.files import write_text_atomically
from latbench.errors import BadData, UsageError
from latbench.tables import table as tables
from latbench.tables.storage import Place

VERSION = 4  # goes up, too, when the same settings would give another model than before
LIBRARIES = ("scikit-learn", "scipy")  # that a fit hangs on
ESTIMATORS: dict[str, type[CostModel]] = {
    kind.__name__: kind for kind in (AnchoredLookup, Roofline, Boosted, Hybrid, Transfer)
}


@dataclass(frozen=True)
class ModelFile:
    """What a model file says. where: of which rows it was fitted, as of `training_rows`; validation: figures by
    method; libraries: the versions that it was fitted with.
    """

    estimator: CostModel
    table_hash: str
    where: Mapping[str, str] = field(default_factory=dict)
    validation: Mapping[str, Figures] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)


def libraries() -> dict[str, str]:
    """The versions, here and now, of what a fit hangs on."""
    return {name: version(name) for name in LIBRARIES}


def save(
    path: str | Path,
    model: CostModel,
    table_hash: str,
    *,
    where: Mapping[str, str] | None = None,
    validation: Mapping[str, Figures] | None = None,
) -> None:
    """Write `model`, fitted to `training_rows(table, where)` of the table with this hash; whole or not at all."""
    content = {
        "version": VERSION,
        "libraries": libraries(),
        "estimator": type(model).__name__,
        "params": model.get_params(),
        "where": dict(where or {}),
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
    if not isinstance(content, dict) or "version" not in content:
        raise BadModel(f"{path}: not a cost model; {advice}")
    if content["version"] != VERSION:
        raise BadModel(f"{path}: cost model version {content['version']!r}, this latbench reads {VERSION}; {advice}")
    for name, is_right in _FORM.items():
        if not (name in content and is_right(content[name])):
            raise BadModel(f"{path}: not a cost model, its {name} is {content.get(name)!r}; {advice}")
    try:
        kind, params = ESTIMATORS[content["estimator"]], content["params"]
        estimator = kind(**params)
    except (KeyError, TypeError) as error:
        raise BadModel(
            f"{path}: estimator {content['estimator']} with {content['params']} is unknown to this latbench; {advice}"
        ) from error
    for name, usual in kind().get_params().items():
        if not _alike(value := getattr(estimator, name), usual):
            raise BadModel(f"{path}: its params {params} fit nothing ({name} cannot be {value!r}); {advice}")
    return ModelFile(estimator, *(content[name] for name in ("table_hash", "where", "validation", "libraries")))


def _alike(value: Any, usual: Any) -> bool:
    """Whether a parameter is of the kind of its default; a form may be none."""
    if usual is None or isinstance(usual, str):
        return value is None or isinstance(value, str)
    return type(value) is type(usual) or (isinstance(usual, float) and type(value) is int)


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _figures(value: Any) -> bool:
    return isinstance(value, dict) and all(
        figure is None or isinstance(figure, int | float) for figure in value.values()
    )


_FORM: dict[str, Callable[[Any], bool]] = {
    "estimator": lambda value: isinstance(value, str),
    "params": lambda value: isinstance(value, dict),
    "table_hash": lambda value: isinstance(value, str),
    "where": _texts,
    "validation": lambda value: isinstance(value, dict) and all(map(_figures, value.values())),
    "libraries": _texts,
}
"""What each entry of a model file must be."""


def load(path: str | Path, table: str | Place) -> CostModel:
    """The model of the file `path`, fitted again to the table at `table`.

    Raises BadModel as `read` does, and for a table or libraries other than those it was fitted to and with; BadData
    for no table.
    """
    saved, found = read(path), tables.table_hash(table)
    if saved.table_hash != found:
        raise BadModel(
            f"{path} was fitted to a table with the hash {saved.table_hash}, and {table} has {found}: "
            "fit it again with latbench fit"
        )
    here = libraries()
    if other := [name for name in LIBRARIES if saved.libraries.get(name) != here[name]]:
        then = ", ".join(f"{name} {saved.libraries.get(name, 'unknown')}" for name in other)
        now = ", ".join(f"{name} {here[name]}" for name in other)
        raise BadModel(f"{path} was fitted and judged with {then}, and here is {now}: fit it again with latbench fit")
    try:
        X, y = read_training_rows(table, saved.where)
    except UsageError as error:
        raise BadModel(f"{path}: not a cost model, {error}") from error
    try:
        return saved.estimator.fit(X, y)
    except BadData:
        raise
    except (TypeError, ValueError) as error:  # a parameter of a kind or size that was never saved
        raise BadModel(f"{path}: its params {saved.estimator.get_params()} fit nothing ({error})") from error
