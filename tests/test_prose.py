"""README files and the pages in docs are plain: short sentences, commands that exist, links that lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from latbench.cli.main import build_application

ROOT = Path(__file__).parents[1]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "datasets/README.md", "reports/README.md",
         "sparse_kernels/cuda/TUNING.md")  # fmt: skip
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("latbench", "search", "cost_models", "sparse_kernels")
CODE = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
MOST_WORDS = 25

# A sentence ends at a full stop, question mark or exclamation mark, which brackets, quotes and emphasis may follow.
# Then comes a space and the beginning of a sentence: a capital, a digit, or a name in backticks.
END = re.compile(r"""(?<=[.!?])(?:[)"'*_]*)\s+(?=[("'*]*[A-Z0-9`])|(?<=[.!?][)"'*])\s+(?=[("'*]*[A-Z0-9`])""")
ABBREVIATIONS = re.compile(r"\b(al|vs|e\.g|i\.e|cf|etc)\.")
LOWER_CASE_NAMES = ("latbench", "torch", "numba", "onnxruntime")  # which may begin a sentence


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs and list items of a page, without code, tables, headings and pictures."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        apart = not line.strip() or line.startswith(("|", "#", "![")) or (line.startswith("    ") and not lines)
        if apart or re.match(r"\s*([-*]|\d+\.) ", line):
            if lines:
                yield " ".join(" ".join(lines).split())
            lines = []
        if not apart:
            lines.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line))


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, each code and each link's target as one word."""
    text = re.sub(r"`[^`]+`", "`code`", paragraph)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = ABBREVIATIONS.sub(r"\1", text)
    for name in LOWER_CASE_NAMES:
        text = re.sub(rf"(?<=[.!?] ){name}\b", name.capitalize(), text)
    return [sentence for sentence in END.split(text) if sentence]


def words(sentence: str) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


def too_long(text: str) -> list[str]:
    found = (sentence for paragraph in paragraphs(text) for sentence in sentences(paragraph))
    return [f"{words(sentence)} words: {sentence}" for sentence in found if words(sentence) > MOST_WORDS]


LONG = " ".join(["word"] * (MOST_WORDS + 1))


@pytest.mark.parametrize(
    "bad",
    [
        f"{LONG}.",
        f"A short one. {LONG}.\n",
        f"- a bullet\n- {LONG}",
        f"1. {LONG}.",
        LONG.replace(" word word", " `a b` word.\nword").replace("word. ", "word "),  # no capital: it is one sentence
        f"```\ncode\n```\n{LONG}\n| a table |",
        f"Text (see `x.py`), {LONG}",
        LONG.replace("word word", "Huang et al. word", 1),  # an abbreviation ends nothing
        LONG.replace("word word", "word 2.5 word", 1),
    ],
)
def test_a_long_sentence_is_found(bad: str) -> None:
    assert len(too_long(bad)) == 1


@pytest.mark.parametrize(
    "good",
    [
        " ".join(["word"] * MOST_WORDS) + ".",
        LONG[:60] + ". " + LONG[60:].strip().capitalize(),
        LONG[:60] + ". `code` begins one, too " + LONG[:40],
        LONG[:60] + ".** And bold ends one. (So does a bracket.) latbench begins one. " + LONG[:40],
        f"```\n{LONG}\n```\n",
        f"| {LONG} |\n",
        f"# {LONG}\n",
        f"Text:\n\n    {LONG}\n",
        "`" + LONG + "`",
    ],
)
def test_a_page_of_short_sentences_passes(good: str) -> None:
    assert too_long(good) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    assert too_long(page.read_text()) == []


def test_the_readme_is_short_and_has_figures_in_tables_alone() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    plain = " ".join(re.sub(r"`[^`]+`|\]\([^)]*\)", "", paragraph) for paragraph in paragraphs(text))
    assert re.findall(r"[\d.]*\d[\d.]*", re.sub(r"Python 3\.\d+|Apache-2\.0|CC-BY-4\.0", "", plain)) == []


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each latbench command of a page's code and its options, such as ("sweep", ["--cpu", "-o"])."""
    for block in re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = line.split(" #")[0]
            if found := re.search(r"(?:^|[`\s])(?<!import )latbench ([a-z]+)\b(.*)", command):
                yield found[1], re.findall(r"(?<=\s)(--[a-z][a-z-]*|-[a-z])\b", found[2])


def options() -> dict[str, set[str]]:
    group = typer.main.get_command(build_application())
    return {
        name: {"--help", *(word for option in command.params for word in (*option.opts, *option.secondary_opts))}
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_on_a_page_exists_with_its_options(page: Path) -> None:
    known = options()
    for command, given in commands(page.read_text()):
        assert command in known, command
        assert set(given) <= known[command], (command, given)


def test_a_wrong_command_would_be_found() -> None:
    text = "```\nlatbench sweep --cpu --workload w.yaml -o t  # --no\nlatbench swoop --fast\n```\n`latbench fit --x`"
    assert list(commands(text)) == [("sweep", ["--cpu", "--workload", "-o"]), ("swoop", ["--fast"]), ("fit", ["--x"])]
    assert "swoop" not in options() and "--x" not in options()["fit"]


def missing(text: str) -> list[str]:
    """The files and folders of the repository that a page names and that do not exist."""
    inside = "latbench|search|cost_models|sparse_kernels|datasets|docs|tests|reports|findings"
    named = re.findall(rf"(?<![\w/.-])((?:{inside})/[\w./-]*)(<?)", text)  # what goes on with <device> is no path
    paths = {path.rstrip(".-") for path, goes_on in named if not goes_on and "ENGINE" not in path}
    return sorted(path for path in paths if not exists(path))


def exists(path: str) -> bool:
    return (ROOT / path).exists() or (ROOT / f"{path}.py").exists()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_path_on_a_page_exists(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_a_wrong_path_would_be_found() -> None:
    assert missing("`tests/nothing.py`, `latbench/cli/main.py` and search/nowhere/") == [
        "search/nowhere/",
        "tests/nothing.py",
    ]


def unknown_names(text: str) -> list[str]:
    """The names of classes, constants and functions that a page has in backticks and the code does not have."""
    named = set(re.findall(r"`([A-Z]\w+|[a-z]+_\w*[a-z])`", text)) - {"Returns", "Parameters", "Raises", "Makefile"}
    code = {word for path in CODE for word in re.findall(r"\w+", path.read_text())}
    return sorted(named - code)


def test_every_name_in_the_guides_for_contributors_exists() -> None:
    for page in ("CONTRIBUTING.md", "docs/how-to/extend.md"):
        assert unknown_names((ROOT / page).read_text()) == [], page
    assert unknown_names("`VectorNM`, `is_at_least_as_free`, `NoSuchClass`, `no_such_function`") == [
        "NoSuchClass",
        "no_such_function",
    ]


def links(text: str) -> list[str]:
    """The targets of a page's links that lead into the repository."""
    return [target for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert [target for target in links(page.read_text()) if not (page.parent / target).exists()] == []


GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
OF_COMMANDS = [  # terms of the summaries that `latbench --help` prints
    "convolution", "cost model", "engine", "frontier", "interval", "kernel", "layer", "pattern", "point", "profile",
    "promise", "sparsity", "sweep", "table", "target", "task", "workload",
]  # fmt: skip
OF_THE_FIELD = [
    "aimed-at speedup", "anchor", "backend", "block-wise", "budget", "burst", "calibration", "ceiling", "checkpoint",
    "confidence", "confidence interval", "coverage", "dense baseline", "disturbed row", "group", "guarantee",
    "hold-out", "inconclusive", "job", "layer database", "mask", "N:M", "one-shot pruning", "option", "problem",
    "recipe", "roofline", "row", "sample", "second budget", "session", "Shfl-BW", "speedup", "stitched model",
    "template", "vector-wise", "verdict", "verify",
]  # fmt: skip


def glossary() -> list[tuple[str, str]]:
    """The terms of the glossary with their definitions, in its order."""
    _, *entries = re.split(r"^### ", GLOSSARY.read_text(), flags=re.MULTILINE)
    return [(term.strip(), " ".join(text.split())) for term, _, text in (entry.partition("\n") for entry in entries)]


def test_the_glossary_is_sorted_and_defines_a_term_once() -> None:
    terms = [term.casefold() for term, _ in glossary()]
    assert terms == sorted(set(terms))


def test_a_definition_is_one_or_two_short_sentences() -> None:
    for term, text in glossary():
        assert 1 <= len(sentences(text)) <= 2, term
        assert text.endswith("."), term
        assert max(map(words, sentences(text))) <= MOST_WORDS, term


def test_a_reference_of_the_glossary_leads_to_another_entry() -> None:
    terms = {term for term, _ in glossary()}
    for term, text in glossary():
        if found := re.fullmatch(r"See (.*)\.", text):
            assert found[1] in terms - {term}


@pytest.mark.parametrize("term", [*OF_COMMANDS, *OF_THE_FIELD])
def test_a_term_is_defined(term: str) -> None:
    assert term in {defined for defined, _ in glossary()}
