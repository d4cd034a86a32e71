import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_kernels import ShflBW, Unstructured, VectorWise
from sparse_kernels.shuffle import cluster, group_rows

quick = settings(deadline=None, derandomize=True, max_examples=30)


def retained(scores, mask):
    return scores[mask].sum() / scores.sum()


def profiled_rows(rng, m, k, profiles):
    """Scores whose rows follow one of a few column profiles, in random order: what training often leaves."""
    weight = np.exp(rng.standard_normal((profiles, k)))[rng.integers(profiles, size=m)] * rng.standard_normal((m, k))
    return weight**2


@quick
@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 12), st.integers(1, 9), st.floats(0, 1))
def test_never_retains_less_than_consecutive_rows(seed, m, k, v, sparsity):
    scores = np.random.default_rng(seed).exponential(size=(m, k))
    shuffled, plain = ShflBW(v).mask(scores, sparsity), VectorWise(v).mask(scores, sparsity)
    assert scores[shuffled].sum() >= scores[plain].sum() * (1 - 1e-12)
    assert abs(shuffled.sum() - (1 - sparsity) * m * k) == pytest.approx(abs(plain.sum() - (1 - sparsity) * m * k))


@quick
@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 12), st.integers(1, 9), st.floats(0, 1))
def test_an_order_holds_every_row_once(seed, m, k, v, sparsity):
    rng = np.random.default_rng(seed)
    scores = rng.exponential(size=(m, k))
    assert sorted(group_rows(scores, v, sparsity, rng)) == list(range(m))
    assert sorted(cluster(scores.astype(np.float32), v, rng)) == list(range(m))


@pytest.mark.parametrize("tail", [0, 3])
def test_planted_groups_are_found(rng, tail):
    v, groups, k = 8, 6, 96
    columns = rng.random((groups + (tail > 0), k)).argsort(axis=1) < k // 4
    planted = np.repeat(columns, v, axis=0)[: groups * v + tail]
    scores = (rng.uniform(0.5, 1.5, planted.shape) * planted)[rng.permutation(len(planted))]
    sparsity = 1 - planted.mean()
    assert retained(scores, VectorWise(v).mask(scores, sparsity)) < 0.7
    assert retained(scores, ShflBW(v).mask(scores, sparsity)) > 0.999


def test_rows_that_follow_profiles_gain_most_of_what_is_lost(rng):
    scores = profiled_rows(rng, 256, 256, profiles=16)
    plain, shuffled, free = (
        retained(scores, pattern.mask(scores, 0.75)) for pattern in (VectorWise(16), ShflBW(16), Unstructured())
    )
    assert shuffled - plain > 0.6 * (free - plain)


def test_the_same_generator_state_gives_the_same_order():
    scores = profiled_rows(np.random.default_rng(1), 60, 40, profiles=5)
    first, second = (group_rows(scores, 8, 0.7, np.random.default_rng(7)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("layer", ["layer2.2.conv1", "layer3.4.conv2"])
def test_trained_convolutions_retain_more_than_consecutive_rows_and_than_clustering(data, layer, sparsity):
    import torch

    checkpoint = torch.load(data / "resnet_cifar10" / "resnet32-d509ac18.th", weights_only=True, map_location="cpu")
    weight = checkpoint["state_dict"][f"module.{layer}.weight"]
    scores = weight.permute(0, 2, 3, 1).reshape(len(weight), -1).double().numpy() ** 2
    order = cluster(Unstructured().mask(scores, sparsity).astype(np.float32), 8, np.random.default_rng(0))
    clustered = retained(scores[order], VectorWise(8).mask(scores[order], sparsity))
    plain = retained(scores, VectorWise(8).mask(scores, sparsity))
    shuffled = retained(scores, ShflBW(8).mask(scores, sparsity))
    assert shuffled > clustered + 0.005
    assert shuffled > plain + 0.01
