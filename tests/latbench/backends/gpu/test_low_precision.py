"""Layers in eight and four bits, and torch's products of them by operators that compute as torch describes them."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import gpu_fakes
import numpy as np
import pytest
import torch

from latbench.backends.gpu import gpu_layers, low_precision_layers, prepare_gpu_point, torch_gpu, torch_low_precision
from latbench.backends.gpu.gpu_layers import build_gpu_layer
from latbench.backends.gpu.low_precision_layers import FP8_SUM, GROUP, EightBits, FourBits, expand_codes
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import TORCH_GPU
from latbench.sweeping import gpu_points
from latbench.sweeping.gpu_points import build_gpu_point
from latbench.workloads.points import Point
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import NM, Dense
from sparse_kernels.shapes import Conv2dShape, LinearShape

SHAPE = LinearShape(48, 256, 24)
PRECISION = {"fp8": "fp8", "fp8_rows": "fp8", "int8": "int8", "int4": "int4"}


def point(kernel: str, shape: LinearShape = SHAPE) -> Point:
    of = (TORCH_GPU, kernel, "token_major")
    one = build_gpu_point("nvidia-h200", shape, Dense(), 0.0, of, precision=PRECISION[kernel])
    return dataclasses.replace(one, cache_mode="warm")


# Layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 16, 200, 1024, 4096, 14336, 40000])
def test_sums_of_fp8_layers_need_no_more_bits_than_the_narrowest_adder_has(k: int) -> None:
    layer = build_gpu_layer(point("fp8", LinearShape(40, k, 24)))
    assert (np.abs(layer.weight) @ np.abs(layer.x)).max() <= FP8_SUM
    for values in (layer.weight, layer.x):
        assert np.array_equal(values, np.rint(values)) and np.abs(values).max(initial=0) <= 16  # what e4m3 holds
    assert k < 100 or (np.count_nonzero(layer.weight) > 0.2 * layer.weight.size and np.ptp(layer.weight) >= 2)


def test_int8_layers_fill_their_type_and_their_sums_fit_int32() -> None:
    layer = build_gpu_layer(point("int8"))
    assert (layer.weight.min(), layer.weight.max()) == (-127, 127)
    with pytest.raises(Unsupported, match="may pass what int32 holds"):
        build_gpu_layer(point("int8", LinearShape(1, 2**18, 1)))


def test_four_bits_are_codes_with_steps_that_bfloat16_holds() -> None:
    layer = build_gpu_layer(point("int4"))
    four = layer.quantised
    assert isinstance(four, FourBits) and set(np.unique(four.codes)) == set(range(16))
    for row, column in ((0, 0), (3, GROUP - 1), (47, GROUP), (20, 255)):
        expected = (int(four.codes[row, column]) - 8) * four.steps[row, column // GROUP]
        assert layer.weight[row, column] == expected + four.zeros[row, column // GROUP]
    assert np.array_equal(gpu_layers.round_to(layer.weight, "bfloat16"), layer.weight)
    assert len(np.unique(four.steps)) > 1 and len(np.unique(four.zeros / four.steps)) > 1
    with pytest.raises(Unsupported, match="steps for 128 columns, which do not divide 200"):
        build_gpu_layer(point("int4", LinearShape(8, 200, 8)))


def test_patterns_drop_values_of_low_precision_layers_too() -> None:
    kernel = (TORCH_GPU, "fp8", "token_major")
    layer = build_gpu_layer(build_gpu_point("x", SHAPE, NM(2, 4), 0.5, kernel, precision="fp8"))
    assert layer.mask.mean() == 0.5 and not layer.weight[~layer.mask].any() and isinstance(layer.quantised, EightBits)


def test_convolutions_have_no_low_precision() -> None:
    with pytest.raises(Unsupported, match="fp8 is for linear layers here"):
        build_gpu_layer(dataclasses.replace(point("fp8"), shape=Conv2dShape(1, 8, 4, 4, 8, 3, 3), layout="nchw"))


# torch's operators, as their sources describe them ----------------------------------------------------------------


class Operators:
    """The operators in NumPy, with the refusals of torch 2.11; `wrong` changes what one of them computes."""

    def __init__(self) -> None:
        self.wrong = ""

    def scaled_mm(
        self, left: torch.Tensor, right: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor,
        out_dtype: torch.dtype, use_fast_accum: bool, out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        assert left.dtype == right.dtype == torch.float8_e4m3fn and use_fast_accum and out.dtype == out_dtype
        if not left.is_contiguous() or not right.t().is_contiguous():
            raise RuntimeError("Only multiplication of row-major and column-major matrices is supported by cuBLASLt")
        if left.shape[1] % 16 or right.shape[1] % 16:
            raise RuntimeError("mat2 shape must be divisible by 16")
        assert (scale_a.numel() == scale_b.numel() == 1) or (
            scale_a.shape == (left.shape[0], 1) and scale_b.shape == (1, right.shape[1])
        )
        values = left.double()[:, self.first(left.shape[1]) :] @ right.double()[self.first(left.shape[1]) :]
        if self.wrong == "scales swapped":
            scale_a = scale_a.flip(0)
        if self.wrong == "narrow sums":
            values = values.to(torch.float8_e5m2).double()
        return out.copy_((values * scale_a * scale_b).to(out_dtype))

    def int_mm(self, left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if left.shape[0] <= 16:
            raise RuntimeError(f"self.size(0) needs to be greater than 16, but got {left.shape[0]}")
        if left.shape[1] % 8 or right.shape[1] % 8:
            raise RuntimeError("mat2.size(1) needs to be greater than 0 and a multiple of 8")
        assert left.dtype == right.dtype == torch.int8 and out.dtype == torch.int32
        first = self.first(left.shape[1])
        values = left.double()[:, first:] @ right.double()[first:]
        return out.copy_(values + (self.wrong == "off by one"))

    def convert(self, halves: torch.Tensor, tiles: int) -> torch.Tensor:
        assert halves.dtype == torch.uint8 and halves.is_contiguous() and tiles in (2, 4, 8)
        m, k = halves.shape[0], 2 * halves.shape[1]
        return halves.clone().view(m // 8, k // (tiles * 16), 32, tiles // 2, -1)  # in an order of its own

    def int4_mm(self, x: torch.Tensor, packed: torch.Tensor, group: int, steps: torch.Tensor) -> torch.Tensor:
        assert x.dtype == steps.dtype == torch.bfloat16 and x.is_contiguous()
        m, k = packed.shape[0] * 8, x.shape[1]
        assert steps.shape == (k // group, m, 2)
        halves = packed.reshape(m, k // 2)
        codes = torch.stack([halves >> 4, halves & 15], dim=2).reshape(m, k).double()
        spread = steps.double().permute(1, 0, 2).repeat_interleave(group, dim=1)
        if self.wrong == "groups swapped":
            spread = spread.roll(group, dims=1)
        weight = (codes - 8) * spread[:, :, 0] + spread[:, :, 1] * (self.wrong != "no zeros")
        first = self.first(k)
        return (x.double()[:, first:] @ weight.t()[first:]).to(torch.bfloat16)

    def first(self, k: int) -> int:
        """The first of the k columns that are multiplied."""
        return 16 if self.wrong == "a tile left out" and k > 16 else 0


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Operators:
    """torch's operators on a GPU that is not there: tensors stay on the host."""
    made = Operators()
    for name, operator in (
        ("_scaled_mm", made.scaled_mm), ("_int_mm", made.int_mm),
        ("_convert_weight_to_int4pack", made.convert), ("_weight_int4pack_mm", made.int4_mm),
    ):  # fmt: skip
        monkeypatch.setattr(torch, name, operator)
    monkeypatch.setattr(torch_low_precision, "place", lambda array: torch.from_numpy(np.array(array, order="C")))
    monkeypatch.setattr(torch_low_precision, "open_torch_driver", gpu_fakes.FakeDevice)
    return made


def check(one: Point) -> tuple[float, Any]:
    """Prepare a point as a sweep does, run it, and check its result."""
    layer = build_gpu_layer(one)
    engine = torch_gpu.prepare(one, layer)
    return prepare_gpu_point.check_results(one, layer, engine, [call() for call in engine.calls]), engine


@pytest.mark.parametrize(
    "shape", [SHAPE, LinearShape(32, 128, 16), LinearShape(64, 512, 8), LinearShape(32, 128, 40)]
)
@pytest.mark.parametrize("kernel", torch_low_precision.KERNELS)
def test_products_of_bytes_and_of_codes_are_right(operators: Operators, kernel: str, shape: LinearShape) -> None:
    error, engine = check(point(kernel, shape))
    assert 0 <= error < 2.0**-7 and engine.kernel == f"torch.{kernel}.token_major"
    each = 0.5 if kernel == "int4" else 1.0
    assert each * shape.m * shape.k <= engine.weight_bytes <= 1.1 * each * shape.m * shape.k + 4 * shape.m


@pytest.mark.parametrize("kernel", ["fp8", "fp8_rows", "int4"])
def test_one_token_is_decoded(operators: Operators, kernel: str) -> None:
    assert check(point(kernel, LinearShape(16, 128, 1)))[0] >= 0


def test_int8_of_few_tokens_is_multiplied_the_other_way_round_and_refused_in_torchs_words(
    operators: Operators,
) -> None:
    assert check(point("int8", LinearShape(32, 128, 16)))[0] == 0
    with pytest.raises(
        Unsupported, match=r"torch int8: mat2\.size\(1\) needs to be greater than 0 and a multiple of 8"
    ):
        check(point("int8", LinearShape(32, 128, 1)))
    with pytest.raises(Unsupported, match="torch fp8: mat2 shape must be divisible by 16"):
        check(point("fp8", LinearShape(40, 128, 1)))
    with pytest.raises(Unsupported, match="packs int4 weights in tiles of 8 x 128"):
        check(point("int4", LinearShape(12, 128, 1)))


WRONG = [
    ("fp8", "a tile left out"), ("fp8_rows", "a tile left out"), ("int8", "a tile left out"),
    ("int4", "a tile left out"),
    ("fp8_rows", "scales swapped"), ("fp8", "narrow sums"), ("fp8_rows", "narrow sums"), ("int8", "off by one"),
    ("int4", "groups swapped"), ("int4", "no zeros"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "wrong"), WRONG)
def test_known_wrong_products_are_refused(operators: Operators, kernel: str, wrong: str) -> None:
    operators.wrong = wrong
    with pytest.raises(WrongResult, match="results are wrong"):
        check(point(kernel, LinearShape(48, 4096, 24)))


def test_a_scale_for_all_is_another_kernel_than_one_for_each(operators: Operators) -> None:
    for kernel, distinct in (("fp8", 1), ("fp8_rows", SHAPE.m)):
        scales = check(point(kernel))[1].scales
        assert len(np.unique(scales[0])) == distinct


def test_types_that_a_kernel_does_not_have_are_refused(operators: Operators) -> None:
    half = dataclasses.replace(point("fp8"), dtype="float16")
    with pytest.raises(Unsupported, match="torch's fp8 multiplies fp8 x fp8 to bfloat16"):
        check(half)
    bytes_by_cublas = build_gpu_point("x", SHAPE, Dense(), 0.0, gpu_points.DENSE[0], precision="fp8")
    with pytest.raises(Unsupported, match="cublas multiplies float16 or bfloat16, not fp8"):
        check(bytes_by_cublas)


def test_a_result_that_was_not_written_is_wrong(operators: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    from latbench.timing.gpu_drivers import TorchDriver

    one = point("int8")
    layer = build_gpu_layer(one)
    engine = torch_gpu.prepare(one, layer)
    result = engine.calls[0]()
    TorchDriver.spoil(SimpleNamespace(), result)  # type: ignore[arg-type]
    with pytest.raises(WrongResult):
        prepare_gpu_point.check_results(one, layer, engine, [result])


def test_facts_of_a_row_count_the_bytes_of_each_type() -> None:
    layer = build_gpu_layer(point("int8"))
    engine = SimpleNamespace(weight_bytes=100, calls=[None], driver=gpu_fakes.FakeDevice(), kernel="k", families=None)
    facts = prepare_gpu_point._facts(point("int8"), layer, engine)  # type: ignore[arg-type]
    assert facts["bytes_min"] == 100 + SHAPE.k * SHAPE.n + 4 * SHAPE.m * SHAPE.n


def test_codes_expand_as_they_are_defined(rng: np.random.Generator) -> None:
    weight, four = low_precision_layers.draw_four_bits(rng, LinearShape(3, 256, 1))
    assert np.array_equal(weight, expand_codes(four))
    none = dataclasses.replace(four, codes=np.full_like(four.codes, 8), zeros=np.zeros_like(four.zeros))
    assert not expand_codes(none).any()
