"""`lb.load`: one call from a folder to a model that runs, whether the folder is pruned or exported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from latbench.base.deployed_forms import OPENVINO, TORCH_PACKAGE, C
from latbench.errors import BadData, UsageError
from search.export.c_library.exported_model import ExportedModel
from search.export.export_manifest import is_exported, read_manifest
from search.export.openvino.openvino_model import OpenVINOModel
from search.export.torch_package.torch_model import TorchModel

if TYPE_CHECKING:
    from torch import Tensor, nn


@overload
def load_model(folder: str | Path, *, threads: int | None = None) -> ExportedModel | OpenVINOModel | TorchModel: ...


@overload
def load_model(
    folder: str | Path,
    model: nn.Module,
    example: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    threads: int | None = None,
) -> nn.Module: ...


def load_model(folder: str | Path, model: Any = None, example: Any = None, *, threads: int | None = None) -> Any:
    """Load a pruned or exported model, ready to be called.

    An exported model takes and gives NumPy arrays. It needs nothing but NumPy, and OpenVINO or torch if it was
    exported to that. A pruned one is the fast torch module that `latbench verify` timed. It is for inference on this
    machine's CPU, with float32 inputs. If it was searched for a GPU, it is there, in the type of its profile, and so
    must its inputs be. Call it as any module, in any thread, also without `torch.no_grad()`. A
    process without models on a GPU may fork. The given model stays as it is.

    Parameters
    ----------
    folder : str or Path
        Folder that `latbench prune` or `latbench export` wrote, such as `latbench-jobs/digits/pruned`.
    model : Module, optional
        Of a pruned folder: the dense model that was pruned, with any weights. A new object of the same class will do.
    example : Tensor, tuple or mapping of str, optional
        Of a pruned folder: inputs of a call, which are one tensor, the positional arguments, or the keywords. They
        prove that the fast module gives the results of the pruned one. Later inputs may have other sizes.
    threads : int, optional
        Threads of a call. By default one for an exported model. For a pruned one on a CPU they are those of the
        profile, for which the speedup was verified; they hold for torch and the kernels in this process.

    Returns
    -------
    Module, ExportedModel, OpenVINOModel or TorchModel
        The converted model in eval mode, without gradients; or a callable of arrays (batch, ...).

    Raises
    ------
    BadData
        The folder is no such model, is damaged, or was pruned from another model.
    UsageError
        The model cannot be called with the example, or cannot be converted, or is for DeepSparse.
    EnvironmentUnusable
        This machine cannot run the exported model, or has no GPU for a pruned one.

    Examples
    --------
    >>> import latbench as lb
    >>> fast = lb.load("latbench-jobs/my_task/pruned", MyNet(), torch.randn(1, 3, 32, 32))  # doctest: +SKIP
    >>> fast(images)  # doctest: +SKIP
    >>> lb.load("deploy", threads=2)(arrays)  # doctest: +SKIP
    """
    folder = Path(folder)
    if is_exported(folder):
        if model is not None or example is not None:
            raise UsageError(f"{folder} is an exported model, which is whole: load it by its folder alone")
        loaders = {OPENVINO: OpenVINOModel, TORCH_PACKAGE: TorchModel, C: ExportedModel}
        return loaders[read_manifest(folder)["form"]](folder, 1 if threads is None else threads)
    if model is None or example is None:
        if (folder / "profile.json").is_file():
            raise UsageError(f"{folder} is a pruned model: give the dense model and an example of its inputs, too")
        raise BadData(f"{folder} is no pruned model and no exported one")
    from search.whole_model.deployed_model import load_deployed

    return load_deployed(folder, model, example, threads=threads)
