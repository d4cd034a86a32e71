"""The help page of a command: every argument and option under the name of what it takes."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand


class CommandWithHelp(TyperCommand):
    """A command whose help shows the metavar of each argument alone; Typer adds the Python type behind it."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options."""
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                name = record[0] if parameter.param_type_name == "option" else parameter.metavar or record[0]
                rows[parameter.param_type_name].append((name, record[1]))
        for kind, heading in (("argument", "Arguments"), ("option", "Options")):
            if rows[kind]:
                with formatter.section(heading):
                    formatter.write_dl(rows[kind])


def find_summary(docstring: str | None) -> str:
    """Return the first sentence of a docstring as one line, which `latbench --help` prints whole."""
    return re.split(r"(?<=\.)\s", " ".join((docstring or "").split()), maxsplit=1)[0]
