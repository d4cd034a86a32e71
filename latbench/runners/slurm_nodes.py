"""Whole nodes of a Slurm cluster, each of which does one thing at a time; as `latbench.runners.ray_nodes`.

    with SlurmNodes("a100", ["nodes=4", "partition=gpu"]) as nodes:
        answers = nodes.ask("package.module:look")                      # each node that Slurm has started by then
        for item, answer in nodes.run(("package.module:tool",), items, lambda item: (item,)):
            ...

A node is a job that has a machine for itself and waits there for work. Slurm queues and places jobs, and tells which
jobs wait and why; submitit submits them. A job connects to this process by TCP with a key that only its submission
holds. It does what it is asked until the connection ends, so each side notices at once when the other is gone. The
work of a lost job goes to another, and the lost job is submitted again as long as that makes progress.

Jobs are watched with squeue, never with sacct, because clusters may run without accounting.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, Self

from latbench.base.files import find_cache_folder
from latbench.errors import EnvironmentUnusable, LatbenchError, UsageError
from latbench.machines.devices import make_slug
from latbench.machines.processors import SLURM_VARIABLES
from latbench.runners.block_scheduler import (
    ASK_SECONDS,
    MOST_LOSSES,
    FunctionCall,
    LostNodes,
    Node,
    WholeNodes,
    convert_node_error,
    take_first_line,
)
from latbench.runners.worker import load_function

MINUTES = 60  # default time limit of a job
TICK_SECONDS = 10.0
MESSAGE_SECONDS = 30  # longest gap within a message
SILENT_SECONDS = 60  # silence after which a machine counts as lost
_OURS = {"array", "error", "exclusive", "job-name", "ntasks", "open-mode", "output", "wrap"}


@dataclass(eq=False)
class _Job:
    """A node's job from its submission on; connected once Slurm has started it.

    Parameters
    ----------
    request
        The present work, or the work to do once connected.
    held
        Whether a callable waits there, or will.
    """

    handle: Any
    node: Node
    host: str = ""
    connection: Connection | None = None
    request: tuple[Any, ...] = ()
    held: bool = False

    def __str__(self) -> str:
        return f"{self.host} (job {self.handle.job_id})" if self.host else f"job {self.handle.job_id}"

    def ask(self, *request: Any) -> None:
        """Send the request now, or as soon as the job is connected."""
        self.request = request
        if self.connection is not None:
            with contextlib.suppress(OSError):  # the wait for the answer reports it
                self.connection.send(request)

    def end(self) -> None:
        """End the job, whatever it does now."""
        if self.connection is not None:
            self.connection.close()
        subprocess.run(["scancel", self.handle.job_id], capture_output=True, check=False)

    def why_lost(self) -> str:
        """Return why the job was lost, as far as its log says so."""
        log = ""
        with contextlib.suppress(OSError):
            log = self.handle.paths.stderr.read_text(errors="replace")
        errors = re.findall(r"slurmstepd: error: \**\s*(.+?)\s*\**$", log, re.M) or (
            log.split("\n") if not self.host else []
        )
        ended = "its process has ended" if self.host else "it ended before it was heard of"
        last = next((line.strip() for line in reversed(errors) if line.strip()), ended)
        return f"{self} was lost: {last}"


class SlurmNodes(WholeNodes):
    """As many nodes as the options ask for.

    Parameters
    ----------
    wanted
        The GPU as the user calls it, one of which each node must have; None: CPUs alone.
    options
        Texts such as "nodes=4" (default 1); all others are options of sbatch, such as "time=60" (minutes, the
        default).
    tell
        Gets sentences on what it waits for.

    Raises
    ------
    UsageError
        An option is invalid.
    EnvironmentUnusable
        submitit or Slurm is not installed, or Slurm refuses the job because no node will ever fit.
    """

    def __init__(
        self, wanted: str | None, options: Sequence[str] = (), tell: Callable[[str], None] = lambda line: None
    ) -> None:
        super().__init__()
        count, given = parse_slurm_options(options)
        self._tell = tell
        self._jobs: dict[str, _Job] = {}
        self._fruitless: Counter[str] = Counter()  # losses of a node since its last result
        self._queued: dict[str, str] | None = None  # Slurm's latest answer
        self._stack = contextlib.ExitStack()
        try:
            self._executor = self._connect(wanted, given)
            self.nodes = [Node(str(number), f"{number} of {count}") for number in range(1, count + 1)]
            for node in self.nodes:
                self._submit(node)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all nodes and kill what still runs there."""
        while self._jobs:
            self._jobs.popitem()[1].end()
        self._stack.close()

    def _connect(self, wanted: str | None, given: dict[str, str]) -> Any:
        try:
            import submitit
        except ImportError:
            raise EnvironmentUnusable(
                "--on slurm needs submitit, it is not installed here: pip install submitit"
            ) from None
        logging.getLogger("submitit").setLevel(logging.CRITICAL)  # it would print to stdout, which is for results
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise EnvironmentUnusable(
                "there is no Slurm here, no command sbatch: sweep from where jobs are submitted"
            )
        if wanted is not None:
            given = {"gres": f"gpu:{make_slug(wanted)}:1", **given}
        shared = find_cache_folder().absolute() / "slurm"
        try:
            shared.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(dir=shared)
        except OSError as error:
            raise EnvironmentUnusable(
                f"cannot write {shared}: {error.strerror}; LATBENCH_CACHE names a folder that all nodes share"
            ) from error
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        self._server = self._stack.enter_context(socket.create_server(("", 0)))
        self._key = secrets.token_bytes(32)
        self._given = " ".join(f"--{key}={value}" for key, value in given.items()) or "its usual options"
        executor = submitit.SlurmExecutor(folder)
        # Without srun, which might bind the task to one core; a batch script has the whole machine.
        executor.update_parameters(
            job_name="latbench", time=MINUTES, mem="0", exclusive=True, use_srun=False,
            additional_parameters={"no-requeue": True, **given},  # this process resubmits lost jobs
        )  # fmt: skip
        return executor

    def _submit(self, node: Node) -> None:
        address = socket.gethostname(), self._server.getsockname()[1]
        try:
            # submitit prints its exceptions there too.
            with contextlib.redirect_stderr(io.StringIO()), _forget_own_grant():
                handle = self._executor.submit(run_node_job, address, self._key, node.id)
        except (RuntimeError, OSError) as error:
            reason = re.sub(r"^sbatch: (error: |fatal: )?", "", take_first_line(error)).rstrip(".")
            raise EnvironmentUnusable(
                f"Slurm takes no job with {self._given}: {reason}; `sinfo -o '%P %G'` lists its partitions and GPUs, "
                "--slurm partition=NAME or gres=gpu:NAME:1 asks for them"
            ) from None
        self._jobs[node.id] = _Job(handle, node)

    def keep(self, nodes: Iterable[Node]) -> None:
        """Use no other nodes than these from now on, among those that have started."""
        kept = {node.id for node in nodes}
        for job in [job for job in self._jobs.values() if job.connection is not None and job.node.id not in kept]:
            self._leave(job)

    def ask(self, function: str, *args: Any) -> dict[Node, Any]:
        """Return the answer of "module:function" on each node that has started when the first one has.

        Raises the function's LatbenchError, and EnvironmentUnusable where it cannot be called.
        """
        reason = "no node is left"
        self._tell(
            f"waiting for Slurm to start one of {len(self._jobs)} jobs: {', '.join(map(str, self._jobs.values()))}"
        )
        told_why = ""
        while self._jobs and not any(job.connection for job in self._jobs.values()):
            for job in self._wait(list(self._jobs.values())):
                reason = job.why_lost()
                self._leave(job)
            if (why := self._why_waiting()) not in (told_why, ""):
                self._tell(f"Slurm says why they wait: {why}")
                told_why = why
        asked = {job for job in self._jobs.values() if job.connection is not None}
        for job in asked:
            job.ask("ask", function, args)
        answers: dict[Node, Any] = {}
        end = time.monotonic() + ASK_SECONDS
        while asked:
            for job in self._wait(list(asked)):
                asked.remove(job)
                answer = self._answer(job)
                if isinstance(answer, LostNodes):
                    reason = answer.reasons[0]
                    self._leave(job)
                else:
                    answers[replace(job.node, name=str(job))] = answer
            if asked and time.monotonic() > end:
                raise EnvironmentUnusable(f"{asked.pop()} gives no answer for {ASK_SECONDS:g} s")
        if not answers:
            raise EnvironmentUnusable(reason)
        return answers

    def _leave(self, job: _Job) -> None:
        """Do not use this node any more."""
        self._jobs.pop(job.node.id, None)
        self.nodes.remove(job.node)
        job.end()

    def _take_all(self, prepare: FunctionCall) -> None:
        for node in list(self.nodes):
            if node.id not in self._jobs:
                try:
                    self._submit(node)
                except EnvironmentUnusable as error:
                    self.nodes.remove(node)
                    self.lost.setdefault(node.name, str(error))
                    continue
            job = self._jobs[node.id]
            if not job.held:
                job.held = True
                self._starting[job] = node
                job.ask("prepare", *prepare)

    def _give(self, node: Node, arguments: tuple[Any, ...]) -> _Job:
        job = self._jobs[node.id]
        job.ask("call", arguments)
        return job

    def _wait(self, jobs: Sequence[_Job]) -> list[_Job]:
        connected = {job.connection: job for job in jobs if job.connection is not None}
        ready = wait([self._server, *connected], TICK_SECONDS)
        if self._server in ready:
            self._welcome()
        if ready:
            return [connected[one] for one in ready if one in connected]
        # A machine without power sends nothing, and a job may end before it connects.
        self._queued = list_queued_jobs(job.handle.job_id for job in self._jobs.values())
        return [job for job in jobs if self._queued is not None and job.handle.job_id not in self._queued]

    def _why_waiting(self) -> str:
        """Return Slurm's latest reasons for the jobs that it has not started."""
        jobs: dict[str, list[str]] = {}
        for job in self._jobs.values():
            reason = (self._queued or {}).get(job.handle.job_id, "None")
            if reason != "None" and job.connection is None:
                jobs.setdefault(reason, []).append(str(job))
        return "; ".join(f"{reason} ({', '.join(which)})" for reason, which in jobs.items())

    def _welcome(self) -> None:
        """Accept a connection: a job's, if it has the key."""
        with contextlib.suppress(OSError, EOFError, AuthenticationError, pickle.UnpicklingError):
            connection = _connection(self._server.accept()[0], patient=False)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            node, host = connection.recv()
            if (job := self._jobs.get(node)) is not None and job.connection is None:
                job.connection, job.host = connection, host
                if job.request:
                    job.ask(*job.request)

    def _outcome(self, job: _Job, node: Node) -> Any:
        answer = self._answer(job)
        if isinstance(answer, LostNodes):
            self.lost.setdefault(str(job), answer.reasons[0])
            self._fruitless[node.id] += 1
            if self._fruitless[node.id] >= MOST_LOSSES:
                self._leave(job)
            else:
                self._jobs.pop(node.id).end()
            return answer
        if job.request[0] == "call":
            self._fruitless[node.id] = 0
        self._idle.append(node)
        return answer

    def _do_without(self, node: Node, why: str) -> None:
        job = self._jobs[node.id]
        self._leave(job)
        self.lost.setdefault(str(job), why)

    def _answer(self, job: _Job) -> Any:
        """Return a job's answer to its request, or LostNodes; raise what it raised."""
        try:
            if job.connection is None:
                raise EOFError
            kind, value = job.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            return LostNodes((job.why_lost(),))
        if kind == "ok":
            return value
        if isinstance(value, BaseException):
            raise convert_node_error(value, replace(job.node, name=str(job))) or value
        raise RuntimeError(f"on node {job}:\n{value}")


def list_queued_jobs(numbers: Iterable[str]) -> dict[str, str] | None:
    """Return those of the jobs that have not ended, with Slurm's reason for waiting; "None" for running ones.

    None where Slurm does not answer.
    """
    # Such variables filter squeue's output.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    command = ["squeue", "--noheader", "--format=%A %r", f"--jobs={','.join(numbers)}"]
    try:
        asked = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
    except OSError:
        return None
    if asked.returncode and "Invalid job id" not in asked.stderr:  # the answer for a job that ended minutes ago
        return None
    lines = (line.partition(" ") for line in asked.stdout.splitlines())
    return {number: reason.strip() for number, _, reason in lines}


def parse_slurm_options(options: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Return the number of nodes in `options`, and the options of sbatch. Raises UsageError for invalid ones."""
    given: dict[str, str] = {}
    for option in options:
        found = re.fullmatch(r"-{0,2}([a-z][a-z0-9_-]*)=(\S.*)", option)
        if found is None:
            raise UsageError(f"--slurm takes key=value, such as partition=gpu, account=me or nodes=4, not {option!r}")
        key = found[1].replace("_", "-")
        if key in _OURS or key.startswith("ntasks-"):
            raise UsageError(f"--slurm {key}= is not allowed: a job is one process that has a node for itself")
        if key == "clusters":  # job numbers are unique within one cluster only
            raise UsageError("--slurm clusters= is not allowed: sweep from where that cluster's jobs are submitted")
        given[key] = found[2]
    count = given.pop("nodes", "1")
    if not (count.isdecimal() and int(count) > 0):
        raise UsageError(f"--slurm nodes= takes a number of nodes, not {count!r}")
    return int(count), given


@contextlib.contextmanager
def _forget_own_grant() -> Iterator[None]:
    """Hide what Slurm granted to this process, because jobs inherit the variables that Slurm does not set anew."""
    own = {name: os.environ.pop(name) for name in SLURM_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(own)


def _connection(peer: socket.socket, *, patient: bool) -> Connection:
    """Return a connection that notices a dead machine, and unless `patient` a stop within a message."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS // 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENT_SECONDS // 6),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ):
        peer.setsockopt(level, option, value)
    peer.setblocking(True)
    if not patient:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            peer.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_SECONDS, 0))
    return Connection(peer.detach())


# On the nodes ------------------------------------------------------------------------------------------------------


def run_node_job(address: tuple[str, int], key: bytes, node: str) -> None:
    """Run a node's job: do what the process at `address` asks for, until it is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it, and scancel would have to wait
    try:
        peer = socket.create_connection(address, timeout=SILENT_SECONDS)
    except OSError as error:
        raise EnvironmentUnusable(
            f"{socket.gethostname()} cannot reach {address[0]}:{address[1]} ({error}): start the sweep on a node"
        ) from None
    with _connection(peer, patient=True) as connection, contextlib.suppress(EOFError, ConnectionError):
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send((node, socket.gethostname()))
        held: Callable[..., Any] | None = None
        while True:
            request = connection.recv()
            try:
                match request:
                    case ("ask", function, args):
                        answer: Any = load_function(function)(*args)
                    case ("prepare", function, *args):
                        answer, held = None, load_function(function)(*args)
                    case ("call", args):
                        assert held is not None
                        answer = held(*args)
                connection.send(("ok", answer))
            except (LatbenchError, OSError, ImportError) as error:
                connection.send(("raised", error))
            except Exception:  # noqa: BLE001 - whatever it is, it is told where somebody reads it
                connection.send(("raised", traceback.format_exc()))
