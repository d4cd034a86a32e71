"""2:4 products for Hopper: their packing, the choice of a tile, and all of it emulated."""

import itertools

import emulator
import numpy as np
import pytest
from sm90_cases import case_of, packed_of, run
from vector_cases import bits, drawn

from sparse_kernels.cuda import nm_sm90
from sparse_kernels.cuda.program import DTYPES, NotSupported
from sparse_kernels.formats import pack, unpack
from sparse_kernels.patterns import NM, VectorWise


def thinned(rng, m, k, dtype="float16"):
    """A 2:4 weight of which many groups keep one element, or none."""
    weight = drawn(rng, (m, k), dtype)
    mask = NM(2, 4).mask(np.abs(weight).astype(float), 0.5) & (rng.random((m, k)) < 0.6)
    return pack(weight, mask, NM(2, 4))


# ---- Packing ----


def unpacked(weights, height, m, k):
    """The bits (m, k) that `weights` stands for, element by element, by the layouts that PTX gives."""
    stages = -(-k // 128)
    groups = len(weights) // stages
    found = np.zeros((groups * height, stages * 128), np.uint16)
    images = [image.tobytes() for image in weights]
    for group, stage, row, kept in itertools.product(*map(range, (groups, stages, height, 64))):
        memory = images[group * stages + stage]
        address = row * 128 + kept * 2
        address ^= (address >> 7 & 7) << 4  # the 128-byte swizzle
        element = np.frombuffer(memory, np.uint16, 1, address)[0]
        four, slot = divmod(kept, 2)  # of 4 columns; first or second of the two kept
        step, half = four // 8, four // 4 % 2  # 32 columns a product; lane 4g + half has 16 of them
        word_at = (((row // 16 * 8 + row % 8) * 2 + half) * 4 + step) * 4
        word = int(np.frombuffer(memory, np.uint32, 1, height * 128 + word_at)[0])
        pair = word >> (row // 8 % 2 * 16 + four % 4 * 4) & 15
        assert pair & 3 < pair >> 2, "the hardware wants two places, rising"
        found[group * height + row, stage * 128 + four * 4 + (pair >> 2 * slot & 3)] |= element
    return found[:m, :k]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "height"), [((1, 1), 128), ((130, 131), 128), ((100, 260), 256)], ids=str)
def test_kept_weights_and_metadata_hold_the_weight(rng, shape, height, dtype):
    packed = thinned(rng, *shape, dtype)
    found = unpacked(nm_sm90.pack(packed, height, dtype), height, *shape)
    np.testing.assert_array_equal(found, bits(unpack(packed), dtype))


def test_places_of_a_group_that_keeps_fewer_than_two(rng):
    """One kept at place 0 to 3, none, two."""
    weight = np.array([[5, 0, 0, 0, 0, 6, 0, 0, 0, 0, 7, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 9, 0, 4]], np.float32)
    values, places = nm_sm90.select_pairs(pack(weight, weight != 0, NM(2, 4)))
    assert values[0].tolist() == [[5, 0], [6, 0], [7, 0], [0, 8], [0, 0], [9, 4]]
    assert places[0].tolist() == [0b0100, 0b1001, 0b1110, 0b1110, 0b0100, 0b1101]


@pytest.mark.parametrize(
    ("pattern", "dtype", "architecture", "said"),
    [
        (NM(1, 4), "float16", "sm_90a", "2:4 weights, not nm:1:4"),
        (VectorWise(64), "float16", "sm_90a", "2:4 weights, not vector:64"),
        (NM(2, 4), "float16", "sm_80", "for sm_90a, not sm_80"),
        (NM(2, 4), "float32", "sm_90a", "not float32"),
    ],
    ids=str,
)
def test_what_is_not_run_is_refused_in_a_sentence(rng, pattern, dtype, architecture, said):
    weight = rng.standard_normal((64, 64)).astype(np.float32)
    sparsity = pattern.sparsity if isinstance(pattern, NM) else 0.5
    packed = pack(weight, pattern.mask(weight.astype(float) ** 2, sparsity), pattern)
    with pytest.raises(NotSupported, match=said):
        nm_sm90.build_program(packed, dtype, architecture, 8)


# ---- Launches ----


def test_high_tiles_for_many_columns_and_low_ones_where_high_ones_would_leave_multiprocessors_idle():
    def clocks(shape, height):
        return nm_sm90.predict_clocks(shape, height, shape[0] // 2, 132)

    assert clocks((8192, 4096), 256) < clocks((8192, 4096), 128)
    assert clocks((2048, 1024), 128) < clocks((2048, 1024), 256)


def test_a_smaller_machine_gets_fewer_blocks_and_other_tiles(rng):
    packed = packed_of(rng, NM(2, 4), 4096, 128)
    program = nm_sm90.build_program(packed, "float16", "sm_90a", 2048, 114)
    (launch,) = program.launches(2048, None)
    assert launch.grid == (114, 1, 1)
    assert nm_sm90.build_program(packed, "float16", "sm_90a", 2048).launches(2048, None)[0].grid == (132, 1, 1)


@pytest.mark.parametrize("n", [8, 100, 129, 5000])
def test_every_launch_is_among_the_variants_that_the_gate_compiles(rng, n):
    known = [variant.name for variant in nm_sm90.VARIANTS]
    assert len(set(known)) == len(known)
    for m, k in ((64, 4096), (1024, 128)):
        packed = packed_of(rng, NM(2, 4), m, k)
        for launch in nm_sm90.build_program(packed, "bfloat16", "sm_90a", n).launches(n, "relu"):
            assert launch.variant.name in known


@pytest.mark.parametrize("height", nm_sm90.HEIGHTS)
def test_the_ring_fits_shared_memory(height):
    kernel = nm_sm90.build_hopper_kernel(height)
    assert kernel.stages >= 3
    assert kernel.stages * kernel.stage_bytes + 2048 <= 227 * 1024


# ---- The kernel ----


@pytest.fixture(params=nm_sm90.HEIGHTS)
def height(request, monkeypatch):
    """Tiles of one height for every shape."""
    monkeypatch.setattr(nm_sm90, "HEIGHTS", (request.param,))
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 8), (129, 200, 136), (300, 129, 72)], ids=str)
def test_a_layer_is_multiplied(rng, shape, height, dtype):
    m, k, n = shape
    run(case_of(rng, thinned(rng, m, k, dtype), n, dtype=dtype, activation="gelu"))


@pytest.mark.parametrize("activation", [None, "relu"])
def test_other_activations(rng, height, activation):
    run(case_of(rng, thinned(rng, 64, 128), 8, activation=activation))


@pytest.mark.parametrize("n", [1, 12, 129])
def test_rows_of_x_that_are_not_aligned(rng, height, n):
    run(case_of(rng, packed_of(rng, NM(2, 4), 70, 299), n, activation="relu"))


@pytest.mark.parametrize("splits", [2, 3])
def test_a_split_product_adds_up(rng, height, splits):
    run(case_of(rng, packed_of(rng, NM(2, 4), 130, 520), 37, activation="relu", splits=splits))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_order_of_threads_and_copies(rng, height, seed):
    """More stages than the ring holds, and several tiles a block, so that every slot is used again and again."""
    run(case_of(rng, packed_of(rng, NM(2, 4), 200, 700), 264, activation="gelu", blocks=2), seed)


def test_without_bias(rng):
    run(case_of(rng, packed_of(rng, NM(2, 4), 64, 128), 64, bias=False))


def test_no_product_is_dropped_or_repeated(rng):
    """Small whole numbers, whose sums float16 holds: any error is a whole unit."""
    weight = rng.integers(1, 4, (128, 260)).astype(np.float32)
    weight *= NM(2, 4).mask(rng.random(weight.shape), 0.5)
    x = rng.integers(-2, 3, (260, 24)).astype(np.float16)
    program = nm_sm90.build_program(pack(weight, weight != 0, NM(2, 4)), "float16", "sm_90a", 24)
    out = np.empty((128, 24), np.float16)
    emulator.run(program.launches(24, None), x, out, seed=2)
    np.testing.assert_array_equal(out, weight @ x.astype(np.float32))
