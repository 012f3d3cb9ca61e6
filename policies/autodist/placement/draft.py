"""The problem of a placement in the making: nodes with their costs and memory, and costs between
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.conversion import canonical
from shardwright.compiler.plan.repeated_blocks import container_of
from shardwright.policies.autodist.placement.emission import BodyPlace
from shardwright.policies.autodist.placement.formulation import Node, OpNode
from shardwright.policies.autodist.placement.layout_sets import Maker, Reader
from shardwright.policies.autodist.placement.pricing import Pricing
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.placement.strategies import OpChoices, Seconds
from shardwright.runtime.layout import Layout


@dataclass(eq=False)
class Draft:
    """What a request's problem has so far. ``places``: of operators, by name; ``homes``: by node
    the module path it belongs to; ``costs``, ``edges`` and ``usage``, by node the bytes of each
    choice, are as in the problem. ``storage``: what stores take, by what that depends on.
    """

    request: PlacementRequest
    pricing: Pricing
    places: Mapping[str, BodyPlace]
    nodes: list[Node] = field(default_factory=list)
    homes: list[str] = field(default_factory=list)
    costs: list[Seconds] = field(default_factory=list)
    edges: list[tuple[int, int, Seconds]] = field(default_factory=list)
    usage: dict[int, Seconds] = field(default_factory=dict)
    storage: dict[Hashable, tuple[Seconds, Seconds, Seconds]] = field(default_factory=dict)

    def add(self, node: Node, cost: Seconds, home: str) -> int:
        """A node, with the cost of each choice; its number."""
        self.nodes.append(node)
        self.homes.append(home)
        self.costs.append(cost)
        return len(self.nodes) - 1

    def charge(self, node: int, cost: Seconds) -> None:
        """More cost for each choice of a node."""
        self.costs[node] = self.costs[node] + cost

    def forwards(self, op: IROp) -> int:
        """How often an operator's forward runs per step: twice where it is computed again in the
        backward.
        """
        return self.request.microbatches * (2 if self.places[op.name].runs_again else 1)

    def stretch_of(self, node: int | None) -> int | None:
        """The stretch of operators that a node belongs to; None where it is no operator."""
        found = self.nodes[node] if node is not None else None
        return self.places[found.op.name].stretch if isinstance(found, OpNode) else None

    def op_cost(self, op: IROp, choices: OpChoices) -> Seconds:
        """Seconds per step of every choice of an operator."""
        return (
            choices.forward_s * self.forwards(op) + choices.backward_s * self.request.microbatches
        )

    def layout_id(self, layout: Layout, value: IRValue) -> int:
        """The number of a layout of a value, in canonical form."""
        return self.pricing.layouts.id(
            canonical(layout, self.request.mesh, differentiable=value.requires_grad)
        )

    def operators(self, readers: Sequence[Reader]) -> list[OpNode]:
        """The operators among some readers."""
        nodes = [self.nodes[reader.node] for reader in readers if reader.node is not None]
        return [node for node in nodes if isinstance(node, OpNode)]

    def home_of(self, maker: Maker | None, readers: Sequence[Reader]) -> str:
        """The module path a value belongs to: that of the operator that makes it, or reads it
        first.
        """
        around = [maker.node if maker is not None else None, *(reader.node for reader in readers)]
        return next((self.homes[index] for index in around if index is not None), "")

    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each numbered module, for modules that come more than once, in the order of
        the graph.
        """
        found: dict[tuple[str, int], list[int]] = {}
        for index, home in enumerate(self.homes):
            container = container_of(home)
            if container is not None:
                found.setdefault(container, []).append(index)
        counts = Counter(prefix for prefix, _ in found)
        return tuple(tuple(nodes) for (prefix, _), nodes in found.items() if counts[prefix] > 1)
