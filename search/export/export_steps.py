"""What exports to every form have in common: what is asked for, what is checked, and the folder that is replaced."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latbench.base.files import stage_folder
from latbench.errors import BadData, EnvironmentUnusable, UsageError
from search.example_inputs import list_tensors
from search.export.expected_results import ExpectedResults, compare_results
from search.export.export_manifest import LIBRARY, MANIFEST, PACKED, PROFILE, is_exported, read_manifest
from search.pruning.storage.model_folder import hash_manifest
from sparse_kernels.cpu.export.cpu_levels import CpuLevel, find_level, list_host_levels
from sparse_kernels.cpu.export.exported_library import UNUSABLE, LibraryError
from sparse_kernels.cpu.export.layer_programs import ExportedLayer
from sparse_kernels.cpu.export.level_job import CompiledLevel, LevelFailure, LevelRequest, compile_level
from sparse_kernels.cpu.export.packed_weights import build_packed_file, read_checksum
from sparse_kernels.cpu.export.shared_library import Extension, NoCompiler, check_compiler, link_library


@dataclass(frozen=True)
class ExportRequest:
    """What to export.

    levels: CPU levels, None for all of this machine. batches, threads: for which kernels are chosen; None takes those
    of the task's example and of the profile. The deployed model runs any other number, too. only_timed: the export
    serves a timing here, of the example with the model's threads, and nothing else.
    """

    levels: Sequence[str] | None = None
    batches: Sequence[int] | None = None
    threads: Sequence[int] | None = None
    only_timed: bool = False

    def list_batches(self, example: int, always: int) -> list[int]:
        """List the batches in their order, from that of the example and one that any deployed model must have."""
        return [example] if self.only_timed else sorted({always, *(self.batches or (example,))})

    def list_threads(self, promised: int) -> list[int]:
        """List the numbers of threads in their order: one, and that which is `promised`, or those asked for."""
        return sorted({1, *((promised,) if self.only_timed else self.threads or (promised,))})


def choose_levels(request: ExportRequest) -> list[CpuLevel]:
    """Return the CPU levels of the request, from the least to the most able."""
    names = request.levels
    has = list_host_levels()
    if not has:
        raise EnvironmentUnusable("models are exported on x86-64 processors with AVX2, and this machine has none")
    if request.only_timed:
        return has[-1:]
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


def check_for_compiler(extension: Extension | None = None) -> None:
    """Raise EnvironmentUnusable unless there is a C compiler that can link kernels."""
    try:
        check_compiler(extension)
    except NoCompiler as error:
        raise EnvironmentUnusable(f"the model cannot be exported: {error}") from None


def check_output(output: Path) -> None:
    """Raise UsageError where the output exists and is neither empty nor an earlier export."""
    if output.exists() and not is_exported(output) and not (output.is_dir() and not any(output.iterdir())):
        raise UsageError(f"{output} exists and is no exported model: give another output folder")


def compile_levels(
    levels: Sequence[CpuLevel], layers: Sequence[ExportedLayer], sizes: Mapping[str, Sequence[int]],
    threads: Sequence[int], progress: Callable[[str], None],
) -> list[CompiledLevel]:  # fmt: skip
    """Compile layers for CPU levels and these numbers of tokens or images, each level in a process of its own."""
    compiled = []
    for level in levels:
        progress(f"compiling for {level.name}")
        compiled.append(_compile(level, layers, sizes, threads))
    return compiled


def _compile(
    level: CpuLevel, layers: Sequence[ExportedLayer], sizes: Mapping[str, Sequence[int]], threads: Sequence[int]
) -> CompiledLevel:
    try:
        return compile_level(LevelRequest(level, layers, sizes, threads))
    except LevelFailure as error:
        said = f"the model could not be compiled for {level.name}: {error}"
        raise (EnvironmentUnusable if error.by_machine else RuntimeError)(said) from error


def describe_request(
    form: str, levels: Sequence[CpuLevel], batches: Sequence[int], threads: Sequence[int]
) -> dict[str, Any]:
    """Return what a manifest says of the request, before there is a promise."""
    names = [each.name for each in levels]
    return {"form": form, "levels": names, "batches": batches, "threads": threads, "pruned": ""}


def write_library(
    folder: Path, levels: Sequence[CompiledLevel], source: Path, build_extension: Callable[[str, int], Extension]
) -> str:
    """Write an engine's extension and its packed file; return the number of the export, which is of its content.

    build_extension: returns the extension with this source, from the number and the checksum of the packed file.
    """
    packed = build_packed_file(levels, [source])
    number = hashlib.sha256(packed).hexdigest()[:16]
    (folder / PACKED).write_bytes(packed)
    try:
        link_library(folder / LIBRARY, levels, extension=build_extension(number, read_checksum(packed)))
    except NoCompiler as error:
        raise EnvironmentUnusable(f"the model cannot be exported: {error}") from None
    return number


@dataclass(frozen=True)
class PrunedResults:
    """What an exported model is compared with: the pruned model, and its conversion, which rounds as the export.

    Both are called with tensors.
    """

    model: Callable[..., Any]
    converted: Callable[..., Any]

    def compare(self, found: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[bool, float]:
        """Return what `compare_results` says of results for these inputs."""
        return compare_results(found, self._call(self.converted, inputs), self._call(self.model, inputs))

    def compute(self, inputs: Sequence[Tensor]) -> ExpectedResults:
        """Return the results of both models for these inputs."""
        return ExpectedResults(list(inputs), self._call(self.converted, inputs), self._call(self.model, inputs))

    def _call(self, model: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return all tensors of what a model returns. It gets copies, for it may change its inputs."""
        with torch.no_grad():
            return list_tensors(model(*(each.clone() for each in inputs)))


def write_promise(folder: Path, pruned: Path | None, expected: ExpectedResults) -> dict[str, Any]:
    """Write the profile and expected results, which a verification of the export needs; return facts about both.

    pruned: the folder with the profile; None for a model that promises nothing.
    """
    expected.save(folder)
    if pruned is None:
        return {"pruned": ""}
    shutil.copyfile(pruned / PROFILE, folder / PROFILE)
    return {"pruned": hash_manifest(pruned)}


def spread_batches(tensors: Sequence[Tensor], batches: Sequence[int]) -> list[list[Tensor]]:
    """Return inputs of these batches, and of one more, which runs as a sum of them.

    They are the example's, floats each a little smaller than the one before it: no two are equal, and none leaves the
    range that an input was calibrated for. Tensors without the batch of the first one stay as they are.
    """
    own = next((len(each) for each in tensors if each.ndim), 1)
    return [[_spread(each, own, batch) for each in tensors] for batch in (*batches, batches[-1] + 1)]


def _spread(x: Tensor, own: int, batch: int) -> Tensor:
    if not x.ndim or len(x) != own:
        return x
    each = x.repeat(-(-batch // own), *[1] * (x.ndim - 1))[:batch]
    if not x.is_floating_point():
        return each
    return each * torch.linspace(1, 0.5, batch, dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))


@contextmanager
def explain_refusals() -> Iterator[None]:
    """Turn what the library refuses into a sentence."""
    try:
        yield
    except LibraryError as error:
        kind = EnvironmentUnusable if error.code == UNUSABLE else RuntimeError
        raise kind(f"the exported model does not run: {error}") from error


@contextmanager
def explain_writes(output: Path) -> Iterator[None]:
    """Turn what the disk refuses into a sentence."""
    try:
        yield
    except OSError as error:
        raise EnvironmentUnusable(f"cannot write {output}: {error}") from error


def _list_files(output: Path) -> set[str]:
    """Return the names of the files of an earlier export; none where its manifest tells none."""
    try:
        return set(read_manifest(output)["files"]) if is_exported(output) else set()
    except BadData:
        return set()


@contextmanager
def replace_folder(output: Path) -> Iterator[Path]:
    """Yield an empty folder, whose files then take the place of those in `output`, the manifest last.

    Each is renamed, so a process that has the old ones open keeps them. Other files of an earlier export are deleted.
    """
    with ExitStack() as stack:
        with explain_writes(output):
            temporary = stack.enter_context(stage_folder(output))
        yield temporary
        with explain_writes(output):
            output.mkdir(exist_ok=True)
            left = _list_files(output)
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == MANIFEST):
                path.replace(output / path.name)
                left.discard(path.name)
            for name in left:
                (output / name).unlink(missing_ok=True)
