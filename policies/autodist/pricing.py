"""What costs of one mesh are read off: menus, conversions and tables by signature, shared by all graphs placed on it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from shardwright.policies.autodist.conversions import Conversions, LayoutSet, ValueType
from shardwright.policies.autodist.copies import Maker, Reader
from shardwright.policies.autodist.request import PlacementRequest
from shardwright.policies.autodist.strategies import LayoutTable, Menus, Seconds, used


class Pricing:
    """What does not change between the graphs placed on one mesh. Equal tables are one object, by which the solver knows equal
    blocks.
    """

    def __init__(self, request: PlacementRequest) -> None:
        self.layouts = LayoutTable()
        self.menus = Menus(request.mesh, request.ranks, request.hardware, request.times, self.layouts)
        self.conversions = Conversions(request.mesh, request.ranks, request.hardware, self.layouts)
        self.arrays: dict[Hashable, Seconds] = {}
        self.candidates: dict[Hashable, tuple[int, ...]] = {}
        self.sets: dict[Hashable, tuple[tuple[LayoutSet, ...], bool] | None] = {}

    def adapters(self, kind: ValueType, maker: Maker, sets: Sequence[LayoutSet], key: Hashable) -> Seconds:
        """``[choices of the maker, sets]``: seconds of the adapters; ``key`` names the sets."""
        full = (kind, maker.key, key)
        if full not in self.arrays:
            sources = used(maker.gives)
            distinct = tuple(dict.fromkeys(sets))
            position = {wanted: index for index, wanted in enumerate(distinct)}
            prices = self.conversions.seconds(kind, sources, distinct)
            rows = np.searchsorted(np.array(sources), maker.gives)
            self.arrays[full] = prices[rows[:, None], np.array([position[wanted] for wanted in sets])[None, :]]
        return self.arrays[full]

    def gathered_twice(self, kind: ValueType, maker: Maker, sets: Sequence[LayoutSet], key: Hashable) -> Seconds:
        """``[choices of the maker, sets]``: infinite where a parameter that is stored over units would be gathered within the
        unit as well. It need not be: what is stored as it is used is cut along the same axes, and gathered from all of them.
        """
        full = ("twice", kind, maker.key, key)
        if full not in self.arrays:
            gathers = self.conversions.gathers
            rows = [[any(gathers(kind, s, goal) for goal in wanted) for wanted in sets] for s in maker.gives.tolist()]
            self.arrays[full] = np.where(np.array(rows), np.inf, 0.0)
        return self.arrays[full]

    def has(self, sets: Sequence[LayoutSet], key: Hashable, reader: Reader) -> Seconds:
        """``[sets, choices of the reader]``: 0 where the set has what the reader wants, else forbidden."""
        full = ("has", key, reader.key)
        if full not in self.arrays:
            layouts = used(layout for wanted in (*sets, *reader.wants) for layout in wanted)
            position = {layout: index for index, layout in enumerate(layouts)}
            members = np.zeros((len(sets), len(layouts)), dtype=bool)
            for index, wanted in enumerate(sets):
                members[index, [position[layout] for layout in wanted]] = True
            distinct = tuple(dict.fromkeys(reader.wants))
            columns = {w: members[:, [position[layout] for layout in w]].all(axis=1) for w in distinct}
            self.arrays[full] = np.where(np.stack([columns[w] for w in reader.wants], axis=1), 0.0, np.inf)
        return self.arrays[full]
