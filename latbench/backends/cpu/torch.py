"""torch, dense: `linear` and `conv2d` of torch.nn.functional, `mkldnn` modules, and `prepacked` oneDNN operators.

The kernels `mkldnn` (torch.utils.mkldnn) and `prepacked` (what torch.compile calls in a frozen model) hold weights in
oneDNN's blocked order. The mkldnn modules take and return plain tensors. So their time includes the conversion of
activations, as in a model where only some layers run this way. The prepacked ones take plain activations; a
convolution is planned with channels last, where it is fastest. `bf16` are the prepacked ones in bfloat16, to which
float32 activations are rounded before and from which they are made after. `int8` is what torch.compile calls for a
model that torch's own tools have quantised: activations are rounded to bytes, and oneDNN multiplies bytes.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from latbench.backends.cpu.prepare_point import Engine, SyntheticLayer, count_copies
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import BFLOAT16, CPU_ENGINES, INT8, TORCH
from latbench.machines.devices import read_cpu_flags
from latbench.workloads.points import Point
from sparse_kernels.formats import unpack
from sparse_kernels.prunable_layers import set_weight_matrix
from sparse_kernels.shapes import Conv2dShape, Shape

Run = Callable[[torch.Tensor], torch.Tensor]


def prepare(point: Point, layer: SyntheticLayer) -> Engine:
    """Prepare the dense layer in torch.

    Raises Unsupported for any other pattern, and for what this build of torch lacks.
    """
    if str(point.pattern) != "dense":
        raise Unsupported(f"torch runs dense layers, not {point.pattern}")
    kind = point.shape.op
    engine = CPU_ENGINES[TORCH]
    rounded = [name for precision in (BFLOAT16, INT8) for name in engine.list_rounded(kind, precision)]
    known = (*engine.timed_kernels[kind], *rounded)
    if point.kernel not in known:
        raise Unsupported(f"torch has no dense {kind} kernel {point.kernel}: known are {', '.join(known)}")
    if point.kernel != kind and not torch.backends.mkldnn.is_available():
        raise Unsupported(f"torch's {point.kernel} kernel is oneDNN's, and this build of torch has none")
    narrow, in_bytes = point.dtype_w == BFLOAT16, point.dtype_w == INT8
    if narrow and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise Unsupported("oneDNN has no bfloat16 for this processor")
    if in_bytes and (reason := refuse_bytes(read_cpu_flags(), platform.machine())) is not None:
        raise Unsupported(reason)
    torch.set_num_threads(point.threads)
    memory = torch.channels_last if point.layout == "nhwc" else torch.contiguous_format
    x = torch.from_numpy(layer.x).contiguous(memory_format=memory)
    weight_bytes = layer.weight.nbytes // (2 if narrow else 4 if in_bytes else 1)
    copies = count_copies(weight_bytes)
    if in_bytes:
        calls = [wrap_inference(_ending_in(memory, _in_bytes(point.shape, layer, x)), x) for _ in range(copies)]
        return Engine(f"torch.int8.{kind}", weight_bytes, calls, torch.Tensor.numpy)
    modules = [_module(point.shape, layer) for _ in range(copies)]
    if point.kernel == "mkldnn":
        runs: list[Run] = [*_to_mkldnn(modules)]
    elif narrow:
        runs = [_rounding(_prepacked(module.bfloat16(), x.bfloat16())) for module in modules]
    else:
        runs = [(_prepacked if point.kernel == "prepacked" else _functional)(module, x) for module in modules]
    calls = [wrap_inference(_ending_in(memory, run), x) for run in runs]
    name = f"torch.{kind}" if point.kernel == kind else f"torch.{point.kernel}.{kind}"
    return Engine(name, weight_bytes, calls, torch.Tensor.numpy)


def wrap_inference(run: Run, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call of `run` on x in inference mode."""

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return run(x)

    return call


def _module(shape: Shape, layer: SyntheticLayer) -> torch.nn.Linear | torch.nn.Conv2d:
    module: torch.nn.Linear | torch.nn.Conv2d
    if isinstance(shape, Conv2dShape):
        module = torch.nn.Conv2d(
            shape.c_in, shape.c_out, (shape.kh, shape.kw), shape.stride, shape.padding, shape.dilation
        )
    else:
        module = torch.nn.Linear(shape.k, shape.m)
    set_weight_matrix(module, torch.from_numpy(layer.weight))
    with torch.no_grad():
        assert module.bias is not None
        module.bias.copy_(torch.from_numpy(layer.bias))
    return module.eval()


def _to_mkldnn(modules: list[torch.nn.Linear | torch.nn.Conv2d]) -> list[torch.nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's module uses torch's own deprecated TorchScript
        from torch.utils import mkldnn

        return [mkldnn.to_mkldnn(module) for module in modules]


def _functional(module: torch.nn.Linear | torch.nn.Conv2d, _: torch.Tensor) -> Run:
    weight, bias = module.weight.detach(), module.bias.detach() if module.bias is not None else None
    if isinstance(module, torch.nn.Linear):
        return lambda x: F.linear(x, weight, bias)
    stride, padding, dilation = module.stride, module.padding, module.dilation
    return lambda x: F.conv2d(x, weight, bias, stride, padding, dilation)


def _prepacked(module: torch.nn.Linear | torch.nn.Conv2d, example: torch.Tensor) -> Run:
    """Return the layer with its weight in the order that oneDNN prefers for activations like `example`."""
    onednn = torch.ops.mkldnn
    weight, bias = module.weight.detach(), module.bias.detach() if module.bias is not None else None
    if isinstance(module, torch.nn.Linear):
        packed = onednn._reorder_linear_weight(weight, len(example))
        return lambda x: onednn._linear_pointwise(x, packed, bias, "none", [], "")
    how = (module.padding, module.stride, module.dilation, module.groups)
    packed = onednn._reorder_convolution_weight(weight, *how, example.shape)
    return lambda x: onednn._convolution_pointwise(x, packed, bias, *how, "none", [], "")


def refuse_bytes(flags: set[str], machine: str) -> str | None:
    """Return why a processor's products of bytes by oneDNN are wrong, by its flags in Linux; None if they are not.

    Without an instruction for four products of bytes, oneDNN adds two of them in 16 bits, where many do not fit
    (issue 103646 of pytorch). machine: as `platform.machine` says it. Processors of Arm have other instructions, and
    no such flags.
    """
    if machine not in ("x86_64", "AMD64") or flags & {"avx512_vnni", "avx_vnni", "amx_int8"}:
        return None
    return "torch's int8 kernel is wrong on processors without VNNI: sums of two products are kept in 16 bits there"


def _in_bytes(shape: Shape, layer: SyntheticLayer, example: torch.Tensor) -> Run:
    """Return the layer in eight bits for float32 activations, whose range is known beforehand."""
    onednn, reading, weight = torch.ops.onednn, layer.input_range, layer.quantize(False)
    whole = torch.from_numpy(unpack(weight.packed).astype(np.int8))
    worth, bias = torch.from_numpy(weight.scales.copy()), torch.from_numpy(layer.bias)
    step, zero, zeros = float(reading.scale), int(reading.zero), torch.zeros(len(worth), dtype=torch.int32)
    read, floats = (step, zero), (1.0, 0, torch.float32, "none", list[float](), "")
    with warnings.catch_warnings():
        # torch will remove the one operator that rounds in one pass. It says so at the first call alone.
        warnings.simplefilter("ignore", UserWarning)
        _to_bytes(example, step, zero)
    if not isinstance(shape, Conv2dShape):
        packed = onednn.qlinear_prepack(whole, example.shape)
        return lambda x: onednn.qlinear_pointwise(
            _to_bytes(x, step, zero), *read, packed, worth, zeros, bias, *floats
        )  # fmt: skip
    filters = whole.reshape(shape.c_out, shape.kh, shape.kw, shape.c_in).permute(0, 3, 1, 2).contiguous()
    how = ([*shape.stride], [*shape.padding], [*shape.dilation], 1)
    packed = onednn.qconv_prepack(filters, worth, *read, *how, example.shape)
    return lambda x: onednn.qconv_pointwise(
        _to_bytes(x, step, zero), *read, packed, worth, zeros, bias, *how, *floats
    )  # fmt: skip


def _to_bytes(x: torch.Tensor, step: float, zero: int) -> torch.Tensor:
    """Round x to uint8; the bytes of torch's quantised tensor are read where they lie, which saves a slow copy."""
    quantised = torch.quantize_per_tensor(x, step, zero, torch.quint8)
    return torch.empty(0, dtype=torch.uint8).set_(quantised.untyped_storage(), 0, x.size(), x.stride())


def _rounding(run: Run) -> Run:
    """Return `run` of bfloat16 for float32 activations."""
    return lambda x: run(x.bfloat16()).float()


def _ending_in(memory: torch.memory_format, run: Run) -> Run:
    """Return `run` with its result in this order of memory."""
    return lambda x: run(x).contiguous(memory_format=memory)
