"""What predictions take for granted of data, as they print it."""

from __future__ import annotations

from typing import Any

import pytest
import sequence_models
from covers import spread
from traces import shared_trace

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.assumptions import HANDED_ON, ONE_DOCUMENT
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig


@pytest.mark.parametrize(
    ("model", "mode", "assumed"),
    spread(
        [
            ("llama-packed", "ring", (ONE_DOCUMENT, HANDED_ON)),
            ("llama-packed", "ulysses", (ONE_DOCUMENT,)),
            ("llama", "ring", ()),
        ],
        3,
    ),
)
def test_what_lengths_of_documents_are_taken_to_be(
    model: str, mode: str, assumed: tuple[str, ...]
) -> None:
    """Where heads are cut no query is handed on; where there are no documents, nothing is taken."""
    entry = sequence_models.MODELS[model]
    inputs = entry.inputs()
    graph = shared_trace(model, entry.make().train(), inputs)
    options: dict[str, Any] = {"plan_ngpus": 2, "runtime_ngpus": 2}
    config = ComputeConfig(**options, pas_config={"cp_mode": mode})
    compiled = compile_graph(graph, find_policy("cp").apply, config, policy_name="cp")
    cost = audit(compiled.program, config, load_hardware("a100-80gb", 2))
    assert cost.assumed == assumed
    assert (f"assumed of the data: {'; '.join(assumed)}" in str(cost)) is bool(assumed)
    assert PlanCost.from_json(cost.to_json()) == cost
