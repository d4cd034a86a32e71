"""The help of every command and option: a noun phrase, short sentences, the default and the unit."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import typer

from latbench.cli import main

MOST_WORDS = 25

NO_NOUN = {
    "a", "also", "an", "as", "at", "by", "for", "from", "how", "if", "in", "it", "likewise", "needed", "of", "on",
    "only", "such", "that", "the", "these", "this", "those", "to", "what", "when", "where", "whether", "which", "who",
    "why", "with",
}  # fmt: skip
VERBS = {
    "add", "allow", "compare", "compute", "delete", "divide", "find", "give", "install", "keep", "learn", "list",
    "measure", "name", "note", "predict", "print", "prune", "read", "replace", "replaces", "run", "save", "say",
    "select", "show", "skip", "start", "stop", "take", "time", "train", "try", "use", "write",
}  # fmt: skip
"""Verbs with which a help text could start; a word that is a noun as well counts where no noun follows it."""

NOUNS_TOO = re.compile(r"(list of|measure of|name of|time limit|print of|plan for|show of)")
UNITS = {"seconds": "second", "budget": "second", "wait": "second", "resolution": "second", "bytes": "byte"}
"""A word in the name of an option, and the unit that its help must name."""


class Shown(NamedTuple):
    """An argument or option: its name on the command line, its help, and whether Typer prints a default."""

    name: str
    help: str | None
    default_is_shown: bool = True


def faults(shown: Shown) -> list[str]:
    """What is wrong with a help text."""
    if not shown.help:
        return ["no help"]
    found = []
    first = re.split(r"[\s,:;.]", shown.help, maxsplit=1)[0].lower()
    if first in NO_NOUN or (first in VERBS and not NOUNS_TOO.match(shown.help.lower())):
        found.append(f"starts with {first!r}, no noun")
    for sentence in sentences(shown.help):
        if (words := len(sentence.split())) > MOST_WORDS:
            found.append(f"a sentence of {words} words")
    if not shown.help.endswith("."):
        found.append("no full stop")
    for word, unit in UNITS.items():
        if word in shown.name.split("-") and unit not in shown.help.lower():
            found.append(f"no unit: {unit}")
    if not shown.default_is_shown and "default" not in shown.help.lower():
        found.append("no default")
    return found


def sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.:;])\s+", text) if part]


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(main.build_application())
    return dict(group.commands)


def every_option() -> Iterator[Any]:
    for verb, command in commands().items():
        for option in command.params:
            if option.name == "help":
                continue
            name = max(option.opts, key=len).removeprefix("--")
            stated = option.required or getattr(option, "is_flag", False) or option.default not in (None, "")
            yield pytest.param(Shown(name, option.help, stated), id=f"{verb} {name}")


@pytest.mark.parametrize("shown", list(every_option()))
def test_the_help_of_an_option_is_plain(shown: Shown) -> None:
    assert faults(shown) == []


@pytest.mark.parametrize("verb", list(commands()))
def test_the_help_of_a_command_is_plain(verb: str) -> None:
    text = " ".join((commands()[verb].help or "").split())
    first, *_ = text.split()
    assert first[0].isupper() and first.lower() not in NO_NOUN
    assert all(len(sentence.split()) <= MOST_WORDS for sentence in sentences(text))


def test_all_of_them_are_looked_at() -> None:
    assert len(commands()) == len(main.COMMANDS)
    assert len(list(every_option())) > 120


@pytest.mark.parametrize(
    ("shown", "fault"),
    [
        (Shown("seed", "Of the synthetic weights and of the order."), "starts with 'of'"),
        (Shown("processes", "That prune layers and judge profiles."), "starts with 'that'"),
        (Shown("also-with", "What is to be said of --also itself, or holds otherwise there."), "starts with 'what'"),
        (Shown("sessions", "Measure each point in so many processes."), "starts with 'measure'"),
        (Shown("cpu", ""), "no help"),
        (Shown("rows", "Number of points"), "no full stop"),
        (Shown("time-budget", "Time limit for the sweep."), "no unit: second"),
        (Shown("dense-seconds", "Duration of the dense model."), "no unit: second"),
        (Shown("most-bytes", "Upper bound on the weights."), "no unit: byte"),
        (Shown("model", "Cost model from latbench fit.", default_is_shown=False), "no default"),
        (Shown("batches", " ".join(["Batches", *["and"] * 25]) + "."), "a sentence of 26 words"),
    ],
)
def test_a_bad_help_is_found(shown: Shown, fault: str) -> None:
    assert any(found.startswith(fault) for found in faults(shown))


def test_a_good_help_passes() -> None:
    assert faults(Shown("wait", "Longest wait for another sweep, in seconds or such as 10m.")) == []
    assert faults(Shown("dry-run", "List of the points only: nothing is measured.")) == []
