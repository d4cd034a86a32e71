"""Pruners in the training loops of other libraries: a transformers `TrainerCallback` and a Lightning `Callback`.

    Trainer(..., callbacks=[build_transformers_callback(MaskDecay(), profile)])
    lightning.Trainer(callbacks=[build_lightning_callback(MaskDecay(), profile)])

They call the pruner's prepare, step and finish, and keep its state in the checkpoints of the loop. A library is
needed only if its function is called.

A method that draws its masks during training has them only at the end. An earlier checkpoint holds a less pruned
model, which most measures rate higher. An option that would select it is refused (`load_best_model_at_end` of
transformers). If the option does not change the final model, a warning is enough (`ModelCheckpoint(monitor=...)` of
Lightning). If training ends early, the last masks are drawn then, with a warning.
"""

from __future__ import annotations

import importlib
import math
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from latbench.errors import BadData, EnvironmentUnusable, UsageError
from search.pruning.masks.layer_targets import LayerTargets
from search.pruning.training.pruner import Pruner

STATE = "pruner.pt"

_NEEDED = "a pruned training continues only from a checkpoint that has it"


def build_transformers_callback(pruner: Pruner, targets: LayerTargets) -> Any:
    """Build a `transformers.TrainerCallback` that prunes the Trainer's model while it trains.

    Each checkpoint folder gets a pruner.pt. A resumed run reads it, and so does loading the best model at the end.
    All ranks have the masks of rank 0.

    A callback does not know from which checkpoint the Trainer resumes. So it looks in the folder in which the
    checkpoint was written, as trainer_state.json says. After a move it looks in
    `TrainingArguments(resume_from_checkpoint=...)` and in `output_dir`.

    Parameters
    ----------
    pruner : Pruner
        The method.
    targets : Profile or mapping of str to LayerTarget or (pattern, sparsity)
        Targets by layer.

    Returns
    -------
    TrainerCallback
        To be passed to a `transformers.Trainer`.

    Raises
    ------
    EnvironmentUnusable
        transformers is not installed.
    UsageError
        During training: `load_best_model_at_end` is set, and the method does not hold its targets from the first
        step.
    BadData
        During training: the pruner.pt of the checkpoint is missing.
    """
    base = _import_first("transformers").TrainerCallback

    class TrainerPrunerCallback(_TrainerPruning, base):  # type: ignore[misc, valid-type]
        """A callback that prunes between the Trainer's steps."""

    return TrainerPrunerCallback(pruner, targets)


def build_lightning_callback(pruner: Pruner, targets: LayerTargets) -> Any:
    """Build a Lightning `Callback` that prunes the LightningModule; the checkpoints hold the pruner's state.

    Parameters
    ----------
    pruner : Pruner
        The method.
    targets : Profile or mapping of str to LayerTarget or (pattern, sparsity)
        Targets by layer.

    Returns
    -------
    Callback
        To be passed to a Lightning `Trainer`.

    Raises
    ------
    EnvironmentUnusable
        Neither lightning nor pytorch_lightning is installed.
    UsageError
        During training: the number of steps is not limited.
    BadData
        During training: the checkpoint holds no pruner.
    """
    base = _import_first("lightning.pytorch", "pytorch_lightning").Callback

    class LightningPrunerCallback(_LightningPruning, base):  # type: ignore[misc, valid-type]
        """A callback that prunes between the optimizer's steps, of any number of batches."""

    return LightningPrunerCallback(pruner, targets)


class _TrainerPruning:
    """The events of a Trainer, as transformers calls them."""

    def __init__(self, pruner: Pruner, targets: LayerTargets) -> None:
        super().__init__()
        self.pruner, self.targets = pruner, targets

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        ranks = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        found = self.pruner.check(model, self.targets, state.max_steps)
        if args.load_best_model_at_end and not self.pruner.holds_targets(found, state.max_steps):
            raise UsageError(
                "load_best_model_at_end may end with a model from before its masks were the last, and nothing "
                f"would train under those: leave it out, as {type(self.pruner).__name__} prunes while the model "
                "trains"
            )
        resumed = _read_resumed(args, state) if state.global_step > 0 else None
        self.pruner.prepare(model, self.targets, total_steps=state.max_steps, group=ranks)
        if resumed is not None:
            self.pruner.load_state_dict(resumed)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.pruner.step()
        # The Trainer writes this into trainer_state.json, right before on_save.
        state.stateful_callbacks[STATE] = {
            "id": uuid.uuid4().hex,
            "folder": str(_get_folder(args, state).absolute()),
        }

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            own = state.stateful_callbacks[STATE]["id"]
            torch.save({**self.pruner.state_dict(), "id": own}, _get_folder(args, state) / STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint:
            best = Path(state.best_model_checkpoint) / STATE
            if not best.is_file():
                raise BadData(f"{best} is missing: {_NEEDED}")
            self.pruner.load_state_dict(_read_state(best))
        _finish(self.pruner)


class _LightningPruning:
    """The events of a Lightning Trainer, as Lightning calls them."""

    def __init__(self, pruner: Pruner, targets: LayerTargets) -> None:
        super().__init__()
        self.pruner, self.targets = pruner, targets
        self.steps = 0
        self.restored: dict[str, Any] | None = None

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints: one for all versions, whatever the name of the class."""
        return "lightning_callback.<locals>.PrunerCallback"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        steps = trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise UsageError("pruning ends with training: give the Trainer max_steps or max_epochs")
        if trainer.global_step > 0 and self.restored is None:
            raise BadData(
                f"training goes on after {trainer.global_step} steps, but its checkpoint holds no pruner: "
                "take one that was saved while this pruner was at work, or start a new Trainer"
            )
        found = self.pruner.check(trainer.model, self.targets, int(steps))
        ranked = [it for it in trainer.checkpoint_callbacks if getattr(it, "monitor", None) is not None]
        if ranked and not self.pruner.holds_targets(found, int(steps)):
            warnings.warn(
                f"the best checkpoint by {ranked[0].monitor} may be from before the last masks, as "
                f"{type(self.pruner).__name__} prunes while the model trains: take the model that fit() leaves",
                stacklevel=2,
            )
        self.pruner.prepare(trainer.model, self.targets, total_steps=int(steps))
        self.steps = trainer.global_step
        if self.restored is not None:
            self.pruner.load_state_dict(self.restored)
            self.restored = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.pruner.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        _finish(self.pruner)

    def state_dict(self) -> dict[str, Any]:
        return self.pruner.state_dict() if self.pruner.at_work else {}  # after training the model is plain

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict or None  # Lightning calls it before training


def _import_first(*names: str) -> Any:
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    raise EnvironmentUnusable(f"{names[0]} is not installed: pip install {names[0].partition('.')[0]}")


def _finish(pruner: Pruner) -> None:
    if early := pruner.unfinished:
        state = pruner.state
        warnings.warn(
            f"training ended after {state.step} of {state.total_steps} steps: nothing is trained under the masks "
            f"that {len(early)} of {len(state.layers)} layers get now",
            stacklevel=2,
        )
    pruner.finish()


def _get_folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _read_resumed(args: Any, state: Any) -> dict[str, Any]:
    """Read the pruner's state of the checkpoint that the Trainer has loaded. It has the same id, in any folder."""
    noted = state.stateful_callbacks.get(STATE, {})
    folders = (args.resume_from_checkpoint, noted.get("folder"), str(_get_folder(args, state)))
    paths = [path for folder in folders if isinstance(folder, str) and (path := Path(folder) / STATE).is_file()]
    for path in paths:
        saved = _read_state(path)
        if saved.get("id") == noted.get("id"):
            return saved
    if paths:
        raise BadData(
            f"{paths[0]} is not of the checkpoint that training goes on from: give that one's folder also as "
            "TrainingArguments(resume_from_checkpoint=...)"
        )
    raise BadData(f"{_get_folder(args, state) / STATE} is missing: {_NEEDED}")


def _read_state(path: Path) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return saved
