"""The help of every command and option: a noun phrase, short sentences, the default and the unit."""

import re
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import typer

from latbench import errors
from latbench.cli import main
from latbench.cli.examples import EXAMPLES, EXIT_CODES

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


def list_parameters() -> Iterator[Any]:
    for verb, command in commands().items():
        for parameter in command.params:
            yield pytest.param(command, parameter, id=f"{verb} {parameter.name}")


@pytest.mark.parametrize(("command", "parameter"), list(list_parameters()))
def test_the_help_says_what_a_value_is_and_not_its_type(command: Any, parameter: Any) -> None:
    context = command.make_context(command.name, [], resilient_parsing=True)
    shown = parameter.get_help_record(context)[0].rpartition(" ")[2]
    choices = re.fullmatch(r"[<\[][a-z0-9|]+[>\]]", shown)  # listed words say themselves what they mean
    assert getattr(parameter, "is_flag", False) or choices or parameter.metavar
    if parameter.metavar:
        assert re.match(r"[A-Z]", parameter.metavar) and parameter.metavar not in ("TEXT", "PATH", "INTEGER", "FLOAT")


def test_summaries_are_whole_sentences(latbench: Any) -> None:
    shown = " ".join(latbench("--help").out.split())
    assert "..." not in shown.partition("Commands:")[2]
    for command in commands().values():
        assert command.get_short_help_str() in shown
        assert command.get_short_help_str().endswith(".")


@pytest.mark.parametrize("verb", list(commands()))
def test_an_argument_is_shown_by_its_name_alone(verb: str, latbench: Any) -> None:
    page = latbench(verb, "--help").out
    arguments = page.partition("Arguments:\n")[2].partition("\n\n")[0]
    named = [each.metavar for each in commands()[verb].params if each.param_type_name == "argument"]
    assert re.findall(r"^  ([A-Z]+)  ", arguments, re.MULTILINE) == named
    assert latbench(verb, "-h").out == page


@pytest.mark.parametrize("verb", list(main.COMMANDS))
def test_each_command_has_two_examples_that_it_accepts(verb: str, latbench: Any) -> None:
    assert len(set(EXAMPLES[verb])) == 2
    group: Any = typer.main.get_command(main.build_application())
    page = " ".join(latbench(verb, "--help").out.replace("\\\n", "").split())
    for example in EXAMPLES[verb]:
        program, command, *words = shlex.split(example)
        assert (program, command) == ("latbench", verb)
        group.commands[verb].make_context(verb, words)  # parses, and raises for an unknown option
        assert example in page


def test_no_example_is_of_an_unknown_command() -> None:
    assert set(EXAMPLES) <= set(main.COMMANDS)


def test_a_wrong_example_would_be_found() -> None:
    group: Any = typer.main.get_command(main.build_application())
    with pytest.raises(Exception, match="--no-such"):
        group.commands["sweep"].make_context("sweep", ["--cpu", "--no-such"])
    with pytest.raises(Exception, match="profile"):
        group.commands["prune"].make_context("prune", ["my_task.py"])


def test_the_exit_codes_in_the_help_are_those_of_the_errors(latbench: Any) -> None:
    codes = {error.exit_code for error in vars(errors).values() if isinstance(error, type)}
    assert set(EXIT_CODES) == {0, main.FAULT, *codes}
    page = latbench("sweep", "--help").out
    for code, meaning in EXIT_CODES.items():
        assert f"    {code:<3} {meaning}\n" in page
    assert max(map(len, page.splitlines())) <= 80
