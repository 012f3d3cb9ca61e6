"""How fast a search has to go over its meshes: whether there is time to try another one, all that
wait, or little more than one plan that fits.

Example: 20 s are left, and five meshes wait. Trying one took 3 s of late, so all of them may still
be tried with every placement. Then one takes 6 s: there is no time for four more of that kind. From
now on a placement that has bettered nothing is followed by no further one.
"""

from __future__ import annotations

from shardwright.policies.autodist.search.auditing import Audits
from shardwright.policies.autodist.search.search_state import TRIED, SearchState

SHORT = 60.0
"""A limit of less than that many times what it takes to place the model on a mesh of one axis
leaves time for few of them.
"""

LAST_SHARE = 0.9
"""The share of the time limit after which also the mesh that is being tried is left, if there is
something to audit.
"""

SLOW_SHARE = 0.05
"""The share of the steady time that is much for one mesh."""


class MeshPace:
    """What the time leaves. ``num_tried``: the meshes that were tried; ``num_waiting``: those of
    the placed ones that are to be tried after the one that is. ``is_short``: whether the limit is
    short for a model of this size; ``None`` before the first placement.
    """

    def __init__(self, state: SearchState, audits: Audits) -> None:
        self._state, self._audits = state, audits
        self._result, self._clock = state.result, state.clock
        self.num_tried = self.num_waiting = 0
        self.is_short: bool | None = None

    def note_placement(self, num_axes: int) -> None:
        """Tell by the first placement, on a mesh of so many axes, whether the limit is short."""
        if self.is_short is None:
            self.is_short = self._clock.limit_s < SHORT * self._state.one_axis_s(num_axes)

    def may_end(self, share: float) -> bool:
        """Whether a share of the time is over, with no time for more, and there is something to
        audit, or overtime is over; never before the first mesh was tried.
        """
        has_some = bool(self._result.others or self._result.audited or self._audits.sure)
        is_over = self._clock.spent() > share and not self._state.may_try()
        return is_over and (has_some or (self.num_tried > 0 and self._clock.is_over))

    def is_scarce(self) -> bool:
        """Whether the time left is too short to try every mesh that waits, as long as others
        took.
        """
        return self._clock.spent(self.num_waiting * self._clock.longest_s(TRIED)) >= 1.0

    def is_slow(self) -> bool:
        """Whether some of the meshes tried of late took much of the time."""
        return self._clock.longest_s(TRIED) > SLOW_SHARE * self._clock.steady_s

    def hurries(self) -> bool:
        """Whether there is time for little more than one plan that fits, and none yet."""
        return bool(self.is_short or self._clock.spent() > LAST_SHARE) and not self._result.audited
