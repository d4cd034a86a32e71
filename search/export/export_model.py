"""Export a pruned model to the form of this name."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from latbench.base.deployed_forms import EXPORTED_FORMS, OPENVINO, TORCH_PACKAGE, C
from latbench.errors import EnvironmentUnusable, UsageError
from search.export.export_steps import ExportRequest, check_for_compiler, choose_levels
from search.export.model_to_export import ModelToExport
from search.task import Task


def check_form(form: str) -> None:
    """Raise UsageError for an unknown form, EnvironmentUnusable for one that needs what is not installed."""
    if form not in EXPORTED_FORMS:
        raise UsageError(f"unknown form {form!r}: known are {', '.join(EXPORTED_FORMS)}")
    if form == OPENVINO and find_spec("openvino") is None:
        raise EnvironmentUnusable("the form openvino needs OpenVINO: pip install openvino, or take the form c")


def check_can_export(task: Task, form: str) -> None:
    """Refuse what no export to the form can do, in seconds. Raises as `export_model` does."""
    check_form(form)
    choose_levels(ExportRequest(only_timed=True))
    if form == C:
        from search.export.c_library.c_export import check_chain

        check_for_compiler()
        check_chain(task)
    elif form == TORCH_PACKAGE:
        from search.export.torch_package.torch_export import check_torch

        check_torch()
    else:
        from search.export.openvino.openvino_export import check_openvino

        check_openvino()


def export_model(
    form: str,
    read_model: Callable[[], ModelToExport],
    output: Path,
    request: ExportRequest,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Export a pruned model, check that it computes the same, and return its manifest.

    Parameters
    ----------
    form : str
        One of `latbench.base.deployed_forms.EXPORTED_FORMS`.
    read_model : callable
        Returns the model. It is called once the machine, the request and the output are known to do.
    output : Path
        Folder to write: absent, empty, or an earlier export.
    request : ExportRequest
        CPU levels, batches and threads.
    progress : callable
        Told what is done next.

    Returns
    -------
    dict of str to object
        The manifest.

    Raises
    ------
    UsageError
        The form does not know what the model computes, or the request cannot be met.
    EnvironmentUnusable
        There is no compiler, or this machine lacks the form's library, a CPU level, memory or disk.
    BadData
        The pruned folder is damaged or of another model.
    RuntimeError
        The exported model does not run, or gives other results: a fault of latbench.
    """
    check_form(form)
    if form == C:
        from search.export.c_library.c_export import export_to_c

        return export_to_c(read_model, output, request, progress)
    if form == TORCH_PACKAGE:
        from search.export.torch_package.torch_export import export_to_torch

        return export_to_torch(read_model, output, request, progress)
    from search.export.openvino.openvino_export import export_to_openvino

    return export_to_openvino(read_model, output, request, progress)
