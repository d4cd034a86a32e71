"""Sparse convolutions over images and over sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparse_kernels.cpu.launch.linear_call import Product
from sparse_kernels.cpu.layouts.image_results import Leaving
from sparse_kernels.cpu.layouts.padded_images import (
    FramedImages,
    Home,
    ImagePlaces,
    QuadImages,
    find_floats_home,
    find_quads_home,
)
from sparse_kernels.cpu.runtime import threads
from sparse_kernels.formats import Packed
from sparse_kernels.formats.int8 import InputRange, Quantization
from sparse_kernels.fx_graphs import is_proxy, record_call
from sparse_kernels.nn.layer_operators import apply_convolution, call_operator
from sparse_kernels.nn.sparse_layer import (
    ACTIVATIONS,
    GPU_BACKENDS,
    INT8,
    UNROUNDED,
    ReadyPlan,
    SparseLayer,
    machine_of,
    pack_layer,
    split_precision,
)
from sparse_kernels.patterns import Pattern
from sparse_kernels.planner import prepare_conv2d
from sparse_kernels.prunable_layers import ConvolutionGeometry, find_geometry
from sparse_kernels.shapes import Conv2dShape
from sparse_kernels.tensors.padded_conv import finished, framable, unframe
from sparse_kernels.tensors.plain_tensors import address_of, is_plain

_CPU = torch.device("cpu")

_NO_CALL = (None, None, None)

KEPT_CALLS = 16
"""Ways in which a layer was called over frames that it remembers."""


class FrameKey(NamedTuple):
    """How a layer is called over frames: where images lie, and what `SparseConv2d.forward` is asked for.

    added_at: where what is added lies; None adds nothing in frames.
    """

    x_places: ImagePlaces
    margin: int | None
    added_at: ImagePlaces | None
    then: str | None
    leave: tuple[float, int, bool] | None


@dataclass(slots=True, eq=False)
class FrameCall:
    """What such a call needs to know, worked out once.

    ready: the plan. y_places: where the result lies. adds: the plan adds what is added. activation: as kernels know
    it. leaving: how bytes are left, if they are. floats_home, quads_home: of the frames in which floats and bytes are
    left; None where they are not. runs: what runs it, by the number of threads: for images of floats, and of bytes.
    equal_ranges: that of bytes and that of the layer, which were found to be equal.
    """

    ready: ReadyPlan
    y_places: ImagePlaces
    adds: bool
    activation: int
    leaving: Leaving | None
    floats_home: Home | None
    quads_home: Home | None
    runs: tuple[dict[int, Product], dict[int, Product]] = field(default_factory=lambda: ({}, {}))
    equal_ranges: tuple[InputRange | None, InputRange | None] = (None, None)

    def find_run(self, key: FrameKey, threads: int, from_quads: bool) -> Product:
        """Return what runs it by so many threads, for images of floats or of bytes."""
        runs = self.runs[from_quads]
        run = runs.get(threads)
        if run is None:
            run = self.ready.plan.bind_run(key.x_places, self.y_places, self.leaving, threads, from_quads)
            runs[threads] = run
        return run


class SparseConv2d(SparseLayer):
    """`activation(conv2d(x, weight, bias))` for x (batch, c_in, h, w) -> (batch, c_out, out_h, out_w)."""

    _axes: ClassVar[int] = 2

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None,
        activation: str | None,
        backend: str,
        geometry: ConvolutionGeometry,
        precision: str = "float32",
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__(packed, bias, activation, backend, precision, quantization)
        self.geometry = geometry
        # As torch's layer of this kind has them, because models compute lengths from them.
        self.kernel_size, self.stride, self.padding, self.dilation = (side[-self._axes :] for side in geometry)
        # Calls over frames, and the plans for which they hold: those of the layer, or none of the calls does.
        self._frame_calls: tuple[object, dict[FrameKey, FrameCall]] = (None, {})
        self._last_frame_call: tuple[Any, Any, Any] = _NO_CALL
        self._enlist()

    def __getstate__(self) -> dict[str, Any]:
        # They hold plans.
        return {**super().__getstate__(), "_frame_calls": (None, {}), "_last_frame_call": _NO_CALL}

    @property
    def in_channels(self) -> int:
        """Channels of an input."""
        return self.shape[1] // math.prod(self.kernel_size)

    @property
    def out_channels(self) -> int:
        """Channels of a result."""
        return self.shape[0]

    @classmethod
    def from_dense(
        cls,
        conv: nn.Conv1d | nn.Conv2d,
        pattern: Pattern,
        mask: np.ndarray | None,
        *,
        activation: str | None = None,
        backend: str = "numba",
        precision: str | Quantization = "float32",
    ) -> SparseConv2d:
        """Return the sparse layer of a pruned Conv2d.

        Parameters
        ----------
        conv : nn.Conv1d or nn.Conv2d
            The layer, whose weight is packed as (c_out, kh*kw*c_in); nn.Conv1d for `SparseConv1d`.
        pattern : Pattern
            The pattern of the mask.
        mask : bool array (c_out, kh*kw*c_in) or None
            True where a weight is kept; None keeps every weight.
        activation : str or None
            ``relu``, ``gelu`` or None, applied to the result.
        backend : str
            ``numba``, ``reference`` or ``cupy``.
        precision : str or Quantization
            ``float32`` or ``bfloat16``, as `prepare_conv2d` says; or how the layer is read in eight bits, by one
            range of inputs.

        Returns
        -------
        SparseConv2d
            A layer for inference.

        Raises
        ------
        ValueError
            If the mask is not of the pattern, or a setting is unknown or not for this backend.
        """
        packed = pack_layer(conv, pattern, mask)
        bias, geometry = conv._parameters["bias"], find_geometry(conv)
        return cls(packed, bias, activation, backend, geometry, *split_precision(precision))

    @staticmethod
    def _check_precision(packed: Packed, precision: str) -> None:
        from sparse_kernels.cpu.plans import conv2d

        conv2d.check_precision(packed, precision)

    def forward(
        self,
        x: Tensor | FramedImages | QuadImages,
        margin: int | None = None,
        added: Tensor | FramedImages | None = None,
        then: str | None = None,
        leave: tuple[float, int, bool] | None = None,
    ) -> Tensor | FramedImages | QuadImages:
        """Run the sparse kernel on x, or on a single image (c_in, h, w); a new image size prepares anew.

        added: what is added to the result, and `then` the activation of the sum. margin: the result may stay in
        frames of this margin, for others that know them. leave: for others in eight bits it may be left as bytes too,
        or instead: the scale and zero of their inputs, and whether floats are read as well. See `pad_propagation`,
        which asks for all that.
        """
        if isinstance(x, (FramedImages, QuadImages)) and self.backend == "numba":
            return self._over_frames(x, x.places, margin, added, then, leave)
        if is_proxy(x):
            given = {"margin": margin, "added": added, "then": then, "leave": leave}
            called: Tensor = record_call(self, x, {name: it for name, it in given.items() if it is not None})
            return called
        assert not isinstance(x, QuadImages)  # left only for layers of this backend
        x = unframe(x)
        if not is_plain(x):
            return finished(call_operator(apply_convolution, self, self._accepted(x)), added, then)
        x = self._accepted(x)
        if margin is not None and self.backend == "numba" and framable(x):
            x = x.contiguous()
            return self._over_frames(x.resolve_neg(), ImagePlaces(*x.shape), margin, added, then, leave)
        return finished(self.compute(x), added, then)

    def compute(self, x: Tensor) -> Tensor:
        """Return the result for a tensor of numbers that was accepted, by address."""
        _check_images(x.shape, self.in_channels)
        if x.ndim == 3:
            return self.compute(x[None])[0]
        shape = self._shape(*x.shape)
        if self._on_gpu:
            y_shape = (self.shape[0], shape.out_h, shape.out_w, shape.batch)
            return self._multiply(x.permute(1, 2, 3, 0).contiguous(), y_shape).permute(3, 0, 1, 2)
        return self._multiply(x.contiguous(), (shape.batch, self.shape[0], shape.out_h, shape.out_w))

    @classmethod
    def fake_result(cls, x: Tensor, known: Mapping[str, Any]) -> Tensor:
        """Return an empty tensor that lies in memory as the result does; known: the description."""
        (m, k), geometry = known["settings"]["shape"], known["own"]["geometry"]
        _check_images(x.shape, k // math.prod(geometry[0]))
        if x.ndim == 3:
            return cls.fake_result(x[None], known)[0]
        taps = zip(x.shape[2:], *geometry, strict=True)
        h, w = ((size + 2 * pad - d * (k - 1) - 1) // stride + 1 for size, k, stride, pad, d in taps)
        if known["backend"] in GPU_BACKENDS:
            return x.new_empty(m, h, w, x.shape[0]).permute(3, 0, 1, 2)
        return x.new_empty(x.shape[0], m, h, w)

    def _list_own(self) -> dict[str, Any]:
        return {"geometry": list(self.geometry)}

    @staticmethod
    def _read_own(own: Mapping[str, Any]) -> dict[str, Any]:
        return {"geometry": ConvolutionGeometry(*(tuple(each) for each in own["geometry"]))}

    @property
    def _weight_shape(self) -> torch.Size:
        return torch.Size((self.shape[0], self.in_channels, *self.kernel_size))

    def _over_frames(
        self,
        x: Tensor | FramedImages | QuadImages,
        x_places: ImagePlaces,
        margin: int | None,
        added: Tensor | FramedImages | None,
        then: str | None,
        leave: tuple[float, int, bool] | None,
    ) -> Tensor | FramedImages | QuadImages:
        """Return the result for contiguous x at these places: in frames of this margin, or as torch has it."""
        buffers, (values, bias) = self._buffers, self._planned
        if buffers["values"] is not values or buffers["bias"] is not bias:
            self._follow_buffers()
        count = threads.set_thread_count(torch.get_num_threads())
        added_at = added.places if isinstance(added, FramedImages) else None
        if UNROUNDED.get() or (added is not None and added_at is None):  # what is added to later is left as floats
            leave = None
        key, known = self._find_frame_call(x_places, margin, added_at, then, leave)
        quads, room, y_at, quads_at = self._find_quads(x, known), known.quads_home, 0, 0
        y: Tensor | FramedImages | QuadImages
        if room is not None:
            assert known.leaving is not None
            y = left = QuadImages(known.y_places, known.leaving.input_range, room)
            quads_at = left.address
        if known.floats_home is not None:
            y = framed = FramedImages(known.y_places, known.floats_home)
            y_at = framed.address
            if room is not None:
                framed.in_quads = left
        elif room is None:
            y = torch.empty(known.y_places.shape, dtype=torch.float32, device="cpu")
            y_at = address_of(y)
        added_address = 0
        if known.adds:
            assert isinstance(added, FramedImages)
            added_address = added.address
        x_at = quads.address if quads is not None else address_of(x) if isinstance(x, Tensor) else x.address
        run = known.runs[quads is not None].get(count) or known.find_run(key, count, quads is not None)
        run(x_at, y_at, known.ready.bias_address, known.activation, added_address, quads_at)
        if known.adds or added is None:
            return y
        assert not isinstance(y, QuadImages)
        return finished(y, added, then)

    def _find_frame_call(
        self,
        x_places: ImagePlaces,
        margin: int | None,
        added_at: ImagePlaces | None,
        then: str | None,
        leave: tuple[float, int, bool] | None,
    ) -> tuple[FrameKey, FrameCall]:
        """Return what a call with images at these places needs to know; the last one's is at hand."""
        plans, key, known = self._last_frame_call
        same = plans is self._plans and x_places is key.x_places and added_at is key.added_at
        if same and margin == key.margin and then == key.then and leave == key.leave:
            if self._latest is not known.ready:
                self._latest = known.ready
            return key, known
        key = FrameKey(x_places, margin, added_at, then, leave)
        plans, calls = self._frame_calls
        found = calls.get(key) if plans is self._plans else None
        if found is None:
            found = self._prepare_frame_call(key)
            self._keep_frame_call(key, found)
        if self._latest is not found.ready:
            self._latest = found.ready
        plans, calls = self._frame_calls
        if calls.get(key) is found:  # else another thread has changed the layer meanwhile
            # Not the key that was found: its places are equal to these, and not the same.
            self._last_frame_call = plans, key, found
        return key, found

    def _forget_plan(self) -> None:
        super()._forget_plan()
        self._frame_calls, self._last_frame_call = (None, {}), _NO_CALL  # which hold plans

    def _prepare_frame_call(self, key: FrameKey) -> FrameCall:
        """Work out what a call needs to know."""
        x_places, margin, added_at, then, leave = key
        ready = self._plans.get(_conv2d_key(_CPU, torch.float32, x_places.shape))
        if ready is None:
            self._shape(*x_places.shape)  # refuses what does not fit
            ready = self._prepared(torch.empty(1, dtype=torch.float32, device="cpu").expand(x_places.shape), ())
        y_places = ready.plan.y_places(x_places.batch, margin)
        adds = added_at == y_places and self.activation is None and ready.plan.can_add(x_places, y_places)
        activation = ACTIVATIONS.index(then) if adds else self._code
        leaving = quads_home = None
        if leave is not None and (adds or added_at is None) and ready.plan.can_leave(x_places, y_places):
            scale, zero, floats = leave
            leaving = Leaving(InputRange(scale, zero), floats)
            quads_home = find_quads_home(y_places, leaving.input_range)
        floats = margin is not None and (leaving is None or leaving.floats)
        floats_home = find_floats_home(y_places) if floats else None
        return FrameCall(ready, y_places, adds, activation, leaving, floats_home, quads_home)

    def _keep_frame_call(self, key: FrameKey, call: FrameCall) -> None:
        """Keep a call for the next time, as long as the layer has its plan."""
        plans = self._plans
        if not any(ready is call.ready for ready in plans.values()):
            return  # another thread has changed the layer meanwhile
        calls = self._frame_calls[1] if self._frame_calls[0] is plans else {}
        calls = dict([*list(calls.items())[1 - KEPT_CALLS :], (key, call)])
        self._frame_calls = plans, calls

    def _find_quads(self, x: Tensor | FramedImages | QuadImages, known: FrameCall) -> QuadImages | None:
        """Return the bytes of x as this layer reads them, if they were left. Raises ValueError for other bytes."""
        quads = x if isinstance(x, QuadImages) else x.in_quads if isinstance(x, FramedImages) else None
        if quads is None:
            return None
        left, own = known.equal_ranges
        if quads.input_range is left and self._input_range is own:
            return quads
        if self.precision == INT8 and quads.input_range == self._input_range:
            known.equal_ranges = quads.input_range, self._input_range
            return quads
        if quads is x:
            raise ValueError(f"this layer reads {self._input_range}, and was given bytes in {quads.input_range}")
        return None

    def _shape(self, batch: int, c_in: int, h: int, w: int) -> Conv2dShape:
        taps, stride, padding, dilation = self.geometry
        shape = Conv2dShape(batch, c_in, h, w, self.shape[0], *taps, stride, padding, dilation)
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
        shape = self._shape(*x.shape)
        if self.precision == INT8:
            return prepare_conv2d(self.planned_weight, shape, self.backend, "nchw")
        return prepare_conv2d(self.packed, shape, self.backend, "nchw", precision=self.precision)


class SparseConv1d(SparseConv2d):
    """`activation(conv1d(x, weight, bias))` for x (batch, c_in, length) -> (batch, c_out, out_length).

    It is a convolution over images with one row.
    """

    _axes = 1

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Run the sparse kernel on x, or on a single sequence (c_in, length)."""
        if is_proxy(x):
            recorded: Tensor = record_call(self, x, {})
            return recorded
        plain = is_plain(x)
        x = self._accepted(x)
        if x.ndim not in (2, 3):
            raise ValueError(f"this layer takes (batch, c_in, length) or (c_in, length), not {tuple(x.shape)}")
        if plain:
            return self.compute(x)
        return call_operator(apply_convolution, self, x)

    def compute(self, x: Tensor) -> Tensor:
        """Return the result for a tensor of numbers that was accepted, by address."""
        return super().compute(x.unsqueeze(-2)).squeeze(-2)

    @classmethod
    def fake_result(cls, x: Tensor, known: Mapping[str, Any]) -> Tensor:
        """Return an empty tensor that lies in memory as the result does; known: the description."""
        return super().fake_result(x.unsqueeze(-2), known).squeeze(-2)


def _check_images(shape: Sequence[int], channels: int) -> None:
    if len(shape) not in (3, 4):
        raise ValueError(f"this layer takes (batch, c_in, h, w) or (c_in, h, w), not {tuple(shape)}")
    if shape[-3] != channels:
        raise ValueError(f"this layer takes {channels} channels, not {shape[-3]}")


def _conv2d_key(device: torch.device, dtype: torch.dtype, shape: Sequence[int]) -> object:
    """Return a plan takes any batch; which kernel is best depends on about how many images there are."""
    return device, dtype, shape[1:], shape[0].bit_length()
