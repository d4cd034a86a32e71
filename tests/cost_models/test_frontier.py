"""Hold-outs: whole shapes, whole families, and the edges of what was measured; and how far beyond a row lies."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm

from cost_models import Uncalibrated, build_hold_outs
from cost_models.evaluation.hold_outs import group_by_family
from cost_models.features.measured_ranges import (
    count_octaves_outside,
    find_furthest,
    find_ranges,
    select_outer_fifths,
)
from cost_models.rows.shape_groups import group_by_shape
from cost_models.uncertainty.edge_calibration import calibrate_edges

Table = Callable[..., pd.DataFrame]


def test_a_fifth_of_the_shapes_lies_at_each_edge_with_all_of_their_rows(table: Table) -> None:
    X = table().sample(frac=1, random_state=0).reset_index(drop=True)
    work = (X["m"] * X["k"] * X["n"]).to_numpy()
    shapes = group_by_shape(X)
    for side, edge in select_outer_fifths(X).items():
        assert len(set(shapes[edge])) == 27 // 5
        assert not set(shapes[edge]) & set(shapes[~edge])
        ours, others = work[edge], work[~edge]
        assert ours.max() <= others.min() if side == "smallest" else ours.min() >= others.max()


def test_fewer_than_five_shapes_have_no_edge(table: Table) -> None:
    X = table(shapes=[(8, 8, n) for n in (1, 2, 3, 4)])
    assert not any(edge.any() for edge in select_outer_fifths(X).values())
    assert set(build_hold_outs(X)) == {"shapes"}


def test_octaves_count_the_size_that_is_furthest_out_and_the_work(table: Table) -> None:
    measured = find_ranges(table(shapes=[(64, 64, 64), (256, 256, 256)]), ["m", "k", "n"])
    asked = table(shapes=[(128, 128, 128), (64, 64, 16), (512, 1024, 256)], patterns=["dense"], sparsities=(0.0,))
    away = count_octaves_outside(asked, measured)
    np.testing.assert_allclose(away["smallest"], [0, 2, 0])
    # 512 x 1024 x 256 is one octave out in m and two in k, so three in work.
    np.testing.assert_allclose(away["largest"], [0, 0, 3])


def test_families_are_of_convolutions_by_kernel_and_stride_and_of_linear_layers_by_aspect(table: Table) -> None:
    linear = table(shapes=[(64, 32, 1), (128, 32, 7), (32, 64, 1), (64, 64, 1)], patterns=["dense"], sparsities=(0,))
    convolutions = linear.iloc[:3].assign(
        op="conv2d", kh=[3, 3, 1], kw=[3, 3, 1], stride_h=[1, 2, 1], stride_w=[1, 2, 1]
    )
    X = pd.concat([linear, convolutions], ignore_index=True)
    np.testing.assert_array_equal(group_by_family(X), [0, 0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(group_by_family(linear), [0, 0, 1, 2])


def test_every_row_is_held_out_once_in_shapes_and_in_families(table: Table) -> None:
    found = build_hold_outs(table())
    assert list(found) == ["shapes", "layer families", "smallest fifth", "largest fifth"]
    for name in ("shapes", "layer families"):
        np.testing.assert_array_equal(np.sum(found[name], axis=0), np.ones(len(table())))


def _dense(sizes: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(sizes, columns=["m", "k", "n"]).assign(op="linear", pattern="dense", sparsity_target=0.0)


@pytest.mark.parametrize(
    ("change", "name", "away"),
    [
        ({"pattern": "vector:8"}, "rows of a block of vector", 1),
        ({"pattern": "vector:128"}, "rows of a block of vector", 1),
        ({"pattern": "block:64x16"}, "columns of a block of block", 1),
        ({"pattern": "vector:16", "sparsity_target": 0.9375}, "density of vector", 2),
        ({"kh": 5}, "kh of a convolution", np.log2(5 / 3)),
        ({"stride_h": 4, "stride_w": 4}, "stride_h of a convolution", 1),
        ({"dilation_w": 2}, "dilation_w of a convolution", 1),
    ],
)
def test_what_is_unlike_in_more_than_size_is_outside_too(
    change: dict[str, object], name: str, away: float, table: Table
) -> None:
    X = pd.concat([
        table(shapes=[(64, 64, 64)], patterns=["vector:16", "vector:64", "block:32x32", "block:64x64"],
              sparsities=(0.5, 0.75)),
        table(shapes=[(64, 64, 64)], patterns=["vector:16"], sparsities=(0.5,)).assign(
            op="conv2d", kh=[3], kw=[3], stride_h=[2], stride_w=[2], dilation_h=[1], dilation_w=[1]),
    ], ignore_index=True)  # fmt: skip
    measured = find_ranges(X, ["m", "k", "n"])
    assert not any(values.any() for values in count_octaves_outside(X, measured).values())
    row = X.iloc[-1:] if set(change) & {"kh", "stride_h", "dilation_w"} else X.iloc[:1]
    asked = row.assign(**change)
    assert find_furthest(asked, measured) == [(name, pytest.approx(away))]
    assert max(side[0] for side in count_octaves_outside(asked, measured).values()) == pytest.approx(away)
    # A linear layer has no stride: what it says there does not matter.
    assert find_furthest(X.iloc[:1].assign(kh=np.nan, stride_h=99), measured)[0][1] == 0


def test_pruning_everything_is_not_infinitely_far(table: Table) -> None:
    X = table()
    [(_, away)] = find_furthest(X.iloc[:1].assign(sparsity_target=1.0), find_ranges(X, ["m"]))
    assert 0 < away < 11


def test_intervals_beyond_an_edge_come_from_its_own_rings_and_hold(rng: np.random.Generator) -> None:
    X = _dense((2 ** rng.uniform(5, 10, (400, 3))).astype(int))
    own = rng.laplace(size=len(X))

    def errors(held_out: np.ndarray) -> np.ndarray:
        """A model that errs by 2%, and by 10% more an octave where layers get larger."""
        away = count_octaves_outside(X[held_out], find_ranges(X[~held_out], ["m", "k", "n"]))
        return own[held_out] * (0.02 + 0.1 * away["largest"])

    found = calibrate_edges(X, errors)
    away = np.array([0.1, 1.0, 3.0])
    small, large = (found[side].half_width(away, 0.9) for side in ("smallest", "largest"))
    # Laplace's 90% lies at log(10); the rings' quantile is of 80 to 240 shapes, and the largest of three is taken.
    truth = np.log(10)
    spread = norm.ppf(1 - 1e-4) * (0.9 * 0.1 / 80) ** 0.5 / 0.1
    for widths, expected in ((small, np.full(3, 0.02)), (large, 0.02 + 0.1 * away)):
        assert (widths >= truth * expected * (1 - 0.25)).all()
        assert (widths <= (truth + 2 * spread) * expected * (1 + 0.25)).all()
    assert (np.diff(large) > 0).all()


def test_an_edge_of_few_shapes_promises_nothing(rng: np.random.Generator) -> None:
    X = _dense((2 ** rng.uniform(5, 10, (12, 3))).astype(int))
    found = calibrate_edges(X, lambda held_out: np.full(held_out.sum(), 0.1))
    with pytest.raises(
        Uncalibrated, match="beyond the measured range an interval of 90% needs more than the 6 shapes"
    ):
        found["largest"].half_width(np.ones(1), 0.9)
    assert found["largest"].half_width(np.ones(1), 0.8)[0] >= 0.1
    with pytest.raises(Uncalibrated, match="the 0 shapes"):
        calibrate_edges(X.iloc[:4], lambda held_out: np.zeros(held_out.sum()))["smallest"].half_width(np.ones(1), 0.5)
