"""A test of each engine on the GPU before the first point, in the process that will time the engine.

An installed engine may still be useless: built without CUDA, for a newer driver, without a library that it opens
late, or without a kernel for this GPU. So each engine prepares one small point, as a sweep does: it builds the layer,
runs it, and its result is checked. A failure is then one sentence for the user instead of an error in every row.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latbench.backends.gpu import prepare_gpu_point
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import CUDA_KERNELS, GPU_ENGINES
from latbench.machines.cuda_libraries import explain_load_error, find_library_versions
from latbench.workloads.points import Point


@dataclass(frozen=True)
class Probed:
    """The findings of a process.

    Attributes
    ----------
    refusals
        Why an engine cannot be used, by backend; without the usable ones.
    libraries
        The versions of the libraries that the process has loaded.
    architecture
        What our CUDA kernels are compiled for; None where they are not among its engines.
    """

    refusals: dict[str, str]
    libraries: dict[str, str | None]
    architecture: str | None = None


def probe_engines(points: Mapping[str, Point]) -> Probed:
    """Prepare a point of each of these backends on the GPU; all that they load stays loaded."""
    refusals: dict[str, str] = {}
    architecture: str | None = None
    for name, point in points.items():
        try:
            _refuse_cpu_build(name)
            facts = prepare_gpu_point.prepare_gpu_point(point).facts
            if GPU_ENGINES[name].kernels == CUDA_KERNELS:
                architecture = facts["kernel_used"].rpartition(".")[2]
        except Unsupported as error:
            # A peer without a kernel for this GPU says so in its rows. Ours have nothing else to offer.
            if GPU_ENGINES[name].ours:
                refusals[name] = format_error(error)
        except Exception as error:  # noqa: BLE001 - what libraries raise has no base class in common
            refusals[name] = format_error(error)
    return Probed(refusals, find_library_versions(), architecture)


def load_modules(modules: Sequence[str]) -> None:
    """Import modules and start CUDA in torch, so that the first request need not wait for it."""
    for module in modules:
        importlib.import_module(module)
    sys.modules["torch"].cuda.synchronize()


def format_error(error: BaseException) -> str:
    """Return an exception in one line: the library that is missing, or the first paragraph of its message."""
    if (missing := explain_load_error(str(error))) is not None:
        return missing
    paragraph = str(error).strip().split("\n\n")[0]
    text = " ".join(paragraph.split())
    return text if text else type(error).__name__


class Refused(Exception):
    """An engine that is installed but useless here; the message is for the user."""


def _refuse_cpu_build(backend: str) -> None:
    """Raise Refused for a torch without CUDA, whose own message does not say what to do."""
    if not GPU_ENGINES[backend].uses_torch:
        return
    torch: Any = importlib.import_module("torch")
    if torch.version.cuda is None:
        raise Refused(
            f"torch {torch.__version__} is built without CUDA: install a CUDA build, as pytorch.org/get-started says"
        )
