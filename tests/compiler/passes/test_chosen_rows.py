"""What may stand between the dispatch of tokens to experts and the sum of their rows, and where
rows may lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import expert_models
import plans
import pytest
import torch
import torch.nn.functional as F
from expert_models import BY_HAND, verify_experts
from torch import Tensor, nn

from shardwright.compiler.cost.work_share import work_share
from shardwright.compiler.passes.chosen_rows import (
    check_has_experts,
    check_imbalance,
    imbalance_of,
    stored_shares,
    with_imbalance,
)
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.plan.builder import PlanBuilder, PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.frontend.cli.model_arguments import read_imbalance
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, PlanError, TraceError
from shardwright.runtime.layout import Mesh

Gate = Callable[[Tensor, Tensor], Tensor]
"""What becomes of two halves ``[rows, inner]`` of what experts compute."""

ONE_BY_ONE: dict[str, Gate] = {
    "softmax of a row": lambda a, b: a.softmax(-1) * b,
    "norm of a row": lambda a, b: F.layer_norm(a * b, (4,)),
    "parts of a row": lambda a, b: (a * b).view(-1, 2, 2).sum(1).repeat(1, 2),
    "a row joined": lambda a, b: torch.cat([a[:, :2], b[:, 2:].clamp(-1, 1)], 1),
    "masked": lambda a, b: (a * b).masked_fill(a > 0, 0.5),
}
ACROSS_ROWS: dict[str, tuple[str, Gate]] = {
    "softmax over rows": ("softmax", lambda a, b: a.softmax(0) * b),
    "softmax over rows that lie last": ("t", lambda a, b: a.T.softmax(-1).T * b),
    "mean of rows": ("mean", lambda a, b: a * b - b.mean(0)),
    "norm over rows": ("batch_norm", lambda a, b: F.batch_norm(a * b, None, None, training=True)),
    "running sum": ("cumsum", lambda a, b: (a * b).cumsum(0)),
    "two rows in one": ("view", lambda a, b: (a * b).view(-1, 8).softmax(-1).view(-1, 4)),
    "rows against rows": ("t", lambda a, b: a @ (b.T @ a)),
    "half of the rows": ("getitem", lambda a, b: torch.cat([a, b], 0)[::2]),
    "numbers of rows": ("mul", lambda a, b: a * b * torch.arange(a.shape[0])[:, None]),
    "drawn anew": ("rand_like", lambda a, b: a * b * torch.rand_like(a)),
}


def use(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts compute with another gate."""

    def apply(self: Any, rows: Tensor) -> Tensor:
        return gate(*rows.chunk(2, dim=-1))

    monkeypatch.setattr(expert_models.Experts, "_apply_gate", apply)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_treats_rows_one_by_one_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(ONE_BY_ONE[name], monkeypatch)
    entry = expert_models.get(BY_HAND)
    config = {"plan_ngpus": 4, "runtime_ngpus": 4, "pas_config": {"ep": 2, "etp": 2}}
    report = expert_models.verify(entry.build(), entry.inputs(), "ep", config)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ACROSS_ROWS)
def test_what_looks_across_rows_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, gate = ACROSS_ROWS[name]
    use(gate, monkeypatch)
    entry = expert_models.get(BY_HAND)
    graph = plans.traced(entry.build(num_layers=1), entry.inputs())
    with pytest.raises(TraceError) as caught:
        plans.annotated(graph)
    message = str(caught.value)
    assert message.startswith(f"{target} between the dispatch of tokens to experts and the sum")
    assert f"{__file__}:" in message and "(layers.0.experts)" in message
    assert "this does not treat every row by itself" in message
    assert "compute it before tokens are dispatched, or after their rows are combined" in message


def test_dropout_of_rows_is_drawn_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans cannot all draw the same numbers: rows have no positions."""
    use(lambda a, b: F.dropout(a * b, 0.5), monkeypatch)
    entry = expert_models.get(BY_HAND)
    graph = plans.traced(entry.build(num_layers=1), entry.inputs())
    text = "".join(plans.compile_with(graph, "ep", 2).files.values())
    found = {line.strip() for line in text.splitlines() if "self.random_function(" in line}
    assert found and all(', dropout, "ep"' in line for line in found), found
    with pytest.raises(
        PlanError, match='for rows of experts, with rng="plan_independent"'
    ) as caught:
        plans.compile_with(graph, "ep", 2, rng="plan_independent")
    assert "(layers.0.experts)" in str(caught.value)
    with pytest.raises(PlanError, match="dropout draws numbers for rows of experts"):
        plans.compile_with(graph, "dp", 1, rng="plan_independent")


# ------------------------------------------------------------------------------------------------
# where rows lie


def graph_by_hand() -> Any:
    entry = expert_models.get(BY_HAND)
    return plans.traced(entry.build(num_layers=1), entry.inputs())


def test_the_share_that_is_stored_is_that_of_the_choices() -> None:
    """Each token chooses two of six experts."""
    graph = plans.annotated(graph_by_hand())
    shares = stored_shares(graph)
    between = {
        value.name
        for op in graph.ops
        if op.target in ("dispatch", "grouped_linear", "silu", "chunk")
        and "experts" in op.module_path
        for value in op.results
    }
    assert between <= shares.keys() and set(shares.values()) == {2 / 6}


@pytest.mark.parametrize("other", ["R", "split:t.0", "split:e"])
def test_rows_are_not_converted_between_cuts(other: str) -> None:
    """One product has its rows on other ranks than the operators around it."""
    graph = graph_by_hand()

    def policy(planned: Any, config: Any) -> Any:
        builder: PlanBuilder = planned.builder(mesh={"ep": 2})
        builder.split("batch", "ep")
        if other != "split:e":
            builder.split("experts", "ep")
        product = next(op for op in planned.ops if op.target == "grouped_linear")
        return builder.strategy(product, "ep", other).build()

    with pytest.raises(PlanError) as caught:
        plans.compile_with(graph, policy, 2)
    message = str(caught.value)
    assert message.startswith("the rows of layers_0_experts_rows cannot be converted from [")
    assert "(layers.0.experts)" in message
    assert "only dispatch and combine move them" in message
    assert "let all operators between dispatch and combine split experts, or all of them" in message


def test_batch_and_experts_are_split_in_either_order() -> None:
    graph = graph_by_hand()

    def policy(*dims: str) -> Any:
        def split(planned: Any, config: Any) -> Any:
            builder: PlanBuilder = planned.builder(mesh={"ep": 2})
            for dim in dims:
                builder.split(dim, "ep")
            return builder.build()

        return split

    found = []
    for dims in (("batch", "experts"), ("experts", "batch")):
        strategies = plans.compile_with(graph, policy(*dims), 2).plan.strategies
        rows = [op for op in graph.ops if op.target in ("dispatch", "grouped_linear", "combine")]
        found.append([strategies[op.name]["ep"] for op in rows])
    assert found[0] == found[1]
    assert {strategy.partition(":")[0] for strategy in found[0]} == {"exchange", "split"}


def test_an_imbalance_of_one_layer(tmp_path: Path) -> None:
    """Another assumption for a layer by its path; the others keep theirs, and so does a file."""
    entry = expert_models.get(BY_HAND)
    graph = plans.annotated(plans.traced(entry.build(), entry.inputs()))
    named = {"layers.1": 2.5}
    check_imbalance(graph, named)
    assert imbalance_of(graph) == 1.25
    measured = imbalance_of(with_imbalance(graph, named))
    assert measured == {"layers.0.experts": 1.25, "layers.1.experts": 2.5}
    plan = Plan(mesh=Mesh.of({"ep": 2}), imbalance=measured)
    assert Plan.from_json(json.loads(plan.dumps())).imbalance == measured
    with pytest.raises(PlanError, match=r"given for 'layers.7', which has no experts"):
        check_imbalance(graph, {"layers.7": 2.0})
    check_has_experts(graph, "--imbalance")
    dense = plans.traced(nn.Linear(2, 2), {"input": torch.zeros(2, 2)})
    with pytest.raises(PlanError, match="--imbalance is about experts, and Linear has none"):
        check_has_experts(dense, "--imbalance")
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(named))
    assert read_imbalance(str(file), 4) == named and read_imbalance("2", 2) == 2.0
    for text, problem in (
        ('{"a": 0.5}', "of 'a' is 0.5, not a number from 1"),
        ("{", "cannot"),
        ('{"a": 2, "b": 4.5}', "the imbalance in .* of 'b' is 4.5, more than a rank can get"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            read_imbalance(str(file), 4)


def test_ranks_share_the_work_of_experts_however_unevenly_they_are_chosen() -> None:
    """Nobody is told that every rank computes all experts, where one may get all tokens."""
    entry = expert_models.get(BY_HAND)
    graph = plans.annotated(plans.traced(entry.build(), entry.inputs()))
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    made = find_policy("ep").apply(graph, config)
    assert isinstance(made, PlannableGraph)
    alone = replace(made, plan=None)
    for imbalance in (1.0, 2.0):
        shared = work_share(lower(alone, replace(made.decided, imbalance=imbalance)))
        assert shared is not None and shared.share == 0.5 and not shared.whole


def test_a_pipeline_knows_what_its_plan_assumes() -> None:
    entry = expert_models.get(BY_HAND)
    graph = plans.annotated(plans.traced(entry.build(), entry.inputs()))
    options = {"num_stages": 2, "dp": 2, "tp": 1, "ep": 2, "num_microbatches": 2}
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True, pas_config=options)
    made = find_policy("hybrid").apply(graph, config)
    assert isinstance(made, Plan)
    program = lower_stages(graph, replace(made, imbalance=3.0))
    known = [imbalance_of(part.graph) for part in (program, *program.programs)]
    assert known == [3.0, 3.0, 3.0]


def test_stages_do_not_begin_between_dispatch_and_combine() -> None:
    report = verify_experts(
        BY_HAND,
        "hybrid",
        {
            "plan_ngpus": 3,
            "runtime_ngpus": 3,
            "use_end2end": True,
            "pas_config": {"num_stages": 3, "tp": 1, "dp": 1, "ep": 1, "num_microbatches": 2},
        },
        steps=1,
    )
    assert report.ok, str(report)
