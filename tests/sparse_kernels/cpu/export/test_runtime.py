"""The runtime in C: calls at the same time, memory that calls take over, forks, threads, other libraries."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported_cases import ExportedFiles, build_linear, export_layers, write_files
from forked_processes import start_child, wait_for
from llvmlite import binding

from sparse_kernels.cpu.export.cpu_levels import FEATURE_BITS, LEVELS, list_host_levels
from sparse_kernels.cpu.export.exported_library import ExportedLibrary, _Error
from sparse_kernels.cpu.export.library_id import RUNTIME
from sparse_kernels.cpu.export.shared_library import find_compiler, find_needed_libc

SHARE = 16384  # floats of a sum from which on a thread gets a share
NAMES = (
    "open", "close", "level", "count_layers", "describe", "find", "kernel", "linear", "conv2d", "add", "borrow",
    "give_back",
    "set_share",
)  # fmt: skip

# A second copy of the runtime, under other names, which looks into a model.
LOOK_INSIDE = (
    "".join(f"#define latbench_{name} copy_{name}\n" for name in NAMES)
    + """
#include <stdlib.h>
static void watch_free(void *memory);
#define free watch_free
#include "latbench.c"
#undef free
static latbench_model *watched;
static int named;
static void watch_free(void *memory) {
    for (int i = 0; memory && watched && i < SLOTS; i++) named += watched->lent[i].memory == memory;
    free(memory);
}
LATBENCH_API void hold_slots(latbench_model *model, int hold) {
    for (int i = 0; i < SLOTS; i++) {
        if (hold) atomic_flag_test_and_set(&model->slots[i].taken), atomic_flag_test_and_set(&model->lent[i].taken);
        else atomic_flag_clear(&model->slots[i].taken), atomic_flag_clear(&model->lent[i].taken);
    }
}
LATBENCH_API int count_named_frees(latbench_model *model) {
    watched = model;
    named = 0;
    for (int64_t floats = 10; floats < 1000000; floats *= 10)
        latbench_give_back(model, latbench_borrow(model, floats, NULL));
    watched = NULL;
    return named;
}
LATBENCH_API void lose_scratch(latbench_model *model) {
    for (int i = 0; i < SLOTS; i++) {
        free(model->slots[i].scratch);
        free(model->lent[i].memory);
    }
}
LATBENCH_API int latbench_run(latbench_model *model, const float *x, int64_t batch, int64_t inputs, float *y,
                              int64_t outputs, int threads, latbench_error *error) {
#undef latbench_linear
    int latbench_linear(latbench_model *, int, const float *, int64_t, int64_t, float *, int64_t, int,
                        latbench_error *);
    return latbench_linear(model, 0, x, batch, inputs, y, outputs, threads, error);
}
"""
)

if not list_host_levels():
    pytest.skip("no CPU level for which kernels are compiled ahead of time", allow_module_level=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ExportedFiles:
    """A layer for the least level, and functions that look into a model."""
    folder = tmp_path_factory.mktemp("runtime")
    layer = build_linear(np.random.default_rng(51), "linear", "vector:16", (53, 37), "relu")
    files = export_layers(folder, [layer], list_host_levels()[:1], (1, 16))
    (folder / "look_inside.c").write_text(LOOK_INSIDE)
    write_files(files, [folder / "look_inside.c"])
    return files


@pytest.fixture
def library(files: ExportedFiles) -> Iterator[ExportedLibrary]:
    """The layer, opened."""
    opened = ExportedLibrary(files.library, files.packed)
    opened._library.latbench_borrow.restype = ctypes.c_void_p
    yield opened
    opened.close()


def add(
    library: ExportedLibrary, a: np.ndarray, b: np.ndarray | None, y: np.ndarray, relu: bool, threads: int
) -> None:
    """Call latbench_add."""
    error = _Error()
    places = [None if each is None else ctypes.c_void_p(each.ctypes.data) for each in (a, b, y)]
    handle, size = ctypes.c_void_p(library._handle), ctypes.c_int64(a.size)
    code = library._library.latbench_add(handle, *places, size, int(relu), threads, ctypes.byref(error))
    assert code == 0, error.text


def look(library: ExportedLibrary, name: str, *given: int) -> int:
    """Call a function that looks into the model."""
    found: int = getattr(library._library, name)(ctypes.c_void_p(library._handle), *given)
    return found


@pytest.mark.parametrize("size", [0, 1, SHARE - 1, 2 * SHARE, 3 * SHARE + 7, 5 * SHARE + 1])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_sums_are_right_in_any_number_of_threads(
    library: ExportedLibrary, rng: np.random.Generator, size: int, threads: int
) -> None:
    a, b = rng.standard_normal((2, size), dtype=np.float32)
    for second in (b, None):
        for relu in (False, True):
            expected = a if second is None else a + second
            y = a.copy()  # a result may take the place of what is read
            add(library, y, second, y, relu, threads)
            assert np.array_equal(y, np.maximum(expected, 0) if relu else expected)


def test_threads_may_go_up_and_down(library: ExportedLibrary, rng: np.random.Generator) -> None:
    a = rng.standard_normal(6 * SHARE, dtype=np.float32)
    x = rng.standard_normal((40, 37), dtype=np.float32)
    expected = library.linear("linear", x, 1)
    for threads in (4, 2, 1, 3, 2, 6, 1, 5) * 20:
        y = np.empty_like(a)
        add(library, a, a, y, False, threads)
        assert np.array_equal(y, a + a)
        np.testing.assert_allclose(library.linear("linear", x, threads), expected, rtol=1e-5, atol=1e-5)


def count_switches() -> dict[str, int]:
    """How often each thread of this process has gone to sleep."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        found[task.name] = next(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_threads_without_a_share_sleep_on(library: ExportedLibrary, rng: np.random.Generator) -> None:
    a = rng.standard_normal(6 * SHARE, dtype=np.float32)
    y, others = np.empty_like(a), {*count_switches()}
    add(library, a, a, y, False, 6)
    time.sleep(0.1)
    before = {task: count for task, count in count_switches().items() if task not in others}
    assert len(before) == 5
    for _ in range(50):
        add(library, a, a, y, False, 2)
        time.sleep(0.002)
    after = count_switches()
    assert sum(after[task] != count for task, count in before.items()) <= 1


def test_more_callers_than_slots_are_served(library: ExportedLibrary, rng: np.random.Generator) -> None:
    x = rng.standard_normal((40, 37), dtype=np.float32)
    a = rng.standard_normal(3 * SHARE, dtype=np.float32)
    expected, y = library.linear("linear", x, 2), np.empty_like(a)
    look(library, "hold_slots", 1)  # as if 64 calls ran
    try:
        assert np.array_equal(library.linear("linear", x, 2), expected)
        add(library, a, None, y, True, 3)
        assert np.array_equal(y, np.maximum(a, 0))
        lent = library._library.latbench_borrow(ctypes.c_void_p(library._handle), ctypes.c_int64(100), None)
        assert lent and lent % 64 == 0
        library._library.latbench_give_back(ctypes.c_void_p(library._handle), ctypes.c_void_p(lent))
    finally:
        look(library, "hold_slots", 0)
    with ThreadPoolExecutor(70) as pool:
        calls = [pool.submit(library.linear, "linear", x, 2) for _ in range(300)]
        assert all(np.array_equal(each.result(), expected) for each in calls)


def test_no_slot_names_memory_that_is_freed(library: ExportedLibrary) -> None:
    """Another call may get the address before the slot has new memory, and would give back the slot instead."""
    assert look(library, "count_named_frees") == 0


def test_a_child_may_close_a_model_that_its_parent_was_calling(
    library: ExportedLibrary, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((40, 37), dtype=np.float32)
    expected = library.linear("linear", x, 2)

    def close() -> bool:
        look(library, "lose_scratch")  # a call of the parent was about to take new memory
        look(library, "hold_slots", 1)
        right = np.array_equal(library.linear("linear", x, 2), expected)
        library.close()
        return right

    assert wait_for(start_child(close)) == 0


def test_a_process_may_fork_while_other_threads_call(library: ExportedLibrary, rng: np.random.Generator) -> None:
    x = rng.standard_normal((200, 37), dtype=np.float32)
    expected, ends = library.linear("linear", x, 2), threading.Event()

    def serve() -> bool:
        right = True
        while not ends.is_set():
            right &= np.array_equal(library.linear("linear", x, 2), expected)
        return right

    def work() -> bool:
        right = all(np.array_equal(library.linear("linear", x, 2), expected) for _ in range(5))
        library.close()
        return right

    with ThreadPoolExecutor(3) as pool:
        served = [pool.submit(serve) for _ in range(3)]
        children = [start_child(work) for _ in range(12)]
        codes = [wait_for(child) for child in children]
        ends.set()
    assert codes == [0] * 12
    assert all(each.result() for each in served)


def test_a_library_calls_its_own_functions(files: ExportedFiles, tmp_path: Path) -> None:
    """Also where an earlier library has given its functions of the same names to the whole process."""
    (tmp_path / "other.c").write_text("int latbench_linear(void) { return 99; }\n")
    other = tmp_path / "other.so"
    subprocess.run([*find_compiler(), "-shared", "-fPIC", "-o", other, tmp_path / "other.c"], check=True)
    code = """
import ctypes, sys
from pathlib import Path
import numpy as np
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from sparse_kernels.cpu.export.exported_library import ExportedLibrary
first, second = (ExportedLibrary(Path(sys.argv[2]), Path(sys.argv[3])) for _ in range(2))
x = np.ones((5, 37), np.float32)
print(np.array_equal(first.run(x, (53,)), second.linear("linear", x)))
"""
    command = [sys.executable, "-c", code, other, files.library, files.packed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_the_runtime_compiles_without_a_warning() -> None:
    for source in sorted(RUNTIME.glob("*.c")):
        command = [*find_compiler(), "-x", "c", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        done = subprocess.run([*command, source], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_features_of_the_processor_are_those_that_llvm_finds(tmp_path: Path) -> None:
    path = tmp_path / "features.so"
    command = [*find_compiler(), "-x", "c", "-std=gnu11", "-shared", "-fPIC", "-o", path]
    subprocess.run([*command, RUNTIME / "cpu_features.c"], check=True)
    library: Any = ctypes.CDLL(str(path))
    library.find_cpu_features.restype = ctypes.c_uint64
    bits, known = library.find_cpu_features(), binding.get_host_cpu_features()
    assert {name: bool(bits >> bit & 1) for name, bit in FEATURE_BITS.items()} == {
        name: known[name] for name in FEATURE_BITS
    }


def test_long_registers_are_not_taken_from_a_level_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"evex512": True, "avx512f": True, "sse4a": True})
    for level in LEVELS:
        features = level.llvm_features.split(",")
        assert "-sse4a" in features
        assert ("-evex512" in features) == ("+avx512f" not in features)


def test_a_library_says_which_c_library_it_needs(files: ExportedFiles, tmp_path: Path) -> None:
    (tmp_path / "library").write_bytes(b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.2.5\0OF_GLIBC_3.1\0")
    assert find_needed_libc(tmp_path / "library") == "glibc 2.34"
    (tmp_path / "library").write_bytes(b"\0libc.musl-x86_64.so.1\0")
    assert find_needed_libc(tmp_path / "library") == "no glibc"
    if "CS_GNU_LIBC_VERSION" in os.confstr_names:
        name, version = find_needed_libc(files.library).split()
        own = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        assert name == own[0] and [*map(int, version.split("."))] <= [*map(int, own[1].split("."))]
