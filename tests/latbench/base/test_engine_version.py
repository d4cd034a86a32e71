"""The text of an engine's version, and what a table's versions have in common."""

import pytest

from latbench.base.engine_version import EngineVersion, describe_mixture, list_versions, parse_engine_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.13.0+cpu", EngineVersion("2.13.0+cpu")),
        ("0.68.1 (row_panels 0da9ec2e)", EngineVersion("0.68.1", {"row_panels": "0da9ec2e"})),
        ("14.2.0 (driver 580.159, nvrtc 13.0)", EngineVersion("14.2.0", {"driver": "580.159", "nvrtc": "13.0"})),
    ],
)
def test_a_text_names_a_version(text: str, version: EngineVersion) -> None:
    assert parse_engine_version(text) == version and str(version) == text


@pytest.mark.parametrize("text", [None, "", float("nan"), "two words", "1.0 (open"])
def test_other_texts_name_none(text: object) -> None:
    assert parse_engine_version(text) is None


def test_parts_are_written_in_the_order_of_their_names() -> None:
    assert str(EngineVersion("1", {"b": "2", "a": "1"})) == "1 (a 1, b 2)"


def test_each_part_has_its_versions() -> None:
    texts = ["0.68.1 (rows 1)", "0.68.1 (rows 2, tokens 1)", "0.68.1 (rows 1)", None, "0.67"]
    assert list_versions(texts) == {"package": ["0.67", "0.68.1"], "rows": ["1", "2"], "tokens": ["1"]}
    assert describe_mixture(texts) == "package 0.67 and 0.68.1, rows 1 and 2, with and without versions of parts"


def test_families_of_different_rows_are_no_mixture() -> None:
    assert describe_mixture(["1 (rows 1)", "1 (tokens 9)"]) == describe_mixture(["1", "1", None]) == ""
    assert describe_mixture(["1 (rows 1)", "1"]) == "with and without versions of parts"
    assert describe_mixture([]) == "" and list_versions([None]) == {}
