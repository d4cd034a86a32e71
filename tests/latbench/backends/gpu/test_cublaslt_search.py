"""The search among cuBLASLt's algorithms, by a library that multiplies in NumPy as cublasLt.h describes it."""

import contextlib
import ctypes
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import gpu_fakes
import numpy as np
import pytest
import torch

from latbench.backends.gpu import cublaslt_search, prepare_gpu_point, torch_gpu
from latbench.backends.gpu.cublaslt_search import Algorithm, LtProduct, Stored
from latbench.backends.gpu.gpu_layers import build_gpu_layer
from latbench.backends.installed_engines import Unsupported
from latbench.sweeping import gpu_points
from latbench.sweeping.gpu_points import build_gpu_point
from latbench.workloads.points import Point
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import Dense
from sparse_kernels.shapes import LinearShape

STREAM = 7
SHAPE = LinearShape(24, 40, 16)
HANDLE = ctypes.c_void_p(1)
NAMES = {2: np.float16, 14: np.uint16}


class FakeCublasLt:
    """cuBLASLt on the host: matrices lie column by column, and an algorithm takes the seconds that it is given."""

    def __init__(self, seconds: tuple[float, ...] = (2.0, 1.0, 3.0)) -> None:
        self.all_seconds, self.elapsed = seconds, 0.0
        self.things: dict[int, Any] = {}
        self.counter = itertools.count(100)
        self.used: list[tuple[int, int, int]] = []  # operations and algorithm of each product
        self.status, self.ignores_transposes = 0, False

    def _make(self, pointer: Any, thing: Any) -> int:
        pointer._obj.value = next(self.counter)
        self.things[pointer._obj.value] = thing
        return 0

    def cublasLtMatmulDescCreate(self, pointer: Any, compute: int, scale: int) -> int:
        assert (compute, scale) == (68, 0)  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        return self._make(pointer, {3: 0, 4: 0})

    def cublasLtMatmulDescSetAttribute(self, descriptor: Any, name: int, pointer: Any, size: Any) -> int:
        assert size.value == 4
        self.things[descriptor.value][name] = pointer._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, pointer: Any, kind: int, rows: Any, columns: Any, leading: Any) -> int:
        assert leading.value >= rows.value > 0
        return self._make(pointer, (NAMES[kind], rows.value, columns.value, leading.value))

    def cublasLtMatmulPreferenceCreate(self, pointer: Any) -> int:
        return self._make(pointer, {})

    def cublasLtMatmulPreferenceSetAttribute(self, preference: Any, name: int, pointer: Any, size: Any) -> int:
        assert size.value == 8
        self.things[preference.value][name] = pointer._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(
        self, handle: Any, descriptor: Any, a: Any, b: Any, c: Any, d: Any, preference: Any, most: int, found: Any,
        count: Any,
    ) -> int:  # fmt: skip
        assert handle is HANDLE and self.things[preference.value] == {1: 32 * 2**20}
        self._sizes(descriptor, a, b, d)
        if self.status:
            return self.status
        for place in range(len(self.all_seconds)):
            found[place].algorithm[0], found[place].state = place, 15 if place == len(self.all_seconds) - 1 else 0
        count._obj.value = len(self.all_seconds)
        return 0

    def _sizes(self, descriptor: Any, a: Any, b: Any, d: Any) -> tuple[bool, bool]:
        turned = tuple(bool(self.things[descriptor.value][name]) for name in (3, 4))
        (_, rows_a, columns_a, _), (_, rows_b, columns_b, _), (_, rows, columns, _) = (
            self.things[it.value] for it in (a, b, d)
        )
        left = (columns_a, rows_a) if turned[0] else (rows_a, columns_a)
        right = (columns_b, rows_b) if turned[1] else (rows_b, columns_b)
        assert left[1] == right[0] and (rows, columns) == (left[0], right[1])
        return turned  # type: ignore[return-value]

    def _array(self, address: Any, layout: Any) -> np.ndarray:
        kind, rows, columns, leading = self.things[layout.value]
        flat = np.ctypeslib.as_array((ctypes.c_uint16 * (leading * columns)).from_address(address.value))
        return flat.view(kind).reshape(columns, leading).T[:rows]

    def cublasLtMatmul(
        self, handle: Any, descriptor: Any, alpha: Any, a: Any, layout_a: Any, b: Any, layout_b: Any, beta: Any,
        c: Any, layout_c: Any, d: Any, layout_d: Any, algorithm: Any, workspace: Any, size: Any, stream: Any,
    ) -> int:  # fmt: skip
        assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0) and size.value == 32 * 2**20
        assert stream.value == STREAM and workspace.value and c.value == d.value
        turned = self._sizes(descriptor, layout_a, layout_b, layout_d)
        left, right, out = (self._array(*pair) for pair in ((a, layout_a), (b, layout_b), (d, layout_d)))
        if out.dtype == np.uint16:  # bfloat16
            left, right = ((it.astype(np.uint32) << 16).view(np.float32) for it in (left, right))
        left, right = left.astype(np.float64), right.astype(np.float64)
        left, right = left.T if turned[0] else left, right.T if turned[1] else right
        y = left @ right
        if self.ignores_transposes and turned[0]:
            y = y[::-1]
        if out.dtype == np.uint16:
            out[...] = torch.from_numpy(y).bfloat16().view(torch.int16).numpy().view(np.uint16)
        else:
            out[...] = y
        place = algorithm._obj.algorithm[0]
        self.elapsed += self.all_seconds[place] * (0.5 if turned == (True, False) else 1.0)
        self.used.append((*map(int, turned), place))
        return 0

    def _destroy(self, thing: Any) -> int:
        del self.things[thing.value]
        return 0

    cublasLtMatmulPreferenceDestroy = cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = _destroy


class Driver(gpu_fakes.FakeDevice):
    """A driver whose clock is the library's."""

    def __init__(self, library: FakeCublasLt) -> None:
        super().__init__()
        self.library = library

    def mark(self) -> float:
        return self.library.elapsed


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeCublasLt:
    """The library and torch on a GPU that is not there: tensors stay on the host."""
    made = FakeCublasLt()
    monkeypatch.setattr(torch_gpu, "open_cublaslt", lambda: (made, HANDLE))
    monkeypatch.setattr(torch_gpu, "open_torch_driver", lambda: Driver(made))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))

    def place(array: np.ndarray, dtype: str) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, dtype))

    monkeypatch.setattr(torch_gpu, "copy_to_device", place)
    monkeypatch.setattr(torch_gpu, "convert_to_float64", lambda array: torch.from_numpy(np.array(array)).double())
    return made


def point(layout: str, dtype: str = "float16", shape: LinearShape = SHAPE) -> Point:
    kernel = next(kernel for kernel in gpu_points.DENSE_SEARCHED if kernel[2] == layout)
    one = build_gpu_point("nvidia-h200", shape, Dense(), 0.0, kernel, precision=dtype)
    return dataclasses.replace(one, cache_mode="warm")


def check(one: Point) -> float:
    layer = build_gpu_layer(one)
    engine = torch_gpu.prepare(one, layer)
    assert engine.kernel == f"torch.cublaslt_search.{one.layout}"
    return prepare_gpu_point.check_results(one, layer, engine, [call() for call in engine.calls])


@pytest.mark.parametrize("layout", ["feature_major", "token_major"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [LinearShape(24, 40, 16), LinearShape(5, 7, 3), LinearShape(3, 9, 1)])
def test_the_fastest_algorithm_multiplies_right_in_both_layouts(
    library: FakeCublasLt, layout: str, dtype: str, shape: LinearShape
) -> None:
    assert 0 <= check(point(layout, dtype, shape)) < 2.0**-7
    # The second algorithm, in the order of operands that this library likes, where there is a choice.
    assert library.used[-1][2] == 1 and (layout == "feature_major" or library.used[-1][:2] == (1, 0))
    assert {used[:2] for used in library.used} == ({(0, 0), (1, 0)} if layout == "token_major" else {(0, 0), (0, 1)})
    assert all(place != 2 for _, _, place in library.used)  # the heuristic marks it as one that cannot run


def test_a_library_that_mixes_up_orders_is_found_out(library: FakeCublasLt) -> None:
    library.ignores_transposes = True
    with pytest.raises(WrongResult, match="results are wrong"):
        check(point("token_major"))


def test_what_the_heuristic_does_not_support_is_refused_and_what_fails_is_an_error(library: FakeCublasLt) -> None:
    library.status = 15
    with pytest.raises(Unsupported, match="heuristic has no algorithm for float16"):
        check(point("feature_major"))
    library.status = 14
    with pytest.raises(RuntimeError, match="cuBLASLt failed with status 14"):
        check(point("feature_major"))


def test_a_product_destroys_what_it_made(library: FakeCublasLt) -> None:
    product = LtProduct(library, HANDLE, "float16", Stored(4, 6), Stored(6, 8))
    assert len(product.list_algorithms()) == 2
    product.close()
    assert not library.things


def test_the_structure_of_an_algorithm_is_that_of_the_header() -> None:
    # 8 words of 8 bytes, a size, a status, a float and four reserved integers.
    assert ctypes.sizeof(Algorithm) == 64 + 8 + 4 + 4 + 16
    assert Algorithm.workspace_bytes.offset == 64 and Algorithm.state.offset == 72


def test_a_torch_without_cublaslt_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt_search, "SONAMES", ("libnosuchlibrary.so.1",))
    cublaslt_search.open_cublaslt.cache_clear()
    with pytest.raises(Unsupported, match=r"has loaded no cuBLASLt.*libnosuchlibrary\.so\.1"):
        cublaslt_search.open_cublaslt()
    cublaslt_search.open_cublaslt.cache_clear()


@pytest.mark.parametrize("kernel", [*gpu_points.DENSE, *gpu_points.DENSE_TURNED], ids="-".join)
def test_all_four_orders_of_operands_give_the_same_layer(library: FakeCublasLt, kernel: gpu_points.Kernel) -> None:
    one = build_gpu_point("nvidia-h200", LinearShape(24, 40, 16), Dense(), 0.0, kernel)
    one = dataclasses.replace(one, cache_mode="warm")
    layer = build_gpu_layer(one)
    orders: list[tuple[bool, bool]] = []

    def asked(name: str) -> contextlib.nullcontext[None]:
        assert name == kernel[1].partition("_")[0]
        return contextlib.nullcontext()

    def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        orders.append((left.is_contiguous(), right.is_contiguous()))
        return out.copy_(left.double() @ right.double())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "mm", product)
        patch.setattr(torch_gpu, "_library", asked)
        patch.setattr(torch, "empty", lambda size, dtype, device: torch.zeros(size, dtype=dtype))
        engine = torch_gpu.prepare(one, layer)
        assert prepare_gpu_point.check_results(one, layer, engine, [call() for call in engine.calls]) >= 0
    expected = {
        ("feature_major", False): (True, True), ("feature_major", True): (False, True),
        ("token_major", False): (True, False), ("token_major", True): (True, True),
    }  # fmt: skip
    assert set(orders) == {expected[one.layout, kernel[1].endswith("_turned")]}
