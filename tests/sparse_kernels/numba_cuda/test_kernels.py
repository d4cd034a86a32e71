"""The kernels against the oracle: on a GPU where there is one, else in Numba's simulator (see test_simulator.py)."""

import dataclasses
import functools
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType

import numba
import numpy as np
import pytest

from sparse_kernels import oracle
from sparse_kernels.formats import pack, unpack
from sparse_kernels.numba_cuda import layouts, numba_cuda_plan
from sparse_kernels.numba_cuda.library import cuda
from sparse_kernels.numba_cuda.tile import ThreadBlockTile
from sparse_kernels.numba_cuda.transpose import transpose
from sparse_kernels.patterns import NM, BlockWise, Dense, ShflBW, Unstructured, VectorWise
from sparse_kernels.plan_protocol import LAYOUTS
from sparse_kernels.reference import finish
from sparse_kernels.shapes import Conv2dShape

SIMULATED = bool(numba.config.ENABLE_CUDASIM)

if not cuda.is_available():
    pytest.skip("no GPU; test_simulator.py runs this file in the simulator", allow_module_level=True)

# On a GPU other people's libraries may warn of what they like.
pytestmark = [] if SIMULATED else [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

PATTERNS = [
    Dense(),
    Unstructured(),
    NM(2, 4),
    NM(1, 3),
    BlockWise(3, 5),
    BlockWise(8, 4),
    VectorWise(3),
    VectorWise(8),
    ShflBW(4),
]

SHAPES = [
    Conv2dShape(2, 4, 5, 6, 5, 3, 3, padding=(1, 1)),
    Conv2dShape(1, 4, 7, 9, 6, 3, 2, (2, 3), (2, 1), (1, 2)),
    Conv2dShape(3, 4, 3, 2, 7, 1, 1),
]


@pytest.fixture(autouse=True, scope="module")
def quick_and_strict_simulator():
    """Threads of the simulator take turns quickly, a transpose has few of them, and shared memory starts as NaN."""
    if not SIMULATED:
        yield
        return
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    lock = threading.Lock()
    before, interval = FakeCUDAShared.array, sys.getswitchinterval()

    def array(self, shape, dtype):
        line = traceback.extract_stack(sys._getframe())[-2][:2]
        with lock:  # threads of a block race for who allocates
            if line not in self._allocations:
                self._allocations[line] = np.full(shape, np.nan, np.dtype(str(dtype)))
            return self._allocations[line]

    FakeCUDAShared.array = array
    numba_cuda_plan.transpose = functools.partial(transpose, side=4, warps=2)
    sys.setswitchinterval(1e-4)  # the simulator waits for its threads in a busy loop
    yield
    FakeCUDAShared.array = before
    numba_cuda_plan.transpose = transpose
    sys.setswitchinterval(interval)


def tile_of(pattern):
    """A tile so small that matrices of a few rows and columns have several, and several stages."""
    match pattern:
        case Unstructured():
            return ThreadBlockTile(2, 2, 1, 1, 0)
        case NM():
            return ThreadBlockTile(2, 2, 1, 2, 2 * pattern.of)
        case VectorWise(v=3):
            return ThreadBlockTile(2, 3, 1, 3, 4)
    return ThreadBlockTile(2, 2, 2, 2, 4)


def packed_of(pattern, weight, sparsity=0.5):
    kept = 0 if isinstance(pattern, Dense) else pattern.sparsity if isinstance(pattern, NM) else sparsity
    return pack(weight, pattern.mask(weight.astype(float) ** 2, kept), pattern)


def run(prepared, x, bias=None, activation=None):
    """y (m, n) of x (k, n), NumPy to NumPy, in the layout of the prepared plan; NaN where nothing was written."""
    turn = prepared.layout == "token_major"
    x = np.ascontiguousarray(x.T if turn else x, prepared.dtype)
    y = call(
        prepared, x, (x.shape[0], prepared.shape[0]) if turn else (prepared.shape[0], x.shape[1]), bias, activation
    )
    return y.T if turn else y


def convolve(prepared, x, bias=None, activation=None):
    """The same for a convolution of x (batch, c_in, h, w)."""
    s = prepared.shape
    return call(prepared, x.astype(prepared.dtype), (len(x), s.c_out, s.out_h, s.out_w), bias, activation)


def call(prepared, x, shape, bias, activation):
    out = cuda.to_device(np.full(shape, np.nan, prepared.dtype))
    bias = None if bias is None else cuda.to_device(bias)
    return prepared(cuda.to_device(x), bias, activation, out).copy_to_host()


def images(rng, shape):
    return oracle.build_exact_operands(rng, 1, shape.c_in, shape.batch * shape.h * shape.w)[1].reshape(
        shape.batch, shape.c_in, shape.h, shape.w
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_nothing_is_dropped_repeated_or_rounded(rng, pattern, layout):
    for m, k, n in [(1, 1, 1), (9, 14, 5), (13, 11, 9)]:
        weight, x = oracle.build_exact_operands(rng, m, k, n)
        packed = packed_of(pattern, weight)
        prepared = numba_cuda_plan.prepare_numba_cuda_linear(packed, layout, n, tile=tile_of(pattern))
        np.testing.assert_array_equal(run(prepared, x), unpack(packed).astype(float) @ x)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_tiles_of_a_gpu_are_whole(rng, pattern):
    m, k, n = 5, 70, 37
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    packed = packed_of(pattern, weight)
    np.testing.assert_array_equal(
        run(numba_cuda_plan.prepare_numba_cuda_linear(packed, "feature_major", n), x),
        unpack(packed).astype(float) @ x,
    )


@pytest.mark.skipif(SIMULATED, reason="a GPU has the time")
@pytest.mark.parametrize("dtype", numba_cuda_plan.DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", [*PATTERNS, NM(1, 100), BlockWise(64, 32), VectorWise(128), ShflBW(32)], ids=str)
def test_layers_of_real_size(rng, pattern, layout, dtype):
    m, k, n = 517, 1031, 777
    weight = rng.standard_normal((m, k)).astype(dtype).astype(np.float32)
    x = rng.standard_normal((k, n)).astype(dtype).astype(np.float32)
    bias = rng.standard_normal(m).astype(np.float32)
    packed = packed_of(pattern, weight, 0.75)
    y = run(numba_cuda_plan.prepare_numba_cuda_linear(packed, layout, n, dtype), x, bias, "gelu")
    check(y, packed, x, bias, "gelu")


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("pattern", [Dense(), Unstructured(), NM(2, 4), BlockWise(3, 5), ShflBW(4)], ids=str)
def test_bias_and_activation_are_those_of_the_oracle(rng, pattern, activation):
    m, k, n = 9, 14, 5
    packed = packed_of(pattern, rng.standard_normal((m, k)).astype(np.float32))
    x, bias = rng.standard_normal((k, n)).astype(np.float32), rng.standard_normal(m).astype(np.float32)
    prepared = numba_cuda_plan.prepare_numba_cuda_linear(packed, "feature_major", n, tile=tile_of(pattern))
    oracle.check(run(prepared, x, bias, activation), packed, x, bias=bias, activation=activation)


def check(y, packed, x, bias, activation):
    """y float16 or float32 against float64: sums in float32, then rounded once, by half a unit in the last place.

    x and the weight are exact in y's type.
    """
    if y.dtype == np.float32:
        oracle.check(y, packed, x, bias=bias, activation=activation)
        return
    weight, x = unpack(packed).astype(float), x.astype(float)
    terms = np.count_nonzero(weight, axis=1).max() + 1
    scale = finish(np.abs(weight) @ np.abs(x), np.abs(bias).astype(float), None)
    before = finish(weight @ x, bias.astype(float), None)
    expected = finish(before, None, activation)
    bound = terms * oracle.UNIT_ROUNDOFF / (1 - terms * oracle.UNIT_ROUNDOFF) * scale
    if activation == "gelu":
        bound = oracle.GELU_SLOPE * bound + oracle.GELU_EVALUATION * (np.abs(before) + bound)
    bound += 2.0**-11 * (np.abs(expected) + bound) + 2.0**-25  # the last where the result is subnormal
    wrong = ~(np.abs(y.astype(float) - expected) <= bound)
    assert not wrong.any(), f"{np.count_nonzero(wrong)} of {wrong.size} results are wrong"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_float16_is_summed_in_float32_and_rounded_once(rng, pattern, layout):
    m, k, n = 7, 60, 3
    weight = rng.standard_normal((m, k)).astype(np.float16).astype(np.float32)
    x = rng.standard_normal((k, n)).astype(np.float16).astype(np.float32)
    bias = rng.standard_normal(m).astype(np.float32)
    packed = packed_of(pattern, weight)
    y = run(
        numba_cuda_plan.prepare_numba_cuda_linear(packed, layout, n, "float16", tile_of(pattern)), x, bias, "gelu"
    )
    assert y.dtype == np.float16
    check(y, packed, x, bias, "gelu")


def test_sums_in_float16_would_be_caught():
    # Float16 has no odd numbers over 2,048: a sum of 3,000 ones stops there, whatever the seed.
    weight, x = np.ones((1, 3000), np.float32), np.ones((3000, 2), np.float32)
    packed = packed_of(Dense(), weight)
    sums = np.zeros((1, 2), np.float16)
    for row in x.astype(np.float16):
        sums += row
    assert sums.tolist() == [[2048, 2048]]
    with pytest.raises(AssertionError, match="results are wrong"):
        check(sums, packed, x, np.zeros(1, np.float32), None)


@pytest.mark.parametrize("shape", SHAPES, ids=["padded", "strided and dilated", "1x1"])
@pytest.mark.parametrize("pattern", [Dense(), Unstructured(), NM(2, 4), BlockWise(3, 5), ShflBW(4)], ids=str)
def test_convolutions_are_those_of_the_oracle(rng, pattern, shape):
    weight, _ = oracle.build_exact_operands(rng, shape.m, shape.k, 1)
    packed = packed_of(pattern, weight)
    x, bias = images(rng, shape), np.arange(shape.m, dtype=np.float32)
    prepared = numba_cuda_plan.prepare_conv2d(packed, shape, "nchw", tile=tile_of(pattern))
    assert (
        oracle.check_conv2d(convolve(prepared, x, bias, "relu"), packed, shape, x, bias=bias, activation="relu") == 0
    )


def test_a_convolution_runs_any_batch(rng):
    shape = SHAPES[0]
    packed = packed_of(VectorWise(8), oracle.build_exact_operands(rng, shape.m, shape.k, 1)[0])
    prepared = numba_cuda_plan.prepare_conv2d(packed, shape, "nchw", tile=tile_of(VectorWise(8)))
    x = images(rng, shape)
    for batch in (x[:0], x[1:]):
        oracle.check_conv2d(convolve(prepared, batch), packed, shape, batch)


@pytest.mark.parametrize("pattern", PATTERNS[1:], ids=str)
def test_groups_that_keep_nothing_give_the_bias(rng, pattern):
    m, k, n = 17, 10, 3
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    weight[:8] = 0
    mask = pattern.mask(weight.astype(float) ** 2, getattr(pattern, "sparsity", 0.7))
    if isinstance(pattern, NM):
        mask[:8] = False
    assert not mask[:6].any()
    bias = np.arange(m, dtype=np.float32)
    for kept in (mask, np.zeros_like(mask)):
        packed = pack(weight, kept, pattern)
        y = run(numba_cuda_plan.prepare_numba_cuda_linear(packed, "feature_major", n, tile=tile_of(pattern)), x, bias)
        np.testing.assert_array_equal(y, unpack(packed).astype(float) @ x + bias[:, None])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_out_there_is_a_new_array_even_of_no_columns(rng, layout):
    weight, x = oracle.build_exact_operands(rng, 9, 8, 3)
    packed = packed_of(VectorWise(8), weight)
    prepared = numba_cuda_plan.prepare_numba_cuda_linear(packed, layout, 3, tile=tile_of(VectorWise(8)))
    for columns in (x, x[:, :0]):
        y = prepared(cuda.to_device(np.ascontiguousarray(columns.T if layout == "token_major" else columns)))
        expected = unpack(packed).astype(float) @ columns
        np.testing.assert_array_equal(y.copy_to_host(), expected.T if layout == "token_major" else expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the simulator's 0 * inf where rows are padding
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("pattern", [Dense(), Unstructured(), VectorWise(8), ShflBW(4)], ids=str)
def test_nan_and_infinity_reach_exactly_the_outputs_that_read_them(rng, pattern, activation):
    weight = np.abs(rng.standard_normal((12, 10))).astype(np.float32) + 1
    packed = packed_of(pattern, weight)
    x = np.abs(rng.standard_normal((10, 5))).astype(np.float32)
    x[4, 1], x[9, 3] = np.nan, np.inf
    y = run(
        numba_cuda_plan.prepare_numba_cuda_linear(packed, "feature_major", 5, tile=tile_of(pattern)),
        x,
        None,
        activation,
    )
    kept = unpack(packed) != 0
    expected = np.zeros(y.shape, bool)
    expected[:, 1], expected[:, 3] = kept[:, 4], kept[:, 9]
    np.testing.assert_array_equal(~np.isfinite(y), expected)
    assert np.isnan(y[kept[:, 4], 1]).all()
    assert np.isposinf(y[kept[:, 9], 3]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_nothing_outside_out_is_written(rng, pattern, layout):
    m, k, n = 7, 6, 3
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    packed = packed_of(pattern, weight)
    prepared = numba_cuda_plan.prepare_numba_cuda_linear(packed, layout, n, tile=tile_of(pattern))
    turn = layout == "token_major"
    guarded = cuda.to_device(np.full(3 * m * n, np.float32(-7)))
    out = guarded[m * n : 2 * m * n].reshape(*((n, m) if turn else (m, n)))
    assert prepared(cuda.to_device(np.ascontiguousarray(x.T if turn else x)), out=out) is out
    expected = unpack(packed).astype(float) @ x
    result = guarded.copy_to_host()
    np.testing.assert_array_equal(result[m * n : 2 * m * n], (expected.T if turn else expected).ravel())
    assert (result[: m * n] == -7).all()
    assert (result[2 * m * n :] == -7).all()


def test_a_copy_has_weights_of_its_own(rng):
    weight, x = oracle.build_exact_operands(rng, 9, 8, 3)
    packed = packed_of(ShflBW(4), weight)
    prepared = numba_cuda_plan.prepare_numba_cuda_linear(packed, "feature_major", 3, tile=tile_of(ShflBW(4)))
    copy = prepared.copy()
    assert (copy.kernel, copy.layout, copy.nbytes) == (prepared.kernel, prepared.layout, prepared.nbytes)
    values = prepared.weight.arguments[2]
    values.copy_to_device(np.zeros(values.shape, np.float32))
    np.testing.assert_array_equal(run(copy, x), unpack(packed).astype(float) @ x)
    assert not run(prepared, x).any()


def test_the_bytes_are_those_of_the_format_and_halve_with_float16(rng):
    packed = packed_of(VectorWise(8), oracle.build_exact_operands(rng, 24, 30, 1)[0])
    single, half = (
        numba_cuda_plan.prepare_numba_cuda_linear(packed, "feature_major", 3, dtype)
        for dtype in numba_cuda_plan.DTYPES
    )
    assert single.nbytes == packed.nbytes
    assert single.nbytes - half.nbytes == packed.values.nbytes // 2


def test_wrong_calls_are_refused_in_a_sentence(rng):
    weight, x = oracle.build_exact_operands(rng, 8, 6, 6)
    prepared = numba_cuda_plan.prepare_numba_cuda_linear(packed_of(VectorWise(8), weight), "feature_major", 6)
    on_gpu = cuda.to_device(x)
    with pytest.raises(TypeError, match=r"x must be an array on the GPU.*not ndarray"):
        prepared(x)
    with pytest.raises(TypeError, match="x must be a float32 array, not float64"):
        prepared(cuda.to_device(x.astype(np.float64)))
    with pytest.raises(ValueError, match=r"x must be of shape \(6, any\), not \(5, 6\)"):
        prepared(cuda.to_device(x[:5]))
    with pytest.raises(ValueError, match="x must be C-contiguous"):
        prepared(cuda.to_device(np.zeros((6, 12), np.float32))[:, ::2])  # Numba's own .T is a copy on a GPU
    with pytest.raises(ValueError, match=r"bias must be of shape \(8\), not \(6,\)"):
        prepared(on_gpu, cuda.to_device(np.zeros(6, np.float32)))
    with pytest.raises(ValueError, match=r"out must be of shape \(8, 6\)"):
        prepared(on_gpu, out=cuda.to_device(np.zeros((6, 8), np.float32)))
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        prepared(on_gpu, None, "tanh")
    both = cuda.to_device(np.zeros(14 * 6, np.float32))
    with pytest.raises(ValueError, match="out must not share memory with x"):
        prepared(both[: 6 * 6].reshape(6, 6), out=both[5 * 6 : 13 * 6].reshape(8, 6))
    with pytest.raises(ValueError, match="no bfloat16 kernels: known are float32, float16"):
        numba_cuda_plan.prepare_numba_cuda_linear(packed_of(VectorWise(8), weight), "feature_major", 6, "bfloat16")
    with pytest.raises(ValueError, match="float16 cannot hold a weight of 70000"):
        numba_cuda_plan.prepare_numba_cuda_linear(
            pack(np.full((1, 1), 7e4, np.float32), None, Dense()), "feature_major", 6, "float16"
        )


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (5, 9), (9, 3)])
@pytest.mark.parametrize("dtype", numba_cuda_plan.DTYPES)
def test_a_transpose_moves_every_element(rng, shape, dtype):
    matrix = rng.standard_normal(shape).astype(dtype)
    for square in ({"side": 4, "warps": 2}, {}):
        target = cuda.to_device(np.zeros(shape[::-1], dtype))
        transpose(cuda.to_device(matrix), target, **square)
        np.testing.assert_array_equal(target.copy_to_host(), matrix.T)


# Known-wrong kernels. Each is the kernel with one text of its source replaced, and the oracle must reject it.

MUTANTS = {
    "dense drops the last stage": (Dense(), "range(0, k, depth)", "range(0, k - depth, depth)"),
    "dense forgets the bias": (Dense(), "total + bias[row]", "total"),
    "dense computes before all is there": (Dense(), "cuda.syncthreads()  # all data must be there", "pass  #"),
    "vector drops the last vector": (VectorWise(8), "end = indptr[group + 1]", "end = indptr[group + 1] - 1"),
    "vector ignores its columns": (VectorWise(8), "indices[start + t]", "start + t"),
    "vector ignores row_ids": (ShflBW(4), "row_ids[group * v + inside] if", "group * v + inside if"),
    "vector repeats the first rows of a group": (VectorWise(8), "row_tile % tiles_of_group * height", "0"),
    "block ignores which blocks": (BlockWise(4, 4), "indices[(start + t) // cols] * cols", "start // cols * cols"),
    "block drops the last block": (BlockWise(4, 4), "end = indptr[group + 1]", "end = (indptr[group + 1] - 1)"),
    "block reads x beyond its end": (BlockWise(3, 4), "feature < k", "True"),
    "nm ignores offsets": (NM(2, 4), "int32(offsets[row, group, slot])", "slot"),
    "nm drops the last group": (NM(2, 4), "first_group + groups_staged, groups)", "groups - 1, groups)"),
    "nm drops a slot": (NM(2, 4), "range(keep)", "range(keep - 1)"),
    "csr drops the last element": (Unstructured(), "indptr[row + 1])", "indptr[row + 1] - 1)"),
    "csr ignores its columns": (Unstructured(), "indices[element]", "element % 10"),
}


def mutated(module, old, new):
    """The module with `old` in its source replaced."""
    source = Path(module.__file__).read_text()
    assert old in source, f"{module.__name__} has no {old!r} any more"
    mutant = ModuleType(f"{module.__name__}_mutated")
    sys.modules[mutant.__name__] = mutant  # where dataclasses look for their annotations
    exec(compile(source.replace(old, new), f"{module.__file__}.mutated", "exec"), mutant.__dict__)
    return mutant


@pytest.mark.skipif(not SIMULATED, reason="a wrong kernel may bring down the GPU's context")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_known_wrong_kernels_are_caught(rng, mutant):
    pattern, old, new = MUTANTS[mutant]
    m, k, n = 13, 10, 3
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    packed = packed_of(pattern, weight, 0 if isinstance(pattern, BlockWise) else 0.4)
    bias = np.arange(1, m + 1, dtype=np.float32)
    right = numba_cuda_plan.prepare_numba_cuda_linear(packed, "feature_major", n, tile=tile_of(pattern))
    oracle.check(run(right, x, bias), packed, x, bias=bias)
    format = mutated(numba_cuda_plan.FORMATS[type(packed)], old, new)
    wrong = dataclasses.replace(right, weight=dataclasses.replace(right.weight, format=format))
    with pytest.raises((oracle.WrongResult, IndexError)):
        oracle.check(run(wrong, x, bias), packed, x, bias=bias)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_missing_tile_of_rows_is_caught(rng, pattern):
    m, k, n = 13, 6, 3
    weight, x = oracle.build_exact_operands(rng, m, k, n)
    packed = packed_of(pattern, weight, 0.2)
    right = numba_cuda_plan.prepare_numba_cuda_linear(packed, "feature_major", n, tile=tile_of(pattern))
    wrong = dataclasses.replace(right, weight=dataclasses.replace(right.weight, row_tiles=right.weight.row_tiles - 1))
    with pytest.raises(oracle.WrongResult):
        oracle.check(run(wrong, x), packed, x)


@pytest.mark.skipif(not SIMULATED, reason="a wrong kernel may bring down the GPU's context")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("i * stride_down", "i"),
        ("+ taps[feature, 2]", ""),
        ("x[image, taps[feature, 0]", "x[0, taps[feature, 0]"),
        ("- shape.padding[0]", ""),
        ("0 <= row <", "-row <"),
    ],
)
def test_a_convolution_that_looks_elsewhere_is_caught(rng, old, new):
    shape = Conv2dShape(2, 2, 5, 4, 3, 2, 2, (2, 1), (1, 1))
    packed = packed_of(Dense(), oracle.build_exact_operands(rng, shape.m, shape.k, 1)[0])
    x = images(rng, shape)
    right = numba_cuda_plan.prepare_conv2d(packed, shape, "nchw", tile=tile_of(Dense()))
    mutant = mutated(layouts, old, new)
    wrong_taps = cuda.to_device(mutant.build_taps(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba_cuda_plan, "IMAGES", mutant.IMAGES)
        wrong = dataclasses.replace(right, taps=wrong_taps)
        with pytest.raises((oracle.WrongResult, IndexError)):
            oracle.check_conv2d(convolve(wrong, x), packed, shape, x)
