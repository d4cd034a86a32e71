"""`latbench setup`: engines that need an environment of their own."""

from __future__ import annotations

import logging

import typer

from latbench.cli.options.engine_options import PythonProgram, RemoveEnvironment, SetupEngine

_LOG = logging.getLogger(__name__)


def setup(engine: SetupEngine, python: PythonProgram = None, remove: RemoveEnvironment = False) -> None:
    """Install an engine into an environment of its own in latbench's cache, and run it once."""
    import time

    from latbench.backends.cpu import deepsparse
    from latbench.backends.cpu import deepsparse_environment as environment
    from latbench.base.engine_registry import DEEPSPARSE, is_deepsparse
    from latbench.errors import UsageError

    if not is_deepsparse(engine):
        raise UsageError(f"unknown engine {engine!r}: known is {DEEPSPARSE}")
    if remove:
        typer.echo(f"{environment.find_folder()} is {'removed' if environment.remove_environment() else 'not there'}")
        return
    typer.echo(environment.LICENCE)
    started = time.monotonic()
    made = environment.install_environment(deepsparse.check_environment, python, _LOG.warning)
    how = f"installed in {time.monotonic() - started:.0f} s" if made else "installed already"
    typer.echo(f"DeepSparse {environment.VERSION} is {how}, and its results are right: {environment.find_folder()}")
