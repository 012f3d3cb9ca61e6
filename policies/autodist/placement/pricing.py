"""What costs of one mesh are read off: op_choices, conversions and tables by signature, shared by
all graphs placed on it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shardwright.compiler.plan.conversion import canonical
from shardwright.compiler.plan.zero import in_pieces, over_units, units_of_storage
from shardwright.policies.autodist.placement.conversions import Conversions, LayoutSet, ValueType
from shardwright.policies.autodist.placement.formulation import Formulation
from shardwright.policies.autodist.placement.layout_sets import Maker, Reader
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.placement.strategies import (
    AllOpChoices,
    LayoutTable,
    Seconds,
    used,
)
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout


class OverUnits:
    """Conversions of parameters on the mesh that they are stored on, which has an axis for the
    units: from the pieces that a layout within the unit is stored in, to what readers have, whole
    over the units with a gradient that is a summand.
    """

    def __init__(self, pricing: Pricing, num_units: int, unit_size: int) -> None:
        self._within, self._num_units = pricing.layouts, num_units
        self.unit_mesh, self.mesh = pricing.request.mesh, pricing.request.mesh.over_units(num_units)
        ranks = tuple(
            unit * unit_size + rank for unit in range(num_units) for rank in pricing.request.ranks
        )
        self._layouts = LayoutTable()
        request = pricing.request
        self.conversions = Conversions(
            self.mesh, ranks, request.hardware, self._layouts, hidden=request.hidden_share
        )
        self._arrays: dict[Hashable, Seconds] = {}

    def stored(self, layout: int, *, differentiable: bool) -> int:
        """The number of what a layout within the unit is stored as."""
        found = self._within[layout]
        axes = [axis for axis in found.grad_partial if self.unit_mesh.axis_size(axis) > 1]
        return self._id(in_pieces(found, axes, self.unit_mesh, self._num_units), differentiable)

    def wanted(self, layouts: LayoutSet, *, differentiable: bool) -> LayoutSet:
        """The numbers of what readers want that have these layouts within the unit."""
        return tuple(
            sorted(
                {self._id(over_units(self._within[layout]), differentiable) for layout in layouts}
            )
        )

    def adapters(
        self, kind: ValueType, maker: Maker, sets: Sequence[LayoutSet], key: Hashable
    ) -> Seconds:
        """The seconds of :meth:`Pricing.adapters`; infinite where a reader has not as a summand
        what is stored in pieces for that.
        """
        full = (kind, maker.key, key)
        if full not in self._arrays:
            sources = [
                self.stored(layout, differentiable=kind.differentiable)
                for layout in maker.gives.tolist()
            ]
            distinct = tuple(dict.fromkeys(sets))
            goals = [self.wanted(wanted, differentiable=kind.differentiable) for wanted in distinct]
            prices = self.conversions.seconds(kind, sources, goals)
            if len(sources) > 1:  # else there is no other way to store it
                prices[self._differs(maker.gives.tolist(), distinct)] = np.inf
            position = {wanted: index for index, wanted in enumerate(distinct)}
            self._arrays[full] = prices[:, [position[wanted] for wanted in sets]]
        return self._arrays[full]

    def _differs(self, layouts: Sequence[int], sets: Sequence[LayoutSet]) -> npt.NDArray[np.bool_]:
        """``[layouts, sets]``: where a layout is G and some reader's is not, so that lowering
        stores it in other pieces.
        """
        summed = [set(self._within[layout].grad_partial) for layout in layouts]
        common = [
            set.intersection(*(set(self._within[layout].grad_partial) for layout in wanted))
            for wanted in sets
        ]
        return np.array([[not own <= shared for shared in common] for own in summed])

    def _id(self, layout: Layout, differentiable: bool) -> int:
        return self._layouts.id(canonical(layout, self.mesh, differentiable=differentiable))


class Pricing:
    """What does not change between the graphs placed on one mesh. Equal tables are one object, by
    which the solver knows equal blocks. ``latest``: the last request, its problem without memory,
    and what says the bytes that are given and used by node.

    ``like``: that of the same mesh on other ranks, or with another price of gathers. Choices,
    layouts and the steps between these are the same there; what they take is not.
    """

    def __init__(self, request: PlacementRequest, like: Pricing | None = None) -> None:
        # Everything that may be shared by requests: layouts by number, strategies, conversions,
        # tables.
        self.request = request
        self.layouts: LayoutTable = LayoutTable() if like is None else like.layouts
        self._over_units: dict[tuple[int, int], OverUnits] = {}
        self.op_choices: AllOpChoices = AllOpChoices(
            request.mesh,
            request.ranks,
            request.hardware,
            request.times,
            self.layouts,
            None if like is None else like.op_choices,
        )
        self.conversions: Conversions = Conversions(
            request.mesh,
            request.ranks,
            request.hardware,
            self.layouts,
            None if like is None else like.conversions.routes,
            request.hidden_share,
        )
        self.arrays: dict[Hashable, Seconds] = {}
        self.candidates: dict[Hashable, tuple[int, ...]] = {}
        self.sets: dict[Hashable, tuple[tuple[LayoutSet, ...], bool] | None] = {}
        self.latest: (
            tuple[PlacementRequest, Formulation, Callable[[], tuple[float, Mapping[int, Seconds]]]]
            | None
        ) = None

    def adapters(
        self, kind: ValueType, maker: Maker, sets: Sequence[LayoutSet], key: Hashable
    ) -> Seconds:
        """``[choices of the maker, sets]``: seconds of the adapters; ``key`` names the sets."""
        full = (kind, maker.key, key)
        if full not in self.arrays:
            sources = used(maker.gives)
            distinct = tuple(dict.fromkeys(sets))
            position = {wanted: index for index, wanted in enumerate(distinct)}
            prices = self.conversions.seconds(kind, sources, distinct)
            # Prices are [distinct layouts given, distinct sets wanted]; here they are spread over
            # all choices and all sets, of which many are alike. ``sources`` is sorted.
            rows = np.searchsorted(np.array(sources), maker.gives)
            self.arrays[full] = prices[
                rows[:, None], np.array([position[wanted] for wanted in sets])[None, :]
            ]
        return self.arrays[full]

    def over_units(self, config: ComputeConfig) -> OverUnits:
        """The prices of parameters that ZeRO-3 stores over units."""
        key = units_of_storage(config), config.plan_ngpus
        if key not in self._over_units:
            self._over_units[key] = OverUnits(self, *key)
        return self._over_units[key]

    def has(self, sets: Sequence[LayoutSet], key: Hashable, reader: Reader) -> Seconds:
        """``[sets, choices of the reader]``: 0 where the set has what the reader wants, else
        forbidden.
        """
        full = ("has", key, reader.key)
        if full not in self.arrays:
            # A truth table ``[sets, layouts]``: which set has which layout.
            layouts = used(layout for wanted in (*sets, *reader.wants) for layout in wanted)
            position = {layout: index for index, layout in enumerate(layouts)}
            members = np.zeros((len(sets), len(layouts)), dtype=bool)
            for index, wanted in enumerate(sets):
                members[index, [position[layout] for layout in wanted]] = True
            # Many choices want the same layouts.
            distinct = tuple(dict.fromkeys(reader.wants))
            columns = {
                w: members[:, [position[layout] for layout in w]].all(axis=1) for w in distinct
            }
            self.arrays[full] = np.where(
                np.stack([columns[w] for w in reader.wants], axis=1), 0.0, np.inf
            )
        return self.arrays[full]
