"""The state of a GPU and what a table records of it, from an NVML that is a fake; no GPU is needed."""

import json
import sys
from typing import Any

import gpu_fakes
import pytest

from latbench.errors import EnvironmentUnusable
from latbench.machines.devices import name_cpu
from latbench.machines.gpu_discovery import VISIBLE_VARIABLE
from latbench.machines.gpu_names import Gpu
from latbench.machines.nvml import (
    GpuState,
    describe_gpu_environment,
    find_first_gpu,
    open_observer,
    summarise_gpu_states,
)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An H200, unless a test gives other devices."""
    made = gpu_fakes.FakeNvml(gpu_fakes.H200)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.delenv(VISIBLE_VARIABLE, raising=False)
    return made


def test_the_first_gpu_is_measured_and_a_machine_without_one_is_refused(fake: Any) -> None:
    assert find_first_gpu() == Gpu("NVIDIA H200", "GPU-3f2a1b2c-0000")
    assert fake.open == 0  # NVML is let go of again
    fake.devices = ()
    with pytest.raises(EnvironmentUnusable, match="the NVIDIA driver sees no GPU: nvidia-smi -L"):
        find_first_gpu()


def test_the_state_is_in_si_units(fake: Any) -> None:
    with open_observer("GPU-3f2a1b2c-0000") as observer:
        state = observer()
    assert state == GpuState(1.98e9, 3.201e9, 412.5, 51.0, frozenset({"sw_power_cap"}))
    assert not state.throttled  # at its power limit it runs as it would in production
    assert fake.open == 0


@pytest.mark.parametrize(
    ("bits", "throttled"),
    [(0x0, False), (0x1, False), (0x4, False), (0x8, True), (0x20, True), (0x44, True), (0x80, True)],
)
def test_heat_and_the_power_supply_throttle(fake: Any, bits: int, throttled: bool) -> None:
    fake.devices = ({**gpu_fakes.H200, "reasons": bits},)
    with open_observer("GPU-3f2a1b2c-0000") as observer:
        assert observer().throttled is throttled


def test_what_a_device_hides_is_unknown_and_no_failure(fake: Any) -> None:
    fake.devices = ({"name": "GRID", "uuid": "GPU-9"},)
    with open_observer("GPU-9") as observer:
        assert observer() == GpuState() and observer.free_bytes() == float("inf")
        assert observer.facts()["gpu_memory_bytes"] is None and observer.facts()["driver"] == "580.159.03"


def test_older_drivers_call_the_reasons_by_another_name(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gpu_fakes.FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    fake.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x40
    with open_observer("GPU-3f2a1b2c-0000") as observer:
        assert observer().reasons == {"hw_thermal_slowdown"}


def test_a_row_has_medians_and_every_reason_that_occurred() -> None:
    states = [
        GpuState(1.9e9, None, 400.0, 50.0, frozenset({"sw_power_cap"})),
        GpuState(1.5e9, None, 700.0, 61.0, frozenset({"gpu_idle"})),
        GpuState(1.8e9, None, None, 55.0, frozenset({"hw_slowdown"})),
    ]
    assert summarise_gpu_states(states) == {
        "clock_hertz": 1.8e9, "power_watts": 550.0, "temperature_celsius": 61.0,
        "event_reasons": "hw_slowdown+sw_power_cap",
    }  # fmt: skip
    assert set(summarise_gpu_states([]).values()) == {None}


def test_the_environment_says_device_driver_and_host_but_not_which_gpu(fake: Any) -> None:
    found = find_first_gpu()
    row = describe_gpu_environment(found)
    assert row["device"] == "nvidia-h200" and row["host"] == name_cpu()
    assert (row["driver"], row["cuda_driver"], row["compute_capability"]) == ("580.159.03", "13.0", "9.0")
    assert row["gpu_power_limit_milliwatts"] == 700_000 and row["gpu_max_clock_hertz"] == 1_980_000_000
    assert found.uuid not in json.dumps(row)
    assert describe_gpu_environment(found)["env_id"] == row["env_id"]
    assert describe_gpu_environment(Gpu(found.name, found.uuid))["device_uuid_hash"] == row["device_uuid_hash"]
