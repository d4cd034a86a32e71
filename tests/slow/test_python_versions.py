"""Every Python version that pyproject.toml names runs the whole path from a sweep to a profile and a sparse layer.

Each version gets a new environment with the pinned versions of `constraints.txt`. The environment takes about 5 GB,
as PyPI's torch brings CUDA, and is removed afterwards.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timed, pytest.mark.long, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = [
    found[1]
    for classifier in PROJECT["classifiers"]
    if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", classifier))
]
TORCH = re.search(r"torch==\S+", (ROOT / "constraints.txt").read_text())
TABLE = "bundled://amd-epyc-zen4-2-threads"
WORKLOAD = """\
name: one
source: made up
layers:
  - {name: only, op: linear, m: 256, k: 256, n: 64}
"""

SPARSE_LAYER = """\
import numpy as np, torch
import cost_models, latbench, search, sparse_kernels
from sparse_kernels import ShflBW
from sparse_kernels.convert import LayerPattern, convert

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 8)).eval()
x = torch.randn(16, 64)
mask = ShflBW(32).mask(model[0].weight.detach().abs().numpy(), 0.75)
fast = convert(model, {"0": LayerPattern(ShflBW(32), mask)}, (x,))
with torch.no_grad():
    model[0].weight *= torch.from_numpy(np.asarray(mask))
    assert torch.allclose(fast(x), model(x), atol=1e-5)
"""


def find_uv() -> str:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        pytest.skip("uv is not installed, and makes the environments: pip install uv")
    return uv


def find_interpreter(version: str) -> str:
    """The path of a Python on PATH or of pyenv's, else the version itself, for uv to download."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for found in [shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")]:
        # What pyenv puts on PATH may stand for a version that is not selected, and fails.
        if found is not None and subprocess.run([found, "-V"], capture_output=True).returncode == 0:
            return str(found)
    return version


@pytest.fixture
def environment(version: str) -> Iterator[Path]:
    """The folder of commands of an environment with latbench in the given version of Python."""
    uv = find_uv()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        create = [uv, "venv", "-q", "--clear", "--python", find_interpreter(version), folder]
        if subprocess.run(create, capture_output=True).returncode != 0:
            pytest.skip(f"no Python {version} on this machine, and uv could download none")
        assert TORCH is not None
        install = [uv, "pip", "install", "-q", "--python", f"{folder}/bin/python", "-c", "constraints.txt"]
        subprocess.run([*install, TORCH[0], "."], cwd=ROOT, check=True)
        yield Path(folder, "bin")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_python_version_sweeps_fits_and_searches(version: str, environment: Path, tmp_path: Path) -> None:
    latbench = environment / "latbench"

    def succeed(*command: str | Path) -> str:
        settings = {**os.environ, "LATBENCH_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert succeed(environment / "python", "-V").startswith(f"Python {version}.")
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    options = ["--patterns", "dense,vector:32", "--sparsities", "0.75", "--backends", "numba"]
    succeed(latbench, "sweep", "--cpu", "--workload", "workload.yaml", *options, "-o", "table")
    succeed(latbench, "validate", "table")
    succeed(latbench, "fit", TABLE, "-o", "model.json")
    solve = [latbench, "solve", TABLE, "--workload", "cpu_kernels", "--cost-model", "model.json", "--target", "2"]
    assert "over numba" in succeed(*solve, "-o", "profile.txt")
    succeed(environment / "python", "-c", SPARSE_LAYER)
