"""Time whole models against each other: one process an engine, in turns, so that disturbances affect all alike.

A round gives every engine one burst of calls, in a shuffled order. Rounds that other processes disturbed are taken
again (`search.whole_model.quiet_rounds`). So are, at once, bursts from when a host had moved the cores apart
(`latbench.sweeping.core_placement`).

The same model built twice differs by some per cent as long as its process lives. So each engine is built several
times, each time in a fork of a process that has imported everything. That is too few builds for an interval;
`search.whole_model.confidence` says what it means for a promise. A build during which the machine never was quiet
does not count, and another one takes its place.

Who needs only a verdict, such as whether a profile reaches a speedup, asks after each build whether it is clear.
Most verdicts take one build. The processes stay between timings, because starting them takes longer than most
timings.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

from latbench.errors import LatbenchError
from latbench.machines.processors import check_threads
from latbench.runners.worker_process import PreparedTask, TaskFailed, Worker, WorkerDied
from latbench.sweeping.core_placement import CorePlacement
from latbench.timing.sampling import Burst
from search.progress import Progress
from search.whole_model.quiet_rounds import (
    SLOW_ROUND,
    Round,
    compute_slowness,
    find_undisturbed_builds,
    select_quiet_rounds,
)
from search.whole_model.timings import Timings

BUILDS = 3
"""Builds of each engine that a timing averages."""

EXTRA_BUILDS = 2
"""Further builds, at most, in place of those that were disturbed."""

MAX_ROUND_FACTOR = 3
"""Rounds taken, at most, for each round asked for: on a machine that others use, about a minute."""

MAX_BURST_TRIES = 20
"""Bursts in a row, at most, until the cores are together again."""

MAX_STARTED_TOGETHER = 32
"""Engines, at most, whose processes start at the same time."""

BUILD_SECONDS = 600.0
"""Time limit for building one engine on a CPU."""

BURST_SECONDS = 300.0
"""Time limit for one burst."""


@dataclass(frozen=True)
class EngineBuilder:
    """How a worker builds one model.

    Attributes
    ----------
    worker
        Name of the worker. Engines of the same worker share its process: one library's threads do not slow its own.
    function
        The builder, "module:function".
    arguments
        Arguments of the builder.
    shares
        Whether the builder gets one more argument: a folder for files that all engines of one timing share.
    """

    worker: str
    function: str
    arguments: tuple[Any, ...]
    shares: bool = False


@dataclass(frozen=True)
class RoundSchedule:
    """How often engines are built and timed.

    Attributes
    ----------
    builds
        Undisturbed builds of each engine, at most.
    rounds
        Quiet rounds of each build.
    seconds
        Seconds of each engine's burst in a round.
    first
        Builds after which a timing may end early, where its caller says that it knows enough.
    """

    builds: int = BUILDS
    rounds: int = 6
    seconds: float = 0.06
    first: int = BUILDS


DEFAULT_SCHEDULE = RoundSchedule()

IsEnough = Callable[[Timings], bool]
"""Returns whether the samples so far suffice."""


class ModelTimer:
    """Times engines in processes that stay from one timing to the next. A context manager: it ends the processes.

    Parameters
    ----------
    threads
        Threads of each engine.
    environment
        Further environment variables of the processes.
    together
        Engines, at most, that are built at the same time.
    build_seconds
        Time limit for building one engine.

    Raises
    ------
    UsageError
        This process may not use so many processors.
    """

    def __init__(
        self, threads: int, environment: Mapping[str, str] | None = None, *, together: int = MAX_STARTED_TOGETHER,
        build_seconds: float = BUILD_SECONDS,
    ) -> None:  # fmt: skip
        check_threads(threads, f"{threads} threads")
        self._threads, self._environment = threads, dict(environment or {})
        self._together, self._build_seconds = together, build_seconds
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @functools.cached_property
    def _workers(self) -> _Workers:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="latbench-engines-"))
        # Entered first, left last: a worker dies with the thread that started it.
        pool = self._stack.enter_context(ThreadPoolExecutor(max_workers=self._together))
        reference = self._stack.enter_context(self._build_worker("reference"))
        return _Workers({}, CorePlacement(reference, self._threads), pool, folder, self._build_seconds)

    def _start(self, name: str) -> Worker:
        """Return the process of this name; start it if there is none."""
        processes = self._workers.processes
        if name not in processes:
            processes[name] = self._stack.enter_context(self._build_worker(name))
        return processes[name]

    def _build_worker(self, name: str) -> Worker:
        return Worker(threads=self._threads, name=name, environment=self._environment)

    def call(self, name: str, function: str, *arguments: Any, timeout: float) -> Any:
        """Return the result of "module:function" called in the process of an engine, which has imported much of it.

        Raises as `Worker.call` does.
        """
        return self._start(name).call(function, *arguments, timeout=timeout)

    def time(
        self,
        engines: Mapping[str, EngineBuilder],
        *,
        required: Sequence[str],
        schedule: RoundSchedule = DEFAULT_SCHEDULE,
        known: Mapping[str, float] | None = None,
        is_enough: IsEnough = lambda timings: False,
        order: np.random.Generator | None = None,
        progress: Progress = lambda what, done, total: None,
    ) -> Timings:
        """Time the engines together, in shuffled turns.

        An engine that cannot run, in any build or round, is left out with the reason.

        Parameters
        ----------
        engines
            Name -> engine.
        required
            Engines that must run.
        schedule
            Builds, rounds and seconds of a burst.
        known
            Engine -> seconds that it took before on this machine, when it was quiet. If the machine is not once as
            fast as that during the first build, it is taken to have another pace now.
        is_enough
            Asked after each build from `schedule.first` on; the timing ends where it returns True.
        order
            Generator that shuffles the turns.
        progress
            Called with the current step.

        Raises
        ------
        LatbenchError
            A required engine cannot run.
        """
        workers = self._workers
        for name in {engine.worker for engine in engines.values()}:
            self._start(name)
        timing = _EngineTiming(
            engines, workers, required, schedule, known or {}, order or np.random.default_rng(0), progress
        )
        while timing.needs_build(is_enough):
            timing.time_build()
        timing.drop_models()
        return timing.result()


class _Workers(NamedTuple):
    """The processes of the engines, the placement of their cores, and a folder that they share."""

    processes: dict[str, Worker]
    placement: CorePlacement
    pool: Executor
    folder: str
    build_seconds: float


class _EngineTiming:
    """One timing while it runs: the engines that still run, the rounds taken, and the build of each round."""

    def __init__(
        self, engines: Mapping[str, EngineBuilder], workers: _Workers, required: Sequence[str],
        schedule: RoundSchedule, known: Mapping[str, float], order: np.random.Generator, progress: Progress,
    ) -> None:  # fmt: skip
        self._engines, self._workers, self._required, self._schedule = dict(engines), workers, required, schedule
        self._known, self._order, self._progress = known, order, progress
        self._left_out: dict[str, str] = {}
        self._rounds: list[Round] = []
        self._builds: list[int] = []
        self._number = 0
        self._prepared: dict[str, PreparedTask] = {}

    def needs_build(self, is_enough: IsEnough) -> bool:
        """Return whether another build is needed: until enough of them were undisturbed, or there are too many."""
        first, wanted = self._schedule.first, self._schedule.builds
        if self._number < min(first, wanted):
            return True
        undisturbed = find_undisturbed_builds(self._rounds, self._builds, self._known)
        if len(undisturbed) >= first and self._number < wanted and is_enough(self.result()):
            return False
        if self._number < wanted:
            return True
        return 0 < len(undisturbed) < wanted and self._number < wanted + EXTRA_BUILDS

    def time_build(self) -> None:
        """Build all engines once and time them in rounds; discard the build if an engine dies while it is timed."""
        self._number += 1
        self._progress(f"preparing whole models, {self._number} of {self._build_count}", None, None)
        prepared, failed = _build_engines(self._engines, self._workers)
        for name, error in failed.items():
            self._leave_out(name, error)
        self._engines = {name: self._engines[name] for name in prepared}
        # Earlier rounds forget the engines that failed, too.
        self._rounds = [{name: bursts[name] for name in self._engines} for bursts in self._rounds]
        self._prepared = prepared
        first = len(self._rounds)
        while self._needs_round(first):
            drawn = self._time_round(prepared)
            if drawn is None:
                # Engines of the same worker died with it: this build begins again, without that one.
                self._engines = {name: it for name, it in self._engines.items() if name not in self._left_out}
                del self._rounds[first:], self._builds[first:]
                self._number -= 1
                break
            self._rounds.append(drawn)
            self._builds.append(self._number)
        if self._rounds and not (compute_slowness(self._rounds, self._known) <= SLOW_ROUND).any():
            self._known = {}  # the machine has another pace now: waiting for the old one may take forever

    def drop_models(self) -> None:
        """Free the memory of the last build's models."""
        for name in self._prepared.keys() & self._engines.keys():
            with contextlib.suppress(TaskFailed, WorkerDied):
                self._workers.processes[self._engines[name].worker].drop([self._prepared[name]])

    def result(self) -> Timings:
        """Return the samples of the rounds that count."""
        undisturbed = find_undisturbed_builds(self._rounds, self._builds, self._known)
        counted = [
            i
            for number in undisturbed or range(1, self._number + 1)
            for i in select_quiet_rounds(self._rounds, self._builds, number, self._known)
        ]
        blocks = {name: [self._rounds[i][name].samples for i in counted] for name in self._engines}
        return Timings(blocks, self._left_out, [self._builds[i] for i in counted])

    @property
    def _build_count(self) -> int:
        return max(self._number, min(self._schedule.first, self._schedule.builds))

    def _leave_out(self, name: str, error: Exception) -> None:
        if name in self._required:
            raise LatbenchError(f"{name} cannot run this model: {error}") from error
        self._left_out[name] = " ".join(str(error).split())

    def _needs_round(self, first: int) -> bool:
        """Return whether this build, whose rounds begin at `first`, needs another round."""
        wanted = self._schedule.rounds
        if len(self._rounds) - first >= MAX_ROUND_FACTOR * wanted:
            return False
        quiet = sum(slow <= SLOW_ROUND for slow in compute_slowness(self._rounds, self._known)[first:])
        if quiet >= wanted:
            return False
        done, total = (self._number - 1) * wanted + quiet, self._build_count * wanted
        self._progress("timing whole models in turns", done, total)
        return True

    def _time_round(self, prepared: Mapping[str, PreparedTask]) -> Round | None:
        """Return a burst of each engine, taken in a shuffled order; None if an engine failed and was left out."""
        turns = list(prepared)
        self._order.shuffle(turns)
        drawn: dict[str, Burst] = {}
        tries = MAX_BURST_TRIES
        for name in turns:
            worker = self._workers.processes[self._engines[name].worker]
            burst = partial(worker.burst, prepared[name], self._schedule.seconds, timeout=BURST_SECONDS)
            try:
                drawn[name], together = self._workers.placement.together(burst, tries)
            except (TaskFailed, WorkerDied) as error:
                self._leave_out(name, error)
                return None
            if not together:  # the round is over: it will not count
                drawn[name], tries = replace(drawn[name], preempted=True), 1
        return {name: drawn[name] for name in prepared}


def _build_engines(
    engines: Mapping[str, EngineBuilder], workers: _Workers
) -> tuple[dict[str, PreparedTask], dict[str, Exception]]:
    """Build all engines in new processes, different workers at the same time; return the built and the failed."""
    prepared: dict[str, PreparedTask] = {}
    failed: dict[str, Exception] = {}

    def build(name_of_worker: str) -> None:
        worker, renewed = workers.processes[name_of_worker], False
        for name, engine in engines.items():
            if engine.worker != name_of_worker:
                continue
            arguments = (*engine.arguments, workers.folder) if engine.shares else engine.arguments
            try:
                if not renewed:
                    worker.renew(engine.function)
                    renewed = True
                prepared[name] = worker.prepare(engine.function, *arguments, timeout=workers.build_seconds)
            except (TaskFailed, WorkerDied) as error:
                failed[name] = error

    list(workers.pool.map(build, dict.fromkeys(engine.worker for engine in engines.values())))
    return {name: prepared[name] for name in engines if name in prepared}, failed
