"""Which engines of a CPU there are, and which of them are installed here."""

from __future__ import annotations

from latbench.machines import devices

# Each engine: its module, and the packages it cannot run without; the first one's version stands in the table.
BACKENDS = {
    "torch": ("latbench.backends.cpu.torch", ("torch",)),
    "onnxruntime": ("latbench.backends.cpu.onnxruntime", ("onnxruntime", "onnx")),
    "openvino": ("latbench.backends.cpu.openvino", ("openvino",)),
    "numba": ("latbench.backends.cpu.numba", ("numba",)),
    "torch_sparse_cpu": ("latbench.backends.cpu.torch_sparse_cpu", ("torch",)),
    "scipy": ("latbench.backends.cpu.scipy", ("scipy",)),
}


class Unsupported(Exception):
    """The engine does not do this; the message says why."""


def available() -> dict[str, str | None]:
    """Every engine with the version that is installed here; None where a package is missing."""
    return {name: version(name) for name in BACKENDS}


def version(name: str) -> str | None:
    """The version of an engine; None unless all of its packages are installed."""
    versions = [devices.version(package) for package in BACKENDS[name][1]]
    return versions[0] if all(versions) else None
