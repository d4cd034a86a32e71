"""Workloads: named lists of layer shapes, read from YAML or traced from a torch model.

    name: bert-base
    source: "Devlin et al. 2019, table ...; huggingface bert-base-uncased config"
    layers:
      - {name: encoder.0.query, op: linear, m: 768, k: 768, n: 128, count: 12}
      - {name: layer1.0.conv2, op: conv2d, batch: 1, c_in: 64, h: 56, w: 56, c_out: 64, kh: 3, kw: 3,
         stride: [1, 1], padding: [1, 1], dilation: [1, 1], count: 3}

Defaults are count 1, stride [1, 1], padding [0, 0] and dilation [1, 1]. All other keys are required, and unknown keys
are refused. The bundled workloads lie in `datasets/workloads` (in a wheel: `latbench/datasets/workloads`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from latbench.base.bundled_data import find_dataset_folder
from latbench.base.declared_keys import (
    TEXT,
    Key,
    Kind,
    MalformedDocument,
    check_mapping,
    choice,
    integer,
    is_integer,
    list_of,
    named_in_errors,
    refuse,
)
from latbench.base.files import write_text_atomically
from latbench.base.strict_yaml import read_yaml
from latbench.errors import BadData, UsageError
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)


UNNAMED = "the model is this one layer; wrap it in nn.Sequential to give the layer a name"


@dataclass(frozen=True)
class Layer:
    """One layer of a workload; `count` equal layers are timed once."""

    name: str
    shape: Shape
    count: int = 1


@dataclass(frozen=True)
class Workload:
    """The layers that dominate a model's time. `source` names where the shapes come from."""

    name: str
    source: str
    layers: tuple[Layer, ...]


def list_workloads() -> list[str]:
    """Return the names of the bundled workloads, sorted."""
    return sorted(path.stem for path in find_dataset_folder("workloads").glob("*.yaml"))


def read_workload(name_or_path: str | Path) -> Workload:
    """Read a workload.

    Parameters
    ----------
    name_or_path
        The name of a bundled workload, or the path of a YAML file.

    Returns
    -------
    Workload
        Its layers.

    Raises
    ------
    UsageError
        The name is unknown.
    BadData
        The file is missing or no workload; the message names the file and the layer.
    """
    path = find_workload_file(name_or_path)
    _LOG.info(f"reading {path}")
    document = read_yaml(path)
    with named_in_errors(path):
        return _parse_workload(document)


def find_workload_file(name_or_path: str | Path) -> Path:
    """Return the file of a workload, bundled or not. Raises as `read_workload`."""
    path = Path(name_or_path)
    if str(name_or_path) in list_workloads():
        return find_dataset_folder("workloads") / f"{name_or_path}.yaml"
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise BadData(f"{path}: no such workload file")
    raise UsageError(
        f"unknown workload {str(name_or_path)!r}: give a YAML file or one of {', '.join(list_workloads())}"
    )


def write_workload(workload: Workload, path: Path) -> None:
    """Write `workload` to `path`, whole or not at all; `read_workload` reads it again.

    Raises EnvironmentUnusable when the file cannot be written.
    """
    head = yaml.safe_dump({"name": workload.name, "source": workload.source}, sort_keys=False, allow_unicode=True)
    lines = [
        # One layer per line, because people read and diff workloads.
        "  - " + yaml.safe_dump(_entry(layer), sort_keys=False, default_flow_style=True, width=math.inf).strip()
        for layer in workload.layers
    ]
    write_text_atomically(path, "\n".join([head + "layers:", *lines]) + "\n")


def trace_model(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    name: str | None = None,
    *,
    keywords: Mapping[str, Any] | None = None,
) -> tuple[Workload, list[tuple[str, str]]]:
    """Run a model once and note the shape of every layer that it calls.

    The model runs in eval mode without gradients, and is left as it was. Layers are those that
    `sparse_kernels.prunable_layers.survey_layers` takes. A linear layer's n is the product of its input's leading
    dimensions. A layer over sequences (nn.Conv1d) is a convolution over images with one row.

    Parameters
    ----------
    model
        The model.
    inputs
        Its arguments.
    name
        Name of the workload; by default the model's class.
    keywords
        Its arguments by name.

    Returns
    -------
    workload : Workload
        Its layers in the order of the first call, named as in `model.named_modules()`.
    skipped : list of (str, str)
        Modules that were left out, with reasons: those that the survey leaves out, and layers that do not run exactly
        once in a forward pass.
    """
    import torch

    from sparse_kernels.prunable_layers import survey_layers

    survey = survey_layers(model)
    calls = _record_input_sizes(model, inputs, keywords or {}, survey.taken)
    layers: dict[str, Layer] = {}
    left_out = dict(survey.left_out)
    for layer_name, module in survey.taken.items():
        shape = _traced_shape(module, calls[layer_name]) if layer_name else UNNAMED
        if isinstance(shape, str):
            left_out[layer_name] = shape
        else:
            layers[layer_name] = Layer(layer_name, shape)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    given = [*inputs, *(keywords or {}).values()]
    sizes = ", ".join("x".join(map(str, item.shape)) for item in given if isinstance(item, torch.Tensor))
    order = [layers[layer] for layer in calls if layer in layers]
    places = {module_name: place for place, (module_name, _) in enumerate(model.named_modules())}
    skipped = sorted(left_out.items(), key=lambda entry: places[entry[0]])
    return Workload(name or type(model).__name__, f"traced from {kind} with inputs {sizes}", tuple(order)), skipped


def _record_input_sizes(
    model: torch.nn.Module,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    layers: Mapping[str, torch.nn.Module],
) -> dict[str, list[torch.Size]]:
    """Run the model and return the input sizes of each call of these layers, by layer name."""
    import torch

    calls: dict[str, list[torch.Size]] = defaultdict(list)
    names = {module: name for name, module in layers.items()}

    def note(module: torch.nn.Module, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        calls[names[module]].append((arguments[0] if arguments else next(iter(given.values()))).shape)

    modes = {module: module.training for module in model.modules()}
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in layers.values()]
    try:
        model.eval()
        with torch.no_grad():
            model(*inputs, **keywords)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    return calls


def _traced_shape(module: torch.nn.Module, inputs: list[torch.Size]) -> Shape | str:
    """Return the layer's shape for its one input, or the reason why it has none."""
    import torch

    from sparse_kernels.prunable_layers import weight_matrix

    if len(inputs) != 1:
        return f"called {len(inputs)} times in one forward pass" if inputs else "never called in the forward pass"
    size = inputs[0]
    try:
        if isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d):
            return _timed(_conv_shape(module, size))
        m, k = weight_matrix(module).shape
        return _timed(LinearShape(m=m, k=k, n=math.prod(size[:-1])))
    except ValueError as error:
        return str(error)


def _conv_shape(module: torch.nn.Conv1d | torch.nn.Conv2d, size: torch.Size) -> Conv2dShape:
    """Return the shape of a convolution; raise ValueError for an input without a batch."""
    from sparse_kernels.prunable_layers import find_geometry

    if len(size) != 2 + len(module.kernel_size):
        raise ValueError("its input has no batch dimension")
    (kh, kw), stride, padding, dilation = find_geometry(module)
    return Conv2dShape(
        batch=size[0], c_in=size[1], h=size[2] if len(size) == 4 else 1, w=size[-1], c_out=module.out_channels,
        kh=kh, kw=kw, stride=stride, padding=padding, dilation=dilation,
    )  # fmt: skip


def _timed(shape: Shape) -> Shape:
    if shape.n < 1:
        raise ValueError("its input is empty (n = 0)")
    return shape


_SIZE = integer(1)


def _parse_pair(value: Any, what: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(map(is_integer, value)):
        raise refuse(value, what, _PAIR_PHRASE)
    return value[0], value[1]


_PAIR_PHRASE = "two whole numbers [rows, columns]"
_PAIR = Kind(_PAIR_PHRASE, _parse_pair)
_OPS: dict[str, Callable[..., Shape]] = {"linear": LinearShape, "conv2d": Conv2dShape}
_EVERY_LAYER = {
    "name": Key(TEXT, "Name of the layer in its model", required=True),
    "op": Key(choice(*_OPS), "Operation", required=True),
    "count": Key(_SIZE, "Number of equal layers, which are timed once; by default 1"),
}
LAYER_KEYS = {
    "linear": {
        **_EVERY_LAYER,
        "m": Key(_SIZE, "Output features", required=True),
        "k": Key(_SIZE, "Input features", required=True),
        "n": Key(_SIZE, "Tokens of a call", required=True),
    },
    "conv2d": {
        **_EVERY_LAYER,
        "batch": Key(_SIZE, "Images of a call", required=True),
        "c_in": Key(_SIZE, "Input channels", required=True),
        "h": Key(_SIZE, "Height of the input", required=True),
        "w": Key(_SIZE, "Width of the input", required=True),
        "c_out": Key(_SIZE, "Output channels", required=True),
        "kh": Key(_SIZE, "Height of the filter", required=True),
        "kw": Key(_SIZE, "Width of the filter", required=True),
        "stride": Key(_PAIR, "Stride; by default [1, 1]"),
        "padding": Key(_PAIR, "Zeros on each side of the input; by default [0, 0]"),
        "dilation": Key(_PAIR, "Distance of the filter's elements; by default [1, 1]"),
    },
}
"""The keys of a layer, by operation."""


def _parse_layer(entry: Any, what: str) -> Layer:
    """Return the layer of a mapping. Raises MalformedDocument, which names the layer as soon as its name is known."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise refuse(entry, what, "a mapping with a name")
    layer = f"layer {entry['name']!r}"
    op = _EVERY_LAYER["op"].kind.parse(entry.get("op"), f"{layer}: op")
    arguments = check_mapping(entry, layer, LAYER_KEYS[op], f"{layer}: ")
    name, count = arguments.pop("name"), arguments.pop("count", 1)
    del arguments["op"]
    try:
        return Layer(name, _OPS[op](**arguments), count)
    except ValueError as error:
        raise MalformedDocument(f"{layer}: {error}") from error


WORKLOAD_KEYS = {
    "name": Key(TEXT, "Name of the workload", required=True),
    "source": Key(TEXT, "Where the shapes come from", required=True),
    "layers": Key(
        list_of(Kind("a layer", _parse_layer), "a list of at least one layer", least=1),
        "The layers that dominate the model's time",
        required=True,
    ),
}
"""The keys of a workload's file."""


def _parse_workload(document: Any) -> Workload:
    workload = Workload(**check_mapping(document, "a workload", WORKLOAD_KEYS))
    for name, count in Counter(layer.name for layer in workload.layers).items():
        if count > 1:
            raise MalformedDocument(f"layer {name!r} is listed {count} times; use count for equal layers")
    return workload


def _entry(layer: Layer) -> dict[str, Any]:
    """Return the YAML mapping of a layer, without default values."""
    fields: dict[str, Any] = {"name": layer.name, "op": layer.shape.op}
    for key, value in asdict(layer.shape).items():
        if key not in ("stride", "padding", "dilation"):
            fields[key] = value
        elif value != getattr(Conv2dShape, key):
            fields[key] = list(value)
    return fields if layer.count == 1 else fields | {"count": layer.count}
