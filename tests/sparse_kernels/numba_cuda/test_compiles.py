"""Every kernel becomes PTX without a driver, for every generation of GPUs; and where ptxas is, machine code."""

import itertools
import re
import shutil
import subprocess

import numba
import numpy as np
import pytest
from numba import types
from numba.np.numpy_support import from_dtype

from sparse_kernels.formats import pack
from sparse_kernels.numba_cuda import numba_cuda_plan, transpose
from sparse_kernels.numba_cuda.layouts import IMAGES, MATRIX, build_taps
from sparse_kernels.numba_cuda.library import cuda
from sparse_kernels.patterns import NM, BlockWise, Dense, ShflBW, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape

if numba.config.ENABLE_CUDASIM:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

COMPUTE_CAPABILITIES = [(7, 5), (8, 0), (9, 0), (10, 0)]
PATTERNS = [Dense(), Unstructured(), NM(2, 4), BlockWise(32, 32), ShflBW(32)]
OTHER_PATTERNS = [NM(1, 100), NM(1, 256), BlockWise(4, 1), VectorWise(3), VectorWise(8), VectorWise(128)]

SHARED_BYTES, REGISTERS = 48 * 1024, 64 * 1024  # of a block: what every one of these GPUs has


@pytest.fixture(scope="module", autouse=True)
def compiler():
    """NVVM turns kernels into PTX: a part of the CUDA toolkit, and of the package nvidia-nvvm."""
    from numba.cuda.cudadrv.error import NvvmSupportError
    from numba.cuda.cudadrv.nvvm import NVVM

    try:
        NVVM()
    except NvvmSupportError:
        pytest.skip("no NVVM: pip install nvidia-nvvm")


def type_of(argument):
    """The Numba type of what a plan passes to its kernel: arrays as they are on the GPU."""
    if isinstance(argument, np.ndarray):
        return types.Array(from_dtype(argument.dtype), argument.ndim, "C")
    return types.Tuple([type_of(it) for it in argument]) if isinstance(argument, tuple) else types.intp


def packed_of(pattern):
    """A weight of 256 x 512, and the kernels for it."""
    weight = np.ones((256, 512), np.float32)
    packed = pack(weight, pattern.mask(weight, getattr(pattern, "sparsity", 0.0)), pattern)
    return packed, numba_cuda_plan.FORMATS[type(packed)]


def compiled(pattern, layout, dtype, n, capability):
    """(PTX, threads of a block) of the kernel that a plan for such a weight would run."""
    packed, format = packed_of(pattern)
    tile = format.choose_tile(packed, n)
    element = np.dtype(dtype)
    x = np.empty((1,) * (2 if layout is MATRIX else 4), element)
    source = (x,) if layout is MATRIX else (x, build_taps(Conv2dShape(1, 512, 1, 1, 256, 1, 1)), 1, 1)
    bias = np.empty(1, np.float32)
    arguments = (format.build_arguments(packed, element), source, n, bias, 0, x)
    ptx, _ = cuda.compile_ptx(
        format.build_kernel(layout, tile).py_func, tuple(map(type_of, arguments)), cc=capability
    )
    return ptx, tile.lanes * tile.warps


def check_ptx(ptx, capability):
    """Sums stay in registers, no float64 slows a card for games down, and everything is inlined."""
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    assert ".local" not in ptx, "something lies in local memory: a loop over sums was not unrolled"
    assert not re.search(r"\.f64\b", ptx), "something is computed in float64"
    assert not re.search(r"^\s*call", ptx, re.MULTILINE), "something is not inlined"


def check_machine_code(ptx, threads, folder):
    """Nothing is spilled, and a block fits a GPU."""
    source, target = folder / "kernel.ptx", re.search(r"\.target (sm_\w+)", ptx)[1]
    source.write_text(ptx)
    command = ["ptxas", f"-arch={target}", "-v", str(source), "-o", str(folder / "kernel.cubin")]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log
    assert int(re.search(r"Used (\d+) registers", log)[1]) * threads <= REGISTERS
    shared = re.search(r"(\d+) bytes smem", log)
    assert shared is None or int(shared[1]) <= SHARED_BYTES


def check_kernel(pattern, layout, dtype, n, capability, folder):
    ptx, threads = compiled(pattern, layout, dtype, n, capability)
    check_ptx(ptx, capability)
    if shutil.which("ptxas"):
        check_machine_code(ptx, threads, folder)


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(it, marks=pytest.mark.slow) if it in COMPUTE_CAPABILITIES[1:-1] else it
        for it in COMPUTE_CAPABILITIES
    ],
    ids=str,
)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_linear_kernels_compile_and_keep_their_sums_in_registers(pattern, capability, tmp_path):
    check_kernel(pattern, MATRIX, "float16", 1000, capability, tmp_path)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_convolutions_compile_and_keep_their_sums_in_registers(pattern, tmp_path):
    check_kernel(pattern, IMAGES, "float32", 1000, COMPUTE_CAPABILITIES[0], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS + OTHER_PATTERNS, ids=str)
def test_kernels_of_every_tile_compile(pattern, tmp_path):
    """Each for one generation, which take turns."""
    packed, format = packed_of(pattern)
    one_a_tile = {format.choose_tile(packed, n): n for n in (1, 40, 1000)}.values()
    every = itertools.product((MATRIX, IMAGES), numba_cuda_plan.DTYPES, one_a_tile)
    for (layout, dtype, n), capability in zip(every, itertools.cycle(COMPUTE_CAPABILITIES), strict=False):
        check_kernel(pattern, layout, dtype, n, capability, tmp_path)


@pytest.mark.parametrize("capability", COMPUTE_CAPABILITIES, ids=str)
@pytest.mark.parametrize("dtype", numba_cuda_plan.DTYPES)
def test_the_transpose_compiles(dtype, capability):
    matrix = types.Array(from_dtype(np.dtype(dtype)), 2, "C")
    ptx, _ = cuda.compile_ptx(transpose.build_kernel().py_func, (matrix, matrix), cc=capability)
    check_ptx(ptx, capability)


def test_an_array_that_is_indexed_by_a_loop_is_seen_in_local_memory():
    @cuda.jit
    def kernel(picks, y):
        sums = cuda.local.array(64, types.float32)
        for i in range(64):
            sums[i] = y[i]
        for i in range(picks.shape[0]):
            y[i] = sums[picks[i]]

    ptx, _ = cuda.compile_ptx(kernel.py_func, (types.int32[::1], types.float32[::1]), cc=(8, 0))
    with pytest.raises(AssertionError, match="local memory"):
        check_ptx(ptx, (8, 0))
