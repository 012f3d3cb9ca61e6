"""What stages and the boundaries between them are priced at is what the audit of the lowered plan says, to the last term."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from planning import slow_machine, two_nodes
from plans import zoo_graph

from shardwright.compiler.cost.body_time import body_time
from shardwright.compiler.cost.hardware import Hardware
from shardwright.compiler.cost.operators import OpTime
from shardwright.compiler.cost.pipeline_time import addition_s, transfer_seconds
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.passes.stages import from_nothing
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.outputs import output_wishes
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Adapt, Compute, Instruction
from shardwright.policies.autodist.candidates import Pace, position_ranks, staged
from shardwright.policies.autodist.joining import joined
from shardwright.policies.autodist.placement.place import place
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.policies.autodist.stages.blocks import block_costs
from shardwright.policies.autodist.stages.chain import block_starts
from shardwright.policies.autodist.stages.messages import Boundary, Messages
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh

RATES = (1e6, 1e8)
"""Bytes/s of links: slow ones are for splitting the batch, fast ones for splitting everything else too."""


@functools.cache
def walks(name: str) -> tuple[Walk, ...]:
    """Placements of a model on several meshes, best for machines of several rates, two of them on one mesh."""
    found = []
    for sizes, rate in itertools.product(((2,), (3,), (2, 2)), RATES):
        mesh = Mesh(tuple(zip("xy", sizes, strict=False)))
        config = ComputeConfig(plan_ngpus=mesh.size, runtime_ngpus=mesh.size, outputs="loss")
        ranks = tuple(range(mesh.size))
        wishes = output_wishes(graph(name), config)
        placed = place(PlacementRequest(graph(name), mesh, ranks, machine(rate), config, microbatches=4, outputs=wishes))
        assert not isinstance(placed, Infeasible)
        setting = Setting(machine(RATES[-1]), ComputeConfig(plan_ngpus=8, runtime_ngpus=8), ranks, num_microbatches=4)
        found.append(Walk(lower(graph(name), placed.plan), setting))
    return tuple(found)


def machine(rate: float) -> Hardware:
    return slow_machine(8, bytes_per_s=rate)


def graph(name: str) -> PlannableGraph:
    return zoo_graph(name)


SLOW = [pytest.param(name, seed, marks=pytest.mark.slow) for name in ("gpt2", "t5", "unet") for seed in range(6)]


@pytest.mark.parametrize(("name", "seed"), [("mlp", 0), ("mlp", 1), *SLOW])
def test_stages_and_messages_take_what_the_audit_says(name: str, seed: int) -> None:
    rng = random.Random(seed)
    offers = walks(name)
    menus = [rng.randrange(len(offers)) for _ in range(2)]
    starts = block_starts(graph(name), [1.0] * len(graph(name).ops), 4)
    cut = rng.randrange(1, len(starts))
    program = lower_stages(graph(name), stages_of(name, menus, [graph(name).ops[starts[cut]].name]))
    sizes = [offer.mesh.size for offer in offers]
    messages = Messages(offers, starts, lambda menu, device: tuple(range(device, device + sizes[menu])))
    boundary = messages.boundary(menus[0], menus[1], sizes[menus[0]])
    check(name, program, [offers[menu] for menu in menus], boundary, starts, cut, machine(RATES[-1]))


@pytest.mark.parametrize("pp_place", [0, 1])
def test_positions_take_what_the_audit_says_wherever_their_ranks_are(pp_place: int) -> None:
    """Two positions of two ranks in nodes of two: side by side, or one rank of each in every node."""
    hardware = two_nodes(bytes_per_s=1e3)
    mesh = Mesh((("x", 2),))
    positions = position_ranks(mesh, 2, pp_place)
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, outputs="loss")
    wishes = output_wishes(graph("unet"), config)
    request = PlacementRequest(graph("unet"), mesh, positions[0], hardware, config, microbatches=4, outputs=wishes)
    placed = place(request)
    assert not isinstance(placed, Infeasible)
    walk = Walk(lower(graph("unet"), placed.plan), Setting(hardware, config, positions[0], num_microbatches=4))
    starts = block_starts(graph("unet"), [1.0] * len(graph("unet").ops), 4)
    cut = len(starts) // 2
    plan = staged(placed.plan, [graph("unet").ops[starts[cut]].name], 2, Pace("1f1b", 1), 4, pp_place)
    assert [stage.ranks for stage in plan.stages] == positions and plan.mesh.names.index("pp") == pp_place
    messages = Messages([walk], starts, lambda menu, device: positions[device // 2])
    check("unet", lower_stages(graph("unet"), plan), [walk] * 2, messages.boundary(0, 0, 2), starts, cut, hardware)


def check(
    name: str,
    program: PipelineProgram,
    offers: list[Walk],
    boundary: Boundary,
    starts: list[int],
    cut: int,
    hardware: Hardware,
) -> None:
    """Two stages and the boundary between them cost what the program does that is emitted for them."""
    spans, size = [(0, cut), (cut, len(starts))], offers[0].setting.config.plan_ngpus
    for index, (offer, (start, stop)) in enumerate(zip(offers, spans, strict=True)):
        blocks = block_costs(offer, starts, {}).blocks
        body = body_time(program.programs[index], hardware, program.plan.stages[index].ranks, unit_size=size)
        several = program.shared | program.owned
        held = [d for d in program.programs[index].declarations if not index or d.value.fqn not in several]
        own = replace(program.programs[index], declarations=tuple(held))  # a shared parameter counts where it is used first
        actual = body.forward_s + body.backward_s + addition_s(own, 4, hardware)
        actual -= elsewhere_s(name, program, [(item, gathered_twice(item, time)) for item, time in body.instructions])
        predicted = sum(block.forward_s + block.backward_s for block in blocks[start:stop])
        predicted -= elsewhere_s(name, program, own_instructions(offer, starts[start], starts[cut] if stop == cut else None))
        predicted += float(boundary.taken_s[cut, stop]) if index else float(boundary.sent_s[cut, len(starts)])
        assert predicted == pytest.approx(actual, rel=1e-9)
    transfers = transfer_seconds(program, hardware)
    assert float(boundary.there_s[cut, len(starts)]) == pytest.approx(transfers.get((0, 1), 0.0), rel=1e-9)
    assert float(boundary.back_s[cut, len(starts)]) == pytest.approx(transfers.get((1, 0), 0.0), rel=1e-9)


def stages_of(name: str, menus: list[int], starts: list[str]) -> Plan:
    return joined(graph(name), [walks(name)[menu].program.plan for menu in menus], starts, "1f1b", 4)


def own_instructions(walk: Walk, start: int, stop: int | None) -> list[tuple[Instruction, OpTime]]:
    return [
        (instruction, time)
        for (place, instruction), time in zip(walk.by_place, walk.times, strict=True)
        if start <= place and (stop is None or place < stop)
    ]


def gathered_twice(instruction: Instruction, time: OpTime) -> OpTime:
    """With the second gather of a weight, which the audit counts apart."""
    twice = isinstance(instruction, Adapt) and instruction.gathers_weight and instruction.of.requires_grad
    return OpTime(time.forward_s, time.backward_s + time.forward_s) if twice else time


def elsewhere_s(name: str, program: PipelineProgram, instructions: Iterable[tuple[Instruction, OpTime]]) -> float:
    """Seconds of what every stage makes for itself, and of adapters of shared parameters: the model of stages has them once."""
    free = from_nothing(graph(name))
    made = {value.name for op in graph(name).ops if op.name in free for value in op.results}
    made |= {value.name for value in graph(name).parameters if value.fqn in program.shared | program.owned}
    return sum(
        time.total_s
        for item, time in instructions
        if (item.original.name in free if isinstance(item, Compute) else item.of.name in made)
    )
