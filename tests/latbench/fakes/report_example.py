"""A made-up but lifelike table with the files of the later steps, for the report's tests: times follow a formula."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from cost_models import AnchoredLookup, read_training_rows, save
from latbench.base.files import hash_file
from latbench.tables.table import hash_table
from latbench.tables.writer import write_environment, write_part
from latbench.workloads.workload import Layer, Workload, write_workload
from search.artifacts.layer_database import Database, Entry
from search.artifacts.profile import LayerChoice, Profile
from search.pipeline.speedup_verdict import ENGINE_COLUMNS, SpeedupVerdict
from search.pipeline.speedup_verdict import VERSION as VERDICT_VERSION
from search.problem.layers import Option
from search.pruning.storage import model_folder as pruned
from search.pruning.storage.model_folder import FILES, hash_manifest
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

ENDS = (1, 0.99, 1.01)
OVERHEAD_SECONDS = 4e-6
ROOF_FLOP_PER_SECOND = 160e9
DENSE_FLOP_PER_SECOND = {
    ("torch", "linear"): 62e9, ("torch", "mkldnn"): 112e9, ("onnxruntime", "auto"): 131e9, ("numba", "auto"): 58e9,
}  # fmt: skip
SPARSE_FLOP_PER_SECOND = {
    "unstructured": 46e9, "nm:2:4": 61e9, "vector:8": 84e9, "vector:32": 104e9, "shflbw:32": 98e9,
    "block:32x32": 90e9,
}  # fmt: skip
SPARSITIES = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98)
SHAPES: tuple[Shape, ...] = (
    LinearShape(768, 768, 128), LinearShape(3072, 768, 128), LinearShape(768, 3072, 128), LinearShape(10, 256, 64),
    LinearShape(512, 64, 64), LinearShape(1024, 512, 1), Conv2dShape(16, 16, 32, 32, 16, 3, 3, padding=(1, 1)),
    Conv2dShape(16, 32, 32, 32, 64, 3, 3, (2, 2), (1, 1)), Conv2dShape(1, 64, 56, 56, 256, 1, 1),
)  # fmt: skip
CHOSEN = (
    ("dense", 0.0), ("vector:32", 0.75), ("shflbw:32", 0.85), ("unstructured", 0.9), ("vector:32", 0.6),
    ("dense", 0.0),
)  # fmt: skip


@dataclass(frozen=True)
class Example:
    """Where the files lie."""

    table: Path
    model: Path
    profile: Path
    pruned: Path
    verify: Path
    workload: Path
    database: Path
    accuracy: Path

    @property
    def files(self) -> dict[str, Path]:
        """The files of the job, by the name of the option that takes them."""
        return {"cost_model": self.model, "profile": self.profile, "pruned": self.pruned, "verify": self.verify}

    @property
    def every(self) -> dict[str, Any]:
        """All optional inputs of a report, as `inputs.read` takes them."""
        others = {"workload": str(self.workload), "database": self.database, "accuracy": self.accuracy}
        return {**self.files, **others}


def row(
    shape: Shape,
    backend: str,
    pattern: str,
    sparsity: float,
    seconds: float | None,
    rng: np.random.Generator,
    **given: Any,
) -> dict[str, Any]:
    """A table row of one layer; `seconds` None makes it a failure, which `given` then explains."""
    found: dict[str, Any] = {
        "purpose": "sweep", "device": "amd-epyc-example", "backend": backend, "backend_version": "1.0", "model": "",
        "op": shape.op, "m": shape.m, "k": shape.k, "n": shape.n, "pattern": pattern, "sparsity_target": sparsity,
        "sparsity_actual": sparsity, "dtype_w": "float32", "dtype_a": "float32", "dtype_out": "float32",
        "layout": "token_major" if shape.op == "linear" else "nchw", "epilogue": "bias", "kernel_requested": "auto",
        "context": "isolated", "cache_mode": "rotated", "launch_mode": "call", "threads": 2, "status": "ok",
        "kernel_used": f"{backend}.{pattern.split(':')[0]}", "env_id": "example", "run_id": "example",
        "started_at": datetime(2026, 3, 2, 9, 0, tzinfo=UTC) + timedelta(seconds=int(rng.integers(3600))),
    }  # fmt: skip
    if isinstance(shape, Conv2dShape):
        found |= {name: getattr(shape, name) for name in ("batch", "c_in", "h", "w", "c_out", "kh", "kw")}
        for name in ("stride", "padding", "dilation"):
            found[f"{name}_h"], found[f"{name}_w"] = getattr(shape, name)
    if seconds is not None:
        noise = rng.gamma(2.0, rng.gamma(2.0, 0.004), size=15)
        found["samples_seconds"] = (seconds * (1 + noise)).tolist()
        kept = shape.flop * (1 - sparsity)
        found |= {
            "flop_nnz": int(kept), "bytes_min": 4 * int(shape.m * shape.k * (1 - sparsity) + shape.k * shape.n),
            "roofline_seconds": kept / ROOF_FLOP_PER_SECOND, "drift_ratio": 1.0 + 0.01 * rng.standard_normal(),
        }  # fmt: skip
    return found | given


def rows(rng: np.random.Generator) -> list[dict[str, Any]]:
    """All layer rows of the example, some failed."""
    found = []
    for shape in SHAPES:
        for (backend, kernel), rate in DENSE_FLOP_PER_SECOND.items():
            seconds = OVERHEAD_SECONDS * (1 + (backend == "onnxruntime")) + shape.flop / rate
            found.append(row(shape, backend, "dense", 0.0, seconds, rng, kernel_requested=kernel))
        for pattern, rate in SPARSE_FLOP_PER_SECOND.items():
            if pattern == "block:32x32" and shape.m % 32:
                reason = f"block:32x32 needs m divisible by 32, not {shape.m}"
                found.append(row(shape, "numba", pattern, 0.75, None, rng, status="unsupported", error=reason))
                continue
            for sparsity in (0.5,) if pattern.startswith("nm") else SPARSITIES:
                seconds = OVERHEAD_SECONDS + shape.flop * (1 - sparsity + 0.01) / rate
                status = "noisy" if rng.random() < 0.03 else "ok"
                found.append(row(shape, "numba", pattern, sparsity, seconds, rng, status=status))
    return found


def write(folder: Path, rng: np.random.Generator, task: str = "digits") -> Example:
    """Write the example's files into `folder`."""
    example = Example(
        folder / "table", folder / "cost_model.json", folder / "profile.json", folder / "pruned", folder / "verify",
        folder / "workload.yaml", folder / "database", folder / "accuracy.csv",
    )  # fmt: skip
    write_part(example.table, rows(rng))
    environment = {
        "env_id": "example", "cpu": "AMD EPYC example", "cores": 2, "memory_bytes": 8_000_000_000, "os": "Debian 12",
        "python": "3.11.9", "numba": "0.68.1", "torch": "2.13.0",
    }  # fmt: skip
    write_environment(example.table, environment)
    table_hash = hash_table(example.table)
    layers = {}
    for index, (pattern, sparsity) in enumerate(CHOSEN):
        seconds = (120 - 15 * index) * 1e-6
        layers[f"blocks.{index}.linear"] = LayerChoice(
            pattern, sparsity, seconds, 0.96 * seconds, 1.05 * seconds, error=0.01 * index
        )
    predicted = {"predicted_seconds": 5.35e-4, "predicted_low": 5.1e-4, "predicted_high": 5.6e-4}
    promise: dict[str, Any] = {"task": task, "target": 2.0, "dense_engine": "onnxruntime", **predicted}
    profile = Profile(
        **promise, layers=layers, backend="numba", threads=2, batch=64, device="amd-epyc-example",
        dense_seconds=1.13e-3, dense_seconds_low=1.11e-3, dense_seconds_high=1.15e-3, fixed_seconds=4.0e-5,
        fixed_seconds_low=3.8e-5, fixed_seconds_high=4.2e-5, loss=0.11, error=0.15, bound=0.14, ceiling=28.3,
        confidence=0.9, additivity_before=0.11, additivity_after=0.02, strategy="spdy", seed=0,
        most_bytes=2.0 * 2**20, weight_bytes=1.75 * 2**20, dense_bytes=6.5 * 2**20,
        table_hash=table_hash, model_hash="0123456789abcdef", inputs="fedcba9876543210",
    )  # fmt: skip
    profile.save(example.profile)
    shapes = {"median": 0.052, "p90": 0.164, "mape": 0.081, "within_5": 0.48, "within_10": 0.77, "coverage": 0.91,
              "nominal_coverage": 0.9, "width": 0.31, "noise_floor": 0.008, "held_out": 414}  # fmt: skip
    sparsities = {**shapes, "median": 0.011, "p90": 0.034, "mape": 0.017, "within_5": 0.95, "within_10": 0.99,
                  "width": 0.06, "held_out": 120}  # fmt: skip
    validation = {"held-out shapes": shapes, "held-out sparsities of measured shapes": sparsities}
    X, seconds = read_training_rows(example.table, {})
    save(example.model, AnchoredLookup().fit(X, seconds), table_hash, X, validation=validation)
    example.pruned.mkdir()
    profile.save(example.pruned / "profile.json")
    for name in FILES[:-1]:
        (example.pruned / name).touch()
    stages = [("dense", 0.071, 0.9806), ("one-shot", 0.142, 0.9694), ("global", 0.083, 0.975)]
    manifest = {
        "version": pruned.VERSION, "task": task, "score_name": "accuracy", "method": "global",
        "stages": [{"name": name, "loss": loss, "score": score} for name, loss, score in stages],
        "layers": {name: {"weights": 4096, "kept_weights": 1024, "packed_bytes": 6000} for name in layers},
        "files": {name: hash_file(example.pruned / name) for name in FILES},
    }  # fmt: skip
    (example.pruned / "manifest.json").write_text(json.dumps(manifest))
    measured = {"measured_seconds": 5.2e-4, "measured_low": 5.15e-4, "measured_high": 5.27e-4}
    gain = {"measured_speedup": 2.17, "measured_speedup_low": 2.14, "measured_speedup_high": 2.2}
    dense = {"torch": 2.1e-3, "torch-mkldnn": 1.3e-3, "onnxruntime": 1.13e-3, "pruned": 5.2e-4}
    engines = {
        name: dict(zip(ENGINE_COLUMNS, [part * end for part in (time, 1.13e-3 / time) for end in ENDS], strict=True))
        for name, time in dense.items()
    }
    engines["pruned"] |= dict(zip(ENGINE_COLUMNS[3:], gain.values(), strict=True))
    verdict = SpeedupVerdict(
        **promise, **measured, **gain, backend="numba", outcome="kept", dense_seconds=1.13e-3, engines=engines,
        left_out={}, slowdown=1.01, score_name="accuracy", score_dense=0.9806, score_pruned=0.975,
        device="amd-epyc-example", threads=2, batch=64, inputs=hash_manifest(example.pruned), code="made up",
    )  # fmt: skip
    _write_database(example, rng)
    _write_accuracies(example.accuracy, rng)
    example.verify.mkdir()
    (example.verify / "verify.json").write_text(json.dumps({"version": VERDICT_VERSION, **asdict(verdict)}))
    return example


def _write_database(example: Example, rng: np.random.Generator) -> None:
    """A workload with the profile's layers, and what they lose at each option: more where less is kept."""
    layers = tuple(Layer(f"blocks.{index}.linear", shape) for index, shape in enumerate(SHAPES[: len(CHOSEN)]))
    write_workload(Workload("example", "made up", layers), example.workload)
    database = Database(example.database, "0123456789abcdef", "made up")
    for layer in layers:
        damage = rng.uniform(0.5, 2.0)
        for place, pattern in enumerate(SPARSE_FLOP_PER_SECOND):
            for sparsity in (0.5,) if pattern.startswith("nm") else SPARSITIES:
                error = 0.02 * damage * (1 + place / 4) * (sparsity / (1 - sparsity)) ** 1.5
                mask = torch.ones(layer.shape.m, 1, dtype=torch.bool)
                entry = Entry(torch.ones(layer.shape.m, 1), mask, error)
                database.put(layer.name, Option(pattern, sparsity), entry)


def _write_accuracies(path: Path, rng: np.random.Generator) -> None:
    rows = [("dense", "gmp", 1.0, 0.92 + 0.002 * rng.standard_normal(), seed, 0.0) for seed in range(3)]
    for pattern, worse in (("unstructured", 1.0), ("vector:32", 1.6), ("shflbw:32", 1.3), ("block:32x32", 2.4)):
        for method, better in (("gmp", 1.0), ("acdc", 0.8)):
            for sparsity in (0.5, 0.75, 0.9, 0.95):
                speedup = 0.7 / (1.02 - sparsity) * worse**0.5
                lost = 0.004 * worse * better * sparsity / (1 - sparsity)
                rows += [
                    (pattern, method, speedup, 0.92 - lost + 0.002 * rng.standard_normal(), seed, sparsity)
                    for seed in range(3)
                ]
    columns = ["pattern", "method", "speedup", "accuracy", "seed", "sparsity"]
    pd.DataFrame(rows, columns=columns).to_csv(path, index=False)
