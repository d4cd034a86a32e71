"""Phases of training as shares of all steps, and the checks that methods share."""

from __future__ import annotations

from latbench.errors import UsageError

BACKWARDS = ("scaled", "straight_through")


def check_dense(dense: float) -> None:
    """Raise UsageError if the dense phase is no share of all steps."""
    if not 0 <= dense <= 1:
        raise UsageError(f"the dense phase is a share of all steps, from 0 to 1, not {dense}")


def check_every(every: int) -> None:
    """Raise UsageError if masks would never be drawn."""
    if every < 1:
        raise UsageError(f"masks are drawn every so many steps, at least 1, not {every}")


def check_decay(dense: float, final: float, backward: str, every: int) -> None:
    """Raise UsageError if the phases do not fit into training, or the backward is unknown."""
    if min(dense, final) < 0 or dense + final > 1 or dense == 1:
        raise UsageError(
            f"the dense and the final phase are shares of all steps, at most 1 together and the first below 1, not "
            f"{dense}, {final}"
        )
    if backward not in BACKWARDS:
        raise UsageError(f"the backward is {' or '.join(BACKWARDS)}, not {backward!r}")
    check_every(every)


def find_phase_bounds(dense: float, final: float, total: int) -> tuple[int, int]:
    """Return the first step of the middle phase, and of the final one."""
    start = round(dense * total)
    return start, max(start, total - round(final * total))
