"""What a sparse weight is, and how it multiplies.

pattern = parse("vector:32")
mask = pattern.mask(weight**2, sparsity=0.75)
plan = prepare(pack(weight, mask, pattern), backend="numba", layout="token_major", n=128)
y = plan(x, bias, activation="relu")
"""

from sparse_kernels.formats import NotOfPattern, Packed, pack, unpack
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorNM, VectorWise, parse
from sparse_kernels.plan_protocol import Plan
from sparse_kernels.planner import matmul, prepare, prepare_conv2d
from sparse_kernels.registry import MissingLibrary, UnknownKernel
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

__all__ = [
    "NM",
    "BlockWise",
    "Conv2dShape",
    "Dense",
    "LinearShape",
    "MissingLibrary",
    "NotOfPattern",
    "Packed",
    "Pattern",
    "Plan",
    "Shape",
    "ShflBW",
    "UnknownKernel",
    "Unstructured",
    "VectorNM",
    "VectorWise",
    "matmul",
    "pack",
    "parse",
    "prepare",
    "prepare_conv2d",
    "unpack",
]
