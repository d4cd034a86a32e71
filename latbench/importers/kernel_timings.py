"""Kernel timings that other projects publish as tables, in milliseconds, one kernel per line.

NeuSight (Lee et al. 2025), csv: OPName, Device, Latency and a layer's sizes, of float32 PyTorch. A linear layer has
B, M (tokens), N (output features) and K. A convolution (conv) has B, Input_Channel, Output_Channel, Kernel_Szie
(their spelling), Input_Size, Stride and Padding. Other operations are skipped: a batched product has one weight per
image.

DeepBench (Baidu), csv made from its spreadsheets: file, sheet, kind (gemm, sparse_gemm), M (output features), N
(tokens), K, a_t and b_t (T where transposed), sparsity, time_ms, or sparse_ms and dense_ms. The file names the
device, and the sheet its precision. Where it names several, as for all published sparse times, `dtype` has to name
it. The spreadsheets themselves are not read: nearly every one has a layout of its own.

aiconfigurator (NVIDIA), Parquet, or the CSV of its earlier gemm_perf.txt: framework, version, device, op_name,
kernel_source, gemm_dtype, m (tokens), n (output features), k, latency.

Lines with equal keys become one row with all their samples; skipped lines are counted by reason. A table is of one
device and one software version, because a key does not hold the version. `only`, a value by column, narrows a file
that has several.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latbench.base.engine_registry import TORCH
from latbench.errors import BadData, UsageError
from latbench.importers.field_values import parse_count, parse_number
from latbench.machines.devices import make_slug
from latbench.tables.point_ids import hash_key
from sparse_kernels.shapes import Conv2dShape

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

SPREADSHEETS = (".xlsx", ".xls", ".ods")

DTYPES = ("float32", "float16", "bfloat16", "int8")

_DENSE = {
    "purpose": "import",
    "op": "linear",
    "model": "",
    "pattern": "dense",
    "sparsity_target": 0.0,
    "status": "ok",
}


class SkippedLine(Exception):
    """Why a line gives no row, as half a sentence."""


def read_kernel_timings(
    format: str, path: Path, *, only: Mapping[str, str], device: str | None = None, dtype: str | None = None
) -> tuple[list[Row], Counter[str]]:
    """Read published kernel timings as table rows.

    Parameters
    ----------
    format
        One of FORMATS.
    path
        The file.
    only
        Values by column; other lines are ignored.
    device
        The device's name in tables; by default as in the file.
    dtype
        Element type of lines that name none.

    Returns
    -------
    (list of dict, Counter)
        Table rows, and the number of skipped lines by reason.

    Raises
    ------
    BadData
        The file is not in this format; the message names the line.
    UsageError
        `only` leaves no lines, or several devices or versions.
    """
    if dtype not in (None, *DTYPES):
        raise UsageError(f"unknown dtype {dtype}: known are {', '.join(DTYPES)}")
    frame = _read_lines(format, path, only)
    merged: dict[str, Row] = {}
    # A key lacks the version, and models are of one device and backend.
    found: dict[str, set[str]] = {name: set() for name in ("device", "backend", "backend_version")}
    left_out: Counter[str] = Counter()
    for line, record in zip(frame.index + 2, frame.to_dict("records"), strict=True):
        try:
            for row, milliseconds in FORMATS[format][2](record, dtype):
                whole = {**_DENSE, **row}
                for name, values in found.items():
                    values.add(str(row.get(name)))
                kept = merged.setdefault(hash_key(whole), whole | {"samples_seconds": []})
                kept["samples_seconds"].append(_seconds(milliseconds))
        except SkippedLine as reason:
            left_out[str(reason)] += 1
        except KeyError as error:
            raise BadData(f"{path}: not {format} timings, it has no column {error.args[0]}") from error
        except ValueError as error:
            raise BadData(f"{path}, line {line}: {error}") from error
    if not merged:
        said = "; ".join(f"{lines} lines left out, {reason}" for reason, lines in left_out.items())
        raise UsageError(f"{path}: no line with a time of a dense or sparse layer is left{said and f': {said}'}")
    for name, values in found.items():
        if len(values) > 1:
            several = ", ".join(sorted(values))
            raise UsageError(f"{path} holds several: {name} {several}; say which with --only COLUMN=VALUE")
    return [row | {"device": device or row["device"]} for row in merged.values()], left_out


def _read_lines(format: str, path: Path, only: Mapping[str, str]) -> pd.DataFrame:
    """Return the lines of a file with the values of `only`. Raises as `read_kernel_timings`."""
    columns, lines_of, _ = FORMATS[format]
    if path.suffix.lower() in SPREADSHEETS and path.exists():
        kind = "Parquet" if lines_of is _parquet_or_csv else "CSV"
        raise BadData(
            f"{path} is a spreadsheet, and {format} timings are read from {kind}: write its kernels to a {kind} "
            f"file, one per line, with the columns {', '.join(columns)}"
        )
    frame = lines_of(path)
    if missing := [name for name in columns if name not in frame.columns]:
        raise BadData(f"{path}: not {format} timings, it has no column {', '.join(missing)}")
    if unknown := [name for name in only if name not in frame.columns]:
        raise UsageError(f"{path} has no column {', '.join(unknown)}, only {', '.join(frame.columns)}")
    if frame.empty:
        raise BadData(f"{path}: no line of timings, only their columns")
    for name, value in only.items():
        chosen = frame[name].astype(str) == value
        if not chosen.any():
            known = ", ".join(sorted(set(frame[name].astype(str)))[:12])
            raise UsageError(f"no line of {path} has {value} as its {name}, but {known}")
        frame = frame[chosen]
    return frame


def _neusight(line: Mapping[str, Any], dtype: str | None) -> Iterator[tuple[Row, Any]]:
    if (operation := _name(line, "OPName")) not in ("linear", "conv"):
        raise SkippedLine(f"their OPName {operation} is no linear layer or convolution")
    device = make_slug(_name(line, "Device"))
    device = device if device.startswith(("nvidia", "amd")) else f"nvidia-{device}"
    same = {"device": device, "backend": TORCH, **_dtypes("float32")}
    same |= {"kernel_requested": "auto", "kernel_used": _text(line.get("kernel")), "context": "isolated"}
    if operation == "linear":
        tokens = _count(line, "B") * _count(line, "M")
        yield same | {"m": _count(line, "N"), "k": _count(line, "K"), "n": tokens}, line["Latency"]
        return
    kernel, stride = _count(line, "Kernel_Szie"), _count(line, "Stride")
    size, padding = _count(line, "Input_Size"), _count(line, "Padding", least=0)
    shape = Conv2dShape(
        _count(line, "B"), _count(line, "Input_Channel"), size, size, _count(line, "Output_Channel"), kernel, kernel,
        (stride, stride), (padding, padding),
    )  # fmt: skip
    sizes = {name: getattr(shape, name) for name in ("m", "k", "n", "batch", "c_in", "h", "w", "c_out", "kh", "kw")}
    for name, value in (("stride", stride), ("padding", padding), ("dilation", 1)):
        sizes |= {f"{name}_h": value, f"{name}_w": value}
    yield same | {"op": "conv2d", **sizes}, line["Latency"]


_PRECISIONS = {"FP32": "float32", "FP16": "float16"}


def _deepbench(line: Mapping[str, Any], dtype: str | None) -> Iterator[tuple[Row, Any]]:
    sheet = _name(line, "sheet")
    precisions = [precision for name, precision in _PRECISIONS.items() if name in sheet]
    if len(precisions) != 1:
        if dtype is None:
            raise SkippedLine(f"their sheet {sheet!r} does not name one precision (--dtype says it)")
        precisions = [dtype]
    if not any(_is_given(line[name]) for name in ("time_ms", "sparse_ms", "dense_ms")):
        raise SkippedLine("they have no time")
    transposed = f"{line['a_t']}{line['b_t']}".lower()
    same = {
        "device": make_slug(_name(line, "file").rpartition("DeepBench_")[2].replace("_", " ")),
        "backend": "deepbench",
        **_dtypes(precisions[0]), "m": _count(line, "M"), "k": _count(line, "K"), "n": _count(line, "N"),
        "context": "isolated",
    }  # fmt: skip
    if line["kind"] == "gemm" and _is_given(line["time_ms"]):
        yield same | {"kernel_requested": f"gemm_{transposed}"}, line["time_ms"]
    if line["kind"] == "sparse_gemm" and _is_given(line["dense_ms"]):
        yield same | {"kernel_requested": f"gemm_{transposed}"}, line["dense_ms"]
    if line["kind"] == "sparse_gemm" and _is_given(line["sparse_ms"]):
        sparsity = parse_number(line["sparsity"], "sparsity")
        if not 0 <= sparsity <= 1:
            raise ValueError(f"sparsity must lie between 0 and 1, not {line['sparsity']}")
        sparse = {"pattern": "unstructured", "sparsity_target": sparsity}
        yield same | {"kernel_requested": "sparse_gemm", **sparse}, line["sparse_ms"]


def _aiconfigurator(line: Mapping[str, Any], dtype: str | None) -> Iterator[tuple[Row, Any]]:
    yield {
        "device": make_slug(_name(line, "device")), "backend": _name(line, "framework"),
        "backend_version": _name(line, "version"), "dtype_w": _name(line, "gemm_dtype"),
        "m": _count(line, "n"), "k": _count(line, "k"), "n": _count(line, "m"),
        "kernel_requested": f"{_name(line, 'op_name')}:{_name(line, 'kernel_source')}", "context": "isolated",
    }, line["latency"]  # fmt: skip


def _dtypes(dtype: str) -> Row:
    return {"dtype_w": dtype, "dtype_a": dtype, "dtype_out": dtype}


def _is_given(value: Any) -> bool:
    return value is not None and value == value and value != ""


def _text(value: Any) -> str | None:
    return str(value) if _is_given(value) else None


def _name(line: Mapping[str, Any], column: str) -> str:
    if not _is_given(line[column]):
        raise ValueError(f"it has no {column}")
    return str(line[column])


def _seconds(milliseconds: Any) -> float:
    value = parse_number(milliseconds, "time") * 1e-3
    if not 0 < value < math.inf:
        raise ValueError(f"a time must be positive and finite, not {milliseconds}")
    return value


def _count(line: Mapping[str, Any], name: str, least: int = 1) -> int:
    return parse_count(line[name], name, least)


def _csv(path: Path) -> pd.DataFrame:
    import pyarrow as pa
    from pyarrow import csv

    try:
        return csv.read_csv(path).to_pandas()
    except FileNotFoundError:
        raise BadData(f"{path}: no such file") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadData(f"{path}: not a csv file ({' '.join(str(error).split())})") from error


def _parquet_or_csv(path: Path) -> pd.DataFrame:
    return _csv(path) if path.suffix.lower() in (".csv", ".txt") else _parquet(path)


def _parquet(path: Path) -> pd.DataFrame:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pandas(ignore_metadata=True)
    except FileNotFoundError:
        raise BadData(f"{path}: no such file") from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadData(f"{path}: not a Parquet file ({error})") from error


RowsOf = Callable[[Mapping[str, Any], str | None], Iterator[tuple[Row, Any]]]

FORMATS: dict[str, tuple[tuple[str, ...], Callable[[Path], pd.DataFrame], RowsOf]] = {
    "neusight": (("OPName", "Device", "Latency", "B"), _csv, _neusight),
    "deepbench": (
        ("file", "sheet", "kind", "M", "N", "K", "a_t", "b_t", "sparsity", "time_ms", "sparse_ms", "dense_ms"),
        _csv,
        _deepbench,
    ),
    "aiconfigurator": (
        ("framework", "version", "device", "op_name", "kernel_source", "gemm_dtype", "m", "n", "k", "latency"),
        _parquet_or_csv,
        _aiconfigurator,
    ),
}
"""For each format: its required columns, the reader of its lines, and the rows of a line with their times."""
