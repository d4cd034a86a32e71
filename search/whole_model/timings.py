"""Samples of whole models that were timed together, with medians, speedups and their confidence intervals.

Rounds are the unit that repeats. Within one round, calls share the state of the machine, so intervals come from
resampling rounds (a block bootstrap, Kuensch 1989).

The measured speedup has one definition, here, and every place prints it. In each round, the median burst of the dense
engine is divided by that of the other engine. The speedup is the median of these ratios. A machine that slows
down for some rounds slows both engines of a pair, so it hardly moves the median. The ratio of the two engines' own
medians may come from different rounds.
"""

from __future__ import annotations

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
        """Return the median of all paired rounds; its interval resamples the rounds of each build."""
        builds = [np.array(own) for own in self._paired_ratios(engine, over)]
        rng = np.random.default_rng(sum(map(len, builds)))
        drawn = [own[rng.integers(0, len(own), (RESAMPLES, len(own)))] for own in builds]
        value = float(np.median(np.concatenate(builds)))
        return _interval(value, np.median(np.concatenate(drawn, axis=1), axis=1), coverage)

    def speedups(self, engine: str, over: str) -> list[float]:
        """Return for each build the median of its paired rounds."""
        return [float(np.median(own)) for own in self._paired_ratios(engine, over)]

    def _paired_ratios(self, engine: str, over: str) -> list[list[float]]:
        """Return the ratio of the burst of `over` to that of `engine` in each round, build by build."""
        ratios = [
            float(np.median(b) / np.median(a)) for a, b in zip(self.blocks[engine], self.blocks[over], strict=True)
        ]
        builds = np.asarray(self.builds or [0] * len(ratios))
        return [[ratios[i] for i in np.flatnonzero(builds == number)] for number in np.unique(builds)]

    def fastest(self, engines: Sequence[str]) -> str:
        """Return the engine with the least median among those that ran."""
        return min((name for name in engines if name in self.blocks), key=lambda name: _median(self.blocks[name]))


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
