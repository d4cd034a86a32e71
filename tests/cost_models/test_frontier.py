"""Hold-outs: whole shapes, whole families, and the edges of what was measured; and how far beyond a row lies."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from cost_models import hold_outs
from cost_models.frontier import fifths, octaves, ranges
from cost_models.hold_outs import families
from cost_models.rows import shape_groups

Table = Callable[..., pd.DataFrame]


def test_a_fifth_of_the_shapes_lies_at_each_edge_with_all_of_their_rows(table: Table) -> None:
    X = table().sample(frac=1, random_state=0).reset_index(drop=True)
    work = (X["m"] * X["k"] * X["n"]).to_numpy()
    shapes = shape_groups(X)
    for side, edge in fifths(X).items():
        assert len(set(shapes[edge])) == 27 // 5
        assert not set(shapes[edge]) & set(shapes[~edge])
        ours, others = work[edge], work[~edge]
        assert ours.max() <= others.min() if side == "smallest" else ours.min() >= others.max()


def test_fewer_than_five_shapes_have_no_edge(table: Table) -> None:
    X = table(shapes=[(8, 8, n) for n in (1, 2, 3, 4)])
    assert not any(edge.any() for edge in fifths(X).values())
    assert set(hold_outs(X)) == {"shapes"}


def test_octaves_count_the_size_that_is_furthest_out_and_the_work(table: Table) -> None:
    measured = ranges(table(shapes=[(64, 64, 64), (256, 256, 256)]), ["m", "k", "n"])
    asked = table(shapes=[(128, 128, 128), (64, 64, 16), (512, 1024, 256)], patterns=["dense"], sparsities=(0.0,))
    away = octaves(asked, measured)
    np.testing.assert_allclose(away["smallest"], [0, 2, 0])
    # 512 x 1024 x 256 is one octave out in m and two in k, so three in work.
    np.testing.assert_allclose(away["largest"], [0, 0, 3])


def test_families_are_of_convolutions_by_kernel_and_stride_and_of_linear_layers_by_aspect(table: Table) -> None:
    linear = table(shapes=[(64, 32, 1), (128, 32, 7), (32, 64, 1), (64, 64, 1)], patterns=["dense"], sparsities=(0,))
    convolutions = linear.iloc[:3].assign(
        op="conv2d", kh=[3, 3, 1], kw=[3, 3, 1], stride_h=[1, 2, 1], stride_w=[1, 2, 1]
    )
    X = pd.concat([linear, convolutions], ignore_index=True)
    np.testing.assert_array_equal(families(X), [0, 0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(families(linear), [0, 0, 1, 2])


def test_every_row_is_held_out_once_in_shapes_and_in_families(table: Table) -> None:
    found = hold_outs(table())
    assert list(found) == ["shapes", "layer families", "smallest fifth", "largest fifth"]
    for name in ("shapes", "layer families"):
        np.testing.assert_array_equal(np.sum(found[name], axis=0), np.ones(len(table())))
