"""Many small examples in few tests: to start a test takes longer than most examples do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

NUM_SHARES = 6

Named = tuple[str, Any]
"""The name of an example, and the example."""


def shares(examples: Sequence[Named]) -> list[Any]:
    """The examples as parameters of a few tests. Neighbours, which are alike, come into different
    ones.
    """
    return [
        pytest.param(examples[number::NUM_SHARES], id=f"share {number}")
        for number in range(NUM_SHARES)
    ]


def check_each(examples: Sequence[Named], check: Callable[..., None]) -> None:
    """Call ``check(name, example)`` for every example, each with the same random numbers.

    Raises the first error when all were tried, with a note that names every example that fails.
    """
    errors: dict[str, Exception] = {}
    for name, example in examples:
        random.seed(0)
        torch.default_generator.manual_seed(0)
        try:
            check(name, example)
        except Exception as error:
            errors[name] = error
    if errors:
        first = next(iter(errors.values()))
        first.add_note(f"{len(errors)} of {len(examples)} examples fail: {', '.join(errors)}")
        raise first
