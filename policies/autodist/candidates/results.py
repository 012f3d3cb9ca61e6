"""What a search has found: the candidates, what they were cut from, and what was refused.

Example: the fastest placement on ``tp=4`` is lowered (:class:`LoweredPlacement`). A request asks
for its two best stages under 1F1B (:class:`CutRequest`), and the answer is a plan of 1.9 s as
predicted and 2.0 s as audited (:class:`Candidate`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.schedule.published import SCHEDULES, generate
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.policies.autodist.candidates.lower_bounds import ARITHMETIC
from shardwright.policies.autodist.candidates.mesh_requests import PlacedModel
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule
from shardwright.policies.autodist.stages.walk import Walk
from shardwright.runtime.errors import PlanError, TraceError
from shardwright.runtime.schedule_actions import ActionKind


@dataclass(frozen=True)
class LoweredPlacement:
    """A placement of the model and its program, on the ranks of a position."""

    placed: PlacedModel
    walk: Walk


@dataclass(frozen=True)
class CutRequest:
    """A request for the best stages of a schedule: the placements that every stage may choose from.

    - ``placements``: with one, all stages have it, on positions that lie as ``pp_place`` says. With
      several, stages lie side by side, each on as many ranks as its placement takes.
    - ``pp_place``: where the pipeline axis stands among the axes of the mesh, from 0, the
      outermost.
    - ``below_s``: what takes longer is of no interest.
    - ``by_hand``: the schedule, where none of those published is meant; ``named_schedule`` says
      nothing then.
    """

    title: str
    placements: tuple[LoweredPlacement, ...]
    num_positions: int
    named_schedule: NamedSchedule
    pp_place: int = 0
    below_s: float = float("inf")
    by_hand: Schedule | None = None

    def schedule(self, num_microbatches: int) -> Schedule:
        """The order of work. There is none without pipeline stages."""
        if self.by_hand is not None:
            return self.by_hand
        name, chunks = self.named_schedule.name, self.named_schedule.chunks
        return generate(name, self.num_positions, num_microbatches, chunks)

    @property
    def num_stages(self) -> int:
        """The stages of all positions together."""
        return (
            self.num_positions * self.named_schedule.chunks
            if self.by_hand is None
            else self.by_hand.num_stages
        )

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule puts off gradients of weights."""
        if self.by_hand is None:
            return (
                self.named_schedule.name != ""
                and SCHEDULES[self.named_schedule.name].splits_backward
            )
        # A schedule by hand has no name to look up, so its actions say it: ``W`` is a gradient put
        # off.
        return any(
            action.kind is ActionKind.WEIGHT_GRADIENT
            for row in self.by_hand.actions
            for action in row
        )


@dataclass(frozen=True)
class Candidate:
    """A plan and what it costs.

    - ``placed``: the placements of its stages, by position of the first; without a pipeline that of
      the model.
    - ``predicted_s``: the step by the model of stages; ``modelled_s``: by the formula that stages
      are cut by; ``cost``: the audit.
    - ``messages_s``: what positions send one another adds to the step at most, wherever stages
      begin.
    - ``used_bytes``: what the fullest rank holds, by the model of stages.
    - ``split_bound_s``: the seconds that no split of its placements is below.
    - ``is_simple``: whether the plan is a simple policy's.
    """

    title: str
    plan: Plan
    predicted_s: float
    placed: tuple[PlacedModel, ...]
    split_bound_s: float = 0.0
    modelled_s: float = 0.0
    messages_s: float = 0.0
    cost: PlanCost | None = None
    used_bytes: float = 0.0
    cut_request: CutRequest | None = field(default=None, repr=False, compare=False)
    is_simple: bool = False

    @property
    def is_mixed(self) -> bool:
        """Whether stages could choose between several placements."""
        return self.cut_request is not None and len(self.cut_request.placements) > 1

    @property
    def bound_s(self) -> float:
        """The least seconds per step of any plan like this one.

        For a pipeline on equal meshes: what some position takes in any placement, and what no split
        of this placement into stages can avoid. For stages that differ: what no split can avoid
        whose stages choose among the placements of the request.
        """
        if not self.plan.stages:
            return self.placed[0].bound_s
        if self.is_mixed:
            return self.split_bound_s
        return max(self.placed[0].share_s(dict(self.plan.mesh.axes)["pp"]), self.split_bound_s)

    @property
    def step_s(self) -> float:
        return self.predicted_s if self.cost is None else self.cost.step_s

    @property
    def compared_s(self) -> float:
        """The step with each message by itself, as bounds count it."""
        return self.predicted_s if self.cost is None else self.cost.compared_s


INTERRUPT = "Ctrl-C"
"""What ended a search that was interrupted from the keyboard."""


def time_over(limit_s: float) -> str:
    """What ended a search whose limit is over: ``the time limit of 0.5 s``."""
    seconds = f"{limit_s:.3g}" if limit_s < 1000 else f"{limit_s:.0f}"
    return f"the time limit of {seconds} s"


NOT_SEARCHED = "not searched"
"""How the reason begins why nothing is known of something."""


@dataclass(frozen=True)
class NotCompared:
    """A mesh where the simple policies may have a better plan, as there was no time to tell.

    ``search``: the title of the search it belongs to, if there are several. ``bound_s``: what no
    plan on it takes less than, 0 where that is not known. ``likely_s``: about what the best plan of
    a simple policy takes on it, infinite where that is not known.
    """

    title: str
    bound_s: float = 0.0
    likely_s: float = float("inf")
    search: str = ""


@dataclass
class SearchResult:
    """What a search has found. It is valid at any time.

    - ``audited``: candidates that fit, the best first; ``others``: those that are only predicted.
    - ``simpler``: the one that is taken, where it is another than the best.
    - ``refused``: what was tried and is no candidate, with the reason; ``needed_bytes``: what it
      needs on a device, where that is too much.
    - ``least``: the least that any audited plan needs which does not fit: the bytes, its title, and
      what most of them are for.
    - ``bounds``: what was tried and is no better than others, with the seconds that none of it is
      below; ``bounded``: the cut requests behind these.
    - ``unanswered``: the bounds of meshes that may have a plan and left none, as there was no time
      or nothing was found that fits.
    - ``unbounded``: pipelines in no bound, as no split of the placements chosen fits.
    - ``arithmetic_bound_s``: the seconds that no plan is below, searched or not.
    - ``not_compared``: see :class:`NotCompared`; ``compared``: the titles of the plans of simple
      policies that were audited.
    - ``interrupted``: what ended the search before its end, in words; ``num_left``: the meshes
      that it did not come to by then.
    - ``searched``: the searches that this is of, where there were several; ``left_out``: how many
      of them there was no time for, in words.
    """

    audited: list[Candidate] = field(default_factory=list)
    others: list[Candidate] = field(default_factory=list)
    simpler: Candidate | None = None
    refused: dict[str, str] = field(default_factory=dict)
    needed_bytes: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    bounded: dict[str, CutRequest] = field(default_factory=dict)
    unanswered: dict[str, float] = field(default_factory=dict)
    unbounded: list[str] = field(default_factory=list)
    least: tuple[float, str, str] = (float("inf"), "", "")
    interrupted: str | None = None
    num_left: int = 0
    seconds: float = 0.0
    searched: str = ""
    left_out: str = ""
    not_compared: list[NotCompared] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    arithmetic_bound_s: float = 0.0

    def refuse(self, title: str, error: PlanError | TraceError) -> None:
        """Note why something that was tried cannot be."""
        self.refused[title] = f"{error.what}: {error.why}" if error.why else error.what

    def bound(self, cut_request: CutRequest, bound_s: float) -> None:
        """Note what no cut of a cut request takes less than."""
        self.bounds[cut_request.title], self.bounded[cut_request.title] = bound_s, cut_request

    @property
    def tried(self) -> tuple[Candidate, ...]:
        """All candidates: those that were audited, then those that are only predicted, best first
        of each.
        """
        return (*self.audited, *sorted(self.others, key=lambda candidate: candidate.step_s))

    @property
    def best(self) -> Candidate | None:
        return self.audited[0] if self.audited else None

    @property
    def answer(self) -> Candidate | None:
        """The plan that is taken: the best, or a simpler one that takes about as long."""
        return self.best if self.simpler is None else self.simpler

    @property
    def tried_mixed(self) -> bool:
        """Whether stages that differ were searched, and so are among what the bound is of."""
        return any(len(asked.placements) > 1 for asked in self.bounded.values()) or any(
            candidate.is_mixed for candidate in (*self.audited, *self.others)
        )

    @property
    def bound_s(self) -> float:
        """No plan of the space takes less, as far as placements have been bounded."""
        return self.least_bounded[0]

    @property
    def least_bounded(self) -> tuple[float, str]:
        """The least of all bounds, and the title of what has it; none is below the arithmetic
        bound. What is on a mesh that the search did not come to has none (``without_bound``).
        """
        left_out = self.without_bound
        bounds = [
            (candidate.bound_s, candidate.title)
            for candidate in (*self.audited, *self.others)
            if candidate.title not in left_out
        ]
        bounds += [
            (bound, title) for title, bound in (*self.bounds.items(), *self.unanswered.items())
        ]
        least = min(bounds, key=lambda item: item[0], default=(float("inf"), ""))
        return max(least, (self.arithmetic_bound_s, ARITHMETIC), key=lambda item: item[0])

    @property
    def without_bound(self) -> set[str]:
        """The titles of candidates on meshes that the search did not come to. The answer is never
        among them: without a bound of its own it has that of the arithmetic.
        """
        answers = [candidate.title for candidate in (self.best, self.answer) if candidate]
        titles = {candidate.title for candidate in self.tried if candidate.bound_s <= 0.0}
        return titles.difference(answers)

    @property
    def rests_on_arithmetic(self) -> bool:
        """Whether nothing better is known than the arithmetic, which bounds all plans."""
        return self.least_bounded[1] == ARITHMETIC
