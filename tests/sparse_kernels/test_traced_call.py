"""Parts that torch.fx alone cannot trace are graphs for calls like the example, and themselves for all others."""

import copy
import inspect
import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.graph_passes.traced_call import TracedCall, find_form, follow_call, trace_call
from sparse_kernels.nn import SparseLinear
from sparse_kernels.nn.attention_operator import attention
from sparse_kernels.patterns import Unstructured
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix


class Attention(nn.Module):
    """As libraries of Transformers write it: shapes in variables, arguments that may be left out, a question."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, scale: float = 0.3, **settings: Any
    ) -> tuple[Tensor, None]:
        before = x.shape[:-1]
        heads = (*before, -1, 8)
        q, k, v = (part(x).view(*heads).transpose(1, 2) for part in (self.query, self.key, self.value))
        if q.shape[2] > 1 and mask is None and settings.get("doubled"):
            v = 2 * v
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, scale=scale)
        return self.out(y.transpose(1, 2).reshape(*before, -1).contiguous()), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(32)
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, mask: Tensor | None = None, **settings: Any) -> Tensor:
        y, _ = self.attention(x, mask, **settings)
        x = self.norm(x + y)
        return x + self.fc2(F.gelu(self.fc1(x)))


class Model(nn.Module):
    """Blocks in a model of which the whole cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None, **settings: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, mask, **settings)
        return torch.from_numpy(x.numpy())


def build(rng: np.random.Generator) -> tuple[nn.Module, nn.Module, dict[str, LayerPattern]]:
    """A model, the same with masked weights, and the choices that make this of that."""
    model = Model().eval()
    choices, masked = {}, copy.deepcopy(model)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            mask = rng.random(tuple(weight_matrix(layer).shape)) < 0.5
            choices[name] = LayerPattern(Unstructured(), mask)
            own = masked.get_submodule(name)
            set_weight_matrix(own, weight_matrix(own) * torch.from_numpy(mask))
    return model, masked, choices


def traced(model: nn.Module) -> dict[str, TracedCall]:
    """The calls that are graphs, by the names of their modules."""
    held = {name: vars(module).get("traced_call") for name, module in model.named_modules()}
    return {name: call for name, call in held.items() if isinstance(call, TracedCall)}


def count(call: TracedCall, what: Callable[..., Any]) -> int:
    return sum(node.target is what for node in call.graph.graph.nodes)


MASK = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)


@torch.no_grad()
def test_a_transformers_part_is_a_graph_with_our_attention(rng: np.random.Generator) -> None:
    model, masked, choices = build(rng)
    x = torch.randn(2, 6, 32)
    converted = convert(model, choices, (x,))
    calls = traced(converted)
    assert {"blocks.0", "blocks.1"} <= set(calls)
    assert count(calls["blocks.0"], attention) == 1
    assert any("keep" in node.kwargs for node in calls["blocks.0"].graph.graph.nodes)  # tiles between fc1 and fc2
    names = {name for name, module in converted.named_modules() if isinstance(module, SparseLinear)}
    assert names == set(choices) and set(converted.state_dict()) >= {"blocks.0.norm.weight"}
    torch.testing.assert_close(converted(x), masked(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_calls_of_any_form_give_what_the_masked_model_gives(rng: np.random.Generator) -> None:
    model, masked, choices = build(rng)
    x = torch.randn(2, 6, 32)
    for example in ({}, {"mask": MASK}, {"doubled": True}):
        converted = convert(model, choices, (x,), example_keywords=example)
        for keywords in ({}, {"mask": MASK}, {"doubled": True}, {"doubled": False}):
            for shape in ((2, 6, 32), (5, 6, 32), (3, 1, 32)):
                if "mask" in keywords and shape[1] != 6:
                    continue
                other = torch.randn(shape)
                expected = masked(other, **keywords)
                torch.testing.assert_close(converted(other, **keywords), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_another_answer_than_the_examples_is_another_way(rng: np.random.Generator) -> None:
    model, masked, choices = build(rng)
    converted = convert(model, choices, (torch.randn(2, 6, 32),), example_keywords={"doubled": True})
    call, seen = traced(converted)["blocks.0"], []
    call.graph.register_forward_hook(lambda *_: seen.append("graph"))
    one, several = torch.randn(2, 1, 32), torch.randn(2, 3, 32)
    torch.testing.assert_close(converted(one, doubled=True), masked(one, doubled=True), rtol=1e-4, atol=1e-5)
    assert seen == []  # a single token is not doubled: the graph gave up
    converted(several, doubled=True)
    assert seen == ["graph"]


@torch.no_grad()
def test_copies_and_pickles_have_graphs_of_their_own(rng: np.random.Generator) -> None:
    model, masked, choices = build(rng)
    x = torch.randn(2, 6, 32)
    converted = convert(model, choices, (x,))
    expected = converted(x)
    twin = copy.deepcopy(converted)
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        torch.testing.assert_close(other(x), expected)
        torch.testing.assert_close(other(x, MASK), masked(x, MASK), rtol=1e-4, atol=1e-5)
        other.get_submodule("blocks.0.norm").weight.zero_()
        assert not torch.allclose(other(x), expected)  # the graph reads the weights of its own module
    torch.testing.assert_close(converted(x), expected)


class Asks(nn.Module):
    """Its way hangs on values, or it changes them before a question."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.fc, self.silu, self.what = nn.Linear(4, 4), nn.SiLU(inplace=True), what

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        if self.what == "values":
            return y if y.sum() > 0 else -y
        if self.what == "length":
            return y * len(y)
        if self.what in ("method", "function", "argument", "module"):
            changed = {
                "method": lambda: x.add_(1), "function": lambda: torch.relu_(x),
                "argument": lambda: F.silu(x, inplace=True), "module": lambda: self.silu(x),
            }[self.what]()  # fmt: skip
            return y if changed.shape[0] > 1 else changed
        return OrderedDict(y=y) if self.what == "own dict" else y * x.shape[0]


@torch.no_grad()
@pytest.mark.parametrize(
    ("what", "can"),
    [*dict.fromkeys(["values", "length", "method", "function", "argument", "module"], False).items(), ("size", True)],
)
def test_what_hangs_on_values_has_no_graph(what: str, can: bool) -> None:
    module, x = Asks(what).eval(), torch.randn(3, 4)
    before = x.clone()
    found = trace_call(module, (x,), {})
    assert torch.equal(x, before) and (found is not None) is can
    if found is not None:
        more, own = torch.randn(5, 4), copy.deepcopy(module)
        follow_call(module, found)
        torch.testing.assert_close(module(more), own(more))
        torch.testing.assert_close(module(x=more), own(more))  # another form
        assert isinstance(module, Asks) and inspect.signature(module.forward) == inspect.signature(own.forward)


@torch.no_grad()
def test_arguments_that_are_no_plain_values_have_no_graph() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, other: Any = None) -> Tensor:
            return x if other is None else x + other[0]

    x = torch.ones(2)
    cache = OrderedDict([(0, x)])
    for args, kwargs in (((x, cache), {}), ((x,), {"other": cache}), ((x, [x, cache]), {})):
        assert trace_call(Adds(), args, kwargs) is None
        assert find_form(args, kwargs, []) != find_form(args, kwargs, [])  # another cache may be given
    module = Adds()
    found = trace_call(module, (x, (x, [x])), {})
    assert found is not None
    follow_call(module, found)
    torch.testing.assert_close(module(x, (3 * x, [x])), 4 * x)
    torch.testing.assert_close(module(x), x)
    torch.testing.assert_close(module(x.double(), [3 * x.double()]), 4 * x.double())


@torch.no_grad()
def test_a_result_keeps_its_class(rng: np.random.Generator) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Asks("own dict")

        def forward(self, x: Tensor) -> Tensor:
            found = self.part(x)
            assert type(found) is OrderedDict
            return found["y"]

    model, x = Holds().eval(), torch.randn(3, 4)
    choices = {"part.fc": LayerPattern(Unstructured(), rng.random((4, 4)) < 0.5)}
    converted = convert(model, choices, (x,))
    assert converted(x).shape == (3, 4)
    assert type(convert(model.part, {"fc": choices["part.fc"]}, (x,))(x)) is OrderedDict
