"""A kernel in parts that threads share, with as little between its call and a part as there can be.

Numba's own way, a kernel with `prange` in it, compiles each part's code four times, as it passes from one of Numba's
wrappers to the next, and starts threads even for one part. Here one loop over parts, the same for all kernels
(`_launch`), knows of a kernel's part nothing but an address, and hands it the address of the arguments: half the time
to compile a kernel, and a microsecond less for a call with one thread.

Where Numba's threads are those of GNU's OpenMP, the loop asks that for them itself: 0.6 us for two threads, where it
takes 1.7 by way of `prange`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import numba
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils

from sparse_kernels.cpu.compiled import FLAGS, compiled, kept
from sparse_kernels.cpu.emitter import I32, I64, with_literals
from sparse_kernels.cpu.threads import link_openmp, taking_turns

_PART = ir.FunctionType(ir.VoidType(), [I64, I64])  # of the address of the arguments, and the number of the part

# What is noted of a part that raised, as an index out of bounds may do; of one that did not return 0, 1 is.
_RAISED = 2


def in_parts(*stages: Callable[..., Any]) -> Callable[..., bool]:
    """The kernel of these stages, one after the other; compiled at its first call, or loaded from disk.

    A stage is a function of the number of its part and of all that the kernel is called with. The kernel's parameter
    with the name of that number and an s says how many parts there are (part, parts). One part is run by the calling
    thread itself; with 0 the stage is left out. A part returns nothing, or an integer; the kernel returns whether all
    of them were 0. It raises RuntimeError if a part raised, and what that part held is never freed then.

    Free variables of a stage are constants, numbers or bool. Raises TypeError for what is no stage.
    """
    parameters = list(inspect.signature(stages[0]).parameters)[1:]
    given, counts = ", ".join(parameters), []
    for stage in stages:
        part, *others = inspect.signature(stage).parameters
        if others != parameters or f"{part}s" not in parameters:
            raise TypeError(
                f"{stage.__qualname__} must have a number, then the parameters of the first stage ({given}), one of "
                "them how many"
            )
        if any(type(cell.cell_contents) not in (bool, int) for cell in stage.__closure__ or ()):
            # A compiled function, for one, would be another in each process, and so would the name on disk be.
            raise TypeError(f"{stage.__qualname__} encloses more than numbers")
        counts.append(f"{part}s")
    openmp = link_openmp()
    launch = _launch_by_openmp if openmp else _launch
    # Kernels that other processes left on disk bring their symbols with them: each needs a name that none other has.
    own = hashlib.sha256(b"".join([bytes([openmp]), *map(_identity, stages)])).hexdigest()[:16]
    name = f"{stages[0].__name__}_{own}"
    names: dict[str, Any] = {
        "__name__": __name__, "_bound": _bound, "_call": _call, "_launch": launch, "_integer_at": _integer_at,
    }  # fmt: skip
    lines = [f"def {name}({given}):", "    _noted = 0"]
    for number, (stage, count) in enumerate(zip(stages, counts, strict=True)):
        names[f"_stage_{number}"] = numba.njit(**FLAGS)(_renamed(stage, f"{stage.__qualname__}_{own}"))
        lines += [
            f"    _part, _arguments, _answer = _bound(_stage_{number}, ({given},))",
            f"    if {count} == 1:",
            "        _call(_part, _arguments, 0)",
            f"    elif {count} > 1:",
            f"        _launch(_part, _arguments, {count})",
            "    _noted |= _integer_at(_answer)",
        ]
    lines += [f"    if _noted & {_RAISED}:", "        raise RuntimeError('a kernel failed')"]
    lines += ["    return _noted == 0"]
    exec("\n".join(lines), names)  # a function of exactly these parameters: with *args Numba takes as long as a part
    return taking_turns(kept(numba.njit(**FLAGS)(names[name]), stages[0], own))


def _identity(stage: Callable[..., Any]) -> bytes:
    """What tells a stage from all others."""
    code, cells = stage.__code__, [cell.cell_contents for cell in stage.__closure__ or ()]
    return repr((stage.__module__, stage.__qualname__, code.co_code, code.co_consts, code.co_names, cells)).encode()


def _renamed(stage: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function under another name, which its symbols have from it."""
    found = FunctionType(stage.__code__, stage.__globals__, stage.__name__, None, stage.__closure__)
    found.__qualname__, found.__module__ = name, stage.__module__
    return found


@with_literals
def _bound(typing_context: Any, stage: Any, given: Any) -> Any:
    """Addresses: of a function of (address of arguments, part), of arguments, of what is noted of their parts."""
    wanted = (types.intp, *given.types)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> ir.Value:
        stage.dispatcher.compile(wanted)
        function = stage.dispatcher.overloads[wanted]
        context.active_code_library.add_linking_library(function.library)
        frame = cgutils.alloca_once(builder, ir.LiteralStructType([values[1].type, I64]))
        arguments, answer = (cgutils.gep_inbounds(builder, frame, 0, i) for i in range(2))
        builder.store(values[1], arguments)
        builder.store(I64(0), answer)

        part = ir.Function(builder.module, _PART, f"{function.fndesc.mangled_name}.part")
        part.linkage = "internal"
        inside = ir.IRBuilder(part.append_basic_block("entry"))
        found = inside.inttoptr(part.args[0], frame.type)
        each = cgutils.unpack_tuple(inside, inside.load(cgutils.gep_inbounds(inside, found, 0, 0)), len(given.types))
        returned = function.signature.return_type
        declared = context.declare_function(builder.module, function.fndesc)
        status, told = context.call_conv.call_function(inside, declared, returned, wanted, [part.args[1], *each])
        noted = I64(0)
        if returned != types.none:
            told = context.cast(inside, told, returned, types.intp)
            noted = inside.zext(inside.icmp_signed("!=", told, I64(0)), I64)
        noted = inside.select(status.is_error, I64(_RAISED), noted)
        inside.atomic_rmw("or", cgutils.gep_inbounds(inside, found, 0, 1), noted, "monotonic")
        inside.ret_void()
        addresses = [builder.ptrtoint(pointer, I64) for pointer in (part, frame, answer)]
        return context.make_tuple(builder, signature.return_type, addresses)

    return types.UniTuple(types.intp, 3)(stage, given), generate


@with_literals
def _call(typing_context: Any, function: Any, arguments: Any, part: Any) -> Any:
    """Call the function at an address."""
    signature = types.void(types.intp, types.intp, types.intp)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        builder.call(builder.inttoptr(args[0], _PART.as_pointer()), args[1:])
        return context.get_dummy_value()

    return signature, generate


@with_literals
def _integer_at(typing_context: Any, address: Any) -> Any:
    """The int64 at an address."""
    signature = types.intp(types.intp)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.load(builder.inttoptr(args[0], I64.as_pointer()))

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
            inside.call(inside.inttoptr(part, _PART.as_pointer()), [found, each])
        inside.ret_void()
        most, parts = _asked(builder, "get_num_threads"), args[2]
        threads = builder.trunc(builder.select(builder.icmp_signed("<", parts, most), parts, most), I32)
        run = ir.FunctionType(ir.VoidType(), [member.type, job.type, I32, I32])
        parallel = cgutils.get_or_insert_function(builder.module, run, "GOMP_parallel")
        builder.call(parallel, [member, job, threads, I32(0)])
        return context.get_dummy_value()

    return signature, generate


def _asked(builder: ir.IRBuilder, name: str) -> ir.Value:
    """What a function of C answers, an int of no arguments."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), name)
    return builder.zext(builder.call(function, []), I64)


def _by_openmp(function: int, arguments: int, parts: int) -> None:
    _share(function, arguments, parts)


def _by_numba(function: int, arguments: int, parts: int) -> None:
    for part in prange(parts):
        _call(function, arguments, part)


_launch_by_openmp = compiled(_by_openmp)
_launch = compiled(_by_numba, parallel=True)
