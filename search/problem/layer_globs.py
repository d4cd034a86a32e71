"""Match layers by name or by a glob with `*`, `?` and `[seq]`, as in fnmatch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from latbench.errors import UsageError
from search.problem.layers import format_names


def match_layers(glob: str, names: Sequence[str], limit: str) -> set[str]:
    """Return the names that match. Raises UsageError, which names the `limit`, if none does."""
    found = {name for name, _ in match_glob(glob, names)}
    if not found:
        raise UsageError(f"{limit}: no layer is called {glob!r}; the model has {format_names(names)}")
    return found


def match_glob(glob: str, names: Iterable[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the names that match, each with the texts that the wildcards stand for."""
    if glob in names:
        return [(glob, ())]
    pieces = re.split(r"(\*|\?|\[!?\]?[^\]]*\])", glob)
    # fnmatch translates each wildcard and appends the end mark, which is cut off; each gets its own group.
    texts = [f"({fnmatch.translate(piece)[:-2]})" if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)]
    pattern = re.compile("".join(texts))
    return [(name, found.groups()) for name in names if (found := pattern.fullmatch(name))]
