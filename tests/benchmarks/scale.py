"""Tables of millions of rows: time and memory of merge, validate, hash, and of the inputs of fit, report, compare and
search.

    python tests/benchmarks/scale.py --rows 1000000 --points 20000

Rows are made up: layers of many shapes, dense and three patterns at nine sparsities, 20 samples each; every point is
measured as often as it takes, by default once, which is the worst case. Two tables that share a tenth of their rows
are merged; everything else is done to the result. Each step runs in a process of its own, whose peak resident memory
is printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import cost_models
from latbench.report import report_inputs
from latbench.tables.compare import read_compared_rows
from latbench.tables.layer_columns import derive_pattern_columns
from latbench.tables.merge import PART_ROWS, merge_tables
from latbench.tables.point_ids import hash_keys
from latbench.tables.schema import SCHEMA, SCHEMA_VERSION
from latbench.tables.table import hash_table
from latbench.tables.time_summary import summarise_sample_rows
from latbench.tables.validate import validate_table
from latbench.tables.writer import write_rows
from search.inputs.table_rows import read_sweep_rows
from sparse_kernels.shapes import LinearShape

SAMPLES = 20
FIRST_MICROSECOND = 1_767_225_600_000_000  # 2026 begins
SPARSITIES = np.array([0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98])
PATTERNS = ("vector:32", "shflbw:32", "unstructured")
TEXTS = {
    "purpose": "sweep", "device": "amd-epyc-9b14", "op": "linear", "model": "", "dtype_w": "float32",
    "dtype_a": "float32", "dtype_out": "float32", "layout": "token_major", "epilogue": "bias",
    "kernel_requested": "auto", "context": "isolated", "cache_mode": "rotated", "launch_mode": "call",
    "run_id": "0123456789ab", "backend_version": "1.2.3", "kernel_used": "some.kernel", "timer": "perf_counter",
    "pinning": "none", "stop_reason": "relative_error", "status": "ok", "flags": "",
}  # fmt: skip


def piece(first: int, count: int, points: int) -> pa.Table:
    """Rows `first` to `first + count` of an endless table of `points`; the same whenever they are asked for."""
    taken = np.arange(first, first + count)
    index = taken % points
    level, curve = index % len(SPARSITIES), index // len(SPARSITIES)
    shape = curve // len(PATTERNS)
    dense = level == 0
    pattern = np.where(dense, "dense", np.array(PATTERNS)[curve % len(PATTERNS)])
    m, k, n = 32 * (1 + shape % 128), 32 * (1 + shape // 128 % 128), 1 + shape // 128**2
    seconds = 1e-6 + 2e-11 * m * k * n * (1 - SPARSITIES[level])
    samples = seconds[:, None] * (1 + 0.01 * np.sin(1.7 * (SAMPLES * taken[:, None] + np.arange(SAMPLES))))
    structure = {text: derive_pattern_columns(text) for text in ("dense", *PATTERNS)}
    columns: dict[str, Any] = {
        **{name: [text] * count for name, text in TEXTS.items()},
        "schema_version": np.full(count, SCHEMA_VERSION), "threads": np.full(count, 2),
        "block": curve, "seq": level, "m": m, "k": k, "n": n, "pattern": pattern,
        "backend": np.where(dense, "torch", "numba"), "sparsity_target": SPARSITIES[level],
        # Each curve has a dense row of its own, told apart by the seed.
        "pattern_seed": curve % len(PATTERNS),
        "started_at": pa.array(FIRST_MICROSECOND + taken, pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        **{name: [structure[text][name] for text in pattern] for name in structure["dense"]},
        "samples_seconds": pa.array(list(samples), SCHEMA.field("samples_seconds").type),
        **summarise_sample_rows(samples, np.full(count, 0.001)), "burst_error": np.full(count, 0.001),
        "sample_count": np.full(count, SAMPLES), "drift_ratio": np.ones(count),
    }  # fmt: skip
    arrays = [
        pa.array(columns[field.name], field.type, from_pandas=True)
        if field.name in columns
        else pa.nulls(count, field.type)
        for field in SCHEMA
    ]
    table = pa.table(arrays, SCHEMA)
    ids = pa.array(hash_keys(table))
    return table.set_column(table.column_names.index("point_id"), SCHEMA.field("point_id"), ids)


def generate(folder: Path, first: int, last: int, points: int) -> None:
    """A table of the rows from `first` to `last`."""
    for start in range(first, last, PART_ROWS):
        write_rows(folder, piece(start, min(PART_ROWS, last - start), points))


def merge(folder: Path, rows: int, points: int) -> str:
    """Two tables into one."""
    merged = merge_tables([folder / "a", folder / "b"], folder / "table")
    assert merged.rows == rows
    return f"{merged.read} rows into {merged.rows}"


def validate(folder: Path, rows: int, points: int) -> str:
    """All checks."""
    found = Counter(finding.severity for finding in validate_table(folder / "table"))
    assert not found["corrupt"] and not found["suspect"]
    return f"{found['note']} notes"


def table_hash(folder: Path, rows: int, points: int) -> str:
    """The hash of all rows."""
    return hash_table(folder / "table")


def fit_input(folder: Path, rows: int, points: int) -> str:
    """What `latbench fit` learns from."""
    X, y = cost_models.read_training_rows(folder / "table")
    assert len(y) == points
    return f"{X.memory_usage(deep=True).sum() / 2**20:.0f} MiB of them the frame"


def report_input(folder: Path, rows: int, points: int) -> str:
    """What `latbench report` reads."""
    read = report_inputs.read_inputs(folder / "table")
    assert len(read.table) == points
    return f"{read.table.memory_usage(deep=True).sum() / 2**20:.0f} MiB of them the frame"


def compare_input(folder: Path, rows: int, points: int) -> str:
    """What `latbench compare` reads of each table: with samples, the latest of each point."""
    return f"{len(read_compared_rows(folder / 'table'))} rows"


def search_input(folder: Path, rows: int, points: int) -> str:
    """What `latbench search` reads, for fifty layers."""
    shapes = {LinearShape(32 * (1 + number), 32, 1) for number in range(50)}
    return f"{len(read_sweep_rows(folder / 'table', shapes, threads=2, backends=['numba']))} rows"


STEPS = (merge, validate, table_hash, fit_input, report_input, compare_input, search_input)


def measured(step: Callable[[Path, int, int], str], folder: Path, rows: int, points: int, answer: Any) -> None:
    """Run a step and send how it went: seconds, peak memory in bytes, memory before, its remark."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    started = time.perf_counter()
    remark = step(folder, rows, points)
    seconds = time.perf_counter() - started
    answer.send((seconds, resident("VmHWM"), before, remark))


def resident(name: str) -> int:
    """Bytes of memory of this process: VmRSS now, VmHWM at most."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return 1024 * int(line.split()[1])


def main() -> None:
    """Generate, run the steps, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--points", type=int, help="how many of the rows are of different points; by default all")
    parser.add_argument("--folder", type=Path, help="where the tables go, and stay; by default they are deleted")
    parser.add_argument("--steps", default=",".join(step.__name__ for step in STEPS))
    chosen = parser.parse_args()
    points = min(chosen.points or chosen.rows, chosen.rows)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        started, half, shared = time.perf_counter(), chosen.rows // 2, chosen.rows // 20
        for name, first, last in (("a", 0, half + shared), ("b", half - shared, chosen.rows)):
            if not (folder / name).exists():
                generate(folder / name, first, last, points)
        size = sum(path.stat().st_size for name in "ab" for path in (folder / name).iterdir())
        print(f"{datetime.now(UTC):%F}: {chosen.rows} rows of {points} points, {size / 2**20:.0f} MiB, generated in "
              f"{time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
        spawn = multiprocessing.get_context("spawn")
        for step in [step for step in STEPS if step.__name__ in chosen.steps.split(",")]:
            here, there = spawn.Pipe()
            process = spawn.Process(target=measured, args=(step, folder, chosen.rows, points, there))
            process.start()
            there.close()
            seconds, peak, before, remark = here.recv()
            process.join()
            memory = f"{peak / 2**20:7.0f} MiB at most, {before / 2**20:.0f} before"
            print(f"{step.__name__:13} {seconds:7.1f} s {memory}; {remark}", flush=True)


if __name__ == "__main__":
    main()
