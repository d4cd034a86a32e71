from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.cpu.kernels.attention import attention
from sparse_kernels.cpu.runtime import scratch_buffers
from sparse_kernels.nn import attention_operator
from sparse_kernels.patterns import VectorWise

SIZES = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 37, 19, 20, 20),
    (1, 2, 8, 70, 64, 33),
    (3, 1, 9, 33, 100, 7),
    (1, 1, 130, 16, 16, 48),
]


def drawn(rng, size):
    """q, k, v as they lie in a model, heads behind tokens, and room for the result."""
    batch, heads, n, keys, d, e = size
    shapes = (n, d), (keys, d), (keys, e)
    q, k, v = (rng.standard_normal((batch, t, heads, f)).astype(np.float32).swapaxes(1, 2) for t, f in shapes)
    return q, k, v, np.full((batch, heads, n, e), np.nan, np.float32)


def expected(q, k, v, scale=None):
    return scaled_dot_product_attention(*(torch.from_numpy(a.astype(float)) for a in (q, k, v)), scale=scale).numpy()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.3, -2.0, 0.0])
def test_attention_is_that_of_float64(rng, size, scale):
    q, k, v, out = drawn(rng, size)
    assert attention(q, k, v, out, scale) is out
    # Scores of up to d terms of 1 move weights by as much, relatively, and results by that share of the largest v.
    d = size[4]
    factor = abs(scale if scale is not None else d**-0.5)
    error = 2 * (d * 2.0**-24 * factor * np.abs(q).max() * np.abs(k).max() * d + 1e-6) * np.abs(v).max()
    np.testing.assert_allclose(out, expected(q, k, v, scale), atol=error, rtol=0)


def test_rows_of_weights_sum_to_one_however_large_the_scores(rng):
    q, k, v, out = drawn(rng, (1, 2, 20, 50, 8, 8))
    v[:] = 1
    for size in (1e-30, 1.0, 1e4, 1e18):
        np.testing.assert_allclose(attention((q * np.float32(size)), k, v, out), 1, rtol=1e-5)


@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_nan_and_infinity_spread_as_in_dense_code(rng, special):
    q, k, v, out = drawn(rng, (1, 2, 11, 20, 8, 8))
    q[0, 0, 3, 2] = special
    v[0, 1, 7, 4] = special
    attention(q, k, v, out)
    wrong = expected(q, k, v)
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(wrong))
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wrong))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_an_earlier_call_left_in_the_shared_room_is_not_read(rng, monkeypatch, size):
    q, k, v, out = drawn(rng, size)
    wanted = attention(q, k, v, np.empty_like(out))
    monkeypatch.setattr(
        scratch_buffers, "_free", deque([scratch_buffers.ScratchBuffer(np.full(2**20, np.nan, np.float32))])
    )
    np.testing.assert_array_equal(attention(q, k, v, out), wanted)


def test_expanded_and_reversed_memory_is_read_as_it_lies(rng):
    q, k, v, out = drawn(rng, (2, 4, 9, 12, 16, 16))
    k, v = np.broadcast_to(k[:, :1], k.shape), v[::-1, :, ::-1]
    np.testing.assert_allclose(attention(q, k, v, out), expected(q, k, v.copy()), atol=2e-5)


def test_what_does_not_fit_is_refused(rng):
    q, k, v, out = drawn(rng, (1, 2, 5, 6, 8, 8))
    with pytest.raises(ValueError, match="attention takes"):
        attention(q, k[:, :1], v, out)
    with pytest.raises(ValueError, match="k must be float32, its last dimension contiguous"):
        attention(q, np.repeat(k, 2, axis=3)[..., ::2], v, out)
    with pytest.raises(ValueError, match="at least one key"):
        attention(q, k[:, :, :0], v[:, :, :0], out)
    assert attention(q[:, :, :0], k, v, out[:, :, :0]).size == 0


class Heads(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.first, self.settings = nn.Linear(64, 96), settings

    def forward(self, x):
        q, k, v = self.first(x).unflatten(-1, (3, 4, 8)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return scaled_dot_product_attention(q, k, v, **self.settings).transpose(1, 2).flatten(2)


def converted(model, x):
    return convert(model, {"first": LayerPattern(VectorWise(32), None)}, (x,))


@pytest.mark.parametrize("settings", [{}, {"scale": 0.2}, {"attn_mask": None, "dropout_p": 0.0}], ids=str)
def test_a_converted_model_runs_this_attention(monkeypatch, settings):
    model, x = Heads(**settings), torch.randn(2, 9, 64)
    fast = converted(model, x)
    called = []
    monkeypatch.setattr(
        attention_operator, "_attend", lambda *a, known=attention_operator._attend: called.append(1) or known(*a)
    )
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert called


@pytest.mark.parametrize(
    "settings", [{"is_causal": True}, {"attn_mask": torch.tril(torch.ones(9, 9)).bool()}], ids=["causal", "mask"]
)
def test_attention_with_a_mask_stays_torchs(monkeypatch, settings):
    model, x = Heads(**settings), torch.randn(2, 9, 64)
    fast = converted(model, x)
    monkeypatch.setattr(attention_operator, "_attend", lambda *a: pytest.fail("the mask was left out"))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


def test_what_the_kernel_does_not_take_torch_runs():
    q = torch.randn(2, 3, 5, 8)
    for other in (q.double(), q.bfloat16(), q[0]):
        torch.testing.assert_close(
            attention_operator.attention(other, other, other), scaled_dot_product_attention(other, other, other)
        )
    q.requires_grad_()
    assert attention_operator.attention(q, q, q).requires_grad
    assert attention_operator.attention(q[:, :, :0], q, q).shape == (2, 3, 0, 8)


def test_attention_under_torch_compile():
    q = torch.randn(1, 2, 7, 8)
    compiled = torch.compile(attention_operator.attention, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, q, q), scaled_dot_product_attention(q, q, q))


def test_what_cannot_be_written_to_or_is_no_attention_is_refused(rng):
    q = rng.standard_normal((1, 2, 5, 8)).astype(np.float32)
    out = np.empty_like(q)
    with pytest.raises(ValueError, match="4 dimensions, not"):
        attention(q[0], q[0], q[0], out[0])
    with pytest.raises(ValueError, match="share no memory"):
        attention(q, q, q, q)
    out.setflags(write=False)
    with pytest.raises(ValueError, match="out must be writable"):
        attention(q, q, q, out)


@torch.no_grad()
def test_heads_of_one_element_whatever_their_stride():
    q = torch.randn(2, 3, 1, 5).transpose(-1, -2)
    torch.testing.assert_close(attention_operator.attention(q, q, q), scaled_dot_product_attention(q, q, q))
