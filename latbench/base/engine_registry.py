"""The engines and the precisions they multiply in: every name that a table, a search or an option may use.

A layer engine multiplies one layer; the column `backend` of a table holds its name. A model engine runs a whole
model; its name also tells the precision, as in `numba-bf16`. Nothing here imports an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CPU, GPU = "cpu", "gpu"
FLOAT32, BFLOAT16 = "float32", "bfloat16"
NUMBA, DEEPSPARSE = "numba", "deepsparse"

CUDA_KERNELS, NUMBA_CUDA_KERNELS = "sparse_kernels.cuda", "sparse_kernels.numba_cuda"


@dataclass(frozen=True)
class LayerEngine:
    """An engine that multiplies one layer.

    Attributes
    ----------
    name : str
        The name in tables and on the command line.
    device : str
        `cpu` or `gpu`.
    module : str
        The module whose `prepare(point, layer)` builds a layer.
    packages : tuple of tuple of str
        Groups of alternatives. The engine needs one package of each group; tables hold the version of the first
        group's package.
    kernels : str
        The package of latbench's own kernels that it runs; empty for another library.
    standard : bool
        Whether a sweep that names no engines needs it: it runs dense layers, or our kernels.
    process : str
        The worker process that GPU engines share by this name.
    libraries : mapping of str to tuple of str
        Libraries whose version a time depends on, by kernel; the entry "" serves every other kernel. The names are
        those of `latbench.machines.cuda_libraries`.
    packed_kernels : tuple of str
        The kernels that read weights in their pattern's format.
    captures_graphs : bool
        Whether its launches can become a CUDA graph.
    tensor_cores : bool
        Whether its dense products run on tensor cores.
    """

    name: str
    device: str
    module: str
    packages: tuple[tuple[str, ...], ...]
    kernels: str = ""
    standard: bool = False
    process: str = ""
    libraries: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packed_kernels: tuple[str, ...] = ()
    captures_graphs: bool = True
    tensor_cores: bool = True

    @property
    def ours(self) -> bool:
        """Whether it runs latbench's own kernels."""
        return bool(self.kernels)

    @property
    def install_names(self) -> tuple[str, ...]:
        """The packages to install: the first alternative of each group."""
        return tuple(group[0] for group in self.packages)


def _cpu(name: str, *packages: str, kernels: str = "", standard: bool = True) -> LayerEngine:
    groups = tuple((package,) for package in packages)
    return LayerEngine(name, CPU, f"latbench.backends.cpu.{name}", groups, kernels=kernels, standard=standard)


CPU_ENGINES = {
    engine.name: engine
    for engine in (
        _cpu("torch", "torch"),
        _cpu("onnxruntime", "onnxruntime", "onnx"),
        _cpu("openvino", "openvino"),
        _cpu(NUMBA, "numba", kernels="sparse_kernels.cpu"),
        _cpu("torch_sparse_cpu", "torch", standard=False),
        _cpu("scipy", "scipy", standard=False),
    )
}
"""Layer engines of a CPU, by name, in the order in which a sweep lists them."""

_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_SPARSE_LT = dict.fromkeys(("cusparselt", "cusparselt_tuned"), ("cusparselt",))
_BSR = dict.fromkeys(("bsr", "bsr_tuned"), ("triton",))

# Each of our own engines may crash alone. Other libraries that are no baseline do not share the baseline's process.
GPU_ENGINES = {
    engine.name: engine
    for engine in (
        LayerEngine(
            "torch_gpu", GPU, "latbench.backends.gpu.torch_gpu", (("torch",),), standard=True, process="torch",
            libraries={"": ("cublas",), "cudnn": ("cudnn",)},
        ),
        LayerEngine(
            "torch_sparse", GPU, "latbench.backends.gpu.torch_sparse", (("torch",),), process="torch_sparse",
            libraries={**_SPARSE_LT, **_BSR, "cutlass": ()}, packed_kernels=tuple(_BSR),
        ),
        # CuPy refuses to call libraries while a stream is captured.
        LayerEngine(
            "cublas", GPU, "latbench.backends.gpu.cublas", (_CUPY,), process="cupy_peers",
            libraries={"": ("cublas",)}, captures_graphs=False,
        ),
        LayerEngine(
            "cusparse", GPU, "latbench.backends.gpu.cusparse", (_CUPY,), process="cupy_peers",
            libraries={"": ("cusparse",)}, packed_kernels=("csr", "bsr"), captures_graphs=False,
        ),
        LayerEngine(
            "cupy", GPU, "latbench.backends.gpu.cupy", (_CUPY,), CUDA_KERNELS, standard=True, process="cupy",
            libraries={"": ("nvrtc",)}, packed_kernels=("auto",),
        ),
        # Its launches go to the default stream, which cannot be captured. CuPy checks its results.
        LayerEngine(
            "numba_cuda", GPU, "latbench.backends.gpu.numba_cuda", (("numba-cuda",), _CUPY), NUMBA_CUDA_KERNELS,
            process="numba_cuda", libraries={"": ("nvvm",)}, packed_kernels=("auto",), captures_graphs=False,
            tensor_cores=False,
        ),
    )
}  # fmt: skip
"""Layer engines of a GPU, by name, in the order in which a sweep lists them."""


@dataclass(frozen=True)
class ModelEngine:
    """An engine that runs a whole model on a CPU.

    Attributes
    ----------
    name : str
        The name in profiles, verifications and `--backend`.
    backend, kernel : str
        What tables call it: the columns `backend` and `kernel_requested`.
    precision : str
        What weights and activations are multiplied in.
    output_precision : str
        The type of what the model returns.
    runs_pruned : bool
        Whether a search can choose it to run the pruned model.
    shares_export : bool
        Whether it runs the exported ONNX file that several engines share.
    phrase : str
        Words that follow a time on it in a sentence.
    """

    name: str
    backend: str
    kernel: str = "auto"
    precision: str = FLOAT32
    output_precision: str = FLOAT32
    runs_pruned: bool = False
    shares_export: bool = False
    phrase: str = ""

    @property
    def ours(self) -> bool:
        """Whether it runs latbench's own kernels."""
        return self.backend == NUMBA


MODEL_ENGINES = {
    engine.name: engine
    for engine in (
        ModelEngine("torch", "torch"),
        ModelEngine("torch-mkldnn", "torch", "mkldnn"),
        ModelEngine("onnxruntime", "onnxruntime", shares_export=True),
        ModelEngine("openvino", "openvino", shares_export=True),
        ModelEngine(NUMBA, NUMBA, runs_pruned=True),
        ModelEngine("torch-bf16", "torch", "bf16", BFLOAT16, output_precision=BFLOAT16),
        ModelEngine("openvino-bf16", "openvino", "bf16", BFLOAT16, shares_export=True),
        ModelEngine("numba-bf16", NUMBA, "bf16", BFLOAT16, runs_pruned=True, phrase=" in bfloat16"),
        ModelEngine(DEEPSPARSE, DEEPSPARSE, runs_pruned=True, phrase=" on DeepSparse"),
    )
}
"""Engines of whole models, by name."""

PRUNED_ENGINES = tuple(name for name, engine in MODEL_ENGINES.items() if engine.runs_pruned)
"""The engines that can run a pruned model: latbench's own kernels in float32 or bfloat16, or DeepSparse."""


def list_standard(engines: Mapping[str, LayerEngine]) -> tuple[str, ...]:
    """List the engines that a sweep measures when it names none, or cannot do without."""
    return tuple(name for name, engine in engines.items() if engine.standard)


def runs_our_kernels(name: str) -> bool:
    """Return whether a model engine runs latbench's own kernels; False for an unknown name."""
    return name in MODEL_ENGINES and MODEL_ENGINES[name].ours


def is_deepsparse(name: str) -> bool:
    """Return whether a model engine is DeepSparse, which brings its own times of layers and its own environment."""
    return name == DEEPSPARSE


def convert_to_table_name(name: str) -> str:
    """Return the name that tables give to an engine of a search: one name for our kernels in every precision.

    Any other name stays as it is. No row of a layer has the name of a whole-model engine such as `torch-bf16`: a
    search by such a name finds nothing.
    """
    return NUMBA if runs_our_kernels(name) else name


def find_precision(name: str) -> str:
    """Return the precision that a model engine multiplies in; float32 for an unknown name."""
    return MODEL_ENGINES[name].precision if name in MODEL_ENGINES else FLOAT32


def may_round(name: str) -> bool:
    """Return whether a model engine rounds to bfloat16, so that dense engines that round are its rivals, too."""
    return find_precision(name) == BFLOAT16


def list_rivals(name: str) -> tuple[str, ...]:
    """List the dense model engines that a pruned model on this engine must beat.

    Those that round to bfloat16 count where it rounds, and DeepSparse where it runs the pruned model.
    """
    return tuple(
        each.name
        for each in MODEL_ENGINES.values()
        if (each.precision == FLOAT32 or may_round(name)) and (each.backend != DEEPSPARSE or is_deepsparse(name))
    )
