"""Results of benchmark libraries: what they wrote becomes rows of layers, or is refused with its fields."""

import json
from pathlib import Path
from typing import Any

import pytest

from latbench.errors import BadData, UsageError
from latbench.importers.benchmark_results import LIBRARIES, read_benchmark_results
from latbench.tables.table import read_table
from latbench.tables.writer import write_part


def run(name: str, real_time: float, **more: Any) -> dict[str, Any]:
    """A run as google-benchmark 1.9.5 wrote it."""
    return {
        "name": name, "family_index": 0, "per_family_instance_index": 0, "run_name": name, "run_type": "iteration",
        "repetitions": 3, "repetition_index": 0, "threads": 1, "iterations": 131027, "real_time": real_time,
        "cpu_time": 0.9 * real_time, "time_unit": "ns",
    } | more  # fmt: skip


def state(m: int, mean: str, **more: Any) -> dict[str, Any]:
    """A state of nvbench: its numbers are texts."""
    axes = [{"name": name, "type": "int64", "value": str(size)} for name, size in (("M", m), ("K", 64), ("N", 8))]
    summaries = [
        {"tag": "nv/cold/sample_size", "data": [{"name": "value", "type": "int64", "value": "512"}]},
        {"tag": "nv/cold/time/gpu/mean", "name": "GPU Time", "hint": "duration",
         "data": [{"name": "value", "type": "float64", "value": mean}]},
    ]  # fmt: skip
    return {"device": 0, "axis_values": axes, "summaries": summaries, "is_skipped": False} | more


def of_google(*runs: dict[str, Any]) -> dict[str, Any]:
    return {"context": {"host_name": "vm", "library_version": "1.9.5"}, "benchmarks": list(runs)}


def of_nvbench(*states: dict[str, Any], devices: tuple[str, ...] = ("NVIDIA H200",)) -> dict[str, Any]:
    named = [{"id": number, "name": name} for number, name in enumerate(devices)]
    return {"meta": {}, "devices": named, "benchmarks": [{"name": "gemm", "axes": [], "states": list(states)}]}


def of_pyperf(name: str, *runs: list[float], **metadata: Any) -> dict[str, Any]:
    """A benchmark as pyperf 2.11 wrote it: the first run calibrates, and has no values."""
    calibration = {"metadata": {"calibrate_loops": 4096}, "warmups": [[1, 1.7e-6]]}
    found = [calibration, *({"values": values, "warmups": [[4096, 4.8e-7]]} for values in runs)]
    own = {"name": name, "loops": 4096} | metadata
    return {"benchmarks": [{"metadata": own, "runs": found}], "metadata": {"hostname": "vm"}, "version": "1.0"}


def read(format: str, content: Any, folder: Path, **given: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    (folder / "r.json").write_text(json.dumps(content))
    rows, left_out = read_benchmark_results(
        format, folder / "r.json", **{"columns": {}, "only": {}, "device": "a-cpu"} | given
    )
    return rows, dict(left_out)


def test_repetitions_of_google_benchmark_are_samples_and_aggregates_are_none(tmp_path: Path) -> None:
    name = "gemm/m:64/k:32/n:8"
    content = of_google(
        run(name, 210.0), run(name, 200.0, repetition_index=1, threads=1),
        run(f"{name}_mean", 205.0, run_name=name, run_type="aggregate"),
        run("gemm/m:128/k:32/n:8/real_time/threads:2", 1.5, time_unit="us", threads=2),
        run("gemm/m:256/k:32/n:8", 0.0, error_occurred=True, error_message="it broke"),
        run("other/5", 1.0),
    )  # fmt: skip
    rows, left_out = read("google-benchmark", content, tmp_path, dtype="fp32", threads=4)
    assert [row["samples_seconds"] for row in rows] == [pytest.approx([2.1e-7, 2e-7]), pytest.approx([1.5e-6])]
    # The library's own threads are callers, and none of the product.
    assert [(row["m"], row["k"], row["n"], row["threads"]) for row in rows] == [(64, 32, 8, 4), (128, 32, 8, 4)]
    first = rows[0]
    assert (first["kernel_requested"], first["backend"], first["device"], first["dtype_w"]) == (
        "gemm", "google-benchmark", "a-cpu", "float32"
    )  # fmt: skip
    assert left_out == {
        "they failed or were skipped": 1, "they have no field m, k, n": 1,
        "they are aggregates of repetitions, not times": 1,
    }  # fmt: skip
    with pytest.raises(UsageError, match="no result is a layer: 1 left out, they are aggregates of repetitions"):
        read("google-benchmark", of_google(run(f"{name}_mean", 2.0, run_name=name, run_type="aggregate")), tmp_path)
    assert "threads" not in read("google-benchmark", content, tmp_path)[0][0]


def test_results_that_differ_in_an_argument_are_rows_of_their_own(tmp_path: Path) -> None:
    runs = [run(f"gemm/{kind}/m:64/k:32/n:8", 1.0 + len(kind)) for kind in ("avx2", "scalar", "unroll:4")]
    rows, _ = read("google-benchmark", of_google(*runs), tmp_path)
    assert [(row["kernel_requested"], len(row["samples_seconds"])) for row in rows] == [
        ("gemm/avx2", 1), ("gemm/scalar", 1), ("gemm/unroll:4", 1)
    ]  # fmt: skip
    states = [state(64, mean) for mean in ("1e-5", "2e-5")]
    for each, kind in zip(states, ("F16", "F32"), strict=True):
        each["axis_values"].append({"name": "T", "type": "type", "value": kind})
    rows, _ = read("nvbench", of_nvbench(*states), tmp_path)
    assert [(row["kernel_requested"], row["samples_seconds"]) for row in rows] == [
        ("gemm/T:F16", [1e-5]), ("gemm/T:F32", [2e-5])
    ]  # fmt: skip
    rows, _ = read("nvbench", of_nvbench(*states), tmp_path, columns={"dtype": "T"})
    assert [(row["kernel_requested"], row["dtype_w"]) for row in rows] == [("gemm", "float16"), ("gemm", "float32")]


@pytest.mark.parametrize("time", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused_by_name(time: float, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="gemm: a time must be positive and finite"):
        read("google-benchmark", of_google(run("gemm/m:64/k:32/n:8", time)), tmp_path)


def test_what_only_leaves_is_told_by_the_values_that_there_are(tmp_path: Path) -> None:
    content = of_google(run("a/m:64/k:32/n:8", 1.0, size=768.0), run("b/m:64/k:32/n:8", 1.0))
    [row], _ = read("google-benchmark", content, tmp_path, only={"size": "768"})
    assert row["kernel_requested"] == "a"
    for only, said in (({"benchmark": "c"}, "has c as its benchmark, but a, b"), ({"x": "1"}, "and no such field")):
        with pytest.raises(UsageError, match=said):
            read("google-benchmark", content, tmp_path, only=only)


def test_arguments_without_names_are_fields_by_their_place(tmp_path: Path) -> None:
    content = of_google(run("gemm/768/64/128", 5.0, pattern_rows=4, dropped=0.5))
    with pytest.raises(UsageError, match=r"The fields are pattern_rows, dropped, benchmark, 1, 2, 3: name"):
        read("google-benchmark", content, tmp_path)
    [row], _ = read("google-benchmark", content, tmp_path, columns={"m": "1", "k": "2", "n": "3"})
    assert (row["m"], row["k"], row["n"], row["pattern"], row["sparsity_target"]) == (768, 64, 128, "dense", 0.0)


@pytest.mark.parametrize(
    ("fields", "pattern", "sparsity"),
    [
        ({"pattern": "vector:32", "sparsity": 0.75}, "vector:32", 0.75), ({"pattern": "nm:2:4"}, "nm:2:4", 0.5),
        ({"pattern": "nm:2:4", "sparsity": 0.5}, "nm:2:4", 0.5), ({"PATTERN": "dense"}, "dense", 0.0),
        ({"sparsity": 0}, "dense", 0.0),
    ],
)  # fmt: skip
def test_patterns_come_with_their_sparsities(
    fields: dict[str, Any], pattern: str, sparsity: float, tmp_path: Path
) -> None:
    [row], _ = read("google-benchmark", of_google(run("gemm/m:64/k:64/n:8", 1.0, **fields)), tmp_path)
    assert (row["pattern"], row["sparsity_target"]) == (pattern, sparsity)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"sparsity": 0.75},
            "the sparsity of dense is 0; another pattern needs a field with its name, and this is 0.75",
        ),
        ({"pattern": "vector:32"}, "vector:32 needs a field with its sparsity"),
        ({"pattern": "vector:32", "sparsity": 1.5}, "the sparsity of vector:32 lies in 0 to 1, and this is 1.5"),
        ({"pattern": "nm:2:4", "sparsity": 0.75}, "the sparsity of nm:2:4 is 0.5"),
        ({"pattern": "stripes"}, "stripes"),
        ({"THREADS": 0}, "threads must be a whole number of at least 1, not 0"),
        ({"dtype": "F7"}, "the element type F7 is unknown: known are float64, float32"),
        ({"sparsity": "half", "pattern": "vector:4"}, "sparsity must be a number, not 'half'"),
    ],
)
def test_what_no_layer_has_is_refused_with_the_benchmark(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=f"r.json: gemm: .*{said}"):
        read("google-benchmark", of_google(run("gemm/m:64/k:64/n:8", 1.0, **fields)), tmp_path)


@pytest.mark.parametrize("size", ["0", "-8", "7.5", "x", "1e12"])
def test_a_size_is_a_whole_number(size: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="m must be a"):
        read("google-benchmark", of_google(run(f"gemm/m:{size}/k:64/n:8", 1.0)), tmp_path)


def test_nvbench_names_its_device_and_gives_the_cold_gpu_time(tmp_path: Path) -> None:
    content = of_nvbench(state(128, "1.25e-05"), state(256, "2e-05"), state(512, "0", is_skipped=True))
    rows, left_out = read("nvbench", content, tmp_path, device=None, dtype="float16")
    assert [(row["m"], row["k"], row["n"], row["samples_seconds"]) for row in rows] == [
        (128, 64, 8, [1.25e-5]), (256, 64, 8, [2e-5])
    ]  # fmt: skip
    assert {row["device"] for row in rows} == {"nvidia-h200"}
    assert left_out == {"they were skipped, or have no cold GPU time": 1}


def test_several_devices_of_nvbench_have_to_be_told_apart(tmp_path: Path) -> None:
    content = of_nvbench(state(128, "1e-5"), state(128, "3e-5", device=1), devices=("NVIDIA H200", "NVIDIA L4"))
    for device in (None, "my-gpu"):
        with pytest.raises(UsageError, match="holds several devices, NVIDIA H200, NVIDIA L4: say which"):
            read("nvbench", content, tmp_path, device=device)
    [row], _ = read("nvbench", content, tmp_path, device=None, only={"device": "NVIDIA L4"})
    assert (row["device"], row["samples_seconds"]) == ("nvidia-l4", [3e-5])


def test_values_of_pyperf_are_samples_and_metadata_are_fields(tmp_path: Path) -> None:
    content = of_pyperf("gemm/m:64/k:32/n:8", [4.71e-7, 4.74e-7], [4.68e-7], dtype="float32")
    [row], left_out = read("pyperf", content, tmp_path)
    assert row["samples_seconds"] == [4.71e-7, 4.74e-7, 4.68e-7] and row["dtype_a"] == "float32" and not left_out
    named = of_pyperf("gemm", [1e-6], m=8, k=4, tokens=2)
    [row], _ = read("pyperf", named, tmp_path, columns={"n": "tokens"})
    assert (row["m"], row["k"], row["n"]) == (8, 4, 2)
    for bad, said in (
        (of_pyperf("gemm", [7.0], unit="byte"), "their unit is byte"),
        (of_pyperf("g"), "have no values"),
    ):
        with pytest.raises(UsageError, match=said):
            read("pyperf", bad, tmp_path)


@pytest.mark.parametrize("format", LIBRARIES)
@pytest.mark.parametrize(
    "content", [[], {}, {"benchmarks": 3}, {"benchmarks": [{}]}, {"benchmarks": [None]}, None, "x"]
)
def test_a_file_of_something_else_is_refused(format: str, content: Any, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=f"r.json: not results of {format}, it"):
        read(format, content, tmp_path)


def test_a_file_that_is_none_a_column_that_is_none_and_a_missing_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no such file"):
        read_benchmark_results("nvbench", tmp_path / "none.json", columns={}, only={})
    (tmp_path / "r.txt").write_text("{")
    with pytest.raises(BadData, match="not a JSON file"):
        read_benchmark_results("nvbench", tmp_path / "r.txt", columns={}, only={})
    content = of_google(run("gemm/m:64/k:64/n:8", 1.0))
    with pytest.raises(UsageError, match="no field gives the column M: known are m, k, n, pattern"):
        read("google-benchmark", content, tmp_path, columns={"M": "1"})
    with pytest.raises(UsageError, match="does not say what was timed: give --device"):
        read("google-benchmark", content, tmp_path, device=None)


def test_rows_become_a_table_and_the_command_leaves_out_what_it_holds(latbench: Any, tmp_path: Path) -> None:
    content = of_google(run("gemm/m:64/k:32/n:8", 210.0), run("slow/m:64/k:32/n:8", 900.0))
    (tmp_path / "r.json").write_text(json.dumps(content))
    command = ("import", "google-benchmark", tmp_path / "r.json", "-o", tmp_path / "table", "--device", "a-cpu")
    ran = latbench(*command, "--only", "benchmark=gemm")
    assert ran.code == 0 and "1 rows from" in ran.out
    assert "up to date" in latbench(*command, "--only", "benchmark=gemm").out
    assert latbench(*command).code == 0 and len(read_table(tmp_path / "table")) == 2
    assert latbench("validate", tmp_path / "table").code == 0
    for options, said in (
        (("--network", "net"), "--network: only for spdy"),
        (("--columns", "m=1"), "no result is a layer"),
        (("--only", "x=1"), "no result of"),
        (("--dtype", "f7"), "--dtype: the element type f7 is unknown: known are float64"),
    ):
        ran = latbench(*command, *options)
        assert ran.code == 2 and said in ran.err
    ran = latbench("import", "neusight", tmp_path / "r.json", "-o", tmp_path / "t", "--columns", "m=1")
    assert ran.code == 2 and "--columns: only for google-benchmark, nvbench, pyperf" in ran.err


def test_rows_of_every_library_can_be_written(tmp_path: Path) -> None:
    contents = {
        "google-benchmark": of_google(run("gemm/m:64/k:32/n:8", 1.0)), "nvbench": of_nvbench(state(64, "1e-6")),
        "pyperf": of_pyperf("gemm/m:64/k:32/n:8", [1e-6]),
    }  # fmt: skip
    assert contents.keys() == LIBRARIES.keys()
    for format, content in contents.items():
        write_part(tmp_path / format, read(format, content, tmp_path)[0])
        assert read_table(tmp_path / format)["median_seconds"].notna().all()
