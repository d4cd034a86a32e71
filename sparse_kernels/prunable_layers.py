"""Which layers of a model can be pruned and run by sparse kernels, and why the others cannot: one answer for all.

Tracing, sweeps, searches, conversion and pruning all ask `survey_layers`. Taken are nn.Linear, nn.Conv1d, nn.Conv2d,
and Conv1D of transformers, which is a linear layer whose weight lies transposed. A layer is seen as the matrix (m, k)
that multiplies its inputs; `as_matrix` and `as_weight` know how the weight holds it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

from sparse_kernels.fx_graphs import hooked

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

# Methods that a layer's class must not override, or no sparse layer can replace it.
_COMPUTING = ("__call__", "forward", "_conv_forward")
# But for these, which write what nn.Linear computes in other words.
_WRITTEN_OUT = (("transformers.models.falcon.modeling_falcon", "FalconLinear"), ("timm.layers.linear", "Linear"))


class LayerSurvey(NamedTuple):
    """What can become of the layers of a model.

    taken: modules that can be pruned, by path, in the order of the model. left_out: why others cannot, by path; they
    are those with a weight of two or more dimensions.
    """

    taken: dict[str, nn.Module]
    left_out: dict[str, str]


def survey_layers(model: nn.Module, dtypes: Collection[torch.dtype] = (torch.float32,)) -> LayerSurvey:
    """Return the layers of a model that can be pruned, and the reasons why others cannot.

    Parameters
    ----------
    model : nn.Module
        The model. It is not called.
    dtypes : collection of torch.dtype
        Element types that a weight may have.

    Returns
    -------
    LayerSurvey
        A module of several names is listed under the first.
    """
    names = {module: name for name, module in model.named_modules()}
    owners: dict[int, list[str]] = defaultdict(list)
    for module, name in names.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[_locate(parameter)].append(name)
    taken: dict[str, nn.Module] = {}
    left_out: dict[str, str] = {}
    for module, name in names.items():
        if isinstance(module, parametrize.ParametrizationList):
            continue  # its owner is listed
        if not _has_matrix(module) and not is_layer(module):
            continue
        reason = _refuse_shared(module, name, owners) or refuse_layer(module) or _refuse_state(module, dtypes)
        if reason is None:
            taken[name] = module
        else:
            left_out[name] = reason
    return LayerSurvey(taken, left_out)


def _locate(parameter: nn.Parameter) -> int:
    """Return where a parameter is: in memory, as two may be views of the same weights, or as an object."""
    if not is_lazy(parameter) and parameter.layout == torch.strided and not parameter.is_meta:
        with contextlib.suppress(RuntimeError):  # of tensors without data
            return parameter.data_ptr() or id(parameter)
    return id(parameter)


def _refuse_shared(module: nn.Module, name: str, owners: Mapping[int, list[str]]) -> str | None:
    """Return which other modules own one of its matrices, or None; owners: paths by the place of a parameter."""
    matrices = [it for it in module._parameters.values() if it is not None and not is_lazy(it) and it.ndim > 1]
    if others := [other for matrix in matrices for other in owners[_locate(matrix)] if other != name]:
        return f"its weight is shared with {', '.join(others)}, where it would be pruned too"
    return None


def refuse_layer(module: nn.Module) -> str | None:
    """Return why this module, whatever is around it, cannot become a sparse layer; None if it can."""
    name = _name_class(module)
    if isinstance(module, nn.MultiheadAttention):
        return "attention reads its projections from one weight, and calls no layer"
    if not is_layer(module):
        return f"{name} has no sparse kernel"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "it is not called but read, by the attention that owns it"
    if _computes_otherwise(module):
        return f"{name} computes something of its own"
    if isinstance(module, nn.Conv1d | nn.Conv2d) and (reason := _refuse_convolution(module)) is not None:
        return reason
    if "weight" in module._parameters and _is_lazy(module):
        return "its weight is not initialized yet: call the model once before"
    if "weight" not in module._parameters:
        return "its weight is computed at each call; prunable_layers.bake_weights(model) makes it a plain one"
    return None


def _name_class(module: nn.Module) -> str:
    """Return the name of a module's class with its article: a Conv3d, an Embedding, an LSTM (spelled: el-es-...)."""
    kind = type(module).__name__
    spelled = kind[:2].isupper()
    return f"{'an' if kind[0] in ('AEFHILMNORSX' if spelled else 'AEIO') else 'a'} {kind}"


def _computes_otherwise(module: nn.Module) -> bool:
    """Return whether a layer's class computes something else than torch's class of its kind."""
    if is_transposed(module):
        return False
    own = next(kind for kind in (nn.Linear, nn.Conv1d, nn.Conv2d) if isinstance(module, kind))
    for method in _COMPUTING:
        writer = next((kind for kind in type(module).__mro__ if method in vars(kind)), own)
        if (writer.__module__, writer.__name__) in _WRITTEN_OUT:
            continue
        if getattr(type(module), method, None) is not getattr(own, method, None):
            return True
    return False


def _refuse_convolution(conv: nn.Conv1d | nn.Conv2d) -> str | None:
    """Return why this convolution has no sparse kernel, or None."""
    if conv.groups != 1:
        kind = "depthwise" if conv.groups == conv.in_channels else "grouped"
        return f"a {kind} convolution ({conv.groups} groups) has no sparse kernel"
    if conv.padding_mode != "zeros":
        return f"padding mode {conv.padding_mode!r} has no sparse kernel: only zeros have"
    if conv.padding == "same" and any(d * (k - 1) % 2 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)):
        return "padding 'same' around an even kernel is asymmetric: no sparse kernel has that"
    return None


def _refuse_state(module: nn.Module, dtypes: Collection[torch.dtype]) -> str | None:
    """Return why the layer cannot be replaced as it stands in the model, or None."""
    weight = module._parameters["weight"]
    assert weight is not None
    if "forward" in vars(module):
        return "its forward was replaced"
    if hooked(module):
        return "it has hooks, which a sparse layer would not call: remove them first"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}, not plain numbers"
    if weight.is_meta:
        return "its weight has no numbers (device meta): load them first"
    if weight.dtype not in dtypes:
        wanted = " or ".join(_name(dtype) for dtype in dtypes)
        return f"its weight is {_name(weight.dtype)}, not {wanted}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_lazy(module: nn.Module) -> bool:
    """Return whether the shape of the layer's weight is still open, as of nn.LazyLinear."""
    return any(parameter is not None and is_lazy(parameter) for parameter in module._parameters.values())


def _has_matrix(module: nn.Module) -> bool:
    """Return whether a module owns a parameter of two or more dimensions."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return any(is_lazy(parameter) or parameter.ndim > 1 for parameter in own)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is of a kind that can be pruned."""
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is Conv1D of transformers: a linear layer with a weight (k, m)."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils" for kind in type(module).__mro__
    )


def bake_weights(model: nn.Module) -> list[str]:
    """Make computed weights of layers plain ones, in place; the model computes the same in eval mode.

    Weights are computed by parametrizations, weight norm, spectral norm, and torch's own pruning.

    Parameters
    ----------
    model : nn.Module
        The model, in eval mode.

    Returns
    -------
    list of str
        Paths of the layers that changed.
    """
    changed = []
    for name, module in model.named_modules():
        if not is_layer(module) or isinstance(module._parameters.get("weight"), Tensor):
            continue
        if parametrize.is_parametrized(module):
            _bake_parametrizations(module)
            changed.append(name)
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, WeightNorm):
                remove_weight_norm(module, hook.name)
            elif isinstance(hook, SpectralNorm):
                remove_spectral_norm(module, hook.name)
            elif isinstance(hook, prune.BasePruningMethod):
                prune.remove(module, hook._tensor_name)
            else:
                continue
            changed.append(name)
    return list(dict.fromkeys(changed))


def _bake_parametrizations(module: nn.Module) -> None:
    """Make what parametrizations compute of a layer plain parameters, in place.

    torch's `remove_parametrizations` is of no use: it changes the class, which copies of the layer share.
    """
    parametrizations: Any = module.parametrizations
    values = {
        name: (getattr(module, name).detach().clone(), any(it.requires_grad for it in each.parameters()))
        for name, each in parametrizations.items()
    }
    del module._modules["parametrizations"]
    module.__class__ = type(module).__bases__[0]
    for name, (value, learns) in values.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=learns))


def weight_matrix(module: nn.Module) -> Tensor:
    """Return the layer's weight as the matrix that is pruned and multiplied.

    Parameters
    ----------
    module : nn.Module
        A layer that `refuse_layer` accepts.

    Returns
    -------
    Tensor (m, k)
        A convolution's matrix is (c_out, kh*kw*c_in), with column (r*kw + s)*c_in + c. It shares the weight's memory
        where torch can.

    Raises
    ------
    ValueError
        If no sparse layer can replace the module.
    """
    return as_matrix(module, _find_weight(module).detach())


def set_weight_matrix(module: nn.Module, matrix: Tensor) -> None:
    """Write a matrix back into the layer, in place.

    Parameters
    ----------
    module : nn.Module
        The layer.
    matrix : Tensor (m, k)
        In the order of `weight_matrix`.

    Raises
    ------
    ValueError
        If the matrix does not fit the weight, or no sparse layer can replace the module.
    """
    weight = _find_weight(module)
    if matrix.shape != as_matrix(module, weight).shape:
        raise ValueError(f"a matrix of {tuple(matrix.shape)} does not fit a weight of {tuple(weight.shape)}")
    with torch.no_grad():
        weight.copy_(as_weight(module, matrix))


def as_matrix(module: nn.Module, weight: Tensor) -> Tensor:
    """Return the layer's weight, or what has its shape, as the matrix (m, k) of `weight_matrix`."""
    return to_matrix(weight, is_transposed(module))


def as_weight(module: nn.Module, matrix: Tensor) -> Tensor:
    """`as_matrix` undone: a matrix (m, k) in the shape of the layer's weight."""
    weight = module._parameters["weight"]
    assert weight is not None
    return to_weight(matrix, weight.shape, is_transposed(module))


def to_matrix(weight: Tensor, transposed: bool = False) -> Tensor:
    """Return a weight as the matrix (m, k) of `weight_matrix`; transposed: a linear layer's weight is (k, m)."""
    if weight.ndim == 2:
        return weight.t() if transposed else weight
    return weight.permute((0, 2, 1) if weight.ndim == 3 else (0, 2, 3, 1)).reshape(weight.shape[0], -1)


def to_weight(matrix: Tensor, shape: torch.Size, transposed: bool = False) -> Tensor:
    """`to_matrix` undone: a matrix (m, k) as a weight of this shape."""
    if len(shape) == 2:
        return matrix.t() if transposed else matrix
    c_out, c_in, *taps = shape
    return matrix.reshape(c_out, *taps, c_in).permute((0, 2, 1) if len(taps) == 1 else (0, 3, 1, 2))


def _find_weight(module: nn.Module) -> nn.Parameter:
    if (reason := refuse_layer(module)) is not None:
        raise ValueError(reason)
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


class ConvolutionGeometry(NamedTuple):
    """Taps of a convolution, each (rows, columns); the padding is zeros on all sides."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


def find_geometry(conv: nn.Conv1d | nn.Conv2d) -> ConvolutionGeometry:
    """Return the taps of a convolution, with the words 'valid' and 'same' resolved; nn.Conv1d has one row of them."""

    def pair(values: tuple[int, ...], row: int) -> tuple[int, int]:
        rows, columns = values if len(values) == 2 else (row, values[0])
        return rows, columns

    padding = conv.padding
    if padding == "valid":
        padding = (0,) * len(conv.kernel_size)
    elif padding == "same":
        padding = tuple(d * (k - 1) // 2 for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
    assert isinstance(padding, tuple)
    return ConvolutionGeometry(
        pair(conv.kernel_size, 1), pair(conv.stride, 1), pair(padding, 0), pair(conv.dilation, 1)
    )
