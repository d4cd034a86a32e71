"""Which rows of a CPU's table timed what is installed, and which other kernels of latbench."""

from typing import Any

import pandas as pd
import pytest

from latbench.backends.cpu import cpu_versions
from latbench.backends.cpu.cpu_versions import CpuVersions, describe_old_kernels, find_old_kernels
from latbench.backends.cpu.numba import prepare
from latbench.backends.cpu.prepare_point import build_synthetic_layer
from latbench.base.bundled_data import find_bundled_table
from latbench.base.engine_registry import NUMBA
from latbench.base.engine_version import parse_engine_version
from latbench.workloads.points import Point
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

DIGITS = {"row_panels": "00000001", "token_blocks": "00000002", "unstructured_rows": "00000003"}
NOW = CpuVersions({NUMBA: "0.68.1", "torch": "2.13.0", "openvino": None})


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_versions, "fingerprint_cpu_family", DIGITS.get)


def rows(*wanted: tuple[str, str, Any]) -> pd.DataFrame:
    return pd.DataFrame(wanted, columns=["backend", "status", "backend_version"]).assign(op="linear")


@pytest.mark.usefixtures("made_up")
def test_a_text_names_the_package_and_the_families_that_ran() -> None:
    assert NOW.describe("torch") == "2.13.0"
    assert (
        NOW.describe(NUMBA, ["token_blocks", "row_panels"]) == "0.68.1 (row_panels 00000001, token_blocks 00000002)"
    )
    assert NOW.describe("openvino") is None
    assert NOW.describe(NUMBA, ["gone"]) == "0.68.1"


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("row", "current", "old_kernel"),
    [
        ((NUMBA, "ok", "0.68.1 (row_panels 00000001)"), True, False),
        ((NUMBA, "ok", "0.68.1 (row_panels ffffffff)"), False, True),
        ((NUMBA, "ok", "0.68.1 (row_panels 00000001, token_blocks ffffffff)"), False, True),
        ((NUMBA, "ok", "0.68.1 (gone 00000001)"), False, True),
        ((NUMBA, "noisy", "0.68.1"), False, True),  # from before rows named families
        ((NUMBA, "ok", None), False, False),
        ((NUMBA, "ok", "0.67.0 (row_panels 00000001)"), False, False),  # the same kernels, by another compiler
        ((NUMBA, "unsupported", "0.68.1"), True, False),
        ((NUMBA, "unsupported", "0.67.0"), False, False),
        (("torch", "ok", "2.13.0"), True, False),
        (("torch", "ok", "2.12.1"), False, False),
        (("torch", "ok", None), False, False),
        (("openvino", "ok", "2026.4.1"), True, False),  # not installed: nothing else is here
        (("deepsparse", "ok", "1.8.0"), True, False),
    ],
)
def test_a_row_is_of_what_is_here_or_of_something_else(
    row: tuple[str, str, Any], current: bool, old_kernel: bool
) -> None:
    assert NOW.current(rows(row)).tolist() == [current]
    assert find_old_kernels(rows(row)).tolist() == [old_kernel]


@pytest.mark.usefixtures("made_up")
def test_old_kernels_are_counted_in_words() -> None:
    new, other = "0.68.1 (row_panels 00000001)", "0.68.1 (row_panels 00000001, token_blocks 1)"
    table = rows(
        (NUMBA, "ok", new), (NUMBA, "ok", other), (NUMBA, "noisy", "0.68.1"), (NUMBA, "error", "0.68.1"),
        ("torch", "ok", "1.0"),
    )  # fmt: skip
    said = "2 of 3 times of latbench's kernels are of other versions than the installed ones (token_blocks, unknown)"
    assert describe_old_kernels(table, "t") == f"{said}; `latbench sweep --cpu --refresh t` tells which have moved"
    for bundled in ("bundled://amd-epyc-zen5-2-threads", find_bundled_table("amd-epyc-zen5-2-threads")):
        assert describe_old_kernels(table, bundled) == said
    assert describe_old_kernels(table[:1], "t") is None and describe_old_kernels(rows(), "t") is None
    assert NOW.current(rows()).shape == (0,)


@pytest.mark.usefixtures("made_up")
def test_whole_models_have_no_old_kernels() -> None:
    table = rows((NUMBA, "ok", "0.68.1")).assign(op="model")
    assert not find_old_kernels(table).any() and describe_old_kernels(table, "t") is None


@pytest.mark.usefixtures("made_up")
def test_columns_of_categories_are_judged_alike() -> None:
    table = rows((NUMBA, "ok", "0.68.1 (row_panels 00000001)"), (NUMBA, "ok", None), ("torch", "ok", "1.0"))
    narrow = table.astype("category")
    assert NOW.current(narrow).tolist() == NOW.current(table).tolist() == [True, False, False]


LAYERS: list[tuple[Shape, Pattern, str]] = [
    (LinearShape(96, 64, 128), VectorWise(32), "vector"),
    (LinearShape(96, 64, 1), Unstructured(), "unstructured"),
    (LinearShape(64, 64, 33), NM(2, 4), "nm"),
    (LinearShape(64, 96, 9), ShflBW(32), "shflbw"),
    (LinearShape(64, 96, 64), Dense(), "dense"),
    (Conv2dShape(1, 32, 9, 9, 32, 3, 3, padding=(1, 1)), BlockWise(8, 8), "block"),
    (Conv2dShape(2, 16, 8, 8, 32, 1, 1), Unstructured(), "unstructured"),
]


@pytest.mark.parametrize(("shape", "pattern", "format"), LAYERS, ids=str)
def test_a_prepared_layer_knows_the_families_that_it_runs(shape: Shape, pattern: Pattern, format: str) -> None:
    sparsity = {"dense": 0.0, "nm": 0.5}.get(format, 0.75)
    point = Point("here", NUMBA, "auto", shape, pattern, sparsity, threads=1)
    engine = prepare(point, build_synthetic_layer(point))
    text = CpuVersions({NUMBA: "0.68.1"}).describe(NUMBA, engine.families)
    version = parse_engine_version(text)
    assert version is not None and {*version.parts} == {*engine.families} != set()
    assert not find_old_kernels(rows((NUMBA, "ok", text))).any()
