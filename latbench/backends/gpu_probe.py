"""Before the first point: does each engine really work on the GPU? Runs in the process that will time the engine.

An engine that is installed may still be of no use: built without CUDA, for a newer driver, without a library that it
opens late, or without a kernel for this GPU. So each prepares one small point here, as a sweep does: it builds the
layer, runs it, and its result is checked. What it says then is one sentence for the user, instead of an error in
every row.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latbench.backends import Unsupported, on_gpu
from latbench.machines.cuda_libraries import explain_load_error, find_library_versions
from latbench.workloads.points import Point


@dataclass(frozen=True)
class Probed:
    """What a process found.

    Attributes
    ----------
    refusals
        Why an engine cannot be used, by backend; without those that can.
    libraries
        The versions of the libraries that the process has loaded.
    architecture
        What our CUDA kernels are compiled for; None where they are not among its engines.
    """

    refusals: dict[str, str]
    libraries: dict[str, str | None]
    architecture: str | None = None


def probe(points: Mapping[str, Point]) -> Probed:
    """Prepare a point of each of these backends on the GPU; all that they load stays loaded."""
    refusals: dict[str, str] = {}
    architecture: str | None = None
    for name, point in points.items():
        try:
            _refuse_cpu_build(name)
            facts = on_gpu.prepare(point).facts
            if name == "cupy":
                architecture = facts["kernel_used"].rpartition(".")[2]
        except Unsupported as error:
            # A peer without a kernel for this GPU says so in its rows. Ours have nothing else to offer.
            if on_gpu.BACKENDS[name].ours:
                refusals[name] = sentence(error)
        except Exception as error:  # noqa: BLE001 - what libraries raise has no base class in common
            refusals[name] = sentence(error)
    return Probed(refusals, find_library_versions(), architecture)


def load(modules: Sequence[str]) -> None:
    """Import modules and start CUDA in torch, so that the first request need not wait for it."""
    for module in modules:
        importlib.import_module(module)
    sys.modules["torch"].cuda.synchronize()


def sentence(error: BaseException) -> str:
    """Return what an exception says, in one line: which library is missing, or its first paragraph."""
    if (missing := explain_load_error(str(error))) is not None:
        return missing
    paragraph = str(error).strip().split("\n\n")[0]
    text = " ".join(paragraph.split())
    return text if text else type(error).__name__


class Refused(Exception):
    """An engine that is installed and of no use here; the message is for the user."""


def _refuse_cpu_build(backend: str) -> None:
    """Raise Refused for a torch without CUDA, whose own words do not say what to do."""
    if not on_gpu.BACKENDS[backend].module.startswith("latbench.backends.torch"):
        return
    torch: Any = importlib.import_module("torch")
    if torch.version.cuda is None:
        raise Refused(
            f"torch {torch.__version__} is built without CUDA: install a CUDA build, as pytorch.org/get-started says"
        )
