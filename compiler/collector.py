"""The garbage collector, which would look at all of torch again and again while a compile makes
objects.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from shardwright.compiler.trace.context.fakes import note_caches


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Let the collector look only at what is made inside the ``with`` block. Objects that somebody
    has set aside already (``gc.freeze``) stay so, and then there are few others.
    """
    if gc.get_freeze_count():
        yield
        return
    note_caches()  # traces look for cached functions among the objects that the collector sees
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
