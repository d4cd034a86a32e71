"""A profile: the option of every layer, its predicted seconds, and its origin.

A profile is stored as JSON, version 3, and read strictly, so that `prune` and `verify` use what `latbench search`
promised.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from latbench.base.deployed_forms import FORM_PHRASES, PYTHON
from latbench.base.engine_registry import FLOAT32, PRECISIONS, runs_on_gpu
from latbench.base.files import write_text_atomically
from latbench.errors import BadData
from latbench.importers.text_formats import write_spdy_profile
from search.deployment import Deployment
from search.problem.layers import Option
from sparse_kernels.patterns import parse

_LOG = logging.getLogger(__name__)

VERSION = 3

Record = TypeVar("Record")


@dataclass(frozen=True)
class LayerChoice:
    """The option of one layer, its predicted seconds with their interval, and its relative output error."""

    pattern: str
    sparsity: float
    seconds: float
    seconds_low: float
    seconds_high: float
    error: float
    precision: str = FLOAT32

    @property
    def option(self) -> Option:
        """The option alone."""
        return Option(self.pattern, self.sparsity, self.precision)


@dataclass(frozen=True)
class Weights:
    """Bytes of all weights of a model: dense, pruned and packed, and the limit that they had to keep."""

    dense: float
    packed: float
    most: float

    def sentence(self) -> str:
        """Return these bytes as a sentence."""
        return f"all weights take {self.packed:,.0f} of {self.most:,.0f} bytes allowed, {self.dense:,.0f} dense"


@dataclass(frozen=True)
class Profile:
    """The option of every searched layer, and the promise: `predicted_seconds` <= `dense_seconds` / `target`.

    Seconds belong to one call of the whole model on the task's example inputs. Names that end in _low and _high are
    the ends of an interval.

    Attributes
    ----------
    task
        Name of the task.
    layers
        Layer name -> its option.
    backend, threads, batch, device
        Where the pruned model runs: backend, threads, size of the batch, and name of the CPU or GPU.
    target
        The speedup that was asked for.
    confidence
        Probability that a verification confirms the promise.
    dense_engine, dense_seconds
        The fastest dense engine, and its seconds.
    fixed_seconds
        Seconds of the converted model beyond the searched layers.
    predicted_seconds
        Seconds of the pruned model.
    loss
        Mean loss on the calibration data.
    error
        Sum of the layers' errors.
    bound
        No profile within the budget has a sum below this.
    ceiling
        The speedup if the searched layers took no time; None if it is unbounded.
    additivity_before, additivity_after
        How far sums of layers were from whole models, as a share (median): before and after the search's calibration.
    strategy, seed
        How the profile was found.
    table_hash, model_hash, inputs
        Hashes of the table, of the model's weights, and of everything that the search depended on.
    most_bytes
        Limit of the bytes of all weights of the pruned model; None if there was none. The next two are None as well.
    weight_bytes
        Bytes of all weights of the pruned model, with searched layers as they are packed.
    dense_bytes
        Bytes of all weights of the dense model.
    precisions
        Types that a layer could have, with commas between them. `dense_engine` is the fastest of those that round no
        further than these. On a GPU the type of the whole model; its layers then count as unrounded (float32).
    form
        How the pruned model is deployed, one of `latbench.base.deployed_forms.FORM_PHRASES`. The promise is measured
        in this form.
    over
        If not empty, `dense_engine` is the fastest of those that round no further than this type.
    """

    task: str
    layers: Mapping[str, LayerChoice]
    backend: str
    threads: int
    batch: int
    device: str
    target: float
    confidence: float
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
    precisions: str = FLOAT32
    form: str = PYTHON
    over: str = ""

    @property
    def options(self) -> dict[str, Option]:
        """The option of every layer."""
        return {name: choice.option for name, choice in self.layers.items()}

    @property
    def deployment(self) -> Deployment:
        """How the pruned model runs."""
        gpu = self.device if runs_on_gpu(self.backend) else ""
        return Deployment(self.threads, self.backend, tuple(self.precisions.split(",")), self.form, gpu, self.over)

    @property
    def weights(self) -> Weights | None:
        """Bytes of all weights, if they were a second budget."""
        if self.dense_bytes is None or self.weight_bytes is None or self.most_bytes is None:
            return None
        return Weights(self.dense_bytes, self.weight_bytes, self.most_bytes)

    @property
    def speedup(self) -> tuple[float, float, float]:
        """The predicted speedup over the fastest dense engine, and its interval.

        The interval of the predicted seconds contains the noise of their ratio to `dense_seconds`.
        """
        ends = (self.predicted_seconds, self.predicted_high, self.predicted_low)
        value, low, high = (self.dense_seconds / seconds for seconds in ends)
        return value, low, high

    @property
    def aimed(self) -> float:
        """The speedup that had to be measured so that a verification keeps the target with this confidence."""
        value, low, _ = self.speedup
        return self.target * value / low

    def save(self, path: Path) -> None:
        """Write the profile to `path` as JSON, whole or not at all."""
        content = {"version": VERSION, **asdict(self)}
        write_text_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def save_spdy(self, path: Path) -> None:
        """Write each layer's sparsity alone, in SPDY's text format."""
        write_spdy_profile({name: choice.sparsity for name, choice in self.layers.items()}, path)


def read_profile(path: Path) -> Profile:
    """Return the profile at `path`.

    Parameters
    ----------
    path
        A file that `Profile.save` wrote.

    Raises
    ------
    BadData
        The file is missing, is no profile, has another version, or lacks an entry.
    """
    _LOG.info(f"reading {path}")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadData(f"{path} does not exist: `latbench search` writes profiles") from None
    except (OSError, ValueError) as error:
        raise BadData(f"{path} is not a JSON file ({error})") from None
    if not isinstance(content, dict) or not {"version", "layers"} <= set(content):
        raise BadData(f"{path} is not a profile, which `latbench search` writes")
    if content.pop("version") != VERSION:
        raise BadData(f"{path} has another profile version than {VERSION}, which this latbench reads; search again")
    layers = content.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise BadData(f"{path}: the entry `layers` must be a JSON object with an entry for each layer")
    content["layers"] = {name: _record(LayerChoice, entry, f"{path}: layer {name}") for name, entry in layers.items()}
    for name, choice in content["layers"].items():
        try:
            parse(choice.pattern)
        except ValueError as error:
            raise BadData(f"{path}: layer {name}: {error}") from None
        if not 0 <= choice.sparsity < 1:
            raise BadData(f"{path}: layer {name}: a sparsity must lie in [0, 1), not {choice.sparsity}")
        if choice.precision not in PRECISIONS:
            raise BadData(f"{path}: layer {name}: unknown precision {choice.precision}")
    found = _record(Profile, content, str(path))
    if found.form not in FORM_PHRASES:
        raise BadData(f"{path}: unknown form {found.form}")
    if found.over not in ("", *PRECISIONS):
        raise BadData(f"{path}: unknown type {found.over} of the dense engines")
    for name in ("target", "dense_seconds", "predicted_seconds", "predicted_low", "predicted_high"):
        if getattr(found, name) <= 0:
            raise BadData(f"{path}: {name} must be above 0, not {getattr(found, name):g}")
    return found


def _record(kind: type[Record], content: Any, where: str) -> Record:
    """Return a dataclass of texts, integers and finite numbers from a JSON object with exactly its fields.

    Fields with a default may be missing.
    """
    if not isinstance(content, dict):
        raise BadData(f"{where}: expected a JSON object, not {content!r}")
    kinds = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    needed = [field.name for field in fields(kind) if field.default is MISSING]  # type: ignore[arg-type]
    if missing := [name for name in needed if name not in content]:
        raise BadData(f"{where}: missing entry {', '.join(missing)}")
    if unknown := [name for name in content if name not in kinds]:
        raise BadData(f"{where}: unknown entry {', '.join(unknown)}")
    for name, value in content.items():
        wanted = str(kinds[name])
        if not (_has_type(wanted.removesuffix(" | None"), value) or (value is None and wanted.endswith(" | None"))):
            raise BadData(f"{where}: {name} must be of kind {wanted}, not {value!r}")
    return kind(**content)


def _has_type(kind: str, value: Any) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, float | int) and math.isfinite(value)
    return True  # the layers, which are checked one by one
