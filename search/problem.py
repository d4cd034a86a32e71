"""The problem to be solved: layers, their options with predicted seconds, and the seconds around them.

The seconds of a converted model are `fixed` plus the sum over its searched layers; the promise is that they are at
most dense / target. Every number is an interval, and it is the unfavourable ends that must keep the promise: the
upper ends of the layers and of `fixed` against the lower end of dense. Errors of several layers are not taken to
cancel, because what makes predictions wrong (a machine that runs slower than when the table was made) moves all of
them the same way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from latbench import devices, tables
from latbench.errors import BadData
from latbench.places import Place
from latbench.plan import describe, shape_columns
from search.solve import Floats, Infeasible, Solution, solve, sum_in_order
from sparse_kernels.patterns import BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorNM, VectorWise, parse
from sparse_kernels.shapes import Shape

Choice = tuple[int, ...]

DENSE = "dense"


class CostModel(Protocol):
    """What a problem asks of a cost model: X is a frame with the table's columns, the answers are seconds."""

    def predict(self, X: pd.DataFrame) -> Floats:
        """Seconds of every row."""

    def predict_interval(self, X: pd.DataFrame, coverage: float) -> tuple[Floats, Floats]:
        """Seconds (low, high) that hold a measurement with probability `coverage`."""


@dataclass(frozen=True)
class Interval:
    """A value and its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Option:
    """One way to hold a layer."""

    pattern: str
    sparsity: float


@dataclass(frozen=True)
class Layer:
    """A layer to choose for: (options,) arrays of predicted seconds, their intervals, and relative output errors."""

    name: str
    options: tuple[Option, ...]
    seconds: Floats
    low: Floats
    high: Floats
    errors: Floats

    def take(self, places: Sequence[int]) -> Layer:
        """The layer with only these options."""
        index = np.asarray(places, np.intp)
        return Layer(
            self.name, tuple(self.options[i] for i in places),
            self.seconds[index], self.low[index], self.high[index], self.errors[index],
        )  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Layers to choose for, what the converted model takes beyond them, and the fastest dense model, in seconds.

    `fixed` may be negative: layers can be faster inside the model than on their own.
    """

    layers: tuple[Layer, ...]
    fixed: Interval
    dense: Interval
    dense_engine: str

    def predict(self, choice: Choice) -> Interval:
        """Seconds of the converted model with these options."""
        value, low, high = (
            sum_in_order(seconds[j] for seconds, j in zip(arrays, choice, strict=True)) + fixed
            for fixed, arrays in (
                (self.fixed.value, [layer.seconds for layer in self.layers]),
                (self.fixed.low, [layer.low for layer in self.layers]),
                (self.fixed.high, self.safe_seconds),
            )
        )
        return Interval(value, low, high)

    def speedup(self, seconds: Interval) -> Interval:
        """How much faster than the dense model that is, both intervals at their worst and at their best."""
        return Interval(
            self.dense.value / seconds.value, self.dense.low / seconds.high, _ratio(self.dense.high, seconds.low)
        )

    @property
    def safe_seconds(self) -> list[Floats]:
        """The upper ends of the options' seconds, an array a layer: what is compared with the budget."""
        return [layer.high for layer in self.layers]

    @property
    def errors(self) -> list[Floats]:
        """The options' errors, an array a layer."""
        return [layer.errors for layer in self.layers]

    @property
    def ceiling(self) -> float | None:
        """The speedup if the searched layers took no time; None if nothing is left then."""
        return self.dense.value / self.fixed.value if self.fixed.value > 0 else None

    def budget(self, target: float) -> float:
        """The seconds that the layers may take together for a speedup of `target`. Raises Infeasible if too few.

        What `predict` and `speedup` say of a profile within it, rounding included, is `target` at least.
        """
        budget = self.dense.low / target - self.fixed.high
        while budget + self.fixed.high > 0 and self.dense.low / (budget + self.fixed.high) < target:
            budget = math.nextafter(budget, -math.inf)
        fastest = sum_in_order(layer.high.min() for layer in self.layers)
        if budget < fastest:
            raise Infeasible(budget, fastest, self._infeasible(target))
        return budget

    def _infeasible(self, target: float) -> str:
        fastest = self.predict(tuple(int(np.argmin(layer.high)) for layer in self.layers))
        best = self.speedup(fastest)
        sentence = (
            f"target {target:g}x is infeasible: the best is {best.value:.2f}x ({best.low:.2f}-{best.high:.2f}x)"
        )
        share = self.fixed.value / self.dense.value
        if target <= best.value:
            sentence += ", and the lower end must reach the target (a lower --risk narrows the interval)"
        if share > 0:
            sentence += f"; {share:.0%} of the time is in layers that cannot be pruned"
        return sentence + "."

    def solve(self, target: float) -> Solution:
        """The profile of least total error that keeps the promise. Raises Infeasible."""
        return solve(self.safe_seconds, self.errors, self.budget(target))

    def uniforms(self, target: float, pattern: str | None = None) -> list[Choice]:
        """For each pattern (or only `pattern`) the mildest sparsity that keeps the promise when all layers have it.

        The least error first; empty if no uniform profile is fast enough.
        """
        budget = self.budget(target)
        found: dict[str, tuple[float, Choice]] = {}
        for option in every_option(self.layers):
            if option.pattern in found or pattern not in (None, option.pattern):
                continue
            choice = uniform_choice(self.layers, option)
            if sum_in_order(t[j] for t, j in zip(self.safe_seconds, choice, strict=True)) <= budget:
                error = sum_in_order(e[j] for e, j in zip(self.errors, choice, strict=True))
                found[option.pattern] = error, choice
        return [choice for _, choice in sorted(found.values())]

    def uniform(self, target: float, pattern: str | None = None) -> Choice:
        """The best uniform profile: one pattern and sparsity everywhere, least total error. Raises Infeasible."""
        choices = self.uniforms(target, pattern)
        if not choices:
            raise Infeasible(
                self.budget(target), math.nan,
                f"no uniform {pattern or 'profile'} reaches {target:g}x; mixed profiles do",
            )  # fmt: skip
        return choices[0]

    def calibrated(self, choice: Choice, measured: Interval, dense: Interval, dense_engine: str) -> Problem:
        """The problem corrected by a measurement of the converted model with these options, and of the dense one.

        All layers are taken to be as much slower or faster than predicted as these were, so that the prediction for
        `choice` becomes `measured`. `measured` and `dense` come from the same rounds: the noise of their ratio is in
        `measured` alone.
        """
        fixed = min(self.fixed.value, measured.low / 2)
        layers = sum_in_order(layer.seconds[j] for layer, j in zip(self.layers, choice, strict=True))
        if not layers > 0:  # nothing to correct but what is around them
            return replace(
                self, fixed=measured, dense=Interval(dense.value, dense.value, dense.value), dense_engine=dense_engine
            )
        value, low, high = ((end - fixed) / layers for end in (measured.value, measured.low, measured.high))
        return Problem(
            tuple(
                replace(layer, seconds=layer.seconds * value, low=layer.seconds * low, high=layer.seconds * high)
                for layer in self.layers
            ),
            Interval(fixed, fixed, fixed),
            Interval(dense.value, dense.value, dense.value),
            dense_engine,
        )

    def certain(self) -> Problem:
        """The problem as if every number were exact: for a search whose result is measured anyway."""
        fixed, dense = self.fixed.value, self.dense.value
        return replace(
            self,
            layers=tuple(replace(layer, low=layer.seconds, high=layer.seconds) for layer in self.layers),
            fixed=Interval(fixed, fixed, fixed),
            dense=Interval(dense, dense, dense),
        )

    def scaled(self, factor: float) -> Problem:
        """The problem with all layers' seconds multiplied: what a layer takes in the model, not on its own."""
        return replace(self, layers=tuple(
            replace(layer, seconds=layer.seconds * factor, low=layer.low * factor, high=layer.high * factor)
            for layer in self.layers
        ))  # fmt: skip

    def without_hopeless(self) -> Problem:
        """Leave out what no efficient profile needs, before its errors are known.

        An option goes if another is no slower, drops no more, and has a pattern that is at least as free. Dense
        stays.
        """

        def hopeless(layer: Layer, j: int) -> bool:
            option = layer.options[j]
            return option.pattern != DENSE and any(
                other != option
                and other.sparsity <= option.sparsity
                and at_least_as_free(parse(other.pattern), parse(option.pattern))
                and layer.high[i] <= layer.high[j]
                for i, other in enumerate(layer.options)
            )

        return replace(self, layers=tuple(
            layer.take([j for j in range(len(layer.options)) if not hopeless(layer, j)]) for layer in self.layers
        ))  # fmt: skip

    def with_errors(self, errors: Mapping[str, Mapping[Option, float]]) -> Problem:
        """The same problem with the options' errors; dense options have none, whatever is given.

        Options whose error is not finite go: a layer whose outputs they ruin is not to be had.
        """

        def known(layer: Layer) -> Layer:
            found = np.array([0.0 if it.pattern == DENSE else errors[layer.name][it] for it in layer.options])
            return replace(layer, errors=found).take(np.flatnonzero(np.isfinite(found)).tolist())

        return replace(self, layers=tuple(map(known, self.layers)))


def at_least_as_free(a: Pattern, b: Pattern) -> bool:
    """Whether every mask of `b` is one of `a` too, so that `a` need not damage a layer more at the same sparsity.

    Dense, which drops nothing, is the freest.
    """
    if a == b or isinstance(a, Dense | Unstructured):
        return True
    if isinstance(a, VectorNM):
        return False
    if isinstance(a, BlockWise) and isinstance(b, BlockWise):
        return b.rows % a.rows == 0 and b.cols % a.cols == 0
    if isinstance(a, VectorWise | ShflBW):
        if isinstance(b, BlockWise):
            return b.rows % a.v == 0
        if isinstance(b, VectorWise) or (isinstance(a, ShflBW) and isinstance(b, ShflBW)):
            return b.v % a.v == 0
    return False


def every_option(layers: Sequence[Layer]) -> list[Option]:
    """The options that any layer has, by pattern and rising sparsity."""
    every = {option for layer in layers for option in layer.options}
    return sorted(every, key=lambda option: (option.pattern, option.sparsity))


def uniform_choice(layers: Sequence[Layer], option: Option) -> Choice:
    """This option in every layer that has it; elsewhere the fastest that drops no more and is at least as free.

    That is dense where nothing else is, and what took the option's place in `without_hopeless`.
    """

    def place(layer: Layer) -> int:
        if option in layer.options:
            return layer.options.index(option)
        free = [
            i
            for i, other in enumerate(layer.options)
            if other.sparsity <= option.sparsity and at_least_as_free(parse(other.pattern), parse(option.pattern))
        ]
        return min(free, key=lambda i: float(layer.high[i]))

    return tuple(map(place, layers))


# What a search needs of a table.
_COLUMNS = [*(field.name for field in tables.KEY), "point_id", "status", "started_at", "median_seconds"]


def swept_rows(table: str | Place, shapes: Collection[Shape], *, threads: int, backend: str) -> pd.DataFrame:
    """The rows of the table at a path or URI that `predicted_layers` looks at; all else is left unread as it comes.

    Memory grows with the rows of these shapes, not with the table's. Raises BadData as `tables.read` does.
    """
    sizes = {
        name: pa.array(sorted({shape_columns(shape)[name] for shape in shapes}), pa.int64())
        for name in ("m", "k", "n")
    }

    def wanted(piece: pa.Table) -> pa.Array:
        mask = pc.and_(pc.equal(piece["backend"], backend), pc.equal(piece["threads"], threads))
        for name, values in sizes.items():
            mask = pc.and_(mask, pc.is_in(piece[name], values))
        return mask

    return tables.select(table, _COLUMNS, wanted)


def in_network(table: str | Place, *, threads: int) -> pd.DataFrame:
    """The rows of the table at a path or URI that `network_rows` looks at, with their samples. Raises BadData."""

    def wanted(piece: pa.Table) -> pa.Array:
        ours = pc.and_(pc.equal(piece["backend"], "deepsparse"), pc.equal(piece["context"], "network"))
        return pc.and_(ours, pc.equal(piece["threads"], threads))

    return tables.select(table, tables.SCHEMA.names, wanted)


def predicted_layers(
    model: CostModel,
    table: pd.DataFrame,
    shapes: Mapping[str, Shape],
    *,
    threads: int,
    backend: str = "numba",
    patterns: Sequence[str] | None = None,
    coverage: float = 0.9,
) -> tuple[Layer, ...]:
    """Each layer with every pattern and sparsity that the table holds for its shape, dense first; errors are NaN yet.

    Rows of rounded weights are no options, because a profile does not ask for them. `patterns` narrows the rest.
    Raises BadData where a layer has no dense time on this backend with so many threads.
    """
    rows = tables.timed(table)
    rows = rows[(rows["purpose"] == "sweep") & (rows["backend"] == backend) & (rows["threads"] == threads)]
    rows = rows[rows["dtype_w"] == rows["dtype_a"]]
    known: dict[Shape, Layer] = {}
    for name, shape in shapes.items():
        if shape not in known:
            known[shape] = _predicted(
                model, _of_shape(rows, shape), name, shape, threads, backend, patterns, coverage
            )
    return tuple(replace(known[shape], name=name) for name, shape in shapes.items())


def network_rows(
    table: pd.DataFrame, network: str, shapes: Mapping[str, Shape], *, threads: int, batch: int
) -> pd.DataFrame:
    """The rows that `latbench layers` measured of a network on this machine: of the whole, and of these layers."""
    rows = tables.timed(table)
    rows = rows[(rows["context"] == "network") & (rows["purpose"] != "verify") & (rows["backend"] == "deepsparse")]
    rows = rows[(rows["threads"] == threads) & (rows["device"] == devices.cpu_device())]
    whole = rows[(rows["op"] == "model") & (rows["model"] == network) & (rows["batch"] == batch)]
    layers = [_of_shape(rows[rows["model"] == f"{network}:{name}"], shape) for name, shape in shapes.items()]
    return pd.concat([whole, *layers])


def measured_layers(
    table: pd.DataFrame, network: str, shapes: Mapping[str, Shape], *, threads: int, batch: int, coverage: float = 0.9
) -> tuple[Layer, ...]:
    """Each layer with every sparsity that the table holds for it inside the network, dense first; errors are NaN yet.

    Its seconds are measured, not predicted: a layer's place counts. Intervals hold one more run with probability
    `coverage`, from how far each run of any layer was from the median of its others; without width where nothing was
    run twice. Raises BadData where a layer has no dense time.
    """
    rows = network_rows(table, network, shapes, threads=threads, batch=batch)
    again = [
        samples[i] / np.median(np.delete(samples, i))
        for samples in rows.loc[(rows["op"] != "model") & (rows["sample_count"] > 1), "samples_seconds"]
        for i in range(len(samples))
    ]
    low, high = np.quantile(again, [(1 - coverage) / 2, (1 + coverage) / 2]) if again else (1.0, 1.0)
    low, high = min(low, 1.0), max(high, 1.0)
    found = []
    for name in shapes:
        own = rows[rows["model"] == f"{network}:{name}"]
        if DENSE not in set(own["pattern"]):
            raise BadData(
                f"the table holds no dense time of layer {name} inside {network} on deepsparse with {threads} "
                f"threads and batch {batch}: `latbench layers` measures it; a layer that DeepSparse never runs by "
                "itself must be one that the task excludes"
            )
        seconds = own["median_seconds"].to_numpy(float)
        options = tuple(
            Option(str(pattern), float(sparsity))
            for pattern, sparsity in zip(own["pattern"], own["sparsity_target"], strict=True)
        )
        found.append(Layer(name, options, seconds, seconds * low, seconds * high, np.full(len(options), np.nan)))
    return tuple(found)


def _of_shape(rows: pd.DataFrame, shape: Shape) -> pd.DataFrame:
    for column, value in shape_columns(shape).items():
        rows = rows[rows[column] == value]
    rows = rows.sort_values(["sparsity_target", "pattern"], kind="stable")
    return rows.drop_duplicates(["pattern", "sparsity_target"])


def _predicted(
    model: CostModel, rows: pd.DataFrame, name: str, shape: Shape, threads: int, backend: str,
    patterns: Sequence[str] | None, coverage: float,
) -> Layer:  # fmt: skip
    if patterns is not None:
        rows = rows[rows["pattern"].isin([DENSE, *patterns])]
    if DENSE not in set(rows["pattern"]):
        raise BadData(
            f"the table holds no valid dense time of layer {name} ({describe(shape)}) on {backend} with {threads} "
            "threads: sweep its workload on this machine (latbench trace, then latbench sweep --workload)"
        )
    low, high = model.predict_interval(rows, coverage)
    options = tuple(
        Option(str(pattern), float(sparsity))
        for pattern, sparsity in zip(rows["pattern"], rows["sparsity_target"], strict=True)
    )
    return Layer(name, options, np.asarray(model.predict(rows)), low, high, np.full(len(options), np.nan))


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else math.inf
