"""Sparse layers for torch models: replacements of a pruned Linear or Conv2d, for inference.

    y = SparseLinear.from_dense(linear, VectorWise(32), mask, activation="relu")(x)     # x (..., k) -> y (..., m)

A layer keeps its packed weight as buffers, so state_dict, deepcopy and pickling work as for any module. It makes a
plan at the first call. It drops the plan when the module is moved, cast or loaded, but not when a buffer is written
to. The plan may hold the weights once more, in the order its kernel reads them.

Backends `numba` and `reference` take float32 tensors on a CPU. Backend `cupy` takes float16 and bfloat16 tensors on a
CUDA GPU. Its kernels read and write feature-major, so a result is a transposed view. A layer copies nothing if its
input is such a view, from another sparse layer or through element-wise operations; it transposes other inputs first.
Work goes to torch's current stream. Call a layer once with inputs of the same shape before a CUDA graph captures it.
Capture again after its weights have changed, because a graph keeps the plan that it captured.

On a CPU a layer keeps a plan for small and one for large batches, or one for each of the latest image sizes. A
SparseLinear with tune=True (backend `numba`) tries a few kernels at its first call, see `cpu.plans.autotune`. It
tries again for about twice or half as many tokens. After a call on a CPU, start child processes that run layers anew,
do not fork them (`cpu.runtime.threads`).

Under `torch.compile` a layer is one operator, `sparse_kernels::multiply`, that knows its layer by a number. Where
blocks are compiled one by one, set `torch._dynamo.config.allow_unspec_int_on_nn_module = True`; otherwise each number
makes a new compilation. Operators find layers in their own process only: `torch.export` is not supported.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sparse_kernels import prepare, prepare_conv2d
from sparse_kernels.cpu.layouts.padded_images import FramedImages, ImagePlaces
from sparse_kernels.cpu.runtime import threads
from sparse_kernels.formats import Packed, check, pack
from sparse_kernels.padded_conv import PLAIN, address_of, finished, framable, unframe
from sparse_kernels.patterns import Pattern
from sparse_kernels.shapes import Conv2dShape
from sparse_kernels.torch_tiles import TokenTiles, tiles_shape, worthwhile

if TYPE_CHECKING:
    from sparse_kernels.cuda.machine import CudaMachine

ACTIVATIONS = (None, "relu", "gelu")
CPU_BACKENDS = ("numba", "reference")
GPU_BACKENDS = ("cupy",)
GPU_DTYPES = (torch.float16, torch.bfloat16)
GPU_ALIGNMENT = 16

KEPT_PLANS = 4  # plans that a layer on a CPU keeps; the oldest go first
KEPT_PLACES = 16  # places of results that a plan keeps

_CPU = torch.device("cpu")

# At most one vector of tokens counts as a small batch. A plan for more is made for at least as many as fill a tile.
SMALL_BATCH, LARGE_BATCH = 16, 64

# Methods that a layer's class must not override, or no sparse layer can replace it.
_COMPUTING = ("__call__", "forward", "_conv_forward")


def weight_matrix(module: nn.Module) -> Tensor:
    """Return the layer's weight as the matrix that is pruned and multiplied.

    Parameters
    ----------
    module : nn.Linear or nn.Conv2d
        A layer that `refuses` accepts.

    Returns
    -------
    Tensor (m, k)
        A convolution's matrix is (c_out, kh*kw*c_in), with column (r*kw + s)*c_in + c. It shares the weight's memory
        where torch can.

    Raises
    ------
    ValueError
        If no sparse layer can replace the module.
    """
    return as_matrix(_prunable(module).weight.detach())


def set_weight_matrix(module: nn.Module, matrix: Tensor) -> None:
    """Write a matrix back into the layer, in place.

    Parameters
    ----------
    module : nn.Linear or nn.Conv2d
        The layer.
    matrix : Tensor (m, k)
        In the order of `weight_matrix`.

    Raises
    ------
    ValueError
        If the matrix does not fit the weight, or no sparse layer can replace the module.
    """
    weight = _prunable(module).weight
    if matrix.shape != (weight.shape[0], weight[0].numel()):
        raise ValueError(f"a matrix of {tuple(matrix.shape)} does not fit a weight of {tuple(weight.shape)}")
    with torch.no_grad():
        weight.copy_(as_weight(matrix, weight.shape))


def as_matrix(weight: Tensor) -> Tensor:
    """Return a weight, or what has its shape, as the matrix (m, k) of `weight_matrix`."""
    return weight if weight.ndim == 2 else weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)


def as_weight(matrix: Tensor, shape: torch.Size) -> Tensor:
    """`as_matrix` undone: a matrix (m, k) in the shape of the layer's weight."""
    if len(shape) == 2:
        return matrix
    c_out, c_in, kh, kw = shape
    return matrix.reshape(c_out, kh, kw, c_in).permute(0, 3, 1, 2)


def refuses(module: nn.Module) -> str | None:
    """Why this module cannot become a sparse layer, in a sentence; None if it can."""
    name = type(module).__name__
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return f"a {name} has no sparse kernel: only Linear and Conv2d have"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return f"a {name} is not called but read, by the attention that owns it: no sparse kernel can take its place"
    own = nn.Linear if isinstance(module, nn.Linear) else nn.Conv2d
    if any(getattr(type(module), method, None) is not getattr(own, method, None) for method in _COMPUTING):
        return f"a {name} computes something of its own, which no sparse kernel does: it stays dense"
    if isinstance(module, nn.Linear):
        return None
    if module.groups != 1:
        return f"a convolution in {module.groups} groups has no sparse kernel: it stays dense"
    if module.padding_mode != "zeros":
        return f"padding mode {module.padding_mode!r} has no sparse kernel: only zeros have"
    odd_reach = (d * (k - 1) % 2 for d, k in zip(module.dilation, module.kernel_size, strict=True))
    if module.padding == "same" and any(odd_reach):
        return "padding 'same' around an even kernel is asymmetric: no sparse kernel has that"
    return None


def machine_of(device: torch.device) -> CudaMachine:
    """Return the GPU that tensors on `device` lie on. Raises TypeError for a CPU, MissingLibrary or NoDevice."""
    if device.type != "cuda":
        raise TypeError(f"backend 'cupy' runs on CUDA tensors, not on {device}: x.cuda(), or backend='numba'")
    return _machine(device)


@functools.cache
def _machine(device: torch.device) -> CudaMachine:
    from sparse_kernels.cuda.machine import TorchMachine

    return TorchMachine.of(device)


@dataclass(frozen=True)
class _Ready:
    """A plan, and the bias as it takes it: a tensor on a GPU, an array that shares its memory on a CPU."""

    plan: Any
    bias: Tensor | None
    rows: int  # of the weight
    _y_places: dict[tuple[ImagePlaces, int | None], ImagePlaces] = field(default_factory=dict)

    def y_places(self, x: ImagePlaces, margin: int | None) -> ImagePlaces:
        """Return where a convolution's result lies: one object for all calls, as it remembers what it works out."""
        known = self._y_places.get((x, margin))
        if known is None:
            if len(self._y_places) >= KEPT_PLACES:
                self._y_places.clear()
            known = self._y_places[x, margin] = self.plan.y_places(x.batch, margin)
        return known

    @functools.cached_property
    def bias_array(self) -> np.ndarray:
        """The bias, or as many zeros."""
        return np.zeros(self.rows, np.float32) if self.bias is None else np.ascontiguousarray(self.bias.numpy())

    @functools.cached_property
    def bias_address(self) -> int:
        return self.bias_array.ctypes.data


class _Sparse(nn.Module):
    """What both layer kinds share: packed buffers, plans made late, inference only."""

    bias: Tensor | None

    def __init__(
        self, packed: Packed, bias: Tensor | None, activation: str | None, backend: str, precision: str
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(map(str, ACTIVATIONS))}")
        if backend not in CPU_BACKENDS + GPU_BACKENDS:
            raise ValueError(f"no backend {backend!r} for layers: known are {', '.join(CPU_BACKENDS + GPU_BACKENDS)}")
        if precision != "float32":
            if backend != "numba":
                raise ValueError(f"precision={precision!r} is for backend numba, not {backend}")
            self._check_precision(packed, precision)
        self.precision = precision
        self.shape: tuple[int, int] = packed.shape
        self.pattern: Pattern = packed.pattern
        self.activation = activation
        self.backend = backend
        self._format = type(packed)
        self._settings: dict[str, Any] = {}
        self._arrays: list[str] = []
        for each in dataclasses.fields(packed):
            value = getattr(packed, each.name)
            if isinstance(value, np.ndarray):
                self._arrays.append(each.name)
                self.register_buffer(each.name, torch.from_numpy(value.copy()))
            else:
                self._settings[each.name] = value
        self.register_buffer("bias", None if bias is None else bias.detach().clone().float())
        self._plans: dict[object, _Ready] = {}
        self._latest: _Ready | None = None
        self._enlist()

    @property
    def packed(self) -> Packed:
        """The packed weight, built from the buffers."""
        tensors = {name: getattr(self, name).cpu() for name in self._arrays}
        arrays = {
            name: (tensor.float() if tensor.is_floating_point() else tensor).numpy().copy()
            for name, tensor in tensors.items()
        }
        return self._format(**self._settings, **arrays)

    @property
    def kernel(self) -> str | None:
        """Name of the kernel that ran this layer last; None before the first call."""
        return None if self._latest is None else str(self._latest.plan.kernel)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        m, k = self.shape
        rounded = "" if self.precision == "float32" else f", precision={self.precision}"
        return f"{m}x{k}, {self.pattern}, activation={self.activation}, backend={self.backend}{rounded}"

    @property
    def _code(self) -> int:
        """The activation as kernels know it."""
        return ACTIVATIONS.index(self.activation)

    @property
    def _on_gpu(self) -> bool:
        return self.backend in GPU_BACKENDS

    def _accepted(self, x: Tensor) -> Tensor:
        """x in an element type that the backend takes: on a GPU autocast's, where that is on; refused if it has none.

        On a CPU dense layers under autocast give bfloat16 or float16, of which sparse ones make float32 again.
        """
        if type(x) is Tensor and x.dtype is torch.float32 and x.is_cpu and not (x.requires_grad or self._on_gpu):
            return x
        if not isinstance(x, Tensor):
            raise TypeError(f"a layer takes a tensor, not a {type(x).__name__}")
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("sparse layers are for inference: call the model under torch.no_grad()")
        if self._on_gpu:
            if x.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(x.device.type):
                x = x.to(torch.get_autocast_dtype(x.device.type))
            if x.dtype not in GPU_DTYPES:
                raise TypeError(f"backend {self.backend!r} takes float16 and bfloat16, not {x.dtype}: model.half()")
            return x
        if x.device.type == "cpu" and x.dtype in GPU_DTYPES and torch.is_autocast_enabled("cpu"):
            x = x.float()
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise TypeError(f"backend {self.backend!r} takes float32 tensors on the CPU, not {x.dtype} on {x.device}")
        return x

    def _product(self, x: Tensor, y_shape: Sequence[int]) -> Tensor:
        """Return the kernel's result for x as it lies in memory."""
        if torch.compiler.is_compiling():
            result: Tensor = multiply(x, list(y_shape), self._number)
            return result
        return self._multiply(x, y_shape)

    def _multiply(self, x: Tensor, y_shape: Sequence[int]) -> Tensor:
        if not self._on_gpu:
            threads.use(torch.get_num_threads())  # before a plan is made, which may be for as many
        ready = self._prepared(x, y_shape)
        if self._on_gpu:
            # A contiguous part of a tensor may start anywhere; rows of an odd length are read element by element.
            x = x.clone() if x.data_ptr() % GPU_ALIGNMENT and not x.shape[-1] % 2 else x
            result: Tensor = ready.plan(x, ready.bias, self.activation)
            return result
        y = x.new_empty(tuple(y_shape))
        x = x.detach() if x.requires_grad else x
        ready.plan(x.resolve_neg().numpy(), bias=ready.bias_array, activation=self.activation, out=y.numpy())
        return y

    def _prepared(self, x: Tensor, y_shape: Sequence[int]) -> _Ready:
        key = self._key(x, y_shape)
        ready = self._plans.get(key)
        if ready is None:
            if self._on_gpu and x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("call the layer once with inputs of this shape before it is captured into a graph")
            bias = None if self.bias is None else self.bias.float()
            if bias is not None and bias.device != x.device:
                raise TypeError(f"the layer lies on {bias.device}, its input on {x.device}")
            ready = _Ready(self._plan(x, y_shape), bias, self.shape[0])
            latest = list(self._plans.items())
            self._plans = dict([*(latest if self._on_gpu else latest[1 - KEPT_PLANS :]), (key, ready)])
        if self._latest is not ready:  # a module takes microseconds to set what it has
            self._latest = ready
        return ready

    @staticmethod
    def _check_precision(packed: Packed, precision: str) -> None:
        """ValueError unless this kind of layer can gain from it."""
        raise NotImplementedError

    def _key(self, x: Tensor, y_shape: Sequence[int]) -> object:
        """Return what a plan is for: another input with the same key runs on the same plan."""
        raise NotImplementedError

    def _plan(self, x: Tensor, y_shape: Sequence[int]) -> Any:
        """Return a new plan for inputs like x."""
        raise NotImplementedError

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Within it nothing is rounded that was not before."""
        precision, self.precision = self.precision, "float32"
        self._forget_plan()
        try:
            yield
        finally:
            self.precision = precision
            self._forget_plan()

    def _forget_plan(self) -> None:
        if self._on_gpu and self._plans and torch.cuda.is_available():
            torch.cuda.synchronize()  # on whichever stream a plan is at work: its memory is given back now
        self._plans, self._latest = {}, None
        self._enlist()  # what was compiled looks at the number, and compiles again

    def _enlist(self) -> None:
        self._number = next(_numbers)
        _layers[self._number] = self

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self._forget_plan()
        inherited: Any = super()  # torch gives no types here
        moved: nn.Module = inherited._apply(fn, recurse)
        return moved

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: Any,
        unexpected: Any,
        errors: list[str],
    ) -> None:
        """Load as torch does, but refuse a weight whose arrays contradict each other: kernels follow its indices."""
        self._forget_plan()
        before = {name: buffer.clone() for name, buffer in self._buffers.items() if buffer is not None}
        known = len(errors)
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        if len(errors) == known and not any(buffer.is_meta for buffer in self.buffers()):
            try:
                check(self.packed)
            except ValueError as error:
                errors.append(f"{prefix.removesuffix('.') or 'this layer'}: {error}")
        if len(errors) > known:
            self._buffers.update(before)

    def __getstate__(self) -> dict[str, Any]:
        # A plan holds compiled kernels: copies and pickles make their own.
        inherited: Any = super()
        return {**inherited.__getstate__(), "_plans": {}, "_latest": None, "_number": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        inherited: Any = super()
        inherited.__setstate__(state)
        self._enlist()


# The operator below finds its layer by number: operators take tensors and plain values only.
_layers: WeakValueDictionary[int, _Sparse] = WeakValueDictionary()
_numbers = itertools.count()


@torch.library.custom_op("sparse_kernels::multiply", mutates_args=())
def multiply(x: Tensor, y_shape: list[int], layer: int) -> Tensor:
    """Return the result of a layer's kernel for x in its layout: an operator that `torch.compile` does not open."""
    if layer not in _layers:
        raise RuntimeError("the sparse layer that this was compiled for is gone: compile the model again")
    return _layers[layer]._multiply(x, y_shape)


@multiply.register_fake
def _(x: Tensor, y_shape: list[int], layer: int) -> Tensor:
    return x.new_empty(y_shape)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q @ k.T * scale) @ v for q (batch, heads, n, d), k and v (batch, heads, keys, d); by default 1/sqrt(d).

    What stands in a converted model where torch.nn.functional.scaled_dot_product_attention stood, without a mask:
    float32 on a CPU by `cpu.kernels.attention`, at the speed of the sparse layers around it; anything else by torch
    itself. The result lies in memory as (batch, n, heads, d), ready to be made one row a token.
    """
    all_three = q, k, v
    ours = all(
        type(t) in PLAIN and t.ndim == 4 and t.dtype is torch.float32 and t.is_cpu and t.numel() for t in all_three
    )
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in all_three)
    if not ours or needs_grad or not _fit(q.shape, k.shape, v.shape):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    return attend(q, k, v, scale) if torch.compiler.is_compiling() else _attend(q, k, v, scale)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    from sparse_kernels.cpu.kernels.attention import run

    # A single element may have any stride: torch calls that contiguous, and `contiguous` would leave it.
    form = torch.contiguous_format
    q, k, v = [t if t.stride(-1) == 1 else t.clone(memory_format=form) for t in map(Tensor.resolve_neg, (q, k, v))]
    (batch, heads, n, d), keys, e = q.shape, k.shape[2], v.shape[3]
    y = q.new_empty(batch, n, heads, e)
    threads.use(torch.get_num_threads())
    out = address_of(y), n * heads * e, e, heads * e
    run(_place(q), _place(k), _place(v), out, (batch, heads, n, d, keys, e), scale)
    return y.transpose(1, 2)


def _place(x: Tensor) -> tuple[int, int, int, int]:
    batch, head, token, _ = x.stride()
    return address_of(x), batch, head, token


def _fit(q: torch.Size, k: torch.Size, v: torch.Size) -> bool:
    return q[:2] == k[:2] == v[:2] and q[3] == k[3] and k[2] == v[2]


@torch.library.custom_op("sparse_kernels::attention", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """`attention` as an operator, opaque to `torch.compile`."""
    return _attend(q, k, v, scale)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    batch, heads, n, _ = q.shape
    return q.new_empty(batch, n, heads, v.shape[-1]).transpose(1, 2)


class SparseLinear(_Sparse):
    """`activation(x @ weight.T + bias)` for x (..., k) -> (..., m)."""

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None,
        activation: str | None,
        backend: str,
        tune: bool = False,
        precision: str = "float32",
    ) -> None:
        super().__init__(packed, bias, activation, backend, precision)
        if tune and backend != "numba":
            raise ValueError(f"tune=True is for backend numba, not {backend}")
        self.tune = tune

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        pattern: Pattern,
        mask: np.ndarray | None,
        *,
        activation: str | None = None,
        backend: str = "numba",
        tune: bool = False,
        precision: str = "float32",
    ) -> SparseLinear:
        """Return the sparse layer of a pruned Linear.

        Parameters
        ----------
        linear : nn.Linear
            The layer, whose weight (m, k) is packed.
        pattern : Pattern
            The pattern of the mask.
        mask : bool array (m, k) or None
            True where a weight is kept; None keeps every weight (pattern Dense).
        activation : str or None
            ``relu``, ``gelu`` or None, applied to the result.
        backend : str
            ``numba``, ``reference`` or ``cupy``.
        tune : bool
            Try a few kernels at the first call and keep the fastest; backend ``numba`` only.
        precision : str
            What may be rounded to bfloat16, as `prepare` says.

        Returns
        -------
        SparseLinear
            A layer for inference.

        Raises
        ------
        ValueError
            If the mask is not of the pattern, or a setting is unknown or not for this backend.
        """
        return cls(_pack(linear, pattern, mask), linear.bias, activation, backend, tune, precision)

    @staticmethod
    def _check_precision(packed: Packed, precision: str) -> None:
        from sparse_kernels.cpu.plans import linear

        linear.check_precision(packed, precision)

    def forward(self, x: Tensor | TokenTiles, keep: bool = False) -> Tensor | TokenTiles:
        """Run the sparse kernel on the rows of x (..., k), of any number of dimensions and any size, 0 included.

        keep: the result may stay in tiles of tokens, for another SparseLinear that alone reads it.
        """
        m, k = self.shape
        tiles = x if isinstance(x, TokenTiles) else None
        x = self._accepted(x.values if isinstance(x, TokenTiles) else x)
        if x.ndim == 0:
            raise ValueError(f"this layer takes {k} features, the input is a single number")
        shape = x.shape
        features, lead = (shape[-1], shape[:-1]) if tiles is None else (shape[1], tiles.lead)
        if features != k:
            raise ValueError(f"this layer takes {k} features, the input has {features}: {(*lead, features)}")
        n = lead.numel()
        if tiles is not None and shape != tiles_shape(n, k):
            raise ValueError(f"tiles of {tuple(shape)} do not hold {n} tokens of {k} features")
        if self.backend == "numba" and type(x) in PLAIN and not torch.compiler.is_compiling():
            if keep and self.lays_out and worthwhile(n):
                return TokenTiles(self._by_address(x, tiles, n, tiles_shape(n, m), True), lead)
            return self._by_address(x, tiles, n, (*lead, m), False)
        rows = x if tiles is not None or x.ndim == 2 else x.reshape(-1, k)
        if self._on_gpu:
            return self._product(rows.t().contiguous(), (m, n)).t().view(*lead, m)
        return self._product(rows.contiguous(), (n, m)).view(*lead, m)

    def _by_address(
        self, x: Tensor, tiles: TokenTiles | None, n: int, y_shape: Sequence[int], into_tiles: bool
    ) -> Tensor:
        """Return the kernel's result for n tokens by address, without further checks and without arrays of NumPy."""
        threads.use(torch.get_num_threads())  # before a plan is made, which may be for as many
        x, y = x.resolve_neg().contiguous(), x.new_empty(y_shape)
        ready = self._plans.get(self._about(n, tiles is not None, into_tiles))
        if ready is None or ready is not self._latest:
            m, k = self.shape
            ready = self._prepared(x if tiles is not None else x.view(n, k), y_shape if into_tiles else (n, m))
        if into_tiles and (filled := n % y_shape[-1]):
            y[-1, :, filled:] = 0  # what reads them next computes on them
        if into_tiles and tiles is not None:
            n = y_shape[0] * y_shape[-1]
        if n:
            ready.plan.run(address_of(x), address_of(y), n, ready.bias_address, self._code)
        return y

    @functools.cached_property
    def lays_out(self) -> bool:
        """Whether the layer lays many tokens out in tiles, so that it saves time to get or give them so."""
        from sparse_kernels.cpu.plans import linear

        return self.backend == "numba" and linear.lays_out_tokens(self.packed)

    def _key(self, x: Tensor, y_shape: Sequence[int]) -> object:
        if self._on_gpu:
            return x.device, x.dtype
        return self._about(x.shape[0], x.ndim == 3, len(y_shape) == 3)

    def _about(self, n: int, from_tiles: bool, into_tiles: bool) -> object:
        """Return what a plan on a CPU is for: another input with the same answer runs on it."""
        if from_tiles:
            return True, into_tiles, None
        return False, into_tiles, n.bit_length() if self._by_size else n <= SMALL_BATCH

    @property
    def _by_size(self) -> bool:
        """Whether plans are for about as many tokens: one in bfloat16 multiplies few of them in another way."""
        return self.tune or self.precision == "bfloat16"

    def _plan(self, x: Tensor, y_shape: Sequence[int]) -> Any:
        if self._on_gpu:
            from sparse_kernels.cuda import cuda_plan

            dtype = str(x.dtype).removeprefix("torch.")
            return cuda_plan.prepare_cuda_linear(
                self.packed, cuda_plan.LINEAR_LAYOUT, x.shape[1], dtype, machine_of(x.device)
            )
        layouts = {(2, 2): "token_major", (2, 3): "into_blocks", (3, 3): "token_blocked", (3, 2): "out_of_blocks"}
        n = x.shape[0]
        if not self._by_size and n > SMALL_BATCH:
            n = max(n, LARGE_BATCH)
        layout = layouts[x.ndim, len(y_shape)]
        tune = self.tune and layout == "token_major"
        return prepare(self.packed, self.backend, layout, n, tune=tune, precision=self.precision)


class ConvolutionGeometry(NamedTuple):
    """Taps of a convolution, each (rows, columns); the padding is zeros on all sides."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


class SparseConv2d(_Sparse):
    """`activation(conv2d(x, weight, bias))` for x (batch, c_in, h, w) -> (batch, c_out, out_h, out_w)."""

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None,
        activation: str | None,
        backend: str,
        geometry: ConvolutionGeometry,
        precision: str = "float32",
    ) -> None:
        super().__init__(packed, bias, activation, backend, precision)
        self.kernel_size, self.stride, self.padding, self.dilation = geometry

    @classmethod
    def from_dense(
        cls,
        conv: nn.Conv2d,
        pattern: Pattern,
        mask: np.ndarray | None,
        *,
        activation: str | None = None,
        backend: str = "numba",
        precision: str = "float32",
    ) -> SparseConv2d:
        """Return the sparse layer of a pruned Conv2d.

        Parameters
        ----------
        conv : nn.Conv2d
            The layer, whose weight is packed as (c_out, kh*kw*c_in).
        pattern : Pattern
            The pattern of the mask.
        mask : bool array (c_out, kh*kw*c_in) or None
            True where a weight is kept; None keeps every weight.
        activation : str or None
            ``relu``, ``gelu`` or None, applied to the result.
        backend : str
            ``numba``, ``reference`` or ``cupy``.
        precision : str
            ``float32`` or ``bfloat16``, as `prepare_conv2d` says.

        Returns
        -------
        SparseConv2d
            A layer for inference.

        Raises
        ------
        ValueError
            If the mask is not of the pattern, or a setting is unknown or not for this backend.
        """
        geometry = ConvolutionGeometry(
            kernel_size=(conv.kernel_size[0], conv.kernel_size[1]),
            stride=(conv.stride[0], conv.stride[1]),
            padding=symmetric_padding(conv),
            dilation=(conv.dilation[0], conv.dilation[1]),
        )
        return cls(_pack(conv, pattern, mask), conv.bias, activation, backend, geometry, precision)

    @staticmethod
    def _check_precision(packed: Packed, precision: str) -> None:
        from sparse_kernels.cpu.plans import conv2d

        conv2d.check_precision(packed, precision)

    def forward(
        self,
        x: Tensor | FramedImages,
        margin: int | None = None,
        added: Tensor | FramedImages | None = None,
        then: str | None = None,
    ) -> Tensor | FramedImages:
        """Run the sparse kernel on x, or on a single image (c_in, h, w); a new image size prepares anew.

        added: what is added to the result, and `then` the activation of the sum. margin: the result may stay in
        frames of this margin, for others that know them. See `pad_propagation`, which asks for them.
        """
        if isinstance(x, FramedImages) and self.backend == "numba":
            return self._over_frames(x, x.places, margin, added, then)
        x = self._accepted(unframe(x))
        if x.ndim == 3:
            return finished(unframe(self.forward(x[None]))[0], added, then)
        if x.ndim != 4:
            raise ValueError(f"this layer takes (batch, c_in, h, w) or (c_in, h, w), not {tuple(x.shape)}")
        shape = self._shape(*x.shape)
        if self._on_gpu:
            y_shape = (self.shape[0], shape.out_h, shape.out_w, shape.batch)
            y = self._product(x.permute(1, 2, 3, 0).contiguous(), y_shape).permute(3, 0, 1, 2)
            return finished(y, added, then)
        x = x.contiguous()
        if margin is not None and self.backend == "numba" and framable(x):
            return self._over_frames(x.resolve_neg(), ImagePlaces(*x.shape), margin, added, then)
        return finished(self._product(x, (shape.batch, self.shape[0], shape.out_h, shape.out_w)), added, then)

    def _over_frames(
        self,
        x: Tensor | FramedImages,
        x_places: ImagePlaces,
        margin: int | None,
        added: Tensor | FramedImages | None,
        then: str | None,
    ) -> Tensor | FramedImages:
        """Return the result for contiguous x at these places: in frames of this margin, or as torch has it."""
        threads.use(torch.get_num_threads())
        ready = self._plans.get(_conv2d_key(_CPU, torch.float32, x_places.shape))
        if ready is None:
            self._shape(*x_places.shape)  # refuses what does not fit
            ready = self._prepared(torch.empty(1, dtype=torch.float32, device="cpu").expand(x_places.shape), ())
        if self._latest is not ready:
            self._latest = ready
        y_places = ready.y_places(x_places, margin)
        y: Tensor | FramedImages
        if margin is None:
            y = torch.empty(y_places.shape, dtype=torch.float32, device="cpu")
        else:
            y = FramedImages(y_places)
        source, to = (each.address if isinstance(each, FramedImages) else address_of(each) for each in (x, y))
        alike = isinstance(added, FramedImages) and added.places == y_places
        if alike and self.activation is None and ready.plan.can_add(x_places, y_places):
            assert isinstance(added, FramedImages)
            code = ACTIVATIONS.index(then)
            ready.plan.run(source, x_places, ready.bias_address, code, to, y_places, added.address)
            return y
        ready.plan.run(source, x_places, ready.bias_address, self._code, to, y_places)
        return finished(y, added, then)

    def _shape(self, batch: int, c_in: int, h: int, w: int) -> Conv2dShape:
        shape = Conv2dShape(
            batch, c_in, h, w, self.shape[0], *self.kernel_size, self.stride, self.padding, self.dilation
        )
        if shape.k != self.shape[1]:
            raise ValueError(f"this layer takes {self.shape[1] // (shape.kh * shape.kw)} channels, not {c_in}")
        return shape

    def _key(self, x: Tensor, y_shape: Sequence[int]) -> object:
        # On a GPU the batch comes last.
        return (x.device, x.dtype, x.shape[:-1]) if self._on_gpu else _conv2d_key(x.device, x.dtype, x.shape)

    def _plan(self, x: Tensor, y_shape: Sequence[int]) -> Any:
        if self._on_gpu:
            from sparse_kernels.cuda import cuda_plan

            shape = self._shape(x.shape[3], *x.shape[:3])
            dtype = str(x.dtype).removeprefix("torch.")
            return cuda_plan.prepare_conv2d(self.packed, shape, cuda_plan.CONV2D_LAYOUT, dtype, machine_of(x.device))
        batch, c_in, h, w = x.shape
        return prepare_conv2d(
            self.packed, self._shape(batch, c_in, h, w), self.backend, "nchw", precision=self.precision
        )


def _conv2d_key(device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> object:
    """Return a plan takes any batch; which kernel is best depends on about how many images there are."""
    return device, dtype, shape[1:], shape[0].bit_length()


def symmetric_padding(conv: nn.Conv2d) -> tuple[int, int]:
    """Return the convolution's zero padding (rows, columns), its words 'valid' and 'same' resolved."""
    if conv.padding == "valid":
        return (0, 0)
    if conv.padding == "same":
        same = [d * (k - 1) // 2 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return (same[0], same[1])
    return (int(conv.padding[0]), int(conv.padding[1]))


def _prunable(module: nn.Module) -> nn.Linear | nn.Conv2d:
    if (reason := refuses(module)) is not None:
        raise ValueError(reason)
    assert isinstance(module, nn.Linear | nn.Conv2d)
    return module


def _pack(module: nn.Module, pattern: Pattern, mask: np.ndarray | None) -> Packed:
    weight = weight_matrix(module).to("cpu", torch.float32).numpy()
    return pack(np.ascontiguousarray(weight), np.ones(weight.shape, bool) if mask is None else mask, pattern)
