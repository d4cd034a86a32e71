"""What calls of linear plans take and refuse: as the reference, whose Python looks at each argument in turn."""

from typing import Any

import numpy as np
import pytest

from sparse_kernels.cpu.launch.linear_call import CpuLinearPlan
from sparse_kernels.cpu.runtime import threads
from sparse_kernels.formats import pack
from sparse_kernels.patterns import parse
from sparse_kernels.plan_protocol import ACTIVATIONS, Plan
from sparse_kernels.planner import prepare

M, K, N = 9, 6, 3

Given = dict[str, Any]


def locked(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def shares_with_x(given: Given) -> None:
    room = np.zeros(2 * M * N, np.float32)
    given["x"] = room[: K * N].reshape(given["x"].shape)
    given["out"] = room[K * N - 1 :][: M * N].reshape(given["out"].shape)


def shares_with_bias(given: Given) -> None:
    given["bias"] = given["out"].reshape(-1)[:M]


def with_one(name: str, change: Any) -> Any:
    return lambda given: given.__setitem__(name, change(given[name]))


WRONG = {
    "features": with_one("x", lambda x: np.ones([length + (length == K) for length in x.shape], np.float32)),
    "axes": with_one("x", lambda x: x.reshape(-1)),
    "more axes": with_one("x", lambda x: x[None]),
    "float64": with_one("x", lambda x: x.astype(np.float64)),
    "other byte order": with_one("x", lambda x: x.astype(">f4")),
    "list": with_one("x", lambda x: x.tolist()),
    "bias of another length": with_one("bias", lambda bias: bias[1:]),
    "bias of two axes": with_one("bias", lambda bias: bias[None]),
    "integers": with_one("bias", lambda bias: bias.astype(np.int32)),
    "bias in a list": with_one("bias", lambda bias: bias.tolist()),
    "activation": lambda given: given.update(activation="tanh"),
    "out as x": with_one("out", lambda out: np.ascontiguousarray(out.T)),
    "out, columns first": with_one("out", np.asfortranarray),
    "out, every other": with_one("out", lambda out: np.repeat(out, 2, axis=1)[:, ::2]),
    "out, locked": with_one("out", locked),
    "out, float64": with_one("out", lambda out: out.astype(np.float64)),
    "out, more tokens": with_one("out", lambda out: np.zeros([it + (it == N) for it in out.shape], np.float32)),
    "out in x": shares_with_x,
    "bias in out": shares_with_bias,
}

RIGHT = {
    "plain": lambda given: None,
    "locked": with_one("x", locked),
    "columns first": with_one("x", np.asfortranarray),
    "every other": with_one("x", lambda x: np.repeat(x, 2, axis=0)[::2]),
    "backwards": with_one("x", lambda x: x[::-1]),
    "one for all": with_one("x", lambda x: np.broadcast_to(x[:1], x.shape)),
    "not aligned": with_one("x", lambda x: np.frombuffer(b"\0" + x.tobytes(), "f4", offset=1).reshape(x.shape)),
    "a class of its own": with_one("x", lambda x: x.view(np.recarray)),
    "bias, every other": with_one("bias", lambda bias: np.repeat(bias, 2)[::2]),
    "no bias": lambda given: given.update(bias=None),
    "no out": lambda given: given.pop("out"),
}


@pytest.fixture(params=["token_major", "feature_major"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


# One kernel, one that needs room (where x is token-major), and several steps (where it is feature-major, or rows are
# single).
@pytest.fixture(params=["vector:4", "shflbw:4", "unstructured"])
def plans(request: pytest.FixtureRequest, rng: np.random.Generator, layout: str) -> tuple[Plan, Plan]:
    weight, pattern = rng.standard_normal((M, K)), parse(request.param)
    packed = pack(weight.astype(np.float32), pattern.mask(weight**2, 0.5), pattern)
    return prepare(packed, "numba", layout, N), prepare(packed, "reference", layout, N)


@pytest.fixture
def given(rng: np.random.Generator, layout: str) -> Given:
    x, bias = rng.standard_normal((N, K), np.float32), rng.standard_normal(M, np.float32)
    out = np.zeros((N, M), np.float32)
    if layout == "feature_major":
        x, out = np.ascontiguousarray(x.T), np.ascontiguousarray(out.T)
    return {"x": x, "bias": bias, "activation": "relu", "out": out}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_as_the_reference_says_it(plans: tuple[Plan, Plan], given: Given, change: Any) -> None:
    change(given)
    before = np.array(given["out"])
    said = []
    for plan in plans:
        with pytest.raises((TypeError, ValueError)) as refused:
            plan(**given)
        said.append((refused.type, str(refused.value)))
    assert said[0] == said[1]
    np.testing.assert_array_equal(given["out"], before)


@pytest.mark.parametrize("change", RIGHT.values(), ids=RIGHT)
def test_what_is_odd_but_right_is_computed(plans: tuple[Plan, Plan], given: Given, change: Any) -> None:
    change(given)
    ours, reference = plans
    expected = np.array(reference(**{**given, "out": None}))
    # Six products and a bias, of numbers about 1, in another order.
    np.testing.assert_allclose(ours(**given), expected, atol=1e-5)
    if "out" in given:
        np.testing.assert_allclose(given["out"], expected, atol=1e-5)


def test_only_what_is_plain_passes_the_quick_look(plans: tuple[Plan, Plan], given: Given) -> None:
    # Else the tests above might show what Python says, and nothing of the compiled function before it.
    plan = plans[0]
    assert isinstance(plan, CpuLinearPlan)
    *_, quick = plan._found(N, threads.count_threads())

    def passes(given: Given) -> bool:
        try:
            return quick(given["x"], given["out"], given["bias"], ACTIVATIONS.index("relu"))
        except TypeError:
            return False

    assert passes(given)
    np.testing.assert_allclose(given["out"], plans[1](**{**given, "out": None}), atol=1e-5)
    for name in set(WRONG) - {"activation"}:
        changed = {**given, "out": given["out"].copy()}
        WRONG[name](changed)
        before = np.array(changed["out"])
        assert not passes(changed), name
        np.testing.assert_array_equal(changed["out"], before)
    assert not passes({**given, "x": given["x"][:0], "out": given["out"][:0]})
