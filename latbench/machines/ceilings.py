"""What a CPU can do at most, and how long fixed pieces of work take on it: measured once, kept in the cache folder.
A GPU's ceilings (`latbench.timing.gpu_ceilings`) are kept in the same way.

The ceilings are the roofline (Williams, Waterman, Patterson 2009, "Roofline"): float32 operations a second, those of
numbers that are multiplied as bfloat16, and bytes read a second from working sets of several sizes. No call can be
faster than its operations at the one rate, or than reading what it must read at the rate of a working set of that
size, which the caches may hold as well as they like.

The pace is what the two reference kernels of a sweep usually take: a dense product, which is bound by the vector
units, and a sum over more memory than the caches hold.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from latbench.base.files import find_cache_folder, write_text_atomically
from latbench.errors import EnvironmentUnusable
from latbench.machines.devices import hash_machine


@dataclass(frozen=True)
class Ceilings:
    """Of one device with so many threads.

    flop_per_second; read_bytes_per_second: by size of the working set in bytes, which rises; product_seconds and
    sum_seconds: what the reference kernels usually take; bfloat16_flop_per_second: as flop_per_second unless given.
    """

    flop_per_second: float
    read_bytes_per_second: dict[int, float]
    product_seconds: float
    sum_seconds: float
    bfloat16_flop_per_second: float = 0.0

    def __post_init__(self) -> None:
        if not self.bfloat16_flop_per_second:
            object.__setattr__(self, "bfloat16_flop_per_second", self.flop_per_second)

    def compute_seconds(self, flop: float, dtype: str = "float32") -> float:
        """The least that so many operations can take, on activations multiplied as `dtype`."""
        return flop / (self.bfloat16_flop_per_second if dtype == "bfloat16" else self.flop_per_second)

    def memory_seconds(self, size: float) -> float:
        """The least that reading so many bytes can take, wherever they lie."""
        return bound_memory_seconds(self.read_bytes_per_second, size)

    def roofline_seconds(self, flop: float, size: float, dtype: str = "float32") -> float:
        """The least that work of so many operations on so many bytes can take, as `compute_seconds`."""
        return max(self.compute_seconds(flop, dtype), self.memory_seconds(size))

    def reference_seconds(self, product_seconds: float, sum_seconds: float, flop: float, size: float) -> float:
        """`weigh_reference_seconds` for work of so many operations on so many bytes."""
        return weigh_reference_seconds(
            product_seconds, sum_seconds, self.compute_seconds(flop), self.memory_seconds(size)
        )

    def or_higher(self, other: Ceilings) -> Ceilings:
        """The higher of two ceilings, rate by rate, and the lesser of two usual times: what else was at work when
        they were measured only ever makes them worse.
        """
        return Ceilings(
            max(self.flop_per_second, other.flop_per_second),
            take_higher_rates(self.read_bytes_per_second, other.read_bytes_per_second),
            min(self.product_seconds, other.product_seconds),
            min(self.sum_seconds, other.sum_seconds),
            max(self.bfloat16_flop_per_second, other.bfloat16_flop_per_second),
        )


def weigh_reference_seconds(product_seconds: float, sum_seconds: float, compute: float, memory: float) -> float:
    """What the two reference kernels take, if they take so long, as one: their geometric mean, in which each counts
    as much as work is bound by what it shows, that takes `compute` and `memory` seconds on the roofline.
    """
    share = compute / (compute + memory)
    return float(product_seconds**share * sum_seconds ** (1 - share))


def bound_memory_seconds(read_bytes_per_second: Mapping[int, float], size: float) -> float:
    """The least that reading `size` bytes can take, at rates by size of the working set, which rises: at that of the
    largest one that is no larger.
    """
    smaller = [rate for held, rate in read_bytes_per_second.items() if held <= size]
    rates = smaller[-1:] or list(read_bytes_per_second.values())[:1]
    return size / rates[0]


def make_non_increasing(rates: Mapping[int, float]) -> dict[int, float]:
    """Rates by size of the working set, each at least as high as the next: a larger set may read faster by luck, and
    never by nature.
    """
    sizes = sorted(rates)
    return {size: max(rates[other] for other in sizes[i:]) for i, size in enumerate(sizes)}


Key = TypeVar("Key", int, str)


def take_higher_rates(rates: Mapping[Key, float], others: Mapping[Key, float]) -> dict[Key, float]:
    """The higher rate of each key of `others`, which are those of the later measurement."""
    return {key: max(rate, rates.get(key, rate)) for key, rate in others.items()}


class DeviceCeilings(Protocol):
    """Ceilings of any device: a dataclass of numbers, and of rates by name or (read_bytes_per_second) by size."""

    def or_higher(self, other: Self) -> Self:
        """The higher of two ceilings, rate by rate."""


AnyCeilings = TypeVar("AnyCeilings", bound=DeviceCeilings)


class CeilingsWithPace(DeviceCeilings, Protocol):
    """Ceilings that also hold what the reference kernels usually take."""

    @property
    def product_seconds(self) -> float:
        """The one that is bound by the units, while the machine is as quiet as it was at best."""

    @property
    def sum_seconds(self) -> float:
        """The one that is bound by memory."""

    def reference_seconds(self, product_seconds: float, sum_seconds: float, flop: float, size: float) -> float:
        """Return both as one time, weighed for work of `flop` operations on `size` bytes."""


AnyCeilingsWithPace = TypeVar("AnyCeilingsWithPace", bound=CeilingsWithPace)


def _numbers(document: Mapping[Any, Any]) -> Iterator[float]:
    """Every value of a document of numbers, and of numbers by name."""
    for value in document.values():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        else:
            yield value


@dataclass(frozen=True)
class CachedCeilings(Generic[AnyCeilings]):
    """Ceilings in the cache folder, of this machine's `device` with `threads` threads.

    work: what they are measured with, since times of other work would correct by the wrong factor, silently. measure:
    finds them, which takes some seconds. kind: what it returns. unit: tells the device from others of its name, and
    from itself with other settings; by default this machine's identity.
    """

    device: str
    threads: int
    work: str
    measure: Callable[[], AnyCeilings]
    kind: type[Any] = Ceilings
    unit: Mapping[str, object] | None = None

    def known(self) -> AnyCeilings | None:
        """What is kept; None where nothing is, or where it is not of this."""
        # A file that is not as it should be will be replaced.
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            document = json.loads(self._path.read_text())
            if document.pop("identity") == self._identity:
                rates = {int(size): float(rate) for size, rate in document.pop("read_bytes_per_second").items()}
                found: AnyCeilings = self.kind(read_bytes_per_second=rates, **document)
                if rates and all(0 < value < math.inf for value in _numbers(vars(found))):
                    return found
        return None

    def get(self) -> AnyCeilings:
        """What is kept, else what is measured now."""
        known = self.known()
        return self._keep(self.measure()) if known is None else known

    def again(self, doubted: AnyCeilings) -> AnyCeilings:
        """Ceilings measured once more, where they are higher than those that are `doubted`."""
        return self._keep(doubted.or_higher(self.measure()))

    @property
    def _identity(self) -> dict[str, object]:
        unit = hash_machine() if self.unit is None else dict(self.unit)
        return {"device": self.device, "threads": self.threads, "work": self.work, "machine": unit}

    @property
    def _path(self) -> Path:
        return find_cache_folder() / "ceilings" / f"{self.device}-{self.threads}.json"

    def _keep(self, found: AnyCeilings) -> AnyCeilings:
        # Where the folder cannot be written, the next sweep measures them again.
        with contextlib.suppress(EnvironmentUnusable):
            document = {"identity": self._identity, **asdict(found)}  # type: ignore[call-overload]
            write_text_atomically(self._path, json.dumps(document, indent=2))
        return found
