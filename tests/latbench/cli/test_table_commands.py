"""plan and sweep as a user meets them: what they print, and how they end."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from latbench.base.engine_registry import CPU_ENGINES, GPU_ENGINES
from latbench.errors import EnvironmentUnusable
from latbench.machines.devices import name_cpu
from latbench.machines.gpu_names import Gpu
from latbench.tables.table import read_table
from latbench.tables.writer import write_part
from latbench.workloads.workload import Layer, Workload, write_workload
from sparse_kernels.shapes import LinearShape


def test_plan_needs_no_argument(latbench: Any) -> None:
    ran = latbench("plan")
    assert ran.code == 0 and "resnet50" in ran.out and "all, equal shapes once" in ran.out
    assert name_cpu() in ran.out and "MB of disk" in ran.out


def test_plan_as_json_counts_what_a_sweep_would_measure(latbench: Any, tiny: Path) -> None:
    document = json.loads(latbench("plan", "--workload", tiny, "--patterns", "dense,vector:8", "--json").out)
    points = latbench("sweep", "--cpu", "--workload", tiny, "--patterns", "dense,vector:8", "--dry-run").out
    assert document["points"] == len(points.splitlines()) == 7 * (6 + 6)
    assert document["shapes"] == 7 and document["patterns"] == {"dense": 42, "vector:8": 42}
    assert document["estimated_seconds"] > 0 and document["estimated_bytes"] > 0


def test_a_sweep_measures_and_the_next_finds_it_done(latbench: Any, tmp_path: Path) -> None:
    layers = (Layer("a", LinearShape(17, 24, 5)), Layer("b", LinearShape(8, 24, 1)))
    write_workload(Workload("two", "made up", layers), tmp_path / "two.yaml")
    arguments = ("sweep", "--cpu", "--workload", tmp_path / "two.yaml", "--patterns", "block:8x8")
    arguments += ("--sparsities", "0.5")
    ran = latbench(*arguments, "--threads", "1", "-o", tmp_path / "out")
    assert ran.code == 0 and str(tmp_path / "out") in ran.out
    frame = read_table(tmp_path / "out")
    assert frame["point_id"].nunique() == 2 and (frame["threads"] == 1).all()
    assert set(frame["status"]) <= {"ok", "noisy", "unsupported"}
    assert latbench("validate", tmp_path / "out").code == 0
    again = latbench(*arguments, "--threads", "1", "-o", tmp_path / "out")
    assert again.code == 0 and "were there already" in again.out


@pytest.mark.usefixtures("no_pace")
def test_a_sweep_that_tunes_has_both_kernels_side_by_side(
    latbench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATBENCH_CACHE", str(tmp_path / "cache"))
    write_workload(Workload("one", "made up", (Layer("a", LinearShape(64, 32, 4)),)), tmp_path / "one.yaml")
    arguments = ("sweep", "--cpu", "--backends", "numba", "--workload", tmp_path / "one.yaml", "--threads", "1")
    arguments += ("--patterns", "vector:32", "--sparsities", "0.5", "--tune", "-o", tmp_path / "out")
    assert latbench(*arguments).code == 0
    rows = read_table(tmp_path / "out").drop_duplicates("point_id", keep="last").set_index("kernel_requested")
    assert set(rows.index) == {"auto", "tuned"} and set(rows["status"]) <= {"ok", "noisy"}
    assert all(kernel.startswith("numba.vector.tokens") for kernel in rows["kernel_used"])
    assert len(list((tmp_path / "cache" / "tuning").iterdir())) == 1


@pytest.mark.usefixtures("no_pace")
@pytest.mark.slow
def test_a_sweep_with_rounded_weights_says_so_in_its_rows(latbench: Any, tmp_path: Path) -> None:
    write_workload(Workload("one", "made up", (Layer("a", LinearShape(64, 32, 4)),)), tmp_path / "one.yaml")
    arguments = ("sweep", "--cpu", "--backends", "torch,numba", "--workload", tmp_path / "one.yaml", "--threads", "1")
    arguments += ("--patterns", "dense,vector:32", "--sparsities", "0.5", "--bf16", "-o", tmp_path / "out")
    done = latbench(*arguments)
    assert done.code == 0 and "numba bf16-weights" in done.out
    rows = read_table(tmp_path / "out").drop_duplicates("point_id", keep="last")
    types = {
        (name, *own) for name, *own in zip(rows["kernel_requested"], rows["dtype_w"], rows["dtype_a"], strict=True)
    }
    assert {it for it in types if it[0].startswith("bf16")} == {
        ("bf16-weights", "bfloat16", "float32"), ("bf16", "bfloat16", "bfloat16")
    }  # fmt: skip
    assert {it[1:] for it in types if not it[0].startswith("bf16")} == {("float32", "float32")}
    [used] = rows.loc[rows["kernel_requested"] == "bf16-weights", "kernel_used"]
    assert ".bf16." in used


def test_by_default_a_sweep_writes_beside_the_user(
    latbench: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, *_: Any, **__: Any) -> None:
        raise EnvironmentUnusable(f"the folder was {folder}")

    monkeypatch.setattr("latbench.sweeping.sweep.run_sweep", refuse)
    ran = latbench("sweep", "--cpu", "--workload", tiny)
    assert f"the folder was latbench-tables/{name_cpu()}" in ran.refused(3)


def test_a_gpu_that_is_not_there_is_one_line_and_code_3(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latbench.machines.gpu_discovery.list_gpus", lambda: ([], "no NVIDIA driver"))
    assert latbench("sweep", "--gpu", "a100").refused(3) == "latbench: --gpu a100 requested, but no NVIDIA driver"
    monkeypatch.setattr(
        "latbench.machines.gpu_discovery.list_gpus", lambda: ([Gpu("NVIDIA H200", "GPU-3f2a1b2c")], "")
    )
    assert "but this machine has NVIDIA H200: type --gpu h200" in latbench("sweep", "--gpu", "a100").refused(3)


def test_a_gpu_sweep_asks_for_half_precision_on_that_gpu(
    latbench: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "latbench.machines.gpu_discovery.list_gpus", lambda: ([Gpu("NVIDIA H200", "GPU-3f2a1b2c")], "")
    )
    points = latbench(
        "sweep", "--gpu", "h200", "--workload", tiny, "--patterns", "dense,nm:2:4,vector:8", "--sparsities", "0.8",
        "--dry-run",
    ).out  # fmt: skip
    assert "torch_gpu cublas dense 0 linear 16x24 on 5" in points
    assert "torch_sparse cusparselt nm:2:4 0.5 linear 16x24 on 5" in points
    ran = latbench("sweep", "--gpu", "h200", "--workload", tiny, "--backends", "torch_gpu", "--dry-run")
    assert {line.split()[0] for line in ran.out.splitlines()} == {"torch_gpu"}
    assert "MB of disk: no kernel compiled and no roofline measured yet" in ran.err


def test_a_gpu_is_planned_for_without_one(latbench: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latbench.machines.gpu_discovery.list_gpus", lambda: ([], "no NVIDIA driver"))
    chosen = ("--workload", tiny, "--patterns", "dense,nm:2:4,vector:8", "--sparsities", "0.8")
    document = json.loads(latbench("plan", "--gpu", "A100", *chosen, "--json").out)
    assert document["device"] == "nvidia-a100" and set(document["backends"]) <= set(GPU_ENGINES)
    assert document["patterns"]["nm:2:4"] and document["estimated_seconds"] > 10 and document["estimated_bytes"] > 0
    assert "no kernel compiled" in document["assumed"]
    ours = json.loads(latbench("plan", "--gpu", "a100", *chosen, "--backends", "cupy", "--json").out)
    assert list(ours["backends"]) == ["cupy"] and ours["points"] < document["points"]
    told = " ".join(latbench("plan", "--gpu", "a100", *chosen).out.split())
    assert "on nvidia-a100: torch_gpu" in told and "disk (assumptions: every engine installed, no kernel" in told


def test_a_plan_of_a_gpu_counts_what_its_sweep_would_measure(
    latbench: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "latbench.machines.gpu_discovery.list_gpus", lambda: ([Gpu("NVIDIA H200", "GPU-3f2a1b2c")], "")
    )
    document = json.loads(latbench("plan", "--gpu", "h200", "--workload", tiny, "--json").out)
    swept = json.loads(latbench("sweep", "--gpu", "h200", "--workload", tiny, "--dry-run", "--json").out)
    assert document["points"] == len(swept["points"]) and document["device"] == swept["device"] == "nvidia-h200"
    assert document["estimated_seconds"] == swept["estimated_seconds"]
    assert document["estimated_bytes"] == swept["estimated_bytes"]
    assert all(document["backends"].values())  # of those installed here, with their versions


def test_a_plan_of_rounded_weights_in_several_sessions_is_that_of_its_sweep(latbench: Any, tiny: Path) -> None:
    asked = ("--workload", tiny, "--patterns", "dense,vector:4", "--backends", "torch,numba", "--json")
    once = json.loads(latbench("plan", *asked).out)
    assert json.loads(latbench("plan", "--cpu", *asked).out) == once
    more = json.loads(latbench("plan", *asked, "--bf16", "--sessions", "3").out)
    swept = json.loads(latbench("sweep", "--cpu", *asked, "--bf16", "--sessions", "3", "--dry-run").out)
    assert more["points"] == len(swept["points"]) > once["points"]
    assert more["estimated_seconds"] == swept["estimated_seconds"] > 3 * once["estimated_seconds"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep"], "say what to measure"),
        (["sweep", "--gpu", "voodoo"], "unknown GPU 'voodoo'"),
        (["sweep", "--gpu", ":1"], "--gpu takes NAME or NAME:INDEX, such as a100 or a100:2, not ':1'"),
        (["plan", "--gpu", "a100:"], "--gpu takes NAME or NAME:INDEX"),
        (["sweep", "--gpu", "a100:1", "--on", "ray"], "the cluster chooses the GPU of a node; type --gpu a100"),
        (["sweep", "--cpu", "--gpu", "a100"], "two sweeps"),
        (["plan", "--cpu", "--gpu", "a100"], "a plan is for the CPU"),
        (["sweep", "--cpu", "--workload", "bort"], "unknown workload 'bort'"),
        (["sweep", "--cpu", "--patterns", "checkers"], "unknown pattern 'checkers'"),
        (["sweep", "--cpu", "--sparsities", "75"], "between 0 and 1"),
        (["plan", "--patterns", "nm:4:2"], "N:M pattern"),
        (["plan", "--gpu", "voodoo"], "unknown GPU 'voodoo'"),
        (["plan", "--gpu", "a100", "--tune"], "--tune is not for --gpu: GPU kernels are not tuned"),
        (["plan", "--gpu", "a100", "--bf16"], "--bf16 is not for --gpu: a sweep of a GPU measures bfloat16"),
        (["plan", "--backends", "scipy", "--bf16"], "--bf16 is for backend numba"),
        (["plan", "--gpu", "a100", "--threads", "2"], "--threads is for a plan without --gpu"),
        (
            ["sweep", "--cpu", "--backends", "numba,tensorrt"],
            "unknown backend 'tensorrt': known are torch, onnxruntime",
        ),
        (["sweep", "--cpu", "--backends", "scipy", "--patterns", "dense"], "nothing to measure"),
        (["sweep", "--cpu", "--backends", "scipy", "--tune"], "--tune is for backend numba"),
        (["sweep", "--gpu", "a100", "--tune"], "--tune is not for --gpu"),
        (["sweep", "--cpu", "--backends", "scipy", "--bf16"], "--bf16 is for backend numba"),
        (["sweep", "--gpu", "a100", "--bf16"], "--bf16 is not for --gpu"),
    ],
)
def test_a_wrong_request_is_one_line_and_code_2(latbench: Any, arguments: list[str], words: str) -> None:
    assert words in latbench(*arguments).refused(2)


def lacking(monkeypatch: pytest.MonkeyPatch, name: str, *packages: str) -> None:
    needed = tuple((package,) for package in packages)
    monkeypatch.setitem(CPU_ENGINES, name, dataclasses.replace(CPU_ENGINES[name], packages=needed))


def test_an_engine_that_is_not_installed_is_named(latbench: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "onnxruntime", "onnxruntime", "no-such-package")
    ran = latbench("sweep", "--cpu", "--workload", tiny, "--patterns", "dense", "--dry-run")
    assert ran.code == 0 and "onnxruntime" not in ran.out
    assert "onnxruntime is left out, it is not installed here: pip install onnxruntime no-such-package" in ran.err


def test_backends_are_chosen_by_name_or_all(latbench: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def used(*given: str) -> set[str]:
        ran = latbench("sweep", "--cpu", "--workload", tiny, "--dry-run", "--sparsities", "0.5", *given)
        assert ran.code == 0 and "left out" not in ran.err
        return {line.split()[0] for line in ran.out.splitlines()}

    assert used() == {"torch", "onnxruntime", "openvino", "numba"}
    assert used("--backends", "scipy, numba", "--backends", "torch_sparse_cpu") == {
        "scipy",
        "numba",
        "torch_sparse_cpu",
    }
    assert used("--backends", "all") == set(CPU_ENGINES)
    lacking(monkeypatch, "openvino", "no-such-package")
    assert "openvino" not in used("--backends", "all")
    refused = latbench("sweep", "--cpu", "--workload", tiny, "--backends", "openvino", "--dry-run").refused(3)
    assert refused == "latbench: openvino is not installed here: pip install no-such-package"
    document = json.loads(latbench("plan", "--workload", tiny, "--backends", "scipy", "--json").out)
    assert list(document["backends"]) == ["scipy"] and "dense" not in document["patterns"]


def test_plan_counts_tuned_kernels_where_asked(latbench: Any, tiny: Path) -> None:
    chosen = ("plan", "--workload", tiny, "--backends", "numba", "--json")
    plain, tuned = (json.loads(latbench(*chosen, *more).out) for more in ((), ("--tune",)))
    assert tuned["points"] > plain["points"] and tuned["estimated_seconds"] > plain["estimated_seconds"]


def test_the_speedup_table_divides_by_the_fastest_dense_engine(row: dict[str, Any], tmp_path: Path) -> None:
    from rich.console import Console

    from latbench.cli.sweep_report import build_speedup_table

    def timed(seconds: float, **change: Any) -> dict[str, Any]:
        return row | change | {"samples_seconds": [seconds] * 9}

    dense = {"pattern": "dense", "sparsity_target": 0.0}
    write_part(
        tmp_path,
        [
            timed(8.0, **dense, backend="torch", kernel_requested="mkldnn"), timed(3.0), timed(12.0, backend="scipy"),
            timed(6.0, **dense, backend="torch", kernel_requested="prepacked", layout="nhwc"),
            timed(1.0, **dense, threads=7),  # of another number of threads
            timed(2.0, m=8, **dense, backend="openvino"), timed(1.0, m=8, sparsity_target=0.9),
            timed(1.0, m=9),  # without a dense time it says nothing
            *(timed(0.1, **dense, backend="torch", **unlike) for unlike in (
                {"cache_mode": "warm"}, {"launch_mode": "graph"}, {"context": "network"}, {"epilogue": "none"},
            )),  # measured in other ways
        ],
    )  # fmt: skip
    found = build_speedup_table(read_table(tmp_path))
    assert found is not None
    heading, table = found
    assert "fastest dense engine (openvino in 1, torch prepacked in 1 of 2 layers)" in heading
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table)
    assert [line.split() for line in captured.get().splitlines()] == [
        ["pattern", "engine", "75%", "90%"],
        ["vector:32", "numba", "2.00x", "2.00x"],
        ["vector:32", "scipy", "0.50x"],
    ]
    both = {"dtype_w": "bfloat16", "dtype_a": "bfloat16", "kernel_requested": "bf16"}
    write_part(tmp_path, [
        timed(1.5, **both), timed(4.5, **dense, **both, backend="torch"), timed(0.5, m=8, sparsity_target=0.9, **both)
    ])  # fmt: skip
    heading, table = build_speedup_table(read_table(tmp_path)) or ("", None)
    assert heading.endswith("of 2 layers; in bfloat16 openvino in 1, torch bf16 in 1 of 2 layers), median of layers:")
    with console.capture() as captured:
        console.print(table)
    assert ["vector:32", "numba", "bf16", "3.00x", "4.00x"] in [it.split() for it in captured.get().splitlines()]
