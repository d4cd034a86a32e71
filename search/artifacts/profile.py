"""A profile: which pattern at which sparsity in which layer, what that is predicted to take, and where it came from.

It is written as JSON, version 2, and read strictly: what `latbench search` promised is what `prune` and `verify`
hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from latbench.base.files import write_text_atomically
from latbench.errors import BadData
from latbench.importers.text_formats import write_spdy_profile
from sparse_kernels.patterns import parse

VERSION = 2

Record = TypeVar("Record")


@dataclass(frozen=True)
class LayerChoice:
    """What one layer becomes, its predicted seconds with their interval, and its relative output error."""

    pattern: str
    sparsity: float
    seconds: float
    seconds_low: float
    seconds_high: float
    error: float


@dataclass(frozen=True)
class Weights:
    """Bytes of all weights of a model: dense, pruned and packed, and the most that they were allowed to take."""

    dense: float
    packed: float
    most: float

    def sentence(self) -> str:
        """The three in words."""
        return f"all weights take {self.packed:,.0f} of {self.most:,.0f} bytes allowed, {self.dense:,.0f} dense"


@dataclass(frozen=True)
class Profile:
    """The choice for every searched layer, and the promise: `predicted_seconds` <= `dense_seconds` / `target`.

    Seconds are of one call of the whole model on the task's example inputs. `fixed_seconds` is what the converted
    model takes beyond the searched layers, `ceiling` the speedup if those took no time (None: unbounded). `error` is
    the sum of the layers' errors, `bound` what no profile within the budget is below, `loss` the calibration loss.
    The promise is met with the probability `risk` when it is verified. `additivity_before` and `additivity_after`: by
    what share of it a sum of layers missed the whole model, without and with what was fitted around them (medians).
    `most_bytes` is what all weights of the pruned model were allowed to take, `weight_bytes` what they do, those of
    searched layers as they are packed, `dense_bytes` those of the dense model; None where nothing was asked for.
    `table_hash`, `model_hash` and `inputs` say what it was made from.
    """

    task: str
    layers: Mapping[str, LayerChoice]
    backend: str
    threads: int
    batch: int
    device: str
    target: float
    risk: float
    dense_engine: str
    dense_seconds: float
    dense_seconds_low: float
    dense_seconds_high: float
    fixed_seconds: float
    fixed_seconds_low: float
    fixed_seconds_high: float
    predicted_seconds: float
    predicted_low: float
    predicted_high: float
    loss: float
    error: float
    bound: float
    ceiling: float | None
    additivity_before: float
    additivity_after: float
    strategy: str
    seed: int
    table_hash: str
    model_hash: str
    inputs: str
    most_bytes: float | None = None
    weight_bytes: float | None = None
    dense_bytes: float | None = None

    @property
    def weights(self) -> Weights | None:
        """What all weights take, where that was a second budget."""
        if self.dense_bytes is None or self.weight_bytes is None or self.most_bytes is None:
            return None
        return Weights(self.dense_bytes, self.weight_bytes, self.most_bytes)

    @property
    def speedup(self) -> tuple[float, float, float]:
        """The predicted speedup over the fastest dense engine, and its interval.

        The predicted seconds are beside dense ones of `dense_seconds`: the noise of their ratio is in them alone.
        """
        ends = (self.predicted_seconds, self.predicted_high, self.predicted_low)
        value, low, high = (self.dense_seconds / seconds for seconds in ends)
        return value, low, high

    def save(self, path: Path) -> None:
        """Write it to `path`, whole or not at all."""
        content = {"version": VERSION, **asdict(self)}
        write_text_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def save_spdy(self, path: Path) -> None:
        """Write SPDY's text format: each layer's sparsity, without its pattern."""
        write_spdy_profile({name: choice.sparsity for name, choice in self.layers.items()}, path)


def load(path: Path) -> Profile:
    """The profile at `path`. Raises BadData when it is missing, foreign, of another version, or lacks anything."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadData(f"{path} does not exist: `latbench search` writes profiles") from None
    except (OSError, ValueError) as error:
        raise BadData(f"{path}: not a JSON file ({error})") from None
    if not isinstance(content, dict) or not {"version", "layers"} <= set(content):
        raise BadData(f"{path}: not a profile, which `latbench search` writes")
    if content.pop("version") != VERSION:
        raise BadData(f"{path}: another profile version than {VERSION}, which this latbench reads; search again")
    layers = content.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise BadData(f"{path}: a profile has layers, a JSON object with an entry for each")
    content["layers"] = {name: _record(LayerChoice, entry, f"{path}: layer {name}") for name, entry in layers.items()}
    for name, choice in content["layers"].items():
        try:
            parse(choice.pattern)
        except ValueError as error:
            raise BadData(f"{path}: layer {name}: {error}") from None
        if not 0 <= choice.sparsity < 1:
            raise BadData(f"{path}: layer {name}: a sparsity lies in [0, 1), not {choice.sparsity}")
    found = _record(Profile, content, str(path))
    for name in ("target", "dense_seconds", "predicted_seconds", "predicted_low", "predicted_high"):
        if getattr(found, name) <= 0:
            raise BadData(f"{path}: {name} must be above 0, not {getattr(found, name):g}")
    return found


def _record(kind: type[Record], content: Any, where: str) -> Record:
    """A dataclass of text, whole numbers and finite reals from a JSON object with just its fields.

    Those that have a default may be missing.
    """
    if not isinstance(content, dict):
        raise BadData(f"{where}: expected a JSON object, not {content!r}")
    kinds = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    needed = [field.name for field in fields(kind) if field.default is MISSING]  # type: ignore[arg-type]
    if missing := [name for name in needed if name not in content]:
        raise BadData(f"{where}: {', '.join(missing)} missing")
    if unknown := [name for name in content if name not in kinds]:
        raise BadData(f"{where}: unknown entry {', '.join(unknown)}")
    for name, value in content.items():
        wanted = str(kinds[name])
        if not (_is(wanted.removesuffix(" | None"), value) or (value is None and wanted.endswith(" | None"))):
            raise BadData(f"{where}: {name} must be of kind {wanted}, not {value!r}")
    return kind(**content)


def _is(kind: str, value: Any) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, float | int) and math.isfinite(value)
    return True  # the layers, which were checked one by one
