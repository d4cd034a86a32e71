"""The vector kernel in the emulator against the float64 oracle, and how a launch is chosen."""

import numpy as np
import pytest
from vector_cases import linear, run

from sparse_kernels import NM, BlockWise, ShflBW, VectorWise, pack
from sparse_kernels.cuda import vector
from sparse_kernels.cuda.program import NotSupported

HEIGHTS = (16, 32, 64, 128)
WIDTHS = (64, 128, 256)

TILES = [
    linear(ShflBW(v), v + 37, 83, 72, activation=activation, width=width, dtype=dtype)
    for v in HEIGHTS
    for width, activation, dtype in zip(
        WIDTHS, ("relu", "gelu", None), ("float16", "bfloat16", "float16"), strict=True
    )
]
MACHINES = [
    linear(VectorWise(v), 2 * v + 5, 141, 136, architecture=architecture, dtype=dtype, width=128)
    for architecture, dtype, heights in (
        ("sm_70", "float16", HEIGHTS),
        ("sm_75", "float16", HEIGHTS),
        ("sm_86", "bfloat16", (16, 64)),
        ("sm_90a", "bfloat16", (32, 128)),
    )
    for v in heights
]
ODD_COLUMNS = [
    linear(VectorWise(v), 130, 51, n, architecture=architecture, dtype=dtype, activation=activation)
    for v, n, architecture, dtype, activation in (
        (16, 1, "sm_80", "float16", "gelu"),
        (32, 63, "sm_80", "bfloat16", None),
        (64, 65, "sm_80", "float16", None),
        (128, 100, "sm_80", "bfloat16", "relu"),
        (64, 7, "sm_75", "float16", "gelu"),
        (32, 9, "sm_70", "float16", "relu"),
    )
]
OTHER_PATTERNS = [
    linear(BlockWise(16, 16), 100, 100, 40),
    linear(BlockWise(64, 48), 200, 120, 24, dtype="bfloat16"),
    linear(BlockWise(128, 64), 130, 200, 80, sparsity=0.7, architecture="sm_75"),
    linear(BlockWise(100, 7), 333, 50, 16),
    linear(VectorWise(24), 50, 50, 16),
    linear(VectorWise(1), 5, 5, 8),
    linear(ShflBW(200), 410, 60, 16, bias=False),
    linear(ShflBW(32), 32, 1, 8),
    linear(VectorWise(32), 1, 1, 1),
]
DEPTHS = [
    linear(VectorWise(16), 32, k, 24, sparsity=0, architecture=architecture, bias=False)
    for k in (1, 16, 31, 32, 33, 64, 96, 97, 128, 129, 300)
    for architecture in ("sm_80", "sm_75")
]


@pytest.mark.parametrize("layer", [*TILES, *MACHINES, *ODD_COLUMNS, *OTHER_PATTERNS, *DEPTHS], ids=str)
def test_a_layer_is_multiplied(layer, rng):
    run(layer, rng, seed=1)


@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("architecture", ["sm_70", "sm_75", "sm_80", "sm_86"])
def test_whatever_the_order_of_threads_and_copies(architecture, seed, rng):
    layer = linear(VectorWise(32), 70, 290, 72, sparsity=0.3, architecture=architecture, width=64)
    run(layer, rng, seed)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_75", "sm_70"])
def test_groups_that_keep_nothing_leave_bias_and_activation(architecture, activation, rng):
    mask = np.zeros((96, 100), bool)
    mask[32:64] = rng.random(100) < 0.5
    layer = linear(VectorWise(32), 96, 100, 40, architecture=architecture, activation=activation)
    run(layer, rng, 1, mask)
    run(layer, rng, 2, np.zeros_like(mask))


def test_groups_of_very_unequal_work(rng):
    mask = np.repeat(np.arange(200) < [[200], [0], [1], [150], [33]], 16, axis=0)
    for architecture in ("sm_80", "sm_75"):
        run(linear(ShflBW(16), 80, 200, 136, architecture=architecture, width=64), rng, 3, mask)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_75", "sm_70"])
def test_infinite_activations_of_dropped_columns_are_not_read(architecture):
    """Padding takes zeros, not some row of x times a zero weight, which would be NaN here."""
    import emulator

    weight = np.ones((16, 40), np.float32)
    mask = np.zeros(weight.shape, bool)
    mask[:, [3, 17]] = True
    x = np.full((40, 8), np.inf, np.float16)
    x[[3, 17]] = 1
    out = np.empty((16, 8), np.uint16)
    program = vector.build_program(pack(weight, mask, VectorWise(16)), "float16", architecture, 8)
    emulator.run(program.launches(8, None), x.view(np.uint16), out, seed=1)
    np.testing.assert_array_equal(out.view(np.float16), 2)


def launch_of(pattern=None, m=256, k=64, n=128, architecture="sm_80", columns=None):
    packed = pack(np.ones((m, k), np.float32), None, pattern or VectorWise(64))
    program = vector.build_program(packed, "float16", architecture, n)
    (launch,) = program.launches(n if columns is None else columns, None)
    return launch


def test_a_program_runs_other_numbers_of_columns_than_it_was_made_for():
    assert launch_of(n=8, columns=2048).variant == launch_of(n=2048, columns=2048).variant
    assert launch_of(n=2048, columns=2047).variant.defines["COPY"] == 1


def test_no_columns_are_no_launch():
    packed = pack(np.ones((16, 16), np.float32), None, VectorWise(16))
    assert vector.build_program(packed, "float16", "sm_80", 0).launches(0, "relu") == []


def test_a_wide_tile_is_taken_where_it_leaves_nobody_idle():
    widths = [launch_of(m=4096, n=n).variant.defines["BN"] for n in (64, 128, 2048, 8192)]
    assert widths == [64, 128, 256, 256]


def test_columns_that_are_not_there_are_counted():
    """320 columns: 5 blocks of 64 bring 5 * 128, 3 of 128 bring 3 * 192, 2 of 256 bring 2 * 320."""
    for columns, widest in ((320, 128), (264, 128), (512, 256), (8, 64)):
        assert vector.choose_width(64, 108, columns, (64, 128, 256), 108) == widest


def test_a_smaller_machine_gets_wider_tiles():
    packed = pack(np.ones((4096, 64), np.float32), None, VectorWise(64))
    for count, width in ((256, 64), (82, 256)):
        (launch,) = vector.build_program(packed, "float16", "sm_89", 256, count).launches(256, None)
        assert launch.variant.defines["BN"] == width


def test_one_program_takes_another_width_for_another_number_of_columns():
    program = vector.build_program(pack(np.ones((4096, 64), np.float32), None, VectorWise(64)), "float16", "sm_80", 1)
    launches = [program.launches(n, None)[0] for n in (8, 2048)]
    assert [launch.variant.defines["BN"] for launch in launches] == [64, 256]
    assert launches[0].arguments[0] is launches[1].arguments[0]


def test_every_launch_is_of_a_variant_that_the_gate_compiles():
    listed = {(one.name, architecture) for one in vector.VARIANTS for architecture in one.architectures}
    assert len(listed) == sum(len(one.architectures) for one in vector.VARIANTS)
    for architecture in vector.MACHINES:
        for v in (1, 16, 20, 64, 128, 300):
            for n in (1, 8, 100, 1024, 100_000):
                packed = pack(np.ones((300, 4), np.float32), None, VectorWise(v))
                (launch,) = vector.build_program(packed, "float16", architecture, n).launches(n, None)
                assert (launch.variant.name, architecture) in listed


def test_blocks_cover_every_group_and_column():
    launch = launch_of(m=300, n=1000)
    assert launch.grid == (5 * -(-1000 // launch.variant.defines["BN"]), 1, 1)
    assert launch.block == (32 * launch.variant.defines["WARPS_M"] * launch.variant.defines["WARPS_N"], 1, 1)


def test_what_does_not_run_is_refused_in_a_sentence():
    packed = pack(np.ones((16, 16), np.float32), None, VectorWise(16))
    with pytest.raises(NotSupported, match=r"are for sm_70, .*, not sm_61"):
        vector.build_program(packed, "float16", "sm_61", 8)
    with pytest.raises(NotSupported, match="elements are float16 or bfloat16, not float32"):
        vector.build_program(packed, "float32", "sm_80", 8)
    with pytest.raises(NotSupported, match="multiply bfloat16 from sm_80 on; sm_75 runs float16"):
        vector.build_program(packed, "bfloat16", "sm_75", 8)
    with pytest.raises(NotSupported, match="more than one launch numbers with 32 bits"):
        vector.build_program(packed, "float16", "sm_80", 8).launches(2**31 - 8, None)
    dropped = np.zeros((4, 4), bool)
    with pytest.raises(NotSupported, match="not nm:2:4"):
        vector.build_program(pack(np.ones((4, 4), np.float32), dropped, NM(2, 4)), "float16", "sm_80", 8)
