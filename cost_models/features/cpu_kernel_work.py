"""Work terms of this project's CPU kernels (`sparse_kernels.cpu`): their loops, padding and copies for a layer.

Everything follows from the columns of a row. Vectors have 16 floats (AVX-512), or 4 or 8 for as few tokens; a CPU
with narrower vectors does more of the same. Each term but the call is divided by the threads. A fit gives each term
its rate in seconds a unit (`cost_models.features.work_terms`):

    call
    multiplications of each format, over all lanes. Lanes count in full if positions (tokens, pixels) do not fill a
        vector, or vectors do not fill a tile of two; a tile of few rows counts more
    multiplications whose tile of x spans more pages than the TLB holds; and more bytes than the first-level cache
    bytes of weights whose rows share their columns, and of single rows; bytes of x that are read; bytes of y
    layout of images for a convolution: elements, rows of images; rows of y that are collected afterwards
    single rows: elements of x that are packed, and passes over a row's columns (one a tile of positions and a stage
        of columns)
    other rows: sums that are set up and finished, over all lanes
    linear layers with tokens along the vector: elements of x and y that are transposed

The terms were chosen on two tables of an AMD EPYC of family 26, with shapes held out; no bundled table was used. On
tables of another CPU their sums are 14% off for five shapes of a ResNet20, where a plain roofline is 25% off. For
three linear shapes both are 18% off.

Not modelled are cache lines that another core has just written, and threads that wait for each other. Small batches,
where each thread packs all of x, are not modelled either, and neither is the choice of a matrix unit
(`sparse_kernels.cpu.matrix_unit.third_linear`).
Terms for matrix units were tried. They brought unseen shapes no nearer: trees on 29 shapes learn as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from cost_models.features.layer_work import SIZES, LayerWork
from cost_models.features.pattern_structure import PatternStructure
from cost_models.rows.row_keys import FloatArray, RowMask, extract_sparsities

_LANES = 16
# Elements of x and y together, and of a row of x, from which on the token-major kernel waits for memory.
_FAR, _LONG_ROWS = 2**20, 3125
_CACHE_BYTES = 48 * 2**10  # first-level cache
_PAGE_BYTES, _PAGES = 4096, 64  # about the pages of a first-level TLB
# As in `sparse_kernels.cpu.kernels.unstructured_rows`: elements of x in a stage, the fewest columns of a row that are
# worth a stage, and the most elements of a stage.
_STAGE_ELEMENTS, _FEWEST_COLUMNS, _MOST_ELEMENTS = 7_500, 12, 2**16


def count_kernel_work(X: pd.DataFrame, formats: Sequence[str]) -> FloatArray:
    """Return the amounts of work of every row, (rows, terms): the call first, then multiplications by format."""
    structure, work, images = PatternStructure.from_rows(X), LayerWork.from_rows(X), ConvolutionLayout.from_rows(X)
    m, k, n = (X[name].to_numpy(np.float64) for name in SIZES)
    density, height = 1 - extract_sparsities(X), _count_shared_rows(m, structure)
    linear, single, by_outputs = X["op"].ne("conv2d").to_numpy(), height == 1, vectorizes_outputs(X)
    panels = ~single & ~by_outputs

    vectors = np.where(linear, np.ceil(n / _LANES), images.vectors)
    short = np.where(linear & (n <= _LANES), np.select([n <= 4, n <= 8], [4.0, 8.0], _LANES), np.inf)
    tokens = np.where(n <= 2, 2.0, np.ceil(n / 8) * 8)
    lanes = np.select([by_outputs, single], [tokens, vectors * _LANES], np.ceil(vectors / 2) * 2 * _LANES)
    lanes = np.where(by_outputs, lanes, np.minimum(lanes, short))
    kept = m * k * density
    multiplied = kept * lanes * np.where(panels, _slow_down_low_tile(height), 1.0)
    pages = np.minimum(images.channels, images.read * 4 / _PAGE_BYTES)
    by_column = panels & ~linear & ~images.laid
    reads = np.where(by_column, 1 - (1 - density) ** np.maximum(1, m / height), 1.0)
    weight_bytes = work.weight_bytes + np.where(single, 2, 4) * kept / height
    stages = count_column_stages(k, np.minimum(vectors, short / _LANES), density)
    terms = [
        *(np.where(structure.format == name, multiplied, 0.0) for name in formats),
        np.where(panels, multiplied * _clip_octaves(pages / _PAGES), 0.0),
        np.where(by_outputs, multiplied * _clip_octaves(4 * k * np.minimum(8, tokens) / _CACHE_BYTES), 0.0),
        np.where(single, 0.0, weight_bytes),
        np.where(single, weight_bytes, 0.0),
        work.input_bytes * reads,
        work.output_bytes,
        images.written,
        images.rows,
        images.collected,
        np.where(single, k * lanes, 0.0),
        np.where(single, m * np.ceil(vectors / 4) * stages, 0.0),
        np.where(single, 0.0, m * lanes),
        np.where(linear & ~by_outputs & _is_token_major(X), (k + m) * n, 0.0),
    ]
    return np.column_stack([np.ones(len(X)), np.stack(terms, axis=1) / _get_column(X, "threads", 1)[:, None]])


def vectorizes_outputs(X: pd.DataFrame) -> RowMask:
    """Return whether each row, (rows,), is a token-major linear layer that runs with its outputs along the vector.

    This is the choice of `sparse_kernels.cpu.plans.linear` for a CPU whose vector unit works in halves (Zen 4).
    Groups of rows must fill vectors. Many tokens run along the vector instead if a group fills only one vector. The
    same holds for permuted rows if x has no long rows. For few tokens half a filled vector is enough. A vector unit
    of full width (Zen 5) runs fewer permuted layers this way. Modelling that did not bring its unseen shapes nearer.
    """
    m, k, n = (X[name].to_numpy(np.float64) for name in SIZES)
    structure = PatternStructure.from_rows(X)
    height, long = _count_shared_rows(m, structure), k >= 2 * m
    two_vectors = (structure.format == "dense") | (height % (2 * _LANES) == 0)
    total, threads = np.ceil(n / _LANES), _get_column(X, "threads", 1)
    balanced = 4 * threads * np.ceil(total / threads) <= 5 * total
    per_thread = np.ceil(total / threads)
    full = 16 * n >= 15 * per_thread * threads * _LANES
    along_tokens = (full & (~long | (per_thread <= 2))) | (n * (m + k) >= _FAR) | (k > _LONG_ROWS)
    by_panels = (total < 2 * threads) | two_vectors
    better = ~balanced | np.where((structure.format == "shflbw") & two_vectors, ~along_tokens, by_panels)
    half_vector = (height % (_LANES // 2) == 0) & (n <= 8)
    filled = two_vectors | (height % _LANES == 0) | half_vector
    along_outputs: RowMask = X["op"].ne("conv2d").to_numpy() & _is_token_major(X) & filled & better
    return along_outputs


def count_column_stages(k: FloatArray, vectors: FloatArray, density: FloatArray) -> FloatArray:
    """Return how many stages of columns `sparse_kernels.cpu.kernels.unstructured_rows` makes of single rows."""
    together = np.minimum(4, vectors) * _LANES
    close = np.minimum(np.ceil(k * together / _STAGE_ELEMENTS), np.floor(k * density / _FEWEST_COLUMNS))
    stride = np.maximum(together, _LANES)
    return np.asarray(np.maximum(np.ceil(k * stride / (_MOST_ELEMENTS - stride)), close), np.float64)


@dataclass(frozen=True)
class ConvolutionLayout:
    """How every convolution lays out its images; zeros for other rows.

    Attributes
    ----------
    vectors : ndarray of shape (rows,)
        Vectors of output positions.
    laid : ndarray of bool, shape (rows,)
        Whether x is copied into a padded layout.
    written, rows : ndarray of shape (rows,)
        Elements and image rows that this copy writes.
    collected : ndarray of shape (rows,)
        Rows of y that are collected afterwards.
    read : ndarray of shape (rows,)
        Elements that the kernel's vectors read from.
    channels : ndarray of shape (rows,)
        Input channels.
    """

    vectors: FloatArray
    laid: RowMask
    written: FloatArray
    rows: FloatArray
    collected: FloatArray
    read: FloatArray
    channels: FloatArray

    @classmethod
    def from_rows(cls, X: pd.DataFrame) -> Self:
        """Return the layout that `sparse_kernels.cpu.plans.conv2d` chooses."""
        batch, c_in, h, w, kh, kw = (_get_column(X, name, 1) for name in ("batch", "c_in", "h", "w", "kh", "kw"))
        down, right = _get_column(X, "stride_h", 1), _get_column(X, "stride_w", 1)
        above, left = _get_column(X, "padding_h", 0), _get_column(X, "padding_w", 0)
        out_h = (h + 2 * above - _get_column(X, "dilation_h", 1) * (kh - 1) - 1) // down + 1
        out_w = (w + 2 * left - _get_column(X, "dilation_w", 1) * (kw - 1) - 1) // right + 1
        convolution = X["op"].eq("conv2d").to_numpy()
        in_place = (kh * kw * down * right == 1) & (above + left == 0) & (h * w >= _LANES)
        laid = convolution & ~in_place
        # A strided convolution reads one phase of the image for each group of taps.
        phases = np.minimum(down, kh) * np.minimum(right, kw)
        pitch, high = -(-(w + left) // right), -(-(h + above) // down)
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


def _count_shared_rows(m: FloatArray, structure: PatternStructure) -> FloatArray:
    """Return how many rows share their columns, (rows,)."""
    return np.where(structure.format == "dense", m, structure.unit_rows)


def _is_token_major(X: pd.DataFrame) -> RowMask:
    token_major: RowMask = (
        X["layout"].eq("token_major").to_numpy() if "layout" in X.columns else np.ones(len(X), bool)
    )
    return token_major


def _slow_down_low_tile(height: FloatArray) -> FloatArray:
    """Return how many times slower a low register tile of `sparse_kernels.cpu.kernels.row_panels` is than 8 rows."""
    rows = np.select([height >= 8, height >= 4], [8.0, 4.0], 2.0)
    return np.asarray((1 + 1 / rows) / (1 + 1 / 8), np.float64)


def _clip_octaves(ratio: FloatArray) -> FloatArray:
    """Return log2 of a ratio, clipped to 0 to 3: beyond 3 octaves a larger tile gets no slower."""
    return np.clip(np.log2(np.maximum(ratio, 1.0)), 0.0, 3.0)


def _get_column(X: pd.DataFrame, name: str, default: float) -> FloatArray:
    """Return a column as floats, (rows,), with `default` for missing values."""
    if name not in X.columns:
        return np.full(len(X), float(default))
    values = X[name].to_numpy(np.float64, na_value=np.nan)
    return np.where(np.isnan(values), default, values)
