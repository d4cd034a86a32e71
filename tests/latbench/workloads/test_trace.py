"""Tracing a torch model: what is timed, what is left out and why."""

import pytest
import torch
from torch import nn

from latbench.workloads.workload import Layer, trace_model
from sparse_kernels.shapes import Conv2dShape, LinearShape


class Odd(nn.Module):
    """Everything that must be left out, beside two layers that must not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.kept = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 7, bias=False)
        self.tied.weight = self.embed.weight
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6)
        self.grouped = nn.Conv2d(6, 6, 3, groups=2)
        self.reflect = nn.Conv2d(6, 6, 3, padding=1, padding_mode="reflect")
        self.lopsided = nn.Conv2d(6, 6, (1, 2), padding="same")
        self.same = nn.Conv2d(6, 5, 3, padding="same", dilation=2)
        self.lstm = nn.LSTM(6, 3)
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.kept(input=self.embed(tokens)))
        x = self.twice(self.twice(x))
        self.tied(x)
        self.lstm(x)
        image = x.transpose(1, 2)[..., None].expand(-1, -1, -1, 9)
        image = self.lopsided(self.reflect(image))
        self.grouped(self.depthwise(image))
        return self.same(image)


def test_linear_layers_and_convolutions_are_noted_in_the_order_of_their_calls() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, (3, 5), stride=(2, 1), padding=(1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 20, 4)
    )
    workload, skipped = trace_model(model, (torch.zeros(2, 3, 8, 5),), name="net")
    conv = Conv2dShape(batch=2, c_in=3, h=8, w=5, c_out=8, kh=3, kw=5, stride=(2, 1), padding=(1, 2))
    assert workload.layers == (Layer("0", conv), Layer("3", LinearShape(m=4, k=160, n=2)))
    assert (workload.name, skipped) == ("net", [])
    assert "Sequential" in workload.source and "2x3x8x5" in workload.source


def test_tokens_are_the_product_of_the_leading_dimensions() -> None:
    workload, _ = trace_model(nn.Sequential(nn.Linear(5, 7)), (torch.zeros(2, 3, 5),))
    assert workload.layers[0].shape == LinearShape(m=7, k=5, n=6)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_what_is_left_out_is_listed_with_its_reason() -> None:
    workload, skipped = trace_model(Odd(), (torch.zeros(2, 9, dtype=torch.int64),))
    same = Conv2dShape(batch=2, c_in=6, h=9, w=9, c_out=5, kh=3, kw=3, padding=(2, 2), dilation=(2, 2))
    assert workload.layers == (Layer("kept", LinearShape(6, 6, 18)), Layer("same", same))
    reasons = {
        "embed": "its weight is shared with tied",
        "twice": "called 2 times",
        "never": "never called",
        "tied": "its weight is shared with embed",
        "depthwise": "depthwise convolution (6 groups)",
        "grouped": "grouped convolution (2 groups)",
        "reflect": "padding mode 'reflect' has no sparse kernel",
        "lopsided": "asymmetric",
        "lstm": "an LSTM has no sparse kernel",
    }
    assert [name for name, _ in skipped] == list(reasons)
    for name, reason in skipped:
        assert reasons[name] in reason


@pytest.mark.parametrize(
    ("model", "size", "reason"),
    [
        (nn.Linear(3, 4), (2, 3), "wrap it in nn.Sequential"),
        (nn.Sequential(nn.Linear(3, 4)), (0, 3), "n = 0"),
        (nn.Sequential(nn.Conv2d(3, 4, 1)), (3, 5, 5), "no batch dimension"),
        (nn.Sequential(nn.Linear(3, 4).double()), (2, 3), "float64, not float32"),
    ],
)
def test_a_layer_that_cannot_be_timed_is_left_out(model: nn.Module, size: tuple[int, ...], reason: str) -> None:
    dtype = next(model.parameters()).dtype
    workload, [(_, said)] = trace_model(model, (torch.zeros(size, dtype=dtype),))
    assert workload.layers == ()
    assert reason in said


def test_the_attention_of_a_transformer_layer_is_named_not_lost() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    workload, skipped = trace_model(layer, (torch.zeros(2, 3, 8),))
    assert [item.name for item in workload.layers] == ["linear1", "linear2"]
    assert [name for name, _ in skipped] == ["self_attn", "self_attn.out_proj"]


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    model[0].eval()
    trace_model(model, (torch.ones(5, 3),))
    assert (model.training, model[0].training, model[1].training) == (True, False, True)
    assert int(model[1].num_batches_tracked) == 0
    assert not model[0]._forward_pre_hooks


def test_a_model_that_raises_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4)).train()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trace_model(model, (torch.ones(5, 9),))
    assert model.training
    assert not model[0]._forward_pre_hooks
