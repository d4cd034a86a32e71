"""Which engines of a GPU are installed here, and what to install where one is missing or made for a newer driver."""

from __future__ import annotations

from collections.abc import Iterable

from latbench.backends.on_gpu import BACKENDS
from latbench.gpu import nvml
from latbench.gpu.names import Gpu

NEEDED = ("torch_gpu", "cupy")
"""The dense baseline and our kernels: without one of them there is nothing to compare."""

NEWEST_CUDA = 13  # that the extras of pyproject.toml are for
_MADE_FOR = {"cupy-cuda13x": 13, "cupy-cuda12x": 12}  # the CUDA that the driver must know at least, by package


def installed() -> dict[str, str]:
    """Return the backends whose packages are installed here, with their versions."""
    versions = {name: backend.version() for name, backend in BACKENDS.items()}
    return {name: version for name, version in versions.items() if version is not None}


def missing(gpu: Gpu) -> dict[str, str]:
    """Return why backends are not installed here and what to install for this GPU's driver, by backend."""
    advice = f"pip install 'latbench[{extra(_driver(gpu)[1])}]'"
    return {
        name: f"{' or '.join(backend.missing[:2])} is not installed: {advice}"
        for name, backend in BACKENDS.items() if backend.missing
    }  # fmt: skip


def refused_by_driver(gpu: Gpu, backends: Iterable[str]) -> dict[str, str]:
    """Return why this GPU's driver cannot run backends, by backend: their packages are made for a newer CUDA."""
    driver, cuda = _driver(gpu)
    refusals = {}
    for backend in backends:
        for package in BACKENDS[backend].used:
            needs = _MADE_FOR.get(package)
            if cuda is not None and needs is not None and _major(cuda) < needs:
                refusals[backend] = (
                    f"the NVIDIA driver {driver} is too old: it runs CUDA {cuda}, and {package} needs CUDA {needs}; "
                    f"install a newer driver, or pip uninstall {package} and pip install 'latbench[{extra(cuda)}]'"
                )
    return refusals


def extra(cuda_driver: str | None) -> str:
    """Return the extra of latbench for a driver that runs this CUDA ("12.4"; None: not known)."""
    return "cuda12" if cuda_driver is not None and _major(cuda_driver) < NEWEST_CUDA else "cuda13"


def _driver(gpu: Gpu) -> tuple[str | None, str | None]:
    """Return the versions of the driver and of the CUDA that it runs."""
    with nvml.observing(gpu.uuid) as observer:
        facts = observer.facts()
    return facts["driver"], facts["cuda_driver"]


def _major(cuda: str) -> int:
    return int(cuda.split(".")[0])
