"""What no plan on a mesh can avoid where memory binds, whatever layers and parts of layers it
computes again.

The problem is that of the placement, with a node more for every tensor that an operator keeps and
that plans may have computed again instead: as many bytes as it has with the operator's choice, or
none, for a share of the seconds of computing it.

**Which share.** A tensor is let go of only if one part, a module whose operators stand together,
holds what makes it and all that keep it, and is computed again: with it the smallest such part, all
of whose operators run once more. The forward of an operator is dealt among the tensors whose
smallest part it is in, by their sizes. What a plan computes again then costs at least the shares of
all that it lets go of. Operators count with their fastest choice, and adapters not at all.

**How much memory.** What a rank holds when a forward ends: parameters, gradients and optimizer
state that are there by then; what operators keep of one microbatch, each in the layout it reads;
and the variables of ``forward`` itself, which live until it returns: results outside of layers, and
those of layers that are read outside of them. In a pipeline these count as far as they are kept
only: a position may run several stages, each with a ``forward`` that lets go of its own.

So every plan of the space within the limit is a choice of this problem, at no more than its cost;
the best multiplier of the row bounds them all. Of a pipeline the limit is that of all positions
together, each of which has such a moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.plan.repeated_blocks import container_of
from shardwright.policies.autodist.placement.activations import Activations
from shardwright.policies.autodist.placement.formulation import Formulation, OpNode, StoreNode
from shardwright.policies.autodist.placement.placement_problem import formulate
from shardwright.policies.autodist.placement.pricing import Pricing
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.placement.strategies import Seconds
from shardwright.policies.autodist.solver.problem import Problem, Row
from shardwright.policies.autodist.solver.solve import lower_bound
from shardwright.policies.autodist.stages.chain import Part, layer_blocks, layer_parts
from shardwright.runtime.layout import Layout


def least_step_s(
    request: PlacementRequest, pricing: Pricing | None = None, *, again: bool = True
) -> float:
    """Seconds per step that no plan within the memory limit is below; ``inf`` where none fits.

    Args:
        request: with a memory limit. What it has computed again is, in all plans.
        pricing: as of :func:`formulate`.
        again: whether plans may compute layers, or parts of them, again.
    """
    assert request.memory_limit_bytes is not None
    formulation = formulate(request, pricing)
    problem = _Draft(request, formulation, again).problem()
    return lower_bound(problem, time_limit_s=request.time_limit_s) - formulation.slack


@dataclass(eq=False)
class _Draft:
    """The problem in the making."""

    request: PlacementRequest
    formulation: Formulation
    again: bool
    costs: list[Seconds] = field(default_factory=list)
    edges: list[tuple[int, int, Seconds]] = field(default_factory=list)
    usage: dict[int, Seconds] = field(default_factory=dict)

    def problem(self) -> Problem:
        """The problem, with its row."""
        problem, graph = self.formulation.problem, self.formulation.graph
        assert self.request.memory_limit_bytes is not None
        self.costs, self.edges = list(problem.node_costs), list(problem.edges)
        request = self.request
        self.activations = Activations.of(
            graph, self.formulation.layouts, request.mesh, request.config.rng
        )
        # A stage of a pipeline gives its results away, so nothing lives to its end.
        config = self.request.config
        is_one = len(self.request.ranks) == config.plan_ngpus and not config.inference_only
        self.alive = _variables(graph) if is_one else frozenset()
        self.inputs = {value.name for value in graph.sources if value.kind is ValueKind.INPUT}
        self.prices = self._prices() if self.again else {}
        # New nodes, for tensors that may be let go of, stand in the block of their operator.
        homes = {node: index for index, block in enumerate(problem.blocks) for node in block}
        blocks = [list(block) for block in problem.blocks]
        for index, node in enumerate(self.formulation.nodes):
            before = len(self.costs)
            # What is stored is held; what is kept is a choice.
            if isinstance(node, StoreNode):
                self.usage[index] = node.least_bytes
            elif isinstance(node, OpNode) and not self.request.config.inference_only:
                self._operator(index, node)
            if index in homes:
                blocks[homes[index]] += range(before, len(self.costs))
        rows = (Row(problem.rows[0].limit, self.usage),)
        return Problem(tuple(self.costs), tuple(self.edges), rows, tuple(map(tuple, blocks)))

    def _operator(self, index: int, node: OpNode) -> None:
        """What an operator keeps in any case, and a node for each tensor that may be let go of."""
        op, choices, activations = node.op, node.choices, self.activations
        held = np.zeros(len(choices))
        for position, value in enumerate(op.results):
            if value.name in self.alive and value.name not in activations.bases:
                held += activations.of_result(op, choices, position)
        for share in activations.shares.get(op.name, ()):
            if share.root in self.alive or share.root in self.inputs:
                continue  # counted where it is made, and with the row's limit
            price = self.prices.get(share.root)
            # No part holds it, so it is kept in any case.
            if price is None:
                held += activations.of_share(op, choices, share)
            else:
                self._choose(index, activations.of_share(op, choices, share), share.part * price)
        inside, price = activations.inside(op, choices), self.prices.get(_inside(op))
        if price is None:
            held += inside
        elif inside.any():
            self._choose(index, inside, price)
        if held.any():
            self.usage[index] = held

    def _choose(self, index: int, kept: Seconds, price: float) -> None:
        """A tensor of an operator: ``kept`` bytes by its choice, or none for a price."""
        levels = np.unique(kept)
        between = np.where(kept[:, None] == levels[None, :], 0.0, np.inf)
        self.edges.append(
            (index, len(self.costs), np.column_stack([np.full(len(kept), price), between]))
        )
        self.usage[len(self.costs)] = np.array([0.0, *levels])
        self.costs.append(np.zeros(len(levels) + 1))

    def _prices(self) -> dict[str, float]:
        """The least seconds per step of computing each root again, and what an operator makes
        inside; without those that no part holds.
        """
        graph = self.formulation.graph
        parts = _parts_by_place(graph)
        sizes = self._sizes()
        smallest: dict[str, Part] = {}
        # The smallest part of the model that makes the tensor and all that keep it.
        for root, at in self._places().items():
            part = next((part for part in parts.get(min(at), ()) if part.stop > max(at)), None)
            if part is not None:
                smallest[root] = part
        # A part is computed again as a whole: its seconds are dealt among the tensors that it
        # saves, in proportion to their sizes, so that no second is counted twice.
        claims = [0.0] * len(graph.ops)  # the sizes of all tensors that an operator is dealt among
        for root, part in smallest.items():
            for index in range(part.start, part.stop):
                claims[index] += sizes[root]
        op_choices = {
            node.op.name: node.choices
            for node in self.formulation.nodes
            if isinstance(node, OpNode)
        }
        # The fastest choice of each operator: this is a bound.
        fastest = [
            self.request.microbatches * float(op_choices[op.name].forward_s.min())
            for op in graph.ops
        ]
        # By root: each operator's seconds, shared out among all that claim it by their sizes.
        found = {}
        for root, part in smallest.items():
            own = range(part.start, part.stop)
            found[root] = sum(fastest[index] * sizes[root] / claims[index] for index in own)
        return found

    def _places(self) -> dict[str, list[int]]:
        """The places of what makes each root that may be let go of, and of all that keep it; what
        an operator makes inside has its own.
        """
        ops, activations = self.formulation.graph.ops, self.activations
        # Where each value is made.
        made = {value.name: index for index, op in enumerate(ops) for value in op.results}
        made = {name: index for name, index in made.items() if name not in self.alive}
        found: dict[str, list[int]] = {}
        for index, op in enumerate(ops):
            for share in activations.shares.get(op.name, ()):
                if share.root in made:
                    found.setdefault(share.root, [made[share.root]]).append(index)
            if activations.internal.get(op.name):
                found[_inside(op)] = [index]
        return found

    def _sizes(self) -> dict[str, float]:
        """Bytes of roots and of what operators make inside, unsplit."""
        ops, mesh = self.formulation.graph.ops, self.request.mesh
        found = {
            v.name: float(local_bytes(Layout.whole(v.shape), v.dtype, mesh))
            for op in ops
            for v in op.results
        }
        return found | {_inside(op): float(self.activations.internal.get(op.name, 0)) for op in ops}


def _parts_by_place(graph: IRGraph) -> dict[int, list[Part]]:
    """The parts that hold an operator, the smallest first."""
    found: dict[int, list[Part]] = {}
    for parts in layer_parts(graph, *layer_blocks(graph)).values():
        for part in sorted(parts, key=lambda part: part.stop - part.start):
            for index in range(part.start, part.stop):
                found.setdefault(index, []).append(part)
    return found


def _variables(graph: IRGraph) -> frozenset[str]:
    """The values that live until the forward returns, whatever is computed again."""
    stretch: dict[str, tuple[object, object]] = {
        op.name: (container_of(op.module_path), op.region) for op in graph.ops
    }
    # A layer that is computed again becomes a method, and its locals die with it.
    starts, layers = layer_blocks(graph)
    for (
        block,
        path,
    ) in layers.items():  # with a number or without: it becomes a method where it is computed again
        for op in graph.ops[
            starts[block] : starts[block + 1] if block + 1 < len(starts) else len(graph.ops)
        ]:
            stretch[op.name] = path, op.region
    uses = graph.uses()
    found = set()
    for op in graph.ops:
        own = stretch[op.name]
        # A value of forward itself, or one that leaves its method.
        for value in op.results:
            readers = uses.get(value.name, ())
            if own == (None, None) or any(stretch[reader.name] != own for reader, _ in readers):
                found.add(value.name)
    return frozenset(found)


def _inside(op: IROp) -> str:
    return f"inside {op.name}"
