"""Compiled kernels on disk: each comes back as itself, whoever saves beside it; damage costs a compilation only."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparse_kernels.cpu.runtime.kernel_cache import KernelFiles

# Prints what kernels of these constants give, how many came from disk, and what was warned of.
PROGRAM = """
import sys, warnings
import numpy as np
from sparse_kernels.cpu.launch.parallel_kernel import build_parallel_kernel

def adding(constant):
    @build_parallel_kernel
    def add(part, x, parts):
        x[part] += constant
    return add

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for constant in map(int, sys.argv[1:]):
        kernel, x = adding(constant), np.zeros(3)
        kernel(x, x.size)
        print(*map(int, x), sum(kernel.stats.cache_hits.values()))
for each in caught:
    print("warned:", each.message)
"""


def run(folder: Path, *constants: int, **environment: str) -> str:
    """What the program prints, with its kernels in `folder`."""
    # A file of its own: Numba keeps nothing of functions that have none.
    program = folder / "program.py"
    if not program.exists():
        program.write_text(PROGRAM)
    command = [sys.executable, program, *map(str, constants)]
    where = {"NUMBA_CACHE_DIR": str(folder / "kernels"), "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(command, env=os.environ | where | environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_what_is_saved_at_the_same_time_stays_apart(tmp_path: Path) -> None:
    keys = [("signature", ("triple", "cpu", ""), ("code", f"constants {i}")) for i in range(40)]

    def save(i: int) -> None:
        KernelFiles(tmp_path, "kernel").save(keys[i], f"kernel {i}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, [*range(40), *range(40)]))
    assert [KernelFiles(tmp_path, "kernel").load(key) for key in keys] == [f"kernel {i}" for i in range(40)]
    assert len(list(tmp_path.iterdir())) == 40  # nothing half written is left


def test_each_part_of_a_key_counts(tmp_path: Path) -> None:
    files = KernelFiles(tmp_path, "kernel")
    key = ("signature", ("triple", "cpu", ""), ("code", "constants"))
    files.save(key, 1)
    others = [
        ("other", *key[1:]), (key[0], ("triple", "other", ""), key[2]), (*key[:2], ("other", "constants")),
        (*key[:2], ("code", "other")),
    ]  # fmt: skip
    assert [files.load(other) for other in others] == [None] * 4
    assert KernelFiles(tmp_path, "other").load(key) is None
    assert files.load(key) == 1


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"?" + data[41:]]
)
def test_damaged_files_are_not_there_and_are_written_anew(tmp_path: Path, damage) -> None:
    files, key = KernelFiles(tmp_path, "kernel"), ("signature", (), ("code", "constants"))
    files.save(key, list(range(100)))
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert files.load(key) is None
    files.save(key, [1])
    assert files.load(key) == [1]


@pytest.mark.slow  # eight processes
def test_processes_that_race_leave_every_kernel_to_the_next(tmp_path: Path) -> None:
    run(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: run(tmp_path, i, i + 10, 7), range(4)))
    assert [text.splitlines()[:2] for text in found] == [
        [f"{i} {i} {i} 0", f"{i + 10} {i + 10} {i + 10} 0"] for i in range(4)
    ]
    constants = [0, 1, 2, 3, 7, 10, 11, 12, 13]
    assert run(tmp_path, *constants).splitlines() == [f"{i} {i} {i} 1" for i in constants]


@pytest.mark.slow  # three processes
def test_a_kernel_from_disk_finds_its_threads_whoever_compiled_it(tmp_path: Path) -> None:
    """What all kernels share comes from disk to the process that compiles the second one."""
    assert [run(tmp_path, constant).strip() for constant in (1, 2, 2)] == ["1 1 1 0", "2 2 2 0", "2 2 2 1"]


@pytest.mark.slow  # three processes
def test_kernels_lie_in_the_cache_folder_and_those_of_another_source_are_not_loaded(tmp_path: Path) -> None:
    where = {"NUMBA_CACHE_DIR": "", "LATBENCH_CACHE": str(tmp_path / "own")}
    assert [run(tmp_path, 5, **where).strip() for _ in range(2)] == ["5 5 5 0", "5 5 5 1"]
    assert {path.parent for path in tmp_path.rglob("*.nbc")} == {tmp_path / "own" / "kernels"}
    (tmp_path / "program.py").write_text(PROGRAM + "# changed\n")
    assert run(tmp_path, 5, **where).strip() == "5 5 5 0"


@pytest.mark.slow  # three processes
def test_where_nothing_can_be_kept_kernels_run_all_the_same_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file, not a folder")
    assert run(tmp_path, 5).splitlines()[0] == "5 5 5 0"
    text = run(tmp_path, 5, LATBENCH_CACHE=str(tmp_path / "kernels"), NUMBA_CACHE_DIR="")
    assert text.startswith("5 5 5 0\nwarned: compiled kernels cannot be kept (cannot cache function")
    assert "set LATBENCH_CACHE to a folder for them" in text
