"""Pipelines whose stages differ: where they are the best plan, and that they train like one
device.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zoo
from planning import slow_machine
from plans import annotated, zoo_graph

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.trace import trace
from shardwright.frontend.verification.verify import verify
from shardwright.policies.autodist.autodist_policy import apply, search, settled
from shardwright.policies.autodist.candidates.meshes import stage_sizes
from shardwright.policies.autodist.candidates.results import SearchResult
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.questions.explain import (
    Request,
    explain_module,
    explain_operator,
)
from shardwright.policies.autodist.questions.what_if import against, levers, side_by_side
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError


def config_of(num_ranks: int, **options: Any) -> ComputeConfig:
    return ComputeConfig(
        plan_ngpus=num_ranks,
        runtime_ngpus=num_ranks,
        use_end2end=True,
        outputs="loss",
        pas_config=options,
    )


def machine(num_ranks: int, rate: float) -> Hardware:
    """A slow machine on which nothing hides behind work: predictions of gathers that do are nearly
    exact only.
    """
    slow = slow_machine(num_ranks, bytes_per_s=rate)
    return replace(slow, device=replace(slow.device, overlap=0.0))


@functools.cache
def found_for(name: str, num_ranks: int, rate: float) -> SearchResult:
    options = AutodistOptions(num_microbatches=8, schedule="1f1b", time_limit_s=1e3)
    return search(zoo_graph(name), config_of(num_ranks), options, machine(num_ranks, rate))


@pytest.mark.slow
def test_stages_that_differ_win_where_ranks_do_not_divide() -> None:
    """Five ranks: three stages on one of them each, and a last one with the head on two."""
    found = found_for("gpt2", 5, 1e7)
    assert found.best is not None and found.best.is_mixed
    stages = found.best.plan.stages
    assert (
        sum(stage.mesh.size for stage in stages) == 5 and len({stage.mesh for stage in stages}) > 1
    )
    assert sorted(rank for stage in stages for rank in stage.ranks) == list(range(5))
    equal = [candidate.step_s for candidate in found.audited if not candidate.is_mixed]
    assert found.best.step_s < min(equal)
    assert found.best.predicted_s == pytest.approx(found.best.step_s, rel=1e-9)
    certificate = settled(found, config_of(5), machine(5, 1e7)).certificate
    assert (
        certificate is not None and certificate.bound_s <= certificate.cost_s == found.best.step_s
    )
    assert "the candidate placements were chosen before the stages" in str(certificate)
    assert "candidate placements for every stage" in certificate.space


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks", "rate", "gain"), [("gpt2", 4, 1e8, 0.02), ("unet", 4, 1e8, 0.02)]
)
def test_stages_that_differ_win_where_blocks_do(
    name: str, num_ranks: int, rate: float, gain: float
) -> None:
    """A head, or the convolutions at the ends of a U-Net, want more ranks than the rest."""
    found = found_for(name, num_ranks, rate)
    assert found.best is not None and found.best.is_mixed
    equal = min(candidate.step_s for candidate in found.audited if not candidate.is_mixed)
    assert found.best.step_s < (1 - gain) * equal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_ranks", "rate"), [("gpt2", 5, 1e7), ("gpt2", 4, 1e8), ("unet", 4, 1e8)]
)
def test_stages_that_differ_train_like_one_device(
    name: str, num_ranks: int, rate: float, tmp_path: Path
) -> None:
    best = found_for(name, num_ranks, rate).best
    assert best is not None and len({stage.mesh for stage in best.plan.stages}) > 1
    (tmp_path / "plan.json").write_text(best.plan.dumps())
    entry = zoo.get(name)
    report = verify(
        entry.build(),
        entry.inputs(),
        "saved",
        config_of(num_ranks, load_plan=str(tmp_path / "plan.json")),
        steps=2,
    )
    assert report.ok, str(report)


@pytest.mark.slow
def test_plans_whose_stages_differ_are_explained() -> None:
    """They are explained by the mesh of the stage that an operator is in; with the stages free to
    differ in what would help.
    """
    found = found_for("gpt2", 5, 1e7)
    assert found.best is not None
    options = AutodistOptions(num_microbatches=8, schedule="1f1b", time_limit_s=1e3)
    asked = Request(zoo_graph("gpt2"), config_of(5), options, machine(5, 1e7), found.best)
    head = explain_operator(asked, "lm_head").choices
    assert {"tp=split:n", "tp=split:k", "tp=G", "R"} < {choice.name for choice in head}
    assert [choice.name for choice in head if choice.chosen] == ["tp=split:n"] and head[0].chosen
    assert head[0].step_s == found.best.step_s < head[1].step_s
    first = next(op.name for op in asked.graph.ops if op.module_path.startswith("transformer.h.0"))
    assert [(choice.name, choice.chosen) for choice in explain_operator(asked, first).choices] == [
        ("R", True)
    ]
    module = explain_module(asked, "lm_head").choices
    assert module[0].name == "as planned" and "tp splits vocab" in [
        choice.name for choice in module
    ]
    levers_s = {choice.name: choice.step_s for choice in levers(asked)}
    assert levers_s["the plan"] == pytest.approx(found.best.step_s, rel=1e-9)
    assert levers_s["one more gigabyte of memory"] <= levers_s["the plan"]
    assert levers_s["links of twice the rate"] < levers_s["the plan"]
    for sizes in ({"tp": 5}, {"pp": 5}):
        other = against(asked, sizes)
        assert other.step_s > found.best.step_s
        assert side_by_side(found.best, other)[0] == ("step", found.best.step_s, other.step_s)


def test_where_none_that_differ_are_better_they_are_in_the_bound_all_the_same() -> None:
    """Three stages on one of three ranks each, which is known as a pipeline of equal positions."""
    found = found_for("gpt2", 3, 1e8)
    (equal,) = [candidate for candidate in found.tried if candidate.title == "pp=3, 1f1b"]
    assert not any(candidate.is_mixed for candidate in found.tried) and found.tried_mixed
    assert found.bounds["3 stages that may differ, 1f1b"] <= equal.predicted_s


def test_numbers_of_ranks_of_a_stage() -> None:
    assert stage_sizes(5) == [1, 2, 3, 4] and stage_sizes(1) == []
    assert stage_sizes(8) == [1, 2, 4]
    assert stage_sizes(12) == [1, 2, 3, 4, 6, 8]
    assert stage_sizes(64) == [4, 8, 16, 32]


def test_unequal_positions_run_one_stage_each() -> None:
    with pytest.raises(ConfigError) as caught:
        apply(zoo_graph("mlp"), config_of(4, num_microbatches=8, num_stages=3, schedule="zb_v"))
    assert str(caught.value) == (
        "policy 'autodist' has num_stages=3 and schedule='zb_v'\n"
        "  why:   4 ranks do not divide into so many equal positions, and unequal ones run "
        "one stage each\n"
        "  try:   a num_stages that divides plan_ngpus, or schedule '1f1b'"
    )


@pytest.mark.slow
def test_a_batch_of_any_size_crosses_between_stages() -> None:
    """Its messages are priced at the size of the dummy arguments; positions of two ranks cut it."""
    entry = zoo.get("mlp")
    dynamic = {path: {0: "batch"} for path in entry.inputs()}
    graph = annotated(trace(entry.build(), entry.inputs(), dynamic_dims=dynamic))
    options = AutodistOptions(num_microbatches=4, schedule="1f1b", time_limit_s=1e3)
    found = search(graph, config_of(4), options, slow_machine(4, bytes_per_s=1e8))
    pipelines = [candidate for candidate in found.tried if candidate.plan.stages]
    assert found.best is not None and any("pp=2" in candidate.title for candidate in pipelines)
    audited = [candidate for candidate in pipelines if candidate.cost is not None]
    assert audited and all(
        candidate.predicted_s == pytest.approx(candidate.step_s, rel=0.05) for candidate in audited
    )
