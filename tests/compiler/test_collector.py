"""The collector looks at new objects only, and rarely, while a search runs, and at all of them
again afterwards.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from covers import spread

from shardwright.compiler import collector
from shardwright.compiler.collector import THRESHOLDS, only_new_objects


class Ring:
    """A cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def nothing_set_aside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the test process has set aside before."""
    monkeypatch.setattr(collector, "_entered", 0)
    number = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if number:
        gc.freeze()


def alive(ring: Ring) -> weakref.ref[Ring]:
    return weakref.ref(ring)


def test_only_what_is_made_inside_is_collected_there() -> None:
    old = alive(Ring())
    with only_new_objects():
        new = alive(Ring())
        gc.collect()
        assert new() is None and old() is not None
    gc.collect()
    assert old() is None


@pytest.mark.parametrize(
    ("outside", "inside"),
    spread(
        [((700, 10, 10), THRESHOLDS), ((0, 10, 10), (0, 10, 10)), ((10**7, 5, 5), (10**7, 5, 5))], 3
    ),
)
def test_it_looks_rarely_inside_and_as_before_afterwards(
    outside: tuple[int, int, int], inside: tuple[int, int, int]
) -> None:
    before = gc.get_threshold()
    gc.set_threshold(*outside)
    try:
        with only_new_objects():
            assert gc.get_threshold() == inside
            with only_new_objects():
                pass
            assert gc.get_threshold() == inside
        assert gc.get_threshold() == outside
    finally:
        gc.set_threshold(*before)


def test_what_is_left_is_not_looked_at_at_once() -> None:
    with only_new_objects():
        kept = [[number] for number in range(1000)]
    assert gc.get_count()[0] < len(kept) / 2


@pytest.mark.slow
def test_what_was_set_aside_before_stays_so() -> None:
    gc.freeze()
    number = gc.get_freeze_count()
    with pytest.raises(ValueError), only_new_objects():
        raise ValueError
    assert gc.get_freeze_count() >= number > 0


@pytest.mark.slow
def test_inside_another_it_leaves_what_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    with only_new_objects():
        with monkeypatch.context() as without:
            without.delattr(gc, "get_freeze_count")  # it looks at every object
            with only_new_objects():
                pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError), only_new_objects():
        raise ValueError
    assert gc.get_freeze_count() == 0
