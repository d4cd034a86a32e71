"""An exported model is verified as it is deployed: timed, compared with the pruned model, and scored by the task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chain_task import CHAIN_TASK, prune_chain

from latbench.cli.commands.export import export as export_command
from latbench.cli.commands.verify import verify as verify_command
from latbench.errors import BadData, UsageError
from latbench.tables.table import read_table
from search.artifacts.profile import read_profile
from search.export.deployed_engine import build_exported, score_exported
from search.export.expected_results import ExpectedResults, compare_results, read_expected
from search.pipeline.verified_model import read_verified
from search.pipeline.verify import PRUNED, read_current_verdict, verify
from search.pruning.storage.model_folder import hash_manifest, load_pruned
from search.task import load_task
from search.whole_model.end_to_end import RoundSchedule
from sparse_kernels.cpu.export.cpu_levels import list_host_levels
from sparse_kernels.oracle import WrongResult

has_levels = pytest.mark.skipif(not list_host_levels(), reason="no CPU level for which kernels are compiled")


def test_a_rounded_result_may_lie_as_far_off_as_rounding_does() -> None:
    pruned = [torch.linspace(-1, 1, 7)]
    converted = [pruned[0] + 0.05]
    assert compare_results([converted[0] - 0.05], converted, pruned)[0]
    right, apart = compare_results([converted[0] + 0.06], converted, pruned)
    assert not right and apart == pytest.approx(0.06 / 1.05)
    assert not compare_results([torch.zeros(6)], converted, pruned)[0]


def test_expected_results_are_kept_as_they_are(tmp_path: Path) -> None:
    expected = ExpectedResults([torch.arange(4), torch.randn(2, 0)], [torch.randn(3)], [torch.tensor(True)])
    expected.save(tmp_path)
    found = read_expected(tmp_path)
    for name in ("inputs", "converted", "pruned"):
        for one, other in zip(getattr(expected, name), getattr(found, name), strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    content = (tmp_path / "expected.npz").read_bytes()
    for damaged in (content[:-40], b"", content[:60] + bytes(30) + content[90:]):
        (tmp_path / "expected.npz").write_bytes(damaged)
        with pytest.raises(BadData, match=r"expected\.npz cannot be read: .*export the model again"):
            read_expected(tmp_path)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task, its pruned model, and the export of that to C."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "chain.py").write_text(CHAIN_TASK)
    task = load_task(str(folder / "chain.py"))
    prune_chain(folder / "pruned", task)
    level = [list_host_levels()[-1].name]
    export_command(task.reference, folder / "pruned", folder / "deploy", to="c", level=level, threads=["1"])
    return folder


@has_levels
@pytest.mark.slow
def test_an_exported_model_is_verified_without_the_pruned_weights(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LATBENCH_LOCKS", str(tmp_path / "locks"))
    once = RoundSchedule(builds=1, rounds=4, first=1)
    monkeypatch.setattr("search.pipeline.verify.VERIFY_SCHEDULE", once)
    task, deploy = load_task(str(exported / "chain.py")), tmp_path / "deploy"
    shutil.copytree(exported / "deploy", deploy)  # as on another machine
    profile = deploy / "profile.json"
    easy = replace(read_profile(profile), target=1e-3)
    set_profile(deploy, lambda: easy.save(profile))
    verdict = verify(task, deploy, tmp_path / "verify")
    assert verdict.met and verdict.form == "c" and "measured exported to C against" in verdict.sentence()
    assert verdict.inputs == hash_manifest(exported / "pruned")
    pruned, _ = load_pruned(exported / "pruned", task.model())
    assert verdict.score_pruned == pytest.approx(task.score(pruned), rel=1e-4)
    assert verdict.score_dense == pytest.approx(task.score(task.model()))
    rows = read_table(tmp_path / "verify").set_index("kernel_used")
    assert rows.loc[PRUNED, ["backend", "kernel_requested"]].tolist() == ["numba", "c"]
    assert read_current_verdict(task, deploy, tmp_path / "verify") == verdict
    assert read_current_verdict(task, exported / "pruned", tmp_path / "verify") is None
    verify_command(task.reference, deploy, tmp_path / "verify")
    assert "measured exported to C" in capsys.readouterr().out


def set_profile(deploy: Path, change: Callable[[], None]) -> None:
    """Change the profile of an export, and its checksum in the manifest."""
    from latbench.base.files import hash_file

    change()
    manifest = json.loads((deploy / "manifest.json").read_text())
    manifest["files"]["profile.json"] = hash_file(deploy / "profile.json")
    (deploy / "manifest.json").write_text(json.dumps(manifest))


@has_levels
@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_a_sentence(exported: Path, tmp_path: Path) -> None:
    deploy = exported / "deploy"
    with pytest.raises(UsageError, match="leave out --backend"):
        read_verified(deploy).choose_deployment("deepsparse")
    assert score_exported(str(exported / "chain.py"), 1, str(deploy))[1] != 0
    for name in ("profile.json", "expected.npz"):
        changed = tmp_path / name.replace(".", "-")
        shutil.copytree(deploy, changed)
        (changed / name).write_bytes((changed / name).read_bytes() + b" ")
        with pytest.raises(BadData, match=f"{name} is missing or was changed after the export"):
            read_verified(changed)
    wrong = tmp_path / "wrong"
    shutil.copytree(deploy, wrong)
    expected = read_expected(wrong)
    replace(
        expected, converted=[each + 1 for each in expected.converted], pruned=[each + 1 for each in expected.pruned]
    ).save(wrong)
    with pytest.raises(WrongResult, match="gives other results than the pruned model: they differ by"):
        build_exported(str(wrong), 1)
    run = build_exported(str(deploy), 1)
    np.testing.assert_allclose(run()[0], expected.converted[0], rtol=1e-4, atol=1e-5)
