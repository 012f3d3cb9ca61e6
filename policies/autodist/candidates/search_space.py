"""What is searched, as the options say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.policies.autodist.placement.constraints import Constraints
from shardwright.policies.autodist.stages.chain import SHARE
from shardwright.runtime.layout import Mesh

WORTH = 1.05
"""How much longer than the best of the searches before a candidate may be predicted to take, and is
audited all the same, at least. Predictions of large models are within about 2 % of their audits.
"""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What is searched. ``None`` leaves a choice to the search.

    - ``meshes``: the meshes of one pipeline position, by number of ranks.
    - ``num_positions``: the pipeline positions; 1 is no pipeline.
    - ``pp_place``: the axis of the mesh before which the pipeline axis stands; 0 is outermost.
    - ``stage_starts``: the first operators of all stages but the first.
    - ``recompute``: module paths that are computed again, whatever the memory. ``None``: layers, as
      few as memory asks for.
    - ``mixed``: whether stages may differ in placement and number of ranks, where the schedule has
      one stage for each position.
    - ``simple``: whether plans of the simple policies count too, as far as they obey the
      ``constraints`` on their mesh.
    - ``audits``: the number of candidates that are audited at once.
    - ``near``: a candidate is audited if it is predicted to take at most that many times what the
      best takes.
    - ``others_s``: the step of the best plan of other searches.
    - ``simpler_within``: the share of a step that a simpler plan may take longer.
    - ``tolerance``: stages begin between layers where a step takes at most so much longer than with
      other stages, as a share of it.
    - ``zigzag``: whether such plans may deal positions in zigzag.
    - ``pieces``: whether the loss may run in pieces, where a plan does not fit without.
    - ``block_share``: the most that a block takes of a stage of average length, where stages may
      begin inside layers, too.
    """

    meshes: Mapping[int, Sequence[Mesh]]
    num_microbatches: int
    num_positions: int | None = None
    schedules: Sequence[str] = ("1f1b",)
    chunks: int | None = None
    stage_starts: Sequence[str] | None = None
    recompute: Sequence[str] | None = None
    memory_bytes: float = float("inf")
    audits: int = 6
    others_s: float = float("inf")
    simpler_within: float = 0.0
    near: float = 1.1
    tolerance: float = 0.0
    block_share: float = SHARE
    mixed: bool = True
    simple: bool = False
    zigzag: bool = True
    pieces: bool = True
    constraints: Callable[[Mesh], Constraints] = lambda mesh: Constraints()
    pp_place: int | None = None

    @property
    def worth_s(self) -> float:
        """How long a candidate may be predicted to take, whatever this search has found."""
        return self.others_s * max(WORTH, 1 + self.simpler_within)

    @property
    def beaten_s(self) -> float:
        """The bound from which on a mesh is out, whatever this search has found."""
        return self.others_s * (1 + self.simpler_within)

    def may_have(self, num_stages: int) -> bool:
        """Whether a plan may have so many stages: any number, or that of which the begins are
        given.
        """
        return self.stage_starts is None or num_stages == len(self.stage_starts) + 1
