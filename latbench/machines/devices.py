"""The CPU of this machine: its name in tables, its environment, its state during a measurement.

Device names are lower case with hyphens: `amd-epyc-9b14` (for GPUs see `latbench.machines.gpu_names`). A virtual CPU
often hides its model. Family and model number then replace it, because tables of different processors must not share
a name.
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

from latbench.base.environments import hash_environment
from latbench.machines.processors import list_allowed_processors, read_processors

CPUINFO = Path("/proc/cpuinfo")
STAT = Path("/proc/stat")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_CLOCKS = Path("/sys/devices/system/cpu")
_MACHINE = Path("/etc/machine-id")

# The instruction-set flags that decide which kernels run, widest registers first, with their width in bits.
_VECTOR_BITS = {"avx512f": 512, "sve": 128, "avx2": 256, "avx": 256, "asimd": 128, "sse2": 128}
_TELLING_FLAGS = (
    "sse4_2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "sve", "sve2", "i8mm", "bf16",
)  # fmt: skip

_PACKAGES = ("latbench", "numpy", "torch", "numba", "llvmlite", "onnxruntime", "scipy", "pyarrow")


def make_slug(text: str) -> str:
    """Return `text` in lower case, words joined by hyphens: "NVIDIA A100-SXM4-80GB" is nvidia-a100-sxm4-80gb."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))


def name_cpu(cpuinfo: str | None = None) -> str:
    """Return the name in tables of this CPU, or of the one that the text of /proc/cpuinfo describes."""
    fields = _cpu_fields(cpuinfo)
    name = re.sub(r"\(r\)|\(tm\)|\bcpu\b|\bprocessor\b|@.*|\d+-core", " ", fields.get("model name", ""), flags=re.I)
    words = make_slug(name)
    if re.search(r"\d{3}|\d[a-z]\d", words):
        return words
    if not words or words == "unknown":
        vendor = fields.get("vendor_id", f"{platform.machine()} {fields.get('CPU implementer', '')}")
        words = make_slug({"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(vendor, vendor))
    hidden = [f"{name.split()[-1]} {fields[name]}" for name in ("cpu family", "model", "CPU part") if name in fields]
    return make_slug(" ".join([words, *hidden]))


def _cpu_fields(cpuinfo: str | None = None) -> dict[str, str]:
    """Return the first processor's fields in /proc/cpuinfo."""
    if cpuinfo is None:
        cpuinfo = CPUINFO.read_text() if CPUINFO.exists() else ""
    first = cpuinfo.strip().split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


# The environment: everything that may change times on the same device ---------------------------------------------


def describe_cpu_environment(threads: int) -> dict[str, Any]:
    """Return this machine and its software as texts and integers by name; env_id is the hash of the rest."""
    fields = _cpu_fields()
    flags = read_cpu_flags()
    processors = read_processors()
    row: dict[str, Any] = {
        "device": name_cpu(),
        "device_uuid_hash": hash_machine(),
        "cpu_model": fields.get("model name", platform.processor()),
        "cpu_flags": " ".join(flag for flag in _TELLING_FLAGS if flag in flags),
        "vector_bits": find_vector_bits(flags),
        "cores": processors.default_threads,
        "processors": processors.most_threads,
        "threads": threads,
        "memory_bytes": read_memory_bytes(),
        **read_cache_sizes(),
        "governor": read_governor(),
        "os": platform.platform(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: find_version(package) for package in _PACKAGES},
    }
    return {"env_id": hash_environment(row), **row}


def read_cpu_flags() -> set[str]:
    """Return the instruction sets of the first processor as /proc/cpuinfo names them; empty where it names none."""
    fields = _cpu_fields()
    return set((fields.get("flags") or fields.get("Features") or "").split())


def find_vector_bits(flags: set[str] | None = None) -> int | None:
    """Return the width of the widest vector registers (SVE: the least width); None if the flags do not tell."""
    flags = read_cpu_flags() if flags is None else flags
    return next((bits for flag, bits in _VECTOR_BITS.items() if flag in flags), None)


def read_cache_sizes() -> dict[str, int | None]:
    """Return the bytes of the first core's caches: l1d_bytes, l2_bytes, l3_bytes; None where they are hidden."""
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


def read_governor() -> str | None:
    """Return the clock governor of the kernel; None where it is hidden, as in most virtual machines."""
    return _GOVERNOR.read_text().strip() if _GOVERNOR.exists() else None


def read_memory_bytes() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def hash_machine() -> str | None:
    """Return a hash that tells this machine from others of its name; None where it has no identity."""
    if not _MACHINE.exists() or not (identity := _MACHINE.read_text().strip()):
        return None
    return hashlib.sha256(f"latbench {identity}".encode()).hexdigest()[:12]


def find_version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# The state of the machine while it measures -------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuTimes:
    """Clock ticks of all processors since the machine started.

    Parameters
    ----------
    total
        All ticks.
    steal
        Ticks that the hypervisor gave to others.
    """

    total: int
    steal: int


def read_cpu_times(stat: str | None = None) -> CpuTimes | None:
    """Read the clock ticks from /proc/stat, or from its text; None where there is none."""
    if stat is None:
        if not STAT.exists():
            return None
        stat = STAT.read_text()
    ticks = [int(value) for value in stat.splitlines()[0].split()[1:9]]
    return CpuTimes(sum(ticks), ticks[7])


def read_telemetry(before: CpuTimes | None) -> dict[str, float | None]:
    """Return the telemetry columns since `before`: clock_hertz (fastest core), load, steal_fraction."""
    after = read_cpu_times()
    known = before is not None and after is not None and after.total > before.total
    return {
        "clock_hertz": read_clock_hertz(),
        "load": os.getloadavg()[0],
        "steal_fraction": (after.steal - before.steal) / (after.total - before.total) if known else None,  # type: ignore[union-attr]
    }


def read_clock_hertz() -> float | None:
    """Return the fastest clock frequency among the cores that this process may use; None where it is hidden.

    Idle cores slow down and say nothing about busy ones.
    """
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    clocks = {
        int(cpu): float(mhz)
        for cpu, mhz in re.findall(r"^processor\s*: (\d+)\n.*?^cpu MHz\s*: ([\d.]+)", text, re.M | re.S)
    }
    return max((mhz * 1e6 for cpu, mhz in clocks.items() if cpu in list_allowed_processors()), default=None)


def read_scaling_hertz() -> float | None:
    """Return the same frequency from the governor's files, which are cheaper to read; None where they are hidden.

    Virtual machines hide them.
    """
    try:
        files = (_CLOCKS / f"cpu{cpu}/cpufreq/scaling_cur_freq" for cpu in list_allowed_processors())
        return max(float(file.read_text()) for file in files) * 1e3
    except (OSError, ValueError):
        return None
