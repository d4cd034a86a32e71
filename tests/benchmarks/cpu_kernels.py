"""How fast the CPU kernels are beside the fastest dense engine: prints one table a shape, in half a minute.

    python tests/benchmarks/cpu_kernels.py [--all] [--only linear|conv] [--threads 2] [--shape 768x768x128]
    python tests/benchmarks/cpu_kernels.py --workload resnet50 --patterns vector:32,shflbw:32
    python tests/benchmarks/cpu_kernels.py --shape 768x3072x1 --cold --bf16

Dense is the fastest of onnxruntime, torch's oneDNN modules, oneDNN's prepacked layers and, once `latbench setup
deepsparse` was called, DeepSparse; the table names them. They run in processes of their own; in each round a block of
calls of every engine takes its turn, with a rest for spinning threads, and of a block the least time counts, so that
other people's load falls out. Printed are medians of the rounds, of times and of their ratios. On a machine that is
busy all the time use one thread: then the clock is that of the process, which stands still while others run. A block
that was timed while a host had moved the cores apart (`latbench.sweeping.core_placement`) is timed again.

Weights and activations are warm, unless --cold: then enough copies of the weights take turns to pass the caches, for
sparse and dense ones alike, and in each round a sum over arrays as large takes its turn: what the memory allows.

--frames: convolutions read and write images in frames, as they lie between the layers of a converted model.

DeepSparse's sparse layers (the share of zeros that the table names, alone, not in a network) are no baseline either.
With --int8 it has linear layers in eight bits, too, whose zeros come in fours along a row, as it wants them.

--bf16 adds our linear layers with weights of bfloat16, and all layers with all that is multiplied in bfloat16, still
against dense float32; and beside linear ones torch's dense layer with weights, activations and results in bfloat16,
which counts as no baseline: it computes something else.

--int8 adds our layers in eight bits, and the dense ones of OpenVINO, torch and onnxruntime (and of that with the
largest value of each call, `dynamic`): a speedup of a layer in eight bits is over the fastest of those. torch's is
left out on processors without VNNI, where its results are wrong.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numba
import numpy as np

from latbench.backends.cpu import deepsparse_environment
from latbench.backends.cpu.prepare_point import SyntheticLayer, build_synthetic_layer, count_copies
from latbench.backends.cpu.torch import refuse_bytes
from latbench.base.engine_registry import CPU_ENGINES, FLOAT32
from latbench.errors import LatbenchError
from latbench.machines.devices import read_cpu_flags
from latbench.runners.worker_process import Worker
from latbench.sweeping.core_placement import CorePlacement
from latbench.workloads.points import Point
from latbench.workloads.workload import read_workload
from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.kernels.image_layout import copy_images
from sparse_kernels.cpu.kernels.transpose_tiles import pack_tiles
from sparse_kernels.cpu.layouts.image_results import Finish, Results
from sparse_kernels.cpu.layouts.padded_images import FramedImages, ImagePlaces
from sparse_kernels.cpu.plans.conv2d import CpuConv2dPlan
from sparse_kernels.cpu.plans.linear import PRECISIONS
from sparse_kernels.cpu.runtime.scratch_buffers import copy_to_cache_line, find_address
from sparse_kernels.formats import pack, unpack
from sparse_kernels.formats.int8 import InputRange, find_scales, pack_int8
from sparse_kernels.patterns import NM, Dense, Unstructured, parse
from sparse_kernels.plan_protocol import ACTIVATIONS, BLOCKED_LAYOUTS, LAYOUTS, Array, Plan
from sparse_kernels.planner import prepare, prepare_conv2d
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
SPINNING_SECONDS = 0.04  # of onnxruntime's threads after a call
MOST_TRIES = 300  # of a block, while cores are apart: for ten seconds or so

Calls = Sequence[Callable[[], object]]


def least(calls: Calls, seconds: float, threads: int) -> float:
    """The least time of one call, over at least three, and more until they take `seconds` together.

    Of several calls, which take turns, the least mean of a whole turn.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    calls[0]()
    times: list[float] = []
    while len(times) < 3 or sum(times) * len(calls) < seconds:
        start = clock()
        for run in calls:
            run()
        times.append((clock() - start) / len(calls))
    return min(times)


def onnxruntime_layer(shape: Shape, threads: int) -> Callable[[], object]:
    """A call of the dense layer in onnxruntime."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weight: tuple[int, ...]
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
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    feed = {"x": copy_to_cache_line(rng.standard_normal(shapes[0], np.float32))}
    return lambda: session.run(None, feed)


def torch_layer(shape: Shape, threads: int) -> Callable[[], object]:
    """A call of the dense layer in torch, by oneDNN, in that library's own layout."""
    import torch
    from torch.utils.mkldnn import to_mkldnn

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    layer: torch.nn.Module
    if isinstance(shape, LinearShape):
        layer, x = torch.nn.Linear(shape.k, shape.m), torch.randn(shape.n, shape.k)
    else:
        c = shape
        layer = torch.nn.Conv2d(c.c_in, c.c_out, (c.kh, c.kw), c.stride, c.padding)
        x = torch.randn(c.batch, c.c_in, c.h, c.w)
    fast, packed = to_mkldnn(layer.eval()), x.to_mkldnn()
    return lambda: fast(packed)


def prepacked_layer(shape: Shape, threads: int) -> Callable[[], object]:
    """A call of the dense layer by oneDNN, its weight packed once, convolutions with channels last."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    onednn = torch.ops.mkldnn
    if isinstance(shape, LinearShape):
        layer, x = torch.nn.Linear(shape.k, shape.m), torch.randn(shape.n, shape.k)
        weight = onednn._reorder_linear_weight(layer.weight.detach(), shape.n)
        return lambda: onednn._linear_pointwise(x, weight, layer.bias, "none", [], "")
    c = shape
    conv = torch.nn.Conv2d(c.c_in, c.c_out, (c.kh, c.kw), c.stride, c.padding)
    image = torch.randn(c.batch, c.c_in, c.h, c.w).contiguous(memory_format=torch.channels_last)
    how = (c.padding, c.stride, (1, 1), 1)
    weight = onednn._reorder_convolution_weight(conv.weight.detach(), *how, image.shape)
    return lambda: onednn._convolution_pointwise(image, weight, conv.bias, *how, "none", [], "")


def bfloat16_layer(shape: Shape, threads: int) -> Callable[[], object]:
    """A call of the dense linear layer in torch, all of it in bfloat16."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    layer, x = torch.nn.Linear(shape.k, shape.m).bfloat16(), torch.randn(shape.n, shape.k).bfloat16()
    return lambda: layer(x)


def int8_layers(backend: str, kernel: str, shape: Shape, threads: int, copies: int) -> list[Callable[[], object]]:
    """Calls of the dense layer in eight bits in another library, as latbench's sweeps make them."""
    layout = "nhwc" if isinstance(shape, Conv2dShape) and kernel in CPU_ENGINES[backend].channels_last else ""
    point = Point("cpu", backend, kernel, shape, Dense(), 0.0, threads, layout=layout, dtype_w="int8", dtype_a="int8")
    module = importlib.import_module(f"latbench.backends.cpu.{backend}")
    made = module.prepare(point, build_synthetic_layer(point))
    return list(itertools.islice(itertools.cycle(made.calls), copies))


def integer_layer(shape: LinearShape, layer: SyntheticLayer) -> bytes:
    """The linear layer in eight bits as DeepSparse runs it as such: a product of whole numbers, as an ONNX model.

    Read by steps before and after a product of floats, as other engines want it, it would be multiplied in float32.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight, reading = layer.quantize(False), layer.input_range
    constants: dict[str, Any] = {
        "step": np.float32(reading.scale), "zero": np.uint8(reading.zero), "weight_zero": np.int8(0),
        "weight": np.ascontiguousarray(unpack(weight.packed).astype(np.int8).T),
        "worth": (weight.scales * np.float32(reading.scale)).astype(np.float32), "bias": layer.bias,
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["read"]),
        helper.make_node("MatMulInteger", ["read", "weight", "zero", "weight_zero"], ["whole"]),
        helper.make_node("Cast", ["whole"], ["sums"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["sums", "worth"], ["scaled"]),
        helper.make_node("Add", ["scaled", "bias"], ["y"]),
    ]
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, size)
        for name, size in (("x", [shape.n, shape.k]), ("y", [shape.n, shape.m]))
    ]
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "layer", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    serialised: bytes = model.SerializeToString()
    return serialised


INT8 = {
    "OpenVINO int8": ("openvino", "int8"), "onnxruntime int8": ("onnxruntime", "int8"),
    "onnxruntime dynamic": ("onnxruntime", "int8-dynamic"), "torch int8": ("torch", "int8"),
}  # fmt: skip
if refuse_bytes(read_cpu_flags(), platform.machine()) is not None:
    del INT8["torch int8"]
BFLOAT16 = "torch all bf16"
DEEPSPARSE = {"DeepSparse": 0.0, "DeepSparse 75%": 0.75, "DeepSparse 90%": 0.9}
DEEPSPARSE_INT8 = {"DeepSparse int8": 0.0, "DeepSparse int8 75%": 0.75, "DeepSparse int8 90%": 0.9}
ENGINES = {"onnxruntime": onnxruntime_layer, "torch oneDNN": torch_layer, "oneDNN prepacked": prepacked_layer}
BASELINES = (*ENGINES, "DeepSparse")
ENGINES[BFLOAT16] = bfloat16_layer


def dense_worker(pipe: Connection, engine: str, threads: int) -> None:
    """Take shapes and numbers of copies, then seconds, each answered with the least time of a call, until 0."""
    while (asked := pipe.recv()) is not None:
        shape, copies = asked
        if engine in INT8:
            calls = int8_layers(*INT8[engine], shape, threads, copies)
        else:
            calls = [ENGINES[engine](shape, threads) for _ in range(copies)]
        while seconds := pipe.recv():
            found = least(calls, seconds, threads)
            time.sleep(SPINNING_SECONDS if engine.startswith("onnxruntime") else 0)
            pipe.send(found)


def deepsparse_worker(pipe: Connection, name: str, threads: int) -> None:
    """As `dense_worker`, by DeepSparse, of a layer with the share of zeros of this name; one copy in any case."""
    from latbench.backends.cpu import deepsparse
    from latbench.backends.cpu.onnxruntime import build_one_node_model

    environment = deepsparse_environment.find_environment()
    in_bytes, sparsity = name in DEEPSPARSE_INT8, (DEEPSPARSE | DEEPSPARSE_INT8)[name]
    pattern = Dense() if not sparsity else parse("block:1x4") if in_bytes else Unstructured()
    dtype = "int8" if in_bytes else FLOAT32
    build = integer_layer if in_bytes else build_one_node_model
    while (asked := pipe.recv()) is not None:
        shape, _ = asked
        point = Point("cpu", "deepsparse", "auto", shape, pattern, sparsity, threads, dtype_w=dtype, dtype_a=dtype)
        layer = build_synthetic_layer(point)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "layer.onnx"
            path.write_bytes(build(shape, layer))
            with deepsparse.load_model(path, [layer.x], threads=threads, environment=environment) as model:
                while seconds := pipe.recv():
                    pipe.send(min(model.burst(seconds).samples))


@dataclass(frozen=True)
class Peers:
    """The pipe to each engine's process; and whether this machine's cores are together just now."""

    pipes: dict[str, Connection]
    placement: CorePlacement

    def together(self, timed: Callable[[], float]) -> float:
        """The seconds of a block that was timed while cores were together, or of the last try."""
        return self.placement.together(timed, MOST_TRIES)[0]


@contextmanager
def engines(threads: int, bf16: bool = False, int8: bool = False) -> Iterator[Peers]:
    """A process for each engine that there is."""
    context = multiprocessing.get_context("spawn")
    workers: dict[str, tuple[Callable[..., None], Any]] = {
        name: (dense_worker, name) for name in (*ENGINES, *(INT8 if int8 else ())) if bf16 or name != BFLOAT16
    }
    with suppress(LatbenchError):  # not set up: the table does not name it
        deepsparse_environment.find_environment()
        workers |= {name: (deepsparse_worker, name) for name in (*DEEPSPARSE, *(DEEPSPARSE_INT8 if int8 else ()))}
    pipes = {}
    for name, (work, argument) in workers.items():
        pipes[name], far = context.Pipe()
        context.Process(target=work, args=(far, argument, threads), daemon=True).start()
    try:
        with Worker(threads=threads, name="reference") as worker:
            yield Peers(pipes, CorePlacement(worker, threads))
    finally:
        for pipe in pipes.values():
            pipe.send(None)


@cache
def total() -> Callable[[np.ndarray], object]:
    """The compiled sum of an array."""

    @numba.njit(parallel=True, fastmath=True)
    def of(array):  # type: ignore[no-untyped-def]
        result = np.float32(0)
        for i in numba.prange(array.size):
            result += array[i]
        return result

    return of


def reading(size: int, copies: int) -> Calls:
    """Calls that sum up `size` bytes, each out of its own memory."""
    return [partial(total(), np.ones(max(1, size // 4), np.float32)) for _ in range(copies)]


def conv2d_run(shape: Conv2dShape, frames: bool, bias: np.ndarray) -> Callable[[CpuConv2dPlan], object]:
    """What calls a plan on images as torch has them, or in frames as they lie in a converted model."""
    margin = max(shape.padding) if frames else None
    x = FramedImages(ImagePlaces(shape.batch, shape.c_in, shape.h, shape.w, margin))
    y = FramedImages(ImagePlaces(shape.batch, shape.c_out, shape.out_h, shape.out_w, margin))
    images = np.random.default_rng(1).standard_normal(x.places.shape, np.float32)
    copy_images(find_cpu_target().lanes, images.ctypes.data, ImagePlaces(*images.shape), x.address, x.places)
    relu = ACTIVATIONS.index("relu")
    # It names the bias, not its address alone: else its memory is freed, and others write there.
    return lambda plan: plan.run(x.address, x.places, Finish(find_address(bias), relu), Results(y.address, y.places))


def call_linear(plan: Plan, x: Array, bias: Array, y: Array) -> None:
    """Call a plan of a linear layer, relu included; the result goes to `y`."""
    plan(x, bias, "relu", y)


def numba_cases(
    shape: Shape, specs: Sequence[str], how: argparse.Namespace
) -> dict[tuple[str, float], tuple[Plan, Calls, int]]:
    """(plan, calls, kept weights) for every pattern and sparsity this shape can have."""
    layout, frames, cold, bf16 = how.layout, how.frames, how.cold, how.bf16
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((shape.m, shape.k), np.float32) / np.float32(np.sqrt(shape.k))
    bias = np.zeros(shape.m, np.float32)
    cases: dict[tuple[str, float], tuple[Plan, Calls, int]] = {}
    for spec in specs:
        pattern = parse(spec)
        sparsities = (pattern.sparsity,) if isinstance(pattern, NM) else (0.0,) if spec == "dense" else SPARSITIES
        if pattern.refuses(shape) is not None:
            continue
        for sparsity in sparsities:
            mask = pattern.mask(weight.astype(np.float64) ** 2, sparsity)
            packed = pack(weight, mask, pattern)
            in_bytes = pack_int8(weight, mask, pattern, find_scales(weight), InputRange.covering(-4.0, 4.0))
            run: dict[str, Callable[[Any], object]]
            plans: dict[str, Any] = {}
            if isinstance(shape, Conv2dShape):
                plans[spec] = prepare_conv2d(packed, shape, "numba")
                if bf16:
                    with suppress(ValueError):  # a pattern that gains nothing from it
                        plans[f"{spec} bf16"] = prepare_conv2d(packed, shape, "numba", precision="bfloat16")
                if how.int8:
                    plans[f"{spec} int8"] = prepare_conv2d(in_bytes, shape, "numba")
                run = dict.fromkeys(plans, conv2d_run(shape, frames, bias))
            else:
                plans[spec] = prepare(packed, "numba", layout, shape.n)
                if bf16:
                    for precision in PRECISIONS[1:]:
                        name = f"{spec} {precision.replace('bfloat16', 'bf16')}"
                        with suppress(ValueError):
                            plans[name] = prepare(packed, "numba", layout, shape.n, precision=precision)
                if how.int8 and layout == "token_major":
                    own_steps = replace(in_bytes, input_range=None)
                    for name, each in (("int8", in_bytes), ("int8 dynamic", own_steps)):
                        plans[f"{spec} {name}"] = prepare(each, "numba", layout, shape.n)
                x = rng.standard_normal((shape.n, shape.k), np.float32)
                if layout == "feature_major":
                    x = np.ascontiguousarray(x.T)
                elif layout in ("token_blocked", "out_of_blocks"):
                    x = pack_tiles(x)
                x = copy_to_cache_line(x)
                y = copy_to_cache_line(plans[spec](x))
                run = dict.fromkeys(plans, partial(call_linear, x=x, bias=bias, y=y))
            for name, plan in plans.items():
                turns = [plan, *(plan.copy() for _ in range((count_copies(plan.nbytes) if cold else 1) - 1))]
                cases[name, sparsity] = (plan, [partial(run[name], each) for each in turns], packed.nnz)
    return cases


Key = tuple[str, float]


@dataclass(frozen=True)
class Measured:
    """What was timed of one shape: seconds a call, one number a round."""

    shape: Shape
    peers: dict[str, list[float]]
    ours: dict[Key, list[float]]
    plans: dict[Key, tuple[Plan, int]]
    """With the number of kept weights."""
    first_calls_seconds: float
    reads: dict[Key, list[float]]
    """Of summing up as many bytes as each of ours reads; of cold weights only."""

    def fastest(self, names: Sequence[str] = BASELINES) -> str:
        """The dense engine of least median among these."""
        return min((name for name in self.peers if name in names), key=lambda name: np.median(self.peers[name]))

    def speedup(self, key: Key, peer: str | None = None) -> float:
        """Over a peer, by default the fastest dense one in the precision of the key: the median of the rounds'
        ratios."""
        peer = peer or self.fastest([*INT8] if "int8" in key[0] else BASELINES)
        return float(np.median(np.divide(self.peers[peer], self.ours[key])))

    def share_of_reading(self, key: Key) -> float:
        """How fast a call is beside summing up the bytes that it reads: the median of the rounds' ratios."""
        return float(np.median(np.divide(self.reads[key], self.ours[key])))


def measure(shape: Shape, running: Peers, specs: Sequence[str], how: argparse.Namespace) -> Measured:
    """Time all engines and all cases of one shape in turns."""
    cases = numba_cases(shape, specs, how)
    start = time.perf_counter()
    for _, calls, _ in cases.values():
        calls[0]()
    first = time.perf_counter() - start
    pipes = running.pipes
    if isinstance(shape, Conv2dShape):
        pipes = {engine: pipe for engine, pipe in pipes.items() if engine not in (BFLOAT16, *DEEPSPARSE_INT8)}
    if how.cold:  # its copies would need processes of their own
        pipes = {engine: pipe for engine, pipe in pipes.items() if engine not in DEEPSPARSE | DEEPSPARSE_INT8}
    for pipe in pipes.values():
        pipe.send((shape, count_copies(4 * shape.m * shape.k) if how.cold else 1))
    peers: dict[str, list[float]] = {engine: [] for engine in pipes}
    ours: dict[Key, list[float]] = {key: [] for key in cases}
    sums = {key: reading(read_bytes(plan, shape), len(calls)) for key, (plan, calls, _) in cases.items() if how.cold}
    reads: dict[Key, list[float]] = {key: [] for key in sums}

    def answered(pipe: Connection) -> float:
        pipe.send(BLOCK_SECONDS)
        return float(pipe.recv())

    for _ in range(how.rounds):
        for engine, pipe in pipes.items():
            peers[engine].append(running.together(partial(answered, pipe)))
        for key, (_, calls, _) in cases.items():
            ours[key].append(running.together(partial(least, calls, BLOCK_SECONDS, how.threads)))
            if how.cold:
                reads[key].append(running.together(partial(least, sums[key], BLOCK_SECONDS, how.threads)))
    for pipe in pipes.values():
        pipe.send(0.0)
    return Measured(shape, peers, ours, {key: (plan, nnz) for key, (plan, _, nnz) in cases.items()}, first, reads)


def read_bytes(plan: Plan, shape: Shape) -> int:
    """Bytes of the weights and the activations that a call reads."""
    return plan.nbytes + 4 * shape.k * shape.n


def show(found: Measured, how: argparse.Namespace) -> None:
    """Print the table of one shape."""
    shape = found.shape
    print(f"\n{shape}\n  first calls {found.first_calls_seconds:.2f} s")
    for engine, times in found.peers.items():
        seconds = float(np.median(times))
        kept = 1 - (DEEPSPARSE | DEEPSPARSE_INT8).get(engine, 0.0)
        what = "dense " if engine in (*BASELINES, *INT8) else "      "
        print(f"  {what}{engine:16} {seconds * 1e6:8.1f} us         {kept * shape.flop / seconds / 1e9:5.0f} GFLOP/s")
    for key, times in found.ours.items():
        plan, nnz = found.plans[key]
        seconds = float(np.median(times))
        rate = shape.flop * nnz / (shape.m * shape.k) / seconds / 1e9
        read = f" {found.share_of_reading(key):4.0%} of reading {read_bytes(plan, shape)} bytes " if how.cold else ""
        print(
            f"  {key[0]:17} {key[1]:4.0%} {seconds * 1e6:8.1f} us {found.speedup(key):6.2f}x"
            f" {rate:5.0f} GFLOP/s on non-zeros {read} {plan.kernel}",
            flush=True,
        )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every shape and pattern: some minutes")
    parser.add_argument("--only", choices=("linear", "conv"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", help="MxKxN of a linear layer instead of the list; several separated by commas")
    parser.add_argument("--workload", help="the layers of a bundled workload instead of the list")
    parser.add_argument(
        "--layout", choices=(*LAYOUTS, *BLOCKED_LAYOUTS), default="token_major", help="of linear layers"
    )
    parser.add_argument("--frames", action="store_true", help="images of convolutions lie in frames, as in a model")
    parser.add_argument("--cold", action="store_true", help="weights come from memory")
    parser.add_argument("--bf16", action="store_true", help="also weights of bfloat16, and dense all in bfloat16")
    parser.add_argument("--int8", action="store_true", help="also all layers in eight bits")
    parser.add_argument("--patterns", help="patterns instead of those of the list, separated by commas", default="")
    arguments = parser.parse_args()
    numba.set_num_threads(arguments.threads)
    linear, conv = (ALL_LINEAR, ALL_CONV) if arguments.all else (LINEAR, CONV)
    shapes: list[Shape] = [
        *(linear if arguments.only != "conv" else []),
        *(conv if arguments.only != "linear" else []),
    ]
    if arguments.workload:
        known = dict.fromkeys(layer.shape for layer in read_workload(arguments.workload).layers)
        kinds = {"conv": Conv2dShape, "linear": LinearShape}
        shapes = [shape for shape in known if arguments.only is None or isinstance(shape, kinds[arguments.only])]
    if arguments.shape:
        shapes = [LinearShape(*(int(number) for number in text.split("x"))) for text in arguments.shape.split(",")]
    specs = [spec for spec in arguments.patterns.split(",") if spec] or (ALL_PATTERNS if arguments.all else PATTERNS)
    found = []
    with engines(arguments.threads, arguments.bf16, arguments.int8) as peers:
        for shape in shapes:
            found.append(measure(shape, peers, specs, arguments))
            show(found[-1], arguments)
    print(
        f"\nspeedup over the fastest dense engine, {arguments.threads} threads: median of {len(shapes)} (least-most)"
    )
    for key in dict.fromkeys(itertools.chain.from_iterable(one.ours for one in found)):
        speedups = [one.speedup(key) for one in found if key in one.ours]
        print(f"  {key[0]:17} {key[1]:4.0%} {np.median(speedups):6.2f}x ({min(speedups):.2f}-{max(speedups):.2f})")


if __name__ == "__main__":
    main()
