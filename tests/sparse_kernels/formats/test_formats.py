import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_kernels import (
    NM,
    BlockWise,
    Dense,
    NotOfPattern,
    ShflBW,
    Unstructured,
    VectorNM,
    VectorWise,
    formats,
    pack,
    unpack,
)

PATTERNS = [
    Dense(),
    Unstructured(),
    NM(2, 4),
    NM(1, 3),
    NM(15, 16),
    BlockWise(4, 8),
    BlockWise(3, 1),
    VectorWise(1),
    VectorWise(4),
    VectorWise(64),
    VectorNM(4, 2, 4),
    VectorNM(3, 1, 7),
    ShflBW(1),
    ShflBW(4),
    ShflBW(7),
]


def mask_of(pattern, weight, sparsity):
    scores = weight.astype(float) ** 2
    if isinstance(pattern, Dense):
        return pattern.mask(scores)
    return pattern.mask(scores, pattern.sparsity if isinstance(pattern, NM | VectorNM) else sparsity)


def draw(seed, m, k):
    return np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.sampled_from(PATTERNS),
    st.integers(0, 99),
    st.integers(1, 37),
    st.integers(1, 37),
    st.sampled_from([0, 0.3, 0.8, 1]),
)
def test_what_is_packed_is_unpacked(pattern, seed, m, k, sparsity):
    weight = draw(seed, m, k)
    mask = mask_of(pattern, weight, sparsity)
    packed = pack(weight, mask, pattern)
    np.testing.assert_array_equal(unpack(packed), np.where(mask, weight, 0))
    assert unpack(packed).dtype == np.float32
    assert packed.shape == (m, k)
    assert packed.pattern == pattern
    assert packed.nnz == mask.sum()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_packed_weight_cannot_be_changed_from_outside(pattern, rng):
    weight = rng.standard_normal((13, 11)).astype(np.float32)
    packed = pack(weight, mask_of(pattern, weight, 0.5), pattern)
    before = unpack(packed)
    weight[:] = 0
    np.testing.assert_array_equal(unpack(packed), before)
    for name, array in arrays(packed).items():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
        assert array.flags.c_contiguous, name
    with pytest.raises(dataclasses.FrozenInstanceError):
        packed.shape = (1, 1)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_bytes_are_those_of_the_arrays(pattern, rng):
    weight = rng.standard_normal((13, 11)).astype(np.float32)
    packed = pack(weight, mask_of(pattern, weight, 0.5), pattern)
    assert packed.nbytes == sum(array.nbytes for array in arrays(packed).values())


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_copy_has_addresses_of_its_own(pattern, rng):
    weight = rng.standard_normal((13, 11)).astype(np.float32)
    packed = pack(weight, mask_of(pattern, weight, 0.5), pattern)
    for other in (formats.copy_packed(packed), pickle.loads(pickle.dumps(packed))):
        np.testing.assert_array_equal(unpack(other), unpack(packed))
        assert not any(np.may_share_memory(a, arrays(other)[name]) for name, a in arrays(packed).items() if a.size)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_kept_zeros_stay_kept(pattern):
    weight = np.zeros((8, 12), np.float32)
    mask = mask_of(pattern, np.ones((8, 12)), 0.5)
    packed = pack(weight, mask, pattern)
    assert packed.nnz == mask.sum() > 0
    if not isinstance(pattern, NM):
        assert packed.values.size >= mask.sum()


def test_no_mask_keeps_everything(rng):
    weight = rng.standard_normal((5, 6)).astype(np.float32)
    for pattern in (Dense(), Unstructured(), BlockWise(2, 4), VectorWise(2), ShflBW(2)):
        assert pack(weight, None, pattern).nnz == 30
    with pytest.raises(NotOfPattern, match="nm:2:4 keeps at most 2 of 4 columns, and the mask keeps 4"):
        pack(weight, None, NM(2, 4))


def test_csr_as_it_is_written():
    weight = np.array([[0, 1, 0], [0, 0, 0], [2, 0, 3]], np.float32)
    packed = pack(weight, weight != 0, Unstructured())
    assert packed.indptr.tolist() == [0, 1, 1, 3]
    assert packed.indices.tolist() == [1, 0, 2]
    assert packed.values.tolist() == [1, 2, 3]
    assert (packed.indptr.dtype, packed.indices.dtype, packed.values.dtype) == (np.int64, np.int32, np.float32)


def test_nm_as_it_is_written():
    weight = np.array([[0, 1, 0, 2, 3], [0, 0, 4, 0, 0]], np.float32)
    packed = pack(weight, weight != 0, NM(2, 4))
    assert packed.values.tolist() == [[[1, 2], [3, 0]], [[4, 0], [0, 0]]]
    assert packed.offsets.tolist() == [[[1, 3], [0, 0]], [[2, 2], [0, 0]]]
    assert packed.offsets.dtype == np.uint8


def test_blocks_as_they_are_written():
    weight = np.arange(1, 16, dtype=np.float32).reshape(3, 5)
    mask = BlockWise(2, 4).mask(np.array([[9.0, 9, 9, 9, 0], [9, 9, 9, 9, 0], [0, 0, 0, 0, 9]]), 6 / 15)
    packed = pack(weight, mask, BlockWise(2, 4))
    assert packed.indptr.tolist() == [0, 1, 2]
    assert packed.indices.tolist() == [0, 1]
    assert packed.values.tolist() == [[[1, 2, 3, 4], [6, 7, 8, 9]], [[15, 0, 0, 0], [0, 0, 0, 0]]]


def test_vectors_as_they_are_written():
    weight = np.arange(1, 11, dtype=np.float32).reshape(5, 2)
    mask = np.array([[1, 0], [0, 1], [1, 0], [0, 1], [1, 1]], bool)
    packed = pack(weight, mask, ShflBW(2))
    assert packed.row_ids.tolist() == [0, 2, 1, 3, 4, -1]
    assert packed.indptr.tolist() == [0, 1, 2, 4]
    assert packed.indices.tolist() == [0, 1, 0, 1]
    assert packed.values.tolist() == [[1, 5], [4, 8], [9, 0], [10, 0]]
    assert (packed.indptr.dtype, packed.indices.dtype, packed.row_ids.dtype) == (np.int64, np.int32, np.int32)
    plain = pack(weight, np.ones((5, 2), bool), VectorWise(2))
    assert plain.row_ids.tolist() == [0, 1, 2, 3, 4, -1]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.integers(0, 99), st.integers(1, 30), st.integers(1, 5), st.integers(1, 6))
def test_row_groups_are_found_again_from_the_mask(seed, m, k, v):
    rng = np.random.default_rng(seed)
    mask = (rng.random((-(-m // v), k)) < 0.5).repeat(v, axis=0)[:m][rng.permutation(m)]
    packed = pack(draw(seed, m, k), mask, ShflBW(v))
    assert sorted(packed.row_ids[:m]) == list(range(m))
    assert (packed.row_ids[m:] == -1).all()
    full = packed.row_ids[: m - m % v].reshape(-1, v)
    assert (np.diff(full[:, 0]) > 0).all()
    for group, rows in enumerate(packed.row_ids.reshape(-1, v)):
        rows = rows[rows >= 0]
        assert (np.diff(rows) > 0).all()
        columns = packed.indices[packed.indptr[group] : packed.indptr[group + 1]].tolist()
        assert all(np.flatnonzero(mask[row]).tolist() == columns for row in rows)


CHEQUERED = np.indices((4, 8)).sum(axis=0) % 2 == 0


@pytest.mark.parametrize(
    ("pattern", "mask", "said"),
    [
        (Dense(), CHEQUERED, "keeps everything, and the mask drops 16"),
        (NM(1, 4), CHEQUERED, r"at most 1 of 4 columns, and the mask keeps 2 in row 0, group 0 \(columns 0 to 3\)"),
        (NM(1, 3), np.eye(4, 8, 6, dtype=bool) | np.eye(4, 8, 7, dtype=bool), r"1 of 2 columns.*\(columns 6 to 7\)"),
        (BlockWise(2, 2), CHEQUERED, "a part of the block at row 0, column 0"),
        (VectorWise(2), np.eye(4, 8, dtype=bool), "a part of the one at rows 0 to 1, column 0"),
        (VectorWise(3), np.arange(4)[:, None] + np.zeros((4, 8)) == 2, "rows 0 to 2, column 0"),
        (ShflBW(2), np.eye(4, 8, dtype=bool), "multiples of 2, and the mask has 1 rows with the columns of row 0"),
        (ShflBW(3), CHEQUERED, r"multiples of 3 \(and 1 rows more, as the weight has 4\), and the mask has 2 rows"),
    ],
    ids=lambda it: str(it) if not isinstance(it, np.ndarray | str) else "",
)
def test_a_mask_of_another_pattern_is_refused_with_its_place(pattern, mask, said, rng):
    with pytest.raises(NotOfPattern, match=said):
        pack(rng.standard_normal((4, 8)).astype(np.float32), mask, pattern)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(
    ("weight", "mask", "said"),
    [
        (
            np.array([[1, np.nan]], np.float32),
            np.ones((1, 2), bool),
            "1 elements are not, the first is nan at row 0, column 1",
        ),
        (np.array([[np.inf, 1]], np.float32), np.ones((1, 2), bool), "inf at row 0, column 0"),
        (np.ones((2, 2)), np.ones((2, 2), bool), "float32 array, not float64"),
        ([[1.0]], np.ones((1, 1), bool), "float32 array, not list"),
        (np.ones((2, 2), np.float32), np.ones((2, 2)), "bool array, not float64"),
        (np.ones((2, 2), np.float32), np.ones((2, 3), bool), "must agree"),
        (np.ones((2, 2, 2), np.float32), np.ones((2, 2, 2), bool), r"matrix \(m, k\)"),
        (np.ones((0, 2), np.float32), np.ones((0, 2), bool), r"matrix \(m, k\)"),
    ],
    ids=["nan", "infinite", "float64", "list", "mask dtype", "mask shape", "three dimensions", "empty"],
)
def test_what_no_format_can_hold_is_refused(pattern, weight, mask, said):
    with pytest.raises((ValueError, TypeError), match=said):
        pack(weight, mask, pattern)


def test_what_is_no_pattern_or_no_packed_weight_is_refused():
    with pytest.raises(TypeError, match="a pattern such as"):
        pack(np.ones((2, 2), np.float32), None, "dense")
    with pytest.raises(TypeError, match="a packed weight is needed, not ndarray"):
        unpack(np.ones((2, 2), np.float32))


def test_importing_the_package_stays_light():
    heavy = "torch numba scipy pandas sklearn cupy"
    code = f"import sys, sparse_kernels; print([name for name in '{heavy}'.split() if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("pattern", [Dense(), Unstructured(), NM(2, 4), BlockWise(3, 4), ShflBW(4)], ids=str)
def test_rounding_takes_the_nearest_bfloat16_and_keeps_the_rest(rng, pattern):
    weight = (rng.standard_normal((24, 16)) * 10.0 ** rng.integers(-38, 38, (24, 16))).astype(np.float32)
    weight[0, :4] = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x80000001], np.uint32).view(np.float32)  # ties
    packed = pack(weight, None if isinstance(pattern, Dense) else pattern.mask(np.abs(weight) + 1.0, 0.5), pattern)
    nearest = formats.round_packed(packed)
    expected = torch.from_numpy(unpack(packed)).bfloat16().float().numpy()
    np.testing.assert_array_equal(unpack(nearest).view(np.uint32), expected.view(np.uint32))
    before, after = arrays(packed), arrays(nearest)
    assert all(np.array_equal(before[name], after[name]) for name in before if name != "values")
    assert not after["values"].flags.writeable


def arrays(packed):
    fields = {field.name: getattr(packed, field.name) for field in dataclasses.fields(packed)}
    return {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
