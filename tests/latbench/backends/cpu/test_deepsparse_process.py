"""DeepSparse's process, seen from both ends, with a fake in place of its native module."""

import ast
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepsparse_fake
import numpy as np
import psutil
import pytest

from latbench.backends.cpu import deepsparse, deepsparse_worker
from latbench.backends.cpu.deepsparse import Operation, Process, load_model, time_operations
from latbench.backends.cpu.deepsparse_environment import Environment
from latbench.errors import EnvironmentUnusable

FAKE = Environment(Path(sys.executable), Path(deepsparse_fake.__file__))
INPUTS = [np.arange(6, dtype=np.float32).reshape(3, 2), np.ones(4, np.int64)]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Makes a model file that behaves as said."""

    def make(**behaviour: Any) -> Path:
        path = tmp_path / "model.onnx"
        path.write_text(json.dumps(behaviour))
        return path

    return make


def ended(pid: int) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not psutil.pid_exists(pid):
            return True
        time.sleep(0.02)
    return False


def test_a_model_gets_its_inputs_threads_and_batch_and_gives_its_outputs(model: Any) -> None:
    with load_model(model(), INPUTS, threads=5, environment=FAKE) as loaded:
        total, facts = loaded.outputs()
    np.testing.assert_array_equal(total, [19.0, 19.0])
    assert total.dtype == np.float32
    assert facts.tolist() == [3, 5]


def test_calls_are_timed_where_they_run(model: Any) -> None:
    with load_model(model(seconds=0.004), INPUTS, threads=1, environment=FAKE) as loaded:
        assert loaded.inner_loops == 1
        assert loaded.facts == {}
        burst = loaded.burst(0.02)
        assert min(burst.samples) >= 0.004
        assert 1 <= len(burst.samples) <= 5
        assert len(loaded.burst(0.0).samples) == 1


def test_short_calls_are_timed_by_the_dozen(model: Any) -> None:
    with load_model(model(), INPUTS, threads=1, environment=FAKE) as loaded:
        assert loaded.inner_loops > 1
        assert max(loaded.burst(0.01).samples) * loaded.inner_loops > 1e-5


@pytest.mark.parametrize(("switches", "preempted"), [(61, False), (62, True)])
def test_a_burst_that_others_cut_into_is_called_that(switches: int, preempted: bool) -> None:
    class Answers:
        def ask(self, verb: str, **_: Any) -> dict[str, Any]:
            return {"samples": [1e-3], "switches": switches, "cpu_seconds": 1.0}

    timed: Any = Answers()
    assert deepsparse.Model(timed, 1).burst(0.1).preempted is preempted


def test_what_the_engine_prints_stays_in_its_log(model: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with load_model(model(), INPUTS, threads=1, environment=FAKE):
        pass
    assert capfd.readouterr() == ("", "")


def test_a_refusal_has_the_engines_words_and_the_process_lives(model: Any) -> None:
    path = model(refuses="no such operator")
    with pytest.raises(EnvironmentUnusable, match="DeepSparse refuses this: RuntimeError: no such operator"):
        load_model(path, INPUTS, threads=1, environment=FAKE)
    with Process(FAKE) as process:
        with pytest.raises(EnvironmentUnusable, match="knows load, run, burst, analyse, not 'serve'"):
            process.ask("serve")
        with pytest.raises(EnvironmentUnusable, match="FileNotFoundError"):
            process.ask("load", model="", inputs="/absent", threads=1)


def test_a_death_is_told_with_the_last_words(model: Any) -> None:
    said = "the DeepSparse process ended by signal SIGABRT: contact support"
    with pytest.raises(EnvironmentUnusable, match=said):
        load_model(model(dies="a long story\ncontact support"), INPUTS, threads=1, environment=FAKE)
    with (
        pytest.raises(EnvironmentUnusable, match=r"ended with exit code 1: .*Error"),
        Process(Environment(FAKE.python, FAKE.engine.with_name("absent.py"))) as process,
    ):
        process.ask("run", outputs="")


def test_a_silent_engine_is_given_up(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with load_model(model(seconds=0.2), INPUTS, threads=1, environment=FAKE) as loaded:
        monkeypatch.setattr(deepsparse, "ANSWER_SECONDS", 0.1)
        with pytest.raises(EnvironmentUnusable, match=r"DeepSparse gave no answer for 0\.1 s"):
            loaded.outputs()


def test_closing_ends_the_process(model: Any) -> None:
    with load_model(model(), INPUTS, threads=1, environment=FAKE) as loaded:
        pid = loaded._process._process.pid
        assert psutil.pid_exists(pid)
    assert ended(pid)


def test_an_analysis_names_kernels_and_values(model: Any) -> None:
    dense, fused = time_operations(model(), INPUTS, threads=1, environment=FAKE, calls=7)
    assert dense == Operation("gemm", ("/fc1/Gemm_output_0",), 0.0, 2e-3)
    # 7 calls and 1 before: the fake gives back what it was asked for
    assert fused == Operation("pyramid", ("/a_output_0", "/b_output_0"), 0.0, 8e-3)
    sparse = time_operations(model(), INPUTS, threads=1, environment=FAKE, sparsity=0.9)[0]
    assert sparse == Operation("ks_gemm_hyb", ("/fc1/Gemm_output_0",), 0.9, 2e-3)


def test_the_worker_runs_in_the_oldest_python_and_imports_numpy_alone() -> None:
    source = Path(deepsparse_worker.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 9))
    modules = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    roots = {module.split(".")[0] for module in modules if module}
    assert roots - set(sys.stdlib_module_names) == {"numpy"}


def test_a_worker_whose_parent_is_gone_ends() -> None:
    command = [str(FAKE.python), "-I", str(deepsparse._WORKER), "0", str(os.getppid()), str(FAKE.engine)]
    done = psutil.Popen(command, stderr=-1, text=True)
    _, said = done.communicate(timeout=30)
    assert (done.returncode, said.strip()) == (1, "the parent is gone")
