"""Verification: what is concluded from timings, the rows and files it leaves, and one whole run on a small model."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from latbench.cli.commands.verify import verify as verify_command
from latbench.errors import BadData, EnvironmentUnusable, PromiseMissed, UsageError
from latbench.tables.table import read_table
from latbench.tables.writer import write_part
from search.artifacts.profile import LayerChoice, Profile
from search.deployment import Deployment
from search.pipeline.speedup_verdict import (
    ENGINE_COLUMNS,
    INCONCLUSIVE,
    KEPT,
    MISSED,
    VERSION,
    SpeedupVerdict,
    judge_speedup,
    read_verdict,
)
from search.pipeline.verify import (
    PRUNED,
    SESSION,
    build_rows,
    build_session,
    build_verdict,
    read_current_verdict,
    verify,
)
from search.problem.layers import Interval
from search.pruning.storage.model_folder import hash_manifest, save_pruned
from search.task import Task, load_task
from search.whole_model.end_to_end import RoundSchedule
from search.whole_model.overhead import describe_conditions
from search.whole_model.sessions import write_sessions
from search.whole_model.timings import Timings
from sparse_kernels.patterns import parse
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

TASK = """
import torch
name = "little"
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5)).eval()
def example(): return (torch.linspace(-1, 1, 3 * 24).view(3, 24),)
def calibration(): return [example()]
def loss(model, batch): return model(*batch).square().mean()
def score(model): return float(model(*example()).mean())
"""


def profile(target: float = 2.0, threads: int = 1) -> Profile:
    numbers = dict.fromkeys([
        "dense_seconds", "dense_seconds_low", "dense_seconds_high", "fixed_seconds", "fixed_seconds_low",
        "fixed_seconds_high", "predicted_seconds", "predicted_low", "predicted_high", "loss", "error", "bound",
        "confidence", "additivity_before", "additivity_after",
    ], 1.0)  # fmt: skip
    texts = dict.fromkeys(["device", "dense_engine", "strategy", "table_hash", "model_hash", "inputs"], "x")
    layers = {
        "0": LayerChoice("vector:8", 0.5, 1e-3, 1e-3, 1e-3, 0.1),
        "2": LayerChoice("dense", 0.0, 1e-3, 1e-3, 1e-3, 0.0),
    }
    return Profile(
        task="little", layers=layers, backend="numba", threads=threads, batch=3, ceiling=None, seed=0, target=target,
        **numbers, **texts,
    )  # fmt: skip


def deployed(profile: Profile, backend: str = "numba") -> Deployment:
    return replace(profile.deployment, backend=backend)


def steady(seconds: float) -> list[list[float]]:
    return [[seconds] * 6] * 4


def timings(pruned: float) -> Timings:
    return Timings(
        {"torch": steady(6.0), "onnxruntime": steady(4.0), PRUNED: steady(pruned)}, {"torch-mkldnn": "why"}
    )


@pytest.fixture
def little(tmp_path: Path) -> Task:
    (tmp_path / "little.py").write_text(TASK)
    return load_task(str(tmp_path / "little.py"))


def pruned_folder(folder: Path, task: Task, followed: Profile) -> Path:
    model = task.model()
    matrix = weight_matrix(model.get_submodule("0"))
    mask = torch.from_numpy(parse("vector:8").mask(matrix.square().numpy(), 0.5))
    set_weight_matrix(model.get_submodule("0"), torch.where(mask, matrix, 0.0))
    save_pruned(folder, model, {"0": mask}, followed, {"task": "little"})
    return folder


def test_the_verdict_is_against_the_fastest_dense_engine(little: Task) -> None:
    met = build_verdict(little, profile(), deployed(profile()), timings(2.0), (0.9, 0.8), "hash")
    assert (met.met, met.measured_speedup, met.dense_engine, met.dense_seconds) == (True, 2.0, "onnxruntime", 4.0)
    assert (met.score_dense, met.score_pruned, met.left_out) == (0.9, 0.8, {"torch-mkldnn": "why"})
    missed = build_verdict(little, profile(), deployed(profile()), timings(2.01), (0.9, 0.8), "hash")
    assert not missed.met
    assert missed.sentence() == "promise missed: 1.99x (1.99-1.99x) measured against onnxruntime, 2x promised"
    assert PromiseMissed(missed.sentence()).exit_code == 1


@pytest.mark.parametrize(
    ("pruned_seconds", "predicted_seconds", "slowdown", "needlessly"),
    [
        (1.0, 2.0, 1.0, True),  # 4x measured, 2x promised and predicted
        (1.0, 2.0, None, True),
        (1.0, 1.0, 1.0, False),  # the search knew: it found nothing milder that keeps the promise
        (1.0, 2.0, 0.5, False),  # 4x predicted: the dense engine took 8 seconds then
        (1.6, 2.0, 1.0, False),  # 2.5x is near enough
        (2.5, 2.0, 1.0, False),
    ],
)
def test_a_model_is_needlessly_fast_where_the_search_did_not_foresee_it(
    little: Task, pruned_seconds: float, predicted_seconds: float, slowdown: float | None, needlessly: bool
) -> None:
    found = build_verdict(little, profile(), deployed(profile()), timings(pruned_seconds), (0.9, 0.8), "hash")
    found = replace(found, predicted_seconds=predicted_seconds, slowdown=slowdown)
    assert found.is_needlessly_fast is needlessly


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [(2.0, 2.2, KEPT), (1.99, 2.2, INCONCLUSIVE), (1.8, 2.0, INCONCLUSIVE), (1.8, 1.99, MISSED)],
)
def test_a_target_within_the_interval_is_no_verdict(low: float, high: float, outcome: str) -> None:
    assert judge_speedup(Interval((low + high) / 2, low, high), 2.0) == outcome


def test_where_medians_disagree_with_the_paired_rounds_the_verdict_says_so(little: Task) -> None:
    # Slow rounds slow both engines, but more of them fall on the later half of one's samples.
    dense = [[4.0] * 6, [4.0] * 6, [8.0] * 6, [8.0] * 2, [8.0] * 2]
    pruned = [[2.0] * 2, [2.0] * 2, [4.0] * 6, [4.0] * 6, [4.0] * 6]
    timed = Timings({"torch": dense, PRUNED: pruned}, {})
    verdict = build_verdict(little, profile(), deployed(profile()), timed, (1, 1), "hash")
    assert (verdict.outcome, verdict.measured_speedup, verdict.ratio_of_medians) == (KEPT, 2.0, 1.0)
    assert "the ratio of the two median times is 1.00x, outside the interval" in verdict.sentence()
    assert verdict.engines["torch"]["speedup"] == 1.0 and verdict.engines[PRUNED]["speedup"] == 2.0


def test_on_deepsparse_its_own_dense_model_is_one_to_beat(little: Task, tmp_path: Path) -> None:
    timed = Timings({"torch": steady(6.0), "deepsparse": steady(3.0), PRUNED: steady(2.0)}, {})
    verdict = build_verdict(little, profile(), deployed(profile(), "deepsparse"), timed, (0.9, 0.8), "hash")
    assert verdict.sentence() == (
        "promise missed: 1.50x (1.50-1.50x) measured on DeepSparse against deepsparse, 2x promised"
    )
    write_part(tmp_path / "table", build_rows(verdict, timed))
    found = read_table(tmp_path / "table").set_index("kernel_used")[["backend", "backend_version", "pattern"]]
    assert found.loc["deepsparse"].tolist() == ["deepsparse", "1.8.0", "dense"]
    assert found.loc[PRUNED].tolist() == ["deepsparse", "1.8.0", "profile"]
    assert found.loc["torch", "backend"] == "torch"


def test_in_bfloat16_rows_say_so_and_the_dense_models_in_it_are_ones_to_beat(little: Task, tmp_path: Path) -> None:
    timed = Timings({"torch": steady(6.0), "torch-bf16": steady(3.0), PRUNED: steady(1.0)}, {})
    halves = profile()
    layers = {name: replace(it, precision="bfloat16") for name, it in halves.layers.items()}
    halves = replace(halves, layers=layers, precisions="float32,bfloat16")
    verdict = build_verdict(little, halves, deployed(halves), timed, (0.9, 0.8), "hash")
    assert verdict.sentence() == (
        "promise kept: 3.00x (3.00-3.00x) measured in bfloat16 against torch-bf16, 2x promised (6.00x against torch)"
    )
    write_part(tmp_path / "table", build_rows(verdict, timed))
    found = read_table(tmp_path / "table").set_index("kernel_used")[["backend", "kernel_requested", "dtype_a"]]
    assert found.loc[PRUNED].tolist() == ["numba", "auto", "bfloat16"]
    assert found.loc["torch-bf16"].tolist() == ["torch", "bf16", "bfloat16"]
    assert found.loc["torch"].tolist() == ["torch", "auto", "float32"]


def test_what_plain_int8_would_give_is_told_and_is_not_the_rival(little: Task) -> None:
    timed = Timings({"torch": steady(6.0), "openvino-int8": steady(1.5), PRUNED: steady(2.0)}, {})
    verdict = replace(
        build_verdict(little, profile(), deployed(profile()), timed, (0.9, 0.8), "hash"), score_int8=0.89
    )
    assert (verdict.dense_engine, verdict.measured_speedup, verdict.outcome) == ("torch", 3.0, KEPT)
    assert verdict.over_int8 == (1.5, pytest.approx(0.75))
    assert verdict.beside_int8 == "the pruned model is 0.750× as fast"
    assert "--precision int8" in verdict.int8_advice
    assert not replace(verdict, precision="int8").int8_advice  # it has them already
    timed_slower = Timings({**timed.blocks, "openvino-int8": steady(9.0)}, {})
    slow = build_verdict(little, profile(), deployed(profile()), timed_slower, (0.9, 0.8), "hash")
    assert (slow.beside_int8, slow.int8_advice) == ("the pruned model is 4.50× as fast", "")
    assert "int8" not in verdict.sentence()
    session = build_session(timed, profile().options, ["torch", "openvino"])
    assert set(session.timings.blocks) == {"torch", *session.profiles}  # a search in float32 does not see it
    allowed = replace(profile(), precisions="float32,int8")
    assert (
        build_verdict(little, allowed, deployed(allowed), timed, (0.9, 0.8), "hash").dense_engine == "openvino-int8"
    )


def test_without_deepsparse_nothing_is_timed(little: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATBENCH_CACHE", str(tmp_path / "cache"))
    folder = pruned_folder(tmp_path / "pruned", little, profile())
    refusal = r"latbench setup deepsparse|DeepSparse needs|DeepSparse 1\.8\.0 runs"
    with pytest.raises(EnvironmentUnusable, match=refusal):
        verify(little, folder, tmp_path / "verify", deployment=deployed(profile(), "deepsparse"))
    # A model that was searched for DeepSparse is verified there, without being told.
    folder = pruned_folder(tmp_path / "other", little, replace(profile(), backend="deepsparse"))
    with pytest.raises(EnvironmentUnusable, match=refusal):
        verify(little, folder, tmp_path / "verify")
    assert not (tmp_path / "verify").exists()


def test_a_verdict_of_a_busy_machine_says_so(little: Task) -> None:
    known = replace(profile(), dense_engine="onnxruntime", dense_seconds=3.0)
    assert (
        build_verdict(little, known, deployed(known), timings(2.01), (0.9, 0.8), "hash")
        .sentence()
        .endswith(
            "2x promised (the dense engine took 1.33 times as long as in the search: "
            "the machine is busy, or another one)"
        )
    )
    steadier = replace(known, dense_seconds=3.9)
    quiet = build_verdict(little, steadier, deployed(steadier), timings(2.01), (0.9, 0.8), "hash")
    assert quiet.sentence().endswith("2x promised")
    assert (
        build_verdict(little, profile(), deployed(profile()), timings(2.01), (0.9, 0.8), "hash").slowdown is None
    )  # never heard of engine x


def test_every_engine_is_a_row_of_the_table(little: Task, tmp_path: Path) -> None:
    verdict = build_verdict(little, profile(), deployed(profile()), timings(2.0), (0.9, 0.8), "hash")
    write_part(tmp_path / "table", build_rows(verdict, timings(2.0)))
    found = read_table(tmp_path / "table").set_index("kernel_used")
    assert set(found.index) == {"torch", "onnxruntime", PRUNED}
    assert set(found["purpose"]) == {"verify"}
    assert set(found["op"]) == {"model"}
    assert found.loc[PRUNED, ["backend", "pattern", "median_seconds"]].tolist() == ["numba", "profile", 2.0]
    assert found.loc["torch", ["backend", "pattern", "model"]].tolist() == ["torch", "dense", "little"]
    assert found["point_id"].nunique() == 3


def test_a_verdict_is_of_one_model_on_one_machine(
    little: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = pruned_folder(tmp_path / "pruned", little, profile()), tmp_path / "verify"
    output.mkdir()
    key = describe_conditions(little, little.model(), "x", Deployment(1))
    for seconds, known in ((2.0, True), (2.01, False)):  # a promise that was missed is measured again
        asked = deployed(profile())
        verdict = build_verdict(little, profile(), asked, timings(seconds), (0.9, 0.8), hash_manifest(folder))
        (output / "verify.json").write_text(json.dumps({"version": VERSION, **asdict(verdict)}))
        write_sessions([build_session(timings(seconds), profile().options, ["torch"])], key, output / SESSION)
        assert (read_current_verdict(little, folder, output) == verdict) is known
        assert read_current_verdict(little, folder, output, deployed(profile(), "deepsparse")) is None
        other = pruned_folder(tmp_path / "other", little, profile(1.5))
        assert read_current_verdict(little, other, output) is None
        with monkeypatch.context() as patched:
            patched.setattr("search.whole_model.timed_device.name_cpu", lambda: "another-cpu")
            assert read_current_verdict(little, folder, output) is None
        edited = tmp_path / "edited.py"
        edited.write_text(TASK.replace(".mean())", ".sum())"))
        assert read_current_verdict(load_task(str(edited)), folder, output) is None


@pytest.mark.parametrize("most", [9000.0, None])
def test_the_command_says_what_all_weights_take_where_they_have_a_budget(
    most: float | None,
    little: Task,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = replace(profile(), most_bytes=most, weight_bytes=7000.0, dense_bytes=12000.0)
    folder = pruned_folder(tmp_path / "pruned", little, asked)
    verdict = build_verdict(little, asked, deployed(asked), timings(2.0), (0.9, 0.8), "hash")
    monkeypatch.setattr("search.pipeline.verify.read_current_verdict", lambda *of: verdict)
    verify_command(little.reference, folder, tmp_path / "verify")
    said = "all weights take 7,000 of 9,000 bytes allowed, 12,000 dense\n" in capsys.readouterr().out
    assert said is (most is not None)


def test_the_command_says_what_was_predicted_for_the_backend_it_ran_on(
    little: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = replace(profile(), predicted_seconds=1.9, predicted_low=1.8, predicted_high=2.1)
    folder = pruned_folder(tmp_path / "pruned", little, asked)
    for backend in ("numba", "deepsparse"):
        verdict = build_verdict(little, asked, deployed(asked, backend), timings(2.0), (0.9, 0.8), "hash")
        monkeypatch.setattr("search.pipeline.verify.read_current_verdict", lambda *of, verdict=verdict: verdict)
        verify_command(little.reference, folder, tmp_path / "verify", backend=backend)
        said = "the pruned model was predicted to take 1.90 s (1.80–2.10)\n" in capsys.readouterr().out
        assert said is (backend == "numba")


@pytest.mark.slow
def test_a_small_model_is_verified_from_its_folder(
    little: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATBENCH_LOCKS", str(tmp_path / "locks"))  # this test need not wait for the machine
    once = RoundSchedule(builds=1, rounds=4, first=1)  # what is built again and again is test_end_to_end.py's
    monkeypatch.setattr("search.pipeline.verify.VERIFY_SCHEDULE", once)
    folder, output = pruned_folder(tmp_path / "pruned", little, profile(1e-3)), tmp_path / "verify"
    verdict = verify(little, folder, output)
    assert verdict.met
    own = {"torch", "torch-mkldnn", "onnxruntime", "openvino", "numba", PRUNED}
    assert set(verdict.engines) == {*own, "openvino-int8"} and verdict.over_int8 is not None
    model = little.model()
    assert verdict.score_int8 == pytest.approx(verdict.score_dense, rel=0.05)
    assert verdict.score_dense == pytest.approx(little.score(model))
    assert verdict.score_pruned != verdict.score_dense
    assert read_verdict(output / "verify.json") == verdict
    content = json.loads((output / "verify.json").read_text())
    assert content["measured_speedup"] == verdict.measured_speedup
    samples = read_table(output).set_index("kernel_used")["samples_seconds"]
    assert np.median(samples[PRUNED]) == verdict.measured_seconds


def test_a_profile_for_more_threads_than_there_are_is_refused(little: Task, tmp_path: Path) -> None:
    folder = pruned_folder(tmp_path / "pruned", little, replace(profile(), threads=4096))
    with pytest.raises(UsageError, match=r"was searched for 4096 threads: this process may use .* search again with"):
        verify(little, folder, tmp_path / "verify")
    assert not (tmp_path / "verify").exists()


def test_a_folder_of_another_task_is_refused_before_anything_is_timed(little: Task, tmp_path: Path) -> None:
    folder = pruned_folder(tmp_path / "pruned", little, profile())
    other = tmp_path / "other.py"
    other.write_text(TASK.replace('"little"', '"other"'))
    with pytest.raises(BadData, match="is a pruned model of task little, not of other"):
        verify(load_task(str(other)), folder, tmp_path / "verify")
    with pytest.raises(BadData, match="is a pruned model of task little, not of other"):
        read_current_verdict(load_task(str(other)), folder, tmp_path / "verify")
    with pytest.raises(BadData, match="is no pruned model"):
        verify(little, tmp_path / "absent", tmp_path / "verify")


def test_a_verdict_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_verdict(tmp_path / "absent.json") is None
    (tmp_path / "other.json").write_text(json.dumps({"version": VERSION}))
    assert read_verdict(tmp_path / "other.json") is None
    for wrong in (
        {"version": VERSION + 1},
        {"target": 0},
        {"predicted_seconds": "fast"},
        {"engines": {"torch": 3}},
        {"measured_low": -1.0},
    ):
        engines = {"torch": dict.fromkeys(ENGINE_COLUMNS, 1e-3)}
        whole = {field.name: 1.0 for field in fields(SpeedupVerdict)} | {"engines": engines, "version": VERSION}
        (tmp_path / "verify.json").write_text(json.dumps(whole))
        assert read_verdict(tmp_path / "verify.json") is not None
        (tmp_path / "verify.json").write_text(json.dumps(whole | wrong))
        assert read_verdict(tmp_path / "verify.json") is None
