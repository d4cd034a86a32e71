"""Rows, tiny workloads and a device lock of the test's own."""

import sys
from pathlib import Path
from typing import Any

import pytest

from latbench.cli import main
from latbench.workloads.workload import Layer, Workload, write_workload
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
        "run_id": "run", "timer": "perf_counter",
    }  # fmt: skip


@pytest.fixture
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder and locks of the test's own: its sweeps wait for nobody else's. Subprocesses inherit them."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LATBENCH_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps in this process do without the machine's ceilings, which take seconds to find."""
    monkeypatch.setattr("latbench.sweeping.sweep_machine.CpuMachine.pace", lambda machine, seconds_left: None)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A workload file of seven layers so small that each takes microseconds."""
    shapes = [LinearShape(m, 24, n) for m in (16, 17, 32) for n in (1, 5)] + [LinearShape(5, 7, 3)]
    path = tmp_path / "tiny.yaml"
    write_workload(
        Workload("tiny", "made up", tuple(Layer(f"layer{i}", shape) for i, shape in enumerate(shapes))), path
    )
    return path


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
            main.main()
        return Ran(ended.value.code or 0, *capsys.readouterr())

    return run
