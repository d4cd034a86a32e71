"""The protocol of pruners: what any training loop does with them, against formulas written out."""

import copy
import gc
import io
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from latbench.errors import BadData, UsageError
from search.pruning.masks.layer_targets import LayerTarget, LayerTargets, build_erk_targets, resolve_targets
from search.pruning.saliency.fisher import MFAC, DynamicMFAC, WoodFisher
from search.pruning.saliency.scores import Score
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
from search.pruning.training.recipe import Recipe
from sparse_kernels.patterns import NM, BlockWise, ShflBW, Unstructured, VectorWise
from sparse_kernels.prunable_layers import weight_matrix

TARGETS = {"conv": ("vector:4", 0.75), "fc1": ("unstructured", 0.8), "fc2": ("nm:1:4", 0.75)}
STEPS = 20
METHODS: dict[str, Callable[[], Pruner]] = {
    "gmp": lambda: GMP(updates=4),
    "gmp_mfac": lambda: GMP(updates=2, score=MFAC(gradients=3, damping=1e-3)),
    "acdc": lambda: ACDC(warmup=0.1, period=0.1, last_dense=0.2, final=0.3),
    "ste": STE,
    "sr_ste": lambda: SRSTE(penalty=0.01),
    "rigl": lambda: RigL(every=4),
    "asp": lambda: ASP(dense=0.3),
    "mask_decay": MaskDecay,
    "mask_decay_exponential": lambda: MaskDecay(shape="exponential", backward="straight_through"),
    "structure_decay": StructureDecay,
    "step": lambda: STEP(earliest=0.2, latest=0.4, tolerance=0.0),
    "grow_and_prune": lambda: GrowAndPrune(partitions=3, rounds=1),
    "held": lambda: FixedMask(given_masks=given_masks()),
}
ON_DEVICES = METHODS | {
    "gmp_mfac_dynamic": lambda: GMP(updates=2, score=DynamicMFAC(gradients=3, damping=1e-3)),
    "gmp_woodfisher": lambda: GMP(begin=0.2, updates=2, initial=0.5, score=WoodFisher(gradients=3, damping=1e-3)),
}


def given_masks() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {name: weight_matrix(net().get_submodule(name)).shape for name in TARGETS}
    targets = resolve_targets(TARGETS, net())
    return {name: targets[name].mask(torch.rand(shapes[name], generator=generator)) for name in TARGETS}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.fc1 = nn.Linear(32, 12)
        self.fc2 = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(self.conv(x).relu().flatten(1)).tanh())


def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, 4, 4, generator=generator), torch.randn(8, 6, generator=generator)


def loss(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return mse_loss(model(x), y)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def train(model: nn.Module, pruner: Pruner, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
        pruner.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [adam, sgd])
def test_every_method_ends_at_its_targets_and_masks_hold_through_momentum_and_weight_decay(
    method: str, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    if method == "step":
        make = adam
    model, pruner = net(), METHODS[method]()
    keys = list(model.state_dict())
    parameters = list(model.parameters())
    optimizer = make(model)
    pruner.prepare(model, TARGETS, total_steps=STEPS)
    train(model, pruner, optimizer, 0, STEPS + 5)  # past the end too
    seen = [loss(model, 0).item(), pruner.masks]
    pruner.finish()
    assert seen[0] == loss(model, 0).item()
    masks = pruner.masks
    assert all(torch.equal(masks[name], seen[1][name]) for name in TARGETS)
    assert masks["conv"].sum() == 8 * 36 / 4
    assert bool((masks["conv"].view(2, 4, 36).sum(dim=1) % 4 == 0).all())
    assert masks["fc1"].sum() == round(0.2 * 12 * 32)
    assert bool((masks["fc2"].view(6, 3, 4).sum(dim=2) == 1).all())
    for name, mask in masks.items():
        weight = weight_matrix(model.get_submodule(name))
        assert bool((weight[~mask] == 0).all())
        assert bool((weight[mask] != 0).double().mean() > 0.9)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    Net().load_state_dict(model.state_dict())


@pytest.mark.parametrize("method", ON_DEVICES)
@pytest.mark.parametrize(("stop", "model_first"), [(3, True), (7, False), (13, True)])
def test_a_run_goes_on_bit_equal_from_a_checkpoint(method: str, stop: int, model_first: bool) -> None:
    goes_on_bit_equal(ON_DEVICES[method], TARGETS, stop, model_first)


@pytest.mark.parametrize("along", ["outputs", "both"])
@pytest.mark.parametrize("method", ["gmp", "ste", "rigl", "structure_decay"])
def test_a_run_under_masks_along_the_outputs_goes_on_bit_equal(method: str, along: str) -> None:
    half = LayerTarget(NM(2, 4), 0.5, along=along, exact=False)
    goes_on_bit_equal(METHODS[method], {"conv": half, "fc1": half}, stop=7, model_first=True)


def goes_on_bit_equal(make: Callable[[], Pruner], targets: LayerTargets, stop: int, model_first: bool) -> None:
    """transformers and Lightning load the model before callbacks prepare; a user may do so after."""
    whole, pruner = net(), make()
    pruner.prepare(whole, targets, total_steps=STEPS)
    optimizer = adam(whole)
    train(whole, pruner, optimizer, 0, stop)
    buffer = io.BytesIO()
    torch.save([whole.state_dict(), optimizer.state_dict(), pruner.state_dict()], buffer)
    train(whole, pruner, optimizer, stop, STEPS)
    pruner.finish()

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed, again = Net(), make()
    optimizer = adam(resumed)
    optimizer.load_state_dict(saved[1])
    if model_first:
        resumed.load_state_dict(saved[0])
    again.prepare(resumed, targets, total_steps=STEPS)
    again.load_state_dict(saved[2])
    if not model_first:
        resumed.load_state_dict(saved[0])
    train(resumed, again, optimizer, stop, STEPS)
    again.finish()
    assert same(whole, resumed)
    assert all(torch.equal(pruner.masks[name], again.masks[name]) for name in targets)


@pytest.mark.parametrize("method", METHODS)
def test_an_optimizer_made_after_prepare_does_the_same(method: str) -> None:
    results = []
    for early in (True, False):
        model, pruner = net(), METHODS[method]()
        optimizer = adam(model) if early else None
        pruner.prepare(model, TARGETS, total_steps=STEPS)
        train(model, pruner, optimizer or adam(model), 0, STEPS)
        pruner.finish()
        results.append(model)
    assert same(*results)


class Wrapped(torch.optim.Optimizer):
    """An optimizer that has another one make its updates, as ZeroRedundancyOptimizer and Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([parameter for group in inner.param_groups for parameter in group["params"]], {})

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        return self.inner.step(closure)


def trained_by(method: str, *, wrap: bool = False, closed: bool = False) -> nn.Module:
    """A net that the method pruned, its optimizer given a closure or not, in another optimizer or not."""
    model, pruner = net(), METHODS[method]()
    inner = adam(model)
    optimizer = Wrapped(inner) if wrap else inner
    pruner.prepare(model, TARGETS, total_steps=STEPS)
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            value = loss(model, step)
            value.backward()
            return value

        if closed:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        pruner.step()
    pruner.finish()
    return model


@pytest.mark.parametrize("method", METHODS)
def test_a_closure_does_the_same_as_a_backward_before_the_step(method: str) -> None:
    assert same(trained_by(method), trained_by(method, closed=True))


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("method", ["acdc", "asp", "gmp_mfac", "mask_decay", "rigl"])
def test_an_optimizer_in_another_one_makes_one_update_a_step(method: str, closed: bool) -> None:
    assert same(trained_by(method, closed=closed), trained_by(method, wrap=True, closed=closed))


def test_two_optimizers_of_the_same_layers_are_not_taken_for_one_in_the_other() -> None:
    model, pruner = net(), STE()
    pruner.prepare(model, TARGETS, total_steps=5)
    loss(model, 0).backward()
    adam(model).step()
    with pytest.raises(UsageError, match=r"call pruner.step\(\) after every optimizer.step\(\)"):
        sgd(model).step()


def test_an_optimizer_that_calls_its_closure_often_sees_the_masked_function() -> None:
    """LBFGS minimises the loss of the forward's weights, which it is shown anew at each call."""
    model, pruner = net(), STE()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    pruner.prepare(model, {"fc1": ("unstructured", 0.5)}, total_steps=5)
    densities = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        densities.append(int((model.fc1.weight != 0).sum()))
        value = loss(model, 0)
        value.backward()
        return value

    for _ in range(5):
        optimizer.step(closure)
        pruner.step()
    assert len(densities) > 5
    assert set(densities) == {12 * 32 // 2}


@pytest.mark.parametrize(
    ("pruner", "fade", "kept", "penalty"),
    [
        (STE(), 0.0, 1.0, 0.0),
        (SRSTE(penalty=0.3), 0.0, 1.0, 0.3),
        (MaskDecay(dense=0, final=0, rate=0.25), 0.75, 0.75, 0.0),
        (MaskDecay(dense=0, final=0, rate=0.25, backward="straight_through"), 0.75, 1.0, 0.0),
        (MaskDecay(dense=0, final=0, rate=0.25, shape="exponential"), math.exp(-0.25), math.exp(-0.25), 0.0),
        (StructureDecay(dense=0, final=0, stages=()), 0.0, 0.0, 0.0),
        (StructureDecay(dense=0, final=0, stages=(), backward="straight_through"), 0.0, 1.0, 0.0),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_two_steps_are_those_of_autograd_on_the_written_formula(
    pruner: Pruner, fade: float, kept: float, penalty: float
) -> None:
    """W~ = W (m + D (1 - m)); dropped weights get `kept` of the gradient by W~, and penalty W."""
    model = net()
    pruner.prepare(model, {"fc1": ("nm:2:4", 0.5)}, total_steps=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    train(model, pruner, optimizer, 0, 2)

    other = net()
    dense = other.fc1.weight.detach().clone()
    expected = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    for step in range(2):
        mask = torch.from_numpy(NM(2, 4).mask(dense.double().square().numpy(), 0.5))
        now = 1.0 if step == 0 and fade else fade
        share = 1.0 if step == 0 and fade else kept
        with torch.no_grad():
            other.fc1.weight.copy_(torch.where(mask, dense, now * dense))
        expected.zero_grad()
        loss(other, step).backward()
        gradient = other.fc1.weight.grad
        assert gradient is not None
        other.fc1.weight.grad = torch.where(mask, gradient, share * gradient + penalty * dense)
        with torch.no_grad():
            other.fc1.weight.copy_(dense)
        expected.step()
        dense = other.fc1.weight.detach().clone()
    found = pruner.state.layers["fc1"].dense
    assert found is not None
    torch.testing.assert_close(found, dense, rtol=1e-6, atol=1e-7)


def test_the_scaled_gradient_is_autograds_own() -> None:
    model = net()
    pruner = MaskDecay(dense=0, final=0, rate=0.25)
    pruner.prepare(model, {"fc1": ("nm:1:4", 0.75)}, total_steps=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, pruner, optimizer, 0, 2)  # D = 0.5 now, the weights as they were

    weight = net().fc1.weight.detach().requires_grad_()
    mask = torch.from_numpy(NM(1, 4).mask(weight.detach().double().square().numpy(), 0.75))
    other = net()
    x, y = batch(7)
    masked = weight * (mask + 0.5 * ~mask)
    mse_loss(torch.func.functional_call(other, {"fc1.weight": masked}, x), y).backward()

    optimizer.zero_grad()
    loss(model, 7).backward()
    optimizer.step()  # what the optimizer saw is left in the parameter's gradient
    torch.testing.assert_close(model.fc1.weight.grad, weight.grad, rtol=1e-6, atol=1e-8)


def test_accumulated_batches_make_one_step_with_one_penalty() -> None:
    whole, parts = net(), net()
    pruners = SRSTE(penalty=0.3), SRSTE(penalty=0.3)
    both = []
    for model, pruner in zip((whole, parts), pruners, strict=True):
        pruner.prepare(model, TARGETS, total_steps=3)
        both.append(sgd(model))
    for step in range(3):
        x, y = batch(step)
        both[0].zero_grad()
        mse_loss(whole(x), y).backward()
        both[1].zero_grad()
        for half in range(2):
            (mse_loss(parts(x[4 * half : 4 * half + 4]), y[4 * half : 4 * half + 4]) / 2).backward()
        for optimizer, pruner in zip(both, pruners, strict=True):
            optimizer.step()
            pruner.step()
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_changes_nothing_and_a_skipped_step_keeps_the_weights(fused: bool) -> None:
    plain, scaled = net(), net()
    pruners = SRSTE(penalty=0.3), SRSTE(penalty=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    both = [torch.optim.SGD(model.parameters(), lr=0.1, fused=fused) for model in (plain, scaled)]
    for model, pruner in zip((plain, scaled), pruners, strict=True):
        pruner.prepare(model, TARGETS, total_steps=4)
    for step in range(3):
        for optimizer in both:
            optimizer.zero_grad()
        loss(plain, step).backward()
        both[0].step()
        scaler.scale(loss(scaled, step)).backward()
        scaler.step(both[1])
        scaler.update()
        for pruner in pruners:
            pruner.step()
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    before = copy.deepcopy(scaled.state_dict())
    both[1].zero_grad()
    scaler.scale(loss(scaled, 3) * math.inf).backward()
    scaler.step(both[1])
    scaler.update()
    pruners[1].step()
    assert all(torch.equal(before[name], value) for name, value in scaled.state_dict().items())


@pytest.mark.parametrize("method", METHODS)
def test_a_fused_optimizer_that_skips_a_step_itself_is_as_if_it_had_not_been_called(method: str) -> None:
    """GradScaler hands its scale and what it found to a fused optimizer, whose step is called all the same.

    Scales are powers of two, so that unscaled gradients are bit-equal. Skipped are steps in which gradients are
    looked at: before RigL's update and M-FAC's mask, in STEP's dense and masked phase.
    """
    plain, scaled = net(), net()
    pruners = METHODS[method](), METHODS[method]()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    both = [torch.optim.AdamW(model.parameters(), lr=0.02, fused=True) for model in (plain, scaled)]
    for model, pruner in zip((plain, scaled), pruners, strict=True):
        pruner.prepare(model, TARGETS, total_steps=STEPS)
    for step in range(STEPS):
        skipped = step in (3, 4, 10)
        for optimizer in both:
            optimizer.zero_grad()
        if not skipped:
            loss(plain, step).backward()
            both[0].step()
        before = copy.deepcopy(scaled.state_dict())
        scaler.scale(loss(scaled, step) * (math.inf if skipped else 1)).backward()
        scaler.step(both[1])
        scaler.update()
        if skipped:
            assert all(torch.equal(before[name], value) for name, value in scaled.state_dict().items())
        for pruner in pruners:
            pruner.step()
    for pruner in pruners:
        pruner.finish()
    assert same(plain, scaled)
    assert all(torch.equal(pruners[0].masks[name], pruners[1].masks[name]) for name in TARGETS)


@pytest.mark.parametrize("method", ON_DEVICES)
def test_nothing_is_made_on_torchs_default_device(method: str) -> None:
    """A model on a GPU: whatever does not follow the weights' device is elsewhere, as it is on "meta" here."""
    models = []
    for default in ("cpu", "meta"):
        model, pruner = net(), ON_DEVICES[method]()
        optimizer = adam(model)
        with torch.device(default):
            pruner.prepare(model, TARGETS, total_steps=STEPS)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()
            with torch.device(default):
                pruner.step()
        with torch.device(default):
            pruner.finish()
        models.append(model)
    assert same(*models)


@pytest.mark.parametrize("pruner", [ASP(), GMP(initial=0.5), STE()], ids=["asp", "gmp", "ste"])
def test_a_mask_that_cannot_be_drawn_leaves_the_model_as_it_was(pruner: Pruner) -> None:
    model = net()
    with torch.no_grad():
        model.fc2.weight[0, 0] = torch.nan  # the last layer: the others' masks are drawn by then
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BadData, match="layer fc2, after 0 steps: the weights hold NaN"):
        pruner.prepare(model, TARGETS, total_steps=STEPS)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items() if name != "fc2.weight")
    assert not pruner.at_work


@pytest.mark.parametrize("score", [MFAC(), WoodFisher(), DynamicMFAC()], ids=lambda score: type(score).__name__)
def test_a_mask_that_is_due_before_any_gradient_is_refused_where_its_score_needs_some(score: Score) -> None:
    due: tuple[type[Pruner], ...] = (ASP, STE, SRSTE, GrowAndPrune)
    for pruner in (*(kind(score=score) for kind in due), GMP(initial=0.5, score=score), GMP(end=0.0, score=score)):
        model = net()
        with pytest.raises(UsageError, match=f"before the first step, when .* for {type(score).__name__}: let"):
            pruner.prepare(model, TARGETS, total_steps=STEPS)
        assert same(model, net()) and not pruner.at_work
    for fine in (ASP(dense=0.1, score=score), GMP(score=score), GMP(begin=0.1, initial=0.5, score=score)):
        fine.prepare(net(), TARGETS, total_steps=STEPS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("method", ON_DEVICES)
def test_on_a_gpu_every_method_trains_under_amp(method: str) -> None:
    model, pruner = net().cuda(), ON_DEVICES[method]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)  # too large at first: steps are skipped
    pruner.prepare(model, TARGETS, total_steps=STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        with torch.autocast("cuda", torch.float16):
            value = mse_loss(model(x.cuda()), y.cuda())
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        pruner.step()
    pruner.finish()
    assert pruner.masks["fc1"].sum() == round(0.2 * 12 * 32)
    for name, mask in pruner.masks.items():
        weight = weight_matrix(model.get_submodule(name))
        assert bool(torch.isfinite(weight).all())
        assert bool((weight[~mask] == 0).all())


def test_bfloat16_weights_are_pruned_too() -> None:
    model, pruner = nn.Linear(16, 8).bfloat16(), STE()
    pruner.prepare(model, {"": ("nm:2:4", 0.5)}, total_steps=1)
    optimizer = sgd(model)
    model(torch.ones(1, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    pruner.step()
    pruner.finish()
    assert model.weight.dtype == torch.bfloat16
    assert (model.weight != 0).sum() == 64


def test_evaluation_and_checkpoints_between_steps_see_the_pruned_function() -> None:
    model, pruner = net(), STE()
    pruner.prepare(model, TARGETS, total_steps=9)
    train(model, pruner, adam(model), 0, 4)
    for name, mask in pruner.masks.items():
        assert bool((weight_matrix(model.get_submodule(name))[~mask] == 0).all())
    plain = Net()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(batch(0)[0]), model(batch(0)[0]))


def test_a_layer_has_one_pruner_at_a_time() -> None:
    model, first, second = net(), STE(), STE()
    first.prepare(model, TARGETS, total_steps=5)
    with pytest.raises(UsageError, match="layer conv: another pruner is at work on it"):
        second.prepare(model, TARGETS, total_steps=5)
    second.prepare(copy.deepcopy(model), TARGETS, total_steps=5)  # other weights
    first.finish()
    third = STE()
    third.prepare(model, TARGETS, total_steps=5)
    forgotten = [third]
    forgotten.append(forgotten)  # type: ignore[arg-type]  # a cycle, which only the garbage collector ends
    del third, forgotten
    first.prepare(model, TARGETS, total_steps=5)


def test_misuse_is_refused_in_a_sentence() -> None:
    model, pruner = net(), STE()
    with pytest.raises(UsageError, match="not at work: call prepare"):
        pruner.step()
    pruner.prepare(model, TARGETS, total_steps=5)
    with pytest.raises(UsageError, match="at work already"):
        pruner.prepare(model, TARGETS, total_steps=5)
    optimizer = adam(model)
    loss(model, 0).backward()
    optimizer.step()
    with pytest.raises(UsageError, match=r"conv: save a checkpoint after pruner.step"):
        pruner.state_dict()
    with pytest.raises(UsageError, match=r"layer conv: call pruner.step\(\) after every optimizer.step\(\)"):
        optimizer.step()
    pruner.step()
    with torch.no_grad():
        model.fc1.weight += 1
    with pytest.raises(UsageError, match="layer fc1: its weight was changed, but not by a torch"):
        optimizer.step()


def test_a_checkpoint_of_another_pruner_is_refused() -> None:
    pruner = STE()
    pruner.prepare(net(), TARGETS, total_steps=5)
    saved = pruner.state_dict()
    for other, targets, steps, what in (
        (SRSTE(), TARGETS, 5, "differs in pruner"),
        (STE(every=2), TARGETS, 5, "differs in pruner"),
        (STE(), TARGETS, 6, "differs in total_steps"),
        (STE(), {"fc1": ("unstructured", 0.7)}, 5, "differs in targets"),
    ):
        other.prepare(net(), targets, total_steps=steps)
        with pytest.raises(BadData, match=what):
            other.load_state_dict(saved)


@pytest.mark.parametrize("part", ["weight", "mask", "gradients"])
def test_a_checkpoint_of_layers_of_other_shapes_is_refused_before_anything_is_changed(part: str) -> None:
    """Of one row it would fit in any number of them."""
    model, pruner = net(), GMP(begin=0.1, score=MFAC(gradients=2))
    pruner.prepare(model, TARGETS, total_steps=STEPS)
    train(model, pruner, adam(model), 0, STEPS // 2 - 1)
    saved = pruner.state_dict()
    last = saved["layers"]["fc2"]
    last[part] = [last[part][0][:1]] if part == "gradients" else last[part][:1]
    other = GMP(begin=0.1, score=MFAC(gradients=2))
    resumed = net()
    other.prepare(resumed, TARGETS, total_steps=STEPS)
    with pytest.raises(BadData, match=r"of another model: layer fc2 is \(1, 12\) there and \(6, 12\) here"):
        other.load_state_dict(saved)
    assert same(resumed, net())
    assert other.state.step == 0


def test_weights_that_are_not_finite_are_said_with_layer_and_step() -> None:
    model, pruner = net(), STE()
    pruner.prepare(model, TARGETS, total_steps=5)
    optimizer = adam(model)
    loss(model, 0).backward()
    optimizer.step()
    with torch.no_grad():
        model.fc2.weight[0, 0] = torch.nan
    with pytest.raises(BadData, match="layer fc2, after 1 steps: the weights hold NaN"):
        pruner.step()


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        ({"fc9": ("unstructured", 0.5)}, "no layer 'fc9': it has conv, fc1, fc2"),
        ({"": ("unstructured", 0.5)}, "a Net has no sparse kernel"),
        ({"fc1": ("nm:2:4", 0.75)}, "layer fc1: nm:2:4 has sparsity 0.5 and no other, not 0.75"),
        ({"fc1": ("nm:4:2", 0.5)}, "layer fc1: an N:M pattern keeps fewer"),
        ({"conv": ("nm:2:8", 0.75)}, "layer conv: .*multiples of 8"),
        ({"fc1": ("block:64x64", 0.5)}, "layer fc1: one block of block:64x64 covers the whole 12x32 layer"),
        (
            {"fc2": LayerTarget(NM(2, 8), 0.75, along="both")},
            "layer fc2: transposable nm:2:8 needs both sides in mult",
        ),
        ({"fc1": ("dense", 0.0)}, "no layer is to be pruned"),
    ],
)
def test_targets_that_do_not_fit_are_refused_by_name(targets: dict[str, tuple[str, float]], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        STE().prepare(net(), targets, total_steps=5)


@pytest.mark.parametrize("other", [nn.Linear(32, 12), nn.Embedding(12, 32)], ids=lambda other: type(other).__name__)
def test_a_weight_that_another_module_has_too_is_not_pruned(other: nn.Module) -> None:
    """Such as an output layer's, which is the embedding: whether the other is to be pruned or not."""
    model = net()
    model.other = other
    other.weight = model.fc1.weight
    for names in [["fc1"], *([["fc1", "other"]] if isinstance(other, nn.Linear) else [])]:
        with pytest.raises(UsageError, match="layer fc1: its weight is shared with other, where it would be pruned"):
            resolve_targets({name: (Unstructured(), 0.5) for name in names}, model)
    assert list(resolve_targets({"fc2": (Unstructured(), 0.5)}, model)) == ["fc2"]


def test_a_forgotten_pruner_leaves_optimizers_alone() -> None:
    model = net()
    pruner = STE()
    pruner.prepare(model, TARGETS, total_steps=5)
    hooks = optimizers._global_optimizer_pre_hooks
    count = len(hooks)
    del pruner
    gc.collect()
    assert len(hooks) == count - 1


@pytest.mark.parametrize("pattern", [BlockWise(2, 4), VectorWise(4), ShflBW(4), Unstructured()], ids=str)
def test_whole_units_fade(pattern: BlockWise | VectorWise | ShflBW | Unstructured) -> None:
    """Mask decay on vectors, blocks and row groups: what fades in the forward is a mask of the pattern."""
    model, pruner = net(), MaskDecay(dense=0, final=0.5, rate=0.25)
    pruner.prepare(model, {"fc1": (pattern, 0.75)}, total_steps=8)
    optimizer = sgd(model)
    train(model, pruner, optimizer, 0, 2)
    layer = pruner.state.layers["fc1"]
    assert layer.dense is not None
    shown = model.fc1.weight.detach() / layer.dense
    assert set(shown.flatten().tolist()) == {0.5, 1.0}
    mask = pattern.mask(layer.dense.double().square().numpy(), 0.75)
    assert torch.equal(shown == 1, torch.from_numpy(mask))
    train(model, pruner, optimizer, 2, 8)
    pruner.finish()
    assert (model.fc1.weight != 0).sum() == 12 * 32 / 4


def ranks(rank: int, folder: str) -> None:
    """One of two ranks with data of its own."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for method, make in METHODS.items():
        model = nn.parallel.DistributedDataParallel(net())
        pruner = RigL(every=2, seed=rank) if method == "rigl" else make()  # with another seed they would differ
        pruner.prepare(model, TARGETS, total_steps=STEPS)
        optimizer = adam(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, 10 * step + rank).backward()
            optimizer.step()
            pruner.step()
        pruner.finish()
        found[method] = [pruner.masks, model.module.state_dict()]
    torch.save(found, f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_that_train_together_have_the_same_masks(tmp_path: Path) -> None:
    processes = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)]) for rank in range(2)]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:  # a rank that failed leaves the other waiting for it
            process.kill()
            process.wait()
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    for method in METHODS:
        (masks, weights), (others, other_weights) = first[method], second[method]
        assert all(torch.equal(masks[name], others[name]) for name in TARGETS), method
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights), method
        assert (net().fc1.weight != weights["fc1.weight"]).any()


if __name__ == "__main__":
    ranks(int(sys.argv[1]), sys.argv[2])


@pytest.mark.parametrize("steps", [None, 10.5, "10", 0, True])
def test_a_number_of_steps_that_is_none_is_refused(steps: Any) -> None:
    with pytest.raises(UsageError, match="a whole number of optimizer steps, at least one, not "):
        GMP().prepare(nn.Sequential(nn.Linear(8, 8)), {"0": ("unstructured", 0.5)}, total_steps=steps)


@pytest.mark.parametrize("entry", ["nm:1:4", ("unstructured", "0.5"), ("unstructured",), (0.5, "unstructured"), 0.5])
def test_a_target_that_is_none_is_refused_by_name(entry: Any) -> None:
    with pytest.raises(UsageError, match=r"layer 0: a target is a pattern and a sparsity, .*, not "):
        resolve_targets({"0": entry}, nn.Sequential(nn.Linear(8, 8)))


@pytest.mark.parametrize("sparsity", [-1.0, 1.0])
def test_densities_by_erdos_and_renyi_are_of_a_share_and_of_patterns_that_have_many(sparsity: float) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(UsageError, match="sparsity is the share of weights dropped"):
        build_erk_targets(model, "unstructured", sparsity)
    with pytest.raises(UsageError, match="nm:1:4 has one sparsity"):
        build_erk_targets(model, "nm:1:4", 0.75)


@pytest.mark.parametrize("lost", ["mask", "weight", "layers", "more"])
def test_a_state_that_lacks_something_is_refused(lost: str) -> None:
    model, pruner = nn.Sequential(nn.Linear(8, 8)), GMP()
    pruner.prepare(model, {"0": ("unstructured", 0.5)}, total_steps=10)
    state = pruner.state_dict()
    (state if lost in state else state["layers"]["0"]).pop(lost)
    with pytest.raises(BadData, match=f"lacks {lost}"):
        pruner.load_state_dict(state)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="the first below 1"):
        MaskDecay(dense=1.0, final=0.0)
    with pytest.raises(UsageError, match="tighten from one to the next, not nm:1:2, nm:15:16"):
        StructureDecay(stages=("nm:1:2", "nm:15:16"))
    with pytest.raises(UsageError, match=r"last stage nm:1:16 keeps less than the target nm:2:4"):
        StructureDecay(stages=("nm:1:16",)).list_structures(LayerTarget(NM(2, 4), 0.5))
    with pytest.raises(UsageError, match="warmup is part of the 10 steps"):
        Recipe(steps=10, warmup=1000)
    with pytest.raises(UsageError, match="momentum must be a number of at least 0 and below 1"):
        Recipe(momentum=1.5)
