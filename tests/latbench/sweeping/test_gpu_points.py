"""What is measured on a GPU, and in which order."""

import pytest

from latbench.sweeping import gpu_points
from latbench.sweeping.gpu_points import (
    GPU_SPARSITIES,
    build_gpu_point,
    list_smoke_points,
    list_staged_blocks,
    list_standard_blocks,
    list_standard_shapes,
)
from latbench.workloads.points import Point
from sparse_kernels.patterns import NM, BlockWise, Dense, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape

SHAPE = LinearShape(256, 128, 64)
FIRST_BLOCKS = 3  # those of the first tier


@pytest.fixture(scope="module")
def standard() -> list[list[Point]]:
    return list_standard_blocks("nvidia-h200")


def test_the_standard_sweep_is_bounded_and_of_one_shape_a_block(standard: list[list[Point]]) -> None:
    every = [each for block in standard for each in block]
    assert 400 <= len(every) <= gpu_points.MOST_POINTS and len({each.id for each in every}) == len(every)
    for block in standard:
        assert 1 <= len(block) <= gpu_points.BLOCK_POINTS and len({each.shape for each in block}) == 1


def test_what_tells_most_comes_first(standard: list[list[Point]]) -> None:
    first = [each for block in standard[:FIRST_BLOCKS] for each in block]
    assert first[0].shape == LinearShape(4096, 4096, 2048)
    assert {str(each.pattern) for each in first} >= {"dense", "vector:128", "shflbw:64", "nm:2:4"}
    layouts = {(each.kernel, each.layout) for each in first if each.backend == "torch_gpu"}
    # All four orders of operands, a search, and bytes; bfloat16 by the same kernels.
    names = ("cublas", "cublaslt", "cublas_turned", "cublaslt_turned", "cublaslt_search")
    orders = {(name, layout) for name in names for layout in ("feature_major", "token_major")}
    assert layouts == orders | {(name, "token_major") for name in ("fp8", "fp8_rows", "int8")}
    assert {each.dtype_w for each in first} == {"float16", "bfloat16", "fp8", "int8"}
    # The first shape meets every backend, in well under a quarter of the points.
    of_first = [each for block in standard for each in block if each.shape == first[0].shape]
    assert {each.backend for each in of_first} == set(gpu_points.GPU_ENGINES) and len(of_first) < 100


def test_what_the_kernels_have_to_show_are_the_first_blocks(standard: list[list[Point]]) -> None:
    kernels = {
        (str(each.pattern), each.sparsity, each.backend, each.kernel)
        for block in standard[:FIRST_BLOCKS]
        for each in block
    }
    ours = {(pattern, sparsity) for pattern, sparsity, backend, _ in kernels if backend == "cupy"}
    four = (0.5, 0.75, 0.9, 0.95)
    assert ours >= {(f"{pattern}:128", sparsity) for pattern in ("shflbw", "vector") for sparsity in four}
    assert ours >= {(f"{pattern}:64", sparsity) for pattern in ("shflbw", "vector") for sparsity in (0.75, 0.9)}
    assert ours >= {("block:128x128", 0.75), ("nm:2:4", 0.5)}
    peers = {(pattern, kernel) for pattern, _, backend, kernel in kernels if backend == "torch_sparse"}
    assert peers == {
        ("block:128x128", "bsr"), ("block:128x128", "bsr_tuned"),
        ("nm:2:4", "cusparselt"), ("nm:2:4", "cusparselt_tuned"), ("nm:2:4", "cutlass"), ("nm:2:4", "torchao"),
    }  # fmt: skip


def test_then_come_all_shapes_large_ones_first(standard: list[list[Point]]) -> None:
    shapes = list(dict.fromkeys(block[0].shape for block in standard))
    assert shapes == list_standard_shapes()
    assert tuple(shapes[: len(gpu_points.LARGE)]) == gpu_points.LARGE and isinstance(shapes[-1], Conv2dShape)


def test_decoding_is_measured_on_few_tokens_against_dense_and_the_peers(standard: list[list[Point]]) -> None:
    every = [each for block in standard for each in block]
    decoded = [each for each in every if each.shape.n in (1, 16)]
    assert {(each.shape.m, each.shape.k) for each in decoded} == {(6144, 4096), (4096, 4096), (4096, 14336)}
    for shape in {each.shape for each in decoded}:
        asked = {(str(each.pattern), each.backend) for each in decoded if each.shape == shape}
        assert asked >= {("dense", "torch_gpu"), ("vector:64", "cupy"), ("nm:2:4", "cupy")}
        assert ("nm:2:4", "torch_sparse") in asked
        types = {each.dtype_w for each in decoded if each.shape == shape and each.pattern == Dense()}
        assert types >= {"float16", "fp8", "int4"}
    assert 60 <= len(decoded) <= 150


def test_a_search_that_takes_long_is_made_for_the_large_shapes(standard: list[list[Point]]) -> None:
    tuned = [each.shape for block in standard for each in block if each.kernel == "bsr_tuned"]
    assert set(tuned) == set(gpu_points.LARGE) and len(tuned) == 2 * len(gpu_points.LARGE) + 1
    # Who asks for another shape gets it there.
    asked = flat(
        list_staged_blocks([LinearShape(256, 256, 256)], "x", patterns=[BlockWise(64, 64)], sparsities=(0.5,))
    )
    assert "bsr_tuned" in {each.kernel for each in asked}


def test_every_shape_has_dense_to_compare_with_before_any_sparse_point(standard: list[list[Point]]) -> None:
    seen = set()
    for block in standard:
        seen |= {each.shape for each in block if isinstance(each.pattern, Dense)}
        assert block[0].shape in seen
    assert seen == set(list_standard_shapes())


def test_the_standard_sweep_covers_the_workloads(standard: list[list[Point]]) -> None:
    shapes = {each.shape for block in standard for each in block}
    assert {LinearShape(512, 2048, 2048), LinearShape(3072, 768, 128), LinearShape(4096, 1024, 128)} <= shapes
    assert LinearShape(11008, 4096, 2048) in shapes
    assert sum(isinstance(shape, Conv2dShape) for shape in shapes) >= 6
    sparsities = {each.sparsity for block in standard for each in block}
    assert {0.5, 0.75, 0.9, 0.95} <= sparsities
    assert all(each.epilogue == "none" for block in standard for each in block)


def test_only_installed_backends_are_asked() -> None:
    blocks = list_standard_blocks("nvidia-h200", backends=["cupy", "torch_gpu"])
    assert {each.backend for block in blocks for each in block} == {"cupy", "torch_gpu"}


def test_numba_is_launched_because_it_cannot_be_captured() -> None:
    assert build_gpu_point("x", SHAPE, Dense(), 0.0, gpu_points.NUMBA[0]).launch_mode == "call"


def test_a_user_may_ask_for_any_pattern_and_sparsity() -> None:
    asked = flat(list_staged_blocks([SHAPE, SHAPE], "x", patterns=[BlockWise(32, 32), NM(2, 4)], sparsities=(0.7,)))
    assert {(str(each.pattern), each.sparsity) for each in asked} == {("block:32x32", 0.7), ("nm:2:4", 0.5)}
    peers = {each.kernel for each in asked if each.pattern == NM(2, 4)}
    assert peers == {"auto", "cusparselt", "cusparselt_tuned", "cutlass", "torchao"}
    everything = flat(list_staged_blocks([SHAPE], "x"))
    assert {each.backend for each in everything} == set(gpu_points.GPU_ENGINES)
    of_vectors = {each.sparsity for each in everything if each.pattern == VectorWise(128)}
    assert of_vectors == set(GPU_SPARSITIES)


def test_a_full_sweep_begins_as_the_standard_one_and_has_all_of_it(standard: list[list[Point]]) -> None:
    full = list_staged_blocks([*list_standard_shapes(), SHAPE], "nvidia-h200")
    assert full[:FIRST_BLOCKS] == standard[:FIRST_BLOCKS]
    assert set(flat(standard)) < set(flat(full)) and len(set(flat(full))) == len(flat(full))
    assert all(
        0 < len(block) <= gpu_points.BLOCK_POINTS and len({each.shape for each in block}) == 1 for block in full
    )
    # What every shape has in common comes before the rest of any.
    first = {shape: number for number, block in reversed(list(enumerate(full))) for shape in [block[0].shape]}
    assert max(first.values()) < len(full) / 2


def test_a_smoke_test_has_every_kernel_of_every_engine_and_small_layers() -> None:
    smoke = list_smoke_points("x")
    kernels = {(each.backend, each.kernel, each.layout) for each in smoke}
    every = [wish for wishes in (gpu_points.LINEAR_WISHES, gpu_points.CONV_WISHES) for wish in wishes]
    assert kernels == {kernel for wish in every for kernel in wish.kernels}
    ours = {each.pattern for each in smoke if each.backend == "cupy"}
    assert {each.format for each in ours} == {"vector", "shflbw", "block", "nm", "unstructured"}
    assert len(smoke) < 50 and len(set(smoke)) == len(smoke)
    assert {each.shape for each in smoke} == {gpu_points.SMOKE_LINEAR, gpu_points.SMOKE_CONV, gpu_points.SMOKE_FEW}
    assert {each.backend for each in smoke if each.shape == gpu_points.SMOKE_FEW} == {"cupy"}
    assert {each.backend for each in list_smoke_points("x", ["cupy"])} == {"cupy"}


@pytest.mark.parametrize("precision", gpu_points.PRECISIONS)
def test_a_point_names_the_types_of_its_operands(precision: str) -> None:
    one = build_gpu_point("x", SHAPE, Dense(), 0.0, gpu_points.DENSE[0], precision=precision)
    assert (one.dtype_w, one.dtype_a, one.dtype) == gpu_points.PRECISIONS[precision] and one.dtype_w == precision


def test_weights_in_four_bits_are_for_few_tokens() -> None:
    for n, expected in ((64, {"int4"}), (65, set())):
        asked = flat(list_staged_blocks([LinearShape(256, 128, n)], "x"))
        assert {each.dtype_w for each in asked if each.kernel == "int4"} == expected


def flat(blocks: list[list[Point]]) -> list[Point]:
    return [each for block in blocks for each in block]
