"""Packing for vector.cu: what a lane of the tensor-core product will read gives the weight back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_kernels import NM, BlockWise, Dense, ShflBW, VectorWise, pack, unpack
from sparse_kernels.cuda.program import NotSupported
from sparse_kernels.cuda.vector import locate_columns
from sparse_kernels.cuda.vector_tiles import BK, HEIGHTS, convert_to_bits, pack_tiles
from sparse_kernels.shapes import Conv2dShape

PATTERNS = [
    VectorWise(16),
    VectorWise(32),
    VectorWise(64),
    VectorWise(128),
    VectorWise(1),
    VectorWise(24),
    VectorWise(200),
    VectorWise(257),
    ShflBW(16),
    ShflBW(20),
    ShflBW(150),
    BlockWise(16, 16),
    BlockWise(48, 5),
    BlockWise(128, 64),
    BlockWise(130, 33),
    BlockWise(3, 40),
]


def mma_element(lane, which):
    """Row and column of m16n8k16's first operand: register which / 2, half which % 2 (PTX ISA)."""
    register, half = divmod(which, 2)
    return lane // 4 + 8 * (register % 2), lane % 4 * 2 + half + 8 * (register // 2)


def volta_element(lane, which):
    """The same for the quad pairs' m8n8k4, four of them after each other: columns 4i to 4i + 3 in the i-th."""
    return lane // 4 % 2 * 8 + lane // 16 * 4 + lane % 4, which


def volta_place(lane, which):
    """Where vector.cu reads that element among the 256: 8 columns of 16 rows, then the other 8."""
    return which // 8 * 128 + (lane % 8 + lane // 16 * 8) * 8 + which % 8


def weight_of(tiles, volta):
    """The matrix (m, k) of element bits that the lanes read, put together element by element."""
    matrix = np.zeros(tiles.shape, np.uint16)
    for group, row_ids in enumerate(tiles.row_ids):
        for tile in range(tiles.starts[group], tiles.starts[group + 1]):
            for step in range(BK // 16):
                for strip in range(tiles.height // 16):
                    part = tiles.weights[tile, step, strip]
                    for lane in range(32):
                        for which in range(16 if volta else 8):
                            row, column = (volta_element if volta else mma_element)(lane, which)
                            bits = part[volta_place(lane, which) if volta else lane * 8 + which]
                            place = row_ids[strip * 16 + row], tiles.columns[tile, step * 16 + column]
                            if min(place) < 0:
                                assert bits == 0
                            else:
                                matrix[place] = bits
    return matrix


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.sampled_from(PATTERNS),
    st.integers(0, 99),
    st.integers(1, 150),
    st.integers(1, 70),
    st.sampled_from([0, 0.4, 0.9, 1]),
    st.booleans(),
)
def test_lanes_read_the_weight_that_was_packed(pattern, seed, m, k, sparsity, volta):
    weight = np.random.default_rng(seed).standard_normal((m, k)).astype(np.float16).astype(np.float32)
    mask = pattern.mask(weight.astype(np.float64) ** 2, sparsity)
    packed = pack(weight, mask, pattern)
    tiles = pack_tiles(packed, "float16", volta=volta)
    expected = unpack(packed).astype(np.float16)
    np.testing.assert_array_equal(weight_of(tiles, volta).view(np.float16), expected)


@pytest.mark.parametrize("m", [1, 16, 40, 128, 129, 300])
def test_a_dense_weight_is_vectors_that_are_all_kept(m, rng):
    weight = rng.standard_normal((m, 37)).astype(np.float16).astype(np.float32)
    tiles = pack_tiles(pack(weight, None, Dense()), "float16", volta=False)
    np.testing.assert_array_equal(weight_of(tiles, False).view(np.float16), weight)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_every_row_is_written_once_and_no_column_lies_outside(pattern, rng):
    m, k = 301, 97
    mask = pattern.mask(rng.random((m, k)), 0.6)
    tiles = pack_tiles(pack(np.ones((m, k), np.float32), mask, pattern), "float16", volta=False)
    rows = tiles.row_ids[tiles.row_ids >= 0]
    assert sorted(rows) == list(range(m))
    assert tiles.row_ids.min() >= -1
    assert -1 <= tiles.columns.min() <= tiles.columns.max() < k
    assert tiles.height in HEIGHTS
    assert tiles.row_ids.shape == (tiles.groups, tiles.height)
    assert tiles.starts[-1] == len(tiles.columns) == len(tiles.weights)


def test_the_groups_with_most_tiles_come_first(rng):
    mask = np.zeros((64, 200), bool)
    for group, kept in enumerate((0, 200, 33, 64)):
        mask[16 * group : 16 * group + 16, :kept] = True
    tiles = pack_tiles(pack(np.ones(mask.shape, np.float32), mask, VectorWise(16)), "float16", volta=False)
    np.testing.assert_array_equal(tiles.starts, [0, 7, 9, 11, 11])
    np.testing.assert_array_equal(tiles.row_ids[:, 0], [16, 32, 48, 0])


@pytest.mark.parametrize(("v", "height"), [(1, 16), (16, 16), (17, 32), (64, 64), (100, 128), (128, 128), (129, 128)])
def test_groups_get_the_next_height_there_is(v, height):
    tiles = pack_tiles(pack(np.ones((200, 8), np.float32), None, VectorWise(v)), "float16", volta=False)
    assert tiles.height == height


def test_arrays_cannot_be_changed_and_their_bytes_are_counted(rng):
    tiles = pack_tiles(
        pack(rng.standard_normal((40, 50)).astype(np.float32), None, ShflBW(16)), "bfloat16", volta=False
    )
    arrays = [tiles.starts, tiles.columns, tiles.weights, tiles.row_ids]
    assert tiles.nbytes == sum(array.nbytes for array in arrays)
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_bfloat16_is_rounded_to_the_nearest_even(rng):
    values = rng.standard_normal(1000).astype(np.float32)
    values[:4] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -(1 + 2.0**-8)
    got = (convert_to_bits(values, "bfloat16").astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got[:4], [1, 1 + 2.0**-6, 1 + 2.0**-7, -1])
    unit = 2.0 ** (np.floor(np.log2(np.abs(values))) - 7)
    assert (np.abs(got.astype(np.float64) - values) <= unit / 2).all()


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65520), ("bfloat16", 3.4e38)])
def test_a_weight_too_large_for_the_element_type_is_refused(dtype, value):
    weight = np.full((16, 4), value, np.float32)
    with pytest.raises(NotSupported, match=f"{dtype} cannot hold the weight"):
        pack_tiles(pack(weight, None, VectorWise(16)), dtype, volta=False)


def test_other_formats_are_refused():
    packed = pack(np.eye(4, dtype=np.float32), np.eye(4, dtype=bool), NM(2, 4))
    with pytest.raises(NotSupported, match="run vector, shflbw, block and dense weights, not nm:2:4"):
        pack_tiles(packed, "float16", volta=False)


def test_places_are_those_of_the_image(rng):
    shape = Conv2dShape(1, 5, 9, 8, 4, 3, 2, (2, 1), (1, 2), (3, 4))
    columns = np.array([[0, 7, 29, -1]], np.int32)  # (r, s, c) = (0, 0, 0), (0, 1, 2), (2, 1, 4)
    offsets, taps = locate_columns(columns, shape)
    np.testing.assert_array_equal(offsets, [[0, 2 * 72 + 4, 4 * 72 + 6 * 8 + 4, -1]])
    np.testing.assert_array_equal(taps[:, :3], [[0, 4, (6 << 16) + 4]])
