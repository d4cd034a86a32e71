"""Every reader of a YAML file refuses what does not fit: one sentence with the file, the key and what is allowed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latbench.errors import LatbenchError
from latbench.workloads.workload import read_workload
from search.problem.limits import read_limits
from search.pruning.training.recipe import read_recipe

READERS: dict[str, Callable[[Path], Any]] = {
    "workload": read_workload,
    "limits": read_limits,
    "recipe": lambda path: read_recipe(str(path)),
}
GOOD = {
    "workload": "name: w\nsource: s\nlayers: [{name: a, op: linear, m: 3, k: 5, n: 7}]\n",
    "limits": "tied: [[a, b]]\nminimum: {a: 0.5}\n",
    "recipe": "method: gmp\nsteps: 3\nsettings: {end: 0.6, updates: 2}\n",
}


def refuse(kind: str, text: str, folder: Path) -> str:
    path = folder / "file.yaml"
    path.write_text(text)
    with pytest.raises(LatbenchError) as refused:
        READERS[kind](path)
    message = str(refused.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


@pytest.mark.parametrize("kind", READERS)
def test_a_good_file_is_read(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(GOOD[kind])
    assert READERS[kind](tmp_path / "file.yaml")


@pytest.mark.parametrize(
    ("kind", "old", "new", "named", "allowed"),
    [
        # true for a number
        ("workload", "m: 3", "m: true", "layer 'a': m must be", "a whole number of at least 1, not True"),
        ("limits", "a: 0.5", "a: true", "minimum of 'a' must be", "a number from 0 to 1, not True"),
        ("recipe", "steps: 3", "steps: true", "steps must be", "a whole number of at least 1, not True"),
        ("recipe", "updates: 2", "updates: true", "settings of gmp: updates must be", "a whole number, not True"),
        # a number as a text
        ("workload", "m: 3", "m: '3'", "layer 'a': m must be", "a whole number of at least 1, not '3'"),
        ("limits", "a: 0.5", "a: '0.5'", "minimum of 'a' must be", "a number from 0 to 1, not '0.5'"),
        ("recipe", "end: 0.6", "end: '0.6'", "settings of gmp: end must be", "a number, not '0.6'"),
        # a text for a list or a mapping
        (
            "workload", "[{name: a, op: linear, m: 3, k: 5, n: 7}]", "ab",
            "layers must be", "a list of at least one layer, not 'ab'",
        ),
        ("limits", "[[a, b]]", "[ab]", "item 1 of tied must be", "a list of names, not 'ab'"),
        ("limits", "{a: 0.5}", "ab", "minimum must be", "a mapping from layers to sparsities, not 'ab'"),
        ("recipe", "{end: 0.6, updates: 2}", "ab", "settings must be", "a mapping, not 'ab'"),
        # no number
        ("workload", "m: 3", "m: .nan", "layer 'a': m must be", "a whole number of at least 1, not nan"),
        ("limits", "a: 0.5", "a: .nan", "minimum of 'a' must be", "a number from 0 to 1, not nan"),
        ("recipe", "end: 0.6", "end: .nan", "settings of gmp: end must be", "a number, not nan"),
        ("recipe", "steps: 3", "learning_rate: .inf", "learning_rate must be", "a number above 0, not inf"),
        ("recipe", "steps: 3", f"weight_decay: 1{'0' * 400}", "weight_decay must be", "of at least 0, not 1000"),
        # a key twice
        ("workload", "m: 3", "m: 3, m: 3", "", "'m' is given twice"),
        ("limits", "a: 0.5", "a: 0.5, a: 0.6", "", "'a' is given twice"),
        ("recipe", "steps: 3", "steps: 3\nsteps: 3", "", "'steps' is given twice"),
        # an unknown key
        ("workload", "name: w", "nam: w", "unknown key 'nam' (name?)", "known are name, source, standard, layers"),
        ("workload", "m: 3", "mm: 3", "layer 'a': unknown key 'mm' (m?)", "known are name, op, count, m, k, n"),
        ("limits", "minimum", "min", "unknown key 'min' (minimum?)", "known are tied, tied_in_each, fixed, minimum,"),
        ("recipe", "steps", "step", "unknown key 'step' (steps?)", "known are method, settings, start, steps,"),
        ("recipe", "updates", "update", "settings of gmp: unknown key 'update' (updates?)", "known are score,"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    kind: str, old: str, new: str, named: str, allowed: str, tmp_path: Path
) -> None:
    assert old in GOOD[kind]
    message = refuse(kind, GOOD[kind].replace(old, new, 1), tmp_path)
    assert named in message and allowed in message


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("text", ["", "5", "[a, b]", "&a [*a]"])
def test_what_is_no_mapping_is_refused(kind: str, text: str, tmp_path: Path) -> None:
    assert f"{kind if kind == 'limits' else f'a {kind}'} must be a mapping with keys among " in refuse(
        kind, text, tmp_path
    )


@pytest.mark.parametrize("kind", READERS)
def test_a_long_value_is_quoted_in_part(kind: str, tmp_path: Path) -> None:
    assert len(refuse(kind, f"[{'a, ' * 1000}]", tmp_path)) < 400
