"""Raise the bounds of pipelines, at the end of a search, by what their schedules make stages wait
for.

While a search goes on, a pipeline is bounded by what is soon known: by its share of the work of any
placement, and by stages one by one. That leaves out what positions with several stages wait for,
and that these share its memory; so it says of many schedules that they might still be better than
the best plan. Only those that might are looked at again here (``stages/scheduled.py``), also those
whose stages may differ: the best plan's own first, which says most of how far the others need be
raised; then the one of the least bound, and none further than the least bound that nothing is known
to raise. So the first that cannot be raised is the last.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.policies.autodist.candidates.results import Candidate, CutRequest
from shardwright.policies.autodist.search.state import SearchState

SHARE = 0.1
"""The most that this may take, as a share of the time limit."""


def raise_bounds(state: SearchState) -> None:
    """Raise the bounds in ``state.result``, as far as the limit leaves time."""
    found = state.result
    if found.best is None:
        return
    staged = [
        (c.bound_s, c.cut_request, c)
        for c in found.tried
        if c.cut_request is not None and c.plan.stages
    ]
    waiting: list[tuple[float, CutRequest, Candidate | None]] = [*staged]
    waiting += [
        (found.bounds[title], cut_request, None) for title, cut_request in found.bounded.items()
    ]
    rest = [c.bound_s for c in found.tried if c.cut_request is None or not c.plan.stages]
    rest += [bound for title, bound in found.bounds.items() if title not in found.bounded]
    enough_s = min([state.best_s(), *rest, *found.unanswered.values()])
    until_s = state.clock.seconds + min(state.clock.left_s, SHARE * state.clock.limit_s)

    def is_over() -> bool:
        return state.clock.seconds >= until_s

    known: dict[tuple[object, ...], float] = {}
    for bound_s, cut_request, candidate in sorted(
        waiting, key=lambda item: (item[2] is not found.best, item[0])
    ):
        if bound_s >= enough_s:
            continue
        key = (
            *(id(lowered.walk) for lowered in cut_request.placements),
            cut_request.num_positions,
            cut_request.pp_place,
            cut_request.named_schedule,
        )
        if key not in known:
            if is_over():
                return
            known[key] = state.cutter.scheduled_bound_s(cut_request, enough_s, is_over)
        if candidate is None:
            found.bounds[cut_request.title] = max(bound_s, known[key])
            enough_s = min(enough_s, found.bounds[cut_request.title])
            continue
        raised = replace(candidate, split_bound_s=max(candidate.split_bound_s, known[key]))
        enough_s = min(enough_s, raised.bound_s)
        found.audited = [raised if other is candidate else other for other in found.audited]
        found.others = [raised if other is candidate else other for other in found.others]
