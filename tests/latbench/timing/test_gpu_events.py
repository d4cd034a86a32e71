"""Timing by events, on a device that exists only as two clocks."""

import gc
import weakref
from typing import Any

import gpu_fakes
import numpy as np
import pytest

from latbench.machines.nvml import GpuState, summarise_gpu_states
from latbench.timing import gpu_events
from latbench.timing.gpu_events import (
    BatchPlan,
    EventTimer,
    NotCaptured,
    TimingMode,
    build_event_timer,
    choose_copies,
    displaces_cache,
)
from latbench.timing.sampling import FEWEST_ROUNDS, StopRule, Timing, sample_interleaved

GRAPH = TimingMode("rotated", "graph")
CALL = TimingMode("rotated", "call")
COLD = TimingMode("cold", "call")
WARM = TimingMode("warm", "call")
HOT = GpuState(reasons=frozenset({"hw_thermal_slowdown"}))
FINE = GpuState(clock_hertz=1.98e9, reasons=frozenset({"sw_power_cap"}))


def ready(device: Any, mode: TimingMode, *calls: Any, **options: Any) -> EventTimer:
    return build_event_timer(calls, device, mode, clock=device.clock, **options)


@pytest.mark.parametrize("mode", [GRAPH, CALL, COLD, WARM])
@pytest.mark.parametrize("seconds", [2e-6, 7e-5, 3e-3])
@pytest.mark.parametrize("launch", [0.0, 5e-6, 40e-6])
def test_samples_are_the_devices_time_however_slow_the_host_is(
    mode: TimingMode, seconds: float, launch: float
) -> None:
    device = gpu_fakes.FakeDevice(launch=launch)
    samples = ready(device, mode, device.kernel(seconds)).burst(0.01).samples
    assert samples and np.allclose(samples, seconds, rtol=1e-6)


def test_without_a_head_start_the_hosts_latency_is_timed() -> None:
    # What the test above would not notice if the fake device were never late.
    device = gpu_fakes.FakeDevice(launch=40e-6)
    timer = ready(device, CALL, device.kernel(2e-6))
    timer.flushes = 0
    device.wait()
    assert min(timer.burst(0.0).samples) > 1e-5


@pytest.mark.parametrize("mode", [GRAPH, CALL, WARM])
@pytest.mark.parametrize("seconds", [3e-6, 1.1e-5, 9e-4])
def test_a_sample_is_long_beside_the_tick_of_events(mode: TimingMode, seconds: float) -> None:
    device = gpu_fakes.FakeDevice(tick=5e-7)
    timer = ready(device, mode, device.kernel(seconds))
    assert timer.inner_loops * seconds >= 0.9 * gpu_events.SHORTEST_SAMPLE_SECONDS
    assert np.allclose(timer.burst(0.01).samples, seconds, rtol=0.005)


def test_cold_calls_follow_a_flush_each() -> None:
    device = gpu_fakes.FakeDevice()
    timer = ready(device, COLD, device.kernel(1e-4), device.kernel(1e-4, "copy"))
    device.ran.clear()
    timer.burst(0.0)
    counted = device.ran[1 + timer.flushes :]  # after the call that warms up and the head start
    assert counted == ["flush", "work"] * timer.samples and timer.inner_loops == 1
    assert timer.facts["l2_flush_bytes"] == 2 * device.l2_bytes


def test_warm_calls_are_preceded_by_themselves() -> None:
    device = gpu_fakes.FakeDevice()
    timer = ready(device, WARM, device.kernel(3e-4), device.kernel(3e-4, "copy"))
    device.ran.clear()
    timer.burst(0.0)
    last_flush = len(device.ran) - 1 - device.ran[::-1].index("flush")
    assert device.ran[last_flush + 1 :] == ["work"] * (timer.samples + 1) * timer.inner_loops
    assert timer.facts["l2_flush_bytes"] is None


@pytest.mark.parametrize("mode", [GRAPH, CALL])
@pytest.mark.parametrize("copies", [1, 3, 7])
def test_rotated_copies_weigh_the_same(mode: TimingMode, copies: int) -> None:
    device = gpu_fakes.FakeDevice()
    timer = ready(device, mode, *(device.kernel((i + 1) * 1e-6, f"copy{i}") for i in range(copies)))
    assert timer.inner_loops % copies == 0
    mean = sum(i + 1 for i in range(copies)) / copies * 1e-6
    assert timer.burst(0.0).samples == pytest.approx([mean] * timer.samples, rel=1e-6)
    device.ran.clear()
    timer.burst(0.0)
    used = [name for name in device.ran if name != "flush"]
    assert {used.count(f"copy{i}") for i in range(copies)} == {len(used) // copies}


def test_a_graph_is_captured_once_and_only_when_asked_for() -> None:
    device = gpu_fakes.FakeDevice()
    ready(device, GRAPH, device.kernel(1e-5)).burst(0.05)
    assert device.captures == 1
    ready(device, CALL, device.kernel(1e-5)).burst(0.05)
    assert device.captures == 1


@pytest.mark.parametrize("mode", [GRAPH, CALL])
def test_what_a_graph_reads_lives_as_long_as_its_timer(mode: TimingMode) -> None:
    # Freed arrays are other points' soon: those would be overwritten at every replay.
    device = gpu_fakes.FakeDevice()
    device.capture = lambda work: device.kernel(1e-5)  # a graph holds no Python objects
    calls = [device.kernel(1e-5), device.kernel(1e-5, "copy")]
    alive = [weakref.ref(call) for call in calls]
    timer = ready(device, mode, *calls)
    del calls
    gc.collect()
    assert all(call() is not None for call in alive)
    del timer
    gc.collect()
    assert all(call() is None for call in alive)


def test_what_cannot_be_captured_says_so() -> None:
    device = gpu_fakes.FakeDevice()

    def capture(work: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    def broken() -> None:
        raise RuntimeError("out of something")

    device.capture = capture
    with pytest.raises(NotCaptured, match="not permitted"):
        ready(device, GRAPH, device.kernel(1e-5))
    with pytest.raises(RuntimeError, match="out of something"):  # which is another matter
        ready(device, GRAPH, broken)


def test_a_graph_of_cold_calls_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="a flush between the calls of a graph would be timed"):
        TimingMode("cold", "graph")
    with pytest.raises(ValueError, match="no timing mode tepid call"):
        TimingMode("tepid", "call")


def states(*given: GpuState | None) -> Any:
    following = iter(given)
    return lambda: next(following, given[-1])


def test_batches_of_a_hot_device_do_not_count_if_there_are_others() -> None:
    device = gpu_fakes.FakeDevice()
    slowly = iter([1e-3] * 4 + [2e-3] * 100)  # 4: trials and warm-up are over by then
    timer = EventTimer(
        device.kernel(lambda: next(slowly)),
        device,
        CALL,
        BatchPlan(inner_loops=1, samples=3, flushes=1),
        clock=device.clock,
        watch=states(FINE, HOT),
    )
    burst = timer.burst(0.012)
    assert burst.samples == pytest.approx([1e-3] * 3) and not burst.preempted
    assert burst.states == (FINE,)


def test_a_device_that_is_hot_all_the_time_has_all_its_samples_and_says_so() -> None:
    device = gpu_fakes.FakeDevice()
    timer = ready(device, CALL, device.kernel(1e-4), watch=states(HOT))
    burst = timer.burst(0.02)
    assert burst.preempted and burst.samples and set(burst.states) == {HOT}
    timing = Timing()
    for _ in range(FEWEST_ROUNDS):
        timing.add(timer.burst(0.0))
    assert timing.preempted and summarise_gpu_states(timing.states)["event_reasons"] == "hw_thermal_slowdown"


def test_a_device_that_tells_nothing_is_timed_all_the_same() -> None:
    device = gpu_fakes.FakeDevice()
    burst = ready(device, CALL, device.kernel(1e-4)).burst(0.0)
    assert burst.states == () and not burst.preempted
    assert summarise_gpu_states(burst.states)["clock_hertz"] is None


def test_the_stopping_rule_is_the_one_of_all_measurements(rng: np.random.Generator) -> None:
    device = gpu_fakes.FakeDevice(launch=1e-6)
    timer = ready(device, COLD, device.kernel(lambda: float(rng.normal(1e-4, 2e-6))))
    timing = next(
        iter(sample_interleaved({"x": timer.burst}, StopRule(rel_error=0.005, max_seconds=5), clock=device.clock))
    )[1]
    assert timing.converged and np.median(timing.samples) == pytest.approx(1e-4, rel=0.01)


def test_a_batch_never_fills_the_stream() -> None:
    device = gpu_fakes.FakeDevice(launch=1e-6)
    timer = ready(device, COLD, device.kernel(1e-7))
    assert timer.samples <= gpu_events.MOST_SAMPLES_A_BATCH and timer.flushes <= gpu_events.MOST_FLUSHES
    graph = ready(device, GRAPH, device.kernel(1e-9))
    assert graph.inner_loops <= gpu_events.MOST_LOOPS


@pytest.mark.parametrize("each", [1, 1000, 2**20, 11 * 2**20, 40 * 2**20, 2**30])
def test_a_copy_finds_nothing_of_its_own_in_the_cache(each: int) -> None:
    l2 = 50 * 2**20
    copies = choose_copies(each, l2, 512)
    assert 2 <= copies <= 512
    others = (copies - 1) * each
    assert displaces_cache(each, l2, copies) == (others >= 1.5 * l2)
    if copies < 512:
        assert others >= 2 * l2 > (copies - 2) * each  # enough, and no more than that
    else:
        assert others < 2 * l2


def test_layers_too_small_for_so_many_copies_are_told() -> None:
    assert not displaces_cache(2**10, 2**26, choose_copies(2**10, 2**26, 512))
    assert choose_copies(0, 2**26, 512) == 512
    assert displaces_cache(2**18, 2**26, choose_copies(2**18, 2**26, 512))
    assert not displaces_cache(2**18, 2**26, choose_copies(2**18, 2**26, 64))
