"""The page of commands is what the command line says."""

import re
from pathlib import Path

import typer

from latbench.cli.commands_page import format_commands_page
from latbench.cli.main import COMMANDS, build_application

PAGE = Path(__file__).parents[3] / "docs/reference/commands.md"


def test_the_page_is_of_today() -> None:
    assert PAGE.read_text() == format_commands_page(), "make docs"


def test_every_command_has_a_section_with_all_its_options() -> None:
    group = typer.main.get_command(build_application())
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", format_commands_page(), re.MULTILINE | re.DOTALL))
    assert list(sections) == COMMANDS
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        for option in command.params:
            if option.param_type_name == "option" and not option.hidden:
                assert all(f"`{word}" in sections[name] or f" {word}" in sections[name] for word in option.opts), name


def test_the_page_does_not_depend_on_the_width_of_the_terminal(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("COLUMNS", "40")
    assert format_commands_page() == PAGE.read_text()
