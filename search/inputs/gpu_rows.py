"""Rows of a GPU's table as a search needs them: sparse layers on latbench's kernels, dense ones on torch.

In a pruned model on a GPU, a layer that stays dense is torch's own (`search.whole_model.convert_model`). So its time
is that of the library that torch calls, with activations as a model has them. A sweep of a GPU times layers in
float16. bfloat16 takes as long on tensor cores, so these times stand for both. Whole models are timed in their type.
"""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from latbench.base.engine_registry import CUPY, FLOAT16, TORCH_GPU
from latbench.errors import BadData
from latbench.tables.storage import Place
from latbench.tables.table import select_timed
from search.deployment import GPU_THREADS
from search.inputs.table_rows import EngineRows, read_sweep_rows
from search.problem.layers import DENSE
from sparse_kernels.shapes import Shape

MODEL_KERNELS = ("cublas", "cublaslt", "cudnn")
"""The libraries that torch may call for a dense layer. Others, and searched algorithms, are no part of a model."""

MODEL_LAYOUTS = ("token_major", "nchw")
"""How the activations of a dense layer lie in a pruned model."""


def read_gpu_rows(table: str | Place, shapes: Collection[Shape], device: str) -> EngineRows:
    """Return the timed rows of these shapes on a GPU, and a row of each kind of other shapes.

    Parameters
    ----------
    table
        A path or URI.
    shapes
        Shapes of layers.
    device
        The GPU's name in tables.

    Raises
    ------
    BadData
        As `latbench.tables.table.read_table`. Or the table has nothing of this GPU.
    """
    rows = read_sweep_rows(table, shapes, threads=GPU_THREADS, backends=[CUPY, TORCH_GPU], device=device)
    return select_gpu_rows(rows, device)


def select_gpu_rows(table: pd.DataFrame, device: str) -> EngineRows:
    """Return the timed rows of sweeps on a GPU that stand for layers of a model. Raises BadData if there are none."""
    rows = select_timed(table)
    rows = rows[(rows["purpose"] == "sweep") & (rows["threads"] == GPU_THREADS)]
    rows = rows[(rows["dtype_w"] == FLOAT16) & (rows["dtype_a"] == FLOAT16)]
    ours = (rows["backend"] == CUPY) & (rows["pattern"] != DENSE)
    torchs = (rows["backend"] == TORCH_GPU) & (rows["pattern"] == DENSE)
    torchs &= rows["kernel_requested"].isin(MODEL_KERNELS) & rows["layout"].isin(MODEL_LAYOUTS)
    found = rows[(ours | torchs) & (rows["device"] == device)]
    if found.empty:
        raise BadData(
            f"the table has no times of layers of a model on {device}: `latbench sweep --gpu {device} --workload "
            "FILE` measures the layers that `latbench trace TASK -o FILE` writes"
        )
    return EngineRows(found, CUPY, GPU_THREADS)
