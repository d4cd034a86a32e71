"""The kernel for few columns in the emulator against the float64 oracle, and how blocks share a weight."""

import dataclasses

import numpy as np
import pytest
import vector_cases
from vector_cases import Layer, linear

from sparse_kernels import BlockWise, Dense, ShflBW, VectorWise, pack
from sparse_kernels.cuda import vector_few
from sparse_kernels.cuda.program import NotSupported, Program
from sparse_kernels.cuda.targets import TARGETS
from sparse_kernels.cuda.vector_tiles import HEIGHTS, pack_tiles
from sparse_kernels.formats import Packed

COLUMNS = (1, 2, 7, 8, 9, 16, 18, 32, 37, 40, 64)

EVERY_WIDTH = [
    linear(VectorWise(v), v + 19, 83, n, activation=activation, dtype=dtype)
    for n in COLUMNS
    for v, activation, dtype in ((16, "gelu", "float16"), (64, "relu", "bfloat16"), (128, None, "float16"))
]
PATTERNS = [
    linear(ShflBW(32), 70, 141, 5),
    linear(BlockWise(16, 16), 100, 100, 4, dtype="bfloat16"),
    linear(BlockWise(100, 7), 333, 50, 16),
    linear(VectorWise(24), 50, 50, 16),
    linear(VectorWise(1), 5, 5, 8),
    linear(ShflBW(200), 410, 60, 16, bias=False),
    linear(Dense(), 70, 40, 3, sparsity=0.0),
    linear(VectorWise(32), 1, 1, 1),
    linear(VectorWise(16), 32, 700, 12, sparsity=0, architecture="sm_90a"),
]


def run(layer: Layer, rng: np.random.Generator, seed: int, mask: np.ndarray | None = None) -> None:
    vector_cases.run(layer, rng, seed, mask, vector_few.build_program)


@pytest.mark.parametrize("layer", [*EVERY_WIDTH, *PATTERNS], ids=str)
def test_a_layer_is_multiplied(layer: Layer, rng: np.random.Generator) -> None:
    run(layer, rng, seed=1)


@pytest.mark.parametrize("seed", range(2, 8))
def test_whatever_the_order_of_threads(seed: int, rng: np.random.Generator) -> None:
    run(linear(VectorWise(32), 70, 290, 20, sparsity=0.3), rng, seed)


def test_groups_that_keep_nothing_leave_bias_and_activation(rng: np.random.Generator) -> None:
    mask = np.zeros((96, 100), bool)
    mask[32:64] = rng.random(100) < 0.5
    run(linear(VectorWise(32), 96, 100, 6, activation="gelu"), rng, 1, mask)
    run(linear(VectorWise(32), 96, 100, 6), rng, 2, np.zeros_like(mask))


def test_groups_of_very_unequal_work(rng: np.random.Generator) -> None:
    mask = np.repeat(np.arange(200) < [[200], [0], [1], [150], [33]], 16, axis=0)
    run(linear(ShflBW(16), 80, 200, 24), rng, 3, mask)


@pytest.mark.parametrize(
    ("row_tiles", "width"),
    [(tall, width) for width in vector_few.WIDTHS for tall in vector_few.list_row_tiles(64, width)],
)
def test_however_blocks_share_the_rows(rng: np.random.Generator, row_tiles: int, width: int) -> None:
    for warps in (each for each in vector_few.WARPS if each <= vector_few.find_most_warps(row_tiles, width)):

        def with_tile(packed: Packed, dtype: str, architecture: str, n: int, warps: int = warps) -> Program:
            program = vector_few.build_program(packed, dtype, architecture, n)
            return dataclasses.replace(program, tile=vector_few.FewTile(row_tiles, width, warps))

        vector_cases.run(linear(VectorWise(64), 150, 190, 15, sparsity=0.4), rng, 5, None, with_tile)


def test_more_columns_than_it_was_made_for_are_right_too(rng: np.random.Generator) -> None:
    def few(packed: Packed, dtype: str, architecture: str, n: int) -> Program:
        return vector_few.build_program(packed, dtype, architecture, 1)

    vector_cases.run(linear(VectorWise(32), 50, 60, 150), rng, 1, None, few)


def test_infinite_activations_of_dropped_columns_are_not_read() -> None:
    import emulator

    weight, mask = np.ones((16, 40), np.float32), np.zeros((16, 40), bool)
    mask[:, [3, 17]] = True
    x = np.full((40, 8), np.inf, np.float16)
    x[[3, 17]] = 1
    out = np.empty((16, 8), np.uint16)
    program = vector_few.build_program(pack(weight, mask, VectorWise(16)), "float16", "sm_80", 8)
    emulator.run(program.launches(8, None), x.view(np.uint16), out, seed=1)
    np.testing.assert_array_equal(out.view(np.float16), 2)


def kept_columns(m: int, kept: int, v: int) -> vector_few.VectorTiles:
    mask = np.zeros((m, 4 * kept), bool)
    mask[:, :kept] = True
    return pack_tiles(pack(np.ones(mask.shape, np.float32), mask, VectorWise(v)), "float16", volta=False)


def test_every_multiprocessor_has_a_block_and_enough_warps() -> None:
    tiles = kept_columns(4096, 1024, 64)
    assert vector_few.choose_few_tile(tiles, 1, 132) == (2, 1, 16)  # 128 blocks of 32 rows
    assert vector_few.choose_few_tile(tiles, 64, 132) == (2, 8, 8)
    assert vector_few.choose_few_tile(tiles, 1, 20).row_tiles == 4  # a smaller machine
    assert vector_few.choose_few_tile(kept_columns(16384, 512, 64), 16, 132) == (4, 2, 8)
    assert vector_few.choose_few_tile(kept_columns(512, 64, 64), 1, 132) == (1, 1, 4)  # few columns have few turns


def test_what_is_asked_for_covers_the_way_to_memory() -> None:
    """24 KiB of weights a multiprocessor are under way where the weight is large enough."""
    for v in (32, 64, 128):
        for n in (1, 16, 64):
            tiles = kept_columns(8192, 1024, v)
            tile = vector_few.choose_few_tile(tiles, n, 132)
            blocks = tiles.groups * tiles.height // 16 // tile.row_tiles // 132
            under_way = (vector_few.find_depth(tile.row_tiles) - 1) * tile.row_tiles * vector_few.PIECE_BYTES
            assert max(1, min(2, blocks)) * tile.warps * under_way >= 24 * 1024


def test_every_launch_is_of_a_variant_that_the_gate_compiles() -> None:
    listed = {one.name for one in vector_few.VARIANTS}
    assert len(listed) == len(vector_few.VARIANTS)
    for v in (1, 16, 20, 64, 128, 300):
        packed = pack(np.ones((300, 4), np.float32), None, VectorWise(v))
        for n, machine in ((n, machine) for n in (*COLUMNS, 1000) for machine in (1, 16, 132)):
            program = vector_few.build_program(packed, "bfloat16", "sm_80", 1, machine)
            (launch,) = program.launches(n, None)
            assert launch.variant.name in listed
            assert launch.block[0] <= 32 * launch.variant.defines["MOST_WARPS"]


def test_a_block_fits_the_smallest_machine() -> None:
    least = min(TARGETS[name].block_shared_bytes for name in vector_few.ARCHITECTURES)
    for height in HEIGHTS:
        for width in vector_few.WIDTHS:
            for tall in vector_few.list_row_tiles(height, width):
                tile = vector_few.FewTile(tall, width, vector_few.find_most_warps(tall, width))
                assert vector_few.count_shared_bytes(tile) <= least


@pytest.mark.parametrize("n", [1, 8, 16])
def test_four_fifths_of_a_large_layer_is_reading_its_weights(n: int) -> None:
    """Predicted, of a decoder's 14336 x 4096 at 75%: the rest is the way to memory and back."""
    tiles = kept_columns(14336, 1024, 64)
    least = tiles.weights.nbytes / (vector_few.MEMORY_BYTES_A_CLOCK * 132)
    assert least / vector_few.predict_clocks(tiles, n, 132) >= 0.8


def test_no_columns_are_no_launch() -> None:
    packed = pack(np.ones((16, 16), np.float32), None, VectorWise(16))
    assert vector_few.build_program(packed, "float16", "sm_80", 0).launches(0, "relu") == []


def test_what_does_not_run_is_refused_in_a_sentence() -> None:
    packed = pack(np.ones((16, 16), np.float32), None, VectorWise(16))
    with pytest.raises(NotSupported, match=r"few columns is for sm_80, .*, not sm_75"):
        vector_few.build_program(packed, "float16", "sm_75", 8)
    with pytest.raises(NotSupported, match="elements are float16 or bfloat16, not float32"):
        vector_few.build_program(packed, "float32", "sm_80", 8)
    with pytest.raises(NotSupported, match="takes up to 64, not 65"):
        vector_few.build_program(packed, "float16", "sm_80", 65)
    with pytest.raises(NotSupported, match="more than one launch numbers with 32 bits"):
        vector_few.build_program(packed, "float16", "sm_80", 8).launches(2**31 - 8, None)
