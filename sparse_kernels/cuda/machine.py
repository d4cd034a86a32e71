"""GPUs as a plan sees them: memory, the current stream, and kernels that are compiled, loaded and launched.

`CupyMachine` takes CuPy arrays. `TorchMachine` takes torch tensors: memory comes from torch's allocator, and the
stream is torch's current one, so that its CUDA graphs capture what is launched. Both load and launch by CuPy. All
that needs a GPU is here, behind `CudaMachine`: everything else is tested without one.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda import build
from sparse_kernels.cuda.program import Dim3, Variant
from sparse_kernels.cuda.targets import ARCHITECTURES, TARGETS
from sparse_kernels.registry import MissingLibrary, NoDevice

EMBEDDED = {
    (7, 2): "Jetson Xavier is an embedded chip, on which code for other GPUs does not run; use another GPU",
    (8, 7): "Jetson Orin is an embedded chip, on which code for other GPUs does not run; use another GPU",
    (10, 1): "Jetson Thor reports 10.1 with a driver older than CUDA 13; update the driver, and it reports 11.0",
}
"""Embedded chips for which `GpuArchitecture.runs_on` does not hold: why there is no kernel, and what to do."""

# A GPU array of CuPy or torch: neither has types to check against here.
Array = Any

LoadedKernel = Callable[[Dim3, Dim3, tuple[np.generic, ...]], None]
"""A loaded kernel: called with grid, block and arguments, puts a launch on the current stream."""


@dataclass(frozen=True)
class View:
    """What a plan must know of an array."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    nbytes: int

    def overlaps(self, other: View) -> bool:
        """Return whether two contiguous arrays share a byte."""
        return self.address < other.address + other.nbytes and other.address < self.address + self.nbytes


class CudaMachine(Protocol):
    """What a plan asks of a GPU."""

    @property
    def architecture(self) -> str:
        """One of ARCHITECTURES."""

    @property
    def multiprocessors(self) -> int | None:
        """How many it has; None for those of the usual machine of its architecture."""

    @property
    def arrays(self) -> str:
        """What its arrays are called, for messages."""

    def upload(self, array: NDArray[np.generic]) -> Array:
        """Return the array's bytes on the GPU."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new array of float16, bfloat16 or uint8."""

    def view(self, array: object) -> View | None:
        """Return what the array is; None if it is no array of this GPU."""

    def scratch(self, count: int) -> Array:
        """Return so many bytes of scratch memory, unused by others until the next launch ends."""

    def kernel(self, variant: Variant, shared_bytes: int) -> LoadedKernel:
        """Return a variant, compiled and loaded, that may use so much dynamic shared memory."""


@dataclass(frozen=True, eq=False)
class CupyMachine:
    """One GPU, for CuPy arrays; CuPy has no bfloat16: its bits lie in uint16."""

    cupy: Any
    device: int
    architecture: str
    multiprocessors: int
    newest: int  # the newest CUDA major version whose cubins the driver loads
    _scratch: dict[int, list[Array]] = field(default_factory=dict)

    @property
    def arrays(self) -> str:
        """What its arrays are called, for messages."""
        return f"a CuPy array on GPU {self.device}"

    @classmethod
    def current(cls) -> CupyMachine:
        """CuPy's current GPU. Raises MissingLibrary or NoDevice."""
        cupy = _cupy()
        abilities = _abilities(cupy)
        return cls(cupy, cupy.cuda.runtime.getDevice(), *abilities)

    def upload(self, array: NDArray[np.generic]) -> Array:
        """Return the array's bytes on the GPU."""
        uploaded = self.cupy.array(array)
        # The copy is on the current stream, and the array may be used on another.
        self.cupy.cuda.get_current_stream().synchronize()
        return uploaded

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new array of float16, bfloat16 or uint8."""
        return self.cupy.empty(shape, "uint16" if dtype == "bfloat16" else dtype)

    def view(self, array: object) -> View | None:
        """Return what the array is; None if it is no array of CuPy's on this GPU."""
        if not isinstance(array, self.cupy.ndarray):
            return None
        it: Any = array
        if it.device.id != self.device:
            return None
        dtype = "bfloat16" if it.dtype == np.uint16 else it.dtype.name
        return View(it.data.ptr, dtype, it.shape, it.flags.c_contiguous, it.nbytes)

    def scratch(self, count: int) -> Array:
        """Return so many bytes of scratch memory of the current stream, on which one thread may launch at a time.

        What is outgrown stays: a CUDA graph that was captured from a call goes on using it.
        """
        grown = self._scratch.setdefault(int(self.cupy.cuda.get_current_stream().ptr), [])
        if not grown or grown[-1].nbytes < count:
            grown.append(self.empty((max(count, 2 * grown[-1].nbytes if grown else 0),), "uint8"))
        return grown[-1]

    def kernel(self, variant: Variant, shared_bytes: int) -> LoadedKernel:
        """Return a variant, compiled and loaded, that may use so much dynamic shared memory."""
        device = self.cupy.cuda.Device(self.device)
        with device:
            function = _load(self.cupy, self.device, variant, shared_bytes, self.architecture, self.newest)

        def launch(grid: Dim3, block: Dim3, arguments: tuple[np.generic, ...]) -> None:
            with device:
                function(grid, block, arguments, shared_mem=shared_bytes)

        return launch


@dataclass(frozen=True, eq=False)
class TorchMachine:
    """One GPU, for torch tensors on `device`, a torch.device with an index."""

    torch: Any
    cupy: Any
    device: Any
    architecture: str
    multiprocessors: int
    newest: int  # the newest CUDA major version whose cubins the driver loads

    @classmethod
    def of(cls, device: Any) -> TorchMachine:
        """Return the GPU of a torch device with an index. Raises MissingLibrary or NoDevice."""
        torch, cupy = importlib.import_module("torch"), _cupy()
        with torch.cuda.device(device):
            return cls(torch, cupy, device, *_abilities(cupy))

    @property
    def arrays(self) -> str:
        """What its arrays are called, for messages."""
        return f"a torch tensor on {self.device}"

    def upload(self, array: NDArray[np.generic]) -> Array:
        """Return the array's bytes on the GPU."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return self.torch.tensor(flat, device=self.device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a new tensor of float16, bfloat16 or uint8."""
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=self.device)

    def view(self, array: object) -> View | None:
        """Return what the tensor is; None if it is no tensor on this GPU."""
        if not isinstance(array, self.torch.Tensor):
            return None
        it: Any = array
        if it.device != self.device:
            return None
        dtype = str(it.dtype).removeprefix("torch.")
        return View(it.data_ptr(), dtype, tuple(it.shape), it.is_contiguous(), it.nbytes)

    def scratch(self, count: int) -> Array:
        """Return scratch memory of torch's allocator, which knows what graphs and streams use."""
        return self.empty((count,), "uint8")

    def kernel(self, variant: Variant, shared_bytes: int) -> LoadedKernel:
        """Return a variant, compiled and loaded, that may use so much dynamic shared memory."""
        # CuPy loads and launches on the current device, which it shares with torch.
        with self.torch.cuda.device(self.device):
            function = _load(self.cupy, self.device.index, variant, shared_bytes, self.architecture, self.newest)
            loaded = function.kernel

        def launch(grid: Dim3, block: Dim3, arguments: tuple[np.generic, ...]) -> None:
            # Pass the stream explicitly: CuPy would take its own current stream, and may read torch's default one as
            # another.
            stream = _Stream(self.torch.cuda.current_stream(self.device).cuda_stream)
            with self.torch.cuda.device(self.device):
                loaded(grid, block, arguments, shared_bytes, stream)

        return launch


@dataclass(frozen=True)
class _Stream:
    """A stream of another library, as CuPy's functions take it."""

    ptr: int


def list_architectures(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the architectures whose code a GPU of a compute capability runs, the newest first. Raises NoDevice."""
    number = f"{capability[0]}.{capability[1]}"
    if capability in EMBEDDED:
        raise NoDevice(f"no kernel for compute capability {number}: {EMBEDDED[capability]}")
    fitting = tuple(name for name, target in reversed(TARGETS.items()) if target.runs_on(capability))
    if not fitting:
        oldest = next(iter(TARGETS.values())).capability
        advice = "use a newer GPU" if capability < oldest else "use a newer latbench or another GPU"
        raise NoDevice(
            f"no kernel for compute capability {number}: kernels are compiled for {', '.join(ARCHITECTURES)}, and a "
            f"GPU only runs code of its own major version; {advice}"
        )
    return fitting


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        raise MissingLibrary(
            "backend 'cupy' needs cupy, which is not installed: pip install cupy-cuda13x (V100: cupy-cuda12x)"
        ) from error
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise MissingLibrary(f"backend 'cupy' needs cupy, which cannot be imported: {reason}") from error


def _abilities(cupy: Any) -> tuple[str, int, int]:
    """Return what to compile for on CuPy's current GPU, its multiprocessors, and the newest CUDA its driver loads."""
    try:
        device = cupy.cuda.Device()
        capability, multiprocessors = device.compute_capability, device.attributes["MultiProcessorCount"]
        driver = cupy.cuda.runtime.driverGetVersion()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise NoDevice(f"backend 'cupy' found no NVIDIA GPU that it can use: {error}") from error
    newest = driver // 1000
    architectures = list_architectures((int(capability[:-1]), int(capability[-1])))
    return build.select_compilable(architectures, newest), multiprocessors, newest


# Loaded functions, by device, kernel and architecture: kernels of the same name are the same.
_functions: dict[tuple[int, str, str], Any] = {}
_loading = threading.Lock()


def _load(cupy: Any, device: int, variant: Variant, shared_bytes: int, architecture: str, newest: int) -> Any:
    """Return a variant's function, compiled and loaded on the current GPU, whose number is `device`."""
    key = device, variant.name, architecture
    with _loading:
        if key not in _functions:
            cubin = build.compile(variant, architecture, newest=newest)
            _functions[key] = cupy.RawModule(path=str(cubin.path)).get_function(variant.function)
        function = _functions[key]
        # All plans share the function, and its limit of shared memory holds at each launch: it may only grow.
        if shared_bytes > function.max_dynamic_shared_size_bytes:
            function.max_dynamic_shared_size_bytes = shared_bytes
        return function
