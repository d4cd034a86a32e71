"""CUDA's shared libraries: which wheel contains each, and which version is installed.

Nothing here loads a library or needs a GPU. The driver's own libraries (libcuda, libnvidia-ml) are not listed,
because no wheel contains them.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from latbench.base.engine_registry import CUSPARSE, GPU_ENGINES
from latbench.machines.devices import find_version

NEWEST_FIRST = (13, 12)  # CUDA's major versions, in the order in which CuPy and numba-cuda look for libraries


@dataclass(frozen=True)
class Library:
    """A shared library, by CUDA's major version.

    Attributes
    ----------
    sonames
        The name that the loader knows it by.
    wheels
        The package that contains it.
    getter
        Its function that returns its version without a GPU; empty where nobody asks.
    asked
        The soname under which that function is called; empty for its own.
    """

    sonames: Mapping[int, str]
    wheels: Mapping[int, str]
    getter: str = ""
    asked: str = ""


def _toolkit(soname: str, wheel: str, getter: str = "") -> Library:
    """Return a library of the CUDA toolkit whose soname ends in CUDA's major version."""
    return Library({cuda: f"{soname}.{cuda}" for cuda in NEWEST_FIRST}, {13: wheel, 12: f"{wheel}-cu12"}, getter)


def _both(soname: str, wheels: Mapping[int, str], getter: str, asked: str = "") -> Library:
    """Return a library whose soname is the same for both."""
    return Library(dict.fromkeys(NEWEST_FIRST, soname), wheels, getter, asked)


LIBRARIES = {
    "cublas": _toolkit("libcublas.so", "nvidia-cublas", "cublasGetProperty"),
    "cublaslt": _toolkit("libcublasLt.so", "nvidia-cublas"),
    # Its wheel has the headers with which CuPy compiles.
    "cudart": _toolkit("libcudart.so", "nvidia-cuda-runtime"),
    # libcudnn.so.9 would load libcudnn_graph.so.9 to answer.
    "cudnn": _both(
        "libcudnn.so.9", {13: "nvidia-cudnn-cu13", 12: "nvidia-cudnn-cu12"}, "cudnnGetProperty", "libcudnn_graph.so.9"
    ),
    "cusparse": _both(
        "libcusparse.so.12", {13: "nvidia-cusparse", 12: "nvidia-cusparse-cu12"}, "cusparseGetProperty"
    ),
    "cusparselt": _both(
        "libcusparseLt.so.0", {13: "nvidia-cusparselt-cu13", 12: "nvidia-cusparselt-cu12"}, "cusparseLtGetProperty"
    ),
    "nvjitlink": _toolkit("libnvJitLink.so", "nvidia-nvjitlink"),
    "nvrtc": _toolkit("libnvrtc.so", "nvidia-cuda-nvrtc", "nvrtcVersion"),
    "nvvm": Library({13: "libnvvm.so.4", 12: "libnvvm.so"}, {13: "nvidia-nvvm", 12: "nvidia-cuda-nvcc-cu12"}),
}

_VERSIONED = ("cublas", "cudnn", "cusparse", "cusparselt", "nvrtc", "nvvm")
_TRITON = ("triton", "pytorch-triton")
_PARTS = range(3)  # major, minor and patch in libraryPropertyType (library_types.h)


def find_library_versions() -> dict[str, str | None]:
    """Return the versions of the libraries that affect times.

    A library that this process has loaded is asked for its version. For others the version of the wheel counts, cut
    to the numbers that the library would return. Nothing is loaded.

    Returns
    -------
    dict
        By name: cublas, cudnn, cusparse, cusparselt ("13.1.1"), nvrtc ("13.0"), nvvm, triton; None for missing ones.
    """
    found: dict[str, str | None] = {name: _loaded(name) or _installed(name) for name in _VERSIONED}
    return {**found, "triton": next(filter(None, map(find_version, _TRITON)), None)}


def explain_load_error(message: str) -> str | None:
    """Return which library is missing and what to install.

    Parameters
    ----------
    message
        The text of an exception, such as CuPy's ImportError.

    Returns
    -------
    str or None
        None where the text names none of these libraries, or one whose wheel is installed and hidden by no other.
    """
    cuda = _cuda_of_cupy()
    wheels = {library.sonames[cuda]: library.wheels[cuda] for library in LIBRARIES.values()}
    named = re.findall(r"lib\w+\.so(?:\.\d+)?", message)  # first what is missing, then what lies in searched folders
    missing = next((name for name in named if name in wheels), None)
    if missing is None:
        return None
    if find_version(wheels[missing]) is not None:
        return explain_mixed_cuda()
    return f"{missing} cannot be loaded: pip install {wheels[missing]}"


def explain_mixed_cuda() -> str | None:
    """Return why the installed CuPy would load the libraries of another CUDA version; None where it loads its own.

    CuPy and numba-cuda load CUDA 13's libraries wherever those are installed, also in their builds for CUDA 12.
    """
    if _cuda_of_cupy() != 12:
        return None
    wheels = dict.fromkeys(LIBRARIES[name].wheels[13] for name in GPU_ENGINES[CUSPARSE].opened_libraries)
    others = [wheel for wheel in wheels if find_version(wheel) is not None]
    if not others:
        return None
    return (
        f"cupy-cuda12x would load the libraries of CUDA 13, which are installed too ({', '.join(others)}): "
        "make a new environment, and type pip install '.[cuda12]' in a clone of latbench"
    )


def _cuda_of_cupy() -> int:
    """Return the CUDA version that the installed CuPy is built for; the newest where its package does not say."""
    return 12 if find_version("cupy-cuda12x") is not None else NEWEST_FIRST[0]


def _loaded(name: str) -> str | None:
    """Return the version that a loaded library reports; None where it is not loaded or reports none."""
    library = LIBRARIES[name]
    for soname in (library.asked,) if library.asked else dict.fromkeys(library.sonames.values()):
        try:
            numbers = _numbers(ctypes.CDLL(soname, mode=os.RTLD_NOLOAD), library.getter)
        except (OSError, AttributeError):  # not loaded; without that function
            continue
        if numbers is not None:
            return ".".join(map(str, numbers))
    return None


def _numbers(library: ctypes.CDLL, getter: str) -> tuple[int, ...] | None:
    """Return the version numbers that a library's getter reports; None where it fails."""
    function = getattr(library, getter)
    if getter == "nvrtcVersion":  # both numbers at once, and no patch
        values = [ctypes.c_int(), ctypes.c_int()]
        statuses = [function(*map(ctypes.byref, values))]
    else:
        values = [ctypes.c_int() for _ in _PARTS]
        statuses = [function(part, ctypes.byref(value)) for part, value in zip(_PARTS, values, strict=True)]
    return None if any(statuses) else tuple(value.value for value in values)


def _installed(name: str) -> str | None:
    """Return the version of a library's wheel in the library's own form; None where there is none."""
    found = next(filter(None, map(find_version, LIBRARIES[name].wheels.values())), None)
    return None if found is None else ".".join(found.split(".")[: 2 if name == "nvrtc" else len(_PARTS)])
