"""--quiet and --verbose, before and after the command; the other ways to start latbench."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from latbench.cli.commands import doctor
from latbench.cli.load_warning import WITHOUT_THEM, note_load
from latbench.cli.progress_bar import live
from latbench.errors import PromiseMissed, UsageError
from search.knapsack.arrays import Infeasible

TABLE = "bundled://amd-epyc-zen4-2-threads"


def start(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "latbench", *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, check=False)


@pytest.mark.parametrize("words", [("-v", "validate", TABLE), ("validate", TABLE, "--verbose")])
def test_details_say_what_is_read(words: tuple[str, ...], latbench: Any) -> None:
    ran, plain = latbench(*words), latbench("validate", TABLE)
    assert (ran.code, ran.out) == (0, plain.out)
    assert plain.err == ""
    assert "latbench: reading " in ran.err and "amd-epyc-zen4-2-threads/part-" in ran.err


@pytest.mark.parametrize("place", ["before", "after"])
def test_quiet_has_results_and_errors_only(place: str, latbench: Any, tiny: Path) -> None:
    command = ["sweep", "--cpu", "--workload", tiny, "--dry-run"]
    loud = latbench(*command)
    quiet = latbench(*(["-q", *command] if place == "before" else [*command, "-q"]))
    assert (quiet.code, quiet.out, quiet.err) == (0, loud.out, "")
    assert "MB of disk" in loud.err
    assert latbench("-q", "validate", tiny).refused(5)


def test_quiet_shows_no_progress(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def works() -> None:
        with live() as tell:
            tell("working", 1, 2)

    monkeypatch.setattr(doctor, "doctor", works)
    assert latbench("doctor").err == "1/2 working\n"
    assert latbench("doctor", "--quiet").err == ""


@pytest.mark.parametrize("words", [("-q", "-v", "doctor"), ("-q", "doctor", "-v"), ("doctor", "-q", "-v")])
def test_quiet_and_verbose_together_are_refused(words: tuple[str, ...], latbench: Any) -> None:
    assert "--quiet and --verbose" in latbench(*words).refused(2)


def test_a_command_leaves_no_verbosity_behind(latbench: Any) -> None:
    before = [(logging.getLogger(name).level, logging.getLogger(name).propagate) for name in ("latbench", "search")]
    latbench("-v", "validate", TABLE)
    after = [(logging.getLogger(name).level, logging.getLogger(name).propagate) for name in ("latbench", "search")]
    assert before == after and not logging.getLogger("latbench").handlers
    assert latbench("validate", TABLE).err == ""


def test_a_traceback_is_for_those_who_ask(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ZeroDivisionError("of nothing")

    monkeypatch.setattr(doctor, "doctor", fails)
    short, long = latbench("doctor"), latbench("doctor", "-v")
    assert short.code == long.code == 70
    assert short.err.count("\n") == 1 and "--verbose shows the traceback" in short.err
    assert "test_verbosity.py, line " in short.err
    assert "Traceback" in long.err and long.err.endswith("please report it\n")


def test_an_expected_error_has_the_traceback_of_foreign_code_only(latbench: Any, tmp_path: Path) -> None:
    (tmp_path / "bad_task.py").write_text("raise KeyError('lost')\n")
    words = ("trace", tmp_path / "bad_task.py")
    assert "Traceback" not in latbench(*words).err
    assert "KeyError: 'lost'" in latbench(*words, "-v").err
    assert "Traceback" not in latbench("-v", "validate", tmp_path / "nothing").err


def test_the_module_is_the_command() -> None:
    assert start("--version").stdout.startswith("latbench ")
    refused = start("nosuch")
    assert refused.returncode == 2 and refused.stderr.startswith("latbench: No such command 'nosuch'")


def test_a_shell_completes_commands_and_options() -> None:
    asked = {"_LATBENCH_COMPLETE": "complete_bash"}
    assert start(**asked, COMP_WORDS="latbench sw", COMP_CWORD="1").stdout.split() == ["sweep"]
    assert "--time-budget" in start(**asked, COMP_WORDS="latbench sweep --ti", COMP_CWORD="2").stdout.split()


def test_completion_is_installed_for_the_shell_in_use(tmp_path: Path) -> None:
    script = start("--show-completion", HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="")
    assert "--install-completion" in start("--help").stdout
    assert "_LATBENCH_COMPLETE" in script.stdout or "not supported" in script.stderr + script.stdout


LOAD = "other programs take 1.0 of 2 cores now"


@pytest.mark.parametrize("load", [LOAD, None])
def test_a_refusal_keeps_its_kind_and_says_the_load_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, load: str | None
) -> None:
    monkeypatch.setattr("latbench.machines.noise_sources.describe_load_now", lambda threads: load)
    with pytest.raises(PromiseMissed) as refused, note_load():
        raise Infeasible(0.5, 0.6, "the best is 1.84x.")
    assert type(refused.value) is Infeasible
    assert str(refused.value) == ("the best is 1.84x." if load is None else f"the best is 1.84x{WITHOUT_THEM}")
    assert (LOAD in caplog.text) is (load is not None)


def test_other_errors_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latbench.machines.noise_sources.describe_load_now", lambda threads: LOAD)
    with pytest.raises(UsageError, match=r"^no such layer$"), note_load():
        raise UsageError("no such layer")
