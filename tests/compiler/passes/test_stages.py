"""Graphs cut into stages: what each stage reads, receives, sends and returns, and cuts that cannot
be.
"""

from dataclasses import replace

import plans
import pytest

from shardwright.compiler.passes.lower_stages import lower_stages, verify_pipeline
from shardwright.compiler.passes.recompute_regions import mark_recompute
from shardwright.compiler.passes.stages import from_nothing, split_stages, stage_of_ops
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan, StagePlan
from shardwright.policies.stage_places import starts_at
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh


def stages_at(graph: PlannableGraph, *paths: str, meshes: tuple[dict[str, int], ...] = ()) -> Plan:
    """Stages that begin at these module paths, each on a mesh of its own."""
    stages, first_rank = [], 0
    for index, first_op in enumerate(["", *starts_at(graph, paths)]):
        mesh = Mesh.of(meshes[index] if meshes else {})
        stages.append(StagePlan(first_op, mesh, tuple(range(first_rank, first_rank + mesh.size))))
        first_rank += mesh.size
    return Plan(
        Mesh.of({"rank": first_rank}), stages=tuple(stages), schedule="1f1b", num_microbatches=2
    )


def test_labels_are_read_where_the_loss_is_and_tied_weights_are_in_both_stages() -> None:
    graph = plans.zoo_graph("gpt2")
    program = lower_stages(graph, stages_at(graph, "transformer.h.1"))
    verify_pipeline(program)
    first, last = program.stages
    assert [v.name for v in first.reads] == ["input_ids"] and [v.name for v in last.reads] == [
        "labels"
    ]
    assert first.receives == () and [source for _, source in last.receives] == [0]
    assert [target for _, target in first.sends] == [1] and last.sends == ()
    assert [path for path, _ in last.outputs] == ["loss", "logits"] and first.outputs == ()
    assert program.shared == {"transformer.wte.weight": (0, 1)}
    assert {d.value.fqn for d in program.declarations} >= {value.fqn for value in graph.parameters}


def test_a_value_that_skips_stages_goes_straight_to_where_it_is_needed() -> None:
    graph = plans.zoo_graph("t5")
    program = lower_stages(
        graph, stages_at(graph, "encoder.block.1", "decoder.block.0", "decoder.block.1")
    )
    verify_pipeline(program)
    encoded = {
        value.name: (source, stage.index)
        for stage in program.stages
        for value, source in stage.receives
    }
    assert len(encoded) > 2
    targets: dict[str, set[int]] = {}
    for crossing in program.crossings:
        targets.setdefault(crossing.value.name, set()).add(crossing.target)
    assert {2, 3} in targets.values()  # what the encoder made, used by both decoder stages


def test_values_made_from_nothing_are_made_in_every_stage() -> None:
    graph = plans.zoo_graph("bert")
    free = from_nothing(graph)
    for stage in split_stages(
        graph, stage_of_ops(graph, stages_at(graph, "bert.encoder.layer.1")), 2
    ):
        made = {value.name for op in graph.ops if op.name in free for value in op.results}
        assert not made & {value.name for value, _ in stage.receives}


@pytest.mark.slow
def test_what_another_stage_makes_for_itself_is_in_none_of_its_regions() -> None:
    """Else a stage would compute again, and its backward not come in two parts, for positions from
    the first layer.
    """
    graph = mark_recompute(plans.zoo_graph("t5"), ("decoder.block.0",))
    first, last = lower_stages(graph, stages_at(graph, "decoder.block.1")).stages
    inside = {op.name for op in first.graph.ops if op.region is not None}
    assert inside & {op.name for op in last.graph.ops} and not any(
        op.region for op in last.graph.ops
    )


def test_meshes_may_differ() -> None:
    graph = plans.zoo_graph("llama")
    program = lower_stages(graph, stages_at(graph, "model.layers.1", meshes=({"tp": 2}, {"tp": 4})))
    verify_pipeline(program)
    assert {len(c.sent.ranks) for c in program.crossings} == {2} and {
        len(c.received.ranks) for c in program.crossings
    } == {4}


def test_stages_out_of_order() -> None:
    graph = plans.zoo_graph("gpt2")
    first, second = starts_at(graph, ["transformer.h.1", "transformer.h.0"])
    stages = (
        StagePlan("", Mesh(), (0,)),
        StagePlan(first, Mesh(), (1,)),
        StagePlan(second, Mesh(), (2,)),
    )
    with pytest.raises(PlanError) as error:
        lower_stages(graph, Plan(Mesh.of({"pp": 3}), stages=stages))
    assert str(error.value) == (
        f"stage 2 begins at operator {second!r}, not after stage 1 begins\n"
        f"  why:   stage 1 begins at {first!r}; values would have to flow backwards\n"
        "  try:   list the stages in the order of the graph"
    )


def test_a_stage_cannot_begin_inside_a_recompute_region() -> None:
    graph = mark_recompute(plans.zoo_graph("gpt2"), ["transformer.h.*"])
    inside = [op.name for op in graph.ops if op.module_path.startswith("transformer.h.1")][5]
    stages = (StagePlan("", Mesh(), (0,)), StagePlan(inside, Mesh(), (1,)))
    with pytest.raises(PlanError, match="inside a recompute region"):
        lower_stages(graph, Plan(Mesh.of({"pp": 2}), stages=stages))


def test_more_stages_than_operators() -> None:
    graph = plans.zoo_graph("mlp")
    few = replace(graph, ops=graph.ops[:2])
    stages = tuple(StagePlan("", Mesh(), (rank,)) for rank in range(3))
    with pytest.raises(
        PlanError, match="the plan has 3 stages, but the graph has only 2 operators"
    ):
        lower_stages(few, Plan(Mesh.of({"pp": 3}), stages=stages))


def test_tied_weights_on_unequal_meshes_belong_to_the_first_stage() -> None:
    graph = plans.zoo_graph("gpt2")
    program = lower_stages(graph, stages_at(graph, "transformer.h.1", meshes=({"tp": 2}, {})))
    assert program.shared == {} and list(program.owned) == ["transformer.wte.weight"]
    assert list(program.owned["transformer.wte.weight"]) == [0, 1]


def test_recompute_of_an_unknown_module() -> None:
    with pytest.raises(PlanError) as error:
        mark_recompute(plans.zoo_graph("gpt2"), ["transformer.layers.*"])
    assert str(error.value) == (
        "recompute names 'transformer.layers.*', but no operator belongs to such a module\n"
        "  try:   give module paths as in named_modules(), with * for any one name: "
        "'model.layers.*'"
    )
