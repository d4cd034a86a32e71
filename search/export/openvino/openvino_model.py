"""A model exported to OpenVINO, in Python: a callable of NumPy arrays, without torch or Numba."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
from numpy.typing import ArrayLike, NDArray

from latbench.base.deployed_forms import OPENVINO
from latbench.base.quiet_openvino import import_openvino
from latbench.errors import EnvironmentUnusable, UsageError
from search.export.array_model import ArrayInput, ArrayModel
from search.export.export_manifest import GRAPH, GRAPH_WEIGHTS, LIBRARY, PACKED, check_files, read_manifest
from search.export.fork_gate import ForkGate, wait_until_library_threads_sleep


def name_release() -> str:
    """Return the release of the installed OpenVINO, such as 2026.4.1. Raises EnvironmentUnusable if there is none."""
    version: str = _import_openvino().__version__
    return version.partition("-")[0]


def _import_openvino() -> Any:
    try:
        return import_openvino()
    except ImportError as error:
        raise EnvironmentUnusable(f"OpenVINO is not installed: pip install openvino ({error})") from error


_loaded: WeakSet[OpenVINOModel] = WeakSet()


def _abandon_models() -> None:
    """Let the models of a forked process compile anew, and never free what they had.

    OpenVINO's threads are not copied by a fork, and freeing what had them would wait for them.
    """
    for model in [*_loaded]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(model._compiled))
        model._compiled, model._lock = {}, Lock()


_gate = ForkGate(wait_until_library_threads_sleep, _abandon_models)


class _Compiled(NamedTuple):
    """A compiled model, and its requests that nobody uses now."""

    model: Any
    idle: SimpleQueue[Any]


Shapes = tuple[tuple[int, ...], ...]


class OpenVINOModel(ArrayModel):
    """A model that `latbench export --to openvino` wrote: call it with inputs, get results.

    Calls of the exported sizes run a model that is compiled for them. OpenVINO takes a tenth to a quarter longer
    where a side is free, so one for all sizes is compiled only when other inputs come.

    Threads of a process may call it at the same time. A process that forks after it was loaded compiles it again at
    its first call. A pickle holds its folder, so a spawned process does so, too.

    Parameters
    ----------
    folder : Path
        Folder of the exported model.
    threads : int
        Threads of a call.
    checked : bool
        Whether the files must be those of the manifest.

    Raises
    ------
    BadData
        A file is missing or damaged, or does not belong to the others.
    EnvironmentUnusable
        This machine lacks each CPU level of the model, the C library that it needs, or the OpenVINO that it is for.
    """

    def __init__(self, folder: Path, threads: int = 1, *, checked: bool = True) -> None:
        super().__init__(folder, threads)
        manifest = read_manifest(self.folder)
        if checked:
            check_files(self.folder, manifest, [LIBRARY, PACKED, GRAPH, GRAPH_WEIGHTS])
            if (here := name_release()) != manifest[OPENVINO]:
                raise EnvironmentUnusable(
                    f"{folder} was exported for OpenVINO {manifest[OPENVINO]}, and here is {here}: install that one, "
                    "or export the model again"
                )
        self._sizes = list_exported_sizes(manifest)
        self._compiled: dict[Shapes | None, _Compiled] = {}
        self._lock = Lock()
        with _gate:
            self._get_compiled(self._sizes[0])
        _loaded.add(self)

    def _get_compiled(self, shapes: Shapes) -> _Compiled:
        """Return the model for inputs of these shapes; compile it unless this process has done so."""
        key = shapes if shapes in self._sizes else None
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = _Compiled(self._compile(key), SimpleQueue())
            return self._compiled[key]

    def _compile(self, shapes: Shapes | None) -> Any:
        openvino = _import_openvino()
        core = openvino.Core()
        settings = {
            "INFERENCE_NUM_THREADS": self.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }  # fmt: skip
        try:
            core.add_extension(str(self.folder / LIBRARY))
            model = core.read_model(self.folder / GRAPH)
            self._inputs = [_read_port(each) for each in model.inputs]
            if shapes is not None:
                model.reshape({i: openvino.PartialShape(list(shape)) for i, shape in enumerate(shapes)})
            return core.compile_model(model, "CPU", settings)
        except RuntimeError as error:
            said = _shorten(error)
            if "unsupported opset" in said:  # the system's loader gives the library that lay at this path before
                said = "this process has loaded an earlier export from there: load the new one in a new process"
            raise EnvironmentUnusable(f"{self.folder} cannot be loaded: {said}") from error

    def run(self, *inputs: ArrayLike) -> list[NDArray[Any]]:
        """Return all results for these inputs, in the model's order. Raises UsageError for inputs that do not fit."""
        with _gate:
            return self._run(inputs)

    def _run(self, inputs: Sequence[ArrayLike]) -> list[NDArray[Any]]:
        arrays = self._read_inputs(inputs)
        compiled = self._get_compiled(tuple(each.shape for each in arrays))
        try:
            request = compiled.idle.get_nowait()
        except Empty:
            request = compiled.model.create_infer_request()
        try:
            results = request.infer(arrays, share_inputs=True)
            return [results[i] for i in range(len(results))]
        except RuntimeError as error:
            raise UsageError(f"the model did not run: {_shorten(error)}") from error
        finally:
            compiled.idle.put(request)


def run_model(folder: str, threads: int, inputs: list[list[NDArray[Any]]]) -> list[list[NDArray[Any]]]:
    """Return the results of a deployed model for each of the inputs."""
    model = OpenVINOModel(Path(folder), threads, checked=False)
    return [model.run(*each) for each in inputs]


def list_exported_sizes(manifest: Mapping[str, Any]) -> list[Shapes]:
    """List the shapes of the inputs for which a model was exported: those of the example, then of other batches."""
    example: Shapes = tuple(tuple(each["example"]) for each in manifest["inputs"])
    own = next((shape[0] for shape in example if shape), 1)
    batches = [own, *(each for each in manifest["batches"] if each != own)]
    return [
        tuple((batch, *shape[1:]) if shape and shape[0] == own else shape for shape in example) for batch in batches
    ]


def _read_port(port: Any) -> ArrayInput:
    shape = port.get_partial_shape()
    sides = [None if side.is_dynamic else side.get_length() for side in shape] if shape.rank.is_static else None
    name = port.get_any_name() if port.get_names() else ""
    return ArrayInput(name, np.dtype(port.get_element_type().to_dtype()), None if sides is None else tuple(sides))


def _shorten(error: Exception) -> str:
    """Return the last line of what OpenVINO says: those before it name places in its own code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
