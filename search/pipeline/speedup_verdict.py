"""The verdict of a verification: the promise, the measurement, and what follows from both."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from latbench.base.deployed_forms import FORM_PHRASES, PYTHON
from latbench.base.engine_registry import DENSE_INT8, FLOAT32, INT8, MODEL_ENGINES, list_as_precise
from latbench.base.number_format import format_ratio
from search.problem.layers import Interval

VERSION = 3

KEPT, MISSED, INCONCLUSIVE = "kept", "missed", "inconclusive"

ENGINE_COLUMNS = ("value", "low", "high", "speedup", "speedup_low", "speedup_high")

BUSY = 1.1
"""A sentence mentions that the dense engine took this many times as long as in the search, or more."""

MAX_OVERSHOOT = 1.3
"""Above this multiple of the target, milder profiles are tried."""

SURPRISE = 1.1
"""A speedup is a surprise above this multiple of the predicted one: the search saw a slower machine."""

_ADVICE = {
    MISSED: "`latbench search --refine` corrects the search by this measurement",
    INCONCLUSIVE: (
        "the target lies within the interval: verify again on a quieter machine (`latbench doctor` says how), or "
        "search with --refine for a faster profile"
    ),
}


def judge_speedup(speedup: Interval, target: float) -> str:
    """Return whether an interval of a measured speedup lies above the target, below it, or contains it."""
    if speedup.low >= target:
        return KEPT
    return MISSED if speedup.high < target else INCONCLUSIVE


@dataclass(frozen=True)
class SpeedupVerdict:
    """The content of verify.json: the promise, the measurement, and whether the promise is kept.

    Seconds are medians of calls of the whole model. Speedups are medians of paired rounds
    (`search.whole_model.timings`). Names that end in _low and _high are the ends of 95% intervals.

    Attributes
    ----------
    task
        Name of the task.
    backend
        The backend that ran the pruned model.
    target
        The promised speedup.
    outcome
        KEPT if the interval of the measured speedup lies above the target, MISSED if it lies below, INCONCLUSIVE if
        the target lies within it.
    predicted_seconds
        The profile's prediction, for the backend of its search.
    measured_seconds, measured_speedup
        The pruned model's measured seconds, and its speedup over the fastest dense engine.
    dense_engine, dense_seconds
        The fastest dense engine, and its seconds.
    engines
        Every engine that ran -> its ENGINE_COLUMNS: its seconds, its speedup over the fastest dense engine, and the
        ends of their intervals.
    left_out
        Engine that did not run -> the reason.
    slowdown
        Seconds of the profile's dense engine, divided by its seconds in the search: far from 1 on another machine or
        a busy one. None if that engine did not run.
    score_name, score_dense, score_pruned
        The task's score of both models.
    device, threads, batch
        Name of the CPU or GPU, threads, and size of the batch.
    inputs
        Hash of the pruned model's manifest.
    code
        Hash of the files that define the task.
    precision
        The least precise type in which a layer of the pruned model is multiplied.
    score_int8
        The score of the dense model in eight bits on OpenVINO; None where it was not timed or not scored.
    form
        How the pruned model is deployed, one of `latbench.base.deployed_forms.FORM_PHRASES`.
    exported
        Hash of the manifest of the exported model; empty for one that is not exported.
    over
        If not empty, only dense engines that round no further than this type count for the promise.
    """

    task: str
    backend: str
    target: float
    outcome: str
    predicted_seconds: float
    predicted_low: float
    predicted_high: float
    measured_seconds: float
    measured_low: float
    measured_high: float
    measured_speedup: float
    measured_speedup_low: float
    measured_speedup_high: float
    dense_engine: str
    dense_seconds: float
    engines: Mapping[str, Mapping[str, float]]
    left_out: Mapping[str, str]
    slowdown: float | None
    score_name: str
    score_dense: float
    score_pruned: float
    device: str
    threads: int
    batch: int
    inputs: str
    code: str
    precision: str = FLOAT32
    score_int8: float | None = None
    form: str = PYTHON
    exported: str = ""
    over: str = ""

    @property
    def rivals(self) -> str:
        """Words for the dense engines that the promise is over."""
        return "the fastest dense engine" + (f" in {' or '.join(list_as_precise(self.over))}" if self.over else "")

    @property
    def met(self) -> bool:
        """Whether the promise is kept."""
        return self.outcome == KEPT

    @property
    def predicted_speedup(self) -> float:
        """The speedup that the search predicted, over what is the fastest dense engine now."""
        return self.dense_seconds / (self.slowdown or 1.0) / self.predicted_seconds

    @property
    def is_needlessly_fast(self) -> bool:
        """Whether the model is far above the target, and above what the search predicted.

        A milder profile would keep the promise, too, and keep more of the score.
        """
        bounds = MAX_OVERSHOOT * self.target, SURPRISE * self.predicted_speedup
        return self.met and self.measured_speedup_low > max(bounds)

    @property
    def ratio_of_medians(self) -> float:
        """The dense engine's median seconds over those of the pruned model, whichever rounds they come from."""
        return self.dense_seconds / self.measured_seconds

    @property
    def medians_disagree(self) -> bool:
        """Whether the ratio of medians lies outside the interval of the measured speedup."""
        return not self.measured_speedup_low <= self.ratio_of_medians <= self.measured_speedup_high

    @property
    def where(self) -> str:
        """Words for how the pruned model ran, to follow a time of it; empty for our own kernels in float32."""
        engine = MODEL_ENGINES[self.backend].phrase if self.backend in MODEL_ENGINES else ""
        return FORM_PHRASES[self.form] + engine + ("" if self.precision == FLOAT32 else f" in {self.precision}")

    @property
    def over_precisions(self) -> dict[str, tuple[str, float]]:
        """For each type the fastest dense engine that multiplies in it, and the speedup over that engine."""
        found: dict[str, tuple[str, float]] = {}
        for name, columns in self.engines.items():
            if name not in MODEL_ENGINES:  # the pruned model
                continue
            over = self.measured_speedup / columns["speedup"]
            precision = MODEL_ENGINES[name].precision
            if precision not in found or over < found[precision][1]:
                found[precision] = name, over
        return found

    @property
    def over_int8(self) -> tuple[float, float] | None:
        """The seconds of the dense model in eight bits on OpenVINO, and the speedup over it; None if not timed."""
        if (columns := self.engines.get(DENSE_INT8)) is None:
            return None
        return columns["value"], self.measured_speedup / columns["speedup"]

    @property
    def beside_int8(self) -> str:
        """Words to follow the time of the dense model in eight bits; empty if that was not timed."""
        over = self.over_int8
        return "" if over is None else f"the pruned model is {format_ratio(over[1])} as fast"

    @property
    def int8_advice(self) -> str:
        """What to do if the dense model in eight bits is faster than a pruned one without; empty if it is not."""
        over = self.over_int8
        if over is None or over[1] >= 1 or self.precision == INT8:
            return ""
        return "`--precision int8` lets the search use eight bits, too"

    @property
    def advice(self) -> str:
        """What to do if the promise is not kept; empty if it is."""
        return _ADVICE.get(self.outcome, "")

    def sentence(self) -> str:
        """Return the verdict in one line."""
        low, high = self.measured_speedup_low, self.measured_speedup_high
        found = (
            f"{self.measured_speedup:.2f}x ({low:.2f}-{high:.2f}x) measured{self.where} against {self.dense_engine}"
        )
        sentence = f"promise {self.outcome}: {found}, {self.target:g}x promised"
        others = [(name, over) for name, over in self.over_precisions.values() if name != self.dense_engine]
        if self.precision != FLOAT32 and others:
            sentence += f" ({', '.join(f'{over:.2f}x against {name}' for name, over in others)})"
        if self.slowdown is not None and self.slowdown > BUSY:
            sentence += (
                f" (the dense engine took {self.slowdown:.2f} times as long as in the search: the machine is busy, "
                "or another one)"
            )
        if self.medians_disagree:
            sentence += (
                f"; the ratio of the two median times is {self.ratio_of_medians:.2f}x, outside the interval: the "
                "machine's speed changed between rounds, and only the paired rounds count"
            )
        return sentence


def read_verdict(path: Path) -> SpeedupVerdict | None:
    """Return the verdict in a verify.json; None if the file is missing or cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") != VERSION:
            return None
        verdict = SpeedupVerdict(**content)
        times = [getattr(verdict, name) for name in _POSITIVE]
        times += [engine[name] for engine in verdict.engines.values() for name in ENGINE_COLUMNS]
        scores = (verdict.score_dense, verdict.score_pruned)
        return verdict if all(0 < time < math.inf for time in times) and all(map(math.isfinite, scores)) else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


_POSITIVE = (
    "target", "predicted_seconds", "predicted_low", "predicted_high", "measured_seconds", "measured_low",
    "measured_high", "measured_speedup", "measured_speedup_low", "measured_speedup_high", "dense_seconds",
)  # fmt: skip
