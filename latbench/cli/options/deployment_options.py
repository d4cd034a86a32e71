"""The options that say how a pruned model runs, as a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from latbench.base.engine_registry import CUPY, FLOAT16, MODEL_TYPES_ON_GPU, NUMBA, runs_on_gpu
from latbench.cli.options.option_texts import check_deployed_form, parse_precisions, parse_rival_type
from latbench.errors import UsageError

if TYPE_CHECKING:
    from search.deployment import Deployment
    from search.task import Task


def choose_deployment(
    task: Task,
    backend: str | None,
    *,
    threads: int | None,
    precisions: Sequence[str] | None,
    form: str,
    gpu: str | None,
    over: str | None,
) -> Deployment:
    """Return how a model runs.

    Parameters
    ----------
    task
        The task, which may name its device and type.
    backend
        The engine of the pruned model; None for that of the task's device.
    threads, precisions, form, gpu, over
        The options; None for those that are not given.

    Raises
    ------
    UsageError
        The options do not go together, or there are too few processors.
    """
    from latbench.machines.processors import select_threads
    from search.deployment import GPU_THREADS, Deployment

    backend = backend or (NUMBA if task.deploy_device == "cpu" else CUPY)
    check_deployed_form(form, backend)
    if not runs_on_gpu(backend):
        if gpu is not None:
            raise UsageError(f"--gpu {gpu} does not go with {backend}, which runs on a CPU: add --backend {CUPY}")
        allowed, rivals = parse_precisions(precisions), parse_rival_type(over)
        return Deployment(select_threads(threads), backend, allowed, form, over=rivals)
    if over is not None:
        raise UsageError(f"--over does not go with {backend}: on a GPU all engines run the model in one type")
    if threads is not None:
        raise UsageError(f"--threads does not go with {backend}, which runs on a GPU")
    return Deployment(GPU_THREADS, backend, (_choose_type(task, precisions),), form, gpu or "")


def _choose_type(task: Task, precisions: Sequence[str] | None) -> str:
    """Return the type of the whole model on a GPU: the given one, that of the task, or float16."""
    wanted = list(precisions or ()) or [task.deploy_dtype or FLOAT16]
    if len(wanted) > 1 or wanted[0] not in MODEL_TYPES_ON_GPU:
        raise UsageError(
            f"--precision {','.join(wanted)} does not go with {CUPY}: on a GPU the whole model has one type, "
            f"{' or '.join(MODEL_TYPES_ON_GPU)}"
        )
    return wanted[0]
