"""What the rules of simple policies say is worked out once for all meshes, and is the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import plans
import pytest

from shardwright.policies.autodist.search import simple_rules
from shardwright.policies.autodist.search.simple_rules import WITH_POSITIONS, Rules
from shardwright.policies.context_axes import ContextAxis, split_context
from shardwright.policies.sequences import Positions
from shardwright.policies.splits import split_dims
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh

RULES = ("batch", "inner", WITH_POSITIONS)


def test_the_axis_beside_one_in_zigzag_is_split_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One split serves all lengths of the other axis, and keys that go round or are gathered."""
    graph, asked = plans.zoo_graph("llama"), Counter[str]()

    def split(*args: Any, **options: Any) -> None:
        asked[args[1]] += 1
        split_dims(*args, **options)

    monkeypatch.setattr(simple_rules, "split_dims", split)
    rules = Rules(graph, ComputeConfig(plan_ngpus=8, runtime_ngpus=8))
    for sizes, along, beside in (((2, 2), "x", "y"), ((4, 2), "x", "y"), ((2, 2), "y", "x")):
        mesh = Mesh(tuple(zip("xy", sizes, strict=True)), ((along, 1),))
        size = mesh.axis_size(along)
        for rule in RULES if along == "x" else RULES[:2]:
            for mode in ("ring", "gather"):
                builder = graph.builder(mesh=mesh)
                classes = set(rules._dims(rule, 2).classes)
                positions = Positions() if rule == WITH_POSITIONS else None
                split_dims(builder, beside, classes, positions=positions)
                split_context(builder, [ContextAxis(along, size, mode)], {})
                found = rules._sequence_plan(mesh, along, mode, rule)
                assert found.strategies == builder.plan("autodist").strategies
    assert asked.total() == len(RULES)


def test_a_graph_with_layers_computed_again_is_marked_once() -> None:
    rules = Rules(plans.zoo_graph("llama"), ComputeConfig(plan_ngpus=4, runtime_ngpus=4))
    chains = rules.recomputing(rules.every_layer)
    assert rules.recomputing(rules.every_layer) is chains
    assert {op.region is not None for op in chains.graph.ops} == {False, True}
    assert rules.recomputing(()).graph is rules.needed
