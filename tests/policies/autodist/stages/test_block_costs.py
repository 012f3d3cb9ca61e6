"""What blocks cost, with some of them computed again, is what the program does that is lowered for
them.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from planning import mesh_of, slow_machine
from plans import random_plan, zoo_graph

from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.time.body_time import body_time
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.passes.recompute_regions import mark_recompute
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule, staged
from shardwright.policies.autodist.stages.block_costs import block_costs
from shardwright.policies.autodist.stages.chain import Part, layer_blocks, layer_parts
from shardwright.policies.autodist.stages.stage_costs import StageCosts
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.runtime.config import ComputeConfig

CHOICES = ("none", "all", "some", "parts")
CASES = [
    (name, mesh, choice)
    for name in ("gpt2", "llama", "t5")
    for mesh in ("2", "2x2")
    for choice in CHOICES
]
FAST = [("gpt2", "2", "parts"), ("gpt2", "2x2", "all")]


def drawn(parts: dict[int, tuple[Part, ...]], choice: str, rng: random.Random) -> set[str]:
    """Module paths: of layers, or of parts of layers."""
    if choice == "none":
        return set()
    if choice == "parts":
        return {rng.choice(own).path for own in parts.values()}
    return {own[0].path for own in parts.values() if choice == "all" or rng.random() < 0.5}


@pytest.mark.parametrize(
    ("name", "mesh", "choice"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_blocks_take_what_their_program_does(name: str, mesh: str, choice: str) -> None:
    """Every operator has a random strategy, so that there are adapters in front
    of regions, and inside.
    """
    graph, rng = zoo_graph(name), random.Random(f"{name} {mesh} {choice}")
    starts, layers = layer_blocks(graph)
    parts = layer_parts(graph, starts, layers)
    paths = drawn(parts, choice, rng)
    plan = random_plan(graph, mesh_of(mesh), rng)
    size = plan.mesh.size
    config = ComputeConfig(plan_ngpus=size, runtime_ngpus=size)
    setting = Setting(slow_machine(size), config, tuple(range(size)))
    marked = mark_recompute(graph, tuple(paths))
    marked_program = lower(marked, plan)
    body = body_time(marked_program, setting.hardware, setting.ranks, gathers_ahead=False)
    blocks = block_costs(
        Walk(lower(graph, plan), setting), starts, parts, lambda part: part.path in paths
    ).blocks
    assert sum(block.forward_s for block in blocks) == pytest.approx(body.forward_s, rel=1e-12)
    assert sum(block.backward_s for block in blocks) == pytest.approx(body.backward_s, rel=1e-12)
    own = block_costs(
        Walk(lower(marked, plan), setting), starts, {}
    ).blocks  # regions that the model has already
    assert sum(block.backward_s for block in own) == pytest.approx(body.backward_s, rel=1e-12)
    assert [block.activation_bytes for block in own] == [block.activation_bytes for block in blocks]


RECOMPUTED = (
    (),
    ("h.1",),
    ("h.0", "h.1"),
    ("h.1.attn",),
    ("h.0.mlp.act", "h.1.mlp.act"),
    ("h.0.ln_1", "h.0.mlp", "h.1"),
    ("h.0", "h.1.mlp.c_proj", "h.1.mlp.dropout"),
)


@pytest.mark.parametrize(
    ("bytes_per_s", "overlap"),
    [
        (3e4, 1.0),
        (1e2, 0.8),
        *(pytest.param(rate, 0.8, marks=pytest.mark.slow) for rate in (1e3, 1e4, 1e5, 1e6)),
    ],
)
def test_blocks_hide_what_their_program_begins_ahead(bytes_per_s: float, overlap: float) -> None:
    """Blocks take as long as the whole program with weights in pieces over two units, also with
    layers or parts of them computed again. Where gathers take much longer than what is computed
    beside them, blocks may take a little less, and never more.
    """
    graph, mesh = zoo_graph("gpt2"), mesh_of("2")
    hardware = slow_machine(4, bytes_per_s=bytes_per_s)
    hardware = replace(hardware, device=replace(hardware.device, overlap=overlap))
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=4, use_zero=3)
    plan = replace(graph.builder(mesh=mesh).split("batch", "x").plan(), zero=2)
    starts, layers = layer_blocks(graph)
    parts = layer_parts(graph, starts, layers)
    walk = Walk(lower(graph, plan), Setting(hardware, config, (0, 1), gathers_ahead=True))
    for names in RECOMPUTED:
        paths = tuple(f"transformer.{name}" for name in names)
        program = lower(mark_recompute(graph, paths), plan)
        blocks = block_costs(walk, starts, parts, lambda part, paths=paths: part.path in paths)
        body = body_time(program, hardware, (0, 1))
        waited = body_time(program, hardware, (0, 1), gathers_ahead=False)
        forward_s, backward_s = (
            sum(getattr(block, name) for block in blocks.blocks)
            for name in ("forward_s", "backward_s")
        )
        assert forward_s == pytest.approx(body.forward_s, rel=1e-12)
        assert forward_s < waited.forward_s
        assert backward_s <= body.backward_s * (1 + 1e-12) < waited.backward_s
        is_long = bool(names) and bytes_per_s < 1e3
        assert backward_s >= body.backward_s * (0.996 if is_long else 1 - 1e-5)
    assert walk.exposed_s > 0


@pytest.mark.parametrize("use_zero", [0, 1])
def test_optimizer_state_that_stages_share_is_that_of_the_audit(use_zero: int) -> None:
    """The embedding of a tied head is held by the first stage and the last, each with a part of its
    state under ZeRO.
    """
    graph, mesh, hardware = zoo_graph("gpt2"), mesh_of("2"), slow_machine(8)
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=8, use_zero=use_zero)
    plan = graph.builder(mesh=mesh).split("batch", "x").plan()
    walk = Walk(lower(graph, plan), Setting(hardware, config, (0, 1), num_microbatches=4))
    starts = layer_blocks(graph)[0]
    cut = len(starts) // 2
    program = lower_stages(
        graph, staged(plan, [graph.ops[starts[cut]].name], 2, NamedSchedule("1f1b", 1), 4, 0)
    )
    assert set(program.shared) == {"transformer.wte.weight"}
    costs = audit(program, config, hardware)
    tables = StageCosts(block_costs(walk, starts, {}).placed(2), 4, splits_backward=False)
    for index, (start, stop) in enumerate([(0, cut), (cut, len(starts))]):
        declared = [d for d in program.programs[index].declarations if d.value.requires_grad]
        beside = sum(2 * local_bytes(d.layout, d.value.dtype, mesh) for d in declared)
        beside += sum(
            local_bytes(d.layout, d.value.dtype, mesh)
            for d in program.programs[index].declarations
            if d not in declared
        )
        state = tables.held_bytes[start, stop] - beside
        assert state == pytest.approx(costs.memory[2 * index].optimizer_bytes, rel=1e-3)
    alone = StageCosts(
        block_costs(walk, starts, {}).placed(2, shares=False), 4, splits_backward=False
    )
    assert (alone.held_bytes[:cut, cut:] == tables.held_bytes[:cut, cut:]).all() == (not use_zero)
    assert alone.held_bytes[0, len(starts)] == tables.held_bytes[0, len(starts)]
    assert tables.held_bytes[0, len(starts)] == pytest.approx(
        sum(held.held_bytes for held in walk.parameters), rel=1e-12
    )
