"""Seconds of a pruned model beyond its searched layers, found by timing the whole model at a few profiles.

The table of layers has neither the first layer, norms, activations that could not be folded, nor calls between
layers. All of them are in the user's time. Layers inside a network also differ from layers alone: they find their
activations as they need them, and share caches and threads. So the pruned model is timed at probe profiles of very
different speed, from all dense to very sparse. It is timed once more with its layers free: they return what they
computed once, and pruning cannot reduce what remains. With these times,

    seconds of the model = fixed + sum over its layers of (scale * predicted seconds - saved)

is fitted: `fixed` is measured, `scale` and `saved` belong to the line through the profiles. The layers of DeepSparse
and of exported models cannot be made free: there `fixed` is the line's value without layers. What the line does not
explain widens the interval of `fixed`. The dense engines are timed in the same rounds. How far a sum of layers is
from the whole, with and without this line, is the profile's `additivity`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from latbench.base.engine_registry import find_plain_torch
from latbench.errors import BadData
from search.deployment import Deployment
from search.knapsack.arrays import Choice, Floats, sum_in_order
from search.problem.layers import (
    DENSE,
    Interval,
    LayerOptions,
    build_uniform_choice,
    expand_choice,
    list_options,
)
from search.problem.problem import Problem
from search.progress import Progress
from search.source_code import hash_model_code
from search.task import Task
from search.whole_model.end_to_end import ModelTimer, RoundSchedule
from search.whole_model.engine_builders import build_dense_engines, build_free_engine, build_pruned_engines
from search.whole_model.model_engines import DENSE_ENGINES
from search.whole_model.sessions import OptionsByLayer, Session, name_profile
from search.whole_model.timed_device import find_timed_device

_LOG = logging.getLogger(__name__)

# Goes up when whole models are built otherwise, or other ones are timed, than before.
VERSION = 3

FREE = "layers free"
"""Name of the engine whose sparse layers take no time."""

PROBE_SCHEDULE = RoundSchedule(builds=1, rounds=5, first=1)
"""Probes only place the first profile; the rounds of a search measure what it promises."""

MIN_SCALE = 0.1
"""Lower bound for the line: a layer takes at least this share of its own time in the network, and an option saves at
least this share of what it saves alone. Otherwise a busy machine could make all options alike."""


@dataclass(frozen=True)
class WholeModel:
    """Measured seconds of whole models, and the line from predicted layers to the pruned model.

    Attributes
    ----------
    dense
        Dense engine -> its seconds.
    fixed
        Seconds of the pruned model without its layers.
    scale, saved
        In the model, a layer takes `scale` times its predicted seconds, less `saved` seconds.
    left_out
        Dense engine that could not run -> the reason.
    """

    dense: Mapping[str, Interval]
    fixed: Interval
    scale: float
    saved: float
    left_out: Mapping[str, str]

    @property
    def dense_engine(self) -> str:
        """The fastest dense engine, the baseline of a speedup."""
        return min(self.dense, key=lambda name: self.dense[name].value)

    @property
    def ceiling(self) -> float | None:
        """The speedup if the searched layers took no time; None if nothing remains then."""
        return self.dense[self.dense_engine].value / self.fixed.value if self.fixed.value > 0 else None

    def build_problem(self, layers: tuple[LayerOptions, ...]) -> Problem:
        """Return the problem of these layers, with their seconds in the network and the fixed seconds."""
        engine = self.dense_engine

        def in_network(seconds: Floats) -> Floats:
            return np.maximum(self.scale * seconds - self.saved, MIN_SCALE * self.scale * seconds)

        placed = (
            layer.change_parts(
                lambda it: replace(
                    it, seconds=in_network(it.seconds), low=in_network(it.low), high=in_network(it.high)
                )
            )
            for layer in layers
        )
        return Problem(tuple(placed), self.fixed, self.dense[engine], engine)


def time_probe_profiles(
    task: Task,
    layers: Sequence[LayerOptions],
    deployment: Deployment,
    timer: ModelTimer,
    progress: Progress = lambda what, done, total: None,
) -> Session:
    """Time the dense engines and the pruned model at the probe profiles, with random masks.

    On latbench's own kernels, also time the fastest of these profiles with its layers free.
    """
    options = [expand_choice(layers, choice) for choice in select_probe_profiles(layers).values()]
    profiles = {name_profile(it): it for it in options}
    engines = build_dense_engines(task, deployment) | build_pruned_engines(task, deployment, profiles)
    if (free := build_free_engine(task, deployment, options[-1])) is not None:
        engines[FREE] = free
    required = [find_plain_torch(deployment.backend), *profiles, *({FREE} & engines.keys())]
    timings = timer.time(engines, required=required, schedule=PROBE_SCHEDULE, progress=progress)
    for name, reason in timings.left_out.items() if deployment.on_gpu else ():
        _LOG.warning(f"{name} is left out of the comparison: {reason}")
    return Session(profiles, timings)


def describe_conditions(task: Task, model: nn.Module, model_hash: str, deployment: Deployment) -> dict[str, Any]:
    """Return what the times of whole models depend on, whatever the layers become: the key of their files."""
    device, example = find_timed_device(deployment), task.example()
    return {
        "models": VERSION, "model_hash": model_hash, "code": hash_model_code(model), "device": device.name,
        "inputs": [example.describe(), example.describe_tensors()],
        "threads": deployment.threads, "backend": deployment.backend, "form": deployment.form,
        "precisions": list(deployment.precisions), "engines": device.describe_versions(),
    } | ({"over": deployment.over} if deployment.over else {})  # fmt: skip


def find_choice(layers: Sequence[LayerOptions], options: OptionsByLayer) -> Choice:
    """Return the choice that `expand_choice` turns into `options`. Raises BadData for an unknown layer or option."""
    if missing := {layer.name for layer in layers} ^ set(options):
        raise BadData(f"the profile has other layers than the search: {', '.join(sorted(missing)[:3])}")
    choice = []
    for layer in layers:
        option = options[layer.name]
        if option not in layer.options:
            raise BadData(f"the search has no option {option} for layer {layer.name}")
        choice.append(layer.options.index(option))
    return tuple(choice)


def select_probe_profiles(layers: Sequence[LayerOptions]) -> dict[str, Choice]:
    """Return the all-dense profile, the fastest uniform one, and one uniform profile about half way between them."""
    choices = {str(option): build_uniform_choice(layers, option) for option in list_options(layers)}
    seconds = {label: sum_layer_seconds(layers, choice) for label, choice in choices.items()}
    dense = DENSE
    fastest = min(seconds, key=seconds.__getitem__)
    half = min(seconds, key=lambda label: abs(seconds[label] - (seconds[dense] + seconds[fastest]) / 2))
    return {label: choices[label] for label in dict.fromkeys([dense, half, fastest])}


def sum_layer_seconds(layers: Sequence[LayerOptions], choice: Choice) -> float:
    """Return the sum of the layers' predicted seconds, each on its own."""
    return sum_in_order(layer.seconds[j] for layer, j in zip(layers, choice, strict=True))


def fit_whole_model(layers: Sequence[LayerOptions], session: Session, coverage: float) -> WholeModel:
    """Fit the line to the session's profiles. Raises BadData for options that `layers` do not have.

    Parameters
    ----------
    layers
        The layers as predicted, each on its own.
    session
        The timings of `time_probe_profiles`.
    coverage
        Coverage of the intervals.
    """
    timings = session.timings
    measured = [timings.seconds(name, coverage) for name in session.profiles]
    choices = [find_choice(layers, options) for options in session.profiles.values()]
    alone = [sum_layer_seconds(layers, choice) for choice in choices]
    start, scale = fit_relative_line(alone, [interval.value for interval in measured], MIN_SCALE)
    free = timings.seconds(FREE, coverage) if FREE in timings.blocks else Interval(*[max(start, 0.0)] * 3)
    found = WholeModel(
        dense={name: timings.seconds(name, coverage) for name in DENSE_ENGINES if name in timings.blocks},
        fixed=free,
        scale=scale,
        saved=(free.value - start) / sum(len(layer.parts) for layer in layers),
        left_out=dict(timings.left_out),
    )
    # The worst case: a profile off the line, and the noise of its own timing.
    predicted = [found.build_problem(tuple(layers)).predict(choice).value for choice in choices]
    pairs = list(zip([*predicted, free.value], [*measured, free], strict=True))
    below = max(value - interval.low for value, interval in pairs)
    above = max(interval.high - value for value, interval in pairs)
    return replace(found, fixed=Interval(free.value, free.value - max(below, 0.0), free.value + max(above, 0.0)))


def compute_additivity(alone: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Return how far sums of layers are from whole models, as a share (median): before and after fitting a line.

    After fitting, each profile is predicted by the line through the others. With too few profiles for a line, both
    values are the same.

    Parameters
    ----------
    alone
        Sum of the layers' seconds of each profile.
    measured
        Seconds of the whole model of each profile.
    """
    sums, whole = np.asarray(alone, np.float64), np.asarray(measured, np.float64)
    before = float(np.median(np.abs(sums / whole - 1)))
    if len(sums) < 3:
        return before, before
    deviations = []
    for i in range(len(sums)):
        start, scale = fit_relative_line(np.delete(sums, i).tolist(), np.delete(whole, i).tolist())
        deviations.append(abs((start + scale * sums[i]) / whole[i] - 1))
    return before, float(np.median(deviations))


def fit_relative_line(x: Sequence[float], y: Sequence[float], min_scale: float = 0.0) -> tuple[float, float]:
    """Return (start, scale) of y = start + scale * x by least squares on relative errors; scale >= `min_scale`.

    Errors are relative because the promise concerns the fast end, where the seconds are few. With one point, the
    scale is 1.
    """
    at, seconds = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(np.unique(at)) < 2:
        return float((seconds - at).mean()), 1.0
    design = np.stack([np.ones_like(at), at], axis=1) / seconds[:, None]
    start, scale = map(float, np.linalg.lstsq(design, np.ones_like(at), rcond=None)[0])
    if scale < min_scale:  # profiles predicted to be slower were hardly slower: only their level is known
        return float(((seconds - min_scale * at) / seconds**2).sum() / (1 / seconds**2).sum()), min_scale
    return start, scale
