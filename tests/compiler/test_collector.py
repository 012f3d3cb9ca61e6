"""The collector looks at new objects only while a search runs, and at all of them again
afterwards.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from shardwright.compiler.collector import only_new_objects


class Ring:
    """A cycle, which only the collector frees."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def nothing_set_aside() -> Iterator[None]:
    """Whatever the test process has set aside before."""
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


def test_what_was_set_aside_before_stays_so() -> None:
    gc.freeze()
    number = gc.get_freeze_count()
    with pytest.raises(ValueError), only_new_objects():
        raise ValueError
    assert gc.get_freeze_count() >= number > 0


def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError), only_new_objects():
        raise ValueError
    assert gc.get_freeze_count() == 0
