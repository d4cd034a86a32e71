"""What is measured on: the device's name, the environment that a table records, the state of the machine meanwhile.

Device names are lower-case with hyphens (`amd-epyc-9b14`, `nvidia-a100-sxm4-80gb`). A virtual CPU often hides its
model; family and model number then stand for it, because tables of unlike processors must not share a name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latbench.environments import env_id
from latbench.errors import EnvironmentUnusable, UsageError

CPUINFO = Path("/proc/cpuinfo")
STAT = Path("/proc/stat")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_CLOCKS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MACHINE = Path("/etc/machine-id")

# What the user types after --gpu, and how the driver's name contains it.
GPU_NAMES = {
    "a100": "A100", "h100": "H100", "h200": "H200", "t4": "T4", "v100": "V100", "l4": "L4", "l40": "L40",
    "l40s": "L40S", "a10": "A10", "a30": "A30", "a40": "A40", "b200": "B200", "gh200": "GH200",
    **{f"rtx{number}".lower().replace(" ", ""): f"RTX {number}" for number in (
        "2070", "2080", "2080 Ti", "3060", "3070", "3080", "3080 Ti", "3090", "3090 Ti", "4060", "4070", "4080",
        "4090", "5070", "5080", "5090", "A5000", "A6000",
    )},
}  # fmt: skip

# A name that goes on like this is another chip's: an RTX 4080 SUPER is no RTX 4080, a slice of an A100 no A100.
_OTHER_CHIPS = {"ti", "super", "laptop", "mobile", "mig"}

# The instruction-set flags that decide which kernels run, widest registers first, with their width in bits.
_VECTOR_BITS = {"avx512f": 512, "sve": 128, "avx2": 256, "avx": 256, "asimd": 128, "sse2": 128}
_TELLING_FLAGS = (
    "sse4_2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "sve", "sve2", "i8mm", "bf16",
)  # fmt: skip

_PACKAGES = ("latbench", "numpy", "torch", "numba", "llvmlite", "onnxruntime", "scipy", "pyarrow")


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU as its driver calls it."""

    name: str
    uuid: str

    @property
    def device(self) -> str:
        """The device's name in tables; older drivers leave the maker out ("Tesla T4" is nvidia-tesla-t4)."""
        words = slug(self.name)
        return words if words.startswith("nvidia") else f"nvidia-{words}"


def slug(text: str) -> str:
    """`text` in lower case, words joined by hyphens: "NVIDIA A100-SXM4-80GB" is nvidia-a100-sxm4-80gb."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))


def cpu_device(cpuinfo: str | None = None) -> str:
    """The name of this CPU (or of the one that the text of /proc/cpuinfo describes) in tables."""
    fields = _cpu_fields(cpuinfo)
    name = re.sub(r"\(r\)|\(tm\)|\bcpu\b|\bprocessor\b|@.*|\d+-core", " ", fields.get("model name", ""), flags=re.I)
    words = slug(name)
    if re.search(r"\d{3}|\d[a-z]\d", words):
        return words
    if not words or words == "unknown":
        vendor = fields.get("vendor_id", f"{platform.machine()} {fields.get('CPU implementer', '')}")
        words = slug({"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(vendor, vendor))
    hidden = [f"{name.split()[-1]} {fields[name]}" for name in ("cpu family", "model", "CPU part") if name in fields]
    return slug(" ".join([words, *hidden]))


def _cpu_fields(cpuinfo: str | None = None) -> dict[str, str]:
    """The first processor's fields in /proc/cpuinfo."""
    if cpuinfo is None:
        cpuinfo = CPUINFO.read_text() if CPUINFO.exists() else ""
    first = cpuinfo.strip().split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cores() -> int:
    """How many cores this process may use: its affinity, and the quota of its control group if that is less.

    Two threads of one core count once, because the second adds nothing to a kernel that fills the vector units.
    """
    siblings = set()
    for cpu in sorted(allowed()):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.add(topology.read_text().strip() if topology.exists() else str(cpu))
    quota = _QUOTA.read_text().split() if _QUOTA.exists() else ["max"]
    most = len(siblings) if quota[0] == "max" else int(quota[0]) // int(quota[1])
    return max(1, min(len(siblings), most))


def gpus() -> tuple[list[Gpu], str]:
    """The NVIDIA GPUs of this machine; if there are none, the reason in a few words."""
    try:
        import pynvml
    except ImportError:
        return [], "nvidia-ml-py is not installed, so no GPU can be seen"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return [], "no NVIDIA driver"
    try:
        devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        handles = [handle for device in devices for handle in _instances(pynvml, device)]
        found = [Gpu(pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError as error:
        return [], f"the NVIDIA driver answers: {error}"
    finally:
        pynvml.nvmlShutdown()
    return found, "" if found else "no NVIDIA GPU"


def _instances(nvml: Any, handle: Any) -> list[Any]:
    """The slices of a GPU that is divided (MIG), because CUDA sees only those; else the GPU itself."""
    try:
        divided = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except nvml.NVMLError:  # older devices cannot be divided
        divided = False
    if not divided:
        return [handle]
    slices = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            slices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
        except nvml.NVMLError:  # fewer than the most there may be
            break
    return slices


def known_gpu(wanted: str) -> None:
    """Raise UsageError for the name of a GPU that nobody knows."""
    if wanted.lower() not in GPU_NAMES:
        raise UsageError(f"unknown GPU {wanted!r}: known are {', '.join(GPU_NAMES)}")


def demand_gpu(wanted: str) -> Gpu:
    """The GPU of this machine that the user calls `wanted`.

    Raises UsageError for a name nobody knows, EnvironmentUnusable where this machine has no such GPU: the sentence
    says what was found.
    """
    known_gpu(wanted)
    found, reason = gpus()
    for gpu in found:
        if gpu_matches(gpu, wanted.lower()):
            return gpu
    if found:
        names = ", ".join(f'"{gpu.name}" ({gpu.uuid[:8]}...)' for gpu in found)
        raise EnvironmentUnusable(
            f"--gpu {wanted} requested, found {names}; a table is of one device: {_instead(found[0])}"
        )
    raise EnvironmentUnusable(
        f"--gpu {wanted} requested, but {reason}; run it on a machine with that GPU, or measure this one with --cpu"
    )


def gpu_matches(gpu: Gpu, wanted: str) -> bool:
    """Whether `gpu` is what the user calls `wanted`, a key of GPU_NAMES: whole words, so that an L40S is no L4."""
    words = slug(GPU_NAMES[wanted]).split("-")
    have = gpu.device.split("-")
    starts = [i for i in range(len(have)) if have[i : i + len(words)] == words]
    return any(_OTHER_CHIPS.isdisjoint(have[i + len(words) :]) for i in starts)


def _instead(gpu: Gpu) -> str:
    short = next((name for name in GPU_NAMES if gpu_matches(gpu, name)), None)
    return "measure the CPU with --cpu" if short is None else f"use --gpu {short}, or --cpu"


# The environment: what may change times although the device is the same ---------------------------------------------


def environment(threads: int) -> dict[str, Any]:
    """This machine and its software, texts and whole numbers by name; env_id is the hash of the rest."""
    fields = _cpu_fields()
    flags = cpu_flags()
    row: dict[str, Any] = {
        "device": cpu_device(),
        "device_uuid_hash": machine_hash(),
        "cpu_model": fields.get("model name", platform.processor()),
        "cpu_flags": " ".join(flag for flag in _TELLING_FLAGS if flag in flags),
        "vector_bits": vector_bits(flags),
        "cores": cores(),
        "threads": threads,
        "memory_bytes": memory_bytes(),
        **caches(),
        "governor": governor(),
        "os": platform.platform(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }
    return {"env_id": env_id(row), **row}


def cpu_flags() -> set[str]:
    """The instruction sets of the first processor, as /proc/cpuinfo calls them; empty where it tells none."""
    fields = _cpu_fields()
    return set((fields.get("flags") or fields.get("Features") or "").split())


def vector_bits(flags: set[str] | None = None) -> int | None:
    """The width of the widest vector registers that the flags tell of (SVE: at least); None if they tell nothing."""
    flags = cpu_flags() if flags is None else flags
    return next((bits for flag, bits in _VECTOR_BITS.items() if flag in flags), None)


def caches() -> dict[str, int | None]:
    """Bytes of the first core's caches: l1d_bytes, l2_bytes, l3_bytes; None where the kernel hides them."""
    sizes: dict[str, int | None] = {"l1d_bytes": None, "l2_bytes": None, "l3_bytes": None}
    for index in sorted(_CACHES.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        number = re.fullmatch(r"(\d+)([KM]?)", size)
        if number and kind != "Instruction":
            name = "l1d_bytes" if level == "1" else f"l{level}_bytes"
            sizes[name] = int(number[1]) * {"": 1, "K": 1024, "M": 1024**2}[number[2]]
    return sizes


def governor() -> str | None:
    """How the kernel chooses the clock frequency; None where it is hidden, as in most virtual machines."""
    return _GOVERNOR.read_text().strip() if _GOVERNOR.exists() else None


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def machine_hash() -> str | None:
    """Tells this machine from others of the same name without saying which it is; None where it has no identity."""
    if not _MACHINE.exists() or not (identity := _MACHINE.read_text().strip()):
        return None
    return hashlib.sha256(f"latbench {identity}".encode()).hexdigest()[:12]


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# The state of the machine while it measures -------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuTimes:
    """Clock ticks since the machine started, of all processors: all, and those that the hypervisor gave to others."""

    total: int
    steal: int


def cpu_times(stat: str | None = None) -> CpuTimes | None:
    """Read from /proc/stat (or from its text); None where there is none."""
    if stat is None:
        if not STAT.exists():
            return None
        stat = STAT.read_text()
    ticks = [int(value) for value in stat.splitlines()[0].split()[1:9]]
    return CpuTimes(sum(ticks), ticks[7])


def telemetry(before: CpuTimes | None) -> dict[str, float | None]:
    """The telemetry columns for the time since `before`: clock_hertz (the fastest core's), load, steal_fraction."""
    after = cpu_times()
    known = before is not None and after is not None and after.total > before.total
    return {
        "clock_hertz": clock_hertz(),
        "load": os.getloadavg()[0],
        "steal_fraction": (after.steal - before.steal) / (after.total - before.total) if known else None,  # type: ignore[union-attr]
    }


def clock_hertz() -> float | None:
    """The fastest clock frequency among the cores that this process may use, as the kernel reports it: idle ones slow
    down, and say nothing of those at work. None where it does not.
    """
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    clocks = {
        int(cpu): float(mhz)
        for cpu, mhz in re.findall(r"^processor\s*: (\d+)\n.*?^cpu MHz\s*: ([\d.]+)", text, re.M | re.S)
    }
    return max((mhz * 1e6 for cpu, mhz in clocks.items() if cpu in allowed()), default=None)


def scaling_hertz() -> float | None:
    """The same from where the governor keeps it, which is cheaper to read; None where the system hides it, as virtual
    machines do.
    """
    try:
        files = (_CLOCKS / f"cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in allowed())
        return max(float(file.read_text()) for file in files) * 1e3
    except (OSError, ValueError):
        return None


def allowed() -> set[int]:
    """The processors that this process may use."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
