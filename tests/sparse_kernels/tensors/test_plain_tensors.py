"""What kernels may read by address, and torch's private functions that tell it: each test says what broke."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from sparse_kernels.tensors.plain_tensors import address_of, has_tangent, is_plain


class Subclass(Tensor):
    """A tensor with a class of its own, as quantized ones have."""


def seen_by(watch) -> list[bool]:  # type: ignore[no-untyped-def]
    """What `is_plain` says of a tensor while somebody watches."""
    said: list[bool] = []

    def look(x: Tensor) -> Tensor:
        said.append(is_plain(x))
        return x + 1

    watch(look)
    return said


def test_numbers_in_memory_are_plain() -> None:
    x = torch.randn(3, 4)
    with torch.inference_mode():
        inference = torch.randn(2)
    for tensor in (x, x.t(), x[1:, ::2], nn.Parameter(x), torch.zeros(0), x.half(), inference):
        assert is_plain(tensor)
    with torch.no_grad(), torch.autocast("cpu"):
        assert is_plain(x)
    assert address_of(x[1:]) == x.data_ptr() + 16


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_nothing_is_plain_while_somebody_watches() -> None:
    x = torch.randn(3, 4)
    assert seen_by(lambda look: torch.jit.trace(look, (x,), check_trace=False)) == [False], (
        "torch._C._get_tracing_state no longer tells that torch.jit.trace is at work"
    )
    for watch in (
        lambda look: torch.fx.experimental.proxy_tensor.make_fx(look)(x),
        lambda look: torch.vmap(look)(x),
        lambda look: torch.func.functionalize(look)(x),
        lambda look: torch.func.grad(lambda given: look(given).sum())(x),
    ):
        assert seen_by(watch) == [False], "torch._C._dispatch_isTensorSubclassLike no longer sees wrapped tensors"
    with FlopCounterMode(display=False):
        assert not is_plain(x), "torch._C._dispatch_isTensorSubclassLike no longer sees modes of the dispatcher"
    with TorchFunctionMode():
        assert not is_plain(x), "torch._C._len_torch_function_stack no longer counts modes"
    with forward_ad.dual_level():
        assert not is_plain(x), "torch.autograd.forward_ad._current_level is no longer the level at work"
        assert has_tangent(forward_ad.make_dual(x, x)) and not has_tangent(x)
    assert is_plain(x) and not has_tangent(x)


def test_what_has_no_numbers_of_its_own_is_not_plain() -> None:
    x = torch.randn(3, 4)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    for tensor in (fake, x.to("meta"), x.to_sparse(), x.as_subclass(Subclass), x.numpy(), None):
        assert not is_plain(tensor)
    for tensor in (fake, x.to_sparse(), x.to_mkldnn(), x.as_subclass(Subclass)):
        with pytest.raises(TypeError, match="computes with numbers"):
            address_of(tensor)
