"""How fast the CPU kernels are beside the fastest dense engine: prints one table a shape, in half a minute.

    python tests/benchmarks/cpu_kernels.py [--all] [--only linear|conv] [--threads 2] [--shape 768x768x128]

Dense is the faster of onnxruntime and torch's oneDNN layers, which the table names. Both run in processes of their
own, onnxruntime without spinning threads; blocks of calls alternate between the engines, and the least time of all
blocks counts, so that other people's load falls out. On a machine that is busy all the time use one thread: then the
clock is that of the process, which stands still while others run. Weights and activations are warm.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numba
import numpy as np

from sparse_kernels.formats import pack
from sparse_kernels.patterns import NM, parse
from sparse_kernels.plan import Plan, prepare, prepare_conv2d
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

LINEAR = [LinearShape(m, k, n) for m, k, n in ((768, 768, 128), (2048, 512, 128), (512, 2048, 128))]
CONV = [Conv2dShape(1, 128, 28, 28, 128, 3, 3, padding=(1, 1)), Conv2dShape(16, 256, 14, 14, 256, 1, 1)]
PATTERNS = ("unstructured", "nm:2:4", "nm:1:4", "vector:32")

CHANNELS = ((64, 56), (128, 28), (256, 14))
ALL_LINEAR = [*LINEAR, *(LinearShape(m, k, n) for m, k, n in ((3072, 768, 128), (768, 3072, 128), (768, 768, 16)))]
ALL_CONV = [
    *(Conv2dShape(batch, c, h, h, c, 3, 3, padding=(1, 1)) for batch in (1, 16) for c, h in CHANNELS),
    *(Conv2dShape(batch, c, h, h, c, 1, 1) for batch in (1, 16) for c, h in CHANNELS),
    *(Conv2dShape(16, c, h, h, c, 3, 3, padding=(1, 1)) for c, h in ((16, 32), (32, 16), (64, 8))),
]
ALL_PATTERNS = ("dense", *PATTERNS, "vector:8", "vector:4", "shflbw:32", "shflbw:64", "block:32x32")
SPARSITIES = (0.5, 0.75, 0.9)
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


def onnxruntime_layer(shape: Shape, threads: int) -> Callable[[], object]:
    """A call of the dense layer in onnxruntime."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    if isinstance(shape, LinearShape):
        shapes, weight = ([shape.n, shape.k], [shape.n, shape.m]), (shape.k, shape.m)
        nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])]
    else:
        c = shape
        shapes = ([c.batch, c.c_in, c.h, c.w], [c.batch, c.c_out, c.out_h, c.out_w])
        weight, (down, right) = (c.c_out, c.c_in, c.kh, c.kw), c.padding
        pads, strides = [down, right, down, right], list(c.stride)
        nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], pads=pads, strides=strides)]
    weights = {"w": rng.standard_normal(weight, np.float32), "b": np.zeros(shape.m, np.float32)}
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
    return lambda: session.run(None, feed)


def torch_layer(shape: Shape, threads: int) -> Callable[[], object]:
    """A call of the dense layer in torch, by oneDNN, in that library's own layout."""
    import torch
    from torch.utils.mkldnn import to_mkldnn

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    if isinstance(shape, LinearShape):
        layer, x = torch.nn.Linear(shape.k, shape.m), torch.randn(shape.n, shape.k)
    else:
        c = shape
        layer = torch.nn.Conv2d(c.c_in, c.c_out, (c.kh, c.kw), c.stride, c.padding)
        x = torch.randn(c.batch, c.c_in, c.h, c.w)
    fast, packed = to_mkldnn(layer.eval()), x.to_mkldnn()
    return lambda: fast(packed)


ENGINES = {"onnxruntime": onnxruntime_layer, "torch oneDNN": torch_layer}


def dense_worker(pipe: Connection, engine: str, threads: int) -> None:
    """Take a shape, then numbers of seconds, each answered with the least time of a call of its layer, until 0."""
    while (shape := pipe.recv()) is not None:
        call = ENGINES[engine](shape, threads)
        while seconds := pipe.recv():
            pipe.send(least(call, seconds, threads))


def numba_cases(
    shape: Shape, specs: Sequence[str]
) -> dict[tuple[str, float], tuple[Plan, Callable[[], object], int]]:
    """(plan, call, kept weights) for every pattern and sparsity this shape can have."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((shape.m, shape.k), np.float32) / np.float32(np.sqrt(shape.k))
    bias = np.zeros(shape.m, np.float32)
    cases = {}
    for spec in specs:
        pattern = parse(spec)
        sparsities = (pattern.sparsity,) if isinstance(pattern, NM) else (0.0,) if spec == "dense" else SPARSITIES
        if pattern.refuses(shape) is not None:
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


def report(shape: Shape, pipes: dict[str, Connection], rounds: int, threads: int, specs: Sequence[str]) -> None:
    """Print the table of one shape."""
    cases = numba_cases(shape, specs)
    start = time.perf_counter()
    for _, call, _ in cases.values():
        call()
    first = time.perf_counter() - start
    for pipe in pipes.values():
        pipe.send(shape)
    dense, times = dict.fromkeys(pipes, float("inf")), dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for engine, pipe in pipes.items():
            pipe.send(BLOCK_SECONDS)
            dense[engine] = min(dense[engine], pipe.recv())
        for key, (_, call, _) in cases.items():
            times[key] = min(times[key], least(call, BLOCK_SECONDS, threads))
    for pipe in pipes.values():
        pipe.send(0.0)
    print(f"\n{shape}\n  first calls {first:.2f} s")
    for engine, seconds in dense.items():
        print(f"  dense {engine:13} {seconds * 1e6:8.1f} us         {shape.flop / seconds / 1e9:5.0f} GFLOP/s")
    best = min(dense.values())
    for (spec, sparsity), (plan, _, nnz) in cases.items():
        seconds = times[spec, sparsity]
        rate = shape.flop * nnz / (shape.m * shape.k) / seconds / 1e9
        print(
            f"  {spec:14} {sparsity:4.0%} {seconds * 1e6:8.1f} us {best / seconds:6.2f}x"
            f" {rate:5.0f} GFLOP/s on non-zeros  {plan.kernel}"
        )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every shape and pattern: some minutes")
    parser.add_argument("--only", choices=("linear", "conv"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", help="MxKxN of one linear layer instead of the list")
    parser.add_argument("--patterns", help="patterns instead of those of the list, separated by commas", default="")
    arguments = parser.parse_args()
    numba.set_num_threads(arguments.threads)
    linear, conv = (ALL_LINEAR, ALL_CONV) if arguments.all else (LINEAR, CONV)
    shapes: list[Shape] = [
        *(linear if arguments.only != "conv" else []),
        *(conv if arguments.only != "linear" else []),
    ]
    if arguments.shape:
        m, k, n = (int(number) for number in arguments.shape.split("x"))
        shapes = [LinearShape(m, k, n)]
    specs = [spec for spec in arguments.patterns.split(",") if spec] or (ALL_PATTERNS if arguments.all else PATTERNS)
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for engine in ENGINES:
        pipes[engine], far = context.Pipe()
        context.Process(target=dense_worker, args=(far, engine, arguments.threads), daemon=True).start()
    for shape in shapes:
        report(shape, pipes, arguments.rounds, arguments.threads, specs)
    for pipe in pipes.values():
        pipe.send(None)


if __name__ == "__main__":
    main()
