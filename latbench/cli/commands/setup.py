"""`latbench setup`: engines that need an environment of their own."""

from __future__ import annotations

from typing import Annotated

import typer


def setup(
    engine: Annotated[str, typer.Argument(help="deepsparse: the sparse CPU engine, for evaluation only.")],
    python: Annotated[
        str | None, typer.Option(help="The Python to make its environment with; by default one that does is found.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete the environment.")] = False,
) -> None:
    """Install an engine into an environment of its own, beside latbench's cache, and run it once."""
    import time

    from latbench.backends.cpu import deepsparse
    from latbench.backends.cpu import deepsparse_environment as environment
    from latbench.base.engines import DEEPSPARSE, is_deepsparse
    from latbench.errors import UsageError

    if not is_deepsparse(engine):
        raise UsageError(f"unknown engine {engine!r}: known is {DEEPSPARSE}")
    if remove:
        typer.echo(f"{environment.folder()} is {'removed' if environment.remove() else 'not there'}")
        return
    typer.echo(environment.LICENCE)
    started = time.monotonic()
    made = environment.install(deepsparse.check, python, lambda line: typer.echo(f"latbench: {line}", err=True))
    how = f"installed in {time.monotonic() - started:.0f} s" if made else "there already"
    typer.echo(f"DeepSparse {environment.VERSION} is {how} and computes what it should: {environment.folder()}")
