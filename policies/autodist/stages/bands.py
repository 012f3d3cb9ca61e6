"""Tables of stages, cut down to stages of few blocks.

What a stage costs is a table ``[start, stop]`` over blocks. Of many stages none has more than a few
blocks: the others do not fit, or take longer than is asked for. A *band* has a row for each number
of blocks in the place of one for each start, so that a shortest path over many stages looks at no
more entries than there are.

Example: three blocks, and stages of at most two. The band has two rows; ``band[row, stop]`` is of
the stage from ``stop - 2 + row`` to ``stop``, so the row 0 is of stages of two blocks:

====  ==========  ==========  ==========  ==========
row   stop 0      stop 1      stop 2      stop 3
====  ==========  ==========  ==========  ==========
0     none        none        0 to 2      1 to 3
1     none        0 to 1      1 to 2      2 to 3
====  ==========  ==========  ==========  ==========
"""

from __future__ import annotations

import functools

import numpy as np

from shardwright.policies.autodist.stages.frontier import Array


class Band:
    """The stages of at most ``width`` of ``num_blocks`` blocks, as ``[row, stop]``."""

    def __init__(self, num_blocks: int, width: int) -> None:
        self.width, self.stops = width, np.arange(num_blocks + 1)
        starts = self.stops - width + np.arange(width)[:, None]
        self._is_none = starts < 0
        self.starts = np.maximum(starts, 0)  # ``[row, stop]``, 0 where there is none
        # Where each stage is in a table read row by row, and where it starts in a column that has
        # one entry more, for no stage.
        self._in_table = self.starts * (num_blocks + 1) + self.stops
        self._in_column = np.where(self._is_none, num_blocks + 1, self.starts)

    def of(self, table: Array, outside: float = np.inf) -> Array:
        """The band of a table ``[start, stop]``; ``outside``: what stands for no stage."""
        found: Array = table.take(self._in_table)
        found[self._is_none] = outside
        return found

    def at_start(self, column: Array) -> Array:
        """``[row, stop]``: the entry of a column ``[block]`` at which the stage starts."""
        return np.append(column, np.inf).take(self._in_column)


@functools.lru_cache(maxsize=256)
def band_of(num_blocks: int, width: int) -> Band:
    """The band of so many blocks; the same is returned each time."""
    return Band(num_blocks, width)


def most_blocks(stages: Array) -> int:
    """The most blocks of the stages for which a table ``[start, stop]`` is true; 0 for none."""
    if not stages.size:
        return 0
    # The first start of each stop.
    starts, stops = stages.argmax(axis=0), np.arange(stages.shape[1])
    return int((stops - starts).max(initial=0, where=stages[starts, stops]))
