"""Results of benchmark libraries in JSON, of benchmarks that time matrix products: one row for each product.

google-benchmark (1.x): named arguments of a run, such as `gemm/m:768/k:768/n:128`, and its counters. Each repetition
is a sample of real time; aggregates of repetitions are left out. Its threads are callers of one benchmark each, not
threads of a product, so they are no field.

nvbench: the axes of a state, and the mean GPU time of its cold runs.

pyperf: named parts of a benchmark's name as above, and its metadata. Each value is a sample.

A result has fields: `benchmark`, the name in front of all arguments, and those above. Arguments without a name are
fields by their place, from 1 on. The columns of a row come from fields of the same name, upper or lower case, or from
those that the user names. Arguments and axes that give no column are part of the kernel's name. So results that
differ in them are different rows.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latbench.errors import BadData, UsageError
from latbench.importers.field_values import parse_count, parse_number
from latbench.machines.devices import make_slug
from latbench.tables.point_ids import hash_key
from sparse_kernels.patterns import Dense, parse

Row = dict[str, Any]

SIZES = ("m", "k", "n")
COLUMNS = (*SIZES, "pattern", "sparsity", "dtype", "threads")
"""Columns that fields can give."""

_DTYPES = {
    "float64": ("f64", "fp64", "double"), "float32": ("f32", "fp32", "float", "single"),
    "float16": ("f16", "fp16", "half"), "bfloat16": ("bf16",), "fp8": ("f8", "e4m3"), "int8": ("i8", "s8"),
    "int4": ("i4", "s4"), "int32": ("i32", "s32"),
}  # fmt: skip
"""Element types as tables have them, and what else they are called, in lower case."""

# What google-benchmark itself appends to a name.
_SETTINGS = (
    "real_time",
    "process_time",
    "manual_time",
    "threads",
    "repeats",
    "iterations",
    "min_time",
    "min_warmup_time",
)

_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Result:
    """What a library measured once.

    fields: by name. arguments: names of those that tell benchmarks apart. device: its name where the file has it.
    why_not: why it is no time, or None.
    """

    fields: Mapping[str, Any]
    arguments: Collection[str]
    samples_seconds: list[float]
    device: str | None = None
    why_not: str | None = None


def read_benchmark_results(
    format: str,
    path: Path,
    *,
    columns: Mapping[str, str],
    only: Mapping[str, str],
    device: str | None = None,
    dtype: str | None = None,
    threads: int | None = None,
) -> tuple[list[Row], Counter[str]]:
    """Read results of a benchmark library as table rows.

    Parameters
    ----------
    format
        One of LIBRARIES.
    path
        The file.
    columns
        The field of a column, for columns whose field has another name.
    only
        Values by field; other results are ignored.
    device
        The device's name in tables; by default as in a file of nvbench.
    dtype
        Element type of results without one.
    threads
        Threads of results without them.

    Returns
    -------
    (list of dict, Counter)
        Table rows, and the number of left-out results by reason.

    Raises
    ------
    BadData
        The file is not of this library, or a field holds what no layer has.
    UsageError
        A column is unknown, the device is not known, or no result is a layer.
    """
    merged, left_out = dict[str, Row](), Counter[str]()
    results, devices = _read_results(format, path, columns), set()
    for result in _select(path, results, only):
        if (why_not := result.why_not or _explain_missing(result.fields, columns)) is not None:
            left_out[why_not] += 1
            continue
        try:
            row = {"backend": format, **_build_row(result, columns, dtype, threads)}
        except ValueError as error:
            raise BadData(f"{path}: {result.fields['benchmark']}: {error}") from error
        devices.add(result.device)
        row["device"] = _name_device(path, device or result.device)
        merged.setdefault(hash_key(row), row | {"samples_seconds": []})["samples_seconds"] += result.samples_seconds
    if not merged:
        raise UsageError(_explain_nothing(path, results, left_out))
    if len(devices) > 1:
        several = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"{path} holds several devices, {several}: say which with --only device=NAME")
    return list(merged.values()), left_out


def _select(path: Path, results: Sequence[Result], only: Mapping[str, str]) -> list[Result]:
    """Return the results with these values. Raises UsageError where no result has one."""
    for name, value in only.items():
        known = sorted({str(each.fields[name]) for each in results if name in each.fields})
        results = [each for each in results if name in each.fields and _is_same(each.fields[name], value)]
        if not results:
            has = f"but {', '.join(known[:12])}" if known else "and no such field"
            raise UsageError(f"no result of {path} has {value} as its {name}, {has}")
    return [*results]


def _is_same(value: Any, text: str) -> bool:
    try:
        return str(value) == text or float(value) == float(text)
    except (TypeError, ValueError):
        return False


def _explain_nothing(path: Path, results: Sequence[Result], left_out: Mapping[str, int]) -> str:
    """Return why no result is a row."""
    said = "; ".join(f"{count} left out, {reason}" for reason, count in left_out.items())
    fields = dict.fromkeys(name for each in results for name in each.fields)
    sizes = "m (output features), k (input features) and n (tokens) with --columns m=FIELD,k=FIELD,n=FIELD"
    advice = f" The fields are {', '.join(fields)}: name those of {sizes}" if fields else ""
    return f"{path}: no result is a layer: {said or 'the file has none'}.{advice}"


def _read_results(format: str, path: Path, columns: Mapping[str, str]) -> list[Result]:
    """Return the results of a file. Raises BadData unless it is of this library, UsageError for unknown columns."""
    if unknown := set(columns) - set(COLUMNS):
        raise UsageError(f"no field gives the column {min(unknown)}: known are {', '.join(COLUMNS)}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadData(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise BadData(f"{path}: not a JSON file ({error})") from error
    try:
        return list(LIBRARIES[format](content))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        lacks = f"it has no {error.args[0]}" if isinstance(error, KeyError) else "its parts are of other kinds"
        raise BadData(f"{path}: not results of {format}, {lacks}") from error


def _google_benchmark(content: Any) -> Iterator[Result]:
    known = {
        "name", "run_name", "run_type", "time_unit", "real_time", "cpu_time", "iterations", "repetitions",
        "repetition_index", "family_index", "per_family_instance_index", "threads", "aggregate_name",
        "aggregate_unit",
    }  # fmt: skip
    for run in content["benchmarks"]:
        named = _split_name(run["run_name"] if "run_name" in run else run["name"], _SETTINGS)
        fields = {name: value for name, value in run.items() if name not in known} | named
        if run.get("error_occurred") or run.get("skipped"):
            yield Result(fields, named, [], why_not="they failed or were skipped")
        elif run.get("run_type", "iteration") != "iteration":
            yield Result(fields, named, [], why_not="they are aggregates of repetitions, not times")
        else:
            yield Result(fields, named, [float(run["real_time"]) * _UNITS[run["time_unit"]]])


def _nvbench(content: Any) -> Iterator[Result]:
    devices = {device["id"]: device["name"] for device in content["devices"]}
    for benchmark in content["benchmarks"]:
        for state in benchmark["states"]:
            device = devices.get(state["device"])
            fields = {"benchmark": benchmark["name"], "device": device}
            axes = {axis["name"]: axis["value"] for axis in state["axis_values"] or ()}
            fields |= axes
            means = [each for each in state.get("summaries") or () if each["tag"] == "nv/cold/time/gpu/mean"]
            if state.get("is_skipped") or not means:
                yield Result(fields, axes, [], device, "they were skipped, or have no cold GPU time")
                continue
            [mean] = [entry["value"] for entry in means[0]["data"] if entry["name"] == "value"]
            yield Result(fields, axes, [float(mean)], device)


def _pyperf(content: Any) -> Iterator[Result]:
    shared = content.get("metadata") or {}
    for benchmark in content["benchmarks"]:
        metadata = shared | (benchmark.get("metadata") or {})
        named = _split_name(metadata["name"])
        fields = {**metadata, **named}
        samples = [float(value) for run in benchmark["runs"] for value in run.get("values", ())]
        unit = metadata.get("unit", "second")
        if unit != "second" or not samples:
            yield Result(fields, named, [], why_not=f"their unit is {unit}" if samples else "they have no values")
        else:
            yield Result(fields, named, samples)


LIBRARIES: dict[str, Callable[[Any], Iterator[Result]]] = {
    "google-benchmark": _google_benchmark,
    "nvbench": _nvbench,
    "pyperf": _pyperf,
}
"""For each library: the results in the content of its file."""


def _split_name(name: str, settings: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields in a name: the benchmark, named arguments, and others by their place; without settings."""
    benchmark, *arguments = name.split("/")
    fields: dict[str, Any] = {"benchmark": benchmark}
    for place, argument in enumerate(arguments, start=1):
        key, colon, value = argument.partition(":")
        if key not in settings:
            fields[key if colon else str(place)] = value if colon else argument
    return fields


def _find(fields: Mapping[str, Any], columns: Mapping[str, str], column: str) -> Any:
    """Return the value of a column, or None."""
    name = _find_field(fields, columns, column)
    return None if name is None else fields[name]


def _find_field(fields: Mapping[str, Any], columns: Mapping[str, str], column: str) -> str | None:
    """Return the field that gives a column, or None."""
    names = [columns[column]] if column in columns else [column, column.upper()]
    return next((name for name in names if fields.get(name) is not None), None)


def _name_device(path: Path, device: str | None) -> str:
    if device is None:
        raise UsageError(f"{path} does not say what was timed: give --device, such as amd-epyc-9654")
    return make_slug(device)


def _explain_missing(fields: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    """Return which fields of sizes are missing, or None."""
    missing = [columns.get(name, name) for name in SIZES if _find(fields, columns, name) is None]
    return f"they have no field {', '.join(missing)}" if missing else None


def _build_row(result: Result, columns: Mapping[str, str], dtype: str | None, threads: int | None) -> Row:
    """Return the row of a layer, without its device and times. Raises ValueError for what no layer has."""
    fields = result.fields
    for seconds in result.samples_seconds:
        if not 0 < seconds < math.inf:
            raise ValueError(f"a time must be positive and finite, not {seconds:g} s")
    sizes = {name: parse_count(_find(fields, columns, name), name) for name in SIZES}
    spec = _find(fields, columns, "pattern")
    pattern = parse("dense" if spec is None else str(spec))
    own = 0.0 if isinstance(pattern, Dense) else getattr(pattern, "sparsity", None)
    given = _find(fields, columns, "sparsity")
    if given is None and own is None:
        raise ValueError(f"{pattern} needs a field with its sparsity")
    sparsity = parse_number(own if given is None else given, "sparsity")
    if not 0 <= sparsity < 1 or (own is not None and abs(sparsity - own) > 1e-6):
        known = "lies in 0 to 1" if own is None else f"is {own:g}; another pattern needs a field with its name"
        raise ValueError(f"the sparsity of {pattern} {known}, and this is {given}")
    element = _find(fields, columns, "dtype") or dtype
    own_threads = _find(fields, columns, "threads")
    count = threads if own_threads is None else own_threads
    return {
        "purpose": "import", "op": "linear", "model": "", "status": "ok", "context": "isolated", **sizes,
        "pattern": str(pattern), "sparsity_target": sparsity, "kernel_requested": _name_kernel(result, columns),
        **({} if element is None else dict.fromkeys(("dtype_w", "dtype_a", "dtype_out"), name_dtype(element))),
        **({} if count is None else {"threads": parse_count(count, "threads")}),
    }  # fmt: skip


def _name_kernel(result: Result, columns: Mapping[str, str]) -> str:
    """Return the benchmark with all of its arguments that are no column."""
    used = {"benchmark", *(_find_field(result.fields, columns, column) for column in COLUMNS)}
    others = [
        str(result.fields[name]) if name.isdigit() else f"{name}:{result.fields[name]}"
        for name in result.arguments
        if name not in used
    ]
    return "/".join([str(result.fields["benchmark"]), *others])


def name_dtype(text: Any) -> str:
    """Return an element type as tables have it. Raises ValueError for an unknown one."""
    name = str(text).lower()
    for dtype, others in _DTYPES.items():
        if name in (dtype, *others):
            return dtype
    raise ValueError(f"the element type {text} is unknown: known are {', '.join(_DTYPES)}")
