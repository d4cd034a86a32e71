"""Model files: a fitted cost model and the hash of its table, as JSON, never a pickle.

    {"version": 6, "libraries": {"scikit-learn": "1.7.2", "scipy": "1.16.3"}, "estimator": "AnchoredLookup",
     "params": {...}, "where": {"backend": "numba"}, "table_hash": "...",
     "validation": {"held-out sparsities of measured shapes": {"median": 0.01, ...}},
     "fitted_hash": "...", "examples": {...}, "predicted": {...}, "fitted": {...}}

`fitted` is what `cost_models.kept_state` makes of the model, so `load` does not fit it again. It refuses a table with
another hash, and content with another one. It also refuses a model whose parts no longer predict what they predicted
for its examples when it was saved: the code of a feature or of a library may have changed since.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.estimators.boosted import Boosted
from cost_models.estimators.hybrid import Hybrid
from cost_models.estimators.roofline import Roofline
from cost_models.estimators.transfer import Transfer
from cost_models.evaluation.held_out_errors import CostModel, Figures
from cost_models.kept_state import decode, encode
from cost_models.refusals import BadModel
from cost_models.rows.row_keys import KEY, FloatArray
from latbench.base.files import write_text_atomically
from latbench.tables.storage import Place
from latbench.tables.table import hash_table

_LOG = logging.getLogger(__name__)

VERSION = 6  # also rises if the same settings give another model than before
LIBRARIES = ("scikit-learn", "scipy")  # whose versions affect a fit
_EXAMPLES = 24
_SAME = 1e-9  # relative difference of two predictions of one model, whose sums may round differently
ESTIMATORS: dict[str, type[CostModel]] = {
    kind.__name__: kind for kind in (AnchoredLookup, Roofline, Boosted, Hybrid, Transfer)
}


@dataclass(frozen=True)
class ModelFile:
    """Content of a model file.

    Attributes
    ----------
    estimator : CostModel
        The model's settings, unfitted.
    table_hash : str
        Hash of the table that it was fitted to.
    where : mapping of str to str
        Filter of the training rows, as of `select_training_rows`.
    validation : mapping of str to mapping
        Figures of `evaluate` by the method of holding out.
    libraries : mapping of str to str
        Versions of the libraries that it was fitted with.
    fitted_hash : str
        Hash of `fitted`.
    fitted, examples, predicted : object
        The fitted model, some of its training rows and the seconds that its parts predict for them, as
        `cost_models.kept_state.encode` returns them.
    """

    estimator: CostModel
    table_hash: str
    where: Mapping[str, str] = field(default_factory=dict)
    validation: Mapping[str, Figures] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    fitted_hash: str = ""
    fitted: Any = None
    examples: Any = None
    predicted: Any = None


def find_library_versions() -> dict[str, str]:
    """Return the installed versions of the libraries that affect a fit."""
    return {name: version(name) for name in LIBRARIES}


def save(
    path: str | Path,
    model: CostModel,
    table_hash: str,
    X: pd.DataFrame,
    *,
    where: Mapping[str, str] | None = None,
    validation: Mapping[str, Figures] | None = None,
) -> None:
    """Save a fitted model, atomically.

    Parameters
    ----------
    path : str or Path
        The model file.
    model : CostModel
        The model, fitted to the training rows of the table.
    table_hash : str
        Hash of the table, as `latbench.tables.table.hash_table` returns it.
    X : DataFrame of shape (rows, columns)
        The training rows. The file keeps some of them and their predictions, by which `load` knows the model again.
    where : mapping of str to str, optional
        Filter of the training rows, as of `select_training_rows`.
    validation : mapping of str to mapping, optional
        Figures of `evaluate` by the method of holding out.
    """
    examples = _select_examples(model, X)
    content = {
        "version": VERSION,
        "libraries": find_library_versions(),
        "estimator": type(model).__name__,
        "params": model.get_params(),
        "where": dict(where or {}),
        "table_hash": table_hash,
        "validation": dict(validation or {}),
    }
    fitted = json.dumps(encode(model), allow_nan=False)
    rest = {
        "fitted_hash": _hash_text(fitted),
        "examples": encode(examples.astype(object).where(examples.notna(), np.nan).to_dict("list")),
        "predicted": encode(_predict_parts(model, examples)),
    }
    # What people may read is indented; the rest is a line each.
    lines = [json.dumps(content, indent=2, allow_nan=False).removesuffix("\n}")]
    lines += [f'  "{name}": {json.dumps(value, allow_nan=False)}' for name, value in rest.items()]
    write_text_atomically(Path(path), ",\n".join([*lines, f'  "fitted": {fitted}']) + "\n}\n")


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _predict_parts(model: CostModel, X: pd.DataFrame) -> FloatArray:
    """Return the seconds of every row of X by each part of a model.

    A hybrid asks only one of its parts for a row, so each is asked alone. A look-up gives measured times for its
    training rows, so it also tells what lies between them.
    """
    if isinstance(model, Hybrid):
        return np.concatenate([_predict_parts(model.lookup_, X), _predict_parts(model.learned_, X)])
    seconds = model.predict(X) if len(X) else np.empty(0)
    return (
        np.concatenate([seconds, model.interpolate_some(_EXAMPLES)]) if isinstance(model, AnchoredLookup) else seconds
    )


def _select_examples(model: CostModel, X: pd.DataFrame) -> pd.DataFrame:
    """Return some of the rows that the model covers, from everywhere in X, with the columns that have values."""
    covered = np.flatnonzero(model.covers(X))
    chosen = covered[np.unique(np.linspace(0, len(covered) - 1, _EXAMPLES).astype(int))] if len(covered) else covered
    return X.iloc[chosen][[name for name in KEY if name in X.columns]].reset_index(drop=True)


def read(path: str | Path) -> ModelFile:
    """Read the content of a model file, but for the fitted model.

    Parameters
    ----------
    path : str or Path
        The model file.

    Returns
    -------
    ModelFile
        Its estimator is not fitted.

    Raises
    ------
    BadModel
        The file is missing, malformed or of another version.
    """
    path, advice = Path(path), "make it with latbench fit"
    _LOG.info(f"reading {path}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModel(f"{path}: no such cost model; {advice}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BadModel(f"{path}: not a cost model ({error}); {advice}") from error
    if not isinstance(content, dict) or "version" not in content:
        raise BadModel(f"{path}: not a cost model; {advice}")
    if content["version"] != VERSION:
        raise BadModel(f"{path}: cost model version {content['version']!r}, this latbench reads {VERSION}; {advice}")
    for name, is_right in _ENTRY_CHECKS.items():
        if not (name in content and is_right(content[name])):
            raise BadModel(f"{path}: not a cost model, its {name} is {content.get(name)!r}; {advice}")
    try:
        kind, params = ESTIMATORS[content["estimator"]], content["params"]
        estimator = kind(**params)
    except (KeyError, TypeError) as error:
        raise BadModel(
            f"{path}: estimator {content['estimator']} with {content['params']} is unknown to this latbench; {advice}"
        ) from error
    for name, default in kind().get_params().items():
        if not _is_same_kind(value := getattr(estimator, name), default):
            raise BadModel(f"{path}: its params {params} fit nothing ({name} cannot be {value!r}); {advice}")
    checked = (content[name] for name in ("table_hash", "where", "validation", "libraries"))
    return ModelFile(estimator, *checked, *map(content.get, ("fitted_hash", "fitted", "examples", "predicted")))


def _is_same_kind(value: Any, default: Any) -> bool:
    """Return whether a parameter has the type of its default; a text may be None."""
    if default is None or isinstance(default, str):
        return value is None or isinstance(value, str)
    return type(value) is type(default) or (isinstance(default, float) and type(value) is int)


def _is_text_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_figure_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(
        figure is None or isinstance(figure, int | float) for figure in value.values()
    )


_ENTRY_CHECKS: dict[str, Callable[[Any], bool]] = {
    "estimator": lambda value: isinstance(value, str),
    "params": lambda value: isinstance(value, dict),
    "table_hash": lambda value: isinstance(value, str),
    "where": _is_text_mapping,
    "validation": lambda value: isinstance(value, dict) and all(map(_is_figure_mapping, value.values())),
    "libraries": _is_text_mapping,
}
"""A check of the type of each entry in a model file."""


def load(path: str | Path, table: str | Place) -> CostModel:
    """Load a fitted model.

    Parameters
    ----------
    path : str or Path
        The model file.
    table : str or Place
        Path or URI of the table that the model was fitted to.

    Returns
    -------
    CostModel
        The fitted model.

    Raises
    ------
    BadModel
        As `read`; or the table is not that of the saved model, or the model does not predict what it did.
    BadData
        There is no such table.
    """
    saved, found = read(path), hash_table(table)
    if saved.table_hash != found:
        raise BadModel(
            f"{path} was fitted to a table with the hash {saved.table_hash}, and {table} has {found}: "
            "fit it again with latbench fit"
        )
    try:
        model, again, before = _revive(saved)
    except BadModel as error:
        raise BadModel(f"{path}: not a cost model, {error}; fit it again with latbench fit") from error
    except Exception as error:  # of what is damaged anything may follow
        raise BadModel(
            f"{path}: what it has learned cannot be used ({error}); fit it again with latbench fit"
        ) from error
    if again.shape != before.shape or not np.allclose(again, before, rtol=_SAME, atol=0):
        raise BadModel(f"{path} predicts other times here than where it was fitted: fit it again with latbench fit")
    return model


def _revive(saved: ModelFile) -> tuple[CostModel, FloatArray, FloatArray]:
    """Return the fitted model, and the seconds of its examples that it predicts now and predicted before."""
    if _hash_text(json.dumps(saved.fitted)) != saved.fitted_hash:
        raise BadModel("what it has learned was changed")
    model: CostModel = decode(saved.fitted)
    settings = type(saved.estimator), saved.estimator.get_params()
    if not isinstance(model, tuple(ESTIMATORS.values())) or (type(model), model.get_params()) != settings:
        raise BadModel("what it has learned is of another estimator")
    examples, before = pd.DataFrame(decode(saved.examples)), np.asarray(decode(saved.predicted), np.float64)
    return model, _predict_parts(model, examples), before
