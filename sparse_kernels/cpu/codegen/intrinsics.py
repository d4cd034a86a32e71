"""Make functions that emit vector code callable from Numba kernels.

An emitter is a function of a builder, a form and operands. The form holds what is known when a kernel is compiled:
tile sizes, lanes, options. The operands are what the kernel works out as it runs. In a kernel the form is a tuple of
integers that the kernel encloses, or builds of literals; operands are integers, or NamedTuples of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from llvmlite import ir
from numba import errors, types
from numba.extending import intrinsic


def with_literals(function: Callable[..., Any]) -> Any:
    """Return an intrinsic whose typing function sees literal types where arguments are literals."""
    # To a type checker, what @intrinsic returns would take the typing context too.
    return intrinsic(prefer_literal=True)(function)


def vector_code(form: Any = None) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that makes an emitter an intrinsic, a function of kernels that returns nothing.

    form: the NamedTuple of the emitter's form, None if it has none. The emitter gets the builder, the form, and the
    operands. Operands are int64 or float32 values, or NamedTuples of them, as the kernel gave them.
    """

    def decorate(emit_code: Callable[..., None]) -> Any:
        @with_literals
        @wraps(emit_code)
        def typed(typing_context: Any, *given: Any) -> Any:
            if form is not None and not all(isinstance(each, types.Literal) for each in given[0].types):
                raise errors.TypingError(f"the form of {emit_code.__name__} must be literal, not {given[0]}")

            def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
                kinds, first = signature.args, 0 if form is None else 1
                operands = [
                    _operand(context, builder, *each) for each in zip(kinds[first:], args[first:], strict=True)
                ]
                if form is not None:
                    operands.insert(0, form(*(int(each.literal_value) for each in kinds[0].types)))
                emit_code(builder, *operands)
                return context.get_dummy_value()

            return types.void(*given), generate

        return typed

    return decorate


def _operand(context: Any, builder: ir.IRBuilder, kind: Any, value: ir.Value) -> Any:
    """Return an operand as an int64 or float32, or as a NamedTuple of them."""
    named: Any = kind
    if isinstance(kind, types.BaseNamedTuple):
        fields = (builder.extract_value(value, i) for i in range(len(named.types)))
        pairs = zip(named.types, fields, strict=True)
        return named.instance_class(*(_operand(context, builder, *each) for each in pairs))
    return context.cast(builder, value, kind, types.float32 if isinstance(kind, types.Float) else types.intp)
