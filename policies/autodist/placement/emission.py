"""Where lowering puts the adapters of one value, and how often each of them runs.

A copy is made for the first operator that reads it, in the recompute region of that operator. What
emission does with regions (:mod:`shardwright.compiler.plan.repeated_blocks`) decides which of its
adapters run again in the backward: of a value from outside those run in front of the region that
something after it reads too, and, but for weights, those before the first gather.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from shardwright.compiler.ir.graph import IRGraph
from shardwright.policies.autodist.placement.conversions import (
    Again,
    Conversions,
    LayoutSet,
    StepTime,
    ValueType,
    kept_steps,
    union,
)

END = sys.maxsize
"""The stretch of what is made for the outside, after all operators."""


@dataclass(frozen=True, slots=True)
class BodyPlace:
    """Where an operator stands in the body. ``stretch``: the number of its stretch, consecutive
    operators of one recompute region or none; ``runs_again``: whether that is computed again;
    ``module``: path and region, for which pieces of a weight are gathered.
    """

    stretch: int
    runs_again: bool
    module: tuple[str, str | None]


OUTSIDE = BodyPlace(END, False, ("", None))


def places(graph: IRGraph, *, trains: bool) -> dict[str, BodyPlace]:
    """Where each operator of a graph stands, whose recompute regions are marked."""
    found = {}
    for stretch, (region, ops) in enumerate(groupby(graph.ops, lambda op: op.region)):
        for op in ops:
            found[op.name] = BodyPlace(
                stretch, region is not None and trains, (op.module_path, region)
            )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One reader of a value: its node, what each of its choices wants, and its place. ``keeps``: as
    of a reader.
    """

    node: int
    wants: tuple[LayoutSet, ...]
    place: BodyPlace
    keeps: bool = False


@dataclass(frozen=True, eq=False)
class Uses:
    """The readers of a value. ``made_in``: the stretch of what makes it, None for a parameter or an
    input; ``stays``: whether its adapters stay in a region that alone reads it, as those of weights
    do. ``readers``: in the order of the program;
    ``fixed``: what the outside wants.
    """

    kind: ValueType
    made_in: int | None
    stays: bool
    readers: tuple[Use, ...]
    fixed: LayoutSet

    def again(self) -> Again | None:
        """Which adapters run again, whatever readers choose; None where that depends on their
        choices.
        """
        stretches = {use.place.stretch for use in self.readers} | ({END} if self.fixed else set())
        if not any(use.place.runs_again for use in self.readers):
            return Again.NONE
        if len(stretches) > 1:
            return None
        return Again.ALL if self.stays or self.made_in in stretches else Again.FROM_GATHERS

    def wanted(self, choice: Sequence[int]) -> LayoutSet:
        """All layouts that readers want by their choices."""
        return union([self.fixed, *(use.wants[choice[use.node]] for use in self.readers)])

    def seconds(self, conversions: Conversions, source: int, choice: Sequence[int]) -> float:
        """Per step, of all adapters of the value, made as ``source``, by the choices of its
        readers.
        """
        all_wants = [(use.wants[choice[use.node]], use.place, use.keeps) for use in self.readers]
        if self.fixed:
            all_wants.append((self.fixed, OUTSIDE, False))
        emission = _Emission(self, conversions, source, all_wants)
        return self.kind.microbatches * sum(emission.seconds(copy) for copy in emission.copies)


@dataclass(eq=False)
class _Copy:
    """One copy of the value. ``last``: the last stretch that reads it, or one made of it where it
    is made; ``is_inside``: whether it is made by what runs again; ``is_kept``: whether a reader
    keeps it, or a copy of which it is a part.
    """

    layout: int
    place: BodyPlace
    start: _Copy | None = None
    last: int = -1
    is_inside: bool = False
    is_kept: bool = False


@dataclass(eq=False)
class _Emission:
    """The copies of a value in the order they are made, as :mod:`shardwright.compiler.passes.lower`
    makes them.
    """

    uses: Uses
    conversions: Conversions
    source: int
    all_wants: Sequence[tuple[LayoutSet, BodyPlace, bool]]
    copies: list[_Copy] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind = self.uses.kind
        # The tree of copies that lowering makes for all readers together.
        self.tree: Mapping[int, int] = self.conversions.tree(
            kind, self.source, union(wants for wants, _, _ in self.all_wants)
        )
        made_in = -1 if self.uses.made_in is None else self.uses.made_in
        root = _Copy(self.source, BodyPlace(made_in, False, ("", None)), is_inside=True)
        self.known: dict[tuple[int, object], _Copy] = {(self.source, None): root}
        for wants, place, keeps in self.all_wants:
            self._read(wants, place, keeps)
        # From the leaves back: a copy is kept for backward if what is made of it is, by views
        # alone.
        for copy in reversed(self.copies):
            assert copy.start is not None
            copy.start.is_kept |= copy.is_kept and all(step.is_kept for step in self._steps(copy))
            same = copy.start.place.stretch == copy.place.stretch
            copy.start.last = max(copy.start.last, copy.place.stretch, copy.last if same else -1)

    def _read(self, wants: Iterable[int], place: BodyPlace, keeps: bool) -> None:
        for layout in wants:
            copy = self._make(layout, place)
            copy.is_kept |= keeps
            if place is not OUTSIDE:
                copy.last = max(copy.last, place.stretch)

    def _make(self, layout: int, place: BodyPlace) -> _Copy:
        # A copy under ``None`` serves everyone. What gathers a weight (ZeRO-3) serves its own
        # module alone, as it is let go of after that module.
        found = self.known.get((layout, None)) or self.known.get((layout, place.module))
        if found is not None:
            return found
        # Along the tree: what this copy is made of is made first.
        start = self._make(self.tree[layout], place)
        copy = _Copy(layout, place, start)
        self.copies.append(copy)
        kind = self.uses.kind
        gathers = kind.is_weight and self.conversions.gathers(kind, start.layout, layout)
        # A copy of something local is local: its source is not there for other modules.
        everywhere = (start.layout, None) in self.known and not gathers
        self.known[layout, None if everywhere else place.module] = copy
        return copy

    def seconds(self, copy: _Copy) -> float:
        """Per microbatch, of the adapters of one copy; of those before it first."""
        start, place = copy.start, copy.place
        assert start is not None
        # Inside of a stretch that runs again, adapters run again with it.
        inside = start.is_inside and start.place.stretch == place.stretch
        is_shared = copy.last > place.stretch
        total = 0.0
        steps = self._steps(copy)
        num_before = len(steps) - len(kept_steps(steps)) if copy.is_kept else len(steps)
        for index, step in enumerate(steps):
            stays = self.uses.stays or step.gathers
            inside = place.runs_again and (inside or (stays and not is_shared))
            again_s = 0.0
            if inside:
                again_s = step.forward_s
            # A weight that is gathered once more for backward.
            elif index >= num_before:
                again_s = step.regathered_s
            total += step.forward_s + again_s + step.backward_s
        copy.is_inside = inside
        return total

    def _steps(self, copy: _Copy) -> Sequence[StepTime]:
        assert copy.start is not None
        return self.conversions.steps(self.uses.kind, copy.start.layout, copy.layout)
