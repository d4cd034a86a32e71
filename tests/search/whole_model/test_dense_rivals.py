"""Which dense engines are still timed: noise leaves none out, evidence does, and later evidence may take it back."""

import numpy as np

from search.whole_model.dense_rivals import find_fastest_dense, find_known_seconds, find_slower_engines
from search.whole_model.timings import Timings


def draw(seconds: dict[str, float], scatter: float, rounds: int, builds: int = 1, seed: int = 0) -> Timings:
    rng = np.random.default_rng(seed)
    blocks = {name: [[value * rng.lognormal(0, scatter)] for _ in range(rounds)] for name, value in seconds.items()}
    return Timings(blocks, {}, [1 + i % builds for i in range(rounds)])


def test_an_engine_is_left_out_if_it_is_certainly_slower() -> None:
    quiet = draw({"torch": 1.0, "openvino": 1.2, "onnxruntime": 1.05}, 0.01, rounds=5)
    assert find_slower_engines([quiet]) == {"openvino"}
    assert find_fastest_dense([quiet]) == "torch"


def test_a_noisy_session_leaves_no_near_engine_out() -> None:
    # Seconds of one session, on a machine that others used: OpenVINO is the fastest when it is quiet.
    noisy = Timings(
        {
            "torch": [[0.0992], [0.1027], [0.0666], [0.0739], [0.0686]],
            "openvino": [[0.0857], [0.1015], [0.0889], [0.0839], [0.0868]],
            "numba": [[0.0724], [0.1075], [0.1053], [0.0823], [0.0909]],
            "torch-mkldnn": [[0.111], [0.114], [0.126], [0.1146], [0.1208]],
        },
        {},
    )
    assert find_fastest_dense([noisy]) == "torch"
    assert find_slower_engines([noisy]) == {"torch-mkldnn"}


def test_later_rounds_take_an_earlier_judgement_back() -> None:
    probes = draw({"torch": 1.0, "openvino": 1.2}, 0.01, rounds=5)
    verified = draw({"torch": 1.2, "openvino": 1.0}, 0.05, rounds=18, builds=3, seed=1)
    assert find_slower_engines([probes]) == {"openvino"}
    assert find_fastest_dense([probes, verified]) == "openvino"
    assert "openvino" not in find_slower_engines([probes, verified])


def test_an_engine_that_was_never_timed_is_not_judged() -> None:
    first = draw({"torch": 1.0}, 0.01, rounds=5)
    other = draw({"openvino": 2.0}, 0.01, rounds=5)  # in a session without torch: no pairs
    assert find_slower_engines([first, other]) == set()
    assert find_slower_engines([]) == set()
    assert find_fastest_dense([]) == "torch"
    assert "pruned" not in find_known_seconds([draw({"torch": 1.0, "pruned": 0.5}, 0.01, rounds=5)])
