"""The fingerprint of Numba's kernels changes with their code, not with what is said of it. Needs no GPU."""

import shutil
from pathlib import Path

import pytest

from sparse_kernels.numba_cuda import source_fingerprint


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in source_fingerprint.FOLDER.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(source_fingerprint, "FOLDER", tmp_path)
    return tmp_path


def every() -> dict[str, str]:
    source_fingerprint.fingerprint_module.cache_clear()
    found = {module: source_fingerprint.fingerprint_module(module) for module in source_fingerprint.MODULES.values()}
    source_fingerprint.fingerprint_module.cache_clear()
    return found


def test_comments_docstrings_and_imports_change_nothing(folder):
    before = every()
    for path in folder.glob("*.py"):
        text = path.read_text()
        assert text.startswith('"""')
        path.write_text('"""Another docstring' + text[3:] + "\n\nimport math  # a comment\n")
    assert every() == before


@pytest.mark.parametrize(("file", "changed"), [("vector", {"vector"}), ("tile", None), ("numba_cuda_plan", None)])
def test_code_changes_the_formats_that_run_it(folder, file, changed):
    before = every()
    path = folder / f"{file}.py"
    path.write_text(path.read_text() + "\nSOMETHING = 1\n")
    after = every()
    assert {name for name in before if before[name] != after[name]} == (changed or set(before))


def test_every_format_has_a_file():
    from sparse_kernels.numba_cuda import numba_cuda_plan

    assert set(source_fingerprint.MODULES.values()) == {
        module.__name__.rpartition(".")[2] for module in numba_cuda_plan.FORMATS.values()
    }
