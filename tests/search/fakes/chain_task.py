"""A task whose model is a chain that `latbench export` takes, and its pruned model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from made_profile import make_profile

from latbench.base.deployed_forms import PYTHON
from search.pruning.storage.model_folder import save_pruned
from search.task import Task
from sparse_kernels.formats.int8 import InputRange, Quantization, find_scales, round_to_steps
from sparse_kernels.patterns import parse
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

CHAIN_TASK = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(40, 64), nn.Linear(64, 40)
    def forward(self, x):
        return torch.relu(x + self.fc2(torch.relu(self.fc1(x))))

def model():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12, 40), Block(), nn.Linear(40, 3)).eval()
def example():
    torch.manual_seed(1)
    return (torch.randn(5, 3, 7, 6),)
def calibration(): return [example()]
def loss(model, batch): return model(*batch).square().mean()
def score(model): return float(model(*example()).mean())
"""


CHAIN_LAYERS = {"3": "vector:8", "4.fc1": "vector:16"}


def prune_chain(
    folder: Path, task: Task, precision: str = "float32", layers: Mapping[str, str] = CHAIN_LAYERS,
    form: str = PYTHON,
) -> Path:  # fmt: skip
    """Prune layers of the task by magnitude to these patterns, to be computed in this precision."""
    model, masks, choices, quantizations = task.model(), {}, {}, {}
    for layer, spec in layers.items():
        module = model.get_submodule(layer)
        matrix = weight_matrix(module)
        masks[layer] = torch.from_numpy(parse(spec).mask(matrix.square().numpy(), 0.75))
        kept = torch.where(masks[layer], matrix, 0.0)
        choices[layer] = (spec, 0.75)
        if precision == "int8":
            scales = find_scales(kept.numpy())
            kept = torch.from_numpy(round_to_steps(kept.numpy(), scales))
            quantizations[layer] = Quantization(scales, InputRange.covering(-4, 4))
        set_weight_matrix(module, kept)
    made = make_profile("chain", model, choices)
    rounded = {name: replace(each, precision=precision) for name, each in made.layers.items()}
    profile = replace(made, layers=rounded, precisions=",".join(dict.fromkeys(["float32", precision])), form=form)
    save_pruned(folder, model, masks, profile, {"task": "chain"}, quantizations)
    return folder
