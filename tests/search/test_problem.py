"""Problems: options from a table, budgets that the unfavourable ends must keep, uniform profiles, honest refusals."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from latbench import devices, tables
from latbench.errors import BadData
from latbench.plan import Point, shape_columns
from search.problem import (
    DENSE,
    Interval,
    Layer,
    Option,
    Problem,
    at_least_as_free,
    measured_layers,
    predicted_layers,
    uniform_choice,
)
from search.solve import Infeasible
from sparse_kernels.formats import pack
from sparse_kernels.patterns import parse
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

OPTIONS = (Option(DENSE, 0.0), Option("vector:8", 0.5), Option("vector:8", 0.9), Option("unstructured", 0.5))


def layer(name: str, seconds: Sequence[float], errors: Sequence[float], spread: float = 0.1) -> Layer:
    t = np.array(seconds)
    return Layer(name, OPTIONS[: len(t)], t, t * (1 - spread), t * (1 + spread), np.array(errors))


def problem() -> Problem:
    return Problem(
        layers=(
            layer("a", [4.0, 2.0, 1.0, 3.0], [0.0, 0.1, 0.4, 0.05]),
            layer("b", [6.0, 3.0, 1.0, 5.0], [0.0, 0.2, 0.9, 0.1]),
        ),
        fixed=Interval(1.0, 0.8, 1.2),
        dense=Interval(10.0, 9.9, 10.1),
        dense_engine="onnxruntime",
    )


def test_the_unfavourable_ends_must_keep_the_promise() -> None:
    p = problem()
    assert p.budget(2.0) == 9.9 / 2 - 1.2
    predicted = p.predict((2, 2))
    assert (predicted.value, predicted.low, predicted.high) == pytest.approx((3.0, 2.6, 3.4), rel=1e-15)
    speedup = p.speedup(predicted)
    assert (speedup.value, speedup.low, speedup.high) == pytest.approx((10 / 3, 9.9 / 3.4, 10.1 / 2.6), rel=1e-15)
    solution = p.solve(2.0)
    assert p.speedup(p.predict(solution.choice)).low >= 2.0
    assert solution.choice == (1, 2)  # by hand: (1, 1) takes 5.5 s at its upper end and (2, 1) 4.4 s, of 3.75 s


def test_the_ceiling_is_what_free_layers_would_give() -> None:
    assert problem().ceiling == 10.0
    free = Problem(problem().layers, Interval(-0.1, -0.2, 0.0), Interval(1, 1, 1), "torch")
    assert free.ceiling is None


def test_infeasible_is_said_with_the_best_its_interval_and_the_rest() -> None:
    sentence = (
        r"^target 4x is infeasible: the best is 3\.33x \(2\.91-3\.88x\); "
        r"10% of the time is in layers that cannot be pruned\.$"
    )
    with pytest.raises(Infeasible, match=sentence) as caught:
        problem().solve(4.0)
    assert caught.value.fastest_seconds == pytest.approx(2.2)
    with pytest.raises(Infeasible, match=r"target 3.2x is infeasible: .* lower end must reach the target .*--risk"):
        problem().solve(3.2)


def test_uniform_profiles_are_the_mildest_that_fit_the_least_error_first() -> None:
    p = problem()
    assert p.uniforms(2.0) == [(2, 2)]
    assert p.uniforms(1.4) == [(1, 1)]
    assert p.uniforms(0.98) == [(3, 3), (1, 1)]
    assert p.uniforms(0.98, "vector:8") == [(1, 1)]
    assert p.uniform(0.98) == (3, 3)
    with pytest.raises(Infeasible, match="no uniform unstructured reaches 2x"):
        p.uniform(2.0, "unstructured")


def test_a_layer_without_the_option_stays_dense_in_a_uniform_profile() -> None:
    p = problem()
    short = Problem((p.layers[0], layer("b", [6.0], [0.0])), p.fixed, p.dense, p.dense_engine)
    assert uniform_choice(short.layers, Option("vector:8", 0.9)) == (2, 0)


def test_options_that_nothing_efficient_needs_are_left_out() -> None:
    slow = layer("a", [2.0, 1.0, 1.5, 2.5], [0.0, np.nan, np.nan, np.nan])
    p = Problem((slow,), Interval(0, 0, 0), Interval(9, 9, 9), "torch").without_hopeless()
    assert p.layers[0].options == (OPTIONS[0], OPTIONS[1])
    assert p.layers[0].seconds.tolist() == [2.0, 1.0]


def test_a_pattern_that_is_freer_and_no_slower_makes_another_hopeless() -> None:
    options = tuple(
        Option(p, 0.5) for p in ("unstructured", "shflbw:8", "vector:8", "block:16x8", "nm:2:4", "vector:4")
    )
    t = np.array([9.0, 3.0, 3.0, 3.0, 9.5, 2.9])
    one = Layer("a", options, t, t, t, np.zeros(6))
    left = Problem((one,), Interval(0, 0, 0), Interval(9, 9, 9), "torch").without_hopeless().layers[0].options
    # shflbw:8 is no slower than vector:8; vector:4 than block:16x8; unstructured than nm:2:4.
    assert [option.pattern for option in left] == ["unstructured", "shflbw:8", "vector:4"]


@pytest.mark.parametrize(
    ("freer", "other"),
    [
        ("unstructured", "nm:2:4"), ("shflbw:8", "vector:16"), ("shflbw:8", "shflbw:16"),
        ("vector:4", "vector:8"), ("vector:8", "block:16x3"), ("shflbw:4", "block:8x1"), ("block:4x4", "block:8x4"),
        ("vector:4", "vectornm:8:2:4"), ("unstructured", "vectornm:8:2:4"),
    ],
)  # fmt: skip
def test_every_mask_of_a_pattern_is_one_of_a_freer_pattern(freer: str, other: str, rng: np.random.Generator) -> None:
    assert at_least_as_free(parse(freer), parse(other))
    assert not at_least_as_free(parse(other), parse(freer))
    if freer == "unstructured":
        return
    mask = parse(other).mask(rng.random((32, 16)), 0.5)
    pack(np.ones((32, 16), np.float32) * mask, mask, parse(freer))  # refuses a mask that is not of its pattern


def test_scaling_and_errors_change_only_what_they_say() -> None:
    p = problem().scaled(0.5)
    assert p.layers[0].high.tolist() == (problem().layers[0].high * 0.5).tolist()
    errors = {name: dict.fromkeys(OPTIONS, 7.0) for name in ("a", "b")}
    assert p.with_errors(errors).layers[1].errors.tolist() == [0.0, 7.0, 7.0, 7.0]


def test_a_measurement_becomes_the_prediction_for_what_was_measured() -> None:
    measured, dense = Interval(7.0, 6.5, 7.5), Interval(11.0, 10.8, 11.2)
    p = problem().calibrated((1, 1), measured, dense, "torch")
    found = p.predict((1, 1))
    assert (found.value, found.low, found.high) == pytest.approx((7.0, 6.5, 7.5))
    assert p.budget(1.1) == pytest.approx(11.0 / 1.1 - 1.0)  # the ratio's noise is in `measured` already
    faster = p.predict((2, 2))
    assert faster.value == pytest.approx(1.0 + 2.0 * 6.0 / 5.0)
    assert faster.low < faster.value < faster.high
    tiny = problem().calibrated((1, 1), Interval(0.9, 0.8, 1.0), dense, "torch")
    assert tiny.predict((1, 1)).value == pytest.approx(0.9)


class Doubling:
    """A cost model by formula: the measured median, and between half and twice that."""

    def predict(self, X: pd.DataFrame) -> np.ndarray:
        return X["median_seconds"].to_numpy(float)

    def predict_interval(self, X: pd.DataFrame, coverage: float) -> tuple[np.ndarray, np.ndarray]:
        return self.predict(X) * (1 - coverage / 2), self.predict(X) * (1 + coverage)


LINEAR = LinearShape(m=32, k=16, n=7)
CONV = Conv2dShape(batch=1, c_in=8, h=5, w=5, c_out=16, kh=3, kw=3, padding=(1, 1))
CONV2 = Conv2dShape(batch=1, c_in=8, h=5, w=5, c_out=16, kh=3, kw=3, padding=(1, 1), stride=(2, 2))


def table(*entries: tuple[Shape, str, float, float, dict[str, Any]]) -> pd.DataFrame:
    rows = []
    for shape, pattern, sparsity, seconds, changes in entries:
        point = Point("cpu", "numba", "auto", shape, parse(pattern), sparsity, threads=2)
        row = {**point.key(), "point_id": point.id, "status": "ok", "started_at": datetime.now(UTC)}
        rows.append({**row, "median_seconds": seconds, **changes})
    return pd.DataFrame(rows, columns=tables.SCHEMA.names)


def test_options_are_what_the_table_holds_for_the_shape_dense_first() -> None:
    t = table(
        (LINEAR, "vector:8", 0.9, 1.0, {}),
        (LINEAR, "dense", 0.0, 4.0, {}),
        (LINEAR, "nm:2:4", 0.5, 3.0, {}),
        (LINEAR, "vector:8", 0.5, 2.0, {"status": "incorrect", "point_id": "x"}),
        (LINEAR, "vector:8", 0.75, 2.0, {"threads": 1, "point_id": "y"}),
        (LINEAR, "dense", 0.0, 0.1, {"backend": "torch", "point_id": "z"}),
        (LINEAR, "vector:8", 0.9, 0.5, {"dtype_w": "bfloat16", "kernel_requested": "bf16", "point_id": "v"}),
        (CONV, "dense", 0.0, 5.0, {}),
        (CONV2, "dense", 0.0, 6.0, {}),
    )
    found = predicted_layers(
        Doubling(), t, {"x": LINEAR, "y": CONV, "z": CONV2, "w": LINEAR}, threads=2, coverage=0.5
    )
    assert [one.name for one in found] == ["x", "y", "z", "w"]
    assert found[0].options == (Option("dense", 0.0), Option("nm:2:4", 0.5), Option("vector:8", 0.9))
    assert found[0].seconds.tolist() == found[3].seconds.tolist() == [4.0, 3.0, 1.0]
    assert (found[0].low[0], found[0].high[0]) == (3.0, 6.0)
    assert (found[1].seconds.tolist(), found[2].seconds.tolist()) == ([5.0], [6.0])
    narrow = predicted_layers(Doubling(), t, {"x": LINEAR}, threads=2, patterns=["nm:2:4"])
    assert narrow[0].options == (Option("dense", 0.0), Option("nm:2:4", 0.5))


def test_a_layer_that_was_not_swept_is_named() -> None:
    t = table((LINEAR, "vector:8", 0.9, 1.0, {}))
    with pytest.raises(
        BadData, match=r"no valid dense time of layer fc \(linear 32x16 on 7\) on numba with 2 threads"
    ):
        predicted_layers(Doubling(), t, {"fc": LINEAR}, threads=2)


def test_convolutions_are_told_apart_by_every_column() -> None:
    assert shape_columns(CONV) != shape_columns(CONV2)


def in_network(name: str, shape: Shape, sparsity: float, *samples: float, **changes: Any) -> dict[str, Any]:
    row = {
        "purpose": "sweep", "device": devices.cpu_device(), "backend": "deepsparse", "model": f"net:{name}",
        "pattern": "unstructured" if sparsity else "dense", "sparsity_target": sparsity, "context": "network",
        "threads": 2, "status": "ok", "samples_seconds": list(samples),
    }  # fmt: skip
    return row | shape_columns(shape) | changes


def written(folder: Path, *rows: dict[str, Any]) -> pd.DataFrame:
    tables.write_part(folder, rows)
    return tables.read(folder)


def test_layers_inside_a_network_take_what_was_measured_at_their_place(tmp_path: Path) -> None:
    t = written(
        tmp_path,
        in_network("a", LINEAR, 0.9, 1.0), in_network("a", LINEAR, 0.0, 4.0), in_network("a", LINEAR, 0.5, 5.0),
        in_network("b", LINEAR, 0.0, 3.0),  # the same shape elsewhere takes another time
        in_network("a", LINEAR, 0.75, 2.0, threads=1), in_network("a", LINEAR, 0.6, 2.0, device="another"),
        in_network("a", LINEAR, 0.8, 2.0, purpose="verify"), in_network("a", LINEAR, 0.95, 2.0, backend="numba"),
        in_network("a", LINEAR, 0.85, 2.0, n=8), in_network("a", LINEAR, 0.7, 2.0, context="isolated"),
    )  # fmt: skip
    a, b = measured_layers(t, "net", {"a": LINEAR, "b": LINEAR}, threads=2, batch=7)
    assert a.options == (Option(DENSE, 0.0), Option("unstructured", 0.5), Option("unstructured", 0.9))
    assert a.seconds.tolist() == a.low.tolist() == a.high.tolist() == [4.0, 5.0, 1.0]  # each was run once
    assert (b.options, b.seconds.tolist()) == ((Option(DENSE, 0.0),), [3.0])
    with pytest.raises(
        BadData,
        match="no dense time of layer c inside net on deepsparse with 2 threads and batch 7: `latbench layers`",
    ):
        measured_layers(t, "net", {"a": LINEAR, "c": LINEAR}, threads=2, batch=7)
    with pytest.raises(BadData, match="no dense time of layer a inside other"):
        measured_layers(t, "other", {"a": LINEAR}, threads=2, batch=7)


def test_intervals_inside_a_network_hold_one_more_run(tmp_path: Path, rng: np.random.Generator) -> None:
    runs = np.exp(0.05 * rng.standard_normal((150, 4)))
    shapes = {f"fc{i}": LINEAR for i in range(len(runs))}
    rows = [in_network(name, LINEAR, 0.0, *run[:3]) for name, run in zip(shapes, runs, strict=True)]
    layers = measured_layers(written(tmp_path, *rows), "net", shapes, threads=2, batch=7, coverage=0.8)
    held = [layer.low[0] <= run[3] <= layer.high[0] for layer, run in zip(layers, runs, strict=True)]
    # Medians of two others scatter more than of all three, which holds 1% more; then three standard deviations.
    assert abs(np.mean(held) - 0.81) <= 3 * (0.81 * 0.19 / len(runs)) ** 0.5


def test_whatever_fits_the_budget_keeps_the_promise_to_the_last_bit(rng: np.random.Generator) -> None:
    missed = 0
    for _ in range(300):
        fixed, dense, target = float(rng.uniform(0.1, 1)), float(rng.uniform(5, 9)), float(rng.uniform(1.1, 3))
        room = dense / target - fixed
        p = Problem((), Interval(fixed, fixed, fixed), Interval(dense, dense, dense), "torch")
        for seconds in (p.budget(target), room):
            one = Layer("a", (Option(DENSE, 0.0),), *(np.array([seconds]),) * 3, np.zeros(1))
            kept = replace(p, layers=(one,))
            if seconds <= p.budget(target):
                assert kept.speedup(kept.predict((0,))).low >= target
            else:
                missed += kept.speedup(kept.predict((0,))).low < target
    assert missed > 10  # as a plain difference would


def test_options_with_an_error_that_is_not_finite_cannot_be_had() -> None:
    errors = {name: {OPTIONS[1]: 1.0, OPTIONS[2]: np.inf, OPTIONS[3]: np.nan} for name in ("a", "b")}
    assert [layer.options for layer in problem().with_errors(errors).layers] == [OPTIONS[:2]] * 2


def test_uniform_profiles_are_not_worse_for_options_that_were_left_out() -> None:
    fast = layer("a", [9.0, 1.0, 1.5, 1.4], [0.0, np.nan, np.nan, np.nan])
    p = Problem((fast, problem().layers[1]), Interval(0, 0, 0), Interval(9, 9, 9), "torch").without_hopeless()
    assert Option("vector:8", 0.9) not in p.layers[0].options
    assert uniform_choice(p.layers, Option("vector:8", 0.9))[0] == 1  # at 50% it is faster


def test_a_model_whose_layers_take_no_time_is_corrected_around_them() -> None:
    free = layer("a", [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0])
    dense = Interval(4.0, 4.0, 4.0)
    p = Problem((free,), Interval(1, 1, 1), dense, "torch").calibrated((0,), Interval(2.0, 1.9, 2.1), dense, "torch")
    assert p.predict((0,)) == Interval(2.0, 1.9, 2.1)
