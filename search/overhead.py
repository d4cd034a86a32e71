"""What a pruned model takes beyond its searched layers, found by timing it whole at a few profiles.

The first layer, norms, activations that could not be folded, calls between layers: none of them is in the table of
layers, all of them are in the user's time. And layers on their own are not layers in a network: caches and threads
are shared. So the pruned model is timed at profiles of very unlike speed, all dense to very sparse, and

    seconds of the model = fixed + scale * sum of the layers' predicted seconds

is fitted. What the line leaves unexplained widens the interval of `fixed`. The dense engines are timed in the same
rounds. How far a sum of layers is from the whole, with this line and without it, is the profile's `additivity`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from latbench import backends, devices
from latbench.errors import BadData
from search.end_to_end import Engine, Progress, time_engines
from search.engines import DENSE_ENGINES
from search.layers import options_of
from search.problem import DENSE, Choice, Interval, Layer, Option, Problem, every_option, uniform_choice
from search.sessions import Chosen, Session, profile_name
from search.solve import sum_in_order
from search.task import Task
from sparse_kernels.cpu import target


@dataclass(frozen=True)
class WholeModel:
    """Whole-model seconds: the dense engines', and fixed + scale * layers for the pruned model.

    `left_out` names dense engines that could not run, with the reason.
    """

    dense: Mapping[str, Interval]
    fixed: Interval
    scale: float
    left_out: Mapping[str, str]

    @property
    def dense_engine(self) -> str:
        """The fastest dense engine: what a speedup is measured against."""
        return min(self.dense, key=lambda name: self.dense[name].value)

    def problem(self, layers: tuple[Layer, ...]) -> Problem:
        """The problem of these layers: their seconds as in the network, and the seconds around them."""
        engine = self.dense_engine
        return Problem(layers, self.fixed, self.dense[engine], engine).scaled(self.scale)


def measure_whole_model(
    task: Task,
    layers: Sequence[Layer],
    *,
    threads: int,
    backend: str,
    progress: Progress = lambda what, done, total: None,
) -> Session:
    """Time the dense engines, and the pruned model on `backend` at a few profiles with random masks."""
    chosen = [by_name(layers, choice) for choice in probe_profiles(layers).values()]
    profiles = {profile_name(one): one for one in chosen}
    engines = dense_engines(task, threads, backend)
    for name, one in profiles.items():
        engines[name] = Engine("pruned", "search.engines:random_pruned", (task.reference, threads, backend, one))
    timings = time_engines(engines, threads=threads, required=["torch", *profiles], progress=progress)
    return Session(profiles, timings)


def dense_engines(task: Task, threads: int, backend: str) -> dict[str, Engine]:
    """The dense engines that a pruned model on `backend` is compared with; DeepSparse is one where it runs there."""
    return {
        name: Engine(name, function, (task.reference, threads))
        for name, function in DENSE_ENGINES.items()
        if name != "deepsparse" or backend == "deepsparse"
    }


def conditions(task: Task, model_hash: str, threads: int, backend: str) -> dict[str, Any]:
    """What whole-model times depend on, whatever the layers become."""
    versions = {name: backends.version(name) for name in ("torch", "onnxruntime", "openvino", "numba")}
    return {
        "model_hash": model_hash, "device": devices.cpu_device(), "inputs": [list(x.shape) for x in task.example()],
        "threads": threads, "backend": backend, "engines": {"kernels": str(target.VERSION), **versions},
    }  # fmt: skip


def by_name(layers: Sequence[Layer], choice: Choice) -> dict[str, tuple[str, float]]:
    """Layer name -> (pattern, sparsity); tied layers one by one."""
    return {name: (it.pattern, it.sparsity) for name, it in options_of(layers, choice).items()}


def choice_of(layers: Sequence[Layer], chosen: Chosen) -> Choice:
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


def probe_profiles(layers: Sequence[Layer]) -> dict[str, Choice]:
    """All dense, one uniform profile about half way to the fastest, and the fastest uniform one."""
    choices = {
        f"{option.pattern} {option.sparsity:g}": uniform_choice(layers, option) for option in every_option(layers)
    }
    seconds = {label: seconds_of(layers, choice) for label, choice in choices.items()}
    dense = f"{DENSE} 0"
    fastest = min(seconds, key=seconds.__getitem__)
    half = min(seconds, key=lambda label: abs(seconds[label] - (seconds[dense] + seconds[fastest]) / 2))
    return {label: choices[label] for label in dict.fromkeys([dense, half, fastest])}


def seconds_of(layers: Sequence[Layer], choice: Choice) -> float:
    """The layers' predicted seconds, each on its own."""
    return sum_in_order(layer.seconds[j] for layer, j in zip(layers, choice, strict=True))


def whole_model(layers: Sequence[Layer], session: Session, coverage: float) -> WholeModel:
    """Fit the timings of the pruned model at the session's profiles. Raises BadData for options `layers` lack."""
    timings = session.timings
    measured = [timings.seconds(name, coverage) for name in session.profiles]
    alone = [seconds_of(layers, choice_of(layers, chosen)) for chosen in session.profiles.values()]
    fixed, scale = fit_line(alone, [interval.value for interval in measured])
    # The worst of: a profile off the line, and the noise of its own timing.
    below = max(fixed + scale * x - interval.low for x, interval in zip(alone, measured, strict=True))
    above = max(interval.high - fixed - scale * x for x, interval in zip(alone, measured, strict=True))
    return WholeModel(
        dense={name: timings.seconds(name, coverage) for name in DENSE_ENGINES if name in timings.blocks},
        fixed=Interval(fixed, fixed - max(below, 0.0), fixed + max(above, 0.0)),
        scale=scale,
        left_out=dict(timings.left_out),
    )


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
        fixed, scale = fit_line(np.delete(sums, i).tolist(), np.delete(whole, i).tolist())
        left_out.append(abs((fixed + scale * sums[i]) / whole[i] - 1))
    return before, float(np.median(left_out))


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(fixed, scale) of y = fixed + scale * x by least squares on relative errors, both >= 0; scale 1 for one point.

    Relative, because a profile at the fast end is where the promise is made, and its seconds are few.
    """
    at, seconds = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(np.unique(at)) < 2:
        return max(0.0, float((seconds - at).mean())), 1.0
    design = np.stack([np.ones_like(at), at], axis=1) / seconds[:, None]
    fixed, scale = np.linalg.lstsq(design, np.ones_like(at), rcond=None)[0]
    if fixed < 0:
        ratio = at / seconds
        return 0.0, float(ratio.sum() / (ratio @ ratio))
    return float(fixed), float(max(scale, 0.0))
