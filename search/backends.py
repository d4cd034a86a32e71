"""Names of the engines that run a pruned model, and the names of the same engines in a table."""

from dataclasses import dataclass

OWN = {"numba": "float32", "numba-bf16": "bfloat16"}
"""latbench's own kernels: name in a search -> type of the weights and activations.

A table calls all of them `numba`, and its rows name the type.
"""


def in_table(backend: str) -> str:
    """Return the name that a table gives to a backend of a search."""
    return "numba" if backend in OWN else backend


@dataclass(frozen=True)
class Deployment:
    """How a pruned model runs: threads of each engine, and one of `search.whole_model.model_engines.BACKENDS`."""

    threads: int
    backend: str = "numba"
