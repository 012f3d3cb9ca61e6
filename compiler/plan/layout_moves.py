"""The order of a conversion: which axis is added, moved or dropped next, until one layout has
become the other.

Axes that cut the same place on both sides stay. Other axes that cut go one at a time. Slices and
reduce-scatters shrink the tensor, so they go before all-reduces; gathers go last. A minor axis of a
place is dropped before its major one, and added after it. Nothing here depends on the shape of the
tensor.

Example: from ``[8/dp, 768] P(tp)`` to ``[8, 768/tp]`` the reduce-scatter over tp comes first, then
the all-gather over dp, which has to move a quarter of the tensor if tp is 4.

[Note: One sum over several axes] A conversion that keeps the shape goes over all its axes at once.
One sum over 4 x 2 ranks sends 7/4 of the tensor; a sum over 4 and then one over 2 send 6/4 + 1. If
the axes lie on different tiers of a machine, the one collective may be hierarchical, and then sends
less between the nodes too. By the cost model it is never the slower choice, but for small tensors
in groups that lie unevenly on nodes. Gathers and reduce-scatters gain nothing this way: of nested
pieces a second one sends only what the first has left.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.compiler.plan.layout_cuts import Place, PlaceKey, cut_places, fits, in_order
from shardwright.runtime.errors import InternalError
from shardwright.runtime.layout import Layout, Mesh


@dataclass(frozen=True, slots=True)
class State:
    """A layout without its sizes: its places in order, and the axes on which it is P and G, sorted.
    Axes of one rank are left out.
    """

    places: tuple[Place, ...]
    partial: tuple[str, ...]
    grad_partial: tuple[str, ...]

    @classmethod
    @functools.lru_cache(maxsize=65536)  # a placement converts each layout to hundreds of others
    def of(cls, layout: Layout, mesh: Mesh, *, differentiable: bool = True) -> State:
        """The state of a layout. Without a gradient (not ``differentiable``) it is G on no axis."""
        partial = sorted(a for a in layout.partial if mesh.axis_size(a) > 1)
        grad_partial = sorted(a for a in layout.grad_partial if mesh.axis_size(a) > 1)
        places = in_order(cut_places(layout, mesh))
        return cls(places, tuple(partial), tuple(grad_partial) if differentiable else ())

    def letters(self) -> dict[str, str]:
        """The placement on each axis where it is S, P or G. It is R on all others."""
        found = {axis: "S" for place in self.places for axis in place.axes}
        found.update(dict.fromkeys(self.partial, "P"))
        found.update(dict.fromkeys(self.grad_partial, "G"))
        return found


@dataclass(frozen=True, slots=True)
class Move:
    """One adapter, over several axes only if it neither cuts nor joins a dim.

    ``source``: the place whose last axis it joins. ``to``: the place that it cuts, after ``count``
    other axes that cut it. ``after``: the state that it leaves.
    """

    kind: str
    axes: tuple[str, ...]
    backward: str | None
    after: State
    source: Place | None = None
    to: Place | None = None
    count: int = 0


def moves(source: State, goal: State, mesh: Mesh) -> tuple[Move, ...]:
    """The moves from one state to another; none when they are equal."""
    found: list[Move] = []
    now = source
    # No conversion takes this many moves; the bound makes an endless one an error.
    for _ in range(8 * max(1, len(mesh.axes))):
        if now == goal:
            return tuple(found)
        found.append(_next_move(now, goal, mesh))
        now = found[-1].after
    raise InternalError(
        f"no conversion from {source} to {goal} on mesh {mesh}", why=f"stuck at {now}"
    )


def _next_move(now: State, goal: State, mesh: Mesh) -> Move:
    """The next move towards the goal, the cheapest kind first."""
    letters, wanted = now.letters(), goal.letters()
    kept = _kept(now.places, goal.places)
    # Axes that may cut next: the first one of each place of the goal that does not cut it yet.
    # Axes that may be joined next: the last one of each place that must not stay.
    addable = {}
    for place in goal.places:
        count = _present(place, now.places)
        if count < len(place.axes):
            addable[place.axes[count]] = (place, count)
    droppable = {
        place.axes[-1]: place for place in now.places if len(place.axes) > kept.get(place.key, 0)
    }
    # Slices and reduce-scatters.
    for axis, (place, count) in addable.items():
        letter = letters.get(axis, "R")
        if letter != "S" and fits(place, now.places):
            after = _add(now, place, count)
            if letter == "P":
                return Move("reduce_scatter", (axis,), None, after, to=place, count=count)
            return Move(
                "narrow",
                (axis,),
                "pad" if letter == "G" else "all_gather",
                after,
                to=place,
                count=count,
            )
    # All-to-alls, for an axis that cuts another place now.
    for axis, (place, count) in addable.items():
        if axis in droppable:
            rest = _without(now, droppable[axis])
            if _present(place, rest.places) == count and fits(place, rest.places):
                return Move(
                    "all_to_all",
                    (axis,),
                    None,
                    _add(rest, place, count),
                    droppable[axis],
                    place,
                    count,
                )
    # Conversions that keep the shape.
    changes = {axis: (letters.get(axis, "R"), wanted.get(axis, "R")) for axis in mesh.names}
    changes = {
        axis: change
        for axis, change in changes.items()
        if "S" not in change and change[0] != change[1]
    }
    if changes:
        return _shapeless_move(now, changes)
    # Gathers. An axis that is wanted S, but could not move, is gathered last and cut again.
    for place in sorted(droppable.values(), key=lambda p: wanted.get(p.axes[-1]) == "S"):
        axis = place.axes[-1]
        letter = wanted.get(axis, "R")
        after = _lettered(_without(now, place), axis, letter)
        if letter == "P":
            return Move("pad", (axis,), None, after, place)
        return Move(
            "all_gather", (axis,), "reduce_scatter" if letter == "G" else "slice", after, place
        )
    raise InternalError(f"no step from {now} towards {goal} on mesh {mesh}")


# The adapter and its backward for a conversion of an axis that keeps the shape.
_SHAPELESS = {
    ("R", "G"): ("grad_all_reduce", None),
    ("R", "P"): ("keep_one", "identity"),
    ("P", "R"): ("all_reduce", "identity"),
    ("P", "G"): ("all_reduce", "all_reduce"),
    ("G", "R"): ("grad_keep_one", None),
    ("G", "P"): ("keep_one", "keep_one"),
}


def _shapeless_move(now: State, changes: Mapping[str, tuple[str, str]]) -> Move:
    """The first of the conversions that keep the shape. ``changes``: the letter of each axis, and
    the one that it gets.

    Sums come first: that of the value over all axes on which it is P, then that of its gradient
    over all axes on which it is to be G. If these are the same axes, one adapter does both.
    [Note: One sum over several axes]
    """
    # By what an axis is now, and what it becomes.
    made_whole = tuple(axis for axis, (a, _) in changes.items() if a == "P")
    grad_summed = tuple(axis for axis, (_, b) in changes.items() if b == "G")
    grad_kept = tuple(axis for axis, (a, _) in changes.items() if a == "G")
    kept = tuple(axis for axis, (_, b) in changes.items() if b == "P")
    # Summing comes first, on the way P -> R -> G. Only then is anything kept on one rank.
    if made_whole or grad_summed:
        axes, change = _step_between(("P", "R", "G"), made_whole, grad_summed)
    else:
        axes, change = _step_between(("G", "R", "P"), grad_kept, kept)
    # One adapter changes all its axes at once.
    after = now
    for axis in axes:
        after = _lettered(after, axis, change[1])
    kind, backward = _SHAPELESS[change]
    return Move(kind, axes, backward, after)


def _step_between(
    letters: tuple[str, str, str], leaving: tuple[str, ...], arriving: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, str]]:
    """The next step of axes that go from the first letter over R to the last: first all axes that
    leave the first letter, then all that arrive at the last.
    """
    first, middle, last = letters
    if leaving == arriving:
        return leaving, (first, last)
    return (leaving, (first, middle)) if leaving else (arriving, (middle, last))


def _kept(now: Sequence[Place], then: Sequence[Place]) -> dict[PlaceKey, int]:
    """How many axes of each place, from the major one on, are the same on both sides."""
    wanted = {place.key: place.axes for place in then}
    kept = {}
    for place in now:
        # Axes cut from major to minor, so only a common beginning leaves the same pieces: ``a, b``
        # and ``a, c`` share the pieces of ``a``.
        common = 0
        for a, b in zip(place.axes, wanted.get(place.key, ()), strict=False):
            if a != b:
                break
            common += 1
        kept[place.key] = common
    return kept


def _present(place: Place, now: Sequence[Place]) -> int:
    """How many axes of ``place`` cut it already. If other axes cut it, that is all of them, so that
    none is added yet.
    """
    for other in now:
        if other.key == place.key:
            count = len(other.axes)
            return count if place.axes[:count] == other.axes else len(place.axes)
    return 0


def _without(state: State, place: Place) -> State:
    """The state with the last axis of a place gone."""
    shorter = (
        replace(place, axes=place.axes[:-1]) if own is place else own for own in state.places
    )
    return State(tuple(own for own in shorter if own.axes), state.partial, state.grad_partial)


def _add(state: State, place: Place, count: int) -> State:
    """The state with axis ``count`` of ``place`` cutting too."""
    cut = replace(place, axes=place.axes[: count + 1])
    places = in_order([*(own for own in state.places if own.key != place.key), cut])
    return _lettered(State(places, state.partial, state.grad_partial), place.axes[count], "R")


def _lettered(state: State, axis: str, letter: str) -> State:
    """The state with another letter than S on an axis."""

    def axes(now: tuple[str, ...], own: str) -> tuple[str, ...]:
        return tuple(sorted({*now, axis})) if letter == own else tuple(a for a in now if a != axis)

    return State(state.places, axes(state.partial, "P"), axes(state.grad_partial, "G"))
