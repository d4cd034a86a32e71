"""Prune a small CNN, convert it to sparse kernels, and time it against dense torch: python examples/prune_cnn.py."""

import copy
import statistics
from timeit import timeit

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import latbench as lb
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

PATTERN, SPARSITY = (
    lb.patterns.parse("vector:16"),
    0.9,
)  # each group of 16 output channels keeps a tenth of its inputs
data = load_digits()
images, labels = torch.tensor(data.images / 16, dtype=torch.float32)[:, None], torch.tensor(data.target)


def train(model, steps, masks):  # weights outside of the masks stay zero
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.train().parameters(), 2e-3)
    for _ in range(steps):
        chosen = torch.randint(1300, (32,))
        optimizer.zero_grad()
        cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        for layer, mask in masks.items():
            set_weight_matrix(layer, weight_matrix(layer) * torch.from_numpy(mask))
    return model.eval()


@torch.inference_mode()
def score(model):
    return float((model(images[1300:]).argmax(1) == labels[1300:]).float().mean())


parts = []
for c_in, c_out, stride in ((1, 32, 1), (32, 64, 2), (64, 128, 1), (128, 128, 1)):
    parts += [nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]
dense = train(nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)), 80, {})

# Keep the largest weights of the three large convolutions, then train on to recover.
pruned = copy.deepcopy(dense)
masks = {name: PATTERN.mask(weight_matrix(pruned[int(name)]).numpy() ** 2, SPARSITY) for name in ("3", "6", "9")}
train(pruned, 40, {pruned[int(name)]: mask for name, mask in masks.items()})

# The conversion proves on the example that the fast model gives the same results as the pruned one.
x = images[-16:]
fast = lb.convert(pruned, {name: lb.LayerPattern(PATTERN, mask) for name, mask in masks.items()}, (x,))
with torch.inference_mode():  # in turns, so that both see the same machine
    pairs = [(timeit(lambda: dense(x), number=1), timeit(lambda: fast(x), number=1)) for _ in range(100)][10:]
ratio = statistics.median(slow / quick for slow, quick in pairs)
print(f"accuracy: {score(dense):.3f} dense, {score(fast):.3f} pruned")
print(f"the pruned model is {ratio:.2f} times as fast as dense torch")
