"""One-shot methods side by side: errors of the layers, seconds, and the score after the whole model is pruned.

    python tests/experiments/oneshot.py [TASK] -o FOLDER

prunes every layer of the task (ResNet20 on CIFAR-10, with LATBENCH_DATA, by default) to each option by each method,
puts each option's layers into the model, tunes its batch norms and scores it. Every finished line is appended to
FOLDER/results.jsonl, and is not computed again; the table is printed at the end. Seconds are the method's own, of all
layers; the time for H is given apart. A method's first option of a pattern pays for what later ones share.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from search.artifacts.layer_database import hash_model
from search.pruning.one_shot.adaprune import AdaPrune
from search.pruning.one_shot.batchnorm import tune_batchnorm
from search.pruning.one_shot.fill_database import ONE_SHOT_METHODS, hash_pruning_inputs
from search.pruning.one_shot.hessian import compute_input_hessians
from search.pruning.one_shot.one_shot_pruner import OneShotPruner, PrunedWeight
from search.pruning.one_shot.sparsegpt import SparseGPT
from search.task import Task, load_task
from search.traced_layers import list_prunable_layers
from sparse_kernels.patterns import Pattern, parse
from sparse_kernels.prunable_layers import refuse_layer, set_weight_matrix, weight_matrix

RESNET20 = Path(__file__).parents[1] / "tasks" / "resnet20.py"
OPTIONS = (
    ("unstructured", 0.75), ("unstructured", 0.9), ("nm:2:4", 0.5), ("vector:8", 0.75), ("vector:8", 0.9),
    ("shflbw:32", 0.75), ("block:8x4", 0.75),
)  # fmt: skip


class RefittedSparseGPT(SparseGPT):
    """SparseGPT's mask with the least squares of all its weights."""

    def prune(self, pattern: Pattern, sparsity: float) -> PrunedWeight:
        return AdaPrune(self.weight, self.hessian, iterations=math.inf).fit(super().prune(pattern, sparsity).mask)


ALL: dict[str, Callable[[Tensor, Tensor], OneShotPruner]] = {
    **ONE_SHOT_METHODS,
    "sparsegpt, refitted": RefittedSparseGPT,
}


def run(task: Task, path: Path) -> list[dict[str, Any]]:
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    missing = {
        method: [pair for pair in OPTIONS if not any((method, *pair) == key(row) for row in done)] for method in ALL
    }
    if not any(missing.values()):
        return done
    model, batches = task.model(), task.calibration()
    modules = dict(model.named_modules())
    shapes = list_prunable_layers(task, model)
    hessians, hessian_seconds = seen(task, model, list(shapes), path.with_name("hessians.pt"))
    dense_score = task.score(model)
    weights = {name: weight_matrix(modules[name]).contiguous() for name in hessians}
    for method, pairs in missing.items():
        started = time.perf_counter()
        problems = {name: ALL[method](weights[name], hessians[name]) for name in hessians} if pairs else {}
        setting_up = time.perf_counter() - started
        for spec, sparsity in pairs:
            pattern = parse(spec)
            pruned, sparse = {}, task.model()
            started = time.perf_counter()
            for name, problem in problems.items():
                if pattern.refuses(shapes[name]) is None and refuse_layer(modules[name]) is None:
                    pruned[name] = problem.prune(pattern, sparsity)
            seconds = time.perf_counter() - started
            for name, layer in pruned.items():
                set_weight_matrix(sparse.get_submodule(name), layer.weight)
            tune_batchnorm(task, sparse, batches)
            errors = [layer.error for layer in pruned.values()]
            kept = sum(int(layer.mask.sum()) for layer in pruned.values())
            row = {
                "task": task.name, "method": method, "pattern": spec, "sparsity": sparsity,
                "layers": len(pruned), "of_layers": len(problems),
                "reached": 1 - kept / sum(layer.mask.numel() for layer in pruned.values()),
                "mean_error": sum(errors) / len(errors), "largest_error": max(errors),
                "seconds": seconds, "setting_up_seconds": setting_up, "hessian_seconds": hessian_seconds,
                "dense_score": dense_score, "score": task.score(sparse),
            }  # fmt: skip
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            done.append(row)
            print(
                row["method"], spec, sparsity, f"error {row['mean_error']:.4f} score {row['score']:.3f}", flush=True
            )
    return done


def seen(task: Task, model: torch.nn.Module, layers: list[str], path: Path) -> tuple[dict[str, Tensor], float]:
    """Each layer's H and the seconds they took, kept for the next time."""
    of = [hash_model(model), hash_pruning_inputs(task)]
    if path.exists() and (known := torch.load(path))["of"] == of:
        return known["hessians"], known["seconds"]
    started = time.perf_counter()
    hessians = dict(compute_input_hessians(task, model, layers, task.calibration()))
    seconds = time.perf_counter() - started
    torch.save({"of": of, "hessians": hessians, "seconds": seconds}, path)
    return hessians, seconds


def key(row: dict[str, Any]) -> tuple[str, str, float]:
    return row["method"], row["pattern"], row["sparsity"]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: an option a line, mean layer error, score and seconds of each method."""
    by_key = {key(row): row for row in rows}
    lines = [
        "| option | " + " | ".join(ALL) + " |",
        "|---|" + "---|" * len(ALL),
    ]
    for spec, sparsity in OPTIONS:
        cells = []
        for method in ALL:
            row = by_key.get((method, spec, sparsity))
            cells.append(f"{row['mean_error']:.4f} / {row['score']:.3f} / {row['seconds']:.1f} s" if row else "")
        lines.append(f"| {spec} {sparsity:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default=str(RESNET20))
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    task = load_task(arguments.task)
    rows = run(task, arguments.output / "results.jsonl")
    first = rows[0]
    print(
        f"\n{task.name}: dense {task.score_name} {first['dense_score']:.3f}; H took {first['hessian_seconds']:.1f} s"
    )
    print("Mean |dy|^2/|y|^2 of a layer / score after batch-norm tuning / seconds for all layers:\n")
    print(table(rows))


if __name__ == "__main__":
    main()
