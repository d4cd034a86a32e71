"""Samples of whole models that were timed together, with medians, speedups and their confidence intervals.

Rounds are the unit that repeats. Within one round, calls share the state of the machine, so intervals come from
resampling rounds (a block bootstrap, Kuensch 1989). A speedup's interval resamples the same rounds of both engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search.problem.layers import Interval

Blocks = Sequence[Sequence[float]]
"""Samples in seconds a call, round by round."""

RESAMPLES = 1000
"""Draws of a bootstrap."""


@dataclass(frozen=True)
class Timings:
    """Samples of every engine, with equally many rounds for each.

    Attributes
    ----------
    blocks
        Engine -> samples (seconds a call) of each round.
    left_out
        Engine that could not run -> the reason.
    builds
        Number of the build that each round timed; empty if engines were built once.
    """

    blocks: Mapping[str, Blocks]
    left_out: Mapping[str, str]
    builds: Sequence[int] = ()

    def seconds(self, engine: str, coverage: float) -> Interval:
        """Return the median call (seconds), and the interval that contains it with probability `coverage`."""
        medians = _resample_medians(self.blocks[engine])
        return _interval(_median(self.blocks[engine]), medians, coverage)

    def speedup(self, engine: str, over: str, coverage: float) -> Interval:
        """Return the geometric mean of `speedups`; its interval resamples the rounds of each build in pairs."""
        value = math.exp(float(np.log(self.speedups(engine, over)).mean()))
        resampled = [np.log(_resample_medians(b) / _resample_medians(a)) for a, b in self._by_build(engine, over)]
        return _interval(value, np.exp(np.mean(resampled, axis=0)), coverage)

    def speedups(self, engine: str, over: str) -> list[float]:
        """Return for each build the median of `over` divided by the median of `engine`."""
        return [_median(b) / _median(a) for a, b in self._by_build(engine, over)]

    def fastest(self, engines: Sequence[str]) -> str:
        """Return the engine with the least median among those that ran."""
        return min((name for name in engines if name in self.blocks), key=lambda name: _median(self.blocks[name]))

    def _by_build(self, *engines: str) -> list[list[Blocks]]:
        """Return the rounds of these engines, build by build."""
        builds = np.asarray(self.builds or [0] * len(self.blocks[engines[0]]))
        rounds = [np.flatnonzero(builds == number).tolist() for number in np.unique(builds)]
        return [[[self.blocks[engine][i] for i in own] for engine in engines] for own in rounds]


def _median(blocks: Blocks) -> float:
    return float(np.median(np.concatenate([np.asarray(block) for block in blocks])))


def _resample_medians(blocks: Blocks) -> NDArray[np.float64]:
    """Return medians over rounds drawn with replacement; equal numbers of rounds give equal draws, hence pairs.

    A sample counts as often as its round was drawn. In the order of samples, the median is where half of all counts
    are reached.
    """
    rng = np.random.default_rng(len(blocks))
    arrays = [np.asarray(block) for block in blocks]
    draws = rng.integers(0, len(arrays), (RESAMPLES, len(arrays)))
    samples = np.concatenate(arrays)
    order = np.argsort(samples)
    sorted_samples = samples[order]
    round_of_sample = np.repeat(np.arange(len(arrays)), [len(block) for block in arrays])[order]
    draw_counts = (draws[:, :, None] == np.arange(len(arrays))).sum(axis=1, dtype=np.int32)
    medians = []
    for counts in np.array_split(draw_counts, max(1, RESAMPLES * len(samples) >> 20)):  # 8 MB at once
        reached = counts[:, round_of_sample].cumsum(axis=1, dtype=np.int32)
        total = reached[:, -1:]
        lower, upper = (sorted_samples[(reached <= rank).sum(axis=1)] for rank in ((total - 1) // 2, total // 2))
        medians.append((lower + upper) / 2)
    return np.concatenate(medians)


def _interval(value: float, resampled: NDArray[np.float64], coverage: float) -> Interval:
    low, high = np.quantile(resampled, [(1 - coverage) / 2, (1 + coverage) / 2])
    return Interval(value, min(value, float(low)), max(value, float(high)))
