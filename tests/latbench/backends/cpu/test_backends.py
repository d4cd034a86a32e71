"""Engines: each computes what the oracle says, on odd shapes too, and a wrong one is caught before it is timed."""

import importlib
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from latbench.backends import installed_engines
from latbench.backends.cpu import prepare_point
from latbench.backends.cpu.prepare_point import Engine, Rotation, SyntheticLayer
from latbench.backends.cpu.torch import refuse_bytes
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import CPU_ENGINES
from latbench.machines.devices import read_cpu_flags
from latbench.workloads.points import Point
from sparse_kernels import oracle
from sparse_kernels.cpu.codegen import cpu_target
from sparse_kernels.formats import pack
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

SHAPES: list[Shape] = [
    LinearShape(17, 13, 5),
    LinearShape(1, 1, 1),
    Conv2dShape(3, 5, 9, 7, 6, 3, 2, (2, 1), (1, 0), (1, 2)),
    Conv2dShape(1, 4, 5, 5, 8, 1, 1),
]


@pytest.fixture(autouse=True)
def one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several would share a pool of threads, and no session of this process could have its own any more."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("latbench.backends.cpu.onnxruntime.MOST_SESSIONS", 1)


def point(
    backend: str,
    kernel: str,
    shape: Shape,
    pattern: Pattern | None = None,
    sparsity: float = 0.0,
    threads: int = 2,
    layout: str = "",
) -> Point:
    return Point("cpu", backend, kernel, shape, pattern or Dense(), sparsity, threads=threads, layout=layout)


DENSE = [("torch", 0), ("torch", 1), ("torch", 2), ("onnxruntime", 0), ("openvino", 0), ("numba", 0)]


def test_onnxruntime_runs_a_layer_that_needs_no_copies_after_one_that_does() -> None:
    code = """
from latbench.backends.cpu import onnxruntime, prepare_point
from latbench.workloads.points import Point
from sparse_kernels.patterns import Dense
from sparse_kernels.shapes import LinearShape

for sessions in (2, 1):
    onnxruntime.MOST_SESSIONS = sessions
    point = Point("cpu", "onnxruntime", "auto", LinearShape(17, 13, 5), Dense(), 0.0, threads=2)
    engine = onnxruntime.prepare(point, prepare_point.build_synthetic_layer(point))
    print(len(engine.calls), *engine.output(engine.calls[0]()).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2 5 17", "1 5 17"], done.stderr


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("backend", "position"), DENSE)
def test_every_engine_runs_dense_layers_and_is_right(backend: str, position: int, shape: Shape) -> None:
    rotation = prepare_point.prepare_point(
        point(backend, CPU_ENGINES[backend].timed_kernels[shape.op][position], shape)
    )
    assert rotation.facts["max_rel_err"] < 1e-5
    assert rotation.facts["nnz"] == shape.m * shape.k and rotation.facts["sparsity_actual"] == 0
    assert rotation.facts["flop_dense"] == rotation.facts["flop_nnz"] == shape.flop
    assert rotation.facts["kernel_used"].startswith(backend)
    assert rotation() is not None


@pytest.mark.parametrize(
    ("backend", "cache_bytes", "copies", "flags"),
    [
        ("numba", 5 * 4 * 32 * 16, 5, ""),
        ("openvino", 5 * 4 * 32 * 16, 4, "in_cache"),  # an engine that is given fewer says so
        ("numba", 2**30, 6, "in_cache"),  # so does any other, of a layer so small
    ],
)
def test_a_row_says_how_many_copies_took_turns_and_whether_they_passed_the_caches(
    monkeypatch: pytest.MonkeyPatch, backend: str, cache_bytes: int, copies: int, flags: str
) -> None:
    monkeypatch.setattr(prepare_point, "count_rotated_bytes", lambda: cache_bytes)
    monkeypatch.setattr(prepare_point, "count_copies", lambda size, most=6: min(most, -(-cache_bytes // size)))
    for module in ("numba", "openvino"):
        monkeypatch.setattr(f"latbench.backends.cpu.{module}.count_copies", prepare_point.count_copies)
    monkeypatch.setattr("latbench.backends.cpu.openvino.MOST_SESSIONS", 4)
    facts = prepare_point.prepare_point(point(backend, "auto", LinearShape(32, 16, 3))).facts
    assert (facts["weight_copies"], facts["flags"]) == (copies, flags)


@pytest.mark.parametrize("pattern", [VectorWise(8), ShflBW(8), BlockWise(8, 4), Unstructured(), NM(2, 4)], ids=str)
def test_numba_runs_every_pattern_and_is_right(pattern: Pattern) -> None:
    rotation = prepare_point.prepare_point(point("numba", "auto", LinearShape(24, 16, 3), pattern, 0.5))
    assert rotation.facts["sparsity_actual"] == pytest.approx(0.5, abs=0.05)
    assert rotation.facts["flop_nnz"] == 2 * rotation.facts["nnz"] * 3


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("kernel", CPU_ENGINES["torch"].timed_kernels["conv2d"])
def test_a_convolution_by_torch_ends_in_the_order_of_memory_that_its_row_names(kernel: str, layout: str) -> None:
    y = prepare_point.prepare_point(point("torch", kernel, Conv2dShape(2, 5, 9, 7, 6, 3, 3), layout=layout))()
    assert y.is_contiguous(memory_format=torch.channels_last) == (layout == "nhwc")
    assert y.is_contiguous() == (layout == "nchw")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("shape", SHAPES[2:], ids=str)
def test_openvino_takes_and_gives_images_in_the_order_that_the_row_names(shape: Conv2dShape, layout: str) -> None:
    rotation = prepare_point.prepare_point(point("openvino", "auto", shape, layout=layout))
    size = (shape.c_out, shape.out_h, shape.out_w) if layout == "nchw" else (shape.out_h, shape.out_w, shape.c_out)
    assert rotation()[0].shape == (shape.batch, *size)


# What becomes CSR, and what BSR: odd sizes, and next to nothing kept.
COMPRESSED = [
    (LinearShape(17, 13, 5), Unstructured(), 0.5, "csr"),
    (LinearShape(1, 1, 1), Unstructured(), 0.5, "csr"),
    (LinearShape(9, 31, 1), Unstructured(), 0.999, "csr"),
    (LinearShape(7, 11, 3), NM(2, 4), 0.5, "csr"),
    (LinearShape(35, 21, 11), BlockWise(7, 7), 0.6, "bsr"),
    (LinearShape(24, 16, 3), BlockWise(8, 8), 0.95, "bsr"),
]


@pytest.mark.parametrize(("shape", "pattern", "sparsity", "format"), COMPRESSED, ids=str)
@pytest.mark.parametrize("backend", ["torch_sparse_cpu", "scipy"])
def test_libraries_of_sparse_matrices_are_right(
    backend: str, shape: Shape, pattern: Pattern, sparsity: float, format: str
) -> None:
    wanted = point(backend, "auto", shape, pattern, sparsity, threads=1)
    rotation = prepare_point.prepare_point(wanted)
    assert rotation.facts["kernel_used"] == f"{backend}.{format}"
    assert rotation.facts["max_rel_err"] < 1e-5
    assert rotation.facts["nnz"] == np.count_nonzero(prepare_point.build_synthetic_layer(wanted).weight)
    y = np.asarray(rotation())
    assert y.flags.c_contiguous and y.shape == (shape.n, shape.m)


def test_scipy_has_blocks_that_are_not_square_and_torch_has_not() -> None:
    wanted = point("scipy", "auto", LinearShape(24, 15, 2), BlockWise(8, 3), 0.5, threads=1)
    assert prepare_point.prepare_point(wanted).facts["kernel_used"] == "scipy.bsr"
    with pytest.raises(Unsupported, match="takes square ones, not block:8x3"):
        prepare_point.prepare_point(replace(wanted, backend="torch_sparse_cpu"))


@pytest.mark.parametrize("backend", ["torch_sparse_cpu", "scipy"])
@pytest.mark.parametrize(
    ("shape", "pattern", "said"),
    [
        (LinearShape(24, 16, 3), VectorWise(8), "runs unstructured, N:M and block-wise linear layers, not vector:8"),
        (LinearShape(24, 16, 3), Dense(), "not dense"),
        (LinearShape(20, 16, 3), BlockWise(8, 8), "needs whole blocks, and block:8x8 does not divide 20 x 16"),
        (Conv2dShape(1, 8, 5, 5, 8, 3, 3), Unstructured(), "has no sparse convolutions"),
    ],
    ids=str,
)
def test_libraries_of_sparse_matrices_refuse_the_rest(
    backend: str, shape: Shape, pattern: Pattern, said: str
) -> None:
    sparsity = 0.0 if isinstance(pattern, Dense) else 0.5
    with pytest.raises(Unsupported, match=f"{backend} .*{said}"):
        prepare_point.prepare_point(point(backend, "auto", shape, pattern, sparsity, threads=1))


@pytest.mark.parametrize("pattern", [Unstructured(), BlockWise(4, 4)], ids=str)
@pytest.mark.parametrize("backend", ["torch_sparse_cpu", "scipy"])
def test_a_lost_weight_of_a_sparse_matrix_is_caught(
    monkeypatch: pytest.MonkeyPatch, backend: str, pattern: Pattern
) -> None:
    module = importlib.import_module(f"latbench.backends.cpu.{backend}")
    whole = module.compress_weight

    def without_the_last(*arguments: Any) -> Any:
        packed = whole(*arguments)
        values = packed.values.copy()
        values.flat[-1] = 0
        return replace(packed, values=values)

    monkeypatch.setattr(module, "compress_weight", without_the_last)
    with pytest.raises(WrongResult, match="results are wrong"):
        prepare_point.prepare_point(point(backend, "auto", LinearShape(12, 8, 3), pattern, 0.5, threads=1))


def test_torch_without_mkl_has_no_sparse_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: False)
    with pytest.raises(Unsupported, match="this build of torch has none"):
        prepare_point.prepare_point(point("torch_sparse_cpu", "auto", LinearShape(8, 8, 1), Unstructured(), 0.5))


def test_torch_without_onednn_has_its_own_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    with pytest.raises(Unsupported, match="prepacked kernel is oneDNN's, and this build of torch has none"):
        prepare_point.prepare_point(point("torch", "prepacked", LinearShape(8, 8, 1)))
    assert (
        prepare_point.prepare_point(point("torch", "linear", LinearShape(8, 8, 1))).facts["kernel_used"]
        == "torch.linear"
    )


def test_an_unknown_kernel_of_torch_is_refused() -> None:
    with pytest.raises(Unsupported, match="no dense conv2d kernel linear: known are conv2d, mkldnn, prepacked"):
        prepare_point.prepare_point(point("torch", "linear", Conv2dShape(1, 4, 5, 5, 8, 1, 1)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("backend", "kernel"), [("torch", "prepacked"), ("torch_sparse_cpu", "auto")])
def test_torch_has_as_many_threads_as_its_row_says(backend: str, kernel: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pattern = Dense() if backend == "torch" else Unstructured()
        prepare_point.prepare_point(point(backend, kernel, LinearShape(8, 8, 1), pattern, 0.0, threads))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_openvino_has_as_many_threads_as_its_row_says(threads: int) -> None:
    from latbench.backends.cpu import openvino

    wanted = point("openvino", "auto", LinearShape(8, 8, 1), threads=threads)
    model = openvino.compile_layer(wanted, prepare_point.build_synthetic_layer(wanted))
    assert model.get_property("INFERENCE_NUM_THREADS") == threads and model.get_property("NUM_STREAMS") == 1


def test_scipy_refuses_threads_that_it_would_not_use() -> None:
    with pytest.raises(Unsupported, match="scipy multiplies with one thread, not 2"):
        prepare_point.prepare_point(point("scipy", "auto", LinearShape(8, 8, 1), Unstructured(), 0.5, threads=2))


def test_openvino_in_bfloat16_gives_no_float32_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from latbench.backends.cpu import openvino

    wanted = point("openvino", "auto", LinearShape(64, 4096, 8))
    assert prepare_point.prepare_point(wanted).facts["kernel_used"].endswith("f32")
    if "BF16" not in openvino.openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this processor has no bfloat16")
    monkeypatch.setattr(openvino, "compile_layer", partial(openvino.compile_layer, precision="bf16"))
    with pytest.raises(Unsupported, match="computes this layer in bf16 here"):
        prepare_point.prepare_point(wanted)


def test_openvino_reports_to_nobody() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*_): raise AssertionError('a connection was tried')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "import latbench.backends.cpu.openvino\n"
        "print([name for name in sys.modules if name.startswith('openvino_telemetry.')])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n" and ran.stderr == ""


@pytest.mark.parametrize("backend", ["torch", "onnxruntime", "openvino"])
def test_a_dense_engine_refuses_a_sparse_point(backend: str) -> None:
    with pytest.raises(Unsupported, match=f"{backend} runs dense layers, not vector:8"):
        prepare_point.prepare_point(point(backend, "auto", LinearShape(8, 8, 1), VectorWise(8), 0.5))


def test_a_pattern_that_does_not_fit_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="channels"):
        prepare_point.prepare_point(point("numba", "auto", Conv2dShape(1, 3, 5, 5, 8, 3, 3), NM(2, 4), 0.5))


def test_rounded_weights_are_held_to_the_rounded_product_and_refused_where_they_gain_nothing() -> None:
    shape = LinearShape(64, 48, 3)
    rotation = prepare_point.prepare_point(
        replace(point("numba", "bf16-weights", shape, ShflBW(32), 0.5), dtype_w="bfloat16")
    )
    assert ".bf16." in rotation.facts["kernel_used"] and rotation.facts["max_rel_err"] < 1e-5
    exact = point("numba", "auto", shape, ShflBW(32), 0.5)
    assert rotation.facts["bytes_min"] < prepare_point.prepare_point(exact).facts["bytes_min"]
    with pytest.raises(Unsupported, match="which those of nm:2:4 do not"):
        prepare_point.prepare_point(replace(point("numba", "bf16-weights", shape, NM(2, 4), 0.5), dtype_w="bfloat16"))


@pytest.mark.parametrize(
    ("backend", "pattern"), [("torch", Dense()), ("openvino", Dense()), ("numba", Dense()), ("numba", ShflBW(32))]
)
def test_a_layer_in_bfloat16_is_held_to_the_product_of_rounded_numbers(backend: str, pattern: Pattern) -> None:
    exact = point(backend, "bf16", LinearShape(64, 4096, 64), pattern, 0.0 if pattern == Dense() else 0.5)
    try:
        rotation = prepare_point.prepare_point(replace(exact, dtype_w="bfloat16", dtype_a="bfloat16"))
    except Unsupported as reason:  # the processor lacks it, and says so
        assert "bfloat16" in str(reason) or "bf16" in str(reason) or "f32" in str(reason)
        assert backend != "numba" or not (cpu_target.find_cpu_target().pairs or cpu_target.find_cpu_target().matrix)
        return
    assert rotation.facts["max_rel_err"] < oracle.BFLOAT16_ROUNDOFF
    if backend != "numba" or (cpu_target.find_cpu_target().pairs and not cpu_target.find_cpu_target().matrix):
        assert rotation.facts["max_rel_err"] > 1e-5  # it did round
        usual = replace(exact, kernel="prepacked" if backend == "torch" else "auto")
        assert rotation.facts["bytes_min"] < 0.9 * prepare_point.prepare_point(usual).facts["bytes_min"]


@pytest.mark.parametrize("shape", [LinearShape(24, 37, 5), Conv2dShape(2, 12, 9, 7, 17, 3, 3, (2, 1), (1, 1))])
@pytest.mark.parametrize("backend", ["torch", "onnxruntime", "openvino", "numba"])
def test_a_dense_layer_in_eight_bits_is_held_to_the_product_of_whole_numbers(backend: str, shape: Shape) -> None:
    pytest.importorskip(backend)
    layout = "nhwc" if isinstance(shape, Conv2dShape) and "int8" in CPU_ENGINES[backend].channels_last else ""
    exact = point(backend, "auto", shape, layout=layout)
    in_bytes = replace(exact, kernel="int8", dtype_w="int8", dtype_a="int8")
    if backend == "torch" and (reason := refuse_bytes(read_cpu_flags(), platform.machine())) is not None:
        with pytest.raises(Unsupported, match=reason):
            prepare_point.prepare_point(in_bytes)
        return
    rotation = prepare_point.prepare_point(in_bytes)  # which compares the result with the oracle's
    layer = prepare_point.build_synthetic_layer(exact)
    bytes_read = rotation.facts["bytes_min"] - layer.bias.nbytes - 4 * (shape.m * shape.n)
    assert bytes_read < layer.weight.nbytes / 2 + layer.x.nbytes
    assert re.search("int8|i8", rotation.facts["kernel_used"].lower())


@pytest.mark.parametrize(
    ("flags", "machine", "wrong"),
    [
        ({"avx2", "fma"}, "x86_64", True), ({"avx2", "avx512f", "avx512bw"}, "x86_64", True), (set(), "AMD64", True),
        ({"sse4_1"}, "x86_64", True), ({"avx2", "avx_vnni"}, "x86_64", False), ({"amx_int8"}, "x86_64", False),
        ({"avx2", "avx512f", "avx512_vnni"}, "x86_64", False), ({"asimd", "asimddp"}, "aarch64", False),
    ],
)  # fmt: skip
def test_torch_multiplies_bytes_only_where_pairs_of_products_are_not_cut(
    flags: set[str], machine: str, wrong: bool
) -> None:
    reason = refuse_bytes(flags, machine)
    assert (reason is not None) is wrong and (reason is None or "without VNNI" in reason)


def test_what_bfloat16_does_not_explain_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column left out, of 48, or an eighth of the precision."""
    wrong: list[Callable[[SyntheticLayer], np.ndarray]] = [
        lambda layer: layer.x[:, :-1] @ layer.weight[:, :-1].T + layer.bias,
        lambda layer: layer.x @ (layer.weight * np.float32(1.02)).T + layer.bias,
    ]
    exact = point("numba", "bf16", LinearShape(64, 48, 60))
    for compute in wrong:

        def prepare(
            _: Point, layer: SyntheticLayer, compute: Callable[[SyntheticLayer], np.ndarray] = compute
        ) -> Engine:
            return Engine("planted", layer.weight.nbytes, [lambda: compute(layer)])

        monkeypatch.setattr("latbench.backends.cpu.numba.prepare", prepare)
        with pytest.raises(WrongResult):
            prepare_point.prepare_point(replace(exact, dtype_w="bfloat16", dtype_a="bfloat16"))


def test_exact_weights_in_place_of_rounded_ones_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(_: Point, layer: SyntheticLayer) -> Engine:
        return Engine("planted", layer.weight.nbytes, [lambda: layer.x @ layer.weight.T + layer.bias])

    monkeypatch.setattr("latbench.backends.cpu.numba.prepare", prepare)
    exact = point("numba", "bf16-weights", LinearShape(64, 48, 3), ShflBW(32), 0.5)
    prepare_point.prepare_point(exact)
    with pytest.raises(WrongResult):
        prepare_point.prepare_point(replace(exact, dtype_w="bfloat16"))


def _drops_the_last_input(layer: SyntheticLayer) -> np.ndarray:
    return layer.x[:, :-1] @ layer.weight[:, :-1].T + layer.bias


def _forgets_the_bias(layer: SyntheticLayer) -> np.ndarray:
    return layer.x @ layer.weight.T


def _rounds_to_half(layer: SyntheticLayer) -> np.ndarray:
    return (layer.x.astype(np.float16) @ layer.weight.T.astype(np.float16)).astype(np.float32) + layer.bias


@pytest.mark.parametrize("wrong", [_drops_the_last_input, _forgets_the_bias, _rounds_to_half])
@pytest.mark.parametrize("copy", [0, 1])
def test_a_wrong_engine_is_caught_in_any_copy(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[SyntheticLayer], np.ndarray], copy: int
) -> None:
    def prepare(_: Point, layer: SyntheticLayer) -> Engine:
        right = layer.x @ layer.weight.T + layer.bias
        calls: list[Callable[[], Any]] = [lambda: right, lambda: right]
        calls[copy] = lambda: wrong(layer)
        return Engine("planted", layer.weight.nbytes, calls)

    monkeypatch.setattr("latbench.backends.cpu.torch.prepare", prepare)
    with pytest.raises(WrongResult):
        prepare_point.prepare_point(point("torch", "linear", LinearShape(8, 16, 4)))


@pytest.mark.parametrize("backend", CPU_ENGINES)
def test_calls_keep_what_they_read(backend: str) -> None:
    pattern = Unstructured() if backend in ("torch_sparse_cpu", "scipy") else Dense()
    for kernel in CPU_ENGINES[backend].timed_kernels["linear"]:
        wanted = point(backend, kernel, LinearShape(24, 16, 3), pattern, 0.0, threads=1 if backend == "scipy" else 2)
        layer = prepare_point.build_synthetic_layer(wanted)
        rotation = prepare_point.prepare_point(wanted)
        others = [np.full_like(it, 7) for it in (layer.x, layer.weight, layer.bias) for _ in range(100)]
        y = rotation()
        y = np.asarray(y[0] if backend in ("onnxruntime", "openvino") else y)
        np.testing.assert_allclose(y, layer.x @ layer.weight.T + layer.bias, atol=1e-5)
        del others


def test_copies_take_turns() -> None:
    rotation = Rotation([lambda: "a", lambda: "b", lambda: "c"], {})
    assert [rotation() for _ in range(5)] == ["a", "b", "c", "a", "b"]


@pytest.mark.parametrize(
    ("weight_bytes", "copies"), [(0, 256), (1, 256), (2**18, 192), (9 * 2**20, 6), (48 * 2**20, 1), (2**26, 1)]
)
def test_copies_fill_the_caches_and_no_more(monkeypatch: pytest.MonkeyPatch, weight_bytes: int, copies: int) -> None:
    monkeypatch.setattr(prepare_point, "count_rotated_bytes", lambda: 48 * 2**20)
    assert prepare_point.count_copies(weight_bytes) == copies
    assert prepare_point.count_copies(weight_bytes, 32) == min(copies, 32)


@pytest.mark.parametrize(("granted", "copies"), [(None, 64), (2**30, 16), (2**33, 64)])
def test_copies_fit_into_the_memory_however_large_a_cache_a_virtual_machine_shows(
    monkeypatch: pytest.MonkeyPatch, granted: int | None, copies: int
) -> None:
    monkeypatch.setattr(prepare_point, "count_rotated_bytes", lambda: 720 * 2**20)
    monkeypatch.setattr(prepare_point, "read_memory_bytes", lambda: 2**32)
    monkeypatch.setattr(prepare_point, "read_available_bytes", lambda: granted)
    assert prepare_point.count_copies(4 * 2**20) == copies


@pytest.mark.parametrize(("told", "mebibytes"), [("32768K", 96), ("1024K\n", 3), ("", 64), ("32M", 64), (None, 64)])
def test_weights_rotate_past_the_last_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str | None, mebibytes: float
) -> None:
    if told is not None:
        (tmp_path / "size").write_text(told)
    monkeypatch.setattr(cpu_target, "_LAST_CACHE", tmp_path / "size")
    assert cpu_target.count_rotated_bytes.__wrapped__() == mebibytes * 2**20


def test_the_same_point_always_gets_the_same_layer() -> None:
    wanted = point("numba", "auto", LinearShape(16, 24, 3), VectorWise(8), 0.5)
    first, again = prepare_point.build_synthetic_layer(wanted), prepare_point.build_synthetic_layer(wanted)
    np.testing.assert_array_equal(first.weight, again.weight)
    np.testing.assert_array_equal(first.x, again.x)
    assert not np.array_equal(first.weight, prepare_point.build_synthetic_layer(replace(wanted, seed=1)).weight)


@pytest.mark.parametrize("m", [1, 7, 8, 20, 64])
def test_a_shuffled_mask_is_one_that_packs_and_is_not_in_order(rng: np.random.Generator, m: int) -> None:
    mask = prepare_point.build_synthetic_mask(rng, ShflBW(8), (m, 40), 0.75)
    pack(np.ones((m, 40), np.float32), mask, ShflBW(8))
    if m == 64:
        first = mask.reshape(8, 8, 40)
        assert not (first == first[:, :1]).all()


def test_an_engine_whose_package_is_missing_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_engines.list_cpu_versions()["numba"]
    lacking = replace(CPU_ENGINES["numba"], packages=(("numba",), ("no-such-package",)))
    monkeypatch.setitem(CPU_ENGINES, "numba", lacking)
    assert installed_engines.list_cpu_versions()["numba"] is None
