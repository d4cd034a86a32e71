"""The user's cache folder, as `latbench.base.files` finds it too."""

from __future__ import annotations

import os
from pathlib import Path


def find_user_cache(part: str) -> Path:
    """Return a part of the cache folder: below LATBENCH_CACHE, else `latbench` in XDG_CACHE_HOME or ~/.cache."""
    if given := os.environ.get("LATBENCH_CACHE"):
        return Path(given) / part
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "latbench" / part
