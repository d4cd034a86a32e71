"""The texts of options as values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer

from latbench.base.engine_registry import NUMBA
from latbench.base.recipe_names import AUTO_RECIPE
from latbench.errors import UsageError

COLUMN_VALUE = "COLUMN=VALUE,..."

SECOND_SETTINGS: dict[str, Callable[[str], Any]] = {
    "target": float, "workload": str, "model": Path, "network": str, "device": str, "backend": str, "threads": int,
    "batch": int, "dense_seconds": float, "fixed_seconds": float,
}  # fmt: skip
"""The settings that --also-with takes.

Both tables are of one model and one profile, so the settings of layers and options hold for both. How times were
taken is each table's own.
"""


def split_list(param: typer.CallbackParam, texts: list[str] | None) -> list[str] | None:
    """Return the values of an option that takes several: separated by commas, repeated, or both.

    This is the callback of every such option, so that all commands read lists alike. A value that is given twice
    counts once. Raises UsageError for an empty value.
    """
    return _without_repeats(_split(max(param.opts, key=len), texts, lambda text: text.split(",")))


def parse_precisions(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the types in which layers may be multiplied, from the most precise; float32 is always among them.

    Raises UsageError for an unknown type.
    """
    from latbench.base.engine_registry import FLOAT32, PRECISIONS

    if unknown := [text for text in texts or () if text not in PRECISIONS]:
        raise UsageError(f"unknown precision {unknown[0]!r}: known are {', '.join(PRECISIONS)}")
    return tuple(each for each in PRECISIONS if each == FLOAT32 or each in (texts or ()))


def parse_rival_type(text: str | None) -> str:
    """Return the type of `--over`, empty where it is not given. Raises UsageError for an unknown one."""
    from latbench.base.engine_registry import PRECISIONS

    if text is not None and text not in PRECISIONS:
        raise UsageError(f"unknown type {text!r} for --over: known are {', '.join(PRECISIONS)}")
    return text or ""


def check_deployed_form(form: str, backend: str = NUMBA) -> None:
    """Raise UsageError for an unknown form, or one in which a backend's models cannot be deployed."""
    from latbench.base.deployed_forms import FORM_PHRASES, PYTHON

    if form not in FORM_PHRASES:
        raise UsageError(f"unknown form {form!r} to deploy: known are {', '.join(FORM_PHRASES)}")
    if form != PYTHON and backend != NUMBA:
        raise UsageError(f"--deploy {form} does not go with {backend}: exports run latbench's own CPU kernels")


def split_pairs(param: typer.CallbackParam, texts: list[str] | None) -> list[str] | None:
    """Return the values of an option that takes several NAME=VALUE, as `split_list`.

    A part without an equals sign belongs to the value before it, so a value may hold commas: partition=gpu,debug.
    """
    return _without_repeats(_split(max(param.opts, key=len), texts, lambda text: re.split(r",(?=[^,=]*=)", text)))


def split_inputs(param: typer.CallbackParam, texts: list[str] | None) -> list[str] | None:
    """Return the inputs of a model, as `split_list`; two inputs may be alike, so a repeated one counts twice.

    Raises UsageError for 1,3,224,224, which is one input whose sizes are joined by commas instead of x.
    """
    option = max(param.opts, key=len)
    for text in texts or ():
        if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)+", text):
            joined = re.sub(r"\s*,\s*", "x", text.strip())
            raise UsageError(f"{option} takes {_INPUT_FORM}, not {text!r}: one input of these sizes is {joined}")
    return _split(option, texts, lambda text: text.split(","))


def _without_repeats(values: list[str] | None) -> list[str] | None:
    return values and list(dict.fromkeys(values))


def _split(option: str, texts: list[str] | None, split: Callable[[str], list[str]]) -> list[str] | None:
    if not texts:
        return None
    values = [value.strip() for text in texts for value in split(text)]
    if "" in values:
        raise UsageError(f"{option} has an empty value in {','.join(texts)!r}: separate values by single commas")
    return values


def parse_duration(text: str) -> float:
    """Return the seconds of a number with s, m or h behind it, or nothing for seconds.

    Raises UsageError for any other text.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([smh]?)", text.strip())
    if found is None:
        raise UsageError(f"a duration is a number followed by s, m or h, such as 90s or 10m, not {text!r}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_train_budget(text: str | None, recipe: str | None) -> float | None:
    """Return the seconds of `--train-budget`; None where it is not given.

    Raises UsageError for a text that is no time above 0, or beside a recipe that has a length of its own.
    """
    if text is None:
        return None
    if recipe not in (None, AUTO_RECIPE):
        raise UsageError(f"--train-budget goes with --recipe {AUTO_RECIPE}, not {recipe}: a recipe has its own steps")
    seconds = parse_duration(text)
    if seconds <= 0:
        raise UsageError(f"--train-budget is a time above 0, such as 10m, not {text}")
    return seconds


def parse_column_values(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Return the value by column of a repeated option COLUMN=VALUE.

    Raises UsageError for a text of another form, or a column that is given twice.
    """
    found: dict[str, str] = {}
    for text in texts or ():
        column, separator, value = text.partition("=")
        if not (column and separator and value):
            raise UsageError(f"{option} takes COLUMN=VALUE, not {text!r}")
        if column in found:
            raise UsageError(f"{option} {column} is given twice: {found[column]} and {value}")
        found[column] = value
    return found


def parse_second_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings of --also-with by name. Raises UsageError for an unknown setting or a wrong value."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        key = name.replace("-", "_")
        try:
            found[key] = SECOND_SETTINGS[key](value)
        except (KeyError, ValueError):
            known = ", ".join(SECOND_SETTINGS)
            raise UsageError(f"--also-with takes {known}, as in batch=16, not {text!r}") from None
    return found


def parse_sizes(option: str, form: str, text: str, count: int | None = None) -> list[int]:
    """Return the whole numbers of a text such as 768x768x128.

    `form` describes the text for the message; `count` is how many numbers it has, None for any number of them.
    Raises UsageError for any other text, and for numbers below 1.
    """
    try:
        numbers = [int(number) for number in text.split("x")]
    except ValueError:
        numbers = []
    if not numbers or (count is not None and len(numbers) != count):
        raise UsageError(f"{option} takes {form}, not {text!r}")
    if min(numbers) < 1:
        raise UsageError(f"{option} takes numbers of at least 1, not {text}")
    return numbers


class ModelInput(NamedTuple):
    """One input of a model: name (None: by position), sizes, element type, and the integer that all values are below.

    Without `bound`, floats are zeros, and all others are ones, as in a mask.
    """

    name: str | None
    sizes: list[int]
    dtype: str
    bound: int | None


INPUT_TYPES = ("float32", "int64", "int32", "bool")
_INPUT_FORM = "sizes joined by x such as 1x3x224x224, or NAME:SIZES:TYPE:BOUND such as ids:1x128:int64:30522"


def parse_model_inputs(option: str, texts: Sequence[str]) -> list[ModelInput]:
    """Return the inputs of a repeated option. Raises UsageError for another text, or a name that comes twice."""
    inputs = [_parse_model_input(option, text) for text in texts]
    names = [given.name for given in inputs if given.name is not None]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{option} gives the input {twice[0]} twice; each name is one argument of the model")
    return inputs


def _parse_model_input(option: str, text: str) -> ModelInput:
    first, *rest = text.split(":")
    named = first.isidentifier() and bool(rest)
    sizes, dtype, bound, *more = [*(rest if named else [first, *rest]), "", ""]
    if any(more):
        raise UsageError(f"{option} takes {_INPUT_FORM}, not {text!r}")
    if (dtype or INPUT_TYPES[0]) not in INPUT_TYPES:
        raise UsageError(f"{option} takes the types {', '.join(INPUT_TYPES)}, not {dtype!r} as in {text!r}")
    if bound and not (dtype.startswith("int") and bound.isdecimal() and int(bound) > 0):
        raise UsageError(f"{option}: a bound is a positive whole number after int64 or int32, not as in {text!r}")
    numbers = parse_sizes(option, _INPUT_FORM, sizes)
    return ModelInput(first if named else None, numbers, dtype or INPUT_TYPES[0], int(bound) if bound else None)


def check_share(option: str, value: float, *, zero: bool = False) -> None:
    """Raise UsageError unless a number lies between 0 and 1; `zero`: 0 itself is allowed."""
    if not (0 < value < 1 or (zero and value == 0)):
        below = "from 0 up to, but not including, 1" if zero else "between 0 and 1"
        raise UsageError(f"{option} is a share {below}, not {value:g}")


def check_positive(option: str, value: float) -> None:
    """Raise UsageError unless a share is positive and finite."""
    if not 0 < value < math.inf:
        raise UsageError(f"{option} is a positive share such as 0.02, not {value:g}")
