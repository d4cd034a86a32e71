"""How a pruned model runs."""

from dataclasses import dataclass

from latbench.base.deployed_forms import PYTHON
from latbench.base.engine_registry import FLOAT32, NUMBA


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
        One of `latbench.base.deployed_forms.FORM_PHRASES`. latbench's own kernels run in any of them.
    """

    threads: int
    backend: str = NUMBA
    precisions: tuple[str, ...] = (FLOAT32,)
    form: str = PYTHON
