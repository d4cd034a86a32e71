"""Workloads: named lists of layer shapes, read from YAML or traced from a torch model.

    name: bert-base
    source: "Devlin et al. 2019, table ...; huggingface bert-base-uncased config"
    layers:
      - {name: encoder.0.query, op: linear, m: 768, k: 768, n: 128, count: 12}
      - {name: layer1.0.conv2, op: conv2d, batch: 1, c_in: 64, h: 56, w: 56, c_out: 64, kh: 3, kw: 3,
         stride: [1, 1], padding: [1, 1], dilation: [1, 1], count: 3}

A linear layer that runs on several token counts lists them: `n: [1, 16, 512]`. It is timed at each. Wherever a
workload is named, `NAME@16` means its layers on 16 tokens.

Defaults are count 1, stride [1, 1], padding [0, 0] and dilation [1, 1]. All other keys of a layer are required, and
unknown keys are refused. The bundled workloads lie in `datasets/workloads`; in a wheel, in
`latbench/datasets/workloads`.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from latbench.base.bundled_data import find_dataset_folder
from latbench.base.declared_keys import (
    FLAG,
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
    """The layers that dominate a model's time.

    Attributes
    ----------
    name : str
        The name.
    source : str
        Where the shapes come from.
    layers : tuple of Layer
        The layers. One that runs on several token counts is there once for each, in a row.
    standard : bool
        Whether a sweep that names no workload measures it.
    """

    name: str
    source: str
    layers: tuple[Layer, ...]
    standard: bool = True

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The token counts, rising, where a layer runs on several of them; else ()."""
        several = {name for name, count in Counter(layer.name for layer in self.layers).items() if count > 1}
        return tuple(sorted({layer.shape.n for layer in self.layers if layer.name in several}))

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each layer by name. Raises UsageError if a layer has several token counts."""
        if counts := self.token_counts:
            raise UsageError(
                f"workload {self.name} is for {_join(counts)} tokens, and each layer needs one shape here: name one "
                f"count, as in {self.name}{AT}{counts[0]}"
            )
        return {layer.name: layer.shape for layer in self.layers}


AT = "@"
"""Between a workload and a token count: llama-3.1-8b@16."""


def list_workloads() -> list[str]:
    """Return the names of the bundled workloads, sorted."""
    return sorted(path.stem for path in find_dataset_folder("workloads").glob("*.yaml"))


def list_standard_workloads() -> list[str]:
    """Return the names of the bundled workloads that a sweep measures if it names none, sorted."""
    return [name for name in list_workloads() if read_workload(name).standard]


def read_workload(name_or_path: str | Path) -> Workload:
    """Read a workload.

    Parameters
    ----------
    name_or_path
        The name of a bundled workload, or the path of a YAML file. With `@16` after it: its layers on 16 tokens, one
        of the token counts that the file lists.

    Returns
    -------
    Workload
        Its layers.

    Raises
    ------
    UsageError
        The name is unknown, or the file does not list the token count.
    BadData
        The file is missing or no workload; the message names the file and the layer.
    """
    path, tokens = _find_file(name_or_path)
    _LOG.info(f"reading {path}")
    document = read_yaml(path)
    with named_in_errors(path):
        workload = _parse_workload(document)
    return workload if tokens is None else _select_tokens(workload, tokens)


def find_workload_file(name_or_path: str | Path) -> Path:
    """Return the file of a workload, bundled or not. Raises as `read_workload`."""
    return _find_file(name_or_path)[0]


def _find_file(name_or_path: str | Path) -> tuple[Path, int | None]:
    """Return the file of a workload, and the token count after its name, if there is one."""
    text = str(name_or_path)
    if Path(text).is_file():
        return Path(text), None
    name, at, count = text.rpartition(AT)
    tokens = int(count) if at and count.isdecimal() else None
    path = Path(text if tokens is None else name)
    if str(path) in list_workloads():
        return find_dataset_folder("workloads") / f"{path}.yaml", tokens
    if path.is_file():
        return path, tokens
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise BadData(f"{path}: no such workload file")
    raise UsageError(f"unknown workload {str(path)!r}: give a YAML file or one of {', '.join(list_workloads())}")


def _select_tokens(workload: Workload, tokens: int) -> Workload:
    """Return the layers of a workload on one of its token counts."""
    counts = workload.token_counts
    if tokens not in counts:
        which = (
            f"the token counts {_join(counts)}, not {tokens}"
            if counts
            else f"no token counts, so there is no @{tokens}"
        )
        raise UsageError(f"workload {workload.name} lists {which}: copy its file, and list {tokens} there (n: [...])")
    layers = tuple(layer for layer in workload.layers if layer.shape.n == tokens)
    return replace(workload, name=f"{workload.name}{AT}{tokens}", layers=layers)


def _join(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def write_workload(workload: Workload, path: Path) -> None:
    """Write `workload` to `path`, whole or not at all; `read_workload` reads it again.

    Raises EnvironmentUnusable when the file cannot be written.
    """
    top = {"name": workload.name, "source": workload.source} | ({} if workload.standard else {"standard": False})
    head = yaml.safe_dump(top, sort_keys=False, allow_unicode=True)
    lines = [
        # One layer per line, because people read and diff workloads.
        "  - " + yaml.safe_dump(_entry(list(equal)), sort_keys=False, default_flow_style=True, width=math.inf).strip()
        for _, equal in itertools.groupby(workload.layers, key=lambda layer: layer.name)
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
_TOKENS_PHRASE = "a whole number of at least 1, or a list of different ones"


def _parse_tokens(value: Any, what: str) -> tuple[int, ...]:
    """Return the token counts that a file gives, one or several."""
    if not isinstance(value, list):
        return (_SIZE.parse(value, what),)
    counts = tuple(_SIZE.parse(each, f"{what} (item {place})") for place, each in enumerate(value, start=1))
    if not counts or len(set(counts)) < len(counts):
        raise refuse(value, what, _TOKENS_PHRASE)
    return counts


_TOKENS = Kind(_TOKENS_PHRASE, _parse_tokens)


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
        "n": Key(_TOKENS, "Tokens of a call. With a list, the layer is timed at each", required=True),
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


def _parse_layer(entry: Any, what: str) -> list[Layer]:
    """Return the layer of a mapping, once for each token count.

    Raises MalformedDocument, which names the layer as soon as its name is known.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise refuse(entry, what, "a mapping with a name")
    layer = f"layer {entry['name']!r}"
    op = _EVERY_LAYER["op"].kind.parse(entry.get("op"), f"{layer}: op")
    arguments = check_mapping(entry, layer, LAYER_KEYS[op], f"{layer}: ")
    name, count = arguments.pop("name"), arguments.pop("count", 1)
    del arguments["op"]
    several = [{"n": tokens} for tokens in arguments.pop("n")] if "n" in arguments else [{}]
    try:
        return [Layer(name, _OPS[op](**arguments, **tokens), count) for tokens in several]
    except ValueError as error:
        raise MalformedDocument(f"{layer}: {error}") from error


WORKLOAD_KEYS = {
    "name": Key(TEXT, "Name of the workload", required=True),
    "source": Key(TEXT, "Where the shapes come from", required=True),
    "standard": Key(FLAG, "Whether a sweep that names no workload measures it; by default true"),
    "layers": Key(
        list_of(Kind("a layer", _parse_layer), "a list of at least one layer", least=1),
        "The layers that dominate the model's time",
        required=True,
    ),
}
"""The keys of a workload's file."""


def _parse_workload(document: Any) -> Workload:
    given = check_mapping(document, "a workload", WORKLOAD_KEYS)
    entries: tuple[list[Layer], ...] = given.pop("layers")
    for name, count in Counter(layers[0].name for layers in entries).items():
        if count > 1:
            raise MalformedDocument(
                f"layer {name!r} is listed {count} times; use count for equal layers, and a list for n"
            )
    return Workload(layers=tuple(itertools.chain.from_iterable(entries)), **given)


def _entry(equal: Sequence[Layer]) -> dict[str, Any]:
    """Return the YAML mapping of a layer at all its token counts, without default values."""
    layer = equal[0]
    fields: dict[str, Any] = {"name": layer.name, "op": layer.shape.op}
    for key, value in asdict(layer.shape).items():
        if key not in ("stride", "padding", "dilation"):
            fields[key] = value
        elif value != getattr(Conv2dShape, key):
            fields[key] = list(value)
    if len(equal) > 1:
        fields["n"] = [each.shape.n for each in equal]
    return fields if layer.count == 1 else fields | {"count": layer.count}
