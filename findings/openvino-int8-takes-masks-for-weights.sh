#!/usr/bin/env bash
# OpenVINO: one layer in eight bits anywhere, and attention no longer sees its scores, if its mask is made of booleans.
#
# Seen with openvino 2026.4.1 on x86 processors with and without AVX-512. Many encoders add a mask to their scores:
# (1 - present) * -1e9, where `present` says which tokens are no padding. In graphs this is Convert, Subtract, Multiply.
# Weights in eight bits are read by the same three operations. If the model has any FakeQuantize, as every model that
# NNCF quantised after training has, the plugin prepares it for eight bits, and takes a mask of type boolean, u8 or i8
# for such numbers. It moves the multiplication by -1e9 behind the addition, so scores are divided by -1e9 before they
# are added to 0 or 1. Float32 loses them there. Softmax then gives all tokens that are present the same weight.
#
# One would expect results that are off by a step of eight bits. They are those of a model without queries and keys,
# and nothing is said. A sentence encoder fell to a cosine of 0.36 to its own embeddings, with 0.998 after the mask was
# written with Select. Masks of type i32 and i64 are not affected.
#
# The script computes probabilities of four tokens, two of which are padding, with and without FakeQuantize.
# 60 MB. Exit code 1: OpenVINO behaves otherwise now.
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

TOKENS, WIDTH = 4, 8
rng = np.random.default_rng(0)
weight, x = (rng.standard_normal(size).astype(np.float32) for size in ((WIDTH, WIDTH), (1, TOKENS, WIDTH)))
MASKS = {"boolean": np.int64, "u8": np.uint8, "i32": np.int32, "i64": np.int64}


def attend(kind, in_bytes, chosen=False):
    """Return the probabilities (TOKENS, TOKENS); the last two tokens are padding."""
    given = operators.parameter([1, 1, TOKENS], MASKS[kind])
    present = operators.not_equal(given, np.int64(0)) if kind == "boolean" else given
    tokens = operators.parameter(x.shape, np.float32)
    if chosen:
        bias = operators.select(present, np.float32(0), np.float32(-1e9))
    else:
        number = operators.convert(present, np.float32)
        bias = operators.multiply(operators.subtract(np.float32(1), number), np.float32(-1e9))
    read = operators.fake_quantize(tokens, *map(np.float32, (-4, 4, -4, 4)), 256) if in_bytes else tokens
    queries = operators.matmul(read, operators.constant(weight), False, True)
    scores = operators.add(operators.matmul(queries, tokens, False, True), bias)
    model = openvino.Model([operators.softmax(scores, -1)], [given, tokens], "attention")
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled([np.array([[[1, 1, 0, 0]]], MASKS[kind]), x])[0][0]


def compare(kind, **how):
    """Return how far probabilities move by reading one layer's inputs in 256 steps."""
    moved = float(np.abs(attend(kind, True, **how) - attend(kind, False, **how)).max())
    print(f"mask of {kind}{', by Select' if how else ''}: probabilities move by {moved:.3f}")
    return moved


print("openvino", openvino.__version__)
print("in floats:", np.round(attend("boolean", False), 3)[0].tolist())
print("with FakeQuantize:", np.round(attend("boolean", True), 3)[0].tolist())
wrong = [compare("boolean"), compare("u8")]
right = [compare("i32"), compare("i64"), compare("boolean", chosen=True)]
sys.exit(0 if min(wrong) > 0.3 and max(right) < 0.05 else 1)
END
