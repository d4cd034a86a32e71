"""Which GPUs this process may use: those that NVML lists and that CUDA_VISIBLE_DEVICES shows.

The rules of the variable are CUDA's, because whoever sets it expects them:

- https://docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html: the variable lists
  indices, UUIDs or unique beginnings of UUIDs. CUDA counts GPUs in that order. An empty text shows none. An invalid
  entry hides itself and all after it. Indices count from the fastest GPU unless CUDA_DEVICE_ORDER is PCI_BUS_ID.
- https://docs.nvidia.com/datacenter/tesla/mig-user-guide/mig-device-names.html: slices of a divided GPU (MIG) go by
  their UUID, with drivers before 470 by MIG-<UUID of the GPU>/<GPU instance>/<compute instance>.
- Two rules are in no page of NVIDIA; PyTorch has them from drivers (`torch.cuda._parse_visible_devices`). An entry of
  another kind than the first is invalid. A GPU that is named twice hides all.

NVML is imported where it is used, so that a machine without it can import this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latbench.errors import EnvironmentUnusable, UsageError
from latbench.machines.gpu_names import (
    Gpu,
    find_device_name,
    format_alternatives,
    format_counts,
    parse_wanted_gpu,
    select_gpu,
)

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
UUID_VARIABLE = "LATBENCH_GPU_UUID"  # tells a worker which GPU to watch

_NO_LIBRARY = (
    "nvidia-ml-py is not installed, so no GPU can be found: pip install 'latbench[cuda13]', "
    "or 'latbench[cuda12]' where the driver is older than 580"
)

# Subclasses of pynvml.NVMLError by name: an older nvidia-ml-py may lack one.
_NO_DRIVER = {
    "NVMLError_LibraryNotFound": (
        "no NVIDIA driver is installed (libnvidia-ml.so.1 was not found): install one, or start the container with "
        "its GPUs (docker run --gpus all)"
    ),
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is not loaded: sudo modprobe nvidia, or reboot",
    "NVMLError_LibRmVersionMismatch": (
        "the NVIDIA driver was updated while the old one runs (driver/library version mismatch): reboot"
    ),
    "NVMLError_NoPermission": (
        "this user may not use the NVIDIA driver: check who may read and write /dev/nvidia* (ls -l /dev/nvidia*)"
    ),
}


@dataclass(frozen=True)
class Board:
    """A GPU as NVML lists it.

    Parameters
    ----------
    gpu
        The GPU.
    slices
        Its MIG slices by each of their identifiers; None where it is not divided.
    """

    gpu: Gpu
    slices: Mapping[str, Gpu] | None = None

    @property
    def usable(self) -> list[Gpu]:
        """The devices that CUDA can use: the slices of a divided GPU, else the GPU itself."""
        return [self.gpu] if self.slices is None else list(dict.fromkeys(self.slices.values()))


def list_gpus() -> tuple[list[Gpu], str]:
    """Return the GPUs that this process may use in CUDA's order; if there are none, the reason and what to do."""
    try:
        import pynvml
    except ImportError:
        return [], _NO_LIBRARY
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [], _NO_DRIVER.get(type(error).__name__, _refused(error))
    try:
        boards = [_board(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        return [], _refused(error)
    finally:
        pynvml.nvmlShutdown()
    return select_visible(boards, os.environ.get(VISIBLE_VARIABLE), os.environ.get(ORDER_VARIABLE))


def _refused(error: Exception) -> str:
    return f"the NVIDIA driver fails ({error}): nvidia-smi may tell more"


def _board(nvml: Any, index: int) -> Board:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    gpu = _gpu(nvml, handle)
    try:
        divided = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except nvml.NVMLError:  # older devices cannot be divided
        divided = False
    if not divided:
        return Board(gpu)
    slices: dict[str, Gpu] = {}
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # there are fewer than there may be; some hide their instances
            each = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            part = _gpu(nvml, each)
            slices[part.uuid] = part
            instances = nvml.nvmlDeviceGetGpuInstanceId(each), nvml.nvmlDeviceGetComputeInstanceId(each)
            slices[f"MIG-{gpu.uuid}/{instances[0]}/{instances[1]}"] = part
    return Board(gpu, slices)


def _gpu(nvml: Any, handle: Any) -> Gpu:
    return Gpu(nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle))


def select_visible(boards: Sequence[Board], variable: str | None, order: str | None) -> tuple[list[Gpu], str]:
    """Return the `boards` that CUDA shows, in its order; if there are none, the reason and what to do.

    Parameters
    ----------
    boards
        The GPUs in NVML's order, which is that of their PCI bus.
    variable
        The value of CUDA_VISIBLE_DEVICES; None where it is not set.
    order
        The value of CUDA_DEVICE_ORDER.
    """
    usable = [gpu for board in boards for gpu in board.usable]
    if not boards:
        return [], "the NVIDIA driver sees no GPU: nvidia-smi -L lists what it sees"
    if not usable:
        return [], "MIG is on and no GPU has an instance: sudo nvidia-smi mig -cgi PROFILE -C makes one"
    if variable is None:
        return usable, ""
    entries = [entry.strip() for entry in variable.split(",")]
    if _kind(entries[0]) == "index" and order != "PCI_BUS_ID" and len({board.gpu.name for board in boards}) > 1:
        return [], (
            f"{VISIBLE_VARIABLE}={variable} is ambiguous here: CUDA counts GPUs from the fastest, nvidia-smi by PCI "
            "bus; "
            f"set {ORDER_VARIABLE}=PCI_BUS_ID, or name GPUs by UUID (nvidia-smi -L)"
        )
    shown: list[Gpu] = []
    for entry in entries:
        named = _named(entry, boards) if _kind(entry) == _kind(entries[0]) else []
        if not named:
            break
        if not set(shown).isdisjoint(named):
            return [], f"{VISIBLE_VARIABLE}={variable} names a GPU twice, and CUDA then shows none: name each once"
        shown += named
    if shown:
        return shown, ""
    return [], (
        f"{VISIBLE_VARIABLE}={variable} hides every GPU of this machine ({format_counts(usable)}): unset it, or name "
        "one by "
        "index or UUID (nvidia-smi -L)"
    )


def _kind(entry: str) -> str:
    if entry.isascii() and entry.isdigit():
        return "index"
    return entry[:4] if entry[:4] in ("GPU-", "MIG-") else "invalid"


def _named(entry: str, boards: Sequence[Board]) -> list[Gpu]:
    """Return the GPUs of an entry of CUDA_VISIBLE_DEVICES: a GPU, its slices or one slice; none if it is invalid."""
    match _kind(entry):
        case "index":
            found = list(boards[int(entry) : int(entry) + 1])
        case "GPU-":
            found = [board for board in boards if board.gpu.uuid.startswith(entry)]
        case "MIG-":
            known = {name: gpu for board in boards for name, gpu in (board.slices or {}).items()}
            parts = {gpu for name, gpu in known.items() if name.startswith(entry)}
            return list(parts) if len(parts) == 1 else []
        case _:
            return []
    return found[0].usable if len(found) == 1 else []


def build_gpu_variables(gpu: Gpu) -> dict[str, str]:
    """Return the environment variables of a worker that sees this GPU alone, and watches it."""
    return {VISIBLE_VARIABLE: gpu.uuid, ORDER_VARIABLE: "PCI_BUS_ID", UUID_VARIABLE: gpu.uuid}


def find_gpu(text: str, otherwise: str = ", or measure the CPU with --cpu") -> Gpu:
    """Return the GPU of this machine that a user calls `text`: NAME or NAME:INDEX, counted as in `list_gpus`.

    Parameters
    ----------
    text
        What the user typed.
    otherwise
        What a refusal offers in place of another GPU.

    Raises
    ------
    UsageError
        `text` is no name, an unknown one, matches different models, or the GPU at INDEX is another model.
    EnvironmentUnusable
        This machine has no such GPU, or none that this process may use.
    """
    wanted = parse_wanted_gpu(text)
    found, reason = list_gpus()
    if not found:
        find_device_name(wanted.name)
        raise EnvironmentUnusable(f"--gpu {text} requested, but {reason}")
    here = (
        f"{VISIBLE_VARIABLE}={os.environ[VISIBLE_VARIABLE]} shows"
        if VISIBLE_VARIABLE in os.environ
        else "this machine has"
    )
    gpu = select_gpu(wanted, found, here)
    if gpu is not None:
        return gpu
    advice = f"{here} {format_counts(found)}: type --gpu {format_alternatives(found)}"
    try:
        find_device_name(wanted.name)
    except UsageError:
        raise UsageError(f"unknown GPU {wanted.name!r}, {advice}") from None
    raise EnvironmentUnusable(f"--gpu {text} requested, but {advice}{otherwise}")
