"""What a command that times whole models says of other programs at work."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from latbench.errors import PromiseMissed

_LOG = logging.getLogger(__name__)

WITHOUT_THEM = "; other programs took the cores when this began: try again when they are done"


@contextmanager
def note_load(threads: int | None = None) -> Iterator[None]:
    """Warn if other programs take cores that so many threads need; a refusal inside the context says it again."""
    from latbench.machines.noise_sources import describe_load_now

    if (load := describe_load_now(threads)) is not None:
        _LOG.warning(load)
    try:
        yield
    except PromiseMissed as error:
        if load is not None:
            error.args = (f"{str(error).removesuffix('.')}{WITHOUT_THEM}", *error.args[1:])
        raise
