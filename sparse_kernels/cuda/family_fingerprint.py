"""Eight digits that stand for what a family of kernels is: they change with what is compiled or launched.

A measured time is of one version of a kernel. A comment, a new name or another layout of the Python code does not
change that version. An instruction, a compile option, a tile, a packed array or a launch does. So the fingerprint is
made of what comes out, not of how it is written:

- compiled: the CUDA source of every variant for the architecture, with its headers and without comments, its macros
  and the compiler's options;
- launched: grids, blocks, shared memory and arguments, packed weights among them, of some sample layers, each with
  many numbers of columns;
- chosen: the constants by which a family chooses its tiles, because the samples are small. A change of the choice
  itself that none of the samples shows is missed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda import build, variants
from sparse_kernels.cuda.program import Argument, Launch, NotSupported, Operand, Program, Variant
from sparse_kernels.formats import Packed, pack
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape

DIGITS = 8

SAMPLES: dict[str, tuple[Pattern, ...]] = {
    "dense": (Dense(),),
    "vector": (VectorWise(16), VectorWise(32), VectorWise(64), VectorWise(128)),
    "shflbw": (ShflBW(64),),
    "block": (BlockWise(64, 64), BlockWise(128, 64)),
    "nm": (NM(2, 4), NM(1, 4)),
    "unstructured": (Unstructured(),),
}
"""Patterns of the sample layers, by format."""

SIZES = ((1024, 768), (391, 517))
"""Rows and columns of the sample weights: even and odd ones."""

COLUMNS = (1, 8, 16, 64, 129, 512, 2048, 8192)
CONVOLUTION = Conv2dShape(8, 64, 14, 14, 128, 3, 3, padding=(1, 1))
BATCHES = (1, 8, 64)
KEPT = 0.25

_CHOOSERS = {"vector_sm90": ("sm90",), "nm_sm90": ("sm90",)}  # modules that choose tiles for several families

_COMMENT = re.compile(r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*")""", re.DOTALL)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def fingerprint_family(family: str, architecture: str) -> str:
    """Return the fingerprint of a family (`variants.FAMILIES`) on an architecture.

    Parameters
    ----------
    family
        Such as ``vector_sm90``.
    architecture
        Such as ``sm_90a``.

    Returns
    -------
    str
        Eight hexadecimal digits.
    """
    digests = (
        _digest(_compiled(family, architecture)), _launched_digest(family, architecture), _digest(_constants(family))
    )  # fmt: skip
    return _digest(digests)[:DIGITS]


def list_families(op: str, format: str, n: int) -> tuple[str, ...]:
    """Return the families that may run a layer of n columns, in the order in which they are tried.

    None for an unknown format.
    """
    return variants.CONV2D.get(format, ()) if op == "conv2d" else variants.list_linear_families(format, n)


def read_code(source: str) -> str:
    """Return a CUDA source of `device_code` with the headers that it includes, without comments and spare space."""
    text = (build.KERNELS / source).read_text()
    bare = _COMMENT.sub(lambda found: found[1] or " ", text)
    headers = [read_code(name) for name in _INCLUDE.findall(bare) if (build.KERNELS / name).is_file()]
    lines = (" ".join(line.split()) for line in bare.splitlines())
    return "\n".join([*headers, *(line for line in lines if line)])


def _constants(family: str) -> Iterator[str]:
    """Yield the values of the numeric constants of the modules of a family; a new name changes nothing."""
    for name in (family, *_CHOOSERS.get(family, ())):
        module = importlib.import_module(f"{__package__}.{name}")
        values = [value for key, value in vars(module).items() if key.isupper()]
        tuples = [value if isinstance(value, tuple) else (value,) for value in values]
        yield from sorted(str(numbers) for numbers in tuples if all(isinstance(it, int | float) for it in numbers))


def _digest(texts: Iterable[str | bytes]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text if isinstance(text, bytes) else text.encode())
        found.update(b"\0")
    return found.hexdigest()


@functools.cache
def _launched_digest(family: str, architecture: str) -> str:
    """Return the digest of the launches on samples; it is cached, because packing them takes a second."""
    return _digest(_launched(family, architecture))


def _compiled(family: str, architecture: str) -> Iterator[str]:
    of_here = [one for one in variants.list_variants([family]) if architecture in one.architectures]
    for one in sorted(of_here, key=lambda one: one.name):
        yield _compiled_variant(one, architecture)


@functools.cache
def _code(source: str) -> str:
    return read_code(source)


def _compiled_variant(variant: Variant, architecture: str) -> str:
    options = [each for each in build.compile_options(variant, architecture) if not each.startswith("-I")]
    return "\0".join([variant.function, *options, _code(variant.source)])


def _launched(family: str, architecture: str) -> Iterator[str | bytes]:
    for format, patterns in SAMPLES.items():
        for pattern, (m, k) in itertools.product(patterns, SIZES):
            if family in list_families("linear", format, 1):
                packed = _packed(pattern, m, k)
                columns = [n for n in COLUMNS if family in list_families("linear", format, n)]
                prepare = functools.partial(
                    variants.find_linear_builder(family), packed, "float16", architecture, columns[-1]
                )
                yield from _of_program(f"{pattern} {m} {k}", prepare, columns)
        if family in list_families("conv2d", format, 1):
            packed = _packed(patterns[-1], CONVOLUTION.m, CONVOLUTION.k)
            prepare = functools.partial(
                variants.find_conv2d_builder(family), packed, CONVOLUTION, "float16", architecture
            )
            yield from _of_program(f"{patterns[-1]} {CONVOLUTION}", prepare, BATCHES)


def _of_program(name: str, prepare: Callable[[], Program], columns: Iterable[int]) -> Iterator[str | bytes]:
    yield name
    try:
        program = prepare()
    except NotSupported:
        yield "refused"
        return
    seen: dict[int, NDArray[np.generic]] = {}  # kept, so that no other array gets its id
    for n in columns:
        for launch in program.launches(n, None):
            yield _geometry(n, launch)
            for argument in launch.arguments:
                if isinstance(argument, np.ndarray) and id(argument) in seen:
                    continue
                if isinstance(argument, np.ndarray):
                    seen[id(argument)] = argument
                yield from _of_argument(argument)


def _geometry(n: int, launch: Launch) -> str:
    variant = launch.variant
    return f"{n} {variant.name} {launch.grid} {launch.block} {launch.shared_bytes} {launch.scratch_bytes}"


def _of_argument(argument: Argument) -> Iterator[str | bytes]:
    if isinstance(argument, np.ndarray):
        yield f"{argument.dtype} {argument.shape}"
        yield np.ascontiguousarray(argument).tobytes()
    elif isinstance(argument, Operand):
        yield argument.value
    else:
        yield f"{argument.dtype} {argument}"


def _packed(pattern: Pattern, m: int, k: int) -> Packed:
    """Return a weight of the pattern, a quarter of it kept; the same every time."""
    rng = np.random.default_rng([m, k])
    weight = rng.standard_normal((m, k), np.float32)
    return pack(weight, None if isinstance(pattern, Dense) else _mask(rng, pattern, m, k), pattern)


def _mask(rng: np.random.Generator, pattern: Pattern, m: int, k: int) -> NDArray[np.bool_]:
    return pattern.mask(rng.random((m, k)), pattern.sparsity if isinstance(pattern, NM) else 1 - KEPT)
