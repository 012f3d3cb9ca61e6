"""What operators keep for the backward, as a sum over operators: the part of the memory row that
activations are.

A value that several operators keep is counted in equal shares with all of them, in the layout each
has it in: right where they have it in the same, and near where not. What a view keeps is counted
with the tensor it is a view of. Of a recompute region only what comes in from outside is kept. The
exact peak, with what is temporary, is walked over the lowered program afterwards
(``program_memory``), and the row corrected where
the two differ.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shardwright.compiler.cost.fake.saved_tensors import Saved, saved_for_backward
from shardwright.compiler.cost.local_calls import local_bytes, signature
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.ops.strategy import Assignment, split_factor
from shardwright.policies.autodist.placement.strategies import LayoutTable, OpChoices, Seconds
from shardwright.runtime.config import RngMode
from shardwright.runtime.layout import Mesh


@dataclass(frozen=True, slots=True)
class Share:
    """A tensor that an operator keeps, a result or an operand. ``part``: how much of it counts with
    this operator. ``root``: the value whose memory it is.
    """

    is_result: bool
    position: int
    part: float
    root: str


@dataclass
class Activations:
    """``shares``: by operator, the tensors it keeps. ``internal``: by operator, the bytes of what
    it makes inside and keeps, unsplit. ``bases``: views by name, to the value whose memory they
    share.
    """

    layouts: LayoutTable
    mesh: Mesh
    bases: Mapping[str, str]
    shares: dict[str, list[Share]] = field(default_factory=dict)
    internal: dict[str, int] = field(default_factory=dict)
    _bytes: dict[tuple[int, torch.dtype], int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, graph: IRGraph, layouts: LayoutTable, mesh: Mesh, rng: RngMode = "fast"
    ) -> Activations:
        """What the operators of a graph keep. Its recompute regions are marked. ``rng``: how calls
        draw.
        """
        # Operators with one signature keep the same, and models repeat theirs.
        known: dict[Hashable, Saved] = {}
        saved: dict[str, Saved] = {}
        for op in graph.ops:
            key = signature(op)
            if key not in known:
                known[key] = saved_for_backward(op, rng=rng)
            saved[op.name] = known[key]
        found = cls(layouts, mesh, _bases(graph, saved))
        stored = {value.name for value in graph.sources if value.kind is not ValueKind.INPUT}
        # The region of each value's maker: a tensor that stays in its region is computed again.
        regions = {value.name: op.region for op in graph.ops for value in op.results}
        # For each tensor the operators that keep it: its bytes are shared out among these.
        keepers: dict[str, list[tuple[IROp, bool, int]]] = {}
        for op in graph.ops:
            for result, position, value in _kept(op, saved[op.name], regions):
                base = found.bases.get(value.name, value.name)
                # Parameters are there anyway.
                if base not in stored:
                    keepers.setdefault(base, []).append((op, result, position))
            if op.region is None:
                found.internal[op.name] = saved[op.name].internal_bytes
        for base, kept_by in keepers.items():
            for op, result, position in kept_by:
                found.shares.setdefault(op.name, []).append(
                    Share(result, position, 1.0 / len(kept_by), base)
                )
        return found

    def usage(self, op: IROp, choices: OpChoices) -> Seconds | None:
        """Bytes kept by every choice of an operator; None if it keeps nothing."""
        shares, internal = self.shares.get(op.name, ()), self.internal.get(op.name, 0)
        if not shares and not internal:
            return None
        total = np.zeros(len(choices))
        for share in shares:
            total += self.of_share(op, choices, share)
        return total + self.inside(op, choices)

    def of_share(self, op: IROp, choices: OpChoices, share: Share) -> Seconds:
        """Bytes of a share, by choice."""
        value = (op.results if share.is_result else op.operands)[share.position]
        ids = (choices.results if share.is_result else choices.operands)[:, share.position]
        return share.part * self._sizes(ids.tolist(), value.dtype)

    def of_result(self, op: IROp, choices: OpChoices, position: int) -> Seconds:
        """Bytes of a result, by choice."""
        return self._sizes(choices.results[:, position].tolist(), op.results[position].dtype)

    def inside(self, op: IROp, choices: OpChoices) -> Seconds:
        """Bytes of what an operator makes inside and keeps, by choice."""
        internal = self.internal.get(op.name, 0)
        if not internal:
            return np.zeros(len(choices))
        found: Seconds = internal / np.array(
            [float(math.prod(self._cuts(assignment))) for assignment in choices.assignments]
        )
        return found

    def _cuts(self, assignment: Assignment) -> list[int]:
        """Into how many pieces each axis cuts what is made inside: all of it, where the operator is
        split.
        """
        return [
            size
            for axis, size in self.mesh.axes
            if split_factor(assignment.get(axis, "R")) is not None
        ]

    def _sizes(self, ids: Sequence[int], dtype: torch.dtype) -> Seconds:
        return np.array([float(self._size(layout, dtype)) for layout in ids])

    def _size(self, layout: int, dtype: torch.dtype) -> int:
        key = (layout, dtype)
        if key not in self._bytes:
            self._bytes[key] = local_bytes(self.layouts[layout], dtype, self.mesh)
        return self._bytes[key]


def _kept(
    op: IROp, saved: Saved, regions: Mapping[str, str | None]
) -> list[tuple[bool, int, IRValue]]:
    """What an operator keeps: as autograd says; inside a region what comes from outside of it."""
    if op.region is None:
        kept = [(False, position, op.operands[position]) for position in saved.operands]
        return kept + [(True, position, op.results[position]) for position in saved.results]
    return [
        (False, i, value)
        for i, value in enumerate(op.operands)
        if regions.get(value.name) != op.region
    ]


def _bases(graph: IRGraph, saved: Mapping[str, Saved]) -> dict[str, str]:
    """Views by name, to the value whose memory they share."""
    bases: dict[str, str] = {}
    for op in graph.ops:
        for value, position in zip(op.results, saved[op.name].views, strict=False):
            if position is not None:
                base = op.operands[position].name
                bases[value.name] = bases.get(base, base)
    return bases
