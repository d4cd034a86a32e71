"""The adapters for transformers and Lightning, under loops that call what the real ones call, in their order."""

import copy
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from latbench.errors import BadData, EnvironmentUnusable, UsageError
from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.callbacks import build_lightning_callback, build_transformers_callback
from search.pruning.training.methods.acdc import ACDC
from search.pruning.training.methods.asp import ASP
from search.pruning.training.methods.fixed_mask import FixedMask
from search.pruning.training.methods.gmp import GMP
from search.pruning.training.methods.grow_and_prune import GrowAndPrune
from search.pruning.training.methods.mask_decay import MaskDecay
from search.pruning.training.methods.rigl import RigL
from search.pruning.training.methods.sr_ste import SRSTE
from search.pruning.training.methods.ste import STE
from search.pruning.training.methods.step import STEP
from search.pruning.training.methods.structure_decay import StructureDecay
from search.pruning.training.pruner import Pruner
from sparse_kernels.patterns import NM

HALF = LayerTarget(NM(2, 4), 0.5)
TARGETS = {"0": ("nm:2:4", 0.5)}
STEPS = 6
# One that keeps dense weights behind its masks, and one whose zeros are hard.
PRUNERS = (STE, partial(RigL, every=2, alpha=1.0))


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()


def by_hand(pruner: Pruner, accumulate: int = 1) -> nn.Module:
    model = net()
    pruner.prepare(model, TARGETS, total_steps=STEPS)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulate):
            loss(model, accumulate * step + part).backward()
        optimizer.step()
        pruner.step()
    pruner.finish()
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers, lightning = ModuleType("transformers"), ModuleType("pytorch_lightning")
    transformers.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    lightning.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", lightning)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)


def trainer(
    callback: Any,
    model: nn.Module,
    folder: Path,
    *,
    first: int = 0,
    best: int = 0,
    last: int = STEPS,
    resumed: Path | None = None,
    told: str | None = None,
) -> None:
    """What transformers.Trainer does: events with (args, state, control), the model among the keywords.

    It goes on after `first` steps from the checkpoint in `resumed`, by default its own in `folder`.
    """
    args = SimpleNamespace(output_dir=str(folder), load_best_model_at_end=best > 0, resume_from_checkpoint=told)
    state = SimpleNamespace(
        global_step=first, max_steps=STEPS, is_world_process_zero=True, best_model_checkpoint=None,
        stateful_callbacks={},
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if first:
        saved = torch.load((resumed or folder / f"checkpoint-{first}") / "trainer.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.stateful_callbacks = json.loads(saved["callbacks"])
    callback.on_train_begin(args, state, None, model=model, optimizer=optimizer)
    for step in range(first, last):
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        state.global_step = step + 1
        callback.on_step_end(args, state, None, model=model, optimizer=optimizer)
        checkpoint = folder / f"checkpoint-{state.global_step}"
        checkpoint.mkdir(exist_ok=True, parents=True)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**saved, "callbacks": json.dumps(state.stateful_callbacks)}, checkpoint / "trainer.pt")
        callback.on_save(args, state, None, model=model)
    if best:
        state.best_model_checkpoint = str(folder / f"checkpoint-{best}")
        model.load_state_dict(torch.load(folder / f"checkpoint-{best}" / "trainer.pt")["model"])
    callback.on_train_end(args, state, None, model=model)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("make", PRUNERS)
def test_under_transformers_training_is_as_by_hand_and_resumes(make: Callable[[], Pruner], tmp_path: Path) -> None:
    model, resumed, best = net(), net(), net()
    trainer(build_transformers_callback(make(), TARGETS), model, tmp_path)
    assert same(model, by_hand(make()))
    trainer(build_transformers_callback(make(), TARGETS), resumed, tmp_path, first=4)
    assert same(model, resumed)
    trainer(build_transformers_callback(make(), TARGETS), best, tmp_path, best=3)
    assert torch.equal(best[0].weight, torch.load(tmp_path / "checkpoint-3" / "trainer.pt")["model"]["0.weight"])
    (tmp_path / "checkpoint-4" / "pruner.pt").unlink()
    with pytest.raises(BadData, match=r"checkpoint-4/pruner.pt is missing"):
        trainer(build_transformers_callback(make(), TARGETS), net(), tmp_path, first=4)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("moved", [False, True])
def test_under_transformers_a_run_that_is_resumed_from_another_folder_takes_the_pruner_from_there(
    moved: bool, tmp_path: Path
) -> None:
    """train(resume_from_checkpoint="a/checkpoint-4") with output_dir="b", where another run left a checkpoint-4."""
    a, b = tmp_path / "a", tmp_path / "b"
    model, other, resumed = net(), net(), net()
    trainer(build_transformers_callback(STE(), TARGETS), model, a)
    with torch.no_grad():
        other[0].weight.neg_()
    trainer(build_transformers_callback(STE(), TARGETS), other, b)
    if moved:
        a = a.rename(tmp_path / "c")
        with pytest.raises(BadData, match=r"b/checkpoint-4/pruner.pt is not of the checkpoint that .* goes on from"):
            trainer(build_transformers_callback(STE(), TARGETS), net(), b, first=4, resumed=a / "checkpoint-4")
    trainer(
        build_transformers_callback(STE(), TARGETS), resumed, b, first=4, resumed=a / "checkpoint-4",
        told=str(a / "checkpoint-4") if moved else None,
    )  # fmt: skip
    assert same(model, resumed)


@pytest.mark.usefixtures("fakes")
def test_under_transformers_masks_are_of_all_ranks_though_the_model_is_not_wrapped(tmp_path: Path) -> None:
    pruner = STE()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        trainer(build_transformers_callback(pruner, TARGETS), net(), tmp_path)
        assert pruner.state.group is torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


def lightning(callback: Any, model: nn.Module, *, first: int = 0, saved: Any = None, monitor: Any = None) -> Any:
    """What lightning.Trainer does: model, callbacks and optimizer restored in turn; closures; two batches a step.

    Returns what a checkpoint after three steps holds.
    """
    fake = SimpleNamespace(
        model=model, global_step=first, estimated_stepping_batches=STEPS,
        checkpoint_callbacks=[SimpleNamespace(monitor=monitor)],
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    kept = None
    if saved is not None:
        model.load_state_dict(saved[0])
        if saved[2]:  # Lightning leaves out what is empty
            callback.load_state_dict(saved[2])
        optimizer.load_state_dict(saved[1])
    callback.on_train_start(fake, model)
    for index in range(2 * first, 2 * STEPS):

        def closure(index: int = index) -> torch.Tensor:
            if index % 2 == 0:
                optimizer.zero_grad()
            value = loss(model, index)
            value.backward()
            return value

        if index % 2 == 0:
            closure()
        else:
            optimizer.step(closure)
            fake.global_step += 1
        callback.on_train_batch_end(fake, model, None, None, index)
        if index == 5:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), callback.state_dict()))
    callback.on_train_end(fake, model)
    return kept


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("make", PRUNERS)
def test_under_lightning_closures_and_accumulation_are_as_by_hand_and_resume(make: Callable[[], Pruner]) -> None:
    model, resumed = net(), net()
    callback = build_lightning_callback(make(), TARGETS)
    saved = lightning(callback, model)
    assert same(model, by_hand(make(), accumulate=2))
    lightning(build_lightning_callback(make(), TARGETS), resumed, first=3, saved=saved)
    assert same(model, resumed)
    assert callback.state_dict() == {}  # trainer.save_checkpoint() after fit()
    with pytest.raises(BadData, match="goes on after 3 steps, but its checkpoint holds no pruner"):
        lightning(build_lightning_callback(make(), TARGETS), net(), first=3, saved=(*saved[:2], {}))


def test_a_method_that_is_not_at_its_masks_from_the_start_takes_no_earlier_model_for_the_best() -> None:
    targets = {"0": HALF}
    for pruner in (STE(), SRSTE(), RigL(), ASP(), FixedMask(), MaskDecay(dense=0, final=1), GMP(end=0)):
        assert pruner.holds_targets(targets, 20), pruner
    for pruner in (ASP(dense=0.1), GMP(), ACDC(), MaskDecay(dense=0), StructureDecay(), STEP(), GrowAndPrune()):
        assert not pruner.holds_targets(targets, 20), pruner


@pytest.mark.usefixtures("fakes")
def test_under_transformers_the_best_model_is_refused_where_masks_are_still_to_come(tmp_path: Path) -> None:
    model, pruner = net(), GMP()
    with pytest.raises(UsageError, match=r"load_best_model_at_end may end with .* leave it out, as GMP prunes while"):
        trainer(build_transformers_callback(pruner, TARGETS), model, tmp_path, best=3)
    assert not pruner.at_work
    assert same(model, net())


@pytest.mark.usefixtures("fakes")
def test_training_that_is_stopped_early_says_that_nothing_is_trained_under_the_last_masks(tmp_path: Path) -> None:
    model, pruner = net(), GMP(end=1.0)
    with pytest.warns(UserWarning, match="ended after 4 of 6 steps: nothing is trained under the masks that 1 of 1"):
        trainer(build_transformers_callback(pruner, TARGETS), model, tmp_path, last=4)
    assert (model[0].weight == 0).double().mean() == 0.5


@pytest.mark.usefixtures("fakes")
def test_under_lightning_a_best_checkpoint_from_before_the_last_masks_is_warned_of() -> None:
    model = net()
    with pytest.warns(UserWarning, match="best checkpoint by val_loss may be .*: take the model that fit"):
        lightning(build_lightning_callback(GMP(), TARGETS), model, monitor="val_loss")
    assert (model[0].weight == 0).double().mean() == 0.5
    lightning(build_lightning_callback(STE(), TARGETS), net(), monitor="val_loss")


@pytest.mark.usefixtures("fakes")
def test_under_lightning_training_without_an_end_is_refused() -> None:
    fake = SimpleNamespace(model=net(), global_step=0, estimated_stepping_batches=math.inf)
    with pytest.raises(UsageError, match="give the Trainer max_steps or max_epochs"):
        build_lightning_callback(STE(), TARGETS).on_train_start(fake, fake.model)


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvironmentUnusable, match="transformers is not installed: pip install transformers"):
        build_transformers_callback(STE(), TARGETS)
    with pytest.raises(EnvironmentUnusable, match="pip install lightning"):
        build_lightning_callback(STE(), TARGETS)
