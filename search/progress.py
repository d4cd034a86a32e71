"""The callback of long jobs that report their progress."""

from collections.abc import Callable

Progress = Callable[[str, int | None, int | None], None]
"""Receives the name of the current step, the number of finished parts, and the number of parts (None: unknown)."""
