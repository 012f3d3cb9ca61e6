"""Products of settings of which the default tests run a cover, and the slow tests the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def spread(cases: Iterable[Any], every: int, *, first: int = 0, whole: bool = False) -> list[Any]:
    """Mark all cases slow but each ``every``-th, beginning with the one at ``first``.

    Cases that are marked already stay as they are, and do not count. ``whole``: a tuple is one
    parameter, not one for each name.
    """
    found, number = [], 0
    for case in cases:
        is_parameters = isinstance(case, type(pytest.param()))
        if is_parameters and case.marks:
            found.append(case)
            continue
        values = case.values if is_parameters else (case,)
        if not is_parameters and isinstance(case, tuple) and not whole:
            values = case
        marks = [] if number % every == first else [pytest.mark.slow]
        found.append(pytest.param(*values, marks=marks, id=case.id if is_parameters else None))
        number += 1
    return found
