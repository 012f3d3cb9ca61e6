"""Gradients of weights that are computed while a sum is under way: which, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import plans
import pytest
import torch
from covers import spread
from torch import nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.passes.verify_program import verify_program
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Program
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import InternalError, PlanError


class Block(nn.Module):
    """Three products of one value, one of them frozen, and one weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.gate, self.up, self.frozen = (nn.Linear(8, 16, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.twice = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x).relu())
        wide = self.gate(y).relu() * self.up(y) * self.frozen(y) + self.twice(y) * self.twice(2 * y)
        return self.down(wide).pow(2).sum()


def program_of(**options: object) -> Program:
    graph = plans.traced(Block().double(), {"x": torch.ones(4, 8, dtype=torch.float64)})
    compiled = plans.compile_with(graph, "tp", 2, overlap_communication=True, **options)
    assert isinstance(compiled.program, Program)
    return compiled.program


def beside(program: Program) -> list[list[str]]:
    """The weights beside each adapter."""
    found = [[w.fqn or "" for w in i.beside] for i in program.body if isinstance(i, Adapt)]
    return [names for names in found if names]


def test_weights_with_one_reader_and_a_gradient() -> None:
    program = program_of()
    assert ["gate.weight", "up.weight"] in beside(program)
    everything = {name for names in beside(program) for name in names}
    assert not everything & {"frozen.weight", "twice.weight"}


def test_nothing_is_beside_anything_unless_it_is_asked_for() -> None:
    graph = plans.traced(Block().double(), {"x": torch.ones(4, 8, dtype=torch.float64)})
    compiled = plans.compile_with(graph, "tp", 2)
    assert isinstance(compiled.program, Program) and not beside(compiled.program)


def _without(program: Program, name: str) -> Callable[[Instruction], Instruction]:
    def changed(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Adapt):
            return instruction
        return replace(instruction, beside=tuple(w for w in instruction.beside if w.fqn != name))

    return changed


def _plain(program: Program, name: str) -> Callable[[Instruction], Instruction]:
    def changed(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Compute) or instruction.original.name != name:
            return instruction
        return replace(instruction, op=instruction.op.retarget("linear"))

    return changed


def _twice(program: Program, name: str) -> Callable[[Instruction], Instruction]:
    def changed(instruction: Instruction) -> Instruction:
        if not isinstance(instruction, Adapt) or not instruction.beside:
            return instruction
        return replace(instruction, beside=(*instruction.beside, instruction.beside[0]))

    return changed


def _at_another_adapter(program: Program, name: str) -> Callable[[Instruction], Instruction]:
    weight = next(d.value for d in program.declarations if d.value.fqn == name)

    def changed(instruction: Instruction) -> Instruction:
        if isinstance(instruction, Adapt) and instruction.step.kind == "all_reduce":
            return replace(instruction, beside=(weight,))
        return _without(program, name)(instruction)

    return changed


@pytest.mark.parametrize(
    ("mutated", "name", "says"),
    [
        (_without, "up.weight", "leaves the gradient of its weight to no sum"),
        (_plain, "up", "has its gradient beside a sum, and other readers"),
        (_twice, "", "cannot get its gradient beside"),
        (_at_another_adapter, "up.weight", "cannot get its gradient beside"),
    ],
)
def test_what_does_not_fit_is_noticed(
    mutated: Callable[[Program, str], Callable[[Instruction], Instruction]], name: str, says: str
) -> None:
    program = program_of()
    body = tuple(map(mutated(program, name), program.body))
    assert body != program.body
    verify_program(program)
    with pytest.raises(InternalError, match=says):
        verify_program(replace(program, body=body))


def test_a_schedule_that_puts_weights_off_is_refused() -> None:
    config = ComputeConfig(
        plan_ngpus=4,
        runtime_ngpus=4,
        use_end2end=True,
        overlap_communication=True,
        pas_config={"tp": 2, "num_stages": 2, "num_microbatches": 4, "schedule": "zb_h1"},
    )
    graph = plans.zoo_traced("gpt2")
    with pytest.raises(PlanError, match="does not go with the schedule 'zb_h1'") as refused:
        compile_graph(graph, find_policy("hybrid").apply, config)
    assert "1f1b" in str(refused.value)


@pytest.mark.parametrize("options", spread([{}, {"sequence_parallel": True}], 2, first=1))
def test_what_runs_beside_a_sum_costs_no_time(options: dict[str, bool]) -> None:
    """Seconds of products and bytes stay; sums take less by what the products hide."""
    graph, machine = plans.zoo_traced("llama"), load_hardware("h100", num_devices=2)
    costs = []
    for overlaps in (False, True):
        config = ComputeConfig(
            plan_ngpus=2, runtime_ngpus=2, overlap_communication=overlaps, pas_config=options
        )
        compiled = compile_graph(graph, find_policy("tp").apply, config)
        costs.append(audit(compiled.program, config, machine))
    (before,), (after,) = ([cost.ranks[0]] for cost in costs)
    assert after.compute_s == pytest.approx(before.compute_s, rel=1e-12)
    assert after.comm_bytes == before.comm_bytes
    kind = "tp reduce_scatter" if options else "tp all_reduce"
    assert 0 < after.comm_s[kind] < before.comm_s[kind]
    saved = before.comm_s[kind] - after.comm_s[kind]
    assert costs[0].step_s - costs[1].step_s == pytest.approx(saved, rel=1e-9)
