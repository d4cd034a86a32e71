"""Kinds of values: which they take, and how they say what they take."""

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from latbench.base.declared_keys import (
    ANYTHING,
    FLAG,
    MAPPING,
    NAMES,
    TEXT,
    Key,
    Kind,
    MalformedDocument,
    check_mapping,
    choice,
    integer,
    number,
    optional,
    pairs_of,
)

VALUES = (
    None, True, False, 0, 1, 5, -1, 10**400, 0.0, 0.5, 1.0, -0.5, float("nan"), float("inf"), np.float32(0.5),
    np.int64(1), np.bool_(True), Decimal(1), "", " ", "a", "1", [], ["a"], ("a",), ["a", 1], [["a"]], {}, {"a": 1},
    b"ab",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "phrase", "taken"),
    [
        (integer(1), "a whole number of at least 1", (1, 5, 10**400, np.int64(1))),
        (integer(0, 4), "a whole number from 0 to 4", (0, 1, np.int64(1))),
        (integer(), "a whole number", (0, 1, 5, -1, 10**400, np.int64(1))),
        (number(above=0), "a number above 0", (1, 5, 0.5, 1.0, np.float32(0.5), np.int64(1))),
        (number(least=0, below=1), "a number of at least 0 and below 1", (0, 0.0, 0.5, np.float32(0.5))),
        (number(least=0, most=1), "a number from 0 to 1", (0, 1, 0.0, 0.5, 1.0, np.float32(0.5), np.int64(1))),
        (TEXT, "a text that is not empty", ("a", "1")),
        (FLAG, "true or false", (True, False)),
        (choice("a", "b"), "one of a, b", ("a",)),
        (optional(FLAG), "true or false, or null", (None, True, False)),
        (NAMES, "a list of names", ([], ["a"], ("a",))),
        (MAPPING, "a mapping", ({}, {"a": 1})),
        (pairs_of(integer(), "a mapping to whole numbers"), "a mapping to whole numbers", ({}, {"a": 1})),
        (ANYTHING, "anything", VALUES),
    ],
    ids=lambda value: value.phrase if isinstance(value, Kind) else "",
)
def test_a_kind_takes_its_values_alone_and_says_which(kind: Kind, phrase: str, taken: tuple[Any, ...]) -> None:
    assert kind.phrase == phrase
    for value in VALUES:
        if any(value is it or (type(value) is type(it) and value == it) for it in taken):
            kind.parse(value, "steps")
        else:
            with pytest.raises(MalformedDocument) as refused:
                kind.parse(value, "steps")
            assert "steps" in str(refused.value) and "\n" not in str(refused.value)


def test_a_mapping_is_checked_key_by_key() -> None:
    keys = {"steps": Key(integer(1), "Steps", required=True), "names": Key(NAMES, "Names")}
    assert check_mapping({"steps": 2, "names": ["a"]}, "a recipe", keys) == {"steps": 2, "names": ("a",)}
    for value, said in (
        ({"names": []}, "layer 1: steps missing; a recipe needs steps"),
        ({"steps": 2, "name": []}, r"layer 1: unknown key 'name' \(names\?\); known are steps, names"),
        ({"steps": 0}, "layer 1: steps must be a whole number of at least 1, not 0"),
        ([], r"a recipe must be a mapping with keys among steps, names, not \[\]"),
    ):
        with pytest.raises(MalformedDocument, match=f"^{said}$"):
            check_mapping(value, "a recipe", keys, "layer 1: ")
