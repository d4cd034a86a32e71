"""A task for latbench: BERT-base (Devlin et al. 2019) with random weights, one sequence of 128 tokens, all present.

Layers are called as in huggingface's transformers.
"""

import torch
from random_weights import RandomWeights
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

LAYERS, WIDTH, HEADS, HIDDEN, WORDS, TOKENS = 12, 768, 12, 3072, 30522, 128


class SelfAttention(nn.Module):
    """Every token looks at all: (n, tokens, width) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Output(nn.Module):
    """A linear layer to `WIDTH` features, added to what the layer began with, and normalised."""

    def __init__(self, features: int):
        super().__init__()
        self.dense = nn.Linear(features, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return self.norm(x + self.dense(y))


class Layer(nn.Module):
    """Attention, then a hidden layer for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(), "output": Output(WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, HIDDEN)})
        self.output = Output(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention["output"](self.attention["self"](x), x)
        return self.output(gelu(self.intermediate["dense"](x)), x)


class Bert(nn.Module):
    """Tokens (n, t) to the last layer's features (n, t, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(LAYERS))})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.places.weight[: tokens.shape[1]])
        for layer in self.encoder["layer"]:
            x = layer(x)
        return x


def sentences(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(WORDS, (n, TOKENS), generator=generator)


task = RandomWeights("bert-base", Bert, sentences)
model, example, calibration, loss, score = task.model, task.example, task.calibration, task.loss, task.score
name, score_name = task.name, task.score_name
