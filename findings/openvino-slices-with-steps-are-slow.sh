#!/usr/bin/env bash
# OpenVINO: every second row and column of images by a slice takes longer than by pooling over one element.
#
# Seen with openvino 2026.4.1 on a CPU with AVX-512, in float32. Shortcuts of residual networks and patches of
# detectors take `x[:, :, ::2, ::2]`, which the importer makes a Slice with steps. One would expect that it costs at
# most a copy, as it computes nothing. But a Slice with steps of the last two axes has no kernel of its own ("ref" in
# the profile), and is computed element by element. AvgPool with a kernel of 1 x 1 and the same strides gives the same
# numbers, infinite ones and NaN included, and has one. Medians of the operation alone, two threads, 16 images:
#
#     16 x 32 x 32     Slice 103 us     AvgPool 46 us
#
# In a ResNet20 the two slices were a tenth of the whole time.
#
# The script times the operations as OpenVINO's own profile does, in turns, and prints the median of the ratios.
# 60 MB. Exit code 1: the numbers differ, or the slice is less than 1.3 times as slow now.
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

SIZES = (16, 16, 32, 32)
SETTINGS = {
    "INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 2, "NUM_STREAMS": 1, "PERF_COUNT": True,
    "ENABLE_CPU_PINNING": False,
}  # fmt: skip


def build(take):
    """Return a request of a model that takes every second row and column of something computed."""
    x = operators.parameter(SIZES, np.float32)
    y = operators.add(take(operators.multiply(x, np.float32(2))), np.float32(0))
    model = openvino.Model([y], [x], "taking")
    return openvino.Core().compile_model(model, "CPU", SETTINGS).create_infer_request()


def slice_steps(x):
    return operators.slice(x, np.array([0, 0]), np.array([2**62, 2**62]), np.array([2, 2]), np.array([2, 3]))


def pool(x):
    return operators.avg_pool(x, [2, 2], [0, 0], [0, 0], [1, 1], True, "floor")


def run(request, kind, x):
    """Return the result, and the microseconds of the operations of this kind."""
    y = request.infer([x])[0].copy()
    spent = [each.real_time.total_seconds() for each in request.profiling_info if each.node_type == kind]
    return y, 1e6 * sum(spent)


rng = np.random.default_rng(0)
x = rng.standard_normal(SIZES).astype(np.float32)
x[0, 0, 0, :5] = np.nan, 1, np.inf, 1, -np.inf
requests = {"Slice": build(slice_steps), "AvgPool": build(pool)}
times = {kind: [] for kind in requests}
for _ in range(300):
    results = {}
    for kind, request in requests.items():
        results[kind], microseconds = run(request, kind, x)
        times[kind].append(microseconds)
same = np.array_equal(results["Slice"], results["AvgPool"], equal_nan=True)
medians = {kind: float(np.median(each[50:])) for kind, each in times.items()}
ratio = medians["Slice"] / medians["AvgPool"]
print("openvino", openvino.__version__)
print(f"the same numbers: {same}; Slice {medians['Slice']:.0f} us, AvgPool {medians['AvgPool']:.0f} us: {ratio:.1f} times")
sys.exit(0 if same and ratio >= 1.3 else 1)
END
