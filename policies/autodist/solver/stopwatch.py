"""Time on a machine that others use too: seconds of the wall, and those of them that this process
had.

Example: beside three busy processes on one core, 12 s of the wall are 3 s of work. What has to
find a first choice counts these, so that it does not end with nothing because others were busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_SHARE = 0.25
"""The share of the wall's seconds that counts as work at least, so that an end is in sight also
where the process gets less.
"""


class Stopwatch:
    """The seconds since it was made. ``wall``, ``cpu``: the clocks, those of the machine and of the
    process if none are given. ``since_s``: the wall's seconds that were over before.
    """

    def __init__(
        self,
        wall: Callable[[], float] | None = None,
        cpu: Callable[[], float] | None = None,
        *,
        since_s: float = 0.0,
    ) -> None:
        self._wall, self._cpu = wall or time.monotonic, cpu or time.process_time
        self._began_wall, self._began_cpu = self._wall() - since_s, self._cpu()

    @property
    def wall_s(self) -> float:
        """The wall's seconds."""
        return self._wall() - self._began_wall

    @property
    def worked_s(self) -> float:
        """The seconds in which the process worked, of all its threads together no more than the
        wall's.
        """
        wall_s = self.wall_s
        return max(min(self._cpu() - self._began_cpu, wall_s), LEAST_SHARE * wall_s)

    @property
    def slowdown(self) -> float:
        """How many of the wall's seconds a second of work has taken so far, at least 1."""
        worked_s = self.worked_s
        return max(1.0, self.wall_s / worked_s) if worked_s > 0 else 1.0
