"""Names of devices, and what a table records about the machine."""

from pathlib import Path

import pytest

from latbench.machines import devices
from latbench.machines.devices import (
    describe_cpu_environment,
    name_cpu,
    read_clock_hertz,
    read_cpu_times,
    read_scaling_hertz,
    read_telemetry,
)

EPYC = "processor : 0\nvendor_id : AuthenticAMD\ncpu family : 25\nmodel : 17\nmodel name : {}\n\nprocessor : 1\n"
XEON = "processor : 0\nvendor_id : GenuineIntel\ncpu family : 6\nmodel : 85\nmodel name : {}\n"
ARM = "processor : 0\nFeatures : fp asimd sve\nCPU implementer : 0x41\nCPU part : 0xd40\n"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (EPYC.format("AMD EPYC 9B14"), "amd-epyc-9b14"),
        (EPYC.format("AMD Ryzen 9 7950X 16-Core Processor"), "amd-ryzen-9-7950x"),
        (XEON.format("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz"), "intel-xeon-platinum-8375c"),
        (XEON.format("Intel(R) Core(TM) i7-10700K CPU @ 3.80GHz"), "intel-core-i7-10700k"),
        # Virtual machines hide the model: what is left would name several generations alike.
        (EPYC.format("AMD EPYC"), "amd-epyc-family-25-model-17"),
        (XEON.format("Intel(R) Xeon(R) CPU @ 2.20GHz"), "intel-xeon-family-6-model-85"),
        (XEON.format("unknown"), "intel-family-6-model-85"),
    ],
)
def test_cpu_names_are_lower_case_with_hyphens(cpuinfo: str, name: str) -> None:
    assert name_cpu(cpuinfo) == name


def test_a_cpu_without_a_model_name_has_one_all_the_same() -> None:
    assert name_cpu(ARM).endswith("0x41-part-0xd40")
    assert name_cpu("") != ""


def test_this_machine_can_be_described() -> None:
    row = describe_cpu_environment(threads=2)
    assert row["device"] == name_cpu() and row["threads"] == 2
    assert 1 <= row["cores"] <= row["processors"] <= 4096 and row["memory_bytes"] > 2**28
    assert row["numpy"] and row["numba"]
    assert (
        describe_cpu_environment(threads=2)["env_id"]
        == row["env_id"]
        != describe_cpu_environment(threads=1)["env_id"]
    )


def test_steal_is_a_share_of_all_ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_cpu_times("cpu  10 0 10 70 0 0 0 10 0 0\n")
    assert before == devices.CpuTimes(total=100, steal=10)
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 0 10 145 0 0 0 35 0 0\n")
    monkeypatch.setattr(devices, "STAT", stat)
    assert read_telemetry(before)["steal_fraction"] == 0.25
    assert read_telemetry(None)["steal_fraction"] is None


def test_the_clock_is_that_of_a_core_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {0: 800, 1: 3100, 2: 4000}  # MHz; 2 belongs to others, 0 is idle
    cpuinfo = "\n\n".join(f"processor\t: {cpu}\nflags\t\t: fpu\ncpu MHz\t\t: {mhz}.5" for cpu, mhz in cores.items())
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    for cpu, mhz in cores.items():
        folder = tmp_path / f"cpu{cpu}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{mhz}000\n")
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(devices, "_CLOCKS", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert read_scaling_hertz() == 3.1e9 and read_clock_hertz() == 3.1005e9
    monkeypatch.setattr(devices, "CPUINFO", tmp_path / "absent")
    monkeypatch.setattr(devices, "_CLOCKS", tmp_path / "absent")
    assert read_scaling_hertz() is None and read_clock_hertz() is None
