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
  again while the backward of its operator runs. The next weight is on its way meanwhile. Weights
  that come in one collective come again in one: each is there until its own operator has had it.

What an instruction makes, keeps and needs while it runs is its footprint (``footprint.py``).

Example: ``h = x @ w1; a = gelu(h); y = a @ w2`` with 8 bytes for each of ``h``, ``a`` and ``y``.
Forward ends with 24 bytes of activations. The backward of ``a @ w2`` makes 8 bytes of gradient of
``a`` and releases what it saved; that of ``gelu`` uses this gradient up and makes the one of ``h``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.memory.footprint import Footprints, Forward, TensorForm
from shardwright.compiler.cost.memory.ledger import Ledger
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.program import (
    Adapt,
    Instruction,
    Loop,
    Program,
    gathers_at,
    joins,
)
from shardwright.compiler.plan.repeated_blocks import (
    Run,
    gathered_until,
    group_blocks,
    reads,
    writes,
)

ACTIVATION, TEMPORARY = "activation", "temporary"


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
        self._summed_in = summed_in
        self.program, self.footprints, self.ledger = program, footprints, ledger
        self.arrive, self.trains = arrive, trains
        self.inexact: set[str] = set()
        self.values = {name: _Local(form, storage) for name, (form, storage) in sources.items()}
        self.sources = set(sources)
        self.nodes: list[Node] = []
        self.regions: list[_Region] = []
        self.outputs: list[int] = []
        # The storages of gathered weights that are whole now, by name of the value.
        self.gathered: dict[str, int] = {}
        # The bytes that each collective of weights gathers, in their order. ``num_gathered`` counts
        # how far forward has come in that list; backward counts down again.
        self._groups = _gatherings(program)
        self._group_of = {
            adapter.result.name: number
            for number, group in enumerate(self._groups)
            for adapter in group
        }
        # The gathers of one collective, by the names of their results.
        self._together = {
            adapter.result.name: group
            for position, i in enumerate(program.body)
            if not joins(i)
            for group in [gathers_at(program.body, position)]
            for adapter in group
        }
        # What backward gathers again, by name. An activation may be among it.
        self._again = {
            i.result.name: i for i in program.body if isinstance(i, Adapt) and i.gathers_again
        }
        self.on_their_way = [sum(map(self._whole_bytes, group)) for group in self._groups]
        self.num_gathered = 0
        # How many operators' backwards will still ask for each weight, and the storages of those
        # that came for one of them and are held for the others.
        self._asked: dict[str, int] = {}
        self._came: dict[str, int] = {}
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
            self._drop(over.get(position, []))
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
            node = self._run(instruction, bound, keeps=region is None)
            if not isinstance(instruction, Loop) and instruction.meanwhile:
                until = position + instruction.meanwhile
                buffers = self.ledger.new(self._temporary_bytes, TEMPORARY)
                under_way.append((self.ledger.hold(buffers), until))
            self.release([buffers for buffers, until in under_way if until == position])
            if node is not None:
                node.region = region
                self.nodes.append(node)
                if region is not None:
                    self.regions[region].nodes.append(node)
            self._drop((over or {}).get(position, ()))
        return bound

    def _drop(self, weights: Sequence[IRValue]) -> None:
        for value in weights:
            if value.name in self.gathered:
                self.ledger.release(self.gathered.pop(value.name))

    def _ahead(self, number: int) -> int:
        """The bytes of the gathered weight at this position, which is on its way; 0 if there is
        none.
        """
        return self.on_their_way[number] if 0 <= number < len(self.on_their_way) else 0

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
        weight = isinstance(instruction, Adapt) and instruction.gathers_weight
        if weight and not joins(instruction):
            self.num_gathered += -1 if again else 1
        self._temporary_bytes = max(0, found.peak - sum(found.made))
        joined = self._joining_bytes(instruction)
        # While a weight is used, the next one is being gathered, on the way forward only.
        self.ledger.use(
            found.peak + joined + (0 if again else self._ahead(self.num_gathered)),
            _name(instruction),
        )
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
                self.gathered[value.name] = storage
            else:
                bound.append(storage)
        node = None
        if self.trains and any(form.requires_grad for form in found.results):
            # The runtime's hooks replace a gathered weight that autograd saves by a handle, which
            # gathers it again in backward: it is not held, but counts while that backward runs.
            whole = {} if again else {storage: name for name, storage in self.gathered.items()}
            gathered = dict.fromkeys(whole[numbers[n]] for n in found.saved if numbers[n] in whole)
            for name in gathered if keeps else ():
                self._asked[name] = self._asked.get(name, 0) + 1
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
                self._recompute(self.regions[node.region])
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
        self.release([*self._came.values()])
        self._came.clear()
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
        what came in is held, and so are the summands of a reduce-scatter: those that are sent, and
        those that arrive.
        """
        held = [self.ledger.hold(gradient[1]) for gradient in incoming if gradient is not None]
        self.differentiate(node, incoming, gradients, remaining)
        if adapter.step.backward == "reduce_scatter":
            held += [
                self.ledger.hold(self.ledger.new(self._whole_bytes(adapter), TEMPORARY))
                for _ in range(2)
            ]
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
        for weight in node.gathered:
            if weight not in self._came:
                self._arrive_again(weight)
        # Beside what the operator itself needs: the weight that its predecessor in the forward
        # needs next, and what summing a gradient takes.
        extra = (
            (self._ahead(self.num_gathered - 1) if node.gathered else 0)
            + self._cast_bytes(node)
            + self._joined_bytes(node)
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
        for weight in node.gathered:
            self._asked[weight] = self._asked.get(weight, 1) - 1
            if self._asked[weight] <= 0 and weight in self._came:
                self.ledger.release(self._came.pop(weight))
        for number in made:
            self.ledger.drop_unheld(number)
        for operand, form, storage in results:
            gradients[operand] = self._accumulated(gradients.get(operand), form, storage, name)
            remaining[operand] -= 1
            if operand in self.sources and remaining[operand] == 0:
                self.arrive(operand, *gradients.pop(operand))

    def _whole_bytes(self, adapter: Adapt) -> int:
        return local_bytes(adapter.step.after, adapter.of.dtype, self.footprints.rank.mesh)

    def _arrive_again(self, weight: str) -> None:
        """Hold a weight for the backward of its operator, and what comes in one collective with it
        and is asked for as well.
        """
        group: tuple[Adapt, ...] = (self._again[weight],)
        if weight in self._group_of:
            group = self._groups[self._group_of[weight]]
            # One collective brings the whole group, so its members are asked for once.
            self.num_gathered -= 1
        for adapter in group:
            name = adapter.result.name
            if name == weight or (self._asked.get(name, 0) > 0 and name not in self._came):
                storage = self.ledger.new(self._whole_bytes(adapter), ACTIVATION)
                self._came[name] = self.ledger.hold(storage)

    def _joining_bytes(self, instruction: Instruction) -> int:
        """The bytes that it takes to gather several activations in one collective, beyond those of
        one: what came for the others, while all are joined.
        """
        if not joins(instruction):
            return 0
        assert isinstance(instruction, Adapt)
        *others, last = self._together[instruction.result.name]
        # Weights arrive where they belong.
        if instruction.gathers_weight or instruction is not last:
            return 0
        return sum(map(self._whole_bytes, others))

    def _joined_bytes(self, node: Node) -> int:
        """The bytes that it takes to sum the gradients of several gathered values in one
        collective, beyond those of one: the others' rows and pieces, and all rows end to end.

        They are there from the first of the gathers whose backward runs, which is the last.
        """
        instruction = node.instruction
        if not joins(instruction):
            return 0
        assert isinstance(instruction, Adapt)
        group = self._together[instruction.result.name]
        summed = [adapter for adapter in group if adapter.of.takes_gradient]
        # The gradients wait for each other: the collective runs when the last of them is there.
        if instruction is not summed[-1] or instruction.step.backward != "reduce_scatter":
            return 0
        mesh = self.footprints.rank.mesh
        pieces = sum(local_bytes(a.step.before, a.of.dtype, mesh) for a in summed[:-1])
        wholes = [self._whole_bytes(adapter) for adapter in summed]
        # What one alone takes is counted where its adapter is. Of activations all whole gradients
        # are there in any case: only what is sent and what comes is there beside them.
        if not instruction.gathers_weight:
            return pieces + 2 * sum(wholes[:-1])
        # All whole gradients are there, their copies end to end beside them, and the pieces that
        # come out.
        return pieces + sum(wholes[:-1]) + sum(wholes)

    def _cast_bytes(self, node: Node) -> int:
        """The bytes that it takes to sum the gradient of a gathered weight in another dtype.

        These are a copy of the whole gradient in that dtype, and what the room for the sum and this
        rank's piece of it have more than in the weight's dtype.
        """
        if not (isinstance(node.instruction, Adapt) and node.instruction.gathers_weight):
            return 0
        weight = node.operands[0].form
        wide, narrow = self._summed_in(weight.dtype).itemsize, weight.dtype.itemsize
        if wide == narrow:
            return 0
        whole = (
            local_bytes(node.instruction.step.after, weight.dtype, self.footprints.rank.mesh)
            // narrow
        )
        # The whole gradient in the wide dtype, and what gradient and piece take more than in the
        # narrow one, in which they are counted elsewhere.
        return whole * wide + (whole + weight.num_bytes // narrow) * (wide - narrow)

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

    def _recompute(self, region: _Region) -> None:
        """Run a region again and hold what autograd saves in it. The run stops at the last
        instruction that saves anything, as torch's checkpoint does with early stop.
        """
        region.recomputed = True
        # The nodes of the first run, without saved tensors, get those of this run.
        by_instruction = {id(node.instruction): node for node in region.nodes}
        forwards = self._forwards(region)
        last = max((i for i, found in enumerate(forwards) if found.saved), default=-1)
        bound: list[int] = []
        for position, instruction in enumerate(region.instructions[: last + 1]):
            # ``again``: results are there already, only what autograd saves is new.
            node = self._run(instruction, bound, keeps=True, again=True)
            if node is not None:
                known = by_instruction[id(instruction)]
                known.saved, known.operands, known.gathered = node.saved, node.operands, ()
            self._drop(region.over.get(position, ()))
        self.release(bound)
        # Weights that were gathered for the first run alone.
        for name in list(self.gathered):
            self.ledger.release(self.gathered.pop(name))

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


def _gatherings(program: Program) -> list[tuple[Adapt, ...]]:
    """The gathers of weights, by the collectives in which they go."""
    return [
        gathers_at(program.body, position)
        for position, i in enumerate(program.body)
        if isinstance(i, Adapt) and i.gathers_weight and not i.joins
    ]


def _name(instruction: Instruction) -> str:
    if isinstance(instruction, Loop):
        return f"loop {instruction.axis}"
    return instruction.result.name if isinstance(instruction, Adapt) else instruction.original.name
