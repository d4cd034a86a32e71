"""A campaign of faults against real sweeps: no finished point is lost, none is corrupt, and each fault is reported.

Kernels, workers, the sweep's own process, the disk, clocks and files are harmed, more than a hundred times, as a
generator with a fixed seed draws it; sweeps are real processes with real workers, on points that take a millisecond
(faulty.py). After each fault the table is held against what is known to be in it. How fast the machine is decides
when a fault strikes, but not whether: a sweep that ended before was not harmed, and another one is.

A point is finished when the sweep has written it. A fault is reported when what it cost has a row with a status and a
reason, when the sweep ends with one line and its exit code, or when `validate` names the damaged file; who is killed
can say nothing, and the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import faulty
import numpy as np
import psutil
import pytest

from latbench.errors import BadData
from latbench.tables.schema import TIMED
from latbench.tables.table import read_arrow_table, read_table
from latbench.tables.validate import validate_table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("own_lock")]

Which = tuple[int, float, int]
"""A point: rows of its layer, sparsity, what goes wrong."""


class Campaign:
    """What was injected so far, by kind, and how it went."""

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.corrupt: Counter[str] = Counter()
        self.reported: Counter[str] = Counter()
        self.complaints: list[str] = []

    def note(self, kind: str, *, reported: bool, complaint: str = "") -> None:
        self.injected[kind] += 1
        self.reported[kind] += reported
        if not reported:
            self.complaints.append(f"{kind}: {complaint}")

    def __str__(self) -> str:
        head = f"{'fault':<28} {'injected':>8} {'lost':>5} {'corrupt':>8} {'reported':>8}"
        columns = (self.injected, self.lost, self.corrupt, self.reported)
        lines = [
            "{:<28} {:>8} {:>5} {:>8} {:>8}".format(kind, *(column[kind] for column in columns))
            for kind in self.injected
        ]
        every = "{:<28} {:>8} {:>5} {:>8} {:>8}".format("all", *(column.total() for column in columns))
        return "\n".join([head, *lines, every, *self.complaints])


class Table:
    """A table that faults are injected into, and all that is known to be in it."""

    def __init__(self, campaign: Campaign, folder: Path) -> None:
        self.campaign, self.folder = campaign, folder
        folder.parent.mkdir(exist_ok=True)
        self.log = folder.parent / "finished.log"
        self.log.touch()
        self.known: set[str] = set()  # parts that hold finished points
        self.deleted: set[str] = set()  # parts that the campaign itself deleted
        self.wanted: list[Which] = []  # points whose kernels are fine
        self._rows = itertools.count(1)

    def fine(self, count: int) -> list[Which]:
        """New points whose kernels are fine, a block each."""
        fresh = [(next(self._rows), 0.5, faulty.FINE) for _ in range(count)]
        self.wanted += fresh
        return fresh

    def start(self, points: Sequence[Which], environment: dict[str, str] | None = None, **order: Any) -> Sweep:
        order |= {"folder": str(self.folder), "log": str(self.log), "points": points}
        return Sweep(self, order, environment or {})

    def announced(self) -> list[str]:
        """The parts that sweeps said they had finished."""
        return self.log.read_text().split()

    def check(self, kind: str, damaged: set[Path] = frozenset()) -> None:  # type: ignore[assignment]
        """Every part that was ever there is there, and says what its name promises; nothing is corrupt but what is
        `damaged` on purpose.
        """
        spoilt = {path.name for path in damaged}
        there = {path.name for path in self.folder.glob("part-*.parquet")}
        self.known = (self.known | there | set(self.announced())) - spoilt - self.deleted
        kept = {name for name in self.known if self._is_whole(self.folder / name)}
        if lost := self.known - kept:
            self.campaign.lost[kind] += len(lost)
            self.campaign.complaints.append(f"{kind}: lost {', '.join(sorted(lost))}")
        self.known = kept
        found = list(validate_table(self.folder)) if self.known | spoilt else []
        corrupt = [each for each in found if each.severity == "corrupt" and each.path not in damaged]
        self.campaign.corrupt[kind] += len(corrupt)
        self.campaign.complaints += [f"{kind}: {each.path.name}: {each.text}" for each in corrupt]

    def _is_whole(self, part: Path) -> bool:
        return part.is_file() and part.name == f"part-{hashlib.sha256(part.read_bytes()).hexdigest()[:16]}.parquet"

    def rows(self) -> dict[Which, dict[str, Any]]:
        """The latest row of each point."""
        rows = sorted(read_arrow_table(self.folder).to_pylist(), key=lambda row: row["started_at"])
        return {(row["m"], row["sparsity_target"], row["pattern_seed"]): row for row in rows}

    def complete(self) -> None:
        """Nothing is left to do but what was cut off, and a sweep does that."""
        sweep = self.start(self.wanted)
        assert sweep.ended() == 0, sweep.err
        rows = self.rows()
        assert all(rows[which]["status"] in TIMED for which in self.wanted)
        self.check("the end")
        assert len(self.known | self.deleted) >= len(self.wanted)  # a block each, or faults would strike between none


class Sweep:
    """A sweep in a process of its own."""

    def __init__(self, table: Table, order: dict[str, Any], environment: dict[str, str]) -> None:
        self.table, self.before, self.err = table, len(table.announced()), ""
        self.process = subprocess.Popen(
            [sys.executable, faulty.__file__, json.dumps(order)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
        )  # fmt: skip

    def until(self, blocks: int) -> None:
        """Wait until it has finished so many blocks, or ends before."""
        while len(self.table.announced()) - self.before < blocks and self.process.poll() is None:
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def workers(self) -> list[psutil.Process]:
        """The processes that it started; none where it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children()
        return []

    def until_stopped(self) -> None:
        """Wait until it has stopped itself, as it was ordered to."""
        assert os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        _, self.err = self.process.communicate(timeout=600)
        return self.process.returncode

    def line(self) -> str:
        """The one line that it said as it ended; empty if it was not one."""
        said = [line for line in self.err.splitlines() if line.startswith("latbench: ")]
        return said[0] if len(said) == 1 and "Traceback" not in self.err else ""


def draw(rng: random.Random, kinds: Sequence[Any], least: int, most: int) -> list[Any]:
    """Each of the kinds `least` to `most` times, in a random order."""
    drawn = [kind for kind in kinds for _ in range(rng.randint(least, most))]
    rng.shuffle(drawn)
    return drawn


# Kernels and workers ----------------------------------------------------------------------------------------------


PATIENCE = [10.0, 2.0]
"""The seconds after which a preparation and a burst count as a hang: ten times what they take."""


def harm_kernels(table: Table, rng: random.Random) -> None:
    """Each bad kernel shares a block, and its worker, with one that is fine."""
    costly = [kernel for kernel in faulty.HARMS if faulty.HARMS[kernel][1] == "timeout"]
    cheap = [kernel for kernel in faulty.KERNELS if kernel not in costly]
    # Each harms when it is prepared and when it is timed; where that is waited for, one of them when it is prepared.
    drawn = draw(rng, [(kernel, later) for kernel in cheap for later in (False, True)], 1, 1)
    drawn += [(kernel, place > 0) for place, kernel in enumerate(draw(rng, costly, 1, 1))]
    faults = []
    for kernel, later in drawn:
        [fine] = table.fine(1)
        faults.append((kernel, (fine[0], 0.75, faulty.seed(kernel, later=later))))
    sweep = table.start([*table.wanted, *(which for _, which in faults)], seconds=PATIENCE)
    assert sweep.ended() == 0, sweep.err
    rows = table.rows()
    for kernel, which in faults:
        statuses, word = faulty.expected(kernel)
        row = rows.get(which, {})
        reported = row.get("status") in statuses and word in (row.get("error") or "")
        table.campaign.note(kernel, reported=reported, complaint=str({k: row.get(k) for k in ("status", "error")}))
    table.check("kernels")


def kill_workers(table: Table, rng: random.Random) -> None:
    """Somebody else kills or stops the worker, at any moment: at most the point that it was at pays."""
    kinds = {"worker killed": signal.SIGKILL, "worker segfaults": signal.SIGSEGV, "worker stopped": signal.SIGSTOP}
    drawn = draw(rng, list(kinds), 2, 3)
    while drawn:
        points = table.fine(3 * len(drawn) + 2)
        sweep = table.start(points, seconds=PATIENCE)
        struck = []
        for number, kind in enumerate(drawn, start=1):
            sweep.until(2 * number)
            time.sleep(rng.uniform(0, 0.02))
            if not (workers := sweep.workers()):
                break  # the sweep is done: the rest is for the next
            with contextlib.suppress(psutil.NoSuchProcess):
                for worker in workers:
                    worker.send_signal(kinds[kind])
            struck.append(kind)
        code = sweep.ended()
        rows = table.rows()
        silent = [
            which
            for which in points
            if which not in rows or not (rows[which]["status"] in TIMED or rows[which]["error"])
        ]
        for kind in struck:
            table.campaign.note(kind, reported=code == 0 and not silent, complaint=f"{code} {silent} {sweep.err}")
            table.check(kind)
        drawn = drawn[len(struck) :]


# The process of the sweep -----------------------------------------------------------------------------------------


def kill_sweeps(table: Table, rng: random.Random) -> None:
    """Killed in any moment, or politely asked to end; the next goes on from there."""
    kinds = {
        "sweep killed": signal.SIGKILL, "sweep interrupted": signal.SIGINT, "sweep terminated": signal.SIGTERM,
        "terminal closed": signal.SIGHUP,
    }  # fmt: skip
    drawn = [*draw(rng, list(kinds), 2, 3), *["sweep killed"] * 2]
    while drawn:
        kind = drawn[-1]
        table.fine(10)
        sweep = table.start(table.wanted)
        # While Python itself starts, it ends as Python does.
        sweep.until(rng.randint(0 if kind == "sweep killed" else 1, 4))
        time.sleep(rng.uniform(0, 0.05))
        workers = sweep.workers()
        sweep.signal(kinds[kind])
        if (code := sweep.ended()) == 0:
            continue  # it was done before: no fault, and another try
        drawn.pop()
        if kinds[kind] == signal.SIGKILL:
            reported = code == -signal.SIGKILL
        else:
            reported = code == 4 and "the same command goes on from there" in sweep.line()
        table.campaign.note(kind, reported=reported, complaint=f"{code} {sweep.err}")
        psutil.wait_procs(workers, timeout=10)
        assert not any(worker.is_running() for worker in workers)
        table.check(kind)


def hurt_writes(table: Table, rng: random.Random, kinds: Sequence[str], least: int, most: int) -> None:
    """Something happens while a file is written: the description of the environment or a part."""
    for kind in draw(rng, kinds, least, most):
        if at_environment := rng.random() < 0.2:
            for path in table.folder.glob("env-*"):
                path.unlink()
        fresh = table.fine(4)
        sweep = table.start(table.wanted, hurt=kind, at=0 if at_environment else rng.randint(0, len(fresh) - 1))
        code = sweep.ended()
        (table.folder.parent / "filler").unlink(missing_ok=True)
        if kind.startswith("killed"):
            reported = code == -signal.SIGKILL
        elif kind.startswith("file"):
            reported = code == 3 and "cannot write" in sweep.line()
        else:
            reported = code == 4 and "the same command goes on from there" in sweep.line()
        table.campaign.note(kind, reported=reported, complaint=f"{code} {sweep.err}")
        table.check(kind)


def jump_clocks(table: Table, rng: random.Random) -> None:
    """The wall clock jumps between any two blocks, back and ahead; what is measured then is kept all the same."""
    jumps = [rng.uniform(-100, 100) for _ in range(5)]
    points = table.fine(len(jumps))
    sweep = table.start(table.wanted, jumps=jumps)
    code = sweep.ended()
    rows = table.rows()
    for which in points:
        kept = code == 0 and rows[which]["status"] in TIMED
        table.campaign.note("wall clock jumps", reported=kept, complaint=f"{code} {sweep.err}")
    table.check("wall clock jumps")


# Files ------------------------------------------------------------------------------------------------------------


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) - 1)]


def flip_a_bit(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def lose_a_page(content: bytes, rng: random.Random) -> bytes:
    """As a file system that lost power may give it back."""
    at = rng.randrange(0, len(content), 512)
    return content[:at] + bytes(len(content[at : at + 512])) + content[at + 512 :]


# Of a description without its last line break nothing is missing.
DAMAGES = {"truncated": truncate, "a flipped bit": flip_a_bit, "a page of zeros": lose_a_page}


def damage_files(table: Table, rng: random.Random) -> None:
    """A part, or the description of the environment, is damaged: that file is named, and no other."""
    fates = [(damage, deleted) for damage in DAMAGES for deleted in (False, True)]
    drawn = draw(rng, fates, 2, 2)
    table.fine(len(drawn))  # a part each, of which half are deleted
    table.complete()
    for (damage, deleted), pattern in itertools.product(drawn, ("part-*", "env-*")):
        file = rng.choice(sorted(table.folder.glob(pattern)))
        kind = f"{pattern.partition('-')[0]}: {damage}"
        whole = file.read_bytes()
        spoilt = DAMAGES[damage](whole, rng)
        file.write_bytes(spoilt)
        named = {found.path for found in validate_table(table.folder) if found.severity == "corrupt"}
        reported = named == {file}
        if pattern == "part-*":
            with pytest.raises(BadData, match=file.name):
                read_table(table.folder)
        table.campaign.note(kind, reported=reported, complaint=f"{named} for {file}")
        table.check(kind, {file})
        if pattern == "part-*" and deleted:
            file.unlink()  # as is advised: its points are measured again
            table.deleted.add(file.name)
        else:
            file.write_bytes(whole)  # from a copy
    # The environment needs no advice: a sweep describes its machine again.
    for file in table.folder.glob("env-*"):
        file.write_bytes(b"")
    sweep = table.start([*table.wanted, *table.fine(1)])
    assert sweep.ended() == 0, sweep.err
    assert not [found for found in validate_table(table.folder) if found.severity != "note"]


def damage_beneath_a_sweep(table: Table, rng: random.Random) -> None:
    """A part is damaged while a sweep goes on: it says so, and keeps what it measured meanwhile."""
    for damage in DAMAGES:
        sweep = table.start([*table.wanted, *table.fine(6)], hurt="stopped within a file", at=rng.randint(2, 5))
        sweep.until_stopped()
        file = table.folder / table.announced()[-1]
        whole = file.read_bytes()
        spoilt = DAMAGES[damage](whole, rng)
        file.write_bytes(spoilt)
        sweep.signal(signal.SIGCONT)
        code, kind = sweep.ended(), "part damaged beneath a sweep"
        table.campaign.note(kind, reported=code == 5 and file.name in sweep.line(), complaint=f"{code} {sweep.err}")
        table.check(kind, {file})
        file.write_bytes(whole)
        table.check(kind)


# Two at a time ----------------------------------------------------------------------------------------------------


def two_at_a_time(table: Table, rng: random.Random) -> None:
    """The second waits, and finds all done; or gives up and says for whom it waited."""
    for number in range(2):
        points = table.fine(5)
        sweeps = [table.start(points) for _ in range(2)]
        codes = [sweep.ended() for sweep in sweeps]
        rows = read_arrow_table(table.folder).to_pylist()
        settled = Counter(row["point_id"] for row in rows if row["status"] == "ok")
        once = max(settled.values(), default=0) <= 1
        table.campaign.note(
            "two sweeps, one device", reported=codes == [0, 0] and once, complaint=f"{codes} {settled}"
        )
        table.check("two sweeps, one device")
        first = table.start(table.fine(4), hurt="stopped within a file", at=rng.randint(0, 3))
        first.until_stopped()
        second = table.start(table.wanted, wait=f"{number / 10}s")
        code = second.ended()
        named = code == 3 and f"(process {first.process.pid} of" in second.line()
        table.campaign.note("sweep stopped", reported=named, complaint=f"{code} {second.err}")
        first.signal(signal.SIGCONT)
        assert first.ended() == 0, first.err
        table.check("sweep stopped")


def two_machines(table: Table, rng: random.Random, locks: Path) -> None:
    """On a shared folder no lock helps: both write, one of them is killed, and nothing is lost."""
    injected = 0
    while injected < 2:
        for path in table.folder.glob("env-*"):
            path.unlink()
        points = table.fine(8)
        other = {"LATBENCH_LOCKS": str(locks)}
        sweeps = [table.start(points), table.start(points, other)]
        sweeps[0].until(rng.randint(2, 8))
        killed = rng.choice(sweeps)
        killed.signal(signal.SIGKILL)
        codes = {sweep is killed: sweep.ended() for sweep in sweeps}
        if codes[True] == 0:
            continue  # it was done before: no fault, and another try
        injected += 1
        table.campaign.note("two machines, one killed", reported=codes[False] == 0, complaint=str(codes))
        table.check("two machines, one killed")


# The campaign -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of four megabytes; None where it cannot be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        yield None
        return
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_no_fault_loses_or_spoils_a_finished_point_and_each_is_reported(
    tmp_path: Path, rng: np.random.Generator, small: Path | None
) -> None:
    campaign, seed, began = Campaign(), int(rng.integers(2**32)), time.monotonic()
    scenes: dict[str, Callable[[Table, random.Random], None]] = {
        "kernels": harm_kernels,
        "workers": kill_workers,
        "sweeps": kill_sweeps,
        "writes": lambda table, dice: hurt_writes(table, dice, WRITES, 2, 2),
        "clocks": jump_clocks,
        "files": damage_files,
        "beneath": damage_beneath_a_sweep,
        "two": two_at_a_time,
        "machines": lambda table, dice: two_machines(table, dice, tmp_path / "locks of another machine"),
    }
    if small is not None:
        scenes["small"] = lambda table, dice: hurt_writes(table, dice, ["file system full"], 3, 3)
    for name, scene in scenes.items():
        table = Table(campaign, (small if small is not None and name == "small" else tmp_path / name) / "out")
        scene(table, random.Random(f"{seed} {name}"))  # its own: scenes do not hang on each other's luck
        table.complete()
        print(f"{name}: {time.monotonic() - began:.0f} s")
    print(campaign)
    assert campaign.injected.total() >= 100
    assert campaign.lost.total() == campaign.corrupt.total() == 0, campaign.complaints
    assert campaign.reported == campaign.injected, campaign.complaints


WRITES = [hurt for hurt in faulty.HURTS if hurt not in ("file system full", "stopped within a file")]
