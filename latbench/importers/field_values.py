"""Numbers in files of other projects, which may be texts, or missing."""

from __future__ import annotations

import math
from typing import Any

_MOST = 2**31  # no layer is that large


def parse_number(value: Any, what: str) -> float:
    """Return a number. Raises ValueError, which names `what` it is of, for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"it has no {what}" if value is None else f"{what} must be a number, not {value!r}"
        ) from None


def parse_count(value: Any, what: str, least: int = 1) -> int:
    """Return a whole number of at least `least`. Raises ValueError for anything else."""
    number = parse_number(value, what)
    if not (math.isfinite(number) and number.is_integer() and least <= number < _MOST):
        raise ValueError(f"{what} must be a whole number of at least {least}, not {value}")
    return int(number)
