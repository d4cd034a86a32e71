"""How long jobs report what they do."""

from collections.abc import Callable

Progress = Callable[[str, int | None, int | None], None]
"""Receives the name of the current step, how many parts are finished, and how many there are (None: unknown)."""
