"""A model outside torch, such as an exported one, that is called as the torch model that it came from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from latbench.errors import UsageError
from search.example_inputs import ExampleInputs


class CompiledModule(nn.Module):
    """A compiled model as a module: it takes and returns tensors where the torch model did.

    Parameters
    ----------
    model : Module
        The torch model.
    example : ExampleInputs
        Inputs of a call. Their tensors, in order, are what the compiled model takes.
    run : callable
        From arrays to all results, in the order of the torch model's.
    """

    def __init__(self, model: nn.Module, example: ExampleInputs, run: Callable[..., Sequence[NDArray[Any]]]) -> None:
        super().__init__()
        self._run, self._signature = run, inspect.signature(model.forward)
        self._wanted = list(self._place(example))
        with torch.no_grad():
            self._output = ExampleInputs((example.map_tensors(lambda each: each.clone()).call(model),))
        self.eval()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the result, in tensors, for any arguments that name the same tensors as the example's."""
        given = self._place(ExampleInputs(arguments, keywords))
        if given.keys() != {*self._wanted}:
            raise UsageError(
                f"the exported model takes {', '.join(self._wanted)}, and was called with {', '.join(given)}"
            )
        results = self._run(*(given[place].detach().numpy() for place in self._wanted))
        left = iter([torch.from_numpy(np.array(each)) for each in results])
        return self._output.map_tensors(lambda _: next(left)).arguments[0]

    def _place(self, inputs: ExampleInputs) -> Mapping[str, Tensor]:
        """Return the tensors of a call by their parameter of the model, and their place in it."""
        bound = self._signature.bind_partial(*inputs.arguments, **inputs.keywords).arguments
        named = ExampleInputs(keywords=bound)
        places = (place.removeprefix("keyword ") for place in named.describe_tensors())
        return dict(zip(places, named.tensors(), strict=True))
