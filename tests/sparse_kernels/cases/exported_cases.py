"""Layers of all kinds to export, and the library that they make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparse_kernels.cpu.export.cpu_levels import CpuLevel
from sparse_kernels.cpu.export.layer_programs import ExportedLayer
from sparse_kernels.cpu.export.level_job import CompiledLevel, LevelRequest, compile_level
from sparse_kernels.cpu.export.packed_weights import build_packed_file
from sparse_kernels.cpu.export.shared_library import link_library
from sparse_kernels.formats import pack
from sparse_kernels.formats.int8 import InputRange, pack_int8
from sparse_kernels.patterns import Dense, parse
from sparse_kernels.shapes import Conv2dShape


class ExportedFiles(NamedTuple):
    """A library and its packed file."""

    library: Path
    packed: Path
    levels: list[CompiledLevel]


def build_linear(
    rng: np.random.Generator, name: str, spec: str, shape: tuple[int, int], activation: str | None = None
) -> ExportedLayer:
    """Return a linear layer of a pattern, 75% sparse where the pattern leaves it open, with a bias."""
    weight, pattern = rng.standard_normal(shape, dtype=np.float32), parse(spec)
    kept = pattern.mask(weight.astype(float) ** 2, sparsity=_sparsity(spec))
    bias = rng.standard_normal(shape[0], dtype=np.float32)
    return ExportedLayer(name, pack(weight * kept, kept, pattern), bias, activation)


def build_image_layer(
    rng: np.random.Generator, name: str, spec: str, shape: Conv2dShape, activation: str | None = None
) -> ExportedLayer:
    """Return a convolution of a pattern."""
    layer = build_linear(rng, name, spec, (shape.m, shape.k), activation)
    return ExportedLayer(name, layer.weight, layer.bias, activation, image=shape)


def build_int8(rng: np.random.Generator, name: str, spec: str, m: int, k: int) -> ExportedLayer:
    """Return a linear layer in eight bits."""
    weight, pattern = rng.standard_normal((m, k), dtype=np.float32), parse(spec)
    kept = pattern.mask(weight.astype(float) ** 2, sparsity=_sparsity(spec))
    scales = (np.abs(weight).max(axis=1) / 127).astype(np.float32)
    packed = pack_int8(weight * kept, kept, pattern, scales, InputRange(0.05, 128))
    return ExportedLayer(name, packed, None)


def _sparsity(spec: str) -> float:
    if isinstance(parse(spec), Dense):
        return 0.0
    return 0.5 if ":" in spec and spec.startswith("nm") else 0.75


def export_layers(
    folder: Path, layers: Sequence[ExportedLayer], levels: Sequence[CpuLevel], sizes: Sequence[int] = (1, 7)
) -> ExportedFiles:
    """Export layers for these levels, one and two threads."""
    of_layers = {each.name: sizes for each in layers}
    compiled = [compile_level(LevelRequest(level, layers, of_layers, (1, 2))) for level in levels]
    files = ExportedFiles(folder / "liblayers.so", folder / "layers.latbench", compiled)
    write_files(files)
    return files


def write_files(files: ExportedFiles, sources: Sequence[Path] = ()) -> None:
    """Write the library, of which these C files are part, and its packed file."""
    files.packed.write_bytes(build_packed_file(files.levels, sources))
    link_library(files.library, files.levels, sources)
