"""Whole models timed against each other: an engine a process, taking turns, so the machine's moods hit all alike.

A round gives every engine one burst of calls, in a shuffled order. Three kinds of rounds are taken again: those in
which other processes took the cores, those in which the engines together were much slower than in their fastest
rounds (a neighbour on a shared machine slows all by a third for seconds or minutes), and those in which the dense
engines were much slower than they are known to be. Such rounds slow the engines unequally. So do bursts from when a
host had moved the cores apart (`latbench.sweeping.core_placement`), which are taken again at once. No engine is
judged by its own time alone, and the pruned model never by what was predicted for it. Rounds are what repeats: within
one, calls share the state of the machine, so intervals come from resampling rounds (a block bootstrap, Kuensch 1989),
and a speedup's from resampling the same rounds of both engines.

The same model built twice differs by some per cent as long as its process lives, so each engine is built anew a few
times, each time in a fork of a process that has imported all. That is too few for an interval; what it means for a
promise is `risk`'s matter. A building during which the machine never was quiet does not count, and another takes its
place.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from latbench.errors import LatbenchError
from latbench.machines.devices import hash_machine, name_cpu
from latbench.runners.device_lock import lock_device
from latbench.runners.worker_process import PreparedTask, TaskFailed, Worker, WorkerDied
from latbench.sweeping.core_placement import CorePlacement
from latbench.timing.sampling import Burst
from search.problem.layers import Interval
from search.progress import Progress

Blocks = Sequence[Sequence[float]]
"""Samples in seconds a call, round by round."""

Round = Mapping[str, Burst]
"""A burst of each engine, the same engines in each round."""

PROCESSES = 3
ROUNDS = 18
ROUND_SECONDS = 0.12
MOST_TRIES = 3  # times the rounds asked for, on a machine that other processes use: a minute
MOST_MOVES = 20  # bursts one after the other, until cores are together again
SLOW = 0.1  # a round is slow if the engines' mean log slowdown is more: without neighbours it is 1 to 5%
FEWEST_QUIET = 3  # rounds of a building
DISTURBED = 0.25  # as SLOW, of a building: processes of their own have no bad luck together
MORE_PROCESSES = 2  # in place of those that were disturbed
PREPARE_SECONDS = 600.0
SAMPLE_SECONDS = 300.0
RESAMPLES = 1000


def cpu_lock(progress: Progress) -> AbstractContextManager[None]:
    """This machine's CPU for oneself; `progress` hears who else has it. Raises as `lock_device` does."""

    def waiting(holder: str) -> None:
        progress(f"waiting: {holder}", None, None)

    return lock_device(name_cpu(), hash_machine(), waiting=waiting)


@dataclass(frozen=True)
class Engine:
    """How a worker builds one model: the worker's name, "module:function" and its arguments.

    Engines of the same worker share its process: one library's threads do not slow its own. One that `shares` gets a
    last argument more: a folder for what all engines of one timing need only once.
    """

    worker: str
    function: str
    arguments: tuple[Any, ...]
    shares: bool = False


@dataclass(frozen=True)
class Timings:
    """Samples of every engine by round, equally many rounds each, and why engines were left out.

    `built` says for each round which building of the engines it timed; empty if they were built once.
    """

    blocks: Mapping[str, Blocks]
    left_out: Mapping[str, str]
    built: Sequence[int] = ()

    def seconds(self, engine: str, coverage: float) -> Interval:
        """The median call, and the interval that holds it with probability `coverage`."""
        medians = _resampled_medians(self.blocks[engine])
        return _interval(_median(self.blocks[engine]), medians, coverage)

    def speedup(self, engine: str, over: str, coverage: float) -> Interval:
        """The geometric mean of `speedups`; for its interval the rounds of each building are resampled in pairs."""
        value = math.exp(float(np.log(self.speedups(engine, over)).mean()))
        resampled = [np.log(_resampled_medians(b) / _resampled_medians(a)) for a, b in self._buildings(engine, over)]
        return _interval(value, np.exp(np.mean(resampled, axis=0)), coverage)

    def speedups(self, engine: str, over: str) -> list[float]:
        """Median of `over` by median of `engine` in each building."""
        return [_median(b) / _median(a) for a, b in self._buildings(engine, over)]

    def _buildings(self, *engines: str) -> list[list[Blocks]]:
        """The rounds of these engines, building by building."""
        built = np.asarray(self.built or [0] * len(self.blocks[engines[0]]))
        rounds = [np.flatnonzero(built == number).tolist() for number in np.unique(built)]
        return [[[self.blocks[engine][i] for i in own] for engine in engines] for own in rounds]

    def fastest(self, engines: Sequence[str]) -> str:
        """The engine with the least median among those that ran."""
        return min((name for name in engines if name in self.blocks), key=lambda name: _median(self.blocks[name]))


def time_engines(
    engines: Mapping[str, Engine],
    *,
    threads: int,
    required: Sequence[str],
    processes: int = PROCESSES,
    rounds: int = ROUNDS,
    round_seconds: float = ROUND_SECONDS,
    known: Mapping[str, float] | None = None,
    order: np.random.Generator | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Timings:
    """Time the engines together, `rounds` times in all, built anew in `processes` processes each.

    One that cannot run, in whichever building and round, is left out with the reason; a `required` one raises it.
    known: seconds that some of them took before on this machine, when it was quiet. Where others used the machine all
    the while, engines are built once more, and that building does not count. Where it is not once as fast as that
    during the first building, it is taken to have another pace now.
    """
    known, order = known or {}, order or np.random.default_rng(0)
    left_out: dict[str, str] = {}

    def leave_out(name: str, error: Exception) -> None:
        if name in required:
            raise LatbenchError(f"{name} cannot run this model: {error}") from error
        left_out[name] = " ".join(str(error).split())

    taken: list[Round] = []
    built: list[int] = []
    wanted = math.ceil(rounds / processes)
    number = 0
    names = list(dict.fromkeys(engine.worker for engine in engines.values()))
    with ExitStack() as stack:
        shared = stack.enter_context(tempfile.TemporaryDirectory(prefix="latbench-engines-"))
        # Entered first, left last: a worker dies with the thread that started it.
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=len(names)))
        workers = {name: stack.enter_context(Worker(threads=threads, name=name)) for name in names}
        placement = CorePlacement(stack.enter_context(Worker(threads=threads, name="reference")), threads)
        while number < processes or (
            0 < len(undisturbed(taken, built, known)) < processes and number < processes + MORE_PROCESSES
        ):
            number += 1
            progress(f"preparing whole models, {number} of {max(number, processes)}", None, None)
            prepared, failed = _prepare(engines, workers, pool, shared)
            for name, error in failed.items():
                leave_out(name, error)
            engines = {name: engines[name] for name in prepared}
            taken = [{name: bursts[name] for name in engines} for bursts in taken]  # also what ran before
            first = len(taken)
            while len(taken) - first < MOST_TRIES * wanted:
                quiet = sum(slow <= SLOW for slow in slowness(taken, known)[first:])
                if quiet >= wanted:
                    break
                progress(
                    "timing whole models in turns", (number - 1) * wanted + quiet, max(number, processes) * wanted
                )
                turn = list(prepared)
                order.shuffle(turn)
                drawn: dict[str, Burst] = {}
                tries = MOST_MOVES
                for name in turn:
                    try:
                        worker = workers[engines[name].worker]
                        burst = partial(worker.burst, prepared[name], round_seconds, timeout=SAMPLE_SECONDS)
                        drawn[name], together = placement.together(burst, tries)
                        if not together:  # the round is over
                            drawn[name], tries = replace(drawn[name], preempted=True), 1
                    except (TaskFailed, WorkerDied) as error:
                        leave_out(name, error)
                        break
                if len(drawn) < len(turn):
                    # Engines of the same worker died with it: this building begins again, without that one.
                    engines = {name: engine for name, engine in engines.items() if name not in left_out}
                    del taken[first:], built[first:]
                    number -= 1
                    break
                taken.append({name: drawn[name] for name in prepared})
                built.append(number)
            if taken and not (slowness(taken, known) <= SLOW).any():
                known = {}  # the machine has another pace by now, and to wait for the old one may take for ever
    numbers = undisturbed(taken, built, known) or range(1, number + 1)
    counted = [i for number in numbers for i in counted_rounds(taken, built, number, known)]
    blocks = {name: [taken[i][name].samples for i in counted] for name in engines}
    return Timings(blocks, left_out, [built[i] for i in counted])


def undisturbed(taken: Sequence[Round], built: Sequence[int], known: Mapping[str, float]) -> list[int]:
    """The buildings that had the machine to themselves at times: not even their quietest rounds were slow in others.

    Engines of one building run in processes of their own, so that all of them are slow only if the machine is.
    """
    slow, of = slowness(taken, known), np.asarray(built)
    return [
        number for number in np.unique(of).tolist() if np.sort(slow[of == number])[:FEWEST_QUIET][-1] <= DISTURBED
    ]


def counted_rounds(
    taken: Sequence[Round], built: Sequence[int], number: int, known: Mapping[str, float]
) -> list[int]:
    """Which rounds of building `number` count: the quiet ones.

    Where it never was as quiet as it was known to be, the quietest there was has to do.
    """
    own = [i for i, it in enumerate(built) if it == number]
    for slow in (slowness(taken, known), slowness(taken, {})):
        quiet = [i for i in own if slow[i] <= SLOW]
        if len(quiet) >= min(FEWEST_QUIET, len(own)):
            return quiet
    return sorted(sorted(own, key=lambda i: float(slow[i]))[:FEWEST_QUIET])


def _prepare(
    engines: Mapping[str, Engine], workers: Mapping[str, Worker], pool: Executor, shared: str
) -> tuple[dict[str, PreparedTask], dict[str, Exception]]:
    """Build all engines in new processes, those of different workers at the same time; what is built, what failed."""
    prepared: dict[str, PreparedTask] = {}
    failed: dict[str, Exception] = {}

    def prepare(worker: str) -> None:
        own = {name: engine for name, engine in engines.items() if engine.worker == worker}
        begun = False
        for name, engine in own.items():
            arguments = (*engine.arguments, shared) if engine.shares else engine.arguments
            try:
                if not begun:
                    workers[worker].renew(engine.function)
                    begun = True
                prepared[name] = workers[worker].prepare(engine.function, *arguments, timeout=PREPARE_SECONDS)
            except (TaskFailed, WorkerDied) as error:
                failed[name] = error

    list(pool.map(prepare, dict.fromkeys(engine.worker for engine in engines.values())))
    return {name: prepared[name] for name in engines if name in prepared}, failed


def slowness(taken: Sequence[Round], known: Mapping[str, float]) -> np.ndarray:
    """How much slower than in the fastest rounds the engines together were in each, as a logarithm.

    Or than engines with `known` seconds are known to be, if that is more; infinite where others took the cores. The
    fastest rounds are the first FEWEST_QUIET by the engines' mean: the least times that each engine had in any round
    were luck of different rounds, and beside them all rounds are slow where single bursts scatter.
    """
    if not taken:
        return np.zeros(0)
    names = list(taken[0])
    logs = np.log([[np.median(bursts[name].samples) for name in names] for bursts in taken])
    alone = np.array([not any(burst.preempted for burst in bursts.values()) for bursts in taken])
    means = logs.mean(axis=1)
    fast = np.sort(means[alone] if alone.any() else means)[:FEWEST_QUIET][-1]
    slow = np.maximum(means - fast, 0.0)
    if before := [(names.index(name), seconds) for name, seconds in known.items() if name in names]:
        columns, seconds = zip(*before, strict=True)
        slow = np.maximum(slow, (logs[:, columns] - np.log(seconds)).mean(axis=1))
    slow[~alone] = np.inf
    return slow


def _median(blocks: Blocks) -> float:
    return float(np.median(np.concatenate([np.asarray(block) for block in blocks])))


def _resampled_medians(blocks: Blocks) -> np.ndarray:
    """Medians over rounds drawn with replacement; equal numbers of rounds give equal draws, hence pairs.

    A sample counts as often as its round was drawn: in the order of samples, the median is where half of all counts
    are reached.
    """
    rng = np.random.default_rng(len(blocks))
    arrays = [np.asarray(block) for block in blocks]
    draws = rng.integers(0, len(arrays), (RESAMPLES, len(arrays)))
    samples = np.concatenate(arrays)
    order = np.argsort(samples)
    ordered, of = samples[order], np.repeat(np.arange(len(arrays)), [len(one) for one in arrays])[order]
    drawn = (draws[:, :, None] == np.arange(len(arrays))).sum(axis=1, dtype=np.int32)
    medians = []
    for times in np.array_split(drawn, max(1, RESAMPLES * len(samples) >> 20)):  # 8 MB at once
        reached = times[:, of].cumsum(axis=1, dtype=np.int32)
        total = reached[:, -1:]
        lower, upper = (ordered[(reached <= rank).sum(axis=1)] for rank in ((total - 1) // 2, total // 2))
        medians.append((lower + upper) / 2)
    return np.concatenate(medians)


def _interval(value: float, resampled: np.ndarray, coverage: float) -> Interval:
    low, high = np.quantile(resampled, [(1 - coverage) / 2, (1 + coverage) / 2])
    return Interval(value, min(value, float(low)), max(value, float(high)))
