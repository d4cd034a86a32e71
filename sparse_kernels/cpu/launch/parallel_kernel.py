"""Make kernels whose parts threads share, with as little as possible between a call and a part.

A kernel with Numba's `prange` compiles each part's code four times, as it passes from one of Numba's wrappers to the
next. It starts threads even for one part. Here the code that runs parts is the same for all kernels (`native_call`).
It knows only the address of a part, and hands it the address of the arguments, which halves the time to compile a
kernel. What is the same in all calls is laid out once: to take twenty arguments out of Python's objects Numba needs a
microsecond, and two or three where these are cold.

A stage has three parameters: the number of its part; `call`, a NamedTuple of the addresses and numbers that each call
brings; and `layer`, a NamedTuple of everything else.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FunctionType
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types

from sparse_kernels.cpu.codegen.intrinsics import with_literals
from sparse_kernels.cpu.codegen.vector_emitter import I64
from sparse_kernels.cpu.launch.native_call import MOST_WORDS, PART, RAISED, build_record, compile_runner
from sparse_kernels.cpu.launch.recording import RecordedKernel, is_recording
from sparse_kernels.cpu.runtime.kernel_cache import FLAGS, cache_on_disk
from sparse_kernels.cpu.runtime.numba_internals import WITHOUT_COUNTS, WITHOUT_WRAPPER, cgutils

_watched: ContextVar[set[str] | None] = ContextVar("_watched", default=None)


@contextmanager
def watch_kernels() -> Iterator[set[str]]:
    """Yield a set that gets the module of each kernel that this thread binds meanwhile."""
    found: set[str] = set()
    token = _watched.set(found)
    try:
        yield found
    finally:
        _watched.reset(token)


class ParallelKernel:
    """Kernel of `build_parallel_kernel`: called with all arguments, or bound to those that stay as they are."""

    def __init__(
        self, parameters: Sequence[str], counts: Sequence[str], lay: Callable[..., Any], module: str
    ) -> None:
        """lay: compiled, puts all arguments down at an address; returns what `_laid` and `_part` return.

        parameters: names of the stages' parameters after the number of the part. counts: for each stage, the name of
        what says how many parts it has, a parameter or a field of the last one. module: the file of the stages.
        """
        self._parameters, self._counts, self._lay, self._module = list(parameters), counts, lay, module

    def __call__(self, *arguments: Any) -> bool:
        """Run the stages with these arguments; return whether all parts returned 0."""
        if self._parameters == ["call", "layer"]:
            call, layer = arguments
            return self.bind(type(call), layer)(*call)
        return self.bound("", **dict(zip(self._parameters, arguments, strict=True)))()

    def bind(self, call: Any, layer: Any) -> BoundKernel:
        """Return a kernel of (part, call, layer) as a function of the fields of `call`, integers.

        call: the NamedTuple of what each call brings. layer: the NamedTuple of what stays the same, of which arrays
        are read and written in place. A field of it says how many parts each stage has.
        """
        fields: tuple[str, ...] = call._fields
        given = [call(*(0 for _ in fields)), layer]
        counts = [getattr(layer, count) for count in self._counts]
        # A NamedTuple of integers is a run of words.
        return self._bound(given, counts, lambda places: [places[0] + i for i in range(len(fields))])

    def bound(self, varying: str, **constant: Any) -> BoundKernel:
        """Return the kernel as a function of the `varying` parameters, integers; the others stay as they are.

        Elements of the arrays among the others are read and written in place. The numbers of parts never vary.
        """
        names = varying.split()
        if sorted([*names, *constant]) != sorted(self._parameters) or {*names} & {*self._counts}:
            raise TypeError(
                f"a kernel of {', '.join(self._parameters)} cannot be bound to {', '.join(constant)} with "
                f"{varying or 'nothing'} left: bind every parameter but those that vary, and every number of parts"
            )
        given = [constant.get(name, 0) for name in self._parameters]
        counts = [constant[count] for count in self._counts]
        return self._bound(given, counts, lambda places: [places[self._parameters.index(name)] for name in names])

    def _bound(
        self, given: list[Any], counts: Sequence[int], find_varying: Callable[[Sequence[int]], list[int]]
    ) -> BoundKernel:
        """Lay the arguments down; find_varying: from the word of each argument to the words that vary."""
        if (watched := _watched.get()) is not None:
            watched.add(self._module)
        if is_recording():
            return cast(BoundKernel, RecordedKernel(self, given, counts, find_varying))  # called as one is
        frame = np.empty(MOST_WORDS, np.int64)
        (words, noted, *places), parts = self._lay(frame.ctypes.data, *given)
        varying = find_varying(places)
        laid = build_record(frame[:words], noted, list(zip(parts, counts, strict=True)), varying)
        run = BoundKernel(compile_runner(len(varying)), laid.ctypes.data)
        run.held = laid, given, self
        return run

    @property
    def name(self) -> str:
        """The name of the kernel, which tells it from all others: it has a hash of the stages and their constants."""
        name: str = self._lay.__name__
        return name

    def compile_parts(self, given: Sequence[Any]) -> tuple[str, list[str]]:
        """Compile the stages for arguments of these types, anew and for no caller in Python.

        Returns the LLVM code, optimised, and the names of its functions of (address of a frame, part), one a stage.
        """
        dispatcher: Any = self._lay
        wanted = tuple(map(numba.typeof, given))
        fresh: Any = numba.njit(**FLAGS)(dispatcher.py_func)  # what was loaded from disk has no LLVM code
        fresh.compile((types.intp, *wanted))
        stages = [dispatcher.py_func.__globals__[f"_stage_{number}"] for number in range(len(self._counts))]
        compiled = [stage.overloads[types.intp, *wanted] for stage in stages]
        return fresh.inspect_llvm(fresh.signatures[0]), [f"{each.fndesc.mangled_name}.part" for each in compiled]

    @property
    def stats(self) -> Any:
        """Numba's statistics of where the compiled code came from."""
        return self._lay.stats  # type: ignore[attr-defined]


class BoundKernel(partial[bool]):
    """A kernel as a function of what varies. The rest lies in one piece, as in a model each call finds it cold."""

    held: Any  # objects that must live as long as the kernel may be called

    def __reduce__(self) -> Any:
        raise TypeError("an address means nothing to a copy")


def build_parallel_kernel(*stages: Callable[..., Any], makes_arrays: bool = False) -> ParallelKernel:
    """Return the kernel of these stages, which run one after the other.

    A stage is a function of the number of its part and of what the kernel is called with. The plural of that number's
    name says how many parts there are (part, parts): a parameter, or a field of the parameter `layer`. The calling
    thread runs a single part itself; with 0 parts the stage is left out.

    A part returns nothing, or an integer; the kernel returns whether all of them were 0. It raises RuntimeError if a
    part raised, and what that part held is never freed then. It is compiled when first bound or called, or loaded
    from disk.

    Only stages of a kernel that `makes_arrays` may create arrays, or call what returns one: for the others references
    to arrays are not counted, which saves two calls an array.

    Free variables of a stage are constants: numbers, bool, or tuples of them. Raises TypeError for what is no stage.
    """
    parameters = list(inspect.signature(stages[0]).parameters)[1:]
    given, counts = ", ".join(parameters), []
    for stage in stages:
        part, *others = inspect.signature(stage).parameters
        if others != parameters or not (f"{part}s" in parameters or "layer" in parameters):
            raise TypeError(
                f"{stage.__qualname__} must have a number, then the parameters of the first stage ({given}), one of "
                "them how many"
            )
        if not all(_is_constant(cell.cell_contents) for cell in stage.__closure__ or ()):
            # A compiled function is another one in each process, for example, and so the name on disk would be, too.
            raise TypeError(f"{stage.__qualname__} encloses more than numbers")
        counts.append(f"{part}s")
    # Kernels that other processes left on disk bring their symbols with them. So each kernel needs a name of its own.
    own = hashlib.sha256(b"".join(_identity(stage) for stage in stages)).hexdigest()[:16]
    name = f"{stages[0].__name__}_{own}"
    names: dict[str, Any] = {"__name__": __name__, "_laid": _laid, "_part": _part}
    flags = {**FLAGS, **WITHOUT_WRAPPER, **({} if makes_arrays else WITHOUT_COUNTS)}
    for number, stage in enumerate(stages):
        names[f"_stage_{number}"] = numba.njit(**flags)(_renamed(stage, f"{stage.__qualname__}_{own}"))
    parts = "".join(f"_part(_stage_{number}, ({given},)), " for number in range(len(stages)))
    # A function of exactly these parameters: with *args Numba takes as long as a part.
    exec(f"def {name}(_at, {given}):\n    return _laid(_at, ({given},)), ({parts})", names)
    lay = cache_on_disk(numba.njit(**FLAGS)(names[name]), stages[0], own)
    return ParallelKernel(parameters, counts, lay, stages[0].__module__)


def _is_constant(value: object) -> bool:
    """Return whether a value is a number, a bool, or a plain tuple of them."""
    return type(value) in (bool, int) or (type(value) is tuple and all(_is_constant(each) for each in value))


def _identity(stage: Callable[..., Any]) -> bytes:
    """Return what tells a stage from all others."""
    code, cells = stage.__code__, [cell.cell_contents for cell in stage.__closure__ or ()]
    return repr((stage.__module__, stage.__qualname__, code.co_code, code.co_consts, code.co_names, cells)).encode()


def _renamed(stage: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the same function under another name, which its symbols take over."""
    found = FunctionType(stage.__code__, stage.__globals__, stage.__name__, None, stage.__closure__)
    found.__qualname__, found.__module__ = name, stage.__module__
    return found


@with_literals
def _laid(typing_context: Any, at: Any, given: Any) -> Any:
    """Put the arguments down at an address, then a 0 where parts note what they return: a frame.

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
            raise TypeError(f"the arguments of a kernel take {words} words, and a frame holds {MOST_WORDS}")
        places = [noted, *(cgutils.gep_inbounds(builder, frame, 0, 0, i) for i in range(len(given.types)))]
        found = [builder.lshr(builder.sub(builder.ptrtoint(place, I64), args[0]), I64(3)) for place in places]
        return context.make_tuple(builder, signature.return_type, [I64(words), *found])

    return types.UniTuple(types.intp, 2 + len(given.types))(at, given), generate


def _frame_type(arguments: ir.Type) -> ir.Type:
    return ir.LiteralStructType([arguments, I64])


def _not_counted(context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> ir.Value:
    """Return the same arrays without reference counts: what Numba counts by is gone when they are bound."""
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
    """Return the address of a function of (address of a frame, part) that runs this part of the stage."""
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
        status, result = context.call_conv.call_function(inside, declared, returned, wanted, [part.args[1], *each])
        noted = I64(0)
        if returned != types.none:
            result = context.cast(inside, result, returned, types.intp)
            noted = inside.zext(inside.icmp_signed("!=", result, I64(0)), I64)
        noted = inside.select(status.is_error, I64(RAISED), noted)
        inside.atomic_rmw("or", cgutils.gep_inbounds(inside, frame, 0, 1), noted, "monotonic")
        inside.ret_void()
        return builder.ptrtoint(part, I64)

    return types.intp(stage, given), generate
