"""A profile comes back as it was written, and anything else is refused in a sentence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from latbench.errors import BadData
from search.artifacts.profile import LayerChoice, Profile, Weights, read_profile


def example() -> Profile:
    return Profile(
        task="digits",
        layers={
            "a.fc1": LayerChoice("shflbw:32", 0.75, 1e-3, 0.9e-3, 1.1e-3, 0.03),
            "a.fc2": LayerChoice("dense", 0.0, 2e-3, 1.9e-3, 2.1e-3, 0.0),
        },
        backend="numba", threads=2, batch=128, device="some-cpu", target=2.0, dense_engine="onnxruntime",
        dense_seconds=8e-3, dense_seconds_low=7.9e-3, dense_seconds_high=8.1e-3, fixed_seconds=5e-4,
        fixed_seconds_low=4e-4, fixed_seconds_high=6e-4, predicted_seconds=3.5e-3, predicted_low=3.2e-3,
        predicted_high=3.8e-3, loss=0.1, error=0.03, bound=0.03, ceiling=16.0, confidence=0.9,
        additivity_before=0.1, additivity_after=0.02, strategy="spdy", seed=0,
        table_hash="aa", model_hash="bb", inputs="cc",
    )  # fmt: skip


def test_a_profile_comes_back(tmp_path: Path) -> None:
    example().save(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == example()
    assert json.loads((tmp_path / "p.json").read_text())["version"] == 3


def test_a_second_budget_is_in_it_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    asked = replace(example(), most_bytes=1e6, weight_bytes=9e5, dense_bytes=4e6)
    asked.save(path)
    assert read_profile(path) == asked
    assert asked.weights == Weights(dense=4e6, packed=9e5, most=1e6)
    assert asked.weights.sentence() == "all weights take 900,000 of 1,000,000 bytes allowed, 4,000,000 dense"
    content = json.loads(path.read_text())
    del content["most_bytes"], content["weight_bytes"], content["dense_bytes"]
    path.write_text(json.dumps(content))
    assert read_profile(path) == example()
    assert example().weights is None


def test_the_speedup_is_over_dense_and_its_noise_is_in_the_predicted_seconds() -> None:
    assert example().speedup == pytest.approx((8 / 3.5, 8 / 3.8, 8 / 3.2))


def test_spdy_can_read_it(tmp_path: Path) -> None:
    example().save_spdy(tmp_path / "p.txt")
    assert (tmp_path / "p.txt").read_text() == "0.7500 a.fc1\n0.0000 a.fc2\n"


def changed(path: Path, **changes: Any) -> Path:
    example().save(path)
    content = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            del content[key]
        else:
            content[key] = value
    path.write_text(json.dumps(content))
    return path


LAYER = {"pattern": "dense", "sparsity": 0.0, "seconds": 1.0, "seconds_low": 1.0, "seconds_high": 1.0, "error": 0.0}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 1}, "another profile version than 3"),
        ({"version": None}, "not a profile, which"),
        ({"layers": None}, "not a profile, which"),  # as a model file of `latbench fit`, which has a version too
        ({"target": None}, "missing entry target"),
        ({"target": "2"}, "target must be of kind float, not '2'"),
        ({"target": float("nan")}, "target must be of kind float, not nan"),
        ({"threads": True}, "threads must be of kind int"),
        ({"surprise": 1}, "unknown entry surprise"),
        ({"layers": {}}, "the entry `layers` must be a JSON object"),
        ({"layers": {"fc": 3}}, "layer fc: expected a JSON object, not 3"),
        ({"layers": {"fc": LAYER | {"pattern": "vector:x"}}}, "layer fc: unknown pattern 'vector:x'"),
        ({"layers": {"fc": LAYER | {"sparsity": 1.0}}}, r"layer fc: a sparsity must lie in \[0, 1\)"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadData, match=sentence):
        read_profile(changed(tmp_path / "p.json", **changes))


def test_missing_and_broken_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="does not exist: `latbench search` writes"):
        read_profile(tmp_path / "absent.json")
    path = tmp_path / "broken.json"
    path.write_text('{"version": 1, ')
    with pytest.raises(BadData, match="not a JSON file"):
        read_profile(path)
    path.write_text("[1]")
    with pytest.raises(BadData, match="not a profile, which"):
        read_profile(path)
