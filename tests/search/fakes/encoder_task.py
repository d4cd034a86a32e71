"""A task whose model is no chain, and inputs of it."""

from pathlib import Path

import torch

from search.task import Task, load_task

# Attention whose three layers read one value, a GELU that is a layer's own, keywords, and two results.
ENCODER_TASK = """
import torch
from torch import nn
from torch.nn import functional as F

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)
    def forward(self, ids, mask):
        x = self.words(ids)
        scores = self.query(x) @ self.key(x).transpose(1, 2) + (mask[:, None, :] - 1) * 1e4
        x = x + self.out(scores.softmax(-1) @ self.value(x))
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return {"tokens": x, "pooled": x.mean(1)}

def model():
    torch.manual_seed(0)
    return Encoder().eval()
def example():
    torch.manual_seed(1)
    mask = torch.ones(2, 12)
    mask[1, 9:] = 0
    return {"ids": torch.randint(50, (2, 12)), "mask": mask}
def calibration(): return [example()]
def loss(model, batch): return model(**batch)["pooled"].square().mean()
def score(model): return float(model(**example())["pooled"].mean())
"""
ENCODER_LAYERS = {
    "query": "vector:8",
    "key": "vector:8",
    "value": "unstructured",
    "up": "vector:16",
    "down": "nm:1:4",
}


def make_task(folder: Path, text: str) -> Task:
    (folder / "exported_task.py").write_text(text)
    return load_task(str(folder / "exported_task.py"))


def make_inputs(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch * tokens)
    mask = (torch.rand(batch, tokens, generator=generator) < 0.8).float()
    mask[:, 0] = 1
    return {"ids": torch.randint(50, (batch, tokens), generator=generator), "mask": mask}
