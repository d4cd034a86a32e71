"""Calls of a user's code. What it raises becomes one sentence with the user's exception and its place."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from latbench.errors import UsageError

Result = TypeVar("Result")

_ROOT = Path(__file__).resolve().parents[1]
_OWN = tuple(_ROOT / package for package in ("latbench", "search", "cost_models", "sparse_kernels"))
_BUNDLED = _ROOT / "search" / "tasks"
_STANDARD = Path(sysconfig.get_paths()["stdlib"])


def call_user_code(what: str, function: Callable[[], Result], advice: str = "") -> Result:
    """Return the result of a user's function.

    Parameters
    ----------
    what
        What runs, as the subject of the sentence: "task digits: loss()".
    function
        Calls the user's code.
    advice
        What the user can do, appended to the sentence.

    Raises
    ------
    UsageError
        The function raised an exception, or called `sys.exit`.
    """
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} raised {describe_error(error)}{advice}") from error


def describe_error(error: BaseException) -> str:
    """Return the exception's class, its text and its place: "KeyError: 'lost' (my_task.py:9)"."""
    text = str(error).strip()
    return f"{type(error).__name__}{f': {text}' if text else ''}{_find_place(error)}"


def _find_place(error: BaseException) -> str:
    """Return the innermost line of the user's own files as ` (file:line)`, or else that of a library."""
    if isinstance(error, SyntaxError):
        return ""  # its text has the place
    frames = [
        (Path(frame.f_code.co_filename), line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<")
    ]
    outside = [(path, line) for path, line in frames if not _is_own(path)]
    users = [(path, line) for path, line in outside if not _is_library(path)]
    for path, line in reversed(users or outside):
        return f" ({path.name}:{line})"
    return ""


def _is_own(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _OWN) and not path.is_relative_to(_BUNDLED)


def _is_library(path: Path) -> bool:
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return bool(installed) or path.is_relative_to(_STANDARD)
