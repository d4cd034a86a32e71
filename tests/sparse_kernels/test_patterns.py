import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_kernels import (
    NM,
    BlockWise,
    Conv2dShape,
    Dense,
    LinearShape,
    NotOfPattern,
    ShflBW,
    Unstructured,
    VectorNM,
    VectorWise,
    pack,
    parse,
    unpack,
)
from sparse_kernels.top_units import select_top_units

quick = settings(deadline=None, derandomize=True, max_examples=40)

PATTERNS = st.one_of(
    st.just(Dense()),
    st.just(Unstructured()),
    st.integers(2, 256).flatmap(lambda of: st.builds(NM, st.integers(1, of - 1), st.just(of))),
    st.builds(BlockWise, st.integers(1, 200), st.integers(1, 200)),
    st.builds(VectorWise, st.integers(1, 200)),
    st.integers(2, 256).flatmap(
        lambda of: st.builds(VectorNM, st.integers(1, 200), st.integers(1, of - 1), st.just(of))
    ),
    st.builds(ShflBW, st.integers(1, 200)),
)


def draw_scores(seed, m, k, ties):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 4, (m, k)).astype(float) if ties else rng.exponential(size=(m, k))


@quick
@given(PATTERNS)
def test_text_form_reads_back(pattern):
    assert parse(str(pattern)) == pattern


@pytest.mark.parametrize(
    "text", ["", "Dense", "nm:2", "nm:2:4:8", "block:32", "block:3x", "vector:-1", "shflbw:1.5", "csr"]
)
def test_unknown_text_lists_what_is_known(text):
    with pytest.raises(ValueError, match=r"known are dense, .*, vector:V, vectornm:V:KEEP:OF, shflbw:V"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "nm:4:4",
        "nm:0:4",
        "vectornm:0:2:4",
        "vectornm:8:4:4",
        "nm:5:4",
        "nm:2:300",
        "block:0x4",
        "vector:0",
        "shflbw:0",
    ],
)
def test_impossible_settings_are_refused(text):
    with pytest.raises(ValueError, match="not "):
        parse(text)


@pytest.mark.parametrize("value", [2.0, "2", True, None])
def test_settings_are_whole_numbers(value):
    with pytest.raises(ValueError, match="v must be a whole number of at least 1"):
        VectorWise(value)


@pytest.mark.parametrize("pattern", [Unstructured(), NM(2, 4), BlockWise(2, 2), VectorWise(2), ShflBW(2)], ids=str)
@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (np.full((4, 4), np.nan), "16 are not, the first is nan at row 0, column 0"),
        (-np.eye(4), "4 are not, the first is -1.0 at row 0, column 0"),
        (np.full((4, 4), np.inf), "inf"),
        (np.ones(4), r"matrix \(m, k\)"),
        (np.ones((0, 4)), r"matrix \(m, k\)"),
        ([[1.0]], r"matrix \(m, k\)"),
        (np.ones((4, 4), int), "floating-point"),
    ],
    ids=["nan", "negative", "infinite", "vector", "empty", "list", "whole"],
)
def test_scores_that_cannot_be_ranked_are_refused(pattern, scores, said):
    with pytest.raises((ValueError, TypeError), match=said):
        pattern.mask(scores, 0.5)


@pytest.mark.parametrize("sparsity", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("pattern", [Dense(), Unstructured(), NM(2, 4), BlockWise(2, 2), ShflBW(2)], ids=str)
def test_sparsity_out_of_range_is_refused(pattern, sparsity):
    with pytest.raises(ValueError, match="between 0 and 1"):
        pattern.mask(np.ones((4, 4)), sparsity)


def test_dense_keeps_everything_and_nothing_less():
    assert Dense().mask(np.ones((3, 5))).all()
    with pytest.raises(ValueError, match=r"sparsity is 0, not 0\.5"):
        Dense().mask(np.ones((3, 5)), 0.5)


@quick
@given(st.integers(0, 99), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1), st.booleans())
def test_unstructured_keeps_the_largest_and_the_first_of_equals(seed, m, k, sparsity, ties):
    scores = draw_scores(seed, m, k, ties)
    mask = Unstructured().mask(scores, sparsity)
    count = int((1 - sparsity) * m * k + 0.5)
    by_rank = sorted(range(m * k), key=lambda i: (-scores.flat[i], i))
    assert sorted(np.flatnonzero(mask)) == sorted(by_rank[:count])


@quick
@given(
    st.integers(0, 99),
    st.integers(1, 5),
    st.integers(1, 17),
    st.sampled_from([(1, 2), (2, 4), (1, 4), (2, 3), (7, 16)]),
)
def test_nm_keeps_the_largest_of_every_group(seed, m, k, keep_of):
    keep, of = keep_of
    scores = draw_scores(seed, m, k, ties=True)
    mask = NM(keep, of).mask(scores, 1 - keep / of)
    for row in range(m):
        for first in range(0, k, of):
            group = range(first, min(first + of, k))
            by_rank = sorted(group, key=lambda column: (-scores[row, column], column))
            most = -(-keep * len(group) // of)
            assert [column for column in group if mask[row, column]] == sorted(by_rank[:most])


@quick
@given(
    st.integers(0, 99), st.integers(1, 9), st.integers(1, 17), st.integers(1, 4), st.sampled_from([(1, 2), (2, 3)])
)
def test_vector_nm_is_nm_of_what_the_rows_of_a_group_score_together(seed, m, k, v, keep_of):
    keep, of = keep_of
    scores = draw_scores(seed, m, k, ties=True)
    mask = VectorNM(v, keep, of).mask(scores, 1 - keep / of)
    for first in range(0, m, v):
        rows = slice(first, first + v)
        expected = NM(keep, of).mask(scores[rows].sum(axis=0, keepdims=True), 1 - keep / of)
        assert (mask[rows] == expected).all()


def test_nm_has_one_sparsity():
    with pytest.raises(ValueError, match=r"nm:2:4 has sparsity 0\.5 and no other, not 0\.75"):
        NM(2, 4).mask(np.ones((4, 4)), 0.75)
    assert NM(1, 3).mask(np.ones((4, 4)), 0.6666667).sum() == 8
    with pytest.raises(ValueError, match=r"vectornm:2:1:4 has sparsity 0\.75 and no other, not 0\.5"):
        VectorNM(2, 1, 4).mask(np.ones((4, 4)), 0.5)


def test_nm_refuses_groups_across_the_taps_of_a_convolution():
    assert "6 channels" in NM(2, 4).refuses(Conv2dShape(1, 6, 8, 8, 8, 3, 3))
    assert NM(2, 4).refuses(Conv2dShape(1, 8, 8, 8, 8, 3, 3)) is None
    assert NM(2, 4).refuses(Conv2dShape(1, 6, 8, 8, 8, 1, 1)) is None
    assert NM(2, 4).refuses(LinearShape(3, 7, 1)) is None
    assert "vectornm:8:2:4 needs" in VectorNM(8, 2, 4).refuses(Conv2dShape(1, 6, 8, 8, 8, 3, 3))


def test_a_block_larger_than_the_layer_is_refused():
    assert "covers the whole 10x27 layer" in BlockWise(32, 32).refuses(LinearShape(10, 27, 1))
    assert BlockWise(32, 16).refuses(LinearShape(10, 27, 1)) is None


@pytest.mark.parametrize("pattern", [Dense(), Unstructured(), VectorWise(32), ShflBW(32)], ids=str)
def test_a_small_layer_is_no_reason_to_refuse(pattern):
    assert pattern.refuses(LinearShape(1, 1, 0)) is None


@quick
@given(st.data(), st.integers(0, 99), st.floats(0, 1), st.booleans())
def test_chosen_units_are_the_best_of_all_subsets(data, seed, sparsity, ties):
    sizes = np.array(data.draw(st.lists(st.sampled_from([6, 4, 3, 2]), min_size=1, max_size=9)))
    totals = draw_scores(seed, 1, len(sizes), ties)[0]
    wanted = (1 - sparsity) * sizes.sum()
    kept = select_top_units(totals, sizes, wanted)
    subsets = [np.array(bits, bool) for bits in itertools.product([False, True], repeat=len(sizes))]
    gap = min(abs(sizes[subset].sum() - wanted) for subset in subsets)
    assert abs(sizes[kept].sum() - wanted) <= gap + 1e-6
    # an equally near count on the other side is as good, so the best is sought among those with the count kept
    best = max(totals[subset].sum() for subset in subsets if sizes[subset].sum() == sizes[kept].sum())
    assert totals[kept].sum() == pytest.approx(best)


@quick
@given(
    st.integers(0, 99), st.integers(1, 23), st.integers(1, 23), st.floats(0, 1), st.integers(1, 8), st.integers(1, 8)
)
def test_kept_elements_are_within_half_a_unit_of_the_wanted(seed, m, k, sparsity, rows, cols):
    scores = draw_scores(seed, m, k, ties=False)
    for pattern, unit in ((BlockWise(rows, cols), rows * cols), (VectorWise(rows), rows), (ShflBW(rows), rows)):
        mask = pattern.mask(scores, sparsity)
        assert mask.shape == (m, k)
        assert mask.dtype == bool
        assert abs(mask.sum() - (1 - sparsity) * m * k) <= unit / 2 + 1e-6
        assert pack(scores.astype(np.float32), mask, pattern).nnz == mask.sum()


def test_block_and_vector_masks_keep_the_largest_sums():
    scores = np.array([[9.0, 0, 1, 1], [0, 0, 1, 1], [5, 5, 0, 0], [0, 0, 0, 3]])
    blocks = [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    vectors = [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 1], [1, 1, 0, 1]]
    np.testing.assert_array_equal(BlockWise(2, 2).mask(scores, 0.5), np.array(blocks, bool))
    np.testing.assert_array_equal(VectorWise(2).mask(scores, 0.5), np.array(vectors, bool))


@pytest.mark.parametrize("pattern", [Unstructured(), BlockWise(2, 3), VectorWise(3), ShflBW(3)], ids=str)
def test_the_same_scores_give_the_same_mask(pattern, rng):
    scores = rng.integers(0, 3, (31, 17)).astype(float)
    np.testing.assert_array_equal(pattern.mask(scores, 0.7), pattern.mask(scores.copy(), 0.7))


@pytest.mark.parametrize("sparsity", [0.0, 1.0])
@pytest.mark.parametrize("pattern", [Unstructured(), BlockWise(4, 4), VectorWise(4), ShflBW(4)], ids=str)
def test_the_ends_of_sparsity_keep_all_or_nothing(pattern, sparsity, rng):
    mask = pattern.mask(rng.exponential(size=(13, 7)), sparsity)
    assert mask.all() if sparsity == 0 else not mask.any()


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
@pytest.mark.parametrize("pattern", [Unstructured(), BlockWise(2, 2), VectorWise(2), ShflBW(2)], ids=str)
def test_the_scale_of_scores_does_not_matter(pattern, scale, rng):
    scores = 2.0 ** rng.integers(0, 4, (12, 9))
    np.testing.assert_array_equal(pattern.mask(scores, 0.6), pattern.mask(scores * scale, 0.6))


@pytest.mark.parametrize("pattern", [Unstructured(), NM(2, 4), BlockWise(2, 2), VectorWise(2), ShflBW(2)], ids=str)
def test_scores_of_zero_are_chosen_among_all_the_same(pattern):
    assert pattern.mask(np.zeros((8, 8)), 0.5).sum() == 32


@pytest.mark.parametrize("size", [(64, 32), (33, 18), (7, 3)], ids=str)
def test_shuffled_fours_of_columns_are_blocks_in_another_order(rng, size):
    pattern = ShflBW(8, 4)
    assert parse("shflbw:8x4") == pattern and str(pattern) == "shflbw:8x4"
    scores = rng.random(size)
    mask = pattern.mask(scores, 0.5)
    packed = pack(rng.standard_normal(size).astype(np.float32), mask, pattern)
    order = packed.row_ids[: size[0]]
    blocks = BlockWise(8, 4)
    pack(np.ones(size, np.float32), mask[order], blocks)  # raises unless they are whole blocks
    assert scores[mask].sum() >= scores[blocks.mask(scores, 0.5)].sum() - 1e-9
    np.testing.assert_array_equal(unpack(packed) != 0, mask)


def test_a_mask_that_splits_fours_of_columns_is_refused():
    mask = np.zeros((8, 8), bool)
    mask[:, 1:5] = True
    with pytest.raises(NotOfPattern, match="keeps 4 columns together"):
        pack(np.ones((8, 8), np.float32), mask, ShflBW(8, 4))
