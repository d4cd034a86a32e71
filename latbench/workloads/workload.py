"""Workloads: named lists of layer shapes, read from YAML or traced from a torch model.

    name: bert-base
    source: "Devlin et al. 2019, table ...; huggingface bert-base-uncased config"
    layers:
      - {name: encoder.0.query, op: linear, m: 768, k: 768, n: 128, count: 12}
      - {name: layer1.0.conv2, op: conv2d, batch: 1, c_in: 64, h: 56, w: 56, c_out: 64, kh: 3, kw: 3,
         stride: [1, 1], padding: [1, 1], dilation: [1, 1], count: 3}

count, stride, padding and dilation may be left out (1, [1, 1], [0, 0] and [1, 1]); nothing else may, and nothing
unknown may be added. The bundled ones lie in `datasets/workloads` (in a wheel: `latbench/datasets/workloads`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from latbench.base.bundled_data import find_dataset_folder
from latbench.base.files import write_text_atomically
from latbench.base.strict_yaml import read_yaml
from latbench.errors import BadData, UsageError
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Layer:
    """One layer of a workload; `count` equal layers are timed once."""

    name: str
    shape: Shape
    count: int = 1


@dataclass(frozen=True)
class Workload:
    """The layers that a model spends its time in. `source` names where the shapes come from."""

    name: str
    source: str
    layers: tuple[Layer, ...]


def list_workloads() -> list[str]:
    """The names of the workloads that come with latbench, sorted."""
    return sorted(path.stem for path in find_dataset_folder("workloads").glob("*.yaml"))


def read_workload(name_or_path: str | Path) -> Workload:
    """Read a workload: a bundled one by its name, or any YAML file by its path.

    Raises UsageError for a name that is neither, BadData (with file and layer) for a file that is no workload.
    """
    return _read(find_workload_file(name_or_path))


def find_workload_file(name_or_path: str | Path) -> Path:
    """The file of a workload, a bundled one or any other; raises as `read_workload` does where there is none."""
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
    """Write `workload` to `path`, whole or not at all; `read_workload` gives it back.

    Raises EnvironmentUnusable when the file cannot be written.
    """
    head = yaml.safe_dump({"name": workload.name, "source": workload.source}, sort_keys=False, allow_unicode=True)
    lines = [
        # One layer a line: a workload is read by people, and compared by their tools.
        "  - " + yaml.safe_dump(_entry(layer), sort_keys=False, default_flow_style=True, width=math.inf).strip()
        for layer in workload.layers
    ]
    write_text_atomically(path, "\n".join([head + "layers:", *lines]) + "\n")


def trace_model(
    model: torch.nn.Module, inputs: Sequence[Any], name: str | None = None
) -> tuple[Workload, list[tuple[str, str]]]:
    """Run `model(*inputs)` once, in eval mode and without gradients, and note the shape of every layer it calls.

    A layer is an `nn.Linear` (n: the product of its input's leading dimensions) or an `nn.Conv2d` with groups=1 and
    symmetric zero padding. Returns the workload, layers in the order of the first call, named as in
    `model.named_modules()`, and what was left out as (module name, reason): whatever else holds a weight of two or
    more dimensions, shares its weight, or runs not exactly once a forward pass. The model is left as it was.
    """
    import torch

    names = {module: module_name for module_name, module in model.named_modules()}
    calls: dict[str, list[torch.Size]] = defaultdict(list)

    def note(module: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        calls[names[module]].append((arguments[0] if arguments else keywords["input"]).shape)

    layer_kinds = (torch.nn.Linear, torch.nn.Conv2d)
    candidates = [module for module in names if isinstance(module, layer_kinds)]
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in candidates]
    modes = {module: module.training for module in names}
    try:
        model.eval()
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training

    layers: dict[str, Layer] = {}
    skipped: list[tuple[str, str]] = []
    shared = _shared_weights(names)
    for module, module_name in names.items():
        matrices = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        if not matrices and not isinstance(module, layer_kinds):
            continue  # norms, activations and containers: nothing that a pattern could prune
        shape = shared.get(module) or _traced_shape(module, module_name, calls[module_name])
        if isinstance(shape, str):
            skipped.append((module_name, shape))
        else:
            layers[module_name] = Layer(module_name, shape)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    given = ", ".join("x".join(map(str, item.shape)) for item in inputs if isinstance(item, torch.Tensor))
    order = [layers[layer] for layer in calls if layer in layers]
    return Workload(name or type(model).__name__, f"traced from {kind} with inputs {given}", tuple(order)), skipped


def _shared_weights(names: dict[torch.nn.Module, str]) -> dict[torch.nn.Module, str]:
    """Modules whose weight is another's too, with the sentence that says so: pruning one would prune the other."""
    owners: dict[int, list[torch.nn.Module]] = defaultdict(list)
    for module in names:
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                owners[id(parameter)].append(module)
    return {
        module: f"its weight is shared with {', '.join(names[other] for other in group if other is not module)}"
        for group in owners.values()
        if len(group) > 1
        for module in group
    }


def _traced_shape(module: torch.nn.Module, name: str, inputs: list[torch.Size]) -> Shape | str:
    """The layer's shape for its one input, or the reason why it has none."""
    import torch

    if not isinstance(module, torch.nn.Linear | torch.nn.Conv2d):
        return f"{type(module).__name__} is neither a linear layer nor a 2-d convolution"
    if not name:
        return "the model is this one layer; wrap it in nn.Sequential to give the layer a name"
    if len(inputs) != 1:
        return f"called {len(inputs)} times in one forward pass" if inputs else "never called in the forward pass"
    if module.weight.dtype != torch.float32:
        return f"its weight is {str(module.weight.dtype).removeprefix('torch.')}, not float32"
    size = inputs[0]
    try:
        if isinstance(module, torch.nn.Linear):
            return _timed(LinearShape(m=module.out_features, k=module.in_features, n=math.prod(size[:-1])))
        return _timed(_conv2d_shape(module, size))
    except ValueError as error:
        return str(error)


def _conv2d_shape(module: torch.nn.Conv2d, size: torch.Size) -> Conv2dShape:
    """Raises ValueError, in the words of `trace_model`, for a convolution that latbench does not prune."""
    if module.groups > 1:
        kind = "depthwise" if module.groups == module.in_channels else "grouped"
        raise ValueError(f"{kind} convolution ({module.groups} groups)")
    if module.padding_mode != "zeros":
        raise ValueError(f"padding with {module.padding_mode}, not zeros")
    if len(size) != 4:
        raise ValueError("its input has no batch dimension")
    kernel, dilation = module.kernel_size, module.dilation
    if isinstance(module.padding, str):
        # torch's "same" pads dilation * (kernel - 1) in all; an odd number would put one more on one side.
        total = [0, 0] if module.padding == "valid" else [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(amount % 2 for amount in total):
            raise ValueError("its 'same' padding is not symmetric")
        padding = (total[0] // 2, total[1] // 2)
    else:
        padding = (module.padding[0], module.padding[1])
    return Conv2dShape(
        batch=size[0], c_in=size[1], h=size[2], w=size[3], c_out=module.out_channels, kh=kernel[0], kw=kernel[1],
        stride=(module.stride[0], module.stride[1]), padding=padding, dilation=(dilation[0], dilation[1]),
    )  # fmt: skip


def _timed(shape: Shape) -> Shape:
    if shape.n < 1:
        raise ValueError("it is given nothing to work on (n = 0)")
    return shape


_WHOLE = {"m", "k", "n", "count", "batch", "c_in", "h", "w", "c_out", "kh", "kw"}
_OPS: dict[str, tuple[Callable[..., Shape], set[str], set[str]]] = {
    "linear": (LinearShape, {"m", "k", "n"}, set()),
    "conv2d": (Conv2dShape, {"batch", "c_in", "h", "w", "c_out", "kh", "kw"}, {"stride", "padding", "dilation"}),
}


def _read(path: Path) -> Workload:
    try:
        return _workload(read_yaml(path))
    except _Malformed as error:
        raise BadData(f"{path}: {error}") from error


class _Malformed(Exception):
    """What is wrong inside a workload file, still without the file's name."""


def _workload(document: Any) -> Workload:
    _check_keys(document, "a workload", required={"name", "source", "layers"})
    for key in ("name", "source"):
        if not isinstance(document[key], str) or not document[key].strip():
            raise _Malformed(f"{key} must be a text that says something, not {document[key]!r}")
    if not isinstance(document["layers"], list) or not document["layers"]:
        raise _Malformed("layers must be a list of at least one layer")
    layers = tuple(_layer(entry, position) for position, entry in enumerate(document["layers"], start=1))
    names = [layer.name for layer in layers]
    for name in names:
        if names.count(name) > 1:
            raise _Malformed(f"layer {name!r} is listed {names.count(name)} times; use count for equal layers")
    return Workload(document["name"], document["source"], layers)


def _layer(entry: Any, position: int) -> Layer:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise _Malformed(f"layer {position} must be a mapping with a name, not {entry!r}")
    what = f"layer {entry['name']!r}"
    op = entry.get("op")
    if not isinstance(op, str) or op not in _OPS:
        raise _Malformed(f"{what}: op must be one of {', '.join(_OPS)}, not {op!r}")
    build, required, optional = _OPS[op]
    _check_keys(entry, what, required={"name", "op"} | required, optional=frozenset({"count"} | optional))
    for key in _WHOLE & entry.keys():
        if not _is_whole(entry[key]) or entry[key] < 1:
            raise _Malformed(f"{what}: {key} must be a whole number of at least 1, not {entry[key]!r}")
    arguments = {key: entry[key] for key in required}
    for key in optional & entry.keys():
        pair = entry[key]
        if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_whole, pair)):
            raise _Malformed(f"{what}: {key} must be two whole numbers [rows, columns], not {pair!r}")
        arguments[key] = tuple(pair)
    try:
        return Layer(entry["name"], build(**arguments), entry.get("count", 1))
    except ValueError as error:
        raise _Malformed(f"{what}: {error}") from error


def _check_keys(entry: Any, what: str, required: set[str], optional: frozenset[str] = frozenset()) -> None:
    if not isinstance(entry, dict):
        raise _Malformed(f"{what} must be a mapping with the keys {', '.join(sorted(required))}")
    if missing := required - entry.keys():
        raise _Malformed(f"{what}: {', '.join(sorted(missing))} missing")
    if unknown := entry.keys() - required - optional:
        known = ", ".join(sorted(required | optional))
        raise _Malformed(f"{what}: unknown key {', '.join(sorted(map(str, unknown)))}; known are {known}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _entry(layer: Layer) -> dict[str, Any]:
    """The YAML mapping of a layer, without what is at its default."""
    fields: dict[str, Any] = {"name": layer.name, "op": layer.shape.op}
    for key, value in asdict(layer.shape).items():
        if key not in ("stride", "padding", "dilation"):
            fields[key] = value
        elif value != getattr(Conv2dShape, key):
            fields[key] = list(value)
    return fields if layer.count == 1 else fields | {"count": layer.count}
