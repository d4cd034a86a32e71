"""Layers drawn at random, how their plans are called, and what the results must be.

A layer is a frozen value; its repr is one line that makes it again, so `run(Linear(...))` repeats a failure.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Barrier
from typing import Any

import numba
import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from numpy.lib.stride_tricks import as_strided

from sparse_kernels import (
    NM,
    BlockWise,
    Conv2dShape,
    Dense,
    Packed,
    ShflBW,
    VectorNM,
    VectorWise,
    oracle,
    pack,
    parse,
    prepare,
    prepare_conv2d,
    unpack,
)
from sparse_kernels.cpu.kernels.transpose_tiles import count_tile_tokens
from sparse_kernels.plan_protocol import ACTIVATIONS, BLOCKED_LAYOUTS, LAYOUTS
from sparse_kernels.reference import build_patches, finish

LARGEST = float(np.finfo(np.float32).max)

# Elements before and behind every array of a call: more than a register tile could touch by mistake.
GUARD = 300
SENTINEL = np.float32(-7)

KEPT = ("even", "uneven", "a group without columns", "a single unit")
LIES = ("in a row", "every other", "transposed", "backwards", "repeated")
VALUES = ("whole", "normal", "with zeros", "wide", "tiny", "overflowing")
SPECIALS = ((np.nan,), (np.inf,), (-np.inf,), (np.inf, -np.inf), (np.nan, np.inf, -np.inf))

_callers = ThreadPoolExecutor(2)


def check(
    y: np.ndarray, packed: Packed, x: np.ndarray, bias: np.ndarray | None, activation: str | None, exact: bool = False
) -> None:
    """Raise WrongResult unless y (m, n) is activation(w @ x + bias) for x (k, n) of any float32 values.

    A dropped weight reads nothing: where it meets NaN or an infinity the result is as if x were 0 there, while dense
    code makes NaN of it. Kept weights are as in dense code: a sum is NaN if it reads NaN or infinities of both signs,
    else the infinity it reads. Sums too large for float32 are infinite if all products are of one sign; else they may
    be anything, as the order of the sum decides. ReLU keeps NaN. GELU of -inf is 0, or NaN as in torch. All other
    results are those of `oracle.check`; with `exact` they are equal to the oracle.
    """
    weight, clean = unpack(packed), np.where(np.isfinite(x), x, np.float32(0))
    with np.errstate(all="ignore"):
        sums = finish(weight.astype(float) @ clean, bias, None)
        scale = finish(np.abs(weight).astype(float) @ np.abs(clean), None if bias is None else np.abs(bias), None)
        above = (weight > 0).astype(float) @ (x == np.inf) + (weight < 0).astype(float) @ (x == -np.inf) > 0
        below = (weight > 0).astype(float) @ (x == -np.inf) + (weight < 0).astype(float) @ (x == np.inf) > 0
        nan = ((weight != 0).astype(float) @ np.isnan(x) > 0) | (above & below)
        # Where the scale is this near the largest float32, rounding decides whether a sum passes it.
        large, one_sign = scale > 0.999 * LARGEST, np.abs(sums) > 0.999999 * scale
        certain = large & one_sign & (scale > 1.001 * LARGEST) & ~above & ~below
        before = np.select([nan, above, below, certain], [np.nan, np.inf, -np.inf, np.sign(sums) * np.inf], sums)
        expected = finish(before, None, activation)
        plainly = finish(sums, None, activation)
    anything = large & ~nan & ~certain
    known = (nan | above | below | certain) & ~anything
    right = (y == expected) | (np.isnan(y) & np.isnan(expected))
    if activation == "gelu":
        right |= (before == -np.inf) & (np.isnan(y) | (np.abs(y) < 1e-19))
    if (known & ~right).any():
        row, column = np.argwhere(known & ~right)[0]
        raise oracle.WrongResult(
            f"feature {row}, column {column} is {y[row, column]}, and what it reads makes it {expected[row, column]}"
        )
    plain = np.where(known | anything, plainly, y)
    oracle.check(plain, packed, clean, bias=bias, activation=activation)
    if exact and activation != "gelu":
        wrong = plain != plainly
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise oracle.WrongResult(f"feature {row}, column {column} is {y[row, column]} and not exact")


@dataclass(frozen=True, kw_only=True)
class Layer(ABC):
    """A layer and how its plan is called.

    kept: how the weights that are kept are spread over the rows. n, prepared_for: tokens of the call (images of a
    convolution), and those the plan is prepared for. earlier: tokens of a call before, whose x is all NaN. beside:
    tokens of a call at the same time, from another thread. lies: the strides of x. special: what some of x is.
    """

    pattern: str = "dense"
    sparsity: float = 0.0
    kept: str = "even"
    n: int = 1
    prepared_for: int = 1
    threads: int = 1
    activation: str | None = None
    bias: bool = False
    out: bool = False
    lies: str = "in a row"
    values: str = "whole"
    special: tuple[float, ...] = ()
    copied: bool = False
    earlier: int | None = None
    beside: int | None = None
    seed: int = 0

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """(m, k) of the weight."""

    @property
    @abstractmethod
    def axes(self) -> tuple[int, int]:
        """The axis of x and y that has tokens (images), and the one that has features."""

    @abstractmethod
    def x_shape(self, n: int) -> tuple[int, ...]:
        """The shape of x."""

    @abstractmethod
    def y_shape(self, n: int) -> tuple[int, ...]:
        """The shape of y."""

    @abstractmethod
    def columns(self, x: np.ndarray) -> np.ndarray:
        """x as the oracle takes it: (k, n)."""

    @abstractmethod
    def rows(self, y: np.ndarray) -> np.ndarray:
        """y as the oracle takes it: (m, n)."""

    @abstractmethod
    def plan(self, backend: str = "numba") -> Any:
        """The plan, prepared and perhaps copied."""

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={value!r}".replace("nan", "np.nan").replace("inf", "np.inf")
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    @property
    def rng(self) -> np.random.Generator:
        """A new generator of this layer's numbers."""
        return np.random.default_rng(self.seed)

    @cached_property
    def weight_and_mask(self) -> tuple[np.ndarray, np.ndarray]:
        """The dense weight (m, k), float32, and what is kept of it."""
        rng, (m, k) = self.rng, self.size
        mask = mask_of(parse(self.pattern), m, k, self.sparsity, self.kept, rng)
        if self.values == "whole":
            weight, _ = oracle.build_exact_operands(rng, m, k, 1)
        else:
            weight = rng.standard_normal((m, k)).astype(np.float32)
            weight[weight == 0] = 1
        if self.values == "with zeros":
            weight[rng.random((m, k)) < 0.3] = 0
        return weight, mask

    @cached_property
    def packed(self) -> Packed:
        """The packed weight."""
        return pack(*self.weight_and_mask, parse(self.pattern))

    def bias_of(self, rng: np.random.Generator) -> np.ndarray | None:
        """The bias, amid NaN."""
        if not self.bias:
            return None
        m = self.size[0]
        drawn = rng.integers(-9, 10, m) if self.values == "whole" else rng.standard_normal(m)
        return within(drawn.astype(np.float32), np.nan, rng)

    def x_of(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """x for n tokens, with the strides it is to have, amid NaN."""
        shape = self.x_shape(n)
        if self.values == "whole":
            most = min(4, 2**24 // (4095 * self.size[1]))
            x = (rng.integers(1, most + 1, shape) * rng.choice([-1, 1], shape)).astype(np.float32)
        else:
            x = rng.standard_normal(shape)
            if self.values == "wide":
                x *= 10.0 ** rng.uniform(-44, 30, shape)
            elif self.values == "tiny":
                x *= 1e-38
            elif self.values == "overflowing":
                x = np.where(rng.random(shape) < 0.1, np.sign(x) * LARGEST * rng.random(shape), x)
            x = x.astype(np.float32)
        if x.size and self.special:
            where = np.concatenate(
                [rng.integers(x.size, size=rng.integers(1, 6)), [0, x.size - 1][rng.integers(2) :]]
            )
            x.reshape(-1)[where] = rng.choice(self.special, where.size)
        return laid(x, self.lies, self.axes[0], rng)

    def run(self, plan: Any) -> None:
        """Raise WrongResult unless all calls give what `check` expects, inside `out` and nowhere else."""
        if self.earlier is not None:
            with np.errstate(all="ignore"):
                plan(np.full(self.x_shape(self.earlier), np.nan, np.float32))
        if self.beside is None:
            return self._call(plan, self.n, self.rng)
        together = Barrier(2, timeout=60)
        calls = [
            (self.n, np.random.default_rng([self.seed, 1])),
            (self.beside, np.random.default_rng([self.seed, 2])),
        ]
        for call in [_callers.submit(self._call, plan, *call, together) for call in calls]:
            call.result()
        return None

    def _call(self, plan: Any, n: int, rng: np.random.Generator, together: Barrier | None = None) -> None:
        numba.set_num_threads(min(self.threads, numba.config.NUMBA_NUM_THREADS))
        x, bias = self.x_of(n, rng), self.bias_of(rng)
        before = x.copy()
        out = within(np.full(self.y_shape(n), np.nan, np.float32), SENTINEL, rng) if self.out else None
        if together is not None:
            together.wait()
        with np.errstate(all="ignore"):  # the reference kernels are NumPy, which warns
            y = plan(x, bias, self.activation, out)
        if out is not None:
            if y is not out:
                raise oracle.WrongResult("the result is not `out`")
            around = out.base
            start = (out.__array_interface__["data"][0] - around.__array_interface__["data"][0]) // 4
            if (around[:start] != SENTINEL).any() or (around[start + out.size :] != SENTINEL).any():
                raise oracle.WrongResult("something was written outside `out`")
        if y.shape != self.y_shape(n) or y.dtype != np.float32:
            raise oracle.WrongResult(f"the result is {y.dtype} {y.shape}, expected float32 {self.y_shape(n)}")
        if not np.array_equal(x, before, equal_nan=True):
            raise oracle.WrongResult("x has changed")
        # Tiles may hold more tokens than the other side has.
        columns, rows = self.columns(x), self.rows(y)
        both = min(columns.shape[1], rows.shape[1])
        exact = self.values == "whole"
        check(rows[:, :both], self.packed, columns[:, :both], bias, self.activation, exact=exact)


@dataclass(frozen=True, repr=False, kw_only=True)
class Linear(Layer):
    """A linear layer (m, k), x and y in `layout`; token-blocked are whole tiles, of at least n tokens."""

    m: int = 1
    k: int = 1
    layout: str = "feature_major"

    @property
    def size(self) -> tuple[int, int]:
        return self.m, self.k

    @property
    def axes(self) -> tuple[int, int]:
        return (1, 0) if self.layout == "feature_major" else (0, 1)

    def x_shape(self, n: int) -> tuple[int, ...]:
        return self._of(self.k, n, self.layout in ("token_blocked", "out_of_blocks"))

    def y_shape(self, n: int) -> tuple[int, ...]:
        if self.layout == "out_of_blocks" and not self.out:
            n = -(-n // count_tile_tokens()) * count_tile_tokens()
        return self._of(self.m, n, self.layout in ("token_blocked", "into_blocks"))

    def columns(self, x: np.ndarray) -> np.ndarray:
        return self._feature_major(x, self.k)

    def rows(self, y: np.ndarray) -> np.ndarray:
        return self._feature_major(y, self.m)

    def _of(self, features: int, n: int, blocked: bool) -> tuple[int, ...]:
        if blocked:
            return -(-n // count_tile_tokens()), features, count_tile_tokens()
        return (features, n) if self.layout == "feature_major" else (n, features)

    def _feature_major(self, array: np.ndarray, features: int) -> np.ndarray:
        by_token = self.layout != "feature_major"
        return array.swapaxes(0, 1 if by_token else 0).reshape(features, array.size // features)

    def plan(self, backend: str = "numba") -> Any:
        plan = prepare(self.packed, backend, self.layout, self.prepared_for)
        return plan.copy() if self.copied else plan


@dataclass(frozen=True, repr=False, kw_only=True)
class Conv2d(Layer):
    """A convolution of `n` images, prepared for `prepared_for`."""

    c_in: int = 1
    c_out: int = 1
    h: int = 1
    w: int = 1
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def shape(self, batch: int) -> Conv2dShape:
        """The shape for `batch` images."""
        sizes = (self.c_in, self.h, self.w, self.c_out)
        return Conv2dShape(batch, *sizes, *self.kernel, self.stride, self.padding, self.dilation)

    @property
    def size(self) -> tuple[int, int]:
        return self.c_out, self.shape(1).k

    @property
    def axes(self) -> tuple[int, int]:
        return 0, 1

    def x_shape(self, n: int) -> tuple[int, ...]:
        return n, self.c_in, self.h, self.w

    def y_shape(self, n: int) -> tuple[int, ...]:
        shape = self.shape(n)
        return n, shape.c_out, shape.out_h, shape.out_w

    def columns(self, x: np.ndarray) -> np.ndarray:
        return build_patches(x, self.shape(len(x)))

    def rows(self, y: np.ndarray) -> np.ndarray:
        return y.swapaxes(0, 1).reshape(self.c_out, y.size // self.c_out)

    def plan(self, backend: str = "numba") -> Any:
        plan = prepare_conv2d(self.packed, self.shape(self.prepared_for), backend)
        return plan.copy() if self.copied else plan


def run(layer: Layer, backend: str = "numba", wrap: Callable[[Any, Layer], Any] = lambda plan, _: plan) -> None:
    """Prepare the layer and call it; AssertionError, with the layer in its first line, for whatever goes wrong.

    wrap: what is called in place of the plan.
    """
    threads = numba.get_num_threads()
    try:
        layer.run(wrap(layer.plan(backend), layer))
    except Exception as error:
        raise AssertionError(f"{layer!r}\n{type(error).__name__}: {error}") from error
    finally:
        numba.set_num_threads(threads)


def mask_of(pattern: Any, m: int, k: int, sparsity: float, kept: str, rng: np.random.Generator) -> np.ndarray:
    """A random mask (m, k) of the pattern; its own `mask` would not leave a group empty, nor fill another."""
    if isinstance(pattern, Dense):
        return np.ones((m, k), bool)
    match pattern:
        case BlockWise():
            height, width = pattern.rows, pattern.cols
        case VectorWise() | ShflBW():
            height, width = pattern.v, 1
        case _:
            height, width = 1, 1
    groups, units = -(-m // height), -(-k // width)
    chance = np.full((groups, 1), 1 - sparsity)
    if kept == "uneven":
        chance *= 2 * rng.random((groups, 1))
    elif kept == "a group without columns":
        chance[rng.integers(groups)] = 0
    elif kept == "a single unit":
        chance[:] = 0
    whole = rng.random((groups, units)) < chance
    if kept == "a single unit":
        whole[rng.integers(groups), rng.integers(units)] = True
    if isinstance(pattern, NM | VectorNM):
        limits = NM(pattern.keep, pattern.of)
        for first in range(0, k, pattern.of):
            part = whole[:, first : first + pattern.of]
            turns = np.argsort(np.argsort(np.where(part, rng.random(part.shape), 2), axis=1), axis=1)
            part &= turns < limits.keeps_of(part.shape[1])
    mask = whole.repeat(height, axis=0)[:m].repeat(width, axis=1)[:, :k]
    return mask[rng.permutation(m)] if isinstance(pattern, ShflBW) else mask


def within(array: np.ndarray, around: float, rng: np.random.Generator) -> np.ndarray:
    """The same array, contiguous in the middle of a larger one full of `around`, anywhere in a cache line."""
    whole = np.full(array.size + 2 * GUARD + 16, around, np.float32)
    start = GUARD + int(rng.integers(16))
    inside = whole[start : start + array.size].reshape(array.shape)
    inside[...] = array
    return inside


def laid(x: np.ndarray, how: str, free: int, rng: np.random.Generator) -> np.ndarray:
    """x with other strides, amid NaN. repeated: along axis `free`, all of the first of x."""
    match how:
        case "every other":
            there = np.full([2 * length + 1 for length in x.shape], np.nan, np.float32)[(slice(1, None, 2),) * x.ndim]
        case "transposed":
            there = within(np.full(x.T.shape, np.nan, np.float32), np.nan, rng).T
        case "backwards":
            there = within(np.full(x.shape, np.nan, np.float32), np.nan, rng)[(slice(None, None, -1),) * x.ndim]
        case "repeated":
            strides = [0 if axis == free else step for axis, step in enumerate(x.strides)]
            return as_strided(x, x.shape, strides)
        case _:
            return within(x, np.nan, rng)
    there[...] = x
    return there


def patterns() -> SearchStrategy[str]:
    """Every form that `parse` reads."""
    heights = st.sampled_from([1, 2, 3, 4, 8, 16, 32, 64])
    n_of_m = st.one_of(st.integers(2, 16), st.sampled_from([64, 256])).flatmap(
        lambda of: st.integers(1, of - 1).map(lambda keep: f"{keep}:{of}")
    )
    sides = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 32, 64])
    return st.one_of(
        st.just("dense"),
        st.just("unstructured"),
        n_of_m.map("nm:{}".format),
        st.builds("block:{}x{}".format, sides, sides),
        heights.map("vector:{}".format),
        st.builds("vectornm:{}:{}".format, heights, n_of_m),
        heights.map("shflbw:{}".format),
    )


def common(counts: SearchStrategy[int]) -> dict[str, SearchStrategy[Any]]:
    """What layers of both kinds are drawn from; counts: numbers of tokens or images."""
    return {
        "pattern": patterns(),
        "sparsity": st.one_of(st.sampled_from([0.0, 0.5, 0.75, 0.9, 1.0]), st.floats(0, 1)),
        "kept": st.sampled_from(KEPT),
        "n": counts,
        "prepared_for": counts,
        "threads": st.sampled_from([1, 2]),
        "activation": st.sampled_from(ACTIVATIONS),
        "bias": st.booleans(),
        "out": st.booleans(),
        "lies": st.sampled_from(LIES),
        "copied": st.booleans(),
        "earlier": st.none() | counts,
        "beside": st.one_of(st.none(), st.none(), st.none(), counts),
        "seed": st.integers(0, 999),
    }


@st.composite
def numbers(draw: DrawFn) -> dict[str, Any]:
    """Values of the weights and of x. Infinities meet no kept zeros, which a kernel may skip or multiply."""
    special = draw(st.one_of(st.just(()), st.sampled_from(SPECIALS)))
    values = draw(st.sampled_from([it for it in VALUES if not (special and it == "with zeros")]))
    return {"special": special, "values": values}


@st.composite
def linears(draw: DrawFn, layouts: Sequence[str] = (*LAYOUTS, *BLOCKED_LAYOUTS)) -> Linear:
    """Linear layers, up to 200 x 200, at times with one long side."""
    lengths = st.one_of(st.integers(1, 200), st.sampled_from([15, 16, 17, 31, 32, 33, 63, 64, 65]))
    tokens = st.one_of(st.integers(1, 130), st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 0]))
    m, k = draw(lengths), draw(lengths)
    long = draw(st.sampled_from([*[None] * 10, "m", "k"]))
    if long == "m":
        m = draw(st.sampled_from([1567, 2047, 2048, 2051]))
    elif long == "k":
        k = draw(st.sampled_from([2047, 2048, 2051, 3000]))
    layout = draw(st.sampled_from(layouts))
    drawn = draw(st.fixed_dictionaries(common(tokens)))
    return Linear(m=m, k=k, layout=layout, **drawn, **draw(numbers()))


@st.composite
def convolutions(draw: DrawFn) -> Conv2d:
    """Convolutions whose kernel fits the image."""
    sides = {
        "kernel": st.integers(1, 5),
        "stride": st.integers(1, 3),
        "padding": st.integers(0, 3),
        "dilation": st.integers(1, 3),
    }
    pairs = {name: (draw(side), draw(side)) for name, side in sides.items()}
    least = [
        max(1, (taps - 1) * apart + 1 - 2 * pad)
        for taps, apart, pad in zip(pairs["kernel"], pairs["dilation"], pairs["padding"], strict=True)
    ]
    h = least[0] + draw(st.one_of(st.integers(0, 9), st.integers(0, 9), st.sampled_from([15, 16, 31, 56])))
    w = least[1] + draw(st.one_of(st.integers(0, 20), st.sampled_from([15, 16, 31, 56])))
    c_in, c_out = draw(st.integers(1, 8)), draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65])))
    drawn = draw(st.fixed_dictionaries(common(st.sampled_from([1, 2, 3, 4, 5, 0]))))
    return Conv2d(c_in=c_in, c_out=c_out, h=h, w=w, **pairs, **drawn, **draw(numbers()))
