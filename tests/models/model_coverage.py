"""Trace, convert, prune, save and load small models of timm and transformers, and write a page of what is taken.

    make test-models                                            # writes docs/reference/models.md
    python tests/models/model_coverage.py MODEL ...             # checks these models, and prints their rows

Every model is converted twice: with pattern dense in all layers that it calls, and with vector:8 at 75% from what
`load_pruned` returns. Each converted model is compared with the masked dense one on three calls; conversion has seen
the first only.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from model_zoo import CALLS, MODELS, ZooModel
from multiply_adds import Product, count_multiply_adds
from torch import Tensor, nn

from latbench.workloads.workload import trace_model
from search.artifacts.layer_database import hash_model
from search.artifacts.profile import LayerChoice, Profile
from search.pruning.masks.apply_masks import apply_masks
from search.pruning.masks.layer_targets import LayerTarget, resolve_targets
from search.pruning.storage.model_folder import load_pruned, save_pruned
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.patterns import Dense, VectorWise
from sparse_kernels.prunable_layers import is_layer, survey_layers, weight_matrix

PATTERN, SPARSITY = VectorWise(8), 0.75
WRONG = 1e-3  # of the largest number of a result: roundings of float32 stay far below it
ENOUGH = 0.9  # of the multiply-adds
ACTIVATIONS = "products of two activations, as in attention"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"

_HEAD = """# Models of other libraries

Small models of timm and transformers with random weights, on the way from `survey_layers` through `trace_model`,
`convert`, `save_pruned` and `load_pruned`. Each is converted twice: with pattern `dense`, and with `{pattern}` at
{sparsity:.0%}.

- **taken**, **left out**: layers that are pruned and converted, and other modules with a matrix, such as embeddings.
- **multiply-adds**: the share of the model's matrix products and convolutions that is in the layers taken.
- **measured**: the share in layers that `latbench trace` lists too. It lists those that one forward pass calls once.
- **most of the rest**: the largest part of the other multiply-adds, and why it is left out.
- **difference**: the largest between the converted and the masked dense model, on three calls with other values,
  batch sizes, lengths and padding. It is relative to the largest number of each result.

{summary}

This page is generated: `make test-models`, with torch {torch}, timm {timm} and transformers {transformers}.

| library | model | class | taken | left out | multiply-adds | measured | most of the rest | difference |
|{rule}
"""

_NARROW = "Widths are far below those of real models, so attention has a larger share than usual."


@dataclass(frozen=True)
class Row:
    """What became of a model.

    kind: its class. taken, left_out: layers. share: of the multiply-adds, those in layers that are converted.
    measured: the same of layers that a sweep measures. reason: why most of the others are left out. difference: the
    largest, relative to the largest number of the same result. refusal: what conversion says if it refuses. fault:
    what went wrong.
    """

    entry: ZooModel
    kind: str = ""
    taken: int = 0
    left_out: int = 0
    share: float = 0.0
    measured: float = 0.0
    reason: str = ""
    difference: float = 0.0
    refusal: str = ""
    fault: str = ""


def check_model(entry: ZooModel, backend: str = "numba") -> Row:
    """Return what becomes of a model on the way from its survey to the loaded, converted one."""
    model = entry.build(0)
    args, keywords = entry.make_inputs(0)
    row, names = _describe(entry, model)
    dense = {name: LayerPattern(Dense()) for name in names}
    try:
        row = _compare(row, model, convert(model, dense, args, example_keywords=keywords, backend=backend), "dense")
        masked, masks = _prune(model, names)
        with tempfile.TemporaryDirectory() as folder:
            save_pruned(Path(folder) / "pruned", masked, masks, _make_profile(model, masks), {})
            loaded, choices = load_pruned(Path(folder) / "pruned", entry.build(1))
        converted = convert(loaded, choices, args, example_keywords=keywords, backend=backend)
    except ValueError as error:
        return replace(row, refusal=str(error))
    expected = masked.state_dict()
    if unlike := [name for name, tensor in loaded.state_dict().items() if not torch.equal(tensor, expected[name])]:
        return replace(row, fault=f"{unlike[0]} is not loaded as it was saved")
    if differ(_results(model, entry, 0), _results(masked, entry, 0)) < 10 * WRONG:
        return replace(row, fault="the results do not show whether the model is pruned")
    return _compare(row, masked, converted, str(PATTERN))


def _describe(entry: ZooModel, model: nn.Module) -> tuple[Row, list[str]]:
    """Return what the survey and the trace say, and the names of the layers that the model calls."""
    args, keywords = entry.make_inputs(0)
    survey = survey_layers(model)
    workload, skipped = trace_model(model, args, keywords=keywords)
    never = {name for name, reason in skipped if reason.startswith("never called")}
    names = [name for name in survey.taken if name not in never]
    counts = count_multiply_adds(model, args, keywords)
    measured = sum(counts.get(Product(layer.name, layer.name), 0.0) for layer in workload.layers)
    rest = explain_rest(model, counts)
    total, reason = sum(counts.values()), max(rest, key=lambda each: rest[each], default="")
    row = Row(
        entry, type(model).__name__, len(names), len(survey.left_out), 1 - sum(rest.values()) / total,
        measured / total, f"{rest[reason] / total:.1%} {reason}" if reason else "",
    )  # fmt: skip
    return row, names


def explain_rest(model: nn.Module, counts: Mapping[Product, float]) -> dict[str, float]:
    """Return the multiply-adds that are not in the layers taken, by the reason why."""
    survey, modules = survey_layers(model), dict(model.named_modules())
    rest: dict[str, float] = defaultdict(float)
    for (name, weight), count in counts.items():
        if name in survey.taken:
            continue
        if is_layer(modules[name]):
            reason = survey.left_out[name]
        elif weight is None:
            reason = ACTIVATIONS
        else:
            kind = type(modules[name]).__name__
            reason = survey.left_out.get(weight, f"weights of layers that {kind} reads and does not call")
        rest[reason] += count
    return dict(rest)


def _prune(model: nn.Module, names: list[str]) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a copy of the model with masks of PATTERN applied, and the masks."""
    masked = copy.deepcopy(model)
    targets = resolve_targets({name: LayerTarget(PATTERN, SPARSITY) for name in names}, masked)
    modules = dict(masked.named_modules())
    masks = {name: target.mask(weight_matrix(modules[name]).square()) for name, target in targets.items()}
    apply_masks(masked, masks)
    return masked, masks


def _make_profile(model: nn.Module, masks: Mapping[str, Tensor]) -> Profile:
    """Return a profile with these layers; its times are made up."""
    layers = {
        name: LayerChoice(str(PATTERN), float(1 - mask.double().mean()), 1.0, 1.0, 1.0, 0.0)
        for name, mask in masks.items()
    }
    return Profile(
        task="coverage", layers=layers, backend="numba", threads=1, batch=2, device="cpu", target=1.0, confidence=0.5,
        dense_engine="torch", dense_seconds=1.0, dense_seconds_low=1.0, dense_seconds_high=1.0, fixed_seconds=0.0,
        fixed_seconds_low=0.0, fixed_seconds_high=0.0, predicted_seconds=1.0, predicted_low=1.0, predicted_high=1.0,
        loss=0.0, error=0.0, bound=0.0, ceiling=None, additivity_before=0.0, additivity_after=0.0,
        strategy="coverage", seed=0, table_hash="", model_hash=hash_model(model), inputs="",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ comparing


def _compare(row: Row, oracle: nn.Module, converted: nn.Module, what: str) -> Row:
    """Return the row with the difference between two models on all calls, and a fault if it is too large."""
    for call, name in enumerate(CALLS):
        expected = _results(oracle, row.entry, call)
        try:
            difference = differ(expected, _results(converted, row.entry, call))
        except Exception as error:  # noqa: BLE001 - whatever a converted model raises is what is looked for
            return replace(row, fault=f"{what}, {name}: {type(error).__name__}: {error}")
        row = replace(row, difference=max(row.difference, difference))
        if not difference <= WRONG:
            row = replace(row, fault=row.fault or f"{what}, {name}: results differ by {difference:.1g}")
    return row


def _results(model: nn.Module, entry: ZooModel, call: int) -> list[Tensor]:
    args, keywords = entry.make_inputs(call)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(call)  # some draw what they mask
        return list(list_tensors(model(*args, **keywords), set()))


def list_tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors in a result, in order: of tuples, dictionaries, and objects such as caches."""
    if isinstance(value, Tensor):
        yield value
    elif id(value) in seen or isinstance(value, nn.Module | str | type):
        return
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from list_tensors(each, seen | {id(value)})
    elif isinstance(value, tuple | list):
        for each in value:
            yield from list_tensors(each, seen | {id(value)})
    elif hasattr(value, "__dict__"):
        yield from list_tensors(vars(value), seen | {id(value)})


def differ(expected: list[Tensor], found: list[Tensor]) -> float:
    """Return the largest difference between results, each relative to the largest number of the expected one."""
    if [each.shape for each in expected] != [each.shape for each in found]:
        return float("inf")
    largest = 0.0
    for a, b in zip(expected, found, strict=True):
        if not a.numel():
            continue
        a, b = a.double(), b.double()
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()) or not torch.equal(a[~finite], b[~finite]):
            return float("inf")
        scale = a[finite].abs().max().item() if finite.any() else 0.0
        distance = (a - b)[finite].abs().max().item() if finite.any() else 0.0
        largest = max(largest, distance / scale if scale else distance)
    return largest


# ------------------------------------------------------------------------------------------------ the page


def main() -> int:
    """Check models, and print their rows or write the page of all. Exit code 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of models; default: all, for the page")
    parser.add_argument("--backend", default="numba", help="backend of the sparse layers; default: numba")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    let_torchvision_load()
    rows = []
    for entry in MODELS:
        if options.models and entry.name not in options.models:
            continue
        started = time.perf_counter()
        rows.append(_check(entry, options.backend))
        print(f"{format_row(rows[-1])} {time.perf_counter() - started:.1f} s", flush=True)
    print(summarize(rows))
    if not options.models and options.backend == "numba":
        PAGE.write_text(format_page(rows), encoding="utf-8")
    return 1 if any(row.fault for row in rows) else 0


def _check(entry: ZooModel, backend: str) -> Row:
    """Return the row of a model; whatever it raises is a fault, and the next model has its turn."""
    try:
        return check_model(entry, backend)
    except Exception as error:  # noqa: BLE001 - tracebacks are what is looked for
        traceback.print_exc()
        return Row(entry, fault=f"{type(error).__name__}: {error}")


def let_torchvision_load() -> None:
    """Define the operators that torchvision needs at import: those of PyPI's are for torch with CUDA alone."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


_KEPT: list[Any] = []  # an operator lives as long as its library


def format_page(rows: Sequence[Row]) -> str:
    """Return the page of all rows as Markdown."""
    versions = {name: version(name).partition("+")[0] for name in ("torch", "timm", "transformers")}
    head = _HEAD.format(
        pattern=PATTERN,
        sparsity=SPARSITY,
        summary=textwrap.fill(f"{_NARROW} {summarize(rows)}", 118),
        rule="---|" * 9,
        **versions,
    )
    return head + "".join(f"{format_row(row)}\n" for row in rows)


def format_row(row: Row) -> str:
    """Return a row of the table."""
    outcome = row.fault or row.refusal or (f"{row.difference:.0e}" if row.difference else "0")
    cells = (
        row.entry.library, f"`{row.entry.name}`", f"`{row.kind}`", str(row.taken), str(row.left_out),
        f"{row.share:.0%}", f"{row.measured:.0%}", row.reason, outcome,
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def summarize(rows: Sequence[Row]) -> str:
    """Return a sentence with the counts."""
    converted = [row for row in rows if not (row.fault or row.refusal)]
    most = sum(row.share >= ENOUGH for row in converted)
    refused, wrong = sum(bool(row.refusal) for row in rows), sum(bool(row.fault) for row in rows)
    return (
        f"Of {len(rows)} models {len(converted)} are converted, {most} of them with {ENOUGH:.0%} of their "
        f"multiply-adds or more. {refused} are refused, and {wrong} give wrong results."
    )


if __name__ == "__main__":
    sys.exit(main())
