"""The roof: parse, call, print. Each verb is one function in `latbench/commands`; nothing below imports this.

Expected failures end as one line on stderr and the exit code of their class in `latbench.errors`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from typing import Annotated, Any, TextIO, cast

import typer

from latbench.errors import EnvironmentUnusable, Incomplete, LatbenchError, UsageError

INTERRUPTED = 130  # what Typer answers after Ctrl-C

# What it raises for a command line it does not understand; of those classes it exports only what is below this one.
_Misused: type[Exception] = typer.BadParameter.__mro__[1]

# In the order a user meets them: the job's verbs, then what helps with tables and machines.
VERBS = [
    "trace", "plan", "sweep", "fit", "predict", "search", "prune", "verify", "report",
    "solve", "compare", "validate", "merge", "import", "layers", "doctor", "setup",
]  # fmt: skip
_MODULES = {"import": "import_timings"}  # of verbs that are no names in Python


def application(asked: str = "") -> typer.Typer:
    """Return the command line: one command for each module of `latbench.cli.commands`, or only the one `asked` for.

    Setting up the options of all commands takes longer than most commands run.
    """
    app = typer.Typer(
        help="Which sparsity pays on your hardware, and a pruned model that really reaches the speedup asked for.",
        pretty_exceptions_enable=False,
        add_completion=False,
        rich_markup_mode=None,
    )
    app.callback()(_said_before_the_verb)
    for verb in [asked] if asked in VERBS else VERBS:
        name = _MODULES.get(verb, verb)
        app.command(name=verb)(getattr(importlib.import_module(f"latbench.cli.commands.{name}"), name))
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"latbench {importlib.metadata.version('latbench')}")
        raise typer.Exit


def _said_before_the_verb(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with the code that says how it went."""
    stdout, sys.stdout = sys.stdout, cast(TextIO, _Output(sys.stdout))
    try:
        given = sys.argv[1:] or ["--help"]
        code = application(given[0])(given, standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except LatbenchError as error:
        code = _fail(error)
    except _Misused as error:
        code = _fail(UsageError(_sentence(error)))
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(Incomplete("interrupted; what is finished is kept, and the same command goes on from there"))
    except OSError as error:
        code = _fail(EnvironmentUnusable(f"{error.filename or 'the system'}: {error.strerror or error}"))
    finally:
        sys.stdout.flush()
        sys.stdout = stdout
    sys.exit(code)


class _Output:
    """Standard output whose reader may go away (`latbench ... | head`): that ends no command and is no failure."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As that of the stream."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._to_nobody()
            return len(text)

    def flush(self) -> None:
        """As that of the stream."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._to_nobody()

    def _to_nobody(self) -> None:
        # Also what Python still has to write at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _sentence(error: Any) -> str:
    """What Typer complains of, and where help is."""
    command = error.ctx.command_path if error.ctx else "latbench"
    return f"{error.format_message().rstrip('.')}: see `{command} --help`"


def _fail(error: LatbenchError) -> int:
    line = " ".join(str(error).split())
    sys.stderr.write(f"latbench: {line}\n")
    return error.exit_code


if __name__ == "__main__":
    main()
