"""Kernels in parts: each part once, stages one after the other, what parts return, and what is no kernel; and bound
ones, which know most of their arguments."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np
import pytest
from llvmlite import ir

from sparse_kernels.cpu.codegen.intrinsics import vector_code
from sparse_kernels.cpu.launch.parallel_kernel import build_parallel_kernel


@pytest.fixture(autouse=True)
def all_threads() -> Iterator[None]:
    before = numba.get_num_threads()
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    yield
    numba.set_num_threads(before)


@pytest.mark.parametrize("parts", [0, 1, 2, 3, 37])
def test_each_part_runs_once(parts: int) -> None:
    @build_parallel_kernel
    def count(part, seen, parts):
        seen[part] += 1

    seen = np.zeros(40, np.int64)
    assert count(seen, parts)
    assert seen.tolist() == [1] * parts + [0] * (40 - parts)


@pytest.mark.parametrize(("parts", "shares"), [(4, 3), (4, 1), (4, 0), (1, 4), (0, 2)])
def test_a_stage_begins_when_the_one_before_is_done(parts: int, shares: int) -> None:
    def write(part, x, y, parts, shares):
        for i in range(1000 * part, 1000 * part + 1000):
            x[i] = 1

    def read(share, x, y, parts, shares):
        y[share] = x.sum()

    x, y = np.zeros(4000, np.int64), np.full(4, -1, np.int64)
    build_parallel_kernel(write, read)(x, y, parts, shares)
    assert y.tolist() == [1000 * parts] * shares + [-1] * (4 - shares)


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.int64])
def test_a_kernel_says_whether_any_part_said_something(dtype: type) -> None:
    @build_parallel_kernel
    def found(part, x, parts):
        return x[part]

    x = np.zeros(8, dtype)
    assert found(x, 8)
    for i in (0, 7):
        assert not found(np.arange(8) == i if dtype == np.bool_ else (np.arange(8) == i).astype(dtype), 8)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_part_that_fails_fails_the_kernel(parts: int) -> None:
    @build_parallel_kernel
    def fail(part, x, parts):
        if part == parts - 1:
            raise ValueError("not seen by the caller, who gets an error of its own")
        x[part] = 1

    x = np.zeros(4)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        fail(x, parts)
    assert x.tolist() == [1] * (parts - 1) + [0] * (5 - parts)


def test_constants_and_types_have_kernels_of_their_own() -> None:
    def adding(constant):
        @build_parallel_kernel
        def add(part, x, pair, parts):
            x[part] += constant + pair[1]

        return add

    for constant in (1, 2):
        for dtype in (np.int64, np.float32):
            x = np.zeros(2, dtype)
            adding(constant)(x, (x, 10), 2)
            assert x.tolist() == [constant + 10] * 2


def test_callers_of_several_threads_have_arguments_of_their_own() -> None:
    @build_parallel_kernel
    def fill(part, x, value, parts):
        for i in range(part, x.size, parts):
            x[i] = value

    arrays = [np.zeros(1000, np.int64) for _ in range(4)]

    def work(number: int) -> None:
        for _ in range(200):
            fill(arrays[number], number, 2)

    fill(arrays[0], 0, 2)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(array.tolist()) for array in arrays] == [{0}, {1}, {2}, {3}]


@pytest.mark.parametrize("told", [-1, 2**62, -(2**63)])
def test_no_result_hides_a_failure_or_looks_like_one(told: int) -> None:
    @build_parallel_kernel
    def tell(part, told, fails, parts):
        if part == fails:
            raise ValueError
        return told

    assert tell(told, -1, 2) is False
    with pytest.raises(RuntimeError, match="a kernel failed"):
        tell(told, 1, 2)


def test_a_stage_of_several_kernels_belongs_to_each() -> None:
    def add(share, x, parts, shares):
        x[share] += 1

    def kernel(constant):
        def fill(part, x, parts, shares):
            x[part] = constant

        return build_parallel_kernel(fill, add)

    kernels = [kernel(constant) for constant in (10, 20, 30)]
    for number in (2, 0, 1):
        x = np.zeros(3)
        kernels[number](x, 3, 2)
        assert x.tolist() == [10 * number + 11] * 2 + [10 * number + 10]


def write(part, x, pair, value, parts):  # type: ignore[no-untyped-def]
    """Each part's element is the value, some steps of a table, and what lies in an array inside a tuple."""
    step, (table, empty) = pair
    x[part] = value + step * table[part] + empty.size


def test_a_bound_kernel_is_called_with_what_varies_in_the_order_asked_for() -> None:
    @build_parallel_kernel
    def tell(part, x, a, b, scale, parts):
        x[part] = a + 10 * b + scale * part

    x = np.zeros(3)
    run = tell.bound("b a", x=x, scale=0.5, parts=3)
    for a, b in ((1, 2), (-3, 2**40)):
        assert run(b, a)
        assert x.tolist() == [a + 10 * b + scale for scale in (0, 0.5, 1)]
    assert tell.bound("", x=x, a=1, b=0, scale=0.0, parts=1)()
    assert x[0] == 1


def test_a_bound_kernel_keeps_its_arrays_no_longer_than_it_lives() -> None:
    x, table = np.zeros(2, np.int64), np.array([5, 7])
    last = weakref.ref(table)
    run = build_parallel_kernel(write).bound("value", x=x, pair=(100, (table, np.zeros(0, np.float32))), parts=2)
    del table
    for value in range(1000):  # as often as a count that went wrong by one would need to be seen
        assert run(value)
    assert x.tolist() == [999 + 500, 999 + 700]
    assert last() is not None
    del run
    gc.collect()
    assert last() is None


@vector_code()
def add_to(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Add a number to the int64 at an address."""
    place = builder.inttoptr(address, ir.IntType(64).as_pointer())
    builder.store(builder.add(builder.load(place), value), place)


@pytest.mark.parametrize("parts", [1, 2])
def test_callers_of_several_threads_share_a_bound_kernel(parts: int) -> None:
    table = np.array([3, 5])
    results = [np.zeros(2, np.int64) for _ in range(4)]

    @build_parallel_kernel
    def add(part, x_at, table, parts):
        for _ in range(1000):
            add_to(x_at + part * 8, table[part])

    run = add.bound("x_at", table=table, parts=parts)

    def work(number: int) -> None:
        for _ in range(20):
            run(results[number].ctypes.data)

    callers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [result.tolist() for result in results] == [[60_000, 100_000 if parts == 2 else 0]] * 4


def test_a_bound_kernel_forgets_what_a_call_said() -> None:
    @build_parallel_kernel
    def tell(part, told, parts):
        if told < 0:
            raise ValueError
        return told

    run = tell.bound("told", parts=2)
    for _ in range(2):
        assert run(0)
        assert not run(1)
        with pytest.raises(RuntimeError, match="a kernel failed"):
            run(-1)


def test_a_kernel_is_bound_to_all_that_it_takes_and_to_nothing_else() -> None:
    kernel = build_parallel_kernel(write)
    x = np.zeros(2, np.int64)
    for varying, constant in (
        ("value", {"x": x, "parts": 2}),
        ("value", {"x": x, "pair": (), "value": 1, "parts": 2}),
        ("value other", {"x": x, "pair": (), "parts": 2}),
        ("value parts", {"x": x, "pair": ()}),
    ):
        with pytest.raises(TypeError, match="a kernel of x, pair, value, parts cannot be bound"):
            kernel.bound(varying, **constant)


def printed(program: str, folder: Path) -> str:
    """What a process of its own prints that runs the program, from a file, or Numba would keep nothing of it."""
    path = folder / "program.py"
    path.write_text(program)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, path]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


# Prints how many threads there are when torch has used two, and when a kernel has used two as well.
ONE_POOL = """
import os
import numba, numpy as np, torch
from sparse_kernels.cpu.launch.parallel_kernel import build_parallel_kernel

torch.set_num_threads(2)
numba.set_num_threads(2)
torch.ones(500, 500) @ torch.ones(500, 500)
torch.ones(10**6).exp()

@build_parallel_kernel
def fill(part, x, parts):
    x[part] = 1

run = fill.bound("", x=np.zeros(2), parts=2)
print(len(os.listdir("/proc/self/task")))
run()
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.slow  # a process with torch
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux lists a process's threads")
@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread needs no pool")
def test_kernels_use_the_threads_that_torch_has(tmp_path: Path) -> None:
    # Two pools wait for work on the same cores: a model of both would take ten times as long.
    before, after = map(int, printed(ONE_POOL, tmp_path).split())
    assert after == before


def test_a_bound_kernel_cannot_be_copied() -> None:
    run = build_parallel_kernel(write).bound(
        "value", x=np.zeros(1, np.int64), pair=(1, (np.ones(1), np.ones(1))), parts=1
    )
    for copy_of in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="an address means nothing to a copy"):
            copy_of(run)


def test_only_integers_vary() -> None:
    run = build_parallel_kernel(write).bound(
        "value", x=np.zeros(1, np.int64), pair=(1, (np.ones(1), np.ones(1))), parts=1
    )
    with pytest.raises(TypeError):
        run("1")


def test_what_is_no_stage_is_refused() -> None:
    def first(part, x, parts):
        x[part] = 1

    def other(part, x, y, parts):
        x[part] = y

    def uncounted(item, x, parts):
        x[item] = 1

    def enclosing(part, x, parts):
        first(part, x, parts)

    for stages in ((first, other), (first, uncounted)):
        with pytest.raises(
            TypeError, match=r"must have a number, then the parameters of the first stage \(x, parts\)"
        ):
            build_parallel_kernel(*stages)
    with pytest.raises(TypeError, match="enclosing encloses more than numbers"):
        build_parallel_kernel(enclosing)
