"""Random layers for GPUs, and an oracle that lets half precision pass and nothing worse."""

import dataclasses
import math
import zlib

import numpy as np
import pytest

from latbench.backends.gpu.gpu_layers import (
    ROUNDOFF,
    build_gpu_layer,
    build_random_mask,
    check_product,
    convert_to_bits,
    round_to,
)
from latbench.sweeping import gpu_points
from latbench.sweeping.gpu_points import build_gpu_point
from sparse_kernels import formats
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorNM, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

DTYPES = ["float16", "bfloat16"]


@pytest.mark.parametrize(
    "pattern",
    [Unstructured(), BlockWise(16, 8), VectorWise(8), ShflBW(8), NM(2, 4), NM(3, 7), NM(9, 20), VectorNM(8, 2, 8)],
)
@pytest.mark.parametrize("size", [(64, 96), (67, 43), (5, 131)])
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_random_masks_are_of_their_pattern(
    rng: np.random.Generator, pattern: Pattern, size: tuple[int, int], sparsity: float
) -> None:
    if isinstance(pattern, NM | VectorNM):
        sparsity = pattern.sparsity
    mask = build_random_mask(rng, pattern, size, sparsity)
    weight = rng.standard_normal(size).astype(np.float32) * mask
    packed = formats.pack(weight, mask, pattern)  # refuses what is not of the pattern
    assert np.array_equal(formats.unpack(packed), weight)


@pytest.mark.parametrize("pattern", [Unstructured(), BlockWise(8, 8), VectorWise(16), ShflBW(16)])
def test_random_masks_keep_as_many_as_asked_for(rng: np.random.Generator, pattern: Pattern) -> None:
    for sparsity in (0.5, 0.75, 0.95):
        mask = build_random_mask(rng, pattern, (128, 160), sparsity)
        unit = 64 if isinstance(pattern, BlockWise) else 16
        assert abs(int(mask.sum()) - (1 - sparsity) * mask.size) <= unit / 2
    assert build_random_mask(rng, Dense(), (3, 5), 0.0).all()


def test_every_choice_of_a_group_occurs(rng: np.random.Generator) -> None:
    groups = build_random_mask(rng, NM(2, 4), (200, 40), 0.5).reshape(-1, 4)
    kinds, counts = np.unique(groups, axis=0, return_counts=True)
    assert len(kinds) == 6 and (groups.sum(axis=1) == 2).all()
    assert np.abs(counts - 2000 / 6).max() < 6 * math.sqrt(2000 * 5 / 36)


def test_a_point_has_one_layer_and_another_point_another(rng: np.random.Generator) -> None:
    shape = LinearShape(32, 48, 8)
    three = [
        build_gpu_point("x", shape, VectorWise(8), sparsity, gpu_points.OURS[0], seed=seed)
        for sparsity, seed in ((0.5, 0), (0.75, 0), (0.5, 1))
    ]
    layers = [build_gpu_layer(point) for point in three]
    assert np.array_equal(build_gpu_layer(three[0]).weight, layers[0].weight)
    assert not np.array_equal(layers[1].mask, layers[0].mask) and not np.array_equal(layers[2].mask, layers[0].mask)
    assert np.array_equal(layers[1].x, layers[0].x)  # the same activations for every pattern
    both = layers[0].mask & layers[1].mask
    assert both.any() and np.array_equal(layers[0].weight[both], layers[1].weight[both])
    assert not np.array_equal(layers[2].x, layers[0].x)
    assert np.array_equal(formats.unpack(layers[0].packed), layers[0].weight)
    assert layers[0].x.shape == (48, 8)
    convolution = build_gpu_point("x", Conv2dShape(2, 8, 5, 6, 16, 3, 3), VectorWise(8), 0.5, gpu_points.OURS_CONV[0])
    layer = build_gpu_layer(convolution)
    assert layer.x.shape == (2, 8, 5, 6) and layer.weight.shape == (16, 72)


@pytest.mark.parametrize("shape", [LinearShape(67, 43, 8), Conv2dShape(1, 5, 6, 6, 67, 3, 3)], ids=["linear", "conv"])
@pytest.mark.parametrize(
    "pattern", [Dense(), Unstructured(), BlockWise(16, 8), VectorWise(8), ShflBW(8), NM(2, 4)], ids=str
)
def test_a_layer_counts_what_its_packed_weight_holds(pattern: Pattern, shape: Shape) -> None:
    sparsity = 0.0 if isinstance(pattern, Dense) else 0.5
    layer = build_gpu_layer(build_gpu_point("x", shape, pattern, sparsity, gpu_points.OURS[0]))
    assert layer.nnz == layer.packed.nnz == np.count_nonzero(layer.weight)
    assert layer.terms == max(np.count_nonzero(row) for row in layer.weight)


def test_kernels_for_the_same_weights_share_them() -> None:
    shape = LinearShape(32, 48, 8)
    first, again = (
        build_gpu_point("x", shape, VectorWise(8), 0.5, kernel) for kernel in (gpu_points.OURS[0], gpu_points.BSR[0])
    )
    layer = build_gpu_layer(first)
    assert build_gpu_layer(again) is layer and layer.packed is layer.packed
    other = build_gpu_layer(dataclasses.replace(first, dtype="bfloat16"))
    assert not np.array_equal(other.weight, layer.weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_are_what_the_element_type_holds(dtype: str) -> None:
    point = build_gpu_point("x", LinearShape(16, 32, 4), Dense(), 0.0, gpu_points.DENSE[0])
    layer = build_gpu_layer(dataclasses.replace(point, dtype=dtype))
    for array in (layer.weight, layer.x):
        assert np.array_equal(round_to(array, dtype), array)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_to_the_nearest_and_to_even(rng: np.random.Generator, dtype: str) -> None:
    import torch

    array = np.concatenate([rng.standard_normal(1000), [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 65504, 1e-7]])
    array = array.astype(np.float32)
    expected = torch.from_numpy(array).to(getattr(torch, dtype))
    assert np.array_equal(round_to(array, dtype), expected.float().numpy())
    assert np.array_equal(convert_to_bits(array, dtype).view(np.uint16), expected.view(torch.uint16).numpy())


def test_only_half_precisions_have_bits() -> None:
    with pytest.raises(ValueError, match="float16 or bfloat16, not float64"):
        convert_to_bits(np.zeros(3, np.float32), "float64")


def operands(rng: np.random.Generator, dtype: str, m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    weight = round_to((rng.standard_normal((m, k)) / k**0.5).astype(np.float32), dtype)
    weight *= rng.random((m, k)) < 0.5
    return weight, round_to(rng.standard_normal((k, n)).astype(np.float32), dtype)


def verdict(y: np.ndarray, weight: np.ndarray, x: np.ndarray, dtype: str) -> float:
    terms = int(np.count_nonzero(weight, axis=1).max(initial=0))
    return check_product(
        y.astype(np.float64), weight.astype(np.float64), x.astype(np.float64), terms=terms, dtype=dtype
    )


def chopped_sums(weight: np.ndarray, x: np.ndarray, step: int) -> np.ndarray:
    """The product with float32 sums that are chopped after every `step` terms, as tensor cores add."""
    total = np.zeros((weight.shape[0], x.shape[1]), np.float64)
    for begin in range(0, weight.shape[1], step):
        total += weight[:, begin : begin + step].astype(np.float64) @ x[begin : begin + step].astype(np.float64)
        nearest = total.astype(np.float32)
        away = np.abs(nearest.astype(np.float64)) > np.abs(total)
        total = np.where(away, np.nextafter(nearest, np.float32(0)), nearest).astype(np.float64)
    return total.astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "n"), [(16, 64, 8), (7, 1000, 5), (1, 1, 1), (33, 4096, 3)])
def test_float32_sums_pass_whether_rounded_or_chopped(
    rng: np.random.Generator, dtype: str, m: int, k: int, n: int
) -> None:
    weight, x = operands(rng, dtype, m, k, n)
    for sums in (weight @ x, chopped_sums(weight, x, 4), chopped_sums(weight, x, 16)):
        error = verdict(round_to(sums, dtype), weight, x, dtype)
        assert 0 <= error <= ROUNDOFF[dtype] * 1.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_split_into_parts_of_the_element_type_pass_where_that_is_allowed(
    rng: np.random.Generator, dtype: str
) -> None:
    weight, x = operands(rng, dtype, 64, 512, 24)
    split = np.zeros((64, 24), np.float32)
    for begin in range(0, 512, 32):  # as cuBLAS does, in its worst order
        split = round_to(split + round_to(weight[:, begin : begin + 32] @ x[begin : begin + 32], dtype), dtype)
    right, wrong = weight.astype(np.float64), weight.copy()
    wrong[:, :256] = 0
    with pytest.raises(WrongResult):
        verdict(split, weight, x, dtype)
    wide = x.astype(np.float64)
    assert check_product(split.astype(np.float64), right, wide, terms=512, dtype=dtype, parts=16) > 0
    with pytest.raises(WrongResult):
        check_product(wrong.astype(np.float64) @ wide, right, wide, terms=512, dtype=dtype, parts=16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_known_wrong_results_fail(rng: np.random.Generator, dtype: str) -> None:
    weight, x = operands(rng, dtype, 64, 512, 24)
    right = round_to(weight @ x, dtype)
    assert verdict(right, weight, x, dtype) > 0
    dropped = weight.copy()
    dropped[:, -16:] = 0
    halves = np.zeros((64, 24), np.float32)
    for begin in range(0, 512, 16):
        halves = round_to(halves + weight[:, begin : begin + 16] @ x[begin : begin + 16], dtype)
    missing = right.copy()
    missing[3, 5] = np.nan
    wrong = {
        "the last tile dropped": round_to(dropped @ x, dtype),
        "sums in half precision": halves,
        "two rows swapped": right[[1, 0, *range(2, 64)]],
        "not a number": missing,
        "chopped at the end": np.nextafter(right.astype(np.float16), np.float16(0)).astype(np.float32) * 0.99,
    }
    for name, y in wrong.items():
        with pytest.raises(WrongResult, match="results are wrong"):
            verdict(y, weight, x, dtype)
            pytest.fail(f"{name} passed")


def test_a_result_of_another_shape_is_wrong(rng: np.random.Generator) -> None:
    weight, x = operands(rng, "float16", 8, 16, 4)
    with pytest.raises(WrongResult, match=r"has shape \(4, 8\), expected \(8, 4\)"):
        verdict((weight @ x).T, weight, x, "float16")


def test_the_oracle_takes_tensors_as_well(rng: np.random.Generator) -> None:
    import torch

    weight, x = operands(rng, "float16", 16, 64, 8)
    tensors = [torch.from_numpy(array).double() for array in (round_to(weight @ x, "float16"), weight, x)]
    error = check_product(*tensors, terms=64, dtype="float16")
    assert error == pytest.approx(verdict(round_to(weight @ x, "float16"), weight, x, "float16"))
    tensors[0][2, 3] += 1
    with pytest.raises(WrongResult, match="1 of 128 results are wrong; the first is feature 2, column 3"):
        check_product(*tensors, terms=64, dtype="float16")


def test_an_empty_result_is_right() -> None:
    empty = np.zeros((3, 0))
    assert check_product(empty, np.ones((3, 4)), np.zeros((4, 0)), terms=4, dtype="float16") == 0.0


def test_the_seed_is_the_points_own() -> None:
    # Two shapes whose text is alike must not share weights: the seed is a checksum of everything that the text says.
    texts = {f"{LinearShape(m, 8, 8)} {VectorWise(v)} {s}" for m in (8, 16) for v in (8, 16) for s in (0.5, 0.75)}
    assert len({zlib.crc32(text.encode()) for text in texts}) == len(texts) == 8
