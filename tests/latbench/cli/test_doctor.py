"""doctor: what it reads from a machine's files, what it advises, and how it tells."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import gpu_fakes
import pytest

from latbench.backends.cpu import cpu_reference
from latbench.base.engine_registry import CPU_ENGINES
from latbench.base.files import find_cache_folder
from latbench.machines.ceilings import CachedCeilings, Ceilings
from latbench.machines.devices import name_cpu
from latbench.machines.gpu_discovery import VISIBLE_VARIABLE
from latbench.machines.noise_sources import Host, list_advice, read_host
from latbench.machines.nvml import describe_gpu_environment, find_first_gpu
from latbench.machines.processors import SLURM_VARIABLES, count_cores
from latbench.sweeping.gpu_roofline import build_cached_gpu_ceilings
from latbench.timing.gpu_ceilings import GpuCeilings

JSON_KEYS = {
    "advice", "backends", "ceilings", "deepsparse", "device", "environment", "gpu_backends", "gpus", "host",
    "lock_folder", "cache_folder", "no_gpu",
}  # fmt: skip
"""What scripts read."""

QUIET = Host(processors=16, cores=16, governor="performance", turbo=False, load=0.4, steal_fraction=0.0)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at stolen time here: there is no waiting between two looks. No GPU of a test is hidden."""
    monkeypatch.setattr("latbench.cli.commands.doctor.STEAL_SECONDS", 0.0)
    for name in (VISIBLE_VARIABLE, *SLURM_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def _machine(root: Path, **files: str) -> Path:
    """A root with these files; double underscores stand for slashes."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_what_slurm_granted_and_what_cannot_be_read_is_told(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latbench.machines.gpu_discovery.list_gpus", lambda: ([], "no NVIDIA driver"))
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "some")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    monkeypatch.setattr("latbench.cli.main.limit_default_threads", lambda: None)  # it would outlast this test
    out = latbench("doctor").out
    assert "1 granted by Slurm" in out
    assert "! SLURM_CPUS_PER_TASK is 'some', which is no number of processors: it is ignored" in out


def test_a_server_is_read_from_its_files(tmp_path: Path) -> None:
    cpus = "sys__devices__system__cpu__cpu"
    root = _machine(
        tmp_path,
        proc__cpuinfo="processor : 0\nflags : fpu sse2 avx2\ncpu MHz : 2100.0\n",
        proc__loadavg="3.25 2.00 1.00 2/300 4242\n",
        **{f"{cpus}{i}__topology__thread_siblings_list": f"{i % 2},{i % 2 + 2}" for i in range(4)},
        **{f"{cpus}{i}__cpufreq__scaling_cur_freq": "3000000" for i in range(4)},
        sys__devices__system__cpu__cpu0__cpufreq__scaling_governor="schedutil\n",
        sys__devices__system__cpu__cpu0__cpufreq__cpuinfo_max_freq="3700000\n",
        sys__devices__system__cpu__intel_pstate__no_turbo="0\n",
    )  # fmt: skip
    host = read_host(0.05, root=root, allowed={0, 1, 2, 3})
    assert (host.processors, host.cores, host.governor, host.turbo) == (4, 2, "schedutil", True)
    assert (host.clock_hertz, host.most_clock_hertz) == (3e9, 3.7e9)
    assert (host.load, host.steal_fraction, host.virtual) == (3.25, 0.05, False)
    assert host.quota_cores is None and "intel_pstate/no_turbo" in (host.turbo_switch or "")


def test_a_virtual_machine_hides_its_clock(tmp_path: Path) -> None:
    root = _machine(tmp_path, proc__cpuinfo="flags : fpu hypervisor\ncpu MHz : 2100.0\n\ncpu MHz : 2300.0\n")
    host = read_host(root=root, allowed={0, 1})
    assert host == Host(processors=2, cores=2, clock_hertz=2.2e9, virtual=True)
    assert read_host(root=tmp_path / "nothing", allowed={0}) == Host(processors=1, cores=1)


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc__self__cgroup": "0::/box/inner\n",
            "sys__fs__cgroup__box__cpu.max": "150000 100000\n",
            "sys__fs__cgroup__box__cpu.stat": "usage_usec 1\nnr_periods 9\nnr_throttled 7\n",
            "sys__fs__cgroup__box__inner__cpu.max": "max 100000\n",
        },
        # A container sees its own group as the top, though its path is the host's.
        {
            "proc__self__cgroup": "0::/system.slice/docker-1.scope\n",
            "sys__fs__cgroup__cpu.max": "150000 100000\n",
            "sys__fs__cgroup__cpu.stat": "nr_throttled 7\n",
        },
        {
            "proc__self__cgroup": "5:memory:/x\n4:cpu,cpuacct:/box\n",
            "sys__fs__cgroup__cpu,cpuacct__box__cpu.cfs_quota_us": "150000\n",
            "sys__fs__cgroup__cpu,cpuacct__box__cpu.cfs_period_us": "100000\n",
            "sys__fs__cgroup__cpu,cpuacct__box__cpu.stat": "nr_throttled 7\n",
            "sys__fs__cgroup__cpu,cpuacct__cpu.cfs_quota_us": "-1\n",
            "sys__fs__cgroup__cpu,cpuacct__cpu.cfs_period_us": "100000\n",
        },
    ],
)
def test_a_quota_is_found_in_either_kind_of_control_group(tmp_path: Path, files: dict[str, str]) -> None:
    host = read_host(root=_machine(tmp_path, **files), allowed={0, 1, 2, 3})
    assert (host.quota_cores, host.throttled_periods) == (1.5, 7)


@pytest.mark.parametrize(
    "files", [{".dockerenv": ""}, {"run__.containerenv": ""}, {"proc__self__cgroup": "0::/kubepods/pod1\n"}]
)
def test_a_container_is_known_by_its_marks(tmp_path: Path, files: dict[str, str]) -> None:
    assert read_host(root=_machine(tmp_path, **files), allowed={0}).container


def test_a_container_is_told_to_share_its_lock(
    latbench: Any, monkeypatch: pytest.MonkeyPatch, own_lock: Path
) -> None:
    monkeypatch.setattr("latbench.machines.gpu_discovery.list_gpus", lambda: ([], "no NVIDIA driver"))
    monkeypatch.setattr(
        "latbench.machines.noise_sources.read_host", lambda steal: Host(**{**vars(QUIET), "container": True})
    )
    shared = latbench("doctor").out
    assert f"in {own_lock.parent / 'locks'}" in shared and "in a container" in shared and "! this" not in shared
    monkeypatch.delenv("LATBENCH_LOCKS")
    alone = latbench("doctor").out
    assert "! this is a container: sweeps in other containers do not see its lock in /tmp" in alone


def test_a_quiet_machine_needs_no_advice() -> None:
    assert list_advice(QUIET) == []
    assert list_advice(Host(processors=8, cores=8)) == []  # what is hidden is not guessed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"governor": "powersave"}, "governor is powersave: the clock follows the load; `sudo cpupower"),
        ({"turbo": True, "turbo_switch": "echo 1"}, "turbo is on: the clock sinks as the chip gets warm; `echo 1`"),
        ({"processors": 32}, "32 hardware threads share 16 cores"),
        ({"load": 9.5}, "the load is 9.5 on 16 cores: others take"),
        ({"steal_fraction": 0.07}, "the hypervisor gives 7% of the time to others: measure on a dedicated host"),
        ({"quota_cores": 1.5}, "a quota of 1.5 cores on 16 processors (cgroup cpu.max): it stops"),
        ({"quota_cores": 1.5, "throttled_periods": 7}, "it was stopped 7 times so far"),
        ({"processors": 2, "cores": 2}, "only 2 cores: the system's own work disturbs every call"),
        (
            {"processors": 1, "cores": 1},
            "only 1 core: the system's own work disturbs every call; measure on a larger",
        ),
    ],
)
def test_each_disturbance_is_a_sentence_with_its_remedy(change: dict[str, Any], words: str) -> None:
    [sentence] = list_advice(Host(**{**vars(QUIET), **change}))
    assert words in sentence and "\n" not in sentence


def test_doctor_tells_what_it_found(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = dataclasses.replace(CPU_ENGINES["onnxruntime"], packages=(("no-such-package",),))
    monkeypatch.setitem(CPU_ENGINES, "onnxruntime", lacking)
    monkeypatch.setattr("latbench.machines.gpu_discovery.list_gpus", lambda: ([], "no NVIDIA driver"))
    monkeypatch.setattr(
        "latbench.machines.noise_sources.read_host",
        lambda steal: Host(processors=4, cores=2, governor="powersave", load=0.1),
    )
    ran = latbench("doctor", "--json")
    facts = json.loads(ran.out)
    assert set(facts) == JSON_KEYS
    assert facts["device"] == name_cpu() and facts["environment"]["cores"] >= 1
    assert facts["backends"]["numba"]["version"]
    assert facts["backends"]["onnxruntime"] == {"version": None, "missing": ["no-such-package"]}
    assert facts["host"]["governor"] == "powersave" and len(facts["advice"]) == 3
    assert facts["gpu_backends"]["torch_gpu"]["version"]
    assert facts["cache_folder"] == str(find_cache_folder())
    out = latbench("doctor").out
    assert f"in {facts['cache_folder']}, which LATBENCH_CACHE moves" in out
    assert facts["device"] in out and "missing: pip install no-such-package" in out
    assert "none: no NVIDIA driver" in out and "without a GPU" in out
    assert out.count("\n! ") == 3


def test_doctor_prints_the_extra_that_an_advice_names(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets are markup to what prints the table."""
    advice = "pip install 'latbench[cuda13]'"
    monkeypatch.setattr("latbench.machines.gpu_discovery.list_gpus", lambda: ([], advice))
    monkeypatch.setattr("latbench.machines.noise_sources.list_advice", lambda host: [advice])
    out = latbench("doctor").out
    assert f"none: {advice}" in out and f"! {advice}" in out


def test_a_virtual_machine_without_names_is_said(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = Host(**{**vars(QUIET), "virtual": True, "clock_hertz": 2.6e9})
    monkeypatch.setattr("latbench.machines.noise_sources.read_host", lambda steal: hidden)
    monkeypatch.setattr("latbench.machines.devices.read_governor", lambda: None)
    monkeypatch.setattr("latbench.machines.gpu_discovery.list_gpus", lambda: ([], "no NVIDIA driver"))
    monkeypatch.setattr("latbench.machines.devices.name_cpu", lambda: "intel-xeon-family-6-model-167")
    out = latbench("doctor").out
    assert "2.60 GHz nominal, the real one is hidden" in out
    assert "others may have the name intel-xeon-family-6-model-167: keep their tables apart" in out
    monkeypatch.setattr("latbench.machines.devices.name_cpu", lambda: "amd-epyc-9b14")
    assert "the hypervisor hides" not in latbench("doctor").out


def test_doctor_tells_of_every_gpu(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.FakeNvml(gpu_fakes.H200))
    [gpu] = json.loads(latbench("doctor", "--json").out)["gpus"]
    assert gpu["device"] == "nvidia-h200" and gpu["driver"] and gpu["clock_hertz"] > 1e9
    assert "GPU 0, NVIDIA H200" in (out := latbench("doctor").out) and f"driver {gpu['driver']}" in out
    assert out.count("not measured yet: the first sweep measures it") == 2  # the rooflines of CPU and GPU


def test_doctor_prints_what_to_type_for_each_gpu(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090 D")
    gpus = [{**gpu_fakes.H200, "name": name, "uuid": f"GPU-{number}"} for number, name in enumerate(names)]
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.FakeNvml(*gpus))
    found = json.loads(latbench("doctor", "--json").out)["gpus"]
    assert [(gpu["index"], gpu["option"]) for gpu in found] == [(0, "a100:0"), (1, "a100:1"), (2, "rtx-4090-d")]
    out = latbench("doctor").out
    assert "GPU 1, NVIDIA A100-SXM4-80GB" in out and "latbench sweep --gpu a100:1" in out
    monkeypatch.setenv(VISIBLE_VARIABLE, "GPU-2,GPU-0")
    found = json.loads(latbench("doctor", "--json").out)["gpus"]
    assert [(gpu["index"], gpu["option"]) for gpu in found] == [(0, "rtx-4090-d"), (1, "a100")]
    monkeypatch.setenv(VISIBLE_VARIABLE, "-1")
    assert "none: CUDA_VISIBLE_DEVICES=-1 hides every GPU of this machine" in latbench("doctor").out


def test_rooflines_are_shown_once_a_sweep_has_measured_them(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.FakeNvml(gpu_fakes.H200))
    before = json.loads(latbench("doctor", "--json").out)
    assert before["ceilings"] is before["gpus"][0]["ceilings"] is None
    cpu = Ceilings(1.5e11, {2**14: 2e11, 2**26: 1e10}, 3e-3, 5e-3, 3e11)
    CachedCeilings(name_cpu(), count_cores(), cpu_reference.WORK, lambda: cpu).get()
    gpu = GpuCeilings({"float16": 8e14}, 6e13, {2**20: 6e12, 2**29: 3e12}, 2e-4, 1e-4)
    build_cached_gpu_ceilings(describe_gpu_environment(find_first_gpu()), lambda: gpu).get()
    out = latbench("doctor").out
    assert "0.15 TFLOP/s float32, 0.3 TFLOP/s bfloat16, reads 200 GB/s of 16 KiB, reads 10 GB/s of 64 MiB" in out
    assert "800 TFLOP/s float16 on tensor cores, 60 TFLOP/s float32, reads 6000 GB/s of 1 MiB" in out


def test_a_hot_gpu_is_said(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = gpu_fakes.FakeNvml(gpu_fakes.H200)
    monkeypatch.setattr(hot, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: 0x40, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", hot)
    assert "! NVIDIA H200 is slowed down now (hw_thermal_slowdown): let it cool" in latbench("doctor").out


def test_advice_tells_equal_gpus_apart(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [
        {**gpu_fakes.H200, "uuid": f"GPU-{number}", "reasons": bits} for number, bits in enumerate((0x40, 0x40, 0x4))
    ]
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.FakeNvml(*gpus))
    out = latbench("doctor").out
    assert "! GPU 0, NVIDIA H200 is slowed down" in out and "! GPU 1, NVIDIA H200 is slowed down" in out
    assert "GPU 2, NVIDIA H200 is slowed" not in out


def test_what_makes_a_gpu_quieter_is_said(latbench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = gpu_fakes.FakeNvml(gpu_fakes.H200)
    for function, answer in (
        ("nvmlDeviceGetPersistenceMode", 0), ("nvmlDeviceGetPowerManagementDefaultLimit", 900_000),
        ("nvmlDeviceGetComputeRunningProcesses", [object()] * 2),
    ):  # fmt: skip
        monkeypatch.setattr(busy, function, lambda handle, answer=answer: answer, raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", busy)
    out = " ".join(latbench("doctor").out.split())
    assert "2 processes compute on it now" in out and "nvidia-smi -pm 1" in out
    assert "W instead of 900 W" in out and "sudo nvidia-smi -pl 900" in out and "nvidia-smi -lgc 1980" in out
    monkeypatch.setitem(sys.modules, "pynvml", gpu_fakes.FakeNvml(gpu_fakes.H200))  # that hides all of it
    out = latbench("doctor").out
    assert "processes compute" not in out and "-pm 1" not in out and "-pl" not in out
