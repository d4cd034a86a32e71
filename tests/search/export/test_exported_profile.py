"""A search that names a deployed form times its profiles as exports, and its promise holds for that form alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from chain_task import CHAIN_TASK, prune_chain

from latbench.base.deployed_forms import EXPORTED_FORMS, OPENVINO, PYTHON, C
from latbench.cli.commands.export import export as export_command
from latbench.cli.commands.search import search as search_command
from latbench.errors import BadData, UsageError
from search.artifacts.layer_database import Database, hash_model
from search.artifacts.profile import read_profile
from search.deployment import Deployment
from search.export.export_manifest import is_export_of, read_manifest
from search.export.export_model import check_can_export
from search.export.exported_profile import build_database_exported, build_random_exported
from search.pipeline.verified_model import read_verified
from search.problem.layers import DENSE, Option
from search.pruning.one_shot.fill_database import fill_database, hash_pruning_inputs
from search.pruning.storage.model_folder import hash_manifest
from search.task import Task, load_task
from search.whole_model import overhead
from search.whole_model.engine_builders import build_dense_engines, build_informative_engine, build_pruned_engines
from search.whole_model.model_engines import mask_at_random, prune_from_database
from sparse_kernels.cpu.export.cpu_levels import list_host_levels

CHOICES = {"3": Option("vector:8", 0.75), "4.fc1": Option(DENSE, 0.0), "4.fc2": Option("vector:16", 0.5)}

has_levels = pytest.mark.skipif(not list_host_levels(), reason="no CPU level for which kernels are compiled")


@pytest.fixture
def chain(tmp_path: Path) -> Task:
    (tmp_path / "chain.py").write_text(CHAIN_TASK)
    return load_task(str(tmp_path / "chain.py"))


def list_exports(shared: Path) -> list[Path]:
    return [path for path in shared.iterdir() if path.is_dir()]


@has_levels
@pytest.mark.slow
@pytest.mark.parametrize("form", EXPORTED_FORMS)
def test_a_profile_is_exported_once_and_runs_as_deployed(chain: Task, tmp_path: Path, form: str) -> None:
    if form == OPENVINO:
        pytest.importorskip("openvino")
    run = build_random_exported(chain.reference, 2, form, CHOICES, str(tmp_path))
    masked, _, example = mask_at_random(chain.reference, CHOICES)
    with torch.no_grad():
        np.testing.assert_allclose(run()[0], masked(*example.arguments).numpy(), rtol=1e-4, atol=1e-5)
    [folder] = list_exports(tmp_path)
    manifest = read_manifest(folder)
    assert (manifest["form"], manifest["batches"], manifest["threads"]) == (form, [5], [1, 2])
    assert manifest["levels"] == [list_host_levels()[-1].name] and manifest["pruned"] == ""
    written = (folder / "manifest.json").stat().st_mtime_ns
    np.testing.assert_array_equal(
        build_random_exported(chain.reference, 2, form, CHOICES, str(tmp_path))()[0], run()[0]
    )
    assert list_exports(tmp_path) == [folder] and (folder / "manifest.json").stat().st_mtime_ns == written
    if form != C:  # any form will do
        return
    milder = {**CHOICES, "3": Option("vector:8", 0.5)}
    build_random_exported(chain.reference, 2, form, milder, str(tmp_path))
    assert len(list_exports(tmp_path)) == 2


@has_levels
@pytest.mark.slow
def test_weights_come_from_the_layer_database(chain: Task, tmp_path: Path) -> None:
    model = chain.model()
    model_hash, folder = hash_model(model), tmp_path / "database"
    database = Database(folder, model_hash, hash_pruning_inputs(chain))
    fill_database(chain, model, {name: [option] for name, option in CHOICES.items()}, database)
    given = str(folder), model_hash, CHOICES
    run = build_database_exported(chain.reference, 1, C, *given, str(tmp_path))
    pruned, _, example = prune_from_database(chain.reference, *given)
    with torch.no_grad():
        np.testing.assert_allclose(run()[0], pruned(*example.arguments).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("database", [(), ("folder", "hash")])
@pytest.mark.parametrize("form", [PYTHON, C])
def test_profiles_are_built_in_the_form_that_is_deployed(chain: Task, form: str, database: tuple[str, ...]) -> None:
    [engine] = build_pruned_engines(chain, Deployment(2, form=form), {"fast": CHOICES}, database).values()
    source = "database" if database else "random"
    assert engine.function.endswith(f":build_{source}_{'pruned' if form == PYTHON else 'exported'}")
    runner = "numba" if form == PYTHON else form
    assert engine.arguments == (chain.reference, 2, runner, *database, CHOICES) and engine.shares == (form != PYTHON)


def test_another_form_is_another_timing(chain: Task) -> None:
    keys = [
        overhead.describe_conditions(chain, chain.model(), "model", Deployment(2, form=form))
        for form in (PYTHON, C, OPENVINO)
    ]
    assert len({str(key) for key in keys}) == 3


def test_other_dense_engines_are_another_timing_and_another_search(
    chain: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A promise over float32 engines, although layers may be in eight bits."""
    monkeypatch.setattr("search.whole_model.engine_builders.can_quantize", lambda: True)
    plain, over = (Deployment(2, precisions=("float32", "int8"), over=type_) for type_ in ("", "float32"))
    assert {"openvino", "openvino-int8"} <= set(plain.rivals) and "openvino-int8" not in over.rivals
    assert set(Deployment(2, over="int8").rivals) == set(plain.rivals)
    keys = [overhead.describe_conditions(chain, chain.model(), "model", each) for each in (plain, over)]
    assert keys[1] == {**keys[0], "over": "float32"}
    assert set(build_dense_engines(chain, over)) == set(over.rivals)
    assert set(build_informative_engine(chain, over)) == {"openvino-int8"}
    pruned = prune_chain(tmp_path / "pruned", chain)
    profile = replace(read_profile(pruned / "profile.json"), precisions="float32,int8", over="float32")
    profile.save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json").deployment == replace(over, threads=profile.threads)
    replace(profile, over="fp8").save(tmp_path / "profile.json")
    with pytest.raises(BadData, match="unknown type fp8 of the dense engines"):
        read_profile(tmp_path / "profile.json")


@has_levels
@pytest.mark.slow
def test_a_promise_for_one_form_is_not_verified_in_another(chain: Task, tmp_path: Path) -> None:
    level = [list_host_levels()[-1].name]
    pruned, deploy = prune_chain(tmp_path / "pruned", chain, form=C), tmp_path / "deploy"
    with pytest.raises(UsageError, match=r"that form alone: .*`latbench export TASK .*pruned --to c -o deploy`"):
        read_verified(pruned).choose_deployment()
    export_command(chain.reference, pruned, deploy, to=C, level=level, threads=["1"])
    assert read_verified(deploy).choose_deployment().form == C
    assert is_export_of(deploy, C, hash_manifest(pruned))
    assert not is_export_of(deploy, OPENVINO, hash_manifest(pruned)) and not is_export_of(deploy, C, "another")
    (deploy / "libmodel.so").unlink()  # this process has loaded it, and still has that file
    (deploy / "libmodel.so").write_bytes(b"damaged")
    assert not is_export_of(deploy, C, hash_manifest(pruned))
    other = prune_chain(tmp_path / "other", chain, form=OPENVINO)
    export_command(chain.reference, other, deploy, to=C, level=level, threads=["1"])
    with pytest.raises(UsageError, match="`latbench export TASK PRUNED --to openvino -o deploy`, then verify deploy"):
        read_verified(deploy).choose_deployment()
    profile = read_profile(other / "profile.json")
    replace(profile, form="java").save(tmp_path / "profile.json")
    with pytest.raises(BadData, match="unknown form java"):
        read_profile(tmp_path / "profile.json")


NO_CHAIN = CHAIN_TASK.replace("nn.ReLU(), nn.Flatten()", "nn.Sigmoid(), nn.Flatten()")


@has_levels
def test_what_cannot_be_exported_is_refused_before_anything_is_timed(tmp_path: Path) -> None:
    (tmp_path / "curved.py").write_text(NO_CHAIN)
    curved = load_task(str(tmp_path / "curved.py"))
    with pytest.raises(UsageError, match=r"cannot be exported to C: .*Sigmoid.* is not supported"):
        check_can_export(curved, C)
    given = curved.reference, str(tmp_path / "table"), tmp_path / "database", tmp_path / "profile.json"
    for options, said in (
        ({"deploy": "java"}, "unknown form 'java' to deploy: known are python, openvino, torch, c"),
        ({"deploy": C, "backend": "deepsparse"}, "--deploy c does not go with deepsparse"),
    ):
        with pytest.raises(UsageError, match=said):
            search_command(*given, target=2.0, model=tmp_path / "model.json", **options)  # type: ignore[arg-type]


@has_levels
@pytest.mark.slow
def test_an_export_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "curved.py").write_text(NO_CHAIN)
    with pytest.raises(UsageError, match=r"cannot be exported to C: .*Sigmoid"):
        build_random_exported(str(tmp_path / "curved.py"), 1, C, CHOICES, str(tmp_path))
    assert not list_exports(tmp_path)
