"""A backward in two parts: the gradients of the inputs first, so that they can travel on, those of
the parameters later.

The forward runs once, and nothing is computed twice that costs much. In the graph of autograd, call
*inner* the nodes from which an input is reached, and *outer* those from which only parameters are.
A gradient leaves the inner part where an inner node has an outer child. There are two kinds of such
edges:

- **deferred**: the child belongs to this node alone, as the transposed weight of a linear does. The
  first part notes the gradient that comes into the node and leaves out the product for the child;
  the second part runs the node again, for the child only. Nodes of PyTorch compute the gradients
  they are asked for, so no product is computed twice.
- **direct**: several nodes have the child (a bias that is used twice), or the node is an autograd
  function written in Python, which computes all its gradients whenever it runs and may communicate.
  There the first part computes the gradient that comes into the child, and the second part goes on
  from there.

Every path from a result to a parameter crosses exactly one of these edges, so what the second part
adds up is the gradient.

The second part goes from the results to the inputs and lets go of each node it has run. The
gradient of a parameter that one node alone leads to is accumulated with it; those of parameters
that several lead to are summed first, and come last.

All ranks that hold the same stage meet the same nodes in the same order: what communicates in a
backward does so once, in the same order on all of them.

The two parts are those of "Zero Bubble Pipeline Parallelism" (Qi et al., 2023), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shardwright.runtime.training.asked_gradients import ask_gradients

Edge = tuple[Node, int]
"""A node, and the number of the result whose gradient comes in."""


class SplitBackward:
    """The backward of some results in two parts, for one pair of calls.

    ``roots``: where the results' gradients come in, with these gradients. ``inputs``: leaves.
    :meth:`input_gradients` comes first, then :meth:`accumulate`, and then the graph is used up.
    """

    def __init__(
        self, roots: Sequence[tuple[GradientEdge, Tensor]], inputs: Sequence[Tensor]
    ) -> None:
        self._inputs = [get_gradient_edge(x) for x in inputs]
        graph = _Graph([edge.node for edge, _ in roots], [edge.node for edge in self._inputs])
        self._roots = [(edge, grad) for edge, grad in roots if edge.node in graph.inner]
        self._deferred = graph.deferred_edges()
        self._direct = graph.direct_edges(self._deferred)
        self._alone = graph.parameters_below(self._deferred, [edge.node for edge, _ in roots])
        self._owners = graph.owners([edge for edge, _ in roots], self._direct)
        self._incoming: dict[Node, tuple[Tensor | None, ...]] = {}
        # What is computed of no input at all waits for the second part as a whole.
        self._captured: list[tuple[Edge, Tensor]] = [
            ((edge.node, edge.output_nr), grad) for edge, grad in roots if edge.node in graph.outer
        ]

    def input_gradients(self) -> list[Tensor | None]:
        """The gradients of the inputs, in order; ``None`` for one that the results do not depend
        on.
        """
        if not self._roots:
            return [None] * len(self._inputs)
        # Notes what comes into the nodes whose other children wait for the second part.
        handles = [node.register_prehook(self._note(node)) for node in self._deferred]
        try:
            # Gradients of the inputs, and of the edges at which the second part begins directly.
            gradients = ask_gradients(
                [edge for edge, _ in self._roots],
                [*self._inputs, *(GradientEdge(*edge) for edge in self._direct)],
                [grad for _, grad in self._roots],
                retain_graph=True,
                # The second part runs nodes of this graph again.
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        self._roots = []
        self._captured += _defined(self._direct, gradients[len(self._inputs) :])
        return list(gradients[: len(self._inputs)])

    def accumulate(self) -> None:
        """Add the gradients of the parameters to their ``grad``."""
        while self._deferred:
            node = next(iter(self._deferred))
            self._accumulate_from(node, self._deferred.pop(node))
            del node  # with it goes what no other node needs
        captured, self._captured = self._captured, []
        if captured:
            torch.autograd.backward(
                [GradientEdge(*edge) for edge, _ in captured], [grad for _, grad in captured]
            )
        self._owners = []

    def _accumulate_from(self, node: Node, edges: list[Edge]) -> None:
        """Run a node again for the children that were left out."""
        incoming = enumerate(self._incoming.pop(node, ()))
        known = [
            (GradientEdge(node, number), grad) for number, grad in incoming if grad is not None
        ]
        roots, grads = [edge for edge, _ in known], [grad for _, grad in known]
        parameters = self._alone.pop(node, None)
        if not known:
            return
        # Its parameters are nobody else's: autograd may add to them directly.
        if parameters is not None:
            torch.autograd.backward(roots, grads, inputs=parameters)
            return
        # Otherwise the gradients of its edges go on with all others.
        gradients = ask_gradients(
            roots, [GradientEdge(*edge) for edge in edges], grads, allow_unused=True
        )
        self._captured += _defined(edges, gradients)

    def _note(self, node: Node) -> _Noting:
        return _Noting(node, self._incoming)


@dataclass(frozen=True, slots=True)
class _Noting:
    """A hook that notes the gradients which come into a node."""

    node: Node
    incoming: dict[Node, tuple[Tensor | None, ...]]

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        self.incoming[self.node] = tuple(gradients)


def _defined(
    edges: Iterable[Edge], gradients: Iterable[Tensor | None]
) -> list[tuple[Edge, Tensor]]:
    return [(edge, grad) for edge, grad in zip(edges, gradients, strict=True) if grad is not None]


class _Graph:
    """The nodes below some roots. ``inner``: those that reach an input. ``outer``: those that reach
    parameters only, each after its children.
    """

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Node]) -> None:
        self.inner: set[Node] = set()
        self.outer: dict[Node, None] = {}
        self._leaving: dict[
            Node, list[Edge]
        ] = {}  # edges from inner nodes to outer ones, results first
        self._parents: dict[Node, set[Node]] = {}
        # ``inner`` nodes lead to inputs, ``outer`` ones to parameters only.
        order = _children_first(roots)
        for node in order:
            children = _children(node)
            for child, _ in children:
                self._parents.setdefault(child, set()).add(node)
            if node in inputs or any(child in self.inner for child, _ in children):
                self.inner.add(node)
            elif _is_leaf(node) or any(child in self.outer for child, _ in children):
                self.outer[node] = None
        # Where the graph leaves the inner part: there gradients are split.
        for node in reversed(order):
            if node in self.inner:
                edges = [edge for edge in dict.fromkeys(_children(node)) if edge[0] in self.outer]
                if edges:
                    self._leaving[node] = edges

    def deferred_edges(self) -> dict[Node, list[Edge]]:
        """The edges from inner nodes to outer children that may be computed later, by inner node,
        results first.
        """
        deferred: dict[Node, list[Edge]] = {}
        for node, edges in self._leaving.items():
            if not isinstance(node, BackwardCFunction):
                own = [(child, number) for child, number in edges if self._parents[child] == {node}]
                if own:
                    deferred[node] = own
        self._drop_tangled(deferred)
        return deferred

    def direct_edges(self, deferred: dict[Node, list[Edge]]) -> list[Edge]:
        """Where the gradients of all other edges between the two parts are taken, so that none goes
        on to another.
        """
        leaving = ((node, edge) for node, edges in self._leaving.items() for edge in edges)
        return self._untangled(
            list(
                dict.fromkeys(edge for node, edge in leaving if edge not in deferred.get(node, []))
            )
        )

    def parameters_below(
        self, deferred: Mapping[Node, list[Edge]], roots: Sequence[Node]
    ) -> dict[Node, list[Tensor]]:
        """The parameters that the children of each node of ``deferred`` lead to, if nothing else
        leads to any of them.
        """
        # ``part``: the connected piece of the outer graph that a node belongs to.
        part = self._parts()
        # From which inner nodes, or roots, each piece is reached.
        leading: dict[Node, set[Node | None]] = {}
        for node, edges in self._leaving.items():
            for child, _ in edges:
                leading.setdefault(part(child), set()).add(node)
        for root in roots:
            if root in self.outer:
                leading.setdefault(part(root), set()).add(None)
        leaves: dict[Node, list[Tensor]] = {}
        for node in self.outer:
            if _is_leaf(node):
                leaves.setdefault(part(node), []).append(node.variable)  # type: ignore[attr-defined]
        found: dict[Node, list[Tensor]] = {}
        for node, edges in deferred.items():
            below = dict.fromkeys(part(child) for child, _ in edges)
            # Nothing else leads to these pieces.
            if edges == self._leaving[node] and all(leading[each] == {node} for each in below):
                found[node] = [x for each in below for x in leaves.get(each, ())]
        return found

    def _parts(self) -> Callable[[Node], Node]:
        """Says which of the outer nodes hang together: of those that do, it names the same one."""
        above: dict[Node, Node] = {node: node for node in self.outer}

        def part(node: Node) -> Node:
            # Union-find with path halving: each step skips one node on the way to the root.
            while above[node] is not node:
                above[node] = node = above[above[node]]
            return node

        for node in self.outer:
            for child, _ in _children(node):
                if child in above:
                    above[part(child)] = part(node)
        return part

    def owners(
        self, roots: Sequence[GradientEdge], edges: Iterable[Edge]
    ) -> list[Node | GradientEdge]:
        """What keeps the nodes of ``edges`` and ``roots`` alive: of an autograd function written in
        Python, the object at hand does not. The nearest nodes above it do, and for a root the token
        in its edge.
        """
        owners: list[Node | GradientEdge] = [edge for edge in roots if edge.node in self.outer]
        by_node = {edge.node: edge for edge in roots}
        waiting = [node for node, _ in edges]
        for node in waiting:  # grows while it is read
            if not isinstance(node, BackwardCFunction):
                owners.append(node)
            elif node in by_node:
                owners.append(by_node[node])
            else:
                waiting += self._parents.get(node, ())
        return owners

    def _drop_tangled(self, deferred: dict[Node, list[Edge]]) -> None:
        """Take out deferred children from which the gradient would go on to a direct one: the first
        part needs them.
        """
        # Taking one out may tangle another: until none is left.
        while True:
            above = self._above(self.direct_edges(deferred))
            tangled = [
                (node, edge)
                for node, edges in deferred.items()
                for edge in edges
                if edge[0] in above
            ]
            if not tangled:
                return
            for node, edge in tangled:
                deferred[node].remove(edge)
                if not deferred[node]:
                    del deferred[node]

    def _untangled(self, edges: list[Edge]) -> list[Edge]:
        """The edges, where a child from which another one is reached is replaced by its own
        children.
        """
        while True:
            above = self._above(edges)
            if not any(node in above for node, _ in edges):
                return edges
            # One level down at a time, until no child hangs below another.
            lower = [
                _children(node) if node in above else [(node, number)] for node, number in edges
            ]
            edges = list(
                dict.fromkeys(edge for group in lower for edge in group if edge[0] in self.outer)
            )

    def _above(self, edges: Iterable[Edge]) -> set[Node]:
        """The outer nodes from which one of the edges' nodes is reached."""
        targets = {node for node, _ in edges}
        above: set[Node] = set()
        for node in self.outer:
            if any(child in targets or child in above for child, _ in _children(node)):
                above.add(node)
        return above


def _is_leaf(node: Node) -> bool:
    """Whether gradients end here: at a tensor that nothing computed."""
    return hasattr(node, "variable")


def _children(node: Node) -> list[Edge]:
    return [(child, number) for child, number in node.next_functions if child is not None]


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """All nodes below the roots, each after its children; the same order wherever the graph is the
    same.
    """
    # Depth first without recursion: graphs are deeper than Python's stack.
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            # Met for the second time: everything below it is in the order.
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in reversed(_children(node)) if child not in seen]
    return order
