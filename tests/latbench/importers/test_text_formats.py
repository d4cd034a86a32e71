"""Files of other projects: read and written faithfully, refused with a line number."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from latbench.errors import BadData
from latbench.importers.text_formats import (
    SpdyTimings,
    convert_rows_to_spdy,
    convert_spdy_to_rows,
    read_spdy,
    read_spdy_profile,
    write_spdy,
    write_spdy_profile,
)
from latbench.tables.table import read_table, select_timed
from latbench.tables.writer import write_part

GOOD = "base\n0.5\nprunable\n0.25\nconv1\n0.0125 0.0000\n0.01 0.4000\nfc\n0.2 0.0000\n"


def test_a_timing_file_is_read_as_written(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(GOOD)
    timings = read_spdy(tmp_path / "t.txt")
    assert timings == SpdyTimings(0.5, 0.25, {"conv1": ((0.0125, 0.0), (0.01, 0.4)), "fc": ((0.2, 0.0),)})
    assert timings.fixed == 0.25


def test_seconds_are_written_to_the_last_bit(tmp_path: Path) -> None:
    timings = SpdyTimings(np.float64(2.5e-6), np.float64(1.2345e-6), {"fc": ((4e-10, 0.5), (1.2345678e-6, 0.0))})
    write_spdy(timings, tmp_path / "t.txt")
    assert read_spdy(tmp_path / "t.txt") == timings
    assert (tmp_path / "t.txt").read_text().startswith("base\n2.5e-06\nprunable\n1.2345e-06\nfc\n4e-10 0.5000\n")
    rows = convert_spdy_to_rows(timings, network="n", pattern="unstructured", device="a-cpu")
    assert rows[0]["flags"] == "prunable_seconds=1.2345e-06"


def test_the_published_files_are_read_and_survive_a_round_trip(data: Path, tmp_path: Path) -> None:
    files = sorted((data / "spdy_tables").glob("*.txt"))
    assert len(files) == 5
    for path in files:
        timings = read_spdy(path)
        write_spdy(timings, tmp_path / path.name)
        assert read_spdy(tmp_path / path.name) == timings
    assert sum(map(len, read_spdy(data / "spdy_tables" / "rn50_unstr.txt").layers.values())) == 54 * 42


@pytest.mark.parametrize("names", [("0", "2"), ("10", "0.0", "1.2", "3.10", "1.2.3"), ("1.a", "a.1", "0.weight")])
def test_positions_in_a_sequence_are_names_of_layers(names: tuple[str, ...], tmp_path: Path) -> None:
    timings = SpdyTimings(0.5, 0.25, dict.fromkeys(names, ((0.1, 0.0), (0.05, 0.5))))
    write_spdy(timings, tmp_path / "t.txt")
    assert read_spdy(tmp_path / "t.txt") == timings


@pytest.mark.parametrize("name", ["02", "0.01", "-1", "1.", ".5", "1e3", "1_0", "a b", "", "nan", "inf"])
def test_a_layer_name_that_would_be_read_as_something_else_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=f"cannot hold a layer called {name!r}"):
        write_spdy(SpdyTimings(0.5, 0.25, {name: ((0.1, 0.0),)}), tmp_path / "t.txt")
    assert not (tmp_path / "t.txt").exists()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (GOOD, "", "line 1: expected 'base' and a line with its seconds, found the end"),
        ("base", "bass", "line 1: expected 'base' and a line with its seconds, found 'bass'"),
        ("\nprunable\n0.25", "", "line 3: expected 'prunable'"),
        ("0.25", "0.6", "line 4: prunable is 0.6 s, more than the 0.5 s of the whole model"),
        ("0.25", "a lot", "line 4: expected seconds, found 'a lot'"),
        ("0.5", "nan", "line 2: seconds must be positive and finite, not nan"),
        ("0.0125", "-0.0125", "line 6: seconds must be positive and finite, not -0.0125"),
        ("0.0125", "nan", "line 6: seconds must be positive"),
        ("0.0125", "inf", "line 6: seconds must be positive"),
        ("0.0125", "0", "line 6: seconds must be positive"),
        ("0.0125", "fast", "line 6: expected seconds, found 'fast'"),
        ("0.4000", "nan", "line 7: a sparsity must lie in [0, 1], not nan"),
        ("0.4000", "40", "line 7: a sparsity must lie in [0, 1], not 40"),
        (" 0.4000", "", "line 7: expected a layer's name or"),
        (" 0.4000", " 0.4 0.1", "line 7: expected a layer's name or"),
        ("conv1\n", "", "line 5: expected a layer's name or"),
        ("fc", "conv1", "line 8: layer conv1 is listed twice"),
        ("conv1\n0.0125 0.0000\n0.01 0.4000\nfc\n0.2 0.0000\n", "conv1\n", "line 5: the file ends without"),
    ],
)
def test_a_malformed_timing_file_is_refused_with_its_line(old: str, new: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(BadData) as refusal:
        read_spdy(path)
    assert said in str(refusal.value)


def test_a_missing_file_and_bytes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no such file"):
        read_spdy(tmp_path / "t.txt")
    (tmp_path / "t.txt").write_bytes(b"base\n\xff")
    with pytest.raises(BadData, match="not a text file"):
        read_spdy(tmp_path / "t.txt")
    with pytest.raises(BadData, match="cannot be read"):
        read_spdy(tmp_path)
    (tmp_path / "t.txt").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())  # as Windows' editors begin a file
    assert read_spdy(tmp_path / "t.txt").base == 0.5


def test_profiles_survive_a_round_trip(tmp_path: Path) -> None:
    profile = {"layer1.0.conv1": 0.4, "layer1.0.conv2": 0.99, "fc": 0.0}
    write_spdy_profile(profile, tmp_path / "p.txt")
    assert (tmp_path / "p.txt").read_text().startswith("0.4000 layer1.0.conv1\n")
    assert read_spdy_profile(tmp_path / "p.txt") == profile
    with pytest.raises(BadData, match="cannot hold a layer called 'a b': names have no space"):
        write_spdy_profile({"a b": 0.5}, tmp_path / "p.txt")
    assert read_spdy_profile(tmp_path / "p.txt") == profile


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "an empty profile"),
        ("0.5 a\n0.5", "line 2: expected '<sparsity> <layer>'"),
        ("0.5 a\n0.6 a", "line 2: layer a is listed twice"),
        ("a 0.5", "line 1: expected a sparsity, found 'a'"),
        ("nan a", r"line 1: a sparsity must lie in \[0, 1\]"),
    ],
)
def test_a_malformed_profile_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(text)
    with pytest.raises(BadData, match=said):
        read_spdy_profile(tmp_path / "p.txt")


def test_rows_of_imported_timings_make_the_same_file_again(data: Path, tmp_path: Path) -> None:
    timings = read_spdy(data / "spdy_tables" / "rn18_unstr.txt")
    rows = convert_spdy_to_rows(timings, network="rn18", pattern="unstructured", device="a-cpu")
    write_part(tmp_path, rows)
    made = convert_rows_to_spdy(select_timed(read_table(tmp_path)), "rn18")
    assert made.base == timings.base
    assert {name: dict(map(reversed, points)) for name, points in made.layers.items()} == {
        name: dict(map(reversed, points)) for name, points in timings.layers.items() if points
    }


def test_rows_make_a_table_in_which_every_layer_is_its_own(tmp_path: Path) -> None:
    timings = SpdyTimings(0.5, 0.25, {"a": ((0.3, 0.0), (0.4, 0.0), (0.1, 0.4)), "b": ((0.2, 0.4),), "empty": ()})
    rows = convert_spdy_to_rows(
        timings, network="net", pattern="block:1x4", device="a-cpu", threads=4, shapes={"a": {"op": "linear", "m": 7}}
    )
    write_part(tmp_path, rows)
    table = read_table(tmp_path)
    assert table["point_id"].is_unique
    assert set(table["purpose"]) == {"import"} and set(table["context"]) == {"network"}
    layers = table[table["op"] != "model"].set_index(["model", "sparsity_target"])
    assert layers["median_seconds"].to_dict() == pytest.approx(
        {("net:a", 0.0): 0.35, ("net:a", 0.4): 0.1, ("net:b", 0.4): 0.2}
    )
    assert layers["pattern"].tolist() == ["dense", "block:1x4", "block:1x4"]
    assert layers.loc["net:a", "m"].tolist() == [7, 7]
    assert pd.isna(layers.loc[("net:b", 0.4), "m"])
    [whole] = table[table["op"] == "model"].to_dict("records")
    assert (whole["model"], whole["median_seconds"], whole["flags"]) == ("net", 0.5, "prunable_seconds=0.25")
