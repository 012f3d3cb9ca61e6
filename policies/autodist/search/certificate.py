"""What is certain of the best plan: its cost, a lower bound that is raised once the plan is known,
and what that bound covers.

Example: a plan of 2.18 s with the bound 2.10 s. The proof says where the bound comes from (the
elimination of the placement was exact) and what it leaves out (the placement was chosen before the
stages), and lists every mesh that was tried with its own bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.plan import Certificate
from shardwright.policies.autodist.candidates.lower_bounds import ARITHMETIC
from shardwright.policies.autodist.candidates.meshes import with_pp
from shardwright.policies.autodist.candidates.results import (
    NOT_SEARCHED,
    Candidate,
    CutRequest,
    NotCompared,
    SearchResult,
)
from shardwright.policies.autodist.candidates.titles import first_of, in_sizes, mesh_title
from shardwright.policies.autodist.search.search_state import BOUNDS_SHARES, SearchState
from shardwright.policies.autodist.stages.scheduled import ScheduledBound
from shardwright.runtime.layout import Mesh

ROUNDS = 8
"""How many rounds of a game are played before it is looked again which bound is the least."""

OF_SEARCH = 0.5
"""The share of the time a search has taken that its bounds may take in any case, if the limit has
it.
"""


@dataclass
class _Raising:
    """A bound that may be raised: of a ``candidate``, or else of cuts of one request that were
    never made. It is the least of those of the ``cut_requests``, where they say more than what was
    known before.
    """

    bound_s: float
    cut_requests: list[CutRequest]
    candidate: Candidate | None = None
    split_bound_s: float = 0.0  # of the candidate, before

    def raise_to(self, result: SearchResult, found_s: float) -> bool:
        """Keep in the result what was found. Returns whether it is a bound of this."""
        before = self.candidate
        if before is None:
            title = self.cut_requests[0].title
            if found_s == float("inf"):  # no split of this placement fits
                result.unbounded.append(title)
                del result.bounds[title], result.bounded[title]
                return False
            self.bound_s = result.bounds[title] = max(self.bound_s, found_s)
            return True
        # A plan by rule that takes less than all that the search could cut in its place: the
        # placement chosen there is not the best, and its stages say nothing of others.
        is_of_others = found_s > before.compared_s * (1 + 1e-9)
        after = replace(
            before, split_bound_s=max(self.split_bound_s, 0.0 if is_of_others else found_s)
        )
        result.audited = [after if other is before else other for other in result.audited]
        result.others = [after if other is before else other for other in result.others]
        self.candidate, self.bound_s = after, after.bound_s
        return not is_of_others


def raise_bounds(state: SearchState) -> None:
    """Raise the bounds of pipelines in ``state.result``, as far as the limit leaves time.

    While a search goes on, a pipeline is bounded by what is soon known: by its share of the work of
    any placement, and by stages one by one. That leaves out what positions with several stages wait
    for, and that these share its memory; so it says of many schedules that they might still be
    better than the best plan. Only those that might are looked at again here
    (``stages/scheduled.py``), also those whose stages may differ. It is always the least bound that
    is raised next, a little, and none further than the least that cannot be raised any more. So the
    first that cannot be raised is the last.
    """
    result = state.result
    if result.best is None:
        return
    left_out = result.without_bound
    # Pipelines can be bounded better; of all else the bounds stay as they are.
    waiting: list[_Raising] = []
    rest: list[float] = []
    asked = _requests_by_pipeline(result)
    for tried in result.tried:
        cut_requests = [] if tried.cut_request is None else [tried.cut_request]
        # A simple policy's plan: its bound is that of the placements of the search in its place.
        if tried.cut_request is None and tried.plan.stages:
            cut_requests = asked.get(_pipeline(tried), [])
        if cut_requests and tried.plan.stages:
            waiting.append(_Raising(tried.bound_s, cut_requests, tried, tried.split_bound_s))
        elif tried.title not in left_out:
            rest.append(tried.bound_s)
    for title, bound_s in result.bounds.items():
        if title in result.bounded:
            waiting.append(_Raising(bound_s, [result.bounded[title]], None))
        else:
            rest.append(bound_s)
    # Nothing needs to be raised above what is certain to stay.
    enough_s = min([result.best.compared_s, *rest, *result.unanswered.values()])
    # Half of what the search has taken, or the share of its first two minutes.
    clock, share = state.clock, BOUNDS_SHARES[1]
    most_s = min(share * clock.limit_s, max(share * clock.steady_s, OF_SEARCH * clock.seconds))
    until_s = clock.seconds + min(clock.left_s, most_s)

    # Only a share of the time that is left goes into bounds.
    def is_late() -> bool:
        return clock.seconds >= until_s

    # Requests with the same placements and schedule have one bound.
    known: dict[tuple[object, ...], ScheduledBound] = {}
    while waiting and not is_late():
        raising = min(waiting, key=lambda item: item.bound_s)
        # No plan below, but for rounding: neither this bound nor any other one is the least.
        if raising.bound_s >= enough_s * (1 - 1e-9):
            break
        scheduled = []
        for cut_request in raising.cut_requests:
            key = (
                *(id(lowered.walk) for lowered in cut_request.placements),
                cut_request.num_positions,
                cut_request.pp_place,
                cut_request.named_schedule,
            )
            if key not in known:
                known[key] = state.cutter.bounds.scheduled_bound(cut_request)
            scheduled.append(known[key])
        least = min(scheduled, key=lambda bound: bound.bound_s)
        if least.bound_s <= raising.bound_s:
            least.play(enough_s, ROUNDS, is_late)
        least = min(scheduled, key=lambda bound: bound.bound_s)
        is_raised = raising.raise_to(result, least.bound_s)
        if least.is_over or not is_raised:
            waiting.remove(raising)
            if is_raised or raising.candidate is not None:
                enough_s = min(enough_s, raising.bound_s)


Pipeline = tuple[tuple[int, ...], int, str, int]
"""The sizes of the axes of a mesh, the place of the pipeline axis among them, the name of a
schedule, and the number of stages.
"""


def _axis_sizes(mesh: Mesh) -> tuple[int, ...]:
    return tuple(size for _, size in mesh.axes)


def _sizes(cut_request: CutRequest) -> tuple[int, ...]:
    """The sizes of the axes of the mesh that a request is cut for, with those of a pipeline."""
    mesh, number = cut_request.placements[0].placed.plan.mesh, cut_request.num_positions
    return _axis_sizes(mesh if number == 1 else with_pp(mesh, number, cut_request.pp_place))


def _pipeline(candidate: Candidate) -> Pipeline:
    """The mesh and schedule of a candidate, whatever its axes are called."""
    plan = candidate.plan
    return _axis_sizes(plan.mesh), plan.mesh.names.index("pp"), plan.schedule, len(plan.stages)


def _requests_by_pipeline(result: SearchResult) -> dict[Pipeline, list[CutRequest]]:
    """What the search has cut on each mesh for each schedule, all stages in one placement."""
    found: dict[Pipeline, list[CutRequest]] = {}
    tried = (candidate.cut_request for candidate in result.tried)
    for cut_request in (*tried, *result.bounded.values()):
        if cut_request is None or len(cut_request.placements) > 1 or cut_request.num_positions == 1:
            continue
        place, name = cut_request.pp_place, cut_request.named_schedule.name
        key = _sizes(cut_request), place, name, cut_request.num_stages
        found.setdefault(key, []).append(cut_request)
    return found


HIDDEN = (
    "gathers of weights are hidden in the bound, as far as the device can: the program begins them "
    "one weight ahead, and the step has what operators do not hide"
)
"""What certificates say of plans that store weights in pieces: over units (ZeRO-3), or over the
ranks of a unit.
"""

BY_ITSELF = (
    "the bound is of programs that send each message by itself; a compile joins small ones, where "
    "that holds no more memory, and hides what overlap_communication lets it"
)
"""What certificates say where a program that was audited does so."""


def certificate(
    result: SearchResult,
    best: Candidate,
    hardware: Hardware,
    unit_ranks: int | None = None,
    zero_stage: int | None = None,
) -> Certificate:
    """What is certain of the best plan. ``unit_ranks``, ``zero_stage``: the ranks of a unit and the
    stage of ZeRO, each where there are several units and no other was searched.
    """
    sharing = hardware.device.sharing
    # Bounds are of ranks that all compute; a rank with a core for itself is faster.
    speed = 1.0 if sharing is None else sharing.speed(1)
    # The least bound of everything that was searched is the bound of the answer.
    least_s, least = result.least_bounded
    proof = [*_proof(result, best), *_faster_but_less_simple(result), *_what_was_left_out(result)]
    if least_s < best.bound_s:
        proof.append(f"the bound is that of {least}, the lowest of all")
    # Arithmetic alone bounds every plan, searched or not.
    if result.arithmetic_bound_s > 0 and not result.rests_on_arithmetic:
        least_of_all = amount(result.arithmetic_bound_s / speed, "s")
        proof.append(f"no plan at all takes less than {least_of_all}, {ARITHMETIC}")
    if sharing is not None:
        proof.append(
            "times are those of ranks that all compute, and no rank is faster than with a core for "
            "itself"
        )
    if _gathers_weights(result, best):
        proof.append(HIDDEN)
    if any(candidate.compared_s != candidate.step_s for candidate in result.audited):
        proof.append(BY_ITSELF)
    return Certificate(
        best.step_s,
        min(least_s, best.compared_s) / speed,
        tuple(proof),
        _space(result, best),
        hardware.name,
        tuple(_tried(result)),
        covers=_covers(result, unit_ranks, zero_stage),
        apart_s=None if best.compared_s == best.step_s else best.compared_s,
        cut_short=_cut_short(result, best),
    )


def _cut_short(result: SearchResult, best: Candidate) -> str | None:
    """A sentence on what a search has looked at that was ended before it had a bound of its own."""
    if result.interrupted is None or not result.rests_on_arithmetic:
        return None
    number = len(result.tried)
    which = "the only one" if number == 1 else f"the best of the {number}"
    whose = "a plan by the fixed rules of a policy, and " if best.is_simple else ""
    ended = f"until it was ended by {result.interrupted}"
    return f"It is {whose}{which} that the search looked at {ended}"


def _gathers_weights(result: SearchResult, best: Candidate) -> bool:
    """Whether the bound of the best plan is that of programs that gather weights."""
    if best.plan.zero:
        return True
    cut_requests = [best.cut_request]
    # A simple policy's plan has the bound of what the search has placed on its mesh.
    if best.cut_request is None:
        tried = [candidate.cut_request for candidate in result.tried]
        cut_requests = [
            cut_request
            for cut_request in (*tried, *result.bounded.values())
            if cut_request is not None and _sizes(cut_request) == _axis_sizes(best.plan.mesh)
        ]
    return any(
        adapter.gathers_weight
        for cut_request in cut_requests
        if cut_request is not None
        for lowered in cut_request.placements
        for adapter in lowered.walk.program.adapters()
    )


def _covers(result: SearchResult, unit_ranks: int | None, zero_stage: int | None) -> str:
    """What the bound is of: meshes, and schedules of pipelines on them; and what it leaves out, as
    there was no time.
    """
    if result.rests_on_arithmetic:
        return "any plan at all on so many ranks"
    left_out = result.without_bound
    bounded = [candidate for candidate in result.tried if candidate.title not in left_out]
    titles = {candidate.title for candidate in bounded} | {*result.bounds, *result.unanswered}
    # What was refused cannot be, or takes longer than others by its own bound.
    titles |= {title for title, why in result.refused.items() if not why.startswith(NOT_SEARCHED)}
    has_stages = bool(result.bounded) or any(candidate.plan.stages for candidate in bounded)
    words = "one mesh" if len(titles) == 1 else f"{len(titles)} meshes"
    words += " and schedules" if has_stages else ""
    if result.interrupted is not None or left_out:
        words = f"the {words} that the search came to"
    if unit_ranks is not None:
        words += f" in units of {unit_ranks} rank{'s' if unit_ranks > 1 else ''}"
    alone = []
    if zero_stage is not None:
        alone.append(f"with ZeRO-{zero_stage}" if zero_stage else "without ZeRO")
    if not has_stages:
        alone.append("without pipelines")
    words += f", {' and '.join(alone)}" if alone else ""
    missing = []
    if result.num_left:
        missing.append(f"not on {result.num_left} other mesh{'es' if result.num_left > 1 else ''}")
    if result.left_out:
        missing.append(f"not with {result.left_out}")
    return f"any plan on {words}" + (f", but {' and '.join(missing)}" if missing else "")


def _space(result: SearchResult, best: Candidate) -> str:
    """The plan, and among what it was chosen."""
    if result.rests_on_arithmetic:
        return best.title
    if best.is_mixed:
        assert best.cut_request is not None
        number = len(best.cut_request.placements)
        return f"{best.title}; {number} candidate placements for every stage"
    return f"{best.title}; {best.placed[0].space}"


def _proof(result: SearchResult, best: Candidate) -> list[str]:
    """Why nothing that was searched is below the bound."""
    # Each sentence says how far the bound reaches.
    if result.rests_on_arithmetic:
        return [ARITHMETIC]
    if best.is_mixed:
        words = (
            "the candidate placements were chosen before the stages; with them the bound holds "
            "for every split between blocks"
        )
        return [words, *_not_in_bound(result)]
    proof = [_of_placement(best)]
    if best.is_simple:
        proof.append(
            "the bound is of other placements: the plan is a simple policy's, which the search has "
            "not bettered"
        )
    elif best.plan.stages:
        proof.append(
            "the placement was chosen before the stages, of which the bound holds for every split "
            "between blocks"
        )
    if result.tried_mixed:
        proof.append("stages that differ were searched with their candidate placements")
    return [*proof, *_not_in_bound(result)]


def _of_placement(best: Candidate) -> str:
    """What is known of the placement behind the best plan. It says nothing of other meshes."""
    placed = best.placed[0]
    where = in_sizes(mesh_title(1, placed.plan.mesh))
    if best.plan.stages:
        return f"the placement of its stages, on {where} each, by itself: {placed.proof}"
    whose = "the placement of the search" if best.is_simple else "the placement"
    return f"{whose} on {where}: {placed.proof}"


def _faster_but_less_simple(result: SearchResult) -> list[str]:
    fastest, taken = result.best, result.simpler
    if fastest is None or taken is None:
        return []
    less = f"{1 - fastest.step_s / taken.step_s:.1%}"
    return [
        f"{fastest.title} takes {less} less, as predicted: plans so near to one another cannot be "
        "told apart, so the simpler one is taken (option simpler_within)"
    ]


def _not_in_bound(result: SearchResult) -> list[str]:
    if not result.unbounded:
        return []
    titles = first_of(result.unbounded)
    return [f"not in the bound: {titles}, as no split of the placements chosen there fits"]


def _what_was_left_out(result: SearchResult) -> list[str]:
    """The searches that this is of, what ended them, and what there was no time for."""
    # What the bound does not reach.
    words = []
    if result.searched:
        words.append(f"searched one by one: {result.searched}")
    if result.interrupted is not None:
        ended = f"the search was ended by {result.interrupted}"
        if not result.rests_on_arithmetic:
            ended += "; of the meshes that it did not come to the bound says nothing"
        words.append(ended)
    if result.not_compared:
        words.append(
            "the simple policies may have a better plan: there was no time to compare it with "
            f"{_where_not_compared(result.not_compared)}; {_compared(result.compared)}"
        )
    return words


MOST_NAMED = 2
"""How many of the meshes that were not compared are named, and of the plans that were. Of more, a
certificate gives the number and names the most likely meshes, or the first plans.
"""


def _compared(titles: Sequence[str]) -> str:
    """Which plans of the simple policies were audited."""
    # Titles have commas.
    named = "; ".join(titles[:MOST_NAMED])
    if not titles:
        return "none of their plans was compared"
    if len(titles) == 1:
        return f"one of their plans was compared: {named}"
    among = "among them " if len(titles) > MOST_NAMED else ""
    return f"{len(titles)} of their plans were compared: {among}{named}"


def _where_not_compared(not_compared: Sequence[NotCompared]) -> str:
    """Where plans were not compared: the meshes, or how many there are and the most likely."""
    # What is not known of a mesh puts it last.
    likely = sorted(not_compared, key=lambda each: (each.likely_s, each.bound_s))
    # Titles have commas.
    named = "; ".join(in_sizes(each.title) for each in likely[:MOST_NAMED])
    if len(likely) <= MOST_NAMED:
        return f"those on {named}"
    searches = {each.search for each in likely}
    of_searches = f" in {len(searches)} of these searches" if len(searches) > 1 else ""
    return f"those on {len(likely)} meshes{of_searches}, the most likely of them: {named}"


def _tried(result: SearchResult) -> list[str]:
    """A line for each candidate, for what is no better, and for what was refused."""
    lines = []
    for candidate in result.tried:
        step = amount(candidate.step_s, "s", digits=6)
        if candidate.compared_s != candidate.step_s:
            step += f" ({amount(candidate.compared_s, 's', digits=6)} with each message by itself)"
        bound = amount(max(candidate.bound_s, result.arithmetic_bound_s), "s", digits=6)
        lines.append(f"{in_sizes(candidate.title)}: {step}, at least {bound}")
    for title, bound_s in result.bounds.items():
        least = amount(bound_s, "s", digits=6)
        lines.append(f"{in_sizes(title)}: none of them takes less than {least}")
    return [*lines, *(f"{in_sizes(title)}: {why}" for title, why in result.refused.items())]
