"""The memory of one forward and backward of a program on one rank, by walking its instructions as
they run.

Storages live while something holds them:

- **variables** of the generated code, until the method ends in which they are bound: ``forward``,
  or that of a repeated block;
- **autograd**, from the forward of an operator to its backward, for what it saves (each storage
  once, views share);
- **gradients** on their way, from the operator that makes them to the one that uses them. They come
  in the reverse order of the forward, as the engine takes the latest node that is ready. A second
  gradient of a value is added in place where nothing else holds the first one and it is no view (of
  the two dims in which a product was computed, say);
- a **recompute region** holds its arguments; its first operator to need something computes the
  region again;
- with ZeRO-3 a **gathered weight** is there from its gathering to its last use in the method, and
  again while the backward of its operator runs; the next one is on its way meanwhile.

What an instruction makes, keeps and needs on the way is in its
:mod:`~shardwright.compiler.cost.memory.footprint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.memory.footprint import Footprints, Forward, TensorForm
from shardwright.compiler.cost.memory.ledger import Ledger
from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.program import Adapt, Compute, Instruction, Program
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
    """An instruction in the graph of autograd. ``saved``: the storages it holds."""

    instruction: Instruction
    operands: list[_Local]
    operand_names: list[str]
    result_names: list[str]
    saved: list[int]
    region: int | None = None
    gathered: int = 0  # bytes of weights that its backward gathers again


@dataclass(slots=True)
class _Region:
    """A part that is recomputed. ``arguments``: storages held until its backward is done. ``over``:
    by position, the gathered weights that it needs no longer.
    """

    instructions: tuple[Instruction, ...]
    arguments: list[int]
    over: Mapping[int, Sequence[IRValue]]
    nodes: list[Node] = field(default_factory=list)
    recomputed: bool = False


Arrive = Callable[[str, TensorForm, int], None]
"""Called with a source, its complete gradient and the storage of that, which the caller of it
releases.
"""


class BodyMemory:
    """One run of ``program``. ``sources``: the forms of its inputs, parameters, buffers and
    constants by value name, and the storages they lie in. ``arrive`` takes the gradients of
    sources. ``summed_in``: the dtype in which the gradient of a weight that is gathered is summed,
    by that of the weight.
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
        self.gathered: dict[
            str, int
        ] = {}  # the storages of weights that are whole now, by name of the value
        self.on_their_way = [
            local_bytes(i.step.after, i.of.dtype, footprints.rank.mesh)
            for i in _gatherings(program)
        ]
        self.num_gathered = 0
        self._views: set[int] = set()  # storages of gradients that are views

    # ---------------------------------------------------------------------------------------------
    # forward

    def forward(self) -> None:
        """Run the forward. After it, only the results and what autograd needs is held."""
        bound: list[int] = []
        items = group_blocks(self.program)
        results = [value for _, value in self.program.output.leaves() if isinstance(value, IRValue)]
        over = gathered_until(
            items, [*results, *(after for _, after in self.program.buffer_updates)]
        )
        for position, item in enumerate(items):
            if not isinstance(item, Run):
                bound += self._bind([item], over={0: over.get(position, [])})
                continue
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
        """Run instructions; the storages that their variables hold. ``over``: by position, weights
        to let go of.
        """
        bound: list[int] = []
        for position, instruction in enumerate(instructions):
            node = self._run(instruction, bound, keeps=region is None)
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
        """Bytes of the weight of this number, if there is one: it is on its way."""
        return self.on_their_way[number] if 0 <= number < len(self.on_their_way) else 0

    def _run(
        self, instruction: Instruction, bound: list[int], *, keeps: bool, again: bool = False
    ) -> Node | None:
        """Run one instruction: bind its results, and with ``keeps`` hold what autograd saves.
        ``again``: in a backward, where gathered weights are saved like anything else.
        """
        operands = [self.values[value.name] for value in reads(instruction)]
        found = self.footprints.forward(
            instruction, [local.form for local in operands], trains=self.trains
        )
        if not found.exact:
            self.inexact.add(_name(instruction))
        weight = isinstance(instruction, Adapt) and instruction.gathers_weight
        self.num_gathered += -1 if weight and again else weight
        self.ledger.use(
            found.peak + (0 if again else self._ahead(self.num_gathered)), _name(instruction)
        )
        numbers = [local.storage for local in operands] + [
            self.ledger.new(size, ACTIVATION) for size in found.made
        ]
        for value, form, number in zip(
            writes(instruction), found.results, found.storages, strict=True
        ):
            self.values[value.name] = _Local(form, numbers[number])
            storage = self.ledger.hold(numbers[number])
            if weight:
                self.gathered[value.name] = storage
            else:
                bound.append(storage)
        node = None
        if self.trains and any(form.requires_grad for form in found.results):
            whole = set() if again else set(self.gathered.values())
            gathered = {numbers[number] for number in found.saved} & whole
            saved = (
                [self.ledger.hold(numbers[n]) for n in found.saved if numbers[n] not in whole]
                if keeps
                else []
            )
            names = (
                [value.name for value in reads(instruction)],
                [value.name for value in writes(instruction)],
            )
            node = Node(
                instruction, operands, *names, saved, gathered=sum(map(self.ledger.size, gathered))
            )
        for number in numbers[len(operands) :]:
            self.ledger.drop_unheld(number)
        self.ledger.use(0, _name(instruction))
        return node

    # ---------------------------------------------------------------------------------------------
    # backward

    def backward(self, roots: Mapping[str, Gradient]) -> None:
        """Run the backward from the gradients of ``roots`` by value name, whose storages are held
        and pass to this.
        """
        gradients: dict[str, Gradient] = dict(roots)
        remaining = self.contributions(set(roots))
        kept: list[Node] = []
        for node in reversed(self.nodes):
            incoming = [gradients.pop(name, None) for name in node.result_names]
            if all(gradient is None for gradient in incoming):
                kept.append(node)
                continue
            if node.region is not None and not self.regions[node.region].recomputed:
                self._recompute(self.regions[node.region])
            self.differentiate(node, incoming, gradients, remaining)
            self.release(node.saved)
            node.saved = []
            if node.region is not None and node is self.regions[node.region].nodes[0]:
                self.release(self.regions[node.region].arguments)
                self.regions[node.region].arguments = []
        self.arrive_rest(gradients)
        for node in kept:
            self.release(node.saved)
        for region in self.regions:
            self.release(region.arguments)

    def arrive_rest(self, gradients: Mapping[str, Gradient]) -> None:
        """Hand out the gradients that no operator used: of inputs that are results too."""
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
        """Run the backward of one node. ``incoming``: the gradients of its results, which it uses
        up. ``gradients``: of values so far, by name; those of its operands are added.
        ``remaining``: how many more each value will be given. ``only``: the positions of the
        operands whose gradients are computed, if not of all.
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
        if node.gathered:
            self.num_gathered -= 1
        extra = (
            node.gathered
            + (self._ahead(self.num_gathered - 1) if node.gathered else 0)
            + self._cast_bytes(node)
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
        for number in made:
            self.ledger.drop_unheld(number)
        for operand, form, storage in results:
            gradients[operand] = self._accumulated(gradients.get(operand), form, storage, name)
            remaining[operand] -= 1
            if operand in self.sources and remaining[operand] == 0:
                self.arrive(operand, *gradients.pop(operand))

    def _cast_bytes(self, node: Node) -> int:
        """What it takes that the gradient of a gathered weight is summed in another dtype: a copy
        of all of it, and what the room for the sum and this rank's piece are larger.
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
        return whole * wide + (whole + weight.num_bytes // narrow) * (wide - narrow)

    def _accumulated(
        self, held: Gradient | None, form: TensorForm, storage: int, name: str
    ) -> Gradient:
        """The sum of two gradients of one value."""
        if held is None:
            return form, storage
        if self.ledger.holders(held[1]) > 1 or held[1] in self._views:
            total = self.ledger.hold(self.ledger.new(form.num_bytes, TEMPORARY))
            self.ledger.use(0, f"backward of {name}")
            self.ledger.release(held[1])
            held = form, total
        self.ledger.release(storage)
        return held

    def contributions(self, reached: set[str]) -> dict[str, int]:
        """How many gradients each value will be given."""
        counts: dict[str, int] = {}
        for node in reversed(self.nodes):
            if not reached.isdisjoint(node.result_names):
                for name, local in zip(node.operand_names, node.operands, strict=True):
                    if local.form.requires_grad:
                        reached.add(name)
                        counts[name] = counts.get(name, 0) + 1
        return counts

    def _recompute(self, region: _Region) -> None:
        """Run a region again up to its last instruction that keeps something, and hold what that
        is.
        """
        region.recomputed = True
        by_instruction = {id(node.instruction): node for node in region.nodes}
        forwards = self._forwards(region)
        last = max((i for i, found in enumerate(forwards) if found.saved), default=-1)
        bound: list[int] = []
        for position, instruction in enumerate(region.instructions[: last + 1]):
            node = self._run(instruction, bound, keeps=True, again=True)
            if node is not None:
                known = by_instruction[id(instruction)]
                known.saved, known.operands, known.gathered = node.saved, node.operands, 0
            self._drop(region.over.get(position, ()))
        self.release(bound)
        for name in list(self.gathered):
            self.ledger.release(self.gathered.pop(name))

    def _forwards(self, region: _Region) -> list[Forward]:
        return [
            self.footprints.forward(
                i, [self.values[value.name].form for value in reads(i)], trains=True
            )
            for i in region.instructions
        ]

    def release(self, storages: list[int]) -> None:
        """Let go of storages, and empty the list."""
        for storage in storages:
            self.ledger.release(storage)
        storages.clear()


def _gatherings(program: Program) -> list[Adapt]:
    return [i for i in program.body if isinstance(i, Adapt) and i.gathers_weight]


def _name(instruction: Instruction) -> str:
    return instruction.result.name if isinstance(instruction, Adapt) else _op_name(instruction)


def _op_name(instruction: Compute) -> str:
    return instruction.original.name
