"""Searches side by side: one for every size of a unit and of a microbatch, and every stage of ZeRO.

For every size of a microbatch, of those that make up the batch of a step, there is a graph
(``batch_sizes.py``). For each, for every size of a unit that may be chosen, and for every stage of
ZeRO where the config leaves it to the plan, there is one search (``search.py``). The best of all is
the answer; the least of their bounds is the bound.

Either changes what every operator, sum of gradients and byte costs, so each is a search of its own.
Their steps do the same work on the same samples, so that their costs compare as they are. They
share one limit of time, and what is worked out about strategies and conversions.

A graph is asked for when its first search begins. So where the limit ends the searches, no model
was traced for those that there was no time for.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.passes.chosen_rows import (
    check_has_experts,
    check_imbalance,
    imbalance_of,
    with_imbalance,
)
from shardwright.compiler.passes.unused_outputs import needed
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.imbalance import Imbalance
from shardwright.compiler.plan.plan import Batch, Plan
from shardwright.policies.autodist.candidates.alarm import Alarm
from shardwright.policies.autodist.candidates.clock import Clock
from shardwright.policies.autodist.candidates.results import (
    INTERRUPT,
    NOT_SEARCHED,
    Candidate,
    SearchResult,
    time_over,
)
from shardwright.runtime.activity import preceded
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError

STAGES = (0, 1, 2, 3)
"""The stages of ZeRO."""

ONCE_MORE = 2 / 3
"""The share of what is left for a search that runs once more, before others do: it has the best
plan. A search keeps parts of its share for its last steps. So it may be ended by a share of 85 s,
and be done after 50 s of one of 110 s.
"""


@dataclass(frozen=True)
class Subsearch:
    """What one of the searches is of. ``make_graph``: makes its graph, or gives the one that it has
    made. ``zero_stage``, ``batch``, ``unit_size``: what tells it from the others; ``None`` where
    nothing does.
    """

    make_graph: Callable[[], PlannableGraph]
    config: ComputeConfig
    zero_stage: int | None = None
    batch: Batch | None = None
    unit_size: int | None = None

    @property
    def graph(self) -> PlannableGraph:
        """The graph that is searched. The first look at it may take as long as a trace.

        Raises:
            ConfigError: how experts are chosen is given, and the model has none.
            PlanError: the config names an output that the model does not return.
            TraceError: the model cannot be traced for this size of a microbatch.
        """
        return self.make_graph()

    @property
    def num_microbatches(self) -> int | None:
        return None if self.batch is None else self.batch.num_microbatches

    @property
    def title(self) -> str:
        """``units of 8, microbatches of 4, ZeRO-2``."""
        words = []
        if self.unit_size is not None:
            words.append(f"units of {self.unit_size}")
        if self.batch is not None:
            words.append(f"microbatches of {self.batch.samples}")
        if self.zero_stage is not None:
            words.append(f"ZeRO-{self.zero_stage}" if self.zero_stage else "no ZeRO")
        return ", ".join(words)

    def of(self, candidate: Candidate) -> Candidate:
        """A candidate as one of this subsearch."""
        plan = replace(candidate.plan, zero_stage=self.zero_stage, batch=self.batch)
        return replace(candidate, title=f"{candidate.title}, {self.title}", plan=plan)


@dataclass(frozen=True)
class Subsearches:
    """What is searched, one after the other, and what cannot be: by title, and why."""

    listed: tuple[Subsearch, ...]
    refused: Mapping[str, str]

    @classmethod
    def of(
        cls,
        graphs: Mapping[Batch | None, PlannableGraph],
        config: ComputeConfig,
        stages: Sequence[int] | None,
        imbalance: Imbalance | None = None,
    ) -> Subsearches:
        """What is needed of every graph, with every stage of ZeRO among ``stages`` (``None``: all)
        where the config leaves it to the plan. ``imbalance``: how unevenly experts are chosen.
        A graph is looked up in ``graphs`` when it is searched.

        Raises:
            ConfigError: stages for a config that names its own, or that are none.
        """
        listed, refused = [], {}
        # A graph for each batch, with every stage of ZeRO. Large microbatches come first: on a
        # device with room for them they are the fastest, and small ones are soon known not to be.
        for batch in sorted(graphs, key=_samples, reverse=True):
            graph = functools.cache(functools.partial(_searched, graphs, batch, config, imbalance))
            if not config.leaves_zero_to_plan:
                _check_no_stages(stages, config)
                listed.append(Subsearch(graph, config, batch=batch))
                continue
            # A stage may contradict the config: it is refused, the others are searched.
            for stage in _checked_stages(stages):
                try:
                    listed.append(Subsearch(graph, config.with_zero(stage), stage, batch))
                except ConfigError as error:
                    refused[Subsearch(graph, config, stage, batch).title] = error.what
        return cls(tuple(listed), refused)

    @property
    def imbalance(self) -> Imbalance | None:
        """How unevenly experts are assumed to be chosen; ``None`` without experts."""
        return imbalance_of(self.listed[0].graph) if self.listed else None

    @classmethod
    def of_units(cls, parts: Mapping[int, Subsearches]) -> Subsearches:
        """The searches of several sizes of a unit, the smallest first: they take the least time,
        and what they find tells which of the larger ones are worth theirs.
        """
        listed: list[Subsearch] = []
        refused: dict[str, str] = {}
        for size, part in sorted(parts.items()):
            listed += [replace(subsearch, unit_size=size) for subsearch in part.listed]
            refused |= {f"units of {size}, {title}": why for title, why in part.refused.items()}
        return cls(tuple(listed), refused)

    def chosen(self, plan: Plan) -> Subsearch:
        """The one that a plan comes from."""
        wanted = (plan.zero_stage, plan.batch, plan.mesh.size)
        return next(
            subsearch
            for subsearch in self.listed
            if (subsearch.zero_stage, subsearch.batch, subsearch.config.plan_ngpus) == wanted
        )

    def search(
        self,
        one: Callable[[Subsearch, float, float], SearchResult],
        time_limit_s: float,
        spent_s: float = 0.0,
        alarm: Alarm | None = None,
    ) -> SearchResult:
        """Run all of them by ``one``, each in its share of the time that is left, and join what
        they find. ``spent_s``: how much of the limit is over before. ``alarm``: ends the one under
        way, and none is begun after that.

        Each audits only what is predicted to be about as good as the best so far. One is not begun
        if less time is left than the quickest so far took. Where the limit is over and no plan is
        known, the last ones are begun first, as most ranks and the smallest microbatches need least
        memory: one of them in any case, others in the overtime of a search. Those that their shares
        have ended run once more in what all have left, the one with the best plan first.
        """
        # The usual case: one search, all the time.
        if len(self.listed) == 1 and not self.listed[0].title and not self.refused:
            found = one(self.listed[0], max(time_limit_s - spent_s, 0.0), float("inf"))
            if found.interrupted not in (None, INTERRUPT):
                found.interrupted = _time_over(time_limit_s, 1)
            return found
        began = time.monotonic() - spent_s
        clock = Clock(max(time_limit_s - spent_s, 0.0))
        results: dict[int, SearchResult] = {}  # by place in the list
        not_begun: dict[str, str] = {}

        def left_s() -> float:
            has_rung = alarm is not None and alarm.has_rung
            return 0.0 if has_rung else max(time_limit_s - (time.monotonic() - began), 0.0)

        def best_s() -> float:
            steps_s = [
                found.best.compared_s for found in results.values() if found.best is not None
            ]
            return min(steps_s, default=math.inf)

        def is_interrupted() -> bool:
            return any(found.interrupted == INTERRUPT for found in results.values())

        def run(index: int, share_s: float, words: str = "") -> SearchResult:
            number = f"{index + 1} of {len(self.listed)}, " if len(self.listed) > 1 else ""
            try:
                with preceded(f"{number}{self.listed[index].title}{words}: "):
                    return one(self.listed[index], share_s, best_s())
            except KeyboardInterrupt:
                if best_s() == math.inf:
                    raise
                return SearchResult(interrupted=INTERRUPT)

        waiting = deque(range(len(self.listed)))
        while waiting:
            is_over = bool(results) and left_s() <= 0.0 and best_s() == math.inf
            index = waiting.pop() if is_over else waiting.popleft()
            subsearch = self.listed[index]
            quickest_s = min((found.seconds for found in results.values()), default=0.0)
            # Why it was not begun is told with the other refusals.
            if is_interrupted():
                not_begun[subsearch.title] = f"{NOT_SEARCHED}, as the search had ended"
            elif is_over and clock.is_over and len(results) > 1:
                not_begun[subsearch.title] = f"{NOT_SEARCHED}, as the time limit was over"
            elif left_s() <= quickest_s and best_s() < math.inf:
                not_begun[subsearch.title] = (
                    f"{NOT_SEARCHED}, as {left_s():.1f} s were left, and the quickest search took "
                    f"{quickest_s:.1f} s"
                )
            else:
                # The time that is left is dealt evenly among those that are left.
                results[index] = run(index, left_s() / (1 + len(waiting)))

        # Most need less than an even share. What they leave is for those that need more.
        ended = [index for index, found in results.items() if found.interrupted is not None]
        ended.sort(key=lambda index: _step_s(results[index]))
        for place, index in enumerate(ended):
            is_last = place == len(ended) - 1
            share_s = left_s() * (1.0 if is_last else ONCE_MORE)
            if not is_interrupted() and share_s > results[index].seconds:
                results[index] = _once_more(results[index], run(index, share_s, ", once more"))

        total = SearchResult(refused={**self.refused, **not_begun}, arithmetic_bound_s=math.inf)
        for index, found in results.items():
            _add(total, found, self.listed[index])
        begun = [self.listed[index] for index in results]
        if is_interrupted():
            total.interrupted = INTERRUPT
        elif not_begun or any(found.interrupted for found in results.values()):
            total.interrupted = _time_over(time_limit_s, len(self.listed))
        total.seconds = time.monotonic() - began
        total.searched = _in_words(begun)
        if total.best is not None:
            # A later search may have found what these cannot beat.
            beaten_s = total.best.compared_s
            total.not_compared = [each for each in total.not_compared if each.bound_s < beaten_s]
        if len(begun) < len(self.listed):
            number = len(self.listed)
            total.left_out = f"{number - len(begun)} of {number} {self._choices}"
            total.searched += f"; no time was left for {total.left_out}"
        return total

    @property
    def _choices(self) -> str:
        """What is chosen among: ``sizes of a microbatch``, or ``combinations of unit and ...``."""
        first = self.listed[0]
        chosen = {
            "unit": ("sizes of a unit", first.unit_size),
            "microbatch": ("sizes of a microbatch", first.batch),
            "stage of ZeRO": ("stages of ZeRO", first.zero_stage),
        }
        names = [name for name, (_, value) in chosen.items() if value is not None]
        if len(names) == 1:
            return chosen[names[0]][0]
        return f"combinations of {_listed(names)}"


def _searched(
    graphs: Mapping[Batch | None, PlannableGraph],
    batch: Batch | None,
    config: ComputeConfig,
    imbalance: Imbalance | None,
) -> PlannableGraph:
    """What is searched of the graph for one size of a microbatch."""
    whole = graphs[batch]
    check_imbalance(whole, imbalance)
    if "imbalance" in config.pas_config:  # its default is no wish
        check_has_experts(whole, "option 'imbalance'")
    return PlannableGraph.of(with_imbalance(needed(whole, config), imbalance))


def _samples(batch: Batch | None) -> int:
    return 0 if batch is None else batch.samples


def _step_s(found: SearchResult) -> float:
    return math.inf if found.best is None else found.best.step_s


def _once_more(before: SearchResult, found: SearchResult) -> SearchResult:
    """What a search has found that has run twice: what the run says that came further, with the
    plans of both. The second one knew those of the first, and may have audited better ones alone.
    """
    has_some = bool(found.tried or found.refused)  # it was not interrupted at once
    is_further = found.interrupted is None or (has_some and found.num_left <= before.num_left)
    kept, other = (found, before) if is_further else (before, found)
    known = [candidate.plan for candidate in kept.audited]
    least_s = 0.0 if kept.interrupted else kept.bound_s
    kept.audited += [
        _bounded(candidate, least_s) for candidate in other.audited if candidate.plan not in known
    ]
    kept.audited.sort(key=lambda candidate: candidate.step_s)
    kept.compared = list(dict.fromkeys([*other.compared, *kept.compared]))
    if found.interrupted == INTERRUPT:
        kept.interrupted = INTERRUPT
    return kept


def _bounded(candidate: Candidate, least_s: float) -> Candidate:
    """A candidate of a search no plan of which takes less than ``least_s``: a run of it in a hurry
    knows less of the mesh.
    """
    bound_s = min(least_s, candidate.compared_s)
    if candidate.plan.stages:
        return replace(candidate, split_bound_s=max(candidate.split_bound_s, bound_s))
    placed, *others = candidate.placed
    placed = replace(placed, bound_s=max(placed.bound_s, bound_s))
    return replace(candidate, placed=(placed, *others))


def _add(total: SearchResult, found: SearchResult, subsearch: Subsearch) -> None:
    # Titles get the name of the subsearch: several may have one title.
    total.audited = sorted(
        [*total.audited, *map(subsearch.of, found.audited)], key=lambda candidate: candidate.step_s
    )
    total.others += map(subsearch.of, found.others)
    total.refused |= {
        f"{title}, {subsearch.title}": reason for title, reason in found.refused.items()
    }
    total.needed_bytes |= {
        f"{title}, {subsearch.title}": needed for title, needed in found.needed_bytes.items()
    }
    total.bounds |= {f"{title}, {subsearch.title}": bound for title, bound in found.bounds.items()}
    total.bounded |= {
        f"{title}, {subsearch.title}": replace(cut_request, title=f"{title}, {subsearch.title}")
        for title, cut_request in found.bounded.items()
    }
    total.least = min(
        total.least, (found.least[0], f"{found.least[1]}, {subsearch.title}", found.least[2])
    )
    total.unbounded += [f"{title}, {subsearch.title}" for title in found.unbounded]
    total.not_compared += [
        replace(each, title=f"{each.title}, {subsearch.title}", search=subsearch.title)
        for each in found.not_compared
    ]
    total.compared += [f"{title}, {subsearch.title}" for title in found.compared]
    total.num_left += found.num_left
    total.arithmetic_bound_s = min(total.arithmetic_bound_s, found.arithmetic_bound_s)
    total.unanswered |= {
        f"{title}, {subsearch.title}": bound for title, bound in found.unanswered.items()
    }


def _time_over(time_limit_s: float, num_searches: int) -> str:
    limit = time_over(time_limit_s)
    return limit if num_searches == 1 else f"{limit}, which {num_searches} searches share"


def _check_no_stages(stages: Sequence[int] | None, config: ComputeConfig) -> None:
    if stages is not None:
        raise ConfigError(
            "policy 'autodist' has the option zero, and the config a stage of ZeRO",
            why=f"zero={list(stages)} are stages to choose from, use_zero={config.use_zero!r} is "
            "one",
            hint="use_zero='auto' leaves the stage to the search",
        )


def _checked_stages(stages: Sequence[int] | None) -> Iterable[int]:
    if stages is None:
        return STAGES
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown or not stages or len(set(stages)) < len(stages):
        raise ConfigError(
            f"option 'zero' of policy 'autodist' cannot be {list(stages)!r}",
            why="it lists stages of ZeRO, each once, to choose from",
            hint="some of 0, 1, 2 and 3; without it all are tried",
        )
    return sorted(stages)


def _in_words(listed: Sequence[Subsearch]) -> str:
    """``units of 1 and 8 ranks, microbatches of 1, 2 and 4 samples, stages 0 and 1 of ZeRO``."""
    units = [v.unit_size for v in listed if v.unit_size is not None]
    sizes = sorted({v.batch.samples for v in listed if v.batch is not None})
    stages = [v.zero_stage for v in listed if v.zero_stage is not None]
    words = []
    if units:
        words.append(f"units of {_counted(units, 'rank')}")
    if sizes:
        words.append(f"microbatches of {_counted(sizes, 'sample')}")
    # With a batch given, other units would have done the same work.
    config = listed[0].config
    if sizes and not units and config.runtime_ngpus > 1:
        words.append(f"units of {_counted([config.plan_ngpus], 'rank')} alone")
    if stages:
        stage = "stages" if len(set(stages)) > 1 else "stage"
        words.append(f"{stage} {_listed(map(str, stages))} of ZeRO")
    return ", ".join(words)


def _counted(numbers: Sequence[int], what: str) -> str:
    """``1 rank``; ``1, 2 and 4 ranks``."""
    return f"{_listed(map(str, numbers))} {what}{'' if set(numbers) == {1} else 's'}"


def _listed(names: Iterable[str]) -> str:
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} and {last}" if most else last
