"""Hashes of all rows of an Arrow table at once: 128 bits a row, without a loop over rows.

Every value becomes two 64-bit words. The finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable
pseudorandom number generators") mixes each word with its position: its column, and its place in a text or list. Words
of one row are added modulo 2^64. Nulls and NaN are equal, 0.0 and -0.0 too; 3 and 3.0 are not. The hash guards
against accidents, not attacks: among ten million rows, two different ones share a hash with a probability of 10^-25.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""(rows, 2): a row's hash in two words."""

_LANES = 2
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NOTHING = np.uint64(0x6E756C6C)


def hash_rows(table: pa.Table) -> Words:
    """Return the hash of every row (rows, 2). It depends on the names of the columns, not on their order.

    Raises TypeError for a column that holds neither numbers, texts, times nor lists of numbers.
    """
    total = np.zeros((table.num_rows, _LANES), np.uint64)
    for name in table.column_names:
        column = table[name]
        if pa.types.is_string(column.type):
            column = column.dictionary_encode()
        chunks = [_mixed_words(chunk, _salt(name)) for chunk in column.chunks]
        if chunks:
            total += np.concatenate(chunks)
    return _mixed(total)


def hash_multiset(sums: Words, count: int) -> str:
    """Return 16 hexadecimal digits for `count` rows whose hashes add up to `sums` (2,), in any order."""
    return hashlib.sha256(f"{count} {sums[0]} {sums[1]}".encode()).hexdigest()[:16]


def find_first_occurrences(hashes: Words) -> NDArray[np.bool_]:
    """Return (rows,) whether a row is the first with its hash."""
    order = np.lexsort((np.arange(len(hashes)), hashes[:, 1], hashes[:, 0]))
    ordered = hashes[order]
    first = np.ones(len(hashes), bool)
    first[order[1:]] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return first


def _mixed_words(array: pa.Array, salt: Words) -> Words:
    """Return (rows, 2) the words of the values, mixed with their column; each value of a dictionary once."""
    if not pa.types.is_dictionary(array.type):
        return _mixed(_words(array) ^ salt)
    levels = _mixed(np.concatenate([_words(array.dictionary), np.full((1, _LANES), _NOTHING)]) ^ salt)
    words: Words = levels[array.indices.fill_null(len(array.dictionary)).to_numpy(zero_copy_only=False)]
    return words


def _words(array: pa.Array) -> Words:
    """Return (rows, 2) words for the values; equal values have equal words."""
    kind = array.type
    if pa.types.is_null(kind):
        return np.full((len(array), _LANES), _NOTHING)
    if pa.types.is_string(kind):
        text = array.cast(pa.large_string())
        offsets = np.frombuffer(text.buffers()[1], np.int64)[text.offset : text.offset + len(text) + 1]
        letters = np.frombuffer(text.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
        words = _of_sequences(letters.astype(np.uint64), offsets)
    elif pa.types.is_list(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        words = _of_sequences(_word(array.values.slice(offsets[0], offsets[-1] - offsets[0])), offsets)
    else:
        words = np.repeat(_word(array)[:, None], _LANES, axis=1)
    words[array.is_null().to_numpy(zero_copy_only=False)] = _NOTHING
    return words


def _word(array: pa.Array) -> NDArray[np.uint64]:
    """Return (rows,) the bits of numbers and times; null and NaN have the same."""
    kind = array.type
    if pa.types.is_floating(kind):
        # Adding zero makes -0.0 into 0.0; there are many NaN, and one stands for all.
        values = array.cast(pa.float64()).to_numpy(zero_copy_only=False) + 0.0
        return np.where(np.isnan(values), _NOTHING, values.view(np.uint64))
    if pa.types.is_timestamp(kind):
        array = array.cast(pa.timestamp("us", tz=kind.tz)).cast(pa.int64())
    elif not (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise TypeError(f"a column of {kind} has no hash")
    whole = array.cast(pa.int64()).fill_null(int(_NOTHING)).to_numpy(zero_copy_only=False)
    bits: NDArray[np.uint64] = whole.view(np.uint64)
    return bits


def _of_sequences(elements: NDArray[np.uint64], offsets: NDArray[np.int64]) -> Words:
    """Return (rows, 2) the words of texts or lists; row i has the elements from offsets[i] - offsets[0] on."""
    lengths = np.diff(offsets)
    starts = offsets[:-1] - offsets[0]
    places = (np.arange(len(elements)) - np.repeat(starts, lengths)).astype(np.uint64)
    words = np.empty((len(lengths), _LANES), np.uint64)
    for lane in range(_LANES):
        there = _mixed(np.arange(1, lengths.max(initial=0) + 1, dtype=np.uint64) * _GOLDEN + np.uint64(lane))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(elements ^ there[places]))])
        words[:, lane] = sums[starts + lengths] - sums[starts]
    return words


def _salt(name: str) -> Words:
    """Return (2,) words for the name of a column."""
    return np.frombuffer(hashlib.sha256(name.encode()).digest()[: 8 * _LANES], np.uint64)


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return words of which every bit depends on every bit of the given ones."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
