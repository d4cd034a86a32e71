"""Which sparsity pays on your hardware, and a pruned model that really reaches the speedup you asked for.

    import latbench as lb

    fast = lb.load("latbench-jobs/digits/pruned", model, (x,))

`latbench.base.public_names` lists the names. Each is imported at its first use, so the import itself takes
milliseconds.
"""

from typing import Any

from latbench.base.own_packages import share_names
from latbench.base.public_names import PUBLIC_NAMES, find_public

MOST_SEED = 2**32 - 1
"""The largest seed that NumPy, torch, scikit-learn and the tables all take; the least is 0."""

share_names()


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    found = globals()[name] = find_public(name)
    return found


def __dir__() -> list[str]:
    """Return the public names and the module's own."""
    return sorted({*globals(), *PUBLIC_NAMES, "__version__"})
