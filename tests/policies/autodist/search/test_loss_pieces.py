"""A search whose fastest plan is too large: it takes the loss in pieces, and says so."""

import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import plans
import pytest
import torch
import zoo

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.autodist.autodist_policy import POLICY, search
from shardwright.policies.autodist.candidates.clock import Clock
from shardwright.policies.autodist.candidates.results import Candidate
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.explain import Request, explain_operator
from shardwright.policies.autodist.search import loss_pieces
from shardwright.policies.autodist.search.loss_pieces import LossPieces
from shardwright.policies.autodist.solver.stopwatch import Stopwatch
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError

LIMIT_GB = 0.006


@functools.cache
def graph() -> PlannableGraph:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 4096, "n_positions": 64}
    ids = torch.randint(4096, (2, 64))
    model = zoo.get("gpt2").make(**sizes, use_cache=False)
    return plans.annotated(plans.traced(model, {"input_ids": ids, "labels": ids.clone()}))


def config(**options: Any) -> ComputeConfig:
    given = {"memory_limit_gb": LIMIT_GB, **options}
    return ComputeConfig(plan_ngpus=1, runtime_ngpus=1, pas_config=given)


@pytest.mark.slow
def test_a_loss_in_pieces_is_found_where_memory_binds() -> None:
    compiled = compile_graph(graph(), POLICY.apply, config(), policy_name="autodist")
    assert set(compiled.plan.loops) == {"loss"}
    assert program_memory(compiled.program, config()).peak_bytes <= LIMIT_GB * 1e9
    (note,) = [note for note in compiled.plan.notes if note.axis == "loss"]
    assert "pieces: whole, the plan needs" in note.reason
    options = AutodistOptions(memory_limit_gb=LIMIT_GB)
    hardware = load_hardware(options.hardware, 1)
    found = search(graph(), config(), options, hardware).best
    assert found is not None
    request = Request(graph(), config(), options, hardware, found)
    loss = next(op.name for op in graph().ops if op.target == "cross_entropy")
    assert note.reason in explain_operator(request, loss, 1).binds


def test_it_may_be_forbidden() -> None:
    with pytest.raises(PlanError) as refused:
        POLICY.apply(graph(), config(loss_pieces=False))
    assert "pieces" not in str(refused.value)


class Tried(LossPieces):
    """Tries nothing, and so has noted what it would try."""

    def _try(self, candidate: Candidate, cost: PlanCost) -> None:
        pass


@pytest.mark.parametrize("has_plan", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_where_nothing_fits_what_needs_least_is_tried_first_also_in_overtime(
    has_plan: bool, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of 1 to 6 s, slower ones for less memory: the last one needs least. Another fits, and
    takes 9 s. When it is late, the limit of 100 s is over, of which the search had half to work.
    No plan is tried twice.
    """
    monkeypatch.setattr(loss_pieces, "most_saved_bytes", lambda graph: math.inf)
    walls, works = iter([0.0, *(200.0,) * 50]), iter([0.0, *(60.0,) * 50])
    watch = Stopwatch(lambda: next(walls), lambda: next(works)) if is_late else Stopwatch()
    state = SimpleNamespace(
        result=SimpleNamespace(audited=["it"] if has_plan else []),
        space=SimpleNamespace(memory_bytes=80.0),
        clock=Clock(100.0, watch),
        best_s=lambda: 9.0,
        graph=None,
        end_by_time=lambda: None,
    )
    costs = [SimpleNamespace(step_s=float(n), peak_bytes=250.0 - n) for n in range(1, 7)]
    too_large = [(cost.step_s, cost) for cost in reversed(costs)]
    tried = Tried(cast(Any, state), cast(Any, SimpleNamespace(too_large=too_large)))
    tried.run()
    before = [] if has_plan else [6.0]
    fastest = [] if has_plan and is_late else [1.0, 2.0, 3.0, 4.0]
    assert tried.tried == [*before, *fastest]
    tried.run()
    assert sorted(cast(list[float], tried.tried)) == (
        [] if has_plan and is_late else [1, 2, 3, 4, 5, 6]
    )


@pytest.mark.parametrize(("rest", "counts"), [(75.0, [4, 16]), (79.9, [4, 16, 64]), (81.0, [4])])
def test_more_pieces_are_tried_while_some_number_may_fit(
    rest: float, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan needs 30 bytes for its logits, and ``rest`` beside them, of 80 that there are."""
    tried: list[int] = []

    def audit(candidate: Any) -> Any:
        tried.append(candidate.plan.count)
        return SimpleNamespace(peak_bytes=rest + 30.0 / tried[-1])

    @dataclass(frozen=True)
    class Plan:
        count: int = 1
        notes: tuple[Any, ...] = ()

    monkeypatch.setattr(
        loss_pieces, "in_pieces", lambda graph, plan, options, *rest: Plan(options.loss_pieces)
    )
    monkeypatch.setattr(loss_pieces, "_note", lambda *args: [])
    state = SimpleNamespace(space=SimpleNamespace(memory_bytes=80.0), graph=None, config=None)
    found = LossPieces(cast(Any, state), cast(Any, SimpleNamespace(audit=audit)))
    candidate = Candidate("x=2", cast(Any, Plan()), 1.0, ())
    found._try(candidate, cast(Any, SimpleNamespace(peak_bytes=rest + 30.0)))
    assert tried == counts
