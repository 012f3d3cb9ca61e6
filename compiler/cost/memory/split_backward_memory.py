"""The memory of a backward in two parts, as ``runtime.pipeline.backward`` runs it.

A value is *inner* if it depends on an input whose gradient goes on to another rank. The first part
goes through the inner instructions, from the results to the inputs, and computes the gradients of
their inner operands. If an instruction has other operands too (a weight), the gradient that came in
is noted for the second part. From the first instruction with a note on, everything that autograd
saved stays, as the second part needs the graph. The inputs stay too, whether or not anything saved
them: they are leaves of the graph.

Example: ``y = x @ w`` with a received ``x``. The first part computes the gradient of ``x`` from
that of ``y``, notes the gradient of ``y``, and keeps ``x``. The second part computes that of ``w``
from these two, and releases them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardwright.compiler.cost.memory.body_memory import BodyMemory, Gradient, Node


class SplitMemory:
    """Both parts of the backward of a body that has run forward. ``inputs``: the names of the
    inputs whose gradients go on to another rank.
    """

    def __init__(self, body: BodyMemory, inputs: Collection[str]) -> None:
        self._body = body
        self._inputs = tuple(inputs)
        inner = set(inputs)
        self._inner: list[Node] = []
        for node in body.nodes:
            if not inner.isdisjoint(node.operand_names):
                self._inner.append(node)
                inner.update(node.result_names)
        self._names = inner
        self._noted: dict[int, list[Gradient | None]] = {}  # by id of the node
        self._later: dict[str, Gradient] = {}  # gradients of values outside, for the second part
        self._captured: list[int] = []  # held until the second part is done
        self._remaining: dict[str, int] = {}

    def input_gradients(self, roots: Mapping[str, Gradient]) -> None:
        """The first part, from the gradients of ``roots``. Their storages are held, and this object
        releases them.
        """
        body = self._body
        # How many contributions each gradient waits for.
        self._remaining = body.contributions(set(roots))
        # Roots inside of the first part begin it; the others wait for the second.
        gradients = {name: gradient for name, gradient in roots.items() if name in self._names}
        self._later = {
            name: gradient for name, gradient in roots.items() if name not in self._names
        }
        self._captured = [body.ledger.hold(storage) for _, storage in self._later.values()]
        self._captured += [body.ledger.hold(body.values[name].storage) for name in self._inputs]
        # Backwards through the operators between the roots and the inputs of the stage.
        for node in reversed(self._inner):
            incoming = [gradients.pop(name, None) for name in node.result_names]
            if all(gradient is None for gradient in incoming):
                continue
            inside = [
                number for number, name in enumerate(node.operand_names) if name in self._names
            ]
            # Another operand takes a gradient: note what came in, with a holder of its own.
            if any(
                local.form.requires_grad for n, local in enumerate(node.operands) if n not in inside
            ):
                self._noted[id(node)] = incoming
                for gradient in incoming:
                    if gradient is not None:
                        body.ledger.hold(gradient[1])
            body.differentiate(node, incoming, gradients, self._remaining, only=inside)
        body.arrive_rest(gradients)
        self._let_go()

    def _let_go(self) -> None:
        """Drop what autograd saved above the first note."""
        below: set[str] = set()
        for node in reversed(self._inner):
            if id(node) in self._noted or not below.isdisjoint(node.result_names):
                below.update(node.operand_names)
            else:
                self._body.release(node.saved)

    def weight_gradients(self) -> None:
        """The second part. Each instruction goes as soon as it has run."""
        body, gradients = self._body, self._later
        for node in reversed(body.nodes):
            # It ran in the first part, for its inputs only: now for the rest.
            noted = self._noted.pop(id(node), None)
            if noted is not None:
                only = [
                    number
                    for number, name in enumerate(node.operand_names)
                    if name not in self._names
                ]
                body.differentiate(node, noted, gradients, self._remaining, only=only)
            else:
                incoming = [gradients.pop(name, None) for name in node.result_names]
                if any(gradient is not None for gradient in incoming):
                    body.differentiate(node, incoming, gradients, self._remaining)
            body.release(node.saved)
        body.arrive_rest(gradients)
        body.release(self._captured)
