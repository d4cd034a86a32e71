"""A user's files with the names of our packages: both are found, or one must be renamed."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from latbench.base.own_packages import FOLDER, NAMES

USERS = """
print("search runs")
problem = "the user's own"  # the name of one of our modules, too
def find():
    return "found"
"""

TASK = """
import numpy as np
import torch
import search
from search import problem

assert search.find() == "found" and problem == search.problem == "the user's own"

def model():
    import search
    torch.manual_seed(0)
    assert search.find() == "found" and not hasattr(search, "Problem")
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()

def example():
    return (torch.ones(4, 8),)

def calibration():
    return [torch.ones(4, 8)]

def loss(model, batch):
    return model(batch).mean()

def score(model):
    return 1.0
"""


def run(folder: Path, *command: str, code: int = 0) -> str:
    """What Python prints in the folder, on both streams."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


LATBENCH = ("-m", "latbench.cli.main")  # with the user's folder in front of all others, as `python -m` puts it

SERVER = """
import latbench as lb
import search
print(search.find(), search.problem)
assert lb.solve([[1.0]], [[0.0]], 2.0).choice == (0,)
print(lb.Problem.__module__, lb.load.__name__, search.problem)
import search as again, pickle
assert pickle.loads(pickle.dumps(lb.Problem)) is lb.Problem and not hasattr(again, "knapsack")
"""


def test_a_server_imports_its_own_module_and_ours(tmp_path: Path) -> None:
    write(tmp_path, search=USERS, server=SERVER)
    printed = run(tmp_path, "server.py").splitlines()
    assert printed == [
        "search runs", "found the user's own", "search.problem.problem load_model the user's own"
    ]  # fmt: skip


def test_it_does_not_matter_which_is_imported_first(tmp_path: Path) -> None:
    write(tmp_path, search=USERS, server="import search\n" + SERVER)
    assert run(tmp_path, "server.py").count("search runs") == 1


@pytest.mark.slow  # processes with torch
def test_all_three_names_may_be_the_user_s(tmp_path: Path) -> None:
    names = ("search", "cost_models", "sparse_kernels")
    write(tmp_path, **{name: f"oracle = convert = inputs = rows = own = {name!r}\n" for name in names})
    script = f"""
import latbench as lb
from latbench.base.public_names import PUBLIC_NAMES
for name in PUBLIC_NAMES: getattr(lb, name)
for name in {names}:
    module = __import__(name)
    assert module.own == module.oracle == module.convert == module.inputs == module.rows == name
"""
    write(tmp_path, server=script)
    run(tmp_path, "server.py")


def test_a_module_that_nobody_imports_does_not_run(tmp_path: Path) -> None:
    write(
        tmp_path,
        search="raise SystemExit('a script that searches for hours')",
        server="import latbench as lb; lb.solve",
    )
    assert run(tmp_path, "server.py") == ""


def test_what_a_user_s_module_raises_is_raised_where_it_is_used(tmp_path: Path) -> None:
    write(tmp_path, search="import nothing_of_that_name", server="import latbench\nfrom search import find")
    assert "No module named 'nothing_of_that_name'" in run(tmp_path, "server.py", code=1)


def test_a_user_s_package_keeps_its_modules(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    write(tmp_path / "search", __init__="from search.grid import find", grid="def find(): return 'grid'")
    script = (
        "import latbench as lb\nimport search.grid\nprint(search.find(), search.grid.find(), lb.Problem.__name__)"
    )
    write(tmp_path, server=script)
    assert run(tmp_path, "server.py").split() == ["grid", "grid", "Problem"]


def test_a_package_with_a_module_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    write(tmp_path / "search", __init__="", task="")
    write(tmp_path, server="import latbench")
    said = run(tmp_path, "server.py", code=1)
    assert f"search.task, so one of both could not be imported: rename the folder {tmp_path / 'search'}" in said
    write(tmp_path, my_task=TASK)
    said = run(Path.cwd(), "-P", *LATBENCH, "trace", str(tmp_path / "my_task.py"), "-o", str(tmp_path), code=2)
    assert said.count("\n") == 1 and f"rename the folder {tmp_path / 'search'}" in said


def test_a_folder_of_data_is_no_module(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "results.csv").write_text("")
    write(tmp_path, server="import latbench as lb\nfrom search import solve\nassert solve is lb.solve")
    run(tmp_path, "server.py")


@pytest.mark.slow  # processes with torch
@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_a_task_imports_the_module_beside_it(tmp_path: Path, place: str) -> None:
    write(tmp_path, search=USERS, my_task=TASK)
    (tmp_path / "other").mkdir()
    cwd, safe = (tmp_path, ()) if place == "beside" else (tmp_path / "other", ("-P",))
    run(cwd, *safe, *LATBENCH, "trace", str(tmp_path / "my_task.py"), "-o", str(tmp_path / "workload.yaml"))
    assert "linear" in (tmp_path / "workload.yaml").read_text()


@pytest.mark.slow  # processes with torch
def test_a_worker_loads_such_a_task(tmp_path: Path) -> None:
    write(tmp_path, search=USERS, my_task=TASK)
    script = f"""
import sys
sys.path.append({str(tmp_path)!r})
from latbench.runners.worker_process import Worker

with Worker(threads=1) as worker:
    dense = worker.prepare("search.whole_model.model_engines:build_dense_torch", {str(tmp_path / "my_task.py")!r}, 1)
    print(len(worker.sample(dense, 0.01)) > 0)
"""
    write(tmp_path, measure=script)
    assert "True" in run(tmp_path, "measure.py")


def test_a_server_loads_a_pruned_model_beside_its_own_search(tmp_path: Path) -> None:
    script = """
import latbench as lb
import search
try:
    lb.load("nothing", None, None)
except Exception as error:
    print(search.find(), type(error).__module__, error)
"""
    write(tmp_path, search=USERS, server=script)
    assert "found latbench.errors nothing is no pruned model" in run(tmp_path, "server.py")


def test_our_code_imports_modules_and_never_the_names_that_users_may_have() -> None:
    found = []
    for package in ("latbench", *NAMES):
        for path in (FOLDER / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                taken = [node.module] if isinstance(node, ast.ImportFrom) else []
                plain = [alias.name.partition(".")[0] for alias in node.names] if isinstance(node, ast.Import) else []
                if {*taken, *plain} & {*NAMES}:
                    found.append(f"{path}:{node.lineno}")
    assert not found, "write `from search.problem.limits import Limits`, as `search` may be a user's module"
