import itertools

import emulator
import numpy as np
import pytest
from mutations import Mutation, fails, survivors
from mutations_nm import (
    case_of,
    ordinary,
    program_on,
    pruned,
    tensor,
    whole_numbers,
)
from vector_cases import bits, drawn, numbers, oracle

from sparse_kernels.cuda import nm
from sparse_kernels.cuda.program import DTYPES, NotSupported
from sparse_kernels.cuda.targets import ARCHITECTURES, TARGETS
from sparse_kernels.formats import pack, unpack
from sparse_kernels.patterns import NM, Unstructured
from sparse_kernels.plan_protocol import ACTIVATIONS

TWO_OF_FOUR = [NM(2, 4), NM(1, 4), NM(2, 8), NM(1, 8), NM(1, 16)]
OTHERS = [NM(2, 4), NM(1, 3), NM(4, 8), NM(1, 16), NM(1, 32), NM(3, 10), NM(20, 100), NM(2, 256)]


# ---- Packing ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", TWO_OF_FOUR, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (33, 70)], ids=str)
def test_fragments_and_metadata_hold_the_weight_as_the_instruction_reads_it(rng, shape, pattern, dtype):
    packed, weight = pruned(rng, pattern, drawn(rng, shape, dtype), pattern.sparsity, 0.3)
    program = program_on("tensor", packed, dtype)
    groups, stages = program.fragments.shape[:2]
    found = np.zeros((32 * groups, 64 * stages))
    for place in np.ndindex(groups, stages, 2, 2):  # an instruction
        group_of_rows, stage, tile, step = place
        corner = 32 * group_of_rows + 16 * tile, 64 * stage + 32 * step
        for lane, register, half in itertools.product(range(32), range(4), range(2)):
            g, t = lane // 4, lane % 4
            row, kept = g + 8 * (register % 2), 2 * t + half + 8 * (register // 2)
            group = kept // 2
            word = int(program.metadata[*place, 2 * g + group // 4])
            pair = word >> (16 * (register % 2) + 4 * (group % 4)) & 15
            assert pair & 3 < pair >> 2, "the places of a group must rise"
            element = np.array(int(program.fragments[*place, lane, register]) >> (16 * half) & 0xFFFF, np.uint16)
            column = 4 * group + (pair >> (2 * half) & 3)
            found[corner[0] + row, corner[1] + column] += numbers(element, dtype)
    m, k = shape
    np.testing.assert_array_equal(found[:m, :k], weight)
    assert not found[m:].any()
    assert not found[:, k:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", OTHERS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (65, 131), (70, 600)], ids=str)
def test_entries_hold_the_weight(rng, shape, pattern, dtype):
    packed, weight = pruned(rng, pattern, drawn(rng, shape, dtype), pattern.sparsity, 0.3)
    depth = nm.choose_tile_depth(pattern)
    entries = nm.pack_entries(unpack(packed), depth, dtype)
    found = np.zeros((entries.shape[0] * 64, entries.shape[1] * depth))
    for block, tile, row, slot in np.ndindex(*entries.shape):
        word = int(entries[block, tile, row, slot])
        assert word >> 16 < depth
        element = np.array(word & 0xFFFF, np.uint16)
        found[64 * block + row, tile * depth + (word >> 16)] += numbers(element, dtype)
    m, k = shape
    np.testing.assert_array_equal(found[:m, :k], weight)
    assert not found[m:].any()
    assert not found[:, k:].any()


def test_what_is_no_weight_of_these_kernels_is_refused(rng):
    packed, _ = pruned(rng, NM(2, 4), whole_numbers(rng, (8, 8), 9), 0.5)
    unstructured = pack(np.ones((8, 8), np.float32), None, Unstructured())
    with pytest.raises(NotSupported, match="multiply N:M weights, not unstructured"):
        nm.build_program(unstructured, "float16", "sm_80", 8)
    with pytest.raises(NotSupported, match="elements are float16 or bfloat16, not float32"):
        nm.build_program(packed, "float32", "sm_80", 8)
    with pytest.raises(NotSupported, match="not sm_60"):
        nm.build_program(packed, "float16", "sm_60", 8)
    with pytest.raises(ValueError, match="row 1 keeps more than 2 of the columns 4 to 7"):
        nm.select_two_of_four(np.array([[1, 0, 1, 0, 0, 0, 1, 1], [0, 0, 1, 0, 1, 0, 1, 1]], np.float32))


# ---- Launch settings ----


def test_tensor_cores_take_what_is_two_of_four_where_they_are_faster():
    assert nm.runs_on_tensor_cores(NM(2, 4), "sm_80")
    assert nm.runs_on_tensor_cores(NM(1, 16), "sm_80")
    assert not nm.runs_on_tensor_cores(NM(1, 16), "sm_86")  # ordinary cores skip more than the tensor cores gain
    assert not nm.runs_on_tensor_cores(NM(4, 8), "sm_80")  # 4 of 8 may lie in 4 columns
    assert not nm.runs_on_tensor_cores(NM(1, 3), "sm_80")
    assert not nm.runs_on_tensor_cores(NM(2, 4), "sm_75")
    assert nm.runs_on_tensor_cores(NM(2, 4), "sm_121")


def test_tiles_are_the_largest_that_fill_the_machine():
    assert nm.choose_tensor_tile(4096, 4096, 108).rows == 128
    assert nm.choose_tensor_tile(4096, 128, 108).rows == 64
    assert nm.choose_tensor_tile(4096, 128, 32).rows == 128
    assert nm.choose_tensor_tile(4096, 16, 108).columns == 64
    assert nm.choose_tensor_tile(64, 64, 108) == nm.TILES[-1]
    assert nm.choose_lane_columns(4096, 4096, 32, 8, 108) == 8
    assert nm.choose_lane_columns(4096, 4096, 64, 8, 108) == 4  # deep tiles of x: shared memory
    assert nm.choose_lane_columns(4096, 1, 32, 8, 108) == 2


def test_patterns_on_ordinary_cores_fit_the_shared_memory_of_every_machine():
    most_of_all = min(target.block_shared_bytes for target in TARGETS.values())
    for pattern in [NM(keep, of) for of in range(2, 257) for keep in {1, of // 2, of - 1} - {0}]:
        depth = nm.choose_tile_depth(pattern)
        most = min(depth, max(1, depth // pattern.of) * pattern.keep)
        columns = nm.choose_lane_columns(4096, 4096, depth, most + most % 2, 40)
        assert nm.count_shared_bytes(columns, depth, most + most % 2) <= most_of_all


def test_every_launch_is_a_known_variant(rng):
    known = {variant.name for variant in nm.VARIANTS}
    assert len(known) == len(nm.VARIANTS)
    for pattern, architecture, dtype in itertools.product((NM(2, 4), NM(4, 8)), ARCHITECTURES, DTYPES):
        program = nm.build_program(
            pruned(rng, pattern, whole_numbers(rng, (70, 40), 9), 0.5)[0], dtype, architecture, 1
        )
        for n in (1, 100, 5000):
            (launch,) = program.launches(n, None)
            assert launch.variant.name in known
            assert architecture in launch.variant.architectures
        assert program.launches(0, None) == []


# ---- Results ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", nm.TILES, ids=lambda it: f"{it.rows}x{it.columns}")
@pytest.mark.parametrize(
    "size", [(1, 1, 1), (16, 64, 8), (130, 70, 137), (33, 330, 50), (65, 3, 200), (17, 129, 66)], ids=str
)
def test_tensor_cores_drop_repeat_and_round_nothing(rng, size, tile, dtype):
    assert not fails(case_of(rng, "tensor", size, dtype=dtype, tile=tile), seed=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", nm.LANE_COLUMNS)
@pytest.mark.parametrize(
    "size", [(1, 1, 1), (64, 64, 8), (130, 70, 300), (33, 330, 50), (9, 40, 267), (5, 129, 66)], ids=str
)
def test_ordinary_cores_drop_repeat_and_round_nothing(rng, size, columns, dtype):
    assert not fails(case_of(rng, "ordinary", size, dtype=dtype, columns=columns), seed=0)


@pytest.mark.parametrize(
    "cores, pattern", [("tensor", it) for it in TWO_OF_FOUR] + [("ordinary", it) for it in OTHERS]
)
def test_every_pattern(rng, cores, pattern):
    for seed, size in enumerate([(40, 130, 16), (20, 515, 9)]):
        assert not fails(case_of(rng, cores, size, pattern, also_drop=0.3), seed)


@pytest.mark.parametrize("cores", ["tensor", "ordinary"])
def test_any_order_of_threads_and_copies(rng, cores):
    for seed in range(8):
        assert not fails(case_of(rng, cores, (80, 500, 72)), seed)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 21])
def test_every_tile_is_computed_once_whatever_the_raster(rng, rows):
    assert not fails(case_of(rng, "tensor", (32 * rows - 5, 8, 64 * 3 + 1)), seed=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cores", ["tensor", "ordinary"])
def test_bias_and_activation_are_those_of_the_oracle(rng, cores, dtype, activation):
    m, k, n = 70, 200, 24
    packed, weight = pruned(rng, NM(2, 4), drawn(rng, (m, k), dtype), 0.5)
    x, bias = drawn(rng, (k, n), dtype), rng.standard_normal(m).astype(np.float32)
    out = np.empty((m, n), np.uint16)
    for b in (None, bias):
        emulator.run(program_on(cores, packed, dtype).launches(n, activation), bits(x, dtype), out, b, seed=0)
        expected, bound = oracle(weight, x, b, activation, dtype)
        assert (np.abs(numbers(out, dtype) - expected) <= bound).all()


def test_infinite_activations_reach_only_the_rows_that_read_them(rng):
    """Odd rows keep 1 of 8 where even ones keep 2: what fills their entries up meets no other row of x."""
    weight = np.abs(whole_numbers(rng, (70, 100), 9))  # no two infinities of different signs
    mask = np.zeros(weight.shape, bool)
    mask[:, 3::8] = True
    mask[::2, 5::8] = True
    x = np.full((100, 8), np.inf, np.float16)
    x[3::8] = whole_numbers(rng, x[3::8].shape, 4)
    out = np.empty((70, 8), np.float16)
    program = program_on("ordinary", pack(weight, mask, NM(2, 8)), "float16")
    emulator.run(program.launches(8, None), x, out, seed=0)
    np.testing.assert_array_equal(out[1::2], weight[1::2, 3::8] @ x[3::8].astype(np.float32))
    assert np.isposinf(out[::2]).all()


# ---- Planted bugs: the gate runs them ----


@pytest.mark.parametrize("case", [tensor, ordinary])
def test_an_edit_that_changes_nothing_is_not_taken_for_a_bug(case):
    assert survivors([Mutation("none", case, ("float sums[", "float  sums["))])
