"""A fingerprint changes with the code that can run, and with nothing that is only said of it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparse_kernels.fingerprints import cpu_families, numba_cuda_formats, python_code
from sparse_kernels.fingerprints.python_code import fingerprint_code

KERNELS = '''
"""Kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

from pack.helpers import LANES, Emitter, double
from pack import helpers


class Form(NamedTuple):
    """A form."""

    rows: int
    lanes: int = LANES  # of a vector


def multiply(form: Form, x: int) -> int:
    """Return a product."""
    if x:
        x = double(x)
    return x * form.rows + helpers.triple(x) + Emitter().add(x, 1) + math.floor(1.5)
'''

HELPERS = '''
LANES = 16
UNUSED = 1


def double(x):
    return shifted(x, by=1)


def shifted(x, by):
    return x << by


def triple(x):
    return f"{x + 1}{x:>3}"


def unused(x):
    return x


class Emitter:
    """Emits."""

    def __init__(self):
        self.seen = 0

    def add(self, a, b):
        return a + b

    def subtract(self, a, b):
        return a - b
'''

Edit = Callable[[str, str], str]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "helpers.py").write_text(HELPERS)
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(python_code, "ROOT", tmp_path)
    python_code.read_module.cache_clear()
    yield tmp_path
    python_code.read_module.cache_clear()


def find(**options: object) -> str:
    python_code.read_module.cache_clear()
    return fingerprint_code(["pack.kernels"], **options)  # type: ignore[arg-type]


def edit(package: Path, file: str, before: str, after: str) -> None:
    path = package / f"{file}.py"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))


SAID_ONLY = [
    ("kernels", '"""Return a product."""', '"""Return the product of a form\n    and x."""'),
    ("kernels", '    """Return a product."""\n', ""),
    ("kernels", "  # of a vector", "  # lanes of a vector\n\n    # and no more"),
    ("kernels", "import math\n", "import json\nimport math\n"),
    ("kernels", "form: Form, x: int) -> int:", "form: tuple[int, int], x) -> float:"),
    ("kernels", "multiply(form: Form, x: int)", "multiply(\n    form: Form,\n    x: int,\n)"),
    ("kernels", "if x:\n        x = ", "if x:\n\n        x = "),
    ("helpers", "UNUSED = 1", "UNUSED = 2"),
    ("helpers", "def unused(x):\n    return x", "def unused(x):\n    return -x"),
    ("helpers", "return a - b", "return b - a"),
    ("helpers", "class Emitter:\n", "class Emitter:\n    def first(self):\n        return 1\n\n"),
    ("helpers", "        return a - b\n", "        return a - b\n\n    def last(self):\n        return 1\n"),
    ("helpers", "    def subtract", "    def divide(self, a, b):\n        return a / b\n\n    def subtract"),
    ("helpers", "def unused", "def also_unused(x):\n    return unused(x)\n\n\ndef unused"),
]

RUNS = [
    ("kernels", "Emitter().add(x, 1)", "Emitter().add((x,)[0], 1)"),
    ("kernels", "rows: int\n", "rows: int\n    seen: Emitter\n"),
    ("helpers", "LANES = 16\n", "LANES = {}\nLANES[0] = 16\n"),
    ("kernels", "rows: int\n", "rows: int\n    columns: int\n"),
    ("kernels", "        x = double(x)\n    return", "        x = double(x)\n        return"),
    ("kernels", "math.floor(1.5)", "math.floor(2.5)"),
    ("helpers", "LANES = 16", "LANES = 8"),
    ("helpers", "x << by", "x << by + 1"),
    ("helpers", "{x:>3}", "{x:>4}"),
    ("helpers", "return a + b", "return b + a"),
    ("helpers", "self.seen = 0", "self.seen = 1"),
    ("helpers", "def double(x):", "@staticmethod\ndef double(x):"),
]


@pytest.mark.parametrize(("file", "before", "after"), SAID_ONLY)
def test_what_runs_nothing_changes_nothing(package: Path, file: str, before: str, after: str) -> None:
    known = find()
    edit(package, file, before, after)
    assert find() == known


@pytest.mark.parametrize(("file", "before", "after"), RUNS)
def test_what_runs_changes_it(package: Path, file: str, before: str, after: str) -> None:
    known = find()
    edit(package, file, before, after)
    assert find() != known


def test_a_function_may_move_to_another_file(package: Path) -> None:
    known = find()
    edit(package, "helpers", 'def triple(x):\n    return f"{x + 1}{x:>3}"\n', "from pack.others import triple\n")
    (package / "others.py").write_text('def triple(x):\n    return f"{x + 1}{x:>3}"\n')
    assert find() == known


def test_constants_alone_count_of_what_a_call_does_not_run(package: Path) -> None:
    known = find(unrun=["pack.helpers"])
    edit(package, "helpers", "x << by", "x << by + 1")
    assert find(unrun=["pack.helpers"]) == known
    edit(package, "helpers", "LANES = 16", "LANES = 8")
    assert find(unrun=["pack.helpers"]) != known


def test_definitions_that_use_each_other_end(package: Path) -> None:
    edit(package, "helpers", "return x << by", "return double(x) if by else x")
    assert len(find()) == python_code.DIGITS


def test_a_missing_module_is_no_code(package: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fingerprint_code(["pack.nothing"])


def test_every_python_gives_the_same_digits(package: Path) -> None:
    """A change of them would make the times of all tables old."""
    assert find() == "39f46ef5"


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernels' sources, which a test may change."""
    root = tmp_path / "sparse_kernels"
    shutil.copytree(python_code.ROOT, root, ignore=shutil.ignore_patterns("*.nbc", "__pycache__", "device_code"))
    for module in (python_code, cpu_families, numba_cuda_formats):
        monkeypatch.setattr(module, "ROOT", root)
    clear()
    yield root
    clear()


def clear() -> None:
    python_code.read_module.cache_clear()
    cpu_families.fingerprint_cpu_family.cache_clear()
    numba_cuda_formats.fingerprint_module.cache_clear()


def find_families() -> dict[str, str | None]:
    clear()
    files = [
        path for folder in ("kernels", "matrix_unit") for path in (python_code.ROOT / "cpu" / folder).glob("*.py")
    ]
    found = {path.stem: cpu_families.fingerprint_cpu_family(path.stem) for path in files if path.stem != "__init__"}
    return found | {f"numba_{name}": numba_cuda_formats.fingerprint_module(name)
                    for name in numba_cuda_formats.MODULES.values()}  # fmt: skip


def append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


LINEAR = {
    "row_panels", "token_blocks", "token_major", "small_batch", "unstructured_rows", "transpose_tiles",
    "third_linear", "third_tiles", "byte_linear", "byte_tiles", "byte_panels", "tile_panels", "attention",
    "int8_attention", "product_settings",
}  # fmt: skip
ON_GPUS = {"numba_dense", "numba_vector", "numba_block", "numba_nm", "numba_csr"}


@pytest.mark.parametrize(
    ("file", "before", "after", "changed"),
    [
        ("cpu/kernels/token_blocks.py", "COLUMNS_AHEAD = 32", "COLUMNS_AHEAD = 16", {"token_blocks"}),
        ("cpu/codegen/scatter_rows.py", "def ", "def other_", {"token_major"}),
        ("cpu/plans/linear.py", "LEAST_DENSITY, SOME_TOKENS, ENOUGH_TOKENS = 0.2", "LEAST_DENSITY, SOME_TOKENS, "
         "ENOUGH_TOKENS = 0.3", set()),
        ("cpu/launch/recording.py", "raise RuntimeError", "raise TypeError", set()),
        ("cpu/runtime/kernel_cache.py", "[:32]}.nbc", "[:31]}.nbc", set()),
        ("cpu/launch/linear_call.py", "def ", "def other_", LINEAR),
        ("numba_cuda/transpose.py", "def ", "def other_", ON_GPUS),
        ("numba_cuda/vector.py", "def ", "def other_", {"numba_vector"}),
    ],
)  # fmt: skip
def test_a_change_of_the_kernels_touches_the_families_that_run_it(
    copied: Path, file: str, before: str, after: str, changed: set[str]
) -> None:
    known = find_families()
    path = copied / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    now = find_families()
    assert {name for name in known if now[name] != known[name]} == changed


def test_what_launches_kernels_touches_all_that_are_launched(copied: Path) -> None:
    known = find_families()
    path = copied / "cpu/launch/native_call.py"
    path.write_text(path.read_text().replace("if parts == 1:", "if parts == 2:"))
    changed = {name for name, digits in find_families().items() if digits != known[name]}
    launched = {
        "row_panels", "token_blocks", "token_major", "small_batch", "unstructured_rows", "transpose_tiles",
        "image_layout", "quad_images", "third_linear", "third_conv2d", "byte_linear", "byte_conv2d",
    }  # fmt: skip
    assert launched <= changed and not changed & ON_GPUS


def test_an_unknown_family_has_none() -> None:
    assert cpu_families.fingerprint_cpu_family("no_such_file") is None
    assert cpu_families.fingerprint_cpu_family("../plans/linear") is None


def test_every_format_on_a_gpu_has_a_file() -> None:
    from sparse_kernels.numba_cuda import numba_cuda_plan

    assert set(numba_cuda_formats.MODULES.values()) == {
        module.__name__.rpartition(".")[2] for module in numba_cuda_plan.FORMATS.values()
    }
