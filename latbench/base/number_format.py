"""Numbers for readers: times in ns to s, ratios with a times sign, shares in percent."""

from __future__ import annotations

import math
from typing import TypeGuard

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
NOTHING = "–"


def format_seconds(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Return `412 µs`, or `412 µs (405–420)` with an interval; three significant digits, `–` for no value."""
    if not _is_number(value):
        return NOTHING
    scale, unit = _unit(value)
    text = f"{_digits(value / scale)} {unit}"
    if _is_number(low) and _is_number(high):
        text += f" ({_digits(low / scale)}–{_digits(high / scale)})"
    return text


def format_round_seconds(value: float) -> str:
    """Return a round number of seconds as an axis tick: `20 µs`."""
    scale, unit = _unit(value * (1 + 1e-9))
    return f"{value / scale:g} {unit}"


def format_flop_rate(value: float) -> str:
    """Return operations a second with three significant digits: `1.23 TFLOP/s`."""
    for scale, unit in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")):
        if value >= scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value)} FLOP/s"


def format_ratio(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Return `2.31×`, or `2.31× (2.25–2.37)` with an interval; `–` for no value."""
    if not _is_number(value):
        return NOTHING
    text = f"{_digits(value)}×"
    if _is_number(low) and _is_number(high):
        text += f" ({_digits(low)}–{_digits(high)})"
    return text


def format_percent(value: float | None) -> str:
    """Return a share as `75%`, `97.5%` or `0.42%`: one decimal, or two digits below one percent."""
    if not _is_number(value):
        return NOTHING
    points = 100 * value
    text = f"{points:.1f}" if abs(points) >= 1 or points == 0 else f"{points:.2g}"
    return text.removesuffix(".0") + "%"


def format_percent_rounded_up(value: float, digits: int = 2) -> str:
    """Return a share rounded up to so many decimals: `51%` for 0.504."""
    return format_percent(math.ceil(value * 10**digits - 1e-6) / 10**digits) if _is_number(value) else NOTHING


def format_threads(counts: object) -> str:
    """Return `1 thread`, `2 threads` or `1, 2 threads`."""
    return f"{counts} thread" + ("" if str(counts) == "1" else "s")


def format_count(value: float | None) -> str:
    """Return `12 345`, with a thin space between thousands; `–` for no value."""
    return f"{int(value):,}".replace(",", "\u2009") if _is_number(value) else NOTHING


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _unit(value: float) -> tuple[float, str]:
    for scale, unit in _UNITS:
        if abs(value) >= scale:
            return scale, unit
    return _UNITS[-1]


def _digits(value: float) -> str:
    """Return three significant digits without an exponent."""
    if value == 0:
        return "0"
    text = f"{value:#.3g}"
    if "e" not in text:
        return text.removesuffix(".")
    decimals = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.2e}")))))
    return f"{value:.{decimals}f}"


def format_bytes(value: float) -> str:
    """Return a number of bytes: `23.5 GiB`, `32 KiB`."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1024**power:
            return f"{value / 1024**power:.1f}".removesuffix(".0") + f" {unit}"
    return f"{value:.0f} bytes"


def choose_time_unit(value: float) -> tuple[float, str]:
    """Return the unit for an axis around `value` seconds: its size in seconds and its name."""
    return _unit(value)


def format_score(value: float, name: str) -> str:
    """Return a score as text: a percentage for an accuracy, else four significant digits."""
    return f"{100 * value:.2f}%" if _is_share(value, name) else f"{value:.4g}"


def format_score_change(change: float, score: float, name: str) -> str:
    """Return a change of `score` as text with its sign: in points for an accuracy that is shown as a percentage."""
    return f"{100 * change:+.2f} points" if _is_share(score, name) else f"{change:+.4g}"


def _is_share(value: float, name: str) -> bool:
    return 0 <= value <= 1 and "accuracy" in name.lower()
