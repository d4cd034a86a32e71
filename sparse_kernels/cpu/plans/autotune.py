"""Which kernel and register tile a linear layer runs with, found by trying: `prepare(..., tune=True)`.

A few choices that may be faster than the default one are timed in turn, for this weight and number of tokens. They
run on synthetic x and on copies of the weights that together pass the caches, as a model's weights do. Another choice
than the default must be faster by more than the noise (`find_fastest`). A layer takes some 50 ms of calls, and as
much again to set up the copies. Each kernel that this machine has not compiled yet takes a second more.

Results are kept in the user's cache folder. There is a file for each processor, version of the kernels, layer shape,
pattern, density, precision, layout, and number of tokens and threads. A file that is not as it should be is replaced.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.cpu_target import count_rotated_bytes, find_cpu_target
from sparse_kernels.cpu.kernels import row_panels
from sparse_kernels.cpu.layouts.vector_grid import TILE
from sparse_kernels.cpu.plans import linear
from sparse_kernels.cpu.plans.linear import Choice, LinearLayer
from sparse_kernels.cpu.runtime.cache_folder import find_user_cache
from sparse_kernels.cpu.runtime.kernel_cache import VERSION
from sparse_kernels.cpu.runtime.numba_internals import read_compile_target
from sparse_kernels.formats import Packed
from sparse_kernels.plan_protocol import Plan

Call = Callable[[], object]
Clock = Callable[[], float]

# How much faster another choice must be in three of four pairs. The same plan at other addresses differs by up to 3%.
# Reads from memory differ by more, for seconds at a time, where other machines share the processor.
FASTER = 1.05

# Seconds that are timed together, so that the clock and earlier work do not count.
BLOCK_SECONDS = 5e-4

# Seconds for which all choices are tried, and then the best of them against the default. Fewest and most rounds of
# each.
TRIAL_SECONDS, TRIAL_ROUNDS = 0.02, (3, 9)
FINAL_SECONDS, FINAL_ROUNDS = 0.03, (9, 31)

# Copies of the weights that take turns, so that they come from memory, as in latbench's tables.
MOST_COPIES = 256


def prepare_or_tune(packed: Packed, layout: str, n: int, precision: str = "float32", *, tune: bool = False) -> Plan:
    """Make a linear layer ready with its usual kernel, or with the fastest of a few that are tried (`tune`)."""
    if tune:
        return prepare_tuned(packed, layout, n, precision=precision)
    return linear.prepare_linear(packed, layout, n, precision)


def prepare_tuned(
    packed: Packed, layout: str, n: int, folder: Path | None = None, precision: str = "float32"
) -> Plan:
    """Return the plan of a linear layer that is the fastest for n tokens and the threads that Numba uses now.

    folder: where results are kept, the user's cache unless given.
    """
    layer = linear.describe_layer(packed, layout, n, precision)
    return linear.build_plan(layer, choose_fastest(layer, folder))


def choose_fastest(layer: LinearLayer, folder: Path | None = None, clock: Clock = perf_counter) -> Choice:
    """Return the fastest choice, as found before or now."""
    choices = list_candidates(layer)
    if len(choices) == 1:
        return choices[0]
    key = _key(layer)
    path = _path(key, folder or find_user_cache("tuning"))
    choice = _read_choice(path, key, choices)
    if choice is None:
        choice = choices[find_fastest(_calls(layer, choices), clock)]
        _write_choice(path, key, choice)
    return choice


# ------------------------------------------------------------------------------------------------ what to try


def list_candidates(layer: LinearLayer) -> list[Choice]:
    """Return the default choice, then those that may be faster: few, because each may have to be compiled.

    Trials of 490 layers ruled out the following, which won nowhere. Other shares of the second-level cache for chunks
    and blocks (a quarter to four times). Shorter stages of single rows, and tiles of half as many rows. Few tokens in
    blocks of one thread alone. Any other tile for token-blocked x.
    """
    default, n, lanes = linear.choose_kernel(layer), layer.n, find_cpu_target().lanes
    if layer.blocked or n == 0:
        return [default]
    vectors = linear.choose_vector_kernel(layer)
    others: list[Choice] = []
    if default.kernel in ("amx", "pairs"):
        return [default, vectors]
    if layer.layout == "token_major" and (vectors.kernel == "tokens" or n <= TILE * lanes):
        others += _list_token_choices(layer)
    if vectors.kernel == "rows" or vectors.tile[2] < lanes or 2 * n > lanes:
        others += _list_row_choices(layer)
    if 2 * n > lanes and (matrix := linear.choose_matrix_kernel(layer)) is not None:
        others.append(matrix)
    return list(dict.fromkeys([default, *others]))


def _list_token_choices(layer: LinearLayer) -> list[Choice]:
    """Return tiles of fewer tokens where fewer are computed in vain; narrow vectors for few tokens and low groups."""
    tile, n = linear.choose_narrow_tile(layer), layer.n
    if tile is None or tile[2] < find_cpu_target().lanes < n:
        return []

    def computed(size: int) -> int:
        return -(-n // size) * size

    most, vectors, lanes = tile
    fewer = min(most * 3 // 4, most // 2, key=computed)
    # A smaller tile costs more, unless it saves a tenth of the tokens. One or two tokens have a tile of their own.
    sizes = (most, fewer) if n > 2 and 10 * computed(fewer) <= 9 * computed(most) else (most,)
    return [Choice("tokens", (size, vectors, lanes)) for size in sizes]


def _list_row_choices(layer: LinearLayer) -> list[Choice]:
    """Return the other way in which x may come to kernel rows; for single rows also a narrower tile."""
    size, vectors, lanes = tile = linear.choose_row_tile(layer)
    total, threads = -(-layer.n // lanes), layer.threads
    each = -(-total // threads)
    choices = [Choice("rows", tile)]
    if size == 1 and vectors > 2:
        choices.append(Choice("rows", (size, vectors - 1, lanes)))
    if layer.fills_threads(lanes):
        # In blocks, each thread has vectors of its own. After a pass over x, all vectors come together, and threads
        # share the panels.
        way, together = ("pass", total) if layer.layout == "token_major" else ("blocks", each)
        width = vectors if size == 1 else row_panels.choose_width((size, vectors), together, find_cpu_target())
        if way == "blocks" or each < total < TILE * threads:
            choices.append(Choice("rows", (size, width, lanes), way))
    return choices


# ------------------------------------------------------------------------------------------------ which is fastest


def find_fastest(calls: Sequence[Call], clock: Clock = perf_counter) -> int:
    """Return the index of the fastest call, where the first one is the default: 0 unless another is surely faster.

    All are timed in turn, a block of calls at a time. The one with the least median meets the default again, in new
    pairs of blocks, because the best of several was also the luckiest. It wins if it is faster by FASTER in three
    quarters of the pairs.
    """
    once = min(_seconds(calls[0], 1, clock) for _ in range(3))
    loops = max(1, round(BLOCK_SECONDS / max(once, 1e-7)))
    times = _in_turn(calls, loops, _rounds(TRIAL_SECONDS, loops * once * len(calls), *TRIAL_ROUNDS), clock)
    best = int(np.argmin(np.median(times, axis=0)))
    if best == 0:
        return 0
    pair = (calls[0], calls[best])
    times = _in_turn(pair, loops, _rounds(FINAL_SECONDS, loops * once * 2, *FINAL_ROUNDS), clock)
    return best if np.quantile(times[:, 0] / times[:, 1], 0.25) > FASTER else 0


def _rounds(seconds: float, round_seconds: float, fewest: int, most: int) -> int:
    return int(min(max(seconds / max(round_seconds, 1e-9), fewest), most))


def _in_turn(calls: Sequence[Call], loops: int, rounds: int, clock: Clock) -> NDArray[np.float64]:
    """Seconds (rounds, calls) of blocks of `loops` calls, every other round in the opposite order."""
    times = np.empty((rounds, len(calls)))
    for number in range(rounds):
        for i in range(len(calls))[:: 1 if number % 2 else -1]:
            times[number, i] = _seconds(calls[i], loops, clock)
    return times


def _seconds(call: Call, loops: int, clock: Clock) -> float:
    start = clock()
    for _ in range(loops):
        call()
    return clock() - start


def _calls(layer: LinearLayer, choices: Sequence[Choice]) -> list[Call]:
    """Return a call of the layer for each choice, on the same synthetic x; its copies of the weights take turns."""
    rng = np.random.default_rng(0)
    (m, k), n = layer.packed.shape, layer.n
    lead, tokens = {
        "token_major": ((n,), ()),
        "feature_major": ((), (n,)),
    }[layer.layout]
    x = rng.standard_normal((*lead, k, *tokens), np.float32)
    y, bias = np.empty((*lead, m, *tokens), np.float32), np.zeros(m, np.float32)

    def call(choice: Choice) -> Call:
        plan = linear.build_plan(layer, choice)
        copies = min(MOST_COPIES, -(-count_rotated_bytes() // plan.nbytes))
        plans = [plan, *(plan.copy() for _ in range(copies - 1))]
        for each in plans:
            each(x, bias, None, y)  # compile and prepare for this number of tokens now, not while it is timed
        turn = itertools.cycle(plans)
        return lambda: next(turn)(x, bias, None, y)

    return [call(choice) for choice in choices]


# ------------------------------------------------------------------------------------------------ what was found


@cache
def describe_device() -> str:
    """Return the vector unit and the processor, as Numba's compiler and the operating system call it."""
    cpu = read_compile_target().cpu
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return " ".join([find_cpu_target().name, cpu, *(named[:1] or [platform.processor()])])


def _key(layer: LinearLayer) -> dict[str, Any]:
    """Return what the fastest choice depends on."""
    packed = layer.packed
    m, k = packed.shape
    return {
        "device": describe_device(),
        "version": VERSION,
        "compiler": numba.__version__,
        "m": m,
        "k": k,
        "n": layer.n,
        "threads": layer.threads,
        "layout": layer.layout,
        "pattern": str(packed.pattern),
        "density": round(packed.nnz / (m * k), 2),
        "precision": layer.precision,
    }


def _path(key: dict[str, Any], folder: Path) -> Path:
    return folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"


def _read_choice(path: Path, key: dict[str, Any], choices: Sequence[Choice]) -> Choice | None:
    """Return the choice that is kept for this key, if it is one of these."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return next((it for it in choices if found == _document(key, it)), None)


def _write_choice(path: Path, key: dict[str, Any], choice: Choice) -> None:
    """Keep a choice; others see all of the file or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder) / path.name
            whole.write_text(json.dumps(_document(key, choice)))
            whole.replace(path)
    except OSError as error:
        warnings.warn(
            f"tuning results are not kept, because {path.parent} cannot be written ({error.strerror}): "
            "set LATBENCH_CACHE to a folder for them",
            stacklevel=2,
        )


def _document(key: dict[str, Any], choice: Choice) -> dict[str, Any]:
    return {"key": key, "choice": {**asdict(choice), "tile": list(choice.tile)}}
