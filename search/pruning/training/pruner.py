"""The base class of all methods that prune while a model trains, in a user's own loop:

    pruner = MaskDecay(final=0.2)
    pruner.prepare(model, profile, total_steps=len(loader) * epochs)      # before or after the optimizer is made
    for batch in loader:
        loss(model, batch).backward()
        optimizer.step(); optimizer.zero_grad()
        pruner.step()                                                   # once after every optimizer.step()
    pruner.finish()                                                     # exact zeros; pruner.masks {layer: (m, k)}

A pruner is frozen settings and a small state. For each step, a method returns how a layer computes (`Stage`). That is
the target of its mask, the factor of dropped weights in the forward (`fade`), and their share of the gradient.

Between optimizer steps a layer's own parameter holds the weights that the forward uses. So modules, optimizers and
state_dict keys do not change, evaluation uses the pruned function, and a plain model loads a checkpoint at any time.
If dropped weights keep a value behind the mask (straight-through, decay), the pruner holds the dense weights beside.

torch calls a hook before any optimizer's step. The hook turns the gradient of the forward's weights into that of the
dense ones. It puts the dense weights back into the parameter, so that weight decay and momentum act on what is
trained. `pruner.step()` takes the result, draws due masks, and writes the forward's weights again. It follows that

- gradients may be accumulated over any number of backwards, and scaled (AMP). Methods see them once an update, and
  unscaled. A step that a GradScaler skips, also in a fused optimizer, changes nothing, but counts;
- gradients are clipped as those of the forward's weights;
- the optimizer must be a `torch.optim.Optimizer`, with or without a closure, and may step other optimizers in turn.
  Any other change of a layer whose dense weights are held beside is detected and refused;
- under DistributedDataParallel all ranks use the masks of rank 0. Parameters that are split among ranks (FSDP) are
not
  supported.

Checkpoints: save model, optimizer and `pruner.state_dict()`. To continue, call `prepare` again and load all three.
The pruner's state holds its layers' weights. So the model may be loaded before `prepare`, which writes to it, or
after. Move the model to its device before `prepare`.
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
from search.pruning.masks.layer_targets import LayerTarget, LayerTargets, find_layer_shape, resolve_targets
from search.pruning.saliency.scores import MagnitudeScore, Score
from sparse_kernels.prunable_layers import as_matrix, as_weight
from sparse_kernels.shapes import Shape


@dataclass(frozen=True)
class Stage:
    """How a layer computes during one step.

    Attributes
    ----------
    target : LayerTarget or None
        Target of the layer's mask; None for a dense layer without a mask.
    fade : float
        Factor of dropped weights in the forward.
    backward : float
        Share of the forward's gradient that dropped weights get.
    penalty : float
        Factor of a dropped weight's value that is added to its gradient.
    redraw : bool
        Whether the mask is drawn again now. It always is if the target changes.
    fixed_mask : bool
        Whether the next mask does not depend on gradients of dropped weights.
    last_mask : bool
        Whether no other mask follows, so that no gradient is kept for scores.
    reset_momentum : bool
        Whether momentum starts from zero in the next update (a GradScaler may skip this step).
    """

    target: LayerTarget | None = None
    fade: float = 0.0
    backward: float = 0.0
    penalty: float = 0.0
    redraw: bool = False
    fixed_mask: bool = False
    last_mask: bool = False
    reset_momentum: bool = False


DENSE = Stage()


@dataclass(frozen=True)
class Moment:
    """A point in training, for one layer.

    Attributes
    ----------
    step, total : int
        Finished optimizer steps, and all steps.
    layer, layers : int
        Number of the layer, from 0, and how many layers there are.
    """

    step: int
    total: int
    layer: int = 0
    layers: int = 1


@dataclass(eq=False)
class PrunedLayer:
    """A layer under a pruner.

    Attributes
    ----------
    name, number : str, int
        Name and number of the layer.
    module : Module
        The layer.
    target : LayerTarget
        What it is pruned to at the end.
    gradients : deque of Tensor
        Its latest gradients, for the score.
    mask : bool Tensor or None
        Its mask, in the weight's own shape.
    drawn_for : LayerTarget or None
        Target of the current mask.
    dense : Tensor or None
        Dense weights that are held beside; None if dropped weights are exact zeros.
    squared_gradient : Tensor or None
        Squares of the latest gradient, (m, k), for the mask that follows at once.
    reset_momentum : bool
        Whether its momentum starts from zero in the next update.
    in_update : bool
        Whether the optimizer has stepped, and `Pruner.step` has not.
    version : int
        torch's version counter of the weight after the pruner's last write.
    """

    name: str
    number: int
    module: nn.Module
    target: LayerTarget
    gradients: deque[Tensor]
    mask: Tensor | None = None
    drawn_for: LayerTarget | None = None
    dense: Tensor | None = None
    squared_gradient: Tensor | None = None
    reset_momentum: bool = False
    in_update: bool = False
    version: int = -1

    @property
    def weight(self) -> nn.Parameter:
        """The parameter of the model."""
        weight = self.module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    @property
    def values(self) -> Tensor:
        """The trained weights: the dense ones if they are held beside, and the parameter otherwise."""
        return self.weight.detach() if self.dense is None else self.dense


@dataclass(eq=False)
class PrunerState:
    """The base class of all methods.

    Parameters
    ----------
    score : Score
        How much each weight matters.
    """

    step: int = 0
    total_steps: int = 0
    layers: dict[str, PrunedLayer] = field(default_factory=dict)
    group: Any = None
    hook: Any = None
    running_optimizers: list[Optimizer] = field(default_factory=list)
    method_state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pruner:
    """What all methods share. `score` says which weights matter."""

    keeps_dense: ClassVar[bool] = False  # whether dropped weights keep a value behind the mask
    score: Score = field(default_factory=MagnitudeScore)
    state: PrunerState = field(default_factory=PrunerState, init=False, repr=False)

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return how a layer with this target computes at that moment. It depends on the settings alone."""
        raise NotImplementedError

    def check(self, model: nn.Module, targets: LayerTargets, total_steps: int) -> dict[str, LayerTarget]:
        """Check that the model can be pruned to the targets. Nothing changes.

        Parameters
        ----------
        model : Module
            The model, possibly wrapped.
        targets : Profile or mapping of str to LayerTarget or (pattern, sparsity)
            Targets by layer.
        total_steps : int
            Optimizer steps of the training.

        Returns
        -------
        dict of str to LayerTarget
            The layers to prune.

        Raises
        ------
        UsageError
            As `resolve_targets`; or this method cannot prune the named layer so; or a first mask is due before there
            are the gradients that the score needs.
        """
        inner, _ = unwrap_model(model)
        found = resolve_targets(targets, inner)
        for number, (name, target) in enumerate(found.items()):
            reason = self.refuses(target, find_layer_shape(inner.get_submodule(name)))
            if self.score.gradients and self.stage(target, Moment(0, total_steps, number, len(found))).target:
                reason = (
                    f"its first mask comes before the first step, when no gradient is there for "
                    f"{type(self.score).__name__}: let training begin dense, or score by magnitude"
                )
            if reason is not None:
                raise UsageError(f"layer {name}: {reason}")
        return found

    def list_stages(self, target: LayerTarget, moment: Moment) -> Iterator[tuple[Stage, int]]:
        """Yield the stages of all steps in order, each with its number of steps.

        Consecutive steps are one stage if they differ only in `redraw`, `reset_momentum` and a positive `fade`.
        """
        starts = sorted({0, *(step for step in self.list_stage_starts(target, moment) if 0 < step < moment.total)})
        for start, end in zip(starts, [*starts[1:], moment.total], strict=True):
            yield self.stage(target, replace(moment, step=start)), end - start

    def holds_targets(self, targets: Mapping[str, LayerTarget], steps: int) -> bool:
        """Return whether every layer is under a mask of its target from the first step to the last."""
        return all(
            stage.target == target and stage.fade == 0
            for number, target in enumerate(targets.values())
            for stage, _ in self.list_stages(target, Moment(0, steps, number, len(targets)))
        )

    def prepare(self, model: nn.Module, targets: LayerTargets, *, total_steps: int, group: Any = None) -> None:
        """Start to prune the model. The first masks are drawn if they are due.

        Parameters
        ----------
        model : Module
            The model, on its device; possibly wrapped.
        targets : Profile or mapping of str to LayerTarget or (pattern, sparsity)
            Targets by layer. Only the layer names of a profile count: the weights may have been trained since.
        total_steps : int
            Optimizer steps of the training, at least 1.
        group : ProcessGroup, optional
            The ranks that train the model together, if the model is not a DistributedDataParallel.

        Raises
        ------
        UsageError
            As `check`; or there is nothing to prune; or this pruner, or another one on the same layer, is at work.
            The model does not change then.
        """
        if self.at_work:
            raise UsageError("this pruner is at work already: finish() it first, or make another")
        if not isinstance(total_steps, int) or isinstance(total_steps, bool) or total_steps < 1:
            raise UsageError(f"pruning takes a whole number of optimizer steps, at least one, not {total_steps!r}")
        inner, own = unwrap_model(model)
        group = group if own is None else own
        found = self.check(model, targets, total_steps)
        if not found:
            raise UsageError("no layer is to be pruned: all targets are dense")
        modules = dict(inner.named_modules())
        _check_free({name: modules[name] for name in found})
        state = self.state
        state.step, state.total_steps, state.group, state.method_state = 0, total_steps, group, {}
        state.layers = {
            name: PrunedLayer(name, number, modules[name], target, deque(maxlen=self.score.gradients))
            for number, (name, target) in enumerate(found.items())
        }
        self.start()
        reference = weakref.ref(self)

        def before_update(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            pruner = reference()
            return None if pruner is None else pruner._before_update(optimizer, args, kwargs)

        def after_update(optimizer: Optimizer, *_: Any) -> None:
            if (pruner := reference()) is not None and pruner.state.running_optimizers[:1] == [optimizer]:
                pruner.state.running_optimizers = []

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
        """Take the result of an optimizer step, draw due masks and apply them: call it once after every step."""
        self._check_at_work()
        self.state.running_optimizers = []  # also after an interrupted step
        self.after_update()
        self.state.step += 1
        for layer in self.state.layers.values():
            self._take_update(layer)
        self._advance()

    def finish(self) -> None:
        """End pruning: every layer gets exact zeros, and a mask of its target if it has none.

        The model is plain again. Raises BadData, which names the layer, for weights that are not finite.
        """
        self._check_at_work()
        with torch.no_grad():
            for layer in self.state.layers.values():
                if not bool(torch.isfinite(layer.weight).all()):
                    raise BadData(f"layer {layer.name}: training left NaN or infinite values in its weights")
            for layer in self.state.layers.values():
                self._take_update(layer)
                if layer.drawn_for != layer.target:
                    self._set_mask(layer, layer.target, self._draw_mask(layer, layer.target))
                layer.weight.copy_(_fade(layer.values, _get_mask(layer), 0.0))
                layer.dense = None
                layer.gradients.clear()
        self.state.hook.close()
        self.state.hook = None
        _AT_WORK.discard(self)

    @property
    def at_work(self) -> bool:
        """Whether the pruner is between `prepare` and `finish`."""
        return self.state.hook is not None

    @property
    def unfinished(self) -> list[str]:
        """Layers that `finish` would change now: without their target's mask, or not completely faded."""
        layers = self.state.layers.values()
        stages = [self.stage(layer.target, self._get_moment(layer)) for layer in layers]
        return [
            layer.name
            for layer, stage in zip(layers, stages, strict=True)
            if layer.drawn_for != layer.target or stage.fade > 0
        ]

    @property
    def masks(self) -> dict[str, Tensor]:
        """The current masks (m, k) by layer, True = kept. A layer that computes densely has none."""
        layers = self.state.layers.values()
        return {layer.name: as_matrix(layer.module, layer.mask).clone() for layer in layers if layer.mask is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, to be saved between steps beside those of the model and the optimizer."""
        self._check_at_work()
        if busy := [layer.name for layer in self.state.layers.values() if layer.in_update]:
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
                    "forget": layer.reset_momentum,
                }
                for layer in self.state.layers.values()
            },
            "more": copy.deepcopy(self.state.method_state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, after `prepare` with the same model, targets and steps.

        Raises BadData if it was saved by another pruner, or for other targets, steps or shapes. Nothing changes then.
        """
        self._check_at_work()
        self.check_state(state)
        own = self.state
        own.step = state["step"]
        own.method_state = copy.deepcopy(state["more"])
        for layer in own.layers.values():
            saved = state["layers"][layer.name]
            device = layer.weight.device
            stage = self.stage(layer.target, self._get_moment(layer))
            layer.mask = None if saved["mask"] is None else saved["mask"].to(device)
            layer.drawn_for = None if layer.mask is None else stage.target
            layer.values.copy_(saved["weight"])
            layer.gradients.clear()
            layer.gradients.extend(gradient.to(device) for gradient in saved["gradients"])
            layer.reset_momentum = saved["forget"]
            layer.in_update = False
            self._write_forward_weights(layer, stage)

    # Methods may override what follows.

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise BadData if `load_state_dict` cannot continue from `state`. Nothing changes."""
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

    def refuses(self, target: LayerTarget, shape: Shape) -> str | None:
        """Return why this method cannot prune a layer of that shape, which can hold its target, or None."""
        return None

    def list_stage_starts(self, target: LayerTarget, moment: Moment) -> Iterable[int]:
        """Return the steps at which the stages of `list_stages` begin, in any order and for any `moment.step`."""
        return range(moment.total)

    def start(self) -> None:
        """Begin: `prepare` calls it once before the first masks are drawn."""

    def draw(self, layer: PrunedLayer, target: LayerTarget) -> Tensor:
        """Return a new mask (m, k) for `target`."""
        return target.mask(self.score.scores(as_matrix(layer.module, layer.values), _stack_gradients(layer)))

    def observe(self, layer: PrunedLayer, gradient: Tensor) -> None:
        """Receive the forward's gradient before an update, in the weight's shape and unscaled."""

    def before_update(self, optimizer: Optimizer) -> None:
        """Act on the optimizer when it sees its final parameters and gradients; those of a fused one are scaled."""

    def after_update(self) -> None:
        """Act on the result of the optimizer: `step` calls it first."""

    # Implementation.

    def _get_moment(self, layer: PrunedLayer) -> Moment:
        return Moment(self.state.step, self.state.total_steps, layer.number, len(self.state.layers))

    def _check_at_work(self) -> None:
        if not self.at_work:
            raise UsageError("this pruner is not at work: call prepare(model, targets, total_steps=...) first")

    @torch.no_grad()
    def _take_update(self, layer: PrunedLayer) -> None:
        """Take the trained weights from the optimizer."""
        layer.reset_momentum &= not layer.in_update
        if layer.dense is not None:
            if layer.in_update:
                layer.dense.copy_(layer.weight)
            else:
                self._check_untouched(layer)
        elif layer.mask is not None:  # earlier momentum has moved the dropped weights
            layer.weight.copy_(_fade(layer.weight, layer.mask, 0.0))
        layer.in_update = False

    @torch.no_grad()
    def _advance(self) -> None:
        """Draw due masks and write the next forward's weights. Nothing changes if a mask cannot be drawn."""
        layers = self.state.layers.values()
        stages = [self.stage(layer.target, self._get_moment(layer)) for layer in layers]
        drawn = [
            self._draw_mask(layer, stage.target)
            if stage.target is not None and (stage.redraw or layer.drawn_for != stage.target)
            else None
            for layer, stage in zip(layers, stages, strict=True)
        ]
        for layer, stage, mask in zip(layers, stages, drawn, strict=True):
            if stage.target is None:
                layer.mask = layer.drawn_for = None
            elif mask is not None:
                self._set_mask(layer, stage.target, mask)
            if stage.last_mask:
                layer.gradients.clear()
            layer.reset_momentum |= stage.reset_momentum
            self._write_forward_weights(layer, stage)

    def _draw_mask(self, layer: PrunedLayer, target: LayerTarget) -> Tensor:
        """Return a new mask (m, k), that of rank 0."""
        try:
            mask = self.draw(layer, target)
        except (BadData, ValueError, ArithmeticError) as error:
            raise BadData(f"layer {layer.name}, after {self.state.step} steps: {error}") from error
        if self.state.group is not None:
            bits = mask.to(torch.uint8).contiguous()
            dist.broadcast(bits, dist.get_global_rank(self.state.group, 0), group=self.state.group)
            mask = bits.bool()
        return mask

    def _set_mask(self, layer: PrunedLayer, target: LayerTarget, mask: Tensor) -> None:
        """Give a layer a new mask."""
        if not self.keeps_dense:
            weight = self.score.compensate(as_matrix(layer.module, layer.values), _stack_gradients(layer), mask)
            layer.weight.copy_(as_weight(layer.module, weight))
        layer.mask, layer.drawn_for = as_weight(layer.module, mask).contiguous(), target

    @torch.no_grad()
    def _write_forward_weights(self, layer: PrunedLayer, stage: Stage) -> None:
        """Write the forward's weights into the parameter."""
        if layer.mask is not None:
            layer.weight.copy_(_fade(layer.values, layer.mask, stage.fade))
        elif layer.dense is not None:
            layer.weight.copy_(layer.dense)
        layer.version = layer.weight._version

    def _check_untouched(self, layer: PrunedLayer) -> None:
        """Raise UsageError if the parameter is not what `_write_forward_weights` wrote.

        Only a torch optimizer, whose step has a hook, may change it.
        """
        if layer.weight._version == layer.version or layer.dense is None:
            return
        stage = self.stage(layer.target, self._get_moment(layer))
        shown = layer.dense if layer.mask is None else _fade(layer.dense, layer.mask, stage.fade)
        if not torch.equal(layer.weight, shown):
            raise UsageError(
                f"layer {layer.name}: its weight was changed, but not by a torch.optim.Optimizer that this pruner "
                "sees; load checkpoints of model and pruner together, and train with a torch optimizer"
            )

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare the layers for an optimizer's step; torch calls it, and uses the arguments that it returns.

        An optimizer that another one steps, as in ZeroRedundancyOptimizer and Lookahead, makes part of its update.
        """
        layers = self._layers_of(optimizer)
        running = self.state.running_optimizers
        if running and running[0] is not optimizer and set(layers) <= set(self._layers_of(running[0])):
            running.append(optimizer)
            _reset_momentum([layer for layer in layers if layer.in_update], optimizer)
            return None
        for layer in layers:
            if layer.in_update:
                raise UsageError(
                    f"layer {layer.name}: call pruner.step() after every optimizer.step(), and only then"
                )
        closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not layers:
            return None
        self.state.running_optimizers = [optimizer]
        if closure is None:
            self._restore_dense(layers, optimizer)
            return None

        def forward_and_backward() -> Any:
            for layer in layers:
                if layer.in_update:  # an optimizer may call it several times
                    self._take_update(layer)
                    self._write_forward_weights(layer, self.stage(layer.target, self._get_moment(layer)))
            loss = closure()
            self._restore_dense(layers, optimizer)
            return loss

        return (args[0], *args[2:]), {**kwargs, "closure": forward_and_backward}

    def _layers_of(self, optimizer: Optimizer) -> list[PrunedLayer]:
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [layer for layer in self.state.layers.values() if id(layer.weight) in owned]

    @torch.no_grad()
    def _restore_dense(self, layers: Iterable[PrunedLayer], optimizer: Optimizer) -> None:
        """Write the trained weights into the parameter, and their gradient into its gradient."""
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the step itself
        if found_inf is not None and float(found_inf) > 0:
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales the gradients itself
        for layer in layers:
            stage = self.stage(layer.target, self._get_moment(layer))
            gradient = layer.weight.grad
            if layer.dense is not None:
                self._check_untouched(layer)
                layer.weight.copy_(layer.dense)
            if gradient is not None:
                self.observe(layer, gradient if scale is None else gradient / scale)
                if layer.mask is not None:
                    _convert_gradient(gradient, layer.mask, stage, layer.values, scale)
                if self.score.gradients and not stage.last_mask:
                    layer.gradients.append(gradient.clone() if scale is None else gradient / scale)
            layer.in_update = True
        for each in self.state.running_optimizers:
            _reset_momentum(layers, each)
        self.before_update(optimizer)


def _reset_momentum(layers: Iterable[PrunedLayer], optimizer: Optimizer) -> None:
    """Start the momentum of those layers from zero that ask for it."""
    for layer in layers:
        for name in ("momentum_buffer", "exp_avg") if layer.reset_momentum else ():
            if torch.is_tensor(buffer := optimizer.state[layer.weight].get(name)):
                buffer.zero_()


def _convert_gradient(gradient: Tensor, mask: Tensor, stage: Stage, dense: Tensor, scale: Tensor | None) -> None:
    """Convert the gradient of the forward's weights to that of the dense weights, in place."""
    if stage.backward == 0:
        gradient.masked_fill_(~mask, 0.0)
    elif stage.backward != 1:
        gradient.copy_(torch.where(mask, gradient, stage.backward * gradient))
    if stage.penalty:
        penalty = stage.penalty if scale is None else stage.penalty * scale
        gradient.add_(torch.where(mask, 0.0, dense) * penalty)


def _fade(weight: Tensor, mask: Tensor, fade: float) -> Tensor:
    return torch.where(mask, weight, fade * weight if fade else 0.0)


def _get_mask(layer: PrunedLayer) -> Tensor:
    assert layer.mask is not None
    return layer.mask


def _stack_gradients(layer: PrunedLayer) -> Tensor:
    """Return the latest gradients as one tensor (gradients, m, k)."""
    rows = layer.values.new_empty(len(layer.gradients), *as_matrix(layer.module, layer.values).shape)
    for row, gradient in zip(rows, layer.gradients, strict=True):
        row.copy_(as_matrix(layer.module, gradient))
    return rows


def unwrap_model(model: nn.Module) -> tuple[nn.Module, Any]:
    """Return the user's module without torch.compile and DistributedDataParallel, and the latter's process group."""
    group = None
    while True:
        if isinstance(model, DistributedDataParallel):
            model, group = model.module, model.process_group
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model, group


_AT_WORK: weakref.WeakSet[Pruner] = weakref.WeakSet()


def _check_free(modules: Mapping[str, nn.Module]) -> None:
    """Raise UsageError if a pruner is at work on one of these layers: each would undo what the other does."""
    names = {id(module.weight): name for name, module in modules.items()}

    def list_taken() -> list[str]:
        layers = [layer for pruner in _AT_WORK for layer in pruner.state.layers.values()]
        return [names[id(layer.weight)] for layer in layers if id(layer.weight) in names]

    if list_taken():
        gc.collect()  # an unreachable pruner may wait in a cycle of references
    if found := list_taken():
        raise UsageError(f"layer {found[0]}: another pruner is at work on it: finish() or delete that one first")
