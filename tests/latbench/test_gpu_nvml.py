"""Which GPU it is and how it feels, from an NVML that is a fake; no GPU is needed."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from latbench import devices
from latbench.devices import Gpu
from latbench.errors import EnvironmentUnusable
from latbench.gpu import nvml
from latbench.gpu.nvml import State

fakes = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("gpu_fakes.py"))))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An H200, unless a test gives other devices."""
    made = fakes.FakeNvml(fakes.H200)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
        ("Tesla T4", "nvidia-tesla-t4"),
        ("Tesla V100-SXM2-16GB", "nvidia-tesla-v100-sxm2-16gb"),
        ("NVIDIA H200 MIG 1g.18gb", "nvidia-h200-mig-1g-18gb"),
    ],
)
def test_devices_are_named_as_tables_name_them(name: str, device: str) -> None:
    assert Gpu(name, "").device == device


@pytest.mark.parametrize(
    ("name", "wanted", "same"),
    [
        ("NVIDIA GeForce RTX 3080", "rtx3080", True),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx3080", False),
        ("NVIDIA GeForce RTX 3080 Ti", "rtx3080ti", True),
        ("NVIDIA GeForce RTX 4080 SUPER", "rtx4080", False),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx4090", False),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "a100", False),
        ("NVIDIA A100 80GB PCIe", "a100", True),
        ("NVIDIA GH200 480GB", "h200", False),
        ("NVIDIA L40S", "l40", False),
        ("NVIDIA RTX A6000", "rtxa6000", True),
    ],
)
def test_another_chip_of_a_similar_name_is_another_device(name: str, wanted: str, same: bool) -> None:
    assert devices.gpu_matches(Gpu(name, ""), wanted) is same


def test_the_gpu_that_is_there_is_found(fake: Any) -> None:
    assert devices.demand_gpu("h200") == Gpu("NVIDIA H200", "GPU-3f2a1b2c-0000")
    assert nvml.only_gpu().device == "nvidia-h200"
    assert fake.open == 0  # NVML is let go of again


def test_another_gpu_than_the_one_asked_for_is_refused_with_what_to_type(fake: Any) -> None:
    with pytest.raises(EnvironmentUnusable) as refused:
        devices.demand_gpu("a100")
    assert refused.value.exit_code == 3
    assert str(refused.value) == (
        '--gpu a100 requested, found "NVIDIA H200" (GPU-3f2a...); a table is of one device: use --gpu h200, or --cpu'
    )


def test_a_gpu_without_a_short_name_leaves_the_cpu(fake: Any) -> None:
    fake.devices = ({"name": "NVIDIA T1000", "uuid": "GPU-1"},)
    with pytest.raises(EnvironmentUnusable, match=r'found "NVIDIA T1000".*measure the CPU with --cpu'):
        devices.demand_gpu("a100")


def test_no_driver_no_gpu_and_no_library_are_told_apart(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.driver = False
    with pytest.raises(EnvironmentUnusable, match="--gpu a100 requested, but no NVIDIA driver; run it on a machine"):
        devices.demand_gpu("a100")
    fake.driver, fake.devices = True, ()
    with pytest.raises(EnvironmentUnusable, match="no NVIDIA GPU; this needs a machine with an NVIDIA GPU"):
        nvml.only_gpu()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EnvironmentUnusable, match="nvidia-ml-py is not installed"):
        nvml.only_gpu()


def test_a_divided_gpu_goes_by_its_slices(fake: Any) -> None:
    slices = [{"name": "NVIDIA H200 MIG 3g.71gb", "uuid": f"MIG-{i}"} for i in range(2)]
    fake.devices = ({**fakes.H200, "slices": slices},)
    found, reason = devices.gpus()
    assert [each.uuid for each in found] == ["MIG-0", "MIG-1"] and not reason
    assert found[0].device == "nvidia-h200-mig-3g-71gb"
    with pytest.raises(EnvironmentUnusable, match="MIG"):
        devices.demand_gpu("h200")


def test_the_state_is_in_si_units(fake: Any) -> None:
    with nvml.observing("GPU-3f2a1b2c-0000") as observer:
        state = observer()
    assert state == State(1.98e9, 3.201e9, 412.5, 51.0, frozenset({"sw_power_cap"}))
    assert not state.throttled  # at its power limit it runs as it would in production
    assert fake.open == 0


@pytest.mark.parametrize(
    ("bits", "throttled"),
    [(0x0, False), (0x1, False), (0x4, False), (0x8, True), (0x20, True), (0x44, True), (0x80, True)],
)
def test_heat_and_the_power_supply_throttle(fake: Any, bits: int, throttled: bool) -> None:
    fake.devices = ({**fakes.H200, "reasons": bits},)
    with nvml.observing("GPU-3f2a1b2c-0000") as observer:
        assert observer().throttled is throttled


def test_what_a_device_hides_is_unknown_and_no_failure(fake: Any) -> None:
    fake.devices = ({"name": "GRID", "uuid": "GPU-9"},)
    with nvml.observing("GPU-9") as observer:
        assert observer() == State() and observer.free_bytes() == float("inf")
        assert observer.facts()["gpu_memory_bytes"] is None and observer.facts()["driver"] == "580.159.03"


def test_older_drivers_call_the_reasons_by_another_name(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fakes.FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    fake.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x40
    with nvml.observing("GPU-3f2a1b2c-0000") as observer:
        assert observer().reasons == {"hw_thermal_slowdown"}


def test_a_row_has_medians_and_every_reason_that_occurred() -> None:
    states = [
        State(1.9e9, None, 400.0, 50.0, frozenset({"sw_power_cap"})),
        State(1.5e9, None, 700.0, 61.0, frozenset({"gpu_idle"})),
        State(1.8e9, None, None, 55.0, frozenset({"hw_slowdown"})),
    ]
    assert nvml.columns(states) == {
        "clock_hertz": 1.8e9, "power_watts": 550.0, "temperature_celsius": 61.0,
        "event_reasons": "hw_slowdown+sw_power_cap",
    }  # fmt: skip
    assert set(nvml.columns([]).values()) == {None}


def test_the_environment_says_device_driver_and_host_but_not_which_gpu(fake: Any) -> None:
    found = nvml.only_gpu()
    row = nvml.environment(found)
    assert row["device"] == "nvidia-h200" and row["host"] == devices.cpu_device()
    assert (row["driver"], row["cuda_driver"], row["compute_capability"]) == ("580.159.03", "13.0", "9.0")
    assert row["gpu_power_limit_milliwatts"] == 700_000 and row["gpu_max_clock_hertz"] == 1_980_000_000
    assert found.uuid not in json.dumps(row)
    assert nvml.environment(found)["env_id"] == row["env_id"]
    assert nvml.environment(Gpu(found.name, found.uuid))["device_uuid_hash"] == row["device_uuid_hash"]
