"""What the boundary between two pipeline stages takes: messages there and back, and the adapters
that it adds or saves.

What crosses is sent as lowering does it (:mod:`shardwright.compiler.passes.lower_stages`): whole or
in slices, never partial; on another mesh it arrives as its first reader needs it. So the stage
before makes one more copy where it had a summand, and the stage after makes its readers' copies of
what arrives, instead of those that the program of the whole model makes on its mesh. Both trees of
adapters are the ones that lowering makes.

A value is priced as if the stage before had made it, also where an earlier one did. Inputs of the
model, parameters, and values made from nothing are not sent: every stage that reads one has it, and
makes copies of its own.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.adapter_time import step_time
from shardwright.compiler.cost.time.call_times import OpTime
from shardwright.compiler.cost.time.pipeline_time import crossing_s
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.ops.strategy import layouts
from shardwright.compiler.passes.copy_trees import routes
from shardwright.compiler.plan.pipeline import Crossing
from shardwright.compiler.plan.program import Adapt, Compute
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.walk import Walk
from shardwright.runtime.layout import Layout
from shardwright.runtime.transfer import Holding

RanksOf = Callable[[int, int], tuple[int, ...]]
"""The ranks that a stage lies on, from the number of its placement and its first device."""


SIDES = (2,)
"""The shape of seconds in the forward and in the backward."""


ANY_OTHER_MESH = -1
"""The number of a placement before, where it does not matter which: it is on another mesh."""


@dataclass(frozen=True, eq=False)
class Boundary:
    """``[start, stop]`` for the stage after it: seconds of messages ``there_s`` and ``back_s``;
    ``[start, stop, side]``, in the forward and in the backward: of adapters ``sent_s`` that the
    stage before has more, and ``taken_s`` that the stage after has more; or less, where they are
    below 0.
    """

    there_s: Array
    back_s: Array
    sent_s: Array
    taken_s: Array
    total_s: Array


@dataclass(frozen=True)
class _Reach:
    """Some of what a stage reads of a value: ``block``, the last of its blocks that reads it; all
    readers from number ``first`` before ``last``; the places of the stage's operators up to there,
    from ``begin`` before ``end``.
    """

    block: int
    first: int
    last: int
    begin: int
    end: int


@dataclass(frozen=True)
class _Flow:
    """A value that later blocks read. ``is_sent``: to the stages that read it, which do not have it
    otherwise. ``places``: of its readers, ascending. ``reaches[start]``: for a stage that begins at
    that block, by further block that reads it.
    """

    value: IRValue
    is_sent: bool
    places: tuple[int, ...]
    reaches: dict[int, list[_Reach]]

    @functools.cached_property
    def first(self) -> int:
        """The block behind the one that makes it."""
        return min(self.reaches)


@dataclass(frozen=True)
class View:
    """A flow in one placement: the layout it is ``made`` in, as each reader ``needs`` it, and
    adapters by place, ascending.
    """

    made: Layout
    needs: tuple[Layout, ...]
    adapters: tuple[tuple[int, OpTime], ...]

    @functools.cached_property
    def sent(self) -> Layout:
        """The layout in which it is sent on the same mesh."""
        return replace(self.made, partial=(), grad_partial=())

    def wanted(self, first: int, last: int) -> tuple[Layout, ...]:
        """The layouts that the readers from number ``first`` before ``last`` need, each once."""
        numbers = frozenset(self._numbers[first:last])
        if numbers not in self._wanted:
            self._wanted[numbers] = tuple(self._distinct[number] for number in sorted(numbers))
        return self._wanted[numbers]

    def adapters_s(self, begin: int, end: int) -> Array:
        """The seconds of the adapters at places from ``begin`` before ``end``."""
        first, last = (bisect.bisect_left(self._places, place) for place in (begin, end))
        return _sides(time for _, time in self.adapters[first:last])

    # A mask that hundreds of operators read is wanted in a few layouts: numbers of these are
    # compared, as hashing all of them for each stage takes most of the time.

    @functools.cached_property
    def _distinct(self) -> tuple[Layout, ...]:
        return tuple(dict.fromkeys(self.needs))

    @functools.cached_property
    def _numbers(self) -> tuple[int, ...]:
        number = {layout: index for index, layout in enumerate(self._distinct)}
        return tuple(number[layout] for layout in self.needs)

    @functools.cached_property
    def _wanted(self) -> dict[frozenset[int], tuple[Layout, ...]]:
        return {}

    @functools.cached_property
    def _places(self) -> tuple[int, ...]:
        return tuple(place for place, _ in self.adapters)


class Messages:
    """Prices boundaries between blocks that begin at ``starts``, for stages that are placed as
    ``walks`` say.

    ``only_like_home``: stages may only lie where the tiers of the machine are to them as to the
    ranks of their walk.
    """

    def __init__(
        self,
        walks: Sequence[Walk],
        starts: Sequence[int],
        ranks_of: RanksOf,
        *,
        only_like_home: bool = False,
    ) -> None:
        self.walks, self.starts, self.ranks_of, self.only_like_home = (
            walks,
            starts,
            ranks_of,
            only_like_home,
        )
        # What flows over places between blocks, and how each placement has it.
        self._flows = _flows(walks[0], starts)
        self._views = [_views(walk, self._flows) for walk in walks]
        # Boundaries by how their ranks lie on the machine: many are alike.
        self._boundaries: dict[tuple[int, int, bytes], Boundary] = {}
        self._at: dict[tuple[int, int, int], Boundary] = {}
        self._fits: dict[tuple[int, int], bool] = {}
        self._adapters: dict[tuple[int, int | None], Array] = {}
        self._seconds: dict[Hashable, float] = {}
        self._copies: dict[Hashable, Array] = {}

    def where(self, ranks_of: RanksOf) -> Messages:
        """The messages of stages on other ranks; what does not depend on the ranks is shared."""
        found = copy.copy(self)
        found.ranks_of, found._at, found._fits = ranks_of, {}, {}
        return found

    def message_s(self, before: int, after: int, device: int) -> Array:
        """All that a boundary adds."""
        return self.boundary(before, after, device).total_s

    def relief_s(self, placement: int) -> Array:
        """What the boundaries before and after a stage can save of its adapters."""
        return self._least_more(placement, lambda seconds: seconds.sum(axis=-1))

    def relief_by_side_s(self, placement: int) -> Array:
        """The same, ``[start, stop, side]``: in the forward and in the backward, each for
        itself.
        """
        return self._least_more(placement, lambda seconds: seconds)

    def crossings(self, placement: int, num_stages: int) -> list[tuple[Array, Array]]:
        """The least seconds of messages, by stage, where all stages have one placement:
        ``[start, stop]``, of what a stage gets from the stage before it, and of what it sends back.
        Only what is made in the block before the stage is sure to come from there.
        """
        size = self.walks[placement].mesh.size
        nothing = np.zeros((len(self.starts) + 1, len(self.starts) + 1))
        found, known = [(nothing, nothing)], dict[bytes, tuple[Array, Array]]()
        for stage in range(1, num_stages):
            before, own = (self.ranks_of(placement, place * size) for place in (stage - 1, stage))
            if before == own:
                found.append((nothing, nothing))
                continue
            lies = tier_groups(self.walks[placement].setting.hardware, (*before, *own))
            if lies not in known:
                there, back = (
                    self._crossing_table(
                        placement, placement, before, own, reverse, only_fresh=True
                    )
                    for reverse in (False, True)
                )
                known[lies] = there, back
            found.append(known[lies])
        return found

    def _least_more(self, placement: int, counted: Callable[[Array], Array]) -> Array:
        taken = [counted(self._taken(before, placement)) for before in range(len(self.walks))]
        sent = np.minimum(counted(self._sent(placement)), 0.0).min(axis=1)
        # What ends where another begins.
        least: Array = np.minimum(np.minimum.reduce(taken), 0.0) + sent[None]
        return least

    def fits(self, placement: int, device: int) -> bool:
        """Whether the ranks of a stage lie as those that its seconds were taken from."""
        key = placement, device
        if key not in self._fits:
            home, ranks = self.walks[placement].setting, self.ranks_of(placement, device)
            self._fits[key] = not self.only_like_home or tier_groups(
                home.hardware, ranks
            ) == tier_groups(home.hardware, home.ranks)
        return self._fits[key]

    def boundary(self, before: int, after: int, device: int) -> Boundary:
        """What the boundary before a stage that begins at ``device`` takes."""
        # The stage before ends where this one begins.
        at = before, after, device
        if at not in self._at:
            here, there = (
                self.ranks_of(before, device - self.walks[before].mesh.size),
                self.ranks_of(after, device),
            )
            # Only the tiers between the ranks matter, not their numbers.
            lies = (
                b""
                if here == there
                else tier_groups(self.walks[before].setting.hardware, (*here, *there))
            )
            key = before, after, lies
            if key not in self._boundaries:
                self._boundaries[key] = self._priced(before, after, here, there)
            self._at[at] = self._boundaries[key]
        return self._at[at]

    def _priced(
        self, before: int, after: int, here: tuple[int, ...], there: tuple[int, ...]
    ) -> Boundary:
        way, back = (
            self._crossing_table(before, after, here, there, reverse) for reverse in (False, True)
        )
        sent, taken = self._sent(before), self._taken(before, after)
        return Boundary(way, back, sent, taken, way + back + (sent + taken).sum(axis=-1))

    def _sent(self, before: int) -> Array:
        if (before, None) not in self._adapters:
            self._adapters[before, None] = self._table(
                functools.partial(self._sent_s, before), SIDES
            )
        return self._adapters[before, None]

    def _taken(self, before: int, after: int) -> Array:
        # From another mesh a value arrives as its first reader needs it, whoever has sent it.
        is_one_mesh = self.walks[before].mesh == self.walks[after].mesh
        key = before if is_one_mesh else ANY_OTHER_MESH, after
        if key not in self._adapters:
            self._adapters[key] = self._table(
                functools.partial(self._taken_s, before, after), SIDES
            )
        return self._adapters[key]

    def _crossing_table(
        self,
        before: int,
        after: int,
        here: tuple[int, ...],
        there: tuple[int, ...],
        reverse: bool,
        *,
        only_fresh: bool = False,
    ) -> Array:
        """``[start, stop]``: the seconds of the messages with all values that a stage reads, or
        with their gradients. ``only_fresh``: only of what the block before the stage has made.
        """
        num_blocks = len(self.starts)
        table = np.zeros((num_blocks + 1, num_blocks + 1))
        crossing_s = functools.partial(self._crossing_s, before, after, here, there, reverse)
        is_one_mesh = self.walks[before].mesh == self.walks[after].mesh
        for index, flow in enumerate(self._flows):
            starts = [flow.first] if only_fresh else flow.reaches
            if is_one_mesh:
                # A value is received as it is sent, whatever of it the stage reads.
                seconds = crossing_s(index, flow.reaches[flow.first][0])
                for start in starts if seconds else ():
                    table[start, flow.reaches[start][0].block + 1 :] += seconds
                continue
            for start in starts:
                reaches = flow.reaches[start]
                ends = [reach.block for reach in reaches[1:]] + [num_blocks]
                for reach, end in zip(reaches, ends, strict=True):
                    table[start, reach.block + 1 : end + 1] += crossing_s(index, reach)
        return table

    def _table(
        self, seconds: Callable[[int, _Reach], float | Array], shape: tuple[int, ...] = ()
    ) -> Array:
        """``[start, stop]`` of the seconds, ``shape`` of them, of every flow that a stage reads so
        much of, added up.
        """
        num_blocks = len(self.starts)
        table = np.zeros((num_blocks + 1, num_blocks + 1, *shape))
        for index, flow in enumerate(self._flows):
            for start, reaches in flow.reaches.items():
                ends = [reach.block for reach in reaches[1:]] + [num_blocks]
                for reach, end in zip(reaches, ends, strict=True):
                    table[start, reach.block + 1 : end + 1] += seconds(index, reach)
        return table

    def _crossing_s(
        self,
        before: int,
        after: int,
        here: tuple[int, ...],
        there: tuple[int, ...],
        reverse: bool,
        index: int,
        reach: _Reach,
    ) -> float:
        """The seconds of the message with a value, or with its gradient."""
        value = self._flows[index].value
        if (
            here == there
            or not self._flows[index].is_sent
            or (reverse and not value.takes_gradient)
        ):
            return 0.0
        # The layouts at both ends, and the ranks: these are all that a message depends on.
        sent, received = (
            self._views[before][index].sent,
            self._received_as(before, after, index, reach),
        )
        key = before, after, here, there, reverse, value.dtype, sent, received
        if key not in self._seconds:
            ends = [
                Holding(sent, self.walks[before].mesh, here),
                Holding(received, self.walks[after].mesh, there),
            ]
            hardware = self.walks[before].setting.hardware
            self._seconds[key] = crossing_s(Crossing(value, 0, 1, *ends), hardware, reverse=reverse)
        return self._seconds[key]

    def _sent_s(self, before: int, index: int, reach: _Reach) -> Array:
        """The copies that the stage before makes for its own readers and to send it, instead of
        those in the program.
        """
        view, value = self._views[before][index], self._flows[index].value
        if not self._flows[index].is_sent:
            return np.zeros(SIDES)
        wanted = (*view.wanted(0, reach.first), view.sent)
        copies = self._tree_s(before, value, view.made, wanted)
        return copies - view.adapters_s(0, reach.begin)

    def _taken_s(self, before: int, after: int, index: int, reach: _Reach) -> Array:
        """The copies that readers make of what arrives, instead of those in the whole model's
        program.
        """
        view, value = self._views[after][index], self._flows[index].value
        received = self._received_as(before, after, index, reach)
        copies = self._tree_s(after, value, received, view.wanted(reach.first, reach.last))
        return copies - view.adapters_s(reach.begin, reach.end)

    def _received_as(self, before: int, after: int, index: int, reach: _Reach) -> Layout:
        if not self._flows[index].is_sent:
            return self._views[after][index].made
        if self.walks[before].mesh == self.walks[after].mesh:
            return self._views[before][index].sent
        return replace(self._views[after][index].needs[reach.first], partial=(), grad_partial=())

    def _tree_s(
        self, placement: int, value: IRValue, source: Layout, targets: tuple[Layout, ...]
    ) -> Array:
        """The seconds of all copies of a value, there and back."""
        key = placement, value.dtype, value.requires_grad, value.takes_gradient, source, targets
        # As lowering makes them: a tree of copies.
        if key not in self._copies:
            walk = self.walks[placement]
            mesh, ranks, hardware = walk.storage_mesh, walk.storage_ranks, walk.setting.hardware
            found = routes(
                source,
                targets,
                mesh,
                differentiable=value.requires_grad,
                takes_gradient=value.takes_gradient,
            ).values()
            gradient = value.takes_gradient
            steps = itertools.chain.from_iterable(route.steps for route in found)
            times = [
                step_time(step, value.dtype, mesh, ranks, hardware, differentiable=gradient)
                for step in steps
            ]
            self._copies[key] = _sides(times)
        return self._copies[key]


def _sides(times: Iterable[OpTime]) -> Array:
    """Seconds in the forward and in the backward, added up."""
    listed = [(time.forward_s, time.backward_s) for time in times]
    return np.array(listed).sum(axis=0) if listed else np.zeros(SIDES)


def _flows(walk: Walk, starts: Sequence[int]) -> list[_Flow]:
    """The values that are made in one block and read in a later one; and those that all stages have
    and several blocks read.
    """
    graph, free = walk.program.graph, walk.free
    sent = {
        v.name: (place, v)
        for place, op in enumerate(graph.ops)
        if op.name not in free
        for v in op.results
    }
    # By every module for itself.
    gathered = {item.of.name for item in walk.program.adapters() if item.gathers_weight}
    made = {
        v.name: (0, v)
        for v in (*graph.inputs, *graph.parameters, *graph.buffers)
        if v.name not in gathered
    }
    made |= {v.name: (0, v) for op in graph.ops if op.name in free for v in op.results}
    made |= sent
    readers: dict[str, list[int]] = {}
    for place, op in enumerate(graph.ops):
        for value in op.operands:
            if value.name in made and op.name not in free:
                readers.setdefault(value.name, []).append(place)
    flows = []
    for name, places in readers.items():
        home, value = made[name]
        blocks = [bisect.bisect_right(starts, place) - 1 for place in places]
        if name not in sent and blocks[0] == blocks[-1]:
            continue  # its copies are as in the program of the whole model
        first = bisect.bisect_right(starts, home)  # the first block after the one that makes it
        reaches = {
            start: _reaches(start, blocks, starts, len(graph.ops))
            for start in range(first, blocks[-1] + 1)
        }
        if reaches:
            flows.append(_Flow(value, name in sent, tuple(places), reaches))
    return flows


def _reaches(
    start: int, blocks: Sequence[int], starts: Sequence[int], num_places: int
) -> list[_Reach]:
    first = bisect.bisect_left(blocks, start)
    ends = [*starts[1:], num_places]
    return [
        _Reach(block, first, bisect.bisect_right(blocks, block), starts[start], ends[block])
        for block in dict.fromkeys(blocks[first:])
    ]


def _views(walk: Walk, flows: Sequence[_Flow]) -> list[View]:
    """The flows as one placement has them."""
    computed = {item.original.name: item for _, item in walk.by_place if isinstance(item, Compute)}
    # The adapters of each value, with where they stand.
    adapters: dict[str, list[tuple[int, OpTime]]] = {}
    for (place, item), time in zip(walk.by_place, walk.times, strict=True):
        if isinstance(item, Adapt):
            adapters.setdefault(item.of.name, []).append((place, time))
    found = []
    # In what layouts the readers behind a boundary want it.
    for flow in flows:
        needs = []
        for place in dict.fromkeys(flow.places):
            op = walk.program.graph.ops[place]
            assert op.rule is not None
            wanted = layouts(op.rule, computed[op.name].assignment, walk.mesh)[0]
            needs += [
                layout
                for value, layout in zip(op.operands, wanted, strict=True)
                if value.name == flow.value.name
            ]
        made = walk.layouts[flow.value.name]
        found.append(View(made, tuple(needs), tuple(adapters.get(flow.value.name, ()))))
    return found


def tier_groups(hardware: Hardware, ranks: Sequence[int]) -> bytes:
    """A key of where ranks lie on the tiers of a machine.

    It is equal for lists of ranks that fall, in their order, into the same groups of every tier,
    whichever groups these are: costs depend on no more.
    """
    devices = np.asarray(ranks)
    return b"".join(
        _in_order_of_appearance(tier.group_of[devices]).tobytes() for tier in hardware.tiers
    )


def _in_order_of_appearance(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """The groups by number, where the first to be named is 0, the next 1."""
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]
