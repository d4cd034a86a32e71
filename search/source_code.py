"""Source files of a task and its model: what was measured with other code is measured again.

A file counts as a whole. Other files that it imports do not.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def read_source(defined: Any) -> str:
    """Return the file in which a function, class or module is defined; an empty text where there is no source."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(defined)) or ""
    except (OSError, TypeError):
        return ""
    if Path(path).is_file():
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return "".join(linecache.getlines(path))  # a notebook's cell


def read_model_sources(model: torch.nn.Module) -> set[str]:
    """Return the files in which the classes of a model's modules are defined."""
    return {read_source(kind) for kind in {type(module) for module in model.modules()}}


def hash_model_code(model: torch.nn.Module) -> str:
    """Return a hash of the files in which the classes of a model's modules are defined, 16 hexadecimal digits."""
    return hashlib.sha256("\0".join(sorted(read_model_sources(model))).encode()).hexdigest()[:16]
