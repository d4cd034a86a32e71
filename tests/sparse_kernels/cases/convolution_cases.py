"""Convolutions whose results float32 holds exactly, what they must be, and images in frames."""

from __future__ import annotations

import numpy as np
import torch

from sparse_kernels import oracle
from sparse_kernels.cpu.layouts.padded_images import FramedImages, ImagePlaces
from sparse_kernels.formats import Packed, pack, unpack
from sparse_kernels.patterns import NM, Dense, Pattern
from sparse_kernels.shapes import Conv2dShape


def by_torch(packed: Packed, shape: Conv2dShape, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """The convolution of torch, in float64."""
    weight = unpack(packed).astype(np.float64).reshape(shape.c_out, shape.kh, shape.kw, shape.c_in)
    return torch.nn.functional.conv2d(
        torch.from_numpy(x.astype(np.float64)),
        torch.from_numpy(weight.transpose(0, 3, 1, 2).copy()),
        None if bias is None else torch.from_numpy(bias.astype(np.float64)),
        shape.stride,
        shape.padding,
        shape.dilation,
    ).numpy()


def operands(
    rng: np.random.Generator, shape: Conv2dShape, pattern: Pattern, sparsity: float = 0.5
) -> tuple[Packed, np.ndarray]:
    """(packed, x) whose convolution float32 holds exactly."""
    weight, x = oracle.build_exact_operands(rng, shape.m, shape.k, shape.batch * shape.c_in * shape.h * shape.w)
    kept = 0 if isinstance(pattern, Dense) else pattern.sparsity if isinstance(pattern, NM) else sparsity
    packed = pack(weight, pattern.mask(weight.astype(float) ** 2, kept), pattern)
    return packed, x[0].reshape(shape.batch, shape.c_in, shape.h, shape.w).copy()


def view(array: np.ndarray, places: ImagePlaces) -> np.ndarray:
    """The images in a flat array, as an array (batch, channels, h, w) that shares its memory."""
    steps = places.image, places.channel, places.row, 1
    shape = places.batch, places.channels, places.h, places.w
    return np.lib.stride_tricks.as_strided(array[places.first :], shape, [4 * step for step in steps])


def framed(images: np.ndarray | int, places: ImagePlaces) -> FramedImages:
    """Images in a frame."""
    result = FramedImages(places)
    view(result.array, places)[...] = images
    return result
