"""CUDA's libraries: the extras bring what the engines open, and versions are right; no GPU is needed."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from latbench.base.engine_registry import GPU_ENGINES
from latbench.machines import cuda_libraries
from latbench.machines.cuda_libraries import (
    LIBRARIES,
    explain_load_error,
    explain_mixed_cuda,
    find_library_versions,
)

ROOT = Path(__file__).parents[3]

# Of those that CuPy and Numba open, what CuPy's own loader finds; then a kernel as CuPy compiles it, for one GPU.
LOAD_ALL = """
import json, sys
from latbench.machines import cuda_libraries as libraries
before = libraries.find_library_versions()
untouched = "nvidia" not in open("/proc/self/maps").read()

from cuda import pathfinder
for name in ("cudart", "nvrtc", "nvJitLink", "nvvm", "cublasLt", "cublas", "cusparse"):
    pathfinder.load_nvidia_dynamic_lib(name)
from cupy_backends.cuda.libs import cublas, cusparse
from cupy._core import core
from cupy.cuda import compiler
source = "#include <cupy/carray.cuh>\\n#include <cupy/float16.cuh>\\n"
source += 'extern "C" __global__ void k(float16* x) { *x = 1.f; }'
options = (*core.assemble_cupy_compiler_options(()), "-arch=sm_80")
cubin, _ = compiler._NVRTCProgram(source, "k.cu", (), (), method="cubin").compile(options, None)
print(json.dumps([untouched, before, libraries.find_library_versions(), len(cubin)]))
"""

# A library by cuBLAS's name whose version nobody has; then one that does not answer.
FAKE = """
int cublasGetProperty(int part, int* value) { *value = 90 + part; return STATUS; }
"""
ASK_FAKE = """
import ctypes, sys
from latbench.machines import cuda_libraries as libraries
ctypes.CDLL(sys.argv[1])
print(libraries.find_library_versions()["cublas"])
"""


def _python(code: str, *arguments: str | Path) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The packages that are installed, by version."""
    found: dict[str, str] = {}
    monkeypatch.setattr("latbench.machines.cuda_libraries.find_version", found.get)
    return found


# What is opened, and the extras -----------------------------------------------------------------------------------


def test_every_engine_names_known_libraries_and_each_is_opened_by_one() -> None:
    assert all(engine.opened_libraries for engine in GPU_ENGINES.values())
    assert {name for engine in GPU_ENGINES.values() for name in engine.opened_libraries} == LIBRARIES.keys()


def _extra(name: str) -> list[Any]:
    """The requirements of an extra."""
    requirements = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [requirements.Requirement(text) for text in project["optional-dependencies"][name]]


def _toolkit(extra: str) -> Any:
    """What an extra wants of CUDA's toolkit."""
    return next(each for each in _extra(extra) if each.name == "cuda-toolkit")


def _brought(requirements: list[Any]) -> Iterator[str]:
    """The packages that requirements bring, with those that they bring in turn."""
    Requirement = type(requirements[0])
    todo, seen = list(requirements), set()
    while todo:
        wanted = todo.pop()
        if str(wanted) in seen:
            continue
        seen.add(str(wanted))
        yield wanted.name
        for text in metadata.requires(wanted.name) or ():
            each = Requirement(text)
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                todo.append(each)


def test_the_extra_for_cuda_13_brings_every_library_but_torchs() -> None:
    pytest.importorskip("cupy")
    ours = [wanted for wanted in _extra("cuda13") if wanted.name != "torch"]
    brought = set(_brought(ours))
    opened = {name for engine in GPU_ENGINES.values() if not engine.uses_torch for name in engine.opened_libraries}
    missing = {name for name in opened if LIBRARIES[name].wheels[13] not in brought}
    assert not missing


def test_the_extra_for_cuda_12_wants_the_same_of_the_toolkit() -> None:
    assert _toolkit("cuda12").extras == _toolkit("cuda13").extras
    assert next(each for each in _extra("cuda12") if each.name == "numba-cuda").extras == {"cu12"}


def test_the_toolkits_of_the_extras_are_of_their_cuda_and_know_every_architecture() -> None:
    twelve, thirteen = (_toolkit(extra).specifier for extra in ("cuda12", "cuda13"))
    assert not thirteen.contains("12.9") and not twelve.contains("13.0") and not twelve.contains("12.6")
    assert thirteen.contains(metadata.version("cuda-toolkit"))


def test_the_libraries_of_the_extra_load_without_a_gpu_and_say_their_wheels_versions() -> None:
    pytest.importorskip("cupy")
    untouched, before, after, size = json.loads(_python(LOAD_ALL))
    assert untouched  # nothing was loaded to find versions
    assert before == after
    assert before["cublas"].startswith("13.") and before["nvrtc"].startswith("13.") and before["cusparse"]
    assert size > 1000


# Versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "expected"), [("0", "90.91.92"), ("1", None)])
def test_a_loaded_library_says_its_own_version(tmp_path: Path, status: str, expected: str | None) -> None:
    library = tmp_path / "fake.so"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcublas.so.13", f"-DSTATUS={status}", "-x", "c", "-o", library, "-"]
    subprocess.run(["g++", *flags], input=FAKE, check=True, text=True)
    assert _python(ASK_FAKE, library).strip() == (expected or str(find_library_versions()["cublas"]))


def test_versions_of_wheels_are_cut_to_what_a_library_says(
    packages: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cuda_libraries, "_loaded", lambda name: None
    )  # whatever other tests of this process have loaded
    packages |= {
        "nvidia-cublas-cu12": "12.8.4.1", "nvidia-cudnn-cu13": "9.24.0.43", "nvidia-cusparselt-cu13": "0.8.1.post1",
        "triton": "3.6.0",
    }  # fmt: skip
    assert find_library_versions() == {
        "cublas": "12.8.4", "cudnn": "9.24.0", "cusparse": None, "cusparselt": "0.8.1", "nvrtc": None,
        "nvvm": None, "triton": "3.6.0",
    }  # fmt: skip


# What to install --------------------------------------------------------------------------------------------------

NOT_FOUND = """Failure finding "libcublasLt.so.13 or libcublasLt.so.12": No such file: libcublasLt.so.13
  listdir("site-packages/nvidia/cu13/lib"):
    libnvrtc.so.13"""


@pytest.mark.parametrize(
    ("cupy", "advice"),
    [
        ("cupy-cuda13x", "libcublasLt.so.13 cannot be loaded: pip install nvidia-cublas"),
        ("cupy-cuda12x", "libcublasLt.so.12 cannot be loaded: pip install nvidia-cublas-cu12"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_wheel(packages: dict[str, str], cupy: str, advice: str) -> None:
    packages[cupy] = "14.2.0"
    assert explain_load_error(NOT_FOUND) == advice


def test_what_is_no_missing_library_gets_no_advice(packages: dict[str, str]) -> None:
    packages |= {"cupy-cuda13x": "14.2.0", "nvidia-cublas": "13.1.1.3"}
    assert explain_load_error("CUBLAS_STATUS_NOT_INITIALIZED") is None
    assert explain_load_error("libcublas.so.13: cannot read file data") is None
    assert explain_mixed_cuda() is None


def test_libraries_of_cuda_13_beside_a_cupy_for_12_are_told(packages: dict[str, str]) -> None:
    packages |= {"cupy-cuda12x": "14.2.0", "nvidia-cublas-cu12": "12.8.4.1"}
    assert explain_mixed_cuda() is None
    packages["nvidia-cublas"] = "13.1.1.3"
    found = explain_load_error("libcublas.so.12: cannot open shared object file: No such file or directory")
    assert found == explain_mixed_cuda() == (
        "cupy-cuda12x would load the libraries of CUDA 13, which are installed too (nvidia-cublas): "
        "make a new environment, and type pip install '.[cuda12]' in a clone of latbench"
    )  # fmt: skip
