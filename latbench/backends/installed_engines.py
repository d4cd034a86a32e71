"""Which layer engines are installed here, in which version, and which packages one lacks."""

from __future__ import annotations

from collections.abc import Sequence

from latbench.base.engine_registry import CPU_ENGINES, GPU_ENGINES, LayerEngine
from latbench.machines import devices


class Unsupported(Exception):
    """An engine cannot run this layer; the message says why."""


def find_engine_version(name: str) -> str | None:
    """Return the installed version of a layer engine; None if it lacks a package."""
    engine = CPU_ENGINES.get(name) or GPU_ENGINES[name]
    packages = [find_package(group) for group in engine.packages]
    return devices.find_version(packages[0]) if packages[0] is not None and all(packages) else None


def list_cpu_versions() -> dict[str, str | None]:
    """Return the installed version of every CPU engine; None if it lacks a package."""
    return {name: find_engine_version(name) for name in CPU_ENGINES}


def list_gpu_versions() -> dict[str, str | None]:
    """Return the installed version of every GPU engine; None if it lacks a package."""
    return {name: find_engine_version(name) for name in GPU_ENGINES}


def find_package(alternatives: Sequence[str]) -> str | None:
    """Return the first of these packages that is installed; None if none is."""
    return next((name for name in alternatives if devices.find_version(name)), None)


def list_used_packages(engine: LayerEngine) -> tuple[str, ...]:
    """List the installed packages that an engine runs with."""
    return tuple(name for name in map(find_package, engine.packages) if name is not None)


def list_missing_groups(engine: LayerEngine) -> list[tuple[str, ...]]:
    """List the groups of alternatives of which an engine needs a package that is not installed."""
    return [group for group in engine.packages if find_package(group) is None]
