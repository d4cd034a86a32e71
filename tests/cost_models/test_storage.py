"""Model files: what comes back is what was saved, or is refused in a sentence."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import cost_models
from cost_models import AnchoredLookup, BadModel, Boosted, CostModel, Hybrid, Roofline, Transfer
from cost_models.estimators import anchored_lookup, roofline
from cost_models.estimators.fitted_trees import fit_trees
from cost_models.estimators.learned_model import LearnedModel
from cost_models.estimators.tree_arrays import TreeArrays
from cost_models.features.feature_encoder import FeatureEncoder
from cost_models.kept_state import decode, encode
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


def training(folder: Path) -> tuple[pd.DataFrame, np.ndarray]:
    """The training rows of a table."""
    return cost_models.select_training_rows(read_table(folder))


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
    model.fit(*training(folder))
    validation = {"a way": {"median": 0.01, "coverage": None}}
    cost_models.save(tmp_path / "m.json", model, hash_table(folder), X, validation=validation)
    again = cost_models.load(tmp_path / "m.json", folder)
    assert again.get_params() == model.get_params() and type(again) is type(model)
    np.testing.assert_allclose(again.predict(X), model.predict(X), rtol=1e-12)
    np.testing.assert_allclose(again.predict_interval(X, 0.7), model.predict_interval(X, 0.7), rtol=1e-12)
    np.testing.assert_array_equal(again.covers(X), model.covers(X))
    assert cost_models.read(tmp_path / "m.json").validation == validation


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_model_is_loaded_without_fitting(
    model: CostModel, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, X = stored
    cost_models.save(tmp_path / "m.json", model.fit(*training(folder)), hash_table(folder), X)
    with monkeypatch.context() as patched:
        for kind in (AnchoredLookup, LearnedModel, Hybrid):
            patched.setattr(kind, "fit", lambda *_: pytest.fail("it was fitted again"))
        assert len(cost_models.load(tmp_path / "m.json", folder).predict(X)) == len(X)


def test_kept_trees_are_those_of_scikit_learn(rng: np.random.Generator) -> None:
    features = rng.standard_normal((5000, 7))
    features[rng.random(features.shape) < 0.1] = np.nan
    features[:, 3] = np.nan
    trees = fit_trees(features, np.nan_to_num(features[:, 0]) * 2 + rng.standard_normal(5000), max_iter=40)
    kept = decode(json.loads(json.dumps(encode(trees), allow_nan=False)))
    asked = np.concatenate([features, 1e3 * rng.standard_normal((3000, 7)), np.full((1, 7), np.inf)])
    np.testing.assert_allclose(kept(asked), trees(asked), rtol=0, atol=1e-12)
    assert kept(asked[:0]).shape == (0,)
    with pytest.raises(BadModel, match="other features"):
        kept(asked[:, :2])


@pytest.mark.parametrize(
    "value",
    [
        None, True, -3, 2.5, float("inf"), "text", [1, [2.0, None]], (1, ("a",)), {1: "a", None: (2,)}, {"array": 1},
        frozenset({("a", 1), ("b", None)}), np.arange(6).reshape(2, 3), np.array(["a", "bc"]), np.zeros((0, 3)),
        np.array([np.nan, np.inf]), np.array([True, False]),
    ],
)  # fmt: skip
def test_values_come_back_equal(value: Any) -> None:
    again = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert type(again) is type(value)
    if isinstance(value, np.ndarray):
        assert again.dtype == value.dtype
        np.testing.assert_array_equal(again, value)
    else:
        assert again == value


@pytest.mark.parametrize("value", [object(), np.array([object()]), b"bytes", pd.DataFrame({"a": [1]})])
def test_values_of_other_kinds_are_not_written(value: Any) -> None:
    with pytest.raises(TypeError, match="a model file cannot hold a"):
        encode(value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"kept": "Path", "with": {}}, "something unknown: kept, with"),
        ({"kept": "Edge", "with": {"rings": 1}}, "damaged .*missing 2 required"),
        ({"kept": "AnchoredLookup", "with": {}}, "damaged .*allow_extrapolation"),
        ({"kept": "AnchoredLookup", "with": {"allow_extrapolation": False, "fit": 1}}, "something unknown: fit"),
        ({"array": ["O", [1], "AAAAAAAAAAA="]}, "something unknown: array"),
        ({"array": ["<f8", [2], "AAAAAAAAAAA="]}, "damaged"),
        ({"array": ["<f8", [1], "!"]}, "damaged"),
        ({"array": 3}, "something unknown: array"),
        ({"pairs": [[1]]}, "damaged"),
        ({"pairs": [[[1], 2]]}, "damaged .*unhashable"),
        ({"number": "much"}, "damaged"),
        ({"a": 1, "b": 2}, "something unknown: a, b"),
    ],
)
def test_what_is_no_value_is_refused(content: Any, said: str) -> None:
    with pytest.raises(BadModel, match=said):
        decode([content])


@pytest.mark.parametrize(
    "change",
    [
        {"left": [0, 1, 2]},
        {"right": [3, 1, 2]},
        {"roots": [5]},
        {"value": [1.0]},
        {"left": [-1, 1, 2]},
        {"feature": np.zeros((10**9, 0), np.int64)},
        {"feature": [0.0, -1.0, -1.0]},
    ],
)
def test_damaged_trees_are_refused(change: dict[str, list[float]]) -> None:
    """One tree of a node and two leaves: no row may go in circles, or out of the arrays."""
    arrays: dict[str, Any] = {
        "roots": [0], "feature": [0, -1, -1], "threshold": [0.5, 0, 0], "missing_left": [True, False, False],
        "left": [1, 1, 2], "right": [2, 1, 2], "value": [0, 1.0, 2.0],
    }  # fmt: skip
    right = {name: np.array(each) for name, each in arrays.items()}
    np.testing.assert_array_equal(TreeArrays(0.0, **right)(np.array([[0.0], [1.0], [np.nan]])), [1, 2, 1])
    with pytest.raises(BadModel, match="trees are damaged"):
        TreeArrays(0.0, **right | {name: np.array(each) for name, each in change.items()})


def test_a_long_chain_of_nodes_ends(rng: np.random.Generator) -> None:
    nodes = 5000
    order = np.arange(nodes)
    feature, behind = np.where(order < nodes - 1, 0, -1), np.minimum(order + 1, nodes - 1)
    chain = TreeArrays(0.0, order[:1], feature, np.ones(nodes), order < 0, behind, behind, np.ones(nodes))
    with pytest.raises(BadModel, match="deeper than 1000"):
        chain(rng.standard_normal((3, 1)))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_a_model_that_no_longer_predicts_what_it_did_is_refused(
    model: CostModel, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that has changed makes other numbers of what was learned."""
    folder, X = stored
    cost_models.save(tmp_path / "m.json", model.fit(*training(folder)), hash_table(folder), X)
    cost_models.load(tmp_path / "m.json", folder)
    encode_rows, convert, count = FeatureEncoder.encode, anchored_lookup._convert_to_axis, roofline.count_work
    if isinstance(model, AnchoredLookup):
        monkeypatch.setattr(anchored_lookup, "_convert_to_axis", lambda sparsity: convert(sparsity) ** 3)
    elif isinstance(model, Roofline):
        monkeypatch.setattr(roofline, "count_work", lambda *given: 1.1 * count(*given))
    else:  # of a hybrid the look-up answers for all rows that were measured, and its trees changed
        monkeypatch.setattr(FeatureEncoder, "encode", lambda self, X: encode_rows(self, X)[:, ::-1])
    with pytest.raises(BadModel, match="predicts other times here than where it was fitted: fit it again"):
        cost_models.load(tmp_path / "m.json", folder)


def test_what_was_learned_may_not_be_changed(stored: Stored, tmp_path: Path) -> None:
    """Errors set the width of intervals, and no prediction shows them."""
    folder, path = stored[0], tmp_path / "m.json"
    cost_models.save(path, Boosted(max_iter=5).fit(*training(folder)), hash_table(folder), stored[1])
    cost_models.load(path, folder)
    content = json.loads(path.read_text())
    held_out = content["fitted"]["with"]["held_out_errors_"]["array"]
    held_out[2] = encode(np.frombuffer(base64.b64decode(held_out[2]), held_out[0]) * 0.5)["array"][2]
    path.write_text(json.dumps(content))
    with pytest.raises(BadModel, match="what it has learned was changed; fit it again"):
        cost_models.load(path, folder)


def test_a_deep_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("[" * 100_000)
    with pytest.raises(BadModel, match="not a cost model"):
        cost_models.read(tmp_path / "m.json")


def test_what_people_may_read_is_indented_and_the_rest_is_short(stored: Stored, tmp_path: Path) -> None:
    folder, path = stored[0], tmp_path / "m.json"
    cost_models.save(path, Hybrid(max_iter=5).fit(*training(folder)), hash_table(folder), stored[1])
    lines = path.read_text().splitlines()
    assert '  "estimator": "Hybrid",' in lines and len(lines) < 40


@pytest.mark.parametrize("name", ["fitted", "examples", "predicted"])
@pytest.mark.parametrize("value", [None, 3, {}, {"tuple": []}, {"kept": "Roofline", "with": {}}])
def test_a_file_whose_learning_is_damaged_is_refused(name: str, value: Any, stored: Stored, tmp_path: Path) -> None:
    folder, path = stored[0], tmp_path / "m.json"
    cost_models.save(path, AnchoredLookup().fit(*training(folder)), hash_table(folder), stored[1])
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(BadModel, match="fit it again with latbench fit"):
        cost_models.load(path, folder)


def test_a_transfer_comes_back_from_a_table_of_several_devices(
    stored: Stored, tmp_path: Path, seconds: Seconds, rng: np.random.Generator
) -> None:
    folder, X = stored
    new = X[X["n"] == 37].assign(device="b-cpu")
    _write(folder, new, 3 * seconds(new), rng)
    model = Transfer("b-cpu", max_iter=20).fit(*training(folder))
    cost_models.save(tmp_path / "m.json", model, hash_table(folder), new)
    again = cost_models.load(tmp_path / "m.json", folder)
    np.testing.assert_allclose(again.predict(new), model.predict(new), rtol=1e-12)
    np.testing.assert_allclose(again.predict_interval(new), model.predict_interval(new), rtol=1e-12)
    assert np.median(np.abs(again.predict(new) / (3 * seconds(new)) - 1)) < 0.05


def test_another_table_is_refused(stored: Stored, tmp_path: Path, seconds: Seconds, rng: np.random.Generator) -> None:
    folder, X = stored
    model = AnchoredLookup().fit(*training(folder))
    cost_models.save(tmp_path / "m.json", model, hash_table(folder), X)
    _write(folder, X.iloc[:1], seconds(X.iloc[:1]), rng)
    with pytest.raises(BadModel, match=r"was fitted to a table with the hash .* has .* latbench fit"):
        cost_models.load(tmp_path / "m.json", folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", "not a cost model"),
        ("[]", "not a cost model"),
        ("{}", "not a cost model"),
        ({"version": 1}, "cost model version 1, this latbench reads 6"),
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
def test_a_file_that_is_no_model_is_refused(
    change: str | dict[str, Any], said: str, stored: Stored, tmp_path: Path
) -> None:
    path = tmp_path / "m.json"
    cost_models.save(path, AnchoredLookup().fit(*training(stored[0])), "0123", stored[1])
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadModel, match=said):
        cost_models.read(path)


def test_settings_of_another_kind_are_refused(stored: Stored, tmp_path: Path) -> None:
    folder, path = stored[0], tmp_path / "m.json"
    cost_models.save(path, Boosted(max_iter=5).fit(*training(folder)), hash_table(folder), stored[1])
    content = json.loads(path.read_text())
    for params in (
        {"random_state": "x"}, {"max_iter": "many"}, {"folds": None}, {"folds": 2.5}, {"form": {}},
        {"allow_extrapolation": "no"}, {"folds": True}, {"learning_rate": "fast"},
    ):  # fmt: skip
        path.write_text(json.dumps(content | {"params": content["params"] | params}))
        with pytest.raises(BadModel, match=r"its params .* fit nothing"):
            cost_models.load(path, folder)
    path.write_text(json.dumps(content | {"params": content["params"] | {"folds": 4}}))
    with pytest.raises(BadModel, match="what it has learned is of another estimator"):
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
