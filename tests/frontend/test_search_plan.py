"""``search_plan``: called like ``parallelize``, with a module or a class."""

import inspect
from functools import partial
from unittest.mock import Mock

import pytest
import zoo
from api_jobs import Net, X

import shardwright
from shardwright.frontend import search_plan
from shardwright.frontend.search_plan import PlanSearch
from shardwright.policies.autodist import autodist_policy
from shardwright.policies.autodist.candidates.alarm import Alarm
from shardwright.policies.autodist.solver.stopwatch import Stopwatch
from shardwright.runtime.config import ComputeConfig

CONFIG = {"plan_ngpus": 2, "runtime_ngpus": 2, "pas_config": {"hardware": "cpu"}}


def test_arguments_are_named_alike():
    search = inspect.signature(shardwright.search_plan).parameters
    compile_ = inspect.signature(shardwright.parallelize).parameters
    verify = inspect.signature(shardwright.verify).parameters
    for name, parameter in search.items():
        assert (parameter.annotation, parameter.default, parameter.kind) == (
            compile_[name].annotation,
            compile_[name].default,
            compile_[name].kind,
        )
    assert list(verify)[1:4] == list(compile_)[1:4]


@pytest.mark.parametrize("given", [Net(), Net], ids=["module", "class"])
def test_a_module_or_a_class(given):
    found = shardwright.search_plan(given, {"x": X}, CONFIG)
    assert found.plan.policy == "autodist" and found.dummy_forward_args.keys() == {"x"}


def test_tracing_is_a_part_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace takes four seconds of twenty, and one was over before. The first one is of the
    arguments given, the second of the largest size. With a third one more than half of the time
    would be over.
    """
    seconds = [0.0]
    trace, search_each = search_plan.trace, search_plan.search_each
    clock = partial(Stopwatch, lambda: seconds[0], lambda: seconds[0])
    monkeypatch.setattr(search_plan, "Stopwatch", clock)

    def slowly(*args, **options):
        seconds[0] += 4.0
        return trace(*args, **options)

    def searched(variants, options, hardware, spent_s):
        assert spent_s == 9.0
        return search_each(variants, options, hardware, spent_s)

    alarms: list[tuple[float, Mock]] = []

    def noted(left_s: float) -> Mock:
        alarm = Mock(wraps=Alarm(left_s), has_rung=False)
        alarms.append((left_s, alarm))
        return alarm

    monkeypatch.setattr(autodist_policy, "Alarm", noted)
    monkeypatch.setattr(search_plan, "trace", slowly)
    monkeypatch.setattr(search_plan, "search_each", searched)
    entry = zoo.get("mlp")
    options = {"hardware": "cpu", "global_batch": 8, "time_limit_s": 20.0}
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, pas_config=options)
    asked = PlanSearch.of(entry.build(), entry.inputs(), config, spent_s=1.0)
    found = asked.run()
    ((left_s, alarm),) = alarms
    assert left_s == 11.0 and alarm.may_interrupt.called and alarm.note_answer.called
    plan = asked.settled(found).plan
    assert plan.batch is not None and plan.batch.samples == 8
    why = "not searched, as 9 s had passed when other sizes had been traced"
    assert found.refused == {f"microbatches of {size}": why for size in (4, 2, 1)}
    assert plan.certificate is not None
    assert plan.certificate.covers == (
        "any plan on the one mesh that the search came to, without pipelines, but not with 3 of 4 "
        "sizes of a microbatch"
    )
    proof = "\n".join(plan.certificate.proof)
    assert "the search was ended by the time limit of 20 s" in proof
    assert "; no time was left to trace microbatches of 4, microbatches of 2 and 1 more" in proof
