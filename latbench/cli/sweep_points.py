"""The points that the options of `latbench plan` and `latbench sweep` select, and an estimate of their cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from latbench.workloads.points import Point

_LOG = logging.getLogger(__name__)

QUICK_SECONDS = 300.0


@dataclass(frozen=True)
class PointOptions:
    """What a command line says of the points: texts as given, empty where it says nothing.

    Attributes
    ----------
    workloads, patterns, sparsities, backends : sequence of str
        The values as texts.
    adaptive : bool
        Whether points are chosen during the sweep.
    tune : bool
        Whether extra points of latbench's tuned CPU kernels are wanted.
    rounded : sequence of str
        Precisions of which extra points are wanted.
    seed : int
        Random seed of weights and order.
    """

    workloads: Sequence[str] = ()
    patterns: Sequence[str] = ()
    sparsities: Sequence[str] = ()
    backends: Sequence[str] = ()
    adaptive: bool = False
    tune: bool = False
    rounded: Sequence[str] = ()
    seed: int = field(default=0)


class Installed(NamedTuple):
    """Names of engines that are installed, and where: `here`, or `on all nodes` of a cluster."""

    engines: Collection[str]
    where: str = "here"


class Estimate(NamedTuple):
    """Estimators of the seconds of points and the bytes of their table, and their assumptions in words."""

    seconds: Callable[[Sequence[Point]], float]
    table_bytes: Callable[[Sequence[Point]], int]
    assumed: str


def select_cpu_points(options: PointOptions, device: str, threads: int, engines: Sequence[str]) -> list[Point]:
    """Select the points of a CPU."""
    from latbench.workloads.points import FINE_SPARSITIES, SPARSITIES, PointSetup, select_points

    setup = PointSetup(device, threads, engines, options.seed, options.tune, options.rounded)
    default = FINE_SPARSITIES if options.adaptive else SPARSITIES
    return select_points(options.workloads, options.patterns, options.sparsities, setup, default_sparsities=default)


def select_gpu_blocks(options: PointOptions, device: str, installed: Installed) -> list[list[Point]]:
    """Select the points of a GPU in blocks, the most telling block first."""
    from latbench.base.engine_registry import GPU_ENGINES
    from latbench.sweeping.gpu_points import list_staged_blocks, list_standard_shapes
    from latbench.workloads.points import FINE_SPARSITIES, parse_patterns, parse_sparsities
    from latbench.workloads.workload import list_standard_workloads, read_workload

    names = options.workloads
    needed = {name: engine.install_names[:1] for name, engine in GPU_ENGINES.items()}
    shapes = [layer.shape for name in names or list_standard_workloads() for layer in read_workload(name).layers]
    sparsities = FINE_SPARSITIES if options.adaptive else None
    return list_staged_blocks(
        shapes if names else [*list_standard_shapes(), *shapes],
        device,
        backends=select_engines(options.backends or ["all"], needed, installed),
        patterns=parse_patterns(options.patterns) if options.patterns else None,
        sparsities=parse_sparsities(options.sparsities) if options.sparsities else sparsities,
        seed=options.seed,
    )


def select_first_blocks(blocks: Sequence[list[Point]], seconds: float) -> list[list[Point]]:
    """Select the first blocks of a GPU that take about `seconds` together, at least one."""
    from latbench.sweeping.gpu_estimate import estimate_gpu_seconds

    points: list[Point] = []
    for number, block in enumerate(blocks):
        points += block
        if number and estimate_gpu_seconds(points) > seconds:
            return list(blocks[:number])
    return list(blocks)


def select_cpu_engines(given: Sequence[str], installed: Installed | None = None) -> list[str]:
    """Select the CPU engines that are given; by default the standard ones.

    `installed` is by default what this machine has. Warns of standard engines that are not installed, because the
    fastest dense engine may be among them.
    """
    from latbench.backends import installed_engines
    from latbench.base.engine_registry import CPU_ENGINES, list_standard

    needed = {name: engine.install_names for name, engine in CPU_ENGINES.items()}
    if installed is None:
        installed = Installed(
            [name for name, version in installed_engines.list_cpu_versions().items() if version is not None]
        )
    if given:
        return select_engines(given, needed, installed)
    standard = list_standard(CPU_ENGINES)
    for name in standard:
        if name not in installed.engines:
            advice = f"pip install {' '.join(needed[name])}"
            _LOG.warning(f"{name} is left out, it is not installed {installed.where}: {advice}")
    return [name for name in standard if name in installed.engines]


def select_engines(given: Sequence[str], needed: Mapping[str, Sequence[str]], installed: Installed) -> list[str]:
    """Select engines by name, or all installed ones for `all`; `needed` names the packages of each known engine.

    Raises UsageError for an unknown engine, EnvironmentUnusable for one that is not installed.
    """
    from latbench.errors import EnvironmentUnusable, UsageError

    if "all" in given:
        return [name for name in needed if name in installed.engines]
    for name in given:
        if name not in needed:
            raise UsageError(f"unknown backend {name!r}: known are {', '.join(needed)}, and all")
        if name not in installed.engines:
            raise EnvironmentUnusable(
                f"{name} is not installed {installed.where}: pip install {' '.join(needed[name])}"
            )
    return list(given)


def check_cpu_kernel_options(engines: Sequence[str], options: PointOptions) -> None:
    """Raise UsageError for --tune, --bf16 and --int8 without an engine that takes them; those of a GPU are none."""
    from latbench.base.engine_registry import BFLOAT16, CPU_ENGINES, INT8
    from latbench.errors import UsageError

    tuned = [name for name, engine in CPU_ENGINES.items() if engine.tuned_kernels]
    bf16, int8 = (
        [name for name, engine in CPU_ENGINES.items() if precision in engine.rounded_kernels]
        for precision in (BFLOAT16, INT8)
    )
    for asked, name, gpu_reason, able in (
        (options.tune, "--tune", "GPU kernels are not tuned", tuned),
        (BFLOAT16 in options.rounded, "--bf16", "a sweep of a GPU measures bfloat16 in any case", bf16),
        (INT8 in options.rounded, "--int8", "a sweep of a GPU measures int8 in any case", int8),
    ):
        if asked and not engines:
            raise UsageError(f"{name} is not for --gpu: {gpu_reason}")
        if asked and not set(able) & set(engines):
            raise UsageError(f"{name} is for backend {', '.join(sorted(able))}, which is not among those asked for")


def build_estimate(gpu: bool) -> Estimate:
    """Build the estimators for points of a GPU, or of a CPU."""
    if gpu:
        from latbench.sweeping import gpu_estimate

        return Estimate(
            gpu_estimate.estimate_gpu_seconds,
            gpu_estimate.estimate_gpu_table_bytes,
            gpu_estimate.GPU_ESTIMATE_ASSUMPTION,
        )
    from latbench.workloads.points import ESTIMATE_ASSUMPTION, estimate_bytes, estimate_seconds

    return Estimate(estimate_seconds, estimate_bytes, ESTIMATE_ASSUMPTION)


def format_duration(seconds: float) -> str:
    """Return seconds as a text short enough for a column, such as `90 s`, `12 min` or `1.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def list_rounded(bf16: bool, int8: bool) -> tuple[str, ...]:
    """List the precisions that options ask for."""
    from latbench.base.engine_registry import BFLOAT16, INT8

    return tuple(precision for precision, asked in ((BFLOAT16, bf16), (INT8, int8)) if asked)
