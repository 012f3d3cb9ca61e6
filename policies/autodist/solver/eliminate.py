"""Exact elimination: take nodes out one after another, each leaving the table of its best cost for
its neighbours' choices.

This is dynamic programming over a tree decomposition (bucket elimination, Dechter 1999; a min-plus
tensor contraction). It is exact, and its cost is exponential only in the number of neighbours a
node has when it goes: graphs of models are chains with branches, where that is two to four.

**Plan, then run.** Order and shapes do not depend on costs, so they are planned once; every run
with other node costs (other multipliers, see relaxation.py) only adds and minimises arrays. All
tables lie in one flat array; nodes that go in the same round and have equal shapes are computed by
the same numpy calls, and so is the traceback that reads the best choices off the tables.

**Repeated blocks.** A round takes nodes out that are no neighbours, in the order of their *key*:
which tables, in which order of dims, meet in the node. Nodes with equal keys leave equal tables, so
each distinct one is computed once. In a chain of equal blocks the same nodes of all blocks go at
once and leave a chain of equal tables between their boundaries; of that chain every second node
goes at once, leaving equal tables again: these are the min-plus powers of the block's table,
computed in the logarithm of the number of blocks. Nothing is assumed to repeat: every block keeps
its own choices, ends may differ, and values read by all blocks are in the tables of all of them, as
any other neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.policies.autodist.solver.problem import Array

MAX_JOIN = 1 << 24
"""Entries of the largest table that a node and its neighbours may have together."""

_ALWAYS = 17  # log2 of entries: computing a join of that size costs less than a batch of its own
# Entries: larger joins are minimised strategy by strategy, without being stored.
_LOOP_ABOVE = 1 << 21
_CACHE_BELOW = 1 << 16  # entries: batches with smaller inputs keep the positions that they read
_SLICE_ABOVE = 256  # entries: larger tables are copied one by one, smaller ones by one indexed copy


@dataclass(frozen=True)
class Factor:
    """A cost table and the nodes its dims belong to, in ascending order."""

    table: int
    scope: tuple[int, ...]


@dataclass
class Batch:
    """Nodes taken out together: equal shapes, each with its own tables.

    Attributes:
        nodes: ``[members]``; ``neighbours``: ``[members, others]``.
        size: strategies of each node; ``shape``: of its neighbours.
        axes: per input, the join dims of its own dims; join dim 0 is the node, ``i + 1`` is
            neighbour ``i``.
        inputs: per input, where the members' tables start, ``[members]``.
        computed: members whose tables are computed (others have the same key as one of these or of
            an earlier round).
        outputs: where the tables of those are written.
    """

    size: int
    shape: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    dynamic: bool
    members: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    computed_members: list[int] = field(default_factory=list)
    output_offsets: list[int] = field(default_factory=list)

    def freeze(self, offsets: Sequence[int]) -> None:
        """Turn the lists of members into arrays."""
        # Members of a batch have tables of one shape, so all are computed as one array.
        self.nodes = np.array([node for node, _, _ in self.members])
        neighbours = np.array([others for _, others, _ in self.members], dtype=np.intp)
        self.neighbours = neighbours.reshape(len(self.members), len(self.shape))
        tables = np.array([[offsets[table] for table in tables] for _, _, tables in self.members])
        self.inputs = tables.reshape(len(self.members), len(self.axes)).T
        self.computed = np.array(self.computed_members, dtype=np.intp)
        self.outputs = np.array(self.output_offsets, dtype=np.intp)
        self.members.clear()
        # For each input: where its first row lies, and the strides of its other axes.
        self.reads: list[tuple[NDArray[np.intp], list[tuple[int, int]]]] = []
        for axes, starts in zip(self.axes, self.inputs, strict=True):
            first, stride, others = starts[:, None], 1, []
            for axis, size in zip(reversed(axes), reversed(self.dims(axes)), strict=True):
                if axis == 0:
                    first = first + np.arange(size)[None, :] * stride
                else:
                    others.append((axis - 1, stride))
                stride *= size
            self.reads.append((first, others))
        # Small batches read by ready-made indices, which is faster.
        self.gathers: list[NDArray[np.intp]] | None = None
        sizes = [math.prod(self.dims(axes)) for axes in self.axes]
        if (
            max(sizes) * len(self.computed) <= _CACHE_BELOW
            and self.size * math.prod(self.shape) <= _LOOP_ABOVE
        ):
            self.gathers = [
                aligned(starts[self.computed][:, None] + np.arange(size), self, axes)
                for axes, starts, size in zip(self.axes, self.inputs, sizes, strict=True)
            ]
            self.writes = self.outputs[:, None] + np.arange(math.prod(self.shape))

    def dims(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of an input's table."""
        return tuple(self.size if axis == 0 else self.shape[axis - 1] for axis in axes)


class Elimination:
    """A planned elimination of some or all nodes of a pairwise network.

    Args:
        unary: per node, a hashable kind: nodes of one kind have equal costs in every run.
        sizes: per node, its number of strategies.
        edges: ``(a, b)``, ``a < b``, to ``[strategies of a, of b]``; equal tables are the same
            object.
        keep: nodes that stay.
        dynamic: kinds whose costs change between runs; all of them if None.
        max_join: nodes stay when their join would have more entries than this.
        max_others: nodes stay while they have more neighbours than this.
        out_of_time: asked between rounds of planning; nodes that are not planned by then stay.
    """

    def __init__(
        self,
        unary: Mapping[int, object],
        sizes: Mapping[int, int],
        edges: Mapping[tuple[int, int], Array],
        *,
        keep: Collection[int] = (),
        dynamic: Collection[object] | None = None,
        max_join: int = MAX_JOIN,
        max_others: int | None = None,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> None:
        self._offsets: list[int] = []
        self._is_dynamic: list[bool] = []
        self._num_entries = 0
        self.sizes = dict(sizes)
        self.batches: list[Batch] = []
        self.scalars: list[int] = []
        self._factors: dict[int, dict[Factor, int]] = {node: {} for node in unary}
        self._others: dict[int, set[int]] = {node: set() for node in unary}
        # Nodes of one kind share a table; so do edges with one table.
        self._unary_tables: dict[object, tuple[int, int]] = {}  # kind -> table, a node that has it
        for node, kind in unary.items():
            if kind not in self._unary_tables:
                self._unary_tables[kind] = (
                    self._table(sizes[node], dynamic is None or kind in dynamic),
                    node,
                )
            self._factors[node][Factor(self._unary_tables[kind][0], (node,))] = 1
        self._edge_tables: dict[int, tuple[int, Array]] = {}
        for (a, b), cost in edges.items():
            if id(cost) not in self._edge_tables:
                self._edge_tables[id(cost)] = (self._table(cost.size, False), cost)
            factor = Factor(self._edge_tables[id(cost)][0], (a, b))
            self._factors[a][factor] = self._factors[b][factor] = 1
            self._others[a].add(b)
            self._others[b].add(a)
        # Tables that were computed are known by what they are made of: repeated blocks compute
        # once.
        self._known: dict[tuple[object, ...], int] = {}
        self._order(set(keep), math.log2(max_join), max_others, out_of_time)
        self.core = sorted(self._factors)
        self.core_factors = sorted(
            {
                factor: count for node in self.core for factor, count in self._factors[node].items()
            }.items(),
            key=lambda item: (item[0].scope, item[0].table),
        )
        for batch in self.batches:
            batch.freeze(self._offsets)
        self._arena: Array | None = None

    def _table(self, num_entries: int, dynamic: bool) -> int:
        self._offsets.append(self._num_entries)
        self._is_dynamic.append(dynamic)
        self._num_entries += num_entries
        return len(self._offsets) - 1

    @property
    def num_entries(self) -> int:
        """Entries of all tables together."""
        return self._num_entries

    # ---- planning

    def _join_size(self, node: int) -> float:
        return math.log2(self.sizes[node]) + sum(
            math.log2(self.sizes[other]) for other in self._others[node]
        )

    def _order(
        self, keep: set[int], limit: float, max_others: int | None, out_of_time: Callable[[], bool]
    ) -> None:
        """Rounds: of the nodes with about the smallest joins, as many as are no neighbours of each
        other.
        """
        # Nodes by about the size of their join, so that the smallest are at hand.
        buckets: dict[int, set[int]] = {}
        place: dict[int, int] = {}

        def rank(node: int) -> None:
            if node in place:
                buckets[place[node]].discard(node)
            num_others = len(self._others[node])
            size = (
                math.inf
                if max_others is not None and num_others > max_others
                else self._join_size(node)
            )
            if size <= limit:
                # taking out a node with one or two neighbours makes nothing wider: as many of them
                # as possible at once
                place[node] = 0 if num_others <= 2 and size <= _ALWAYS else int(size * 1.5)
                buckets.setdefault(place[node], set()).add(node)
            else:
                place.pop(node, None)

        # What a node's table would be made of; equal keys make equal tables.
        keys: dict[int, tuple[object, ...]] = {}
        for node in self._factors:
            if node not in keep:
                rank(node)
        while not out_of_time():
            # One round: nodes of the lowest bucket, none of them beside another.
            lowest = min((bucket for bucket, nodes in buckets.items() if nodes), default=None)
            if lowest is None:
                return
            candidates = buckets[lowest]
            for node in candidates:
                if node not in keys:
                    keys[node] = self._key(node)
            chosen: list[int] = []
            blocked: set[int] = set()
            for node in sorted(candidates, key=lambda node: (keys[node], node)):
                if node not in blocked:
                    chosen.append(node)
                    blocked |= self._others[node]
            self._take_out(chosen, keys)
            for node in chosen:
                candidates.discard(node)
                del keys[node]
            # The neighbours of what went have other joins now.
            for node in sorted(blocked):
                keys.pop(node, None)
                if node not in keep:
                    rank(node)

    def _key(self, node: int) -> tuple[object, ...]:
        """What the table that a node leaves depends on: shapes, and per factor its dims in the join
        and its table.
        """
        others = sorted(self._others[node])
        axis = {other: i + 1 for i, other in enumerate(others)}
        axis[node] = 0
        # In the order of dims, not of names of nodes: two layers then have one key, and one table.
        inputs = sorted(
            (len(factor.scope), tuple(axis[n] for n in factor.scope), factor.table)
            for factor, count in self._factors[node].items()
            for _ in range(count)
        )
        return (self.sizes[node], tuple(self.sizes[other] for other in others), tuple(inputs))

    def _take_out(self, chosen: list[int], keys: Mapping[int, tuple[object, ...]]) -> None:
        batches: dict[tuple[object, ...], Batch] = {}
        # Nodes of one shape are a batch.
        for node in chosen:
            key = keys[node]
            size, shape, inputs = key
            assert isinstance(size, int) and isinstance(shape, tuple) and isinstance(inputs, tuple)
            dynamic = any(self._is_dynamic[table] for _, _, table in inputs)
            axes = tuple(axes for _, axes, _ in inputs)
            batch = batches.get((size, shape, axes, dynamic))
            if batch is None:
                batch = batches[size, shape, axes, dynamic] = Batch(size, shape, axes, dynamic)
                self.batches.append(batch)
            others = tuple(sorted(self._others[node]))
            batch.members.append((node, others, tuple(table for _, _, table in inputs)))
            # Somebody has this table already.
            table = self._known.get(key)
            if table is None:
                table = self._known[key] = self._table(math.prod(shape), dynamic)
                batch.computed_members.append(len(batch.members) - 1)
                batch.output_offsets.append(self._offsets[table])
            self._replace(node, others, table)

    def _replace(self, node: int, others: tuple[int, ...], table: int) -> None:
        """The node's factors go, the table it leaves comes."""
        for factor in self._factors.pop(node):
            for other in factor.scope:
                if other != node:
                    del self._factors[other][factor]
        left = Factor(table, others)
        for other in others:
            # Its neighbours become neighbours of each other, over the table that it leaves.
            self._others[other].discard(node)
            self._others[other].update(o for o in others if o != other)
            self._factors[other][left] = self._factors[other].get(left, 0) + 1
        if not others:
            self.scalars.append(self._offsets[table])
        del self._others[node]

    # ---- running

    def run(self, costs: Mapping[int, Array]) -> float:
        """Compute all tables for these node costs (of each kind, those of one node are read); the
        cost of what is taken out.

        Where nodes stay, that is only the part that does not depend on them.
        """
        first = self._arena is None
        # One array holds all tables, end to end. Tables of edges never change.
        if self._arena is None:
            self._arena = np.empty(self._num_entries)
            for table, cost in self._edge_tables.values():
                self._arena[self._offsets[table] : self._offsets[table] + cost.size] = cost.ravel()
        # Costs of nodes do change, where prices of rows are in them.
        for table, node in self._unary_tables.values():
            if first or self._is_dynamic[table]:
                self._arena[self._offsets[table] : self._offsets[table] + self.sizes[node]] = costs[
                    node
                ]
        # In the order in which nodes were taken out: each reads what earlier ones left.
        for batch in self.batches:
            if (first or batch.dynamic) and len(batch.computed):
                _compute(self._arena, batch)
        return math.fsum(self._arena[self.scalars]) if self.scalars else 0.0

    def core_table(self, factor: Factor) -> Array:
        """The table of a factor of the nodes that stay, after a run."""
        assert self._arena is not None
        shape = tuple(self.sizes[node] for node in factor.scope)
        start = self._offsets[factor.table]
        return self._arena[start : start + math.prod(shape)].reshape(shape)

    def trace(self, choice: NDArray[np.intp]) -> None:
        """Fill in the best choices of the nodes taken out, given those of nodes that stay;
        ``choice`` is indexed by node.
        """
        assert self._arena is not None
        # Backwards: the last nodes taken out depend on those that stay, earlier ones on later ones.
        for batch in reversed(self.batches):
            total: Array | float = 0.0
            near = choice[batch.neighbours]
            for first, others in batch.reads:
                # Tables lie flat in one arena. An entry is at the table's start plus the
                # neighbour's choice times its stride; ``index`` is [nodes of the batch,
                # strategies].
                index = first
                for position, stride in others:
                    index = index + near[:, position, None] * stride
                total = total + self._arena[index]
            choice[batch.nodes] = np.argmin(total, axis=1)


def _compute(arena: Array, batch: Batch) -> None:
    """Add the inputs of each computed member and minimise over its node."""
    rest = math.prod(batch.shape)
    # All inputs at once, by index.
    if batch.gathers is not None:
        joined = arena[batch.gathers[0]]
        for gather in batch.gathers[1:]:
            joined = joined + arena[gather]
        arena[batch.writes] = joined.min(axis=1).reshape(-1, rest)
        return
    # As many members at a time as fit into memory.
    step = max(1, _LOOP_ABOVE // (batch.size * rest))
    for start in range(0, len(batch.computed), step):
        members = batch.computed[start : start + step]
        inputs = [
            _gather(arena, batch, axes, starts[members])
            for axes, starts in zip(batch.axes, batch.inputs, strict=True)
        ]
        outputs = batch.outputs[start : start + step]
        # A join that is too large is minimised strategy by strategy.
        if batch.size * rest > _LOOP_ABOVE:
            best = _minimum_by_strategy(inputs, batch.size)
        else:
            joined = inputs[0]
            for table in inputs[1:]:
                joined = joined + table
            best = joined.min(axis=1)
        best = np.broadcast_to(best, (len(members), *batch.shape)).reshape(-1, rest)
        # Few large tables are copied one by one, many small ones by index.
        if rest > _SLICE_ABOVE:
            for offset, table in zip(outputs, best, strict=True):
                arena[offset : offset + rest] = table
        else:
            arena[outputs[:, None] + np.arange(rest)] = best


def _gather(arena: Array, batch: Batch, axes: tuple[int, ...], starts: NDArray[np.intp]) -> Array:
    """The tables of some members as ``[members, join dims]``, with size 1 for dims they do not
    have.
    """
    dims = batch.dims(axes)
    size = math.prod(dims)
    # Three ways to the same tables: a view of one, copies of few large ones, one indexing of many
    # small ones.
    if len(starts) == 1:
        tables = arena[starts[0] : starts[0] + size][None]
    elif size > _SLICE_ABOVE:
        tables = np.stack([arena[start : start + size] for start in starts])
    else:
        tables = arena[starts[:, None] + np.arange(size)]
    return aligned(tables, batch, axes)


def aligned(tables: NDArray[Any], batch: Batch, axes: tuple[int, ...]) -> NDArray[Any]:
    """Tables ``[members, entries]`` as ``[members, join dims]``, with size 1 for dims they do not
    have.
    """
    dims = batch.dims(axes)
    order = sorted(range(len(axes)), key=lambda i: axes[i])
    shape = [1] * (len(batch.shape) + 1)
    for axis, dim in zip(axes, dims, strict=True):
        shape[axis] = dim
    return tables.reshape(-1, *dims).transpose(0, *(i + 1 for i in order)).reshape(-1, *shape)


def _minimum_by_strategy(inputs: Sequence[Array], size: int) -> Array:
    """The minimum over join dim 0 of the sum, for joins too large to be stored."""
    best: Array | None = None
    for strategy in range(size):
        total: Array | float = 0.0
        for table in inputs:
            total = total + (table[:, strategy] if table.shape[1] > 1 else table[:, 0])
        assert isinstance(total, np.ndarray)
        if best is None:
            best = total
        else:
            # In place where it can be: these tables may have hundreds of megabytes.
            best = np.minimum(best, total, out=best if best.shape == total.shape else None)
    assert best is not None
    return best
