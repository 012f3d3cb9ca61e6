"""Seconds and bytes in words."""

from __future__ import annotations

import pytest

from shardwright.compiler.plan.amounts import amount


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5e9, "B", "1.5 GB"),
        (2**30, "B", "1.07 GB"),
        (12, "B", "12 B"),
        (999.6e6, "B", "1 GB"),  # rounded first, never "1e+03 MB"
        (3456e12, "B", "3456 TB"),
        (0.0124, "s", "12.4 ms"),
        (0.9996, "s", "1 s"),
        (1234.5, "s", "1234 s"),
        (2.5e-7, "s", "0.25 µs"),
        (0, "s", "0 s"),
        (-0.5, "s", "-500 ms"),
        (float("inf"), "s", "inf s"),
    ],
)
def test_three_digits_and_the_fitting_multiple(value: float, unit: str, text: str) -> None:
    assert amount(value, unit) == text


def test_as_many_digits_as_asked_for() -> None:
    assert (
        amount(1.2345678, "s", digits=6) == "1.23457 s"
        and amount(999999.6e-6, "s", digits=6) == "1 s"
    )
