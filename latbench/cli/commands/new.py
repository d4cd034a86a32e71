"""`latbench new`: a task file from a template."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Template(StrEnum):
    """The templates of task files."""

    vision = "vision"
    text = "text"


NewFile = Annotated[Path, typer.Argument(metavar="FILE", help="File to write, such as my_task.py.")]
TemplateName = Annotated[
    Template,
    typer.Option(
        "--template", help="Template: vision, a small CNN on images, or text, a transformer encoder on token ids."
    ),
]


def new(path: NewFile, template: TemplateName = Template.vision) -> None:
    """Write a task file that runs as it stands. Put your own model and data where REPLACE is written in it."""
    from importlib.resources import files

    from latbench.base.files import write_text_atomically
    from latbench.errors import UsageError

    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UsageError(f"a task is a Python file with a plain name such as my_task.py, not {path.name!r}")
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists already and was not changed; give another name, or remove the file first")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to write {path.name} to; make it first")
    text = files("search.templates").joinpath(f"{template.value}_task.py").read_text(encoding="utf-8")
    write_text_atomically(path, text)
    typer.echo(f"{path}: written from the template {template.value}. It runs as it stands.")
    typer.echo("Put your own model and data where REPLACE is written.")
    typer.echo(f"Next: latbench check {path}")
