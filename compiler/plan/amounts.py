"""Seconds and bytes as people read them: one way to round, and one meaning of a gigabyte."""

from __future__ import annotations

_UNITS = {
    "B": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
}
"""The multiples of each unit, from the largest on. A gigabyte is 10^9 bytes, as in
``memory_limit_gb`` and rates of links.
"""


def amount(value: float, unit: str, digits: int = 3) -> str:
    """A number a person can read, of ``"B"`` or ``"s"``, to so many digits: ``1.53 GB``, ``12.4
    ms``.
    """
    if value == 0:
        return f"0 {unit}"
    multiples = _UNITS[unit]
    size, name = next(
        (m for m in multiples if abs(_rounded(value / m[0], digits)) >= 1), multiples[-1]
    )
    text = f"{value / size:.{digits}g}"
    return f"{value / size:.0f} {name}" if "e" in text else f"{text} {name}"


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
