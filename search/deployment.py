"""How a pruned model runs."""

from dataclasses import dataclass

from latbench.base.engine_registry import FLOAT32, NUMBA

PYTHON, C, OPENVINO = "python", "c", "openvino"
"""Forms of a pruned model: as a torch module in Python, or exported."""

FORM_PHRASES = {PYTHON: "", C: " exported to C", OPENVINO: " exported to OpenVINO"}
"""Words to follow a time of a pruned model in this form."""


@dataclass(frozen=True)
class Deployment:
    """How a pruned model runs.

    Attributes
    ----------
    threads
        Threads of each engine.
    backend
        Backend of the pruned model, one of `latbench.base.engine_registry.PRUNED_ENGINES`.
    precisions
        Types in which its layers may be multiplied. Dense engines that round as far are its rivals, too.
    form
        One of `FORM_PHRASES`. latbench's own kernels run in any of them.
    """

    threads: int
    backend: str = NUMBA
    precisions: tuple[str, ...] = (FLOAT32,)
    form: str = PYTHON
