"""Dense layers whose weights have a step for each block: other libraries run what the numbers say, or are caught."""

from dataclasses import replace

import numpy as np
import pytest

from latbench.backends.cpu import block_steps, prepare_point
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import FEW_TOKENS, ROUNDED_KERNELS
from latbench.workloads.points import Point, PointSetup, list_points
from latbench.workloads.workload import Layer, Workload
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import Dense
from sparse_kernels.shapes import LinearShape

KERNELS = [("onnxruntime", "int8-blocks"), ("onnxruntime", "int4-blocks"), ("openvino", "int4-weights")]


def build_point(backend: str, kernel: str, shape: LinearShape) -> Point:
    rounded = ROUNDED_KERNELS[kernel]
    return Point(
        "cpu", backend, kernel, shape, Dense(), 0.0, threads=2, dtype_w=rounded.weights, dtype_a=rounded.activations
    )


@pytest.fixture(autouse=True)
def one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several would share a pool of threads, and no session of this process could have its own any more."""
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr("latbench.backends.cpu.onnxruntime.MOST_SESSIONS", 1)


@pytest.mark.parametrize(("backend", "kernel"), KERNELS)
@pytest.mark.parametrize("shape", [LinearShape(17, 128, 1), LinearShape(64, 384, 5)], ids=str)
def test_a_layer_is_the_product_of_its_whole_numbers(backend: str, kernel: str, shape: LinearShape) -> None:
    pytest.importorskip(backend)
    point = build_point(backend, kernel, shape)
    rotation = prepare_point.prepare_point(point)
    assert backend in rotation.facts["kernel_used"]
    layer = prepare_point.build_synthetic_layer(point)
    bits = 8 if point.dtype_w == "int8" else 4
    blocks = block_steps.round_in_blocks(layer.weight, bits)
    assert np.abs(blocks.values - layer.weight).max() <= blocks.steps.max() / 2 * 1.0001


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rounds_inputs", [False, True])
def test_wrong_products_are_caught(rng: np.random.Generator, bits: int, rounds_inputs: bool) -> None:
    weight, x, bias = (rng.standard_normal(size, np.float32) for size in ((24, 256), (3, 256), 24))
    x = np.abs(x)  # a wrong zero then shifts every product to one side
    blocks = block_steps.round_in_blocks(weight, bits)
    right = (x @ blocks.values.T + bias).astype(np.float32)
    assert block_steps.check_in_blocks(right, blocks, x, bias, rounds_inputs) < 1e-6
    swapped = blocks.whole.reshape(24, 2, 64, 2)[..., ::-1].reshape(24, 2, 128)  # halves of a byte
    for wrong in (replace(blocks, whole=swapped), replace(blocks, steps=blocks.steps[:, ::-1].copy())):
        with pytest.raises(WrongResult):
            y = (x @ wrong.values.T + bias).astype(np.float32)
            block_steps.check_in_blocks(y, blocks, x, bias, rounds_inputs)
    with pytest.raises(WrongResult):  # the zero of whole numbers is one too low
        block_steps.check_in_blocks(
            right + x.reshape(3, 2, 128).sum(axis=2) @ blocks.steps.T, blocks, x, bias, rounds_inputs
        )


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_bytes_hold_the_numbers_in_order(rng: np.random.Generator, bits: int) -> None:
    blocks = block_steps.round_in_blocks(rng.standard_normal((3, 256), np.float32), bits)
    zero = 2 ** (bits - 1)
    packed = blocks.pack(zero)
    assert packed.shape == (3, 2, 128 * bits // 8) and packed.nbytes + blocks.steps.nbytes == blocks.nbytes
    whole = packed if bits == 8 else np.stack([packed & 15, packed >> 4], axis=-1).reshape(3, 2, 128)
    np.testing.assert_array_equal(whole.astype(int) - zero, blocks.whole)


def test_blocks_of_zeros_stay_zeros_and_other_widths_are_refused() -> None:
    blocks = block_steps.round_in_blocks(np.zeros((2, 128), np.float32), 4)
    assert not blocks.values.any() and np.isfinite(blocks.steps).all()
    with pytest.raises(Unsupported, match="128 columns do not fit a layer of 100"):
        block_steps.round_in_blocks(np.zeros((2, 100), np.float32), 4)


def test_a_sweep_times_smaller_weights_with_few_tokens_only() -> None:
    def list_kernels(tokens: int) -> set[str]:
        workload = Workload("few", "a test", (Layer("fc", LinearShape(256, 256, tokens)),))
        setup = PointSetup("cpu", 2, backends=("onnxruntime", "openvino", "numba"), rounded=("int8",))
        return {point.kernel for point in list_points([workload], setup, patterns=[Dense()])}

    narrow = {"int8-weights", "int4-weights", "int8-blocks", "int4-blocks"}
    assert narrow <= list_kernels(FEW_TOKENS)
    assert not narrow & list_kernels(FEW_TOKENS + 1)
