"""Tasks of networks with random weights: their layers take the time that trained ones take, to stay near the dense
network's outputs is all that they can be asked for.

A batch is a pair: inputs, and what the dense network makes of them, (n, outputs).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, interpolate
from torch.nn.modules.batchnorm import _BatchNorm

Batch = tuple[Tensor, Tensor]
Inputs = Callable[[int, torch.Generator], Tensor]
"""(n, generator) -> n random inputs."""


@dataclass(frozen=True)
class RandomWeights:
    """A task; `name` also seeds the data. The dense network is `network()`, and its norms' statistics are of data."""

    name: str
    network: Callable[[], nn.Module]
    inputs: Inputs
    batch: int = 1
    calibration_batches: int = 8
    calibration_batch: int = 4
    score_name: str = "mean cosine to the dense outputs"

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = self.network()
        norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
        for norm in norms:
            norm.momentum = 1.0
        if norms:
            with torch.no_grad():
                network.train()(self._drawn(self.calibration_batch, seed=1))
        return network.eval()

    def example(self) -> tuple[Tensor]:
        return (self._drawn(self.batch, seed=2),)

    def calibration(self) -> list[Batch]:
        return [self._with_outputs(seed=10 + number) for number in range(self.calibration_batches)]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The squared distance to the dense outputs, as a share of their own square."""
        x, outputs = batch
        return (flat(model(x)) - outputs).square().sum() / outputs.square().sum()

    def score(self, model: nn.Module) -> float:
        x, outputs = self._with_outputs(seed=3)
        with torch.no_grad():
            return cosine_similarity(flat(model(x)).double(), outputs.double()).mean().item()

    @cached_property
    def _dense(self) -> nn.Module:
        return self.model()

    def _with_outputs(self, seed: int) -> Batch:
        x = self._drawn(self.calibration_batch, seed)
        with torch.no_grad():
            return x, flat(self._dense(x))

    def _drawn(self, n: int, seed: int) -> Tensor:
        return self.inputs(n, torch.Generator().manual_seed(seed))


def images(size: int) -> Inputs:
    """Blurred noise (n, 3, size, size): images that differ in more than their grain."""

    def draw(n: int, generator: torch.Generator) -> Tensor:
        coarse = torch.randn(n, 3, size // 16, size // 16, generator=generator)
        return interpolate(coarse, size=(size, size), mode="bilinear")

    return draw


def flat(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    """One or several outputs as a row (n, ...) each."""
    parts = (outputs,) if isinstance(outputs, Tensor) else outputs
    return torch.cat([part.flatten(1) for part in parts], dim=1)
