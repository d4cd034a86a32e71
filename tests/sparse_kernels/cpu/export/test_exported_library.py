"""Exported layers compute what their plans compute, in any number of threads, calls and processes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from exported_cases import ExportedFiles, build_image_layer, build_int8, build_linear, export_layers
from forked_processes import start_child, wait_for

from sparse_kernels import Conv2dShape, oracle
from sparse_kernels.cpu.export.cpu_levels import list_host_levels
from sparse_kernels.cpu.export.exported_library import BAD_ARGUMENT, ExportedLibrary, LibraryError
from sparse_kernels.cpu.export.kernel_objects import ALLOWED_SYMBOLS, list_undefined_symbols
from sparse_kernels.cpu.export.layer_programs import ExportedLayer
from sparse_kernels.cpu.export.level_job import LevelRequest, compile_level
from sparse_kernels.formats import round_packed
from sparse_kernels.formats.int8 import Int8Weight
from sparse_kernels.int8.int8_oracle import check_int8, check_int8_conv2d

BATCHES = (1, 2, 7, 16, 23)  # 16 and 7 were exported, with 1: the others are put together

if not list_host_levels():
    pytest.skip("no CPU level for which kernels are compiled ahead of time", allow_module_level=True)


def some_layers() -> list[ExportedLayer]:
    """A linear layer and a convolution, of odd sizes."""
    rng = np.random.default_rng(47)
    shape = Conv2dShape(1, 5, 9, 7, 24, 3, 3, padding=(1, 1))
    return [
        build_linear(rng, "linear", "vector:16", (53, 37), "relu"),
        build_image_layer(rng, "conv", "vector:8", shape, "relu"),
    ]


def all_layers() -> list[ExportedLayer]:
    """Layers of every kind of kernel."""
    rng = np.random.default_rng(48)
    vector = build_linear(rng, "bfloat16", "vector:32", (64, 70))
    strided = Conv2dShape(1, 6, 11, 9, 16, 3, 3, stride=(2, 2), padding=(1, 1))
    pointwise = Conv2dShape(1, 12, 8, 9, 32, 1, 1)
    wide = Conv2dShape(1, 8, 6, 20, 17, 3, 5, padding=(1, 2), dilation=(1, 1))
    quads = build_int8(rng, "int8 conv", "vector:16", 32, strided.k)
    return [
        *some_layers(),
        *(build_linear(rng, spec, spec, (64, 45), "gelu") for spec in ("dense", "unstructured", "shflbw:32")),
        *(build_linear(rng, spec, spec, (48, 64)) for spec in ("nm:2:4", "block:4x4", "vector:4")),
        build_linear(rng, "one row", "dense", (1, 3)),
        ExportedLayer("bfloat16", vector.weight, vector.bias, "relu", "bfloat16"),
        ExportedLayer("narrow", vector.weight, vector.bias, None, "bfloat16-weights"),
        build_int8(rng, "int8", "vector:16", 48, 37),
        build_image_layer(rng, "strided", "shflbw:8", strided, "relu"),
        build_image_layer(rng, "pointwise", "vector:16", pointwise),
        build_image_layer(rng, "single", "unstructured", wide, "gelu"),
        ExportedLayer("int8 conv", quads.weight, None, image=Conv2dShape(1, 6, 11, 9, 32, 3, 3, (2, 2), (1, 1))),
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ExportedFiles:
    """Two layers, exported for the least level."""
    return export_layers(tmp_path_factory.mktemp("layers"), some_layers(), list_host_levels()[:1], (1, 7, 16))


@pytest.fixture
def library(files: ExportedFiles) -> Iterator[ExportedLibrary]:
    """The two layers, opened."""
    opened = ExportedLibrary(files.library, files.packed)
    yield opened
    opened.close()


def draw_input(rng: np.random.Generator, layer: ExportedLayer, batch: int) -> np.ndarray:
    """Inputs of a layer."""
    image = layer.image
    shape = (layer.weight.shape[1],) if image is None else (image.c_in, image.h, image.w)
    return rng.standard_normal((batch, *shape), dtype=np.float32)


def run_layer(library: ExportedLibrary, layer: ExportedLayer, x: np.ndarray, threads: int = 1) -> np.ndarray:
    """What the library makes of them."""
    return (library.linear if layer.image is None else library.conv2d)(layer.name, x, threads)


def check_layer(layer: ExportedLayer, x: np.ndarray, y: np.ndarray) -> None:
    """Raise WrongResult unless y is right within what the arithmetic explains."""
    known = {"bias": layer.bias, "activation": layer.activation}
    if isinstance(layer.weight, Int8Weight):
        if layer.image is None:
            check_int8(y, layer.weight, x, **known)
        else:
            check_int8_conv2d(y, layer.weight, layer.image, x, **known)
        return
    rounded = layer.precision != "float32"
    packed = round_packed(layer.weight) if rounded else layer.weight
    known["roundoff"] = oracle.BFLOAT16_ROUNDOFF if rounded else 0.0
    if layer.image is None:
        oracle.check(y, packed, x, layout="token_major", **known)
    else:
        oracle.check_conv2d(y, packed, layer.image, x, **known)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", BATCHES)
def test_layers_are_right_for_any_batch(
    library: ExportedLibrary, rng: np.random.Generator, batch: int, threads: int
) -> None:
    for layer in some_layers():
        x = draw_input(rng, layer, batch)
        check_layer(layer, x, run_layer(library, layer, x, threads))


def test_the_check_rejects_a_result_without_its_last_token(
    library: ExportedLibrary, rng: np.random.Generator
) -> None:
    layer = some_layers()[0]
    x = draw_input(rng, layer, 7)
    y = run_layer(library, layer, x)
    y[-1] = 0
    with pytest.raises(oracle.WrongResult):
        check_layer(layer, x, y)


@pytest.mark.slow
@pytest.mark.parametrize("level", [each.name for each in list_host_levels()])
def test_every_kind_of_layer_is_right_at_every_level(tmp_path: Path, rng: np.random.Generator, level: str) -> None:
    chosen = [each for each in list_host_levels() if each.name == level]
    files = export_layers(tmp_path, all_layers(), chosen, (1, 7, 40))
    library = ExportedLibrary(files.library, files.packed)
    assert library.level == level
    for layer in all_layers():
        for batch in (1, 3, 40, 47):
            for threads in (1, 2):
                x = draw_input(rng, layer, batch)
                check_layer(layer, x, run_layer(library, layer, x, threads))


def test_objects_need_nothing_but_the_c_library(files: ExportedFiles) -> None:
    objects = [each for level in files.levels for each in level.objects]
    assert objects
    for each in objects:
        assert list_undefined_symbols(each.content) <= ALLOWED_SYMBOLS


@pytest.mark.slow
def test_code_of_a_level_uses_no_instruction_beyond_it(tmp_path: Path) -> None:
    """zmm registers are of v4; dot products of bytes and of bfloat16 only of the level above."""
    if shutil.which("objdump") is None:
        pytest.skip("no objdump")
    rng = np.random.default_rng(50)
    pairs = build_linear(rng, "pairs", "vector:32", (64, 70))
    layers = [build_int8(rng, "int8", "vector:16", 48, 37)]
    layers.append(ExportedLayer("pairs", pairs.weight, pairs.bias, None, "bfloat16"))
    beyond = {"x86-64-v3": r"%zmm|%k[1-7]", "x86-64-v4": r"vpdpbusd|vdpbf16ps", "x86-64-v4-vnni-bf16": "vpdpwsud|tdp"}
    uses = {"x86-64-v3": r"%ymm", "x86-64-v4": r"%zmm", "x86-64-v4-vnni-bf16": r"vpdpbusd[^z]*%zmm"}
    for level in list_host_levels():
        compiled = compile_level(LevelRequest(level, layers, {"int8": (1, 64), "pairs": (1, 64)}, (1,)))
        text = ""
        for number, each in enumerate(compiled.objects):
            path = tmp_path / f"{number}.o"
            path.write_bytes(each.content)
            text += subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True).stdout
        assert re.search(uses[level.name], text)
        assert not re.search(beyond[level.name], text)


def test_the_library_needs_nothing_of_python(files: ExportedFiles) -> None:
    needed = subprocess.run(["ldd", files.library], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].rsplit("/", 1)[-1] for line in needed.splitlines()}
    assert all(name.startswith(("linux-vdso", "libc.", "libm.", "libpthread.", "ld-linux")) for name in names), names


def test_no_tokens_are_no_work(library: ExportedLibrary) -> None:
    assert library.linear("linear", np.empty((0, 37), np.float32)).shape == (0, 53)


def test_threads_may_call_one_model_at_the_same_time(library: ExportedLibrary, rng: np.random.Generator) -> None:
    layers = some_layers()
    inputs = [(layer, draw_input(rng, layer, batch)) for layer in layers for batch in (3, 7, 16, 23)]
    expected = [run_layer(library, layer, x, 2) for layer, x in inputs]

    def call(_: int) -> bool:
        found = [run_layer(library, layer, x, 2) for layer, x in inputs]
        return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(64)))


def test_a_forked_process_goes_on_with_an_open_model(library: ExportedLibrary, rng: np.random.Generator) -> None:
    layer = some_layers()[1]
    x = draw_input(rng, layer, 16)
    expected = run_layer(library, layer, x, 2)  # the threads of the parent have started
    same = lambda: np.array_equal(run_layer(library, layer, x, 2), expected)  # noqa: E731
    children = [start_child(lambda: all(same() for _ in range(20))) for _ in range(4)]
    assert np.array_equal(run_layer(library, layer, x, 2), expected)
    assert [wait_for(child) for child in children] == [0] * 4


@pytest.mark.parametrize(
    ("name", "shape", "threads", "said"),
    [
        ("linear", (3, 36), 1, "takes 37 features and gives 53, not 36 and 53"),
        ("linear", (3, 37), 0, "threads must be 1 to 1024, not 0"),
        ("conv", (3, 5, 9, 8), 1, "exported for images of 5x9x7, not 5x9x8"),
        ("stem", (3, 37), 1, "there is no layer 'stem'"),
    ],
)
def test_a_wrong_call_is_refused_in_a_sentence(
    library: ExportedLibrary, name: str, shape: tuple[int, ...], threads: int, said: str
) -> None:
    x = np.zeros(shape, np.float32)
    with pytest.raises(LibraryError, match=said) as caught:
        (library.linear if len(shape) == 2 else library.conv2d)(name, x, threads)
    assert caught.value.code == BAD_ARGUMENT


def test_a_layer_of_the_other_kind_is_refused(library: ExportedLibrary) -> None:
    with pytest.raises(LibraryError, match="is linear: call latbench_linear"):
        library.conv2d("linear", np.zeros((1, 1, 1, 37), np.float32))
    with pytest.raises(LibraryError, match="is a convolution: call latbench_conv2d"):
        library.linear("conv", np.zeros((1, 37), np.float32))


@pytest.mark.parametrize(("name", "shape"), [("linear", (37,)), ("linear", (2, 3, 37)), ("conv", (5, 9, 7))])
def test_an_input_of_other_dimensions_is_refused(library: ExportedLibrary, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(LibraryError, match=f"x has {len(shape)} dimensions") as caught:
        (library.linear if name == "linear" else library.conv2d)(name, np.zeros(shape, np.float32))
    assert caught.value.code == BAD_ARGUMENT


@pytest.mark.parametrize(("size", "threads"), [(0, 1), (-1, 1), (1, 0)])
def test_no_kernel_runs_no_tokens(library: ExportedLibrary, size: int, threads: int) -> None:
    with pytest.raises(LibraryError, match=f"no kernel runs {size} tokens or images in {threads} threads"):
        library.name_kernel("linear", size, threads)


def test_a_closed_model_is_refused(files: ExportedFiles) -> None:
    closed = ExportedLibrary(files.library, files.packed)
    closed.close()
    closed.close()
    x, image = np.zeros((1, 37), np.float32), np.zeros((1, 5, 9, 7), np.float32)
    for use in (
        lambda: closed.level, lambda: closed.layers, lambda: closed.linear("linear", x), lambda: closed.run(x, (53,)),
        lambda: closed.conv2d("conv", image), lambda: closed.name_kernel("linear", 1),
    ):  # fmt: skip
        with pytest.raises(LibraryError, match="the model is closed"):
            use()


def test_a_model_says_its_layers_and_kernels(library: ExportedLibrary) -> None:
    assert library.layers == ["linear", "conv"]
    assert "numba.vector" in library.name_kernel("linear", 16, 2)


def test_the_loader_imports_no_compiler_and_no_framework() -> None:
    code = "import sys, sparse_kernels.cpu.export.exported_library; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "numpy" in loaded
    assert not {"numba", "llvmlite", "torch", "pandas", "sklearn", "pyarrow", "typer"} & {*loaded}
