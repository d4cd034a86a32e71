"""The adapters for transformers and Lightning, under loops that call what the real ones call, in their order."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from latbench.errors import BadData, EnvironmentUnusable
from search.pruning.callbacks import lightning_callback, transformers_callback
from search.pruning.ste import STE

TARGETS = {"0": ("nm:2:4", 0.5)}
STEPS = 6


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()


def by_hand(accumulate: int = 1) -> nn.Module:
    model, pruner = net(), STE()
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


def trainer(callback: Any, model: nn.Module, folder: Path, *, first: int = 0, best: int = 0) -> None:
    """What transformers.Trainer does: events with (args, state, control), the model among the keywords."""
    args = SimpleNamespace(output_dir=str(folder), load_best_model_at_end=best > 0)
    state = SimpleNamespace(
        global_step=first, max_steps=STEPS, is_world_process_zero=True, best_model_checkpoint=None
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if first:
        saved = torch.load(folder / f"checkpoint-{first}" / "trainer.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    callback.on_train_begin(args, state, None, model=model, optimizer=optimizer)
    for step in range(first, STEPS):
        loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        state.global_step = step + 1
        callback.on_step_end(args, state, None, model=model, optimizer=optimizer)
        checkpoint = folder / f"checkpoint-{state.global_step}"
        checkpoint.mkdir(exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint / "trainer.pt")
        callback.on_save(args, state, None, model=model)
    if best:
        state.best_model_checkpoint = str(folder / f"checkpoint-{best}")
        model.load_state_dict(torch.load(folder / f"checkpoint-{best}" / "trainer.pt")["model"])
    callback.on_train_end(args, state, None, model=model)


@pytest.mark.usefixtures("fakes")
def test_under_transformers_training_is_as_by_hand_and_resumes(tmp_path: Path) -> None:
    model, resumed, best = net(), net(), net()
    trainer(transformers_callback(STE(), TARGETS), model, tmp_path)
    assert same(model, by_hand())
    trainer(transformers_callback(STE(), TARGETS), resumed, tmp_path, first=4)
    assert same(model, resumed)
    trainer(transformers_callback(STE(), TARGETS), best, tmp_path, best=3)
    assert torch.equal(best[0].weight, torch.load(tmp_path / "checkpoint-3" / "trainer.pt")["model"]["0.weight"])
    (tmp_path / "checkpoint-4" / "pruner.pt").unlink()
    with pytest.raises(BadData, match=r"checkpoint-4/pruner.pt is missing"):
        trainer(transformers_callback(STE(), TARGETS), net(), tmp_path, first=4)


@pytest.mark.usefixtures("fakes")
def test_under_lightning_closures_and_accumulation_are_as_by_hand(tmp_path: Path) -> None:
    """Lightning hands the backward to the optimizer as a closure, and every other batch makes no step."""
    model = net()
    callback = lightning_callback(STE(), TARGETS)
    fake = SimpleNamespace(model=model, global_step=0, estimated_stepping_batches=STEPS)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    callback.on_train_start(fake, model)
    for index in range(2 * STEPS):

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
            saved = callback.state_dict()
    again = lightning_callback(STE(), TARGETS)
    again.load_state_dict(saved)
    again.on_train_start(SimpleNamespace(model=net(), global_step=3, estimated_stepping_batches=STEPS), None)
    assert again.state_dict()["step"] == 3
    callback.on_train_end(fake, model)
    assert same(model, by_hand(accumulate=2))


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvironmentUnusable, match="transformers is not installed: pip install transformers"):
        transformers_callback(STE(), TARGETS)
    with pytest.raises(EnvironmentUnusable, match="pip install lightning"):
        lightning_callback(STE(), TARGETS)
