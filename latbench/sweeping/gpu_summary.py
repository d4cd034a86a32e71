"""A summary of a GPU's table as text: every kernel against the fastest dense one and against its peers.

A ratio above 1 means faster, and names the type of its baseline. Only rows of equal shape and cache mode are
compared: with the fastest dense kernel of the same types of weights and activations, and with the fastest of any
types. Times marked (call) were not taken in a CUDA graph, and include the gaps between launches. Times marked
throttled were taken while heat or the power supply slowed the device down; they are not compared and not in any
median. Times marked in_l2 are of layers so small that the L2 may have held them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from latbench.base.engine_registry import GPU_ENGINES
from latbench.tables.schema import TIMED
from latbench.tables.table import select_timed

OUR_ENGINES = [name for name, engine in GPU_ENGINES.items() if engine.ours]
THROTTLED = "throttled"
LIBRARIES = ("cublas", "cudnn", "cusparse", "cusparselt", "triton")  # the peers of our kernels

SHAPE_COLUMNS = [
    "op", "m", "k", "n", "batch", "c_in", "h", "w", "kh", "kw", "stride_h", "stride_w",
    "c_out", "padding_h", "padding_w", "dilation_h", "dilation_w", "epilogue", "cache_mode",
]  # fmt: skip
TYPE_COLUMNS = ["dtype_w", "dtype_a"]
_TYPED = [*SHAPE_COLUMNS, *TYPE_COLUMNS]
_WORK = [*_TYPED, "pattern", "sparsity_target"]


def compare_kernels(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with a time, with the times of their fastest dense kernel and fastest peer.

    Throttled rows are included for points that have no other. The column dense_seconds is of the same types,
    any_dense_seconds of any types, and any_dense_dtype names them. The columns peer_seconds and peer_kernel are of
    the same sparse work. All are missing where there is none.
    """
    frame = frame.reset_index(drop=True)
    rows = frame.loc[[*select_timed(frame).index, *_throttled(frame).index]]
    sizes = rows[SHAPE_COLUMNS].select_dtypes("number").columns
    # A linear layer has no filters; groups of missing values would be left out.
    rows[sizes] = rows[sizes].fillna(-1)
    quiet = rows[rows["status"] != THROTTLED]
    dense = quiet[quiet["pattern"] == "dense"]
    peers = quiet[(quiet["pattern"] != "dense") & ~quiet["backend"].isin(OUR_ENGINES)]
    return (
        rows.join(_fastest(dense, _TYPED, "dense"), on=_TYPED)
        .join(_fastest(dense, SHAPE_COLUMNS, "any_dense"), on=SHAPE_COLUMNS)
        .join(_fastest(peers, _WORK, "peer"), on=_WORK)
    )


def _throttled(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the latest throttled row of each point that has no valid time."""
    known = set(select_timed(frame)["point_id"])
    rows = frame[(frame["status"] == THROTTLED) & ~frame["point_id"].isin(known)]
    return rows.sort_values("started_at", kind="stable").drop_duplicates("point_id", keep="last")


def _fastest(rows: pd.DataFrame, key: list[str], name: str) -> pd.DataFrame:
    names = {"median_seconds": f"{name}_seconds", "kernel_used": f"{name}_kernel", "weights": f"{name}_dtype"}
    first = rows.assign(weights=rows["dtype_w"]).sort_values("median_seconds").drop_duplicates(key).set_index(key)
    return first[list(names)].rename(columns=names)


def format_gpu_summary(frame: pd.DataFrame, environment: Mapping[str, Any], remarks: list[str]) -> str:
    """Return the whole summary: the device, counts, medians of ratios, every time, and failures."""
    lines = [
        f"{environment.get('device')}: driver {environment.get('driver')}, CUDA {environment.get('cuda_driver')}, "
        f"torch {environment.get('torch')}, cupy "
        f"{environment.get('cupy-cuda13x') or environment.get('cupy-cuda12x')}, "
        + ", ".join(f"{name} {environment.get(name)}" for name in LIBRARIES),
        *remarks,
        "rows: " + ", ".join(f"{count} {status}" for status, count in frame["status"].value_counts().items()),
    ]
    rows = compare_kernels(frame)
    lines += [
        "",
        "median over shapes of the speedup over the fastest dense kernel of the same type, over that of any",
    ]
    lines += ["type, and over the fastest peer:"]
    lines += list(_medians(rows))
    for _, of_shape in rows.groupby(SHAPE_COLUMNS, sort=False):
        lines += ["", *_of_shape(of_shape)]
    failures = list(_failures(frame))
    lines += ["", "not timed:", *failures] if failures else []
    return "\n".join(lines) + "\n"


def _medians(rows: pd.DataFrame) -> Iterator[str]:
    sparse = rows[(rows["pattern"] != "dense") & (rows["status"] != THROTTLED)]
    for key, group in sparse.groupby(["op", "pattern", "sparsity_target", "backend", "kernel_requested", "dtype_w"]):
        op, pattern, sparsity, backend, kernel, dtype = key
        over_dense = group["dense_seconds"] / group["median_seconds"]
        over_any = group["any_dense_seconds"] / group["median_seconds"]
        over_peer = group["peer_seconds"] / group["median_seconds"]
        yield (
            f"  {op:6} {pattern:13} {sparsity:4.0%} {backend:12} {kernel:10} {_ratio(over_dense)} {dtype} dense"
            f"  {_ratio(over_any)} {_name_types(group['any_dense_dtype'])} dense"
            f"  {_ratio(over_peer) if backend in OUR_ENGINES else '':6}{' peer' if backend in OUR_ENGINES else ''}"
            f"  {len(group)} shapes"
        )


def _name_types(dtypes: pd.Series) -> str:
    """Return the types of several baselines as a text; `any` where there is none."""
    return "/".join(sorted(dtypes.dropna().unique())) or "any"


def _of_shape(rows: pd.DataFrame) -> Iterator[str]:
    first = rows.iloc[0]
    yield _shape(first)
    for _, row in rows.sort_values(["pattern", "sparsity_target", "dtype_w", "median_seconds"]).iterrows():
        work = row["flop_nnz"] if row["flop_nnz"] == row["flop_nnz"] else 0
        yield (
            f"  {row['pattern']:13} {row['sparsity_target']:4.0%} {row['median_seconds'] * 1e6:9.2f} us "
            f"+-{_error(row):4.1%} {work / row['median_seconds'] / 1e12:6.1f} TFLOP/s {_clock(row)}  "
            f"{_ratio(row['dense_seconds'] / row['median_seconds'])} {row['dtype_w']} dense"
            f"{_over_other_type(row)}  {row['kernel_used']}{_remarks(row)}"
        )


def _over_other_type(row: pd.Series) -> str:
    """Return the speedup over the fastest dense kernel of any type, if that is another type than the row's."""
    if pd.isna(row["any_dense_dtype"]) or row["any_dense_dtype"] == row["dtype_w"]:
        return ""
    return f", {_ratio(row['any_dense_seconds'] / row['median_seconds']).strip()} {row['any_dense_dtype']} dense"


def _shape(row: pd.Series) -> str:
    if row["op"] != "conv2d":
        return f"linear {row['m']}x{row['k']} on {row['n']}"
    filters = "x".join(f"{row[name]:g}" for name in ("c_out", "c_in", "kh", "kw"))
    return f"conv2d {filters} on " + "x".join(f"{row[name]:g}" for name in ("batch", "h", "w"))


def _remarks(row: pd.Series) -> str:
    remarks = [
        f"({row['launch_mode']})" if row["launch_mode"] != "graph" else "",
        row["status"] if row["status"] != "ok" else "",
        *(flag for flag in (row["flags"] or "").split("+") if flag != "preempted"),
        row["event_reasons"] or "",
    ]
    return "".join(f" {remark}" for remark in remarks if remark)


def _clock(row: pd.Series) -> str:
    """Return the median clock of the multiprocessors while the row was sampled."""
    hertz = row["clock_hertz"]
    return f"{hertz / 1e9:.2f} GHz" if pd.notna(hertz) else "  - GHz "


def _error(row: pd.Series) -> float:
    return float((row["high_seconds"] - row["low_seconds"]) / 2 / row["median_seconds"])


def _ratio(values: Any) -> str:
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    return f"{np.median(known):5.2f}x" if known.size else "    -"


def _failures(frame: pd.DataFrame) -> Iterator[str]:
    tried = frame.sort_values("started_at").drop_duplicates("point_id", keep="last")
    failed = tried[~tried["status"].isin((*TIMED, THROTTLED))]
    named = failed.assign(error=failed["error"].fillna(""))
    for (status, backend, kernel, error), rows in named.groupby(["status", "backend", "kernel_requested", "error"]):
        yield f"  {len(rows)} {status}: {backend} {kernel}: {error}"
