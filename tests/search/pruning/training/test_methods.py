"""The methods' schedules by hand, and what is drawn when."""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from latbench.errors import BadData, UsageError
from search.pruning.masks.layer_targets import LayerTarget, build_erk_targets, build_uniform_targets, resolve_targets
from search.pruning.saliency.fisher import MFAC, DynamicMFAC, WoodFisher
from search.pruning.saliency.scores import Score
from search.pruning.training.methods.acdc import ACDC
from search.pruning.training.methods.asp import ASP
from search.pruning.training.methods.fixed_mask import FixedMask
from search.pruning.training.methods.gmp import GMP, compute_cubic_sparsity
from search.pruning.training.methods.grow_and_prune import GrowAndPrune
from search.pruning.training.methods.mask_decay import MaskDecay
from search.pruning.training.methods.rigl import RigL, drop_smallest_units
from search.pruning.training.methods.sr_ste import SRSTE
from search.pruning.training.methods.ste import STE
from search.pruning.training.methods.step import STEP
from search.pruning.training.methods.structure_decay import StructureDecay
from search.pruning.training.pruner import Moment, Stage
from sparse_kernels.patterns import NM, BlockWise, ShflBW, Unstructured, VectorNM, VectorWise

HALF = LayerTarget(NM(2, 4), 0.5)
THIN = LayerTarget(NM(1, 16), 15 / 16)
SPARSE = LayerTarget(Unstructured(), 0.9)


def linear(m: int = 16, k: int = 32, seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(k, m, bias=False)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_the_cubic_schedule_rises_fast_then_slowly_and_ends_exactly() -> None:
    sparsities = [compute_cubic_sparsity(step, 10, 110, 0.9) for step in range(130)]
    assert sparsities[:11] == [0.0] * 11
    assert sparsities[110:] == [0.9] * 20
    assert sparsities[60] == pytest.approx(0.9 - 0.9 / 8)
    steps = np.diff(sparsities[10:111])
    assert (steps > 0).all()
    assert (np.diff(steps) < 0).all()


def test_gradual_pruning_updates_when_due_and_never_revives() -> None:
    model, gmp = linear(), GMP(begin=0.1, end=0.6, updates=5)
    gmp.prepare(model, {"": ("unstructured", 0.9)}, total_steps=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    kept: list[Tensor] = []
    for step in range(20):
        run(model, optimizer, step)
        gmp.step()
        kept.append(gmp.masks.get("", torch.ones(16, 32, dtype=torch.bool)))
    counts = [int(mask.sum()) for mask in kept]
    expected = [512 - round(512 * 0.9 * (1 - (1 - u / 5) ** 3)) for u in range(6)]
    # Updates are due after 2 (nothing yet), 4, 6, 8, 10 and 12 steps.
    assert counts == [*[512] * 3, *(n for n in expected[1:5] for _ in range(2)), *[expected[5]] * 9]
    assert expected[5] == round(0.1 * 512)
    assert all(bool((later <= earlier).all()) for earlier, later in itertools.pairwise(kept))


@pytest.mark.parametrize("pattern", [NM(1, 4), VectorNM(8, 1, 4)], ids=str)
def test_n_of_m_falls_step_by_step_to_its_one_sparsity(pattern: NM | VectorNM) -> None:
    gmp = GMP(end=1.0, updates=40)
    targets = [gmp.stage(LayerTarget(pattern, 0.75), Moment(step, 40)).target for step in range(41)]
    keeps = [4 if target is None else target.pattern.keep for target in targets]  # type: ignore[union-attr]
    assert list(dict.fromkeys(keeps)) == sorted(set(keeps), reverse=True) == [4, 3, 2, 1]


@pytest.mark.parametrize(
    "score", [MFAC(gradients=5), WoodFisher(gradients=5), DynamicMFAC(gradients=5)], ids=lambda s: type(s).__name__
)
def test_fisher_scores_prune_and_make_up_as_the_dense_inverse_says(score: Score) -> None:
    """F of the latest five gradients; w^2 / (2 [F^-1]_qq) decides, the kept move to the least of dw F dw."""
    model, gmp = linear(4, 32), GMP(begin=0.5, end=0.7, updates=1, score=score)
    gmp.prepare(model, {"": ("unstructured", 0.25)}, total_steps=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    weight = model.weight.detach().clone().double().flatten()
    gradients = []
    for step in range(7):
        assert len(gmp.state.layers[""].gradients) == min(step, 5)
        run(model, optimizer, step)
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.double().flatten())
        gmp.step()
    rows = torch.stack(gradients[-5:])
    fisher = score.damping * torch.eye(128, dtype=torch.float64) + rows.T @ rows / 5  # type: ignore[attr-defined]
    cost = weight**2 / (2 * torch.linalg.inv(fisher).diagonal())
    dropped = torch.zeros(128, dtype=torch.bool)
    dropped[cost.argsort()[:32]] = True
    moved = torch.zeros_like(weight)
    moved[~dropped] = torch.linalg.solve(fisher[~dropped][:, ~dropped], fisher[~dropped] @ weight)
    assert torch.equal(~gmp.masks[""].flatten(), dropped)
    torch.testing.assert_close(model.weight.detach().double().flatten(), moved, rtol=1e-4, atol=1e-4)
    run(model, optimizer, 7)  # no mask comes any more, and no gradient is kept for one
    assert not gmp.state.layers[""].gradients


def test_acdc_takes_the_papers_turns() -> None:
    """ResNet50, 100 epochs: dense to 10; 5 and 5 in turns; dense 75 to 85; compressed to the end."""
    acdc = ACDC()
    expected = [(0, False), *((e, e % 10 == 0) for e in range(10, 76, 5)), (85, True)]
    assert acdc.phases(100) == expected
    stages = [acdc.stage(SPARSE, Moment(step, 100)) for step in range(101)]
    assert stages[9].target is None
    assert stages[10] == stages[14] == Stage(SPARSE, fixed_mask=True)
    assert stages[85] == stages[100] == Stage(SPARSE, fixed_mask=True, last_mask=True)
    assert [step for step in range(101) if stages[step].reset_momentum] == [*range(15, 76, 10)]
    assert ACDC(warmup=0).phases(100)[0] == (0, True)


@pytest.mark.parametrize("skipped", [15, None])
def test_acdc_hits_its_sparsity_in_every_compressed_phase_and_forgets_momentum(skipped: int | None) -> None:
    model, acdc = linear(), ACDC()
    acdc.prepare(model, {"": ("unstructured", 0.9)}, total_steps=100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    masks = {}
    for step in range(100):
        before = model.weight.detach().clone()
        if step != skipped:  # as a GradScaler may
            run(model, optimizer, step)
        if step == (15 if skipped is None else 16):  # the first dense update: it is the gradient alone
            assert model.weight.grad is not None
            torch.testing.assert_close(model.weight.detach(), before - 0.1 * model.weight.grad)
        acdc.step()
        if acdc.masks:
            masks[step + 1] = acdc.masks[""]
            assert (model.weight != 0).sum() == round(0.1 * 512)
    assert sorted(masks) == [s for s in range(1, 101) if (10 <= s < 75 and s // 5 % 2 == 0) or s >= 85]
    assert torch.equal(masks[85], masks[100])
    assert not torch.equal(masks[10], masks[100])


def test_asp_keeps_one_mask_of_the_trained_weights() -> None:
    model, asp = linear(), ASP()
    expected = NM(2, 4).mask(model.weight.detach().double().square().numpy(), 0.5)
    asp.prepare(model, {"": HALF}, total_steps=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(5):
        run(model, optimizer, step)
        assert model.weight.grad is not None
        assert bool((model.weight.grad[~torch.from_numpy(expected)] == 0).all())
        asp.step()
    asp.finish()
    assert np.array_equal(asp.masks[""].numpy(), expected)
    assert np.array_equal(model.weight.detach().numpy() != 0, expected)


@pytest.mark.parametrize("pattern", ["shflbw:4", "nm:2:4"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)], ids=["adamw", "sgd"])
def test_given_masks_are_held_bit_for_bit(
    pattern: str, make: Callable[..., torch.optim.Optimizer], rng: np.random.Generator
) -> None:
    """Masks that no drawing from the weights would give, with kept weights that are zero."""
    model = linear()
    target = resolve_targets({"": (pattern, 0.5)}, model)[""]
    mask = target.mask(torch.from_numpy(rng.random((16, 32)))).numpy()
    with torch.no_grad():
        model.weight[:, ::3] = 0
        model.weight.mul_(torch.from_numpy(mask))
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.5)
    run(model, optimizer, 99)  # momentum from before the mask, of dropped weights too
    held = FixedMask(given_masks={"": mask})
    held.prepare(model, {"": target}, total_steps=5)
    for step in range(5):
        run(model, optimizer, step)
        held.step()
        assert np.array_equal(model.weight.detach().numpy() != 0, mask)
    held.finish()
    assert np.array_equal(held.masks[""].numpy(), mask)


def test_a_checkpoint_of_other_masks_than_the_given_is_refused() -> None:
    mask = HALF.mask(torch.rand(16, 32, generator=torch.Generator().manual_seed(0)))
    held, other = FixedMask(given_masks={"": mask}), FixedMask(given_masks={"": ~mask})
    model = linear()
    held.prepare(linear(), {"": HALF}, total_steps=5)
    other.prepare(model, {"": HALF}, total_steps=5)
    held.load_state_dict(held.state_dict())
    weight = model.weight.detach().clone()
    with pytest.raises(BadData, match="the checkpoint has another mask than the given one"):
        other.load_state_dict(held.state_dict())
    assert torch.equal(model.weight, weight)
    assert torch.equal(other.masks[""], ~mask)


def test_masks_that_do_not_fit_are_refused_by_name() -> None:
    mask = torch.ones(16, 32, dtype=torch.bool)
    for given, sentence in (
        ({}, "layer 0: no mask is given for it"),
        ({"0": mask, "1": mask}, "layer 1: a mask is given for it, but no target"),
        ({"0": mask.T}, r"layer 0: its mask must be bool \(16, 32\), not torch.bool \(32, 16\)"),
        ({"0": mask.float()}, r"layer 0: its mask must be bool .*, not torch.float32"),
    ):
        with pytest.raises(UsageError, match=sentence):
            FixedMask(given_masks=given).prepare(nn.Sequential(linear(), linear()), {"0": HALF}, total_steps=1)


def test_masks_of_straight_through_are_drawn_every_so_often() -> None:
    stages = [STE(dense=0.2, every=3).stage(HALF, Moment(step, 20)) for step in range(20)]
    assert [stage.target is None for stage in stages] == [True] * 4 + [False] * 16
    assert [step for step in range(20) if stages[step].redraw] == [4, 7, 10, 13, 16, 19]
    assert SRSTE(dense=0.2).stage(HALF, Moment(3, 20)) == Stage()
    assert SRSTE().stage(HALF, Moment(3, 20)) == replace(STE().stage(HALF, Moment(3, 20)), penalty=2e-4)


@pytest.mark.parametrize(
    ("decay", "at"),
    [
        (MaskDecay(), lambda t: 1 - t / 70),
        (MaskDecay(rate=0.05), lambda t: max(0.0, 1 - 0.05 * t)),
        (MaskDecay(shape="exponential"), lambda t: 0.01 ** (t / 70)),
        (MaskDecay(shape="exponential", rate=1e-4), lambda t: math.exp(-1e-4 * t)),
    ],
    ids=["linear", "linear-rate", "exponential", "exponential-rate"],
)
def test_the_decays_clock_starts_after_the_dense_phase_and_ends_at_zero(decay: MaskDecay, at: object) -> None:
    stages = [decay.stage(HALF, Moment(step, 100)) for step in range(120)]
    assert all(stage.target is None for stage in stages[:10])
    assert [stage.fade for stage in stages[10:80]] == pytest.approx([at(t) for t in range(70)])  # type: ignore[operator]
    assert stages[10].fade == 1
    assert all(stage.fade == 0 for stage in stages[80:])
    assert all(stage.backward == stage.fade for stage in stages[10:])
    straight = replace(decay, backward="straight_through")
    assert all(straight.stage(HALF, Moment(step, 100)).backward == 1 for step in range(10, 120))


def test_structures_tighten_as_the_papers_do() -> None:
    def patterns(target: LayerTarget, **settings: object) -> list[str]:
        return [str(t.pattern) for t in StructureDecay(**settings).list_structures(target)]  # type: ignore[arg-type]

    assert patterns(THIN) == ["nm:15:16", "nm:8:16", "nm:4:16", "nm:2:16", "nm:1:16"]
    assert patterns(HALF) == ["nm:3:4", "nm:2:4"]
    assert patterns(LayerTarget(NM(3, 8), 5 / 8)) == ["nm:7:8", "nm:4:8", "nm:3:8"]
    assert patterns(LayerTarget(NM(1, 8), 7 / 8), stages="geometric") == ["nm:8:64", "nm:4:32", "nm:2:16", "nm:1:8"]
    assert patterns(LayerTarget(NM(1, 64), 63 / 64), stages="geometric") == ["nm:4:256", "nm:2:128", "nm:1:64"]
    assert patterns(THIN, stages=("nm:8:16",)) == ["nm:8:16", "nm:1:16"]
    vectors = LayerTarget(VectorNM(4, 1, 4), 0.75)
    assert patterns(vectors) == ["vectornm:4:3:4", "vectornm:4:2:4", "vectornm:4:1:4"]
    sparsities = [t.sparsity for t in StructureDecay().list_structures(LayerTarget(ShflBW(4), 0.9))]
    assert sparsities == [0.5, 0.75, 0.875, 0.9]
    with pytest.raises(UsageError, match="geometric structure decay is for N:M patterns, not unstructured"):
        StructureDecay(stages="geometric").list_structures(SPARSE)


def test_structures_that_a_layer_cannot_hold_are_refused_at_the_start() -> None:
    """Both sides of 16x32 are multiples of 4, of 16 too, but 16 is none of 32."""
    for stages, sentence in (
        ("geometric", r"layer : in structure decay's nm:8:32: transposable .* in multiples of 32, not 16x32"),
        (("nm:20:40",), r"in structure decay's nm:20:40: "),
    ):
        with pytest.raises(UsageError, match=sentence):
            StructureDecay(stages=stages).prepare(
                linear(), {"": LayerTarget(NM(1, 4), 0.75, along="both", exact=False)}, total_steps=10
            )


def test_a_mask_that_cannot_be_drawn_is_said_with_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LayerTarget, scores: Tensor) -> Tensor:
        raise ValueError("no such mask")

    monkeypatch.setattr(LayerTarget, "mask", fail)
    with pytest.raises(BadData, match="layer , after 0 steps: no such mask"):
        ASP().prepare(linear(), {"": HALF}, total_steps=10)


def test_a_checkpoint_of_exact_masks_is_not_one_of_quick_ones() -> None:
    saved, other = ASP(), ASP()
    saved.prepare(linear(), {"": LayerTarget(NM(2, 4), 0.5, along="both")}, total_steps=5)
    other.prepare(linear(), {"": LayerTarget(NM(2, 4), 0.5, along="both", exact=False)}, total_steps=5)
    with pytest.raises(BadData, match=r"differs in targets: .*nm:2:4 at 0.5 along both'.*along both, quick"):
        other.load_state_dict(saved.state_dict())


def test_structures_take_equal_shares_between_the_dense_and_the_final_phase() -> None:
    stages = [StructureDecay().stage(THIN, Moment(step, 100)) for step in range(110)]
    keeps = [None if stage.target is None else stage.target.pattern.keep for stage in stages]  # type: ignore[union-attr]
    assert keeps == [None] * 10 + [15] * 14 + [8] * 14 + [4] * 14 + [2] * 14 + [1] * 44
    assert all(stage.fade == stage.backward == 0 for stage in stages)


def test_partitions_take_turns_to_grow() -> None:
    method = GrowAndPrune(partitions=2, rounds=2, final=0.2)
    dense = [[method.stage(SPARSE, Moment(s, 10, layer, 3)).target is None for s in range(10)] for layer in range(3)]
    assert dense[0] == dense[1] == [True, True, False, False] * 2 + [False] * 2
    assert dense[2] == [False, False, True, True] * 2 + [False] * 2
    assert [s for s in range(10) if method.stage(SPARSE, Moment(s, 10, 0, 3)).reset_momentum] == [4]
    assert [s for s in range(10) if method.stage(SPARSE, Moment(s, 10, 2, 3)).reset_momentum] == [2, 6]


@pytest.mark.parametrize("pattern", ["unstructured", "nm:1:4", "vector:4", "block:4x4", "vectornm:4:1:4"])
def test_rigl_drops_the_smallest_and_grows_where_the_gradient_is_largest(pattern: str) -> None:
    model, rigl = linear(), RigL(every=2, until=1.0, alpha=0.5)
    rigl.prepare(model, {"": (pattern, 0.75)}, total_steps=8)
    before = rigl.masks[""]
    weight = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run(model, optimizer, 0)
    rigl.step()
    assert torch.equal(rigl.masks[""], before)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    gradient = torch.autograd.grad(model(x).square().mean(), model.weight)[0]
    run(model, optimizer, 1)
    rigl.step()
    after = rigl.masks[""]
    assert after.sum() == before.sum() == 512 // 4
    share = 0.25 * (1 + math.cos(math.pi * 2 / 8))
    left = drop_smallest_units(LayerTarget(Unstructured(), 0.75), before, weight.double().square(), share)
    if pattern == "unstructured":
        dropped = round(share * 128)
        assert left.sum() == 128 - dropped
        assert weight[before & ~left].abs().max() <= weight[left].abs().min()
        grown = after & ~left
        assert bool((after[left]).all())
        assert gradient[grown].abs().min() >= gradient[~left & ~after].abs().max()
    assert (after & ~before).sum() > 0
    assert bool((model.weight[after & ~before] == 0).all())  # what grows starts from zero
    assert torch.equal(model.weight[after & before], weight[after & before])


def test_rigl_refuses_row_groups() -> None:
    with pytest.raises(UsageError, match="RigL has no Shfl-BW"):
        RigL().prepare(linear(), {"": ("shflbw:4", 0.75)}, total_steps=4)


@pytest.mark.parametrize("exact", [True, False])
def test_rigl_keeps_what_it_did_not_drop_in_transposable_masks_too(exact: bool) -> None:
    """Three weights are left, and the best six to grow leave room for two of them only."""
    model, rigl = linear(4, 4), RigL(every=1, until=1.0, alpha=1.0)
    target = LayerTarget(NM(2, 4), 0.5, along="both", exact=exact)
    rigl.prepare(model, {"": target}, total_steps=100)
    layer, left = rigl.state.layers[""], torch.zeros(4, 4, dtype=torch.bool)
    left[[0, 0, 1], [0, 1, 0]] = True
    layer.mask = left.clone()
    layer.mask[[1, 2, 2, 3, 3], [2, 2, 3, 1, 3]] = True
    with torch.no_grad():
        model.weight.copy_(layer.mask * (0.1 + left))
    layer.squared_gradient = torch.zeros(4, 4, dtype=torch.float64)
    layer.squared_gradient[[0, 1, 2, 2, 3, 3], [2, 3, 0, 2, 1, 3]] = 1.0
    rigl.state.step = 42  # a share of 0.62 of eight goes
    drawn = rigl.draw(layer, target)
    assert bool(drawn[left].all())
    assert drawn.sum() == 8 if exact else drawn.sum() <= 8


def test_rigl_of_units_so_large_that_none_is_kept_keeps_none() -> None:
    model, rigl = linear(16, 32), RigL(every=1)
    rigl.prepare(model, {"": ("block:16x16", 0.9)}, total_steps=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        run(model, optimizer, step)
        rigl.step()
    rigl.finish()
    assert not rigl.masks[""].any()


def test_erk_densities_are_the_formulas_and_add_up() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(64, 128), nn.Linear(128, 2))
    targets = build_erk_targets(model, "unstructured", 0.8)
    sizes = {"0": (16, 8, 3, 3), "2": (128, 64), "3": (2, 128)}
    raw = {name: sum(size) / math.prod(size) for name, size in sizes.items()}
    assert "3" not in targets  # so thin that it stays dense
    assert targets["0"].density / targets["2"].density == pytest.approx(raw["0"] / raw["2"])
    kept = sum(math.prod(sizes[name]) * (targets[name].density if name in targets else 1) for name in sizes)
    assert kept == pytest.approx(0.2 * sum(map(math.prod, sizes.values())))


def test_uniform_targets_leave_out_what_is_excluded() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    assert build_uniform_targets(model, "nm:2:4", 0.5, exclude=["3"]) == {"0": HALF, "2": HALF}
    with pytest.raises(UsageError, match="no layer 'head' to exclude"):
        build_uniform_targets(model, "nm:2:4", 0.5, exclude=["head"])


@pytest.mark.parametrize("along", ["inputs", "outputs", "both"])
def test_groups_run_along_the_axis_that_is_asked_for(along: str) -> None:
    model, ste = linear(), STE()
    ste.prepare(model, {"": LayerTarget(NM(2, 4), 0.5, along=along)}, total_steps=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(model, optimizer, 0)
    ste.step()
    mask = ste.masks[""]
    rows, columns = mask.view(16, 8, 4).sum(dim=2), mask.view(4, 4, 32).sum(dim=1)
    assert bool((rows == 2).all()) == (along != "outputs")
    assert bool((columns == 2).all()) == (along != "inputs")


@pytest.mark.parametrize("k", [32, 30, 3])
def test_torch_draws_n_of_m_masks_as_the_pattern_does(k: int, rng: np.random.Generator) -> None:
    scores = rng.integers(0, 4, (6, k)).astype(np.float64)  # many ties
    for keep, of in ((1, 4), (2, 4), (3, 8), (5, 16)):
        expected = NM(keep, of).mask(scores, 1 - keep / of)
        found = LayerTarget(NM(keep, of), 1 - keep / of).mask(torch.from_numpy(scores))
        assert np.array_equal(found.numpy(), expected)


def test_step_freezes_adams_second_moments_and_makes_the_written_update() -> None:
    model, method = linear(), STEP(earliest=0.5, latest=0.5, penalty=0.1)
    method.prepare(model, {"": HALF}, total_steps=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        run(model, optimizer, step)
        method.step()
    state = optimizer.state[model.weight]
    second, first = state["exp_avg_sq"].clone(), state["exp_avg"].clone()
    for step in range(3, 5):
        layer = method.state.layers[""]
        assert layer.dense is not None
        dense, shown = layer.dense.clone(), model.weight.detach().clone()
        mask = NM(2, 4).mask(dense.double().square().numpy(), 0.5)
        assert torch.equal(shown, torch.where(torch.from_numpy(mask), dense, 0.0))
        run(model, optimizer, step)
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        gradient = torch.autograd.grad(nn.functional.linear(x, shown.requires_grad_()).square().mean(), shown)[0]
        gradient = gradient + 0.1 * torch.where(torch.from_numpy(mask), 0.0, dense)
        method.step()
        first = 0.9 * first + 0.1 * gradient
        corrected = first / (1 - 0.9 ** (step + 1))
        expected = dense * (1 - 0.01 * 0.1) - 0.01 * corrected / ((second / (1 - 0.999**3)).sqrt() + 1e-8)
        torch.testing.assert_close(layer.dense, expected)
        assert torch.equal(state["exp_avg_sq"], second)


def test_step_switches_once_adams_second_moments_settle() -> None:
    model, method = linear(), STEP(earliest=0.2, latest=0.8, tolerance=1e9)
    method.prepare(model, {"": HALF}, total_steps=10)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    masked = []
    for step in range(10):
        masked.append(bool(method.masks))
        run(model, optimizer, step)
        method.step()
    assert masked == [False] * 2 + [True] * 8  # any change is small enough, but not before a fifth
    assert method.state.method_state["switch"] == 2


def test_step_measures_how_much_v_changed_whichever_optimizer_holds_a_layer() -> None:
    model = nn.Sequential(linear(16, 32), linear(32, 16))
    method = STEP(earliest=0.5, latest=0.9, tolerance=0.0)
    method.prepare(model, {"0": HALF, "1": HALF}, total_steps=10)
    both = [torch.optim.Adam(model[i].parameters(), lr=0.01, weight_decay=0.1) for i in range(2)]
    before: list[Tensor] = []
    for step in range(3):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(x).square().mean().backward()
        for optimizer in both:
            optimizer.step()
        method.step()
        now = [adam.state[layer.weight]["exp_avg_sq"].clone() for adam, layer in zip(both, model, strict=True)]
        if before:
            change = sum(float((a - b).abs().sum()) for a, b in zip(now, before, strict=True)) / 1024
            assert method.state.method_state["changes"][-1] == pytest.approx(change)
        before = now
    assert len(method.state.method_state["changes"]) == 2
    for optimizer in both:
        optimizer.state_dict()  # which refuses what it does not own


def test_step_says_which_optimizers_it_takes() -> None:
    model, method = linear(), STEP()
    method.prepare(model, {"": HALF}, total_steps=10)
    with pytest.raises(UsageError, match=r"train with Adam or AdamW, not SGD"):
        run(model, torch.optim.SGD(model.parameters(), lr=0.01), 0)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: GMP(begin=0.6), "begins and ends within training"),
        (lambda: GMP(updates=0), "updated at least once"),
        (lambda: GMP(initial=1.0), r"initial sparsity lies in \[0, 1\)"),
        (lambda: ACDC(final=1.0), "take more than all steps"),
        (lambda: ACDC(period=0), "the period above 0"),
        (lambda: ASP(dense=2), "dense phase is a share"),
        (lambda: STE(every=0), "drawn every so many steps"),
        (lambda: SRSTE(penalty=-1), "not negative"),
        (lambda: MaskDecay(shape="cubic"), "linear or exponential, not 'cubic'"),
        (lambda: MaskDecay(backward="none"), "scaled or straight_through"),
        (lambda: MaskDecay(rate=0), "rate is above 0"),
        (lambda: MaskDecay(dense=0.9), "at most 1 together"),
        (lambda: StructureDecay(stages="fast"), "stepwise, geometric or a list"),
        (lambda: StructureDecay(stages=("vector:4",)), "N:M patterns, such as"),
        (lambda: StructureDecay(factor=3), "power of two"),
        (lambda: RigL(alpha=2), "shares, from 0 to 1"),
        (lambda: STEP(latest=0.05), "in that order"),
        (lambda: GrowAndPrune(rounds=0), "one round"),
        (lambda: LayerTarget(VectorWise(4), 0.5, along="both"), "only N:M masks can be transposable"),
        (lambda: LayerTarget(BlockWise(4, 4), 0.5, along="across"), "groups run along inputs, outputs, both"),
        (lambda: LayerTarget(Unstructured(), 1.0), "from 0 to below 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: object, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make()  # type: ignore[operator]


def test_step_updates_what_had_no_gradient_before_the_switch_as_adam_does() -> None:
    """Of a token that comes late v is zero at the switch: a frozen zero would leave eps to divide by."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    method = STEP(earliest=0.5, latest=0.5, penalty=0.0)
    method.prepare(model, {"1": ("unstructured", 0.0)}, total_steps=40)
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (model, plain)]
    for step in range(40):
        tokens = torch.arange(9 if step < 20 else 10)
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            net(tokens).square().sum().backward()
            optimizer.step()
        method.step()
    method.finish()
    late, alone = (net[0].weight[9].detach() for net in (model, plain))
    assert float((late - alone).abs().max()) < 0.02  # 20 steps of 1e-3 at most
    state = optimizers[0].state[model[0].weight]
    assert float(state["exp_avg_sq"][9].min()) > 0


@pytest.mark.parametrize("method", [GMP, ASP, RigL, ACDC])
def test_gradients_that_spoil_weights_at_the_end_are_said_with_the_layer(method: Any) -> None:
    model, pruner = nn.Sequential(linear()), method()
    pruner.prepare(model, {"0": ("unstructured", 0.5)}, total_steps=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        optimizer.zero_grad()
        model(torch.ones(2, model[0].in_features)).sum().backward()
        if step == 9:
            model[0].weight.grad.fill_(torch.nan)
        optimizer.step()
        try:
            pruner.step()
        except BadData as error:
            assert "layer 0" in str(error)
            return
    with pytest.raises(BadData, match="layer 0: training left NaN or infinite values in its weights"):
        pruner.finish()
