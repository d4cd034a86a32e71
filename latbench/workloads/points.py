"""What is to be measured: points, and how long they take.

A point is the key of a table row: a layer's shape, a pattern at a sparsity, an engine with its settings. Linear
layers are timed token-major (torch's own order), convolutions NCHW, both with a bias: as a model runs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from latbench.errors import UsageError
from latbench.tables.point_ids import hash_key
from latbench.workloads import workload as workloads
from latbench.workloads.workload import Workload
from sparse_kernels import patterns
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorNM, VectorWise
from sparse_kernels.shapes import Conv2dShape, Shape

# The kernels that each engine is asked for, by operation.
KERNELS: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {"linear": ("linear", "mkldnn", "prepacked"), "conv2d": ("conv2d", "mkldnn", "prepacked")},
    "onnxruntime": {"linear": ("auto",), "conv2d": ("auto",)},
    "openvino": {"linear": ("auto",), "conv2d": ("auto",)},
    "numba": {"linear": ("auto",), "conv2d": ("auto",)},
    "torch_sparse_cpu": {"linear": ("auto",), "conv2d": ()},
    "scipy": {"linear": ("auto",), "conv2d": ()},
}
# What they are asked for besides in a sweep that tunes: kernels found by trying.
TUNED: dict[tuple[str, str], tuple[str, ...]] = {("numba", "linear"): ("tuned",)}
# And in one with bfloat16, by kernel the types that weights and activations are multiplied in: kernels that read two
# bytes a weight; and those that round both, dense ones beside them.
_WEIGHTS, _BOTH = ("bfloat16", ""), ("bfloat16", "bfloat16")
ROUNDED: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    **{(engine, op): {"bf16": _BOTH} for engine in ("torch", "openvino", "numba") for op in ("linear", "conv2d")},
    ("numba", "linear"): {"bf16-weights": _WEIGHTS, "bf16": _BOTH},
}
_ROUNDED_FORMATS = {"bf16-weights": ("block", "vector", "shflbw"), "bf16": ("dense", "block", "vector", "shflbw")}
STANDARD = ("torch", "onnxruntime", "openvino", "numba")
"""The engines of a sweep that names none: all that run dense layers, because any may be the fastest, and our own."""

_COMPRESSED = ("unstructured", "nm", "block")
# The formats of weights that each engine multiplies; numba alone all of them.
_FORMATS = {
    "torch": ("dense",), "onnxruntime": ("dense",), "openvino": ("dense",),
    "torch_sparse_cpu": _COMPRESSED, "scipy": _COMPRESSED,
}  # fmt: skip
# Where activations lie in another way than models have them by default: oneDNN's convolutions like channels last.
_LAYOUTS = {
    (engine, "conv2d", kernel): "nhwc"
    for engine, kernel in (("torch", "prepacked"), ("torch", "bf16"), ("openvino", "auto"), ("openvino", "bf16"))
}

# Anchors first: a look-up that interpolates over sparsity needs them, the others make it sharper.
SPARSITIES = (0.5, 0.75, 0.9, 0.6, 0.8, 0.95)

# What an adaptive sweep may choose from: six of them anchor a curve.
FINE_SPARSITIES = tuple(round(0.5 + 0.025 * step, 3) for step in range(20))

# What a point costs on an ordinary core, for the estimate: compiling or building, checking; then timing.
_PREPARE_SECONDS = {
    "torch": 0.1, "onnxruntime": 0.15, "openvino": 0.15, "numba": 0.3, "torch_sparse_cpu": 0.1, "scipy": 0.1,
}  # fmt: skip
_TUNE_SECONDS = 0.5
_CHECKED_FLOP_PER_SECOND = 2e10  # of the float64 product that a result is compared with
_TIMING_SECONDS = 0.5  # most use up what they may, and a sixth of the time goes into the reference
_START_SECONDS = 10.0  # engines, and ceilings where none are kept

ASSUMED = "an ordinary core, and nothing else at work on it"

# Sweeps of 70 points on two cores: a part is mostly the description of its columns, a row has 130 samples on average.
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
    layout: str = ""  # how the activations lie; by default as models on a CPU have them
    dtype_w: str = ""  # of the weights, where they have another one
    dtype_a: str = ""  # that activations are rounded to when they are multiplied, where it is another one

    def __post_init__(self) -> None:
        for name in ("dtype_w", "dtype_a"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.dtype)
        if not self.layout:
            usual = "nchw" if isinstance(self.shape, Conv2dShape) else "token_major"
            object.__setattr__(self, "layout", usual)

    def key(self) -> dict[str, Any]:
        """The key columns of this point's row."""
        return {
            "purpose": self.purpose,
            "device": self.device,
            "backend": self.backend,
            "model": "",
            **shape_columns(self.shape),
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
        return f"{self.backend} {self.kernel} {self.pattern} {self.sparsity:g} {describe(self.shape)}"


def shape_columns(shape: Shape) -> dict[str, Any]:
    """The key columns that say the operation and its shape; a linear layer has no convolution columns."""
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


def describe(shape: Shape) -> str:
    """A shape in few characters, for people."""
    if isinstance(shape, Conv2dShape):
        stride = f"/{shape.stride[0]}" if shape.stride != (1, 1) else ""
        return f"conv {shape.c_out}x{shape.c_in}x{shape.kh}x{shape.kw}{stride} on {shape.batch}x{shape.h}x{shape.w}"
    return f"linear {shape.m}x{shape.k} on {shape.n}"


def points(
    chosen: Iterable[Workload],
    *,
    device: str,
    threads: int,
    backends: Sequence[str] = STANDARD,
    wanted: Sequence[Pattern] | None = None,
    sparsities: Sequence[float] = SPARSITIES,
    seed: int = 0,
    tune: bool = False,
    bf16: bool = False,
) -> list[Point]:
    """Every point of every distinct shape of the workloads `chosen`, in their order.

    `wanted` are the patterns for all layers; by default those that fit a layer's shape, dense among them. A pattern
    whose sparsity is given by its name is measured at that one only. `tune` adds kernels found by trying, and `bf16`
    those with weights of bfloat16, and with activations rounded to it, too.
    """
    found: dict[Point, None] = {}
    for shape in dict.fromkeys(layer.shape for workload in chosen for layer in workload.layers):
        for pattern in default_patterns(shape) if wanted is None else wanted:
            engines = [name for name in backends if name not in _FORMATS or pattern.format in _FORMATS[name]]
            for backend in engines:
                tuned = TUNED.get((backend, shape.op), ()) if tune else ()
                rounded = {
                    kernel: dtypes
                    for kernel, dtypes in (ROUNDED.get((backend, shape.op), {}) if bf16 else {}).items()
                    if pattern.format in _ROUNDED_FORMATS[kernel]
                }
                for kernel in (*KERNELS[backend][shape.op], *tuned, *rounded):
                    layout = _LAYOUTS.get((backend, shape.op, kernel), "")
                    dtype_w, dtype_a = rounded.get(kernel, ("", ""))
                    for sparsity in sparsities_of(pattern, sparsities):
                        point = Point(
                            device, backend, kernel, shape, pattern, sparsity, threads, seed,
                            layout=layout, dtype_w=dtype_w, dtype_a=dtype_a,
                        )  # fmt: skip
                        found[point] = None
    return list(found)


def default_patterns(shape: Shape) -> list[Pattern]:
    """The patterns worth measuring for a layer: vectors as long as its rows allow, and short for convolutions.

    A convolution has few output features and its accuracy suffers more from long vectors than a linear layer's does.
    """
    if isinstance(shape, Conv2dShape):
        v = 16 if shape.m >= 64 else 8
    else:
        v = 32 if shape.m >= 128 else 16 if shape.m >= 32 else 8
    every: list[Pattern] = [Dense(), VectorWise(v), ShflBW(v), BlockWise(v, v), Unstructured(), NM(2, 4), NM(1, 4)]
    return [pattern for pattern in every if pattern.refuses(shape) is None]


def sparsities_of(pattern: Pattern, sparsities: Sequence[float]) -> Sequence[float]:
    """The sparsities at which `pattern` is measured: those asked for, unless it has only one."""
    if isinstance(pattern, Dense):
        return (0.0,)
    return (pattern.sparsity,) if isinstance(pattern, NM | VectorNM) else sparsities


def parse_patterns(texts: Sequence[str]) -> list[Pattern]:
    """Patterns from their specs, several in one text separated by commas. Raises UsageError for an unknown one."""
    try:
        return [patterns.parse(text.strip()) for given in texts for text in given.split(",")]
    except ValueError as error:
        raise UsageError(str(error)) from error


def parse_sparsities(texts: Sequence[str]) -> list[float]:
    """Sparsities, several in one text separated by commas. Raises UsageError for one outside 0 < sparsity < 1."""
    values = []
    for text in (part.strip() for given in texts for part in given.split(",")):
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"a sparsity is a number such as 0.75, not {text!r}") from None
        if not 0 < value < 1:
            raise UsageError(f"a sparsity lies between 0 and 1 (0.9 drops nine of ten weights), not {text}")
        values.append(value)
    return values


def wanted_sparsities(texts: Sequence[str] | None) -> tuple[float, ...] | None:
    """Sparsities as `parse_sparsities` reads them, or for `fine` all that an adaptive sweep may choose from."""
    if not texts:
        return None
    return FINE_SPARSITIES if list(texts) == ["fine"] else tuple(parse_sparsities(texts))


def blocks(wanted: Iterable[Point], seed: int, least: int = 1) -> list[list[Point]]:
    """Points by layer shape, shapes in a random order: neighbours in time share nothing but the machine's mood.

    Shapes of few points come together in blocks of `least` points or more, as far as there are any: the more take
    turns, the longer the time over which each is sampled.
    """
    by_shape: dict[Shape, list[Point]] = {}
    for point in wanted:
        by_shape.setdefault(point.shape, []).append(point)

    def lot(shape: Shape) -> bytes:
        # By hash, not by a generator: a rerun with fewer points left keeps the order.
        return hashlib.sha256(f"{seed} {shape}".encode()).digest()

    found: list[list[Point]] = []
    for shape in sorted(by_shape, key=lot):
        if found and len(found[-1]) < least:
            found[-1] += by_shape[shape]
        else:
            found.append(by_shape[shape])
    return found


def estimated_seconds(wanted: Iterable[Point]) -> float:
    """About how long measuring takes, within a factor of two or so; longer where others use the machine: noisy
    points get other chances. See ASSUMED.
    """
    every = list(wanted)
    tuned = sum(point.kernel == "tuned" for point in every)
    checks = sum(2 * point.shape.m * point.shape.k * point.shape.n for point in every) / _CHECKED_FLOP_PER_SECOND
    each = sum(_PREPARE_SECONDS[point.backend] + _TIMING_SECONDS for point in every)
    return (_START_SECONDS if every else 0.0) + each + checks + _TUNE_SECONDS * tuned


def estimated_bytes(wanted: Iterable[Point], block_points: int = 24, samples: int = _SAMPLES) -> int:
    """About how much disk the table takes, which has a part for every block of so many points or more, and so many
    `samples` a row.
    """
    every = list(wanted)
    if not every:
        return 0
    rows = len(every) * (_ROW_BYTES + samples * _SAMPLE_BYTES)
    return round(_ENVIRONMENT_BYTES + _PART_BYTES * len(blocks(every, 0, block_points)) + rows)


def select(
    names: Sequence[str],
    pattern_specs: Sequence[str],
    sparsity_texts: Sequence[str],
    *,
    device: str,
    threads: int,
    backends: Sequence[str] = STANDARD,
    seed: int = 0,
    tune: bool = False,
    bf16: bool = False,
    usual: Sequence[float] = SPARSITIES,
) -> list[Point]:
    """The points that a command line asks for; where it is silent, all bundled workloads, the default patterns and
    the `usual` sparsities.

    Raises UsageError for an unknown workload, pattern or sparsity, BadData for a file that is no workload.
    """
    chosen = [workloads.load(name) for name in names or workloads.bundled()]
    return points(
        chosen,
        device=device,
        threads=threads,
        backends=backends,
        wanted=parse_patterns(pattern_specs) if pattern_specs else None,
        sparsities=parse_sparsities(sparsity_texts) if sparsity_texts else usual,
        seed=seed,
        tune=tune,
        bf16=bf16,
    )
