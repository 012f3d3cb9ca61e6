"""Models trained with every kind of reducer and distributed optimizer against one device: a cover
of the product.

Any two values of two factors occur together in a test, of which one in four is not slow. More of
the product is in the slow tests, all of it in ``tests/product/optimizers.py``.
"""

import itertools
import random

import pytest
from zero_models import Case, cases, train


def check(case: Case) -> None:
    report = train(case)
    assert report.ok, f"{case}\n{report}"


def pairwise() -> list[Case]:
    """Cases in which every possible pair of values of two factors occurs; the same in every
    process.
    """
    rng = random.Random(0)
    everything = [(case, pairs(case)) for case in cases()]
    missing = {pair for _, covered in everything for pair in covered}
    cover = []
    while missing:
        best, covered = max(rng.sample(everything, 300), key=lambda case: len(missing & case[1]))
        if missing & covered:
            cover.append(best)
            missing -= covered
    return cover


def pairs(case: Case) -> set[tuple[str, str]]:
    return set(itertools.combinations([f"{name}={value}" for name, value in case.items()], 2))


COVER = pairwise()


@pytest.mark.parametrize(
    "index",
    [pytest.param(i, marks=[pytest.mark.slow] if i % 8 else []) for i in range(len(COVER))],
)
def test_models(index: int) -> None:
    check(COVER[index])


@pytest.mark.slow
def test_models_at_random() -> None:
    """Another ten cases; tests/product/optimizers.py tries all."""
    for case in random.Random(0).sample(list(cases()), 10):
        check(case)
