"""The columns of a table, version 3: the same whether a row was swept, verified or imported.

Each column is one record. The Arrow schema, the checks of `latbench validate` and `docs/reference/table.md` are made
from these records. Units are in the column names; times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 3

TIMED = ("ok", "noisy")
"""The statuses of rows that hold a time."""

FAILED = ("impossible", "unsupported", "oom", "incorrect", "timeout", "error")
"""The statuses of rows that never hold a time."""

DISTURBED = ("noisy", "throttled", "spike")
"""The statuses of rows whose point is measured again in the same sweep: a later try is often a quiet one."""

FINISHED = ("ok", "unsupported", "incorrect")
"""The statuses of rows whose point a later sweep skips. The causes of other failures may be gone by then."""

STATUSES = (*TIMED, "throttled", "impossible", "spike", "unsupported", "oom", "incorrect", "timeout", "error")

# Which rows must have a value in a column. What others published may lack what only the one who measures knows.
EVERY_ROW = "every row"
OWN_TIMES = "times that latbench measured"
OWN_LAYERS = "layer times that latbench measured"
OWN_CONVOLUTIONS = "convolution times that latbench measured"
PROVENANCE = "times that latbench measured; a missing value gives a note"


@dataclass(frozen=True)
class TableColumn:
    """One column of the table.

    Parameters
    ----------
    name
        Its name; the unit is part of it.
    type
        Its Arrow type.
    description
        What it holds, in a sentence.
    unit
        The unit of numbers; empty for texts and plain numbers.
    allowed
        The words that latbench writes; `latbench validate` suspects others.
    minimum, above, maximum
        The least value, the value that all must exceed, and the greatest value; None: no such limit.
    needed
        Rows that must have a value: EVERY_ROW, OWN_TIMES, OWN_LAYERS, OWN_CONVOLUTIONS or PROVENANCE; empty: none.
    """

    name: str
    type: pa.DataType
    description: str
    unit: str = ""
    allowed: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    needed: str = ""

    @property
    def limits(self) -> str:
        """The permitted range in words, such as "at least 1"; empty without limits."""
        if self.minimum is not None and self.maximum is not None:
            return f"between {self.minimum:g} and {self.maximum:g}"
        if self.minimum is not None:
            return f"at least {self.minimum:g}"
        return "" if self.above is None else f"above {self.above:g}"


def _text(name: str, description: str, *allowed: str, needed: str = "") -> TableColumn:
    return TableColumn(name, pa.string(), description, allowed=allowed, needed=needed)


def _whole(
    name: str, description: str, minimum: float | None = None, unit: str = "", needed: str = ""
) -> TableColumn:
    return TableColumn(name, pa.int64(), description, unit, minimum=minimum, needed=needed)


def _real(name: str, description: str, unit: str = "", **limits: float) -> TableColumn:
    return TableColumn(name, pa.float64(), description, unit, **limits)  # type: ignore[arg-type]


def _seconds(name: str, description: str) -> TableColumn:
    return _real(name, description, "seconds", above=0)


def _size(name: str, description: str, minimum: float = 1) -> TableColumn:
    return _whole(name, f"Convolutions: {description}", minimum, needed=OWN_CONVOLUTIONS)


# Rows with equal keys are the same point, and `point_id` is the hash of these columns.
KEY_COLUMNS = (
    _text("purpose", "Why the row exists.", "sweep", "verify", "baseline", "import", needed=EVERY_ROW),
    _text("device", "Device, in lower case with hyphens: `amd-epyc-9b14`, `nvidia-h200`.", needed=EVERY_ROW),
    _text("backend", "Engine that ran the work: `numba`, `torch`, `onnxruntime`, ...", needed=EVERY_ROW),
    _text("op", "Operation.", "linear", "conv2d", "model", needed=EVERY_ROW),
    _text("model", "Task of a row that times a whole model, or `network:layer` in a running network; else empty."),
    _whole("m", "Output features.", 1, needed=OWN_LAYERS),
    _whole("k", "Input features; of a convolution kh x kw x c_in.", 1, needed=OWN_LAYERS),
    _whole("n", "Tokens; of a convolution output positions x batch.", 0, needed=OWN_LAYERS),
    _size("batch", "images per call.", 0),
    _size("c_in", "input channels."),
    _size("h", "height of the input."),
    _size("w", "width of the input."),
    _size("c_out", "output channels."),
    _size("kh", "height of the kernel."),
    _size("kw", "width of the kernel."),
    _size("stride_h", "vertical stride."),
    _size("stride_w", "horizontal stride."),
    _size("padding_h", "zero padding at top and bottom.", 0),
    _size("padding_w", "zero padding at left and right.", 0),
    _size("dilation_h", "vertical dilation."),
    _size("dilation_w", "horizontal dilation."),
    _text(
        "pattern",
        "Sparsity pattern: `dense`, `unstructured`, `nm:2:4`, `block:32x32`, `vector:32`, `shflbw:32`; `profile` for "
        "a model whose layers differ.",
        needed=EVERY_ROW,
    ),
    _real("sparsity_target", "Requested share of zero weights.", minimum=0, maximum=1),
    _whole("pattern_seed", "Random seed of the synthetic weights.", 0),
    _text("dtype_w", "Element type of the weights.", needed=OWN_TIMES),
    _text("dtype_a", "Element type to which activations are rounded for the product.", needed=OWN_TIMES),
    _text("dtype_out", "Element type of the results.", needed=OWN_TIMES),
    _text("layout", "Layout of the activations: `feature_major`, `token_major`, `blocked`, `nchw`, `nhwc`, `chwn`."),
    _text("epilogue", "Fused work after the product: `none`, `bias`, `bias+relu`, `bias+gelu`."),
    _text("kernel_requested", "Kernel that the engine was asked for; `auto`: its own choice."),
    _text("context", "Layer timed alone, or inside a running network.", "isolated", "network", needed=OWN_TIMES),
    _text(
        "cache_mode",
        "State of the caches at each call: `rotated` uses several copies of the weights in turn, `warm` one copy, "
        "`cold` flushes the caches.",
        "rotated", "warm", "cold", needed=OWN_TIMES,
    ),
    _text("launch_mode", "GPU launches: one by one, or as a CUDA graph.", "call", "graph", needed=OWN_TIMES),
    _whole("threads", "Threads of the engine.", 1, needed=OWN_TIMES),
)  # fmt: skip

IDENTITY_COLUMNS = (
    _whole("schema_version", f"Version of these columns: {SCHEMA_VERSION}.", needed=EVERY_ROW),
    _text("point_id", "Hash of the key columns: 16 hexadecimal digits.", needed=EVERY_ROW),
    _text("run_id", "Run that wrote the row.", needed=PROVENANCE),
    _text("env_id", "Environment of the measurement, described in `env-<env_id>.json`.", needed=PROVENANCE),
    _whole("block", "Block of the run; the points of one block are sampled in turns.", 0),
    _whole("seq", "Position of the row in its block.", 0),
    TableColumn(
        "started_at", pa.timestamp("us", tz="UTC"), "Start of the measurement of the block, UTC.", needed=EVERY_ROW
    ),
    _text("backend_version", "Version of the engine, its libraries and our kernels."),
    _text("device_uuid_hash", "Tells this device from others of its name without identifying it."),
)

PATTERN_COLUMNS = (
    _text("format", "Storage format: `dense`, `unstructured`, `nm`, `block`, `vector`, `shflbw`; from the pattern."),
    _whole("block_h", "Rows of a block; from the pattern."),
    _whole("block_w", "Columns of a block; from the pattern."),
    _whole("v", "Rows of a vector; from the pattern."),
    _whole("nm_n", "Kept weights of an N:M group; from the pattern."),
    _whole("nm_m", "Weights of an N:M group; from the pattern."),
    _text("kernel_used", "Kernel that ran."),
    _real("sparsity_actual", "Measured share of zero weights.", minimum=0, maximum=1),
    _whole("nnz", "Kept weights, at most m x k."),
)

TIME_COLUMNS = (
    _text("timer", "Clock: `perf_counter`, `cuda_event`, or the format of imported times.", needed=PROVENANCE),
    _whole("l2_flush_bytes", "Bytes written to flush the L2 cache before each cold call.", 0, "bytes"),
    _whole("weight_copies", "Copies of the weights that were used in turn.", 1),
    _text("pinning", "Binding of threads to cores."),
    TableColumn(
        "samples_seconds", pa.list_(pa.field("element", pa.float64())),
        "Samples in the order they were taken; each is the mean of `inner_loops` calls.", "seconds",
    ),
    _seconds("median_seconds", "Median of the samples: the time of the row."),
    _seconds("min_seconds", "Shortest sample."),
    _seconds("mean_seconds", "Mean of the samples."),
    _seconds("q25_seconds", "First quartile of the samples."),
    _seconds("q75_seconds", "Third quartile of the samples."),
    _seconds("p95_seconds", "95th percentile of the samples."),
    _real("std_seconds", "Standard deviation of the samples; null with one sample.", "seconds", minimum=0),
    _seconds("low_seconds", "Lower end of the 95% confidence interval of the median; null below six samples."),
    _seconds("high_seconds", "Upper end of the 95% confidence interval of the median; null below six samples."),
    _real(
        "burst_error",
        "Half of the 95% confidence interval of the median over the median, from the medians of the bursts.",
        minimum=0,
    ),
    _whole("sample_count", "Number of samples."),
    _whole("inner_loops", "Calls per sample.", 1),
    _whole("discarded_samples", "Samples that were left out because the device was disturbed.", 0),
    _real("corrected_seconds", "median_seconds / reference_ratio: the time at the usual pace.", "seconds"),
)  # fmt: skip

PHYSICS_COLUMNS = (
    _whole("flop_dense", "Operations of the dense layer: 2 m k n.", unit="operations"),
    _whole("flop_nnz", "Operations on kept weights: 2 nnz n.", 0, "operations"),
    _whole("bytes_min", "Bytes that every kernel must move.", 1, "bytes"),
    _seconds("roofline_seconds", "Shortest time that the ceilings of the device allow."),
    _real("utilisation", "roofline_seconds / median_seconds."),
)

TELEMETRY_COLUMNS = (
    _real("clock_hertz", "Clock frequency: of the fastest core, or of the GPU's multiprocessors.", "hertz", above=0),
    _real("power_watts", "Power of the GPU.", "watts", minimum=0),
    _real("temperature_celsius", "Highest temperature of the GPU.", "degrees Celsius"),
    _text("event_reasons", "Reasons for disturbances or lower clocks, joined by `+`."),
    _real("load", "Runnable threads of the machine, mean of a minute.", minimum=0),
    _real("steal_fraction", "Share of time that the hypervisor gave to others.", minimum=0, maximum=1),
    _real("drift_ratio", "Median of the later half of the bursts over that of the earlier half.", above=0),
    _seconds("reference_seconds", "Time of fixed reference work during the measurement, weighed for this layer."),
    _seconds("reference_usual_seconds", "Usual time of the same reference work on a quiet machine."),
    _real("reference_ratio", "reference_seconds / reference_usual_seconds: the slowdown of the machine."),
)

QUALITY_COLUMNS = (
    _text("stop_reason", "Why sampling ended.", "relative_error", "plateau", "budget", "failed"),
    _text("status", f"Outcome: {', '.join(f'`{status}`' for status in STATUSES)}.", needed=EVERY_ROW),
    _real("max_rel_err", "Largest error of the result over |w| @ |x| + |bias|.", minimum=0),
    _text(
        "flags",
        "Remarks joined by `+`. `preempted`: other processes or heat disturbed most bursts. `slow_spell`: the "
        "machine was slower than in the rest of the sweep. `spike`: twice far above neighbouring sparsities. "
        "`no_roofline`: the ceilings could not be measured. `in_cache`, `in_l2`: all copies of so small a layer may "
        "have stayed in the cache. `clock_set_back`: started_at was moved behind that of the row it replaces.",
    ),
    _text("error", "Why there is no time, in a sentence."),
)

COLUMN_GROUPS: Mapping[str, tuple[TableColumn, ...]] = {
    "Identity": IDENTITY_COLUMNS,
    "Key": KEY_COLUMNS,
    "Pattern and kernel": PATTERN_COLUMNS,
    "Time": TIME_COLUMNS,
    "Work and ceilings": PHYSICS_COLUMNS,
    "Telemetry": TELEMETRY_COLUMNS,
    "Quality": QUALITY_COLUMNS,
}
"""All columns in the order of the file, by topic."""

COLUMNS: Mapping[str, TableColumn] = {column.name: column for group in COLUMN_GROUPS.values() for column in group}
"""All columns in the order of the file, by name."""

SCHEMA = pa.schema([pa.field(column.name, column.type) for column in COLUMNS.values()])
"""The Arrow schema of a table file."""


def list_needed_columns(needed: str) -> list[str]:
    """Return the names of the columns whose `needed` is this."""
    return [column.name for column in COLUMNS.values() if column.needed == needed]
