"""Any layer, called in any way, is right; any wrong call is refused in a sentence."""

import copy
import dataclasses
import functools
import re
import time

import numba
import numpy as np
import pytest
import torch
from fuzzing import Conv2d, Linear, check, convolutions, linears, run
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from pytest_again import run_pytest
from torch import nn

from sparse_kernels import oracle, pack, parse, unpack
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.cpu.plans import linear
from sparse_kernels.nn import SparseConv2d, SparseLinear
from sparse_kernels.plan_protocol import LAYOUTS
from sparse_kernels.prunable_layers import set_weight_matrix


@pytest.fixture(autouse=True)
def all_threads():
    before = numba.get_num_threads()
    yield
    numba.set_num_threads(before)


COMMON = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
QUICK = settings(COMMON, derandomize=True)


@settings(QUICK, max_examples=150)
@given(linears())
def test_linear_layers(layer):
    run(layer)


@settings(QUICK, max_examples=80)
@given(convolutions())
def test_convolutions(layer):
    run(layer)


@settings(QUICK, max_examples=50)
@given(linears(LAYOUTS) | convolutions())
def test_the_reference_backend(layer):
    run(layer, backend="reference")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(COMMON, max_examples=400)
@given(linears())
def test_many_linear_layers(layer):
    run(layer)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(COMMON, max_examples=400)
@given(convolutions())
def test_many_convolutions(layer):
    run(layer)


# ------------------------------------------------------------------------------------------------ torch layers


def tensor_of(x, lies):
    """The same values as a tensor, with strides that torch can have."""
    x = torch.from_numpy(np.ascontiguousarray(x))
    match lies:
        case "every other":
            return torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]
        case "transposed":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        case "repeated":
            return x[:1].expand(x.shape)
    return x


def module_of(layer, bias, converted):
    """The layer as a torch module, built from a masked one, with its activation."""
    weight, mask = layer.weight_and_mask
    if isinstance(layer, Linear):
        module = nn.Linear(layer.k, layer.m, bias is not None)
    else:
        sides = (layer.kernel, layer.stride, layer.padding, layer.dilation)
        module = nn.Conv2d(layer.c_in, layer.c_out, *sides, bias=bias is not None)
    set_weight_matrix(module, torch.from_numpy(weight))
    if bias is not None:
        module.bias.copy_(torch.from_numpy(bias))
    pattern = parse(layer.pattern)
    if not converted:
        kind = SparseLinear if isinstance(layer, Linear) else SparseConv2d
        return kind.from_dense(module, pattern, mask, activation=layer.activation)
    after = {None: [], "relu": [nn.ReLU()], "gelu": [nn.GELU()]}[layer.activation]
    example = torch.from_numpy(np.random.default_rng(0).standard_normal(layer.x_shape(2)).astype(np.float32))
    return convert(nn.Sequential(module, *after), {"0": LayerPattern(pattern, mask)}, (example,))


@settings(QUICK, max_examples=40)
@given(linears(["token_major"]) | convolutions(), st.booleans(), st.booleans())
@torch.no_grad()
def test_torch_layers_and_converted_models(layer, converted, stacked):
    try:
        rng, bias = layer.rng, layer.bias_of(layer.rng)
        module = module_of(layer, bias, converted)
        for n in (layer.n, layer.prepared_for, layer.n):
            x = layer.x_of(n, rng)
            given_x = tensor_of(x, layer.lies)
            if isinstance(layer, Linear) and stacked:
                y = module(given_x[None, :, None])[0, :, 0]
            else:
                y = module(given_x)
            assert tuple(y.shape) == layer.y_shape(n)
            check(layer.rows(y.numpy()), layer.packed, layer.columns(x), bias, layer.activation)
    except Exception as error:
        raise AssertionError(f"{layer!r}, converted={converted}, stacked={stacked}\n{error}") from error


# ------------------------------------------------------------------------------------------------ wrong calls


def overlapping(a, b):
    """a and b as parts of one array, the last element of a being the first of b."""
    both = np.concatenate([a.ravel(), b.ravel()[1:]])
    return both[: a.size].reshape(a.shape), both[both.size - b.size :].reshape(b.shape)


def with_readonly(out):
    out.setflags(write=False)
    return out


# What is wrong with a call, the argument that the refusal must name, and what is changed of (x, bias, out).
MISTAKES = {
    "x of float64": ("x", lambda x, bias, out: {"x": x.astype(np.float64)}),
    "x of float16": ("x", lambda x, bias, out: {"x": np.ones(x.shape, np.float16)}),
    "x of whole numbers": ("x", lambda x, bias, out: {"x": np.ones(x.shape, np.int32)}),
    "x of complex numbers": ("x", lambda x, bias, out: {"x": x.astype(np.complex64)}),
    "x of the other byte order": ("x", lambda x, bias, out: {"x": x.astype(x.dtype.newbyteorder())}),
    "x a list": ("x", lambda x, bias, out: {"x": x.tolist()}),
    "x a tensor": ("x", lambda x, bias, out: {"x": torch.from_numpy(x)}),
    "x missing": ("x", lambda x, bias, out: {"x": None}),
    "x a number": ("x", lambda x, bias, out: {"x": np.float32(1)}),
    "x of no axes": ("x", lambda x, bias, out: {"x": np.array(1, np.float32)}),
    "x of one axis less": ("x", lambda x, bias, out: {"x": x.reshape(-1)}),
    "x of one axis more": ("x", lambda x, bias, out: {"x": x[None]}),
    "x longer": ("x", lambda x, bias, out: {"x": np.ones(np.add(x.shape, 1), np.float32)}),
    "x shorter": ("x", lambda x, bias, out: {"x": x[tuple(slice(1, None) for _ in x.shape)]}),
    "bias of float64": ("bias", lambda x, bias, out: {"bias": bias.astype(np.float64)}),
    "bias a list": ("bias", lambda x, bias, out: {"bias": bias.tolist()}),
    "bias a number": ("bias", lambda x, bias, out: {"bias": 0.5}),
    "bias longer": ("bias", lambda x, bias, out: {"bias": np.ones(bias.size + 1, np.float32)}),
    "bias shorter": ("bias", lambda x, bias, out: {"bias": bias[1:]}),
    "bias of two axes": ("bias", lambda x, bias, out: {"bias": bias[:, None]}),
    "activation unknown": ("activation", lambda x, bias, out: {"activation": "tanh"}),
    "activation a number": ("activation", lambda x, bias, out: {"activation": 1}),
    "out of float64": ("out", lambda x, bias, out: {"out": out.astype(np.float64)}),
    "out a list": ("out", lambda x, bias, out: {"out": out.tolist()}),
    "out longer": ("out", lambda x, bias, out: {"out": np.zeros(np.add(out.shape, 1), np.float32)}),
    "out shorter": ("out", lambda x, bias, out: {"out": out[1:]}),
    "out flat": ("out", lambda x, bias, out: {"out": out.reshape(-1)}),
    "out transposed": ("out", lambda x, bias, out: {"out": np.zeros(out.T.shape, np.float32).T}),
    "out every other": ("out", lambda x, bias, out: {"out": np.zeros((*out.shape, 2), np.float32)[..., 0]}),
    "out backwards": ("out", lambda x, bias, out: {"out": out[::-1]}),
    "out read-only": ("out", lambda x, bias, out: {"out": with_readonly(out)}),
    "out all one element": ("out", lambda x, bias, out: {"out": as_strided(out, out.shape, [0] * out.ndim)}),
    "out behind x": ("out", lambda x, bias, out: dict(zip(("x", "out"), overlapping(x, out), strict=True))),
    "out before x": ("out", lambda x, bias, out: dict(zip(("out", "x"), overlapping(out, x), strict=True))),
    "out behind bias": ("out", lambda x, bias, out: dict(zip(("bias", "out"), overlapping(bias, out), strict=True))),
    "out before bias": ("out", lambda x, bias, out: dict(zip(("out", "bias"), overlapping(out, bias), strict=True))),
}


@settings(QUICK, max_examples=250)
@given(linears() | convolutions(), st.sampled_from(list(MISTAKES)))
def test_a_wrong_call_is_refused_in_a_sentence_that_names_the_argument(layer, mistake):
    layer = dataclasses.replace(layer, bias=True, lies="in a row", special=())
    argument, change = MISTAKES[mistake]
    x, bias = layer.x_of(layer.n, layer.rng), layer.bias_of(layer.rng)
    out = np.ones(layer.y_shape(layer.n), np.float32)
    call = {"x": x, "bias": bias, "activation": layer.activation, "out": out} | change(x, bias, out)
    before = copy.deepcopy(call)
    plan = layer.plan()
    try:
        y = plan(**call)
    except (TypeError, ValueError) as error:
        assert re.search(rf"\b{argument}\b", str(error)), f"{layer!r}, {mistake}: {error}"
        assert "\n" not in str(error)
        assert all(np.array_equal(call[name], before[name]) for name in ("x", "bias", "out"))
    else:
        # Some are no mistakes for this layer: without tokens, say, nothing overlaps.
        try:
            assert y is call["out"]
            x, bias = before["x"], before["bias"]
            check(layer.rows(y), layer.packed, layer.columns(x), bias, layer.activation)
        except Exception as error:
            raise AssertionError(f"{layer!r}, {mistake}: neither refused nor right\n{error}") from error


# -------------------------------------------------------------------------------------------- the checks themselves


def drops_the_last_token(plan, held, axes, x, *args):
    y = plan(x, *args)
    y.swapaxes(0, axes[0])[-1:] = 0
    return y


def swaps_two_outputs(plan, held, axes, x, *args):
    y = plan(x, *args)
    rows = y.swapaxes(0, axes[1])
    rows[:2] = rows[:2][::-1].copy()
    return y


def reads_the_column_before(plan, held, axes, x, *args):
    return plan(np.roll(x, 1, axis=axes[1]), *args)


def reads_the_token_before(plan, held, axes, x, *args):
    return plan(np.roll(x, 1, axis=axes[0]), *args)


def rounds_x_to_half_precision(plan, held, axes, x, *args):
    return plan(x.astype(np.float16).astype(np.float32), *args)


def forgets_the_bias(plan, held, axes, x, *args):
    return plan(x, None, *args[1:])


def hides_nan(plan, held, axes, x, *args):
    return np.nan_to_num(plan(x, *args), copy=False, posinf=np.inf, neginf=-np.inf)


def reads_what_is_dropped(plan, held, axes, x, *args):
    y = plan(x, *args)
    y += 0 * x.sum(axis=tuple(range(x.ndim)))
    return y


def continues_the_sums_of_the_call_before(plan, held, axes, x, *args):
    y = plan(x, *args)
    y += 0 * held.get("sum", 0)
    held["sum"] = y.sum()
    return y


def has_one_buffer_for_all_threads(plan, held, axes, x, *args):
    y = held["buffer"] = plan(x, *args)
    time.sleep(2e-2)
    size = min(y.size, held["buffer"].size)
    y.reshape(-1)[:size] = held["buffer"].reshape(-1)[:size]
    return y


def writes_behind_out(plan, held, axes, x, *args):
    y = plan(x, *args)
    if y.base is not None:
        as_strided(y, (y.size + 1,), (4,))[-1] = 0
    return y


def reads_behind_x(plan, held, axes, x, *args):
    y = plan(x, *args)
    if x.flags.c_contiguous and x.base is not None and x.base.size > x.size:
        y += 0 * as_strided(x, (x.size + 1,), (4,))[-1]
    return y


WRONG = [
    drops_the_last_token,
    swaps_two_outputs,
    reads_the_column_before,
    reads_the_token_before,
    rounds_x_to_half_precision,
    forgets_the_bias,
    hides_nan,
    reads_what_is_dropped,
    continues_the_sums_of_the_call_before,
    has_one_buffer_for_all_threads,
    writes_behind_out,
    reads_behind_x,
]


@pytest.mark.parametrize("layers", [linears, convolutions])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_kernel_is_caught(wrong, layers):
    def caught(layer):
        try:
            run(layer, wrap=lambda plan, layer: functools.partial(wrong, plan, {}, layer.axes))
        except AssertionError as error:
            return isinstance(error.__cause__, oracle.WrongResult)
        return False

    find(layers(), caught, settings=settings(QUICK, max_examples=150, phases=[Phase.generate]))


@settings(QUICK, max_examples=30)
@given(linears() | convolutions())
def test_a_failure_names_the_layer_in_a_line_that_makes_it_again(layer):
    def refuse(*args):
        raise oracle.WrongResult("wrong")

    with pytest.raises(AssertionError) as failure:
        run(layer, wrap=lambda plan, layer: refuse)
    line = str(failure.value).splitlines()[0]
    assert repr(eval(line, {"Linear": Linear, "Conv2d": Conv2d, "np": np})) == repr(layer)


@settings(QUICK, max_examples=60)
@given(linears() | convolutions())
def test_masks_are_of_their_pattern_and_kept_as_asked(layer):
    _, mask = layer.weight_and_mask
    m, k = layer.size
    assert mask.shape == (m, k)
    if layer.pattern != "dense" and layer.kept != "a single unit":
        assert not mask.any() or layer.sparsity < 1
    if layer.kept == "even" and layer.sparsity == 0 and not layer.pattern.startswith(("nm", "vectornm")):
        assert mask.all()
    np.testing.assert_array_equal(unpack(layer.packed) != 0, mask & (layer.weight_and_mask[0] != 0))


# ------------------------------------------------------------------------------------------------ memory


def read_only(array):
    array = array.copy()
    array.setflags(write=False)
    return array


def off_by_a_byte(array):
    there = np.zeros(array.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(array.shape)
    there[...] = array
    return there


@pytest.mark.slow
@pytest.mark.parametrize("kind", [read_only, off_by_a_byte, np.ma.masked_array])
@pytest.mark.parametrize("pattern", ["unstructured", "vector:32", "shflbw:8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_kind_of_array_will_do(kind, pattern, layout):
    layer = Linear(pattern=pattern, sparsity=0.5, m=40, k=50, n=37, layout=layout)
    plan, x, bias = layer.plan(), layer.x_of(37, layer.rng), np.arange(40, dtype=np.float32)
    expected = plan(x, bias)
    np.testing.assert_array_equal(plan(kind(x), bias), expected)
    np.testing.assert_array_equal(plan(x, kind(bias)), expected)
    if kind is not read_only:
        out = kind(np.zeros_like(expected))
        plan(x, bias, out=out)
        np.testing.assert_array_equal(np.asarray(out), expected)


def test_bounds_are_checked_where_asked_for(rng):
    """Those of a kernel that is given too short an array; what it reads by address is what guards are for."""
    if not numba.config.BOUNDSCHECK:
        pytest.skip("NUMBA_BOUNDSCHECK is not set")
    numba.set_num_threads(1)
    pattern = parse("shflbw:16")
    weight = rng.standard_normal((33, 16), np.float32)
    packed = pack(weight, pattern.mask(weight**2, 0.5), pattern)
    rows = linear.Choice("rows", linear.choose_row_tile(linear.describe_layer(packed, "token_major", 64)), "blocks")
    plan = linear.build_plan(linear.describe_layer(packed, "token_major", 64), rows)
    plan(np.ones((64, 16), np.float32))
    # As if the rows after the first panel were none of the array's, though they are in memory.
    first = dataclasses.replace(plan.panels, row_ids=plan.panels.row_ids[: plan.panels.width])
    with pytest.raises(RuntimeError, match="a kernel failed"):
        dataclasses.replace(plan, panels=first)(np.ones((64, 16), np.float32))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_index_is_out_of_bounds(tmp_path):
    """The quick tests of this file again, by kernels that check every index."""
    switches = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    tests = ["test_linear_layers", "test_convolutions", "test_bounds_are_checked_where_asked_for"]
    assert "3 passed" in run_pytest(switches, *(f"{__file__}::{test}" for test in tests))
