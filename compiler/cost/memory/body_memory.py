"""The memory of one forward and backward of a program on one rank.

The walk goes through the instructions in the order in which they run, and keeps a ledger of
storages. A storage lives while something holds it:

- **Variables** of the generated code hold it until the method ends that binds them: ``forward``, or
  the method of a repeated block.
- **Autograd** holds what an operator saves, from its forward to its backward. A storage counts
  once, however many views share it.
- **Gradients** are held from the operator that makes them to the one that uses them. They come in
  the reverse order of the forward, as autograd's engine takes the latest node that is ready. A
  second gradient of a value is added in place, unless something else holds the first one or it is a
  view (as a product is that was computed in two dims).
- A **recompute region** holds its arguments. The first of its operators that needs a saved tensor
  in backward computes the region again.
- A **gathered weight** (ZeRO-3) is there from its gathering to its last use in the method, and
  again while the backward of its operator runs. The next weight is on its way meanwhile, also in
  regions that run again. Weights that come in one collective come again in one: each is there until
  its own operator has had it.

What an instruction makes, keeps and needs while it runs is its footprint (``footprint.py``).

Example: ``h = x @ w1; a = gelu(h); y = a @ w2`` with 8 bytes for each of ``h``, ``a`` and ``y``.
Forward ends with 24 bytes of activations. The backward of ``a @ w2`` makes 8 bytes of gradient of
``a`` and releases what it saved; that of ``gelu`` uses this gradient up and makes the one of ``h``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardwright.compiler.cost.memory.footprint import Footprints, Forward, TensorForm
from shardwright.compiler.cost.memory.gathered_tensors import GatheredTensors
from shardwright.compiler.cost.memory.ledger import ACTIVATION, TEMPORARY, Ledger
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Loop, Program
from shardwright.compiler.plan.repeated_blocks import (
    Run,
    gathered_until,
    group_blocks,
    reads,
    writes,
)


@dataclass(slots=True)
class _Local:
    """A value of the rank: its form, and the storage it lies in."""

    form: TensorForm
    storage: int


Gradient = tuple[TensorForm, int]
"""The form of a gradient and the storage it lies in."""


@dataclass(slots=True)
class Node:
    """An instruction in the graph of autograd. ``saved``: the storages that it holds. ``region``:
    the index of the recompute region that it belongs to.
    """

    instruction: Instruction
    operands: list[_Local]
    operand_names: list[str]
    result_names: list[str]
    saved: list[int]
    region: int | None = None
    gathered: tuple[str, ...] = ()  # names of the weights that its backward gathers again


@dataclass(slots=True)
class _Region:
    """A part of the program that backward computes again. ``arguments``: storages that it holds
    until its backward is done. ``over``: the gathered weights that are not needed after each
    position.
    """

    instructions: tuple[Instruction, ...]
    arguments: list[int]
    over: Mapping[int, Sequence[IRValue]]
    nodes: list[Node] = field(default_factory=list)
    recomputed: bool = False


Arrive = Callable[[str, TensorForm, int], None]
"""A function ``(name, form, storage)`` that takes the complete gradient of a source. The gradient's
storage is held when it is called, and the function releases it.
"""


class BodyMemory:
    """One run of ``program``, forward and backward.

    ``sources``: the form and the storage of each input, parameter, buffer and constant, by the name
    of the value. ``arrive`` takes the gradients of sources. ``summed_in``: gives the dtype in which
    the gradient of a gathered weight is summed, from the dtype of the weight.
    """

    def __init__(
        self,
        program: Program,
        footprints: Footprints,
        ledger: Ledger,
        sources: Mapping[str, tuple[TensorForm, int]],
        arrive: Arrive,
        *,
        trains: bool = True,
        summed_in: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype,
    ) -> None:
        self.program, self.footprints, self.ledger = program, footprints, ledger
        self.arrive, self.trains = arrive, trains
        self.inexact: set[str] = set()
        self.values = {name: _Local(form, storage) for name, (form, storage) in sources.items()}
        self.sources = set(sources)
        self.nodes: list[Node] = []
        self.regions: list[_Region] = []
        self.outputs: list[int] = []
        self._gathered = GatheredTensors(program, footprints.rank, ledger, summed_in)
        self._views: set[int] = set()  # storages of gradients that are views
        self._temporary_bytes = 0  # what the last instruction needed beside its results
        # Weights whose gradients are computed beside an adapter's backward, and the nodes of their
        # products, with the gradients that came into these.
        self._beside = {w.name for i in program.body if isinstance(i, Adapt) for w in i.beside}
        self._left: dict[str, tuple[Node, Sequence[Gradient | None]]] = {}

    # ---------------------------------------------------------------------------------------------
    # forward

    def forward(self) -> None:
        """Run the forward. After it, only the results and what autograd saved is held."""
        bound: list[int] = []  # storages that the variables of ``forward`` itself hold
        items = group_blocks(self.program)
        results = [value for _, value in self.program.output.leaves() if isinstance(value, IRValue)]
        over = gathered_until(
            items, [*results, *(after for _, after in self.program.buffer_updates)]
        )
        for position, item in enumerate(items):
            if not isinstance(item, Run):
                bound += self._bind([item], over={0: over.get(position, [])})
                continue
            # A repeated block is a method of its own: what its variables hold goes when it returns.
            # The caller's variables hold its outputs before that, so these stay.
            region, inside_over = None, gathered_until(item.instructions, item.outputs)
            if item.recompute and self.trains:
                arguments = [
                    self.ledger.hold(self.values[value.name].storage) for value in item.inputs
                ]
                region = len(self.regions)
                self.regions.append(_Region(item.instructions, arguments, inside_over))
            inside = self._bind(item.instructions, region, inside_over)
            bound += [self.ledger.hold(self.values[value.name].storage) for value in item.outputs]
            self.release(inside)
            self._gathered.drop(over.get(position, []))
        for _, value in self.program.output.leaves():
            if isinstance(value, IRValue):
                self.outputs.append(self.ledger.hold(self.values[value.name].storage))
        self.release(bound)

    def _bind(
        self,
        instructions: Sequence[Instruction],
        region: int | None = None,
        over: Mapping[int, Sequence[IRValue]] | None = None,
    ) -> list[int]:
        """Run instructions, and return the storages that their variables hold. ``over``: the
        gathered weights to let go of after each position.
        """
        bound: list[int] = []
        under_way: list[tuple[int, int]] = []  # what messages hold, and until which position
        for position, instruction in enumerate(instructions):
            # In a region autograd saves nothing: backward runs the region again for that.
            self._gathered.pass_by(instruction, region)
            node = self._run(instruction, bound, keeps=region is None)
            if not isinstance(instruction, Loop) and instruction.meanwhile:
                until = position + instruction.meanwhile
                buffers = self.ledger.new(self._started_bytes(instruction), TEMPORARY)
                under_way.append((self.ledger.hold(buffers), until))
            self.release([buffers for buffers, until in under_way if until == position])
            if node is not None:
                node.region = region
                self.nodes.append(node)
                if region is not None:
                    self.regions[region].nodes.append(node)
                    self._gathered.comes_to(region)
            self._gathered.drop((over or {}).get(position, ()))
        return bound

    def _started_bytes(self, instruction: Adapt | Compute) -> int:
        """The bytes that the message of the last instruction holds while it is under way."""
        sent = (
            self._gathered.sent_bytes(instruction, "forward")
            if isinstance(instruction, Adapt)
            else 0
        )
        return max(sent, self._temporary_bytes)

    def _run(
        self, instruction: Instruction, bound: list[int], *, keeps: bool, again: bool = False
    ) -> Node | None:
        """Run one instruction: bind its results, and with ``keeps`` hold what autograd saves.

        ``again``: a backward runs it to recompute a region, where gathered weights are saved like
        anything else. The result is its node of autograd's graph, ``None`` without a gradient.
        """
        read = (instruction.value,) if isinstance(instruction, Adapt) else reads(instruction)
        operands = [self.values[value.name] for value in read]
        found = self.footprints.forward(
            instruction, [local.form for local in operands], trains=self.trains
        )
        if not found.exact:
            self.inexact.add(_name(instruction))
        held_shortly = isinstance(instruction, Adapt) and instruction.gathers_again
        self._temporary_bytes = max(0, found.peak - sum(found.made))
        joined = self._gathered.joining_bytes(instruction)
        # While a weight is used, the next one is being gathered.
        ahead = self._gathered.under_way_bytes() if again else self._gathered.next_bytes()
        self.ledger.use(found.peak + joined + ahead, _name(instruction))
        # The footprint numbers storages: those of operands first, then those that it makes. This
        # list has the ledger's number of each.
        numbers = [local.storage for local in operands] + [
            self.ledger.new(size, ACTIVATION) for size in found.made
        ]
        for value, form, number in zip(
            writes(instruction), found.results, found.storages, strict=True
        ):
            self.values[value.name] = _Local(form, numbers[number])
            storage = self.ledger.hold(numbers[number])
            if held_shortly:
                self._gathered.whole[value.name] = storage
            else:
                bound.append(storage)
        node = None
        if self.trains and any(form.requires_grad for form in found.results):
            # The runtime's hooks replace a gathered weight that autograd saves by a handle, which
            # gathers it again in backward: it is not held, but counts while that backward runs.
            whole = {} if again else {s: name for name, s in self._gathered.whole.items()}
            gathered = dict.fromkeys(whole[numbers[n]] for n in found.saved if numbers[n] in whole)
            if keeps:
                self._gathered.ask_for(gathered)
            saved = (
                [self.ledger.hold(numbers[n]) for n in found.saved if numbers[n] not in whole]
                if keeps
                else []
            )
            names = (
                [value.name for value in read],
                [value.name for value in writes(instruction)],
            )
            node = Node(instruction, operands, *names, saved, gathered=tuple(gathered))
        for number in numbers[len(operands) :]:
            self.ledger.drop_unheld(number)
        self.ledger.use(0, _name(instruction))
        return node

    # ---------------------------------------------------------------------------------------------
    # backward

    def backward(self, roots: Mapping[str, Gradient]) -> None:
        """Run the backward from the gradients of ``roots``, by name of the value. Their storages
        are held, and this method releases them.
        """
        gradients: dict[str, Gradient] = dict(roots)
        remaining = self.contributions(set(roots))
        kept: list[Node] = []
        # The reverse order of the forward is a valid order of the engine: when a node is reached,
        # all gradients of its results are complete, as everything that read them came later.
        for node in reversed(self.nodes):
            incoming = [gradients.pop(name, None) for name in node.result_names]
            # No gradient reaches this node. What it saved stays until the graph is dropped.
            if all(gradient is None for gradient in incoming):
                kept.append(node)
                continue
            if node.region is not None and not self.regions[node.region].recomputed:
                self._recompute(node.region)
            if not self._beside.isdisjoint(node.operand_names):
                self._leave(node, incoming, gradients, remaining)
            elif isinstance(node.instruction, Adapt) and node.instruction.beside:
                self._communicate(node, node.instruction, incoming, gradients, remaining)
            else:
                self.differentiate(node, incoming, gradients, remaining)
            self.release(node.saved)
            node.saved = []
            # The first node of a region is the last one of its backward.
            if node.region is not None and node is self.regions[node.region].nodes[0]:
                self.release(self.regions[node.region].arguments)
                self.regions[node.region].arguments = []
        self.arrive_rest(gradients)
        self._gathered.close()
        for node in kept:
            self.release(node.saved)
        for region in self.regions:
            self.release(region.arguments)

    def _leave(
        self,
        node: Node,
        incoming: Sequence[Gradient | None],
        gradients: dict[str, Gradient],
        remaining: dict[str, int],
    ) -> None:
        """Run the backward of a product but for the gradient of its weight, which an adapter will
        compute beside its own backward. Until then, what came in and what was saved is held.
        """
        (weight,) = self._beside.intersection(node.operand_names)
        only = [number for number, name in enumerate(node.operand_names) if name != weight]
        for gradient in incoming:
            if gradient is not None:
                self.ledger.hold(gradient[1])
        self._left[weight] = replace(node, saved=node.saved), incoming
        node.saved = []
        self.differentiate(node, incoming, gradients, remaining, only=only)

    def _communicate(
        self,
        node: Node,
        adapter: Adapt,
        incoming: Sequence[Gradient | None],
        gradients: dict[str, Gradient],
        remaining: dict[str, int],
    ) -> None:
        """Run the backward of an adapter, and compute the gradients of weights beside it. Meanwhile
        what came in is held, and what a reduce-scatter needs.
        """
        held = [self.ledger.hold(gradient[1]) for gradient in incoming if gradient is not None]
        self.differentiate(node, incoming, gradients, remaining)
        sent = self.ledger.new(self._gathered.sent_bytes(adapter, "backward"), TEMPORARY)
        held.append(self.ledger.hold(sent))
        for weight in adapter.beside:
            # There is none if no gradient came to the product.
            if weight.name in self._left:
                product, came = self._left.pop(weight.name)
                only = [product.operand_names.index(weight.name)]
                self.differentiate(product, came, gradients, remaining, only=only)
                self.release(product.saved)
        self.release(held)

    def arrive_rest(self, gradients: Mapping[str, Gradient]) -> None:
        """Hand out the gradients that no operator used. They belong to inputs that are results
        too.
        """
        for name, (form, storage) in gradients.items():
            if name in self.sources:
                self.arrive(name, form, storage)
            else:
                self.ledger.release(storage)

    def finish(self) -> None:
        """Drop the results, and what a forward without a backward left."""
        for node in self.nodes:
            self.release(node.saved)
        for region in self.regions:
            self.release(region.arguments)
        self.release(self.outputs)

    def differentiate(
        self,
        node: Node,
        incoming: Sequence[Gradient | None],
        gradients: dict[str, Gradient],
        remaining: dict[str, int],
        *,
        only: Sequence[int] | None = None,
    ) -> None:
        """Run the backward of one node.

        - ``incoming``: the gradients of its results, which it uses up.
        - ``gradients``: the gradients of values so far, by name; it adds those of its operands.
        - ``remaining``: how many more gradients each value will be given.
        - ``only``: the positions of the operands whose gradients are computed; default all.
        """
        name = _name(node.instruction)
        found = self.footprints.backward(
            node.instruction,
            [local.form for local in node.operands],
            [g and g[0] for g in incoming],
            only,
        )
        if not found.exact:
            self.inexact.add(f"backward of {name}")
        self._gathered.come_again(node.gathered)
        # Beside what the operator itself needs: what is on its way, and what summing a gradient
        # takes.
        piece = node.operands[0].form
        extra = self._gathered.under_way_bytes() + self._gathered.summing_bytes(
            node.instruction, piece
        )
        self.ledger.use(found.peak + extra, f"backward of {name}")
        made = [self.ledger.new(size, TEMPORARY) for size in found.made]
        numbers = [g[1] if g is not None else -1 for g in incoming] + made
        results = [
            (node.operand_names[operand], form, self.ledger.hold(numbers[number]))
            for operand, form, number in zip(
                found.wanted, found.gradients, found.storages, strict=True
            )
        ]
        self._views.update(
            s for (_, _, s), is_view in zip(results, found.views, strict=True) if is_view
        )
        for g in incoming:  # the engine lets go of what came in before it hands out the results
            if g is not None:
                self.ledger.release(g[1])
        self._gathered.let_go(node.gathered)
        for number in made:
            self.ledger.drop_unheld(number)
        for operand, form, storage in results:
            gradients[operand] = self._accumulated(gradients.get(operand), form, storage, name)
            remaining[operand] -= 1
            if operand in self.sources and remaining[operand] == 0:
                self.arrive(operand, *gradients.pop(operand))

    def _accumulated(
        self, held: Gradient | None, form: TensorForm, storage: int, name: str
    ) -> Gradient:
        """The sum of two gradients of one value; ``held`` is the sum so far."""
        if held is None:
            return form, storage
        # Autograd adds in place only where it alone holds the first gradient and it is no view.
        if self.ledger.holders(held[1]) > 1 or held[1] in self._views:
            total = self.ledger.hold(self.ledger.new(form.num_bytes, TEMPORARY))
            self.ledger.use(0, f"backward of {name}")
            self.ledger.release(held[1])
            held = form, total
        self.ledger.release(storage)
        return held

    def contributions(self, reached: set[str]) -> dict[str, int]:
        """How many gradients each value will be given, if gradients start at ``reached``. The set
        grows by every value that a gradient reaches.
        """
        counts: dict[str, int] = {}
        for node in reversed(self.nodes):
            if not reached.isdisjoint(node.result_names):
                for name, local in zip(node.operand_names, node.operands, strict=True):
                    if local.form.requires_grad:
                        reached.add(name)
                        counts[name] = counts.get(name, 0) + 1
        return counts

    def _recompute(self, number: int) -> None:
        """Run the region of this index again and hold what autograd saves in it. The run stops at
        the last instruction that saves anything, as torch's checkpoint does with early stop.
        """
        region = self.regions[number]
        region.recomputed = True
        # The nodes of the first run, without saved tensors, get those of this run.
        by_instruction = {id(node.instruction): node for node in region.nodes}
        forwards = self._forwards(region)
        last = max((i for i, found in enumerate(forwards) if found.saved), default=-1)
        bound: list[int] = []
        for position, instruction in enumerate(region.instructions[: last + 1]):
            self._gathered.run_again(instruction, number)
            # ``again``: results are there already, only what autograd saves is new.
            node = self._run(instruction, bound, keeps=True, again=True)
            if node is not None:
                known = by_instruction[id(instruction)]
                known.saved, known.operands, known.gathered = node.saved, node.operands, ()
            self._gathered.drop(region.over.get(position, ()))
        self.release(bound)
        self._gathered.has_run(number)
        # Weights that were gathered for the first run alone.
        self._gathered.drop_all()

    def _forwards(self, region: _Region) -> list[Forward]:
        found = []
        for instruction in region.instructions:
            forms = [self.values[value.name].form for value in reads(instruction)]
            found.append(self.footprints.forward(instruction, forms, trains=True))
        return found

    def release(self, storages: list[int]) -> None:
        """Let go of storages, and empty the list."""
        for storage in storages:
            self.ledger.release(storage)
        storages.clear()


def _name(instruction: Instruction) -> str:
    if isinstance(instruction, Loop):
        return f"loop {instruction.axis}"
    return instruction.result.name if isinstance(instruction, Adapt) else instruction.original.name
