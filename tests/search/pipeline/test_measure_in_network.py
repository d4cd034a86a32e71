"""Layer times taken inside the network: what DeepSparse says, as rows, as SPDY's file, and back."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from latbench.backends.cpu import deepsparse
from latbench.backends.cpu.deepsparse import Operation
from latbench.backends.cpu.deepsparse_environment import Environment
from latbench.cli.commands.layers import layers as layers_command
from latbench.errors import BadData, EnvironmentUnusable, UsageError
from latbench.importers.text_formats import convert_rows_to_spdy, convert_spdy_to_rows, read_spdy, write_spdy
from latbench.machines.processors import Processors
from latbench.tables.table import read_table
from latbench.tables.validate import validate_table
from latbench.tables.writer import write_part
from latbench.timing.sampling import Burst
from search.pipeline import measure_in_network
from search.pipeline.measure_in_network import (
    SPDY_LEVELS,
    RunSchedule,
    build_layer_rows,
    count_missing_runs,
    match_operations,
    select_task_rows,
    time_layers_in_network,
)
from search.task import Task, load_task
from sparse_kernels.shapes import LinearShape

TASK = """
from collections import OrderedDict
import torch
name = "little"
excluded = ("fc1",)
def model():
    torch.manual_seed(0)
    layers = {"fc1": torch.nn.Linear(24, 32), "fc2": torch.nn.Linear(32, 16), "fc3": torch.nn.Linear(16, 5)}
    return torch.nn.Sequential(OrderedDict(layers)).eval()
def example(): return (torch.linspace(-1, 1, 3 * 24).view(3, 24),)
def calibration(): return [example()]
def loss(model, batch): return model(*batch).square().mean()
def score(model): return float(model(*example()).mean())
"""
NOWHERE = Environment(Path("python"), Path("engine"))


@pytest.fixture
def little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setenv("LATBENCH_LOCKS", str(tmp_path / "locks"))  # a lock of its own
    (tmp_path / "little.py").write_text(TASK)
    return load_task(str(tmp_path / "little.py"))


def operation(*outputs: str, seconds: float = 1e-3, sparsity: float = 0.0, kernel: str = "gemm") -> Operation:
    return Operation(kernel, outputs, sparsity, seconds)


VALUES = {"/a/Gemm_output_0": "a", "/b/Gemm_output_0": "b", "/c/Conv_output_0": "c", "/d/Conv_output_0": "d"}


def test_only_what_ran_as_one_layer_is_that_layers_time() -> None:
    alone = operation("/a/Gemm_output_0")
    found = match_operations(
        [
            operation("<none>"),
            alone,
            operation("/b/Gemm_output_0"),  # in two parts: each is no time of the layer
            operation("/b/Gemm_output_0"),
            operation("/c/Conv_output_0", "/d/Conv_output_0"),  # two layers as one
            operation("/e/Add_output_0"),
        ],
        VALUES,
    )
    assert found == {"a": alone}


def test_an_operation_with_its_neighbours_sum_is_still_one_layers() -> None:
    fused = operation("/a/Gemm_output_0", "/a/Add_output_0")
    assert match_operations([fused], VALUES) == {"a": fused}


def test_rows_are_of_the_network_and_name_the_layer(tmp_path: Path) -> None:
    shapes = {"a": LinearShape(8, 4, 3), "b": LinearShape(4, 8, 3)}
    dense = [operation("/a/Gemm_output_0", seconds=2e-3), operation("/b/Gemm_output_0"), operation("<none>")]
    sparse = [
        operation("/a/Gemm_output_0", seconds=1e-3, sparsity=0.75, kernel="ks_gemm_hyb"),
        operation("/b/Gemm_output_0", "/a/Gemm_output_0", seconds=5e-4),
    ]
    analyses = {0.0: [dense, dense], 0.7: [sparse, sparse[:1]]}
    made = build_layer_rows("net", shapes, VALUES, analyses, threads=2, batch=3, calls=20)
    write_part(tmp_path / "table", made)
    table = read_table(tmp_path / "table")
    assert set(table["context"]) == {"network"} and set(table["backend"]) == {"deepsparse"}
    assert set(table["backend_version"]) == {"1.8.0"}
    found = table.set_index(["model", "sparsity_target"])
    assert set(found.index) == {("net", 0.0), ("net", 0.7), ("net:a", 0.0), ("net:b", 0.0)}
    assert found.loc[("net", 0.0), "median_seconds"] == pytest.approx(4e-3)
    assert found.loc[("net:a", 0.0), "samples_seconds"].tolist() == [2e-3, 2e-3]
    assert found.loc[("net:a", 0.0), ["op", "m", "k", "n", "pattern", "nnz"]].tolist() == [
        "linear", 8, 4, 3, "dense", 32,
    ]  # fmt: skip
    assert table["point_id"].nunique() == len(table)

    analyses[0.7] = [sparse[:1], sparse[:1]]
    made = build_layer_rows("net", shapes, VALUES, analyses, threads=2, batch=3, calls=20)
    (pruned,) = [row for row in made if (row.get("model"), row["sparsity_target"]) == ("net:a", 0.7)]
    assert (pruned["pattern"], pruned["kernel_used"], pruned["sparsity_actual"]) == (
        "unstructured",
        "ks_gemm_hyb",
        0.75,
    )
    assert (pruned["nnz"], pruned["flop_nnz"], pruned["flop_dense"]) == (8, 48, 192)


class Fake:
    """Stands for DeepSparse: every layer takes a millisecond, less what is pruned; the n-th analysis is n% slower.

    Called as a whole, the model takes 2 ms.
    """

    def __init__(self) -> None:
        self.asked: list[float | None] = []
        self.fuses_at: float | None = None
        self.interrupted_at: int | None = None

    def ask(self, what: float | None) -> None:
        self.asked.append(what)
        if len(self.asked) == self.interrupted_at:
            raise KeyboardInterrupt

    def analyse(
        self, path: Path, inputs: Sequence[np.ndarray], *, threads: int, environment: Environment,
        sparsity: float | None, calls: int,
    ) -> list[Operation]:  # fmt: skip
        assert path.is_file() and inputs[0].shape == (3, 24) and threads == 2 and environment is NOWHERE
        assert calls == 250  # half a second of 2 ms
        self.ask(sparsity)
        seconds = 1e-3 * (1 - (sparsity or 0.0)) * (1 + len(self.asked) / 100)
        made = [operation(value, seconds=seconds, sparsity=sparsity or 0.0) for value in self.values]
        if self.fuses_at == sparsity and sparsity is not None:
            return [operation(*self.values, seconds=seconds)]
        return made

    def load(self, path: Path, inputs: Sequence[np.ndarray], *, threads: int, environment: Environment) -> Any:
        assert path.is_file() and inputs[0].shape == (3, 24) and threads == 2 and environment is NOWHERE
        self.ask(-1.0)
        return nullcontext(SimpleNamespace(burst=lambda seconds: Burst([2e-3] * 5)))

    values = ("/fc1/Gemm_output_0", "/fc2/Gemm_output_0", "7")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, little: Task) -> Fake:
    found = Fake()
    values = {"/fc1/Gemm_output_0": "fc1", "/fc2/Gemm_output_0": "fc2", "7": "fc3"}
    monkeypatch.setattr(deepsparse, "time_operations", found.analyse)
    monkeypatch.setattr(deepsparse, "load_model", found.load)
    monkeypatch.setattr(measure_in_network, "find_layer_values", lambda *_: values)
    monkeypatch.setattr("latbench.machines.processors.read_processors", lambda: Processors(2, 2))
    return found


def time_layers(task: Task, folder: Path, runs: dict[float, int], **options: Any) -> list[str]:
    return time_layers_in_network(task, folder, NOWHERE, RunSchedule(runs), threads=2, **options)


def test_sparsities_take_turns(little: Task, fake: Fake, tmp_path: Path) -> None:
    told: list[tuple[str, int | None, int | None]] = []
    untimed = time_layers(little, tmp_path / "table", {0.5: 3, 0.9: 2}, progress=lambda *now: told.append(now)
    )  # fmt: skip
    assert untimed == []
    rounds = [fake.asked[i:j] for i, j in ((0, 4), (4, 8), (8, 11))]
    assert [set(each) for each in rounds] == [{-1.0, None, 0.5, 0.9}, {-1.0, None, 0.5, 0.9}, {-1.0, None, 0.5}]
    assert rounds[0][0] == rounds[1][0] == rounds[2][0] == -1.0 and rounds[0] != rounds[1]
    assert told[-1] == ("running the model at imposed sparsities", 10, 11)
    table = read_table(tmp_path / "table")
    assert table["point_id"].is_unique and not list(validate_table(tmp_path / "table"))
    swept = table[table["purpose"] == "sweep"]
    assert set(swept["inner_loops"]) == {250}
    assert swept.groupby("sparsity_target")["sample_count"].unique().to_dict() == {0.0: [3], 0.5: [3], 0.9: [2]}
    # The first layer is excluded by the task: its time is in the whole, and in no row of its own.
    assert set(table["model"]) == {"little", "little:fc2", "little:fc3"}
    dense = swept[(swept["model"] == "little:fc2") & (swept["pattern"] == "dense")].iloc[0]
    runs = [1e-3 * (1 + (i + 1) / 100) for i, sparsity in enumerate(fake.asked) if sparsity is None]
    assert dense["samples_seconds"].tolist() == pytest.approx(runs)
    (whole,) = table[table["purpose"] == "baseline"].to_dict("records")
    assert (whole["op"], whole["model"], whole["pattern"], whole["batch"]) == ("model", "little", "dense", 3)
    assert (whole["median_seconds"], whole["sample_count"]) == (2e-3, 15)


def test_what_was_run_is_kept_when_it_is_interrupted_and_the_rest_is_run_later(
    little: Task, fake: Fake, tmp_path: Path
) -> None:
    folder, wanted = tmp_path / "table", [0.5, 0.9]
    assert count_missing_runs(little, folder, 2, wanted, 2) == {0.5: 2, 0.9: 2}
    fake.interrupted_at = 6
    with pytest.raises(KeyboardInterrupt):
        time_layers(little, folder, {0.5: 2, 0.9: 2})
    missing = count_missing_runs(little, folder, 2, wanted, 2)
    done = [fake.asked[:5].count(sparsity) for sparsity in wanted]
    assert missing == {sparsity: 2 - count for sparsity, count in zip(wanted, done, strict=True) if count < 2}
    fake.interrupted_at = None
    time_layers(little, folder, missing)
    assert count_missing_runs(little, folder, 2, wanted, 2) == {}
    rows = select_task_rows(little, folder, 2).set_index(["model", "purpose", "sparsity_target"])
    for sparsity in wanted:
        runs = [i for i, asked in enumerate(fake.asked) if asked == sparsity and i != 5]
        seconds = [1e-3 * (1 - sparsity) * (1 + (i + 1) / 100) for i in runs]
        # Those of the run that was cut short come first.
        assert rows.loc[("little:fc2", "sweep", sparsity), "samples_seconds"].tolist() == pytest.approx(seconds)
    assert rows.loc[("little", "sweep", 0.0), "sample_count"] == [*fake.asked[:5], *fake.asked[6:]].count(None)

    fake.interrupted_at = len(fake.asked) + 1
    with pytest.raises(KeyboardInterrupt):
        time_layers(little, tmp_path / "other", {0.5: 1})
    assert not (tmp_path / "other").exists()


def test_runs_of_other_threads_batches_or_shapes_do_not_count(little: Task, fake: Fake, tmp_path: Path) -> None:
    folder = tmp_path / "table"
    time_layers(little, folder, {0.5: 2})
    assert count_missing_runs(little, folder, 2, [0.5, 0.9], 2) == {0.9: 2}
    assert count_missing_runs(little, folder, 2, [0.5], 3) == {0.5: 1}
    assert count_missing_runs(little, folder, 1, [0.5], 2) == {0.5: 2}
    (tmp_path / "little.py").write_text(TASK.replace("3 * 24).view(3", "5 * 24).view(5"))
    other = load_task(str(tmp_path / "little.py"))
    assert count_missing_runs(other, folder, 2, [0.5], 2) == {0.5: 2}
    assert select_task_rows(other, folder, 2).empty


def test_timing_anew_forgets_what_was_timed_before(little: Task, fake: Fake, tmp_path: Path) -> None:
    time_layers(little, tmp_path / "table", {0.5: 2})
    time_layers(little, tmp_path / "table", {0.5: 1}, remeasure=True)
    assert set(select_task_rows(little, tmp_path / "table", 2)["sample_count"]) == {1, 5}


def test_layers_that_never_run_alone_are_told(little: Task, fake: Fake, tmp_path: Path) -> None:
    fake.fuses_at = 0.9
    with pytest.raises(EnvironmentUnusable, match="DeepSparse runs no layer of task little by itself"):
        time_layers(little, tmp_path / "table", {0.9: 1})
    fake.fuses_at = None
    fake.values = ("/fc1/Gemm_output_0", "/fc2/Gemm_output_0")
    assert time_layers(little, tmp_path / "table", {0.9: 1}) == ["fc3"]


def test_the_times_make_a_spdy_file_that_can_be_imported(little: Task, fake: Fake, tmp_path: Path) -> None:
    time_layers(little, tmp_path / "table", {0.5: 3, 0.9: 3})
    table = select_task_rows(little, tmp_path / "table", 2)
    write_spdy(convert_rows_to_spdy(table, "little"), tmp_path / "little.txt")
    timings = read_spdy(tmp_path / "little.txt")
    assert list(timings.layers) == ["fc2", "fc3"]
    assert [sparsity for _, sparsity in timings.layers["fc2"]] == [0.0, 0.5, 0.9]
    assert timings.base == pytest.approx(3 * timings.layers["fc2"][0][0], rel=1e-6)
    assert timings.prunable == pytest.approx(2 * timings.layers["fc2"][0][0], rel=1e-6)
    again = convert_spdy_to_rows(timings, network="little", pattern="unstructured", device="cpu")
    write_part(tmp_path / "again", again)
    reread = convert_rows_to_spdy(read_table(tmp_path / "again"), "little")
    assert reread.layers == timings.layers and reread.base == timings.base
    with pytest.raises(BadData, match="no dense times of other and its layers"):
        convert_rows_to_spdy(table, "other")


def test_the_levels_are_those_of_the_published_files(data: Path) -> None:
    published: Any = read_spdy(data / "spdy_tables" / "rn50_unstr.txt").layers
    for points in published.values():
        levels = sorted({sparsity for _, sparsity in points} - {0.0})
        np.testing.assert_allclose(levels, SPDY_LEVELS, atol=1.1e-4)


def write_task(folder: Path, layers: str) -> str:
    """Write the task with other layers, and return its reference."""
    start, end = TASK.index("    layers = "), TASK.index("    return torch.nn.Sequential")
    source = f"{TASK[:start]}    layers = {layers}\n{TASK[end:]}".replace('excluded = ("fc1",)', "excluded = ()")
    (folder / "little.py").write_text(source)
    return str(folder / "little.py")


def test_layers_that_are_called_by_numbers_get_into_a_spdy_file(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write_task(
        tmp_path, '{"0": torch.nn.Linear(24, 8), "1": torch.nn.ReLU(), "2": torch.nn.Linear(8, 5)}'
    )
    monkeypatch.setattr("latbench.backends.cpu.deepsparse_environment.find_environment", lambda: NOWHERE)
    monkeypatch.setattr(
        measure_in_network, "find_layer_values", lambda *_: {"/fc1/Gemm_output_0": "0", "/fc2/Gemm_output_0": "2"}
    )
    layers_command(reference, tmp_path / "table", ["0.5"], 2, 1, tmp_path / "little.txt")
    timings = read_spdy(tmp_path / "little.txt")
    assert list(timings.layers) == ["0", "2"]
    assert [sparsity for _, sparsity in timings.layers["2"]] == [0.0, 0.5]


def test_names_that_a_spdy_file_cannot_hold_are_refused_before_anything_is_timed(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = write_task(tmp_path, '{"a": torch.nn.Linear(24, 8), "inf": torch.nn.Linear(8, 5)}')
    monkeypatch.setattr("latbench.backends.cpu.deepsparse_environment.find_environment", lambda: NOWHERE)
    with pytest.raises(BadData, match="a SPDY timing file cannot hold a layer called 'inf'"):
        layers_command(reference, tmp_path / "table", ["0.5"], 2, 1, tmp_path / "little.txt")
    assert fake.asked == [] and not (tmp_path / "table").exists()


def test_more_threads_than_processors_are_refused_before_anything_is_timed(
    little: Task, fake: Fake, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="3 threads: this process may use 2 processors"):
        time_layers_in_network(little, tmp_path / "table", NOWHERE, RunSchedule({0.5: 1}), threads=3)
    assert fake.asked == []
