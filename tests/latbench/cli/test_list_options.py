"""Options that take several values read them alike: separated by commas, repeated, or both."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from latbench.cli import main
from latbench.cli.options.option_texts import split_list, split_pairs
from latbench.errors import UsageError


def list_options() -> Iterator[tuple[str, Any]]:
    group: Any = typer.main.get_command(main.build_application())
    for verb, command in group.commands.items():
        for option in command.params:
            if option.param_type_name == "option" and option.multiple:
                yield verb, option


OPTIONS = [pytest.param(option, id=f"{verb} {option.name}") for verb, option in list_options()]


class Named:
    """An option as a callback sees it."""

    opts = ("--patterns",)


def split(function: Any, *texts: str) -> list[str] | None:
    found: list[str] | None = function(Named(), list(texts))
    return found


def test_there_are_such_options() -> None:
    assert len(OPTIONS) >= 15


@pytest.mark.parametrize("option", OPTIONS)
def test_every_one_takes_commas_and_repetition(option: Any) -> None:
    pair = "=" in option.metavar
    values = ["a=1", "b=2", "c=3"] if pair else ["a", "b", "c"]
    context = typer.main.get_command(main.build_application("plan")).make_context(
        "latbench", [], resilient_parsing=True
    )
    assert option.callback(context, option, [",".join(values[:2]), values[2]]) == values


@pytest.mark.parametrize("option", OPTIONS)
def test_every_one_says_so(option: Any) -> None:
    assert "comma-separated or repeated" in " ".join(option.help.split())
    assert option.metavar.endswith(",...")


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["dense,vector:8", "nm:2:4"], ["dense", "vector:8", "nm:2:4"]),
        (["dense, vector:8"], ["dense", "vector:8"]),
        (["dense", "dense,dense"], ["dense"]),
        ([], None),
    ],
)
def test_a_list_is_split_at_commas(texts: list[str], values: list[str] | None) -> None:
    assert split(split_list, *texts) == values


@pytest.mark.parametrize("text", ["", ",", "dense,", "dense,,nm:2:4", " "])
def test_an_empty_value_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--patterns has an empty value in .*: separate values by single commas"):
        split(split_list, "unstructured", text)


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (["nodes=4,time=120", "account=a"], ["nodes=4", "time=120", "account=a"]),
        (["partition=gpu,debug,nodes=2"], ["partition=gpu,debug", "nodes=2"]),
        (["Device=Tesla T4"], ["Device=Tesla T4"]),
        (["bad"], ["bad"]),  # who reads the pair refuses it
    ],
)
def test_a_comma_may_be_part_of_the_value_of_a_pair(texts: list[str], values: list[str]) -> None:
    assert split(split_pairs, *texts) == values


def test_a_command_takes_either_style(latbench: Any, tiny: Path) -> None:
    commas = ("--patterns", "dense,vector:8", "--workload", f"{tiny},cpu_kernels")
    repeated = ("--patterns", "dense", "--patterns", "vector:8", "--workload", tiny, "--workload", "cpu_kernels")
    one, other = (json.loads(latbench("plan", *words, "--json").out) for words in (commas, repeated))
    assert one == other and set(one["patterns"]) == {"dense", "vector:8"} and "cpu_kernels" in one["workloads"]
