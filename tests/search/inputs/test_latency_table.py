"""Problems from tables that latbench measured: by shape, by name inside a network, and by the command."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import cost_models
from cost_models import AnchoredLookup
from latbench.backends.cpu.deepsparse import Operation
from latbench.cli import main
from latbench.errors import BadData, UsageError
from latbench.importers.text_formats import convert_spdy_to_rows, read_spdy
from latbench.tables.schema import KEY_COLUMNS, SCHEMA
from latbench.tables.table import hash_table, read_table
from latbench.tables.writer import write_part
from latbench.workloads.points import FINE_SPARSITIES, Point
from latbench.workloads.workload import Layer, Workload, write_workload
from search.inputs import problem_from_spdy, problem_from_table
from search.inputs.latency_table import list_shapes
from search.pipeline.measure_in_network import build_layer_rows
from search.problem.layers import DENSE, Interval, Option
from sparse_kernels.patterns import parse
from sparse_kernels.shapes import LinearShape

A, B = LinearShape(m=32, k=16, n=7), LinearShape(m=64, k=32, n=7)


def swept(*entries: tuple[LinearShape, str, float, float, dict[str, Any]]) -> pd.DataFrame:
    rows = []
    for shape, pattern, sparsity, seconds, changes in entries:
        point = Point("cpu", changes.pop("backend", "numba"), "auto", shape, parse(pattern), sparsity, threads=2)
        rows.append({
            **point.key(), "point_id": point.id, "status": "ok", "started_at": datetime.now(UTC),
            "median_seconds": seconds, "low_seconds": seconds * 0.9, "high_seconds": seconds * 1.1, **changes,
        })  # fmt: skip
    return pd.DataFrame(rows, columns=SCHEMA.names)


def a_table() -> pd.DataFrame:
    return swept(
        (A, "dense", 0.0, 4.0, {}), (A, "vector:8", 0.5, 2.5, {}), (A, "vector:8", 0.75, 1.5, {}),
        (A, "nm:2:4", 0.5, 3.0, {}),
        (B, "dense", 0.0, 8.0, {}), (B, "vector:8", 0.5, 5.0, {}), (B, "vector:8", 0.75, 3.0, {}),
        (A, "dense", 0.0, 3.0, {"backend": "torch"}), (B, "dense", 0.0, 6.0, {"backend": "torch"}),
        (A, "dense", 0.0, 1.0, {"backend": "onnxruntime"}),
    )  # fmt: skip


def test_a_swept_table_gives_layers_by_their_shapes() -> None:
    p = problem_from_table(a_table(), {"a": A, "b": B, "c": A})
    assert [layer.name for layer in p.layers] == ["a", "b", "c"]
    assert p.layers[0].seconds.tolist() == p.layers[2].seconds.tolist() == [4.0, 3.0, 2.5, 1.5]
    assert p.layers[1].high.tolist() == pytest.approx([8.8, 5.5, 3.3])
    # The fastest engine with a time of every layer: 3 + 6 + 3.
    assert (p.dense, p.dense_engine) == (Interval(12.0, pytest.approx(10.8), pytest.approx(13.2)), "torch")
    p = problem_from_table(a_table(), {"a": A, "b": B}, patterns=["vector:8"], sparsities=[0.75], dense_seconds=20.0)
    assert [list(map(str, layer.options)) for layer in p.layers] == [["dense", "vector:8 at 0.75"]] * 2
    assert (p.dense.value, p.fixed.value) == (20.0, 8.0)


def test_a_workload_is_its_layers_one_by_one(tmp_path: Path) -> None:
    layers = (Layer("qkv", A, count=3), Layer("out", B))
    write_workload(Workload("w", "made up", layers), tmp_path / "w.yaml")
    p = problem_from_table(a_table(), str(tmp_path / "w.yaml"))
    assert [layer.name for layer in p.layers] == ["qkv#1", "qkv#2", "qkv#3", "out"]


def test_a_cost_model_gives_sparsities_that_were_not_measured() -> None:
    table = a_table()
    own = table[table["backend"] == "numba"]
    model = AnchoredLookup().fit(own.drop(columns=["low_seconds", "high_seconds"]), own["median_seconds"])

    class Exact:
        def predict(self, X: pd.DataFrame) -> np.ndarray:
            return model.predict(X)

        def covers(self, X: pd.DataFrame) -> np.ndarray:
            return model.covers(X)

        def predict_interval(self, X: pd.DataFrame, coverage: float) -> tuple[np.ndarray, np.ndarray]:
            return model.predict(X), model.predict(X)

    p = problem_from_table(table, {"a": A, "b": B}, model=Exact(), sparsities=[0.6, 0.9])
    assert [list(map(str, layer.options)) for layer in p.layers] == [
        ["dense", "nm:2:4 at 0.5", "vector:8 at 0.6"], ["dense", "vector:8 at 0.6"],
    ]  # fmt: skip
    assert 1.5 < p.layers[0].seconds[2] < 2.5


@pytest.mark.parametrize("backend", ["torch-bf16", "torch-mkldnn", "openvino-bf16"])
def test_engines_of_whole_models_have_no_rows_of_layers(backend: str) -> None:
    with pytest.raises(BadData, match=f"the table holds no swept layer on {backend}"):
        problem_from_table(a_table(), {"a": A}, backend=backend)


def test_what_a_table_does_not_settle_has_to_be_said() -> None:
    t = a_table()
    both = pd.concat([t, t.assign(threads=1, point_id=lambda it: it["point_id"] + "1")])
    with pytest.raises(UsageError, match=r"the table has threads 1 and 2: choose one, threads=\.\.\."):
        problem_from_table(both, {"a": A})
    assert problem_from_table(both, {"a": A}, threads=1).layers[0].seconds[0] == 4.0
    with pytest.raises(UsageError, match="the table has no threads 3, but 2"):
        problem_from_table(t, {"a": A}, threads=3)
    with pytest.raises(UsageError, match="sparse layers were timed on no backend"):
        problem_from_table(t[t["pattern"] == DENSE], {"a": A})
    with pytest.raises(
        BadData, match=r"no time of layer c \(linear 1x1 on 1\): sweep its shape, or give a cost model"
    ):
        problem_from_table(t, {"a": A, "c": LinearShape(m=1, k=1, n=1)})
    with pytest.raises(UsageError, match="no layers inside a network: give the shapes of layers, such as a workload"):
        problem_from_table(t)
    with pytest.raises(BadData, match="no engine's dense times of all layers"):
        problem_from_table(t[(t["pattern"] != DENSE) | (t["backend"] == "onnxruntime")], {"a": A, "b": B})


def test_layers_timed_inside_a_network_go_by_their_names(data: Path, tmp_path: Path) -> None:
    path = data / "spdy_tables" / "rn18_unstr.txt"
    rows = convert_spdy_to_rows(read_spdy(path), network="rn18", pattern="unstructured", device="a-cpu")
    write_part(tmp_path, rows)
    p, expected = problem_from_table(tmp_path).with_prior(), problem_from_spdy(path)
    assert [layer.name for layer in p.layers] == [layer.name for layer in expected.layers]
    assert p.dense.value == expected.dense.value
    assert p.fixed.value == pytest.approx(expected.fixed.value, abs=1e-5)  # the file says the sum to five digits
    assert p.solve(2.0).error == pytest.approx(expected.solve(2.0).error, rel=1e-3)
    with pytest.raises(UsageError, match="the table has no network rn50, but rn18"):
        problem_from_table(tmp_path, network="rn50")


def test_the_command_solves_a_table_with_its_cost_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    levels = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
    rows = [
        (shape, pattern, s, 1e-3 * shape.m * (1 - s), {})
        for shape in (A, B)
        for pattern, s in [("dense", 0.0), *(("vector:8", level) for level in levels)]
    ]
    columns = [field.name for field in KEY_COLUMNS] + ["status", "started_at"]
    made = swept(*rows)[columns].astype(object)
    records = made.where(made.notna(), None).to_dict("records")
    timed = [{**record, "samples_seconds": [row[3]] * 5} for record, row in zip(records, rows, strict=True)]
    table, layers = str(tmp_path / "table"), (Layer("a", A), Layer("b", B))
    write_part(table, timed)
    X, seconds = cost_models.read_training_rows(table, {})
    cost_models.save(tmp_path / "m.json", AnchoredLookup().fit(X, seconds), hash_table(table), X)
    write_workload(Workload("w", "made up", layers), tmp_path / "w.yaml")
    chosen = {}
    for name, more in (
        ("measured", []),
        ("predicted", ["--cost-model", str(tmp_path / "m.json"), "--sparsities", "fine"]),
    ):
        out = tmp_path / f"{name}.csv"
        words = [table, "--workload", str(tmp_path / "w.yaml"), "--target", "3.5", "-o", str(out), *more]
        monkeypatch.setattr(sys, "argv", ["latbench", "solve", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert (ended.value.code or 0, capsys.readouterr().err) == (0, "")
        chosen[name] = set(pd.read_csv(out)["sparsity"])
    assert chosen["measured"] <= {0.0, *levels}
    assert chosen["predicted"] <= {0.0, *FINE_SPARSITIES} and not chosen["predicted"] <= {0.0, *levels}


# Inside a network ---------------------------------------------------------------------------------------------------

NAMES = ("fc1", "fc2")
LEVELS = {0.0: 1.0, 0.5: 0.6, 0.9: 0.2}
"""Of the dense time, at each sparsity."""


def analysed(folder: Path, batch: int, seconds: float, run: str, tokens: int = 3, **changes: Any) -> None:
    """A run of `latbench layers` on a network of two layers that take so long dense, each three times."""
    shapes = {name: LinearShape(m=8, k=4, n=tokens * batch) for name in NAMES}
    analyses = {
        sparsity: [
            [Operation("gemm", (name,), sparsity, seconds * share * slower) for name in NAMES]
            for slower in (1, 1.1, 0.9)
        ]
        for sparsity, share in LEVELS.items()
    }
    made = build_layer_rows("net", shapes, {name: name for name in NAMES}, analyses, threads=2, batch=batch, calls=20)
    write_part(folder, [{**row, "run_id": run, **changes} for row in made])


def test_a_network_timed_at_two_batches_is_two_problems(tmp_path: Path) -> None:
    analysed(tmp_path, 1, 1e-3, "a")
    analysed(tmp_path, 16, 8e-3, "b")
    with pytest.raises(UsageError, match=r"the table has batch 1 and 16: choose one, batch=\.\.\. \(--batch\)"):
        problem_from_table(tmp_path)
    for batch, seconds in ((1, 1e-3), (16, 8e-3)):
        p = problem_from_table(tmp_path, batch=batch)
        assert [layer.name for layer in p.layers] == list(NAMES)
        assert p.layers[0].seconds == pytest.approx([seconds * share for share in LEVELS.values()])
        assert (p.dense.value, p.dense_engine) == (pytest.approx(2 * seconds), "deepsparse")
    assert p.layers[0].high == pytest.approx(p.layers[0].seconds * 1.1 / 0.95)  # as far as runs were apart
    with pytest.raises(UsageError, match="the table has no batch 2, but 1"):
        problem_from_table(tmp_path, batch=2)


def test_of_several_devices_or_backends_it_has_to_be_said_which(tmp_path: Path) -> None:
    analysed(tmp_path, 1, 1e-3, "a", device="one")
    analysed(tmp_path, 1, 2e-3, "b", device="two")
    with pytest.raises(UsageError, match=r"the table has device one and two: choose one, device=\.\.\. \(--device\)"):
        problem_from_table(tmp_path)
    assert problem_from_table(tmp_path, device="two").dense.value == pytest.approx(4e-3)


def test_a_layer_with_times_of_two_shapes_needs_its_shape_said(tmp_path: Path) -> None:
    analysed(tmp_path, 1, 1e-3, "a")
    analysed(tmp_path, 1, 2e-3, "b", tokens=5)
    with pytest.raises(UsageError, match=r"layer net:fc1 has times of several shapes: give the shapes .* --network"):
        problem_from_table(tmp_path)
    for tokens, seconds in ((3, 1e-3), (5, 2e-3)):
        shapes = {name: LinearShape(m=8, k=4, n=tokens) for name in NAMES}
        p = problem_from_table(tmp_path, shapes, network="net")
        assert p.layers[1].seconds[0] == pytest.approx(seconds)
        assert p.layers[1].shape == shapes["fc2"]
    with pytest.raises(BadData, match="no time of layer fc3 inside net"):
        problem_from_table(tmp_path, {"fc3": shapes["fc1"]}, network="net")


def test_what_goes_with_a_network_narrows_it_and_what_does_not_is_refused(tmp_path: Path) -> None:
    analysed(tmp_path, 1, 1e-3, "a")
    p = problem_from_table(tmp_path, sparsities=[0.9, 0.95])
    assert [it.sparsity for it in p.layers[0].options] == [0.0, 0.9]
    assert [it.sparsity for it in problem_from_table(tmp_path, patterns=["vector:8"]).layers[0].options] == [0.0]
    with pytest.raises(UsageError, match="a cost model predicts layers by their shapes"):
        problem_from_table(tmp_path, model=AnchoredLookup())
    with pytest.raises(UsageError, match="shapes contain their own"):
        problem_from_table(a_table(), {"a": A}, batch=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'thread'"):
        problem_from_table(a_table(), {"a": A}, thread=1)  # type: ignore[call-arg]


def test_rounded_weights_are_no_option_unless_a_profile_can_ask_for_them() -> None:
    rounded = (A, "vector:8", 0.9, 0.1, {"dtype_w": "bfloat16", "kernel_requested": "bf16-weights", "point_id": "v"})
    t = pd.concat([a_table(), swept(rounded)])
    before = problem_from_table(a_table(), {"a": A})
    both = {"dtype_w": "bfloat16", "dtype_a": "bfloat16", "kernel_requested": "bf16"}
    t = pd.concat([t, swept(
        (A, "dense", 0.0, 1.9, both | {"point_id": "w"}), (A, "vector:8", 0.9, 0.2, both | {"point_id": "x"}),
        (A, "vector:8", 0.95, 0.1, both | {"point_id": "y"}),
        (A, "dense", 0.0, 0.8, both | {"backend": "torch", "point_id": "z"}),
    )])  # fmt: skip
    found = problem_from_table(t, {"a": A})
    assert found.layers[0].seconds.tolist() == [4.0, 3.0, 2.5, 1.5]
    assert (found.dense, found.dense_engine) == (before.dense, before.dense_engine)
    halves = problem_from_table(t, {"a": A}, precisions=("float32", "bfloat16"))
    assert sorted(halves.layers[0].seconds.tolist()) == [0.1, 0.2, 1.5, 1.9, 2.5, 3.0, 4.0]
    assert (halves.dense.value, halves.dense_engine) == (0.8, "torch")
    # Where nothing in bfloat16 is faster, what is in float32 is the rival.
    slow = t.assign(median_seconds=t["median_seconds"].where(t["point_id"] != "z", 9.0))
    slow = slow[slow["point_id"] != "w"]
    slow = pd.concat([slow, swept((A, "dense", 0.0, 9.0, both | {"point_id": "w"}))])
    assert problem_from_table(slow, {"a": A}, precisions=("float32", "bfloat16")).dense == before.dense


def test_the_command_keeps_a_target_at_two_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    analysed(tmp_path, 1, 1e-3, "a")
    analysed(tmp_path, 16, 8e-3, "b")
    out = tmp_path / "p.csv"

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["latbench", "solve", str(tmp_path), "--batch", "1", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    code, said, _ = run("--target", "1.2", "--also", str(tmp_path), "--also-with", "batch=16", "--also-with",
                        "target=2", "-o", str(out))  # fmt: skip
    assert code == 0 and f"\n{tmp_path}: " in said and said.count("over deepsparse") == 2
    chosen = {row["layer"]: Option(row["pattern"], row["sparsity"]) for row in pd.read_csv(out).to_dict("records")}
    for batch, target in ((1, 1.2), (16, 2.0)):
        assert problem_from_table(tmp_path, batch=batch).selection(chosen).speedup.low >= target
    alone = problem_from_table(tmp_path, batch=1).with_prior().solve(1.2)
    assert problem_from_table(tmp_path, batch=16).selection(alone.options).speedup.low < 2.0
    assert run("--target", "1.2", "--also", str(tmp_path))[0] == 2  # at which batch?
    code, _, said = run(
        "--target", "1.2", "--also", str(tmp_path), "--also-with", "batch=16", "--also-with", "target=9"
    )
    assert code == 1 and f"latbench: {tmp_path}: target 9x is infeasible: the best is" in said


def test_how_the_first_times_were_taken_is_not_said_of_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, phone = tmp_path / "table", tmp_path / "phone.txt"
    analysed(table, 1, 1e-3, "a", device="one")
    analysed(table, 1, 2e-3, "b", device="two")
    layers = "".join(f"{name}\n1.0 0.0\n0.7 0.5\n0.1 0.9\n" for name in NAMES)
    phone.write_text(f"base\n2.0\nprunable\n2.0\n{layers}")

    def run(*words: str) -> tuple[int, str, str]:
        first = [str(table), "--target", "1.2", "--network", "net", "--device", "one", "--patterns", "unstructured"]
        monkeypatch.setattr(sys, "argv", ["latbench", "solve", *first, "--also", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    code, out, err = run(str(phone))
    assert (code, err) == (0, "") and f"\n{phone}: " in out
    code, _, err = run(str(table))
    assert code == 2 and "the table has device one and two: choose one" in err
    assert err.endswith("; give it for --also by --also-with\n")
    code, out, err = run(str(table), "--also-with", "device=two")
    assert (code, err) == (0, "") and out.count("over deepsparse") == 2


def test_the_dense_model_is_the_measured_one_also_where_what_is_beside_the_layers_is_said(tmp_path: Path) -> None:
    analysed(tmp_path, 1, 1e-3, "a")
    measured = problem_from_table(tmp_path)
    told = problem_from_table(tmp_path, fixed_seconds=3e-4)
    assert told.dense == measured.dense and told.fixed.value == 3e-4
    assert problem_from_table(tmp_path, dense_seconds=5e-3).dense_engine == "dense"


def test_layers_that_add_up_to_more_than_the_model_leave_nothing_beside_them(tmp_path: Path) -> None:
    analysed(tmp_path, 1, 1e-3, "a")
    t = read_table(tmp_path)
    t["median_seconds"] *= np.where(t["op"] == "model", 0.99, 1.0)
    p = problem_from_table(t)
    assert (p.dense.value, p.fixed) == (pytest.approx(0.99 * 2e-3), Interval(0.0, 0.0, 0.0))


def test_a_workload_of_several_token_counts_is_asked_which() -> None:
    with pytest.raises(UsageError, match=r"qwen3-0\.6b is for 1, 8, 16, 64, 512, 2048 tokens.*as in qwen3-0\.6b@1"):
        list_shapes("qwen3-0.6b")
    shapes = list_shapes("qwen3-0.6b@16")
    assert len(shapes) == 4 * 28
    assert shapes["model.layers.0.mlp.down_proj#28"] == LinearShape(1024, 3072, 16)


def test_on_a_gpu_dense_layers_in_fewer_bits_are_no_baseline_and_no_option() -> None:
    def of(dtype: str, backend: str, out: str = "") -> dict[str, Any]:
        types = {"dtype_w": dtype, "dtype_a": dtype, "dtype_out": out or dtype}
        return {"backend": backend, "threads": 1, "device": "nvidia-h200", **types}

    table = swept(
        (A, "dense", 0.0, 8.0, of("float16", "torch_gpu")),
        (A, "dense", 0.0, 7.0, of("bfloat16", "torch_gpu")),
        (A, "dense", 0.0, 4.0, of("fp8", "torch_gpu", "bfloat16")),
        (A, "vector:16", 0.75, 3.0, of("float16", "cupy")),
        (A, "vector:16", 0.75, 2.0, of("bfloat16", "cupy")),
    )
    table["point_id"] = [f"p{i}" for i in range(len(table))]
    problem = problem_from_table(table, {"a": A}, backend="cupy", dense_seconds=None)
    assert problem.dense.value == pytest.approx(8.0)
    assert problem.layers[0].seconds.tolist() == pytest.approx([3.0])
