"""The pages of docs: all are in the navigation, and those that list facts list all of them."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CODE = ("latbench", "search", "cost_models", "sparse_kernels")


def listed(entries: list[Any]) -> Iterator[str]:
    """The pages of a navigation, which has sections within sections."""
    for entry in entries:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else listed(value)


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(listed(navigation)) == sorted(pages)


def test_every_page_begins_with_its_only_title() -> None:
    for page in DOCS.rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert text.startswith("# ") and len(re.findall(r"^# ", text, re.MULTILINE)) == 1, page


def variables(text: str) -> set[str]:
    return set(re.findall(r"\bLATBENCH_[A-Z_]+\b", text))


def test_every_variable_of_latbench_has_its_row() -> None:
    of_c = variables((ROOT / "sparse_kernels/cpu/export/runtime/latbench.h").read_text())  # no variables of a shell
    files = [ROOT / "Makefile", ROOT / "tests/conftest.py"]
    files += [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in files for name in variables(path.read_text())} - of_c
    page = (DOCS / "reference" / "environment_variables.md").read_text()
    assert read == variables(page) >= {"LATBENCH_CACHE", "LATBENCH_LOCKS"}


def test_every_extra_for_users_has_its_row() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (DOCS / "how-to" / "install.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert set(extras) - {"dev", "docs", "gate"} <= rows


def test_every_exit_code_has_its_row() -> None:
    from latbench import errors

    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    codes = {kind.exit_code for kind in classes if issubclass(kind, errors.LatbenchError)}
    page = (DOCS / "reference" / "exit_codes.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d) \|", page, re.MULTILINE)} == codes | {0}
