"""Points of a GPU sweep, most of them in float16, and the standard sweep with the most informative points first.

Kernels are timed without bias or activation, because some peers cannot fuse them. Weights are rotated and calls run
in a CUDA graph (see `latbench.timing.gpu_events`), where a library can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from latbench.base.engine_registry import (
    BFLOAT16,
    CUBLAS,
    CUPY,
    CUSPARSE,
    FEW_TOKENS,
    FLOAT16,
    FP8,
    GPU_ENGINES,
    INT4,
    INT8,
    INT32,
    NUMBA_CUDA,
    TORCH_GPU,
    TORCH_SPARSE,
)
from latbench.workloads.points import Point, select_sparsities
from latbench.workloads.workload import read_workload
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

MOST_POINTS = 580
BLOCK_POINTS = 16  # small, because a block's preparation is lost if time runs out before it is timed

GPU_SPARSITIES = (0.5, 0.75, 0.9, 0.95)

# A kernel: backend, name, layout.
Kernel = tuple[str, str, str]

PRECISIONS = {
    FLOAT16: (FLOAT16, FLOAT16, FLOAT16),
    BFLOAT16: (BFLOAT16, BFLOAT16, BFLOAT16),
    FP8: (FP8, FP8, BFLOAT16),
    INT8: (INT8, INT8, INT32),
    INT4: (INT4, BFLOAT16, BFLOAT16),
}
"""Types of weights, activations and results, by the type of the weights."""

DENSE: tuple[Kernel, ...] = (
    (TORCH_GPU, "cublas", "feature_major"),
    (TORCH_GPU, "cublas", "token_major"),
    (TORCH_GPU, "cublaslt", "feature_major"),
    (TORCH_GPU, "cublaslt", "token_major"),
)
DENSE_SEARCHED: tuple[Kernel, ...] = (
    (TORCH_GPU, "cublaslt_search", "feature_major"),
    (TORCH_GPU, "cublaslt_search", "token_major"),
)
DENSE_TURNED: tuple[Kernel, ...] = (
    (TORCH_GPU, "cublas_turned", "feature_major"),
    (TORCH_GPU, "cublas_turned", "token_major"),
    (TORCH_GPU, "cublaslt_turned", "feature_major"),
    (TORCH_GPU, "cublaslt_turned", "token_major"),
)
DENSE_FP8: tuple[Kernel, ...] = ((TORCH_GPU, "fp8", "token_major"), (TORCH_GPU, "fp8_rows", "token_major"))
DENSE_INT8: tuple[Kernel, ...] = ((TORCH_GPU, "int8", "token_major"),)
DENSE_INT4: tuple[Kernel, ...] = ((TORCH_GPU, "int4", "token_major"),)
DENSE_AGAIN: tuple[Kernel, ...] = ((CUBLAS, "matmul", "feature_major"), (CUBLAS, "matmul", "token_major"))
DENSE_CONV: tuple[Kernel, ...] = ((TORCH_GPU, "cudnn", "nchw"), (TORCH_GPU, "cudnn", "nhwc"))
OURS: tuple[Kernel, ...] = ((CUPY, "auto", "feature_major"),)
OURS_CONV: tuple[Kernel, ...] = ((CUPY, "auto", "chwn"),)
NUMBA: tuple[Kernel, ...] = ((NUMBA_CUDA, "auto", "feature_major"),)
NUMBA_CONV: tuple[Kernel, ...] = ((NUMBA_CUDA, "auto", "nchw"),)
CUSPARSELT: tuple[Kernel, ...] = (
    (TORCH_SPARSE, "cusparselt", "feature_major"),
    (TORCH_SPARSE, "cusparselt", "token_major"),
    (TORCH_SPARSE, "cusparselt_tuned", "feature_major"),
)
CUSPARSELT_BYTES: tuple[Kernel, ...] = (
    (TORCH_SPARSE, "cusparselt", "token_major"),
    (TORCH_SPARSE, "cusparselt_tuned", "token_major"),
)
TORCHAO: tuple[Kernel, ...] = ((TORCH_SPARSE, "torchao", "token_major"),)
CUTLASS: tuple[Kernel, ...] = (
    (TORCH_SPARSE, "cutlass", "feature_major"),
    (TORCH_SPARSE, "cutlass", "token_major"),
)
BSR: tuple[Kernel, ...] = ((TORCH_SPARSE, "bsr", "feature_major"), (CUSPARSE, "bsr", "feature_major"))
BSR_TUNED: tuple[Kernel, ...] = ((TORCH_SPARSE, "bsr_tuned", "feature_major"),)
CSR: tuple[Kernel, ...] = ((CUSPARSE, "csr", "feature_major"),)

SMOKE_LINEAR = LinearShape(512, 1024, 256)
SMOKE_FEW = LinearShape(512, 1024, 16)  # for which our kernels have another form
SMOKE_CONV = Conv2dShape(16, 64, 14, 14, 128, 3, 3, padding=(1, 1))

LARGE = (
    LinearShape(4096, 4096, 2048),
    LinearShape(11008, 4096, 2048),
    LinearShape(4096, 11008, 2048),
    LinearShape(4096, 4096, 128),
)
"""A decoder's matrices of 7 billion weights in all (Touvron et al. 2023, LLaMA, table 2), long and short inputs."""

WORKLOADS = ("transformer-base", "bert-base", "gnmt")
LARGEST_RESULT = 2**25  # elements: the classifier of Transformer-base is left to a full sweep
DECODE = ("llama-3.1-8b@1", "llama-3.1-8b@16")  # one sentence, and as many as a busy server answers at once
LARGEST_DECODED = 2**26  # weights: drawing gate_up_proj, or the head, takes as long as twenty points
CONVOLUTIONS = (
    "layer1.0.conv2", "layer2.1.conv2", "layer3.1.conv2", "layer4.1.conv2", "layer1.0.conv3", "layer3.1.conv3",
)  # fmt: skip


@dataclass(frozen=True)
class Wish:
    """Kernels for a pattern at sparsities, for all shapes or for some.

    Parameters
    ----------
    tier
        Tiers are measured in rising order; lower ones are more informative.
    kernels
        The kernels.
    pattern
        The pattern.
    sparsities
        The sparsities.
    shapes
        The shapes; empty: all.
    precision
        The type of the weights, one of PRECISIONS.
    most_tokens
        Columns of the product, at most, for which it is worth a measurement.
    """

    tier: int
    kernels: tuple[Kernel, ...]
    pattern: Pattern
    sparsities: tuple[float, ...] = GPU_SPARSITIES
    shapes: tuple[Shape, ...] = ()
    precision: str = FLOAT16
    most_tokens: int = 2**31

    def is_for(self, shape: Shape) -> bool:
        """Return whether its kernels are measured on a shape."""
        return shape in (self.shapes or (shape,)) and shape.n <= self.most_tokens


FIRST = (LARGE[0],)
FIRST_DECODED = (LinearShape(4096, 4096, 16),)

LINEAR_WISHES = (
    # The main comparison, on one shape.
    Wish(1, DENSE + DENSE_AGAIN + DENSE_TURNED + DENSE_SEARCHED, Dense(), shapes=FIRST),
    Wish(1, DENSE_FP8, Dense(), shapes=FIRST, precision=FP8),
    Wish(1, DENSE_INT8, Dense(), shapes=FIRST, precision=INT8),
    Wish(1, DENSE[2:] + DENSE_SEARCHED, Dense(), shapes=FIRST, precision=BFLOAT16),
    Wish(1, OURS, ShflBW(128), shapes=FIRST),
    Wish(1, OURS, VectorWise(128), shapes=FIRST),
    Wish(1, OURS, ShflBW(64), (0.75, 0.9), FIRST),
    Wish(1, OURS, VectorWise(64), (0.75, 0.9), FIRST),
    Wish(1, OURS + BSR + BSR_TUNED, BlockWise(128, 128), (0.75,), FIRST),
    Wish(1, OURS + CUSPARSELT + CUTLASS, NM(2, 4), shapes=FIRST),
    Wish(1, CUSPARSELT_BYTES + TORCHAO, NM(2, 4), shapes=FIRST, precision=FP8),
    Wish(1, CUSPARSELT_BYTES, NM(2, 4), shapes=FIRST, precision=INT8),
    Wish(1, OURS + CUSPARSELT[2:], NM(2, 4), shapes=FIRST, precision=BFLOAT16),
    # The same for every shape, with fewer points.
    Wish(2, DENSE + DENSE_SEARCHED, Dense()),
    Wish(2, DENSE_FP8, Dense(), shapes=LARGE, precision=FP8),
    Wish(2, DENSE_INT4, Dense(), precision=INT4, most_tokens=FEW_TOKENS),
    Wish(2, OURS, VectorWise(128), (0.75, 0.9)),
    Wish(2, OURS, ShflBW(64), (0.75, 0.9)),
    Wish(2, OURS + CUSPARSELT, NM(2, 4)),
    Wish(3, OURS + BSR, BlockWise(64, 64), (0.75, 0.9)),
    # A search for Triton's parameters takes as long as twenty points.
    Wish(3, BSR_TUNED, BlockWise(64, 64), (0.75, 0.9), LARGE),
    Wish(3, DENSE_TURNED, Dense(), shapes=LARGE),
    Wish(3, DENSE_INT8, Dense(), shapes=LARGE, precision=INT8),
    Wish(3, DENSE[2:] + DENSE_SEARCHED, Dense(), shapes=LARGE, precision=BFLOAT16),
    Wish(3, OURS, VectorWise(64), (0.75,), LARGE, BFLOAT16),
    Wish(3, CUSPARSELT_BYTES[:1] + TORCHAO, NM(2, 4), shapes=LARGE, precision=FP8),
    Wish(3, CUSPARSELT_BYTES[:1], NM(2, 4), shapes=LARGE, precision=INT8),
    Wish(3, OURS + CSR, Unstructured(), (0.9,)),
    Wish(3, NUMBA, VectorWise(64), (0.9,), LARGE),
    Wish(4, OURS, VectorWise(64), (0.5, 0.75, 0.9, 0.95)),
    Wish(4, OURS, ShflBW(128), (0.75, 0.9)),
    Wish(4, OURS, VectorWise(128), (0.5, 0.95)),
    Wish(5, DENSE_AGAIN, Dense()),
    Wish(5, NUMBA, VectorWise(64), (0.9,)),
    Wish(5, OURS + BSR, BlockWise(128, 64), (0.75, 0.9)),
    Wish(5, OURS, VectorWise(32), (0.75, 0.9)),
    Wish(5, OURS + CSR, Unstructured(), (0.95,)),
)
DECODE_WISHES = (
    Wish(2, DENSE + DENSE_SEARCHED, Dense()),
    Wish(2, DENSE_FP8, Dense(), precision=FP8),
    Wish(2, DENSE_INT4, Dense(), precision=INT4),
    Wish(2, OURS, VectorWise(64), (0.75, 0.9)),
    Wish(2, OURS, ShflBW(64), (0.75,)),
    Wish(2, OURS + CUSPARSELT[:2], NM(2, 4)),
    Wish(2, CUSPARSELT[2:], NM(2, 4), shapes=FIRST_DECODED),
    Wish(3, DENSE_TURNED, Dense()),
    Wish(3, OURS, VectorWise(32), (0.75,)),
)
"""For the few tokens of the standard sweep. A layer reads its weights there, and multiplies little."""
CONV_WISHES = (
    Wish(2, DENSE_CONV, Dense()),
    Wish(2, OURS_CONV, VectorWise(64), (0.75, 0.9)),
    Wish(4, OURS_CONV, ShflBW(64), (0.75, 0.9)),
    Wish(5, NUMBA_CONV, VectorWise(64), (0.9,)),
)


def build_gpu_point(
    device: str, shape: Shape, pattern: Pattern, sparsity: float, kernel: Kernel, seed: int = 0,
    precision: str = FLOAT16,
) -> Point:  # fmt: skip
    """Return a point in the mode that its backend allows; `precision` is one of PRECISIONS."""
    backend, name, layout = kernel
    dtype_w, dtype_a, dtype = PRECISIONS[precision]
    launch = "graph" if GPU_ENGINES[backend].captures_graphs else "call"
    return Point(
        device, backend, name, shape, pattern, sparsity, threads=1, seed=seed, epilogue="none",
        cache_mode="rotated", launch_mode=launch, dtype=dtype, layout=layout, dtype_w=dtype_w, dtype_a=dtype_a,
    )  # fmt: skip


def list_wished_points(
    device: str, shape: Shape, wishes: Iterable[Wish], backends: Collection[str] = GPU_ENGINES, seed: int = 0
) -> list[Point]:
    """Return the points of `wishes` for one shape on `backends`, without patterns that do not fit it."""
    found: dict[Point, None] = {}
    for wish in wishes:
        if wish.pattern.refuses(shape) is not None:
            continue
        for sparsity in select_sparsities(wish.pattern, wish.sparsities):
            for kernel in wish.kernels:
                if kernel[0] in backends:
                    point = build_gpu_point(device, shape, wish.pattern, sparsity, kernel, seed, wish.precision)
                    found[point] = None
    return list(found)


def list_decode_shapes() -> list[Shape]:
    """Return the shapes of the standard sweep whose few tokens are those of decoding."""
    layers = [layer.shape for name in DECODE for layer in read_workload(name).layers]
    return [shape for shape in layers if shape.m * shape.k <= LARGEST_DECODED]


def list_standard_shapes() -> list[Shape]:
    """Return the shapes of the standard sweep: large ones, decoding, linear layers of workloads, convolutions."""
    linear = [
        layer.shape for name in WORKLOADS for layer in read_workload(name).layers
        if layer.shape.m * layer.shape.n <= LARGEST_RESULT
    ]  # fmt: skip
    resnet = {layer.name: layer.shape for layer in read_workload("resnet50-batch16").layers}
    return list(dict.fromkeys([*LARGE, *list_decode_shapes(), *linear, *(resnet[name] for name in CONVOLUTIONS)]))


def build_probe_points(device: str, backends: Collection[str]) -> dict[str, Point]:
    """Return a small point for each of these backends, which shows whether it works at all."""
    probes: tuple[tuple[Kernel, Pattern, float], ...] = (
        (DENSE[0], Dense(), 0.0),
        (CUSPARSELT[0], NM(2, 4), 0.5),
        (DENSE_AGAIN[0], Dense(), 0.0),
        (CSR[0], Unstructured(), 0.9),
        (OURS[0], VectorWise(64), 0.75),
        (NUMBA[0], VectorWise(64), 0.75),
    )
    return {
        kernel[0]: build_gpu_point(device, SMOKE_LINEAR, pattern, sparsity, kernel)
        for kernel, pattern, sparsity in probes if kernel[0] in backends
    }  # fmt: skip


def list_smoke_points(device: str, backends: Collection[str] = GPU_ENGINES, seed: int = 0) -> list[Point]:
    """Return one point for every kernel of every engine on small layers; together they show whether all work."""
    found: dict[tuple[object, ...], Point] = {}
    for shape in (SMOKE_LINEAR, SMOKE_CONV):
        for each in list_wished_points(device, shape, _wishes(shape), backends, seed):
            ours = each.pattern if GPU_ENGINES[each.backend].ours else None
            found.setdefault((shape, each.backend, each.kernel, each.layout, ours), each)
    own = [Wish(1, OURS, VectorWise(64), (0.75,)), Wish(1, OURS, ShflBW(128), (0.75,))]
    return [*found.values(), *list_wished_points(device, SMOKE_FEW, own, backends, seed)]


def list_standard_blocks(device: str, backends: Collection[str] = GPU_ENGINES, seed: int = 0) -> list[list[Point]]:
    """Return the standard sweep: the first MOST_POINTS of all tiers but the last, on the standard shapes."""
    decoded = set(list_decode_shapes())

    def chosen(shape: Shape) -> Sequence[Wish]:
        return DECODE_WISHES if shape in decoded else _wishes(shape)

    blocks: list[list[Point]] = []
    left = MOST_POINTS
    for block in _tiers(list_standard_shapes(), device, backends, chosen, seed):
        if left > 0:
            blocks.append(block[:left])
            left -= len(block)
    return blocks


def list_staged_blocks(
    shapes: Iterable[Shape], device: str, *, backends: Collection[str] = GPU_ENGINES,
    patterns: Sequence[Pattern] | None = None, sparsities: Sequence[float] | None = None, seed: int = 0,
) -> list[list[Point]]:  # fmt: skip
    """Return every point of every distinct shape in blocks of one shape each, the most informative first.

    Parameters
    ----------
    shapes
        Layers, the most informative first.
    device
        The device's name in tables.
    backends
        Backends to use: dense by all libraries, each pattern by our kernels and by its peers.
    patterns
        By default those of the wishes; one that no wish names is measured by our kernels.
    sparsities
        By default each wish's own first and, in a last tier, GPU_SPARSITIES.
    seed
        Random seed of the synthetic weights.

    Returns
    -------
    list of list of Point
        At most BLOCK_POINTS in each, no point twice.
    """

    def chosen(shape: Shape) -> list[Wish]:
        wishes = list(_wishes(shape))
        last = max(wish.tier for wish in wishes) + 1
        given = GPU_SPARSITIES if sparsities is None else tuple(sparsities)
        everywhere = [replace(wish, tier=last, sparsities=given, shapes=()) for wish in wishes]
        if sparsities is not None:
            wishes = [replace(wish, sparsities=given) for wish in wishes]
        wishes += everywhere
        if patterns is None:
            return wishes
        others = _unforeseen(shape, wishes, patterns, given)
        return [*(wish for wish in wishes if wish.pattern in patterns), *others]

    return _tiers(shapes, device, backends, chosen, seed)


def _tiers(
    shapes: Iterable[Shape],
    device: str,
    backends: Collection[str],
    chosen: Callable[[Shape], Sequence[Wish]],
    seed: int,
) -> list[list[Point]]:
    """Return blocks of one shape each, one tier of all shapes after the other."""
    wishes = {shape: chosen(shape) for shape in dict.fromkeys(shapes)}
    blocks: list[list[Point]] = []
    seen: set[Point] = set()
    for tier in sorted({wish.tier for of_shape in wishes.values() for wish in of_shape}):
        for shape, of_shape in wishes.items():
            here = [wish for wish in of_shape if wish.tier == tier and wish.is_for(shape)]
            found = [each for each in list_wished_points(device, shape, here, backends, seed) if each not in seen]
            seen.update(found)
            parts = -(-len(found) // BLOCK_POINTS)
            blocks += [found[len(found) * i // parts : len(found) * (i + 1) // parts] for i in range(parts)]
    return blocks


def _wishes(shape: Shape) -> tuple[Wish, ...]:
    return CONV_WISHES if isinstance(shape, Conv2dShape) else LINEAR_WISHES


def _unforeseen(
    shape: Shape, wishes: Sequence[Wish], patterns: Sequence[Pattern], sparsities: Sequence[float]
) -> list[Wish]:
    """Return wishes for patterns that no wish names, by our kernels."""
    ours = OURS_CONV if isinstance(shape, Conv2dShape) else OURS
    named = {wish.pattern for wish in wishes}
    return [Wish(1, ours, pattern, tuple(sparsities)) for pattern in patterns if pattern not in named]
