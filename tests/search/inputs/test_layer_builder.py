"""Where options come from: every pattern and sparsity that a table holds, or that a cost model covers beyond it."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from cost_models import AnchoredLookup, Boosted
from latbench.errors import BadData
from latbench.machines.devices import name_cpu
from latbench.tables.schema import SCHEMA
from latbench.tables.table import read_table
from latbench.tables.writer import write_part
from latbench.workloads.points import Point, convert_shape_to_columns
from search.deployment import Deployment
from search.inputs.layer_builder import build_network_layers, build_predicted_layers
from search.inputs.table_rows import EngineRows, read_sweep_rows, select_engine_rows
from search.problem.layers import DENSE, Option
from sparse_kernels.patterns import parse
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape


class Doubling:
    """A cost model by formula: the measured median, and between half and twice that."""

    def predict(self, X: pd.DataFrame) -> np.ndarray:
        return X["median_seconds"].to_numpy(float)

    def predict_interval(self, X: pd.DataFrame, coverage: float) -> tuple[np.ndarray, np.ndarray]:
        return self.predict(X) * (1 - coverage / 2), self.predict(X) * (1 + coverage)

    def covers(self, X: pd.DataFrame) -> np.ndarray:
        return np.zeros(len(X), bool)


LINEAR = LinearShape(m=32, k=16, n=7)
BFLOAT16 = {"dtype_w": "bfloat16", "dtype_a": "bfloat16", "kernel_requested": "bf16"}
CONV = Conv2dShape(batch=1, c_in=8, h=5, w=5, c_out=16, kh=3, kw=3, padding=(1, 1))
CONV2 = Conv2dShape(batch=1, c_in=8, h=5, w=5, c_out=16, kh=3, kw=3, padding=(1, 1), stride=(2, 2))


def on_engine(rows: pd.DataFrame, *precisions: str, patterns: list[str] | None = None) -> EngineRows:
    return select_engine_rows(rows, Deployment(2, precisions=("float32", *precisions))).with_patterns(patterns)


def table(*entries: tuple[Shape, str, float, float, dict[str, Any]]) -> pd.DataFrame:
    rows = []
    for shape, pattern, sparsity, seconds, changes in entries:
        point = Point("cpu", "numba", "auto", shape, parse(pattern), sparsity, threads=2)
        row = {**point.key(), "point_id": point.id, "status": "ok", "started_at": datetime.now(UTC)}
        rows.append({**row, "median_seconds": seconds, **changes})
    return pd.DataFrame(rows, columns=SCHEMA.names)


def test_options_are_what_the_table_holds_for_the_shape_dense_first() -> None:
    t = table(
        (LINEAR, "vector:8", 0.9, 1.0, {}),
        (LINEAR, "dense", 0.0, 4.0, {}),
        (LINEAR, "nm:2:4", 0.5, 3.0, {}),
        (LINEAR, "vector:8", 0.5, 2.0, {"status": "incorrect", "point_id": "x"}),
        (LINEAR, "vector:8", 0.75, 2.0, {"threads": 1, "point_id": "y"}),
        (LINEAR, "dense", 0.0, 0.1, {"backend": "torch", "point_id": "z"}),
        (LINEAR, "vector:8", 0.9, 0.5, {"dtype_w": "bfloat16", "kernel_requested": "bf16-weights", "point_id": "v"}),
        (LINEAR, "vector:8", 0.8, 0.6, BFLOAT16 | {"point_id": "u"}),
        (CONV, "dense", 0.0, 5.0, {}),
        (CONV2, "dense", 0.0, 6.0, {}),
    )
    found = build_predicted_layers(
        Doubling(), on_engine(t), {"x": LINEAR, "y": CONV, "z": CONV2, "w": LINEAR}, coverage=0.5
    )
    assert [one.name for one in found] == ["x", "y", "z", "w"]
    assert found[0].options == (Option("dense", 0.0), Option("nm:2:4", 0.5), Option("vector:8", 0.9))
    assert found[0].seconds.tolist() == found[3].seconds.tolist() == [4.0, 3.0, 1.0]
    assert (found[0].low[0], found[0].high[0]) == (3.0, 6.0)
    assert (found[1].seconds.tolist(), found[2].seconds.tolist()) == ([5.0], [6.0])
    narrow = build_predicted_layers(Doubling(), on_engine(t, patterns=["nm:2:4"]), {"x": LINEAR})
    assert narrow[0].options == (Option("dense", 0.0), Option("nm:2:4", 0.5))


def test_options_in_bfloat16_are_those_that_were_multiplied_so() -> None:
    t = table(
        (LINEAR, "dense", 0.0, 4.0, {}),
        (LINEAR, "unstructured", 0.9, 2.0, {}),
        (LINEAR, "vector:8", 0.9, 1.0, {}),
        (LINEAR, "vector:8", 0.9, 0.9, {"dtype_w": "bfloat16", "kernel_requested": "bf16-weights", "point_id": "v"}),
        (LINEAR, "vector:8", 0.9, 0.6, BFLOAT16 | {"point_id": "w"}),
        (LINEAR, "dense", 0.0, 1.9, BFLOAT16 | {"backend": "torch", "point_id": "x"}),
    )
    with pytest.raises(
        BadData, match=r"no time of these layers in int8 on numba with 2 threads: `latbench sweep --cpu --int8`"
    ):
        build_predicted_layers(Doubling(), on_engine(t, "bfloat16", "int8"), {"x": LINEAR})
    t = pd.concat([t, table((LINEAR, "dense", 0.0, 2.0, BFLOAT16 | {"point_id": "y"}))])
    [found] = build_predicted_layers(Doubling(), on_engine(t, "bfloat16"), {"x": LINEAR})
    assert dict(zip(found.options, found.seconds.tolist(), strict=True)) == {
        Option("dense", 0.0): 4.0, Option("dense", 0.0, "bfloat16"): 2.0, Option("unstructured", 0.9): 2.0,
        Option("vector:8", 0.9): 1.0, Option("vector:8", 0.9, "bfloat16"): 0.6,
    }  # fmt: skip
    [own] = build_predicted_layers(Doubling(), on_engine(t), {"x": LINEAR})
    assert dict(zip(own.options, own.seconds.tolist(), strict=True)) == {
        Option("dense", 0.0): 4.0, Option("unstructured", 0.9): 2.0, Option("vector:8", 0.9): 1.0
    }  # fmt: skip


def test_a_table_on_disk_of_other_shapes_alone_tells_which_options_there_are(tmp_path: Path) -> None:
    class Learned(Doubling):
        def covers(self, X: pd.DataFrame) -> np.ndarray:
            return np.ones(len(X), bool)

    def swept(shape: Shape, pattern: str, sparsity: float, **changes: Any) -> dict[str, Any]:
        point = Point("cpu", "numba", "auto", shape, parse(pattern), sparsity, threads=2)
        return {**point.key(), "purpose": "sweep", "status": "ok", "samples_seconds": [1.0], **changes}

    other, levels = LinearShape(m=64, k=24, n=9), (0.5, 0.75, 0.9)
    rows_of_table = [
        swept(other, "dense", 0.0),
        swept(CONV, "vector:8", 0.6),
        *(swept(other, "vector:8", level) for level in levels),
        *(swept(replace(other, n=n), "vector:8", 0.5) for n in range(20, 40)),
        swept(other, "nm:2:4", 0.5, threads=1),
        swept(other, "nm:2:4", 0.5, status="incorrect", samples_seconds=None),
        *(swept(other, pattern, level, **BFLOAT16) for pattern, level in (("dense", 0.0), ("vector:8", 0.8))),
    ]
    write_part(tmp_path, rows_of_table)
    rows = read_sweep_rows(tmp_path, [LINEAR], threads=2, backends=["numba"])
    [layer] = build_predicted_layers(Learned(), on_engine(rows), {"fc": LINEAR})
    assert layer.options == (Option("dense", 0.0), *(Option("vector:8", level) for level in levels))
    assert len(rows) == 8  # of twenty more of the same kinds none
    rows = read_sweep_rows(tmp_path, [other], threads=2, backends=["numba"])
    [layer] = build_predicted_layers(Doubling(), on_engine(rows), {"fc": other})
    assert layer.options == (Option("dense", 0.0), *(Option("vector:8", level) for level in levels))
    rows = read_sweep_rows(tmp_path, [other], threads=2, backends=["numba"])
    [layer] = build_predicted_layers(Doubling(), on_engine(rows, "bfloat16"), {"fc": other})
    halves = [option for option in layer.options if option.precision == "bfloat16"]
    assert halves == [Option("dense", 0.0, "bfloat16"), Option("vector:8", 0.8, "bfloat16")]


def test_a_layer_that_was_not_swept_is_named() -> None:
    t = table((LINEAR, "vector:8", 0.9, 1.0, {}))
    with pytest.raises(
        BadData, match=r"no valid dense time of layer fc \(linear 32x16 on 7\) on numba with 2 threads"
    ):
        build_predicted_layers(Doubling(), on_engine(t), {"fc": LINEAR})


def test_convolutions_are_told_apart_by_every_column() -> None:
    assert convert_shape_to_columns(CONV) != convert_shape_to_columns(CONV2)


def in_network(name: str, shape: Shape, sparsity: float, *samples: float, **changes: Any) -> dict[str, Any]:
    row = {
        "purpose": "sweep", "device": name_cpu(), "backend": "deepsparse", "model": f"net:{name}",
        "pattern": "unstructured" if sparsity else "dense", "sparsity_target": sparsity, "context": "network",
        "threads": 2, "status": "ok", "samples_seconds": list(samples),
    }  # fmt: skip
    return row | convert_shape_to_columns(shape) | changes


def written(folder: Path, *rows: dict[str, Any]) -> pd.DataFrame:
    write_part(folder, rows)
    return read_table(folder)


def test_layers_inside_a_network_take_what_was_measured_at_their_place(tmp_path: Path) -> None:
    t = written(
        tmp_path,
        in_network("a", LINEAR, 0.9, 1.0), in_network("a", LINEAR, 0.0, 4.0), in_network("a", LINEAR, 0.5, 5.0),
        in_network("b", LINEAR, 0.0, 3.0),  # the same shape elsewhere takes another time
        in_network("a", LINEAR, 0.75, 2.0, threads=1), in_network("a", LINEAR, 0.6, 2.0, device="another"),
        in_network("a", LINEAR, 0.8, 2.0, purpose="verify"), in_network("a", LINEAR, 0.95, 2.0, backend="numba"),
        in_network("a", LINEAR, 0.85, 2.0, n=8), in_network("a", LINEAR, 0.7, 2.0, context="isolated"),
    )  # fmt: skip
    a, b = build_network_layers(t, "net", {"a": LINEAR, "b": LINEAR}, threads=2, batch=7)
    assert a.options == (Option(DENSE, 0.0), Option("unstructured", 0.5), Option("unstructured", 0.9))
    assert a.seconds.tolist() == a.low.tolist() == a.high.tolist() == [4.0, 5.0, 1.0]  # each was run once
    assert (b.options, b.seconds.tolist()) == ((Option(DENSE, 0.0),), [3.0])
    with pytest.raises(
        BadData,
        match="no dense time of layer c inside net on deepsparse with 2 threads and batch 7: `latbench layers`",
    ):
        build_network_layers(t, "net", {"a": LINEAR, "c": LINEAR}, threads=2, batch=7)
    with pytest.raises(BadData, match="no dense time of layer a inside other"):
        build_network_layers(t, "other", {"a": LINEAR}, threads=2, batch=7)


def test_intervals_inside_a_network_hold_one_more_run(tmp_path: Path, rng: np.random.Generator) -> None:
    runs = np.exp(0.05 * rng.standard_normal((150, 4)))
    shapes = {f"fc{i}": LINEAR for i in range(len(runs))}
    rows = [in_network(name, LINEAR, 0.0, *run[:3]) for name, run in zip(shapes, runs, strict=True)]
    layers = build_network_layers(written(tmp_path, *rows), "net", shapes, threads=2, batch=7, coverage=0.8)
    held = [layer.low[0] <= run[3] <= layer.high[0] for layer, run in zip(layers, runs, strict=True)]
    # Medians of two others scatter more than of all three, which holds 1% more; then three standard deviations.
    assert abs(np.mean(held) - 0.81) <= 3 * (0.81 * 0.19 / len(runs)) ** 0.5


def test_of_several_kernels_it_is_the_one_that_a_model_runs() -> None:
    changes = {"kernel_requested": "tuned", "point_id": "t"}
    t = table(
        (LINEAR, "dense", 0.0, 4.0, {}),
        (LINEAR, "vector:8", 0.9, 0.5, changes),
        (LINEAR, "vector:8", 0.9, 1.0, {}),
    )
    assert build_predicted_layers(Doubling(), on_engine(t), {"x": LINEAR})[0].seconds.tolist() == [4.0, 1.0]


def measured(shape: LinearShape, pattern: str, *sparsities: float) -> list[tuple[Shape, str, float, float, dict]]:
    work = shape.m * shape.k * shape.n
    return [(shape, pattern, s, 1e-9 * (work * (1 - s) + 1000), {}) for s in sparsities]


def test_a_look_up_knows_what_lies_between_measured_sparsities() -> None:
    t = table(
        *measured(LINEAR, "dense", 0.0), *measured(LINEAR, "nm:2:4", 0.5),
        *measured(LINEAR, "vector:8", 0.5, 0.6, 0.75, 0.8, 0.9), *measured(LINEAR, "unstructured", 0.75, 0.8, 0.9),
    )  # fmt: skip
    model = AnchoredLookup().fit(t, t["median_seconds"])
    (layer,) = build_predicted_layers(
        model, on_engine(t), {"x": LINEAR}, sparsities=(0.4, 0.7, 0.85, 0.95), coverage=0.5
    )
    assert layer.options == (
        Option(DENSE, 0.0), Option("nm:2:4", 0.5), Option("vector:8", 0.7), Option("unstructured", 0.85),
        Option("vector:8", 0.85),
    )  # fmt: skip
    expected = [1e-9 * (32 * 16 * 7 * (1 - it.sparsity) + 1000) for it in layer.options]
    assert layer.seconds == pytest.approx(expected, rel=0.02)
    with pytest.raises(BadData, match=r"no valid dense time of layer y .* the cost model knows none"):
        build_predicted_layers(model, on_engine(t), {"y": LinearShape(m=32, k=16, n=9)}, sparsities=(0.7,))


def test_a_learned_model_knows_shapes_between_those_that_were_swept() -> None:
    shapes = [LinearShape(m=m, k=k, n=16) for m in (16, 32, 64) for k in (16, 64)]
    rows = [row for s in shapes for row in measured(s, "dense", 0.0) + measured(s, "vector:8", 0.5, 0.75, 0.9)]
    t = table(*rows)
    model = Boosted(max_iter=10).fit(t, t["median_seconds"])
    wanted = {"known": shapes[0], "between": LinearShape(m=48, k=32, n=16)}
    known, between = build_predicted_layers(model, on_engine(t), wanted, coverage=0.5)
    assert (
        known.options == between.options == (Option(DENSE, 0.0), *(Option("vector:8", s) for s in (0.5, 0.75, 0.9)))
    )
    # Where nothing but dense was measured of a shape, too.
    dense_only = pd.concat([t, table(*measured(wanted["between"], "dense", 0.0))])
    assert build_predicted_layers(model, on_engine(dense_only), wanted, coverage=0.5)[1].options == known.options
    _, finer = build_predicted_layers(model, on_engine(t), wanted, sparsities=(0.45, 0.6, 0.95), coverage=0.5)
    assert finer.options == (Option(DENSE, 0.0), Option("vector:8", 0.6))
    with pytest.raises(BadData, match=r"layer far .* the cost model knows none"):
        build_predicted_layers(model, on_engine(t), {"far": LinearShape(m=640, k=32, n=16)})
    # No groups of four cross from one tap to the next: a pattern that a shape refuses is no option of it.
    conv = table((CONV, "dense", 0.0, 1.0, {}), (CONV, "nm:2:4", 0.5, 1.0, {}))
    odd = Conv2dShape(batch=1, c_in=6, h=5, w=5, c_out=16, kh=3, kw=3, padding=(1, 1))

    class Anything(Doubling):
        def covers(self, X: pd.DataFrame) -> np.ndarray:
            return np.ones(len(X), bool)

    assert build_predicted_layers(Anything(), on_engine(conv), {"x": odd})[0].options == (Option(DENSE, 0.0),)
