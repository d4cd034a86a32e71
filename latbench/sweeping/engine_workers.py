"""The worker processes of a machine, one per engine, and in them the points of the present block."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from time import perf_counter
from typing import Any

from latbench.runners.worker_process import PreparedTask, Worker, WorkerDied
from latbench.sweeping.core_placement import CORES_APART
from latbench.sweeping.roofline_pace import SweepRoofline
from latbench.sweeping.settings import TimeLeft
from latbench.sweeping.sweep_machine import SweepMachine
from latbench.timing.sampling import Burst
from latbench.workloads.points import Point


class EngineWorkers:
    """A machine's workers and the points that they hold. `time_left` bounds every request to them."""

    def __init__(self, machine: SweepMachine, time_left: TimeLeft) -> None:
        self.machine, self._time_left = machine, time_left
        self.pace: SweepRoofline[Any] | None = None
        self.without_pace = False  # whether the pace could not be measured
        self._asked_for_pace = False
        self._workers: dict[str, Worker] = {}
        self._prepared: dict[Point, PreparedTask] = {}
        self._served: dict[str, int] = {}  # the generation in which each worker got its first point

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.close()
        if self.pace is not None:
            self.pace.close()

    def kill(self) -> None:
        """Kill the workers while other threads wait for their answers; `restart` when no thread waits any more."""
        for worker in list(self._workers.values()):
            worker.kill()

    def restart(self) -> None:
        """End the workers that hold points; the next request starts new ones."""
        for worker in self._workers.values():
            worker.close()

    def keep_pace(self) -> None:
        """Time the reference kernels before a burst, if it is their turn.

        The first call, and no other, raises TaskFailed or WorkerDied where they cannot run. Points are worth
        measuring without them, if their rows say so.
        """
        if not self._asked_for_pace:
            self._asked_for_pace = self.without_pace = True
            self.pace = self.machine.pace(self._time_left.beside)
            self.without_pace = False
        if self.pace is not None:
            self.pace.turn()

    def prepare_on_host(self, point: Point) -> None:
        """Do the part of the preparation that leaves the device alone, where the machine separates it."""
        if self.machine.host_task is not None:
            worker = self._worker(point.backend)
            worker.call(self.machine.host_task, point, timeout=self._prepare_seconds(worker))

    def prepare(self, point: Point) -> None:
        """Prepare the point in the worker of its engine."""
        worker = self._worker(point.backend)
        seconds = self._prepare_seconds(worker)
        try:
            self._prepared[point] = worker.prepare(self.machine.task, point, timeout=seconds)
        finally:
            self._served[worker.name] = worker.generation

    def _prepare_seconds(self, worker: Worker) -> float:
        """Return the time limit; a process may take longer for its first point, because it imports and starts the
        device.
        """
        served = worker.generation and self._served.get(worker.name) == worker.generation
        return self.machine.prepare_seconds + (0 if served else self.machine.start_seconds)

    def prepared(self, point: Point) -> PreparedTask:
        """Return the point as it was prepared last; its worker may be gone."""
        return self._prepared[point]

    def holds(self, point: Point) -> bool:
        """Return whether the point is ready; false once its worker died."""
        return self._worker(point.backend).holds(self._prepared[point])

    def burst(self, point: Point, seconds: float) -> Burst:
        """Sample the point for about `seconds`."""
        worker = self._worker(point.backend)
        taken = worker.burst(self._prepared[point], seconds, timeout=self.machine.burst_seconds)
        if self.pace is None:
            return taken
        began = perf_counter()
        apart = self.pace.apart()
        taken = replace(
            taken, rest_seconds=taken.rest_seconds + perf_counter() - began
        )  # does not count as the point's time
        return replace(taken, preempted=True, reasons=(*taken.reasons, CORES_APART)) if apart else taken

    def drop(self) -> None:
        """Free all points; the workers keep what they imported and compiled."""
        for worker in self._workers.values():
            with contextlib.suppress(WorkerDied):  # its memory is free already
                worker.drop(self._prepared.values(), timeout=self.machine.burst_seconds)
        self._prepared.clear()

    def _worker(self, backend: str) -> Worker:
        process = self.machine.process(backend)
        if process not in self._workers:
            self._workers[process] = worker = self.machine.worker(process)
            worker.seconds_left = self._time_left.points
        return self._workers[process]
