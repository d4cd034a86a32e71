"""Plans choose a program, upload its weights once and check calls; here on a machine of NumPy and the emulator."""

import subprocess
import sys

import emulator
import numpy as np
import pytest

from sparse_kernels import patterns
from sparse_kernels.cuda import plan as plans
from sparse_kernels.cuda import variants
from sparse_kernels.cuda.program import Launch, NotSupported, Operand, Variant
from sparse_kernels.formats import pack
from sparse_kernels.registry import MissingLibrary

M, K, N = 70, 52, 37


class EmulatedMachine:
    """A GPU whose memory is NumPy's; it notes what it is asked for."""

    def __init__(self, architecture):
        self.architecture = architecture
        self.uploads = []
        self.launched = []
        self.cleared = 0

    def upload(self, array):
        self.uploads.append(array.copy())
        return self.uploads[-1]

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    def clear(self, array):
        array.fill(0)
        self.cleared += 1

    def is_own(self, array):
        return isinstance(array, np.ndarray)

    def share_memory(self, first, second):
        return np.may_share_memory(first, second)

    def kernel(self, variant, shared_bytes):
        def launch(grid, block, arguments):
            self.launched.append((variant, grid, block, shared_bytes, arguments))

        return launch

    def run(self, x, out, bias):
        """What was launched, in the emulator."""

        def operand(argument):
            if isinstance(argument, np.uint64) and argument == 0:
                return Operand.SCRATCH  # the bias is given, so the null pointer is that of no scratch
            for array, name in ((x, Operand.X), (out, Operand.OUT), (bias, Operand.BIAS)):
                if argument is array:
                    return name
            return argument

        launches = [
            Launch(variant, grid, block, shared, tuple(map(operand, arguments)))
            for variant, grid, block, shared, arguments in self.launched
        ]
        emulator.run(launches, x, out, bias, seed=0)


PATTERNS = {
    "dense": (patterns.Dense(), 0.0),
    "vector": (patterns.VectorWise(32), 0.5),
    "shflbw": (patterns.ShflBW(16), 0.5),
    "block": (patterns.BlockWise(16, 16), 0.5),
    "nm": (patterns.NM(2, 4), 0.5),
    "unstructured": (patterns.Unstructured(), 0.8),
}


def weight(rng, name):
    """A packed weight whose elements are whole numbers, and what it is in float64."""
    pattern, sparsity = PATTERNS[name]
    dense = rng.integers(-4, 5, (M, K)).astype(np.float32)
    mask = pattern.mask(np.abs(dense) + rng.random((M, K)), sparsity)
    return pack(dense, mask, pattern), np.where(mask, dense, 0).astype(np.float64)


@pytest.mark.parametrize("name", PATTERNS)
def test_each_format_has_a_kernel_that_multiplies(rng, name):
    packed, dense = weight(rng, name)
    machine = EmulatedMachine("sm_80")
    plan = plans.prepare(packed, "feature_major", N, machine=machine)
    x = rng.integers(-4, 5, (K, N)).astype(np.float16)
    bias = rng.integers(-9, 10, M).astype(np.float32)
    out = np.empty((M, N), np.float16)
    assert plan(x, bias, "relu", out) is out
    machine.run(x, out, bias)
    # Whole numbers below 2048 are exact in a half.
    np.testing.assert_array_equal(out, np.maximum(dense @ x + bias[:, None], 0))


def test_weights_are_uploaded_once_and_a_copy_has_its_own(rng):
    packed, _ = weight(rng, "vector")
    machine = EmulatedMachine("sm_80")
    plan = plans.prepare(packed, "feature_major", N, machine=machine)
    count = len(machine.uploads)
    assert count > 0
    x = np.zeros((K, N), np.float16)
    plan(x)
    plan(x)
    assert len(machine.uploads) == count
    own = plan.copy()
    own(x)
    assert len(machine.uploads) == 2 * count
    first, last = machine.launched[0][-1], machine.launched[-1][-1]
    shared = {id(it) for it in first if isinstance(it, np.ndarray)} & {id(it) for it in last}
    assert shared == {id(x)}


def test_no_columns_need_no_launch(rng):
    packed, _ = weight(rng, "nm")
    machine = EmulatedMachine("sm_80")
    plan = plans.prepare(packed, "feature_major", 0, machine=machine)
    assert plan(np.zeros((K, 0), np.float16)).shape == (M, 0)
    assert machine.launched == []


def test_hopper_kernels_come_first_where_they_can(rng):
    dense = rng.standard_normal((256, 128)).astype(np.float32)
    kernels = {}
    for v in (32, 64):
        packed = pack(dense, patterns.VectorWise(v).mask(np.abs(dense), 0.5), patterns.VectorWise(v))
        kernels[v] = plans.prepare(packed, "feature_major", 256, machine=EmulatedMachine("sm_90a")).kernel
    assert kernels[64] == "cuda.vector_sm90.sm_90a"
    assert kernels[32] == "cuda.vector_matmul.sm_90a"


def test_where_all_refuse_each_says_why(rng, monkeypatch):
    monkeypatch.setitem(variants.LINEAR, "nm", ("vector", "csr"))
    packed, _ = weight(rng, "nm")
    with pytest.raises(NotSupported, match=r"no CUDA kernel runs nm:2:4 on sm_80: the vector .*; the CSR .*"):
        plans.prepare(packed, "feature_major", N, machine=EmulatedMachine("sm_80"))


def test_a_format_without_kernels_is_refused(rng, monkeypatch):
    monkeypatch.delitem(variants.LINEAR, "nm")
    packed, _ = weight(rng, "nm")
    with pytest.raises(
        NotSupported, match="runs a linear layer of format nm: known are dense, vector, shflbw, block"
    ):
        plans.prepare(packed, "feature_major", N, machine=EmulatedMachine("sm_80"))


@pytest.mark.parametrize(("layout", "dtype"), [("token_major", "float16"), ("feature_major", "float32")])
def test_other_layouts_and_element_types_are_refused(rng, layout, dtype):
    packed, _ = weight(rng, "nm")
    with pytest.raises(NotSupported, match=r"the CUDA kernels .* not '?(token_major|float32)"):
        plans.prepare(packed, layout, N, dtype, EmulatedMachine("sm_80"))


X = np.zeros((K, N), np.float16)
WRONG_CALLS = {
    "another dtype": ((X.astype(np.float32),), TypeError, "x must be of dtype float16, not float32"),
    "no array": (([1.0],), TypeError, "x must be a CuPy array, not list"),
    "another length": ((X[1:],), ValueError, r"x must be of shape \(52, any\), not \(51, 37\)"),
    "strided": ((np.zeros((N, K), np.float16).T,), ValueError, "x must be C-contiguous"),
    "bias": ((X, np.zeros(3, np.float32)), ValueError, r"bias must be of shape \(70,\), not \(3,\)"),
    "half bias": ((X, np.zeros(M, np.float16)), TypeError, "bias must be of dtype float32, not float16"),
    "activation": ((X, None, "tanh"), ValueError, "unknown activation 'tanh'"),
    "out": ((X, None, None, np.zeros((M, 3), np.float16)), ValueError, r"out must be of shape \(70, 37\), not"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_call_that_does_not_fit_is_refused(rng, arguments, error, message):
    packed, _ = weight(rng, "nm")
    machine = EmulatedMachine("sm_80")
    plan = plans.prepare(packed, "feature_major", N, machine=machine)
    with pytest.raises(error, match=message):
        plan(*arguments)
    assert machine.launched == []


def test_out_may_not_lie_on_x(rng):
    pattern = patterns.NM(2, 4)
    dense = rng.standard_normal((K, K)).astype(np.float32)
    plan = plans.prepare(
        pack(dense, pattern.mask(np.abs(dense), 0.5), pattern), "feature_major", N, machine=EmulatedMachine("sm_80")
    )
    with pytest.raises(ValueError, match="out must not share memory with x"):
        plan(X, out=X)


class Counter:
    """A program of two launches that ask for scratch."""

    nbytes = 0

    def launches(self, n, activation):
        variant = Variant("none.cu", "none", {}, ("sm_80",))
        arguments = (Operand.SCRATCH, Operand.BIAS, np.int32(n))
        return [Launch(variant, (n, 1, 1), (32, 1, 1), 0, arguments, scratch_bytes=size) for size in (4, 12)]


def test_launches_share_scratch_that_each_call_clears():
    machine = EmulatedMachine("sm_80")
    plan = plans.CudaPlan(Counter(), machine, (K, None), (M, None), "float16", "none", "feature_major")
    plan(X)
    plan(X)
    scratch = [call[-1][0] for call in machine.launched]
    assert len(scratch) == 4
    assert all(it is scratch[0] for it in scratch)  # where a captured graph expects it
    assert scratch[0].nbytes == 12
    assert machine.cleared == 2


def test_a_missing_bias_is_a_null_pointer():
    machine = EmulatedMachine("sm_80")
    plan = plans.CudaPlan(Counter(), machine, (K, None), (M, None), "float16", "none", "feature_major")
    plan(X)
    null = machine.launched[0][-1][1]
    assert (null.dtype, int(null)) == (np.uint64, 0)


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((7, 0), "sm_70"),
        ((7, 2), "sm_70"),
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
    ],
)
def test_a_gpu_gets_the_newest_code_that_it_runs(capability, architecture):
    assert plans.architecture_of(capability) == architecture


@pytest.mark.parametrize("capability", [(6, 1), (12, 0)])
def test_a_gpu_without_kernels_is_named(capability):
    with pytest.raises(plans.NoDevice, match=rf"compute capability {capability[0]}\.{capability[1]}"):
        plans.architecture_of(capability)


def test_without_cupy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingLibrary, match="pip install cupy-cuda13x"):
        plans.CupyMachine.current()


def test_without_a_gpu_it_says_so():
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        with pytest.raises(plans.NoDevice, match="found no NVIDIA GPU"):
            plans.CupyMachine.current()
    else:
        assert plans.CupyMachine.current().architecture in plans.ARCHITECTURES


def test_importing_plans_loads_neither_cupy_nor_nvrtc():
    code = "import sys, sparse_kernels.cuda.plan; print([name for name in ('cupy', 'cuda') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
