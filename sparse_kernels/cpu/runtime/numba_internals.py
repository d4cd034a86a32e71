"""Everything that the CPU kernels use of Numba beyond its public interface, in one place.

Numba may change any of it in any release. All of it is known to hold from Numba 0.62 to 0.68.1, and
`tests/sparse_kernels/cpu/runtime/test_numba_internals.py` says in a sentence what broke when it no longer does. To
take a new Numba, run that test, then raise the upper bounds of `numba` and `llvmlite` in pyproject.toml.

- `cgutils`: stack slots, fields of structures, loops, declarations of LLVM code (`numba.core.cgutils`)
- `read_compile_target`, `read_llvm_features`: what Numba generates code for (`numba.core.registry.cpu_target`)
- `FunctionCache`, `attach_cache`: our own files of compiled kernels (`numba.core.caching`, `dispatcher._cache`)
- `build_cache_implementation`: the folder of these files (`numba.core.caching.UserProvidedCacheLocator`)
- `serialize`: the content of these files (`numba.core.serialize.dumps`)
- `WITHOUT_COUNTS`: kernels that do not count references to their arrays (the option `_nrt` of `numba.njit`)
- `WITHOUT_WRAPPER`: functions that only compiled code calls (the option `no_cpython_wrapper`)
- `find_thread_counter`: the number of threads without Numba's locks (`numba.np.ufunc.parallel`)
- `find_openmp_library`: the OpenMP that Numba was linked with (`numba.np.ufunc.omppool`)
- `start_queue`: the threads of Numba's queue in a forked process (`numba.np.ufunc.workqueue`)

Intrinsics (`numba.extending.intrinsic`, public) also rely on this, which has no import to gather here:

- A tuple of integers that a kernel encloses has literal types, also behind `inline="always"` (`vector_code`).
- A NamedTuple is an LLVM structure of its fields, in their order, and one of integers is a run of words
  (`parallel_kernel`).
- `dispatcher.overloads`, `library`, `fndesc` and `context.call_conv` call one compiled function from another
  (`parallel_kernel`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
from numba.core import caching
from numba.core import cgutils as numba_cgutils
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

__all__ = [
    "WITHOUT_COUNTS",
    "WITHOUT_WRAPPER",
    "CompileTarget",
    "FunctionCache",
    "attach_cache",
    "build_cache_implementation",
    "cgutils",
    "find_openmp_library",
    "find_thread_counter",
    "read_compile_target",
    "read_llvm_features",
    "serialize",
    "start_queue",
]


cgutils = numba_cgutils
FunctionCache = caching.FunctionCache

# For functions that make no arrays, and whose arrays live at least as long as the call. It saves two calls for each
# array: 3% to 7% of the time of `plan.run` for one token.
WITHOUT_COUNTS: dict[str, Any] = {"_nrt": False}

# For functions that Python never calls: what lets it call them takes a tenth of the time that they take to compile.
WITHOUT_WRAPPER: dict[str, Any] = {"no_cpython_wrapper": True}


class CompileTarget(NamedTuple):
    """What Numba generates code for.

    triple: LLVM's target triple. cpu: LLVM's name of the processor. features: instruction sets that it has.
    """

    triple: str
    cpu: str
    features: frozenset[str]

    @property
    def is_arm(self) -> bool:
        """Whether it is of the AArch64 kind."""
        return self.triple.startswith(("aarch64", "arm64"))


def read_compile_target() -> CompileTarget:
    """Return what Numba generates code for in this process; NUMBA_CPU_NAME may lower it."""
    triple, cpu, features = cpu_target.target_context.codegen().magic_tuple()
    return CompileTarget(triple, cpu, frozenset(each[1:] for each in features.split(",") if each.startswith("+")))


def read_llvm_features() -> str:
    """Return what Numba tells LLVM that the processor has and is to do without, as +name and -name."""
    features: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return features


def attach_cache(dispatcher: Any, cache: FunctionCache) -> None:
    """Let a compiled function load from and save to this cache."""
    dispatcher._cache = cache


def build_cache_implementation(find_folder: Callable[[], Path]) -> type[Any]:
    """Return the `_impl_class` of a FunctionCache whose files lie in NUMBA_CACHE_DIR, else in the folder found."""

    class Locator(caching.UserProvidedCacheLocator):
        def __init__(self, function: Any, source: str) -> None:
            inherited: Any = super()  # Numba's classes have no types
            inherited.__init__(function, source)
            if not numba.config.CACHE_DIR:  # type: ignore[attr-defined]
                self._cache_path = str(find_folder())

        @classmethod
        def from_function(cls, function: Any, source: str) -> Any:
            # Not that of UserProvidedCacheLocator, which is for NUMBA_CACHE_DIR alone.
            inherited: Any = super(caching.UserProvidedCacheLocator, cls)
            return inherited.from_function(function, source)

    class Implementation(caching.CompileResultCacheImpl):
        _locator_classes = [Locator]  # noqa: RUF012

    return Implementation


def serialize(value: Any) -> bytes:
    """Return the bytes from which `pickle.loads` rebuilds what Numba compiled."""
    content: bytes = dumps(value)
    return content


def find_thread_counter() -> Callable[[], int]:
    """Return the function that counts Numba's threads without taking its locks; the public one where it is gone.

    The quick one takes for granted that the threads have started.
    """
    from numba.np.ufunc import parallel

    return getattr(parallel, "_get_num_threads", numba.get_num_threads)


def find_openmp_library() -> str:
    """Return the path of Numba's own library for OpenMP, through which the loader finds the OpenMP beside it."""
    from numba.np.ufunc import omppool  # type: ignore[attr-defined]

    path: str = omppool.__file__
    return path


def start_queue(threads: int) -> None:
    """Start the threads of Numba's queue in a forked process, where Numba takes them for started."""
    from numba.np.ufunc import workqueue  # type: ignore[attr-defined]

    ctypes.CFUNCTYPE(None, ctypes.c_int)(workqueue.launch_threads)(threads)
