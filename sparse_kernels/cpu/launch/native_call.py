"""What a call of a kernel comes down to: its arguments at one address, its parts shared by threads.

A record is int64. It begins with four words: the size of the frame, the word in which parts note what they return,
the number of stages, and the number of words that vary. Then come, for each stage, the address of its part and the
number of parts; the words that vary; and the frame. A frame is what a part is called with the address of. Each call
works on a copy of it, so any number of callers may run one record at once.

Where Numba's threads are those of GNU's OpenMP, that is asked for them directly: 0.6 us for two threads, where it
takes 1.7 by way of `prange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, prange, types
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.intrinsics import with_literals
from sparse_kernels.cpu.codegen.vector_emitter import I32, I64
from sparse_kernels.cpu.runtime.kernel_cache import FLAGS, cache_on_disk, compile_cached
from sparse_kernels.cpu.runtime.numba_internals import cgutils
from sparse_kernels.cpu.runtime.scratch_buffers import allocate_aligned
from sparse_kernels.cpu.runtime.threads import link_openmp, take_turns

# The type of a part: it takes the address of a frame, and the number of the part.
PART = ir.FunctionType(ir.VoidType(), [I64, I64])

# Noted for a part that raised, as an index out of bounds may do. For a part that did not return 0, 1 is noted.
RAISED = 2

MOST_WORDS = 256  # int64 of a frame; an array takes 7 or more
_HEAD = 4  # words of a record before its stages


def build_record(
    frame: NDArray[np.int64], noted: int, stages: Sequence[tuple[int, int]], varying: Sequence[int]
) -> NDArray[np.int64]:
    """Return the record of a frame.

    noted: word in which parts note what they return. stages: (address of the part, parts). varying: words that vary.
    """
    words = [frame.size, noted, len(stages), len(varying), *np.ravel(stages), *varying]
    found = allocate_aligned(len(words) + frame.size, np.int64)
    found[: len(words)], found[len(words) :] = words, frame
    return found


@cache
def compile_runner(count: int) -> Callable[..., bool]:
    """Return the compiled function that runs records with `count` varying words, given an address and these words.

    Returns whether all parts returned 0; RuntimeError if one raised, TypeError for what are no int.
    """
    words = "".join(f"word_{i}, " for i in range(count))
    # The 0 makes a tuple where there are no words.
    body = f"return run_record(launch, at, ({words}0,))"
    return compile_record_function(f"run_{count}", f"at, {words}", body, {}, (types.intp,) * (1 + count))


def compile_record_function(
    name: str, parameters: str, body: str, names: dict[str, Any], signature: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return a function of this text, compiled for one signature; it runs records by `run_record(launch, ...)`.

    A text, so that it has as many parameters as it needs: over a tuple Numba takes twice as long.
    """
    openmp = link_openmp()
    name = f"{name}_by_openmp" if openmp else name
    known = {"__name__": __name__, "run_record": run_record, "launch": _by_openmp if openmp else _by_numba, **names}
    exec(f"def {name}({parameters}):\n    {body}", known)
    found = cache_on_disk(njit(**FLAGS)(known[name]), run_record.py_func, name)
    found.compile(signature)
    found.disable_compile()
    return take_turns(found)


@njit(inline="always")
def run_record(launch, at, words):  # type: ignore[no-untyped-def]
    """Run the record at an address with these words in place of those that vary; whether all parts returned 0."""
    size, noted, stages, varying = carray(view_integers(at), _HEAD)
    first = _HEAD + 2 * stages
    record = carray(view_integers(at), first + varying + size)
    frame_at = _room()
    frame = carray(view_integers(frame_at), size)
    for i in range(size):
        frame[i] = record[first + varying + i]
    for i in range(varying):
        frame[record[first + i]] = words[i]
    for stage in range(_HEAD, first, 2):
        part, parts = record[stage], record[stage + 1]
        if parts == 1:
            call_address(part, frame_at, 0)
        elif parts > 1:
            launch(part, frame_at, parts)
    if frame[noted] & RAISED:
        raise RuntimeError("a kernel failed")
    return frame[noted] == 0


@with_literals
def _room(typing_context: Any) -> Any:
    """Return the address of room for a frame, which lasts until the function that asks for it returns."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        with builder.goto_entry_block():
            room = builder.alloca(ir.ArrayType(I64, MOST_WORDS))  # Numba's own way would fill it with zeros
        return builder.ptrtoint(room, I64)

    return types.intp(), generate


@with_literals
def view_integers(typing_context: Any, address: Any) -> Any:
    """Return a pointer to int64 from an address, as `numba.carray` takes it."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.inttoptr(args[0], I64.as_pointer())

    return types.CPointer(types.int64)(types.intp), generate


@with_literals
def call_address(typing_context: Any, function: Any, arguments: Any, part: Any) -> Any:
    """Call the function at an address."""
    signature = types.void(types.intp, types.intp, types.intp)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        builder.call(builder.inttoptr(args[0], PART.as_pointer()), args[1:])
        return context.get_dummy_value()

    return signature, generate


@with_literals
def _share(typing_context: Any, function: Any, arguments: Any, parts: Any) -> Any:
    """Call the function for each part, shared by as many threads of GNU's OpenMP as Numba would use."""
    signature = types.void(*[types.intp] * 3)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        job = cgutils.alloca_once(builder, ir.ArrayType(I64, 3))
        for i in range(3):
            builder.store(args[i], cgutils.gep_inbounds(builder, job, 0, i))
        member = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [I64]), f"{builder.function.name}.member")
        member.linkage = "internal"
        inside = ir.IRBuilder(member.append_basic_block("entry"))
        given = inside.inttoptr(member.args[0], job.type)
        part, found, count = (inside.load(cgutils.gep_inbounds(inside, given, 0, i)) for i in range(3))
        number, of = (_asked(inside, name) for name in ("omp_get_thread_num", "omp_get_num_threads"))
        first = inside.sdiv(inside.mul(count, number), of)
        last = inside.sdiv(inside.mul(count, inside.add(number, I64(1))), of)
        with cgutils.for_range_slice(inside, first, last, I64(1)) as (each, _):
            inside.call(inside.inttoptr(part, PART.as_pointer()), [found, each])
        inside.ret_void()
        # Ask for all threads even where parts are fewer. For a smaller team OpenMP would end the other threads and
        # start them anew later.
        threads = builder.trunc(_asked(builder, "get_num_threads"), I32)
        run = ir.FunctionType(ir.VoidType(), [member.type, job.type, I32, I32])
        parallel = cgutils.get_or_insert_function(builder.module, run, "GOMP_parallel")
        builder.call(parallel, [member, job, threads, I32(0)])
        return context.get_dummy_value()

    return signature, generate


def _asked(builder: ir.IRBuilder, name: str) -> ir.Value:
    """Return what a function of C answers, an int of no arguments."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), name)
    return builder.zext(builder.call(function, []), I64)


def _each_by_openmp(function: int, arguments: int, parts: int) -> None:
    _share(function, arguments, parts)


def _each_by_numba(function: int, arguments: int, parts: int) -> None:
    for part in prange(parts):
        call_address(function, arguments, part)


_by_openmp = compile_cached(_each_by_openmp)
_by_numba = compile_cached(_each_by_numba, parallel=True)
