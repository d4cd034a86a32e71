"""Rows of small tables for the report's tests: one layer, its time given, everything else filled in."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pandas as pd

from latbench.tables.point_ids import hash_key
from latbench.tables.schema import SCHEMA


def row(pattern: str, sparsity: float, seconds: float, backend: str = "numba", **columns: Any) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(SCHEMA.names)
    found |= {
        "purpose": "sweep", "device": "cpu", "backend": backend, "op": "linear", "m": 4, "k": 3, "n": 2,
        "pattern": pattern, "format": pattern.split(":")[0], "sparsity_target": sparsity, "sparsity_actual": sparsity,
        "kernel_requested": "auto", "kernel_used": f"{backend}.kernel", "threads": 2, "layout": "token_major",
        "dtype_w": "float32", "median_seconds": seconds, "low_seconds": 0.9 * seconds, "high_seconds": 1.2 * seconds,
        "status": "ok", "started_at": datetime(2026, 1, 1, tzinfo=UTC), **columns,
    }  # fmt: skip
    return found | {"point_id": hash_key(found)}


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(list(rows)).astype(dict.fromkeys(("low_seconds", "high_seconds", "median_seconds"), float))
