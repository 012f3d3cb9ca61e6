"""The turns in which axes deal positions."""

from __future__ import annotations

import plans
import pytest
import zoo
from sequence_models import get

from shardwright.compiler.ops.rule import ATTENTION


@pytest.mark.parametrize(
    ("name", "turns"), [("llama", (("cp", 1),)), ("bert", ()), ("llama-packed", (("cp", 1),))]
)
def test_turns_follow_the_mask(name: str, turns: tuple[tuple[str, int], ...]) -> None:
    """One where attention is causal. Rows of documents are evened out at run time."""
    if name in zoo.MODELS:
        graph = plans.zoo_traced(name)
    else:
        graph = plans.traced(get(name).build(), get(name).inputs())
    plan = plans.compile_with(graph, "cp", 2, pas_config={"cp_mode": "gather"}).plan
    assert plan.mesh.turns == turns
    assert type(plan).from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_a_window_longer_than_the_sequence_is_causal_attention() -> None:
    """And a shorter one is not."""
    entry = zoo.get("mistral")
    for window, kernel in ((64, "scaled_dot_product_attention"), (3, "attention_where")):
        graph = plans.traced(entry.build(sliding_window=window), entry.inputs())
        compiled = plans.compile_with(graph, "cp", 2, pas_config={"cp_mode": "ring"})
        ops = compiled.program.graph.ops
        attention = [op for op in ops if op.target in ATTENTION]
        assert {op.target for op in attention} == {kernel}
        assert all(op.arg("is_causal", False) for op in attention) == (window == 64)
        assert compiled.plan.mesh.turns == (("cp", 1),)
