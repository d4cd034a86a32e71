"""Points of a CPU sweep, and estimates of how long they take.

A point is the key of a table row: a layer's shape, a pattern at a sparsity, an engine with its settings. Linear
layers are timed token-major (torch's own order), convolutions NCHW, both with a bias, as a model runs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from latbench.base.engine_registry import (
    CPU_ENGINES,
    INT8,
    ROUNDED_KERNELS,
    CpuLayerEngine,
    RoundedKernel,
    list_standard,
)
from latbench.errors import UsageError
from latbench.tables.point_ids import hash_key
from latbench.workloads.workload import Workload, list_standard_workloads, read_workload
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorNM, VectorWise, parse
from sparse_kernels.shapes import Conv2dShape, Shape

STANDARD_ENGINES = list_standard(CPU_ENGINES)
"""The default engines: all that run dense layers, because any may be the fastest, and our own."""

# Anchors first: a look-up that interpolates over sparsity needs them; the others refine it.
SPARSITIES = (0.5, 0.75, 0.9, 0.6, 0.8, 0.95)

# The choice of an adaptive sweep; six of them anchor a curve.
FINE_SPARSITIES = tuple(round(0.5 + 0.025 * step, 3) for step in range(20))

# Estimated seconds per point on an ordinary core, besides building its layer: tuning, checking, then timing.
_TUNE_SECONDS = 0.5
_CHECKED_FLOP_PER_SECOND = 2e10  # of the float64 product that checks a result
_TIMING_SECONDS = 0.5  # most points use their budget, and a sixth of the time is for reference work
_START_SECONDS = 10.0  # of engines, and of ceilings that are not cached

ESTIMATE_ASSUMPTION = "an ordinary core, and nothing else at work on it"

# From sweeps of 70 points on two cores: a part is mostly its column metadata, a row has 130 samples on average.
_PART_BYTES, _ROW_BYTES, _SAMPLE_BYTES, _SAMPLES = 25_500, 400, 5.3, 130
_ENVIRONMENT_BYTES = 8_000


@dataclass(frozen=True)
class Point:
    """One thing to measure; equal points have equal `id`."""

    device: str
    backend: str
    kernel: str
    shape: Shape
    pattern: Pattern
    sparsity: float
    threads: int
    seed: int = 0
    purpose: str = "sweep"
    epilogue: str = "bias"
    context: str = "isolated"
    cache_mode: str = "rotated"
    launch_mode: str = "call"
    dtype: str = "float32"  # of weights, activations and results
    layout: str = ""  # of the activations; by default as in models on a CPU
    dtype_w: str = ""  # of the weights, if it differs
    dtype_a: str = ""  # to which activations are rounded for the product, if it differs

    def __post_init__(self) -> None:
        for name in ("dtype_w", "dtype_a"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.dtype)
        if not self.layout:
            usual = "nchw" if isinstance(self.shape, Conv2dShape) else "token_major"
            object.__setattr__(self, "layout", usual)

    def key(self) -> dict[str, Any]:
        """Return the key columns of this point's row."""
        return {
            "purpose": self.purpose,
            "device": self.device,
            "backend": self.backend,
            "model": "",
            **convert_shape_to_columns(self.shape),
            "pattern": str(self.pattern),
            "sparsity_target": self.sparsity,
            "pattern_seed": self.seed,
            "dtype_w": self.dtype_w,
            "dtype_a": self.dtype_a,
            "dtype_out": self.dtype,
            "layout": self.layout,
            "epilogue": self.epilogue,
            "kernel_requested": self.kernel,
            "context": self.context,
            "cache_mode": self.cache_mode,
            "launch_mode": self.launch_mode,
            "threads": self.threads,
        }

    @property
    def id(self) -> str:
        """The point_id of this point's row."""
        return hash_key(self.key())

    def __str__(self) -> str:
        return f"{self.backend} {self.kernel} {self.pattern} {self.sparsity:g} {format_shape(self.shape)}"


def convert_shape_to_columns(shape: Shape) -> dict[str, Any]:
    """Return the key columns of a shape and its operation; a linear layer has no convolution columns."""
    columns: dict[str, Any] = {"op": shape.op, "m": shape.m, "k": shape.k, "n": shape.n}
    if isinstance(shape, Conv2dShape):
        columns |= {name: getattr(shape, name) for name in ("batch", "c_in", "h", "w", "c_out", "kh", "kw")}
        pairs: dict[str, tuple[int, int]] = {
            "stride": shape.stride,
            "padding": shape.padding,
            "dilation": shape.dilation,
        }
        columns |= {f"{name}_{axis}": pair[i] for name, pair in pairs.items() for i, axis in enumerate("hw")}
    return columns


def format_shape(shape: Shape) -> str:
    """Return a shape as a short text."""
    if isinstance(shape, Conv2dShape):
        stride = f"/{shape.stride[0]}" if shape.stride != (1, 1) else ""
        return f"conv {shape.c_out}x{shape.c_in}x{shape.kh}x{shape.kw}{stride} on {shape.batch}x{shape.h}x{shape.w}"
    return f"linear {shape.m}x{shape.k} on {shape.n}"


@dataclass(frozen=True)
class PointSetup:
    """What all points of a CPU sweep share.

    Parameters
    ----------
    device
        The device's name in tables.
    threads
        Threads of each engine.
    backends
        The engines.
    seed
        Random seed of the synthetic weights.
    tune
        Add kernels that are found by trying several.
    rounded
        Precisions of which kernels are added: those that round weights, and those that round activations too. With
        int8 the default patterns are joined by those that keep columns in fours.
    """

    device: str
    threads: int
    backends: Sequence[str] = STANDARD_ENGINES
    seed: int = 0
    tune: bool = False
    rounded: Sequence[str] = ()


def list_points(
    chosen: Iterable[Workload],
    setup: PointSetup,
    *,
    patterns: Sequence[Pattern] | None = None,
    sparsities: Sequence[float] = SPARSITIES,
) -> list[Point]:
    """Return every point of every distinct shape of workloads, in their order.

    Parameters
    ----------
    chosen
        The workloads.
    setup
        Device, threads and engines of all points.
    patterns
        Patterns for all layers; by default those that fit a layer's shape, dense among them.
    sparsities
        Sparsities of each pattern. A pattern whose name gives its sparsity is measured at that one only.
    """
    found: dict[Point, None] = {}
    for shape in dict.fromkeys(layer.shape for workload in chosen for layer in workload.layers):
        for pattern in select_default_patterns(shape, setup.rounded) if patterns is None else patterns:
            for backend in setup.backends:
                for kernel in _list_kernels(CPU_ENGINES[backend], shape, pattern, setup):
                    rounded = ROUNDED_KERNELS.get(kernel)
                    dtype_w, dtype_a = (rounded.weights, rounded.activations) if rounded else ("", "")
                    layout = _find_layout(CPU_ENGINES[backend], shape, kernel)
                    for sparsity in select_sparsities(pattern, sparsities):
                        point = Point(
                            setup.device, backend, kernel, shape, pattern, sparsity, setup.threads, setup.seed,
                            layout=layout, dtype_w=dtype_w, dtype_a=dtype_a,
                        )  # fmt: skip
                        found[point] = None
    return list(found)


def _list_kernels(engine: CpuLayerEngine, shape: Shape, pattern: Pattern, setup: PointSetup) -> list[str]:
    """Return the kernels that a sweep times for a layer; none where the engine lacks its format."""
    if engine.formats and pattern.format not in engine.formats:
        return []
    tuned = engine.tuned_kernels.get(shape.op, ()) if setup.tune else ()
    narrow = [kernel for precision in setup.rounded for kernel in engine.list_rounded(shape.op, precision)]
    rounded = [kernel for kernel in narrow if _is_for(ROUNDED_KERNELS[kernel], shape, pattern)]
    return [*engine.timed_kernels[shape.op], *tuned, *rounded]


def _is_for(kernel: RoundedKernel, shape: Shape, pattern: Pattern) -> bool:
    return pattern.format in kernel.formats and (isinstance(shape, Conv2dShape) or shape.n <= kernel.most_tokens)


def _find_layout(engine: CpuLayerEngine, shape: Shape, kernel: str) -> str:
    """Return the layout of activations for a kernel; empty for the default of models."""
    return "nhwc" if isinstance(shape, Conv2dShape) and kernel in engine.channels_last else ""


def select_default_patterns(shape: Shape, rounded: Sequence[str] = ()) -> list[Pattern]:
    """Return the default patterns of a layer: vectors as long as its rows allow, shorter ones for convolutions.

    A convolution has few output features, and its accuracy suffers more from long vectors than a linear layer's. If
    int8 is among the precisions `rounded` to, patterns follow that keep columns in fours.
    """
    if isinstance(shape, Conv2dShape):
        v = 16 if shape.m >= 64 else 8
    else:
        v = 32 if shape.m >= 128 else 16 if shape.m >= 32 else 8
    every: list[Pattern] = [Dense(), VectorWise(v), ShflBW(v), BlockWise(v, v), Unstructured(), NM(2, 4), NM(1, 4)]
    if INT8 in rounded:
        every += [BlockWise(v, 4), ShflBW(v, 4), BlockWise(4, 4), BlockWise(1, 4)]
    return [pattern for pattern in every if pattern.refuses(shape) is None]


def select_sparsities(pattern: Pattern, sparsities: Sequence[float]) -> Sequence[float]:
    """Return the sparsities of `pattern`: the given ones, unless it has only one."""
    if isinstance(pattern, Dense):
        return (0.0,)
    return (pattern.sparsity,) if isinstance(pattern, NM | VectorNM) else sparsities


def parse_patterns(texts: Sequence[str]) -> list[Pattern]:
    """Parse specs of patterns. Raises UsageError for an unknown one."""
    try:
        return [parse(text) for text in texts]
    except ValueError as error:
        raise UsageError(str(error)) from error


def parse_sparsities(texts: Sequence[str]) -> list[float]:
    """Parse sparsities. Raises UsageError outside 0 < sparsity < 1."""
    values = []
    for text in texts:
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"a sparsity is a number such as 0.75, not {text!r}") from None
        if not 0 < value < 1:
            raise UsageError(f"a sparsity lies between 0 and 1 (0.9 drops nine of ten weights), not {text}")
        values.append(value)
    return values


def parse_wanted_sparsities(texts: Sequence[str] | None) -> tuple[float, ...] | None:
    """Parse sparsities as `parse_sparsities`; `fine` means all that an adaptive sweep may choose from."""
    if not texts:
        return None
    return FINE_SPARSITIES if list(texts) == ["fine"] else tuple(parse_sparsities(texts))


def group_into_blocks(wanted: Iterable[Point], seed: int, least: int = 1) -> list[list[Point]]:
    """Group points by layer shape, shapes in a random order that depends on `seed`.

    Shapes of few points share a block of at least `least` points, as far as there are any. The more points take
    turns, the longer is the time over which each is sampled.
    """
    by_shape: dict[Shape, list[Point]] = {}
    for point in wanted:
        by_shape.setdefault(point.shape, []).append(point)

    def lot(shape: Shape) -> bytes:
        # By hash, not by a generator, so that a rerun with fewer points keeps the order.
        return hashlib.sha256(f"{seed} {shape}".encode()).digest()

    found: list[list[Point]] = []
    for shape in sorted(by_shape, key=lot):
        if found and len(found[-1]) < least:
            found[-1] += by_shape[shape]
        else:
            found.append(by_shape[shape])
    return found


def estimate_seconds(wanted: Iterable[Point]) -> float:
    """Return about how long measuring takes in seconds, within a factor of two; see ESTIMATE_ASSUMPTION.

    It takes longer where others use the machine, because noisy points are measured again.
    """
    every = list(wanted)
    tuned = sum(point.kernel == "tuned" for point in every)
    checks = sum(2 * point.shape.m * point.shape.k * point.shape.n for point in every) / _CHECKED_FLOP_PER_SECOND
    each = sum(CPU_ENGINES[point.backend].prepare_seconds + _TIMING_SECONDS for point in every)
    return (_START_SECONDS if every else 0.0) + each + checks + _TUNE_SECONDS * tuned


def estimate_bytes(wanted: Iterable[Point], block_points: int = 24, samples: int = _SAMPLES) -> int:
    """Return about how much disk a table takes, with a part per block and `samples` samples a row."""
    every = list(wanted)
    if not every:
        return 0
    rows = len(every) * (_ROW_BYTES + samples * _SAMPLE_BYTES)
    return round(_ENVIRONMENT_BYTES + _PART_BYTES * len(group_into_blocks(every, 0, block_points)) + rows)


def select_points(
    names: Sequence[str],
    pattern_specs: Sequence[str],
    sparsity_texts: Sequence[str],
    setup: PointSetup,
    *,
    default_sparsities: Sequence[float] = SPARSITIES,
) -> list[Point]:
    """Return the points that a command line asks for.

    Parameters
    ----------
    names
        Names or files of workloads; by default the standard ones.
    pattern_specs
        Specs of patterns; by default those that fit each layer.
    sparsity_texts
        Sparsities; by default `default_sparsities`.
    setup
        Device, threads and engines of all points.
    default_sparsities
        Sparsities where the command line gives none.

    Raises
    ------
    UsageError
        A workload, pattern or sparsity is unknown.
    BadData
        A file is no workload.
    """
    return list_points(
        [read_workload(name) for name in names or list_standard_workloads()],
        setup,
        patterns=parse_patterns(pattern_specs) if pattern_specs else None,
        sparsities=parse_sparsities(sparsity_texts) if sparsity_texts else default_sparsities,
    )
