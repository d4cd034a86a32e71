"""Images between convolutions of a converted model: torch's, or in frames. Every function here takes both.

`cpu.layouts.padded_images` says what a frame is, and `pad_propagation` which images get one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.kernels import image_layout as images
from sparse_kernels.cpu.kernels.max_pooling import PoolWindow, pool_images
from sparse_kernels.cpu.layouts.padded_images import FramedImages, ImagePlaces
from sparse_kernels.cpu.runtime import threads
from sparse_kernels.fx_graphs import is_proxy, record_call
from sparse_kernels.tensors.plain_tensors import address_of, is_plain

Images = Tensor | FramedImages

_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {None: lambda x: x, "relu": F.relu, "gelu": F.gelu}


def framable(x: Images) -> bool:
    """Return whether images can be laid into frames: float32 on a CPU, not empty, not while torch compiles."""
    if not isinstance(x, Tensor) or not is_plain(x) or (torch.is_grad_enabled() and x.requires_grad):
        return False
    return x.ndim == 4 and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0


def frame(x: Images, margin: int) -> Images:
    """Return the images in frames of this margin, where they can be."""
    if isinstance(x, FramedImages) or not framable(x):
        return x
    batch, channels, h, w = x.shape
    framed = FramedImages(ImagePlaces(batch, channels, h, w, margin))
    source = x.resolve_neg().contiguous()
    threads.set_thread_count(torch.get_num_threads())
    images.copy_images(
        find_cpu_target().lanes, address_of(source), ImagePlaces(batch, channels, h, w), framed.address, framed.places
    )
    return framed


def unframe(x: Images) -> Tensor:
    """Return the images as torch has them, in memory of their own if they were in frames."""
    if isinstance(x, Tensor):
        return x
    result = torch.empty(x.places.shape, dtype=torch.float32, device="cpu")
    threads.set_thread_count(torch.get_num_threads())
    images.copy_images(find_cpu_target().lanes, x.address, x.places, address_of(result), ImagePlaces(*x.places.shape))
    return result


def max_pool(
    x: Images,
    taps: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    margin: int | None = None,
) -> Images:
    """Return the max pooling of images; in frames of this margin, where they can be.

    A window's row has a stride of 1 or 2.
    """
    if isinstance(x, Tensor) and not framable(x):
        return F.max_pool2d(x, taps, stride, padding)
    window, places = PoolWindow(taps, stride, padding), ImagePlaces(*x.shape) if isinstance(x, Tensor) else x.places
    h, w = window.count(places.h, places.w)
    if min(h, w) < 1 or any(2 * pad > size for pad, size in zip(padding, taps, strict=True)):
        return F.max_pool2d(unframe(x), taps, stride, padding)  # which refuses that
    x = x.resolve_neg().contiguous() if isinstance(x, Tensor) else x
    result = ImagePlaces(places.batch, places.channels, h, w, margin)
    y = torch.empty(result.shape, dtype=torch.float32, device="cpu") if margin is None else FramedImages(result)
    threads.set_thread_count(torch.get_num_threads())
    source, to = (address_of(each) if isinstance(each, Tensor) else each.address for each in (x, y))
    pool_images(window, source, places, to, result)
    return y


def finished(y: Images, added: Images | float | None, then: str | None) -> Images:
    """Return the activation `then` (relu, gelu or None) of y + added; y itself where nothing is added."""
    if added is None:
        return y
    total = unframe(y) + (unframe(added) if isinstance(added, FramedImages) else added)
    return _ACTIVATIONS[then](total)


class OnFrames(nn.Module):
    """An element-wise function or module that leaves zeros what they are, and takes images in frames as well."""

    def __init__(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, args, kwargs

    def forward(self, x: Images) -> Images:
        """Return the function of x, in the form that x has."""
        if is_proxy(x):
            recorded: Images = record_call(self, x, {})
            return recorded
        if isinstance(x, Tensor):
            return self.function(x, *self.args, **self.kwargs)
        values = torch.from_numpy(x.array)
        changed = self.function(values, *self.args, **self.kwargs)
        if changed.data_ptr() == values.data_ptr():  # nothing was done, or it was done in place
            x.in_quads = None
            return x
        result = FramedImages(x.places)
        torch.from_numpy(result.array).copy_(changed)
        return result
