"""--json: one object on stdout, plain values in it, and errors on stderr as ever."""

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from latbench.cli.json_output import convert_to_json_values

TABLE = "bundled://amd-epyc-zen4-2-threads"
LAYER = ("--pattern", "vector:32", "--shape", "768x768x128", "--sparsity", "0.93")


class Colour(StrEnum):
    red = "red"


class Pair(NamedTuple):
    low: float
    high: float


@dataclass
class Row:
    seconds: float
    path: Path


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Row(1.5, Path("a/b")), {"seconds": 1.5, "path": "a/b"}),
        (Pair(1.0, math.nan), {"low": 1.0, "high": None}),
        ({1: math.inf, "x": (Colour.red, None, True)}, {"1": None, "x": ["red", None, True]}),
        (np.float32(0.5), 0.5),
        (np.array([1, 2]), [1, 2]),
        ({"b", "a"}, ["a", "b"]),
    ],
)
def test_values_become_those_of_json(value: Any, expected: Any) -> None:
    found = convert_to_json_values(value)
    assert found == expected
    assert json.loads(json.dumps(found, allow_nan=False)) == expected


def test_a_value_without_a_form_is_refused_not_guessed() -> None:
    with pytest.raises(TypeError, match="JSON has no form for a complex"):
        convert_to_json_values({"z": 1j})


def test_validate_lists_findings(latbench: Any, tmp_path: Path) -> None:
    found = json.loads(latbench("validate", TABLE, "--json").out)
    assert (found["table"], found["files"], found["counts"]) == (TABLE, 1, {"note": 2})
    repeated, old = found["findings"]
    assert repeated["severity"] == old["severity"] == "note" and "more than one row" in repeated["text"]
    assert "times of latbench's kernels are of other versions" in old["text"]
    (tmp_path / "part-0000000000000000.parquet").write_bytes(b"no parquet")
    ran = latbench("validate", tmp_path, "--json")
    assert ran.refused(5)
    document = json.loads(ran.out)
    assert document["counts"]["corrupt"] == len(document["findings"]) == 1


def test_fit_and_predict_say_what_their_tables_say(latbench: Any, tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    fitted = json.loads(latbench("fit", TABLE, "-o", model, "--json").out)
    assert fitted["estimator"] == "AnchoredLookup" and fitted["points"] == 897 and not fitted["up_to_date"]
    assert fitted["validation"] == json.loads(model.read_text())["validation"]
    assert json.loads(latbench("fit", TABLE, "-o", model, "--json").out) == {**fitted, "up_to_date": True}
    text = latbench("predict", model, "--table", TABLE, *LAYER).out
    found = json.loads(latbench("predict", model, "--table", TABLE, *LAYER, "--json").out)
    assert f"{found['predicted_seconds'] * 1e6:.2f} µs ({found['low_seconds'] * 1e6:.2f} to" in text
    assert (found["m"], found["pattern"], found["sparsity_target"], found["threads"]) == (768, "vector:32", 0.93, 2)
    assert (found["coverage"], found["extrapolated"], found["c_in"]) == (0.9, None, None)
    refused = latbench("predict", model, "--table", TABLE, *LAYER, "--threads", "7", "--json")
    assert refused.refused(5) and refused.out == ""
