"""Every family knows every architecture, and asks none for more than it has."""

import itertools

import numpy as np
import pytest

from latbench.timing import gpu_ceiling_kernels
from sparse_kernels import pack
from sparse_kernels.cuda import csr, nm, nm_sm90, sm90, vector, vector_few, vector_sm90
from sparse_kernels.cuda.program import DTYPES, NotSupported
from sparse_kernels.cuda.targets import ARCHITECTURES, TARGETS
from sparse_kernels.cuda.variants import FAMILIES, FOR_FEW, MOST_FEW, find_linear_builder
from sparse_kernels.patterns import NM, BlockWise, Dense, Unstructured, VectorWise

EVERYWHERE = {"vector": vector, "nm": nm, "csr": csr, "ceilings": gpu_ceiling_kernels}
SINCE_AMPERE = {"vector_few": vector_few}
HOPPER = {"vector_sm90": vector_sm90, "nm_sm90": nm_sm90}
PATTERNS = [
    Dense(),
    *(VectorWise(v) for v in (16, 32, 64, 128)),
    BlockWise(64, 64),
    *(NM(keep, of) for keep, of in ((2, 4), (1, 8), (1, 16), (4, 8), (1, 256))),
    Unstructured(),
]
SIZES = [(300, 200), (128, 4096)]
COLUMNS = (1, 8, 100, 129, 2048)

SPARSE_TENSOR_CORES = {name for name, target in TARGETS.items() if target.capability >= (8, 0)}


def architectures(module, function=None):
    return {it for one in module.VARIANTS if function in (None, one.function) for it in one.architectures}


def test_families_are_for_exactly_the_known_architectures():
    assert all(architectures(module) == set(ARCHITECTURES) for module in EVERYWHERE.values())
    assert all(architectures(module) == {sm90.ARCHITECTURE} for module in HOPPER.values())
    assert all(architectures(module) == SPARSE_TENSOR_CORES for module in SINCE_AMPERE.values())
    assert set(EVERYWHERE) | set(SINCE_AMPERE) | set(HOPPER) == {*FAMILIES, "ceilings"}


def test_tables_are_of_exactly_the_known_architectures():
    assert tuple(vector.MACHINES) == ARCHITECTURES
    assert set(nm.TENSOR_CORES_UP_TO) == architectures(nm, "nm24") == SPARSE_TENSOR_CORES


def test_an_architecture_is_called_by_its_compute_capability():
    for name, target in TARGETS.items():
        assert name.removesuffix("a") == f"sm_{target.capability[0]}{target.capability[1]}"
    assert list(TARGETS.values()) == sorted(TARGETS.values(), key=lambda target: target.capability)


def test_a_block_has_the_shared_memory_that_the_manual_says():
    """CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", in KiB."""
    kib = {name: target.block_shared_bytes / 1024 for name, target in TARGETS.items()}
    assert [kib.pop(name) for name in ("sm_70", "sm_75", "sm_80")] == [96, 64, 163]
    assert {name for name, size in kib.items() if size == 99} == {"sm_86", "sm_89", "sm_120", "sm_121"}
    assert {name for name, size in kib.items() if size == 227} == {"sm_90a", "sm_100", "sm_103", "sm_110"}


def packed_of(pattern, m, k):
    sparsity = pattern.sparsity if isinstance(pattern, NM) else 0.5
    mask = None if isinstance(pattern, Dense) else pattern.mask(np.random.default_rng(0).random((m, k)), sparsity)
    return pack(np.ones((m, k), np.float32), mask, pattern)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_launch_fits_the_shared_memory_of_its_architecture(architecture):
    functions = set()
    for (m, k), pattern in itertools.product(SIZES, PATTERNS):
        packed = packed_of(pattern, m, k)
        for family, dtype in itertools.product(FAMILIES, DTYPES):
            try:
                about = MOST_FEW if family == FOR_FEW else max(COLUMNS)
                program = find_linear_builder(family)(packed, dtype, architecture, about)
            except NotSupported:
                continue
            for launch in itertools.chain.from_iterable(program.launches(n, "relu") for n in COLUMNS):
                assert launch.shared_bytes <= TARGETS[architecture].block_shared_bytes
                functions.add(launch.variant.function)
    on_hopper = {"vector_sm90", "nm_sm90", "finish_sm90"} if architecture == sm90.ARCHITECTURE else set()
    since_ampere = {"nm24", "vector_few"} if architecture in SPARSE_TENSOR_CORES else set()
    assert functions == {"vector_matmul", "nm", "csr"} | since_ampere | on_hopper


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tile_fits_the_shared_memory_of_its_architecture(architecture):
    most = TARGETS[architecture].block_shared_bytes
    assert all(vector.count_shared_bytes(one) <= most for one in vector.VARIANTS if architecture in one.architectures)
    if architecture in SPARSE_TENSOR_CORES:
        assert all(tile.shared_bytes <= most for tile in nm.TILES)


def test_three_stages_let_two_large_tiles_share_100_kib():
    assert {name: machine.stages for name, machine in vector.MACHINES.items()} == {
        **dict.fromkeys(ARCHITECTURES, 4),
        **dict.fromkeys(("sm_70", "sm_75"), 2),
        **dict.fromkeys(("sm_86", "sm_89", "sm_120", "sm_121"), 3),
    }
