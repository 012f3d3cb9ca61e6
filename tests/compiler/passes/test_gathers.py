"""Which weights are gathered together: as few collectives as hold no more."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import plans
import pytest
from covers import spread
from hypothesis import given
from hypothesis import strategies as st

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.passes import gathers
from shardwright.compiler.passes.gathers import GatherTogether
from shardwright.compiler.passes.verify_program import verify_program
from shardwright.compiler.plan.program import Adapt, Program, gathers_at
from shardwright.compiler.plan.repeated_blocks import in_front, writes
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import InternalError


def groups(sizes: list[int], *, first_alone: bool = False, last_alone: bool = False) -> list[int]:
    """The sizes of the groups of some weights."""
    ends = gathers._ends_of_groups(sizes, first_alone=first_alone, last_alone=last_alone)
    assert ends[-1] == len(sizes)
    return [sum(sizes[start:end]) for start, end in pairwise([0, *ends])]


def test_small_weights_come_together_beside_large_ones() -> None:
    assert groups([3, 1, 4, 4]) == [4, 4, 4]
    assert groups([4, 1, 1, 4, 11, 11, 11]) == [10, 11, 11, 11]
    assert groups([5, 5, 5, 5]) == [5, 5, 5, 5]
    # Beside an end may lie what is larger than anything in the layer.
    assert groups([1, 1, 9, 9, 1, 1], first_alone=True, last_alone=True) == [1, 1, 9, 9, 1, 1]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.booleans(), st.booleans())
def test_groups_hold_no_more(sizes: list[int], first_alone: bool, last_alone: bool) -> None:
    found = groups(sizes, first_alone=first_alone, last_alone=last_alone)

    def held(weights: list[int]) -> tuple[int, int]:
        pairs = list(pairwise(weights))
        return max((a + b for a, b in pairs), default=0), max(
            (a + 2 * b for a, b in pairs), default=0
        )

    if len(found) > 1:
        assert held(found) <= held(sizes) and held(found)[1] <= held(sizes)[1]
    if first_alone:
        assert found[0] == sizes[0]
    if last_alone:
        assert found[-1] == sizes[-1]


@pytest.mark.parametrize("name", spread(["gpt2", "llama"], 2, first=1))
def test_steps_are_no_slower_and_hold_no_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit says so: the collectives are fewer, the bytes the same."""
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=4, use_zero=3, outputs="loss")
    hardware = load_hardware("h100", num_devices=4)

    def compiled() -> Program:
        found = compile_graph(plans.zoo_graph(name), find_policy("dp").apply, config).program
        assert isinstance(found, Program)
        return found

    together = compiled()
    monkeypatch.setattr(GatherTogether, "__call__", lambda self, program: program)
    alone = compiled()
    ours, theirs = (audit(program, config, hardware) for program in (together, alone))
    assert ours.step_s < theirs.step_s
    assert ours.ranks[0].comm_bytes == theirs.ranks[0].comm_bytes
    assert ours.memory[0].peak_bytes <= theirs.memory[0].peak_bytes
    num_joining = sum(adapter.joins for adapter in together.adapters())
    assert (
        0
        < num_joining
        == sum(
            len(gathers_at(together.body, at)) - 1
            for at, one in enumerate(together.body)
            if isinstance(one, Adapt) and not one.joins
        )
    )
    # The verifier refuses what one collective cannot do.
    last = next(i for i in reversed(together.body) if isinstance(i, Adapt))
    wrong = [replace(i, joins=True) if i is last else i for i in together.body]
    with pytest.raises(InternalError, match="cannot join what stands before it"):
        verify_program(replace(together, body=tuple(wrong)))


def test_keys_and_values_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads both, so they are whole at the same time in any case. Where communication
    overlaps each is a message of its own, which may be started.
    """
    options = {"cp_mode": "gather"}
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, outputs="loss", pas_config=options)
    hardware = load_hardware("h100", num_devices=2)

    def compiled(config: ComputeConfig) -> Program:
        policy = find_policy("cp")
        found = compile_graph(plans.zoo_graph("llama"), policy.apply, config).program
        assert isinstance(found, Program)
        return found

    together = compiled(config)
    gathers = [a for a in together.adapters() if a.step.kind == "all_gather"]
    num_layers = len(gathers) // 2
    assert [gather.joins for gather in gathers] == [False, True] * num_layers
    overlapping = compiled(replace(config, overlap_communication=True))
    assert not any(adapter.joins for adapter in overlapping.adapters())
    # The verifier refuses one that joins an operator in front of both.
    first, second, *_ = gathers
    others = [i for i in together.body if i is not second]
    at = others.index(first)
    wrong = (*others[:at], second, *others[at:])
    with pytest.raises(InternalError, match="cannot join what stands before it"):
        verify_program(replace(together, body=wrong))
    # Both go in front of the layer that reads them, or none.
    place = together.body.index(first)
    makes_values = next(i for i in together.body if second.value in writes(i))
    attention = together.body[place + 2]
    for before, moved in (([], [first, second]), ([makes_values], [])):
        layer = [*before, first, second, attention]
        assert in_front(layer, lambda name: False, recompute=False) == moved

    monkeypatch.setattr(GatherTogether, "__call__", lambda self, program: program)
    ours, theirs = (audit(p, config, hardware) for p in (together, compiled(config)))
    assert ours.step_s < theirs.step_s
    assert ours.ranks[0].comm_bytes == theirs.ranks[0].comm_bytes
    assert ours.memory[0].peak_bytes <= theirs.memory[0].peak_bytes
