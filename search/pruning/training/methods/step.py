"""STEP: dense Adam first, then masks are learnt with its second moments frozen (Lu et al. 2023).

Noisy gradients of masked weights would corrupt Adam's second moment v. So the first phase is dense. When v has
settled, it is frozen for all of the optimizer's parameters. The second phase trains N:M masks as SR-STE does: w -= lr
m / (sqrt(v*) + eps).

If a weight had no gradient before the switch (a row of an embedding), v is zero and m / sqrt(v) would be unbounded.
Such a weight keeps its own v, which is updated further.

v has settled when the mean of |v_t - v_(t-1)| over the latest 1 / (1 - beta2) steps is below `tolerance`. The switch
comes between the shares `earliest` and `latest` of all steps in any case. The optimizer is torch's Adam or AdamW.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Adam
from torch.optim.optimizer import Optimizer

from latbench.errors import UsageError
from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.phases import check_every
from search.pruning.training.pruner import DENSE, Moment, Pruner, Stage

_NEW = "without_gradient_before_step"  # a key of a parameter's state in the optimizer


@dataclass
class _Update:
    """One parameter's update, to be repeated with the frozen v.

    Attributes
    ----------
    parameter : Tensor
        The parameter.
    before, second : Tensor
        Its value and its v before the update.
    state, settings : dict
        Its state and settings in the optimizer.
    """

    parameter: Tensor
    before: Tensor
    second: Tensor
    state: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class STEP(Pruner):
    """STEP.

    Parameters
    ----------
    earliest, latest : float
        Limits of the switch, as shares of all steps.
    tolerance : float
        Mean change of v below which it has settled.
    penalty : float
        Penalty of dropped weights, as of SR-STE.
    every : int
        Steps between two masks.
    score : Score
        How much each weight matters.
    """

    keeps_dense: ClassVar[bool] = True
    earliest: float = 0.1
    latest: float = 0.5
    tolerance: float = 1e-8
    penalty: float = 2e-4
    every: int = 1
    pending: list[_Update] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.earliest <= self.latest <= 1:
            raise UsageError("STEP switches between `earliest` and `latest`, shares of all steps, in that order")
        if self.tolerance < 0 or self.penalty < 0:
            raise UsageError("STEP's tolerance and penalty are not negative")
        check_every(self.every)

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return the dense stage up to the switch. An unknown switch counts as the latest possible."""
        switch = self._switch(moment.total)
        if moment.step < switch:
            return DENSE
        redraw = (moment.step - switch) % self.every == 0
        return Stage(target, backward=1.0, penalty=self.penalty, redraw=redraw)

    def list_stage_starts(self, target: LayerTarget, moment: Moment) -> Iterable[int]:
        """Return the step of the switch, or the latest possible one."""
        return (self._switch(moment.total),)

    def start(self) -> None:
        """Reset the state: no change of v is known."""
        self.state.method_state.update(changes=[])
        self.pending.clear()

    def before_update(self, optimizer: Optimizer) -> None:
        """Record the state before the update: in the first phase of the pruned layers, to see how v changes."""
        if not isinstance(optimizer, Adam):
            raise UsageError(
                f"STEP freezes Adam's second moments: train with Adam or AdamW, not {type(optimizer).__name__}"
            )
        if any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
            raise UsageError("STEP makes Adam's plain update: without amsgrad and maximize")
        state = self.state.method_state
        if self._learns_masks():
            if "frozen_at" not in state and (steps := _count_steps(optimizer)) > 0:
                state["frozen_at"] = steps
            if "frozen_at" in state:
                self.pending.extend(_record_updates(optimizer))
        else:
            pruned = {id(layer.weight) for layer in self.state.layers.values()}
            self.pending.extend(_record_updates(optimizer, only=pruned))

    def after_update(self) -> None:
        """Repeat the latest update with the frozen v, and switch if it is time."""
        state = self.state.method_state
        if self._learns_masks():
            for update in self.pending:
                _repeat_update(update, state["frozen_at"])
        elif self.pending:
            window = int(1 / (1 - self.pending[0].settings["betas"][1]) + 0.5)
            state["changes"] = [*state["changes"], _compute_change(self.pending)][-window:]
        self.pending.clear()
        step = self.state.step + 1
        early = self.earliest * self.state.total_steps <= step < round(self.latest * self.state.total_steps)
        changes = state["changes"]
        if "switch" not in state and early and changes and sum(changes) / len(changes) < self.tolerance:
            state["switch"] = step

    def _learns_masks(self) -> bool:
        return self.state.step >= self._switch(self.state.total_steps)

    def _switch(self, total: int) -> int:
        switch: int = self.state.method_state.get("switch", round(self.latest * total))
        return switch


def _compute_change(updates: list[_Update]) -> float:
    """Return the mean of |v_t - v_(t-1)| over the updated weights."""
    total = sum(float((update.state["exp_avg_sq"] - update.second).abs().sum()) for update in updates)
    return total / sum(update.second.numel() for update in updates)


def _record_updates(optimizer: Optimizer, only: Container[int] | None = None) -> list[_Update]:
    """Return the coming updates of all parameters, or of those with the ids; there are none at first."""
    return [
        _Update(
            parameter, parameter.detach().clone(), optimizer.state[parameter]["exp_avg_sq"].clone(),
            optimizer.state[parameter], {key: value for key, value in group.items() if key != "params"},
        )
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (only is None or id(parameter) in only)
        and parameter.grad is not None
        and "exp_avg_sq" in optimizer.state.get(parameter, {})
    ]  # fmt: skip


def _count_steps(optimizer: Optimizer) -> int:
    """Return the number of updates that the optimizer has made."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)


@torch.no_grad()
def _repeat_update(update: _Update, frozen_at: int) -> None:
    """Set w -= lr m_hat / (sqrt(v*_hat) + eps) from the value before the update; v returns to its frozen value."""
    settings, state = update.settings, update.state
    lr, (beta1, beta2) = settings["lr"], settings["betas"]
    first = state["exp_avg"] / (1 - beta1 ** int(state["step"]))
    second = update.second / (1 - beta2**frozen_at)
    new = update.second == 0
    if _NEW in state:
        new |= state[_NEW]
    if bool(new.any()):
        state[_NEW] = new  # saved with the optimizer
        second = torch.where(new, state["exp_avg_sq"] / (1 - beta2 ** int(state["step"])), second)
        update.second = torch.where(new, state["exp_avg_sq"], update.second)
    decayed = update.before
    if settings.get("decoupled_weight_decay"):
        decayed = decayed * (1 - lr * settings["weight_decay"])
    update.parameter.copy_(decayed - lr * first / (second.sqrt() + settings["eps"]))
    state["exp_avg_sq"].copy_(update.second)
