"""A compiled model takes and returns tensors where the torch model did."""

import pytest
import torch
from torch import Tensor, nn

from latbench.errors import UsageError
from search.example_inputs import ExampleInputs
from search.whole_model.compiled_module import CompiledModule


class Two(nn.Module):
    """A model of two tensors and a number, with two results."""

    def forward(self, ids: Tensor, mask: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"sum": (ids + mask) * scale, "first": ids}


def test_it_is_called_as_the_model() -> None:
    example = ExampleInputs((torch.zeros(2, 3),), {"mask": torch.ones(2, 3)})
    module = CompiledModule(Two(), example, lambda ids, mask: [ids + 2 * mask, ids])
    ids, mask = torch.full((5, 3), 3.0), torch.full((5, 3), 4.0)
    for found in (module(ids, mask), module(ids, mask=mask), module(mask=mask, ids=ids)):
        assert list(found) == ["sum", "first"] and torch.equal(found["sum"], ids + 2 * mask)
        assert torch.equal(found["first"], ids)
    with pytest.raises(UsageError, match="the exported model takes ids, mask, and was called with ids"):
        module(ids)
