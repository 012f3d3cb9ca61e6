"""The garbage collector, which would look at a traced model and all of torch again and again while
a search makes objects.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Let the collector look only at what is made inside the ``with`` block. Objects that somebody
    has set aside already (``gc.freeze``) stay so, and then there are few others.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
