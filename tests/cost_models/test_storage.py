"""Model files: what comes back is what was saved, or is refused in a sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn

import cost_models
from cost_models import AnchoredLookup, BadModel, Boosted, CostModel, Hybrid, Roofline, Transfer
from latbench.tables.table import hash_table, read_table
from latbench.tables.writer import write_part

Seconds = Callable[[pd.DataFrame], np.ndarray]
Stored = tuple[Path, pd.DataFrame]


@pytest.fixture
def stored(tmp_path: Path, table: Callable[..., pd.DataFrame], seconds: Seconds, rng: np.random.Generator) -> Stored:
    """A table on disk, and its key columns."""
    X = table()
    _write(tmp_path / "table", X, seconds(X), rng)
    return tmp_path / "table", X


def _write(folder: Path, X: pd.DataFrame, seconds: np.ndarray, rng: np.random.Generator) -> None:
    samples = seconds[:, None] * rng.lognormal(0, 0.02, (len(X), 9))
    rows: list[dict[str, Any]] = [
        {name: value for name, value in row.items() if value == value}  # without NaN
        for row in X.to_dict("records")
    ]
    extra = {"status": "ok"}
    write_part(folder, [row | extra | {"samples_seconds": list(s)} for row, s in zip(rows, samples, strict=True)])


MODELS = [
    AnchoredLookup(),
    Roofline(form=None),
    Boosted(max_iter=5, random_state=3),
    Hybrid(max_iter=5, random_state=3),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_saved_model_comes_back_equal(model: CostModel, stored: Stored, tmp_path: Path) -> None:
    folder, X = stored
    model.fit(*cost_models.select_training_rows(read_table(folder)))
    validation = {"a way": {"median": 0.01, "coverage": None}}
    cost_models.save(tmp_path / "m.json", model, hash_table(folder), validation=validation)
    again = cost_models.load(tmp_path / "m.json", folder)
    assert again.get_params() == model.get_params() and type(again) is type(model)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    np.testing.assert_array_equal(again.predict_interval(X, 0.7), model.predict_interval(X, 0.7))
    assert cost_models.read(tmp_path / "m.json").validation == validation


def test_a_transfer_comes_back_from_a_table_of_several_devices(
    stored: Stored, tmp_path: Path, seconds: Seconds, rng: np.random.Generator
) -> None:
    folder, X = stored
    new = X[X["n"] == 37].assign(device="b-cpu")
    _write(folder, new, 3 * seconds(new), rng)
    model = Transfer("b-cpu", max_iter=20).fit(*cost_models.select_training_rows(read_table(folder)))
    cost_models.save(tmp_path / "m.json", model, hash_table(folder))
    again = cost_models.load(tmp_path / "m.json", folder)
    np.testing.assert_array_equal(again.predict(new), model.predict(new))
    assert np.median(np.abs(again.predict(new) / (3 * seconds(new)) - 1)) < 0.05


def test_another_table_is_refused(stored: Stored, tmp_path: Path, seconds: Seconds, rng: np.random.Generator) -> None:
    folder, X = stored
    model = AnchoredLookup().fit(*cost_models.select_training_rows(read_table(folder)))
    cost_models.save(tmp_path / "m.json", model, hash_table(folder))
    _write(folder, X.iloc[:1], seconds(X.iloc[:1]), rng)
    with pytest.raises(BadModel, match=r"was fitted to a table with the hash .* has .* latbench fit"):
        cost_models.load(tmp_path / "m.json", folder)


def test_a_model_of_one_backend_learns_from_its_rows_alone(
    stored: Stored, tmp_path: Path, seconds: Seconds, rng: np.random.Generator
) -> None:
    folder, X = stored
    _write(folder, X.assign(backend="torch"), 2 * seconds(X), rng)
    table_hash = hash_table(folder)
    cost_models.save(tmp_path / "m.json", AnchoredLookup(), table_hash, where={"backend": "torch"})
    np.testing.assert_allclose(
        cost_models.load(tmp_path / "m.json", folder).predict(X.drop(columns="backend")), 2 * seconds(X), rtol=0.1
    )


@pytest.mark.parametrize("libraries", [{"scikit-learn": "0.1"}, {}])
def test_other_libraries_than_it_was_judged_with_are_refused(
    libraries: dict[str, str], stored: Stored, tmp_path: Path
) -> None:
    folder, _ = stored
    path = tmp_path / "m.json"
    cost_models.save(path, AnchoredLookup(), hash_table(folder))
    content = json.loads(path.read_text())
    assert content["libraries"]["scikit-learn"] == sklearn.__version__
    cost_models.load(path, folder)
    here = content["libraries"]
    path.write_text(json.dumps(content | {"libraries": here | libraries if libraries else {}}))
    with pytest.raises(
        BadModel, match=r"judged with scikit-learn (0\.1|unknown).*here is scikit-learn .*fit it again"
    ):
        cost_models.load(path, folder)
    assert cost_models.read(path).libraries == (here | libraries if libraries else {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", "not a cost model"),
        ("[]", "not a cost model"),
        ("{}", "not a cost model"),
        ({"version": 1}, "cost model version 1, this latbench reads 5"),
        ({"estimator": "Forest"}, "estimator Forest .* is unknown"),
        ({"params": {"depth": 3}}, "is unknown to this latbench"),
        ({"params": 3}, "its params is 3"),
        ({"params": {"allow_extrapolation": "x", "extra": 1}}, "is unknown to this latbench"),
        ({"estimator": ["Boosted"]}, "its estimator is"),
        ({"where": {"threads": 2}}, "its where is"),
        ({"libraries": None}, "its libraries is None"),
        ({"libraries": ["scipy"]}, "its libraries is"),
        ({"validation": None}, "its validation is None"),
        ({"validation": {"shapes": "good"}}, "its validation is"),
        ({"validation": {"shapes": {"median": "small"}}}, "its validation is"),
    ],
)
def test_a_file_that_is_no_model_is_refused(change: str | dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    cost_models.save(path, AnchoredLookup(), "0123")
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadModel, match=said):
        cost_models.read(path)


def test_settings_that_nothing_can_be_fitted_with_are_refused(stored: Stored, tmp_path: Path) -> None:
    folder, path = stored[0], tmp_path / "m.json"
    for params in (
        {"random_state": "x"}, {"max_iter": "many"}, {"form": "none"}, {"folds": None}, {"folds": 0}, {"folds": 2.5},
        {"form": {}}, {"allow_extrapolation": "no"}, {"folds": True}, {"learning_rate": "fast"},
    ):  # fmt: skip
        cost_models.save(path, Boosted(**params), hash_table(folder), where={"backend": "numba"})
        with pytest.raises(BadModel, match=r"its params .* fit nothing"):
            cost_models.load(path, folder)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="no such cost model; make it with latbench fit"):
        cost_models.read(tmp_path / "m.json")


def test_whole_models_verifications_and_failures_are_not_learned_from(stored: Stored) -> None:
    folder, X = stored
    row = {name: value for name, value in X.iloc[0].to_dict().items() if value == value}
    write_part(folder, [
        row | {"op": "model", "model": "net", "status": "ok", "samples_seconds": [1.0]},
        row | {"purpose": "verify", "status": "ok", "samples_seconds": [1.0]},
        row | {"threads": 7, "status": "error", "error": "it broke"},
        row | {"threads": 8, "status": "throttled", "samples_seconds": [1.0]},
    ])  # fmt: skip
    learned, y = cost_models.select_training_rows(read_table(folder))
    assert len(learned) == len(X) == len(y)
    assert y.max() < 1
