"""The garbage collector, which would look at all of torch again and again while a compile makes
objects.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from shardwright.compiler.trace.context.fakes import note_caches

_entered = 0
"""How many blocks run now. A block inside another has nothing left to do, and need not ask Python,
which counts the objects set aside one by one: a tenth of a second after ``import transformers``.
"""


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Let the collector look only at what is made inside the ``with`` block. Objects that somebody
    has set aside already (``gc.freeze``) stay so, and then there are few others.
    """
    global _entered
    sets_aside = not _entered and not gc.get_freeze_count()
    if sets_aside:
        note_caches()  # traces look for cached functions among the objects that the collector sees
        gc.freeze()
    _entered += 1
    try:
        yield
    finally:
        _entered -= 1
        if sets_aside:
            gc.unfreeze()
