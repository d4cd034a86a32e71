"""The engines of a GPU that are installed here, and what to install where one is missing or needs a newer driver."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from latbench.backends import installed_engines
from latbench.base.engine_registry import GPU_ENGINES
from latbench.machines.cuda_libraries import explain_mixed_cuda
from latbench.machines.gpu_names import Gpu
from latbench.machines.nvml import open_observer

NEWEST_CUDA = 13  # that the extras of pyproject.toml are for
OLDEST_OF_NEWEST = 7.5  # the compute capability: CUDA 13 knows no Volta
_MADE_FOR = {"cupy-cuda13x": 13, "cupy-cuda12x": 12}  # the CUDA that the driver must know at least, by package


def find_installed() -> dict[str, str]:
    """Return the backends whose packages are installed here, with their versions."""
    return {name: version for name, version in installed_engines.list_gpu_versions().items() if version is not None}


def explain_missing(gpu: Gpu) -> dict[str, str]:
    """Return why backends are not installed here and what to install for this GPU and its driver, by backend."""
    facts = _facts(gpu)
    advice = f"pip install 'latbench[{find_extra(facts['cuda_driver'], facts['compute_capability'])}]'"
    return {
        name: f"{' or '.join(missing[0][:2])} is not installed: {advice}"
        for name, engine in GPU_ENGINES.items() if (missing := installed_engines.list_missing_groups(engine))
    }  # fmt: skip


def explain_driver_refusals(gpu: Gpu, backends: Iterable[str]) -> dict[str, str]:
    """Return why backends cannot run with this GPU's driver, by backend.

    Their packages need a newer CUDA, or would load the libraries of another one.
    """
    facts, mixed = _facts(gpu), explain_mixed_cuda()
    cuda = facts["cuda_driver"]
    refusals = {}
    for backend in backends:
        for package in installed_engines.list_used_packages(GPU_ENGINES[backend]):
            needs = _MADE_FOR.get(package)
            if needs is not None and mixed is not None:
                refusals[backend] = mixed
            elif needs is not None and cuda is not None and _major(cuda) < needs:
                other = find_extra(cuda, facts["compute_capability"])
                refusals[backend] = (
                    f"the NVIDIA driver {facts['driver']} is too old: it runs CUDA {cuda}, and {package} needs CUDA "
                    f"{needs}; install a newer driver, or make a new environment, and type pip install "
                    f"'.[{other}]' in a clone of latbench"
                )
    return refusals


def find_extra(cuda_driver: str | None, compute_capability: str | None = None) -> str:
    """Return the extra of latbench for a driver that runs this CUDA ("12.4") and a GPU ("7.0"; None: not known)."""
    old_driver = cuda_driver is not None and _major(cuda_driver) < NEWEST_CUDA
    old_gpu = compute_capability is not None and float(compute_capability) < OLDEST_OF_NEWEST
    return "cuda12" if old_driver or old_gpu else "cuda13"


def _facts(gpu: Gpu) -> dict[str, Any]:
    with open_observer(gpu.uuid) as observer:
        return observer.facts()


def _major(cuda: str) -> int:
    return int(cuda.split(".")[0])
