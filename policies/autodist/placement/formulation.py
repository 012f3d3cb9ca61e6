"""What the nodes of a placement's problem mean, and what a choice costs exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue
from shardwright.policies.autodist.placement.conversions import Conversions, LayoutSet, ValueType
from shardwright.policies.autodist.placement.emission import Uses
from shardwright.policies.autodist.placement.strategies import Ids, LayoutTable, OpChoices, Seconds
from shardwright.policies.autodist.solver.problem import Problem, evaluate


@dataclass(frozen=True, eq=False)
class OpNode:
    """An operator; its choices are those of the choices."""

    op: IROp
    choices: OpChoices


@dataclass(frozen=True, eq=False)
class StoreNode:
    """A parameter or an updated buffer; its choices are layouts. ``least_bytes``: what each takes
    when a forward ends, with gradients and optimizer state as far as they are there then.
    """

    value: IRValue
    layouts: tuple[int, ...]
    least_bytes: Seconds


@dataclass(frozen=True, eq=False)
class CopiesNode:
    """A value with several readers; its choices are sets of layouts."""

    value: IRValue
    sets: tuple[LayoutSet, ...]
    uses: Uses


@dataclass(frozen=True, eq=False)
class RelayNode:
    """A value with several readers that could want more sets of layouts than are told apart. Its
    choices are the layouts of one copy, the relay, from which every reader's own is made. What
    lowering makes may cost less, where readers share a copy beside the relay, or more, where
    another tree sends less but takes longer; :meth:`Formulation.cost` has the exact cost.
    """

    value: IRValue
    kind: ValueType
    layouts: tuple[int, ...]
    maker: tuple[int | None, Ids]
    uses: Uses


@dataclass(frozen=True, eq=False)
class SpreadValue:
    """A value that a recompute region reads and something else too, so that the choices of all
    readers together decide which adapters run again. The problem says what they cost if none does,
    :meth:`Formulation.cost` what they cost. ``paid``: as the problem has it, [choices of the maker,
    choices of ``node``].
    """

    uses: Uses
    maker: tuple[int | None, Ids]
    node: int
    paid: Seconds


@dataclass(frozen=True, eq=False)
class SharedWeight:
    """A parameter with several readers. Each place gathers pieces for itself, which is what it
    pays; of any other copy, which is made once, every reader pays its share, as of a
    :class:`SharedValue`. ``sources``: what each choice stores it as;
    ``conversions``: on the mesh that it is stored on. ``paid``: by reader, [stores, its choices],
    what the problem says.
    """

    store: int
    sources: tuple[int, ...]
    uses: Uses
    paid: tuple[Seconds, ...]
    conversions: Conversions


@dataclass(frozen=True, eq=False)
class SharedValue:
    """A value without gradient that many blocks read, a rotary table or a mask. It is no node, so
    that the blocks are not all neighbours: every reader pays its share of what the copy costs that
    it wants. Shares add up to the cost where all readers want the same, and to less otherwise;
    :meth:`Formulation.cost` adds the difference.
    """

    value: IRValue
    source: int
    uses: Uses
    shares: tuple[Seconds, ...]


Node = OpNode | StoreNode | CopiesNode | RelayNode


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem, and what its nodes mean.

    ``restricted``: values whose copies were restricted to fewer sets. ``shared``: values priced by
    shares; the operators that make them are computed on every rank. ``slack``: by how much all
    plans may be cheaper for that than the problem says.
    ``spread``: values with adapters that may run again.
    """

    problem: Problem
    nodes: tuple[Node, ...]
    layouts: LayoutTable
    conversions: Conversions
    restricted: tuple[str, ...]
    shared: tuple[SharedValue, ...]
    weights: tuple[SharedWeight, ...]
    spread: tuple[SpreadValue, ...]
    slack: float
    graph: IRGraph

    def cost(self, choice: Sequence[int]) -> float:
        """Seconds per step of a settled choice, exactly."""
        # The problem's own costs, in which some values are priced as if their readers were alone.
        total = evaluate(self.problem, choice)
        # Values that many blocks read: exact, less what was paid for them.
        for item in self.shared:
            shares = zip(item.uses.readers, item.shares, strict=True)
            paid = sum(float(share[choice[use.node]]) for use, share in shares)
            total += item.uses.seconds(self.conversions, item.source, choice) - paid
        # Values whose copies are priced along a relay only.
        for index, node in enumerate(self.nodes):
            if isinstance(node, RelayNode):
                total += self._relayed(node, node.layouts[choice[index]], choice)
        # Values with several sets of copies.
        for spread in self.spread:
            maker, gives = spread.maker
            row = 0 if maker is None else choice[maker]
            exact = spread.uses.seconds(self.conversions, int(gives[row]), choice)
            total += exact - float(spread.paid[row, choice[spread.node]])
        # Parameters, which several readers gather.
        for weight in self.weights:
            stored = choice[weight.store]
            read = zip(weight.uses.readers, weight.paid, strict=True)
            paid = sum(float(table[stored, choice[use.node]]) for use, table in read)
            total += weight.uses.seconds(weight.conversions, weight.sources[stored], choice) - paid
        return total

    def _relayed(self, node: RelayNode, relay: int, choice: Sequence[int]) -> float:
        """What the adapters of a value cost beyond what the problem says."""
        maker, gives = node.maker
        source = int(gives[0 if maker is None else choice[maker]])
        wants = [use.wants[choice[use.node]] for use in node.uses.readers]
        # What a program's end or a buffer wants reads the value, too.
        wants += [node.uses.fixed] if node.uses.fixed else []
        exact = self.conversions.exact
        paid = exact(node.kind, source, (relay,)) + sum(
            exact(node.kind, relay, want) for want in wants
        )
        # The tree that is emitted may share more copies, so this is mostly zero or less.
        return node.uses.seconds(self.conversions, source, choice) - paid

    def settle(self, choice: Sequence[int]) -> tuple[int, ...]:
        """A choice with the same operators and stores, and exactly the copies that they want."""
        settled = list(choice)
        for index, node in enumerate(self.nodes):
            if isinstance(node, CopiesNode):
                settled[index] = node.sets.index(node.uses.wanted(choice))
        return tuple(settled)
