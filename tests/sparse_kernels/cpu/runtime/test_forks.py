"""Forks of a process that has run kernels, as a server makes them that loads a model before it starts workers."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

pytestmark = [
    pytest.mark.slow,  # processes with torch
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks"),
    pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread needs no pool"),
]

# Makes a converted model with two threads, and what it returns for x.
MODEL = """
import os, signal, threading
from concurrent.futures import ThreadPoolExecutor
import numba, torch
from torch import nn
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.patterns import parse

torch.manual_seed(0)
torch.set_num_threads(2)
dense = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
pattern = parse("unstructured")
mask = pattern.mask(dense[0].weight.detach().numpy() ** 2, sparsity=0.8)
x = torch.randn(64, 256)
model = convert(dense, {"0": LayerPattern(pattern, mask)}, (x,))
expected = model(x)

def fork(work):
    if pid := os.fork():
        return pid
    signal.alarm(20)  # a child that waits for ever is killed, which its parent reports
    ok = False
    try:
        ok = work()
    finally:
        os._exit(0 if ok else 1)

def same():
    return torch.equal(model(x), expected)

def wait(*children):
    print(*(os.waitpid(child, 0)[1] for child in children), same())
"""


def forked(script: str, layer: str = "default") -> list[str]:
    """The lines that a script prints after MODEL: exit codes of children, and whether the parent goes on rightly."""
    environment = {**os.environ, "NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": "2"}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-c", MODEL + script],
        cwd=Path(__file__).parents[4], env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("layer", ["default", "workqueue"])
def test_one_worker_after_the_other_returns_the_same_bits(layer: str) -> None:
    assert forked("for _ in range(3): wait(fork(same))", layer) == ["0 True"] * 3


def test_several_workers_run_at_once() -> None:
    assert forked("wait(*[fork(lambda: all(same() for _ in range(20))) for _ in range(3)])") == ["0 0 0 True"]


def test_a_worker_uses_as_many_threads_as_its_parent() -> None:
    count = "lambda: same() and len(os.listdir('/proc/self/task')) >= 2 and numba.get_num_threads() == 2"
    assert forked(f"wait(fork({count}))") == ["0 True"]


def test_a_worker_may_serve_from_a_pool_of_threads() -> None:
    pool = "with ThreadPoolExecutor(3) as pool: return all(pool.map(lambda _: same(), range(12)))"
    assert forked(f"def serve():\n    {pool}\nwait(fork(serve))") == ["0 True"]


def test_a_thread_that_forks_need_not_be_the_one_that_converted() -> None:
    script = "t = threading.Thread(target=lambda: (same(), wait(fork(same)))); t.start(); t.join()"
    assert forked(script) == ["0 True"]


def test_a_worker_forks_in_its_turn() -> None:
    assert forked("wait(fork(lambda: same() and os.waitpid(fork(same), 0)[1] == 0))") == ["0 True"]


def test_without_a_pool_that_ends_a_worker_runs_one_thread_and_says_so_once() -> None:
    script = """
import warnings
from sparse_kernels.cpu.runtime import threads

def alone():
    threads.set_one_thread()  # as after the fork of an OpenMP that cannot end its pool
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        right = all(torch.allclose(model(x), expected, atol=1e-5) for _ in range(2))  # other sums than of two
    texts = [str(each.message) for each in said]
    return right and len(texts) == 1 and "convert after the fork" in texts[0] and threads.count_threads() == 1

wait(fork(alone))
"""
    assert forked(script) == ["0 True"]
