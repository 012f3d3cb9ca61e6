"""Tiles of attention, counted, and what they add to its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace

import pytest
import torch
import torch.nn.functional as F
from example_ops import example_op

from shardwright.compiler.cost.local_calls import local_call
from shardwright.compiler.cost.machine.hardware import Device, Hardware, Tier
from shardwright.compiler.cost.time.attention_calls import LAUNCHES, num_tiles
from shardwright.compiler.cost.time.inner_messages import exchanges_in
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.ops.stand_ins import attention_where
from shardwright.runtime.layout import Mesh
from shardwright.runtime.marks import Seen
from shardwright.runtime.ops.attention_steps import Place, steps_of
from shardwright.runtime.visible_keys import earlier_keys

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


PLACES = torch.arange(64)
DOCUMENTS = replace(
    example_op(
        (
            attention_where,
            (Q, Q, Q, (PLACES[:, None] // 9, PLACES[:, None]), (PLACES // 9, PLACES), ("eq", "le")),
        )
    )[0],
    results=OP.results,
)


def test_queries_of_documents_that_other_ranks_compute_are_priced() -> None:
    """A rank takes half as many as its 16. They and their outputs travel, and both gradients;
    outputs go home when there is nothing left to compute.
    """
    tier = Tier("link", (8,), 1e-3, 1e30)
    slow = replace(HARDWARE, tiers=(tier,))
    found = exchanges_in(DOCUMENTS, ways()["gather"], on(1), slow)
    (sent,) = found
    guests = 8 * 2 * (4 + 4) * 4  # queries, heads, width of a query and of an output, bytes
    assert (sent.forward_bytes, sent.backward_bytes) == (guests, guests)
    assert sent.time.forward_s == sent.time.backward_s == pytest.approx(2 * 3 * tier.latency_s)
    # Beside them keys go round, in the ring.
    ring, again = exchanges_in(DOCUMENTS, ways()["ring"], on(1), slow)
    assert again.forward_bytes == guests and ring.forward_bytes > guests
    # Whole queries, and masks of sizes alone, move nothing.
    assert not exchanges_in(DOCUMENTS, {"cp": "split:h"}, on(1), slow)
    assert not exchanges_in(OP, ways()["gather"], on(1), slow)


@pytest.mark.parametrize(("window", "num_queries"), [(64, 0), (32, 96 / 32), (2, 0)])
def test_queries_are_priced_that_move_as_a_window_leaves_work_uneven(
    window: int, num_queries: float
) -> None:
    """A window of half of the positions leaves 4 ranks 292, 356, 420 and 484 pairs: the mean is
    388, so 96 pairs move, of queries with 32 keys. In one run each, nothing moves.
    """
    bands = tuple(astuple(band) for band in earlier_keys(64, 64, window))
    op, _ = example_op((attention_where, (Q, Q, Q), {"bands": bands}))
    op = replace(op, results=OP.results)
    found = exchanges_in(op, ways()["gather"], on(1), HARDWARE)
    moved = num_queries * 2 * (4 + 4) * 4  # heads, width of a query and of an output, bytes
    assert [sent.forward_bytes for sent in found] == ([moved] if num_queries else [])
    assert not exchanges_in(op, ways()["gather"], on(0), HARDWARE)


@pytest.mark.parametrize("window", [64, 32, 16, 8])
def test_keys_are_priced_that_queries_of_others_need(window: int) -> None:
    """The price is that of the keys which the runtime sends to the rank that gets most of them."""
    seen = earlier_keys(64, 64, window)
    op, _ = example_op((attention_where, (Q, Q, Q), {"bands": tuple(map(astuple, seen))}))
    ring, *_ = exchanges_in(replace(op, results=OP.results), ways()["ring"], on(1), HARDWARE)

    def received(rank: int, *, evens_out: bool) -> int:
        places = (Place(4, rank, 1, is_ring=True),)
        steps = steps_of(places, (64, 64), 1, (Seen((0, 1), seen),), 0, evens_out=evens_out)
        return sum(share.num_keys for step in steps.steps[1:] for share in step.shares)

    alone, most = (
        max(received(rank, evens_out=evens_out) for rank in range(4)) for evens_out in (False, True)
    )
    assert (most > alone) == (window in (32, 16))
    assert ring.forward_bytes == most * 2 * (4 + 4) * 4  # heads, widths of a key and value, bytes


def test_ranks_have_even_work_of_documents_also_where_each_has_one_run() -> None:
    fast = Device("toy", 10**9, {"float32": 1.0}, 1e30, 0.0)
    hardware = replace(HARDWARE, device=fast)
    times = [op_time(DOCUMENTS, ways()["gather"], on(turns), hardware) for turns in (0, 1)]
    assert times[0] == times[1]
