"""The reference page of the commands, generated from the command line that Typer builds.

`make docs` writes it to docs/reference/commands.md.
"""

from __future__ import annotations

import sys
import textwrap
from typing import Any

import typer

from latbench.cli.main import COMMANDS, build_application

_HEAD = """# Commands

These are all commands with their arguments and options, as `latbench COMMAND --help` prints them.
[Exit codes](exit_codes.md) has its own page.

This page is generated: `make docs`.
"""


def format_commands_page() -> str:
    """Return the page as Markdown."""
    group: Any = typer.main.get_command(build_application())
    return "\n".join([_HEAD, *(_format_command(name, group.commands[name]) for name in COMMANDS)])


def _format_command(name: str, command: Any) -> str:
    """Return the section of one command: its summary, its usage, its arguments and options, examples."""
    context = command.context_class(command, info_name=f"latbench {name}")
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    usage = " ".join(["latbench", name, *command.collect_usage_pieces(context)])
    parts = [f"## {name}", _unwrap(command.help), f"```text\n{usage}\n```"]
    for title, given in (("argument", arguments), ("option", options)):
        if given:
            rows = "\n".join(_format_row(*each.get_help_record(context)) for each in given)
            parts.append(f"| {title} | meaning |\n|---|---|\n{rows}")
    if examples := _find_examples(command.epilog):
        parts.append(f"```sh\n{examples}\n```")
    return "\n\n".join(parts) + "\n"


def _find_examples(epilog: str | None) -> str:
    """Return the command lines below `Examples:` in what follows the help; empty if there are none."""
    for paragraph in (epilog or "").replace("\b", "").split("\n\n"):
        title, _, lines = paragraph.strip().partition("\n")
        if title == "Examples:":
            return textwrap.dedent(lines)
    return ""


def _unwrap(text: str | None) -> str:
    """Return the paragraphs of a help text, each on one line."""
    paragraphs = (text or "").replace("\b", "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _format_row(name: str, meaning: str) -> str:
    escaped = " ".join(meaning.split()).replace("|", r"\|").replace("*", r"\*").replace("<", "&lt;")
    return f"| `{name.replace('|', ' or ')}` | {escaped} |"


if __name__ == "__main__":
    sys.stdout.write(format_commands_page())
