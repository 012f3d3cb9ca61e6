"""The kernel calls of attention whose queries or keys are in pieces.

A rank computes attention tile by tile (:mod:`~shardwright.runtime.visible_keys`). Of causal
attention over 4 ranks, dealt in 32 turns, its queries meet the keys of each other rank in 64 tiles,
and its own keys in one. Each tile takes some small operators beside its kernel, as its output is
merged with what was there.
"""

from __future__ import annotations

from shardwright.compiler.cost.local_calls import LocalCall, estimated_size
from shardwright.compiler.cost.machine.hardware import Device
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.ops.rule import ATTENTION
from shardwright.compiler.ops.seen_keys import seen_bands
from shardwright.compiler.ops.strategy import Assignment, factor_axes, split_factor
from shardwright.runtime.atoms import Atom
from shardwright.runtime.layout import Mesh
from shardwright.runtime.runs import Run, joined
from shardwright.runtime.visible_keys import local_bands

LAUNCHES = (12, 10)
"""The operators that a tile takes in the forward and in the backward, its kernel included."""


def further_calls(call: LocalCall, assignment: Assignment, mesh: Mesh, device: Device) -> OpTime:
    """Seconds that the tiles of attention take to launch, beyond one."""
    if call.op.target not in ATTENTION or not any(map(split_factor, assignment.values())):
        return OpTime()
    launches_s = device.launch_s * (num_tiles(call, assignment, mesh) - 1)
    backward_s = LAUNCHES[1] * launches_s if call.differentiated else 0.0
    return OpTime(LAUNCHES[0] * launches_s, backward_s)


def num_tiles(call: LocalCall, assignment: Assignment, mesh: Mesh) -> int:
    """How many tiles the rank at index 0 of every axis computes, at most: it may join some."""
    rule = call.op.rule
    assert rule is not None
    cuts = factor_axes(assignment, mesh)
    axes = [axis for ref in rule.operands[0][-2] for axis in cuts.get(ref.factor, ())]
    num_queries, num_keys = (estimated_size(x.shape[-2]) for x in call.op.operands[:2])
    here = dict.fromkeys(mesh.names, 0)
    queries = joined(Atom((num_queries,), tuple(axes)).pieces(mesh, here))
    bands = seen_bands(call.op, num_queries, num_keys)
    # Keys that go round come piece by piece.
    going_round = [a for a in axes if (assignment.get(a) or "").startswith("exchange:")]
    keys: list[tuple[Run, ...]] = [((0, num_keys),)]
    for axis in going_round[:1]:
        pieces = ({**here, axis: rank} for rank in range(mesh.axis_size(axis)))
        keys = [joined(Atom((num_keys,), (axis,)).pieces(mesh, coords)) for coords in pieces]
    return max(1, sum(len(local_bands(bands, queries, piece)) for piece in keys))
