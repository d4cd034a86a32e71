"""Check what a call brings: arrays on the GPU of any library, seen as numba.cuda sees its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparse_kernels.numba_cuda.library import cuda


def view_on_gpu(name: str, array: Any, dtype: np.dtype, shape: tuple[int | None, ...]) -> Any:
    """Return `array` as an array of numba.cuda, without a copy; None in `shape` stands for any length.

    Accepts what has __cuda_array_interface__ (CuPy, torch, Numba). Where another library says which stream it works
    on, as CuPy does, Numba first waits for that stream. Torch does not, so a tensor must be ready, or be computed on
    the default stream. Raises TypeError or ValueError, with `name` in the sentence.
    """
    if not getattr(array, "__cuda_ndarray__", False):  # Numba's own need no view
        if not hasattr(array, "__cuda_array_interface__"):
            raise TypeError(
                f"{name} must be an array on the GPU, such as CuPy's, torch's or numba.cuda.to_device(...), "
                f"not {type(array).__name__}"
            )
        array = cuda.as_cuda_array(array)
    if array.dtype != dtype:
        raise TypeError(f"{name} must be a {dtype} array, not {array.dtype}")
    if len(array.shape) != len(shape) or any(
        want not in (None, got) for want, got in zip(shape, array.shape, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must be of shape ({wanted}), not {tuple(array.shape)}")
    if not array.is_c_contiguous():
        raise ValueError(f"{name} must be C-contiguous")
    return array


def check_apart(x: Any, out: Any) -> None:
    """Raise ValueError if two arrays of `view_on_gpu` share memory: blocks would read what others have written."""
    (x_first, x_end), (out_first, out_end) = _extent(x), _extent(out)
    if x_first < out_end and out_first < x_end:
        raise ValueError("out must not share memory with x")


def _extent(array: Any) -> tuple[int, int]:
    """Return the addresses of its first byte and of the one after its last; the simulator's arrays are NumPy's."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    first = interface["data"][0]
    return first, first + array.size * array.dtype.itemsize
