"""A kernel in parts that threads share, with as little between its call and a part as there can be.

Numba's own way, a kernel with `prange` in it, compiles each part's code four times, as it passes from one of Numba's
wrappers to the next, and starts threads even for one part. Here what runs parts is the same for all kernels
(`launch`): it knows nothing of them but an address, and hands them the address of the arguments, which halves the
time to compile a kernel. What is the same in all calls is laid out once: to take twenty arguments out of Python's
objects Numba needs a microsecond, and two or three where these are cold.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from sparse_kernels.cpu.codegen.vector_emitter import I64, with_literals
from sparse_kernels.cpu.launch.native_call import MOST_WORDS, PART, RAISED, record, runner
from sparse_kernels.cpu.runtime.kernel_cache import FLAGS, cache_on_disk
from sparse_kernels.cpu.runtime.numba_internals import cgutils


class ParallelKernel:
    """What `in_parts` makes: called with all of its arguments, or `bound` to those that stay as they are."""

    def __init__(self, parameters: Sequence[str], counts: Sequence[str], lay: Callable[..., Any]) -> None:
        """lay: compiled, puts all arguments down at an address; returns what `_laid` and `_part` say."""
        self._parameters, self._counts, self._lay = parameters, counts, lay

    def __call__(self, *arguments: Any) -> bool:
        """Run the stages with these arguments; whether all parts returned 0."""
        return self.bound("", **dict(zip(self._parameters, arguments, strict=True)))()

    def bound(self, varying: str, **constant: Any) -> BoundKernel:
        """The kernel as a function of the `varying` parameters, integers; the others are worked out for all calls.

        Arrays among the others are those whose elements are read and written. How many parts there are never varies.
        """
        names = varying.split()
        if sorted([*names, *constant]) != sorted(self._parameters) or {*names} & {*self._counts}:
            raise TypeError(
                f"a kernel of {', '.join(self._parameters)} is bound to all of them but what varies, which parts do "
                f"not: not to {', '.join(constant)} with {varying or 'nothing'} left"
            )
        given = [constant.get(name, 0) for name in self._parameters]
        frame = np.empty(MOST_WORDS, np.int64)
        (words, noted, *places), parts = self._lay(frame.ctypes.data, *given)
        stages = [(part, constant[count]) for part, count in zip(parts, self._counts, strict=True)]
        varied = [places[self._parameters.index(name)] for name in names]
        laid = record(frame[:words], noted, stages, varied)
        run = BoundKernel(runner(len(names)), laid.ctypes.data)
        run.held = laid, given, self
        return run

    @property
    def stats(self) -> Any:
        """Numba's, of where the compiled code came from."""
        return self._lay.stats  # type: ignore[attr-defined]


class BoundKernel(partial[bool]):
    """A kernel as a function of what varies. The rest lies in one piece, as in a model each call finds it cold."""

    held: Any  # what lives as long as it may be called

    def __reduce__(self) -> Any:
        raise TypeError("an address means nothing to a copy")


def in_parts(*stages: Callable[..., Any]) -> ParallelKernel:
    """The kernel of these stages, one after the other; compiled when first bound or called, or loaded from disk.

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
    # Kernels that other processes left on disk bring their symbols with them: each needs a name that none other has.
    own = hashlib.sha256(b"".join(_identity(stage) for stage in stages)).hexdigest()[:16]
    name = f"{stages[0].__name__}_{own}"
    names: dict[str, Any] = {"__name__": __name__, "_laid": _laid, "_part": _part}
    for number, stage in enumerate(stages):
        names[f"_stage_{number}"] = numba.njit(**FLAGS)(_renamed(stage, f"{stage.__qualname__}_{own}"))
    parts = "".join(f"_part(_stage_{number}, ({given},)), " for number in range(len(stages)))
    # A function of exactly these parameters: with *args Numba takes as long as a part.
    exec(f"def {name}(_at, {given}):\n    return _laid(_at, ({given},)), ({parts})", names)
    return ParallelKernel(parameters, counts, cache_on_disk(numba.njit(**FLAGS)(names[name]), stages[0], own))


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
def _laid(typing_context: Any, at: Any, given: Any) -> Any:
    """Put the arguments down at an address, then a 0 where parts note what they say: a frame.

    Returns its words, which of them is that 0, and at which word each argument begins. Nothing in a frame keeps an
    array alive.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        value = _not_counted(context, builder, given, args[1])
        kind = _frame_type(value.type)
        frame = builder.inttoptr(args[0], kind.as_pointer())
        builder.store(value, cgutils.gep_inbounds(builder, frame, 0, 0))
        noted = cgutils.gep_inbounds(builder, frame, 0, 1)
        builder.store(I64(0), noted)
        words = context.get_abi_sizeof(kind) // 8
        if words > MOST_WORDS:
            raise TypeError(f"a kernel's arguments take {words} words, for which there is no room")
        places = [noted, *(cgutils.gep_inbounds(builder, frame, 0, 0, i) for i in range(len(given.types)))]
        found = [builder.lshr(builder.sub(builder.ptrtoint(place, I64), args[0]), I64(3)) for place in places]
        return context.make_tuple(builder, signature.return_type, [I64(words), *found])

    return types.UniTuple(types.intp, 2 + len(given.types))(at, given), generate


def _frame_type(arguments: ir.Type) -> ir.Type:
    return ir.LiteralStructType([arguments, I64])


def _not_counted(context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> ir.Value:
    """The same arrays, of which Numba does not count who uses them: what it counts by is gone when they are bound."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for i, each in enumerate(kind.types):  # type: ignore[attr-defined]
            item = _not_counted(context, builder, each, builder.extract_value(value, i))
            value = builder.insert_value(value, item, i)
    return value


@with_literals
def _part(typing_context: Any, stage: Any, given: Any) -> Any:
    """The address of a function of (address of a frame, part) that runs this part of the stage."""
    wanted = (types.intp, *given.types)

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> ir.Value:
        stage.dispatcher.compile(wanted)
        function = stage.dispatcher.overloads[wanted]
        context.active_code_library.add_linking_library(function.library)
        part = ir.Function(builder.module, PART, f"{function.fndesc.mangled_name}.part")
        part.linkage = "internal"
        inside = ir.IRBuilder(part.append_basic_block("entry"))
        frame = inside.inttoptr(part.args[0], _frame_type(values[1].type).as_pointer())
        each = cgutils.unpack_tuple(inside, inside.load(cgutils.gep_inbounds(inside, frame, 0, 0)), len(given.types))
        returned = function.signature.return_type
        declared = context.declare_function(builder.module, function.fndesc)
        status, told = context.call_conv.call_function(inside, declared, returned, wanted, [part.args[1], *each])
        noted = I64(0)
        if returned != types.none:
            told = context.cast(inside, told, returned, types.intp)
            noted = inside.zext(inside.icmp_signed("!=", told, I64(0)), I64)
        noted = inside.select(status.is_error, I64(RAISED), noted)
        inside.atomic_rmw("or", cgutils.gep_inbounds(inside, frame, 0, 1), noted, "monotonic")
        inside.ret_void()
        return builder.ptrtoint(part, I64)

    return types.intp(stage, given), generate
