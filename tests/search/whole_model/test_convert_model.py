"""A pruned model as it is served: which of its layers that stay dense run on latbench's kernels."""

import torch
from torch import nn

from search.example_inputs import ExampleInputs
from search.whole_model.convert_model import FEW_CHANNELS, convert_for_example
from sparse_kernels.convert import LayerPattern
from sparse_kernels.nn import SparseConv2d, SparseLayer
from sparse_kernels.patterns import Dense, parse


def test_convolutions_that_read_few_channels_are_ours_and_other_layers_stay_torchs() -> None:
    model = nn.Sequential(
        nn.Conv2d(FEW_CHANNELS, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1),
        nn.Flatten(), nn.Linear(64, 3),
    ).eval()  # fmt: skip
    x = torch.randn(3, FEW_CHANNELS, 6, 6)
    fast = convert_for_example(model, {"2": LayerPattern(Dense())}, ExampleInputs((x,)))
    assert [name for name, module in fast.named_modules() if isinstance(module, SparseLayer)] == ["0", "2"]
    assert isinstance(fast.get_submodule("0"), SparseConv2d) and fast.get_submodule("0").activation == "relu"
    for batch in (1, 3, 5):
        x = torch.randn(batch, FEW_CHANNELS, 6, 6)
        torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_choice_for_such_a_layer_holds() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    model[0].weight.data[:, :, 0] = 0
    mask = (model[0].weight.detach().permute(0, 2, 3, 1).reshape(8, 9) != 0).numpy()
    x = torch.randn(2, 1, 8, 8)
    pattern = LayerPattern(parse("unstructured"), mask)
    fast = convert_for_example(model, {"0": pattern}, ExampleInputs((x,)))
    assert str(fast.get_submodule("0").pattern) == "unstructured"
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-4, atol=1e-5)
