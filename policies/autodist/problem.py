"""The placement of one graph on one mesh as numbers.

Variables, each one choice:

- an **operator**: one of its menu (:mod:`shardwright.policies.autodist.strategies`);
- a **store**: how a parameter, or a buffer that an operator updates, is held;
- the **copies** of a value that several operators read: the set of layouts it is made available in.

Objective, in seconds of one training step on the slowest rank: operators forward and backward; the adapters along every value,
as lowering emits them; the reduction of every parameter's gradient, and the optimizer's pass over it. Where the terms are:

- on a node: an operator's time; a store's reduction and optimizer; copies of a value that has one given layout (an input);
- between the maker of a value and its only reader: the adapters (:meth:`_Builder._edge`);
- between the maker and the copies: the adapters of the whole set, shared as lowering shares them; between the copies and a
  reader: nothing if the set has what the reader wants, else forbidden (:meth:`_Builder._copies`). So a value that is converted
  once for several readers is priced once.

Constraints: inputs arrive and outputs leave in given layouts; what a user pinned; the memory of a rank as a row.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwright.compiler.cost.adapters import step_time
from shardwright.compiler.cost.local import local_bytes
from shardwright.compiler.cost.memory import num_shards
from shardwright.compiler.cost.reduction import parameter_s
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.passes.lower import drop_outputs
from shardwright.compiler.passes.recompute import mark_recompute
from shardwright.compiler.plan.blocks import container_of
from shardwright.compiler.plan.conversion import canonical, convert
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Declaration
from shardwright.compiler.plan.zero import in_pieces, is_large, over_units, units_of_storage
from shardwright.policies.autodist.activations import Activations
from shardwright.policies.autodist.constraints import allowed_strategies
from shardwright.policies.autodist.conversions import Conversions, LayoutSet, ValueType, union
from shardwright.policies.autodist.copies import Maker, Reader, layout_sets
from shardwright.policies.autodist.formulation import (
    CopiesNode,
    Formulation,
    Node,
    OpNode,
    RelayNode,
    SharedValue,
    SharedWeight,
    StoreNode,
    WeightUse,
)
from shardwright.policies.autodist.request import PlacementRequest
from shardwright.policies.autodist.shared import shared_values
from shardwright.policies.autodist.solver.problem import Problem, Row
from shardwright.policies.autodist.strategies import Allowed, LayoutTable, Menu, Menus, Seconds, too_mixed, used
from shardwright.runtime.layout import Layout, Mesh


class Pricing:
    """What does not change between the graphs placed on one mesh: menus and conversions, by signature."""

    def __init__(self, request: PlacementRequest) -> None:
        self.layouts = LayoutTable()
        self.menus = Menus(request.mesh, request.ranks, request.hardware, request.times, self.layouts)
        self.conversions = Conversions(request.mesh, request.ranks, request.hardware, self.layouts)
        self.arrays: dict[Hashable, Seconds] = {}
        self.candidates: dict[Hashable, tuple[int, ...]] = {}
        self.sets: dict[Hashable, tuple[tuple[LayoutSet, ...], bool] | None] = {}


def formulate(request: PlacementRequest, pricing: Pricing | None = None) -> Formulation:
    """The problem of a request. ``pricing`` may be shared by requests for one mesh, ranks, hardware and times."""
    return _Builder(request, pricing or Pricing(request)).build()


@dataclass(eq=False)
class _Builder:
    request: PlacementRequest
    pricing: Pricing
    nodes: list[Node] = field(default_factory=list)
    homes: list[str] = field(default_factory=list)
    costs: list[Seconds] = field(default_factory=list)
    edges: list[tuple[int, int, Seconds]] = field(default_factory=list)
    usage: dict[int, Seconds] = field(default_factory=dict)
    restricted: list[str] = field(default_factory=list)
    shared: list[SharedValue] = field(default_factory=list)
    weights: list[SharedWeight] = field(default_factory=list)
    made_whole: dict[int, float] = field(default_factory=dict)  # makers of shared values, and the least they could cost

    def build(self) -> Formulation:
        request = self.request
        wishes = {path: wish for path, wish in request.outputs.items() if wish is None}
        graph = drop_outputs(request.graph, Plan(request.mesh, outputs=wishes))
        if request.recompute:
            graph = mark_recompute(graph, request.recompute)
        only = allowed_strategies(request.graph, request.constraints, request.mesh)
        self.shared_names, whole = shared_values(graph)
        makers: dict[str, Maker] = {}
        readers: dict[str, list[Reader]] = {}
        for op in graph.ops:
            free = self.pricing.menus.of(op, only.get(op.name))
            menu = free
            if op.name in whole and op.name not in only:
                menu = self.pricing.menus.of(op, self._whole)
            index = self._add(OpNode(op, menu), self._op_cost(op, menu), op.module_path)
            if menu is not free:
                self.made_whole[index] = float(self._op_cost(op, free).min())
            for position, value in enumerate(op.results):
                makers[value.name] = Maker(index, menu.results[:, position], (id(menu), position))
            for value in dict.fromkeys(op.operands):
                positions = tuple(i for i, operand in enumerate(op.operands) if operand == value)
                readers.setdefault(value.name, []).append(self._op_reader(index, menu, positions))
        self._leave(graph, makers, readers)
        self._sources(graph, makers, readers)
        values = (*graph.sources, *(value for op in graph.ops for value in op.results))
        for value in values:
            if value.name in readers:
                self._value(value, makers[value.name], readers[value.name])
        rows: tuple[Row, ...] = ()
        if request.memory_limit_bytes is not None:
            self._keep(graph)
            given = [v for v in graph.sources if v.kind is not ValueKind.PARAMETER and v.name in readers]
            held = sum(local_bytes(Layout.whole(v.shape), v.dtype, request.mesh) for v in given)
            rows = (Row(request.memory_limit_bytes - held, self.usage),)
        problem = Problem(tuple(self.costs), tuple(self.edges), rows, self._blocks())
        return Formulation(
            problem,
            tuple(self.nodes),
            self.pricing.layouts,
            self.pricing.conversions,
            tuple(self.restricted),
            tuple(self.shared),
            tuple(self.weights),
            self._slack(),
            replace(graph, eval_graph=None),
        )

    @property
    def _whole(self) -> Allowed:
        return {axis: frozenset(("R",)) for axis in self.request.mesh.names}

    def _op_cost(self, op: IROp, menu: Menu) -> Seconds:
        return menu.forward_s * self._forwards(op) + menu.backward_s * self.request.microbatches

    def _keep(self, graph: IRGraph) -> None:
        """What operators keep for the backward, of every microbatch in flight."""
        if self.request.config.inference_only:
            return
        activations = Activations.of(graph, self.pricing.layouts, self.request.mesh)
        for index, node in enumerate(self.nodes):
            if isinstance(node, OpNode):
                kept = activations.usage(node.op, node.menu)
                if kept is not None:
                    self.usage[index] = self.request.in_flight * kept

    def _slack(self) -> float:
        """What plans could save at most on values priced by shares and on what makes them."""
        saved = sum(float(self.costs[index].max()) - least for index, least in self.made_whole.items())
        for a, b, prices in self.edges:
            if a in self.made_whole or b in self.made_whole:
                saved += float(prices[np.isfinite(prices)].max())
        return saved + sum(float(share.max()) for item in self.shared for share in item.shares)

    def _add(self, node: Node, cost: Seconds, home: str) -> int:
        self.nodes.append(node)
        self.homes.append(home)
        self.costs.append(cost)
        return len(self.nodes) - 1

    def _forwards(self, op: IROp) -> int:
        """How often an operator's forward runs per step: twice where it is computed again in the backward."""
        again = op.region is not None and not self.request.config.inference_only
        return self.request.microbatches * (2 if again else 1)

    def _op_reader(self, node: int, menu: Menu, positions: tuple[int, ...]) -> Reader:
        key = (id(menu), positions)
        wants = tuple(tuple(sorted(set(row))) for row in menu.operands[:, positions].tolist())
        return Reader(node, wants, key)

    # ------------------------------------------------------------------------------------------------ the outside

    def _id(self, layout: Layout, value: IRValue) -> int:
        return self.pricing.layouts.id(canonical(layout, self.request.mesh, differentiable=value.requires_grad))

    def _leave(self, graph: IRGraph, makers: Mapping[str, Maker], readers: dict[str, list[Reader]]) -> None:
        """Outputs in the layouts wished for, and the new contents of buffers in those they are stored in."""
        for path, value in graph.output.leaves():
            if not isinstance(value, IRValue):
                continue
            wish = self.request.outputs.get(path, "whole")
            if wish == "sharded":
                readers.setdefault(value.name, [])
            elif wish == "sent":
                self._sent(value, makers[value.name], readers)
            else:
                layout = wish if isinstance(wish, Layout) else Layout.whole(value.shape)
                self._outside(value, layout, readers)
        for before, after in graph.buffer_updates:
            stored = self.request.constraints.stored_layout(before.fqn)
            self._outside(after, stored or Layout.whole(before.shape), readers)

    def _outside(self, value: IRValue, layout: Layout, readers: dict[str, list[Reader]]) -> None:
        wanted = (self._id(layout, value),)
        readers.setdefault(value.name, []).append(Reader(None, (wanted,), wanted))

    def _sent(self, value: IRValue, maker: Maker, readers: dict[str, list[Reader]]) -> None:
        """A value leaves the stage as it is made, but for P and G: its maker reads it, so to say, and wants just that."""
        if maker.node is None:
            return
        table = self.pricing.layouts
        stripped = {gives: replace(table[gives], partial=(), grad_partial=()) for gives in used(maker.gives)}
        wants = tuple((self._id(stripped[gives], value),) for gives in maker.gives.tolist())
        readers.setdefault(value.name, []).append(Reader(maker.node, wants, ("sent", maker.key)))

    # ---------------------------------------------------------------------------------------------------- sources

    def _sources(self, graph: IRGraph, makers: dict[str, Maker], readers: Mapping[str, list[Reader]]) -> None:
        updated = {op.operands[i].name for op in graph.ops if op.rule is not None for i in op.rule.updates}
        for value in graph.sources:
            layout = self.request.inputs.get(value.name) if value.kind is ValueKind.INPUT else None
            stored = self.request.constraints.stored_layout(value.fqn) if value.fqn else None
            chosen = value.kind is ValueKind.PARAMETER or value.name in updated
            if not chosen or value.name not in readers:
                given = self._id(stored or layout or Layout.whole(value.shape), value)
                makers[value.name] = Maker(None, np.array([given]), given)
                continue
            if stored is not None:
                candidates: tuple[int, ...] = (self._id(stored, value),)
            else:
                candidates = self._candidates(graph, value, readers[value.name])
            cost, held = self._storage(value, candidates, readers[value.name])
            index = self._add(
                StoreNode(value, candidates), cost, self._home(Maker(None, np.array([]), ()), readers[value.name])
            )
            self.usage[index] = held
            makers[value.name] = Maker(index, np.array(candidates), candidates)

    def _candidates(self, graph: IRGraph, value: IRValue, readers: list[Reader]) -> tuple[int, ...]:
        """The layouts a parameter may be held in: whole, as any reader uses it, and cut along any factor of its first reader
        though that must have it whole.
        """
        table = self.pricing.layouts
        if value.kind is not ValueKind.PARAMETER:
            return used(layout for reader in readers for wanted in reader.wants for layout in wanted)
        first = next(node for node in (self.nodes[r.node] for r in readers if r.node is not None) if isinstance(node, OpNode))
        op = first.op
        assert op.rule is not None
        refs = op.rule.operands[op.operands.index(value)]
        key = ("candidates", id(first.menu), op.operands.index(value), tuple(r.key for r in readers))
        found = self.pricing.candidates.get(key)
        if found is None:
            letters = ["R", *(["G"] if value.requires_grad else [])]
            words = [(letter, letter) for letter in letters]
            words += [("S", f"split:{name}") for name in dict.fromkeys(ref.factor for dim in refs for ref in dim)]
            placed = itertools.product(words, repeat=len(self.request.mesh.names))
            own = {self.pricing.menus.tensor(value, refs, op.rule, each) for each in placed if not too_mixed(each)}
            wanted = {layout for reader in readers for wants in reader.wants for layout in wants}
            found = self.pricing.candidates[key] = used(own | {w for w in wanted if not table[w].partial})
        return found

    def _storage(self, value: IRValue, candidates: Sequence[int], readers: Sequence[Reader]) -> tuple[Seconds, Seconds]:
        """Seconds per step of the gradient's sums and the optimizer, and bytes held, for every way to store a tensor. With
        ZeRO-3 also of gathering it from where it is stored, once for every place that reads it.
        """
        request, config = self.request, self.request.config
        cost, held = np.zeros(len(candidates)), np.zeros(len(candidates))
        trained = value.requires_grad and value.kind is ValueKind.PARAMETER
        item = value.dtype.itemsize
        for index, candidate in enumerate(candidates):
            layout, mesh = self.pricing.layouts[candidate], request.mesh
            if config.use_zero == 3 and trained and is_large(value):
                layout, mesh, gathered_s = self._in_pieces(value, layout, readers)
                cost[index] += gathered_s
            declaration = Declaration(value, layout)
            num_bytes = local_bytes(layout, value.dtype, mesh)
            held[index] = num_bytes
            if trained:
                each_s, once_s = parameter_s(
                    declaration, mesh, config, request.hardware, request.optimizer, request.ranks, request.microbatches
                )
                cost[index] += request.microbatches * each_s + once_s
                state = request.optimizer.kept_bytes / num_shards(layout, mesh, config)
                held[index] += num_bytes / item * (request.optimizer.gradient_bytes(item) + state)
        return cost, held

    def _in_pieces(self, value: IRValue, layout: Layout, readers: Sequence[Reader]) -> tuple[Layout, Mesh, float]:
        """How ZeRO-3 stores a parameter that its readers have as ``layout``, on which mesh, and the seconds of gathering it."""
        request = self.request
        zero = units_of_storage(request.config)
        axes = [axis for axis in layout.grad_partial if request.mesh.axis_size(axis) > 1]
        stored, mesh = in_pieces(layout, axes, request.mesh, zero), request.mesh.over_units(zero)
        used = over_units(layout) if zero > 1 else layout
        ranks = tuple(unit * request.config.plan_ngpus + rank for unit in range(zero) for rank in request.ranks)
        seconds = 0.0
        nodes = [self.nodes[reader.node] for reader in readers if reader.node is not None]
        places = {(n.op.module_path, n.op.region): self._forwards(n.op) for n in nodes if isinstance(n, OpNode)}
        for step in convert(stored, used, mesh):
            time = step_time(step, value.dtype, mesh, ranks, request.hardware)
            again = time.forward_s if step.kind == "all_gather" else 0.0
            for forwards in places.values():
                seconds += forwards * time.forward_s + request.microbatches * (time.backward_s + again)
        return stored, mesh, seconds

    # ----------------------------------------------------------------------------------------------------- values

    def _value(self, value: IRValue, maker: Maker, readers: list[Reader]) -> None:
        """The adapters along one value."""
        inside = [reader for reader in readers if reader.node is not None]
        fixed = union(want for reader in readers if reader.node is None for want in reader.wants)
        forwards = self._value_forwards(value, inside)
        is_weight = value.kind is ValueKind.PARAMETER
        kind = ValueType(value.dtype, value.requires_grad, forwards, self.request.microbatches, is_weight)
        own = [reader for reader in inside if reader.node == maker.node]
        if value.name in self.shared_names and len(set(maker.gives.tolist())) == 1:
            self._share(value, kind, maker, inside, fixed)
        elif len(inside) > 1 and value.kind is ValueKind.PARAMETER and not fixed:
            self._weight(kind, maker, inside)
        elif len(inside) > 1 or own:
            self._copies(value, kind, maker, inside, fixed)
        elif inside:
            self._edge(kind, maker, inside[0], fixed)
        elif fixed and maker.node is not None:
            self.costs[maker.node] = self.costs[maker.node] + self._prices(kind, maker, (fixed,), ("fixed", fixed))[:, 0]

    def _value_forwards(self, value: IRValue, readers: Sequence[Reader]) -> int:
        """Adapters belong to the region of the first operator that reads the value."""
        first = next((node for node in (self.nodes[r.node] for r in readers if r.node is not None)), None)
        return self._forwards(first.op) if isinstance(first, OpNode) else self.request.microbatches

    def _edge(self, kind: ValueType, maker: Maker, reader: Reader, fixed: LayoutSet) -> None:
        """Between the maker of a value and its only reader."""
        assert reader.node is not None
        sets = tuple(union((fixed, want)) for want in reader.wants) if fixed else reader.wants
        prices = self._prices(kind, maker, sets, ("edge", reader.key, fixed))
        if not prices.any():
            return
        if maker.node is None:
            self.costs[reader.node] = self.costs[reader.node] + prices[0]
        else:
            self.edges.append((maker.node, reader.node, prices))

    def _prices(self, kind: ValueType, maker: Maker, sets: Sequence[LayoutSet], key: Hashable) -> Seconds:
        """``[choices of the maker, sets]``."""
        arrays = self.pricing.arrays
        full = (kind, maker.key, key)
        if full not in arrays:
            sources = used(maker.gives)
            distinct = tuple(dict.fromkeys(sets))
            position = {wanted: index for index, wanted in enumerate(distinct)}
            prices = self.pricing.conversions.seconds(kind, sources, distinct)
            rows = np.searchsorted(np.array(sources), maker.gives)
            arrays[full] = prices[rows[:, None], np.array([position[wanted] for wanted in sets])[None, :]]
        return arrays[full] + self._gathered_twice(kind, maker, sets, full) if self._is_over_units(maker) else arrays[full]

    def _is_over_units(self, maker: Maker) -> bool:
        """Whether ZeRO-3 stores a parameter over several units."""
        node = self.nodes[maker.node] if maker.node is not None else None
        return isinstance(node, StoreNode) and units_of_storage(self.request.config) > 1 and is_large(node.value)

    def _gathered_twice(self, kind: ValueType, maker: Maker, sets: Sequence[LayoutSet], key: Hashable) -> Seconds:
        """``[choices of the maker, sets]``: infinite where a parameter would be gathered within the unit as well. It need not
        be: what is stored as it is used is cut along the same axes, and gathered from all of them.
        """
        arrays, full = self.pricing.arrays, ("twice", key)
        if full not in arrays:
            gathers = self.pricing.conversions.gathers
            rows = [[any(gathers(kind, s, goal) for goal in wanted) for wanted in sets] for s in maker.gives.tolist()]
            arrays[full] = np.where(np.array(rows), np.inf, 0.0)
        return arrays[full]

    def _copies(self, value: IRValue, kind: ValueType, maker: Maker, readers: list[Reader], fixed: LayoutSet) -> None:
        """A node for the set of layouts that a value with several readers is needed in."""
        key = ("sets", fixed, tuple(reader.key for reader in readers))
        if key not in self.pricing.sets:
            self.pricing.sets[key] = layout_sets(readers, fixed)
        possible = self.pricing.sets[key]
        if possible is None:
            self._relay(value, kind, maker, readers, fixed)
            return
        sets, complete = possible
        if not complete:
            self.restricted.append(value.name)
        prices = self._prices(kind, maker, sets, key)
        given = tuple((reader.node, reader.wants) for reader in readers if reader.node is not None)
        node = CopiesNode(value, sets, given, fixed)
        index = self._add(node, prices[0] if maker.node is None else np.zeros(len(sets)), self._home(maker, readers))
        if maker.node is not None and prices.any():
            self.edges.append((maker.node, index, prices))
        for reader in readers:
            assert reader.node is not None
            self.edges.append((index, reader.node, self._has(sets, key, reader)))

    def _relay(self, value: IRValue, kind: ValueType, maker: Maker, readers: list[Reader], fixed: LayoutSet) -> None:
        """A node for the one copy from which all readers' are made. Of two readers it prices every tree there is; of more, all
        but those in which two share another copy.
        """
        if len(readers) + bool(fixed) > 2:
            self.restricted.append(value.name)
        wanted = (layout for reader in readers for want in reader.wants for layout in want)
        layouts = used((*wanted, *fixed, *maker.gives.tolist()))
        given = tuple((reader.node, reader.wants) for reader in readers if reader.node is not None)
        prices = self._prices(kind, maker, tuple((layout,) for layout in layouts), ("relay", layouts))
        node = RelayNode(value, kind, layouts, (maker.node, maker.gives), given, fixed)
        cost = prices[0] if maker.node is None else np.zeros(len(layouts))
        index = self._add(node, cost, self._home(maker, readers))
        relay = Maker(index, np.array(layouts), ("relay", layouts))
        if fixed:
            self.costs[index] = cost + self._prices(kind, relay, (fixed,), ("fixed", fixed))[:, 0]
        if maker.node is not None:
            self.edges.append((maker.node, index, prices))
        for reader in readers:
            assert reader.node is not None
            self.edges.append((index, reader.node, self._prices(kind, relay, reader.wants, reader.key)))

    def _weight(self, kind: ValueType, maker: Maker, readers: list[Reader]) -> None:
        """A parameter with several readers: each pays for itself what is gathered, and its share of what is not."""
        assert maker.node is not None
        places = [(node.op.module_path, node.op.region) for node in map(self._operator, readers)]
        uses = []
        for reader, place in zip(readers, places, strict=True):
            assert reader.node is not None
            prices = self._prices(kind, maker, reader.wants, ("edge", reader.key, ()))
            key = ("weight", kind, maker.key, reader.key, len(readers), places.count(place))
            if key not in self.pricing.arrays:
                gathers = {
                    (source, want): any(self.pricing.conversions.gathers(kind, source, goal) for goal in want)
                    for source in used(maker.gives)
                    for want in set(reader.wants)
                }
                table = np.array([[gathers[source, want] for want in reader.wants] for source in maker.gives.tolist()])
                self.pricing.arrays[key] = prices / np.where(table, places.count(place), len(readers))
            paid = self.pricing.arrays[key]
            self.edges.append((maker.node, reader.node, paid))
            uses.append(WeightUse(reader.node, reader.wants, place, paid))
        self.weights.append(SharedWeight(kind, maker.node, tuple(uses)))

    def _operator(self, reader: Reader) -> OpNode:
        node = self.nodes[reader.node] if reader.node is not None else None
        assert isinstance(node, OpNode)
        return node

    def _share(self, value: IRValue, kind: ValueType, maker: Maker, readers: list[Reader], fixed: LayoutSet) -> None:
        """Every reader pays its share of the copy it wants."""
        source = int(maker.gives[0])
        shares = []
        for reader in readers:
            assert reader.node is not None
            share = self._prices(kind, Maker(None, maker.gives[:1], source), reader.wants, reader.key)[0] / len(readers)
            self.costs[reader.node] = self.costs[reader.node] + share
            shares.append(share)
        given = tuple((reader.node, reader.wants) for reader in readers if reader.node is not None)
        self.shared.append(SharedValue(value, kind, source, fixed, given, tuple(shares)))

    def _has(self, sets: Sequence[LayoutSet], key: Hashable, reader: Reader) -> Seconds:
        """``[sets, choices of the reader]``: 0 where the set has what the reader wants, else forbidden."""
        arrays = self.pricing.arrays
        full = ("has", key, reader.key)
        if full not in arrays:
            layouts = used(layout for wanted in (*sets, *reader.wants) for layout in wanted)
            position = {layout: index for index, layout in enumerate(layouts)}
            members = np.zeros((len(sets), len(layouts)), dtype=bool)
            for index, wanted in enumerate(sets):
                members[index, [position[layout] for layout in wanted]] = True
            distinct = tuple(dict.fromkeys(reader.wants))
            columns = {w: members[:, [position[layout] for layout in w]].all(axis=1) for w in distinct}
            table = np.stack([columns[w] for w in reader.wants], axis=1)
            arrays[full] = np.where(table, 0.0, np.inf)
        return arrays[full]

    # ----------------------------------------------------------------------------------------------------- blocks

    def _blocks(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each numbered module, for modules that come more than once, in the order of the graph."""
        found: dict[tuple[str, int], list[int]] = {}
        for index in range(len(self.nodes)):
            container = container_of(self.homes[index])
            if container is not None:
                found.setdefault(container, []).append(index)
        counts = Counter(prefix for prefix, _ in found)
        return tuple(tuple(nodes) for (prefix, _), nodes in found.items() if counts[prefix] > 1)

    def _home(self, maker: Maker, readers: Sequence[Reader]) -> str:
        """The module path a value belongs to: that of the operator that makes it, or reads it first."""
        around = [maker.node, *(reader.node for reader in readers)]
        return next((self.homes[index] for index in around if index is not None), "")
