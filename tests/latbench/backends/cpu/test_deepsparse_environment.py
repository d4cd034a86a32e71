"""`latbench setup deepsparse`: where it refuses, what it runs, and that it can be repeated and undone."""

import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from latbench.backends.cpu import deepsparse, deepsparse_environment
from latbench.cli import main
from latbench.errors import EnvironmentUnusable, UsageError

Run = Callable[[Sequence[str], str], str]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, on a machine that DeepSparse runs on."""
    monkeypatch.setenv("LATBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr("latbench.backends.cpu.deepsparse_environment.read_cpu_flags", lambda: {"avx2"})
    return tmp_path / "cache"


class Machine:
    """Plays the commands: Pythons of the versions given, a venv, pip, and DeepSparse's arch.bin."""

    def __init__(self, pythons: dict[str, str], build: str = "avx512") -> None:
        self.pythons, self.build, self.commands = pythons, build, []

    def run(self, command: Sequence[str], otherwise: str) -> str:
        self.commands.append(list(command))
        match command:
            case [python, "-I", "-c", code] if "version_info" in code:
                if python not in self.pythons:
                    raise EnvironmentUnusable(f"{otherwise}: No such file or directory")
                return self.pythons[python].replace(".", " ")
            case [_, "-m", "venv", place]:
                (Path(place) / "package" / "avx512").mkdir(parents=True)
                (Path(place) / "package" / "avx512" / "deepsparse_engine.so").touch()
                return ""
            case [python, "-I", "-c", _]:
                return f"{Path(python).parents[1]}/package/__init__.py\n"
            case [program] if program.endswith("arch.bin"):
                return json.dumps({"isa": self.build})
        return ""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine({sys.executable: "cpython 3.11.7\n"})
    monkeypatch.setattr(deepsparse_environment, "_run", found.run)
    return found


@pytest.fixture
def latbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the real command line in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["latbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("system", "processor", "flags", "said"),
    [
        ("Linux", "x86_64", {"avx2", "fma"}, None),
        ("Linux", "aarch64", {"asimd"}, None),
        ("Linux", "x86_64", {"avx", "sse4_2"}, "DeepSparse needs a processor with AVX2, and this one has none"),
        ("Darwin", "arm64", set(), "DeepSparse 1.8.0 runs on Linux on x86-64 and ARM, and this is Darwin on arm64"),
        ("Linux", "riscv64", set(), "DeepSparse 1.8.0 runs on Linux on x86-64 and ARM, and this is Linux on riscv64"),
    ],
)
def test_a_machine_that_cannot_is_told_why(system: str, processor: str, flags: set[str], said: str | None) -> None:
    assert deepsparse_environment.explain_refusal(system, processor, flags) == said


def test_the_command_line_refuses_such_a_machine(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latbench.backends.cpu.deepsparse_environment.read_cpu_flags", lambda: {"sse4_2"})
    code, _, err = latbench("setup", "deepsparse")
    assert (code, err) == (3, "latbench: DeepSparse needs a processor with AVX2, and this one has none\n")
    with pytest.raises(EnvironmentUnusable, match="AVX2"):
        deepsparse_environment.find_environment()


def test_where_it_is_not_set_up_that_is_said(latbench: Any, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnusable, match="not set up here: run `latbench setup deepsparse` once"):
        deepsparse_environment.find_environment()
    assert deepsparse_environment.find_deepsparse_version() is None
    code, _, err = latbench("layers", "digits", "-o", str(tmp_path / "table"))
    assert (code, err) == (3, "latbench: DeepSparse is not set up here: run `latbench setup deepsparse` once\n")


@pytest.mark.parametrize(
    ("pythons", "wanted", "chosen"),
    [
        ({sys.executable: "cpython 3.11.7"}, None, sys.executable),
        ({sys.executable: "cpython 3.13.1", "python3.10": "cpython 3.10.2"}, None, "python3.10"),
        ({"python3.9": "cpython 3.9.1", "python3.11": "cpython 3.11.0"}, None, "python3.11"),
        ({sys.executable: "pypy 3.10.2", "python3.9": "cpython 3.9.1"}, None, "python3.9"),
        ({sys.executable: "cpython 3.11.7", "/opt/python": "cpython 3.9.18"}, "/opt/python", "/opt/python"),
    ],
)
def test_a_python_that_does_is_found(
    machine: Machine, pythons: dict[str, str], wanted: str | None, chosen: str
) -> None:
    machine.pythons = pythons
    assert deepsparse_environment.install_environment(lambda _: None, wanted)
    assert [chosen, "-m", "venv", str(deepsparse_environment.find_folder())] in machine.commands


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("/opt/new", r"DeepSparse 1\.8\.0 runs in CPython 3\.9 to 3\.11, and --python /opt/new is cpython 3\.12\.1"),
        ("/opt/old", r"--python /opt/old is cpython 3\.8\.18"),
        ("/opt/absent", "--python: /opt/absent does not run: No such file or directory"),
        ("/bin/true", "--python: /bin/true is no Python"),
    ],
)
def test_a_named_python_that_does_not_is_refused(machine: Machine, wanted: str, said: str) -> None:
    machine.pythons |= {"/opt/new": "cpython 3.12.1", "/opt/old": "cpython 3.8.18", "/bin/true": ""}
    with pytest.raises(UsageError, match=said):
        deepsparse_environment.install_environment(lambda _: None, wanted)


def test_without_any_such_python_it_says_what_to_do(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.pythons = {sys.executable: "cpython 3.12.4"}
    monkeypatch.setattr(platform, "python_version", lambda: "3.12.4")
    said = r"runs in CPython 3\.9 to 3\.11, and this is 3\.12\.4: put a python3\.11 on the PATH, or give --python"
    with pytest.raises(EnvironmentUnusable, match=said):
        deepsparse_environment.install_environment(lambda _: None)


def test_installing_is_done_once_and_undone(machine: Machine, latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[deepsparse_environment.Environment] = []
    monkeypatch.setattr(deepsparse, "check_environment", checked.append)
    code, out, err = latbench("setup", "deepsparse")
    assert code == 0
    assert "evaluation in development and testing environments only" in out.splitlines()[0]
    assert "installing numpy==1.26.4 deepsparse==1.8.0" in err
    (pip,) = [command for command in machine.commands if "pip" in command]
    assert pip[0] == str(deepsparse_environment.find_folder() / "bin" / "python")
    assert "--no-deps" in pip and pip[-3:] == [":all:", "numpy==1.26.4", "deepsparse==1.8.0"]
    assert deepsparse_environment.find_deepsparse_version() == "1.8.0"
    assert checked == [deepsparse_environment.find_environment()]
    assert (
        deepsparse_environment.find_environment().engine
        == deepsparse_environment.find_folder() / "package" / "avx512" / "deepsparse_engine.so"
    )

    before = len(machine.commands)
    code, out, err = latbench("setup", "deepsparse")
    assert (code, err) == (0, "") and "is installed already" in out
    assert not any("venv" in command or "pip" in command for command in machine.commands[before:])

    assert latbench("setup", "deepsparse", "--remove")[1] == f"{deepsparse_environment.find_folder()} is removed\n"
    assert deepsparse_environment.find_deepsparse_version() is None
    assert latbench("setup", "deepsparse", "--remove")[1] == f"{deepsparse_environment.find_folder()} is not there\n"


def test_an_environment_that_does_not_work_is_made_again(machine: Machine) -> None:
    deepsparse_environment.install_environment(lambda _: None)
    results = [EnvironmentUnusable("it computes nonsense"), None]
    told: list[str] = []

    def check(_: deepsparse_environment.Environment) -> None:
        if (result := results.pop(0)) is not None:
            raise result

    assert deepsparse_environment.install_environment(check, tell=told.append)
    assert told[0] == "what is there does not work (it computes nonsense): making it again"
    assert deepsparse_environment.find_deepsparse_version() == "1.8.0"


def test_what_fails_half_way_is_not_taken_for_an_environment(machine: Machine) -> None:
    def check(_: deepsparse_environment.Environment) -> None:
        raise EnvironmentUnusable("it computes nonsense")

    with pytest.raises(EnvironmentUnusable, match="nonsense"):
        deepsparse_environment.install_environment(check)
    assert deepsparse_environment.find_deepsparse_version() is None


def test_an_environment_of_other_pins_is_made_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    deepsparse_environment.install_environment(lambda _: None)
    monkeypatch.setattr(deepsparse_environment, "PINS", ("numpy==1.26.5", "deepsparse==1.8.0"))
    assert deepsparse_environment.find_deepsparse_version() is None
    assert deepsparse_environment.install_environment(lambda _: None)


def test_a_processor_without_a_build_is_told(machine: Machine) -> None:
    machine.build = "unknown"
    with pytest.raises(EnvironmentUnusable, match=r"DeepSparse 1\.8\.0 has no build for this processor \(unknown\)"):
        deepsparse_environment.install_environment(lambda _: None)


def test_a_command_that_fails_is_quoted_by_its_last_line() -> None:
    code = "import sys; sys.exit('no network\\nERROR: no matching distribution\\n')"
    with pytest.raises(EnvironmentUnusable, match=r"^it cannot be installed: ERROR: no matching distribution$"):
        deepsparse_environment._run([sys.executable, "-c", code], "it cannot be installed")
    with pytest.raises(EnvironmentUnusable, match=r"^it cannot be made: No such file or directory$"):
        deepsparse_environment._run(["/absent/python"], "it cannot be made")


def test_an_unknown_engine_is_refused(latbench: Any) -> None:
    assert latbench("setup", "tensorrt")[::2] == (2, "latbench: unknown engine 'tensorrt': known is deepsparse\n")


@pytest.mark.parametrize(
    ("ready", "flags", "said"),
    [
        (False, {"avx2"}, "missing: latbench setup deepsparse"),
        (True, {"avx2"}, "1.8.0, for evaluation only"),
        (False, set(), "DeepSparse needs a processor with AVX2, and this one has none"),
    ],
)
def test_doctor_tells_whether_it_is_there(
    machine: Machine, latbench: Any, monkeypatch: pytest.MonkeyPatch, ready: bool, flags: set[str], said: str
) -> None:
    if ready:
        deepsparse_environment.install_environment(lambda _: None)
    monkeypatch.setattr("latbench.backends.cpu.deepsparse_environment.read_cpu_flags", lambda: flags)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("time.sleep", lambda _: None)  # doctor watches the machine for a second
    (line,) = [line for line in latbench("doctor")[1].splitlines() if line.startswith("backend deepsparse")]
    assert said in line
