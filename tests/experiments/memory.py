"""The most memory that one-shot pruning and saving take for 1 GB of weights, against 2x the weights + 1 GB.

    python tests/experiments/memory.py -o FOLDER [--method magnitude] [--pattern unstructured] [--sparsity 0.75]
                                       [--no-global]

A model of sixteen 4096x4096 layers with random weights (this file is its task) is pruned into a layer database, and
by `latbench prune --packed` into a folder, all in this process, whose largest resident size is printed at the end.
Exits with 1 if it is above the bound. FOLDER must be new, as what is there is not made again; 3 GB.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from latbench.cli.commands.prune import prune
from search.artifacts.layer_database import Database, hash_model
from search.artifacts.profile import LayerChoice, Profile
from search.problem.layers import Option
from search.pruning.one_shot.fill_database import ONE_SHOT_METHODS, fill_database, hash_pruning_inputs
from search.task import Task, load_task

WIDTH, LAYERS = 4096, 16


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(LAYERS):
        layer = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False)
        nn.init.normal_(layer.weight, std=(2 / WIDTH) ** 0.5, generator=generator)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers).eval()


def example() -> tuple[Tensor]:
    return (calibration()[0],)


def calibration() -> list[Tensor]:
    return list(torch.randn(2, 64, WIDTH, generator=torch.Generator().manual_seed(1)))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    y: Tensor = model(batch)
    return y.square().mean()


def score(model: nn.Module) -> float:
    return -float(loss(model, calibration()[0]))


def build(task: Task, folder: Path, method: str, pattern: str, sparsity: float) -> Path:
    """Prune every layer into `folder`/database; returns the profile that wants them all so."""
    net = task.model()
    digest = hash_model(net)
    names = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    database = Database(folder / "database", digest, hash_pruning_inputs(task, method))
    tell = lambda done, total: print(f"{done} of {total} layers pruned", flush=True)  # noqa: E731
    fill_database(task, net, {name: [Option(pattern, sparsity)] for name in names}, database, tell, method=method)
    profile = Profile(
        task=task.name, layers=dict.fromkeys(names, LayerChoice(pattern, sparsity, 1.0, 1.0, 1.0, 0.1)),
        backend="numba", threads=2, batch=64, device="", target=1.0, confidence=0.9, dense_engine="torch",
        dense_seconds=1.0, dense_seconds_low=1.0, dense_seconds_high=1.0, fixed_seconds=0.0, fixed_seconds_low=0.0,
        fixed_seconds_high=0.0, predicted_seconds=1.0, predicted_low=1.0, predicted_high=1.0, loss=1.0, error=1.0,
        bound=1.0, ceiling=None, additivity_before=0.0, additivity_after=0.0, strategy="uniform", seed=0,
        table_hash="", model_hash=digest, inputs="",
    )  # fmt: skip
    path = folder / "profile.json"
    profile.save(path)
    return path


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--method", choices=ONE_SHOT_METHODS, default="magnitude")
    parser.add_argument("--pattern", default="unstructured")
    parser.add_argument("--sparsity", type=float, default=0.75)
    parser.add_argument("--no-global", action="store_true", help="as of `latbench prune`")
    arguments = parser.parse_args()
    weights = 4 * LAYERS * WIDTH**2
    folder = arguments.output / f"{arguments.method}-{arguments.pattern.replace(':', '-')}-{arguments.sparsity:g}"
    task = load_task(str(Path(__file__)))
    started, before = time.perf_counter(), peak_bytes()
    profile = build(task, folder, arguments.method, arguments.pattern, arguments.sparsity)
    built, pruning = peak_bytes(), time.perf_counter()
    joint, command = not arguments.no_global, "prune --packed" + arguments.no_global * " --no-global"
    prune(task.reference, profile, folder / "database", folder / "pruned", joint=joint, packed=True)
    bound = 2 * weights + 10**9
    print(
        f"{weights / 1e9:.2f} GB of weights, {arguments.method} {arguments.pattern} {arguments.sparsity:g}: "
        f"peak {before / 1e9:.2f} GB with everything imported, {built / 1e9:.2f} GB after the database "
        f"({pruning - started:.0f} s), {peak_bytes() / 1e9:.2f} GB after {command} "
        f"({time.perf_counter() - pruning:.0f} s); the bound is 2x + 1 GB = {bound / 1e9:.2f} GB"
    )
    return int(peak_bytes() > bound)


if __name__ == "__main__":
    sys.exit(main())
