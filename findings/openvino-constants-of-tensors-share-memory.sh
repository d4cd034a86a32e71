#!/usr/bin/env bash
# OpenVINO: a constant made of an array copies it; one made of a tensor of this array does not, and changes with it.
#
# Seen with openvino 2026.4.1. `constant(array)` copies by default (`shared_memory=False`), and models are built in
# that habit from arrays that a function forgets. Weights of four bits have no NumPy type, so their constants are made
# of `Tensor(packed bytes, shape, Type.i4)`. There the default is the opposite: the constant reads the memory of the
# array for as long as the model is not compiled, and holds no copy. One would expect the same default for the same
# function. What is written to the array after the constant was made is in the model then, and nothing is said.
# `op.Constant(tensor, shared_memory=False)` copies.
#
# The script keeps the array alive and fills it with other numbers between building and compiling.
# 60 MB. Exit code 1: the defaults are otherwise now.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q openvino==2026.4.1 numpy==2.4.6

"$folder/env/bin/python" - <<'END'
import sys

import numpy as np
import openvino
from openvino import opset13 as operators


def multiply(make_constant):
    """Return ones times a weight of threes whose array is overwritten by ones before the model is compiled."""
    packed = np.full((1, 8), 0x33, np.uint8)  # 16 numbers of four bits, all 3
    weight = make_constant(packed)
    x = operators.parameter([1, 16], np.float32)
    y = operators.matmul(x, operators.convert(weight, np.float32), False, True)
    packed[:] = 0x11
    compiled = openvino.Core().compile_model(openvino.Model([y], [x], "layer"), "CPU")
    return float(compiled(np.ones((1, 16), np.float32))[0][0, 0])


def make_tensor(packed):
    return openvino.Tensor(packed, [1, 16], openvino.Type.i4)


def multiply_bytes():
    """Return the same for a weight of bytes, as a constant of an array."""
    weight = np.full((1, 16), 3, np.int8)
    constant = operators.constant(weight)
    x = operators.parameter([1, 16], np.float32)
    y = operators.matmul(x, operators.convert(constant, np.float32), False, True)
    weight[:] = 1
    compiled = openvino.Core().compile_model(openvino.Model([y], [x], "layer"), "CPU")
    return float(compiled(np.ones((1, 16), np.float32))[0][0, 0])


found = {
    "constant(array)": multiply_bytes(),
    "constant(tensor)": multiply(lambda packed: operators.constant(make_tensor(packed))),
    "Constant(tensor, shared_memory=False)": multiply(
        lambda packed: openvino.op.Constant(make_tensor(packed), shared_memory=False)
    ),
}
print("openvino", openvino.__version__)
for how, result in found.items():
    print(f"{how}: 16 ones times what was 3 and is 1 later = {result:g}")
sys.exit(0 if list(found.values()) == [48.0, 16.0, 48.0] else 1)
END
