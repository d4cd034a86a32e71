"""Text files of SPDY: read into table rows, and written for SPDY's own tools.

SPDY (Frantar and Alistarh 2022), timings: `base`, the dense model's seconds; `prunable`, the seconds in the layers of
the file; then per layer its name and lines `<seconds> <sparsity>`.

    base
    0.45038264
    prunable
    0.44644355
    conv1
    0.013860 0.0000
    0.014522 0.4000

Names without any time may follow, as in one of the published files. SPDY, profiles: a line `<sparsity> <layer>` each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latbench.base.files import write_text_atomically
from latbench.errors import BadData

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class SpdyTimings:
    """A SPDY timing file in seconds; `layers` gives each layer's (seconds, sparsity), in file order."""

    base: float
    prunable: float
    layers: Mapping[str, tuple[tuple[float, float], ...]]

    @property
    def fixed(self) -> float:
        """Seconds outside the layers of the file."""
        return self.base - self.prunable


def read_spdy(path: Path) -> SpdyTimings:
    """Read SPDY timings. Raises BadData with the line number for any fault."""
    lines = _lines(path)
    values = []
    for index, heading in ((0, "base"), (2, "prunable")):
        if len(lines) <= index + 1 or lines[index] != heading:
            found = repr(lines[index]) if index < len(lines) else "the end of the file"
            raise _bad(path, index, f"expected '{heading}' and a line with its seconds, found {found}")
        values.append(_seconds(path, index + 1, lines[index + 1]))
    if values[1] > values[0]:
        raise _bad(path, 3, f"prunable is {values[1]:g} s, more than the {values[0]:g} s of the whole model")
    layers: dict[str, list[tuple[float, float]]] = {}
    points: list[tuple[float, float]] | None = None
    for index, line in enumerate(lines[4:], start=4):
        words = line.split()
        if len(words) == 1 and _is_name(words[0]):
            if words[0] in layers:
                raise _bad(path, index, f"layer {words[0]} is listed twice")
            points = layers.setdefault(words[0], [])
        elif len(words) == 2 and points is not None:
            points.append((_seconds(path, index, words[0]), _sparsity(path, index, words[1])))
        else:
            raise _bad(path, index, f"expected a layer's name or '<seconds> <sparsity>', found {line!r}")
    if not any(layers.values()):
        raise _bad(path, len(lines) - 1, "the file ends without the times of a layer")
    return SpdyTimings(values[0], values[1], {name: tuple(points) for name, points in layers.items()})


def write_spdy(timings: SpdyTimings, path: Path) -> None:
    """Write SPDY timings; `read_spdy` reads them again, sparsities to the format's four digits.

    Raises BadData as `check_spdy_names` does.
    """
    check_spdy_names(timings.layers)
    lines = ["base", _exact(timings.base), "prunable", _exact(timings.prunable)]
    for name, points in timings.layers.items():
        lines += [name, *(f"{_exact(seconds)} {sparsity:.4f}" for seconds, sparsity in points)]
    write_text_atomically(path, "\n".join(lines) + "\n")


def check_spdy_names(layers: Iterable[str]) -> None:
    """Raise BadData for a layer whose name a SPDY timing file cannot hold: it would be read as something else."""
    for name in layers:
        if name.split() != [name] or not _is_name(name):
            raise BadData(
                f"a SPDY timing file cannot hold a layer called {name!r}: names have no space, and are no numbers "
                "but positions such as 0 or 1.2"
            )


def _exact(seconds: float) -> str:
    """Return the shortest exact text of a number, also of NumPy's."""
    return repr(float(seconds))


def read_spdy_profile(path: Path) -> dict[str, float]:
    """Read a SPDY profile: the sparsity of each layer, in file order. Raises BadData with the line number."""
    profile: dict[str, float] = {}
    for index, line in enumerate(_lines(path)):
        words = line.split()
        if len(words) != 2:
            raise _bad(path, index, f"expected '<sparsity> <layer>', found {line!r}")
        if words[1] in profile:
            raise _bad(path, index, f"layer {words[1]} is listed twice")
        profile[words[1]] = _sparsity(path, index, words[0])
    if not profile:
        raise BadData(f"{path}: an empty profile")
    return profile


def write_spdy_profile(profile: Mapping[str, float], path: Path) -> None:
    """Write layer sparsities as a SPDY profile with four digits. Raises BadData for a name with a space."""
    for name in profile:
        if name.split() != [name]:
            raise BadData(f"a SPDY profile cannot hold a layer called {name!r}: names have no space; CSV can")
    write_text_atomically(path, "".join(f"{sparsity:.4f} {name}\n" for name, sparsity in profile.items()))


def convert_spdy_to_rows(
    timings: SpdyTimings,
    *,
    network: str,
    pattern: str,
    device: str,
    threads: int | None = None,
    shapes: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Convert SPDY timings to table rows: one per time and layer, and one of the dense model (op model).

    Times were taken inside the running network (context network), so a layer's place matters: the column `model` is
    `<network>:<layer>`. Sparsity 0 is a dense row, whatever `pattern` says of the others.

    Parameters
    ----------
    timings
        The timings.
    network
        Name of the network.
    pattern
        Spec of the pattern of sparse layers.
    device
        The device's name in tables.
    threads
        Number of threads, if known.
    shapes
        Shape columns by layer name; other layers have null ones.
    """
    from latbench.base.engine_registry import DEEPSPARSE  # `import search` does without the registry

    constant = {
        "purpose": "import", "device": device, "backend": DEEPSPARSE, "dtype_w": "float32", "dtype_a": "float32",
        "dtype_out": "float32", "context": "network", "threads": threads, "pattern_seed": 0, "status": "ok",
    }  # fmt: skip
    whole = {"op": "model", "model": network, "pattern": "dense", "sparsity_target": 0.0}
    prunable = {"samples_seconds": [timings.base], "flags": f"prunable_seconds={_exact(timings.prunable)}"}
    rows = [constant | whole | prunable]
    for name, points in timings.layers.items():
        shape = (shapes or {}).get(name, {})
        # One published file times a layer's dense form twice; a point has one row, with both samples.
        samples: dict[float, list[float]] = {}
        for seconds, sparsity in points:
            samples.setdefault(sparsity, []).append(seconds)
        rows += [
            constant
            | {"model": f"{network}:{name}", "pattern": pattern if sparsity else "dense", "sparsity_target": sparsity}
            | {"samples_seconds": seconds}
            | dict(shape)
            for sparsity, seconds in samples.items()
        ]
    return rows


def convert_rows_to_spdy(frame: pd.DataFrame, network: str) -> SpdyTimings:
    """Convert rows of `convert_spdy_to_rows`, one per point, to SPDY timings.

    A layer without a dense time is left out. Raises BadData where no layer has one, or the whole network has none.
    """
    # The whole model by the clock of its layers; baselines and verifications use another one.
    rows = frame[(frame["context"] == "network") & frame["purpose"].isin(("sweep", "import"))]
    whole = rows[(rows["op"] == "model") & (rows["model"] == network) & (rows["pattern"] == "dense")]
    prefix = f"{network}:"
    layers: dict[str, tuple[tuple[float, float], ...]] = {}
    for model, points in rows[rows["model"].str.startswith(prefix)].groupby("model", sort=False):
        ordered = points.sort_values("sparsity_target")
        if 0.0 in set(ordered["sparsity_target"]):
            layers[model.removeprefix(prefix)] = tuple(
                zip(ordered["median_seconds"], ordered["sparsity_target"], strict=True)
            )
    if whole.empty or not layers:
        raise BadData(f"the table holds no dense times of {network} and its layers, taken in the running network")
    prunable = sum(points[0][0] for points in layers.values())
    return SpdyTimings(float(whole["median_seconds"].iloc[-1]), prunable, layers)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").rstrip().splitlines()
    except FileNotFoundError:
        raise BadData(f"{path}: no such file") from None
    except OSError as error:
        raise BadData(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise BadData(f"{path}: not a text file ({error.reason} at byte {error.start})") from error


def _seconds(path: Path, index: int, text: str) -> float:
    value = _number(path, index, text, "seconds")
    if not 0 < value < math.inf:
        raise _bad(path, index, f"seconds must be positive and finite, not {text}")
    return value


def _sparsity(path: Path, index: int, text: str) -> float:
    value = _number(path, index, text, "a sparsity")
    if not 0 <= value <= 1:
        raise _bad(path, index, f"a sparsity must lie in [0, 1], not {text}")
    return value


def _number(path: Path, index: int, text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _bad(path, index, f"expected {what}, found {text!r}") from None


def _is_name(text: str) -> bool:
    """Return whether a word alone is a layer's name, not a number without its sparsity.

    Layers of nn.Sequential are called 0, 12 or 1.2, which are numbers too.
    """
    try:
        float(text)
    except ValueError:
        return True
    return re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*))?", text, flags=re.A) is not None


def _bad(path: Path, index: int, message: str) -> BadData:
    return BadData(f"{path}, line {index + 1}: {message}")
