"""How much is said on stderr beside the results: --quiet and --verbose.

Every package of latbench says what it does by Python's `logging`: warnings are notes for the user, information is
detail for --verbose. While a command runs, this file prints them as lines that begin with `latbench: `.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from latbench.cli.options.common_options import Quiet, Verbose
from latbench.errors import UsageError

PACKAGES = ("latbench", "search", "cost_models", "sparse_kernels")
QUIET, NORMAL, VERBOSE = logging.ERROR, logging.WARNING, logging.INFO

_level = NORMAL


class _LineHandler(logging.Handler):
    """Prints each record as one line on the stderr of that moment, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"latbench: {record.getMessage()}\n")


@contextlib.contextmanager
def print_notes() -> Iterator[None]:
    """Print the notes of all packages while the context is open, and details once --verbose is given."""
    handler = _LineHandler()
    loggers = [logging.getLogger(name) for name in PACKAGES]
    _apply(NORMAL)
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False  # a task may print all records of the root logger
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
            logger.setLevel(logging.NOTSET)


def set_verbosity(verbose: bool, quiet: bool) -> None:
    """Apply --verbose or --quiet. Raises UsageError where both were given, before and after the command."""
    wanted = {VERBOSE} if verbose else set()
    if quiet:
        wanted.add(QUIET)
    if len(wanted | ({_level} - {NORMAL})) > 1:
        raise UsageError("--quiet and --verbose ask for opposite things: give one of them")
    if wanted:
        _apply(wanted.pop())


def is_quiet() -> bool:
    """Return whether only results and errors are printed."""
    return _level == QUIET


def is_verbose() -> bool:
    """Return whether details are printed."""
    return _level == VERBOSE


def _apply(level: int) -> None:
    global _level
    _level = level
    for name in PACKAGES:
        logging.getLogger(name).setLevel(level)


def accept_verbosity(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options --verbose and --quiet, which apply before it runs."""

    @functools.wraps(command)
    def run(*, verbose: bool, quiet: bool, **given: Any) -> None:
        set_verbosity(verbose, quiet)
        command(**given)

    signature = inspect.signature(command, eval_str=True)
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in (("verbose", Verbose), ("quiet", Quiet))
    ]
    parameters = [*signature.parameters.values(), *own]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run
