"""The tutorials of docs run: every block of shell commands and of Python, in order, in a folder for each tutorial.

A block after a comment `<!-- not run: ... -->` is left out, for the reason that the comment gives. The first tutorial
continues the job of `make demo`, which is the same one.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n)?```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)

NOT_RUN = {"cost_models_notebook": 0, "first_job": 1, "gpu": 4, "your_cnn": 0, "your_transformer": 2}
"""Blocks that no test runs, by tutorial."""

MISSED = 1
"""The exit code of a job that reached less than its target, as may happen on a busy machine."""

MOST_TRIES = 2
"""Further commands, at most, until a job has a pruned model: on a busy machine the one advised may miss, too."""

ADVICE = re.compile(r"`(latbench run [^`]+)` searches for that")


class Block(NamedTuple):
    """A block of a page: why it is not run, or an empty text; its language; its code."""

    reason: str
    language: str
    code: str


def find_blocks(text: str) -> list[Block]:
    return [Block(*found.groups(default="")) for found in BLOCK.finditer(text)]


def test_blocks_are_found_in_order_with_the_reason_for_leaving_one_out() -> None:
    text = "A\n```sh\none\n```\n<!-- not run: no GPU -->\n```sh\ntwo\n```\n```text\nno\n```\n```python\n3\n```\n"
    assert find_blocks(text) == [("", "sh", "one\n"), ("no GPU", "sh", "two\n"), ("", "python", "3\n")]


def test_few_blocks_are_not_run() -> None:
    found = {page.stem: sum(bool(block.reason) for block in find_blocks(page.read_text())) for page in TUTORIALS}
    assert found == NOT_RUN


def make_demo(folder: Path) -> None:
    """Copy the job of `make demo` to a folder."""
    demo = ROOT / "build/demo"
    if not (demo / "summary.json").exists():
        done = subprocess.run(["make", "demo"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    shutil.copytree(demo, folder)


def mark_jobs(page: Path) -> Any:
    """Mark jobs as timed: they time whole models alone on the machine. CI has minutes for two of them."""
    marks = [pytest.mark.timed] if "latbench run" in page.read_text() else []
    if page.stem == "your_transformer":
        marks.append(pytest.mark.long)
    return pytest.param(page, id=page.stem, marks=marks)


def run_block(
    language: str, code: str, folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-euo", "pipefail", "-c", code] if language == "sh" else [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(2400)  # a job that missed its promise searches again
@pytest.mark.parametrize("page", [mark_jobs(page) for page in TUTORIALS])
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    if page.stem == "first_job":
        make_demo(tmp_path / "job")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
    }
    session = ""  # the blocks of Python so far, which later ones build on
    for _, language, code in (block for block in find_blocks(page.read_text()) if not block.reason):
        if language == "python":
            code = session = session + code
        done = run_block(language, code, tmp_path, environment)
        for _ in range(MOST_TRIES):
            if has_missed(code, done, tmp_path):  # as the page says: ask for less, or time once more
                advice = ADVICE.search(done.stderr)
                done = run_block("sh", advice[1] if advice else code, tmp_path, environment)
        assert "Traceback" not in done.stderr, done.stderr
        if has_missed(code, done, tmp_path):
            pytest.skip(f"nothing that this page prunes is faster on so busy a machine: {done.stderr[-400:]}")
        allowed = {0, MISSED} if "latbench run" in code else {0}
        assert done.returncode in allowed, f"{code}\n{done.stdout}\n{done.stderr}"


def has_missed(code: str, done: subprocess.CompletedProcess[str], folder: Path) -> bool:
    """Return whether a job ended with a refusal, which leaves no pruned model."""
    return "latbench run" in code and done.returncode == MISSED and not (folder / "job/pruned").exists()
