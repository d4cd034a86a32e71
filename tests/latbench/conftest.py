"""Rows, tiny workloads and a device lock of the test's own."""

from pathlib import Path
from typing import Any

import pytest

from latbench.workloads import Layer, Workload, save
from sparse_kernels.shapes import LinearShape


@pytest.fixture
def row() -> dict[str, Any]:
    """A row that `write_part` takes: a linear layer of known time."""
    return {
        "purpose": "sweep", "device": "amd-epyc-9b14", "backend": "numba", "op": "linear", "model": "",
        "m": 7, "k": 13, "n": 5, "pattern": "vector:32", "sparsity_target": 0.75, "pattern_seed": 0,
        "dtype_w": "float32", "dtype_a": "float32", "dtype_out": "float32", "layout": "token_major",
        "epilogue": "bias", "kernel_requested": "auto", "context": "isolated", "cache_mode": "rotated",
        "launch_mode": "call", "threads": 2, "status": "ok", "samples_seconds": [3e-3, 1e-3, 2e-3],
    }  # fmt: skip


@pytest.fixture
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own: its sweeps wait for nobody else's. Subprocesses inherit it."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A workload file of seven layers so small that each takes microseconds."""
    shapes = [LinearShape(m, 24, n) for m in (16, 17, 32) for n in (1, 5)] + [LinearShape(5, 7, 3)]
    path = tmp_path / "tiny.yaml"
    save(Workload("tiny", "made up", tuple(Layer(f"layer{i}", shape) for i, shape in enumerate(shapes))), path)
    return path
