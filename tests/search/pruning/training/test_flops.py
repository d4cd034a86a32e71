"""Training FLOPs: the accounting by hand, and the relative costs that the notes on training recipes give."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.flops import (
    Flop,
    compute_layer_cost,
    compute_step_cost,
    compute_training_flop,
    count_forward_flop,
)
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
from search.pruning.training.pruner import Moment, Pruner, Stage
from sparse_kernels.patterns import NM, BlockWise, ShflBW, Unstructured, VectorNM, VectorWise

HALF, THIN = LayerTarget(NM(2, 4), 0.5, along="both"), LayerTarget(NM(1, 16), 15 / 16, along="both")


@pytest.mark.parametrize(
    ("pruner", "half", "thin"),
    [
        (SRSTE(), 0.667, 0.375),
        (ASP(dense=0.5), 0.75, 0.531),
        (MaskDecay(shape="exponential"), 0.933, 0.875),
        (StructureDecay(), 0.758, 0.583),
        (StructureDecay(stages="geometric"), 0.70, 0.4375),
    ],
    ids=["sr-ste", "asp", "mask decay", "stepwise", "geometric"],
)
def test_relative_costs_are_the_known_ones(pruner: Pruner, half: float, thin: float) -> None:
    """Dense phase .1, final phase .2, as the notes give them for an FFN layer with a kernel for both products."""
    assert compute_layer_cost(pruner, HALF, 1000).total / 3 == pytest.approx(half, abs=1e-3)
    assert compute_layer_cost(pruner, THIN, 1000).total / 3 == pytest.approx(thin, abs=1e-3)


def test_every_other_recipe_by_hand() -> None:
    tenth = LayerTarget(Unstructured(), 0.9)
    assert compute_layer_cost(STE(), tenth, 10) == Flop(pytest.approx(0.1), pytest.approx(0.1), pytest.approx(1.0))
    # Compressed 10-15, 20-25, ... 70-75 and 85-100: 50 of 100 steps, with fixed masks.
    assert compute_layer_cost(ACDC(), tenth, 100).total == pytest.approx(3 * (0.5 + 0.5 * 0.1))
    # The gradient is dense in the step before each of the updates at 10, 20 ... 70.
    rigl = compute_layer_cost(RigL(every=10), tenth, 100)
    assert rigl.forward == pytest.approx(0.1)
    assert rigl.weight_gradient == pytest.approx((7 + 93 * 0.1) / 100)
    # Two updates: at 25 (7/8 of the way) and 50.
    gmp = compute_layer_cost(GMP(updates=2), tenth, 100)
    assert gmp.forward == pytest.approx((25 + 25 * (1 - 0.9 * 7 / 8) + 50 * 0.1) / 100)
    assert compute_layer_cost(STEP(latest=0.4), tenth, 10).forward == pytest.approx(0.4 + 0.6 * 0.1)
    turns = [
        compute_layer_cost(GrowAndPrune(final=0.2), tenth, 160, layer=layer, layers=4).forward for layer in range(4)
    ]
    assert turns == pytest.approx([0.2 + 0.8 * 0.1] * 4)


@pytest.mark.parametrize(
    "pruner",
    [
        *(ASP(dense=dense) for dense in (0, 0.37, 1)), STE(dense=0.3, every=3), SRSTE(), STEP(latest=0.33),
        GMP(), GMP(begin=0.13, end=0.77, updates=7, initial=0.3), GMP(begin=0.5, end=0.5), GMP(end=1, updates=500),
        ACDC(), ACDC(warmup=0, period=0.07, final=0.4), RigL(every=7), RigL(every=1), RigL(every=5, until=1.0),
        RigL(until=0), MaskDecay(), MaskDecay(rate=0.03), MaskDecay(shape="exponential", final=0.0),
        MaskDecay(shape="exponential", rate=100.0), MaskDecay(dense=0.5, final=0.5), StructureDecay(),
        StructureDecay(stages="geometric", dense=0.0), StructureDecay(dense=0.5, final=0.5),
        StructureDecay(stages=("nm:8:16", "nm:3:16")), GrowAndPrune(), GrowAndPrune(final=1),
        GrowAndPrune(partitions=5, rounds=3, final=0.13), FixedMask(),
    ],
    ids=repr,
)  # fmt: skip
def test_the_cost_is_that_of_walking_through_every_step(pruner: Pruner) -> None:
    for steps in (1, 2, 3, 17, 100, 333):
        for layer in range(3):
            walk = [pruner.stage(THIN, Moment(step, steps, layer, 3)) for step in range(steps)]
            total = Flop(0.0, 0.0, 0.0)
            for stage in walk:
                total += compute_step_cost(stage)
            cost = compute_layer_cost(pruner, THIN, steps, layer=layer, layers=3)
            for name in ("forward", "input_gradient", "weight_gradient"):
                assert getattr(cost, name) == pytest.approx(getattr(total, name) / steps, rel=1e-9)
            at = 0
            for stage, length in pruner.list_stages(THIN, Moment(0, steps, layer, 3)):
                assert {(it.target, it.fade > 0, it.fixed_mask) for it in walk[at : at + length]} == {
                    (stage.target, stage.fade > 0, stage.fixed_mask)
                }
                at += length
            assert at == steps


def test_a_long_training_is_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    stage = GMP.stage
    monkeypatch.setattr(GMP, "stage", lambda self, *args: seen.append(1) or stage(self, *args))
    compute_layer_cost(GMP(), THIN, 1_000_000)
    assert len(seen) <= 22


def test_only_the_product_along_the_groups_is_sparse() -> None:
    assert compute_step_cost(Stage(HALF, fixed_mask=True)) == Flop(0.5, 0.5, 0.5)
    assert compute_step_cost(Stage(LayerTarget(NM(2, 4), 0.5), fixed_mask=True)) == Flop(0.5, 1.0, 0.5)
    assert compute_step_cost(Stage(LayerTarget(NM(2, 4), 0.5, along="outputs"))) == Flop(1.0, 0.5, 1.0)
    for pattern in (Unstructured(), BlockWise(4, 2), VectorWise(4), VectorNM(4, 2, 4), ShflBW(4)):
        assert compute_step_cost(Stage(LayerTarget(pattern, 0.5))) == Flop(0.5, 0.5, 1.0)
    assert compute_step_cost(Stage(HALF, fade=0.01)) == Flop(1.0, 1.0, 1.0)
    # What 2:4 SR-STE takes with the kernels that there are.
    assert compute_layer_cost(SRSTE(), LayerTarget(NM(2, 4), 0.5), 10).total / 3 == pytest.approx(2.5 / 3)


class Doubling(nn.Linear):
    """A layer that no sparse kernel can take the place of, and which returns more than its product."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(2 * x), None


def test_layers_without_a_sparse_kernel_are_counted_too_as_torch_counts_them() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depthwise = nn.Conv2d(6, 12, 3, groups=6)
            self.grouped = nn.Conv2d(12, 8, 1, groups=4)
            self.reflected = nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect")
            self.doubling = Doubling(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.doubling(self.reflected(self.grouped(self.depthwise(x))))[0]

    model, x = Net(), torch.zeros(2, 6, 7, 7)
    counted = count_forward_flop(model, lambda: model(x))
    assert list(counted) == ["depthwise", "grouped", "reflected", "doubling"]
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert sum(counted.values()) == counter.get_total_flops()
    assert counted["depthwise"] == 2 * 12 * 9 * (2 * 5 * 5)


def test_the_projections_of_attention_are_counted() -> None:
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True).eval()
    query, key, value = torch.randn(3, 5, 8), torch.randn(3, 7, 6), torch.randn(3, 7, 4)
    counted = count_forward_flop(nn.ModuleDict({"a": attention}), lambda: attention(query, key, value))
    of_queries, of_keys, of_values, of_outputs = 2 * 8 * 8 * 15, 2 * 8 * 6 * 21, 2 * 8 * 4 * 21, 2 * 8 * 8 * 15
    assert counted == {"a": of_queries + of_keys + of_values + of_outputs}


def test_a_models_flop_are_counted_by_layer_with_shared_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.fc = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.fc(self.conv(x)))

    model = Twice()
    counted = count_forward_flop(model, lambda: model(torch.zeros(2, 3, 4, 5)))
    assert counted == {"conv": 2 * 8 * 27 * (2 * 4 * 5), "fc": 2 * (2 * 25 * (2 * 8 * 4))}
    dense = compute_training_flop(None, {}, counted, 10)
    assert dense.total == 30 * sum(counted.values())
    pruned = compute_training_flop(STE(), {"fc": LayerTarget(Unstructured(), 0.8)}, counted, 10)
    assert pruned.forward == pytest.approx(10 * (counted["conv"] + 0.2 * counted["fc"]))
    assert pruned.weight_gradient == dense.weight_gradient
