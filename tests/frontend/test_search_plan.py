"""``search_plan``: called like ``parallelize``, with a module or a class."""

import inspect
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import zoo
from api_jobs import Net, X

import shardwright
from shardwright.frontend import search_plan
from shardwright.frontend.search_plan import PlanSearch
from shardwright.policies.autodist import autodist_policy
from shardwright.policies.autodist.candidates.alarm import Alarm
from shardwright.policies.autodist.solver.stopwatch import Stopwatch
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import TraceError

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


@pytest.mark.parametrize(("limit_s", "begun"), [(600.0, [8, 4, 2, 1]), (5.0, [8])])
def test_sizes_are_traced_when_they_are_searched(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, begun: list[int]
) -> None:
    """A trace takes four seconds, and one was over before. The arguments given have 8 samples."""
    seconds, traced = [0.0], []
    trace, search_each = search_plan.trace, search_plan.search_each
    clock = partial(Stopwatch, lambda: seconds[0], lambda: seconds[0])
    monkeypatch.setattr(search_plan, "Stopwatch", clock)

    def slowly(module, args, **options):
        seconds[0] += 4.0
        traced.append(len(args["x"]))
        return trace(module, args, **options)

    def searched(variants, options, hardware, spent_s):
        assert spent_s == 5.0 and traced == [8]
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
    options = {"hardware": "cpu", "global_batch": 8, "time_limit_s": limit_s}
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, pas_config=options)
    given = {"x": torch.zeros(8, 12), "target": torch.zeros(8, 8)}
    asked = PlanSearch.of(entry.build(), given, config, spent_s=1.0)
    found = asked.run()
    ((left_s, alarm),) = alarms
    assert left_s == limit_s - 5.0
    assert alarm.may_interrupt.called and alarm.note_answer.called
    plan = asked.settled(found).plan
    assert plan.batch is not None and traced == begun
    if begun == [8]:
        assert plan.certificate is not None
        left_out = "3 of 4 sizes of a microbatch"
        assert plan.certificate.covers.endswith(f", but not with {left_out}")
        proof = "\n".join(plan.certificate.proof)
        assert f"microbatches of 8 samples; no time was left for {left_out}\n" in proof


def test_a_size_that_cannot_be_traced_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = search_plan.trace

    def only_even(module, args, **options):
        if len(args["x"]) % 2:
            raise TraceError("forward of MLP failed while it was traced")
        return trace(module, args, **options)

    monkeypatch.setattr(search_plan, "trace", only_even)
    entry = zoo.get("mlp")
    options = {"hardware": "cpu", "global_batch": 8, "microbatch": [1, 2]}
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, pas_config=options)
    asked = PlanSearch.of(entry.build(), entry.inputs(), config)
    found = asked.run()
    assert found.refused == {
        "any plan, microbatches of 1": "forward of MLP failed while it was traced"
    }
    certificate = asked.settled(found).plan.certificate
    assert certificate is not None and any("no plan at all" in line for line in certificate.proof)
