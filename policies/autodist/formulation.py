"""What the nodes of a placement's problem mean, and what a choice costs exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue
from shardwright.policies.autodist.conversions import Conversions, LayoutSet, ValueType, union
from shardwright.policies.autodist.solver.problem import Problem, evaluate
from shardwright.policies.autodist.strategies import LayoutTable, Menu, Seconds


@dataclass(frozen=True, eq=False)
class OpNode:
    """An operator; its choices are those of the menu."""

    op: IROp
    menu: Menu


@dataclass(frozen=True, eq=False)
class StoreNode:
    """A parameter or an updated buffer; its choices are layouts."""

    value: IRValue
    layouts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CopiesNode:
    """A value with several readers; its choices are sets of layouts. ``readers``: nodes, and what each choice wants."""

    value: IRValue
    sets: tuple[LayoutSet, ...]
    readers: tuple[tuple[int, tuple[LayoutSet, ...]], ...]
    fixed: LayoutSet


@dataclass(frozen=True, eq=False)
class SharedValue:
    """A value without gradient that many blocks read, a rotary table or a mask. It is no node, so that the blocks are not all
    neighbours: every reader pays its share of what the copy costs that it wants. Shares add up to the cost where all readers
    want the same, and to less otherwise; :meth:`Formulation.cost` adds the difference.
    """

    value: IRValue
    kind: ValueType
    source: int
    fixed: LayoutSet
    readers: tuple[tuple[int, tuple[LayoutSet, ...]], ...]
    shares: tuple[Seconds, ...]


Node = OpNode | StoreNode | CopiesNode


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem, and what its nodes mean.

    ``restricted``: values whose copies were restricted to fewer sets. ``shared``: values priced by shares; the operators that
    make them are computed on every rank. ``slack``: by how much all plans may be cheaper for that than the problem says.
    """

    problem: Problem
    nodes: tuple[Node, ...]
    layouts: LayoutTable
    conversions: Conversions
    restricted: tuple[str, ...]
    shared: tuple[SharedValue, ...]
    slack: float
    graph: IRGraph

    def cost(self, choice: Sequence[int]) -> float:
        """Seconds per step of a settled choice, exactly."""
        total = evaluate(self.problem, choice)
        for item in self.shared:
            wanted = union([item.fixed, *(wants[choice[reader]] for reader, wants in item.readers)])
            paid = sum(float(share[choice[reader]]) for (reader, _), share in zip(item.readers, item.shares, strict=True))
            total += self.conversions.exact(item.kind, item.source, wanted) - paid
        return total

    def settle(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The same choice of operators and stores, with exactly the copies that they want."""
        settled = list(choice)
        for index, node in enumerate(self.nodes):
            if isinstance(node, CopiesNode):
                wanted = union([node.fixed, *(wants[choice[reader]] for reader, wants in node.readers)])
                settled[index] = node.sets.index(wanted)
        return tuple(settled)
