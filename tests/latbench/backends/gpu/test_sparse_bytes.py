"""2:4 layers in eight bits: cuSPARSELt through torch, and torchao, by operators that compute as their sources say."""

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import gpu_fakes
import numpy as np
import pytest
import torch

from latbench.backends.gpu import prepare_gpu_point, torch_low_precision, torch_sparse
from latbench.backends.gpu.gpu_layers import build_gpu_layer
from latbench.backends.installed_engines import Unsupported
from latbench.sweeping import gpu_points
from latbench.sweeping.gpu_points import Kernel, build_gpu_point
from latbench.workloads.points import Point
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import NM
from sparse_kernels.shapes import LinearShape

SHAPE = LinearShape(64, 256, 32)
TWO_OF_FOUR = NM(2, 4)
BEST = (3, 2, 1)  # algorithm, splits of k and their mode that the search finds


def point(kernel: Kernel, precision: str, shape: LinearShape = SHAPE, pattern: NM = TWO_OF_FOUR) -> Point:
    one = build_gpu_point("nvidia-h200", shape, pattern, pattern.sparsity, kernel, precision=precision)
    return dataclasses.replace(one, cache_mode="warm")


class SparseOperators:
    """cuSPARSELt's operators and torchao's; `wrong` changes what they compute."""

    def __init__(self) -> None:
        self.wrong = ""
        self.searched: list[torch.dtype] = []
        self.algorithms: list[tuple[int, ...]] = []

    def compress(self, weight: torch.Tensor) -> torch.Tensor:
        assert weight.is_contiguous()
        kept = (weight.double() != 0).reshape(weight.shape[0], -1, 4).sum(dim=2)
        assert int(kept.max()) <= 2
        return weight.clone()

    def multiply(
        self,
        packed: torch.Tensor,
        x: torch.Tensor,
        bias: Any,
        alpha: Any,
        out: torch.dtype,
        turned: bool,
        *found: int,
    ) -> torch.Tensor:
        assert bias is None and alpha is None and not turned and packed.dtype == x.dtype
        if x.is_contiguous():  # it has bytes for x column by column only
            raise RuntimeError("CUDA error: operation not supported when calling `cusparseLtMatmulDescriptorInit`")
        if x.shape[1] % 16:
            raise RuntimeError("CUDA error: invalid value when calling `cusparseLtDenseDescriptorInit`")
        self.algorithms.append(found)
        weight = packed.double()
        if self.wrong == "positions mixed up":
            weight = weight.reshape(weight.shape[0], -1, 4).roll(1, dims=2).reshape(packed.shape)
        if self.wrong == "half of k":
            weight = weight * (torch.arange(weight.shape[1]) < weight.shape[1] // 2)
        return (weight @ x.double()).to(out)

    def search(
        self, packed: torch.Tensor, x: torch.Tensor, bias: Any, alpha: Any, out: torch.dtype, turned: bool
    ) -> tuple[int, ...]:
        assert bias is None and alpha is None and not turned
        self.searched.append(out)
        return (*BEST, 9)

    def rowwise(
        self, x: torch.Tensor, x_scale: torch.Tensor, packed: torch.Tensor, meta: torch.Tensor, scale: torch.Tensor,
        bias: Any = None, out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert x.dtype == packed.dtype == torch.float8_e4m3fn and x_scale.dtype == scale.dtype == torch.float32
        assert out_dtype is not None and x_scale.shape == x.shape[:1] and scale.shape == packed.shape[:1]
        scale = scale.flip(0) if self.wrong == "scales mixed up" else scale
        return ((x.double() @ packed.double().t()) * x_scale[:, None] * scale).to(out_dtype)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> SparseOperators:
    """The operators on a GPU that is not there: tensors stay on the host."""
    made = SparseOperators()
    monkeypatch.setattr(torch, "_cslt_compress", made.compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", made.multiply)
    monkeypatch.setattr(torch._C, "_cusparselt", SimpleNamespace(mm_search=made.search), raising=False)
    torchao = ModuleType("torchao.ops")
    torchao.rowwise_scaled_linear_sparse_cutlass_f8f8 = made.rowwise  # type: ignore[attr-defined]
    torchao.to_sparse_semi_structured_cutlass_sm9x_f8 = lambda weight: (  # type: ignore[attr-defined]
        made.compress(weight), torch.zeros(1)
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.ops", torchao)

    def place(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(array, order="C"))

    monkeypatch.setattr(torch_low_precision, "place", place)
    monkeypatch.setattr(torch_sparse, "place", place)
    monkeypatch.setattr(torch_sparse, "convert_to_float64", lambda array: place(array).double())
    monkeypatch.setattr(torch_sparse, "open_torch_driver", gpu_fakes.FakeDevice)
    return made


def check(one: Point) -> tuple[float, Any]:
    layer = build_gpu_layer(one)
    engine = torch_sparse.prepare(one, layer)
    return prepare_gpu_point.check_results(one, layer, engine, [call() for call in engine.calls]), engine


KERNELS = [
    *((kernel, precision) for kernel in gpu_points.CUSPARSELT_BYTES for precision in ("fp8", "int8")),
    (gpu_points.TORCHAO[0], "fp8"),
]


@pytest.mark.parametrize(("kernel", "precision"), KERNELS)
@pytest.mark.parametrize("shape", [SHAPE, LinearShape(32, 128, 16), LinearShape(96, 512, 48)])
def test_products_of_sparse_bytes_are_right(
    operators: SparseOperators, kernel: Kernel, precision: str, shape: LinearShape
) -> None:
    error, engine = check(point(kernel, precision, shape))
    assert 0 <= error < 2.0**-7 and (precision == "fp8" or error == 0)
    assert engine.weight_bytes == pytest.approx(0.625 * shape.m * shape.k + 4 * shape.m * (kernel[1] == "torchao"))


WRONG = [
    *((*each, wrong) for each in KERNELS[:-1] for wrong in ("positions mixed up", "half of k")),
    (*KERNELS[-1], "scales mixed up"),
]


@pytest.mark.parametrize(("kernel", "precision", "wrong"), WRONG)
def test_known_wrong_sparse_products_are_refused(
    operators: SparseOperators, kernel: Kernel, precision: str, wrong: str
) -> None:
    operators.wrong = wrong
    with pytest.raises(WrongResult, match="results are wrong"):
        check(point(kernel, precision))


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_the_tuned_kernel_runs_what_the_search_finds_for_the_type_of_the_result(
    operators: SparseOperators, precision: str
) -> None:
    plain, tuned = gpu_points.CUSPARSELT_BYTES
    check(point(plain, precision))
    assert not operators.searched and set(operators.algorithms) == {()}
    operators.algorithms.clear()
    check(point(tuned, precision))
    assert operators.searched == [{"fp8": torch.bfloat16, "int8": torch.int32}[precision]]
    assert set(operators.algorithms) == {BEST}


def test_what_the_libraries_refuse_is_said_in_their_words(
    operators: SparseOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gpu_points.CUSPARSELT_BYTES[0]
    with pytest.raises(Unsupported, match="torch cusparselt: CUDA error: invalid value"):
        check(point(plain, "int8", LinearShape(64, 256, 8)))
    with pytest.raises(Unsupported, match="cusparselt multiplies 2:4 weights, not nm:1:4"):
        check(point(plain, "int8", pattern=NM(1, 4)))
    with pytest.raises(Unsupported, match="takes token_major activations, not feature_major"):
        check(dataclasses.replace(point(plain, "fp8"), layout="feature_major"))
    with pytest.raises(Unsupported, match="torchao's 2:4 kernel multiplies fp8, not int8"):
        check(point(gpu_points.TORCHAO[0], "int8"))
    monkeypatch.setitem(sys.modules, "torchao.ops", None)
    with pytest.raises(Unsupported, match="pip install torchao"):
        check(point(gpu_points.TORCHAO[0], "fp8"))
