"""The garbage collector, which would look at all of torch again and again while a compile makes
objects.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from shardwright.compiler.trace.context.fakes import note_caches

THRESHOLDS = (2_000_000, 20, 100)
"""How many objects are made before the collector looks at those, and how many of its looks before
it looks at older ones. A graph has hardly a circle, and grows all the time: with Python's own
thresholds (700, 10, 10) a quarter of a large compile went by looking.
"""

_entered = 0
"""How many blocks run now. A block inside another has nothing left to do, and need not ask Python,
which counts the objects set aside one by one: a tenth of a second after ``import transformers``.
"""


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Let the collector look only at what is made inside the ``with`` block, and more rarely.
    Objects that somebody has set aside already (``gc.freeze``) stay so, and then there are few
    others. Thresholds that are higher already stay as they are.
    """
    global _entered
    sets_aside = not _entered and not gc.get_freeze_count()
    if sets_aside:
        note_caches()  # traces look for cached functions among the objects that the collector sees
        gc.freeze()
    before = gc.get_threshold()
    raises = not _entered and 0 < before[0] < THRESHOLDS[0]  # 0: it is switched off
    if raises:
        gc.set_threshold(*THRESHOLDS)
    _entered += 1
    try:
        yield
        if sets_aside:
            # What is left hangs on no circle. As old objects the collector looks at it with all
            # others of that age, not at once.
            gc.freeze()
    finally:
        _entered -= 1
        if raises:
            gc.set_threshold(*before)
        if sets_aside:
            gc.unfreeze()
