"""Workloads: named lists of layer shapes, read from YAML or traced from a torch model.

    name: bert-base
    source: "Devlin et al. 2019, table ...; huggingface bert-base-uncased config"
    layers:
      - {name: encoder.0.query, op: linear, m: 768, k: 768, n: 128, count: 12}
      - {name: layer1.0.conv2, op: conv2d, batch: 1, c_in: 64, h: 56, w: 56, c_out: 64, kh: 3, kw: 3,
         stride: [1, 1], padding: [1, 1], dilation: [1, 1], count: 3}

The bundled ones lie in `datasets/workloads` (in a wheel: `latbench/datasets/workloads`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sparse_kernels.shapes import Shape


@dataclass(frozen=True)
class Layer:
    """One layer of a workload; `count` equal layers are timed once."""

    name: str
    shape: Shape
    count: int = 1


@dataclass(frozen=True)
class Workload:
    """The layers that a model spends its time in. `source` names where the shapes come from."""

    name: str
    source: str
    layers: tuple[Layer, ...]
