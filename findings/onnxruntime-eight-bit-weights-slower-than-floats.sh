#!/usr/bin/env bash
# Weights of eight bits are far slower than floats in ONNX Runtime, unless inputs may be rounded, too.
#
# Seen with onnxruntime 1.31.1 on CPUs with AVX-512. MatMulNBits multiplies float32 inputs with weights of 2 to 8
# bits, whose blocks have steps of their own. Its attribute accuracy_level says how products may be computed; by
# default (0) in float32. One row of inputs times a weight of 768 x 3072, two threads, medians of calls:
#
#     MatMul, float32                              0.8 ms
#     MatMulNBits, 4 bits, accuracy_level 0        0.3 ms
#     MatMulNBits, 8 bits, accuracy_level 0        4.3 ms
#     MatMulNBits, 8 bits, accuracy_level 4        0.2 ms
#
# One would expect that 8 bits, which are simpler to unpack than 4, cost about as much as these, and that a quarter of
# the bytes is never much slower than floats. But only 4 bits have a kernel that multiplies in float32. Weights of 8
# bits become floats anew in every call. The results are right in all cases: within 1e-6 of the product with the
# unpacked weight, and within 1e-3 at level 4. So a model whose weights were compressed to 8 bits, with the default
# level, gets several times slower and says nothing.
#
# Exit code 1: 8 bits at level 0 take less than twice as long as float32 now, or 8 times as long as at level 4.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6

"$folder/env/bin/python" - <<'END'
import sys
import time

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

ROWS, COLUMNS, BLOCK = 768, 3072, 128
rng = np.random.default_rng(0)
weight = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
x = rng.standard_normal((1, COLUMNS)).astype(np.float32)


def build_session(node, constants):
    graph = helper.make_graph(
        [node], "layer", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, COLUMNS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, ROWS])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def compress(bits, level):
    """Return the session of the rounded weight, and that weight."""
    blocks, most = weight.reshape(ROWS, -1, BLOCK), 2 ** (bits - 1) - 1
    steps = np.abs(blocks).max(axis=2) / most
    whole = np.rint(blocks / steps[..., None])
    stored = (whole + 2 ** (bits - 1)).astype(np.uint8)
    if bits == 4:
        stored = stored[..., 0::2] | stored[..., 1::2] << 4
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=COLUMNS, N=ROWS, bits=bits,
        block_size=BLOCK, accuracy_level=level,
    )
    values = (whole * steps[..., None]).reshape(ROWS, COLUMNS)
    return build_session(node, {"w": stored, "s": steps.reshape(-1)}), values


def measure(session, values):
    """Return the median time of a call in seconds, and the largest error relative to the largest result."""
    result, right = session.run(None, {"x": x})[0], x.astype(float) @ values.T
    seconds = []
    for _ in range(60):
        start = time.perf_counter()
        session.run(None, {"x": x})
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)), float(np.abs(result - right).max() / np.abs(right).max())


floats = build_session(helper.make_node("MatMul", ["x", "w"], ["y"]), {"w": np.ascontiguousarray(weight.T)})
base, _ = measure(floats, weight)
print(f"onnxruntime {onnxruntime.__version__}: MatMul in float32 takes {base * 1e3:.2f} ms")
ratio = {}
for bits, level in ((4, 0), (4, 4), (8, 0), (8, 4)):
    seconds, error = measure(*compress(bits, level))
    ratio[bits, level] = seconds / base
    print(f"{bits} bits, accuracy_level {level}: {seconds * 1e3:.2f} ms, {seconds / base:.1f} of it, error {error:.0e}")
    if error > 2e-2:
        sys.exit("a result is wrong")
sys.exit(0 if ratio[8, 0] > max(2, 8 * ratio[8, 4]) and ratio[4, 0] < ratio[8, 0] / 4 else 1)
END
