"""Sparsity patterns: which weights of a matrix (m, k) may be kept together, and the best mask for given scores.

A pattern is a frozen value. Tables, profiles and the command line write its text form (`nm:2:4`, `block:32x32`,
`vector:32`, `shflbw:32`), and `parse` reads it back.

A mask is bool (m, k), True where an element is kept. Scores are floats (m, k), not negative: the larger, the more a
weight matters (w**2, say). Sparsity is the share of elements dropped. Every mask keeps as close to (1 - sparsity) * m
* k elements as its pattern allows. Among such masks it is the one with the most score (Shfl-BW: for the row groups
that were found). Edge units are smaller where m or k is no multiple; `top_units.select_top_units` says how they are
chosen.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparse_kernels.shapes import Conv2dShape, Shape
from sparse_kernels.shuffle import Order, group_rows
from sparse_kernels.top_units import (
    Mask,
    Scores,
    check_scores,
    check_sparsity,
    select_top,
    select_top_units,
    select_top_vectors,
)


@dataclass(frozen=True)
class Dense:
    """Every weight is kept."""

    format: ClassVar[str] = "dense"

    def __str__(self) -> str:
        return "dense"

    def mask(self, scores: Scores, sparsity: float = 0.0) -> Mask:
        """Return all True (m, k); ValueError for any sparsity but 0."""
        _check(scores, sparsity)
        if sparsity != 0:
            raise ValueError(f"a dense layer drops nothing: its sparsity is 0, not {sparsity}")
        return np.ones(scores.shape, bool)

    def refuses(self, shape: Shape) -> str | None:
        """Return None: any layer can be dense."""
        return None


@dataclass(frozen=True)
class Unstructured:
    """Any weight on its own; the mask keeps the largest scores of the whole layer."""

    format: ClassVar[str] = "unstructured"

    def __str__(self) -> str:
        return "unstructured"

    def mask(self, scores: Scores, sparsity: float) -> Mask:
        """Return the top (1 - sparsity) * m * k scores, rounded to the nearest whole number."""
        _check(scores, sparsity)
        return select_top(scores.ravel(), math.floor(_wanted(scores, sparsity) + 0.5)).reshape(scores.shape)

    def refuses(self, shape: Shape) -> str | None:
        """Return None: any layer can be unstructured."""
        return None


@dataclass(frozen=True)
class NM:
    """At most `keep` of every `of` consecutive columns of a row (Mishra et al. 2021).

    Where k is no multiple of `of`, the last group of a row has `length` < `of` columns. It keeps at most ceil(keep *
    length / of) of them. A convolution's groups run along its input channels and must not cross from one tap to the
    next. So one larger than 1x1 is refused unless its channels are a multiple of `of`.
    """

    keep: int
    of: int

    format: ClassVar[str] = "nm"

    def __post_init__(self) -> None:
        _check_whole("keep", self.keep)
        _check_whole("of", self.of)
        if not self.keep < self.of <= 256:
            raise ValueError(
                f"an N:M pattern keeps fewer than all of at most 256 columns, not {self.keep} of {self.of}"
            )

    def __str__(self) -> str:
        return f"nm:{self.keep}:{self.of}"

    @property
    def sparsity(self) -> float:
        """The one sparsity this pattern has."""
        return 1 - self.keep / self.of

    def keeps_of(self, length: int) -> int:
        """Return how many of a group of `length` <= `of` columns are kept at most."""
        return -(-self.keep * length // self.of)

    def mask(self, scores: Scores, sparsity: float) -> Mask:
        """Return the top scores of every group; ValueError for a sparsity other than 1 - keep/of."""
        _check(scores, sparsity)
        _check_only(self, sparsity)
        m, k = scores.shape
        groups = -(-k // self.of)
        padded = np.full((m, groups * self.of), -1.0)
        padded[:, :k] = scores
        grouped = padded.reshape(m, groups, self.of)
        best = np.argsort(-grouped, axis=2, kind="stable")[:, :, : self.keep]
        mask = np.zeros(grouped.shape, bool)
        np.put_along_axis(mask, best, True, axis=2)
        last = k - (groups - 1) * self.of
        mask[:, -1] = False
        np.put_along_axis(mask[:, -1], best[:, -1, : self.keeps_of(last)], True, axis=1)
        return mask.reshape(m, -1)[:, :k].copy()

    def refuses(self, shape: Shape) -> str | None:
        """Return a sentence where groups would cross from one tap of a convolution to the next."""
        return _crosses_taps(self, self.of, shape)


@dataclass(frozen=True)
class BlockWise:
    """Dense blocks of `rows` x `cols`; smaller ones at the lower and right edges where m or k is no multiple."""

    rows: int
    cols: int

    format: ClassVar[str] = "block"

    def __post_init__(self) -> None:
        _check_whole("rows", self.rows)
        _check_whole("cols", self.cols)

    def __str__(self) -> str:
        return f"block:{self.rows}x{self.cols}"

    def mask(self, scores: Scores, sparsity: float) -> Mask:
        """Return the blocks of most score in the whole layer."""
        _check(scores, sparsity)
        m, k = scores.shape
        top_rows, left_columns = np.arange(0, m, self.rows), np.arange(0, k, self.cols)
        by_row = np.add.reduceat(scores, top_rows, axis=0, dtype=np.float64)
        totals = np.add.reduceat(by_row, left_columns, axis=1)
        heights = np.minimum(self.rows, m - top_rows)
        widths = np.minimum(self.cols, k - left_columns)
        kept = select_top_units(totals.ravel(), np.outer(heights, widths).ravel(), _wanted(scores, sparsity))
        return kept.reshape(totals.shape).repeat(heights, axis=0).repeat(widths, axis=1)

    def refuses(self, shape: Shape) -> str | None:
        """Return a sentence where a single block covers the whole layer."""
        if self.rows >= shape.m and self.cols >= shape.k:
            return f"one block of {self} covers the whole {shape.m}x{shape.k} layer and could only be kept or dropped"
        return None


@dataclass(frozen=True)
class VectorWise:
    """Vectors of `v` consecutive rows x 1 column; each group of v rows shares its kept columns.

    The vectors are chosen over the whole layer, so that groups may keep different numbers of them. Where m is no
    multiple of v, the last group has fewer rows.
    """

    v: int

    format: ClassVar[str] = "vector"

    def __post_init__(self) -> None:
        _check_whole("v", self.v)

    def __str__(self) -> str:
        return f"vector:{self.v}"

    def mask(self, scores: Scores, sparsity: float) -> Mask:
        """Return the vectors of most score in the whole layer."""
        _check(scores, sparsity)
        kept, _, heights = select_top_vectors(scores, self.v, sparsity)
        return kept.repeat(heights, axis=0)

    def refuses(self, shape: Shape) -> str | None:
        """Return None: a layer with fewer than v rows is one short group."""
        return None


@dataclass(frozen=True)
class VectorNM(VectorWise):
    """Vector-wise N:M: of every `of` consecutive vectors in a group of v rows at most `keep` (as in NM-SpMM).

    Every mask is one of VectorWise(v), and of NM(keep, of): the vector kernels run it, all groups as long. Short
    groups of columns, and convolutions, as for NM.
    """

    keep: int
    of: int

    def __post_init__(self) -> None:
        super().__post_init__()
        NM(self.keep, self.of)

    def __str__(self) -> str:
        return f"vectornm:{self.v}:{self.keep}:{self.of}"

    @property
    def sparsity(self) -> float:
        """The one sparsity this pattern has."""
        return 1 - self.keep / self.of

    def mask(self, scores: Scores, sparsity: float) -> Mask:
        """Return the best vectors in every group of `of`; raise ValueError for a sparsity other than 1 - keep/of."""
        _check(scores, sparsity)
        _check_only(self, sparsity)
        m = scores.shape[0]
        totals = np.add.reduceat(scores, np.arange(0, m, self.v), axis=0, dtype=np.float64)
        return NM(self.keep, self.of).mask(totals, self.sparsity).repeat(self.v, axis=0)[:m]

    def refuses(self, shape: Shape) -> str | None:
        """Return a sentence where groups would cross from one tap of a convolution to the next."""
        return _crosses_taps(self, self.of, shape)


@dataclass(frozen=True)
class ShflBW:
    """Vector-wise after a reordering of the rows, so that any v rows may form a group (Huang et al., DAC 2022).

    The rows of a mask fall into groups of v with equal columns, one group smaller where m is no multiple of v. That
    is all that `pack` needs to find the groups again. Columns are kept `cols` at a time, beside each other: four are
    what a unit for bytes multiplies at once. Where k is no multiple of `cols`, the last ones are fewer.
    """

    v: int
    cols: int = 1

    format: ClassVar[str] = "shflbw"

    def __post_init__(self) -> None:
        _check_whole("v", self.v)
        _check_whole("cols", self.cols)

    def __str__(self) -> str:
        return f"shflbw:{self.v}" if self.cols == 1 else f"shflbw:{self.v}x{self.cols}"

    def mask(self, scores: Scores, sparsity: float) -> Mask:
        """Return the vectors of most score among the row groups that `group_rows` finds.

        Consecutive rows are among the groupings it compares, so this never retains less score than VectorWise(v). The
        same scores give the same mask every time on one machine; the rounding of another's BLAS may lead to another.
        """
        _check(scores, sparsity)
        order, mask = self.order_rows(scores, sparsity), np.empty(scores.shape, bool)
        mask[order] = self.in_order.mask(scores[order], sparsity)
        return mask

    @property
    def in_order(self) -> VectorWise | BlockWise:
        """The pattern of a mask whose rows are put in order."""
        return VectorWise(self.v) if self.cols == 1 else BlockWise(self.v, self.cols)

    def order_rows(self, scores: Scores, sparsity: float) -> Order:
        """Return the order (m,) of the rows of scores (m, k) in which each v rows make a good group."""
        if self.cols > 1:
            scores = np.add.reduceat(scores, np.arange(0, scores.shape[1], self.cols), axis=1)
        return group_rows(scores, self.v, sparsity, np.random.default_rng(0))

    def refuses(self, shape: Shape) -> str | None:
        """Return None: a layer with fewer than v rows is one short group."""
        return None


Pattern = Dense | Unstructured | NM | BlockWise | VectorWise | VectorNM | ShflBW

_FORMS = (
    (re.compile(r"dense"), Dense),
    (re.compile(r"unstructured"), Unstructured),
    (re.compile(r"nm:(\d+):(\d+)"), NM),
    (re.compile(r"block:(\d+)x(\d+)"), BlockWise),
    (re.compile(r"vector:(\d+)"), VectorWise),
    (re.compile(r"vectornm:(\d+):(\d+):(\d+)"), VectorNM),
    (re.compile(r"shflbw:(\d+)(?:x(\d+))?"), ShflBW),
)


def parse(text: str) -> Pattern:
    """Return the pattern of a text, as str(pattern) writes it.

    Parameters
    ----------
    text : str
        Such as ``nm:2:4``, ``block:32x32``, ``vector:32``, ``shflbw:32`` or ``shflbw:32x4``.

    Returns
    -------
    Pattern
        The pattern.

    Raises
    ------
    ValueError
        If the text is no pattern; the message lists the known ones.
    """
    for form, pattern in _FORMS:
        if found := form.fullmatch(text):
            return pattern(*(int(number) for number in found.groups() if number is not None))
    raise ValueError(
        f"unknown pattern {text!r}: known are dense, unstructured, nm:KEEP:OF, block:ROWSxCOLS, vector:V, "
        "vectornm:V:KEEP:OF, shflbw:V, shflbw:VxCOLS"
    )


def _check(scores: Scores, sparsity: float) -> None:
    check_scores(scores)
    check_sparsity(sparsity)


def _check_only(pattern: NM | VectorNM, sparsity: float) -> None:
    if not math.isclose(sparsity, pattern.sparsity, abs_tol=1e-6):
        raise ValueError(f"{pattern} has sparsity {pattern.sparsity:g} and no other, not {sparsity:g}")


def _crosses_taps(pattern: NM | VectorNM, of: int, shape: Shape) -> str | None:
    if isinstance(shape, Conv2dShape) and shape.kh * shape.kw > 1 and shape.c_in % of:
        return (
            f"{pattern} needs input channels in multiples of {of} so that no group crosses the taps of a "
            f"{shape.kh}x{shape.kw} convolution, which has {shape.c_in} channels"
        )
    return None


def _wanted(scores: Scores, sparsity: float) -> float:
    return (1 - sparsity) * scores.size


_LARGEST = 2**31 - 1  # the largest number that a table holds


def _check_whole(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST:
        raise ValueError(f"{name} must be a whole number of at least 1, and at most {_LARGEST}, not {value!r}")
