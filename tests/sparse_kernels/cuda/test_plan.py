"""Plans choose a program, upload its weights once and check calls; here on a machine of NumPy and the emulator."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from emulated_machine import EmulatedMachine

from sparse_kernels import patterns
from sparse_kernels.cuda import cuda_plan, variants
from sparse_kernels.cuda import machine as machines
from sparse_kernels.cuda.program import Launch, NotSupported, Operand, Variant
from sparse_kernels.formats import pack
from sparse_kernels.registry import MissingLibrary, NoDevice

M, K, N = 70, 52, 37


PATTERNS = {
    "dense": (patterns.Dense(), 0.0),
    "vector": (patterns.VectorWise(32), 0.5),
    "vectornm": (patterns.VectorNM(32, 2, 4), 0.5),
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


@pytest.mark.parametrize("n", [N, 90])
@pytest.mark.parametrize("name", PATTERNS)
def test_each_format_has_a_kernel_that_multiplies(rng, name, n):
    packed, dense = weight(rng, name)
    machine = EmulatedMachine("sm_80")
    plan = cuda_plan.prepare_cuda_linear(packed, "feature_major", n, machine=machine)
    x = rng.integers(-4, 5, (K, n)).astype(np.float16)
    bias = rng.integers(-9, 10, M).astype(np.float32)
    # Whole numbers below 2048 are exact in a half.
    np.testing.assert_array_equal(plan(x, bias, "relu"), np.maximum(dense @ x + bias[:, None], 0))


def test_weights_are_uploaded_once_and_a_copy_has_its_own(rng):
    packed, _ = weight(rng, "vector")
    machine = EmulatedMachine("sm_80")
    plan = cuda_plan.prepare_cuda_linear(packed, "feature_major", N, machine=machine)
    count = len(machine.uploads)
    assert count > 0
    x = np.zeros((K, N), np.float16)
    out = machine.empty((M, N), "float16")
    plan(x, out=out)
    plan(x, out=out)
    assert len(machine.uploads) == count
    own = plan.copy()
    own(x, out=out)
    assert len(machine.uploads) == 2 * count
    first, last = ({int(it) for it in launch.arguments if it.dtype == np.uint64} for launch in machine.launched[::2])
    assert first & last - {0} == {x.ctypes.data, out.ctypes.data}


def test_no_columns_need_no_launch(rng):
    packed, _ = weight(rng, "nm")
    machine = EmulatedMachine("sm_80")
    plan = cuda_plan.prepare_cuda_linear(packed, "feature_major", 0, machine=machine)
    assert plan(np.zeros((K, 0), np.float16)).shape == (M, 0)
    assert machine.launched == []


def test_hopper_kernels_come_first_where_they_can(rng):
    dense = rng.standard_normal((256, 128)).astype(np.float32)
    kernels = {}
    for v in (32, 64):
        packed = pack(dense, patterns.VectorWise(v).mask(np.abs(dense), 0.5), patterns.VectorWise(v))
        kernels[v] = cuda_plan.prepare_cuda_linear(
            packed, "feature_major", 256, machine=EmulatedMachine("sm_90a")
        ).kernel
    assert kernels[64] == "cuda.vector_sm90.sm_90a"
    assert kernels[32] == "cuda.vector_matmul.sm_90a"


def test_few_columns_have_a_kernel_of_their_own(rng):
    packed, _ = weight(rng, "vector")
    for n, architecture, kernel, asked in (
        (64, "sm_80", "vector_few", ("vector_few",)),
        (65, "sm_80", "vector_matmul", ("vector_sm90", "vector")),
        (64, "sm_75", "vector_matmul", ("vector_few", "vector_sm90", "vector")),
    ):
        plan = cuda_plan.prepare_cuda_linear(packed, "feature_major", n, machine=EmulatedMachine(architecture))
        assert (plan.kernel, plan.families) == (f"cuda.{kernel}.{architecture}", asked)


def test_where_all_refuse_each_says_why(rng, monkeypatch):
    monkeypatch.setitem(variants.LINEAR, "nm", ("vector", "csr"))
    packed, _ = weight(rng, "nm")
    with pytest.raises(NotSupported, match=r"no CUDA kernel runs nm:2:4 on sm_80: the vector .*; the CSR .*"):
        cuda_plan.prepare_cuda_linear(packed, "feature_major", N, machine=EmulatedMachine("sm_80"))


def test_a_format_without_kernels_is_refused(rng, monkeypatch):
    monkeypatch.delitem(variants.LINEAR, "nm")
    packed, _ = weight(rng, "nm")
    with pytest.raises(
        NotSupported, match="runs a linear layer of format nm: known are dense, vector, shflbw, block"
    ):
        cuda_plan.prepare_cuda_linear(packed, "feature_major", N, machine=EmulatedMachine("sm_80"))


@pytest.mark.parametrize(("layout", "dtype"), [("token_major", "float16"), ("feature_major", "float32")])
def test_other_layouts_and_element_types_are_refused(rng, layout, dtype):
    packed, _ = weight(rng, "nm")
    with pytest.raises(NotSupported, match=r"the CUDA kernels .* not '?(token_major|float32)"):
        cuda_plan.prepare_cuda_linear(packed, layout, N, dtype, EmulatedMachine("sm_80"))


X = np.zeros((K, N), np.float16)
WRONG_CALLS = {
    "another dtype": ((X.astype(np.float32),), TypeError, "x must be of dtype float16, not float32"),
    "no array": (([1.0],), TypeError, "x must be a NumPy array, not list"),
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
    plan = cuda_plan.prepare_cuda_linear(packed, "feature_major", N, machine=machine)
    with pytest.raises(error, match=message):
        plan(*arguments)
    assert machine.launched == []


def test_out_may_not_lie_on_x(rng):
    pattern = patterns.NM(2, 4)
    dense = rng.standard_normal((K, K)).astype(np.float32)
    plan = cuda_plan.prepare_cuda_linear(
        pack(dense, pattern.mask(np.abs(dense), 0.5), pattern), "feature_major", N, machine=EmulatedMachine("sm_80")
    )
    with pytest.raises(ValueError, match="out must not share memory with x"):
        plan(X, out=X)


@pytest.mark.parametrize(("n", "offset", "needed"), [(16, 1, 16), (16, 4, 16), (4, 1, 8), (6, 1, 4)])
def test_arrays_must_be_aligned_for_copies_as_wide_as_their_rows_allow(rng, n, offset, needed):
    packed, _ = weight(rng, "nm")
    plan = cuda_plan.prepare_cuda_linear(packed, "feature_major", n, machine=EmulatedMachine("sm_80"))
    odd = np.zeros(K * n + offset, np.float16)[offset:].reshape(K, n)
    with pytest.raises(ValueError, match=f"x must start at a multiple of {needed} bytes for {n} columns"):
        plan(odd)


@pytest.mark.parametrize(("n", "offset"), [(16, 8), (4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("name", PATTERNS)
def test_arrays_may_start_where_their_copies_allow(rng, n, offset, name):
    packed, dense = weight(rng, name)
    plan = cuda_plan.prepare_cuda_linear(packed, "feature_major", n, machine=EmulatedMachine("sm_80"))
    x = np.zeros(K * n + offset, np.float16)[offset:].reshape(K, n)
    x[:] = rng.integers(-4, 5, (K, n))
    np.testing.assert_array_equal(plan(x), dense @ x)


@pytest.mark.parametrize("name", PATTERNS)
def test_relu_keeps_what_is_no_number(rng, name):
    packed, dense = weight(rng, name)
    plan = cuda_plan.prepare_cuda_linear(packed, "feature_major", 8, machine=EmulatedMachine("sm_80"))
    x = rng.integers(-4, 5, (K, 8)).astype(np.float16)
    x[:, 3] = np.nan
    out = plan(x, activation="relu")
    assert np.isnan(out[(dense != 0).any(axis=1), 3]).all()
    np.testing.assert_array_equal(np.delete(out, 3, axis=1), np.maximum(dense @ np.delete(x, 3, axis=1), 0))


class Counter:
    """A program of two launches that ask for scratch, the more the more columns there are."""

    nbytes = 0

    def launches(self, n, activation):
        variant = Variant("none.cu", "none", {}, ("sm_80",))
        arguments = (Operand.SCRATCH, Operand.BIAS, np.int32(n))
        return [Launch(variant, (n, 1, 1), (32, 1, 1), 0, arguments, scratch_bytes=size) for size in (4, n)]


def counted(machine):
    return cuda_plan.CudaPlan(Counter(), machine, (K, None), (M, None), "float16", "none", "feature_major")


def test_the_launches_of_a_call_share_scratch_for_the_one_that_needs_most():
    machine = EmulatedMachine("sm_80", runs=False)
    given, take = [], machine.scratch
    machine.scratch = lambda count: given.append(take(count)) or given[-1]
    counted(machine)(X)
    assert [it.nbytes for it in given] == [N]
    assert [int(launch.arguments[0]) for launch in machine.launched] == [given[0].ctypes.data] * 2


def test_cupys_scratch_is_a_streams_own_and_what_a_graph_may_have_captured_stays():
    stream = SimpleNamespace(ptr=0)
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream), empty=np.empty)
    machine = machines.CupyMachine(cupy, 0, "sm_80", 108, 13)
    sizes = [machine.scratch(count).nbytes for count in (20, 24, 16)]
    assert sizes == [20, 40, 40]
    first = machine.scratch(16)
    assert first is machine.scratch(40)
    assert [it.nbytes for it in machine._scratch[0]] == [20, 40]
    stream.ptr = 7
    assert machine.scratch(16) is not first


def test_a_missing_bias_is_a_null_pointer():
    machine = EmulatedMachine("sm_80", runs=False)
    counted(machine)(X)
    null = machine.launched[0].arguments[1]
    assert (null.dtype, int(null)) == (np.uint64, 0)


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((7, 0), "sm_70"),
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_103"),
        ((10, 7), "sm_103"),
        ((11, 0), "sm_110"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_121"),
    ],
)
def test_a_gpu_gets_the_newest_code_that_it_runs(capability, architecture):
    assert machines.list_architectures(capability)[0] == architecture


def test_older_code_that_a_gpu_runs_too_comes_after_the_newest():
    assert machines.list_architectures((8, 9)) == ("sm_89", "sm_86", "sm_80")
    assert machines.list_architectures((12, 1)) == ("sm_121", "sm_120")
    assert machines.list_architectures((9, 0)) == ("sm_90a",)


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((6, 1), "kernels are compiled for sm_70, .*, sm_121, and .* of its own major version; use a newer GPU"),
        ((9, 1), "of its own major version; use a newer latbench"),  # what is for 9.0 alone does not run there
        ((13, 0), "of its own major version; use a newer latbench"),
        ((7, 2), "Jetson Xavier is .*; use another GPU"),
        ((8, 7), "Jetson Orin is .*; use another GPU"),
        ((10, 1), "Jetson Thor reports .*; update the driver"),
    ],
)
def test_a_gpu_without_kernels_is_told_why_and_what_to_do(capability, reason):
    with pytest.raises(
        NoDevice, match=rf"^no kernel for compute capability {capability[0]}\.{capability[1]}: .*{reason}"
    ):
        machines.list_architectures(capability)


def cupy_of(capability, cuda):
    """What a machine asks of CuPy on a GPU of this capability with a driver for this CUDA version."""
    device = SimpleNamespace(compute_capability=capability, attributes={"MultiProcessorCount": 48})
    runtime = SimpleNamespace(driverGetVersion=lambda: cuda, getDevice=lambda: 0, CUDARuntimeError=RuntimeError)
    return SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device, runtime=runtime))


@pytest.mark.parametrize(
    ("known", "architecture"), [((100, 101, 120), "sm_120"), ((100, 101, 103, 120, 121), "sm_121")]
)
def test_a_gpu_that_is_too_new_for_the_compiler_gets_the_code_of_its_elder(monkeypatch, known, architecture):
    nvrtc = machines.build.Nvrtc(None, "libnvrtc.so.12", (12, 8), known)
    monkeypatch.setattr(machines.build, "load_nvrtc", {12: nvrtc}.get)
    monkeypatch.setitem(sys.modules, "cupy", cupy_of("121", 12080))
    machine = machines.CupyMachine.current()
    assert (machine.architecture, machine.multiprocessors, machine.newest) == (architecture, 48, 12)


def test_without_cupy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingLibrary, match="pip install cupy-cuda13x"):
        machines.CupyMachine.current()


def test_without_a_gpu_it_says_so():
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        with pytest.raises(NoDevice, match="found no NVIDIA GPU"):
            machines.CupyMachine.current()
    else:
        assert machines.CupyMachine.current().architecture in machines.ARCHITECTURES


def test_importing_plans_loads_neither_cupy_nor_nvrtc():
    code = (
        "import sys, sparse_kernels.cuda.cuda_plan; print([name for name in ('cupy', 'cuda') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_plans_that_share_a_kernel_leave_each_other_the_shared_memory_they_need(monkeypatch):
    class Function:
        max_dynamic_shared_size_bytes = 0

    loaded = []

    class Cupy:
        def RawModule(self, path):
            loaded.append(path)
            return SimpleNamespace(get_function=lambda name: function)

    function = Function()
    monkeypatch.setattr(machines, "_functions", {})
    monkeypatch.setattr(machines.build, "compile", lambda *_, **__: SimpleNamespace(path="some.cubin"))
    variant = Variant("nm.cu", "nm", {}, ("sm_80",))
    for shared_bytes, allowed in [(40_960, 40_960), (33_792, 40_960), (50_000, 50_000), (0, 50_000)]:
        assert machines._load(Cupy(), 0, variant, shared_bytes, "sm_80", 13) is function
        assert function.max_dynamic_shared_size_bytes == allowed
    assert loaded == ["some.cubin"]
