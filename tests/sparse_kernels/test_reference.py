import math

import numpy as np
import pytest
import torch

from sparse_kernels import (
    NM,
    BlockWise,
    Conv2dShape,
    Dense,
    MissingLibrary,
    ShflBW,
    UnknownKernel,
    Unstructured,
    VectorWise,
    matmul,
    oracle,
    pack,
    prepare,
    prepare_conv2d,
    registry,
    unpack,
)

PATTERNS = [
    Dense(),
    Unstructured(),
    NM(2, 4),
    NM(1, 3),
    BlockWise(4, 8),
    VectorWise(4),
    VectorWise(32),
    ShflBW(4),
    ShflBW(7),
]
SIZES = [(1, 1, 1), (7, 5, 0), (13, 17, 3), (37, 130, 9)]
CONVOLUTIONS = [
    Conv2dShape(2, 3, 9, 7, 5, 3, 2, (2, 1), (1, 2), (1, 2)),
    Conv2dShape(3, 4, 5, 5, 8, 1, 1, (2, 2)),
    Conv2dShape(1, 4, 4, 6, 9, 3, 3, padding=(1, 1)),
    Conv2dShape(0, 4, 5, 5, 8, 3, 3),
]


def packed_weight(rng, pattern, m, k, sparsity=0.5):
    weight = rng.standard_normal((m, k)).astype(np.float32)
    kept = 0 if isinstance(pattern, Dense) else pattern.sparsity if isinstance(pattern, NM) else sparsity
    return pack(weight, pattern.mask(weight.astype(float) ** 2, kept), pattern)


def by_hand(packed, x, bias, activation):
    """The product in float64 Python sums, the activation from math.erf: nothing of the package but unpack."""
    weight = unpack(packed)
    y = np.empty((len(weight), x.shape[1]))
    for i, j in np.ndindex(y.shape):
        z = math.fsum(float(w) * float(v) for w, v in zip(weight[i], x[:, j], strict=True))
        z += 0 if bias is None else float(bias[i])
        y[i, j] = max(z, 0) if activation == "relu" else z * (1 + math.erf(z / math.sqrt(2))) / 2 if activation else z
    return y


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_linear_is_the_product(rng, pattern, size, with_bias, activation):
    m, k, n = size
    packed = packed_weight(rng, pattern, m, k)
    x = rng.standard_normal((k, n)).astype(np.float32)
    bias = rng.standard_normal(m).astype(np.float32) if with_bias else None
    y = prepare(packed, "reference", "feature_major", n)(x, bias, activation)
    assert y.dtype == np.float32
    oracle.check(y, packed, x, bias=bias, activation=activation)
    np.testing.assert_allclose(y, by_hand(packed, x, bias, activation), atol=1e-4)
    z = prepare(packed, "reference", "token_major", n)(np.ascontiguousarray(x.T), bias, activation)
    oracle.check(z, packed, x.T, bias=bias, activation=activation, layout="token_major")
    assert z.flags.c_contiguous
    np.testing.assert_allclose(z, y.T, atol=1e-4)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_whole_numbers_come_out_exactly(rng, pattern):
    weight, x = oracle.build_exact_operands(rng, 37, 130, 5)
    kept = 0 if isinstance(pattern, Dense) else pattern.sparsity if isinstance(pattern, NM) else 0.5
    packed = pack(weight, pattern.mask(np.abs(weight), kept), pattern)
    expected = unpack(packed).astype(np.int64) @ x.astype(np.int64)
    np.testing.assert_array_equal(matmul(packed, x, backend="reference"), expected)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=range(len(CONVOLUTIONS)))
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_convolution_is_that_of_torch(rng, pattern, shape, activation):
    packed = packed_weight(rng, pattern, shape.m, shape.k)
    x = rng.standard_normal((shape.batch, shape.c_in, shape.h, shape.w)).astype(np.float32)
    bias = rng.standard_normal(shape.c_out).astype(np.float32)
    y = prepare_conv2d(packed, shape, "reference")(x, bias, activation)
    kernel = torch.tensor(unpack(packed), dtype=torch.float64)
    kernel = kernel.reshape(shape.c_out, shape.kh, shape.kw, shape.c_in).permute(0, 3, 1, 2)
    expected = torch.nn.functional.conv2d(
        torch.tensor(x, dtype=torch.float64),
        kernel,
        torch.tensor(bias, dtype=torch.float64),
        shape.stride,
        shape.padding,
        shape.dilation,
    )
    if activation:
        expected = getattr(torch.nn.functional, activation)(expected)
    assert y.shape == (shape.batch, shape.c_out, shape.out_h, shape.out_w)
    assert y.flags.c_contiguous
    np.testing.assert_allclose(y, expected.numpy(), atol=1e-4)
    oracle.check_conv2d(y, packed, shape, x, bias=bias, activation=activation)


@pytest.mark.parametrize("pattern", [Unstructured(), BlockWise(4, 4), VectorWise(4), ShflBW(4)], ids=str)
def test_an_empty_weight_gives_the_bias(rng, pattern):
    packed = packed_weight(rng, pattern, 9, 6, sparsity=1)
    bias = rng.standard_normal(9).astype(np.float32)
    y = prepare(packed, "reference", "feature_major", 2)(np.ones((6, 2), np.float32), bias)
    np.testing.assert_array_equal(y, np.stack([bias, bias], axis=1))


def test_a_plan_runs_any_n_and_any_batch(rng):
    plan = prepare(packed_weight(rng, VectorWise(4), 9, 6), "reference", "token_major", 128)
    assert plan(np.ones((0, 6), np.float32)).shape == (0, 9)
    assert plan(np.ones((3, 6), np.float32)).shape == (3, 9)
    shape = Conv2dShape(2, 3, 4, 4, 5, 3, 3)
    convolution = prepare_conv2d(packed_weight(rng, VectorWise(4), 5, 27), shape, "reference")
    assert convolution(np.ones((7, 3, 4, 4), np.float32)).shape == (7, 5, 2, 2)


def test_out_is_written_and_returned(rng):
    packed = packed_weight(rng, ShflBW(4), 9, 6)
    x = rng.standard_normal((4, 6)).astype(np.float32)
    out = np.full((4, 9), np.nan, np.float32)
    plan = prepare(packed, "reference", "token_major", 4)
    assert plan(x, out=out) is out
    np.testing.assert_array_equal(out, plan(x))


def test_x_may_have_any_strides(rng):
    plan = prepare(packed_weight(rng, VectorWise(4), 9, 6), "reference", "feature_major", 4)
    x = rng.standard_normal((12, 8)).astype(np.float32)[::2, ::-2]
    np.testing.assert_array_equal(plan(x), plan(np.ascontiguousarray(x)))


def test_a_plan_says_what_it_is(rng):
    packed = packed_weight(rng, ShflBW(4), 9, 6)
    plan = prepare(packed, "reference", "token_major", 4)
    assert (plan.kernel, plan.layout, plan.nbytes) == ("reference.shflbw", "token_major", packed.nbytes)
    copy = plan.copy()
    assert copy.kernel == plan.kernel
    assert not np.may_share_memory(copy.packed.values, packed.values)
    convolution = prepare_conv2d(packed, Conv2dShape(1, 6, 3, 3, 9, 1, 1), "reference").copy()
    assert (convolution.kernel, convolution.layout) == ("reference.conv2d.shflbw", "nchw")
    assert convolution.nbytes == packed.nbytes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"x": np.ones((7, 3), np.float32)}, r"x must be of shape \(6, any\), not \(7, 3\)"),
        ({"x": np.ones(6, np.float32)}, r"x must be of shape \(6, any\), not \(6,\)"),
        ({"x": np.ones((6, 3))}, "x must be a float32 array, not float64"),
        ({"x": [[1.0]]}, "x must be a float32 array, not list"),
        ({"bias": np.ones(8, np.float32)}, r"bias must be of shape \(9,\), not \(8,\)"),
        ({"bias": np.ones(9)}, "bias must be a float32 array, not float64"),
        ({"activation": "tanh"}, "unknown activation 'tanh': known are None, relu, gelu"),
        ({"out": np.ones((3, 9), np.float32)}, r"out must be of shape \(9, 3\), not \(3, 9\)"),
        ({"out": np.ones((3, 9), np.float32).T}, "out must be C-contiguous and writable"),
        ({"out": np.ones((9, 3))}, "out must be a float32 array, not float64"),
    ],
    ids=lambda it: it.replace("\\", "") if isinstance(it, str) else "",
)
def test_what_a_plan_cannot_run_is_said(rng, arguments, said):
    plan = prepare(packed_weight(rng, VectorWise(4), 9, 6), "reference", "feature_major", 3)
    with pytest.raises((ValueError, TypeError), match=said):
        plan(**{"x": np.ones((6, 3), np.float32), **arguments})


def test_out_may_not_be_a_part_of_x(rng):
    plan = prepare(packed_weight(rng, VectorWise(4), 6, 6), "reference", "feature_major", 3)
    x = np.ones((6, 3), np.float32)
    with pytest.raises(ValueError, match="out must not share memory with x"):
        plan(x, out=x)


def test_what_cannot_be_prepared_is_said(rng):
    packed = packed_weight(rng, VectorWise(4), 9, 6)
    with pytest.raises(
        ValueError, match="unknown layout 'nchw' of a linear layer: known are feature_major, token_major"
    ):
        prepare(packed, "reference", "nchw", 1)
    with pytest.raises(ValueError, match="a number of columns of at least 0, not -1"):
        prepare(packed, "reference", "token_major", -1)
    with pytest.raises(
        UnknownKernel, match="no backend 'abacus' for vector linear: known are cupy, numba, numba_cuda, ref"
    ):
        prepare(packed, "abacus", "token_major", 1)
    with pytest.raises(ValueError, match="unknown layout 'nhwc' of a convolution: known are nchw, chwn"):
        prepare_conv2d(packed, Conv2dShape(1, 6, 3, 3, 9, 1, 1), "reference", "nhwc")
    with pytest.raises(ValueError, match="backend reference takes convolutions in layout nchw, not chwn"):
        prepare_conv2d(packed, Conv2dShape(1, 6, 3, 3, 9, 1, 1), "reference", "chwn")
    with pytest.raises(ValueError, match=r"the packed weight is \(9, 6\), and .* needs \(9, 54\)"):
        prepare_conv2d(packed, Conv2dShape(1, 6, 3, 3, 9, 3, 3), "reference")


def test_an_unknown_format_or_operation_lists_what_is_known():
    with pytest.raises(UnknownKernel, match="no kernel for vector conv3d: known are block conv2d, block linear"):
        registry.find_kernel("vector", "conv3d", "reference")


def test_a_missing_library_is_said_with_its_remedy(monkeypatch):
    monkeypatch.setitem(registry.KERNELS, ("dense", "linear", "far"), "no_such_library_here:prepare")
    with pytest.raises(MissingLibrary, match="'far' needs no_such_library_here, which is not installed: pip install"):
        registry.find_kernel("dense", "linear", "far")


def test_a_hole_in_the_package_itself_is_no_missing_library(monkeypatch):
    monkeypatch.setitem(registry.KERNELS, ("dense", "linear", "far"), "sparse_kernels.no_such_module:prepare")
    with pytest.raises(ModuleNotFoundError, match=r"sparse_kernels\.no_such_module"):
        registry.find_kernel("dense", "linear", "far")


def test_every_registered_name_is_of_the_package():
    assert all(target.startswith("sparse_kernels.") for target in registry.KERNELS.values())
    formats = {pattern.format for pattern in PATTERNS}
    operations = {"linear", "conv2d"}
    in_bytes = {("int8", "linear"), ("int8", "conv2d"), ("int8-weights", "linear")}  # of every format
    known = {(format, op) for format in formats for op in operations}
    assert {known[:2] for known in registry.KERNELS} == known | in_bytes
