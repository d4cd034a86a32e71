"""Errors of layers: of outputs, of weights, or a user's own."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from latbench.errors import BadData
from search.artifacts.layer_database import Database, Entry
from search.inputs import layer_errors
from search.inputs.layer_errors import read_errors
from search.problem.layers import DENSE, Interval, LayerOptions, Option, tie_layers
from search.problem.problem import Problem
from sparse_kernels.prunable_layers import weight_matrix

OPTIONS = (Option(DENSE, 0.0), Option("unstructured", 0.5), Option("vector:2", 0.5))
NAMES = ("0", "2")


def problem() -> Problem:
    zeros = np.zeros(3)
    layers = [LayerOptions(name, OPTIONS, zeros, zeros, zeros, zeros * np.nan) for name in NAMES]
    return Problem((tie_layers(layers),), Interval(0, 0, 0), Interval(1, 1, 1), "torch")


def test_errors_of_outputs_and_weights_come_from_the_database(tmp_path: Path, rng: np.random.Generator) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(16, 6))
    database = Database(tmp_path, "hash")
    expected: dict[str, dict[Option, float]] = {name: {} for name in NAMES}
    for name in NAMES:
        dense = weight_matrix(model.get_submodule(name)).detach()
        for option in OPTIONS[1:]:
            mask = torch.from_numpy(rng.random(tuple(dense.shape)) < 0.5)
            pruned = dense * mask * 1.25
            database.put(name, option, Entry(pruned, mask, float(rng.random())))
            change = (pruned.double() - dense.double()).square().sum() / dense.double().square().sum()
            expected[name][option] = float(change)
    weights = layer_errors.compute_weight_errors(problem(), database, model)
    assert {name: own == pytest.approx(expected[name]) for name, own in weights.items()} == dict.fromkeys(NAMES, True)
    outputs = layer_errors.read_output_errors(problem(), database)
    assert outputs["2"][OPTIONS[1]] == database.error("2", OPTIONS[1])
    (layer,) = problem().with_errors(weights).layers
    assert layer.errors.tolist() == pytest.approx([0.0, *(sum(weights[n][o] for n in NAMES) for o in OPTIONS[1:])])


def test_outputs_that_overflow_rule_an_option_out(tmp_path: Path) -> None:
    database = Database(tmp_path, "hash")
    for name in NAMES:
        for option, error in zip(OPTIONS[1:], (0.5, np.nan), strict=True):
            database.put(name, option, Entry(torch.ones(2, 2), torch.ones(2, 2, dtype=bool), error))
    p = problem().with_errors(layer_errors.read_output_errors(problem(), database))
    assert p.layers[0].options == OPTIONS[:2]


def test_a_users_own_errors_are_read_from_a_file(tmp_path: Path) -> None:
    rows = [(name, it.pattern, it.sparsity, 0.25 * j) for name in NAMES for j, it in enumerate(OPTIONS)]
    frame = pd.DataFrame(rows, columns=["layer", "pattern", "sparsity", "error"])
    frame.to_csv(tmp_path / "errors.csv", index=False)
    frame.to_parquet(tmp_path / "errors.parquet")
    for name in ("errors.csv", "errors.parquet"):
        read = read_errors(tmp_path / name)
        assert read == {name: {it: 0.25 * j for j, it in enumerate(OPTIONS)} for name in NAMES}
    assert problem().with_errors(frame).errors[0].tolist() == [0.0, 0.5, 1.0]


def test_a_layer_s_name_is_no_number_whatever_it_looks_like(tmp_path: Path) -> None:
    path = tmp_path / "errors.csv"
    path.write_text("layer,pattern,sparsity,error\n0.1,vector:2,0.5,1\n0.10,vector:2,0.5,2\n1e3,vector:2,0.5,3\n")
    assert {name: list(own.values()) for name, own in read_errors(path).items()} == {
        "0.1": [1.0], "0.10": [2.0], "1e3": [3.0],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layer,pattern,sparsity\n0,dense,0\n", r"errors\.csv: .* error missing"),
        ("layer,pattern,sparsity,error\n0,rows,0.5,1\n", r"errors\.csv: layer 0: .*rows"),
        ("layer,pattern,sparsity,error\n0,nm:2:4,0.6,1\n", "nm:2:4 has a sparsity of 0.5 and no other"),
        ("layer,pattern,sparsity,error\n0,vector:2,0.5,1\n0,vector:2,0.5,2\n", "layer 0 has two errors as vector:2"),
        ("layer,pattern,sparsity,error\n0,vector:2,0.5,high\n", "layer 0: .*high"),
        ("layer,pattern,sparsity,error\n0,vector:2,0.5,\n", "layer 0 has no error as vector:2 at 0.5: write inf"),
        ("layer,pattern,sparsity,error\n0,dense,0,0\n,vector:2,0.5,1\n", "for a layer whose name is blank"),
        ("", r"errors\.csv: no CSV or Parquet file that can be read"),
    ],
)  # fmt: skip
def test_a_file_of_no_errors_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "errors.csv").write_text(text)
    with pytest.raises(BadData, match=said):
        read_errors(tmp_path / "errors.csv")
    with pytest.raises(BadData, match=r"none\.csv: no CSV or Parquet file"):
        read_errors(tmp_path / "none.csv")
