"""The tests of the CPU's kernels on an emulated Arm processor: for Debian on x86, with qemu-user.

    python tests/emulated_arm.py [--has dotprod|i8mm|neither] [PATH ...] [-- OPTION ...]

Paths and options are pytest's. Without any, one of each kind of kernel is tried, as for other x86 processors, and
every kernel in eight bits. That takes half an hour, because an emulated test takes ten times as long. The first call
puts Debian's Python for Arm and the packages that the tests import into build/arm: 1.2 GB.

Kernels are compiled for the instructions that --has names. LLVM does not find them out by itself there. No speed can
be measured in this way.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "sparse_kernels" / "cases"))

from cpu_kernel_tests import OF_EACH_KIND  # noqa: E402

BUILD = ROOT / "build" / "arm"
SYSTEM, PACKAGES = BUILD / "system", BUILD / "packages"
DEBIAN_PACKAGES = ("python3", "libgomp1", "libstdc++6")
WHEEL_PLATFORMS = tuple(
    f"{kind}_aarch64" for kind in ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
)
# torch of this version is the last one whose wheel for Arm on PyPI does without CUDA.
TORCH = "torch==2.9.1"
PINNED = (
    "numpy", "numba", "llvmlite", "scipy", "pytest", "pytest-timeout", "iniconfig", "pluggy", "packaging",
    "hypothesis", "sortedcontainers", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
    "fsspec", "filelock", "pygments",
)  # fmt: skip
IN_BYTES = "int8 or arm_dot_products"
FEATURES = {"neither": "+neon", "dotprod": "+neon,+dotprod", "i8mm": "+neon,+dotprod,+i8mm"}
# The matrix unit is Intel's, libraries in C are made for x86 alone, and times mean nothing here.
LEFT_OUT = ("matrix_unit", "export", "plans/test_autotune.py")


def run(*command: object, **variables: str) -> int:
    """Print and run a command; return its exit code."""
    words = [str(word) for word in command]
    print("$", " ".join(words), flush=True)
    return subprocess.run(words, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode


def must_run(*command: object) -> None:
    """Print and run a command; ends with its exit code unless that is 0."""
    if code := run(*command):
        raise SystemExit(code)


def fetch_system() -> None:
    """Unpack Debian's Python for Arm and the libraries that wheels take for granted, beside this system's own."""
    apt = BUILD / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "state" / "status").touch()  # nothing is installed there, so everything is fetched
    settings = {
        "APT::Architecture": "arm64", "APT::Architectures::": "arm64", "APT::Sandbox::User": "root",
        "Dir::State": apt / "state", "Dir::State::status": apt / "state" / "status", "Dir::Cache": apt / "cache",
    }  # fmt: skip
    get = [
        "apt-get",
        "-qq",
        "--yes",
        *(word for name, value in settings.items() for word in ("-o", f"{name}={value}")),
    ]
    must_run(*get, "update")
    must_run(*get, "install", "--download-only", "--no-install-recommends", *DEBIAN_PACKAGES)
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg", "--extract", package, SYSTEM], check=True)


def fetch_packages() -> None:
    """Unpack wheels for Arm of the versions that are pinned, and torch."""
    wheels, python = BUILD / "wheels", find_python().name.removeprefix("python")
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--dest", wheels]
    fetch += ["--python-version", python, *(word for name in WHEEL_PLATFORMS for word in ("--platform", name))]
    must_run(*fetch, "-c", ROOT / "constraints.txt", *PINNED)
    must_run(*fetch, TORCH)
    for wheel in sorted(wheels.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(PACKAGES)


def find_python() -> Path:
    """Return the interpreter of the emulated system."""
    return min((SYSTEM / "usr" / "bin").glob("python3.[0-9]*"))


def main() -> None:
    """Fetch what is missing, and run the tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--has", choices=FEATURES, default="dotprod")
    parser.add_argument("arguments", nargs="*", help="of pytest; options after --")
    given = parser.parse_args()
    missing = [tool for tool in ("qemu-aarch64", "apt-get", "dpkg") if not shutil.which(tool)]
    if missing or platform.machine() != "x86_64":
        raise SystemExit(f"this needs Debian on x86-64 with qemu-user; not found: {', '.join(missing) or 'x86-64'}")
    if not (BUILD / "ready").exists():
        fetch_system()
        fetch_packages()
        (BUILD / "ready").touch()
    folder = ROOT / "tests" / "sparse_kernels" / "cpu"
    left_out = [f"--ignore={folder / name}" for name in LEFT_OUT]
    code = run(
        "qemu-aarch64", "-cpu", "max", "-L", SYSTEM, find_python(), "-P", "-m", "pytest", "-m", "not slow",
        "--timeout", "0", *(given.arguments or [folder, *left_out, "-k", f"{OF_EACH_KIND} or {IN_BYTES}"]),
        PYTHONPATH=f"{ROOT}{os.pathsep}{PACKAGES}", PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1",
        NUMBA_CACHE_DIR=str(BUILD / "kernels" / given.has), NUMBA_CPU_NAME="generic",
        NUMBA_CPU_FEATURES=FEATURES[given.has],
    )  # fmt: skip
    raise SystemExit(code)


if __name__ == "__main__":
    main()
