"""An exported model in Python: one call from its folder to a callable, with NumPy alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chain_task import CHAIN_TASK, prune_chain

import latbench as lb
from latbench.cli.commands.export import export as export_command
from latbench.errors import BadData, UsageError
from search.export.c_library.exported_model import ExportedModel
from search.pruning.storage.model_folder import load_pruned
from search.task import load_task
from sparse_kernels.convert import convert
from sparse_kernels.cpu.export.cpu_levels import list_host_levels

pytestmark = pytest.mark.slow  # a level takes seconds to compile

if not list_host_levels():
    pytest.skip("no CPU level for which kernels are compiled ahead of time", allow_module_level=True)

X = np.random.default_rng(7).standard_normal((9, 3, 7, 6), np.float32)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """An exported folder, and what its model makes of X."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "chain_task.py").write_text(CHAIN_TASK)
    task = load_task(str(folder / "chain_task.py"))
    pruned = prune_chain(folder / "pruned", task)
    export_command(
        task.reference, pruned, folder / "deploy", to="c", level=[list_host_levels()[-1].name], threads=["2"]
    )
    model, choices = load_pruned(pruned, task.model())
    converted = convert(model, choices, task.example().arguments)
    return folder / "deploy", converted(torch.from_numpy(X)).numpy()


def check(y: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_a_folder_becomes_a_callable(exported: tuple[Path, np.ndarray]) -> None:
    folder, expected = exported
    for threads in (None, 2):
        model = lb.load(folder, threads=threads)
        assert isinstance(model, ExportedModel)
        assert (model.input_shape, model.output_shape, model.level) == ((3, 7, 6), (3,), list_host_levels()[-1].name)
        check(model(X), expected)
        check(model(X.astype(np.float64)[:, ::-1][:, ::-1]), expected)
        check(model(torch.from_numpy(X)), expected)
        assert model(X[:0]).shape == (0, 3)


def test_it_needs_nothing_but_numpy(exported: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    folder, expected = exported
    np.save(tmp_path / "x.npy", X)
    program = f"""
import sys
import numpy as np
import latbench as lb
np.save("y.npy", lb.load({str(folder)!r})(np.load("x.npy")))
heavy = "torch numba llvmlite pandas pyarrow sklearn scipy typer rich".split()
print([name for name in heavy if name in sys.modules])
"""
    told = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
    check(np.load(tmp_path / "y.npy"), expected)


def test_threads_forks_and_spawned_processes_share_it(exported: tuple[Path, np.ndarray]) -> None:
    folder, expected = exported
    model = lb.load(folder, threads=2)
    check(pickle.loads(pickle.dumps(model))(X), expected)
    found: list[np.ndarray] = []
    callers = [threading.Thread(target=lambda: found.extend(model(X) for _ in range(50))) for _ in range(8)]
    for caller in callers:
        caller.start()
    children = []
    for _ in range(4):  # while threads call it
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # one that waits for ever ends
            right = all(np.allclose(model(X), expected, rtol=1e-4, atol=1e-5) for _ in range(50))
            os._exit(0 if right else 1)
        children.append(child)
    for caller in callers:
        caller.join()
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert len(found) == 400
    for y in found:
        check(y, expected)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for y in pool.map(model, [X, X]):
            check(y, expected)


def test_what_does_not_fit_is_refused_in_a_sentence(exported: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    model = lb.load(exported[0])
    for wrong, why in ((X[0], "inputs of shape"), (X[:, :2], "inputs of shape"), (np.float32(1), "inputs of shape"),
                       (X.astype(int), "floating-point numbers, not int64")):  # fmt: skip
        with pytest.raises(UsageError, match=why):
            model(wrong)
    with pytest.raises(UsageError, match="at least one thread, not 0"):
        lb.load(exported[0], threads=0)
    with pytest.raises(UsageError, match="by its folder alone"):
        lb.load(exported[0], torch.nn.Identity(), torch.zeros(1))  # type: ignore[call-overload]
    with pytest.raises(BadData, match="no pruned model and no exported one"):
        lb.load(tmp_path)
    with pytest.raises(UsageError, match="is a pruned model: give the dense model"):
        lb.load(exported[0].parent / "pruned")


@pytest.mark.parametrize("name", ["libmodel.so", "model.latbench", "manifest.json"])
def test_damage_is_refused_before_anything_runs(exported: tuple[Path, np.ndarray], tmp_path: Path, name: str) -> None:
    damaged = shutil.copytree(exported[0], tmp_path / "damaged")
    if name == "manifest.json":
        facts = json.loads((damaged / name).read_text())
        del facts["output"]
        (damaged / name).write_text(json.dumps(facts))
    else:
        content = bytearray((damaged / name).read_bytes())
        content[len(content) // 2] ^= 1
        (damaged / name).write_bytes(content)
    with pytest.raises(BadData, match="export the model again"):
        lb.load(damaged)
