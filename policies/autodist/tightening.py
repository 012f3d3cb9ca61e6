"""Raise the bounds of pipelines, at the end of a search, by what their schedules make stages wait for.

While a search goes on, a pipeline is bounded by what is soon known: by its share of the work of any placement, and by stages
one by one. That leaves out what positions with several stages wait for, and so says of many schedules that they might still be
better than the best plan. Only those that might are looked at again here (``stages/scheduled.py``): the one of the least bound
first, and none further than the least bound that nothing is known to raise. So the first that cannot be raised is the last.
"""

from __future__ import annotations

from dataclasses import replace

from shardwright.policies.autodist.bench import Bench
from shardwright.policies.autodist.found import Candidate

SHARE = 0.1
"""Of the time limit, the most that this may take."""


def tighten(bench: Bench) -> None:
    """Raise the bounds in ``bench.found``, as far as the limit leaves time."""
    found = bench.found
    if found.best is None:
        return
    staged = [c for c in found.tried if _is_on_equal_positions(c) and c.bound_s < bench.best_s()]
    rest = [c.bound_s for c in found.tried if not _is_on_equal_positions(c)]
    enough_s = min([bench.best_s(), *rest, *found.bounds.values(), *found.unanswered.values()])
    until_s = bench.clock.seconds + min(bench.clock.left_s, SHARE * bench.clock.limit_s)

    def is_over() -> bool:
        return bench.clock.seconds >= until_s

    known: dict[tuple[object, ...], float] = {}
    for candidate in sorted(staged, key=lambda candidate: candidate.bound_s):
        if candidate.bound_s >= enough_s:
            continue
        attempt = candidate.attempt
        assert attempt is not None
        key = id(attempt.offers[0].walk), attempt.num_positions, attempt.pp_place, attempt.pace
        if key not in known:
            if is_over():
                return
            known[key] = bench.cutter.scheduled_bound_s(attempt, enough_s, is_over)
        raised = replace(candidate, split_bound_s=max(candidate.split_bound_s, known[key]))
        enough_s = min(enough_s, raised.bound_s)
        found.audited = [raised if other is candidate else other for other in found.audited]
        found.others = [raised if other is candidate else other for other in found.others]


def _is_on_equal_positions(candidate: Candidate) -> bool:
    """Whether a candidate is a pipeline whose stages have one placement, and was cut by the search."""
    return bool(candidate.plan.stages) and not candidate.is_mixed and candidate.attempt is not None
