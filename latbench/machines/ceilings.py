"""Performance ceilings of a device and the usual times of reference work, measured once and cached.

The ceilings are the roofline (Williams, Waterman, Patterson 2009, "Roofline"). They are operations a second on
float32, on numbers multiplied as bfloat16, and on bytes. They are also bytes read a second from working sets of
several sizes. No call can be faster than its operations at the rate of its type. Nor can it be faster than reading
its data at the rate of a working set of that size, which the caches may hold.

The pace is the usual time of a sweep's two reference kernels: a dense product, which is bound by the vector units,
and a sum over more memory than the caches hold. A GPU's ceilings (`latbench.timing.gpu_ceilings`) are cached in the
same way.
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
    """The ceilings of a CPU with a number of threads.

    Parameters
    ----------
    flop_per_second
        Float32 operations a second.
    read_bytes_per_second
        Bytes read a second, by size of the working set in bytes; sizes rise.
    product_seconds, sum_seconds
        Usual times of the reference kernels.
    bfloat16_flop_per_second
        Operations a second on bfloat16 inputs; by default flop_per_second.
    int8_op_per_second
        Operations a second on inputs of eight bits; by default flop_per_second.
    """

    flop_per_second: float
    read_bytes_per_second: dict[int, float]
    product_seconds: float
    sum_seconds: float
    bfloat16_flop_per_second: float = 0.0
    int8_op_per_second: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bfloat16_flop_per_second", "int8_op_per_second"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.flop_per_second)

    def compute_seconds(self, flop: float, dtype: str = "float32") -> float:
        """Return the shortest time for so many operations on activations multiplied as `dtype`."""
        rates = {"bfloat16": self.bfloat16_flop_per_second, "int8": self.int8_op_per_second}
        return flop / rates.get(dtype, self.flop_per_second)

    def memory_seconds(self, size: float) -> float:
        """Return the shortest time for reading so many bytes."""
        return bound_memory_seconds(self.read_bytes_per_second, size)

    def roofline_seconds(self, flop: float, size: float, dtype: str = "float32") -> float:
        """Return the shortest time for so many operations on so many bytes."""
        return max(self.compute_seconds(flop, dtype), self.memory_seconds(size))

    def reference_seconds(self, product_seconds: float, sum_seconds: float, flop: float, size: float) -> float:
        """Return both reference times as one, weighed for work of `flop` operations on `size` bytes."""
        return weigh_reference_seconds(
            product_seconds, sum_seconds, self.compute_seconds(flop), self.memory_seconds(size)
        )

    def or_higher(self, other: Ceilings) -> Ceilings:
        """Return the higher rates and the shorter usual times of two measurements.

        Other work on the machine only ever makes a measurement worse.
        """
        return Ceilings(
            max(self.flop_per_second, other.flop_per_second),
            take_higher_rates(self.read_bytes_per_second, other.read_bytes_per_second),
            min(self.product_seconds, other.product_seconds),
            min(self.sum_seconds, other.sum_seconds),
            max(self.bfloat16_flop_per_second, other.bfloat16_flop_per_second),
            max(self.int8_op_per_second, other.int8_op_per_second),
        )


def weigh_reference_seconds(product_seconds: float, sum_seconds: float, compute: float, memory: float) -> float:
    """Return the times of both reference kernels as one: their weighted geometric mean.

    The weights are the shares of `compute` and `memory` seconds of the work on the roofline.
    """
    share = compute / (compute + memory)
    return float(product_seconds**share * sum_seconds ** (1 - share))


def bound_memory_seconds(read_bytes_per_second: Mapping[int, float], size: float) -> float:
    """Return the shortest time for reading `size` bytes.

    It is that at the rate of the largest working set that is no larger. The sizes of `read_bytes_per_second` rise.
    """
    smaller = [rate for held, rate in read_bytes_per_second.items() if held <= size]
    rates = smaller[-1:] or list(read_bytes_per_second.values())[:1]
    return size / rates[0]


def make_non_increasing(rates: Mapping[int, float]) -> dict[int, float]:
    """Return rates by size of the working set, each at least as high as the next.

    A larger set can be read faster only by chance.
    """
    sizes = sorted(rates)
    return {size: max(rates[other] for other in sizes[i:]) for i, size in enumerate(sizes)}


Key = TypeVar("Key", int, str)


def take_higher_rates(rates: Mapping[Key, float], others: Mapping[Key, float]) -> dict[Key, float]:
    """Return the higher rate of each key of `others`, the later measurement."""
    return {key: max(rate, rates.get(key, rate)) for key, rate in others.items()}


class DeviceCeilings(Protocol):
    """Ceilings of any device: a dataclass of numbers, and of rates by name or by size (read_bytes_per_second)."""

    def or_higher(self, other: Self) -> Self:
        """Return the higher rates of two measurements."""


AnyCeilings = TypeVar("AnyCeilings", bound=DeviceCeilings)


class CeilingsWithPace(DeviceCeilings, Protocol):
    """Ceilings that include the usual times of the reference kernels."""

    @property
    def product_seconds(self) -> float:
        """Time of the reference kernel that is bound by the units, on a quiet machine."""

    @property
    def sum_seconds(self) -> float:
        """Time of the reference kernel that is bound by memory, on a quiet machine."""

    def reference_seconds(self, product_seconds: float, sum_seconds: float, flop: float, size: float) -> float:
        """Return both as one time, weighed for work of `flop` operations on `size` bytes."""


AnyCeilingsWithPace = TypeVar("AnyCeilingsWithPace", bound=CeilingsWithPace)


def _numbers(document: Mapping[Any, Any]) -> Iterator[float]:
    """Yield every number in a document of numbers and of numbers by name."""
    for value in document.values():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        else:
            yield value


@dataclass(frozen=True)
class CachedCeilings(Generic[AnyCeilings]):
    """Ceilings of this machine's `device`, kept in the cache folder.

    Parameters
    ----------
    device
        The device's name in tables.
    threads
        Number of threads.
    work
        Description of the work that measures the ceilings. Cached ceilings of other work are not used.
    measure
        Measures the ceilings; takes some seconds.
    kind
        The class of the ceilings.
    unit
        Identifies the device among those of its name, with its settings; by default this machine's identity.
    """

    device: str
    threads: int
    work: str
    measure: Callable[[], AnyCeilings]
    kind: type[Any] = Ceilings
    unit: Mapping[str, object] | None = None

    def known(self) -> AnyCeilings | None:
        """Return the cached ceilings; None where there are none or they are of other work or another device."""
        # An invalid file is replaced later.
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            document = json.loads(self._path.read_text())
            if document.pop("identity") == self._identity:
                rates = {int(size): float(rate) for size, rate in document.pop("read_bytes_per_second").items()}
                found: AnyCeilings = self.kind(read_bytes_per_second=rates, **document)
                if rates and all(0 < value < math.inf for value in _numbers(vars(found))):
                    return found
        return None

    def get(self) -> AnyCeilings:
        """Return the cached ceilings, else measure and cache them."""
        known = self.known()
        return self._keep(self.measure()) if known is None else known

    def again(self, doubted: AnyCeilings) -> AnyCeilings:
        """Measure again and return the higher of these rates and the doubted ones."""
        return self._keep(doubted.or_higher(self.measure()))

    @property
    def _identity(self) -> dict[str, object]:
        unit = hash_machine() if self.unit is None else dict(self.unit)
        return {"device": self.device, "threads": self.threads, "work": self.work, "machine": unit}

    @property
    def _path(self) -> Path:
        return find_cache_folder() / "ceilings" / f"{self.device}-{self.threads}.json"

    def _keep(self, found: AnyCeilings) -> AnyCeilings:
        # If the folder cannot be written, the next sweep measures them again.
        with contextlib.suppress(EnvironmentUnusable):
            document = {"identity": self._identity, **asdict(found)}  # type: ignore[call-overload]
            write_text_atomically(self._path, json.dumps(document, indent=2))
        return found
