"""What is installed, what importing it costs, and what may import what."""

import subprocess
import sys
import venv
import zipfile
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


@pytest.mark.slow
def test_a_wheel_brings_four_names_and_its_workloads(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    inside = {Path(name).parts[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in inside if not name.endswith(".dist-info")} == NAMES

    # An environment with our dependencies on its path but not our checkout: .pth files in a path entry are not read.
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    here = next(p for p in map(Path, sys.path) if p.name == "site-packages")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    (site / "dependencies.pth").write_text(str(here))
    plan = [tmp_path / "venv" / "bin" / "latbench", "plan"]
    out = subprocess.run(plan, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "resnet50" in out
    where = [python, "-c", "import latbench.workloads.workload as w; print(w.__file__)"]
    assert str(tmp_path) in subprocess.run(where, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
