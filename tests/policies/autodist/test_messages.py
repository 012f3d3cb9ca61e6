"""What stages and the boundaries between them are priced at is what the audit of the lowered plan says, to the last term."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from planning import slow_machine
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
from shardwright.policies.autodist.blocks import block_costs
from shardwright.policies.autodist.chain import block_starts
from shardwright.policies.autodist.joining import joined
from shardwright.policies.autodist.messages import Messages
from shardwright.policies.autodist.placement import place
from shardwright.policies.autodist.request import PlacementRequest
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.policies.autodist.walk import Setting, Walk
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh

RATES = (1e6, 1e8)
"""Bytes/s of links: slow ones are for splitting the batch, fast ones for splitting everything else too."""


@functools.cache
def walks(name: str) -> tuple[Walk, ...]:
    """Placements of a model on several meshes, best for machines of several rates, two of them on one mesh."""
    found = []
    for sizes, rate in itertools.product(((2,), (3,)) if name == "gpt2" else ((2,), (3,), (2, 2)), RATES):
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


@pytest.mark.parametrize(("name", "seed"), [("gpt2", 1), *SLOW])
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
    costs = [block_costs(offers[menu], starts, {}).blocks for menu in menus]
    spans = [(0, cut), (cut, len(starts))]
    hardware = machine(RATES[-1])
    for index, (blocks, (start, stop)) in enumerate(zip(costs, spans, strict=True)):
        body = body_time(program.programs[index], hardware, program.plan.stages[index].ranks, unit_size=8)
        several = program.shared | program.owned
        held = [d for d in program.programs[index].declarations if not index or d.value.fqn not in several]
        own = replace(program.programs[index], declarations=tuple(held))  # a shared parameter counts where it is used first
        actual = body.forward_s + body.backward_s + addition_s(own, 4, hardware)
        actual -= elsewhere_s(name, program, [(item, gathered_twice(item, time)) for item, time in body.instructions])
        predicted = sum(block.forward_s + block.backward_s for block in blocks[start:stop])
        walked = own_instructions(offers[menus[index]], starts[start], starts[cut] if stop == cut else None)
        predicted -= elsewhere_s(name, program, walked)
        predicted += float(boundary.taken_s[cut, stop]) if index else float(boundary.sent_s[cut, len(starts)])
        assert predicted == pytest.approx(actual, rel=1e-9)
    actual = transfer_seconds(program, hardware)
    assert float(boundary.there_s[cut, len(starts)]) == pytest.approx(actual.get((0, 1), 0.0), rel=1e-9)
    assert float(boundary.back_s[cut, len(starts)]) == pytest.approx(actual.get((1, 0), 0.0), rel=1e-9)


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
