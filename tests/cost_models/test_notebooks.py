"""The notebooks run from the tables that come with latbench, and what is committed of their outputs is small."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import cost_models

FOLDER = Path(cost_models.__file__).parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 200_000


def test_there_are_four() -> None:
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_there_small_and_of_a_run_from_top_to_bottom(path: Path) -> None:
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size < MOST_BYTES
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()  # raises what a cell raises
