"""Names of GPUs: their names in tables, the argument of `--gpu`, and how both match.

NVML's full name decides ("NVIDIA A100-SXM4-80GB"). A user types the words that name the chip (`a100`), or more, in
any case, with hyphens, spaces or neither. The same rules hold for a GPU that this file does not list.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from latbench.errors import UsageError
from latbench.machines.devices import make_slug

# Words that never distinguish chips; some drivers and users write them, others do not.
_MAKER = {"nvidia", "tesla", "geforce", "quadro"}

# Words that may be left out: the maker's line, memory, form factor, edition. All other words name the chip, so that a
# 4090 D is no 4090, a 4080 SUPER no 4080 and a virtual A10-24Q no A10.
_OPTIONAL = re.compile(
    r"rtx|\d+gb?|hbm\d[a-z]?|sxm\d*|pcie|nvl\d*|ac|gpu|generation|edition|blackwell|server|workstation"
)

# Used to refuse typos and to suggest names where no GPU is visible: before a cluster is asked, and in a plan.
_KNOWN = (
    "A2", "A10", "A10G", "A16", "A30", "A40", "A100", "A800", "B200", "B300", "GB10", "GB200", "GB300", "GH200",
    "H20", "H100", "H200", "H800", "L2", "L4", "L20", "L40", "L40S", "T4", "V100",
    *(f"RTX {chip}" for chip in (
        "2070", "2080", "2080 Ti", "3060", "3070", "3080", "3080 Ti", "3090", "3090 Ti", "4060", "4070", "4070 Ti",
        "4080", "4080 SUPER", "4090", "4090 D", "5060", "5070", "5070 Ti", "5080", "5090", "5090 D", "A4000", "A5000",
        "A6000", "4000 Ada", "5000 Ada", "6000 Ada", "PRO 4000", "PRO 5000", "PRO 6000",
    )),
)  # fmt: skip

USAGE = "--gpu takes NAME or NAME:INDEX, such as a100 or a100:2"


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU: NVML's full name and its UUID."""

    name: str
    uuid: str

    @property
    def device(self) -> str:
        """The device's name in tables; older drivers leave the maker out ("Tesla T4" is nvidia-tesla-t4)."""
        words = make_slug(self.name)
        return words if words.startswith("nvidia") else f"nvidia-{words}"


@dataclass(frozen=True)
class WantedGpu:
    """The argument of --gpu: a name and, where several GPUs are installed, an index."""

    name: str
    index: int | None = None

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}:{self.index}"


def parse_wanted_gpu(text: str) -> WantedGpu:
    """Return the name and the index in NAME or NAME:INDEX. Raises UsageError for anything else."""
    found = re.fullmatch(r"([^:]+)(?::([0-9]{1,4}))?", text.strip())
    if found is None or not _words(found[1]):
        raise UsageError(f"{USAGE}, not {text!r}: `latbench doctor` lists the GPUs of this machine")
    return WantedGpu(found[1].strip(), None if found[2] is None else int(found[2]))


def matches_name(full_name: str, wanted: str) -> bool:
    """Return whether a user calls the GPU with that full name `wanted`.

    `wanted` must have every word that names the chip; for a MIG slice also the words of its profile.
    """
    pattern = "".join(f"(?:{word})?" if optional else word for word, optional in _chip(full_name))
    typed = "".join(_words(wanted))
    return typed != "" and re.fullmatch(pattern, typed) is not None


def shorten_name(full_name: str) -> str:
    """Return the shortest usual name of a GPU: "NVIDIA GeForce RTX 4090 D" is rtx-4090-d."""
    return "-".join(word for word, optional in _chip(full_name) if not optional or word == "rtx") or make_slug(
        full_name
    )


def _words(text: str) -> list[str]:
    return [word for word in make_slug(text).split("-") if word and word not in _MAKER]


def _chip(full_name: str) -> list[tuple[str, bool]]:
    """Return the words of a full name without its maker, and whether each may be left out."""
    words = _words(full_name)
    whole = words.index("mig") if "mig" in words else len(words)
    return [(word, at < whole and _OPTIONAL.fullmatch(word) is not None) for at, word in enumerate(words)]


def select_gpu(wanted: WantedGpu, gpus: Sequence[Gpu], here: str = "this machine has") -> Gpu | None:
    """Return the GPU of `gpus` that is `wanted`: the one at its index, or the first with its name.

    Parameters
    ----------
    wanted
        What the user typed.
    gpus
        The GPUs in CUDA's order, at least one.
    here
        What messages say before the names of `gpus`.

    Returns
    -------
    The GPU; None where no index is given and no name matches.

    Raises
    ------
    UsageError
        There is no GPU at the index, it is another model, or the name matches different models.
    """
    if wanted.index is not None:
        if wanted.index >= len(gpus):
            raise UsageError(
                f"--gpu {wanted}: there is no GPU {wanted.index}, {here} {format_counts(gpus)}, counted from 0; "
                f"type --gpu {format_alternatives(gpus)}"
            )
        gpu = gpus[wanted.index]
        if not matches_name(gpu.name, wanted.name):
            raise UsageError(
                f"--gpu {wanted}: GPU {wanted.index} is {gpu.name}, {here} {format_counts(gpus)}; "
                f"type --gpu {format_option(gpus, wanted.index)} for that one"
            )
        return gpu
    whole = make_slug(wanted.name)
    exact = [gpu for gpu in gpus if gpu.device in (whole, f"nvidia-{whole}")]
    alike = exact or [gpu for gpu in gpus if matches_name(gpu.name, wanted.name)]
    models = list(dict.fromkeys(gpu.device for gpu in alike))
    if len(models) > 1:
        raise UsageError(f"--gpu {wanted} matches different models: type --gpu {' or --gpu '.join(models)}")
    return alike[0] if alike else None


def format_option(gpus: Sequence[Gpu], index: int) -> str:
    """Return the argument of --gpu for the GPU at `index`: `h200`, or `a100:1` where several match."""
    name = shorten_name(gpus[index].name)
    return name if sum(matches_name(gpu.name, name) for gpu in gpus) == 1 else f"{name}:{index}"


def format_alternatives(gpus: Sequence[Gpu]) -> str:
    """Return the arguments of --gpu for each model of `gpus`, joined by "or --gpu"."""
    names = {}
    for gpu in gpus:
        name = shorten_name(gpu.name)
        unique = len({other.device for other in gpus if matches_name(other.name, name)}) == 1
        names[gpu.device] = name if unique else gpu.device
    return " or --gpu ".join(names.values())


def format_counts(gpus: Sequence[Gpu]) -> str:
    """Return the full names of `gpus` for a message: "8 x NVIDIA H200, NVIDIA T4"."""
    counts = Counter(gpu.name for gpu in gpus)
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())


def find_device_name(wanted: str) -> str:
    """Return the name in tables of a GPU that need not be installed, as far as `wanted` tells it.

    Any full name that starts with "nvidia" is accepted, because there are GPUs that latbench does not list. Raises
    UsageError for other unknown names, and suggests similar ones.
    """
    whole = make_slug(wanted)
    if whole.startswith("nvidia-"):
        return whole
    for name in _KNOWN:
        if matches_name(name, wanted):
            return Gpu(f"NVIDIA {name}", "").device
    if any(matches_name(wanted, name) for name in _KNOWN):  # with more words: a100-sxm4-80gb
        return f"nvidia-{whole}"
    names = {make_slug(name).replace("-", ""): shorten_name(name) for name in _KNOWN}
    close = difflib.get_close_matches("".join(_words(wanted)), names, n=3)
    hint = f", did you mean {', '.join(names[name] for name in close)}?" if close else ":"
    raise UsageError(
        f"unknown GPU {wanted!r}{hint} `latbench doctor` prints the names of this machine's GPUs; "
        f"a GPU that latbench does not know goes by its full name, such as nvidia-{whole}"
    )
