"""What the nodes of a placement's problem mean, and what a choice costs exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue
from shardwright.policies.autodist.placement.conversions import Conversions, LayoutSet, ValueType, union
from shardwright.policies.autodist.placement.strategies import Ids, LayoutTable, Menu, Seconds
from shardwright.policies.autodist.solver.problem import Problem, evaluate


@dataclass(frozen=True, eq=False)
class OpNode:
    """An operator; its choices are those of the menu."""

    op: IROp
    menu: Menu


@dataclass(frozen=True, eq=False)
class StoreNode:
    """A parameter or an updated buffer; its choices are layouts. ``least_bytes``: what each takes when a forward ends, with
    gradients and optimizer state as far as they are there then.
    """

    value: IRValue
    layouts: tuple[int, ...]
    least_bytes: Seconds


@dataclass(frozen=True, eq=False)
class CopiesNode:
    """A value with several readers; its choices are sets of layouts. ``readers``: nodes, and what each choice wants."""

    value: IRValue
    sets: tuple[LayoutSet, ...]
    readers: tuple[tuple[int, tuple[LayoutSet, ...]], ...]
    fixed: LayoutSet


@dataclass(frozen=True, eq=False)
class RelayNode:
    """A value with several readers that could want more sets of layouts than are told apart. Its choices are the layouts of one
    copy, the relay, from which every reader's own is made. What lowering makes may cost less, where readers share a copy beside
    the relay, or more, where another tree sends less but takes longer; :meth:`Formulation.cost` has the exact cost.
    """

    value: IRValue
    kind: ValueType
    layouts: tuple[int, ...]
    maker: tuple[int | None, Ids]
    readers: tuple[tuple[int, tuple[LayoutSet, ...]], ...]
    fixed: LayoutSet


@dataclass(frozen=True, eq=False)
class WeightUse:
    """One reader of a parameter that has several. ``place``: module path and region, for which a weight in pieces is gathered;
    ``paid``: [stores, choices of the reader], what the problem says.
    """

    reader: int
    kind: ValueType
    wants: tuple[LayoutSet, ...]
    place: tuple[str, str | None]
    paid: Seconds


@dataclass(frozen=True, eq=False)
class SharedWeight:
    """A parameter with several readers. Each place gathers pieces for itself, which is what it pays; of any other copy, which
    is made once, every reader pays its share, as of a :class:`SharedValue`. ``sources``: what each choice stores it as;
    ``conversions``: on the mesh that it is stored on.
    """

    store: int
    sources: tuple[int, ...]
    uses: tuple[WeightUse, ...]
    conversions: Conversions


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


Node = OpNode | StoreNode | CopiesNode | RelayNode


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
    weights: tuple[SharedWeight, ...]
    slack: float
    graph: IRGraph

    def cost(self, choice: Sequence[int]) -> float:
        """Seconds per step of a settled choice, exactly."""
        total = evaluate(self.problem, choice)
        for item in self.shared:
            wanted = union([item.fixed, *(wants[choice[reader]] for reader, wants in item.readers)])
            paid = sum(float(share[choice[reader]]) for (reader, _), share in zip(item.readers, item.shares, strict=True))
            total += self.conversions.exact(item.kind, item.source, wanted) - paid
        for index, node in enumerate(self.nodes):
            if isinstance(node, RelayNode):
                total += self._relayed(node, node.layouts[choice[index]], choice)
        return total + sum(self._uses_of(item, choice) for item in self.weights)

    def _uses_of(self, item: SharedWeight, choice: Sequence[int]) -> float:
        """What the adapters of a parameter cost beyond what the problem says."""
        source, conversions = item.sources[choice[item.store]], item.conversions
        wants = [(use.wants[choice[use.reader]], use) for use in item.uses]
        tree = conversions.tree(item.uses[0].kind, source, union(want for want, _ in wants))
        made: set[tuple[int, object]] = {(source, None)}

        def make(goal: int, use: WeightUse) -> float:
            if (goal, None) in made or (goal, use.place) in made:
                return 0.0
            start = tree[goal]
            seconds = make(start, use) + conversions.step_s(use.kind, start, goal)
            everywhere = (start, None) in made and not conversions.gathers(use.kind, start, goal)
            made.add((goal, None if everywhere else use.place))
            return seconds

        exact = sum(make(goal, use) for want, use in wants for goal in want)
        return exact - sum(float(use.paid[choice[item.store], choice[use.reader]]) for _, use in wants)

    def _relayed(self, node: RelayNode, relay: int, choice: Sequence[int]) -> float:
        """What the adapters of a value cost beyond what the problem says."""
        maker, gives = node.maker
        source = int(gives[0 if maker is None else choice[maker]])
        wants = [*([node.fixed] if node.fixed else []), *(wants[choice[reader]] for reader, wants in node.readers)]
        exact = self.conversions.exact
        paid = exact(node.kind, source, (relay,)) + sum(exact(node.kind, relay, want) for want in wants)
        return exact(node.kind, source, union(wants)) - paid

    def settle(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The same choice of operators and stores, with exactly the copies that they want."""
        settled = list(choice)
        for index, node in enumerate(self.nodes):
            if isinstance(node, CopiesNode):
                wanted = union([node.fixed, *(wants[choice[reader]] for reader, wants in node.readers)])
                settled[index] = node.sets.index(wanted)
        return tuple(settled)
