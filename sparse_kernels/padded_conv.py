"""Images between convolutions of a converted model: torch's, or in frames. Every function here takes both.

`cpu.layouts.padded_images` says what a frame is, and `pad_propagation` which images get one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_kernels.cpu.codegen.cpu_target import host
from sparse_kernels.cpu.kernels import image_layout as images
from sparse_kernels.cpu.layouts.padded_images import FramedImages, ImagePlaces
from sparse_kernels.cpu.runtime import threads

Images = Tensor | FramedImages

# What may have numbers at its address: subclasses of Tensor need not (torch's own fake ones tell a wrong one).
PLAIN = (Tensor, nn.Parameter)

_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {None: lambda x: x, "relu": F.relu, "gelu": F.gelu}


def framable(x: Images) -> bool:
    """Return whether images can be laid into frames: float32 on a CPU, not empty, not while torch compiles."""
    if (
        not isinstance(x, Tensor)
        or type(x) not in PLAIN
        or torch.compiler.is_compiling()
        or (torch.is_grad_enabled() and x.requires_grad)
    ):
        return False
    return x.ndim == 4 and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0


def address_of(x: Tensor) -> int:
    """Return the address of a tensor's numbers; raise TypeError for a fake or wrapped tensor, which has none."""
    address = x.data_ptr() if type(x) in PLAIN else 0
    if not address:
        raise TypeError(
            "a sparse layer computes with numbers: this tensor, or one made here, has none (fake or wrapped)"
        )
    return address


def frame(x: Images, margin: int) -> Images:
    """Return the images in frames of this margin, where they can be."""
    if isinstance(x, FramedImages) or not framable(x):
        return x
    batch, channels, h, w = x.shape
    framed = FramedImages(ImagePlaces(batch, channels, h, w, margin))
    source = x.resolve_neg().contiguous()
    threads.use(torch.get_num_threads())
    images.copy_images(
        host().lanes, address_of(source), ImagePlaces(batch, channels, h, w), framed.address, framed.places
    )
    return framed


def unframe(x: Images) -> Tensor:
    """Return the images as torch has them, in memory of their own if they were in frames."""
    if isinstance(x, Tensor):
        return x
    result = torch.empty(x.places.shape, dtype=torch.float32, device="cpu")
    threads.use(torch.get_num_threads())
    images.copy_images(host().lanes, x.address, x.places, address_of(result), ImagePlaces(*x.places.shape))
    return result


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
        if isinstance(x, Tensor):
            return self.function(x, *self.args, **self.kwargs)
        values = torch.from_numpy(x.array)
        changed = self.function(values, *self.args, **self.kwargs)
        if changed.data_ptr() == values.data_ptr():  # nothing was done, or it was done in place
            return x
        result = FramedImages(x.places)
        torch.from_numpy(result.array).copy_(changed)
        return result
