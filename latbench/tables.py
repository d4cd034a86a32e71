"""The table, version 1: one row per measured point, the same columns whether it was swept, verified or imported.

A table is a flat folder of `part-<id>.parquet` files with an `env.parquet` beside them, or a single Parquet file.
Units are in the column names, the identity of a point is in columns, raw samples are kept. Times are in seconds.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 1

_text, _whole, _real = pa.string(), pa.int64(), pa.float64()

# What was measured: the key. Rows with equal keys are the same point, and `point_id` is the hash of these columns.
KEY = [
    pa.field("purpose", _text),  # sweep, verify, baseline, import
    pa.field("device", _text),  # lower-case with hyphens: amd-epyc-..., nvidia-h200
    pa.field("backend", _text),  # numba, torch, onnxruntime, ...
    pa.field("op", _text),  # linear, conv2d, model
    pa.field("model", _text),  # the task of a whole-model row, else ""
    pa.field("m", _whole),  # output features
    pa.field("k", _whole),  # input features
    pa.field("n", _whole),  # tokens; of a convolution output positions x batch
    *(pa.field(name, _whole) for name in (
        "batch", "c_in", "h", "w", "c_out", "kh", "kw",
        "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w",
    )),  # null where op is linear
    pa.field("pattern", _text),  # dense, unstructured, nm:2:4, block:32x32, vector:32, shflbw:32, profile
    pa.field("sparsity_target", _real),
    pa.field("pattern_seed", _whole),
    pa.field("dtype_w", _text),
    pa.field("dtype_a", _text),
    pa.field("dtype_out", _text),
    pa.field("layout", _text),  # feature_major, token_major, blocked, nchw
    pa.field("epilogue", _text),  # none, bias, bias+relu, bias+gelu
    pa.field("kernel_requested", _text),
    pa.field("context", _text),  # isolated, network
    pa.field("cache_mode", _text),  # rotated (weights of several copies in turn), warm, cold
    pa.field("launch_mode", _text),  # call, graph
    pa.field("threads", _whole),
]  # fmt: skip

IDENTITY = [
    pa.field("schema_version", _whole),
    pa.field("point_id", _text),
    pa.field("run_id", _text),
    pa.field("env_id", _text),
    pa.field("block", _whole),  # points of one block are interleaved
    pa.field("seq", _whole),
    pa.field("started_at", pa.timestamp("us", tz="UTC")),
    pa.field("backend_version", _text),
    pa.field("device_uuid_hash", _text),
]

# Follows from the pattern and the mask that was timed; repeated in columns so that readers can filter.
STRUCTURE = [
    pa.field("format", _text),  # dense, unstructured, nm, block, vector, shflbw
    *(pa.field(name, _whole) for name in ("block_h", "block_w", "v", "nm_n", "nm_m")),
    pa.field("kernel_used", _text),
    pa.field("sparsity_actual", _real),
    pa.field("nnz", _whole),
]

TIME = [
    pa.field("timer", _text),
    pa.field("l2_flush_bytes", _whole),
    pa.field("pinning", _text),
    pa.field("samples_seconds", pa.list_(pa.field("element", _real))),  # each one call, means of inner_loops
    *(pa.field(f"{name}_seconds", _real) for name in (
        "median", "min", "mean", "q25", "q75", "p95", "std", "low", "high",
    )),  # low and high: 95% interval of the median
    pa.field("sample_count", _whole),
    pa.field("inner_loops", _whole),
]  # fmt: skip

PHYSICS = [
    pa.field("flop_dense", _whole),
    pa.field("flop_nnz", _whole),
    pa.field("bytes_min", _whole),
    pa.field("roofline_seconds", _real),
    pa.field("utilisation", _real),
]

TELEMETRY = [
    pa.field("clock_hertz", _real),
    pa.field("power_watts", _real),
    pa.field("temperature_celsius", _real),
    pa.field("event_reasons", _text),
    pa.field("load", _real),
    pa.field("steal_fraction", _real),
    pa.field("drift_ratio", _real),
]

QUALITY = [
    pa.field("stop_reason", _text),  # relative_error, budget, max_samples
    pa.field("status", _text),  # ok, noisy, throttled, unsupported, oom, incorrect, timeout, error
    pa.field("max_rel_err", _real),
    pa.field("flags", _text),
    pa.field("error", _text),
]

SCHEMA = pa.schema([*IDENTITY, *KEY, *STRUCTURE, *TIME, *PHYSICS, *TELEMETRY, *QUALITY])
