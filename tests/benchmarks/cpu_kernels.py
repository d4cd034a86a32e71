"""How fast the CPU kernels are beside onnxruntime's dense layers: prints one table, in a few minutes.

    python tests/benchmarks/cpu_kernels.py [--only linear|conv] [--rounds 8] [--threads 2] [--shape 768x768x128]

onnxruntime runs in a process of its own without spinning threads; blocks of calls alternate between the engines, and
the least time of all blocks counts, so that other people's load falls out. On a machine that is busy all the time use
one thread: then the clock is that of the process, which stands still while others run. Weights and activations are
warm.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numba
import numpy as np

from sparse_kernels.formats import pack
from sparse_kernels.patterns import NM, parse
from sparse_kernels.plan import Plan, prepare, prepare_conv2d
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

LINEAR = [LinearShape(m, k, n) for m, k, n in ((768, 768, 128), (3072, 768, 128), (768, 3072, 128), (768, 768, 16))]
CHANNELS = ((64, 56), (128, 28), (256, 14))
CONV = [
    *(Conv2dShape(batch, c, h, h, c, 3, 3, padding=(1, 1)) for batch in (1, 16) for c, h in CHANNELS),
    *(Conv2dShape(batch, c, h, h, c, 1, 1) for batch in (1, 16) for c, h in CHANNELS),
    *(Conv2dShape(16, c, h, h, c, 3, 3, padding=(1, 1)) for c, h in ((16, 32), (32, 16), (64, 8))),
]
PATTERNS = ("dense", "vector:32", "shflbw:32", "shflbw:64", "vector:8", "vector:4", "block:32x32", "unstructured")
SPARSITIES = (0.5, 0.75, 0.9)
N_M = ("nm:2:4", "nm:1:4")
BLOCK_SECONDS = 0.02


def least(run: Callable[[], object], seconds: float, threads: int) -> float:
    """The least time of one call, over at least three calls, and more until they take `seconds` together."""
    clock = time.process_time if threads == 1 else time.perf_counter
    run()
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def onnxruntime_worker(pipe: Connection, threads: int) -> None:
    """Answer each shape with a session, and each number of seconds with the least time of a call."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    while (message := pipe.recv()) is not None:
        if isinstance(message, LinearShape):
            s = message
            shapes, weight = ([s.n, s.k], [s.n, s.m]), (s.k, s.m)
            nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])]
        elif isinstance(message, Conv2dShape):
            c = message
            shapes = ([c.batch, c.c_in, c.h, c.w], [c.batch, c.c_out, c.out_h, c.out_w])
            weight, (down, right) = (c.c_out, c.c_in, c.kh, c.kw), c.padding
            pads, strides = [down, right, down, right], list(c.stride)
            nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], pads=pads, strides=strides)]
        else:
            pipe.send(least(lambda: session.run(None, feed), message, threads))  # noqa: B023
            continue
        weights = {"w": rng.standard_normal(weight, np.float32), "b": np.zeros(message.m, np.float32)}
        ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip("xy", shapes, strict=True)]
        stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
        model = helper.make_model(
            helper.make_graph(nodes, "layer", ends[:1], ends[1:], stored),
            opset_imports=[helper.make_opsetid("", 17)],
            ir_version=8,
        )
        onnx.checker.check_model(model)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        feed = {"x": rng.standard_normal(shapes[0], np.float32)}


def numba_cases(shape: Shape, only: list[str]) -> dict[tuple[str, float], tuple[Plan, Callable[[], object], int]]:
    """(plan, call, kept weights) for every pattern and sparsity this shape can have."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((shape.m, shape.k), np.float32) / np.float32(np.sqrt(shape.k))
    bias = np.zeros(shape.m, np.float32)
    cases = {}
    for spec in (*PATTERNS, *N_M):
        pattern = parse(spec)
        sparsities = (pattern.sparsity,) if isinstance(pattern, NM) else (0.0,) if spec == "dense" else SPARSITIES
        if pattern.refuses(shape) is not None or (only and spec not in only):
            continue
        for sparsity in sparsities:
            packed = pack(weight, pattern.mask(weight.astype(np.float64) ** 2, sparsity), pattern)
            if isinstance(shape, Conv2dShape):
                plan = prepare_conv2d(packed, shape, "numba")
                x = rng.standard_normal((shape.batch, shape.c_in, shape.h, shape.w), np.float32)
                y = np.empty((shape.batch, shape.c_out, shape.out_h, shape.out_w), np.float32)
            else:
                plan = prepare(packed, "numba", "token_major", shape.n)
                x = rng.standard_normal((shape.n, shape.k), np.float32)
                y = np.empty((shape.n, shape.m), np.float32)
            cases[spec, sparsity] = (plan, lambda plan=plan, x=x, y=y: plan(x, bias, "relu", y), packed.nnz)
    return cases


def report(shape: Shape, pipe: Connection, rounds: int, threads: int, only: list[str]) -> None:
    """Print the table of one shape."""
    cases = numba_cases(shape, only)
    start = time.perf_counter()
    for _, call, _ in cases.values():
        call()
    first = time.perf_counter() - start
    pipe.send(shape)
    dense, times = float("inf"), dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        pipe.send(BLOCK_SECONDS)
        dense = min(dense, pipe.recv())
        for key, (_, call, _) in cases.items():
            times[key] = min(times[key], least(call, BLOCK_SECONDS, threads))
    print(f"\n{shape}\n  first calls {first:.2f} s; onnxruntime dense {dense * 1e6:.0f} us", end="")
    print(f", {shape.flop / dense / 1e9:.0f} GFLOP/s")
    for (spec, sparsity), (plan, _, nnz) in cases.items():
        seconds = times[spec, sparsity]
        rate = shape.flop * nnz / (shape.m * shape.k) / seconds / 1e9
        print(
            f"  {spec:13} {sparsity:4.0%} {seconds * 1e6:8.1f} us {dense / seconds:6.2f}x"
            f" {rate:5.0f} GFLOP/s on non-zeros  {plan.kernel}"
        )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("linear", "conv"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", help="MxKxN of one linear layer instead of the list")
    parser.add_argument("--patterns", help="patterns instead of all, separated by commas", default="")
    arguments = parser.parse_args()
    numba.set_num_threads(arguments.threads)
    shapes: list[Shape] = [*LINEAR, *CONV]
    if arguments.only:
        shapes = list(LINEAR if arguments.only == "linear" else CONV)
    if arguments.shape:
        m, k, n = (int(number) for number in arguments.shape.split("x"))
        shapes = [LinearShape(m, k, n)]
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    process = context.Process(target=onnxruntime_worker, args=(far, arguments.threads), daemon=True)
    process.start()
    for shape in shapes:
        report(
            shape, pipe, arguments.rounds, arguments.threads, [spec for spec in arguments.patterns.split(",") if spec]
        )
    pipe.send(None)
    process.join()


if __name__ == "__main__":
    main()
