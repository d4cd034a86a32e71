"""The entry point: parse the command line, call the command, report an expected failure in one line.

Each command is one function in `latbench/cli/commands`. An expected failure ends with the exit code of its class in
`latbench.errors`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from typing import Annotated, Any, TextIO, cast

import typer

from latbench.errors import EnvironmentUnusable, Incomplete, LatbenchError, UsageError
from latbench.machines.processors import limit_default_threads

INTERRUPTED = 130  # Typer's exit code after Ctrl-C

# In the order a user meets them: the commands of a job, then those for tables and machines.
COMMANDS = [
    "new", "check", "run", "trace", "plan", "sweep", "fit", "predict", "search", "prune", "verify", "report",
    "solve", "compare", "validate", "merge", "import", "layers", "doctor", "setup",
]  # fmt: skip
_MODULES = {"import": "import_timings"}  # of commands whose names are keywords of Python


def build_application(asked: str = "") -> typer.Typer:
    """Build the command line with the command `asked`, or with all commands for any other text.

    Setting up the options of all commands takes longer than most commands run.
    """
    app = typer.Typer(
        help="Measure which sparsity pays on your hardware, and prune a model to a verified speedup.",
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode=None,
    )
    app.callback()(_global_options)
    for command in [asked] if asked in COMMANDS else COMMANDS:
        name = _MODULES.get(command, command)
        app.command(name=command)(getattr(importlib.import_module(f"latbench.cli.commands.{name}"), name))
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
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with the code of its outcome."""
    stdout, sys.stdout = sys.stdout, cast(TextIO, _Output(sys.stdout))
    try:
        given = sys.argv[1:] or ["--help"]
        limit_default_threads()
        code = build_application(given[0])(given, prog_name="latbench", standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except LatbenchError as error:
        code = _fail(error)
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(Incomplete("interrupted; finished results are kept, and the same command goes on from there"))
    except OSError as error:
        code = _fail(EnvironmentUnusable(f"{error.filename or 'the system'}: {error.strerror or error}"))
    except Exception as error:
        if (message := _misuse(error)) is None:
            raise
        code = _fail(UsageError(message))
    finally:
        sys.stdout.flush()
        sys.stdout = stdout
    sys.exit(code)


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
    line = " ".join(str(error).split())
    sys.stderr.write(f"latbench: {line}\n")
    return error.exit_code


if __name__ == "__main__":
    main()
