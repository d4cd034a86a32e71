"""Convert a torch model: replace layers by sparse ones, and fold BatchNorm, bias, ReLU and GELU into them.

In traced parts on a CPU, `nn.attention` replaces attention without a mask: torch's may take as long as all layers.
Between sparse linear layers with only element-wise functions between them, tokens stay in tiles (`torch_tiles`).
Between sparse convolutions images stay in frames (`pad_propagation`). Max pooling has a kernel of ours (`pooling`).
Large batches of images are computed a few at a time (`image_turns`). Denormal weights become zeros.

To fold something into a layer, nothing else may read the layer's output, which only a graph shows. So the model
becomes a torch.fx GraphModule, or the largest parts of it that can be traced do. A traced part is kept only if it
gives the same result as the original on the example inputs. Layers in other parts are replaced without folding.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack, redirect_stderr
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.parameter import is_lazy

from sparse_kernels.denormal_weights import drop_denormals
from sparse_kernels.formats.int8 import Quantization, round_to_steps
from sparse_kernels.fx_graphs import (
    activation,
    called_once,
    drop_identities,
    element_wise,
    erase,
    hooked,
    only_user,
    tidy,
    wrap,
)
from sparse_kernels.graph_passes.image_turns import take_turns
from sparse_kernels.graph_passes.pad_propagation import keep_frames
from sparse_kernels.graph_passes.pooling import swap_poolings
from sparse_kernels.graph_passes.traced_call import find_form, follow_call, trace_call
from sparse_kernels.nn.attention_operator import attention
from sparse_kernels.nn.sparse_conv import SparseConv1d, SparseConv2d
from sparse_kernels.nn.sparse_layer import GPU_BACKENDS, INT8, SparseLayer
from sparse_kernels.nn.sparse_linear import SparseLinear
from sparse_kernels.norm_folding import fold_norm
from sparse_kernels.patterns import Pattern
from sparse_kernels.prunable_layers import (
    FLOATS,
    bake_weights,
    is_layer,
    refuse_layer,
    set_weight_matrix,
    survey_layers,
    weight_matrix,
)
from sparse_kernels.same_results import CONVERTED, FOLDED, same_results
from sparse_kernels.tensors.torch_tiles import OnTiles


@dataclass(frozen=True)
class LayerPattern:
    """The pattern that a layer gets.

    pattern: of the mask. mask: bool (m, k), True where a weight is kept; None keeps all. precision: float32, or what
    its kernel may round to bfloat16, as `prepare` and `prepare_conv2d` say; int8 with a quantization. quantization:
    how the layer is read in eight bits. Weights are rounded to its steps.
    """

    pattern: Pattern
    mask: np.ndarray | None = None
    precision: str = "float32"
    quantization: Quantization | None = None


def convert(
    model: nn.Module,
    choices: Mapping[str, LayerPattern],
    example_inputs: tuple[Any, ...],
    *,
    example_keywords: Mapping[str, Any] | None = None,
    backend: str = "numba",
    tune: bool = False,
) -> nn.Module:
    """Return a copy of a model for inference in which every named layer runs its sparse kernel.

    The copy has no gradients: call it in any thread, also without `torch.no_grad()`. Its process may fork.

    Parts that can be traced become `torch.fx.GraphModule`s. They keep only their `forward`, as it computed on the
    example inputs; later changes of plain attributes have no effect. Modules with hooks stay as they are.

    Parameters
    ----------
    model : nn.Module
        Not changed.
    choices : mapping from str to LayerPattern
        Names of layers that `survey_layers` takes, and their patterns. Other layers stay torch's own; a BatchNorm
        that follows one directly is folded into it. Computed weights, as of weight norm, become plain ones first.
    example_inputs : tuple
        What the model is called with. They prove that the converted model is the same function as the masked one (for
        a GPU backend, if they are on a GPU).
    example_keywords : mapping from str, optional
        What it is called with by name.
    backend : str
        ``numba``, ``reference`` or ``cupy``.
    tune : bool
        Linear layers try a few kernels at their first call and keep the fastest; backend ``numba`` only.

    Returns
    -------
    nn.Module
        The converted model.

    Raises
    ------
    ValueError
        If a name is no prunable layer, if no part of the model calls it as a module, or if the model cannot be
        copied or converted. The message names the layer if one is at fault.

    Examples
    --------
    >>> import torch, latbench as lb
    >>> dense, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()), torch.randn(8, 64)
    >>> pattern = lb.patterns.parse("vector:32")
    >>> mask = pattern.mask(dense[0].weight.detach().numpy() ** 2, sparsity=0.5)
    >>> fast = lb.convert(dense, {"0": lb.LayerPattern(pattern, mask)}, (x,))
    >>> y = fast(x)
    """
    check_choices(choices)
    example = _read_example(example_inputs, example_keywords)
    _refuse_missing(model)
    try:
        return _convert_copy(model, choices, example, backend, tune, traces=True)
    except _NotProven:  # a part that is not traced may look into one that is, where only its forward is left
        return _convert_copy(model, choices, example, backend, tune, traces=False)


def check_choices(choices: Mapping[str, LayerPattern]) -> None:
    """Raise ValueError, which names the layer, if a choice is no LayerPattern, such as a pattern without a mask."""
    for name, choice in choices.items():
        if not isinstance(choice, LayerPattern):
            raise ValueError(
                f"layer {name!r} needs a LayerPattern(pattern, mask), not {choice!r}: a mask says which weights stay"
            )


class _NotProven(ValueError):
    """A converted model does not give the result of the masked one."""


def _convert_copy(
    model: nn.Module,
    choices: Mapping[str, LayerPattern],
    example: _Example,
    backend: str,
    tune: bool,
    *,
    traces: bool,
) -> nn.Module:
    """Do what `convert` does, with traced parts or by replacing layers alone."""
    model = copy_model(model).eval()
    bake_weights(model)
    drop_denormals(model)
    chosen = _apply_choices(model, choices, backend)
    _leave_fast_paths(model, chosen)
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {module: name for name, module in modules.items() if module in chosen}
    run = _record_run(model, example, chosen)
    for module in chosen:
        if names[module] not in run.called:
            raise ValueError(f"layer {names[module]!r}: the model does not call it on the example inputs")
    conversion = _Conversion(chosen, Counter(modules.values()), run, backend, tune, traces)
    converted = conversion.of(model, "")
    for module in chosen:
        if module not in conversion.done:
            raise _NotProven(f"layer {names[module]!r} was not reached")
    if backend not in GPU_BACKENDS or _lies_on_gpu([example.inputs, example.keywords]):
        _prove(converted, example, run.calls[""].result)
    _freeze(converted)
    return converted


def _lies_on_gpu(value: Any) -> bool:
    """Return whether a tensor on a GPU is in a value: in lists, tuples and mappings, too."""
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(_lies_on_gpu, parts))


def _freeze(model: nn.Module) -> None:
    """Let no tensor of the model ask for gradients, so that plain calls work outside of `torch.no_grad()`, too."""
    model.requires_grad_(False)
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            if isinstance(value, torch.Tensor):
                value.requires_grad_(False)


@dataclass(frozen=True)
class _Example:
    """What the model is called with."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]


def _read_example(inputs: Any, keywords: Mapping[str, Any] | None) -> _Example:
    """Return what the model is called with. Raises ValueError for a tensor alone, whose rows would be arguments."""
    if not isinstance(inputs, tuple | list):
        raise ValueError(f"the example inputs are a tuple, such as (x,), not a {type(inputs).__name__}")
    return _Example(tuple(inputs), dict(keywords or {}))


def _refuse_missing(model: nn.Module) -> None:
    """Raise ValueError, which names the tensor, if the numbers of a parameter or buffer are not there yet."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"{name} is not initialized yet: call the model once before it is converted")
        if tensor.is_meta:
            raise ValueError(f"{name} has no numbers (device meta): load them before the model is converted")


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of the model. Raises ValueError if something in it cannot be copied.

    torch copies no tensor that was computed with gradients, such as the weight of a layer under `weight_norm`. Its
    numbers are copied.
    """
    held = (value for module in model.modules() for value in vars(module).values())
    computed = (value for value in held if isinstance(value, torch.Tensor) and not value.is_leaf)
    try:
        return copy.deepcopy(model, {id(value): value.detach().clone() for value in computed})
    except Exception as error:
        raise ValueError(f"the model cannot be copied: {type(error).__name__}: {error}") from error


def _leave_fast_paths(model: nn.Module, chosen: Mapping[nn.Module, LayerPattern]) -> None:
    """Let torch's encoders call the chosen layers: their fast paths read the weights instead. In place."""
    for module in model.modules():
        if not any(layer in chosen for layer in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # what the fast path asks first
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _apply_choices(
    model: nn.Module, choices: Mapping[str, LayerPattern], backend: str
) -> dict[nn.Module, LayerPattern]:
    """Mask and round the weights of the chosen layers, in place, and return the layers with their patterns."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = {module: name for name, module in model.named_modules()}
    _separate_weights(model, [modules[name] for name in choices if name in modules])
    survey = survey_layers(model, FLOATS)
    chosen: dict[nn.Module, LayerPattern] = {}
    for name, choice in choices.items():
        if name not in modules:
            raise ValueError(f"the model has no layer {name!r}")
        module = modules[name]
        if module in chosen:
            if not _alike(choice, chosen[module]):
                raise ValueError(f"layer {name!r}: it has another name too, under which another pattern is chosen")
            continue
        if names[module] not in survey.taken:
            raise ValueError(f"layer {name!r}: {survey.left_out.get(names[module]) or refuse_layer(module)}")
        try:
            chosen[module] = _apply(choice, module, backend)
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from None
    return chosen


def _separate_weights(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Give each of these layers a weight of its own, in place: what else reads a shared one keeps all of it."""
    owners = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    for layer in layers:
        weight = layer._parameters.get("weight")
        if weight is not None and owners[id(weight)] > 1:
            layer.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)


def _alike(a: LayerPattern, b: LayerPattern) -> bool:
    masks = a.mask is b.mask or (a.mask is not None and b.mask is not None and np.array_equal(a.mask, b.mask))
    read, other = a.quantization, b.quantization
    alike = read is other or (
        read is not None
        and other is not None
        and read.input_range == other.input_range
        and np.array_equal(read.scales, other.scales)
    )
    return masks and alike and (a.pattern, a.precision) == (b.pattern, b.precision)


def _apply(choice: LayerPattern, module: nn.Module, backend: str) -> LayerPattern:
    """Make the weight what its kernel will multiply with, in place: masked and rounded; return what is known then."""
    if choice.mask is not None:
        matrix = weight_matrix(module)
        if choice.mask.shape != matrix.shape:
            raise ValueError(f"the mask is {choice.mask.shape}, and its weight is {tuple(matrix.shape)}")
        mask = torch.from_numpy(np.ascontiguousarray(choice.mask, bool)).to(matrix.device)
        set_weight_matrix(module, torch.where(mask, matrix, 0.0))
    if choice.quantization is not None:
        matrix, scales = weight_matrix(module), choice.quantization.scales
        if scales.shape != (len(matrix),) or not (scales > 0).all():
            raise ValueError(f"a weight of {len(matrix)} rows needs {len(matrix)} scales, positive and finite")
        rounded = round_to_steps(matrix.float().cpu().numpy(), scales)
        largest = np.rint(np.abs(rounded / scales[:, None]).max(axis=1, initial=0.0)).astype(np.float32)
        choice = replace(choice, quantization=replace(choice.quantization, largest=largest))
        set_weight_matrix(module, torch.from_numpy(rounded).to(matrix))
    if choice.precision != "float32":
        _sparse(module, choice, None, backend, tune=False)  # refuses what cannot be, while the layer's name is known
    if choice.precision.startswith("bfloat16"):
        set_weight_matrix(module, weight_matrix(module).bfloat16().float())
    return choice


@dataclass
class _Conversion:
    """What is needed while a model is converted, part by part.

    names: how many each module has in the whole model. traces: whether parts may become graphs. done: what each
    chosen layer has become.
    """

    chosen: Mapping[nn.Module, LayerPattern]
    names: Counter[nn.Module]
    run: _ExampleRun
    backend: str
    tune: bool
    traces: bool
    done: dict[nn.Module, nn.Module] = field(default_factory=dict)

    def of(self, part: nn.Module, path: str) -> nn.Module:
        """Convert `part`, found at `path`, whole if it can be traced, else child by child."""
        if part in self.chosen:
            if part not in self.done:
                self.done[part] = _sparse(part, self.chosen[part], None, self.backend, self.tune)
            return self.done[part]
        everything = part.named_modules(remove_duplicate=False)
        inside = {name: module for name, module in everything if module in self.chosen}
        # What is folded into a layer must not be folded into one that others outside of this part call too.
        alone = all(self.names[module] == count for module, count in Counter(inside.values()).items())
        if self.traces and path in self.run.calls and alone and not self._loses_state(part):
            traced = _trace(part, self.run.calls[path])
            if traced is not None:
                choices = {name: self.chosen[module] for name, module in inside.items()}
                before = dict(self.done)
                swapped = _swap(traced, choices, self.backend, self.tune)
                self.done |= {inside[name]: layer for name, layer in swapped.items()}
                self._enter_leaves(traced, part, path)
                if all(module in self.done for module in inside.values()):
                    return take_turns(traced) if self.backend == "numba" else traced
                self.done = before  # others call layers in it, through a method that the graph has not
        traceable = self.traces and self.backend == "numba" and path in self.run.calls and not self._loses_state(part)
        for name, child in part._modules.items():
            if child is not None:
                setattr(part, name, self.of(child, f"{path}.{name}" if path else name))
        if traceable:
            _trace_calls(part, self.run.calls[path])
        return part

    def _loses_state(self, part: nn.Module) -> bool:
        """Return whether tracing would lose hooks, changes that a call makes, or the methods of Lightning's class.

        Opened are the part, and modules below it that are not torch's own.
        """
        tracer = _LayerTracer()
        below = (
            module for name, module in part.named_modules() if not (name and tracer.is_leaf_module(module, name))
        )
        return any(hooked(module) or module in self.run.changed or _is_lightning(module) for module in below)

    def _enter_leaves(self, traced: fx.GraphModule, part: nn.Module, path: str) -> None:
        """Convert the modules with chosen layers that the graph of a part calls whole, such as torch's own."""
        for target in {str(node.target) for node in traced.graph.nodes if node.op == "call_module"}:
            try:
                module = part.get_submodule(target)
            except AttributeError:  # one that was put into the graph
                continue
            if module not in self.chosen and any(layer in self.chosen for layer in module.modules()):
                traced.set_submodule(target, self.of(module, f"{path}.{target}" if path else target))


def _is_lightning(module: nn.Module) -> bool:
    """Return whether a module is a LightningModule: its trainer calls methods that a graph does not have."""
    return any(
        kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning") for kind in type(module).__mro__
    )


def _prove(converted: nn.Module, example: _Example, expected: Any) -> None:
    """Raise _NotProven unless the converted model gives what is expected on the example inputs.

    Layers that may round activations do not do so here: how far that leads is no matter of the conversion.
    """
    rounding = [
        layer
        for layer in converted.modules()
        if isinstance(layer, SparseLayer) and layer.precision in ("bfloat16", INT8)
    ]
    try:
        with ExitStack() as unrounded, redirect_stderr(io.StringIO()):  # torch.fx prints what fails
            for layer in rounding:
                unrounded.enter_context(layer.in_float32())
            result = _run(converted, example.inputs, example.keywords)
    except _FROM_MODELS as error:
        raise _NotProven(
            f"{_find_place(converted, error)} reads more of a layer than its result, or gives it what a sparse one "
            f"refuses: {error}"
        ) from None
    if not same_results(result, expected, CONVERTED):
        raise _NotProven(
            "the converted model gives another result on the example inputs than the masked one: some part of the "
            "model does not treat its layers as layers; choose fewer of them"
        )


_FROM_MODELS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What a model may raise when a layer is not what it expects."""


def _find_place(model: nn.Module, error: BaseException) -> str:
    """Return which module of the model raised an error, as messages name it: the innermost that is not ours."""
    names = {module: name for name, module in model.named_modules()}
    place, trace = "the model", error.__traceback__
    while trace is not None:
        running = trace.tb_frame.f_locals.get("self")
        if isinstance(running, nn.Module) and names.get(running) and not isinstance(running, SparseLayer):
            place = f"module {names[running]!r}"
        trace = trace.tb_next
    return place


def _run(
    model: nn.Module,
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
    look: Callable[[], object] = lambda: None,
) -> Any:
    """Return the model's result; leave inputs, buffers and random numbers as they were.

    look: called when the model has run, before its buffers are what they were.
    """
    kept = [
        (buffer, buffer.clone())
        for module in model.modules()
        if not isinstance(module, SparseLayer)
        for buffer in module._buffers.values()
        if buffer is not None
    ]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = copy.deepcopy(model(*copy.deepcopy(inputs), **copy.deepcopy(keywords)))
        look()
        for buffer, before in kept:
            buffer.copy_(before)
    return result


# ------------------------------------------------------------------------------------------------ tracing


@dataclass(frozen=True)
class _Call:
    """One call of a module in the example run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@dataclass(frozen=True)
class _ExampleRun:
    """What a run on the example inputs shows.

    calls: the first call of each module that has children, by path. changed: modules whose buffers or attributes are
    others after it. called: names of the chosen layers that were called.
    """

    calls: dict[str, _Call]
    changed: set[nn.Module]
    called: set[str]


def _record_run(model: nn.Module, example: _Example, chosen: Collection[nn.Module]) -> _ExampleRun:
    """Run the model on the example inputs, and return what that shows."""
    calls: dict[str, _Call] = {}
    given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    before = {module: _find_state(module) for module in model.modules()}
    changed: set[nn.Module] = set()
    called: set[str] = set()
    handles = []
    for name, module in model.named_modules(remove_duplicate=False):
        if module in chosen:
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: called.add(name)))
        if not any(True for _ in module.children()) and name:
            continue

        # Modules may change their inputs in place (ReLU(inplace=True), caches), so what they see is copied before.
        def copy_inputs(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            if name not in given:
                given[name] = copy.deepcopy((args, kwargs))

        def remember(_: nn.Module, args: Any, result: Any, name: str = name) -> None:
            if name not in calls:
                calls[name] = _Call(*given[name], copy.deepcopy(result))

        handles.append(module.register_forward_pre_hook(copy_inputs, with_kwargs=True))
        handles.append(module.register_forward_hook(remember))
    try:
        _run(model, example.inputs, example.keywords, lambda: changed.update(_find_changed(before)))
    finally:
        for handle in handles:
            handle.remove()
    return _ExampleRun(calls, changed, called)


def _find_changed(before: Mapping[nn.Module, dict[str, Any]]) -> set[nn.Module]:
    """Return the modules whose state is another than before."""
    return {module for module, state in before.items() if _find_state(module) != state}


def _find_state(module: nn.Module) -> dict[str, Any]:
    """Return what tells a change of a module's own buffers and attributes: identities, and versions of tensors."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")} | dict(module._buffers)
    return {name: (id(value), _find_version(value)) for name, value in own.items()}


def _find_version(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    return repr(value) if isinstance(value, bool | int | float | str | list | dict) else None


def _takes_turns(part: nn.Module, call: _Call) -> bool:
    """Return whether a part may get None in another call for what it got now: a graph follows one of two ways."""
    try:
        signature = inspect.signature(part.forward)
        given = signature.bind(*call.args, **call.kwargs).arguments
    except (TypeError, ValueError):
        return False
    return any(signature.parameters[name].default is None and value is not None for name, value in given.items())


class _LayerTracer(fx.Tracer):
    """Traces a model to a graph in which every layer that can be pruned is one call, whatever its class."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is not opened."""
        return is_layer(m) or super().is_leaf_module(m, module_qualified_name)


def _trace_graph(model: nn.Module) -> fx.GraphModule:
    """Return the model as a graph; raise whatever the model raises on stand-in values."""
    graph = _LayerTracer().trace(model)
    return fx.GraphModule(model, graph, type(model).__name__)


def _trace(part: nn.Module, call: _Call) -> fx.GraphModule | None:
    """Return the part as a graph with its norms folded, as far as that is the same function; None if none is."""
    if _takes_turns(part, call):
        return None
    for fold in (True, False):
        try:
            traced = _trace_graph(copy.deepcopy(part))
            drop_identities(traced)
            if fold:
                _fold_norms(traced)
            with redirect_stderr(io.StringIO()):  # torch.fx prints what fails
                result = _run(traced, call.args, call.kwargs)
            if same_results(result, call.result, FOLDED):
                return traced
        except Exception:  # noqa: BLE001 - tracing runs foreign code on stand-in values: any failure means "cannot"
            continue
    return None


def _trace_calls(part: nn.Module, call: _Call) -> None:
    """Let a converted part compute calls like the example's by a graph, if that is faster. In place.

    Other calls stay as they are.
    """
    traced = trace_call(part, call.args, call.kwargs)
    if traced is None:
        return
    tensors: list[torch.Tensor] = []
    find_form(call.args, call.kwargs, tensors)
    expected = _run(part, call.args, call.kwargs)
    result = _run(traced.graph, tuple(tensors), {})
    if not same_results(result, expected, FOLDED):
        return
    drop_identities(traced.graph)
    _speed_up(traced.graph, dict(traced.graph.named_modules(remove_duplicate=False)))
    tidy(traced.graph)
    if any(node.target is attention or "keep" in node.kwargs for node in traced.graph.graph.nodes):
        follow_call(part, traced)


# ------------------------------------------------------------------------------------------------ folding


def _fold_norms(traced: fx.GraphModule) -> None:
    """Fold each BatchNorm that is the only reader of a Linear or Conv2d into that layer, in place."""
    modules = dict(traced.named_modules())
    norms = called_once(traced, modules, nn.BatchNorm1d | nn.BatchNorm2d)
    for node in called_once(traced, modules, nn.Linear | nn.Conv1d | nn.Conv2d):
        norm = only_user(node)
        if norm not in norms or hooked(modules[str(norm.target)]):
            continue
        name = str(node.target)
        folded: Any = copy.deepcopy(modules[name])  # another name may call the same layer without the norm
        fold_norm(folded, modules[str(norm.target)])
        drop_denormals(folded)
        traced.set_submodule(name, folded)
        erase(traced, norm, node)
    tidy(traced)


def _swap(
    traced: fx.GraphModule, choices: Mapping[str, LayerPattern], backend: str, tune: bool
) -> dict[str, nn.Module]:
    """Replace the chosen layers by sparse ones, in place, each with the activation that alone reads it.

    Returns the sparse layers by name, without those that the graph does not call.
    """
    modules = dict(traced.named_modules(remove_duplicate=False))
    called = {modules[str(node.target)] for node in traced.graph.nodes if node.op == "call_module"}
    once = called_once(traced, modules, nn.Module)
    activations: dict[nn.Module, str] = {}
    for node in once:
        reader = only_user(node)
        if node.target in choices and reader is not None and (kind := activation(reader, modules)) is not None:
            activations[modules[str(node.target)]] = kind
            erase(traced, reader, node)
    swapped: dict[str, nn.Module] = {}
    sparse: dict[nn.Module, nn.Module] = {}
    for name, choice in choices.items():
        layer = modules.get(name)
        if layer is None or layer not in called:
            continue
        if layer not in sparse:
            sparse[layer] = _sparse(layer, choice, activations.get(layer), backend, tune)
        swapped[name] = sparse[layer]
        traced.set_submodule(name, swapped[name])
    for node in list(traced.graph.nodes):
        owner, _, read = str(node.target).rpartition(".")
        if node.op != "get_attr" or owner not in swapped:
            continue
        if not all(_reads_fact(user) for user in node.users):
            raise ValueError(f"layer {owner!r}: the model reads its {read} as well")
        if not node.users:
            traced.graph.erase_node(node)
    if choices and backend == "numba":
        _speed_up(traced, modules | swapped)
    tidy(traced)
    return swapped


def _speed_up(traced: fx.GraphModule, modules: Mapping[str, nn.Module]) -> None:
    """Run attention and pooling on kernels of ours, and keep what is laid out for them. In place."""
    _swap_attention(traced, modules)
    _keep_tiles(traced)
    keep_frames(traced)
    swap_poolings(traced)


def _reads_fact(node: fx.Node) -> bool:
    """Return whether a node asks a weight for what sparse layers answer too (`PackedWeight`)."""
    name = node.args[1] if node.target is getattr else node.target if node.op == "call_method" else None
    return name in ("shape", "dtype", "device", "ndim", "size", "dim", "numel")


def _swap_attention(traced: fx.GraphModule, modules: Mapping[str, nn.Module]) -> None:
    """Let `attention` do what torch's function does, where it is called with q, k, v and at most a scale.

    It may round to eight bits where all three come from layers that do.
    """
    for node in traced.graph.nodes:
        if node.op != "call_function" or node.target is not F.scaled_dot_product_attention or len(node.args) != 3:
            continue
        settings = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False, **node.kwargs}
        scale = settings.pop("scale", None)
        if list(settings.values()) == [None, 0.0, False, False] and (scale is None or isinstance(scale, float)):
            in_bytes = all(_comes_from_int8(each, modules) for each in node.args)
            node.target, node.kwargs = attention, {"scale": scale, "may_round": in_bytes}
            node.meta["is_wrapped"] = True  # a pickled model is traced anew


def _comes_from_int8(value: Any, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a value is the result of a layer in eight bits, or a view or part of one."""
    while isinstance(value, fx.Node) and value.op in ("call_method", "call_function"):
        sources = value.all_input_nodes
        value = sources[0] if len(sources) == 1 else None
    layer = modules.get(str(value.target)) if isinstance(value, fx.Node) and value.op == "call_module" else None
    return isinstance(layer, SparseLinear) and layer.precision == INT8


def _keep_tiles(traced: fx.GraphModule) -> None:
    """Let tokens stay in tiles from one sparse layer to the next, and what is element-wise between run there."""
    modules = dict(traced.named_modules())
    for node in called_once(traced, modules, SparseLinear):
        between, reader = [], only_user(node)
        while reader is not None and element_wise(reader, modules):
            between.append(reader)
            reader = only_user(reader)
        last = between[-1] if between else node
        if reader is None or reader.op != "call_module" or reader.args != (last,) or reader.kwargs.keys() - {"keep"}:
            continue
        layers = modules[str(node.target)], modules[str(reader.target)]
        if all(isinstance(layer, SparseLinear) and layer.lays_out for layer in layers):
            node.update_kwarg("keep", True)
            for each in between:
                wrap(traced, each, modules, OnTiles)


def _sparse(module: nn.Module, choice: LayerPattern, activation: str | None, backend: str, tune: bool) -> nn.Module:
    quantization = choice.quantization
    precision = choice.precision if quantization is None else _follow_folding(module, quantization)
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        kind = SparseConv1d if isinstance(module, nn.Conv1d) else SparseConv2d
        return kind.from_dense(
            module, choice.pattern, choice.mask, activation=activation, backend=backend, precision=precision
        )
    return SparseLinear.from_dense(
        module, choice.pattern, choice.mask, activation=activation, backend=backend, tune=tune, precision=precision
    )


def _follow_folding(module: nn.Module, quantization: Quantization) -> Quantization:
    """Return the quantization whose steps are those of the layer's weight, which a norm may have scaled row by row.

    A norm multiplies a row and its steps alike: the row's largest weight stays as many steps as it was.
    """
    assert quantization.largest is not None
    weight = weight_matrix(module).float().cpu().numpy()
    found = np.abs(weight).max(axis=1, initial=0.0) / np.maximum(quantization.largest, 1)
    scales = np.where((quantization.largest > 0) & (found > 0), found, quantization.scales)
    return replace(quantization, scales=scales.astype(np.float32))
