"""A machine with its engines, which measures blocks of points.

All points of a block are prepared and checked first, and then sampled in turn. A failure is a row as well. A kernel
that has killed its process twice is not tried again in the run.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from datetime import UTC, datetime
from typing import Any, Self

import numpy as np

from latbench.base.environments import hash_environment
from latbench.base.files import delay_interrupts
from latbench.runners.worker_process import TaskFailed, WorkerDied
from latbench.sweeping.engine_workers import EngineWorkers
from latbench.sweeping.settings import NO_ROOFLINE, Row, RowWriter, SweepSettings, TimeLeft, TimeUsedUp
from latbench.sweeping.sweep_machine import SweepMachine, estimate_cpu_bytes
from latbench.tables.plausibility import MOST_UTILISATION, explain_impossible
from latbench.timing.sampling import NOISY_ERROR, Burst, Sampler, Timing, sample_interleaved
from latbench.workloads.minimum_work import compute_inside_share
from latbench.workloads.points import Point, format_shape

MOST_DEATHS = 2  # of workers per kernel and format; another would cost as much time again

_FAILURES = {
    "Unsupported": "unsupported", "WrongResult": "incorrect", "MemoryError": "oom", "OutOfMemoryError": "oom",
}  # fmt: skip

_Outcome = dict[str, Any]


class Bench:
    """A machine with its engines, ready to measure blocks of points."""

    def __init__(self, machine: SweepMachine, seed: int, settings: SweepSettings) -> None:
        self.machine, self.seed, self.settings = machine, seed, settings
        self._time_left = TimeLeft()
        self.engines = EngineWorkers(
            machine, TimeLeft(lambda: self._time_left.points(), lambda: self._time_left.beside())
        )
        self.environment = machine.environment()
        if settings.sessions > 1:
            environment = {**self.environment, "sessions": settings.sessions}
            self.environment = {**environment, "env_id": hash_environment(environment)}
        self.deaths: dict[str, list[str]] = {}  # reasons of worker deaths, by kernel
        self.block = 0
        self.chance = 0
        self._tell: Callable[[str, int], None] = lambda activity, finished: None
        self._turn = threading.Lock()  # one process at a time on the device
        self._stop = threading.Event()  # stops the preparation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engines.close()

    def split_to_fit(self, points: list[Point]) -> Iterator[list[Point]]:
        """Yield `points` in parts that fit into the available memory."""
        return split_to_fit(points, self.machine.available_bytes(), self.machine.needed_bytes)

    def measure_block(
        self,
        points: list[Point],
        keep: RowWriter,
        *,
        chance: int = 0,
        tell: Callable[[str, int], None] = lambda activity, finished: None,
        time_left: TimeLeft | None = None,
    ) -> None:
        """Measure `points` in turns and pass what is finished to `keep`, also when interrupted.

        Where other processes take the cores all the time, a steady median counts as noisy. On the last chance it is
        accepted, and the row's flags say so. Raises TimeUsedUp when the time is over, also in the middle of a
        request.

        Parameters
        ----------
        points
            The points.
        keep
            Gets the environment and the rows.
        chance
            How often the points were measured before because they were disturbed.
        tell
            Gets the present activity and the number of points with an outcome.
        time_left
            Bounds every request; None: no limit.
        """
        self.chance, self._tell, self._time_left = chance, tell, time_left or TimeLeft()
        rows: list[Row] = []
        started, watched = datetime.now(UTC), self.machine.watch()
        try:
            for point, outcome in self._outcomes(points):
                rows.append(self._build_row(point, outcome, len(rows), started))
        finally:
            if rows:
                with delay_interrupts():
                    state = watched()
                    keep(self.environment, [{**state, **row} for row in rows])
        self.block += 1
        self.engines.drop()

    def _outcomes(self, points: list[Point]) -> Iterator[tuple[Point, _Outcome]]:
        """Yield each point with its timing, or with its failure, as they finish."""
        failed = set()
        for number, failure in self._prepare_all(points):
            if failure is not None:
                failed.add(number)
                yield points[number], failure
        ready = {str(number): point for number, point in enumerate(points) if number not in failed}
        done = len(failed)
        # Points that died with a worker are prepared again here, or at the end of the burst of the death. They are
        # never prepared in a burst of their own, where the time would count.
        failures = self._restore(ready)

        def sampler(name: str) -> Sampler:
            def sample(seconds: float) -> Burst:
                self._check_time()
                failure = failures.get(name) or self._refuse_deadly(ready[name])
                if failure is None:
                    try:
                        return self.engines.burst(ready[name], seconds)
                    except (TaskFailed, WorkerDied) as error:
                        failure = self._note_failure(ready[name], error)
                failures[name] = failure
                others = {other: point for other, point in ready.items() if other not in failures}
                failures.update(self._restore(others))
                return Burst([])

            return sample

        order = random.Random(f"{self.seed} {self.block}")

        def renew(session: int) -> None:
            self._tell(f"preparing again, session {session + 1} of {self.settings.sessions}", done)
            self.engines.restart()
            left = [name for name in ready if name not in failures]
            order.shuffle(left)
            failures.update(self._restore({name: ready[name] for name in left}))

        finished = sample_interleaved(
            {name: sampler(name) for name in ready},
            self.settings.stop_rule,
            order=order,
            between=self._keep_pace,
            renew=renew,
        )
        activity = f"timing: {len(points)} points, first {format_shape(points[0].shape)}"
        self._tell(activity, done)
        for count, (name, timing) in enumerate(finished, start=done + 1):
            self._tell(activity, count)
            done, point = count, ready.pop(name)
            yield point, failures.get(name) or self._build_outcome(point, timing)

    def _keep_pace(self) -> None:
        """Time the reference kernels before a burst, if it is their turn."""
        try:
            self.engines.keep_pace()
        except (TaskFailed, WorkerDied) as error:
            self._tell(f"no roofline: {error}", 0)

    def _prepare_all(self, points: Sequence[Point]) -> Iterator[tuple[int, _Outcome | None]]:
        """Yield the number of each point when it is ready (None) or has failed.

        Points are prepared one after the other, or in parallel where the machine has threads for its processes.
        """
        threads = self.machine.threads_of_processes
        if threads is None:
            for number, point in enumerate(points):
                self._tell(f"preparing: {point}", 0)
                yield number, self._prepare(point)
            return
        by_process: dict[str, list[int]] = {}
        for number, point in enumerate(points):
            by_process.setdefault(self.machine.process(point.backend), []).append(number)
        ended: queue.SimpleQueue[tuple[int, _Outcome | BaseException | None]] = queue.SimpleQueue()
        self._stop.clear()

        def of_one_process(numbers: Sequence[int]) -> None:
            for number in numbers:
                try:
                    ended.put((number, self._prepare(points[number])))
                except BaseException as error:  # noqa: BLE001 - raised again by who waits for it
                    ended.put((number, error))
                    return

        self._tell(f"preparing: {len(points)} points in {len(by_process)} processes", 0)
        running = [threads.submit(of_one_process, numbers) for numbers in by_process.values()]
        try:
            for _ in points:
                number, outcome = ended.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                self._tell(f"preparing: {points[number]} is ready", 0)
                yield number, outcome
        except BaseException:
            self._stop.set()
            self.engines.kill()  # ends the waits of all threads
            wait(running)
            self.engines.restart()
            raise
        finally:
            self._stop.clear()

    def _prepare(self, point: Point) -> _Outcome | None:
        """Prepare a point; return its failure if that is impossible."""
        self._check_time()
        if (skipped := self._refuse_deadly(point)) is not None:
            return skipped
        try:
            self.engines.prepare_on_host(point)
            with self._turn:
                self._check_time()
                self.engines.prepare(point)
        except (TaskFailed, WorkerDied) as error:
            return self._note_failure(point, error)
        return None

    def _check_time(self) -> None:
        left = self._time_left.points()
        if self._stop.is_set() or (left is not None and left <= 0):
            raise TimeUsedUp

    def _restore(self, points: Mapping[str, Point]) -> dict[str, _Outcome]:
        """Prepare those of `points` again that died with their workers; return the failures."""
        failures: dict[str, _Outcome] = {}
        while lost := [
            name for name, point in points.items() if name not in failures and not self.engines.holds(point)
        ]:
            for name in lost:
                if (failure := self._prepare(points[name])) is not None:
                    failures[name] = failure
        return failures

    def _note_failure(self, point: Point, failure: TaskFailed | WorkerDied) -> _Outcome:
        if isinstance(failure, WorkerDied) and failure.reason == "late":
            raise TimeUsedUp
        if isinstance(failure, WorkerDied) and failure.reason in ("crash", "timeout"):
            self.deaths.setdefault(_kernel(point), []).append(str(failure))
        return classify_failure(failure)

    def _refuse_deadly(self, point: Point) -> _Outcome | None:
        """Return the outcome of a point that is not tried, because its kernel killed too many workers."""
        deaths = self.deaths.get(_kernel(point), [])
        if len(deaths) < MOST_DEATHS:
            return None
        reason = f"not tried in this run: {len(deaths)} workers died of {_kernel(point)} points"
        return {"status": "error", "error": f"{reason}, the last because {deaths[-1]}"}

    def _build_outcome(self, point: Point, timing: Timing) -> _Outcome:
        prepared = self.engines.prepared(point)
        known = timing.relative_error <= NOISY_ERROR
        beside, slow_spell = self._compare_with_reference(point, timing, prepared.facts)
        why = explain_impossible(timing.samples, beside.get("roofline_seconds"))
        usual, meanwhile = (beside.get(name, 1.0) for name in ("reference_usual_seconds", "reference_seconds"))
        faster_than_usual = meanwhile * MOST_UTILISATION < usual
        if (why is not None or faster_than_usual) and self.engines.pace is not None and self.engines.pace.doubt():
            beside, slow_spell = self._compare_with_reference(point, timing, prepared.facts)
            why = explain_impossible(timing.samples, beside.get("roofline_seconds"))
        facts = dict(prepared.facts)
        families = facts.pop("kernel_families", None)
        flags = (
            "preempted" if timing.preempted else "",
            "slow_spell" if slow_spell else "",
            NO_ROOFLINE if self.engines.without_pace else "",
            facts.get("flags"),
        )
        outcome = {
            "backend_version": self.machine.version(point, families),
            "status": self._status(known, timing.preempted or slow_spell),
            "stop_reason": timing.stop_reason,
            "samples_seconds": timing.samples,
            "burst_error": timing.burst_error,
            "discarded_samples": timing.discarded,
            "inner_loops": prepared.inner_loops,
            "drift_ratio": timing.drift(),
            "event_reasons": "+".join(timing.reasons),
            **beside,
            **self.machine.columns(timing.states),
            **facts,
            "flags": "+".join(flag for flag in flags if flag),
        }
        if why is not None:
            return outcome | {"status": "impossible", "error": why, "samples_seconds": None, "burst_error": None}
        if outcome["status"] == "throttled":
            by = outcome["event_reasons"] or "an unknown reason"
            outcome["error"] = f"slowed down by {by} on try {self.chance + 1} of {1 + self.settings.noisy_chances}"
        return outcome

    def _compare_with_reference(
        self, point: Point, timing: Timing, facts: Mapping[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """Return the columns that compare a time with the roofline and the reference, and whether it is a slow spell.

        In a slow spell the machine is slower than in the rest of this sweep.
        """
        pace = self.engines.pace
        if pace is None or "flop_nnz" not in facts or "bytes_min" not in facts:
            return {}, False
        flop, size = facts["flop_nnz"] * compute_inside_share(point.shape), facts["bytes_min"]
        columns = {"roofline_seconds": pace.seconds(point, facts.get("kernel_used", ""), flop, size)}
        reference = pace.reference([burst.began for burst in timing.counted], flop, size)
        if reference is None:
            return columns, False
        # Each burst is corrected by the pace around it; the ratio of the medians is the slowdown.
        at_usual_pace = [
            reference.usual_seconds / seconds * sample
            for burst, seconds in zip(timing.counted, reference.seconds, strict=True)
            for sample in burst.samples
        ]
        corrected, ratio = float(np.median(at_usual_pace)), 1.0
        if corrected > 0:  # a zero time is impossible at any pace
            ratio = float(np.median(timing.samples)) / corrected
        columns |= {
            "reference_seconds": ratio * reference.usual_seconds,
            "reference_usual_seconds": reference.usual_seconds,
        }
        return columns, reference.slow_spell

    def _status(self, known: bool, disturbed: bool) -> str:
        if disturbed and self.machine.disturbed_status != "noisy":
            return self.machine.disturbed_status
        return "ok" if known and (self.chance == self.settings.noisy_chances or not disturbed) else "noisy"

    def _build_row(self, point: Point, outcome: _Outcome, seq: int, started: datetime) -> dict[str, Any]:
        return {
            **point.key(),
            "env_id": self.environment["env_id"],
            "seq": seq,
            "started_at": started,
            "backend_version": self.machine.version(point),
            "device_uuid_hash": self.environment["device_uuid_hash"],
            "timer": self.machine.timer,
            "pinning": "none",
            **outcome,
        }


def _kernel(point: Point) -> str:
    """Return what a point runs, in words: its backend, the requested kernel if any, and its format."""
    asked = "" if point.kernel == "auto" else f" {point.kernel}"
    return f"{point.backend}{asked} {point.pattern.format}"


def classify_failure(failure: TaskFailed | WorkerDied) -> _Outcome:
    """Return the status and the error of a point that failed."""
    if isinstance(failure, WorkerDied):
        status = failure.reason if failure.reason in ("timeout", "oom") else "error"
        return {"status": status, "error": str(failure)}
    status = _FAILURES.get(failure.kind, "error")
    return {"status": status, "error": failure.message if status in ("unsupported", "incorrect") else str(failure)}


def split_to_fit(
    points: list[Point], available: float, needed: Callable[[Point], float] = estimate_cpu_bytes
) -> Iterator[list[Point]]:
    """Yield `points` in parts that together need at most `available` bytes, at least one point each."""
    part: list[Point] = []
    total = 0.0
    for point in points:
        if part and total + needed(point) > available:
            yield part
            part, total = [], 0.0
        part.append(point)
        total += needed(point)
    if part:
        yield part
