"""How a pruned model runs."""

from dataclasses import dataclass

from latbench.base.engine_registry import NUMBA


@dataclass(frozen=True)
class Deployment:
    """Threads of each engine, and the backend of the pruned model, a name of `latbench.base.engine_registry`."""

    threads: int
    backend: str = NUMBA
