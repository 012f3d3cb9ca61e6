"""The adapters along every value, as costs between what makes it and what reads it.

How a value is priced depends on its readers: :meth:`Values.add` says which of the methods below
applies.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.plan.zero import is_large, units_of_storage
from shardwright.policies.autodist.placement.conversions import (
    Again,
    Conversions,
    LayoutSet,
    ValueType,
    union,
)
from shardwright.policies.autodist.placement.draft import Draft
from shardwright.policies.autodist.placement.emission import Use, Uses
from shardwright.policies.autodist.placement.formulation import (
    CopiesNode,
    RelayNode,
    SharedValue,
    SharedWeight,
    SpreadValue,
    StoreNode,
)
from shardwright.policies.autodist.placement.layout_sets import Maker, Reader, layout_sets
from shardwright.policies.autodist.placement.strategies import Seconds, used


@dataclass(eq=False)
class Values:
    """Adds values to a draft. ``shared_names``: values priced by shares. The rest is what the
    formulation has to know of them: ``restricted``, names of values whose copies are told apart
    less; ``spread``, values with adapters that may run again; ``shared`` and ``weights``, values
    with several readers and no node of their own.
    """

    draft: Draft
    shared_names: frozenset[str]
    restricted: list[str] = field(default_factory=list)
    spread: list[SpreadValue] = field(default_factory=list)
    shared: list[SharedValue] = field(default_factory=list)
    weights: list[SharedWeight] = field(default_factory=list)

    def add(self, value: IRValue, maker: Maker, readers: Sequence[Reader]) -> None:
        """The adapters along one value."""
        # Readers in the graph; ``fixed`` are layouts that the end of the program wants.
        inside = [reader for reader in readers if reader.node is not None]
        fixed = union(want for reader in readers if reader.node is None for want in reader.wants)
        is_weight = value.kind is ValueKind.PARAMETER
        uses = Uses(
            ValueType(
                value.dtype,
                value.requires_grad,
                self.draft.request.microbatches,
                is_weight,
                takes_gradient=value.takes_gradient,
                is_kept=any(reader.keeps for reader in inside),
            ),
            self.draft.stretch_of(maker.node),
            is_weight or value.kind is ValueKind.BUFFER,
            tuple(
                Use(reader.node, reader.wants, reader.place, reader.keeps)
                for reader in inside
                if reader.node is not None
            ),
            fixed,
        )
        # In a region that runs again, adapters may run again.
        again = uses.again()
        kind = uses.kind if again is None else replace(uses.kind, again=again)
        own = [reader for reader in inside if reader.node == maker.node]
        # From here on, the kinds of values: shared by blocks, weights, several readers, one reader,
        # none.
        if value.name in self.shared_names and len(set(maker.gives.tolist())) == 1:
            self._share(value, maker, inside, uses)
        elif len(inside) > 1 and is_weight and not fixed:
            self._weight(maker, inside, uses)
        elif len(inside) > 1 or own:
            self._copies(value, kind, maker, inside, uses)
        elif inside:
            self._edge(kind, maker, inside[0], uses)
        elif fixed and maker.node is not None:
            self.draft.charge(
                maker.node, self._prices(kind, maker, (fixed,), ("fixed", fixed))[:, 0]
            )

    def _prices(
        self, kind: ValueType, maker: Maker, sets: Sequence[LayoutSet], key: Hashable
    ) -> Seconds:
        """``[choices of the maker, sets]``."""
        pricing = self.draft.pricing
        if self._is_over_units(maker):
            return pricing.over_units(self.draft.request.config).adapters(kind, maker, sets, key)
        return pricing.adapters(kind, maker, sets, key)

    def _is_over_units(self, maker: Maker) -> bool:
        """Whether ZeRO-3 stores a parameter over several units."""
        node = self.draft.nodes[maker.node] if maker.node is not None else None
        is_parameter = (
            isinstance(node, StoreNode)
            and node.value.kind is ValueKind.PARAMETER
            and is_large(node.value)
        )
        return is_parameter and units_of_storage(self.draft.request.config) > 1

    def _edge(self, kind: ValueType, maker: Maker, reader: Reader, uses: Uses) -> None:
        """Between the maker of a value and its only reader."""
        assert reader.node is not None
        fixed = uses.fixed
        sets = tuple(union((fixed, want)) for want in reader.wants) if fixed else reader.wants
        prices = self._prices(kind, maker, sets, ("edge", reader.key, fixed))
        # Free for all pairs: no edge, which keeps the problem small and easy to eliminate.
        if not prices.any():
            return
        self._spread(uses, maker, reader.node, prices)
        if maker.node is None:
            # The value is given, in its one layout: the price is the reader's alone.
            self.draft.charge(reader.node, prices[0])
        else:
            self.draft.edges.append((maker.node, reader.node, prices))

    def _spread(self, uses: Uses, maker: Maker, node: int, paid: Seconds) -> None:
        """Note a value of which adapters may run again, with what the problem says they cost if
        none does.
        """
        if uses.again() is None:
            self.spread.append(SpreadValue(uses, (maker.node, maker.gives), node, paid))

    def _copies(
        self, value: IRValue, kind: ValueType, maker: Maker, readers: list[Reader], uses: Uses
    ) -> None:
        """A node for the set of layouts that a value with several readers is needed in."""
        draft, pricing, fixed = self.draft, self.draft.pricing, uses.fixed
        key = ("sets", fixed, tuple(reader.key for reader in readers))
        if key not in pricing.sets:
            pricing.sets[key] = layout_sets(readers, fixed)
        possible = pricing.sets[key]
        if possible is None:
            self._relay(value, kind, maker, readers, uses)
            return
        # Not all sets of layouts were written out: the bound has to know.
        sets, complete = possible
        if not complete:
            self.restricted.append(value.name)
        prices = self._prices(kind, maker, sets, key)
        cost = prices[0] if maker.node is None else np.zeros(len(sets))
        index = draft.add(CopiesNode(value, sets, uses), cost, draft.home_of(maker, readers))
        # With a maker the price depends on both choices.
        self._spread(uses, maker, index, prices)
        if maker.node is not None and prices.any():
            draft.edges.append((maker.node, index, prices))
        # A reader may choose only what the set has.
        for reader in readers:
            assert reader.node is not None
            draft.edges.append((index, reader.node, pricing.has(sets, key, reader)))

    def _relay(
        self, value: IRValue, kind: ValueType, maker: Maker, readers: list[Reader], uses: Uses
    ) -> None:
        """A node for the one copy from which all readers' are made. Of two readers it prices every
        tree there is; of more, all but those in which two share another copy.
        """
        # With more than two readers, trees with two inner copies are left out.
        draft, fixed = self.draft, uses.fixed
        if len(readers) + bool(fixed) > 2:
            self.restricted.append(value.name)
        wanted = (layout for reader in readers for want in reader.wants for layout in want)
        layouts = used((*wanted, *fixed, *maker.gives.tolist()))
        prices = self._prices(
            kind, maker, tuple((layout,) for layout in layouts), ("relay", layouts)
        )
        node = RelayNode(value, kind, layouts, (maker.node, maker.gives), uses)
        # A given value has one layout: reaching the relay from it is the relay's own cost.
        cost = prices[0] if maker.node is None else np.zeros(len(layouts))
        index = draft.add(node, cost, draft.home_of(maker, readers))
        relay = Maker(index, np.array(layouts), ("relay", layouts))
        if fixed:
            draft.charge(index, self._prices(kind, relay, (fixed,), ("fixed", fixed))[:, 0])
        if maker.node is not None:
            # The maker to the relay, and the relay to every reader.
            draft.edges.append((maker.node, index, prices))
        for reader in readers:
            assert reader.node is not None
            draft.edges.append(
                (index, reader.node, self._prices(kind, relay, reader.wants, reader.key))
            )

    def _weight(self, maker: Maker, readers: list[Reader], uses: Uses) -> None:
        """A parameter with several readers: each pays for itself what is gathered, and its share of
        what is not.
        """
        assert maker.node is not None
        assert len(readers) == len(self.draft.operators(readers)), (
            "a parameter that more than operators read"
        )
        sources, goals, conversions = self._as_stored(uses.kind, maker, readers)
        arrays = self.draft.pricing.arrays
        paid = []
        for reader, wants in zip(readers, goals, strict=True):
            assert reader.node is not None
            # Readers in one module share what is gathered; all readers share the rest.
            alike = [other for other in readers if other.place.module == reader.place.module]
            kinds = [_alone(uses.kind, group) for group in (alike, readers)]
            key = (
                "weight",
                id(conversions),
                *kinds,
                maker.key,
                reader.key,
                len(readers),
                len(alike),
            )
            if key not in arrays:
                gathers = functools.partial(conversions.gathers, uses.kind)
                gathered = {
                    (source, want): any(gathers(source, goal) for goal in want)
                    for source, want in itertools.product(set(sources), set(wants))
                }
                # ``[stored layouts, wants]``: whether anything is gathered on the way.
                table = np.array([[gathered[source, want] for want in wants] for source in sources])
                own, common = (
                    self._prices(kind, maker, reader.wants, ("edge", reader.key, ()))
                    for kind in kinds
                )
                arrays[key] = np.where(table, own / len(alike), common / len(readers))
            self.draft.edges.append((maker.node, reader.node, arrays[key]))
            paid.append(arrays[key])
        placed = zip(uses.readers, goals, strict=True)
        stored = replace(uses, readers=tuple(replace(use, wants=wants) for use, wants in placed))
        self.weights.append(SharedWeight(maker.node, sources, stored, tuple(paid), conversions))

    def _as_stored(
        self, kind: ValueType, maker: Maker, readers: Sequence[Reader]
    ) -> tuple[tuple[int, ...], list[tuple[LayoutSet, ...]], Conversions]:
        """What a parameter is stored as by choice and what each reader wants by choice, as numbers
        for the conversions.
        """
        gives: tuple[int, ...] = tuple(maker.gives.tolist())
        if not self._is_over_units(maker):
            return gives, [reader.wants for reader in readers], self.draft.pricing.conversions
        over = self.draft.pricing.over_units(self.draft.request.config)
        differentiable = kind.differentiable
        # With ZeRO-3 a parameter is stored in pieces over the units too, an axis that the mesh of
        # operators does not have.
        sources = tuple(over.stored(layout, differentiable=differentiable) for layout in gives)
        goals = [
            tuple(over.wanted(want, differentiable=differentiable) for want in reader.wants)
            for reader in readers
        ]
        return sources, goals, over.conversions

    def _share(self, value: IRValue, maker: Maker, readers: list[Reader], uses: Uses) -> None:
        """Every reader pays its share of the copy it wants."""
        source = int(maker.gives[0])
        outside = Maker(None, maker.gives[:1], source)
        shares = []
        for reader in readers:
            assert reader.node is not None
            # Exact if all readers want the same copy, and too little if they do not: so it is a
            # bound.
            share = self._prices(uses.kind, outside, reader.wants, reader.key)[0] / len(readers)
            self.draft.charge(reader.node, share)
            shares.append(share)
        self.shared.append(SharedValue(value, source, uses, tuple(shares)))


def _alone(kind: ValueType, readers: Sequence[Reader]) -> ValueType:
    """A weight that only these readers have: run again with them if they stand in one region, else
    in front of the first.
    """
    stretches = {reader.place.stretch for reader in readers}
    again = Again.ALL if len(stretches) == 1 and readers[0].place.runs_again else kind.again
    return replace(kind, again=again, is_kept=any(reader.keeps for reader in readers))
