"""What a command that times whole models says of other programs at work."""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)


def warn_of_load() -> str:
    """Warn if other programs take the cores; return what to add to a refusal then, else an empty text."""
    from latbench.machines.noise_sources import describe_load_now

    if (load := describe_load_now()) is None:
        return ""
    _LOG.warning(load)
    return "; other programs were at work when this began, and the same may be within reach without them"
