"""The job behind `latbench export`: a pruned folder to a folder that is deployed without Python.

- libmodel.so: the kernels of the model for each CPU level, the runtime, and the chain of model.c
- latbench.h, model.h: what programs include
- model.latbench: the packed weights
- model.c: the chain; it is part of libmodel.so
- main.c, example.py: examples, which call the library
- manifest.json: levels, batches, threads, layers and their kernels; bytes and SHA-256 of the other files
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from latbench.base.files import hash_file, stage_folder
from latbench.errors import EnvironmentUnusable, UsageError
from search.artifacts.profile import read_profile
from search.export.chain_source import MAIN, generate_chain, generate_header, generate_python_example
from search.export.exported_model import LIBRARY, MANIFEST, PACKED, is_exported
from search.export.model_chain import ModelChain, trace_chain
from search.pruning.storage.model_folder import load_pruned
from search.task import Task
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.cpu.export.cpu_levels import CpuLevel, find_level, list_host_levels
from sparse_kernels.cpu.export.exported_library import UNUSABLE, ExportedLibrary, LibraryError
from sparse_kernels.cpu.export.level_job import CompiledLevel, LevelFailure, LevelRequest, compile_level
from sparse_kernels.cpu.export.library_id import VERSION
from sparse_kernels.cpu.export.packed_weights import build_packed_file
from sparse_kernels.cpu.export.shared_library import (
    HEADER,
    NoCompiler,
    check_compiler,
    find_needed_libc,
    link_library,
)
from sparse_kernels.prunable_layers import bake_weights
from sparse_kernels.same_results import CONVERTED, same_results


@dataclass(frozen=True)
class ExportRequest:
    """What to export.

    levels: CPU levels, None for all of this machine. batches, threads: for which kernels are chosen; None takes those
    of the task's example and of the profile. The deployed model runs any other number, too.
    """

    levels: Sequence[str] | None = None
    batches: Sequence[int] | None = None
    threads: Sequence[int] | None = None


def export_model(
    task: Task,
    pruned: Path,
    output: Path,
    request: ExportRequest,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Export a pruned model as a C library, check that it computes the same, and return its manifest.

    Parameters
    ----------
    task : Task
        The task whose model was pruned.
    pruned : Path
        Folder from `latbench prune`.
    output : Path
        Folder to write: absent, empty, or an earlier export.
    request : ExportRequest
        CPU levels, batches and threads.
    progress : callable
        Told what is done next.

    Returns
    -------
    dict of str to object
        The manifest.

    Raises
    ------
    UsageError
        The model is no chain of supported layers, or the request cannot be met.
    EnvironmentUnusable
        There is no C compiler, or this machine lacks a CPU level, memory or disk.
    BadData
        The pruned folder is damaged or of another model.
    RuntimeError
        The exported model does not run, or gives other results: a fault of latbench.
    """
    levels = _choose_levels(request.levels)
    _check_compiler()
    _check_output(output)
    model, choices = load_pruned(pruned, task.model())
    bake_weights(model)
    x = _read_example(task)
    chain, results = trace_chain(model, choices, x), PrunedResults(model, _convert(model, choices, x))
    batches = sorted({1, *(request.batches or (len(x),))})
    threads = sorted({1, *(request.threads or (read_profile(pruned / "profile.json").threads,))})
    compiled = []
    for level in levels:
        progress(f"compiling for {level.name}")
        compiled.append(_compile(chain, level, batches, threads))
    facts = {"levels": [each.name for each in levels], "batches": batches, "threads": threads}
    with _replace_folder(output) as folder:
        progress("linking")
        with _explain_writes(output):
            _write_files(folder, chain, compiled)
        progress("checking results")
        error = _check_results(folder, chain, results, spread_batches(x, batches), facts)
        with _explain_writes(output):
            return _write_manifest(folder, chain, facts | {"error": error})


def _choose_levels(names: Sequence[str] | None) -> list[CpuLevel]:
    has = list_host_levels()
    if not has:
        raise EnvironmentUnusable("models are exported on x86-64 processors with AVX2, and this machine has none")
    if names is None:
        return has
    try:
        levels = [find_level(name) for name in names]
    except ValueError as error:
        raise UsageError(str(error)) from None
    for level in levels:
        if level not in has:
            raise EnvironmentUnusable(
                f"this machine lacks the CPU level {level.name}, on which the export checks its results: it has "
                f"{', '.join(each.name for each in has)}"
            )
    return [level for level in has if level in levels]


def _check_compiler() -> None:
    try:
        check_compiler()
    except NoCompiler as error:
        raise EnvironmentUnusable(f"the model cannot be exported: {error}") from None


def _check_output(output: Path) -> None:
    if output.exists() and not is_exported(output) and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"{output} exists and is no exported model: give another output folder")


def _read_example(task: Task) -> Tensor:
    example = task.example()
    given = [*example.arguments, *example.keywords.values()]
    if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].dtype != torch.float32:
        raise UsageError(f"task {task.name} cannot be exported to C: its example is not one float32 tensor")
    return given[0]


def _convert(model: nn.Module, choices: Mapping[str, LayerPattern], x: Tensor) -> nn.Module:
    """Return the converted model: its layers round as the exported ones do."""
    try:
        return convert(model, choices, (x.clone(),))
    except ValueError as error:
        raise UsageError(f"the model cannot be exported: {error}") from error


def _compile(chain: ModelChain, level: CpuLevel, batches: Sequence[int], threads: Sequence[int]) -> CompiledLevel:
    """Compile the layers of a chain; a layer that sees several tokens of an input is compiled for their number."""
    floats = {step.layer: chain.count_floats(step.output) for step in chain.steps}
    sizes = {}
    for layer in chain.layers:
        tokens = floats[layer.name] // layer.weight.shape[0] if layer.image is None else 1
        sizes[layer.name] = sorted({1, *(batch * tokens for batch in batches)})
    try:
        return compile_level(LevelRequest(level, chain.layers, sizes, threads))
    except LevelFailure as error:
        said = f"the model could not be compiled for {level.name}: {error}"
        raise (EnvironmentUnusable if error.by_machine else RuntimeError)(said) from error


def _write_files(folder: Path, chain: ModelChain, levels: Sequence[CompiledLevel]) -> None:
    texts = {
        "model.h": generate_header(chain), "model.c": generate_chain(chain), "main.c": MAIN,
        "example.py": generate_python_example(chain), HEADER.name: HEADER.read_text(encoding="utf-8"),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    sources = [folder / "model.h", folder / "model.c"]
    (folder / PACKED).write_bytes(build_packed_file(levels, sources))
    try:
        link_library(folder / LIBRARY, levels, sources)
    except NoCompiler as error:
        raise EnvironmentUnusable(f"the model cannot be exported: {error}") from None


@dataclass(frozen=True)
class PrunedResults:
    """What an exported model is compared with: the pruned model, and its conversion, which rounds as the export."""

    model: nn.Module
    converted: nn.Module

    def compare(self, found: Tensor, x: Tensor) -> tuple[bool, float]:
        """Return whether results for x are right, and how far they lie from the converted model's, of its largest.

        Layers in eight bits and in bfloat16 round their inputs. An input near the middle of two steps may go to the
        other one here, for its own roundings. All roundings together are what separates the converted model from the
        pruned one, so they bound what some of them do.
        """
        with torch.no_grad():
            expected = self.converted(x.clone())
            rounded = float((expected - self.model(x.clone())).abs().max())
        apart = float((found - expected).abs().max()) if found.shape == expected.shape else math.inf
        right = apart <= rounded or same_results(found, expected, CONVERTED)
        return right, apart / (float(expected.abs().max()) or 1.0)


def spread_batches(x: Tensor, batches: Sequence[int]) -> list[Tensor]:
    """Return inputs of these batches, and of one more, which runs as a sum of them.

    They are the example's, each a little smaller than the one before it: no two are equal, and none leaves the range
    that an input was calibrated for.
    """
    found = []
    for batch in (*batches, batches[-1] + 1):
        each = x.repeat(-(-batch // len(x)), *[1] * (x.ndim - 1))[:batch]
        found.append(each * torch.linspace(1, 0.5, batch).reshape(-1, *[1] * (x.ndim - 1)))
    return found


def _check_results(
    folder: Path, chain: ModelChain, results: PrunedResults, inputs: Sequence[Tensor], facts: dict[str, Any]
) -> float:
    """Return how far deployed results are from the converted model's, as a share of its largest; raise if far.

    facts: the CPU levels and numbers of threads.
    """
    worst = 0.0
    for level in facts["levels"]:
        with _explain_refusals():
            library = ExportedLibrary(folder / LIBRARY, folder / PACKED, level)
        for threads, x in itertools.product(facts["threads"], inputs):
            with _explain_refusals():
                found = torch.from_numpy(library.run(x.numpy(), chain.shapes[chain.result], threads))
            right, apart = results.compare(found, x)
            if not right:
                raise RuntimeError(
                    f"the exported model gives other results than the pruned one at CPU level {level}, with "
                    f"{threads} threads, for a batch of {len(x)}"
                )
            worst = max(worst, apart)
    return worst


def _write_manifest(folder: Path, chain: ModelChain, facts: dict[str, Any]) -> dict[str, Any]:
    """Write what was exported, and return it."""
    library = ExportedLibrary(folder / LIBRARY, folder / PACKED)
    batch, threads = facts["batches"][-1], facts["threads"][-1]
    layers = {
        layer.name: {
            "shape": layer.weight.shape,
            "pattern": str(layer.weight.pattern),
            "activation": layer.activation,
            "kernel": library.name_kernel(layer.name, batch, threads),
        }
        for layer in chain.layers
    }
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {
        "version": VERSION,
        **facts,
        "libc": find_needed_libc(folder / LIBRARY),
        "input": chain.shapes[0],
        "output": chain.shapes[chain.result],
        "layers": layers,
        "bytes": {path.name: path.stat().st_size for path in files},
        "files": {path.name: hash_file(path) for path in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


@contextmanager
def _explain_refusals() -> Iterator[None]:
    """Turn what the library refuses into a sentence."""
    try:
        yield
    except LibraryError as error:
        kind = EnvironmentUnusable if error.code == UNUSABLE else RuntimeError
        raise kind(f"the exported model does not run: {error}") from error


@contextmanager
def _explain_writes(output: Path) -> Iterator[None]:
    """Turn what the disk refuses into a sentence."""
    try:
        yield
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {output}: {error}") from error


@contextmanager
def _replace_folder(output: Path) -> Iterator[Path]:
    """Yield an empty folder, whose files then take the place of those in `output`, the manifest last.

    Each is renamed, so a process that has the old ones open keeps them.
    """
    with ExitStack() as stack:
        with _explain_writes(output):
            temporary = stack.enter_context(stage_folder(output))
        yield temporary
        with _explain_writes(output):
            output.mkdir(exist_ok=True)
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == MANIFEST):
                path.replace(output / path.name)
