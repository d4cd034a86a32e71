"""Convolutions by implicit GEMM in the emulator: x (c_in, h, w, batch), the batch innermost."""

import numpy as np
import pytest
from vector_cases import Layer, run

from sparse_kernels import BlockWise, ShflBW, VectorWise, pack
from sparse_kernels.cuda import vector
from sparse_kernels.cuda.program import NotSupported
from sparse_kernels.shapes import Conv2dShape

ARCHITECTURES = ("sm_70", "sm_75", "sm_80")


def image(batch, c_in, h, w, c_out, kernel, stride=(1, 1), padding=(0, 0), dilation=(1, 1)):
    return Conv2dShape(batch, c_in, h, w, c_out, *kernel, stride, padding, dilation)


SHAPES = [
    image(8, 7, 6, 5, 20, (3, 3), padding=(1, 1)),
    image(16, 3, 9, 9, 16, (7, 7), stride=(2, 2), padding=(3, 3)),
    image(64, 16, 3, 3, 40, (1, 1)),
    image(8, 5, 7, 8, 18, (1, 1), stride=(2, 2)),
    image(8, 4, 11, 7, 16, (3, 2), stride=(1, 3), padding=(4, 0), dilation=(2, 3)),
    image(24, 40, 2, 2, 130, (3, 3), padding=(1, 1)),
    image(1, 6, 7, 5, 20, (3, 3), padding=(1, 1)),
    image(3, 6, 7, 5, 33, (3, 3), stride=(2, 1), padding=(1, 2)),
    image(12, 3, 5, 5, 16, (5, 5), padding=(2, 2)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_convolution_is_computed(architecture, shape, rng):
    run(Layer(VectorWise(16), shape, architecture=architecture, activation="relu"), rng, seed=1)


@pytest.mark.parametrize(
    "pattern", [ShflBW(32), ShflBW(64), VectorWise(128), BlockWise(64, 16), ShflBW(150)], ids=str
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("width", vector.MACHINES["sm_80"].widths)
def test_every_tile(pattern, dtype, width, rng):
    shape = image(16, 24, 5, 4, 160, (3, 3), padding=(1, 1))
    run(Layer(pattern, shape, 0.7, dtype, activation="gelu", width=width), rng, seed=2)


@pytest.mark.parametrize("seed", range(3, 9))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_whatever_the_order_of_threads_and_copies(architecture, seed, rng):
    shape = image(8, 20, 4, 5, 40, (3, 3), padding=(1, 1))
    run(Layer(ShflBW(32), shape, 0.3, architecture=architecture, width=64), rng, seed)


def test_layers_of_resnet50_launch_one_block_for_every_tile():
    for batch in (16, 64):
        for h, c_in, c_out, kernel, stride in (
            (224, 3, 64, 7, 2),
            (56, 64, 64, 3, 1),
            (56, 256, 128, 1, 1),
            (56, 128, 128, 3, 2),
            (14, 256, 256, 3, 1),
            (7, 512, 2048, 1, 1),
        ):
            shape = image(batch, c_in, h, h, c_out, (kernel, kernel), (stride, stride), (kernel // 2, kernel // 2))
            packed = pack(np.ones((shape.m, shape.k), np.float32), None, VectorWise(64))
            program = vector.build_conv2d_program(packed, shape, "float16", "sm_80")
            (launch,) = program.launches(batch, "relu")
            assert launch.grid[0] == -(-c_out // 64) * -(-shape.n // launch.variant.defines["BN"])
            assert launch.variant.defines["ASYNC"] == 1


def test_what_does_not_fit_is_refused():
    shape = image(8, 4, 5, 5, 16, (3, 3))
    packed = pack(np.ones((16, 35), np.float32), None, VectorWise(16))
    with pytest.raises(ValueError, match=r"the packed weight is \(16, 35\), and .* needs \(16, 36\)"):
        vector.build_conv2d_program(packed, shape, "float16", "sm_80")
    large = image(8, 2, 2**15, 2**15, 16, (1, 1))
    packed = pack(np.ones((16, 2), np.float32), None, VectorWise(16))
    with pytest.raises(NotSupported, match="places in an image are counted in 32 bits"):
        vector.build_conv2d_program(packed, large, "float16", "sm_80")


def test_bytes_are_those_of_the_arrays_that_the_launch_takes():
    shape = image(8, 4, 5, 5, 16, (3, 3))
    packed = pack(np.ones((16, 36), np.float32), None, VectorWise(16))
    program = vector.build_conv2d_program(packed, shape, "float16", "sm_80")
    (launch,) = program.launches(8, None)
    assert program.nbytes == sum(it.nbytes for it in launch.arguments if isinstance(it, np.ndarray))
