"""The placement of one graph on one mesh as numbers.

Variables, each one choice:

- an **operator**: one of its choices (``strategies.py``);
- a **store**: how a parameter, or a buffer that an operator updates, is held (``stores.py``);
- the **copies** of a value that several operators read: the set of layouts it is made available in,
  or the one layout that all are made from (``value_adapters.py``).

Objective, in seconds of one training step on the slowest rank: operators forward and backward; the
adapters along every value, as lowering emits them; the reduction of every parameter's gradient, and
the optimizer's pass over it. Where the terms are:

- on a node: an operator's time (:meth:`Draft.op_cost`); a store's reduction and optimizer
  (:func:`stores._storage`); copies of a value that has one given layout (an input);
- between the maker of a value and its only reader: the adapters (:meth:`Values._edge`);
- between the maker and the copies: the adapters of the whole set, shared as lowering shares them;
  between the copies and a reader: nothing if the set has what the reader wants, else forbidden
  (:meth:`Values._copies`). So a value that is converted once for several readers is priced once.
  Too many sets: :meth:`Values._relay`;
- between a store and each of the several readers of a parameter (:meth:`Values._weight`); on the
  readers of a value that many blocks read (:meth:`Values._share`): shares, which
  :meth:`Formulation.cost` makes exact.

What recompute regions hold runs again, adapters as far as emission leaves them there
(``emission.py``). Where that depends on what several readers choose, the problem has them run once
(:meth:`Values._spread`); :meth:`Formulation.cost` makes it exact.

Constraints: inputs arrive and outputs leave in given layouts (:meth:`_Builder._leave`,
:func:`stores.add_sources`); what a user pinned leaves an operator fewer choices
(``constraints.py``); the memory of a rank is a row (:meth:`_Builder.usage`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.time.kept_weights import keepers
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.passes.recompute_regions import mark_recompute
from shardwright.compiler.passes.unused_outputs import drop_outputs
from shardwright.policies.autodist.placement.activations import Activations
from shardwright.policies.autodist.placement.constraints import allowed_strategies
from shardwright.policies.autodist.placement.conversions import LayoutSet
from shardwright.policies.autodist.placement.draft import Draft
from shardwright.policies.autodist.placement.emission import places
from shardwright.policies.autodist.placement.formulation import Formulation, OpNode
from shardwright.policies.autodist.placement.layout_sets import Maker, Reader
from shardwright.policies.autodist.placement.pricing import Pricing
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.placement.shared import shared_values
from shardwright.policies.autodist.placement.stores import add_sources
from shardwright.policies.autodist.placement.strategies import Allowed, OpChoices, Seconds, used
from shardwright.policies.autodist.placement.value_adapters import Values
from shardwright.policies.autodist.solver.problem import Problem, Row
from shardwright.runtime.layout import Layout


def formulate(request: PlacementRequest, pricing: Pricing | None = None) -> Formulation:
    """The problem of a request. ``pricing`` may be shared by requests for one mesh, ranks, hardware
    and times; it keeps the last problem, which requests share that ask for the same within another
    memory.
    """
    prices = pricing or Pricing(request)
    # Another limit changes the row only: the rest of the problem is the last one's.
    if prices.latest is None or not request.differs_in_limits(prices.latest[0]):
        graph = _as_lowered(request)
        draft = Draft(request, prices, places(graph, trains=not request.config.inference_only))
        builder = _Builder(draft, graph)
        free = builder.build()
        prices.latest = request, free, functools.cache(builder.usage)
    _, free, usage = prices.latest
    if request.memory_limit_bytes is None:
        return free
    # What is left of the limit for choices.
    held, used = usage()
    rows = (Row(request.memory_limit_bytes - held, used),)
    return replace(free, problem=replace(free.problem, rows=rows))


def _as_lowered(request: PlacementRequest) -> IRGraph:
    """The graph without outputs that nobody wants, its recompute regions marked."""
    graph = drop_outputs(request.graph, request.outputs)
    return mark_recompute(graph, request.recompute) if request.recompute else graph


@dataclass(eq=False)
class _Builder:
    """Fills a draft from a graph. ``makers`` and ``readers``: of values, by name. ``made_whole``:
    the makers of shared values, and the least they could cost. ``kept``: the parameters that
    operators keep for the backward, with the operators. ``wants``: the sets of layouts that each
    choice of an operator wants of an operand, by what the reader's key is made of.
    """

    draft: Draft
    graph: IRGraph
    makers: dict[str, Maker] = field(default_factory=dict)
    readers: dict[str, list[Reader]] = field(default_factory=dict)
    made_whole: dict[int, float] = field(default_factory=dict)
    kept: frozenset[tuple[str, str]] = frozenset()
    wants: dict[tuple[int, tuple[int, ...]], tuple[LayoutSet, ...]] = field(default_factory=dict)

    def build(self) -> Formulation:
        draft, graph = self.draft, self.graph
        # Nodes first: operators, parameters. Then for each value what connects its maker with its
        # readers.
        shared_names, whole = shared_values(graph)
        self.kept = keepers(graph)
        self._operators(whole)
        self._leave()
        add_sources(draft, graph, self.makers, self.readers)
        values = Values(draft, shared_names)
        for value in (*graph.sources, *(value for op in graph.ops for value in op.results)):
            if value.name in self.readers:
                values.add(value, self.makers[value.name], self.readers[value.name])
        return Formulation(
            Problem(tuple(draft.costs), tuple(draft.edges), (), draft.blocks()),
            tuple(draft.nodes),
            draft.pricing.layouts,
            draft.pricing.conversions,
            tuple(values.restricted),
            tuple(values.shared),
            tuple(values.weights),
            tuple(values.spread),
            self._slack(values),
            replace(graph, eval_graph=None),
        )

    def _operators(self, whole: frozenset[str]) -> None:
        """A node for every operator. ``whole``: those that make shared values, on every rank."""
        draft, request = self.draft, self.draft.request
        only = allowed_strategies(request.graph, request.constraints, request.mesh)
        # Values that all blocks share are made whole on every rank, unless the user says otherwise.
        everywhere: Allowed = {axis: frozenset(("R",)) for axis in request.mesh.names}
        for op in self.graph.ops:
            free = draft.pricing.op_choices.of(op, only.get(op.name))
            choices = free
            if op.name in whole and op.name not in only:
                choices = draft.pricing.op_choices.of(op, everywhere)
            index = draft.add(OpNode(op, choices), draft.op_cost(op, choices), op.module_path)
            if choices is not free:
                self.made_whole[index] = float(draft.op_cost(op, free).min())
            self._connect(index, op, choices)

    def _connect(self, index: int, op: IROp, choices: OpChoices) -> None:
        """What an operator makes and reads."""
        for position, value in enumerate(op.results):
            self.makers[value.name] = Maker(
                index, choices.results[:, position], (id(choices), position)
            )
        # An operator may read a value twice, in two layouts.
        for value in dict.fromkeys(op.operands):
            positions = tuple(i for i, operand in enumerate(op.operands) if operand == value)
            key = id(choices), positions
            # The operators of all layers have the same choices.
            if key not in self.wants:
                rows = choices.operands[:, positions].tolist()
                self.wants[key] = tuple(tuple(sorted(set(row))) for row in rows)
            keeps = (value.name, op.name) in self.kept
            self._reads(
                value,
                Reader(index, self.wants[key], key, self.draft.places[op.name], keeps),
            )

    def _reads(self, value: IRValue, reader: Reader) -> None:
        self.readers.setdefault(value.name, []).append(reader)

    def _leave(self) -> None:
        """Outputs in the layouts wished for, and the new contents of buffers in those they are
        stored in.
        """
        # The end of the program is a reader that wants one layout.
        request = self.draft.request
        for path, value in self.graph.output.leaves():
            if not isinstance(value, IRValue):
                continue
            # ``"sharded"``: as it is made, nobody reads it. ``"sent"``: it leaves a stage. Else
            # whole, or in the layout that is given.
            wanted = request.outputs.get(path, "whole")
            if wanted == "sharded":
                self.readers.setdefault(value.name, [])
            elif wanted == "sent":
                self._sent(value, self.makers[value.name])
            else:
                self._outside(
                    value, wanted if isinstance(wanted, Layout) else Layout.whole(value.shape)
                )
        for before, after in self.graph.buffer_updates:
            self._outside(
                after, request.constraints.stored_layout(before.fqn) or Layout.whole(before.shape)
            )

    def _outside(self, value: IRValue, layout: Layout) -> None:
        wanted = (self.draft.layout_id(layout, value),)
        self._reads(value, Reader(None, (wanted,), wanted))

    def _sent(self, value: IRValue, maker: Maker) -> None:
        """A value leaves the stage as it is made, but for P and G: its maker reads it, so to say,
        and wants just that.
        """
        if maker.node is None:
            return
        table = self.draft.pricing.layouts
        # Sums are not put off across stages: what is sent is a value, not a summand.
        stripped = {
            gives: replace(table[gives], partial=(), grad_partial=()) for gives in used(maker.gives)
        }
        wants = tuple(
            (self.draft.layout_id(stripped[gives], value),) for gives in maker.gives.tolist()
        )
        self._reads(value, Reader(maker.node, wants, ("sent", maker.key)))

    def usage(self) -> tuple[float, Mapping[int, Seconds]]:
        """The memory of a rank: bytes that are given; and by node those of each choice, what is
        held, and what operators keep for the backward, of every microbatch in flight.
        """
        draft, request = self.draft, self.draft.request
        if not request.config.inference_only:
            activations = Activations.of(
                self.graph, draft.pricing.layouts, request.mesh, request.config.rng
            )
            for index, node in enumerate(draft.nodes):
                kept = (
                    activations.usage(node.op, node.choices) if isinstance(node, OpNode) else None
                    # Inputs and constants are held whole.
                )
                if kept is not None:
                    draft.usage[index] = request.in_flight * kept
        given = [
            v
            for v in self.graph.sources
            if v.kind is not ValueKind.PARAMETER and v.name in self.readers
        ]
        return sum(
            local_bytes(Layout.whole(v.shape), v.dtype, request.mesh) for v in given
        ), draft.usage

    def _slack(self, values: Values) -> float:
        """What plans could save at most on values priced by shares and on what makes them."""
        draft = self.draft
        saved = sum(
            float(draft.costs[index].max()) - least for index, least in self.made_whole.items()
        )
        for a, b, prices in draft.edges:
            if a in self.made_whole or b in self.made_whole:
                saved += float(prices[np.isfinite(prices)].max())
        return saved + sum(float(share.max()) for item in values.shared for share in item.shares)
