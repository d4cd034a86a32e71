"""Sparse layers on GPU tensors: here half-precision tensors on an emulated GPU, then, marked gpu, on a real one."""

import copy
import os
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from emulated_machine import EmulatedTorchMachine
from torch import nn

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.nn import SparseConv2d, SparseLinear, layer_operators, sparse_conv, sparse_linear
from sparse_kernels.patterns import parse
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

PATTERNS = {"dense": 0.0, "unstructured": 0.8, "nm:2:4": 0.5, "block:16x16": 0.5, "vector:32": 0.5, "shflbw:16": 0.6}
CONV_PATTERNS = ("dense", "block:16x16", "vector:32", "shflbw:16")
DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """The GPU that all tensors are taken to lie on."""
    emulated = EmulatedTorchMachine("sm_80")
    for module in (sparse_linear, sparse_conv):
        monkeypatch.setattr(module, "machine_of", lambda device: emulated)
    return emulated


@pytest.fixture(autouse=True)
def _seed(rng):
    torch.manual_seed(int(rng.integers(2**31)))


def whole(module, dtype=torch.float32):
    """Whole numbers as weights and bias: sums of few products are exact in any order and element type."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
    return module.to(dtype).eval()


def choice(module, pattern):
    weight = weight_matrix(module).float().abs().numpy()
    ties_broken = weight + np.random.default_rng(0).random(weight.shape)
    return LayerPattern(parse(pattern), parse(pattern).mask(ties_broken, PATTERNS[pattern]))


def masked(module, mask):
    """The oracle: torch's own layer in float64, the pruned weights set to zero."""
    module = copy.deepcopy(module).double()
    set_weight_matrix(module, weight_matrix(module) * torch.from_numpy(mask))
    return module


def sparse(module, pattern, activation=None):
    chosen = choice(module, pattern)
    kind = SparseLinear if isinstance(module, nn.Linear) else SparseConv2d
    return kind.from_dense(module, chosen.pattern, chosen.mask, activation=activation, backend="cupy"), chosen.mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.no_grad()
def test_a_linear_layer_is_the_masked_one(pattern, dtype):
    linear = whole(nn.Linear(52, 70))
    layer, mask = sparse(linear, pattern, "relu")
    for shape in [(3, 5, 52), (1, 52), (0, 52), (52,)]:
        x = torch.randint(-2, 3, shape).to(dtype)
        y = layer(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), F.relu(masked(linear, mask)(x.double())), rtol=0, atol=0)
    assert layer.kernel.startswith("cuda.") and layer.kernel.endswith(".sm_80")


@pytest.mark.parametrize("pattern", CONV_PATTERNS)
@torch.no_grad()
def test_a_convolution_is_the_masked_one_for_any_batch_with_one_plan(pattern, machine):
    conv = whole(nn.Conv2d(16, 32, 3, stride=2, padding=1))
    layer, mask = sparse(conv, pattern, "relu")
    uploads = []
    for batch in (2, 5):
        x = torch.randint(-2, 3, (batch, 16, 6, 7)).half()
        torch.testing.assert_close(layer(x).double(), F.relu(masked(conv, mask)(x.double())), rtol=0, atol=0)
        uploads.append(len(machine.uploads))
    assert uploads[0] == uploads[1] > 0


@torch.no_grad()
def test_a_convolution_keeps_the_plan_of_every_size_that_a_graph_may_have_captured(machine):
    layer, _ = sparse(whole(nn.Conv2d(16, 32, 3)), "vector:32")
    images = [torch.randint(-2, 3, (1, 16, size, size)).half() for size in (5, 6, 5)]
    uploads = []
    for x in images:
        layer(x)
        uploads.append(len(machine.uploads))
    assert uploads[0] < uploads[1] == uploads[2]


@torch.no_grad()
def test_other_weights_make_other_plans_for_layers_and_operators(machine):
    linear = whole(nn.Linear(48, 32))
    layer, mask = sparse(linear, "vector:32")
    x = torch.randint(-2, 3, (5, 48)).half()
    layer(x)
    layer_operators.apply_linear(x, *layer.operands())
    linear.weight.mul_(2)
    other = SparseLinear.from_dense(linear, parse("vector:32"), mask, backend="cupy")
    layer.load_state_dict(other.state_dict())
    assert layer.kernel is None
    expected = masked(linear, mask)(x.double())
    for y in (layer_operators.apply_linear(x, *layer.operands()), layer(x)):
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=0)


@torch.no_grad()
@torch.no_grad()
def test_few_tokens_have_a_plan_of_their_own_whatever_came_first(machine):
    linear = whole(nn.Linear(52, 70))
    layer, mask = sparse(linear, "shflbw:16")
    for tokens in (5, 100, 5, 64, 65):
        x = torch.randint(-2, 3, (tokens, 52)).half()
        torch.testing.assert_close(layer(x).double(), masked(linear, mask)(x.double()), rtol=0, atol=0)
    functions = [launch.variant.function for launch in machine.launched]
    assert functions == ["vector_few", "vector_matmul", "vector_few", "vector_few", "vector_matmul"]


def test_a_layer_behind_another_copies_nothing():
    first, second = (sparse(whole(nn.Linear(64, 64)), "vector:32")[0] for _ in range(2))
    seen = []
    run = second._multiply
    second._multiply = lambda x, shape: seen.append(x.data_ptr()) or run(x, shape)
    between = first(torch.randint(-2, 3, (2, 8, 64)).half()) + 0
    second(between)
    assert seen == [between.data_ptr()]
    conv, other = (sparse(whole(nn.Conv2d(16, 16, 3, padding=1)), "block:16x16")[0] for _ in range(2))
    run_conv = other._multiply
    other._multiply = lambda x, shape: seen.append(x.data_ptr()) or run_conv(x, shape)
    between = F.relu(conv(torch.randint(-2, 3, (2, 16, 5, 5)).half()))
    other(between)
    assert seen[1:] == [between.data_ptr()]


@torch.no_grad()
def test_a_model_goes_to_half_before_or_after_its_conversion():
    model = whole(nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 16)))
    choices = {
        name: choice(model.get_submodule(name), "vector:32" if name == "0" else "block:16x16") for name in "02"
    }
    x = torch.randint(-2, 3, (9, 48)) / 8
    before = convert(copy.deepcopy(model).half(), choices, (x.half(),), backend="cupy")
    reference = nn.Sequential(masked(model[0], choices["0"].mask), nn.GELU(), masked(model[2], choices["2"].mask))
    expected = reference(x.double())
    # One rounding to half between the layers, one at the end: each 2^-11 of what it rounds.
    scale = float(expected.abs().max() + weight_matrix(model[2]).abs().sum(1).max() * 64)
    torch.testing.assert_close(before(x.half()).double(), expected, rtol=0, atol=scale * 2**-11)
    assert [type(it).__name__ for it in before.modules()].count("GELU") == 0  # it runs in the kernel
    after = sparse(model[0], "vector:32")[0]
    torch.testing.assert_close(after.half()(x.half()), sparse(model[0], "vector:32")[0](x.half()), rtol=0, atol=0)


@torch.no_grad()
def test_a_slice_that_starts_anywhere_is_copied():
    linear = whole(nn.Linear(48, 32))
    layer, mask = sparse(linear, "vector:32")
    flat = torch.randint(-2, 3, (48 * 8 + 1,)).half()
    x = flat[1:].view(48, 8).t()
    torch.testing.assert_close(layer(x).double(), masked(linear, mask)(x.double()), rtol=0, atol=0)


@torch.no_grad()
def test_autocast_decides_the_element_type():
    linear = whole(nn.Linear(48, 32))
    layer, mask = sparse(linear, "vector:32")
    x = torch.randint(-2, 3, (5, 48)).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), masked(linear, mask)(x.double()), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["cupy", "numba"])
@torch.no_grad()
def test_under_torch_compile_a_layer_is_one_operator_of_an_unbroken_graph(backend):
    dtype = torch.float16 if backend == "cupy" else torch.float32
    model = whole(
        nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 9, 32), nn.LayerNorm(32))
    )
    choices = {name: choice(model.get_submodule(name), "vector:32") for name in ("0", "3")}
    x = torch.randint(-2, 3, (4, 16, 5, 5)).to(dtype)
    converted = convert(model.to(dtype), choices, (x,), backend=backend)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(converted, backend=keep, fullgraph=True)
    torch.testing.assert_close(compiled(x), converted(x), rtol=0, atol=0)
    calls = [node.target for node in graphs[0].graph.nodes if "sparse_kernels" in str(node.target)]
    assert len(graphs) == 1
    assert len(calls) == 2


@torch.no_grad()
def test_blocks_that_are_compiled_one_by_one_share_a_compilation():
    torch._dynamo.reset()
    compiled = []

    def count(graph, _):
        compiled.append(graph)
        return graph

    x = torch.randint(-2, 3, (4, 32)).half()
    for _ in range(10):
        block = nn.Sequential(sparse(whole(nn.Linear(32, 32)), "vector:32")[0], nn.LayerNorm(32).half())
        y = block(x)
        block.compile(backend=count, fullgraph=True)
        torch.testing.assert_close(block(x), y, rtol=0, atol=0)
    assert len(compiled) <= 3


@torch.no_grad()
def test_a_copy_of_a_compiled_layer_is_not_the_layer():
    torch._dynamo.reset()
    layer, _ = sparse(whole(nn.Linear(48, 32)), "vector:32")
    x = torch.randint(-2, 3, (5, 48)).half()
    y = layer(x)
    layer.compile(backend="eager")
    twin = copy.deepcopy(layer)
    twin.values.zero_()
    assert not torch.equal(twin(x), y)
    torch.testing.assert_close(layer(x), y, rtol=0, atol=0)


@torch.no_grad()
def test_the_operator_says_truly_what_it_returns():
    layer, _ = sparse(whole(nn.Linear(48, 32)), "vector:32")
    x = torch.randint(-2, 3, (8, 48)).half()
    checks = torch.library.opcheck(layer_operators.apply_linear, (x, *layer.operands()))
    assert set(checks.values()) == {"SUCCESS"}


@torch.no_grad()
def test_copies_and_pickles_are_operators_of_their_own():
    layer, _ = sparse(whole(nn.Linear(48, 32)), "vector:32")
    x = torch.randint(-2, 3, (5, 48)).half()
    y = layer(x)
    twin = copy.deepcopy(layer)
    twin.values.zero_()
    assert not torch.equal(twin(x), y)
    assert torch.equal(layer_operators.apply_linear(x, *layer.operands()), y)
    assert torch.equal(layer_operators.apply_linear(x, *twin.operands()), twin(x))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(5, 48), "takes float16 and bfloat16, not torch.float32: model.half()"),
        (torch.zeros(5, 47).half(), "takes 48 features, the input has 47"),
    ],
)
@torch.no_grad()
def test_inputs_that_do_not_fit_are_refused(x, message):
    layer, _ = sparse(whole(nn.Linear(48, 32)), "vector:32")
    with pytest.raises((TypeError, ValueError), match=message.replace("(", r"\(").replace(")", r"\)")):
        layer(x)


@torch.no_grad()
def test_an_operator_whose_layer_is_gone_computes_the_same():
    layer, _ = sparse(whole(nn.Linear(48, 32)), "vector:32")
    x = torch.randint(-2, 3, (5, 48)).half()
    y, operands = layer(x), layer.operands()
    del layer
    assert torch.equal(layer_operators.apply_linear(x, *operands), y)


@torch.no_grad()
def test_a_tensor_on_a_cpu_is_refused(monkeypatch):
    monkeypatch.undo()
    layer, _ = sparse(whole(nn.Linear(48, 32)), "vector:32")
    with pytest.raises(TypeError, match="backend 'cupy' runs on CUDA tensors, not on cpu"):
        layer(torch.zeros(5, 48).half())


def test_a_backend_that_layers_do_not_have_is_refused():
    with pytest.raises(ValueError, match="no backend 'numba_cuda' for layers: known are numba, reference, cupy"):
        SparseLinear.from_dense(nn.Linear(4, 4), parse("dense"), None, backend="numba_cuda")


# ------------------------------------------------------------------------------------------------ on a real GPU


@pytest.fixture
def real(monkeypatch):
    monkeypatch.undo()
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


def gpu_model(dtype):
    model = whole(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)))
    choices = {"0": choice(model[0], "shflbw:16"), "2": choice(model[2], "vector:32")}
    x = torch.randint(-2, 3, (4, 24, 256))
    reference = nn.Sequential(masked(model[0], choices["0"].mask), nn.ReLU(), masked(model[2], choices["2"].mask))
    x_gpu = x.to("cuda", dtype)
    return convert(model.to("cuda", dtype), choices, (x_gpu,), backend="cupy"), x_gpu, reference(x.double())


def assert_close(y, expected, dtype):
    # Two roundings: between the layers, whose sums reach 128 and go through 512 weights of at most 2, and at the end.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double().cpu(), expected, rtol=eps, atol=float(expected.abs().max()) * eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_on_a_gpu_layers_run_on_torchs_current_stream(real, dtype):
    model, x, expected = gpu_model(dtype)
    assert_close(model(x), expected, dtype)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)  # what follows must wait for it: on another stream it would not
        late = x * 1
        y = model(late)
    side.synchronize()
    assert_close(y, expected, dtype)


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_layers_are_captured_into_a_graph(real):
    model, x, expected = gpu_model(torch.float16)
    static = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(static)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(static)
    static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert_close(y, expected, torch.float16)


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_gpu_a_compiled_model_gives_the_same(real):
    # The last of all, for it takes half a minute where nothing is cached; alone it needs no pool of compilers.
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        pytest.skip("no C compiler, which Triton needs")
    from torch._inductor import config

    model, x, expected = gpu_model(torch.float16)
    torch._dynamo.reset()
    with config.patch(compile_threads=1):
        assert_close(torch.compile(model, fullgraph=True)(x), expected, torch.float16)
