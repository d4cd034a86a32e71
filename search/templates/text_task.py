"""A task for latbench: a small transformer encoder that finds the topic of a text. It runs as it stands.

Put your own model and data where REPLACE is written, then try `latbench check` on this file.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

score_name = "accuracy"  # REPLACE: the name of what score() returns
excluded = ("head",)  # REPLACE: layers that stay dense, by name (blocks.0.* works)
limits: dict[str, list[list[str]]] = {}  # or {"tied": [["blocks.*.up"]]}, for layers that get the same pattern

WEIGHTS = Path(__file__).with_suffix(".pt")  # REPLACE: the file with your trained weights
Batch = tuple[dict[str, Tensor], Tensor]  # REPLACE: what your loss() reads


class EncoderBlock(nn.Module):  # REPLACE: your architecture; nn.Linear can be pruned, nn.MultiheadAttention cannot
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, mask[:, None, None]).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(200, 128), nn.Linear(128, 4)
        self.blocks = nn.ModuleList(EncoderBlock(128) for _ in range(2))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def draw_batch(seed: int, texts: int = 32) -> Batch:  # REPLACE: your texts as token ids, padded to one length
    generator = torch.Generator().manual_seed(seed)
    ids, topics = torch.randint(200, (texts, 16), generator=generator), torch.arange(texts) % 4
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.4, ids // 4 * 4 + topics[:, None], ids)
    return {"ids": ids, "mask": torch.arange(16) < torch.randint(6, 17, (texts, 1), generator=generator)}, topics


def model() -> nn.Module:
    """Return a new model with its trained weights. They must be the same in each call and each process."""
    torch.manual_seed(0)
    network = Encoder()
    if not WEIGHTS.exists():
        train(network)  # REPLACE: remove these two lines and train(), because your weights are trained
    network.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    return network.eval()


def example() -> dict[str, Tensor]:
    """Return the keywords of the call that is timed. The first dimension is the batch."""
    return draw_batch(0, 64)[0]  # REPLACE: inputs of the size that you deploy with


def calibration() -> list[Batch]:
    """Return some batches of training data, the same in each call. A few hundred samples are enough."""
    return [draw_batch(seed) for seed in range(1, 17)]  # REPLACE: your batches


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of one batch, a scalar that has gradients."""
    return cross_entropy(model(**batch[0]), batch[1])  # REPLACE: the loss that your model was trained with


def score(model: nn.Module) -> float:
    """Return the quality on data that was not used for training. A higher score is better."""
    inputs, topics = draw_batch(1 << 40, 500)
    return float((model(**inputs).argmax(1) == topics).float().mean())  # REPLACE: your metric


def train_batches(rng: np.random.Generator) -> Iterator[Batch]:
    """Yield training batches for `latbench prune --recipe`. Remove this function if you do not fine-tune."""
    while True:  # REPLACE: your training data, drawn with rng
        yield draw_batch(int(rng.integers(1 << 30)))


def train(network: nn.Module) -> None:
    """Train the network in a few seconds, and save its weights: every later process reads them."""
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    for _, batch in zip(range(120), train_batches(np.random.default_rng(0)), strict=False):
        optimizer.zero_grad()
        loss(network, batch).backward()
        optimizer.step()
    torch.save(network.state_dict(), WEIGHTS)
