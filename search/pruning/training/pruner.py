"""The protocol of every method that prunes while a model trains, in a user's own loop:

    pruner = MaskDecay(final=0.2)
    pruner.prepare(model, profile, total_steps=len(loader) * epochs)      # before or after the optimizer is made
    for batch in loader:
        loss(model, batch).backward()
        optimizer.step(); optimizer.zero_grad()
        pruner.step()                                                   # once after every optimizer.step()
    pruner.finish()                                                     # hard zeros; pruner.masks {layer: (m, k)}

A pruner is frozen settings and a small state. A method says, for each step, how a layer computes (`Stage`): its
target mask, what dropped weights are multiplied by in the forward (`fade`), how much of their gradient they get.

How: between optimizer steps a layer's own parameter holds the weights that the forward uses, so modules, optimizers
and state_dict keys stay as they are, evaluation sees the pruned function, and a checkpoint of the model loads into a
plain one at any time. Where dropped weights live on behind the mask (straight-through, decay), the pruner keeps the
dense weights beside. A hook, which torch calls before any optimizer's step, turns the gradient of the forward's
weights into that of the dense ones and puts those back into the parameter, so that the optimizer sees them: its
weight decay and momentum act on what is trained. `pruner.step()` takes the result, draws the masks that are due, and
writes the forward's weights again. It follows that

- gradients may be accumulated over any number of backwards, and scaled (AMP): methods see them once an update, and
  unscaled; a step that a GradScaler skips, in a fused optimizer too, changes nothing, but counts;
- gradients are clipped as those of the forward's weights;
- the optimizer must be a `torch.optim.Optimizer`, with or without a closure, and may step others in turn; anything
  else that changes a layer whose dense weights live behind it is noticed and refused;
- under DistributedDataParallel masks are rank 0's. Parameters that are cut up among ranks (FSDP) are not supported.

Checkpoints: save model, optimizer and `pruner.state_dict()`; to go on, prepare anew and load all three. The pruner's
holds its layers' weights, so that the model's may be loaded before `prepare`, which writes to them, or after.
Move the model to its device before `prepare`.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from latbench.errors import BadData, UsageError
from search.pruning.masks.layer_targets import Target, Targets, shape_of, targets_of
from search.pruning.saliency.scores import MagnitudeScore, Score
from sparse_kernels.nn import as_matrix, as_weight
from sparse_kernels.shapes import Shape


@dataclass(frozen=True)
class Stage:
    """How a layer computes during one step, as its method has it.

    target: what its mask is drawn for; None: dense, no mask. fade: dropped weights count so much in the forward.
    backward: dropped weights get so much of the forward's gradient, and penalty times their value is added to that.
    redraw: the mask is drawn anew now; it always is where the target changes. fixed: no gradient of dropped weights
    is needed, as the mask will not change by it. last: no other mask comes, so that no gradient is kept to score by.
    forget: momentum starts from zero in the first update from now on (a GradScaler may skip this step).
    """

    target: Target | None = None
    fade: float = 0.0
    backward: float = 0.0
    penalty: float = 0.0
    redraw: bool = False
    fixed: bool = False
    last: bool = False
    forget: bool = False


DENSE = Stage()


@dataclass(frozen=True)
class When:
    """The moment: `step` finished optimizer steps of `total`; this is layer number `layer` of `layers`."""

    step: int
    total: int
    layer: int = 0
    layers: int = 1


@dataclass(eq=False)
class Layer:
    """A layer under a pruner. mask and dense have the weight's own shape; dense is None where zeros are hard."""

    name: str
    number: int
    module: nn.Module
    target: Target
    gradients: deque[Tensor]
    mask: Tensor | None = None
    drawn_for: Target | None = None
    dense: Tensor | None = None
    seen: Tensor | None = None  # what a method noted of the latest gradient, for the masks that follow at once
    forget: bool = False
    stepping: bool = False
    version: int = -1

    @property
    def weight(self) -> nn.Parameter:
        """The parameter, which the model owns."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def values(self) -> Tensor:
        """What is trained: the dense weights where they are kept beside, else the parameter."""
        return self.weight.detach() if self.dense is None else self.dense


@dataclass(eq=False)
class State:
    """What a pruner remembers between steps."""

    step: int = 0
    total_steps: int = 0
    layers: dict[str, Layer] = field(default_factory=dict)
    group: Any = None  # of the ranks that train together
    hook: Any = None
    running: list[Optimizer] = field(default_factory=list)  # in its step now, and what that steps
    more: dict[str, Any] = field(default_factory=dict)  # of the method's own: plain values, saved with the rest


@dataclass(frozen=True, kw_only=True, eq=False)
class Pruner:
    """What all methods share. `score` says which weights matter."""

    keeps_dense: ClassVar[bool] = False  # dropped weights keep a value behind the mask
    score: Score = field(default_factory=MagnitudeScore)
    state: State = field(default_factory=State, init=False, repr=False)

    def stage(self, target: Target, when: When) -> Stage:
        """How a layer with this target computes at that moment: the method. A pure function of the settings."""
        raise NotImplementedError

    def check(self, model: nn.Module, targets: Targets, total_steps: int) -> dict[str, Target]:
        """The layers to prune, and to what. Changes nothing.

        Raises UsageError as `targets_of` does, and, naming the layer, for one that this method cannot prune so, and
        where a first mask would be drawn before there is any of the gradients that the score asks for.
        """
        inner, _ = unwrapped(model)
        found = targets_of(targets, inner)
        for number, (name, target) in enumerate(found.items()):
            reason = self.refuses(target, shape_of(inner.get_submodule(name)))
            if self.score.gradients and self.stage(target, When(0, total_steps, number, len(found))).target:
                reason = (
                    f"its first mask comes before the first step, when no gradient is there for "
                    f"{type(self.score).__name__}: let training begin dense, or score by magnitude"
                )
            if reason is not None:
                raise UsageError(f"layer {name}: {reason}")
        return found

    def stretches(self, target: Target, when: When) -> Iterator[tuple[Stage, int]]:
        """(stage, steps) from the first of all steps to the last: the first stage of so many that are alike.

        Alike but for `redraw` and `forget`, and for how far weights have faded that still count for something.
        """
        starts = sorted({0, *(step for step in self.changes(target, when) if 0 < step < when.total)})
        for start, end in zip(starts, [*starts[1:], when.total], strict=True):
            yield self.stage(target, replace(when, step=start)), end - start

    def holds_targets(self, targets: Mapping[str, Target], steps: int) -> bool:
        """Whether each layer is under a mask of its target from the first of `steps` steps on, that or others."""
        return all(
            stage.target == target and stage.fade == 0
            for number, target in enumerate(targets.values())
            for stage, _ in self.stretches(target, When(0, steps, number, len(targets)))
        )

    def prepare(self, model: nn.Module, targets: Targets, *, total_steps: int, group: Any = None) -> None:
        """Start pruning `model` to `targets` over `total_steps` optimizer steps; the first masks are drawn if due.

        `targets` is a Profile or {layer: Target or (pattern, sparsity)}. A profile goes by the names of its layers;
        its hash of the model is not looked at, whose weights may have been trained since. `group` are the ranks that
        train the model together, where DistributedDataParallel does not say. Raises UsageError as `check` does, and
        where there is nothing to prune, or this pruner is at work already, or another one on one of the layers; the
        model is then as it was.
        """
        if self.at_work:
            raise UsageError("this pruner is at work already: finish() it first, or make another")
        if not isinstance(total_steps, int) or isinstance(total_steps, bool) or total_steps < 1:
            raise UsageError(f"pruning takes a whole number of optimizer steps, at least one, not {total_steps!r}")
        inner, own = unwrapped(model)
        group = group if own is None else own
        found = self.check(model, targets, total_steps)
        if not found:
            raise UsageError("no layer is to be pruned: all targets are dense")
        modules = dict(inner.named_modules())
        _refuse_taken({name: modules[name] for name in found})
        state = self.state
        state.step, state.total_steps, state.group, state.more = 0, total_steps, group, {}
        state.layers = {
            name: Layer(name, number, modules[name], target, deque(maxlen=self.score.gradients))
            for number, (name, target) in enumerate(found.items())
        }
        self.start()
        reference = weakref.ref(self)

        def before_update(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            pruner = reference()
            return None if pruner is None else pruner._before_update(optimizer, args, kwargs)

        def after_update(optimizer: Optimizer, *_: Any) -> None:
            if (pruner := reference()) is not None and pruner.state.running[:1] == [optimizer]:
                pruner.state.running = []

        if self.keeps_dense:
            for layer in state.layers.values():
                layer.dense = layer.weight.detach().clone()
        self._advance()
        state.hook = ExitStack()
        state.hook.callback(register_optimizer_step_pre_hook(before_update).remove)
        state.hook.callback(register_optimizer_step_post_hook(after_update).remove)
        weakref.finalize(self, state.hook.close)
        _AT_WORK.add(self)

    def step(self) -> None:
        """Call once after every optimizer step: takes its result, draws masks that are due and applies them."""
        self._check_at_work()
        self.state.running = []  # also where a step was broken off
        self.after_update()
        self.state.step += 1
        for layer in self.state.layers.values():
            self._take(layer)
        self._advance()

    def finish(self) -> None:
        """End: every layer gets its target's mask, if it has not, and hard zeros. The model is plain again.

        Raises BadData, naming the layer, for weights that are not finite.
        """
        self._check_at_work()
        with torch.no_grad():
            for layer in self.state.layers.values():
                if not bool(torch.isfinite(layer.weight).all()):
                    raise BadData(f"layer {layer.name}: training left NaN or infinite values in its weights")
            for layer in self.state.layers.values():
                self._take(layer)
                if layer.drawn_for != layer.target:
                    self._drop(layer, layer.target, self._drawn(layer, layer.target))
                layer.weight.copy_(_masked(layer.values, _mask(layer), 0.0))
                layer.dense = None
                layer.gradients.clear()
        self.state.hook.close()
        self.state.hook = None
        _AT_WORK.discard(self)

    @property
    def at_work(self) -> bool:
        """Whether it is between `prepare` and `finish`."""
        return self.state.hook is not None

    @property
    def unfinished(self) -> list[str]:
        """The layers that `finish` would now change: not under their target's mask yet, or not all faded."""
        layers = self.state.layers.values()
        stages = [self.stage(layer.target, self._when(layer)) for layer in layers]
        return [
            layer.name
            for layer, stage in zip(layers, stages, strict=True)
            if layer.drawn_for != layer.target or stage.fade > 0
        ]

    @property
    def masks(self) -> dict[str, Tensor]:
        """{layer: mask (m, k), True = kept} as they are now; a layer that computes densely has none."""
        layers = self.state.layers.values()
        return {layer.name: as_matrix(layer.mask).clone() for layer in layers if layer.mask is not None}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, to be saved between steps beside the model's and the optimizer's."""
        self._check_at_work()
        if busy := [layer.name for layer in self.state.layers.values() if layer.stepping]:
            raise UsageError(f"layer {busy[0]}: save a checkpoint after pruner.step(), not before it")
        return {
            "pruner": repr(self),
            "total_steps": self.state.total_steps,
            "targets": {layer.name: str(layer.target) for layer in self.state.layers.values()},
            "step": self.state.step,
            "layers": {
                layer.name: {
                    "mask": layer.mask,
                    "weight": layer.values.clone(),
                    "gradients": list(layer.gradients),
                    "forget": layer.forget,
                }
                for layer in self.state.layers.values()
            },
            "more": copy.deepcopy(self.state.more),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, once `prepare` was called with the same model, targets and steps.

        Raises BadData when it was saved by another pruner, for other targets, another number of steps or layers of
        other shapes; nothing is changed then.
        """
        self._check_at_work()
        self.check_state(state)
        own = self.state
        own.step = state["step"]
        own.more = copy.deepcopy(state["more"])
        for layer in own.layers.values():
            saved = state["layers"][layer.name]
            device = layer.weight.device
            stage = self.stage(layer.target, self._when(layer))
            layer.mask = None if saved["mask"] is None else saved["mask"].to(device)
            layer.drawn_for = None if layer.mask is None else stage.target
            layer.values.copy_(saved["weight"])
            layer.gradients.clear()
            layer.gradients.extend(gradient.to(device) for gradient in saved["gradients"])
            layer.forget = saved["forget"]
            layer.stepping = False
            self._show(layer, stage)

    # What a method may add to.

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise BadData where `load_state_dict` cannot go on from `state`. Changes nothing."""
        own = self.state
        mine = {
            "pruner": repr(self),
            "total_steps": own.total_steps,
            "targets": {layer.name: str(layer.target) for layer in own.layers.values()},
        }
        if lost := {"layers", "step", "more"} - state.keys():
            raise BadData(f"the checkpoint holds no whole state of a pruner: it lacks {', '.join(sorted(lost))}")
        for key, value in mine.items():
            if state.get(key) != value:
                raise BadData(f"the checkpoint's pruner differs in {key}: it has {state.get(key)}, this one {value}")
        for name, layer in own.layers.items():
            saved, shape = state["layers"].get(name, {}), layer.weight.shape
            if lost := {"mask", "weight", "gradients", "forget"} - saved.keys():
                raise BadData(
                    f"the checkpoint's pruner is damaged: of layer {name} it lacks {', '.join(sorted(lost))}"
                )
            tensors = [saved["weight"], *saved["gradients"], *([] if saved["mask"] is None else [saved["mask"]])]
            if other := [tuple(tensor.shape) for tensor in tensors if tensor.shape != shape]:
                raise BadData(
                    f"the checkpoint's pruner is of another model: layer {name} is {other[0]} there and "
                    f"{tuple(shape)} here"
                )

    def refuses(self, target: Target, shape: Shape) -> str | None:
        """Why this method cannot prune a layer of that shape, which can hold its target; None if it can."""
        return None

    def changes(self, target: Target, when: When) -> Iterable[int]:
        """The steps with which the layer's `stretches` begin, in any order; of `when.step` nothing depends."""
        return range(when.total)

    def start(self) -> None:
        """Called once by `prepare`, before the first masks are drawn."""

    def draw(self, layer: Layer, target: Target) -> Tensor:
        """A new mask (m, k) for `target`."""
        return target.mask(self.score.scores(as_matrix(layer.values), _gradients(layer)))

    def observe(self, layer: Layer, gradient: Tensor) -> None:
        """Called before an update with the forward's gradient, in the weight's shape, unscaled."""

    def before_update(self, optimizer: Optimizer) -> None:
        """Called when the optimizer's parameters and gradients are as it will see them; a fused one's are scaled."""

    def after_update(self) -> None:
        """Called first in `step`, when parameters are as the optimizer left them."""

    # How it works.

    def _when(self, layer: Layer) -> When:
        return When(self.state.step, self.state.total_steps, layer.number, len(self.state.layers))

    def _check_at_work(self) -> None:
        if not self.at_work:
            raise UsageError("this pruner is not at work: call prepare(model, targets, total_steps=...) first")

    @torch.no_grad()
    def _take(self, layer: Layer) -> None:
        """Take what the optimizer made of the trained weights."""
        layer.forget &= not layer.stepping
        if layer.dense is not None:
            if layer.stepping:
                layer.dense.copy_(layer.weight)
            else:
                self._check_untouched(layer)
        elif layer.mask is not None:  # momentum from before the mask has moved what it dropped
            layer.weight.copy_(_masked(layer.weight, layer.mask, 0.0))
        layer.stepping = False

    @torch.no_grad()
    def _advance(self) -> None:
        """Draw the masks that are due, and write the weights of the next forward; none if a mask cannot be drawn."""
        layers = self.state.layers.values()
        stages = [self.stage(layer.target, self._when(layer)) for layer in layers]
        drawn = [
            self._drawn(layer, stage.target)
            if stage.target is not None and (stage.redraw or layer.drawn_for != stage.target)
            else None
            for layer, stage in zip(layers, stages, strict=True)
        ]
        for layer, stage, mask in zip(layers, stages, drawn, strict=True):
            if stage.target is None:
                layer.mask = layer.drawn_for = None
            elif mask is not None:
                self._drop(layer, stage.target, mask)
            if stage.last:
                layer.gradients.clear()
            layer.forget |= stage.forget
            self._show(layer, stage)

    def _drawn(self, layer: Layer, target: Target) -> Tensor:
        """A new mask (m, k), rank 0's."""
        try:
            mask = self.draw(layer, target)
        except (BadData, ValueError, ArithmeticError) as error:
            raise BadData(f"layer {layer.name}, after {self.state.step} steps: {error}") from error
        if self.state.group is not None:
            bits = mask.to(torch.uint8).contiguous()
            dist.broadcast(bits, dist.get_global_rank(self.state.group, 0), group=self.state.group)
            mask = bits.bool()
        return mask

    def _drop(self, layer: Layer, target: Target, mask: Tensor) -> None:
        """Put a layer under a new mask."""
        if not self.keeps_dense:
            weight = self.score.compensate(as_matrix(layer.values), _gradients(layer), mask)
            layer.weight.copy_(as_weight(weight, layer.weight.shape))
        layer.mask, layer.drawn_for = as_weight(mask, layer.weight.shape).contiguous(), target

    @torch.no_grad()
    def _show(self, layer: Layer, stage: Stage) -> None:
        """Write the forward's weights into the parameter."""
        if layer.mask is not None:
            layer.weight.copy_(_masked(layer.values, layer.mask, stage.fade))
        elif layer.dense is not None:
            layer.weight.copy_(layer.dense)
        layer.version = layer.weight._version

    def _check_untouched(self, layer: Layer) -> None:
        """The parameter still holds what `_show` wrote: only a torch optimizer, whose step is seen, may change it."""
        if layer.weight._version == layer.version or layer.dense is None:
            return
        stage = self.stage(layer.target, self._when(layer))
        shown = layer.dense if layer.mask is None else _masked(layer.dense, layer.mask, stage.fade)
        if not torch.equal(layer.weight, shown):
            raise UsageError(
                f"layer {layer.name}: its weight was changed, but not by a torch.optim.Optimizer that this pruner "
                "sees; load checkpoints of model and pruner together, and train with a torch optimizer"
            )

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What torch calls before each optimizer's step, and what may change its arguments.

        An optimizer that another one steps (as ZeroRedundancyOptimizer and Lookahead do) makes part of its update.
        """
        layers = self._layers_of(optimizer)
        running = self.state.running
        if running and running[0] is not optimizer and set(layers) <= set(self._layers_of(running[0])):
            running.append(optimizer)
            _forget([layer for layer in layers if layer.stepping], optimizer)
            return None
        for layer in layers:
            if layer.stepping:
                raise UsageError(
                    f"layer {layer.name}: call pruner.step() after every optimizer.step(), and only then"
                )
        closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not layers:
            return None
        self.state.running = [optimizer]
        if closure is None:
            self._to_dense(layers, optimizer)
            return None

        def forward_and_backward() -> Any:
            for layer in layers:
                if layer.stepping:  # an optimizer that calls it again
                    self._take(layer)
                    self._show(layer, self.stage(layer.target, self._when(layer)))
            loss = closure()
            self._to_dense(layers, optimizer)
            return loss

        return (args[0], *args[2:]), {**kwargs, "closure": forward_and_backward}

    def _layers_of(self, optimizer: Optimizer) -> list[Layer]:
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [layer for layer in self.state.layers.values() if id(layer.weight) in owned]

    @torch.no_grad()
    def _to_dense(self, layers: Iterable[Layer], optimizer: Optimizer) -> None:
        """The trained weights into the parameter, and their gradient into its gradient."""
        found_inf = getattr(optimizer, "found_inf", None)  # where a fused optimizer will skip the step itself
        if found_inf is not None and float(found_inf) > 0:
            return
        scale = getattr(optimizer, "grad_scale", None)  # where it will unscale the gradients itself
        for layer in layers:
            stage = self.stage(layer.target, self._when(layer))
            gradient = layer.weight.grad
            if layer.dense is not None:
                self._check_untouched(layer)
                layer.weight.copy_(layer.dense)
            if gradient is not None:
                self.observe(layer, gradient if scale is None else gradient / scale)
                if layer.mask is not None:
                    _chain(gradient, layer.mask, stage, layer.values, scale)
                if self.score.gradients and not stage.last:
                    layer.gradients.append(gradient.clone() if scale is None else gradient / scale)
            layer.stepping = True
        for each in self.state.running:
            _forget(layers, each)
        self.before_update(optimizer)


def _forget(layers: Iterable[Layer], optimizer: Optimizer) -> None:
    """Start the momentum of those layers that are to forget it from zero."""
    for layer in layers:
        for name in ("momentum_buffer", "exp_avg") if layer.forget else ():
            if torch.is_tensor(buffer := optimizer.state[layer.weight].get(name)):
                buffer.zero_()


def _chain(gradient: Tensor, mask: Tensor, stage: Stage, dense: Tensor, scale: Tensor | None) -> None:
    """From the gradient by the forward's weights to that by the dense ones, in place."""
    if stage.backward == 0:
        gradient.masked_fill_(~mask, 0.0)
    elif stage.backward != 1:
        gradient.copy_(torch.where(mask, gradient, stage.backward * gradient))
    if stage.penalty:
        penalty = stage.penalty if scale is None else stage.penalty * scale
        gradient.add_(torch.where(mask, 0.0, dense) * penalty)


def _masked(weight: Tensor, mask: Tensor, fade: float) -> Tensor:
    return torch.where(mask, weight, fade * weight if fade else 0.0)


def _mask(layer: Layer) -> Tensor:
    assert layer.mask is not None
    return layer.mask


def _gradients(layer: Layer) -> Tensor:
    """The latest gradients as (gradients, m, k)."""
    rows = layer.values.new_empty(len(layer.gradients), *as_matrix(layer.values).shape)
    for row, gradient in zip(rows, layer.gradients, strict=True):
        row.copy_(as_matrix(gradient))
    return rows


def unwrapped(model: nn.Module) -> tuple[nn.Module, Any]:
    """The user's module, out of torch.compile and DistributedDataParallel, and the latter's process group."""
    group = None
    while True:
        if isinstance(model, DistributedDataParallel):
            model, group = model.module, model.process_group
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model, group


_AT_WORK: weakref.WeakSet[Pruner] = weakref.WeakSet()


def _refuse_taken(modules: Mapping[str, nn.Module]) -> None:
    """Raise UsageError where a pruner is at work on one of these layers: each would undo what the other does."""
    names = {id(module.weight): name for name, module in modules.items()}

    def taken() -> list[str]:
        layers = [layer for pruner in _AT_WORK for layer in pruner.state.layers.values()]
        return [names[id(layer.weight)] for layer in layers if id(layer.weight) in names]

    if taken():
        gc.collect()  # one that nobody can call any more may wait in a cycle of references
    if found := taken():
        raise UsageError(f"layer {found[0]}: another pruner is at work on it: finish() or delete that one first")
