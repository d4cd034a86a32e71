"""What a pruned model takes beyond its searched layers, found by timing it whole at a few profiles.

The first layer, norms, activations that could not be folded, calls between layers: none of them is in the table of
layers, all of them are in the user's time. And layers on their own are not layers in a network: caches and threads
are shared. So the pruned model is timed at profiles of very unlike speed, all dense to very sparse, and

    seconds of the model = fixed + scale * sum of the layers' predicted seconds

is fitted. What the line leaves unexplained widens the interval of `fixed`. The dense engines are timed in the same
rounds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from latbench.errors import BadData
from latbench.files import write_text_atomically
from search.end_to_end import Engine, Progress, Timings, time_engines
from search.engines import DENSE_ENGINES
from search.layers import options_of
from search.problem import DENSE, Choice, Interval, Layer, Problem, every_option, uniform_choice
from search.solve import sum_in_order
from search.task import Task


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
    coverage: float,
    progress: Progress = lambda what, done, total: None,
) -> WholeModel:
    """Time the dense engines and the pruned model on `backend` at a few profiles, and fit `fixed` and `scale`."""
    profiles = {f"pruned, {label}": choice for label, choice in probe_profiles(layers).items()}
    engines = dense_engines(task, threads, backend)
    for name, choice in profiles.items():
        arguments = (task.reference, threads, backend, by_name(layers, choice))
        engines[name] = Engine("pruned", "search.engines:random_pruned", arguments)
    timings = time_engines(engines, threads=threads, required=["torch", *profiles], progress=progress)
    return whole_model(layers, profiles, timings, coverage)


def dense_engines(task: Task, threads: int, backend: str) -> dict[str, Engine]:
    """The dense engines that a pruned model on `backend` is compared with; DeepSparse is one where it runs there."""
    return {
        name: Engine(name, function, (task.reference, threads))
        for name, function in DENSE_ENGINES.items()
        if name != "deepsparse" or backend == "deepsparse"
    }


def by_name(layers: Sequence[Layer], choice: Choice) -> dict[str, tuple[str, float]]:
    """Layer name -> (pattern, sparsity); tied layers one by one."""
    return {name: (it.pattern, it.sparsity) for name, it in options_of(layers, choice).items()}


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


def whole_model(
    layers: Sequence[Layer], profiles: Mapping[str, Choice], timings: Timings, coverage: float
) -> WholeModel:
    """Fit the timings of the pruned model at `profiles` (names in `timings`)."""
    measured = [timings.seconds(name, coverage) for name in profiles]
    alone = [seconds_of(layers, choice) for choice in profiles.values()]
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


# Kept beside the layer database, because it takes a minute and depends on the same model ---------------------------


def save(whole: WholeModel, key: Mapping[str, Any], path: Path) -> None:
    """Write what was measured for `key` (hashes and settings) to `path`."""
    write_text_atomically(path, json.dumps({"key": dict(key), **asdict(whole)}, indent=2) + "\n")


def load(path: Path, key: Mapping[str, Any]) -> WholeModel | None:
    """What was measured for the same `key`, or None. Raises BadData for a file that is none of ours."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != dict(key):
            return None
        return WholeModel(
            dense={name: Interval(**interval) for name, interval in content["dense"].items()},
            fixed=Interval(**content["fixed"]),
            scale=float(content["scale"]),
            left_out=dict(content["left_out"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadData(f"{path}: damaged; delete it, or measure again with --remeasure") from error
