"""The columns of a table, version 3: the same whether a row was swept, verified or imported.

Units are in the column names, the identity of a point is in columns, raw samples are kept. Times are in seconds.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 3

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
    pa.field("weight_copies", _whole),  # that took turns; flag in_cache or in_l2 where they may all have stayed there
    pa.field("pinning", _text),
    pa.field("samples_seconds", pa.list_(pa.field("element", _real))),  # each one call, means of inner_loops
    *(pa.field(f"{name}_seconds", _real) for name in (
        "median", "min", "mean", "q25", "q75", "p95", "std", "low", "high",
    )),  # low and high: 95% interval of the median
    pa.field("burst_error", _real),  # half that interval over the median, as bursts disagree; null: not known
    pa.field("sample_count", _whole),
    pa.field("inner_loops", _whole),
    pa.field("discarded_samples", _whole),  # taken while the device was disturbed, and left out
    pa.field("corrected_seconds", _real),  # median_seconds / reference_ratio: what it may take when all is as usual
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
    pa.field("drift_ratio", _real),  # the later half of the samples over the earlier
    pa.field("reference_seconds", _real),  # a fixed piece of work, as far as it shows what bounds this one, meanwhile
    pa.field("reference_usual_seconds", _real),  # what it takes on this machine when all is quiet
    pa.field("reference_ratio", _real),  # of these two
]

QUALITY = [
    pa.field("stop_reason", _text),  # relative_error, plateau, budget
    pa.field("status", _text),  # one of STATUSES
    pa.field("max_rel_err", _real),
    # Joined by plus signs; preempted: other processes took the cores, or heat slowed a GPU down, in most bursts;
    # clock_set_back: started_at is not what the clock said, but after the row that this one replaces;
    # in_cache, in_l2: even the most copies of so small a layer may have stayed in a CPU's caches, in a GPU's L2.
    pa.field("flags", _text),
    pa.field("error", _text),
]

LEAST_SIZES = {"m": 1, "k": 1, "n": 0}
"""The least numbers of output features, input features and tokens that a layer can have."""

SCHEMA = pa.schema([*IDENTITY, *KEY, *STRUCTURE, *TIME, *PHYSICS, *TELEMETRY, *QUALITY])

TIMED = ("ok", "noisy")
# impossible: faster than the device can be, or no time at all. spike: far above its neighbours in sparsity, until it
# has been measured a second time.
STATUSES = (
    *TIMED, "throttled", "impossible", "spike", "unsupported", "oom", "incorrect", "timeout", "error",
)  # fmt: skip

# A rerun measures a point again unless it has a row with one of these: the causes of errors may be gone.
# Noise may be gone, too, but a noisy row was given all its chances: it is measured again only if that is asked for.
FINISHED = ("ok", "unsupported", "incorrect")

DISTURBED = ("noisy", "throttled", "spike")  # the statuses that are measured again: a later try is often a quiet one
