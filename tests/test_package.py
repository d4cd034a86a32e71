"""What is installed, what importing it costs, and what may import what."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = {"latbench", "cost_models", "sparse_kernels", "search"}


def _python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_starting_the_command_line_loads_nothing_heavy() -> None:
    heavy = {"torch", "cupy", "numba", "sklearn", "pandas", "pyarrow", "matplotlib", "plotly", "onnxruntime"}
    loaded = _python("import sys, latbench.cli.main as c; c.build_application(); print(*sys.modules)").split()
    assert not heavy & set(loaded)


def test_a_worker_process_starts_with_little_more_than_numpy_and_pyarrow() -> None:
    loaded = _python("import sys, latbench.runners.worker; print(*sys.modules)").split()
    assert not {"scipy", "pandas", "torch", "numba", "sklearn"} & set(loaded)


def test_what_measures_starts_without_what_it_may_never_need() -> None:
    loaded = _python(
        "import sys, latbench.sweeping.sweep, latbench.backends.cpu.prepare_point; print(*sys.modules)"
    ).split()
    assert not {"scipy.special", "pandas", "torch", "sklearn"} & set(loaded)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution, built as a release is, but with the tools that are installed."""
    folder = tmp_path_factory.mktemp("distributions")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def build_installed(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Returns the Python of a new environment with the wheel, our dependencies on its path, but not our checkout."""

    def build() -> Path:
        folder = tmp_path_factory.mktemp("installed") / "venv"
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        install = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", distributions[0]]
        subprocess.run(install, check=True)
        (site,) = (folder / "lib").glob("python*/site-packages")
        here = next(p for p in map(Path, sys.path) if p.name == "site-packages")
        # The .pth file of our checkout, in that folder, is not read.
        (site / "dependencies.pth").write_text(str(here))
        return python

    return build


@pytest.fixture(scope="module")
def installed(build_installed: Callable[[], Path]) -> Path:
    """The Python of an environment that holds the wheel."""
    return build_installed()


@pytest.mark.slow
def test_a_wheel_brings_four_typed_packages_their_licences_and_the_datasets(distributions: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(distributions[0]).namelist())
    (information,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {*NAMES, information}
    assert {f"{package}/py.typed" for package in NAMES} <= names
    assert {"latbench/datasets/LICENSE", "latbench/datasets/workloads/resnet50.yaml"} <= names
    assert {"search/templates/vision_task.py", "search/templates/text_task.py"} <= names
    assert {f"{information}/licenses/{name}" for name in ("LICENSE", "datasets/LICENSE")} <= names
    metadata = zipfile.ZipFile(distributions[0]).read(f"{information}/METADATA").decode()
    assert "License-Expression: Apache-2.0 AND CC-BY-4.0\n" in metadata


@pytest.mark.slow
def test_a_source_distribution_brings_what_a_reader_of_the_repository_looks_for(
    distributions: tuple[Path, Path],
) -> None:
    with tarfile.open(distributions[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"LICENSE", "datasets/LICENSE", "README.md", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md"}
    wanted |= {
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        ".ci/run",
        ".pre-commit-config.yaml",
        "examples/prune_cnn.py",
    }
    assert wanted <= names
    assert {f"{package}/py.typed" for package in NAMES} <= names


@pytest.mark.slow
def test_an_installed_wheel_runs_and_finds_its_workloads(installed: Path, tmp_path: Path) -> None:
    plan = [installed.parent / "latbench", "plan"]
    out = subprocess.run(plan, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "resnet50" in out
    where = [installed, "-c", "import latbench.workloads.workload as w; print(w.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert Path(found.strip()).is_relative_to(installed.parents[1])


# Compiles a function of each package that has compiled ones, and one in a process that it starts.
COMPILING_SCRIPT = """\
import subprocess, sys
import numpy as np, torch
import search
from sparse_kernels import VectorWise, pack, prepare

seconds = [np.array([2.0, 1.0]), np.array([4.0, 3.0])]
search.solve(seconds, [np.array([0.0, 0.5]), np.array([0.0, 0.1])], 5.0)
if sys.argv[1:] != ["worker"]:
    subprocess.run([sys.executable, __file__, "worker"], check=True)
else:
    weight = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    packed = pack(weight, VectorWise(32).mask(weight**2, 0.75), VectorWise(32))
    prepare(packed, backend="numba", layout="token_major", n=16)(np.ones((16, 64), np.float32))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)  # it compiles
def test_an_uninstall_leaves_nothing_however_much_was_compiled(
    build_installed: Callable[[], Path], tmp_path: Path
) -> None:
    python = build_installed()
    (site,) = (python.parents[1] / "lib").glob("python*/site-packages")
    before = set(site.rglob("*"))
    (tmp_path / "script.py").write_text(COMPILING_SCRIPT)
    settings = {**os.environ, "NUMBA_CACHE_DIR": "", "LATBENCH_CACHE": str(tmp_path / "cache")}
    subprocess.run([python, "script.py"], cwd=tmp_path, env=settings, check=True)
    kernels = {path.name.split("-")[0] for path in (tmp_path / "cache" / "kernels").glob("*.nbc")}
    assert any(name.startswith("states.") for name in kernels), kernels
    assert any(not name.startswith("states.") for name in kernels), kernels
    assert not [path for path in set(site.rglob("*")) - before if path.suffix in {".nbc", ".nbi"}]
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "latbench"], check=True)
    assert not [path for path in site.iterdir() if path.name.startswith(tuple(NAMES))]


USER_SCRIPT = """\
import numpy as np
import search

seconds = [np.array([2.0, 1.0]), np.array([4.0, 3.0])]
solution = search.solve(seconds, [np.array([0.0, 0.5]), np.array([0.0, 0.1])], {budget})
print(solution.seconds + 1.0)
"""


# Types of large libraries are not what the test is about, and take most of its time.
USER_CONFIGURATION = """\
[mypy]
strict = True
[mypy-torch.*,pandas.*,matplotlib.*,sympy.*,plotly.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_a_user_s_script_is_type_checked_against_the_installed_packages(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(USER_CONFIGURATION)
    (tmp_path / "right.py").write_text(USER_SCRIPT.format(budget="5.0"))
    (tmp_path / "wrong.py").write_text(USER_SCRIPT.format(budget="'5.0'"))
    mypy = [sys.executable, "-m", "mypy", "--python-executable", str(installed), "right.py", "wrong.py"]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True)
    faults = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [fault.split(":")[0] for fault in faults] == ["wrong.py"], done.stdout
    assert "str" in faults[0]
