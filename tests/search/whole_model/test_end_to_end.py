"""Engines timed in processes, and what is concluded from the samples; the engines here are plain Python."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from latbench.errors import BadData, LatbenchError
from latbench.runners.worker_process import WorkerDied
from latbench.timing.sampling import Burst
from search.knapsack.arrays import Infeasible
from search.problem.layers import DENSE, Interval, LayerOptions, Option, expand_choice
from search.whole_model.end_to_end import (
    EXTRA_BUILDS,
    MAX_BURST_TRIES,
    MAX_ROUND_FACTOR,
    EngineBuilder,
    ModelTimer,
    RoundSchedule,
)
from search.whole_model.overhead import (
    FREE,
    compute_additivity,
    find_choice,
    fit_relative_line,
    fit_whole_model,
    select_probe_profiles,
)
from search.whole_model.quiet_rounds import (
    SLOW_ROUND,
    Round,
    compute_slowness,
    find_undisturbed_builds,
    select_quiet_rounds,
)
from search.whole_model.sessions import Session
from search.whole_model.timings import RESAMPLES, Timings, _resample_medians

ENGINES = """
import time
def sleeper(seconds):
    return lambda: time.sleep(seconds)
def broken():
    raise RuntimeError("no such operator")
def parent(path):
    import os
    with open(path, "a") as file:
        file.write(f"{os.getppid()} ")
    return lambda: None
def traced(path):
    import os
    with open(path, "a") as file:
        file.write(f"{os.getpid()} ")
    return lambda: None
"""


def time_engines(engines: dict[str, EngineBuilder], *, threads: int, **options: Any) -> Timings:
    with ModelTimer(threads) as timer:
        return timer.time(engines, **options)


def drawn(rng: np.random.Generator, median: float, rounds: int = 15, calls: int = 20) -> list[list[float]]:
    """Rounds whose level moves by 5%, calls within that move by 1%."""
    return [
        (median * np.exp(0.05 * rng.standard_normal() + 0.01 * rng.standard_normal(calls))).tolist()
        for _ in range(rounds)
    ]


def test_engines_run_in_turn_and_one_that_cannot_is_left_out_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "engines.py"
    path.write_text(ENGINES)
    engines = {
        "slow": EngineBuilder("a", f"{path}:sleeper", (0.04,)),
        "fast": EngineBuilder("b", f"{path}:sleeper", (0.01,)),
        "other": EngineBuilder("b", f"{path}:sleeper", (0.02,)),
        "absent": EngineBuilder("c", f"{path}:broken", ()),
    }
    told: list[tuple[str, int | None, int | None]] = []
    timings = time_engines(
        engines,
        threads=1,
        required=["slow"],
        schedule=RoundSchedule(3, 1, 0.01),
        progress=lambda *now: told.append(now),
    )
    # Rounds that something else slowed are taken again, or are left out: there may be more or fewer than asked for.
    counts = {name: len(blocks) for name, blocks in timings.blocks.items()}
    assert list(counts) == ["slow", "fast", "other"]
    assert len(set(counts.values())) == 1
    assert timings.left_out == {"absent": "RuntimeError: no such operator"}
    assert min(min(block) for block in timings.blocks["slow"]) >= 0.04
    assert timings.fastest(["slow", "absent", "other"]) == "other"
    what, done, of = told[-1]
    assert what == "timing whole models in turns" and done is not None and of is not None and done < of >= 3
    with pytest.raises(LatbenchError, match="absent cannot run this model: RuntimeError: no such operator"):
        time_engines({"absent": engines["absent"]}, threads=1, required=["absent"])


def test_engines_are_built_anew_in_several_processes(tmp_path: Path) -> None:
    (tmp_path / "engines.py").write_text(ENGINES)
    engines = {
        name: EngineBuilder(worker, f"{tmp_path / 'engines.py'}:traced", (str(tmp_path / name),))
        for name, worker in (("one", "a"), ("two", "b"), ("three", "b"))
    }
    timings = time_engines(engines, threads=1, required=["one"], schedule=RoundSchedule(3, 1, 0.01))
    processes, two, three = ((tmp_path / name).read_text().split() for name in engines)
    assert len({*processes, *two}) == len(processes) + len(two)  # a process a worker, and none of them twice
    assert two == three
    # More than asked for where something else had the cores during one of them.
    assert 3 <= len(processes) <= 3 + EXTRA_BUILDS
    assert len(timings.builds) == len(timings.blocks["one"])
    assert set(timings.builds) <= set(range(1, len(processes) + 1))


def test_each_building_has_its_speedup() -> None:
    blocks = {"dense": [[4.0], [4.0], [6.0], [6.0]], "pruned": [[2.0], [2.0], [2.0], [2.0]]}
    assert Timings(blocks, {}, (1, 1, 3, 3)).speedups("pruned", "dense") == [2.0, 3.0]
    assert Timings(blocks, {}).speedups("pruned", "dense") == [2.5]


def taken(a: float, b: float, preempted: bool = False) -> Round:
    return {"a": Burst([a] * 5), "b": Burst([b] * 5, preempted)}


def test_rounds_that_something_else_slowed_do_not_count() -> None:
    def quiet(rounds: list[Round], known: dict[str, float]) -> list[int]:
        return np.flatnonzero(compute_slowness(rounds, known) <= SLOW_ROUND).tolist()

    undisturbed = [
        taken(4.0, 2.0),
        taken(4.1, 2.05),
        taken(3.9, 2.1),
        taken(4.0, 2.3),
    ]  # b alone slow: that is its own time
    disturbed = [taken(5.0, 2.7), taken(4.0, 2.0, preempted=True)]
    assert quiet([disturbed[0], *undisturbed, disturbed[1]], {}) == [1, 2, 3, 4]
    assert quiet([], {}) == []
    # All rounds of a session are alike: only what was known before tells that they are slow.
    assert quiet([taken(8.0, 5.0)] * 3, {}) == [0, 1, 2]
    assert quiet([taken(8.0, 5.0)] * 3, {"a": 7.5}) == [0, 1, 2]
    assert quiet([taken(8.0, 5.0)] * 3, {"a": 6.0}) == []
    assert quiet([taken(8.0, 5.0)] * 3, {"a": 9.0}) == [0, 1, 2]
    assert quiet([taken(8.0, 5.0)] * 3, {"another": 1.0}) == [0, 1, 2]


def test_bursts_that_scatter_each_by_itself_make_no_round_slow() -> None:
    rng = np.random.default_rng(0)
    rounds = [{name: Burst([np.exp(0.12 * rng.standard_normal())] * 3) for name in "abcdef"} for _ in range(18)]
    assert np.mean(compute_slowness(rounds, {}) <= SLOW_ROUND) > 0.7  # their means scatter by 5%
    slow = [{name: Burst([1.4 * sample for sample in burst.samples]) for name, burst in it.items()} for it in rounds]
    assert (compute_slowness([*rounds, *slow], {})[18:] > SLOW_ROUND).all()


def test_of_each_building_the_quietest_rounds_count() -> None:
    quiet, slow = taken(4.0, 2.0), taken(8.0, 4.0)
    rounds = [quiet] * 4 + [slow, taken(6.0, 3.0), slow, slow, quiet] + [taken(4.0, 2.0, preempted=True)] * 4
    built = [1] * 4 + [2] * 5 + [3] * 4
    assert select_quiet_rounds(rounds, built, 1, {}) == [0, 1, 2, 3]
    assert select_quiet_rounds(rounds, built, 2, {}) == [4, 5, 8]
    assert select_quiet_rounds(rounds, built, 3, {}) == [9, 10, 11]
    # Never as quiet as it was known to be: then all that are alike.
    assert select_quiet_rounds([slow] * 5, [1] * 5, 1, {"a": 4.0}) == [0, 1, 2, 3, 4]


def test_a_building_that_never_had_the_machine_to_itself_does_not_count() -> None:
    quiet, slow = taken(4.0, 2.0), taken(8.0, 4.4)
    rounds, built = [quiet] * 4 + [slow] * 6 + [slow] * 3 + [quiet] * 3, [1] * 4 + [2] * 6 + [3] * 6
    assert find_undisturbed_builds(rounds, built, {}) == [1, 3]
    assert find_undisturbed_builds(rounds[4:10], built[4:10], {}) == [2]  # nothing tells that it is slow
    assert find_undisturbed_builds(rounds[4:10], built[4:10], {"a": 4.0}) == []
    # One engine's bad luck in its building is its own: the others say that the machine is quiet.
    assert find_undisturbed_builds([quiet, {**quiet, "b": Burst([3.0])}], [1, 2], {}) == [1, 2]
    assert find_undisturbed_builds([], [], {}) == []


class Busy:
    """Workers on a machine that is twice as slow while some buildings last; engines are named by their seconds."""

    disturbed: tuple[int, ...] = ()
    buildings = 0

    def __init__(self, **_: object) -> None:
        pass

    def __enter__(self) -> "Busy":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def renew(self, function: str) -> None:
        Busy.buildings += 1

    def prepare(self, function: str, *arguments: object, timeout: float) -> str:
        return function

    def burst(self, prepared: str, seconds: float, *, timeout: float) -> Burst:
        return Burst([float(prepared) * (2 if Busy.buildings in self.disturbed else 1)])

    def drop(self, prepared: list[str]) -> None:
        pass


@pytest.mark.parametrize(
    ("disturbed", "counted"),
    [((1,), {2, 3, 4}), ((2,), {1, 3, 4}), ((1, 3), {2, 4, 5}), ((1, 2, 4), {3, 5}), ((1, 2, 3), {1, 2, 3})],
)
def test_engines_are_built_again_in_place_of_a_disturbed_building(
    disturbed: tuple[int, ...], counted: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last one was disturbed all the time: nothing tells.
    monkeypatch.setattr(Busy, "disturbed", disturbed)
    monkeypatch.setattr(Busy, "buildings", 0)
    monkeypatch.setattr("search.whole_model.end_to_end.Worker", Busy)
    engines = {name: EngineBuilder("a", name, ()) for name in ("4.0", "3.0")}
    timings = time_engines(engines, threads=1, required=[], schedule=RoundSchedule(3, 3))
    assert set(timings.builds) == counted
    assert timings.seconds("4.0", 0.9).value == (8.0 if disturbed == (1, 2, 3) else 4.0)


@pytest.mark.parametrize(("known", "rounds"), [({}, 9), ({"4.0": 3.9}, 9), ({"4.0": 3.0}, 9 + 6)])
def test_a_machine_of_another_pace_is_waited_for_during_one_building(
    known: dict[str, float], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Busy, "buildings", 0)
    monkeypatch.setattr("search.whole_model.end_to_end.Worker", Busy)
    timings = time_engines(
        {"4.0": EngineBuilder("a", "4.0", ())}, threads=1, required=[], schedule=RoundSchedule(rounds=3), known=known
    )
    assert set(timings.builds) == {1, 2, 3}
    assert len(timings.builds) == rounds  # three a building, and three times as many in the one that waits


class Moving(Busy):
    """Workers whose cores are apart, and twice as slow, in some of their bursts, counted over all."""

    apart: Callable[[int], bool] = staticmethod(lambda burst: False)
    bursts = 0

    def burst(self, prepared: str, seconds: float, *, timeout: float) -> Burst:
        Moving.bursts += 1
        return Burst([float(prepared) * (2 if self.apart(Moving.bursts) else 1)])


@pytest.mark.parametrize(
    ("apart", "slow"),
    [(lambda burst: burst % 12 > 4, False), (lambda burst: burst > 7, False), (lambda _: True, True)],
)
def test_bursts_from_when_cores_were_apart_are_taken_again(
    apart: Callable[[int], bool], slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Moving, "apart", staticmethod(apart))
    monkeypatch.setattr(Moving, "bursts", 0)
    monkeypatch.setattr("search.whole_model.end_to_end.Worker", Moving)
    monkeypatch.setattr("search.whole_model.end_to_end.CorePlacement.apart", lambda self: apart(Moving.bursts))
    engines = {name: EngineBuilder(name, name, ()) for name in ("4.0", "3.0")}
    timings = time_engines(engines, threads=2, required=[], schedule=RoundSchedule(1, 6))
    pace = 2 if slow else 1
    for name in engines:
        assert {sample for block in timings.blocks[name] for sample in block} == {float(name) * pace}
    # A round ends when its cores stay apart: one engine's bursts are taken so often, the other's once.
    assert Moving.bursts <= 6 * MAX_ROUND_FACTOR * (MAX_BURST_TRIES + 1)


class Told(Busy):
    """Workers that say whose turn it was, in which building."""

    turns: ClassVar[list[tuple[int, str]]] = []

    def burst(self, prepared: str, seconds: float, *, timeout: float) -> Burst:
        self.turns.append((Busy.buildings, prepared))
        return super().burst(prepared, seconds, timeout=timeout)


def test_engines_take_turns_in_each_round_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Busy, "buildings", 0)
    monkeypatch.setattr(Told, "turns", [])
    monkeypatch.setattr("search.whole_model.end_to_end.Worker", Told)
    names = ["4.0", "3.0", "2.0", "1.0"]
    engines = {name: EngineBuilder("a", name, ()) for name in names}
    timings = time_engines(engines, threads=1, required=[], schedule=RoundSchedule(2, 6))
    rounds = [Told.turns[i : i + len(names)] for i in range(0, len(Told.turns), len(names))]
    assert len(rounds) == len(timings.builds) == 12
    for one, building in zip(rounds, timings.builds, strict=True):
        assert sorted(name for _, name in one) == sorted(names) and {number for number, _ in one} == {building}
    assert len({tuple(name for _, name in one) for one in rounds}) > 4


@pytest.mark.parametrize(("first", "enough_after", "builds"), [(1, 1, 1), (1, 2, 2), (2, 1, 2), (3, 1, 3), (1, 9, 4)])
def test_a_timing_ends_with_the_first_build_that_says_enough(
    first: int, enough_after: int, builds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Busy, "buildings", 0)
    monkeypatch.setattr("search.whole_model.end_to_end.Worker", Busy)
    seen: list[int] = []

    def is_enough(timings: Timings) -> bool:
        seen.append(len(set(timings.builds)))
        return seen[-1] >= enough_after

    timings = time_engines(
        {"4.0": EngineBuilder("a", "4.0", ())}, threads=1, required=[], schedule=RoundSchedule(4, 3, first=first),
        is_enough=is_enough,
    )  # fmt: skip
    assert set(timings.builds) == set(range(1, builds + 1))
    assert seen == list(range(first, first + len(seen)))  # asked after each build from the first on


def test_a_disturbed_build_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Busy, "disturbed", (2,))
    monkeypatch.setattr(Busy, "buildings", 0)
    monkeypatch.setattr("search.whole_model.end_to_end.Worker", Busy)
    timings = time_engines(
        {"4.0": EngineBuilder("a", "4.0", ())}, threads=1, required=[], schedule=RoundSchedule(4, 3, first=2),
        is_enough=lambda timings: True,
    )  # fmt: skip
    assert set(timings.builds) == {1, 3}


def test_processes_stay_from_one_timing_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "engines.py").write_text(ENGINES)
    path = tmp_path / "parents"
    engine = EngineBuilder("a", f"{tmp_path / 'engines.py'}:parent", (str(path),))
    with ModelTimer(1) as timer:
        for _ in range(2):
            timer.time({"one": engine}, required=["one"], schedule=RoundSchedule(1, 1, 0.01))
    parents = path.read_text().split()
    assert len(parents) >= 2 and len(set(parents)) == 1  # each build is a fork of the same process


class Failing(Busy):
    """Workers on a quiet machine, on which one engine can be built only once."""

    def prepare(self, function: str, *arguments: object, timeout: float) -> str:
        if function == "5.0" and Busy.buildings > 1:
            raise WorkerDied("crash", "killed by signal 11")
        return function


def test_an_engine_that_dies_in_a_later_building_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Busy, "buildings", 0)
    monkeypatch.setattr("search.whole_model.end_to_end.Worker", Failing)
    engines = {name: EngineBuilder("a", name, ()) for name in ("4.0", "5.0", "3.0")}
    timings = time_engines(engines, threads=1, required=["4.0"], schedule=RoundSchedule(3, 3))
    assert (list(timings.blocks), set(timings.builds)) == (["4.0", "3.0"], {1, 2, 3})
    assert timings.left_out == {"5.0": "killed by signal 11"}
    assert timings.seconds("4.0", 0.9).value == 4.0
    monkeypatch.setattr(Busy, "buildings", 0)
    with pytest.raises(LatbenchError, match=r"5\.0 cannot run this model: killed by signal 11"):
        time_engines(engines, threads=1, required=["5.0"], schedule=RoundSchedule(3, 3))


class Dying(Busy):
    """Workers on a quiet machine that die of one engine in their second burst of the second building."""

    def renew(self, function: str) -> None:
        super().renew(function)
        self.dead, self.bursts = False, 0

    def burst(self, prepared: str, seconds: float, *, timeout: float) -> Burst:
        self.bursts += prepared == "5.0"
        self.dead |= prepared == "5.0" and self.bursts == 2 and Busy.buildings == 2
        if self.dead:
            raise WorkerDied("crash", "killed by signal 11")
        return super().burst(prepared, seconds, timeout=timeout)


def test_an_engine_that_dies_while_it_is_timed_is_left_out_and_its_building_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Busy, "buildings", 0)
    monkeypatch.setattr("search.whole_model.end_to_end.Worker", Dying)
    engines = {name: EngineBuilder("a", name, ()) for name in ("4.0", "5.0", "3.0")}
    timings = time_engines(engines, threads=1, required=["4.0"], schedule=RoundSchedule(3, 3))
    assert Busy.buildings == 4
    assert list(timings.blocks) == ["4.0", "3.0"] and timings.left_out == {"5.0": "killed by signal 11"}
    assert list(timings.builds) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert timings.seconds("4.0", 0.9).value == 4.0
    monkeypatch.setattr(Busy, "buildings", 0)
    with pytest.raises(LatbenchError, match=r"5\.0 cannot run this model: killed by signal 11"):
        time_engines(engines, threads=1, required=["5.0"], schedule=RoundSchedule(3, 3))


def test_an_interval_covers_the_truth_about_as_often_as_it_says(rng: np.random.Generator) -> None:
    # Calls of one round are alike: resampling calls instead of rounds would cover a third of the time.
    covered = 0
    for _ in range(60):
        found = Timings({"a": drawn(rng, 2.0)}, {}).seconds("a", 0.9)
        assert found.low <= found.value <= found.high
        covered += found.low <= 2.0 <= found.high
    assert covered >= 46  # of 60 at 0.9: fewer than that has a probability under 0.1% (binomial)


@pytest.mark.parametrize("calls", [(1,), (4,), (1, 1, 1), (3, 1, 4, 1, 5), (700, 900, 1100)])
def test_medians_are_those_of_rounds_drawn_one_by_one(rng: np.random.Generator, calls: tuple[int, ...]) -> None:
    blocks = [rng.lognormal(size=count).round(1 if count < 9 else 9).tolist() for count in calls]  # with ties
    draws = np.random.default_rng(len(blocks)).integers(0, len(blocks), (RESAMPLES, len(blocks)))
    wanted = [np.median(np.concatenate([blocks[i] for i in draw])) for draw in draws]
    np.testing.assert_array_equal(_resample_medians(blocks), wanted)


def test_a_speedup_is_known_better_than_the_seconds_when_rounds_move_alike(rng: np.random.Generator) -> None:
    dense = drawn(rng, 2.0)
    pruned = [[second / 2 * float(np.exp(0.001 * rng.standard_normal())) for second in block] for block in dense]
    timings = Timings({"dense": dense, "pruned": pruned}, {})
    speedup, seconds = timings.speedup("pruned", "dense", 0.9), timings.seconds("pruned", 0.9)
    assert speedup.low <= 2.0 <= speedup.high
    assert (speedup.high - speedup.low) / speedup.value < 0.2 * (seconds.high - seconds.low) / seconds.value


def test_a_line_is_found() -> None:
    assert fit_relative_line([10, 5, 2], [12, 7, 4]) == pytest.approx((2.0, 1.0))
    assert fit_relative_line([10, 5, 2], [9, 4, 1]) == pytest.approx((-1.0, 1.0))
    start, scale = fit_relative_line([10, 5, 2], [9.5, 5, 2.5])
    assert 0.5 < start < 1.0 and scale == pytest.approx(0.87, abs=0.03)
    assert fit_relative_line([4, 4], [5, 7]) == (2.0, 1.0)
    assert fit_relative_line([8], [5]) == (-3.0, 1.0)
    assert fit_relative_line([4, 2], [1, 2]) == pytest.approx((1.2, 0.0))  # never the faster for more work
    assert fit_relative_line([4, 2], [1, 2], 0.1) == pytest.approx(((0.6 + 1.8 / 4) / 1.25, 0.1))
    assert fit_relative_line([10, 5, 2], [12, 7, 4], 0.1) == pytest.approx((2.0, 1.0))


OPTIONS = (Option(DENSE, 0.0), Option("vector:8", 0.5), Option("vector:8", 0.9))


def layers() -> tuple[LayerOptions, ...]:
    t = np.array([4.0, 2.0, 1.0])
    return tuple(LayerOptions(name, OPTIONS, t, 0.9 * t, 1.1 * t, np.zeros(3)) for name in ("a", "b"))


def test_probes_are_dense_fastest_and_half_way() -> None:
    assert select_probe_profiles(layers()) == {"dense": (0, 0), "vector:8 at 0.5": (1, 1), "vector:8 at 0.9": (2, 2)}
    assert select_probe_profiles([layer.take([0]) for layer in layers()]) == {"dense": (0, 0)}


def test_the_whole_model_is_a_line_with_its_spread() -> None:
    def steady(seconds: float) -> list[list[float]]:
        return [[seconds] * 5] * 4

    profiles = {name: expand_choice(layers(), choice) for name, choice in select_probe_profiles(layers()).items()}
    measured = dict(zip(profiles, [8.2, 4.4, 2.5], strict=True))  # 0.6 + 0.95 x, exactly on the line
    blocks = {name: steady(seconds) for name, seconds in measured.items()}
    timings = Timings(blocks | {"torch": steady(9.0), "onnxruntime": steady(7.0)}, {"torch-mkldnn": "why"})
    whole = fit_whole_model(layers(), Session(profiles, timings), 0.9)
    assert (whole.fixed.value, whole.fixed.low, whole.fixed.high) == pytest.approx((0.6, 0.6, 0.6))
    assert whole.scale == pytest.approx(0.95)
    assert (whole.dense_engine, whole.left_out) == ("onnxruntime", {"torch-mkldnn": "why"})
    applied = whole.build_problem(layers())
    assert applied.predict((1, 1)).value == pytest.approx(4.4)
    assert applied.dense == Interval(7.0, 7.0, 7.0)
    blocks["vector:8 at 0.9"] = steady(3.0)
    bent = fit_whole_model(layers(), Session(profiles, Timings(blocks | {"torch": steady(9.0)}, {})), 0.9)
    for seconds, choice in zip([8.2, 4.4, 3.0], [(0, 0), (1, 1), (2, 2)], strict=True):
        in_layers = bent.build_problem(layers()).predict(choice).value - bent.fixed.value
        assert bent.fixed.low - 1e-9 <= seconds - in_layers <= bent.fixed.high + 1e-9


def test_the_ceiling_is_measured_with_layers_that_are_free() -> None:
    # Layers take 1.2 times as long as alone, less 0.45 each: the line through the profiles ends below zero.
    profiles = {name: expand_choice(layers(), choice) for name, choice in select_probe_profiles(layers()).items()}
    measured = dict(zip(profiles, [9.2, 4.4, 2.0], strict=True))
    blocks = {name: [[seconds] * 5] * 4 for name, seconds in (measured | {"torch": 9.0}).items()}
    unknown = fit_whole_model(layers(), Session(profiles, Timings(blocks, {})), 0.9)
    whole = fit_whole_model(layers(), Session(profiles, Timings({**blocks, FREE: [[0.5] * 5] * 4}, {})), 0.9)
    assert (unknown.ceiling, whole.ceiling) == (None, 18.0)
    assert (whole.scale, whole.saved) == pytest.approx((1.2, 0.45))
    for one in (unknown, whole):
        predicted = [one.build_problem(layers()).predict(choice).value for choice in ((0, 0), (1, 1), (0, 1), (2, 2))]
        assert predicted == pytest.approx([9.2, 4.4, 6.8, 2.0])
    with pytest.raises(Infeasible, match=r"the best is 4\.50x .*, and 18\.00x if all layers took no time; 6% of the"):
        whole.build_problem(layers()).budget(20.0)


def test_no_layer_is_predicted_to_take_nothing() -> None:
    profiles = {name: expand_choice(layers(), choice) for name, choice in select_probe_profiles(layers()).items()}
    blocks = dict(zip(profiles, ([[seconds] * 5] * 4 for seconds in (9.2, 4.4, 2.0)), strict=True))
    timings = Timings(blocks | {"torch": [[9.0] * 5] * 4, FREE: [[2.1] * 5] * 4}, {})  # slower than with its layers
    whole = fit_whole_model(layers(), Session(profiles, timings), 0.9)
    found = whole.build_problem(layers()).layers[0]
    assert found.seconds[2] == pytest.approx(0.1 * 1.2)
    assert (found.low > 0).all() and (found.low <= found.seconds).all() and (found.seconds <= found.high).all()
    assert whole.fixed.low == pytest.approx(2.0 - 2 * 0.12)


def test_a_line_that_falls_does_not_make_all_options_alike() -> None:
    profiles = {name: expand_choice(layers(), choice) for name, choice in select_probe_profiles(layers()).items()}
    blocks = dict(
        zip(profiles, ([[seconds] * 5] * 4 for seconds in (4.0, 4.1, 4.2)), strict=True)
    )  # the slower, the less
    for free in ({}, {FREE: [[0.5] * 5] * 4}):
        whole = fit_whole_model(
            layers(), Session(profiles, Timings(blocks | {"torch": [[9.0] * 5] * 4} | free, {})), 0.9
        )
        seconds = whole.build_problem(layers()).layers[0].seconds
        assert (np.diff(seconds) < 0).all()
        assert 3.0 < whole.build_problem(layers()).predict((1, 1)).value < 5.0


def test_additivity_is_what_sums_miss_with_the_line_and_without() -> None:
    alone, whole = [10.0, 5.0, 2.0, 1.0], [9.0, 5.0, 2.6, 1.8]  # 1 + 0.8 x
    before, after = compute_additivity(alone, whole)
    assert before == pytest.approx(np.median([1 / 9, 0, 0.6 / 2.6, 0.8 / 1.8]))
    assert after == pytest.approx(0, abs=1e-12)
    assert compute_additivity([4.0, 2.0], [5.0, 2.0]) == (pytest.approx(0.1), pytest.approx(0.1))


def test_profiles_by_name_and_by_place() -> None:
    chosen = expand_choice(layers(), (1, 2))
    assert chosen == {"a": OPTIONS[1], "b": OPTIONS[2]}
    assert find_choice(layers(), chosen) == (1, 2)
    with pytest.raises(BadData, match="the profile has other layers than the search: b"):
        find_choice(layers()[:1], chosen)
    with pytest.raises(BadData, match=r"the search has no option vector:8 at 0\.7 for layer b"):
        find_choice(layers(), {**chosen, "b": Option("vector:8", 0.7)})
