"""What models of timm and transformers do with their layers, in models of a few lines."""

import copy
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.nn import SparseConv1d, SparseConv2d
from sparse_kernels.patterns import Dense, VectorWise
from sparse_kernels.prunable_layers import survey_layers


class AskingForLengths(nn.Module):
    """Its layer says how long the input must be, as in Whisper; Python looks at a value, so it is not traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != 5 * self.conv.stride[0] or not x.isfinite().all():
            raise ValueError(f"expected {5 * self.conv.stride[0]} samples, got {x.shape[-1]}")
        y: Tensor = self.conv(x)
        return y


def test_a_model_may_compute_lengths_from_a_convolutions_settings(rng: np.random.Generator) -> None:
    model, x = AskingForLengths().eval(), torch.from_numpy(rng.standard_normal((2, 8, 10), np.float32))
    converted = convert(model, {"conv": LayerPattern(Dense())}, (x,))
    with torch.no_grad():
        torch.testing.assert_close(converted(x), model(x))


@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_a_sparse_convolution_has_its_settings_as_torch_has_them(kind: str) -> None:
    dense = {"1d": nn.Conv1d, "2d": nn.Conv2d}[kind](8, 16, 3, stride=2, padding=1, dilation=2)
    sparse = {"1d": SparseConv1d, "2d": SparseConv2d}[kind].from_dense(dense, Dense(), None)
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation"):
        assert getattr(sparse, name) == getattr(dense, name)
    assert sparse.weight.shape == dense.weight.shape


class LooksInside(nn.Module):
    """It reads a setting of a layer in a part of it; Python looks at a value, so that only the part is traced."""

    def __init__(self, setting: str) -> None:
        super().__init__()
        self.inner, self.setting = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), setting
        self.inner[0].scale = 2.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        if not x.isfinite().all():
            raise ValueError("infinite")
        y: Tensor = self.inner(x) * getattr(self.inner[0], self.setting)
        return y


class Nested(nn.Module):
    def __init__(self, setting: str) -> None:
        super().__init__()
        self.block = LooksInside(setting)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y


LOOKED_INSIDE = {"block.inner.0": LayerPattern(Dense()), "block.inner.2": LayerPattern(Dense())}


def test_a_part_that_others_look_into_is_not_made_a_graph(rng: np.random.Generator) -> None:
    model, x = Nested("in_features").eval(), torch.from_numpy(rng.standard_normal((2, 8), np.float32))
    converted = convert(model, LOOKED_INSIDE, (x,))
    with torch.no_grad():
        torch.testing.assert_close(converted(x), model(x))


def test_what_a_model_raises_over_a_sparse_layer_names_the_module() -> None:
    model = Nested("scale").eval()
    with pytest.raises(ValueError, match=r"^module 'block' reads more of a layer than its result.*'scale'"):
        convert(model, LOOKED_INSIDE, (torch.ones(2, 8),))


def build_written_out(name: str, module: str, factor: float = 1.0) -> type[nn.Linear]:
    """Return a class as FalconLinear of transformers is: nn.Linear with a forward of its own."""

    class WrittenOut(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return factor * (x @ self.weight.T + self.bias)

    WrittenOut.__name__, WrittenOut.__module__ = name, module
    return WrittenOut


def test_a_linear_layer_that_falcon_writes_out_is_taken(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "transformers.models.falcon.modeling_falcon"
    kind = build_written_out("FalconLinear", place)
    monkeypatch.setitem(sys.modules, place, ModuleType(place))
    monkeypatch.setattr(sys.modules[place], "FalconLinear", kind, raising=False)
    model, x = nn.Sequential(kind(16, 8)).eval(), torch.from_numpy(rng.standard_normal((3, 16), np.float32))
    assert list(survey_layers(model).taken) == ["0"]
    with torch.no_grad():
        torch.testing.assert_close(convert(model, {"0": LayerPattern(VectorWise(8))}, (x,))(x), model(x))


@pytest.mark.parametrize(
    ("name", "module"),
    [("FalconLinear", "mine"), ("Linear", "transformers.models.falcon.modeling_falcon")],
)
def test_another_class_with_a_forward_of_its_own_is_left_out(name: str, module: str) -> None:
    model = nn.Sequential(build_written_out(name, module, 2.0)(16, 8))
    assert "computes something of its own" in survey_layers(model).left_out["0"]


def test_a_class_that_changes_what_falcon_writes_out_is_left_out() -> None:
    kind = build_written_out("FalconLinear", "transformers.models.falcon.modeling_falcon")
    twice = type("Twice", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})
    assert "computes something of its own" in survey_layers(nn.Sequential(twice(16, 8))).left_out["0"]


def test_what_cannot_be_helped_is_said_before_what_can() -> None:
    """A grouped convolution under weight norm, as in wav2vec2, is not worth baking."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, groups=2)))
    assert survey_layers(model).left_out["0"] == "a grouped convolution (2 groups) has no sparse kernel"


class Optimistic(nn.Module):
    """It asks whether there is a mask: its graph, which follows yes, fails on the example."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * mask.reshape(-1)
        y: Tensor = self.fc(x)
        return y


class InPlace(nn.Module):
    """It changes its input, of which its caller keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.activation = nn.Linear(8, 8), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.fc(x.add_(1.0)))
        return y


def test_a_part_that_changes_its_input_is_tried_on_what_it_was_given(rng: np.random.Generator) -> None:
    model, x = InPlace().eval(), torch.from_numpy(rng.standard_normal((2, 8), np.float32))
    converted = convert(model, {"fc": LayerPattern(Dense())}, (x,))
    assert isinstance(converted, fx.GraphModule)
    with torch.no_grad():
        torch.testing.assert_close(converted(x.clone()), model(x.clone()))


class Optional(nn.Module):
    """It takes a mask or none: a graph would follow one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * mask
        y: Tensor = self.inner(x)
        return y


def test_a_mask_of_the_example_may_be_left_out_later(rng: np.random.Generator) -> None:
    model, x = Optional().eval(), torch.from_numpy(rng.standard_normal((2, 8), np.float32))
    mask = torch.tensor([1.0, 0.0]).repeat(4)
    converted = convert(model, {"inner.0": LayerPattern(Dense())}, (x,), example_keywords={"mask": mask})
    with torch.no_grad():
        torch.testing.assert_close(converted(x, mask=mask), model(x, mask=mask))
        torch.testing.assert_close(converted(x), model(x))


def test_what_cannot_be_traced_prints_nothing(rng: np.random.Generator, capfd: pytest.CaptureFixture[str]) -> None:
    model, x = Optimistic().eval(), torch.from_numpy(rng.standard_normal((2, 8), np.float32))
    converted = convert(model, {"fc": LayerPattern(Dense())}, (x,))
    with torch.no_grad():
        torch.testing.assert_close(converted(x), model(x))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("keywords", [{}, {"mask": None}, {"mask": torch.ones(8)}], ids=["absent", "none", "given"])
def test_an_optional_mask_prints_nothing(
    keywords: dict[str, torch.Tensor | None], rng: np.random.Generator, capfd: pytest.CaptureFixture[str]
) -> None:
    model, x = Optional().eval(), torch.from_numpy(rng.standard_normal((2, 8), np.float32))
    converted = convert(model, {"inner.0": LayerPattern(Dense())}, (x,), example_keywords=keywords)
    with torch.no_grad():
        torch.testing.assert_close(converted(x, **keywords), model(x, **keywords))
    assert capfd.readouterr() == ("", "")


class Copying(Optimistic):
    """It copies what it computes on, which torch.fx cannot without a remark."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copy.deepcopy(x)
        return super().forward(x)


def test_a_copy_of_a_value_while_a_model_is_traced_prints_nothing(
    rng: np.random.Generator, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Copying().eval(), torch.from_numpy(rng.standard_normal((2, 8), np.float32))
    convert(model, {"fc": LayerPattern(Dense())}, (x,))
    assert capfd.readouterr() == ("", "") and caplog.text == ""


def test_a_conversion_that_fails_is_one_sentence(rng: np.random.Generator, capfd: pytest.CaptureFixture[str]) -> None:
    model, x = Optimistic().eval(), torch.from_numpy(rng.standard_normal((2, 8), np.float32))
    with pytest.raises(ValueError, match="no layer 'lost'") as caught:
        convert(model, {"lost": LayerPattern(Dense())}, (x,))
    assert len(str(caught.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")
