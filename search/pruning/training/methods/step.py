"""STEP: dense Adam first, then masks are learnt under its second moments as they were (Lu et al. 2023).

Noisy gradients of masked weights would corrupt Adam's v. In the first phase training is dense; once v settles, it is
frozen for all of the optimizer's parameters, and the N:M phase goes on as SR-STE: w -= lr m / (sqrt(v*) + eps).

Where no gradient ever came before the switch (rows of an embedding) v is zero, and m over it would be without bound:
such weights keep a v of their own that goes on.

v has settled when the mean of |v_t - v_(t-1)| over the latest 1 / (1 - beta2) steps is below `tolerance`, not before
`earliest` and at `latest` in any case, as shares of all steps. The optimizer is torch's Adam or AdamW.
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
from search.pruning.masks.layer_targets import Target
from search.pruning.training.phases import check_every
from search.pruning.training.pruner import DENSE, Pruner, Stage, When

_NEW = "without_gradient_before_step"  # in the optimizer's state of a parameter


@dataclass
class _Update:
    """One parameter's update, to be made again with the frozen v."""

    parameter: Tensor
    before: Tensor
    second: Tensor
    state: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class STEP(Pruner):
    """`penalty` is SR-STE's; masks are drawn every `every` steps."""

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

    def stage(self, target: Target, when: When) -> Stage:
        """Dense up to the switch; before it is known, that is taken to be the latest possible."""
        switch = self._switch(when.total)
        if when.step < switch:
            return DENSE
        redraw = (when.step - switch) % self.every == 0
        return Stage(target, backward=1.0, penalty=self.penalty, redraw=redraw)

    def changes(self, target: Target, when: When) -> Iterable[int]:
        """The switch, the latest possible where it has not come."""
        return (self._switch(when.total),)

    def start(self) -> None:
        """No change of v is known yet."""
        self.state.more.update(changes=[])
        self.pending.clear()

    def before_update(self, optimizer: Optimizer) -> None:
        """Remember what the update starts from: in the first phase v, to see how it changes; in the second all."""
        if not isinstance(optimizer, Adam):
            raise UsageError(
                f"STEP freezes Adam's second moments: train with Adam or AdamW, not {type(optimizer).__name__}"
            )
        if any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
            raise UsageError("STEP makes Adam's plain update: without amsgrad and maximize")
        more = self.state.more
        if self._learns_masks():
            if "frozen_at" not in more and (steps := _steps(optimizer)) > 0:
                more["frozen_at"] = steps
            if "frozen_at" in more:
                self.pending.extend(_updates(optimizer))
        else:
            pruned = {id(layer.weight) for layer in self.state.layers.values()}
            self.pending.extend(_updates(optimizer, only=pruned))

    def after_update(self) -> None:
        """Switch if it is time; make the latest update again with the frozen v."""
        more = self.state.more
        if self._learns_masks():
            for update in self.pending:
                _again(update, more["frozen_at"])
        elif self.pending:
            window = int(1 / (1 - self.pending[0].settings["betas"][1]) + 0.5)
            more["changes"] = [*more["changes"], _change(self.pending)][-window:]
        self.pending.clear()
        step = self.state.step + 1
        early = self.earliest * self.state.total_steps <= step < round(self.latest * self.state.total_steps)
        changes = more["changes"]
        if "switch" not in more and early and changes and sum(changes) / len(changes) < self.tolerance:
            more["switch"] = step

    def _learns_masks(self) -> bool:
        return self.state.step >= self._switch(self.state.total_steps)

    def _switch(self, total: int) -> int:
        switch: int = self.state.more.get("switch", round(self.latest * total))
        return switch


def _change(updates: list[_Update]) -> float:
    """The mean of |v_t - v_(t-1)| over the weights that were updated."""
    total = sum(float((update.state["exp_avg_sq"] - update.second).abs().sum()) for update in updates)
    return total / sum(update.second.numel() for update in updates)


def _updates(optimizer: Optimizer, only: Container[int] | None = None) -> list[_Update]:
    """What the optimizer is about to change, of all its parameters or those of the ids; not the very first time."""
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


def _steps(optimizer: Optimizer) -> int:
    """How many updates the optimizer has made."""
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)


@torch.no_grad()
def _again(update: _Update, frozen_at: int) -> None:
    """w -= lr m_hat / (sqrt(v*_hat) + eps) from where the update started; v is put back where it was anything."""
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
