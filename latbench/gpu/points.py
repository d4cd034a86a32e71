"""What is measured on a GPU: points in float16, and the standard sweep, most telling first.

Kernels are timed without bias or activation, because not all of the peers can fuse them. The mode is rotated weights
in a CUDA graph (see `latbench.gpu.timing`), where a library can be captured.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from latbench import workloads
from latbench.backends.on_gpu import BACKENDS
from latbench.plan import Point, sparsities_of
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

MOST_POINTS = 500
BLOCK_POINTS = 16  # what a block has prepared is lost if time runs out before it is timed

SPARSITIES = (0.5, 0.75, 0.9, 0.95)

# Kernels by what they multiply: backend, kernel, layout.
Kernel = tuple[str, str, str]

DENSE: tuple[Kernel, ...] = (
    ("torch_gpu", "cublas", "feature_major"),
    ("torch_gpu", "cublas", "token_major"),
    ("torch_gpu", "cublaslt", "feature_major"),
    ("torch_gpu", "cublaslt", "token_major"),
)
DENSE_AGAIN: tuple[Kernel, ...] = (("cublas", "matmul", "feature_major"), ("cublas", "matmul", "token_major"))
DENSE_CONV: tuple[Kernel, ...] = (("torch_gpu", "cudnn", "nchw"), ("torch_gpu", "cudnn", "nhwc"))
OURS: tuple[Kernel, ...] = (("cupy", "auto", "feature_major"),)
OURS_CONV: tuple[Kernel, ...] = (("cupy", "auto", "chwn"),)
NUMBA: tuple[Kernel, ...] = (("numba_cuda", "auto", "feature_major"),)
NUMBA_CONV: tuple[Kernel, ...] = (("numba_cuda", "auto", "nchw"),)
CUSPARSELT: tuple[Kernel, ...] = (
    ("torch_sparse", "cusparselt", "feature_major"),
    ("torch_sparse", "cusparselt", "token_major"),
    ("torch_sparse", "cusparselt_tuned", "feature_major"),
)
CUTLASS: tuple[Kernel, ...] = (
    ("torch_sparse", "cutlass", "feature_major"),
    ("torch_sparse", "cutlass", "token_major"),
)
BSR: tuple[Kernel, ...] = (("torch_sparse", "bsr", "feature_major"), ("cusparse", "bsr", "feature_major"))
BSR_TUNED: tuple[Kernel, ...] = (("torch_sparse", "bsr_tuned", "feature_major"),)
CSR: tuple[Kernel, ...] = (("cusparse", "csr", "feature_major"),)

LARGE = (
    LinearShape(4096, 4096, 2048),
    LinearShape(11008, 4096, 2048),
    LinearShape(4096, 11008, 2048),
    LinearShape(4096, 4096, 128),
)
"""A decoder's matrices of 7 billion weights in all (Touvron et al. 2023, LLaMA, table 2), long and short inputs."""

WORKLOADS = ("transformer-base", "bert-base", "gnmt")
LARGEST_RESULT = 2**25  # elements: the classifier of Transformer-base is left to a full sweep
CONVOLUTIONS = (
    "layer1.0.conv2", "layer2.1.conv2", "layer3.1.conv2", "layer4.1.conv2", "layer1.0.conv3", "layer3.1.conv3",
)  # fmt: skip


@dataclass(frozen=True)
class Wish:
    """Kernels for a pattern at sparsities, of one tier: the lower, the more it tells. For all shapes, or for some."""

    tier: int
    kernels: tuple[Kernel, ...]
    pattern: Pattern
    sparsities: tuple[float, ...] = SPARSITIES
    shapes: tuple[Shape, ...] = ()


FIRST = (LARGE[0],)
TUNED = (LARGE[1], LARGE[3])  # a search for Triton's parameters takes as long as twenty points

LINEAR_WISHES = (
    # What the kernels have to show, on one shape.
    Wish(1, DENSE + DENSE_AGAIN, Dense(), shapes=FIRST),
    Wish(1, OURS, ShflBW(128), shapes=FIRST),
    Wish(1, OURS, VectorWise(128), shapes=FIRST),
    Wish(1, OURS, ShflBW(64), (0.75, 0.9), FIRST),
    Wish(1, OURS, VectorWise(64), (0.75, 0.9), FIRST),
    Wish(1, OURS + BSR + BSR_TUNED, BlockWise(128, 128), (0.75,), FIRST),
    Wish(1, OURS + CUSPARSELT + CUTLASS, NM(2, 4), shapes=FIRST),
    # The same of every shape, in brief.
    Wish(2, DENSE, Dense()),
    Wish(2, OURS, VectorWise(128), (0.75, 0.9)),
    Wish(2, OURS, ShflBW(64), (0.75, 0.9)),
    Wish(2, OURS + CUSPARSELT, NM(2, 4)),
    Wish(3, OURS + BSR, BlockWise(64, 64), (0.75, 0.9)),
    Wish(3, BSR_TUNED, BlockWise(64, 64), (0.9,), TUNED),
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
CONV_WISHES = (
    Wish(2, DENSE_CONV, Dense()),
    Wish(2, OURS_CONV, VectorWise(64), (0.75, 0.9)),
    Wish(4, OURS_CONV, ShflBW(64), (0.75, 0.9)),
    Wish(5, NUMBA_CONV, VectorWise(64), (0.9,)),
)


def point(device: str, shape: Shape, pattern: Pattern, sparsity: float, kernel: Kernel, seed: int = 0) -> Point:
    """A point in the mode that its backend allows."""
    backend, name, layout = kernel
    launch = "graph" if BACKENDS[backend].captured else "call"
    return Point(
        device, backend, name, shape, pattern, sparsity, threads=1, seed=seed, epilogue="none",
        cache_mode="rotated", launch_mode=launch, dtype="float16", layout=layout,
    )  # fmt: skip


def wished(
    device: str, shape: Shape, wishes: Iterable[Wish], backends: Collection[str] = BACKENDS, seed: int = 0
) -> list[Point]:
    """The points of `wishes` for one shape, on `backends`, without patterns that do not fit it."""
    found: dict[Point, None] = {}
    for wish in wishes:
        if wish.pattern.refuses(shape) is not None:
            continue
        for sparsity in sparsities_of(wish.pattern, wish.sparsities):
            for kernel in wish.kernels:
                if kernel[0] in backends:
                    found[point(device, shape, wish.pattern, sparsity, kernel, seed=seed)] = None
    return list(found)


def standard_shapes() -> list[Shape]:
    """The shapes of the standard sweep, most telling first: large ones, linear layers of workloads, convolutions."""
    linear = [
        layer.shape for name in WORKLOADS for layer in workloads.load(name).layers
        if layer.shape.m * layer.shape.n <= LARGEST_RESULT
    ]  # fmt: skip
    resnet = {layer.name: layer.shape for layer in workloads.load("resnet50-batch16").layers}
    return list(dict.fromkeys([*LARGE, *linear, *(resnet[name] for name in CONVOLUTIONS)]))


def standard(device: str, backends: Collection[str] = BACKENDS, seed: int = 0) -> list[list[Point]]:
    """The standard sweep: blocks of one shape each, MOST_POINTS at most, a tier of all shapes after the other."""
    blocks: list[list[Point]] = []
    seen: set[Point] = set()
    for tier in sorted({wish.tier for wish in (*LINEAR_WISHES, *CONV_WISHES)}):
        for shape in standard_shapes():
            chosen = [wish for wish in _wishes(shape) if wish.tier == tier and shape in (wish.shapes or (shape,))]
            found = [each for each in wished(device, shape, chosen, backends, seed) if each not in seen]
            found = found[: MOST_POINTS - len(seen)]
            seen.update(found)
            parts = -(-len(found) // BLOCK_POINTS)
            blocks += [found[len(found) * i // parts : len(found) * (i + 1) // parts] for i in range(parts)]
    return blocks


def _wishes(shape: Shape) -> tuple[Wish, ...]:
    return CONV_WISHES if isinstance(shape, Conv2dShape) else LINEAR_WISHES


def points(
    shapes: Iterable[Shape], device: str, *, backends: Collection[str] = BACKENDS,
    patterns: Sequence[Pattern] | None = None, sparsities: Sequence[float] = SPARSITIES, seed: int = 0,
) -> list[Point]:  # fmt: skip
    """Every point of every distinct shape: dense by all libraries, each pattern by ours and by its peers."""
    found: dict[Point, None] = {}
    for shape in dict.fromkeys(shapes):
        chosen = [replace(wish, sparsities=tuple(sparsities)) for wish in _wishes(shape)]
        if patterns is not None:
            others = _unforeseen(shape, chosen, patterns, sparsities)
            chosen = [*(wish for wish in chosen if wish.pattern in patterns), *others]
        found |= dict.fromkeys(wished(device, shape, chosen, backends, seed))
    return list(found)


def _unforeseen(
    shape: Shape, wishes: Sequence[Wish], patterns: Sequence[Pattern], sparsities: Sequence[float]
) -> list[Wish]:
    """Patterns that no wish names, by our kernels."""
    ours = OURS_CONV if isinstance(shape, Conv2dShape) else OURS
    named = {wish.pattern for wish in wishes}
    return [Wish(1, ours, pattern, tuple(sparsities)) for pattern in patterns if pattern not in named]
