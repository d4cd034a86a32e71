"""The roof: whatever is typed, and whatever happens below, ends as one line and the right exit code."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latbench.cli import main
from latbench.cli.commands import doctor
from latbench.tables.writer import write_part

ROOT = Path(__file__).parents[3]


def outcome(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line."""
    monkeypatch.setattr(sys, "argv", ["latbench", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    found = capsys.readouterr()
    return int(ended.value.code or 0), found.out, found.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "nosuch"], "latbench: Got unexpected extra argument(s) (nosuch): see `latbench plan --help`\n"),
        (["nosuch"], "latbench: No such command 'nosuch': see `latbench --help`\n"),
        (["sweep", "--nosuch"], "latbench: No such option: --nosuch: see `latbench sweep --help`\n"),
        (["search", "digits"], "see `latbench search --help`\n"),
        (["plan", "--threads", "many"], "see `latbench plan --help`\n"),
    ],
)
def test_a_command_line_that_is_not_understood_is_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = outcome(monkeypatch, capsys, *words)
    assert (code, out) == (2, "")
    assert err.endswith(said)
    assert err.count("\n") == 1


@pytest.mark.parametrize("seed", ["-1", "100000000000000000000"])
@pytest.mark.parametrize("verb", ["fit", "layers", "prune", "search", "sweep"])
def test_a_seed_that_no_generator_takes_is_refused_before_any_work(
    verb: str, seed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    option = "--random-state" if verb == "fit" else "--seed"
    code, _, err = outcome(monkeypatch, capsys, verb, option, seed)
    assert code == 2
    assert err.startswith(f"latbench: Invalid value for '{option}': ")
    assert err.endswith(f"{0 if seed == '-1' else 4294967295}: see `latbench {verb} --help`\n")


@pytest.mark.parametrize(("words", "code"), [(["--fail-on", "same"], 1), ([], 0)])
def test_a_reader_that_goes_away_changes_no_exit_code(
    words: list[str], code: int, row: dict[str, Any], rng: np.random.Generator, tmp_path: Path
) -> None:
    """As in `latbench compare A B | head -1`, which in CI is to fail on what it is asked to fail on, and on nothing
    else.
    """
    table = str(tmp_path / "table")
    write_part(tmp_path / "table", [row | {"samples_seconds": list(1e-3 * rng.lognormal(0, 0.002, 48))}])
    command = [sys.executable, "-m", "latbench.cli.main", "compare", table, table, "--rows", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.close()
        _, err = process.communicate()
    assert process.returncode == code
    assert "Traceback" not in err and "BrokenPipe" not in err


def test_a_command_is_set_up_without_the_others() -> None:
    assert [command.name for command in main.build_application("import").registered_commands] == ["import"]
    assert len(main.build_application("nosuch").registered_commands) == len(main.COMMANDS)


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_nothing_asked_for_is_help(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = outcome(monkeypatch, capsys, *words)
    assert (code, err) == (0, "")
    assert all(command in out for command in main.COMMANDS)


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (ZeroDivisionError("by\nzero"), 70, "latbench: a fault of latbench, ZeroDivisionError: by zero ("),
        (KeyboardInterrupt(), 4, "latbench: interrupted; finished results are kept, and the same command goes on"),
        (OSError(28, "No space left on device", "table"), 3, "latbench: table: No space left on device"),
    ],
)
def test_what_happens_below_is_one_line(
    raised: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails() -> None:
        raise raised

    monkeypatch.setattr(doctor, "doctor", fails)
    found = outcome(monkeypatch, capsys, "doctor")
    assert found[0] == code
    assert found[2].startswith(line) and found[2].count("\n") == 1


def test_the_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert outcome(monkeypatch, capsys, "--version") == (0, f"latbench {project}\n", "")
