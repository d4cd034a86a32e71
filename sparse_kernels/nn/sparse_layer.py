"""What sparse layers of all kinds share: packed buffers, plans made late, inference only."""

from __future__ import annotations

import dataclasses
import functools
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from sparse_kernels.cpu.runtime import threads
from sparse_kernels.formats import Packed, check, pack
from sparse_kernels.formats.int8 import InputRange, Int8Weight, Quantization, quantize_packed
from sparse_kernels.patterns import Pattern, parse
from sparse_kernels.prunable_layers import weight_matrix
from sparse_kernels.tensors.plain_tensors import is_plain

if TYPE_CHECKING:
    from sparse_kernels.cuda.machine import CudaMachine

ACTIVATIONS = (None, "relu", "gelu")
CPU_BACKENDS = ("numba", "reference")
GPU_BACKENDS = ("cupy",)
GPU_DTYPES = (torch.float16, torch.bfloat16)
GPU_ALIGNMENT = 16

KEPT_PLANS = 4  # plans that a layer on a CPU keeps; the oldest go first

INT8 = "int8"
"""The precision of layers that read weights and inputs as bytes."""

ONE_WEIGHT = "a sparse layer has one packed weight: call the models of an ensemble one after the other"

FORMATS = {kind.__name__: kind for kind in get_args(Packed)}

UNROUNDED = ContextVar("UNROUNDED", default=False)
"""Whether a layer is `in_float32` here. Meanwhile all leave floats, which any layer can read."""

LAYERS = WeakTensorKeyDictionary()
"""The first array of each layer's packed weight -> a weak reference to the layer: operators take tensors only."""


def machine_of(device: torch.device) -> CudaMachine:
    """Return the GPU that tensors on `device` lie on. Raises TypeError for a CPU, MissingLibrary or NoDevice."""
    if device.type != "cuda":
        raise TypeError(f"backend 'cupy' runs on CUDA tensors, not on {device}: x.cuda(), or backend='numba'")
    return _machine(device)


@functools.cache
def _machine(device: torch.device) -> CudaMachine:
    from sparse_kernels.cuda.machine import TorchMachine

    return TorchMachine.of(device)


class PackedWeight(NamedTuple):
    """What a sparse layer answers when it is asked for its weight: the facts of the weight, without its numbers.

    Models look at them, to cast their inputs for example. The numbers are in `SparseLayer.packed`.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one length of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements of the dense weight."""
        return self.shape.numel()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a sparse layer keeps its weight packed, and answers its shape, dtype and device, not {name!r}"
        )


@dataclass(frozen=True)
class ReadyPlan:
    """A plan, and the bias as it takes it: a tensor on a GPU, an array that shares its memory on a CPU."""

    plan: Any
    bias: Tensor | None
    rows: int  # of the weight

    @functools.cached_property
    def bias_array(self) -> np.ndarray:
        """The bias, or as many zeros."""
        return np.zeros(self.rows, np.float32) if self.bias is None else np.ascontiguousarray(self.bias.numpy())

    @functools.cached_property
    def bias_address(self) -> int:
        """The address of that array."""
        return self.bias_array.ctypes.data


class SparseLayer(nn.Module):
    """What layers of all kinds share: packed buffers, plans made late, inference only."""

    kinds: ClassVar[dict[str, type[SparseLayer]]] = {}
    """The layer classes by name."""

    bias: Tensor | None
    scales: Tensor | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make the class known to operators, which rebuild layers from their description."""
        super().__init_subclass__(**kwargs)
        SparseLayer.kinds[cls.__name__] = cls

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None,
        activation: str | None,
        backend: str,
        precision: str,
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(map(str, ACTIVATIONS))}")
        if backend not in CPU_BACKENDS + GPU_BACKENDS:
            raise ValueError(f"no backend {backend!r} for layers: known are {', '.join(CPU_BACKENDS + GPU_BACKENDS)}")
        if (precision == INT8) != (quantization is not None):
            raise ValueError(f"precision {INT8!r} and a quantization belong together")
        if precision != "float32":
            if backend != "numba" and not (backend == "reference" and precision == INT8):
                raise ValueError(f"precision={precision!r} is for backend numba, not {backend}")
            if quantization is None:
                self._check_precision(packed, precision)
            else:
                quantize_packed(packed, quantization)  # refuses scales that are none
        self.precision = precision
        self._input_range = None if quantization is None else quantization.input_range
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
        self.register_buffer("scales", None if quantization is None else torch.from_numpy(quantization.scales.copy()))
        self.register_buffer("bias", None if bias is None else bias.detach().clone().float())
        self._plans: dict[object, ReadyPlan] = {}
        self._latest: ReadyPlan | None = None
        self._versions: list[int | None] | None = None

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
    def planned_weight(self) -> Packed | Int8Weight:
        """The weight as plans take it: whole numbers of steps where the layer runs in eight bits."""
        if self.precision != INT8:
            return self.packed
        assert self.scales is not None
        return quantize_packed(self.packed, Quantization(self.scales.numpy(), self._input_range))

    @property
    def input_range(self) -> InputRange | None:
        """How the layer reads its inputs as bytes; None where it reads floats, or each token by its own values."""
        return self._input_range

    @property
    def weight(self) -> PackedWeight:
        """The facts of the dense weight: its shape, dtype and device."""
        values = self._buffers["values"]
        assert values is not None
        return PackedWeight(self._weight_shape, values.dtype, values.device)

    @property
    def kernel(self) -> str | None:
        """Name of the kernel that ran this layer last; None before the first call."""
        return None if self._latest is None else str(self._latest.plan.kernel)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        m, k = self.shape
        rounded = "" if self.precision == "float32" else f", precision={self.precision}"
        return f"{m}x{k}, {self.pattern}, activation={self.activation}, backend={self.backend}{rounded}"

    @functools.cached_property
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
            raise RuntimeError(
                "sparse layers are for inference, and an input requires grad: call the model under torch.no_grad(), "
                "or give it x.detach()"
            )
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

    def operands(self) -> tuple[list[Tensor], Tensor | None, str]:
        """Return what an operator takes beside the input: the packed weight's arrays, the bias, the description."""
        arrays = [getattr(self, name) for name in self._arrays]
        return arrays if self.scales is None else [*arrays, self.scales], self.bias, self.description

    @classmethod
    def rebuild(cls, arrays: Sequence[Tensor], bias: Tensor | None, description: str) -> SparseLayer:
        """Return a layer made of what `operands` returned, with arrays of its own."""
        known = json.loads(description)
        tensors = [tensor.detach().cpu() for tensor in arrays]
        quantization = None
        if known["precision"] == INT8:
            reading = known["input_range"]
            quantization = Quantization(
                tensors.pop().float().numpy(), None if reading is None else InputRange(*reading)
            )
        fields = {
            name: (tensor.float() if tensor.is_floating_point() else tensor).numpy()
            for name, tensor in zip(known["arrays"], tensors, strict=True)
        }
        settings = known["settings"]
        settings |= {"pattern": parse(settings["pattern"]), "shape": tuple(settings["shape"])}
        packed = FORMATS[known["format"]](**settings, **fields)
        check(packed)
        own = cls._read_own(known["own"])
        layer = cls(
            packed, bias, known["activation"], known["backend"], precision=known["precision"],
            quantization=quantization, **own,
        )  # fmt: skip
        return layer.to(arrays[0].device)

    def is_made_of(self, arrays: Sequence[Tensor], bias: Tensor | None, description: str) -> bool:
        """Return whether these are the layer's own operands."""
        own, own_bias, own_description = self.operands()
        same = len(own) == len(arrays) and all(a is b for a, b in zip(own, arrays, strict=True))
        return same and bias is own_bias and description == own_description

    def _multiply(self, x: Tensor, y_shape: Sequence[int]) -> Tensor:
        """Return the kernel's result for x as it lies in memory."""
        self._follow_buffers()
        if not self._on_gpu:
            threads.set_thread_count(torch.get_num_threads())  # before a plan is made, which may be for as many
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

    def _prepared(self, x: Tensor, y_shape: Sequence[int]) -> ReadyPlan:
        key = self._key(x, y_shape)
        ready = self._plans.get(key)
        if ready is None:
            if self._on_gpu and x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("call the layer once with inputs of this shape before it is captured into a graph")
            bias = None if self.bias is None else self.bias.float()
            if bias is not None and bias.device != x.device:
                raise TypeError(f"the layer lies on {bias.device}, its input on {x.device}")
            ready = ReadyPlan(self._plan(x, y_shape), bias, self.shape[0])
            latest = list(self._plans.items())
            self._plans = dict([*(latest if self._on_gpu else latest[1 - KEPT_PLANS :]), (key, ready)])
        if self._latest is not ready:  # a module takes microseconds to set what it has
            self._latest = ready
        return ready

    def compute(self, x: Tensor) -> Any:
        """Return the result for a tensor of numbers that was accepted, by address."""
        raise NotImplementedError

    @classmethod
    def fake_result(cls, x: Tensor, known: Mapping[str, Any]) -> Tensor:
        """Return an empty tensor that lies in memory as the result does; known: the description."""
        raise NotImplementedError

    def _list_own(self) -> dict[str, Any]:
        """Return the settings of this kind of layer alone, as JSON has them."""
        raise NotImplementedError

    @staticmethod
    def _read_own(own: Mapping[str, Any]) -> dict[str, Any]:
        """Return `_list_own`'s settings as the constructor takes them."""
        raise NotImplementedError

    @property
    def _weight_shape(self) -> torch.Size:
        """Shape of the dense weight, as torch has it."""
        raise NotImplementedError

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
        """Within it nothing is rounded that was not before, and no layer leaves bytes for this one."""
        precision, self.precision = self.precision, "float32"
        self._forget_plan()
        before = UNROUNDED.set(True)
        try:
            yield
        finally:
            UNROUNDED.reset(before)
            self.precision = precision
            self._forget_plan()

    def _forget_plan(self) -> None:
        if self._on_gpu and self._plans and torch.cuda.is_available():
            torch.cuda.synchronize()  # on whichever stream a plan is at work: its memory is given back now
        self._plans, self._latest = {}, None
        self._enlist()

    def _enlist(self) -> None:
        """Note what plans are made of, and let operators find this layer."""
        self.description = self._describe()
        self._planned, self._versions = (self._buffers["values"], self._buffers["bias"]), None
        LAYERS[self._buffers[self._arrays[0]]] = weakref.ref(self)

    def _describe(self) -> str:
        """Return what a layer is, apart from its tensors, as a text that operators take."""
        settings = {**self._settings, "pattern": str(self.pattern)}
        described = {
            "kind": type(self).__name__, "format": self._format.__name__, "settings": settings,
            "arrays": self._arrays, "activation": self.activation, "backend": self.backend,
            "precision": self.precision,
            "input_range": None if self._input_range is None else dataclasses.astuple(self._input_range),
            "own": self._list_own(), "dimensions": len(self._weight_shape),
        }  # fmt: skip
        return json.dumps(described, sort_keys=True)

    def note_versions(self, versions: list[int | None]) -> None:
        """Drop plans if buffers were written to since the last call by an operator."""
        if self._versions != versions:
            if self._versions is not None:
                self._forget_plan()
            self._versions = versions

    def _follow_buffers(self) -> None:
        """Drop plans if somebody has put other tensors in the place of the buffers, as functional calls do."""
        values, bias = self._planned
        if self._buffers["values"] is values and self._buffers["bias"] is bias:
            return
        if not all(is_plain(buffer) for buffer in self._buffers.values() if buffer is not None):
            raise RuntimeError(ONE_WEIGHT)
        self._forget_plan()

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

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse `torch.jit.script`, which asks this of a module before it compiles it."""
        raise RuntimeError(
            "torch.jit.script compiles Python that a sparse layer does not have: use torch.jit.trace or torch.export"
        )

    def __getstate__(self) -> dict[str, Any]:
        # A plan holds compiled kernels: copies and pickles make their own.
        inherited: Any = super()
        return {**inherited.__getstate__(), "_plans": {}, "_latest": None, "_planned": None, "_versions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        inherited: Any = super()
        inherited.__setstate__(state)
        self._enlist()


def split_precision(precision: str | Quantization) -> tuple[str, Quantization | None]:
    """Return a precision's name, and how the layer is read in eight bits if it is."""
    return (INT8, precision) if isinstance(precision, Quantization) else (precision, None)


def pack_layer(module: nn.Module, pattern: Pattern, mask: np.ndarray | None) -> Packed:
    """Return the weight of a layer in the pattern's format; without a mask all of it is kept."""
    weight = weight_matrix(module).to("cpu", torch.float32).numpy()
    return pack(np.ascontiguousarray(weight), np.ones(weight.shape, bool) if mask is None else mask, pattern)
