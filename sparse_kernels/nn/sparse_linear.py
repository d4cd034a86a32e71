"""Sparse linear layers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparse_kernels.cpu.runtime import threads
from sparse_kernels.formats import Packed
from sparse_kernels.formats.int8 import Quantization
from sparse_kernels.fx_graphs import is_proxy, record_call
from sparse_kernels.nn.layer_operators import apply_linear, call_operator
from sparse_kernels.nn.sparse_layer import GPU_BACKENDS, INT8, SparseLayer, machine_of, pack_layer, split_precision
from sparse_kernels.patterns import Pattern
from sparse_kernels.planner import prepare
from sparse_kernels.tensors.plain_tensors import address_of, is_plain
from sparse_kernels.tensors.torch_tiles import TokenTiles, tiles_shape, worthwhile

# At most one vector of tokens counts as a small batch. A plan for more is made for at least as many as fill a tile.
SMALL_BATCH, LARGE_BATCH = 16, 64


class SparseLinear(SparseLayer):
    """`activation(x @ weight.T + bias)` for x (..., k) -> (..., m)."""

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None,
        activation: str | None,
        backend: str,
        tune: bool = False,
        precision: str = "float32",
        quantization: Quantization | None = None,
    ) -> None:
        super().__init__(packed, bias, activation, backend, precision, quantization)
        if tune and backend != "numba":
            raise ValueError(f"tune=True is for backend numba, not {backend}")
        self.tune = tune
        self._enlist()

    @property
    def in_features(self) -> int:
        """Features of an input."""
        return self.shape[1]

    @property
    def out_features(self) -> int:
        """Features of a result."""
        return self.shape[0]

    @classmethod
    def from_dense(
        cls,
        linear: nn.Module,
        pattern: Pattern,
        mask: np.ndarray | None,
        *,
        activation: str | None = None,
        backend: str = "numba",
        tune: bool = False,
        precision: str | Quantization = "float32",
    ) -> SparseLinear:
        """Return the sparse layer of a pruned Linear.

        Parameters
        ----------
        linear : nn.Linear, or Conv1D of transformers
            The layer, whose weight is packed as (m, k).
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
        precision : str or Quantization
            What may be rounded to bfloat16, as `prepare` says; or how the layer is read in eight bits.

        Returns
        -------
        SparseLinear
            A layer for inference.

        Raises
        ------
        ValueError
            If the mask is not of the pattern, or a setting is unknown or not for this backend.
        """
        bias = linear._parameters.get("bias")
        packed, settings = pack_layer(linear, pattern, mask), split_precision(precision)
        return cls(packed, bias, activation, backend, tune, *settings)

    @staticmethod
    def _check_precision(packed: Packed, precision: str) -> None:
        from sparse_kernels.cpu.plans import linear as plans

        plans.check_precision(packed, precision)

    def forward(self, x: Tensor | TokenTiles, keep: bool = False) -> Tensor | TokenTiles:
        """Run the sparse kernel on the rows of x (..., k), of any number of dimensions and any size, 0 included.

        keep: the result may stay in tiles of tokens, for another SparseLinear that alone reads it.
        """
        if isinstance(x, TokenTiles):
            return self._over_tiles(x, keep)
        if not is_plain(x):
            if is_proxy(x):
                recorded: Tensor = record_call(self, x, {"keep": keep} if keep else {})
                return recorded
            return call_operator(apply_linear, self, self._accepted(x))
        result: Tensor | TokenTiles = self.compute(self._accepted(x), keep)
        return result

    def compute(self, x: Tensor, keep: bool = False) -> Any:
        """Return the result for a tensor of numbers that was accepted, by address; keep: as in `forward`."""
        shape, (m, k) = x.shape, self.shape
        if not shape or shape[-1] != k:  # microseconds count here: a call without work takes seven
            _check_features(shape, k)
        lead = shape[:-1]
        n = lead.numel()
        if self.backend == "numba":
            if keep and self.lays_out and worthwhile(n):
                return TokenTiles(self._by_address(x, None, n, tiles_shape(n, m), True), lead)
            return self._by_address(x, None, n, (*lead, m), False)
        rows = x if x.ndim == 2 else x.reshape(-1, shape[-1])
        if self._on_gpu:
            return self._multiply(rows.t().contiguous(), (m, n)).t().view(*lead, m)
        return self._multiply(rows.contiguous(), (n, m)).view(*lead, m)

    def _over_tiles(self, x: TokenTiles, keep: bool) -> Tensor | TokenTiles:
        """Return the result for tokens in tiles."""
        (m, k), lead, values = self.shape, x.lead, self._accepted(x.values)
        n, features = lead.numel(), values.shape[1]
        if features != k:
            raise ValueError(f"this layer takes {k} features, the input has {features}: {(*lead, features)}")
        if values.shape != tiles_shape(n, k):
            raise ValueError(f"tiles of {tuple(values.shape)} do not hold {n} tokens of {k} features")
        if keep and self.lays_out and worthwhile(n):
            return TokenTiles(self._by_address(values, x, n, tiles_shape(n, m), True), lead)
        return self._by_address(values, x, n, (*lead, m), False)

    @classmethod
    def fake_result(cls, x: Tensor, known: Mapping[str, Any]) -> Tensor:
        """Return an empty tensor that lies in memory as the result does; known: the description."""
        (m, k), lead = known["settings"]["shape"], x.shape[:-1]
        _check_features(x.shape, k)
        if known["backend"] in GPU_BACKENDS:
            return x.new_empty(m, lead.numel()).t().view(*lead, m)
        return x.new_empty(*lead, m)

    def _list_own(self) -> dict[str, Any]:
        return {"tune": self.tune}

    @staticmethod
    def _read_own(own: Mapping[str, Any]) -> dict[str, Any]:
        return dict(own)

    @property
    def _weight_shape(self) -> torch.Size:
        return torch.Size(self.shape)

    def _by_address(
        self, x: Tensor, tiles: TokenTiles | None, n: int, y_shape: Sequence[int], into_tiles: bool
    ) -> Tensor:
        """Return the kernel's result for n tokens by address, without further checks and without arrays of NumPy."""
        buffers, (values, bias) = self._buffers, self._planned
        if buffers["values"] is not values or buffers["bias"] is not bias:
            self._follow_buffers()
        threads.set_thread_count(torch.get_num_threads())  # before a plan is made, which may be for as many
        x, y = (x.resolve_neg() if x.is_neg() else x).contiguous(), x.new_empty(y_shape)
        ready = self._plans.get(self._about(n, tiles is not None, into_tiles))
        if ready is None or ready is not self._latest:
            m, k = self.shape
            ready = self._prepared(x if tiles is not None else x.view(n, k), y_shape if into_tiles else (n, m))
        if into_tiles and (filled := n % y_shape[-1]):
            y[-1, :, filled:] = 0  # what reads them next computes on them
        if into_tiles and tiles is not None:
            n = y_shape[0] * y_shape[-1]
        if n:
            ready.plan.run(address_of(x), y.data_ptr(), n, ready.bias_address, self._code)
        return y

    @functools.cached_property
    def lays_out(self) -> bool:
        """Whether the layer lays many tokens out in tiles, so that it saves time to get or give them so."""
        from sparse_kernels.cpu.plans.linear import lays_out_tokens

        return self.backend == "numba" and self.precision != INT8 and lays_out_tokens(self.packed)

    def _key(self, x: Tensor, y_shape: Sequence[int]) -> object:
        if self._on_gpu:
            from sparse_kernels.cuda.variants import takes_few_columns

            # Few columns have a kernel of their own, with a copy of the weights in the order that it reads.
            return x.device, x.dtype, takes_few_columns(x.shape[1])
        return self._about(x.shape[0], x.ndim == 3, len(y_shape) == 3)

    def _about(self, n: int, from_tiles: bool, into_tiles: bool) -> object:
        """Return what a plan on a CPU is for: another input with the same answer runs on it."""
        if from_tiles:
            return True, into_tiles, None
        return False, into_tiles, n.bit_length() if self._by_size else n <= SMALL_BATCH

    @property
    def _by_size(self) -> bool:
        """Whether plans are for about as many tokens: one in bfloat16 multiplies few of them in another way."""
        return self.tune or self.precision in ("bfloat16", INT8)

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
        if self.precision == INT8:
            return prepare(self.planned_weight, self.backend, layout, n)
        tune = self.tune and layout == "token_major"
        return prepare(self.packed, self.backend, layout, n, tune=tune, precision=self.precision)


def _check_features(shape: Sequence[int], k: int) -> None:
    if not shape:
        raise ValueError(f"this layer takes {k} features, the input is a single number")
    if shape[-1] != k:
        raise ValueError(f"this layer takes {k} features, the input has {shape[-1]}: {tuple(shape)}")
