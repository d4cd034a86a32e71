"""A kernel in parts that threads share, with as little between its call and a part as there can be.

Numba's own way, a kernel with `prange` in it, compiles each part's code four times, as it passes from one of Numba's
wrappers to the next, and starts threads even for one part. Here one loop over parts is compiled once for all kernels
(`_launch`). It knows of a kernel's part nothing but an address, and hands it the address of the arguments: half the
time to compile a kernel, and a microsecond less for a call with one thread.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numba.extending
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.core.serialize import dumps

from sparse_kernels.cpu.compiled import FLAGS, compiled, kept

# To a type checker, what @intrinsic returns would take the typing context too.
intrinsic: Any = numba.extending.intrinsic

_I64 = ir.IntType(64)
_PART = ir.FunctionType(ir.VoidType(), [_I64, _I64])  # of the address of the arguments, and the number of the part

# What a part tells if it ended early, as Numba's checks of bounds make it.
_FAILED = 2**62


def in_parts(*stages: Callable[..., Any]) -> Callable[..., bool]:
    """The kernel of these stages, one after the other; compiled at its first call, or loaded from disk.

    A stage is a function of the number of its part and of all that the kernel is called with. The kernel's parameter
    with the name of that number and an s says how many parts there are (part, parts): a single one the caller
    computes, none leaves the stage out. A part returns nothing, or an integer. The kernel returns whether all of them
    were 0. RuntimeError if a part failed. Free variables of the first stage are constants; others have none.
    """
    first, *others = stages
    if any(stage.__closure__ for stage in others):
        raise TypeError("only the first stage may have free variables: they are part of the name on disk")
    # Kernels that other processes left on disk bring their symbols with them: each needs a name that none other has.
    constants = dumps([cell.cell_contents for cell in first.__closure__ or ()])
    own = hashlib.sha256(first.__code__.co_code + constants).hexdigest()[:16]
    for stage in stages:
        stage.__qualname__ = f"{stage.__qualname__}_{own}"
    parameters = list(inspect.signature(first).parameters)[1:]
    given = ", ".join(parameters)
    lines = [f"def kernel_{own}({given}):", "    told = 0"]
    known: dict[str, Any] = {
        "__name__": __name__,
        "bound": _bound,
        "call": _call,
        "launch": _launch,
        "integer_at": _integer_at,
    }
    for number, stage in enumerate(stages):
        part, *rest = inspect.signature(stage).parameters
        if rest != parameters:
            raise TypeError(f"all stages must have the parameters of the first: {given}")
        known[f"stage_{number}"] = numba.njit(**FLAGS)(stage)
        lines += [
            f"    function, arguments, answer = bound(stage_{number}, ({given},))",
            f"    if {part}s == 1:",
            "        call(function, arguments, 0)",
            f"    elif {part}s > 1:",
            f"        launch(function, arguments, {part}s)",
            "    told |= integer_at(answer)",
        ]
    lines += [f"    if told >= {_FAILED}:", "        raise RuntimeError('a kernel failed')", "    return told == 0"]
    exec("\n".join(lines), known)  # a function of exactly these parameters: with *args Numba takes as long as a part
    return kept(numba.njit(**FLAGS)(known[f"kernel_{own}"]), *stages)


@intrinsic
def _bound(typing_context: Any, stage: Any, given: Any) -> Any:
    """(address of a function of (arguments, part), address of its arguments, address of what its parts returned)."""
    wanted = (types.intp, *given.types)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> ir.Value:
        stage.dispatcher.compile(wanted)
        whole = stage.dispatcher.overloads[wanted]
        context.active_code_library.add_linking_library(whole.library)
        frame = cgutils.alloca_once(builder, ir.LiteralStructType([values[1].type, _I64]))
        arguments, answer = (cgutils.gep_inbounds(builder, frame, 0, i) for i in range(2))
        builder.store(values[1], arguments)
        builder.store(_I64(0), answer)

        part = ir.Function(builder.module, _PART, f"{whole.fndesc.mangled_name}.part")
        part.linkage = "internal"
        inside = ir.IRBuilder(part.append_basic_block("entry"))
        found = inside.inttoptr(part.args[0], frame.type)
        each = cgutils.unpack_tuple(inside, inside.load(cgutils.gep_inbounds(inside, found, 0, 0)), len(given.types))
        returned = whole.signature.return_type
        function = context.declare_function(builder.module, whole.fndesc)
        status, told = context.call_conv.call_function(inside, function, returned, wanted, [part.args[1], *each])
        told = _I64(0) if returned == types.none else context.cast(inside, told, returned, types.intp)
        told = inside.select(status.is_error, _I64(_FAILED), told)
        inside.atomic_rmw("or", cgutils.gep_inbounds(inside, found, 0, 1), told, "monotonic")
        inside.ret_void()
        addresses = [builder.ptrtoint(pointer, _I64) for pointer in (part, frame, answer)]
        return context.make_tuple(builder, signature.return_type, addresses)

    return types.UniTuple(types.intp, 3)(stage, given), generate


@intrinsic
def _call(typing_context: Any, function: Any, arguments: Any, part: Any) -> Any:
    """Call the function at an address."""
    signature = types.void(types.intp, types.intp, types.intp)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        builder.call(builder.inttoptr(args[0], _PART.as_pointer()), args[1:])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _integer_at(typing_context: Any, address: Any) -> Any:
    """The int64 at an address."""
    signature = types.intp(types.intp)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.load(builder.inttoptr(args[0], _I64.as_pointer()))

    return signature, generate


def _each_part(function: int, arguments: int, parts: int) -> None:
    for part in prange(parts):
        _call(function, arguments, part)


_launch = compiled(_each_part, parallel=True)
