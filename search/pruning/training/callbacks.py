"""Pruners in other people's training loops: a transformers `TrainerCallback` and a Lightning `Callback`.

    Trainer(..., callbacks=[transformers_callback(MaskDecay(), profile)])
    lightning.Trainer(callbacks=[lightning_callback(MaskDecay(), profile)])

Thin: they call prepare, step and finish when the loop does what these follow, and keep the pruner's state in the
loop's checkpoints. Neither library is needed unless its function is called.

A method that gets to its masks while the model trains is done only at the end: a checkpoint from before is of a less
pruned model, and so better by most measures. What would take such a one for the best is refused (transformers'
`load_best_model_at_end`), or warned of where it does not change the model that training leaves (Lightning's
`ModelCheckpoint(monitor=...)`). Training that others stop early is ended by drawing the last masks, with a warning.
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
from search.pruning.masks.layer_targets import Targets
from search.pruning.training.pruner import Pruner

STATE = "pruner.pt"

_NEEDED = "training that was pruned goes on from a checkpoint that has it"


def transformers_callback(pruner: Pruner, targets: Targets) -> Any:
    """A `transformers.TrainerCallback` that prunes the Trainer's model to `targets` while it trains.

    Each checkpoint folder gets a pruner.pt; a run that is resumed, and the best model that is loaded at the end, read
    it. A callback is not told which checkpoint the Trainer goes on from: the folder that it was written to is in its
    trainer_state.json, and after that was moved, `TrainingArguments(resume_from_checkpoint=...)` says it, or it lies
    in `output_dir`. All ranks have rank 0's masks. Raises EnvironmentUnusable without transformers; in training
    BadData where the checkpoint's pruner.pt is missing, and, before the first step, UsageError for
    `load_best_model_at_end` unless the method holds its targets from the first step on.
    """
    base = _imported("transformers").TrainerCallback

    class PrunerCallback(base):  # type: ignore[misc, valid-type]
        """Prunes between the Trainer's steps."""

        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            ranks = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
            found = pruner.check(model, targets, state.max_steps)
            if args.load_best_model_at_end and not pruner.holds_targets(found, state.max_steps):
                raise UsageError(
                    "load_best_model_at_end may end with a model from before its masks were the last, and nothing "
                    f"would train under those: leave it out, as {type(pruner).__name__} prunes while the model trains"
                )
            resumed = _resumed(args, state) if state.global_step > 0 else None
            pruner.prepare(model, targets, total_steps=state.max_steps, group=ranks)
            if resumed is not None:
                pruner.load_state_dict(resumed)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pruner.step()
            # The Trainer writes this into trainer_state.json, right before on_save.
            state.stateful_callbacks[STATE] = {"id": uuid.uuid4().hex, "folder": str(_folder(args, state).absolute())}

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                own = state.stateful_callbacks[STATE]["id"]
                torch.save({**pruner.state_dict(), "id": own}, _folder(args, state) / STATE)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if args.load_best_model_at_end and state.best_model_checkpoint:
                best = Path(state.best_model_checkpoint) / STATE
                if not best.is_file():
                    raise BadData(f"{best} is missing: {_NEEDED}")
                pruner.load_state_dict(_read(best))
            _finish(pruner)

    return PrunerCallback()


def lightning_callback(pruner: Pruner, targets: Targets) -> Any:
    """A Lightning `Callback` that prunes the LightningModule to `targets`; its checkpoints hold the pruner's state.

    Raises EnvironmentUnusable without lightning or pytorch_lightning; in training UsageError where there is no number
    of steps to prune over, BadData where the checkpoint that training goes on from was not saved while it pruned.
    """
    base = _imported("lightning.pytorch", "pytorch_lightning").Callback

    class PrunerCallback(base):  # type: ignore[misc, valid-type]
        """Prunes between the optimizer's steps, however many batches each takes."""

        def __init__(self) -> None:
            self.steps = 0
            self.restored: dict[str, Any] | None = None

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            steps = trainer.estimated_stepping_batches
            if not math.isfinite(steps):
                raise UsageError("pruning ends with training: give the Trainer max_steps or max_epochs")
            if trainer.global_step > 0 and self.restored is None:
                raise BadData(
                    f"training goes on after {trainer.global_step} steps, but its checkpoint holds no pruner: "
                    "take one that was saved while this pruner was at work, or start a new Trainer"
                )
            found = pruner.check(trainer.model, targets, int(steps))
            ranked = [it for it in trainer.checkpoint_callbacks if getattr(it, "monitor", None) is not None]
            if ranked and not pruner.holds_targets(found, int(steps)):
                warnings.warn(
                    f"the best checkpoint by {ranked[0].monitor} may be from before the last masks, as "
                    f"{type(pruner).__name__} prunes while the model trains: take the model that fit() leaves",
                    stacklevel=2,
                )
            pruner.prepare(trainer.model, targets, total_steps=int(steps))
            self.steps = trainer.global_step
            if self.restored is not None:
                pruner.load_state_dict(self.restored)
                self.restored = None

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step > self.steps:
                self.steps = trainer.global_step
                pruner.step()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            _finish(pruner)

        def state_dict(self) -> dict[str, Any]:
            return pruner.state_dict() if pruner.at_work else {}  # saved after training: the model is plain

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.restored = state_dict or None  # Lightning calls this before the training starts

    return PrunerCallback()


def _imported(*names: str) -> Any:
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


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _resumed(args: Any, state: Any) -> dict[str, Any]:
    """The pruner's state of the checkpoint that the Trainer has loaded: wherever it lies, it has the same id."""
    noted = state.stateful_callbacks.get(STATE, {})
    places = (args.resume_from_checkpoint, noted.get("folder"), str(_folder(args, state)))
    paths = [path for place in places if isinstance(place, str) and (path := Path(place) / STATE).is_file()]
    for path in paths:
        saved = _read(path)
        if saved.get("id") == noted.get("id"):
            return saved
    if paths:
        raise BadData(
            f"{paths[0]} is not of the checkpoint that training goes on from: give that one's folder also as "
            "TrainingArguments(resume_from_checkpoint=...)"
        )
    raise BadData(f"{_folder(args, state) / STATE} is missing: {_NEEDED}")


def _read(path: Path) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return saved
