"""Choose a sparsity for each layer of a text encoder, and time the result: python examples/prune_text_encoder.py.

The weights are random here. For a trained model, `latbench new my_task.py --template text` is the way to start.
"""

import statistics
from timeit import repeat, timeit

import numpy as np
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import latbench as lb
from sparse_kernels import pack, prepare
from sparse_kernels.prunable_layers import weight_matrix

PATTERN, SPARSITIES = lb.patterns.parse("vector:16"), (0.0, 0.5, 0.75, 0.9)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(x)))


torch.manual_seed(0)
dense = nn.Sequential(nn.Embedding(1000, 256), Block(256), Block(256)).eval().requires_grad_(False)
ids = torch.randint(1000, (8, 32))
layers = {name: layer for name, layer in dense.named_modules() if isinstance(layer, nn.Linear)}

# An option of a layer has a time, which is measured here, and an error: the share of the squared weights it drops.
masks, times, errors = [], {}, []
for layer in layers.values():
    weight = weight_matrix(layer).numpy()
    masks.append([PATTERN.mask(weight**2, sparsity) for sparsity in SPARSITIES])
    if weight.shape not in times:  # layers of one shape take the same time
        x = np.ones((ids.numel(), weight.shape[1]), np.float32)
        plans = [prepare(pack(weight, mask, PATTERN), "numba", "token_major", n=len(x)) for mask in masks[-1]]
        times[weight.shape] = [min(repeat(lambda plan=plan, x=x: plan(x), number=1, repeat=30)) for plan in plans]
    errors.append([(weight[~mask] ** 2).sum() / (weight**2).sum() for mask in masks[-1]])

# The least error in a time that is halfway between no zeros and the fastest options.
seconds = [times[weight_matrix(layer).shape] for layer in layers.values()]
chosen = lb.solve(seconds, errors, budget=sum(options[0] + min(options) for options in seconds) / 2)
for name, choice in zip(layers, chosen.choice, strict=True):
    print(f"{name:8} {SPARSITIES[choice]:4.0%} of the weights are zero")
choices = {name: lb.LayerPattern(PATTERN, masks[i][chosen.choice[i]]) for i, name in enumerate(layers)}
fast = lb.convert(dense, choices, (ids,))
with torch.inference_mode():  # in turns, so that both see the same machine
    pairs = [(timeit(lambda: dense(ids), number=1), timeit(lambda: fast(ids), number=1)) for _ in range(60)][10:]
print(f"the pruned model is {statistics.median(a / b for a, b in pairs):.2f} times as fast as dense torch")
