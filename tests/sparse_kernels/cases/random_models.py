"""Random small models, as people write them: residuals, shared layers, branches, reshapes, changes in place, buffers.

A model is a list of steps. Each reads values that earlier steps left and adds one; the last value is the result.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.patterns import Pattern, parse
from sparse_kernels.prunable_layers import set_weight_matrix, survey_layers, weight_matrix
from sparse_kernels.same_results import CONVERTED, same_results

WIDTHS = (8, 16, 24)
PATTERNS = ("unstructured", "vector:4", "vector:8", "shflbw:8", "nm:2:4", "block:4x4", "dense")

LAYERS = ("layer", "layer", "layer", "shared layer", "computed weight", "subclass", "read weight", "hooked")
ELEMENT_WISE = ("relu module", "relu function", "relu in place", "gelu", "tanh", "dropout")
COMBINED = ("add", "add in place", "multiply", "concatenate")
RESHAPED = ("transpose", "flatten and back", "slice written", "clone", "chunk", "stack and mean")
OTHERS = ("norm", "layer norm", "buffer written", "branch on a shape", "constant", "sequential", "list")
STEPS = LAYERS + ELEMENT_WISE + COMBINED + RESHAPED + OTHERS


class Plain(nn.Linear):
    """A subclass that computes what a Linear does."""


class Own(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        """Return twice what a Linear does."""
        return 2 * super().forward(x)


@dataclass(frozen=True)
class Step:
    """What is done with a value: its kind, whether it reads the latest value or an earlier one, and a choice."""

    kind: str
    back: int
    other: int
    choice: int


@dataclass(frozen=True)
class Drawn:
    """A model to build: over images or tokens, its steps, and how its layers are pruned."""

    images: bool
    batch: int
    length: int
    width: int
    steps: tuple[Step, ...]
    pattern: str
    left_dense: int
    seed: int


def models() -> st.SearchStrategy[Drawn]:
    """Draw models."""
    step = st.builds(
        Step, st.sampled_from(STEPS), st.sampled_from([0, 0, 0, 1, 2]), st.integers(0, 3), st.integers(0, 7)
    )
    return st.builds(
        Drawn,
        images=st.booleans(),
        batch=st.sampled_from([1, 2, 3]),
        length=st.sampled_from([1, 5, 17, 70]),
        width=st.sampled_from(WIDTHS),
        steps=st.lists(step, min_size=1, max_size=9).map(tuple),
        pattern=st.sampled_from(PATTERNS),
        left_dense=st.integers(0, 3),
        seed=st.integers(0, 2**31 - 1),
    )


class RandomModel(nn.Module):
    """The model of what was drawn; values are (batch, width, h, w) or (batch, tokens, width)."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.images, self.steps = drawn.images, drawn.steps
        self.parts = nn.ModuleDict()
        self.register_buffer("calls", torch.zeros(3))
        widths = [drawn.width]
        for number, step in enumerate(self.steps):
            width = widths[max(0, len(widths) - 1 - step.back)]
            widths.append(self._build(number, step, width, widths))

    def _build(self, number: int, step: Step, width: int, widths: list[int]) -> int:
        """Make the modules of a step; return the width of its result."""
        wide, name = WIDTHS[step.choice % len(WIDTHS)], f"step{number}"
        match step.kind:
            case "layer" | "hooked" | "read weight" | "computed weight" | "subclass":
                self.parts[name] = self._layer(width, wide, step)
                return wide
            case "shared layer":
                for earlier in self.parts.values():
                    if isinstance(earlier, nn.Linear | nn.Conv2d) and earlier.weight.shape[1] == width:
                        self.parts[name] = earlier
                        return int(earlier.weight.shape[0])
                self.parts[name] = self._layer(width, width, step)
            case "relu module":
                self.parts[name] = nn.ReLU(inplace=step.choice % 2 == 0)
            case "dropout":
                self.parts[name] = nn.Dropout(0.5)
            case "norm":
                self.parts[name] = nn.BatchNorm2d(width) if self.images else nn.BatchNorm1d(width)
            case "layer norm":
                self.parts[name] = nn.LayerNorm(width)
            case "sequential":
                inner = self._layer(width, wide, step), nn.ReLU(), self._layer(wide, width, step)
                self.parts[name] = nn.Sequential(*inner)
            case "list":
                self.parts[name] = nn.ModuleList([self._layer(width, width, step) for _ in range(2)])
            case "concatenate":
                return width + widths[step.other % len(widths)]
        return width

    def _layer(self, width: int, wide: int, step: Step) -> nn.Module:
        """Return a layer of the kind that the step wants."""
        bias = step.choice != 3
        if self.images:
            taps = (1, 3)[step.choice % 2]
            layer: nn.Module = nn.Conv2d(width, wide, taps, padding=taps // 2, bias=bias)
        else:
            kind = nn.Linear if step.kind != "subclass" else (Plain, Own)[step.choice % 2]
            layer = kind(width, wide, bias=bias)
        if step.kind == "computed weight":
            layer = nn.utils.parametrizations.weight_norm(layer)
        if step.kind == "hooked":
            layer.register_forward_hook(lambda module, given, result: 2 * result)
        return layer

    def forward(self, x: Tensor) -> Any:
        """Return the last value; with a dictionary around it if there are many steps."""
        values = [x]
        for number, step in enumerate(self.steps):
            value = values[max(0, len(values) - 1 - step.back)]
            values.append(self._run(number, step, value, values))
        return {"last": values[-1], "first": [values[1]]} if len(self.steps) > 6 else values[-1]

    def _run(self, number: int, step: Step, x: Tensor, values: list[Tensor]) -> Tensor:
        part = dict(self.parts.items()).get(f"step{number}")
        other = values[step.other % len(values)]
        match step.kind:
            case "norm" if not self.images:
                return part(x.transpose(1, 2)).transpose(1, 2)
            case "layer norm" if self.images:
                return part(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            case "list":
                for each in part:
                    x = each(x)
                return x
            case "read weight":
                return part(x) * (1 + part.weight.abs().mean())
            case "relu function":
                return F.relu(x)
            case "relu in place":
                return F.relu(x.clone(), inplace=True)
            case "gelu":
                return F.gelu(x)
            case "tanh":
                return torch.tanh(x)
        if part is not None:
            return part(x)
        return self._combine(step, x, other)

    def _combine(self, step: Step, x: Tensor, other: Tensor) -> Tensor:
        features = 1 if self.images else 2
        match step.kind:
            case "add" | "add in place" | "multiply" if x.shape == other.shape:
                if step.kind == "multiply":
                    return x * torch.sigmoid(other)
                if step.kind == "add":
                    return x + other
                y = x.clone() if step.choice % 2 else x * 1.0
                y += other
                return y
            case "concatenate":
                return torch.cat([x, other], features)
            case "transpose":
                return x.transpose(0, 1).contiguous().transpose(0, 1)
            case "flatten and back":
                return x.reshape(-1).view(x.shape)
            case "slice written":
                y = x.clone()
                y[:, 0] = 0
                return y
            case "chunk":
                return torch.cat(x.chunk(2, features)[::-1], features)
            case "stack and mean":
                return torch.stack([x, x * 0.5]).mean(0)
            case "buffer written":
                self.calls += 1
                return x + self.calls[0]
            case "branch on a shape":
                return x * 2 if x.shape[0] > 1 else x - 1
            case "constant":
                return x + torch.ones(x.shape[features]).view(-1, *([1, 1] if self.images else []))
        return x.clone()


@dataclass
class Outcome:
    """How many models were converted, and why others were refused."""

    converted: int = 0
    refused: dict[str, int] = field(default_factory=dict)


def check_conversion(drawn: Drawn, outcome: Outcome) -> None:
    """Convert the model at 0% and under masks: it must compute what the masked model does, or be refused."""
    torch.manual_seed(drawn.seed)
    model = RandomModel(drawn).eval()
    size = (drawn.batch, drawn.width, drawn.length, 3) if drawn.images else (drawn.batch, drawn.length, drawn.width)
    x, other = torch.randn(size), torch.randn(size)
    taken = list(survey_layers(model).taken)[drawn.left_dense :]
    for pattern in (parse("dense"), parse(drawn.pattern)):
        choices = {name: _draw_mask(model.get_submodule(name), pattern) for name in taken}
        try:
            converted = convert(model, choices, (x,))
        except ValueError as error:
            reason = str(error).partition(": ")[2] or str(error)
            outcome.refused[reason] = outcome.refused.get(reason, 0) + 1
            continue
        masked = _mask(model, choices)
        for given in (x, other):
            with torch.no_grad():
                expected, found = masked(given.clone()), converted(given.clone())
            if not same_results(found, expected, CONVERTED):
                raise AssertionError(f"the converted model computes something else: {drawn}")
        outcome.converted += 1


def _draw_mask(layer: nn.Module, pattern: Pattern) -> LayerPattern:
    dense = str(pattern) == "dense"
    scores = weight_matrix(layer).abs().double().numpy()
    return LayerPattern(pattern, None if dense else np.asarray(pattern.mask(scores, 0.5)))


def _mask(model: RandomModel, choices: dict[str, LayerPattern]) -> nn.Module:
    """Return a copy of the model with the masks applied to its weights, as torch computes it."""
    masked = copy.deepcopy(model)
    for name, choice in choices.items():
        if choice.mask is not None:
            layer = masked.get_submodule(name)
            set_weight_matrix(layer, torch.where(torch.from_numpy(choice.mask), weight_matrix(layer), 0.0))
    return masked
