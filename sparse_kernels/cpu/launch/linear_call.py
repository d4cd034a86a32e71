"""Call a linear layer's kernel: as little as possible at each call, and once what can be done once.

A layer takes tens of microseconds. In a model each call's Python starts cold, as weights have passed the caches since
the last one. It takes several times as long as in a loop; for BERT-base's smallest layers it took as long as the
kernel. So a plan works out once how it runs so many tokens with so many threads, and keeps that as a function of
addresses. A caller that has checked its arguments, as torch layers have, calls that directly (`CpuLinearPlan.run`). A
compiled function looks at arrays, and goes on to the kernel if a call is one kernel. Python looks only at what that
function finds wrong, because it takes several times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types

from sparse_kernels.cpu.launch.native_call import compile_record_function, view_integers
from sparse_kernels.cpu.launch.parallel_kernel import BoundKernel
from sparse_kernels.cpu.layouts.vector_grid import TILE
from sparse_kernels.cpu.runtime.kernel_cache import compile_cached
from sparse_kernels.cpu.runtime.scratch_buffers import allocate_aligned, borrow, find_addresses, give_back
from sparse_kernels.cpu.runtime.threads import count_threads
from sparse_kernels.plan_protocol import ACTIVATIONS, Array, check_call

# A call that a plan has prepared for a number of tokens and threads. Its arguments are the addresses of x, y and
# bias, and the code of the activation. It returns False if y has to be computed in another way.
Call = Callable[[int, int, int, int], bool]

# The same for arrays, which it checks first. It also returns False for arrays that are not fit to run, and raises
# TypeError for types other than `_ARRAYS`.
CallOfArrays = Callable[[Array, Array, Array, int], bool]

# Tokens, threads, and the two calls for them.
Way = tuple[int, int, Call, CallOfArrays]


def _nothing(*_: object) -> bool:
    return False


# The way of a plan that was not called yet.
NEVER: Way = (0, 0, _nothing, _nothing)


class KernelWithScratch(NamedTuple):
    """A call that is one kernel of `LinearCall`. needed: elements of scratch memory."""

    kernel: BoundKernel
    needed: int


# The product of a weight and x, both laid out, at places found before. Its arguments are the addresses of x, y and
# bias, the code of the activation, and the addresses of an array to add and of quads. What is added lies as y does
# where y is in frames; 0 adds nothing. It writes activation(w @ x + added + bias) to y, to quads, or to both. If it
# returns False, they mean nothing.
Product = Callable[[int, int, int, int, int, int], bool]

KEPT_WAYS = 64  # ways that a plan keeps; then it forgets all of them

# Elements from which on results start at a cache line. NumPy puts large arrays 16 bytes behind one, so that every
# stored vector crosses two lines. A layer of 3072 outputs then takes a tenth longer.
LARGE = 2**16


def convert_arguments(
    x: Array,
    x_shape: tuple[int | None, ...],
    bias: Array | None,
    activation: str | None,
    out: Array | None,
    y_shape: tuple[int | None, ...],
    features: int,
) -> tuple[Array, Array, Array, int]:
    """Return (x, y, bias, code of the activation) as kernels take them; refuse what `check_call` refuses.

    x and bias are C-contiguous, copied where they are not; y is `out` where given; no bias is `features` zeros.
    """
    check_call(x, x_shape, bias, activation, out, y_shape, features)
    free = x.shape[x_shape.index(None)]
    y = _empty([free if length is None else length for length in y_shape]) if out is None else out
    bias = np.zeros(features, np.float32) if bias is None else np.ascontiguousarray(bias)
    return np.ascontiguousarray(x), y, bias, ACTIVATIONS.index(activation)


def build_way(n: int, threads: int, found: Call | KernelWithScratch, axis: int, m: int, k: int) -> Way:
    """Return how n tokens pass a layer (m, k), by what was found for them; axis: along which they lie in arrays."""
    if not isinstance(found, KernelWithScratch):
        return n, threads, found, _looked_at(found, axis, n, m, k)
    bound, needed = found
    record = bound.args[0]
    known = np.array([record, axis, n, m, k], np.int64)
    call = _with_scratch(bound.func, record, needed, bound)
    return n, threads, call, _with_scratch(_looking_and_running(), known.ctypes.data, needed, (known, bound))


def _with_scratch(kernel: Callable[..., bool], at: int, needed: int, held: Any) -> Callable[..., bool]:
    """Return a function of (x, y, bias, activation) that calls the kernel with `at`, scratch memory, and these.

    It keeps alive what is `held`. What it needs are defaults, not free variables: in a model each object on the way
    to a value comes from memory.
    """
    if not needed:
        alone = BoundKernel(kernel, at, 0)
        alone.held = held
        return alone

    def call(x: Any, y: Any, bias: Any, activation: int, kernel: Callable[..., bool] = kernel, at: int = at,
             needed: int = needed) -> bool:  # fmt: skip
        scratch = borrow(needed)
        done = kernel(at, scratch.address, x, y, bias, activation)
        give_back(scratch)
        return done

    call.__dict__["held"] = held
    return call


def _looked_at(found: Call, axis: int, n: int, m: int, k: int) -> CallOfArrays:
    look = _looking()

    def call(x: Array, y: Array, bias: Array, activation: int) -> bool:
        x_at, y_at, bias_at = look(x, y, bias, axis, n, m, k)
        return x_at != 0 and found(x_at, y_at, bias_at, activation)

    return call


@dataclass(frozen=True, eq=False)
class CpuLinearPlan:
    """What plans of linear layers (m, k) share: how they are called."""

    shape: tuple[int, int]
    layout: str
    # Copies start with none, because they have weights of their own.
    _ways: dict[tuple[int, int], Way] = field(default_factory=dict, init=False)
    _last: Way = field(default=NEVER, init=False)

    def __call__(
        self, x: Array, bias: Array | None = None, activation: str | None = None, out: Array | None = None
    ) -> Array:
        """Return activation(w @ x + bias) in the plan's layout, as `Plan` says. Copy x if it is not C-contiguous."""
        m, k = self.shape
        axis = _TOKENS_ALONG.get(self.layout, -1)
        plain = axis >= 0 and type(x) is np.ndarray and x.ndim == 2 and activation in ACTIVATIONS
        if plain and x.shape[1 - axis] == k and (n := x.shape[axis]):
            y = _empty([m, n] if axis else [n, m]) if out is None else out
            given = np.zeros(m, np.float32) if bias is None else bias
            if type(y) is type(given) is np.ndarray:
                tokens, threads, _, call = self._last
                if tokens != n or threads != count_threads():
                    *_, call = self._found(n, count_threads())
                try:
                    if call(x, y, given, ACTIVATIONS.index(activation)):
                        return y
                except TypeError:  # another dtype or number of axes, or read-only
                    pass
        given_arrays = GivenArrays(x, bias, activation, out)
        x, y, bias, code, n = convert_linear_arguments(self.layout, self.shape, self._tile_tokens, given_arrays)
        if n:
            x_at, y_at, bias_at = find_addresses(x, y, bias)
            self.run(x_at, y_at, n, bias_at, code)
        return y

    def run(self, x: int, y: int, n: int, bias: int, activation: int) -> None:
        """Do the same for n > 0 tokens at addresses that hold what the layout says; nothing is checked.

        activation: its place among `plan.ACTIVATIONS`. All arrays are C-contiguous float32; bias has m elements.
        """
        threads = count_threads()
        tokens, last, call, _ = self._last
        if tokens != n or last != threads:
            _, _, call, _ = self._found(n, threads)
        if not call(x, y, bias, activation):
            self._otherwise().run(x, y, n, bias, activation)

    def prepare_call(self, n: int, threads: int) -> Call | KernelWithScratch:
        """Return how n > 0 tokens are run with so many threads, for those who keep it themselves."""
        return self._prepared(n, threads)

    def _found(self, n: int, threads: int) -> Way:
        """Return how so many tokens are run with so many threads; kept, as the next call most often asks for it."""
        way = self._ways.get((n, threads))
        if way is None:
            if len(self._ways) >= KEPT_WAYS:
                self._ways.clear()
            axis = _TOKENS_ALONG.get(self.layout, 0)
            way = self._ways[n, threads] = build_way(n, threads, self._prepared(n, threads), axis, *self.shape)
        object.__setattr__(self, "_last", way)
        return way

    def __getstate__(self) -> dict[str, object]:
        # Leave out compiled kernels: copies and pickles find them again.
        return {**self.__dict__, "_ways": {}, "_last": NEVER}

    @property
    def _tile_tokens(self) -> int:
        """Tokens of a tile, of layouts that are blocked."""
        return TILE * self._lanes

    @property
    def _lanes(self) -> int:
        """Of vectors of tokens, of layouts that are blocked."""
        raise NotImplementedError

    def _prepared(self, n: int, threads: int) -> Call | KernelWithScratch:
        """Return how n > 0 tokens are run with so many threads."""
        raise NotImplementedError

    def _otherwise(self) -> CpuLinearPlan:
        """Return the plan that is right where this one said that it is not."""
        raise NotImplementedError


class GivenArrays(NamedTuple):
    """What a plan is called with: x, and optionally a bias, the name of an activation, and a result to write to."""

    x: Array
    bias: Array | None
    activation: str | None
    out: Array | None


def convert_linear_arguments(
    layout: str, shape: tuple[int, int], tile_tokens: int, given: GivenArrays
) -> tuple[Array, Array, Array, int, int]:
    """Return the result of `convert_arguments` for a linear layer (m, k) in any layout, and the number of tokens.

    tile_tokens: tokens of a tile of blocked layouts. Tokens that fill up a last tile count, unless `out` is
    token-major and says how many there are. Where x is token-major they are 0 in y: what reads them next computes on
    them.
    """
    (m, k), tokens, (x, bias, activation, out) = shape, tile_tokens, given
    if layout == "token_major":
        found = convert_arguments(x, (None, k), bias, activation, out, (None, m), m)
        return *found, found[0].shape[0]
    if layout == "feature_major":
        found = convert_arguments(x, (k, None), bias, activation, out, (m, None), m)
        return *found, found[0].shape[1]
    if layout == "into_blocks":
        n = np.shape(x)[0] if np.ndim(x) else 0
        x, y, bias, code = convert_arguments(x, (None, k), bias, activation, out, (-(-n // tokens), m, tokens), m)
        if n % tokens:
            y[-1, :, n % tokens :] = 0
        return x, y, bias, code, n
    if layout == "out_of_blocks":
        tiles = np.shape(x)[0] if np.ndim(x) else 0
        wanted = np.shape(out)[0] if np.ndim(out) else 0  # type: ignore[arg-type]
        n = wanted if -(-wanted // tokens) == tiles else tiles * tokens
        return *convert_arguments(x, (None, k, tokens), bias, activation, out, (n, m), m), n
    found = convert_arguments(x, (None, k, tokens), bias, activation, out, (None, m, tokens), m)
    return *found, len(found[0]) * tokens


# The axis of the tokens, in layouts with two axes.
_TOKENS_ALONG = {"token_major": 0, "feature_major": 1}


_READ = [types.Array(types.float32, axes, "A", readonly=True) for axes in (1, 2)]
_ARRAYS = (_READ[1], types.float32[:, :], _READ[0])  # x, y and bias: TypeError for others


@cache
def _looking() -> Callable[..., tuple[int, int, int]]:
    """`_look`, compiled."""
    dispatcher: Any = compile_cached(_look)
    dispatcher.compile((*_ARRAYS, *[types.intp] * 4))
    dispatcher.disable_compile()
    look: Callable[..., tuple[int, int, int]] = dispatcher
    return look


@cache
def _looking_and_running() -> Callable[..., bool]:
    """`_look`, then the kernel: called with the address of (record, axis, n, m, k), room, and as a call of arrays."""
    return compile_record_function(
        "look_and_run",
        "at, room, x, y, bias, activation",
        """record, axis, n, m, k = carray(view_integers(at), 5)
    x_at, y_at, bias_at = look(x, y, bias, axis, n, m, k)
    return x_at != 0 and run_record(launch, record, (room, x_at, y_at, bias_at, activation))""",
        {"look": njit(inline="always")(_look), "carray": carray, "view_integers": view_integers},
        (types.intp, types.intp, *_ARRAYS, types.intp),
    )


# Return the addresses of x and y, with n > 0 tokens along this axis, and of a bias. They are 0 for arrays that are
# not fit to run: of other shapes, not C-contiguous, or sharing memory.
def _look(x: Array, y: Array, bias: Array, axis: int, n: int, m: int, k: int) -> Any:
    # Signed, because Numba would add unsigned and signed integers as float64.
    x_at, y_at, bias_at = np.intp(x.ctypes.data), np.intp(y.ctypes.data), np.intp(bias.ctypes.data)
    right = bias.shape[0] == m and bias.strides[0] == 4
    right &= x.shape[axis] == n and x.shape[1 - axis] == k and x.strides == (4 * x.shape[1], 4)
    right &= y.shape[axis] == n and y.shape[1 - axis] == m and y.strides == (4 * y.shape[1], 4)
    y_end = y_at + 4 * n * m
    apart = (x_at >= y_end or y_at >= x_at + 4 * n * k) and (bias_at >= y_end or y_at >= bias_at + 4 * m)
    return (x_at, y_at, bias_at) if right and apart else (0, 0, 0)


def _empty(shape: list[int]) -> Array:
    """Return memory for a result, uninitialised; it starts at a cache line if it is large."""
    size = math.prod(shape)
    return allocate_aligned(size, allocate=np.empty).reshape(shape) if size > LARGE else np.empty(shape, np.float32)
