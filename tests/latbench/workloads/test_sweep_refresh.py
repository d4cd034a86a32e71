"""Tables that age: what a sweep, a merge, a fit and a validation say of times of other kernels, and `--refresh`."""

import json
from pathlib import Path
from typing import Any

import pytest

from latbench.backends.cpu import cpu_versions
from latbench.base.bundled_data import find_bundled_table
from latbench.tables.table import read_table
from latbench.workloads.workload import Layer, Workload, write_workload
from sparse_kernels.shapes import LinearShape

pytestmark = pytest.mark.usefixtures("no_pace")


@pytest.fixture
def sweep(tmp_path: Path) -> tuple[Any, ...]:
    """The arguments of a sweep of six points of latbench's kernels."""
    layers = tuple(Layer(f"layer{m}", LinearShape(m, 24, 5)) for m in (8, 16, 24))
    write_workload(Workload("three", "made up", layers), tmp_path / "three.yaml")
    return ("sweep", "--cpu", "--workload", tmp_path / "three.yaml", "--patterns", "block:8x8", "--sparsities",
            "0.5,0.75", "--backends", "numba", "--threads", "1", "-o")  # fmt: skip


@pytest.fixture
def old(latbench: Any, sweep: tuple[Any, ...], tmp_path: Path) -> Path:
    """A table of it from before today's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_versions, "fingerprint_cpu_family", lambda family: "0ld0ld00")
        assert latbench(*sweep, tmp_path / "old").code == 0
    return tmp_path / "old"


def test_rows_name_the_kernels_that_they_timed(latbench: Any, old: Path) -> None:
    versions = read_table(old)["backend_version"]
    assert versions.str.contains(r"^\S+ \((?:\w+ 0ld0ld00(?:, )?)+\)$").all()


def test_a_sweep_takes_old_times_again(latbench: Any, sweep: tuple[Any, ...], old: Path) -> None:
    ran = latbench(*sweep, old)
    assert ran.code == 0 and f"6 times of {old} are of other versions of engines or kernels" in ran.err
    assert "were there already" not in ran.out
    frame = read_table(old)
    assert len(frame) >= 12 and frame["point_id"].nunique() == 6
    again = latbench(*sweep, old)
    assert "6 were there already" in again.out and "other versions" not in again.err
    checked = latbench("validate", old)
    assert checked.code == 0 and "other versions" not in checked.out  # readers take the latest


def test_a_refresh_times_a_sample_and_keeps_it(latbench: Any, old: Path) -> None:
    ran = latbench("sweep", "--cpu", "--refresh", old)
    assert ran.code == 0 and f"6 times of {old} are of other versions than the installed ones: 6 are timed" in ran.err
    assert "numba linear" in ran.out and "new / old" in ran.out and "no engine of the table is unchanged" in ran.out
    frame = read_table(old)
    assert frame[~frame["backend_version"].str.contains("0ld0ld00")]["point_id"].nunique() == 6
    again = latbench("sweep", "--cpu", "--refresh", old, "--json")
    assert again.code == 0 and json.loads(again.out) == {"table": str(old), "machine": None, "groups": []}
    assert "no time is of another version" in again.err


def test_unchanged_engines_tell_what_the_machine_changed(latbench: Any, sweep: tuple[Any, ...], old: Path) -> None:
    """torch's rows are current: they are timed again beside the old ones."""
    dense = [each if each not in ("block:8x8", "numba") else {"block:8x8": "dense", "numba": "torch"}[each]
             for each in sweep]  # fmt: skip
    assert latbench(*dense, old).code == 0
    before = len(read_table(old))
    document = json.loads(latbench("sweep", "--cpu", "--refresh", old, "--json").out)
    assert 0 < document["machine"]["low"] <= document["machine"]["ratio"] <= document["machine"]["high"]
    assert {group["group"].partition(" ")[0] for group in document["groups"]} == {"numba"}
    frame = read_table(old)
    assert set(frame["backend"][before:]) == {"numba", "torch"}


def test_a_refresh_as_json_has_a_group_for_each_kind_of_kernel(latbench: Any, old: Path) -> None:
    document = json.loads(latbench("sweep", "--cpu", "--refresh", old, "--json").out)
    assert document["table"] == str(old)
    assert sum(group["old"] for group in document["groups"]) == 6
    for group in document["groups"]:
        assert group["group"].startswith("numba linear ") and 0 < group["low"] <= group["ratio"] <= group["high"]


@pytest.mark.parametrize("more", [("--patterns", "dense"), ("-o", "elsewhere"), ("--dry-run",), ("--int8",)])
def test_a_refresh_takes_its_points_from_the_table(latbench: Any, tmp_path: Path, more: tuple[str, ...]) -> None:
    line = latbench("sweep", "--cpu", "--refresh", tmp_path, *more).refused(2)
    assert "takes its points from" in line


def test_what_cannot_be_refreshed_is_refused(latbench: Any, tmp_path: Path) -> None:
    for table in ("bundled://amd-epyc-zen5-2-threads", find_bundled_table("amd-epyc-zen5-2-threads")):
        assert "came with latbench" in latbench("sweep", "--cpu", "--refresh", table).refused(2)
    assert "no such table" in latbench("sweep", "--cpu", "--refresh", tmp_path / "none").refused(5)
    (tmp_path / "part.parquet").write_bytes(b"")
    assert "is a file" in latbench("sweep", "--cpu", "--refresh", tmp_path / "part.parquet").refused(2)


def test_a_table_of_two_numbers_of_threads_needs_one(latbench: Any, row: dict[str, Any], tmp_path: Path) -> None:
    from latbench.tables.writer import write_part

    write_part(tmp_path / "table", [row, row | {"threads": 1}])
    assert "one number of threads" in latbench("sweep", "--cpu", "--refresh", tmp_path / "table").refused(2)


def test_a_table_of_another_device_is_refused(latbench: Any, row: dict[str, Any], tmp_path: Path) -> None:
    from latbench.tables.writer import write_part

    write_part(tmp_path / "table", [row | {"device": "another-cpu", "threads": 1}])
    line = latbench("sweep", "--cpu", "--refresh", tmp_path / "table").refused(2)
    assert "it has another-cpu with 1 threads" in line


def test_a_refresh_that_is_stopped_judges_what_it_has(latbench: Any, old: Path) -> None:
    ran = latbench("sweep", "--cpu", "--refresh", old, "--time-budget", "0.001")
    assert ran.code == 4 and "new / old" in ran.out and "the same command goes on" in ran.err


def test_other_commands_tell_of_old_times(latbench: Any, sweep: tuple[Any, ...], old: Path, tmp_path: Path) -> None:
    assert latbench(*sweep, tmp_path / "new").code == 0
    merged = latbench("merge", old, tmp_path / "new", "-o", tmp_path / "both")
    assert (
        merged.code == 0 and "0ld0ld00 and" in merged.err and "the latest settled one of a point counts" in merged.err
    )
    assert "several versions" not in latbench("merge", tmp_path / "new", "-o", tmp_path / "copy").err
    said = "6 of 6 times of latbench's kernels are of other versions than the installed ones ("
    fitted = latbench("fit", old, "-o", tmp_path / "model.json")
    assert fitted.code == 0 and said in fitted.err and "used together" not in fitted.err
    assert said not in latbench("fit", tmp_path / "new", "-o", tmp_path / "model.json").err
    checked = latbench("validate", old)
    assert checked.code == 0 and said in checked.out
    assert said in json.loads(latbench("validate", old, "--json").out)["findings"][-1]["text"]
