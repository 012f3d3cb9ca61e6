"""Tokens that are exchanged for experts are time and bytes of an all-to-all."""

from __future__ import annotations

import expert_models
import plans
import pytest
from covers import spread

from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware

NAME = "ep all_to_all"


@pytest.mark.parametrize(("policy", "exchanges"), spread([("ep", True), ("tp", False)], 2))
def test_an_exchange_is_no_computing(policy: str, exchanges: bool) -> None:
    entry = expert_models.get(expert_models.BY_HAND)
    graph = plans.traced(entry.build(num_layers=1), entry.inputs())
    compiled = plans.compile_with(graph, policy, 2)
    near, far = (
        audit(compiled.program, compiled.config, load_hardware(name, 2)).ranks[0]
        for name in ("a100-80gb", "h100")
    )
    assert (NAME in near.comm_s) == exchanges == (NAME in far.comm_s)
    if exchanges:
        assert near.comm_s[NAME] > 0 and near.comm_bytes[NAME] == far.comm_bytes[NAME] > 0
