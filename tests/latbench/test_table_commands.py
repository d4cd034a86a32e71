"""plan, sweep, validate, merge and doctor as a user meets them: what they print, and how they end."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from latbench import backends, cli, devices, sweep, tables
from latbench.devices import Gpu
from latbench.errors import EnvironmentUnusable
from latbench.workloads import Layer, Workload, save
from sparse_kernels.shapes import LinearShape


class Ran:
    """How a command ended."""

    def __init__(self, code: Any, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def refused(self, code: int) -> str:
        """The one line of a refusal with this exit code."""
        assert self.code == code, (self.out, self.err)
        lines = [line for line in self.err.splitlines() if line.startswith("latbench: ")]
        assert len(lines) == 1 and "Traceback" not in self.err
        return lines[0]


@pytest.fixture
def latbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], own_lock: Path) -> Any:
    """Runs the real command line in this process."""

    def run(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["latbench", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Ran(ended.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def two_tables(tmp_path: Path, row: dict[str, Any]) -> tuple[Path, Path]:
    tables.write_part(tmp_path / "a", [row])
    tables.write_part(tmp_path / "b", [row | {"m": 8}])
    return tmp_path / "a", tmp_path / "b"


def test_plan_needs_no_argument(latbench: Any) -> None:
    ran = latbench("plan")
    assert ran.code == 0 and "resnet50" in ran.out and "all, equal shapes once" in ran.out
    assert devices.cpu_device() in ran.out and "MB of disk" in ran.out


def test_plan_as_json_counts_what_a_sweep_would_measure(latbench: Any, tiny: Path) -> None:
    document = json.loads(latbench("plan", "--workload", tiny, "--patterns", "dense,vector:8", "--json").out)
    points = latbench("sweep", "--cpu", "--workload", tiny, "--patterns", "dense,vector:8", "--dry-run").out
    assert document["points"] == len(points.splitlines()) == 7 * (6 + 6)
    assert document["shapes"] == 7 and document["patterns"] == {"dense": 42, "vector:8": 42}
    assert document["estimated_seconds"] > 0 and document["estimated_bytes"] > 0


def test_a_sweep_measures_and_the_next_finds_it_done(latbench: Any, tmp_path: Path) -> None:
    layers = (Layer("a", LinearShape(17, 24, 5)), Layer("b", LinearShape(8, 24, 1)))
    save(Workload("two", "made up", layers), tmp_path / "two.yaml")
    arguments = ("sweep", "--cpu", "--workload", tmp_path / "two.yaml", "--patterns", "block:8x8")
    arguments += ("--sparsities", "0.5")
    ran = latbench(*arguments, "--threads", "1", "-o", tmp_path / "out")
    assert ran.code == 0 and str(tmp_path / "out") in ran.out
    frame = tables.read(tmp_path / "out")
    assert frame["point_id"].nunique() == 2 and (frame["threads"] == 1).all()
    assert set(frame["status"]) <= {"ok", "noisy", "unsupported"}
    assert latbench("validate", tmp_path / "out").code == 0
    again = latbench(*arguments, "--threads", "1", "-o", tmp_path / "out")
    assert again.code == 0 and "were there already" in again.out


def test_by_default_a_sweep_writes_beside_the_user(
    latbench: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, *_: Any, **__: Any) -> None:
        raise EnvironmentUnusable(f"the folder was {folder}")

    monkeypatch.setattr(sweep, "run", refuse)
    ran = latbench("sweep", "--cpu", "--workload", tiny)
    assert f"the folder was latbench-tables/{devices.cpu_device()}" in ran.refused(3)


def test_a_gpu_that_is_not_there_is_one_line_and_code_3(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: ([], "no NVIDIA driver"))
    assert latbench("sweep", "--gpu", "a100").refused(3) == (
        "latbench: --gpu a100 requested, but no NVIDIA driver; run it on a machine with that GPU, or measure this "
        "one with --cpu"
    )
    monkeypatch.setattr(devices, "gpus", lambda: ([Gpu("NVIDIA H200", "GPU-3f2a1b2c")], ""))
    assert 'found "NVIDIA H200" (GPU-3f2a...)' in latbench("sweep", "--gpu", "a100").refused(3)


def test_a_gpu_sweep_asks_for_half_precision_on_that_gpu(
    latbench: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: ([Gpu("NVIDIA H200", "GPU-3f2a1b2c")], ""))
    points = latbench(
        "sweep", "--gpu", "h200", "--workload", tiny, "--patterns", "dense,nm:2:4,vector:8", "--sparsities", "0.8",
        "--dry-run",
    ).out  # fmt: skip
    assert "torch_gpu cublas dense 0 linear 16x24 on 5" in points
    assert "torch_sparse cusparselt nm:2:4 0.5 linear 16x24 on 5" in points
    points = latbench("sweep", "--gpu", "h200", "--workload", tiny, "--backends", "torch_gpu", "--dry-run").out
    assert {line.split()[0] for line in points.splitlines()} == {"torch_gpu"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep"], "say what to measure"),
        (["sweep", "--gpu", "voodoo"], "unknown GPU 'voodoo'"),
        (["sweep", "--cpu", "--gpu", "a100"], "two sweeps"),
        (["sweep", "--cpu", "--workload", "bort"], "unknown workload 'bort'"),
        (["sweep", "--cpu", "--patterns", "checkers"], "unknown pattern 'checkers'"),
        (["sweep", "--cpu", "--sparsities", "75"], "between 0 and 1"),
        (["plan", "--patterns", "nm:4:2"], "N:M pattern"),
        (
            ["sweep", "--cpu", "--backends", "numba,tensorrt"],
            "unknown backend 'tensorrt': known are torch, onnxruntime",
        ),
        (["sweep", "--cpu", "--backends", "scipy", "--patterns", "dense"], "nothing to measure"),
    ],
)
def test_a_wrong_request_is_one_line_and_code_2(latbench: Any, arguments: list[str], words: str) -> None:
    assert words in latbench(*arguments).refused(2)


def test_an_engine_that_is_not_installed_is_named(latbench: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "onnxruntime", ("x", ("onnxruntime", "no-such-package")))
    ran = latbench("sweep", "--cpu", "--workload", tiny, "--patterns", "dense", "--dry-run")
    assert ran.code == 0 and "onnxruntime" not in ran.out
    assert "onnxruntime is left out, it is not installed here: pip install onnxruntime no-such-package" in ran.err


def test_backends_are_chosen_by_name_or_all(latbench: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def used(*given: str) -> set[str]:
        ran = latbench("sweep", "--cpu", "--workload", tiny, "--dry-run", "--sparsities", "0.5", *given)
        assert ran.code == 0 and ran.err == ""
        return {line.split()[0] for line in ran.out.splitlines()}

    assert used() == {"torch", "onnxruntime", "openvino", "numba"}
    assert used("--backends", "scipy, numba", "--backends", "torch_sparse_cpu") == {
        "scipy",
        "numba",
        "torch_sparse_cpu",
    }
    assert used("--backends", "all") == set(backends.BACKENDS)
    monkeypatch.setitem(backends.BACKENDS, "openvino", ("x", ("no-such-package",)))
    assert "openvino" not in used("--backends", "all")
    refused = latbench("sweep", "--cpu", "--workload", tiny, "--backends", "openvino", "--dry-run").refused(3)
    assert refused == "latbench: openvino is not installed here: pip install no-such-package"
    document = json.loads(latbench("plan", "--workload", tiny, "--backends", "scipy", "--json").out)
    assert list(document["backends"]) == ["scipy"] and "dense" not in document["patterns"]


def test_the_speedup_table_divides_by_the_fastest_dense_engine(row: dict[str, Any], tmp_path: Path) -> None:
    from rich.console import Console

    from latbench.commands.sweep import speedup_table

    def timed(seconds: float, **change: Any) -> dict[str, Any]:
        return row | change | {"samples_seconds": [seconds] * 9}

    dense = {"pattern": "dense", "sparsity_target": 0.0}
    tables.write_part(
        tmp_path,
        [
            timed(8.0, **dense, backend="torch", kernel_requested="mkldnn"), timed(3.0), timed(12.0, backend="scipy"),
            timed(6.0, **dense, backend="torch", kernel_requested="prepacked", layout="nhwc"),
            timed(1.0, **dense, threads=7),  # of another number of threads
            timed(2.0, m=8, **dense, backend="openvino"), timed(1.0, m=8, sparsity_target=0.9),
            timed(1.0, m=9),  # without a dense time it says nothing
        ],
    )  # fmt: skip
    found = speedup_table(tables.read(tmp_path))
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


def test_validate_praises_a_whole_table(latbench: Any, two_tables: tuple[Path, Path]) -> None:
    ran = latbench("validate", two_tables[0])
    assert ran.code == 0 and "1 file: nothing to complain of" in ran.out


def test_validate_goes_on_after_a_damaged_part(latbench: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    parts = [tables.write_part(tmp_path, [row | {"m": m}]) for m in (1, 2)]
    parts[0].write_bytes(parts[0].read_bytes()[:-9])
    (tmp_path / "foreign.parquet").write_bytes(b"not parquet")
    ran = latbench("validate", tmp_path)
    assert "2 findings are corruption" in ran.refused(5)
    assert f"corrupt: {parts[0]}: damaged" in ran.out and "foreign.parquet" in ran.out
    assert str(parts[1]) not in ran.out


def test_validate_has_nothing_to_say_of_no_table(latbench: Any, tmp_path: Path) -> None:
    assert "no such table" in latbench("validate", tmp_path / "nowhere").refused(5)


@pytest.mark.parametrize(
    ("column", "value", "severity", "words"),
    [
        ("point_id", "0123456789abcdef", "corrupt", "its key hashes to"),
        ("status", "splendid", "corrupt", "unknown status 'splendid'"),
        ("pattern", "checkers", "corrupt", "unknown pattern"),
        ("v", 16, "corrupt", "v is 16, and pattern vector:32 says 32"),
        ("median_seconds", 2.1e-3, "corrupt", "median_seconds is 0.0021, and its samples give 0.002"),
        ("samples_seconds", [1.0, -1.0], "corrupt", "positive finite seconds"),
        ("nnz", 92, "corrupt", "nnz 92 of 91 weights"),
        ("sparsity_actual", 0.1, "corrupt", "no sparsity of 0.1"),
    ],
)
def test_validate_sees_a_row_that_contradicts_itself(
    latbench: Any, tmp_path: Path, row: dict[str, Any], column: str, value: Any, severity: str, words: str
) -> None:
    whole = parquet.read_table(tables.write_part(tmp_path, [row | {"nnz": 21, "sparsity_actual": 1 - 21 / 91}]))
    index, field = whole.column_names.index(column), tables.SCHEMA.field(column)
    parquet.write_table(whole.set_column(index, field, pa.array([value], field.type)), tmp_path / "edited.parquet")
    ran = latbench("validate", tmp_path / "edited.parquet")
    ran.refused(5)
    assert severity in ran.out and words in ran.out


def test_validate_suspects_times_in_another_unit(latbench: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    big = {"m": 4096, "k": 4096, "n": 4096}
    tables.write_part(tmp_path, [row | big | {"samples_seconds": [1e-9]}, row | {"samples_seconds": [7000.0]}])
    ran = latbench("validate", tmp_path)
    assert ran.code == 0 and ran.out.count("times are in seconds") == 2


def test_validate_notes_repeated_points(latbench: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    tables.write_part(tmp_path, [row, row])
    ran = latbench("validate", tmp_path)
    assert ran.code == 0 and "1 points are measured more than once" in ran.out


def test_merge_makes_one_table(latbench: Any, two_tables: tuple[Path, Path], tmp_path: Path) -> None:
    ran = latbench("merge", *two_tables, "-o", tmp_path / "out")
    assert ran.code == 0 and "2 rows of 2" in ran.out
    assert sorted(tables.read(tmp_path / "out")["m"]) == [7, 8]
    assert "exists already" in latbench("merge", *two_tables, "-o", tmp_path / "out").refused(2)


def test_merge_refuses_unlike_devices(
    latbench: Any, two_tables: tuple[Path, Path], tmp_path: Path, row: dict[str, Any]
) -> None:
    tables.write_part(tmp_path / "c", [row | {"device": "nvidia-h200"}])
    sources = (two_tables[0], tmp_path / "c")
    assert "unlike devices" in latbench("merge", *sources, "-o", tmp_path / "out").refused(2)
    assert not (tmp_path / "out").exists()
    assert latbench("merge", *sources, "-o", tmp_path / "out", "--allow-mixed").code == 0


def test_merge_refuses_another_schema_version(latbench: Any, two_tables: tuple[Path, Path], tmp_path: Path) -> None:
    whole = parquet.read_table(two_tables[0])
    parquet.write_table(whole.set_column(0, "schema_version", pa.array([7])), tmp_path / "newer.parquet")
    ran = latbench("merge", two_tables[0], tmp_path / "newer.parquet", "-o", tmp_path / "out")
    assert f"newer.parquet: table version 7, this latbench reads {tables.SCHEMA_VERSION}" in ran.refused(5)


def test_doctor_tells_what_it_found(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "onnxruntime", ("x", ("no-such-package",)))
    ran = latbench("doctor", "--json")
    facts = json.loads(ran.out)
    assert facts["device"] == devices.cpu_device() and facts["environment"]["cores"] >= 1
    assert facts["backends"]["numba"]["version"]
    assert facts["backends"]["onnxruntime"] == {"version": None, "missing": ["no-such-package"]}
    out = latbench("doctor").out
    assert facts["device"] in out and "missing: pip install no-such-package" in out and "GPUs" in out
