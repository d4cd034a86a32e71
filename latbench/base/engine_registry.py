"""The engines and the precisions they multiply in: every name that a table, a search or an option may use.

A layer engine multiplies one layer; the column `backend` of a table holds its name. A model engine runs a whole
model; its name also tells the precision, as in `numba-bf16`. Nothing here imports an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FLOAT32, BFLOAT16, INT8 = "float32", "bfloat16", "int8"
PRECISIONS = FLOAT32, BFLOAT16, INT8
"""Types in which a layer's weights and inputs are multiplied, from the most precise."""

INT4 = "int4"
"""Weights of four bits, two in a byte, as other libraries' dense layers have them for few tokens."""

FLOAT16, FP8, INT32 = "float16", "fp8", "int32"
"""Types on GPUs. fp8 is e4m3 with scales; int32 holds sums of products of int8."""

ELEMENT_BYTES = {FLOAT32: 4.0, FLOAT16: 2.0, BFLOAT16: 2.0, FP8: 1.0, INT8: 1.0, INT4: 0.5, INT32: 4.0}
"""Bytes of an element, by type."""

TORCH, NUMBA, DEEPSPARSE = "torch", "numba", "deepsparse"
DENSE_INT8 = "openvino-int8"
"""The dense engine that a verification times in any case, to say what plain eight bits would give."""

TORCH_GPU, TORCH_SPARSE, CUBLAS = "torch_gpu", "torch_sparse", "cublas"
CUSPARSE, CUPY, NUMBA_CUDA = "cusparse", "cupy", "numba_cuda"
TORCH_ON_GPU = "torch-gpu"

MODEL_TYPES_ON_GPU = FLOAT16, BFLOAT16
"""Types in which a whole model runs on a GPU, the usual one first."""

CUDA_KERNELS, NUMBA_CUDA_KERNELS = "sparse_kernels.cuda", "sparse_kernels.numba_cuda"


@dataclass(frozen=True)
class LayerEngine:
    """An engine that multiplies one layer.

    Attributes
    ----------
    name : str
        The name in tables and on the command line.
    module : str
        The module whose `prepare(point, layer)` builds a layer.
    packages : tuple of tuple of str
        Groups of alternatives. The engine needs one package of each group; tables hold the version of the first
        group's package.
    kernels : str
        The package of latbench's own kernels that it runs; empty for another library.
    standard : bool
        Whether a sweep that names no engines needs it: it runs dense layers, or our kernels.
    """

    name: str
    module: str
    packages: tuple[tuple[str, ...], ...]
    kernels: str = ""
    standard: bool = False

    @property
    def ours(self) -> bool:
        """Whether it runs latbench's own kernels."""
        return bool(self.kernels)

    @property
    def uses_torch(self) -> bool:
        """Whether it runs inside torch."""
        return (TORCH,) in self.packages

    @property
    def install_names(self) -> tuple[str, ...]:
        """The packages to install: the first alternative of each group."""
        return tuple(group[0] for group in self.packages)


Kernels = Mapping[str, tuple[str, ...]]  # by operation


@dataclass(frozen=True)
class CpuLayerEngine(LayerEngine):
    """An engine that multiplies one layer on a CPU.

    Attributes
    ----------
    timed_kernels : mapping of str to tuple of str
        The kernels that a sweep times, by operation.
    tuned_kernels : mapping of str to tuple of str
        Those that a sweep which tunes adds; each is found by trying several.
    rounded_kernels : mapping of str to mapping of str to tuple of str
        Those that a sweep with bfloat16 or int8 adds, by that precision; see `ROUNDED_KERNELS`.
    formats : tuple of str
        The weight formats that it reads; empty for all.
    channels_last : tuple of str
        The kernels whose convolutions take channels last, as oneDNN prefers.
    prepare_seconds : float
        Estimated seconds to build a layer on an ordinary core.
    """

    timed_kernels: Kernels = field(default_factory=dict)
    tuned_kernels: Kernels = field(default_factory=dict)
    rounded_kernels: Mapping[str, Kernels] = field(default_factory=dict)
    formats: tuple[str, ...] = ()
    channels_last: tuple[str, ...] = ()
    prepare_seconds: float = 0.1

    def list_rounded(self, op: str, precision: str) -> tuple[str, ...]:
        """List the kernels of an operation that round to this precision."""
        return self.rounded_kernels.get(precision, {}).get(op, ())


FEW_TOKENS = 64
"""With more tokens than this, a layer multiplies longer than it reads weights: smaller weights gain nothing."""


@dataclass(frozen=True)
class RoundedKernel:
    """What a kernel rounds its weights to and, unless this is empty, its activations; and what it is for.

    Attributes
    ----------
    weights, activations : str
        Their types in the product; empty for float32.
    formats : tuple of str
        The weight formats.
    most_tokens : int
        Tokens of a linear layer, at most, with which a sweep times it.
    """

    weights: str
    activations: str
    formats: tuple[str, ...]
    most_tokens: int = 2**31


ROUNDED_KERNELS = {
    "bf16-weights": RoundedKernel(BFLOAT16, "", ("block", "vector", "shflbw")),
    "bf16": RoundedKernel(BFLOAT16, BFLOAT16, ("dense", "block", "vector", "shflbw")),
    "int8": RoundedKernel(INT8, INT8, ("dense", "block", "vector", "shflbw", "nm", "unstructured")),
    "int8-dynamic": RoundedKernel(INT8, INT8, ("dense", "block", "vector", "shflbw", "nm", "unstructured")),
    "int8-weights": RoundedKernel(INT8, "", ("dense", "block", "vector", "shflbw"), FEW_TOKENS),
    "int8-blocks": RoundedKernel(INT8, INT8, ("dense",), FEW_TOKENS),
    "int4-weights": RoundedKernel(INT4, "", ("dense",), FEW_TOKENS),
    "int4-blocks": RoundedKernel(INT4, INT8, ("dense",), FEW_TOKENS),
}
"""Kernels that read fewer bytes a weight, and kernels that round both operands.

`int8` reads activations in one range for all tokens, found beforehand, `int8-dynamic` each token by its own. With
`int8-weights` only weights are bytes, with `int4-weights` half bytes, which pays for few tokens. The kernels with
`blocks` have a step for each BLOCK columns of a row, and read as many activations by their own largest value.
"""

NOT_IN_MODELS = ("bf16-weights", "int8-dynamic", "int8-weights", "int8-blocks", "int4-weights", "int4-blocks")
"""Kernels that a searched model does not run: it rounds inputs too, in ranges that were found before."""

BLOCK = 128
"""Columns of a weight in four bits that share a step."""


def _cpu(name: str, packages: tuple[str, ...], *, standard: bool = True, **facts: Any) -> CpuLayerEngine:
    groups = tuple((package,) for package in packages)
    return CpuLayerEngine(name, f"latbench.backends.cpu.{name}", groups, standard=standard, **facts)


_AUTO = {"linear": ("auto",), "conv2d": ("auto",)}
_LINEAR = {"linear": ("auto",), "conv2d": ()}
_BF16 = {"linear": ("bf16",), "conv2d": ("bf16",)}
_INT8 = {"linear": ("int8", "int8-weights", "int4-weights"), "conv2d": ("int8",)}
_INT8_OR_DYNAMIC = {"linear": ("int8", "int8-dynamic", "int8-blocks", "int4-blocks"), "conv2d": ("int8",)}
_COMPRESSED = ("unstructured", "nm", "block")

CPU_ENGINES = {
    engine.name: engine
    for engine in (
        _cpu(
            TORCH, ("torch",), formats=("dense",),
            rounded_kernels={BFLOAT16: _BF16, INT8: {"linear": ("int8",), "conv2d": ("int8",)}},
            channels_last=("prepacked", "bf16", "int8"),
            timed_kernels={op: (op, "mkldnn", "prepacked") for op in ("linear", "conv2d")},
        ),
        _cpu(
            "onnxruntime", ("onnxruntime", "onnx"), formats=("dense",), timed_kernels=_AUTO, prepare_seconds=0.15,
            rounded_kernels={INT8: _INT8_OR_DYNAMIC},
        ),
        _cpu(
            "openvino", ("openvino",), formats=("dense",), timed_kernels=_AUTO,
            rounded_kernels={BFLOAT16: _BF16, INT8: _INT8}, channels_last=("auto", "bf16", "int8"),
            prepare_seconds=0.15,
        ),
        _cpu(
            NUMBA, ("numba",), kernels="sparse_kernels.cpu", timed_kernels=_AUTO, prepare_seconds=0.3,
            tuned_kernels={"linear": ("tuned",)},
            rounded_kernels={
                BFLOAT16: {"linear": ("bf16-weights", "bf16"), "conv2d": ("bf16",)},
                INT8: {"linear": ("int8", "int8-dynamic", "int8-weights"), "conv2d": ("int8",)},
            },
        ),
        _cpu("torch_sparse_cpu", ("torch",), standard=False, formats=_COMPRESSED, timed_kernels=_LINEAR),
        _cpu("scipy", ("scipy",), standard=False, formats=_COMPRESSED, timed_kernels=_LINEAR),
    )
}  # fmt: skip
"""Layer engines of a CPU, by name, in the order in which a sweep lists them."""


@dataclass(frozen=True)
class GpuLayerEngine(LayerEngine):
    """An engine that multiplies one layer on a GPU.

    Attributes
    ----------
    process : str
        The worker process that engines share by this name.
    libraries : mapping of str to tuple of str
        Libraries whose version a time depends on, by kernel; the entry "" serves every other kernel. The names are
        those of `latbench.machines.cuda_libraries`.
    opened_libraries : tuple of str
        The libraries that it opens, or that the check of its results opens.
    packed_kernels : tuple of str
        The kernels that read weights in their pattern's format.
    captures_graphs : bool
        Whether its launches can become a CUDA graph.
    tensor_cores : bool
        Whether it runs products on tensor cores, except in its `ordinary_kernels`.
    ordinary_kernels : tuple of str
        How the names of its kernels without tensor cores begin.
    skips_products : bool
        Whether its convolutions may use fewer products than the weights imply, as Winograd's do.
    low_precision_kernels : tuple of str
        The kernels that read weights in eight or four bits.
    optional_kernels : tuple of str
        Kernels of a standard engine without which a visit to a GPU goes on.
    """

    process: str = ""
    libraries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    opened_libraries: tuple[str, ...] = ()
    packed_kernels: tuple[str, ...] = ()
    captures_graphs: bool = True
    tensor_cores: bool = True
    ordinary_kernels: tuple[str, ...] = ()
    skips_products: bool = False
    low_precision_kernels: tuple[str, ...] = ()
    optional_kernels: tuple[str, ...] = ()

    def runs_on_tensor_cores(self, kernel: str) -> bool:
        """Return whether a kernel, by its name in tables, multiplies on tensor cores."""
        return self.tensor_cores and not kernel.startswith(self.ordinary_kernels)


_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
# CuPy compiles all work but products. Its float64 products check the results of all engines but torch's.
_OPENED_BY_CUPY = ("cublas", "cublaslt", "cudart", "nvrtc")
_BYTES_OF_TORCH = ("fp8", "fp8_rows", "int8", "int4")
_SPARSE_LT = dict.fromkeys(("cusparselt", "cusparselt_tuned"), ("cusparselt",))
_BSR = dict.fromkeys(("bsr", "bsr_tuned"), ("triton",))


def _gpu(name: str, *packages: tuple[str, ...], **facts: Any) -> GpuLayerEngine:
    return GpuLayerEngine(name, f"latbench.backends.gpu.{name}", packages, **facts)


# Each of our own engines may crash alone. Other libraries that are no baseline do not share the baseline's process.
GPU_ENGINES = {
    engine.name: engine
    for engine in (
        _gpu(
            TORCH_GPU, ("torch",), standard=True, process="torch", skips_products=True,
            low_precision_kernels=_BYTES_OF_TORCH, optional_kernels=("cublaslt_search", *_BYTES_OF_TORCH),
            libraries={"": ("cublas",), "cudnn": ("cudnn",)},
            # torch's wheels ask for what they open.
            opened_libraries=("cublas", "cublaslt", "cudart", "cudnn", "nvrtc"),
        ),
        _gpu(
            TORCH_SPARSE, ("torch",), process="torch_sparse",
            libraries={**_SPARSE_LT, **_BSR, "cutlass": (), "torchao": ()}, packed_kernels=tuple(_BSR),
            low_precision_kernels=(*_SPARSE_LT, "torchao"),
            opened_libraries=("cublas", "cublaslt", "cudart", "cusparselt", "nvrtc"),
        ),
        # CuPy refuses to call libraries while a stream is captured.
        _gpu(
            CUBLAS, _CUPY, process="cupy_peers", libraries={"": ("cublas",)}, opened_libraries=_OPENED_BY_CUPY,
            captures_graphs=False,
        ),
        _gpu(
            CUSPARSE, _CUPY, process="cupy_peers", libraries={"": ("cusparse",)}, packed_kernels=("csr", "bsr"),
            opened_libraries=(*_OPENED_BY_CUPY, "cusparse", "nvjitlink"), captures_graphs=False,
        ),
        _gpu(
            CUPY, _CUPY, kernels=CUDA_KERNELS, standard=True, process="cupy", libraries={"": ("nvrtc",)},
            opened_libraries=_OPENED_BY_CUPY, packed_kernels=("auto",), ordinary_kernels=("cuda.csr.",),
        ),
        # Its launches go to the default stream, which cannot be captured. CuPy checks its results.
        _gpu(
            NUMBA_CUDA, ("numba-cuda",), _CUPY, kernels=NUMBA_CUDA_KERNELS, process="numba_cuda",
            libraries={"": ("nvvm",)}, opened_libraries=(*_OPENED_BY_CUPY, "nvjitlink", "nvvm"),
            packed_kernels=("auto",), captures_graphs=False, tensor_cores=False,
        ),
    )
}  # fmt: skip
"""Layer engines of a GPU, by name, in the order in which a sweep lists them."""


@dataclass(frozen=True)
class ModelEngine:
    """An engine that runs a whole model.

    Attributes
    ----------
    name : str
        The name in profiles, verifications and `--backend`.
    backend, kernel : str
        What tables call it: the columns `backend` and `kernel_requested`.
    precision : str
        What weights and activations are multiplied in; empty for the model's own type, as on a GPU.
    output_precision : str
        The type of what the model returns.
    runs_dense : bool
        Whether it runs a dense model, and can be a rival of the pruned one.
    runs_pruned : bool
        Whether a search can choose it to run the pruned model.
    shares_export : bool
        Whether it runs the exported ONNX file that several engines share.
    phrase : str
        Words that follow a time on it in a sentence.
    on_gpu : bool
        Whether it runs on a GPU.
    """

    name: str
    backend: str
    kernel: str = "auto"
    precision: str = FLOAT32
    output_precision: str = FLOAT32
    runs_dense: bool = True
    runs_pruned: bool = False
    shares_export: bool = False
    phrase: str = ""
    on_gpu: bool = False

    @property
    def ours(self) -> bool:
        """Whether it runs latbench's own kernels."""
        return self.backend in (NUMBA, CUPY)


def _gpu_model(name: str, backend: str, kernel: str = "auto", **facts: Any) -> ModelEngine:
    return ModelEngine(name, backend, kernel, "", "", on_gpu=True, **facts)


MODEL_ENGINES = {
    engine.name: engine
    for engine in (
        ModelEngine(TORCH, TORCH),
        ModelEngine("torch-mkldnn", TORCH, "mkldnn"),
        ModelEngine("onnxruntime", "onnxruntime", shares_export=True),
        ModelEngine("openvino", "openvino", shares_export=True),
        ModelEngine(NUMBA, NUMBA, runs_pruned=True),
        ModelEngine("torch-bf16", TORCH, "bf16", BFLOAT16, output_precision=BFLOAT16),
        ModelEngine("openvino-bf16", "openvino", "bf16", BFLOAT16, shares_export=True),
        ModelEngine("numba-bf16", NUMBA, "bf16", BFLOAT16),
        ModelEngine(DENSE_INT8, "openvino", "int8", INT8, shares_export=True),
        ModelEngine("onnxruntime-int8", "onnxruntime", "int8", INT8, shares_export=True),
        ModelEngine(DEEPSPARSE, DEEPSPARSE, runs_pruned=True, phrase=" on DeepSparse"),
        _gpu_model(TORCH_ON_GPU, TORCH_GPU, "eager"),
        _gpu_model("torch-gpu-folded", TORCH_GPU, "folded"),
        _gpu_model("torch-gpu-compiled", TORCH_GPU, "compiled"),
        _gpu_model("tensorrt", "tensorrt"),
        _gpu_model(CUPY, CUPY, runs_dense=False, runs_pruned=True, phrase=" on a GPU"),
    )
}
"""Engines of whole models, by name."""

PRUNED_ENGINES = tuple(name for name, engine in MODEL_ENGINES.items() if engine.runs_pruned)
"""The engines that can run a pruned model: latbench's own kernels on a CPU or a GPU, or DeepSparse."""


def list_standard(engines: Mapping[str, LayerEngine]) -> tuple[str, ...]:
    """List the engines that a sweep measures when it names none, or cannot do without."""
    return tuple(name for name, engine in engines.items() if engine.standard)


def runs_our_kernels(name: str) -> bool:
    """Return whether a pruned model on this engine runs latbench's own kernels; False for an unknown name."""
    return name in MODEL_ENGINES and MODEL_ENGINES[name].runs_pruned and MODEL_ENGINES[name].ours


def runs_on_gpu(name: str) -> bool:
    """Return whether a model engine runs on a GPU; False for an unknown name."""
    return name in MODEL_ENGINES and MODEL_ENGINES[name].on_gpu


def find_plain_torch(name: str) -> str:
    """Return the engine that runs any dense model on the device of this engine: torch as it is."""
    return TORCH_ON_GPU if runs_on_gpu(name) else TORCH


def is_deepsparse(name: str) -> bool:
    """Return whether a model engine is DeepSparse, which brings its own times of layers and its own environment."""
    return name == DEEPSPARSE


def find_narrowest(precisions: Iterable[str]) -> str:
    """Return the least precise of these types."""
    return max(precisions, key=PRECISIONS.index)


def list_as_precise(precision: str) -> tuple[str, ...]:
    """List the types that are as precise as this one, or more so."""
    return PRECISIONS[: PRECISIONS.index(precision) + 1]


def list_rivals(name: str, precisions: Iterable[str] = (FLOAT32,)) -> tuple[str, ...]:
    """List the dense model engines that a pruned model must beat.

    Parameters
    ----------
    name : str
        The engine that runs the pruned model. DeepSparse is a rival only where it does.
    precisions : iterable of str
        Types in which the pruned model's layers may be multiplied. An engine that rounds further is no rival. On a
        GPU all engines run the model in one type.
    """
    dense = [each for each in MODEL_ENGINES.values() if each.runs_dense and each.on_gpu == runs_on_gpu(name)]
    if runs_on_gpu(name):
        return tuple(each.name for each in dense)
    allowed = list_as_precise(find_narrowest(precisions))
    return tuple(
        each.name
        for each in dense
        if each.precision in allowed and (each.backend != DEEPSPARSE or is_deepsparse(name))
    )
