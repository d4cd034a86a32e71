"""DeepSparse's own Python environment: made by `latbench setup deepsparse`, in latbench's cache.

DeepSparse was given up in 2025: its newest package is an empty stub, and the last real one, 1.8.0, needs an older
Python, NumPy and onnx than latbench. So it gets an environment with only its native library and a fitting NumPy, and
runs there in processes of its own (`latbench.backends.cpu.deepsparse`).
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock

from latbench.base.files import find_cache_folder, write_text_atomically
from latbench.errors import EnvironmentUnusable, UsageError
from latbench.machines.devices import read_cpu_flags

VERSION = "1.8.0"
PINS = ("numpy==1.26.4", f"deepsparse=={VERSION}")
PYTHONS = ((3, 9), (3, 11))  # DeepSparse has no build for a newer one, its NumPy none for an older one
LICENCE = (
    f"DeepSparse {VERSION} comes under the Neural Magic DeepSparse Community License: for evaluation in development "
    "and testing environments only, not for production use, not to be passed on"
)

_READY = "latbench.json"  # written last: says that the environment is whole
_FIND_VERSION = "import sys; print(sys.implementation.name, *sys.version_info[:3])"
# Where the package lies is found without importing it: that would report its use.
_FIND_PACKAGE = "import importlib.util; print(importlib.util.find_spec('deepsparse').origin)"


@dataclass(frozen=True)
class Environment:
    """The Python that DeepSparse runs in, and its native module for this processor."""

    python: Path
    engine: Path


def find_folder() -> Path:
    """Return the folder of the environment."""
    return find_cache_folder() / "engines" / "deepsparse"


def explain_refusal(
    system: str | None = None, machine: str | None = None, flags: set[str] | None = None
) -> str | None:
    """Return why DeepSparse cannot run on this machine, or one with these properties; None if it can."""
    system, machine = system or platform.system(), machine or platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        return f"DeepSparse {VERSION} runs on Linux on x86-64 and ARM, and this is {system} on {machine}"
    flags = read_cpu_flags() if flags is None else flags
    if machine == "x86_64" and "avx2" not in flags:
        return "DeepSparse needs a processor with AVX2, and this one has none"
    return None


def find_deepsparse_version() -> str | None:
    """Return DeepSparse's version if it is set up here, else None."""
    return VERSION if _is_whole(find_folder()) else None


def find_environment() -> Environment:
    """Return the environment. Raises EnvironmentUnusable if there is none, or if it does not work."""
    if reason := explain_refusal():
        raise EnvironmentUnusable(reason)
    if not _is_whole(find_folder()):
        raise EnvironmentUnusable("DeepSparse is not set up here: run `latbench setup deepsparse` once")
    return _locate(find_folder())


def install_environment(
    check: Callable[[Environment], None],
    python: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> bool:
    """Make the environment unless it is there and `check` passes; return whether it had to be made.

    `python` is the interpreter to make it with, by default latbench's own or a python3.11 to python3.9 on the PATH.
    `check` runs DeepSparse and raises EnvironmentUnusable if that fails. Raises UsageError for an unfit `python`,
    EnvironmentUnusable where DeepSparse cannot be installed.
    """
    if reason := explain_refusal():
        raise EnvironmentUnusable(reason)
    place = find_folder()
    place.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place.with_suffix(".lock")):
        if _is_whole(place):
            try:
                check(_locate(place))
            except EnvironmentUnusable as error:
                tell(f"what is there does not work ({error}): making it again")
            else:
                return False
        base, named = _interpreter(python)
        tell(f"making an environment with Python {named} in {place}")
        shutil.rmtree(place, ignore_errors=True)
        _run([base, "-m", "venv", str(place)], "an environment cannot be made")
        tell(f"installing {' '.join(PINS)}")
        # DeepSparse's other dependencies are for its Python package, which is not used. No source is ever built.
        # PYTHONPATH is not for this Python (-I); pip's own settings may name the index there is.
        pip = ["-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary", ":all:"]
        _run([str(place / "bin" / "python"), *pip, *PINS], f"{' '.join(PINS)} cannot be installed")
        check(_locate(place))
        write_text_atomically(place / _READY, json.dumps({"pins": PINS, "python": named}) + "\n")
    return True


def remove_environment() -> bool:
    """Delete the environment; return whether there was one."""
    place = find_folder()
    if not place.exists():
        return False
    try:
        with filelock.FileLock(place.with_suffix(".lock")):  # nobody is making it
            shutil.rmtree(place)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot remove {place}: {error.strerror or error}") from error
    return True


def _is_whole(place: Path) -> bool:
    """Return whether an environment with these very pins was finished in `place`."""
    try:
        return bool(json.loads((place / _READY).read_text(encoding="utf-8"))["pins"] == list(PINS))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _locate(place: Path) -> Environment:
    """Return the parts of the environment in `place`; DeepSparse's own program names its build for this CPU."""
    python = place / "bin" / "python"
    broken = f"the environment in {place} does not work; `latbench setup deepsparse` makes it again"
    package = Path(_run([str(python), "-I", "-c", _FIND_PACKAGE], broken).strip()).parent
    try:
        build = json.loads(_run([str(package / "arch.bin")], broken))["isa"]
    except (ValueError, KeyError, TypeError) as error:
        raise EnvironmentUnusable(f"{broken} ({error})") from error
    engine = package / build / "deepsparse_engine.so"
    if not engine.is_file():
        raise EnvironmentUnusable(f"DeepSparse {VERSION} has no build for this processor ({build})")
    return Environment(python, engine)


def _interpreter(wanted: str | None) -> tuple[str, str]:
    """Return a Python that DeepSparse runs in, and its version. Raises UsageError if the wanted one is none."""
    oldest, newest = (".".join(map(str, numbers)) for numbers in PYTHONS)
    needed = f"DeepSparse {VERSION} runs in CPython {oldest} to {newest}"
    newest_first = range(PYTHONS[1][1], PYTHONS[0][1] - 1, -1)
    for candidate in [wanted] if wanted else [sys.executable, *(f"python3.{minor}" for minor in newest_first)]:
        try:
            name, numbers = _kind_of(candidate)
        except EnvironmentUnusable as error:
            if wanted:
                raise UsageError(f"--python: {error}") from error
            continue
        named = ".".join(map(str, numbers))
        if name == "cpython" and PYTHONS[0] <= numbers[:2] <= PYTHONS[1]:
            return candidate, named
        if wanted:
            raise UsageError(f"{needed}, and --python {wanted} is {name} {named}")
    here = platform.python_version()
    raise EnvironmentUnusable(f"{needed}, and this is {here}: put a python{newest} on the PATH, or give --python")


def _kind_of(python: str) -> tuple[str, tuple[int, ...]]:
    """Return the name and the version of an interpreter. Raises EnvironmentUnusable if it is none."""
    words = _run([python, "-I", "-c", _FIND_VERSION], f"{python} does not run").split()
    if len(words) != 4:
        raise EnvironmentUnusable(f"{python} is no Python")
    return words[0], tuple(map(int, words[1:]))


def _run(command: Sequence[str], otherwise: str) -> str:
    """Return the output of `command`. Raises EnvironmentUnusable with `otherwise` and the reason if it fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EnvironmentUnusable(f"{otherwise}: {error.strerror or error}") from error
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise EnvironmentUnusable(f"{otherwise}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout
