"""The entry point: parse the command line, call the command, report an expected failure in one line.

Each command is one function in `latbench/cli/commands`. An expected failure ends with the exit code of its class in
`latbench.errors`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
from typing import Annotated, Any, TextIO, cast

import typer

from latbench.cli.command_help import CommandWithHelp, find_summary
from latbench.cli.examples import build_epilog
from latbench.cli.options.common_options import Quiet, Verbose
from latbench.cli.verbosity import accept_verbosity, is_verbose, print_notes, set_verbosity
from latbench.errors import EnvironmentUnusable, Incomplete, LatbenchError, UsageError
from latbench.machines.processors import limit_default_threads

INTERRUPTED = 130  # Typer's exit code after Ctrl-C
FAULT = 70  # the exit code of an error that nobody expects: EX_SOFTWARE of sysexits.h

# In the order a user meets them: the commands of a job, then those for tables and machines.
COMMANDS = [
    "new", "check", "run", "trace", "plan", "sweep", "fit", "predict", "search", "prune", "verify", "export",
    "report", "solve", "compare", "validate", "merge", "import", "layers", "doctor", "setup",
]  # fmt: skip
_MODULES = {"import": "import_timings"}  # of commands whose names are keywords of Python


def build_application(asked: str = "") -> typer.Typer:
    """Build the command line with the command `asked`, or with all commands for any other text.

    Setting up the options of all commands takes longer than most commands run.
    """
    app = typer.Typer(
        help="Measure which sparsity pays on your hardware, and prune a model to a verified speedup.",
        epilog="`latbench COMMAND --help` shows the options, two examples and the exit codes of a command.",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_global_options)
    for command in [asked] if asked in COMMANDS else COMMANDS:
        name = _MODULES.get(command, command)
        function = getattr(importlib.import_module(f"latbench.cli.commands.{name}"), name)
        app.command(
            name=command,
            cls=CommandWithHelp,
            short_help=find_summary(function.__doc__),
            epilog=build_epilog(command),
        )(accept_verbosity(function))
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"latbench {importlib.metadata.version('latbench')}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Version of latbench, and nothing else."
        ),
    ] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
) -> None:
    set_verbosity(verbose, quiet)


def main() -> None:
    """Run the command line and exit with the code of its outcome."""
    stdout, sys.stdout = sys.stdout, cast(TextIO, _Output(sys.stdout))
    try:
        with print_notes():
            code = _run(sys.argv[1:] or ["--help"])
    finally:
        sys.stdout.flush()
        sys.stdout = stdout
    sys.exit(code)


def _run(given: list[str]) -> int:
    """Run a command line and return its exit code; a failure is one line on stderr."""
    try:
        limit_default_threads()
        asked = next((word for word in given if not word.startswith("-")), "")  # no option before it takes a value
        code: int = build_application(asked)(given, prog_name="latbench", standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except LatbenchError as error:
        return _fail(error)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(Incomplete("interrupted; finished results are kept, and the same command goes on from there"))
    except OSError as error:
        return _fail(EnvironmentUnusable(f"{error.filename or 'the system'}: {error.strerror or error}"))
    except Exception as error:  # noqa: BLE001 - a fault of latbench is one line, too, unless --verbose is given
        if (message := _misuse(error)) is None:
            return _fail_unexpectedly(error)
        return _fail(UsageError(message))
    return code


class _Output:
    """Standard output whose reader may leave (`latbench ... | head`): the command continues without failure."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text; drop it once the reader has left."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        """Flush the stream, unless the reader has left."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._discard()

    def _discard(self) -> None:
        # This also discards what Python still writes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _misuse(error: Any) -> str | None:
    """Return what Typer says of a command line that it does not understand; None for any other error.

    Only these errors of Typer format a message. No class for them is part of every version of its interface.
    """
    if not hasattr(error, "format_message"):
        return None
    context = getattr(error, "ctx", None)
    return f"{error.format_message().rstrip('.')}: see `{context.command_path if context else 'latbench'} --help`"


def _fail(error: LatbenchError) -> int:
    """Print the error as one line and return its exit code; --verbose shows what raised it before."""
    if is_verbose() and error.__cause__ is not None and not isinstance(error.__cause__, LatbenchError):
        traceback.print_exception(error.__cause__)
    line = " ".join(str(error).split())
    sys.stderr.write(f"latbench: {line}\n")
    return error.exit_code


def _fail_unexpectedly(error: Exception) -> int:
    """Print an error that no part of latbench expects, and return its exit code."""
    if is_verbose():
        traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(f"{type(error).__name__}: {error}".split())
    advice = "please report it" if is_verbose() else "--verbose shows the traceback for a report"
    sys.stderr.write(f"latbench: a fault of latbench, {said} ({place.filename}, line {place.lineno}): {advice}\n")
    return FAULT


if __name__ == "__main__":
    main()
