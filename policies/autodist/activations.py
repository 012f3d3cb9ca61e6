"""What operators keep for the backward, as a sum over operators: the part of the memory row that activations are.

A value that several operators keep is counted in equal shares with all of them, in the layout each has it in: right where they
have it in the same, and near where not. What a view keeps is counted with the tensor it is a view of. Of a recompute region
only what comes in from outside is kept. The exact peak, with what is temporary, is walked over the lowered program afterwards
(:func:`shardwright.compiler.cost.memory.program_memory`), and the row corrected where the two differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shardwright.compiler.cost.local import local_bytes
from shardwright.compiler.cost.saved import Saved, saved_for_backward
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.policies.autodist.strategies import LayoutTable, Menu, Seconds, signature
from shardwright.runtime.layout import Mesh


@dataclass
class Activations:
    """``shares``: by operator, the tensors it keeps as ``(is a result, position, share)``. ``internal``: by operator, the bytes
    of what it makes inside and keeps, unsplit.
    """

    layouts: LayoutTable
    mesh: Mesh
    shares: dict[str, list[tuple[bool, int, float]]] = field(default_factory=dict)
    internal: dict[str, int] = field(default_factory=dict)
    _bytes: dict[tuple[int, torch.dtype], int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: IRGraph, layouts: LayoutTable, mesh: Mesh) -> Activations:
        """For the operators of a graph whose recompute regions are marked."""
        found = cls(layouts, mesh)
        known: dict[Hashable, Saved] = {}
        saved: dict[str, Saved] = {}
        for op in graph.ops:
            key = signature(op)
            if key not in known:
                known[key] = saved_for_backward(op)
            saved[op.name] = known[key]
        bases = _bases(graph, saved)
        stored = {value.name for value in graph.sources if value.kind is not ValueKind.INPUT}
        regions = {value.name: op.region for op in graph.ops for value in op.results}
        keepers: dict[str, list[tuple[IROp, bool, int]]] = {}
        for op in graph.ops:
            for result, position, value in _kept(op, saved[op.name], regions):
                base = bases.get(value.name, value.name)
                if base not in stored:
                    keepers.setdefault(base, []).append((op, result, position))
            if op.region is None:
                found.internal[op.name] = saved[op.name].internal_bytes
        for kept_by in keepers.values():
            for op, result, position in kept_by:
                found.shares.setdefault(op.name, []).append((result, position, 1.0 / len(kept_by)))
        return found

    def usage(self, op: IROp, menu: Menu) -> Seconds | None:
        """Bytes kept by every choice of an operator; None if it keeps nothing."""
        shares, internal = self.shares.get(op.name, ()), self.internal.get(op.name, 0)
        if not shares and not internal:
            return None
        total = np.zeros(len(menu))
        for result, position, share in shares:
            value = (op.results if result else op.operands)[position]
            ids = (menu.results if result else menu.operands)[:, position]
            total += share * self._sizes(ids.tolist(), value.dtype)
        if internal:
            tensors = [(menu.operands, i, v) for i, v in enumerate(op.operands)]
            tensors += [(menu.results, i, v) for i, v in enumerate(op.results)]
            sizes = [self._sizes(ids[:, i].tolist(), value.dtype) for ids, i, value in tensors]
            largest = max(sizes, key=lambda size: float(size.max()))  # what is made inside shrinks with it
            total += internal * largest / max(1.0, float(largest.max()))
        return total

    def _sizes(self, ids: Sequence[int], dtype: torch.dtype) -> Seconds:
        return np.array([float(self._size(layout, dtype)) for layout in ids])

    def _size(self, layout: int, dtype: torch.dtype) -> int:
        key = (layout, dtype)
        if key not in self._bytes:
            self._bytes[key] = local_bytes(self.layouts[layout], dtype, self.mesh)
        return self._bytes[key]


def _kept(op: IROp, saved: Saved, regions: Mapping[str, str | None]) -> list[tuple[bool, int, IRValue]]:
    """What an operator keeps: as autograd says; inside a region what comes from outside of it."""
    if op.region is None:
        kept = [(False, position, op.operands[position]) for position in saved.operands]
        return kept + [(True, position, op.results[position]) for position in saved.results]
    return [(False, i, value) for i, value in enumerate(op.operands) if regions.get(value.name) != op.region]


def _bases(graph: IRGraph, saved: Mapping[str, Saved]) -> dict[str, str]:
    """Views by name, to the value whose memory they share."""
    bases: dict[str, str] = {}
    for op in graph.ops:
        for value, position in zip(op.results, saved[op.name].views, strict=False):
            if position is not None:
                base = op.operands[position].name
                bases[value.name] = bases.get(base, base)
    return bases
