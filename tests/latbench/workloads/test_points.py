"""Points: what is measured, once each, in an order that a rerun keeps."""

import pytest

from latbench.base.engine_registry import CPU_ENGINES
from latbench.errors import UsageError
from latbench.workloads.points import (
    STANDARD_ENGINES,
    Point,
    PointSetup,
    estimate_bytes,
    estimate_seconds,
    group_into_blocks,
    list_points,
    parse_patterns,
    parse_sparsities,
    select_default_patterns,
    select_points,
)
from latbench.workloads.workload import Layer, Workload, list_standard_workloads, read_workload
from sparse_kernels.patterns import NM, BlockWise, Dense, ShflBW, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

LINEAR = LinearShape(768, 768, 128)
CONV = Conv2dShape(1, 16, 14, 14, 32, 3, 3, (1, 1), (1, 1))


def some_points(*shapes: LinearShape | Conv2dShape, **options: object) -> list[Point]:
    workload = Workload("w", "s", tuple(Layer(f"l{i}", shape) for i, shape in enumerate(shapes)))
    return list_points([workload], PointSetup("cpu", 2, **options))  # type: ignore[arg-type]


def test_equal_shapes_are_measured_once() -> None:
    assert some_points(LINEAR, LINEAR) == some_points(LINEAR)
    ids = [point.id for point in some_points(LINEAR, CONV)]
    assert len(set(ids)) == len(ids)


def test_by_default_dense_runs_on_every_engine_that_can_and_sparse_on_ours() -> None:
    points = some_points(LINEAR)
    dense = {(point.backend, point.kernel) for point in points if point.pattern == Dense()}
    assert dense == {
        ("torch", "linear"), ("torch", "mkldnn"), ("torch", "prepacked"), ("onnxruntime", "auto"),
        ("openvino", "auto"), ("numba", "auto"),
    }  # fmt: skip
    assert {point.backend for point in points if point.pattern != Dense()} == {"numba"}
    assert dense == {
        (backend, kernel) for backend in STANDARD_ENGINES for kernel in CPU_ENGINES[backend].timed_kernels["linear"]
    }


@pytest.mark.parametrize("backend", ["torch_sparse_cpu", "scipy"])
def test_libraries_of_sparse_matrices_are_asked_for_what_they_have(backend: str) -> None:
    assert {point.pattern for point in some_points(LINEAR, backends=[backend])} == {
        Unstructured(), NM(2, 4), NM(1, 4), BlockWise(32, 32),
    }  # fmt: skip
    assert some_points(CONV, backends=[backend]) == []


def test_convolutions_by_onednn_have_their_channels_last_and_say_so() -> None:
    last = {(point.backend, point.kernel) for point in some_points(CONV) if point.layout == "nhwc"}
    assert last == {("torch", "prepacked"), ("openvino", "auto")}
    assert {point.layout for point in some_points(CONV)} == {"nchw", "nhwc"}
    assert {point.layout for point in some_points(LINEAR)} == {"token_major"}


def test_every_backend_has_a_plan() -> None:

    assert all(engine.timed_kernels["linear"] for engine in CPU_ENGINES.values())
    assert estimate_seconds(some_points(LINEAR, backends=list(CPU_ENGINES))) > 0


def test_tuning_adds_our_linear_layers_once_more() -> None:
    usual, tuned = set(some_points(LINEAR, CONV)), set(some_points(LINEAR, CONV, tune=True))
    more = {(point.backend, point.kernel, point.shape, point.pattern, point.sparsity) for point in tuned - usual}
    ours = [point for point in usual if point.backend == "numba" and point.shape == LINEAR]
    assert usual < tuned
    assert more == {("numba", "tuned", LINEAR, point.pattern, point.sparsity) for point in ours}


def test_bfloat16_adds_our_layers_with_rounded_weights_and_all_in_bfloat16_beside_dense_ones() -> None:
    usual, rounded = set(some_points(LINEAR, CONV)), set(some_points(LINEAR, CONV, rounded=["bfloat16"]))
    assert usual < rounded
    formats: dict[tuple[Shape, str, str], set[str]] = {}
    for point in rounded - usual:
        formats.setdefault((point.shape, point.backend, point.kernel), set()).add(point.pattern.format)
        key = point.key()
        of_x = "float32" if point.kernel == "bf16-weights" else "bfloat16"
        assert (key["dtype_w"], key["dtype_a"], key["dtype_out"]) == ("bfloat16", of_x, "float32")
    sparse = {"vector", "shflbw", "block"}
    both = {(shape, engine, "bf16"): {"dense"} for shape in (LINEAR, CONV) for engine in ("torch", "openvino")}
    ours = {(shape, "numba", "bf16"): {"dense", *sparse} for shape in (LINEAR, CONV)}
    assert formats == {**both, **ours, (LINEAR, "numba", "bf16-weights"): sparse}
    # As fast as they can be had: oneDNN's convolutions like channels last.
    assert {(it.backend, it.layout) for it in rounded - usual if it.shape == CONV} == {
        ("numba", "nchw"), ("torch", "nhwc"), ("openvino", "nhwc")
    }  # fmt: skip


def test_the_default_patterns_hold_all_formats_with_their_own_sparsities() -> None:
    points = some_points(LINEAR, backends=["numba"])
    found = {point.pattern: [] for point in points}  # type: ignore[var-annotated]
    for point in points:
        found[point.pattern].append(point.sparsity)
    free = [VectorWise(32), ShflBW(32), BlockWise(32, 32), Unstructured()]
    assert set(found) == {Dense(), *free, NM(2, 4), NM(1, 4)}
    assert found[Dense()] == [0.0] and found[NM(2, 4)] == [0.5] and found[NM(1, 4)] == [0.75]
    for pattern in free:
        assert sorted(found[pattern]) == [0.5, 0.6, 0.75, 0.8, 0.9, 0.95]


@pytest.mark.parametrize(
    "shape", [LinearShape(10, 33, 1), LinearShape(1, 1, 1), CONV, Conv2dShape(1, 3, 8, 8, 16, 7, 7)]
)
def test_defaults_never_name_what_a_shape_cannot_hold(shape: LinearShape | Conv2dShape) -> None:
    patterns = select_default_patterns(shape)
    assert Dense() in patterns and all(pattern.refuses(shape) is None for pattern in patterns)


def test_a_row_has_the_key_of_its_point() -> None:
    point = some_points(CONV)[0]
    key = point.key()
    assert (key["op"], key["m"], key["k"], key["n"]) == ("conv2d", 32, 144, 196)
    assert (key["c_in"], key["stride_h"], key["padding_w"], key["layout"]) == (16, 1, 1, "nchw")
    assert some_points(LINEAR)[0].key()["layout"] == "token_major"
    assert "c_in" not in some_points(LINEAR)[0].key()


def test_blocks_hold_one_shape_and_keep_their_order_when_points_are_done() -> None:
    shapes = [LinearShape(m, 64, 8) for m in range(1, 12)]
    points = some_points(*shapes)
    whole = group_into_blocks(points, seed=1)
    assert all(len({point.shape for point in block}) == 1 for block in whole)
    order = [block[0].shape for block in whole]
    assert order != shapes and set(order) == set(shapes)
    assert [block[0].shape for block in group_into_blocks(points, seed=2)] != order
    left = [point for point in points if point.shape in shapes[::2]]
    assert [block[0].shape for block in group_into_blocks(left, seed=1)] == [s for s in order if s in shapes[::2]]


def test_shapes_of_few_points_share_a_block_and_none_is_divided() -> None:
    points = [*some_points(*(LinearShape(m, 64, 8) for m in range(1, 30)))]
    alone = group_into_blocks(points, seed=1)
    assert {len(block) for block in alone} != {1}
    together = group_into_blocks(points, seed=1, least=100)
    assert [point for block in together for point in block] == [point for block in alone for point in block]
    assert all(len(block) >= 100 for block in together[:-1]) and len(together) > 1
    by_shape = [{point.shape for point in block} for block in together]
    assert sum(len(shapes) for shapes in by_shape) == len(set.union(*by_shape)) == len(alone)


def test_patterns_and_sparsities_are_read_from_texts() -> None:
    assert parse_patterns(["dense", "vector:8", "nm:2:4"]) == [Dense(), VectorWise(8), NM(2, 4)]
    assert parse_sparsities(["0.5", ".75", "0.9"]) == [0.5, 0.75, 0.9]


@pytest.mark.parametrize("text", ["1", "0", "-0.5", "75", "nan", "half", ""])
def test_a_sparsity_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="sparsity"):
        parse_sparsities([text])


def test_an_unknown_pattern_or_workload_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"unknown pattern 'checkers'.*nm:KEEP:OF"):
        parse_patterns(["dense", "checkers"])
    with pytest.raises(UsageError, match="bert-base"):
        select_points(["bort-base"], [], [], PointSetup(device="cpu", threads=1))


def test_silence_means_the_bundled_workloads_that_are_no_language_models() -> None:
    points = select_points([], [], [], PointSetup(device="cpu", threads=1))
    shapes = {layer.shape for name in list_standard_workloads() for layer in read_workload(name).layers}
    assert {point.shape for point in points} == shapes and "qwen3-8b" not in list_standard_workloads()
    assert 600 < estimate_seconds(points) < 36_000
    assert 1e5 < estimate_bytes(points) < 1e8


def test_the_estimate_of_disk_is_what_a_sweep_of_gnmt_took() -> None:
    """Forty points of two and three layers a part: 128,371 bytes, measured."""
    shapes = [LinearShape(4096, 1024, 128)] * 18 + [LinearShape(32320, 1024, 128)] * 12
    shapes += [LinearShape(4096, 2048, 128)] * 10
    every = [Point("cpu", "numba", "auto", shape, Dense(), 0.0, 2, seed=seed) for seed, shape in enumerate(shapes)]
    assert estimate_bytes(every, block_points=1) == pytest.approx(128_371, rel=0.1)
    assert estimate_bytes([]) == estimate_seconds([]) == 0
