"""What our CPU kernels repeat, fill up and copy for a layer: the amounts of work that `sparse_kernels.cpu` has.

All from the columns of a row, for vectors of 16 floats (AVX-512), of 4 or 8 where tokens are as few; narrower units
do more of the same. Each amount but the call is divided by the threads, and takes so many seconds a unit, which a
table tells (`cost_models.features.work_terms`):

    call
    multiplications of each format, of all lanes: vectors that positions (tokens, pixels) do not fill, tiles of two
        vectors, and of few rows
    the same, where a tile of x lies in more pages than the TLB holds, or in more bytes than the first-level cache
    bytes of weights, of rows that share their columns and of single ones; of x as far as it is read; of y
    images laid out for a convolution: elements, rows of them; rows of y collected afterwards
    single rows: x packed for them, and runs over a row's columns (a tile of positions, a stage of columns)
    other rows: sums set up and finished, of all lanes
    linear layers with tokens along the vector: x and y that go there and back

Which amounts there are was found on two tables of an EPYC of family 26, shape by shape left out; none of the bundled
ones had a say. On tables of another CPU sums of them are 14% off where a plain roofline is 25% (five shapes of a
ResNet20), and both are 18% off for three linear shapes.

What it does not know: which lines another core has just written, threads that wait for each other, that each thread
lays out all of x where tokens are few, and which layers a matrix unit multiplies
(`sparse_kernels.cpu.kernels.amx_linear`, `matrix_conv2d`). Amounts of its own for that (tiles, thirds, sums) brought
the unseen shapes of a CPU with one no nearer: trees on 29 shapes find out as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from cost_models.features.layer_work import SIZES, Physics, Structure
from cost_models.rows.row_keys import Array, sparsities

Mask = npt.NDArray[np.bool_]

_LANES = 16
_FAR, _LONG_ROWS = 2**20, 3125  # elements of x and y, of a row of x, from which on kernel tokens waits for memory
_CLOSE_BYTES = 48 * 2**10  # first-level cache
_PAGE_BYTES, _PAGES = 4096, 64  # what a first-level TLB holds, about
# `sparse_kernels.cpu.kernels.unstructured_rows`: elements of x in a stage, columns of a row in it, and elements at
# most
_STAGE, _WORTHWHILE, _FARTHEST = 7_500, 12, 2**16


def amounts(X: pd.DataFrame, formats: Sequence[str]) -> Array:
    """How much work every row of X is, (rows, terms), the call first; `formats` have rates of their own."""
    structure, physics, images = Structure.of(X), Physics.of(X), Images.of(X)
    m, k, n = (X[name].to_numpy(np.float64) for name in SIZES)
    density, height = 1 - sparsities(X), _height(m, structure)
    linear, single, by_tokens = X["op"].ne("conv2d").to_numpy(), height == 1, along_outputs(X)
    panels = ~single & ~by_tokens

    vectors = np.where(linear, np.ceil(n / _LANES), images.vectors)
    short = np.where(linear & (n <= _LANES), np.select([n <= 4, n <= 8], [4.0, 8.0], _LANES), np.inf)
    tokens = np.where(n <= 2, 2.0, np.ceil(n / 8) * 8)
    lanes = np.select([by_tokens, single], [tokens, vectors * _LANES], np.ceil(vectors / 2) * 2 * _LANES)
    lanes = np.where(by_tokens, lanes, np.minimum(lanes, short))
    kept = m * k * density
    multiplied = kept * lanes * np.where(panels, _low_tile(height), 1.0)
    pages = np.minimum(images.channels, images.read * 4 / _PAGE_BYTES)
    by_column = panels & ~linear & ~images.laid
    reads = np.where(by_column, 1 - (1 - density) ** np.maximum(1, m / height), 1.0)
    weight_bytes = physics.weight_bytes + np.where(single, 2, 4) * kept / height
    terms = [
        *(np.where(structure.format == name, multiplied, 0.0) for name in formats),
        np.where(panels, multiplied * _octaves(pages / _PAGES), 0.0),
        np.where(by_tokens, multiplied * _octaves(4 * k * np.minimum(8, tokens) / _CLOSE_BYTES), 0.0),
        np.where(single, 0.0, weight_bytes),
        np.where(single, weight_bytes, 0.0),
        physics.input_bytes * reads,
        physics.output_bytes,
        images.written,
        images.rows,
        images.collected,
        np.where(single, k * lanes, 0.0),
        np.where(single, m * np.ceil(vectors / 4) * stages(k, np.minimum(vectors, short / _LANES), density), 0.0),
        np.where(single, 0.0, m * lanes),
        np.where(linear & ~by_tokens & _token_major(X), (k + m) * n, 0.0),
    ]
    return np.column_stack([np.ones(len(X)), np.stack(terms, axis=1) / _column(X, "threads", 1)[:, None]])


def along_outputs(X: pd.DataFrame) -> Mask:
    """Whether each row of X, (rows,), is a linear layer with its outputs along the vector, of token-major x and y.

    As `sparse_kernels.cpu.plans.linear.default` chooses for a vector unit that works in halves (Zen 4): groups of
    rows must fill vectors, and where they fill but one, or are permuted and x has no long rows, many tokens are
    better along the vector. Of few tokens they need to fill but a half of one. A unit that does not work so (Zen 5)
    wants fewer permuted ones along the vector; to know that brought its unseen shapes no nearer.
    """
    m, k, n = (X[name].to_numpy(np.float64) for name in SIZES)
    structure = Structure.of(X)
    height, long = _height(m, structure), k >= 2 * m
    two = (structure.format == "dense") | (height % (2 * _LANES) == 0)
    total, threads = np.ceil(n / _LANES), _column(X, "threads", 1)
    shared = 4 * threads * np.ceil(total / threads) <= 5 * total
    each = np.ceil(total / threads)
    full = 16 * n >= 15 * each * threads * _LANES
    along_tokens = (full & (~long | (each <= 2))) | (n * (m + k) >= _FAR) | (k > _LONG_ROWS)
    by_panels = (total < 2 * threads) | two
    better = ~shared | np.where((structure.format == "shflbw") & two, ~along_tokens, by_panels)
    part = (height % (_LANES // 2) == 0) & (n <= 8)
    filled = two | (height % _LANES == 0) | part
    found: Mask = X["op"].ne("conv2d").to_numpy() & _token_major(X) & filled & better
    return found


def stages(k: Array, vectors: Array, density: Array) -> Array:
    """How many stages of columns single rows have, as `sparse_kernels.cpu.kernels.unstructured_rows.single_rows` cuts
    them."""
    together = np.minimum(4, vectors) * _LANES
    close = np.minimum(np.ceil(k * together / _STAGE), np.floor(k * density / _WORTHWHILE))
    stride = np.maximum(together, _LANES)
    return np.asarray(np.maximum(np.ceil(k * stride / (_FARTHEST - stride)), close), np.float64)


@dataclass(frozen=True)
class Images:
    """Of every convolution, (rows,) each, and zeros elsewhere: vectors of positions; whether x is laid out, elements
    written and rows of images copied to do so, rows of y collected; elements that vectors read from, and channels.
    """

    vectors: Array
    laid: Mask
    written: Array
    rows: Array
    collected: Array
    read: Array
    channels: Array

    @classmethod
    def of(cls, X: pd.DataFrame) -> Self:
        """As `sparse_kernels.cpu.plans.conv2d` lays them."""
        batch, c_in, h, w, kh, kw = (_column(X, name, 1) for name in ("batch", "c_in", "h", "w", "kh", "kw"))
        down, right = _column(X, "stride_h", 1), _column(X, "stride_w", 1)
        above, left = _column(X, "padding_h", 0), _column(X, "padding_w", 0)
        out_h = (h + 2 * above - _column(X, "dilation_h", 1) * (kh - 1) - 1) // down + 1
        out_w = (w + 2 * left - _column(X, "dilation_w", 1) * (kw - 1) - 1) // right + 1
        convolution = X["op"].eq("conv2d").to_numpy()
        in_place = (kh * kw * down * right == 1) & (above + left == 0) & (h * w >= _LANES)
        laid = convolution & ~in_place
        # Stride by stride, one phase of the image for each tap that reads another.
        phases, pitch, high = (
            np.minimum(down, kh) * np.minimum(right, kw),
            -(-(w + left) // right),
            -(-(h + above) // down),
        )
        flat = batch * np.ceil(((out_h - 1) * pitch + out_w) / _LANES)
        by_row = np.where(out_w >= _LANES, batch * out_h * np.ceil(out_w / _LANES), np.inf)
        vectors = np.where(in_place, batch * np.ceil(out_h * out_w / _LANES), np.minimum(flat, by_row))
        written = np.where(laid, batch * c_in * phases * high * pitch, 0.0)
        return cls(
            np.where(convolution, vectors, 0.0),
            laid,
            written,
            np.where(laid, batch * c_in * phases * high, 0.0),
            np.where(laid & (flat <= by_row), batch * X["m"].to_numpy(np.float64) * out_h, 0.0),
            np.where(laid, written, batch * c_in * h * w),
            np.where(convolution, c_in, 0.0),
        )


def _height(m: Array, structure: Structure) -> Array:
    """Rows that share their columns."""
    return np.where(structure.format == "dense", m, structure.unit_rows)


def _token_major(X: pd.DataFrame) -> Mask:
    found: Mask = X["layout"].eq("token_major").to_numpy() if "layout" in X.columns else np.ones(len(X), bool)
    return found


def _low_tile(height: Array) -> Array:
    """By how much a register tile of fewer than 8 rows is slower (`sparse_kernels.cpu.kernels.row_panels.tile`)."""
    rows = np.select([height >= 8, height >= 4], [8.0, 4.0], 2.0)
    return np.asarray((1 + 1 / rows) / (1 + 1 / 8), np.float64)


def _octaves(ratio: Array) -> Array:
    """log2 of a ratio, 0 to 3: what is too large for a cache does not get slower for ever."""
    return np.clip(np.log2(np.maximum(ratio, 1.0)), 0.0, 3.0)


def _column(X: pd.DataFrame, name: str, default: float) -> Array:
    """A column as numbers, `default` where it is missing."""
    if name not in X.columns:
        return np.full(len(X), float(default))
    values = X[name].to_numpy(np.float64, na_value=np.nan)
    return np.where(np.isnan(values), default, values)
