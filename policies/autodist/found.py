"""What a search tries and what it has found: attempts, and the candidates that they make."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Program
from shardwright.policies.autodist.blocks import Setting
from shardwright.policies.autodist.candidates import Pace
from shardwright.policies.autodist.space import Placed, Wish
from shardwright.runtime.layout import Mesh


@dataclass(frozen=True)
class Opening:
    """A mesh of one position with the model placed on it for speed alone. ``others``: what may be asked besides."""

    num_positions: int
    mesh: Mesh
    free: Placed
    others: tuple[Wish, ...]

    @property
    def bound_s(self) -> float:
        """No plan of so many positions on this mesh takes less."""
        return self.free.bound_s / self.num_positions


@dataclass(frozen=True)
class Attempt:
    """What a candidate was made of: a placement lowered on the mesh of one position, to be cut into stages for a schedule."""

    title: str
    placed: Placed
    program: Program
    setting: Setting
    num_positions: int
    pace: Pace


@dataclass(frozen=True)
class Candidate:
    """A plan and what it costs. ``predicted_s``: by the model of stages; ``cost``: audited. ``used_bytes``: of the fullest
    rank, by that model.
    """

    title: str
    plan: Plan
    predicted_s: float
    placed: Placed
    split_bound_s: float = 0.0
    cost: PlanCost | None = None
    used_bytes: float = 0.0
    attempt: Attempt | None = field(default=None, repr=False, compare=False)

    @property
    def bound_s(self) -> float:
        """Of a pipeline on these meshes: the share of a position in the work of any placement, and what no split of this
        placement into stages can avoid.
        """
        positions = dict(self.plan.mesh.axes).get("pp", 1) if self.plan.stages else 1
        return max(self.placed.bound_s / positions, self.split_bound_s if self.plan.stages else 0.0)

    @property
    def step_s(self) -> float:
        return self.predicted_s if self.cost is None else self.cost.step_s


INTERRUPT = "Ctrl-C"
"""What ended a search that was interrupted from the keyboard."""


@dataclass
class Found:
    """What a search has found so far. ``audited``: candidates that were lowered, best first; ``others``: predicted only;
    ``refused``: what was tried and why it is no candidate. ``searched``: what searches this is of, where there were several.
    """

    audited: list[Candidate] = field(default_factory=list)
    others: list[Candidate] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    interrupted: str | None = None
    seconds: float = 0.0
    searched: str = ""

    @property
    def best(self) -> Candidate | None:
        return self.audited[0] if self.audited else None

    @property
    def bound_s(self) -> float:
        """No plan of the space takes less, as far as placements have been bounded."""
        return min((c.bound_s for c in (*self.audited, *self.others)), default=float("inf"))
