"""The machines that kernels are compiled for."""

from __future__ import annotations

MULTIPROCESSORS = {"sm_70": 80, "sm_75": 40, "sm_80": 108, "sm_86": 82, "sm_89": 128, "sm_90a": 132, "sm_100": 148}
"""Of the usual machine of each architecture, which blocks of a launch should keep busy: V100, T4, A100, RTX 3090 (an
A10 has 72), RTX 4090 (L40 142), H100 SXM and H200 (H100 PCIe 114), B200."""

ARCHITECTURES = tuple(MULTIPROCESSORS)
