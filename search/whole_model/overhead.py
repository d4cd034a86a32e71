"""What a pruned model takes beyond its searched layers, found by timing it whole at a few profiles.

The first layer, norms, activations that could not be folded, calls between layers: none of them is in the table of
layers, all of them are in the user's time. And layers on their own are not layers in a network: there they find their
activations as they need them, and share caches and threads. So the pruned model is timed at profiles of very unlike
speed, all dense to very sparse, and once more with its layers free: they return what they once computed, and what is
left no pruning brings down. With these,

    seconds of the model = fixed + sum over its layers of (scale * predicted seconds - saved)

is fitted: `fixed` was measured, `scale` and `saved` are of the line through the profiles. On DeepSparse layers cannot
be made free: `fixed` is what the line leaves without layers. What the line leaves unexplained widens the interval of
`fixed`. The dense engines are timed in the same rounds. How far a sum of layers is from the whole, with this line and
without it, is the profile's `additivity`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latbench.backends import installed_engines
from latbench.base.engine_registry import CPU_ENGINES, MODEL_ENGINES, list_rivals, list_standard, runs_our_kernels
from latbench.errors import BadData
from latbench.machines.devices import name_cpu
from search.knapsack.arrays import Choice, Floats, sum_in_order
from search.problem.layers import (
    DENSE,
    Interval,
    LayerOptions,
    Option,
    build_uniform_choice,
    expand_choice,
    list_options,
)
from search.problem.problem import Problem
from search.progress import Progress
from search.task import Task
from search.whole_model.end_to_end import Engine, time_engines
from search.whole_model.model_engines import DENSE_ENGINES
from search.whole_model.sessions import Chosen, Session, profile_name
from sparse_kernels.cpu.runtime import kernel_cache as compiled

# Goes up when other whole models are timed than before.
VERSION = 2

FREE = "layers free"

LEAST = 0.1
"""Of what it takes alone, a layer takes at least so much in the network, and an option that saves time there at least
so much of what it saves: what a busy machine made of the line must not make all options alike."""


@dataclass(frozen=True)
class WholeModel:
    """Whole-model seconds: the dense engines', and those of the pruned model without its layers, `fixed`.

    In it a layer takes `scale` times what was predicted, less `saved` seconds. `left_out` names dense engines that
    could not run, with the reason.
    """

    dense: Mapping[str, Interval]
    fixed: Interval
    scale: float
    saved: float
    left_out: Mapping[str, str]

    @property
    def dense_engine(self) -> str:
        """The fastest dense engine: what a speedup is measured against."""
        return min(self.dense, key=lambda name: self.dense[name].value)

    @property
    def ceiling(self) -> float | None:
        """The speedup if the searched layers took no time; None if nothing is left then."""
        return self.dense[self.dense_engine].value / self.fixed.value if self.fixed.value > 0 else None

    def problem(self, layers: tuple[LayerOptions, ...]) -> Problem:
        """The problem of these layers: their seconds as in the network, and the seconds around them."""
        engine = self.dense_engine

        def inside(seconds: Floats) -> Floats:
            return np.maximum(self.scale * seconds - self.saved, LEAST * self.scale * seconds)

        placed = (
            layer.change_parts(
                lambda it: replace(it, seconds=inside(it.seconds), low=inside(it.low), high=inside(it.high))
            )
            for layer in layers
        )
        return Problem(tuple(placed), self.fixed, self.dense[engine], engine)


def measure_whole_model(
    task: Task,
    layers: Sequence[LayerOptions],
    *,
    threads: int,
    backend: str,
    progress: Progress = lambda what, done, total: None,
) -> Session:
    """Time the dense engines, and the pruned model on `backend` at a few profiles with random masks.

    On latbench's own kernels also at the last of them, the fastest, with its layers free.
    """
    chosen = [by_name(layers, choice) for choice in probe_profiles(layers).values()]
    profiles = {profile_name(one): one for one in chosen}
    engines = dense_engines(task, threads, backend)
    for name, one in profiles.items():
        engines[name] = Engine(
            "pruned", "search.whole_model.model_engines:random_pruned", (task.reference, threads, backend, one)
        )
    if runs_our_kernels(backend):
        arguments = (task.reference, threads, backend, chosen[-1])
        engines[FREE] = Engine("pruned", "search.whole_model.model_engines:layers_free", arguments)
    required = ["torch", *profiles, *({FREE} & engines.keys())]
    timings = time_engines(engines, threads=threads, required=required, progress=progress)
    return Session(profiles, timings)


def dense_engines(task: Task, threads: int, backend: str) -> dict[str, Engine]:
    """The dense engines that a pruned model on `backend` is compared with: DeepSparse where it runs there, and those
    in bfloat16 where it does.
    """
    return {
        name: Engine(name, DENSE_ENGINES[name], (task.reference, threads), shares=MODEL_ENGINES[name].shares_export)
        for name in list_rivals(backend)
    }


def conditions(task: Task, model_hash: str, threads: int, backend: str) -> dict[str, Any]:
    """What whole-model times depend on, whatever the layers become."""
    versions = {name: installed_engines.find_engine_version(name) for name in list_standard(CPU_ENGINES)}
    return {
        "model_hash": model_hash, "device": name_cpu(), "inputs": [list(x.shape) for x in task.example()],
        "threads": threads, "backend": backend, "engines": {"kernels": str(compiled.VERSION), **versions},
    }  # fmt: skip


def by_name(layers: Sequence[LayerOptions], choice: Choice) -> dict[str, tuple[str, float]]:
    """Layer name -> (pattern, sparsity); tied layers one by one."""
    return {name: (it.pattern, it.sparsity) for name, it in expand_choice(layers, choice).items()}


def choice_of(layers: Sequence[LayerOptions], chosen: Chosen) -> Choice:
    """`by_name` the other way round. Raises BadData for a layer or an option that there is not."""
    if missing := {layer.name for layer in layers} ^ set(chosen):
        raise BadData(f"a profile of other layers than are searched: {', '.join(sorted(missing)[:3])}")
    places = []
    for layer in layers:
        option = Option(*chosen[layer.name])
        if option not in layer.options:
            raise BadData(f"layer {layer.name} cannot be {option.pattern} at {option.sparsity:g} in this search")
        places.append(layer.options.index(option))
    return tuple(places)


def probe_profiles(layers: Sequence[LayerOptions]) -> dict[str, Choice]:
    """All dense, one uniform profile about half way to the fastest, and the fastest uniform one."""
    choices = {
        f"{option.pattern} {option.sparsity:g}": build_uniform_choice(layers, option)
        for option in list_options(layers)
    }
    seconds = {label: seconds_of(layers, choice) for label, choice in choices.items()}
    dense = f"{DENSE} 0"
    fastest = min(seconds, key=seconds.__getitem__)
    half = min(seconds, key=lambda label: abs(seconds[label] - (seconds[dense] + seconds[fastest]) / 2))
    return {label: choices[label] for label in dict.fromkeys([dense, half, fastest])}


def seconds_of(layers: Sequence[LayerOptions], choice: Choice) -> float:
    """The layers' predicted seconds, each on its own."""
    return sum_in_order(layer.seconds[j] for layer, j in zip(layers, choice, strict=True))


def whole_model(layers: Sequence[LayerOptions], session: Session, coverage: float) -> WholeModel:
    """Fit the timings of the pruned model at the session's profiles. Raises BadData for options `layers` lack."""
    timings = session.timings
    measured = [timings.seconds(name, coverage) for name in session.profiles]
    choices = [choice_of(layers, chosen) for chosen in session.profiles.values()]
    alone = [seconds_of(layers, one) for one in choices]
    start, scale = fit_line(alone, [interval.value for interval in measured], LEAST)
    free = timings.seconds(FREE, coverage) if FREE in timings.blocks else Interval(*[max(start, 0.0)] * 3)
    found = WholeModel(
        dense={name: timings.seconds(name, coverage) for name in DENSE_ENGINES if name in timings.blocks},
        fixed=free,
        scale=scale,
        saved=(free.value - start) / sum(len(layer.parts) for layer in layers),
        left_out=dict(timings.left_out),
    )
    # The worst of: a profile off the line, and the noise of its own timing.
    predicted = [found.problem(tuple(layers)).predict(choice).value for choice in choices]
    below = max(one - interval.low for one, interval in zip([*predicted, free.value], [*measured, free], strict=True))
    above = max(
        interval.high - one for one, interval in zip([*predicted, free.value], [*measured, free], strict=True)
    )
    return replace(found, fixed=Interval(free.value, free.value - max(below, 0.0), free.value + max(above, 0.0)))


def additivity(alone: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """How far sums of layers' seconds are from the whole model's: the median share of it, (before, after) the line.

    After: each profile by the line through the others; as before where there are too few for one.
    """
    sums, whole = np.asarray(alone, np.float64), np.asarray(measured, np.float64)
    before = float(np.median(np.abs(sums / whole - 1)))
    if len(sums) < 3:
        return before, before
    left_out = []
    for i in range(len(sums)):
        start, scale = fit_line(np.delete(sums, i).tolist(), np.delete(whole, i).tolist())
        left_out.append(abs((start + scale * sums[i]) / whole[i] - 1))
    return before, float(np.median(left_out))


def fit_line(x: Sequence[float], y: Sequence[float], least: float = 0.0) -> tuple[float, float]:
    """(start, scale) of y = start + scale * x by least squares on relative errors, scale >= `least`, 1 for one point.

    Relative, because a profile at the fast end is where the promise is made, and its seconds are few.
    """
    at, seconds = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(np.unique(at)) < 2:
        return float((seconds - at).mean()), 1.0
    design = np.stack([np.ones_like(at), at], axis=1) / seconds[:, None]
    start, scale = map(float, np.linalg.lstsq(design, np.ones_like(at), rcond=None)[0])
    if scale < least:  # the slower as predicted were hardly that: nothing is known but about where they are
        return float(((seconds - least * at) / seconds**2).sum() / (1 / seconds**2).sum()), least
    return start, scale
