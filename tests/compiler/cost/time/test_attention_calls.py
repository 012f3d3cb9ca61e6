"""Tiles of attention, counted, and what they add to its time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from example_ops import example_op

from shardwright.compiler.cost.local_calls import local_call
from shardwright.compiler.cost.machine.hardware import Device, Hardware, Tier
from shardwright.compiler.cost.time.attention_calls import LAUNCHES, num_tiles
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.runtime.layout import Mesh

Q = torch.randn(1, 2, 64, 4, requires_grad=True)
OP = example_op((F.scaled_dot_product_attention, (Q, Q, Q), {"is_causal": True}))[0]
RATES = {"float32": 1e30}
HARDWARE = Hardware("toy", Device("toy", 10**9, RATES, 1e30, 1.0), (Tier("link", (8,), 0.0, 1e30),))


def on(turns: int, size: int = 4) -> Mesh:
    return Mesh((("cp", size),), (("cp", turns),) if turns else ())


def ways() -> Mapping[str, dict[str, str]]:
    """Keys whole, and keys that go round."""
    assert OP.rule is not None
    (queries,) = OP.rule.operands[0][-2]
    (pair,) = {exchange.pair for exchange in OP.rule.exchanges}
    return {
        "gather": {"cp": f"split:{queries.factor}"},
        "ring": {"cp": f"exchange:{pair[0]}>{pair[1]}"},
    }


def test_tiles_are_counted() -> None:
    found = {
        (way, turns): num_tiles(local_call(OP, assignment, on(turns)), assignment, on(turns))
        for way, assignment in ways().items()
        for turns in (0, 1, 4)
    }
    # The rank at index 0 has the first piece, or in every turn the first and the last.
    assert found["gather", 0] == 1 and found["gather", 1] == 2
    # Pieces of neighbouring turns touch: two of them are one.
    assert found["gather", 4] == 5
    # Its own keys are one tile. Of another rank's it sees none, or in one turn those before its
    # late piece.
    assert found["ring", 0] == 1 and found["ring", 1] == 1 + 3
    assert found["ring", 4] == 1 + 3 * 4


def test_tiles_take_launches_and_every_mesh_has_a_price_of_its_own() -> None:
    """Prices are remembered, and a mesh that deals in other turns has another one."""
    assignment = ways()["ring"]
    one, four, again = (op_time(OP, assignment, on(turns), HARDWARE) for turns in (0, 4, 0))
    assert one == again
    assert four.forward_s - one.forward_s == LAUNCHES[0] * 3 * 4
    assert four.backward_s - one.backward_s == LAUNCHES[1] * 3 * 4
