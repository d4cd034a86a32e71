"""How many threads kernels and torch use, as their users set it."""

import os
import subprocess
import sys
from pathlib import Path

# Two threads for Numba, whatever the machine has; torch's user asks for one before the first kernel.
CONVERT = """
import torch
torch.set_num_threads(1)
import numba
from torch import nn
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.patterns import parse

dense = nn.Sequential(nn.Linear(64, 32))
pattern = parse("vector:16")
mask = pattern.mask(dense[0].weight.detach().numpy() ** 2, sparsity=0.5)
model = convert(dense, {"0": LayerPattern(pattern, mask)}, (torch.randn(8, 64),))
model(torch.randn(8, 64))
print(torch.get_num_threads(), numba.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
"""


def test_threads_that_were_set_before_the_first_kernel_stay() -> None:
    """Numba, when it starts, sets the number of all its threads for torch, too, where both use one OpenMP."""
    environment = {**os.environ, "NUMBA_NUM_THREADS": "2"}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", CONVERT],
        cwd=Path(__file__).parents[4], env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "1", "2"]
