"""The memory of tensors that are gathered for an operator and let go after it.

Such a tensor is there from its gathering to its last use in the forward. Autograd does not keep it:
it comes once more for the backward of each operator that read it. While one is used, the next one
is on its way. Those that come in one collective come again in one. A recompute region that runs
again gathers in the order of its forward, and its last gather begins what backward needs next.

Example: two weights of 8 bytes, each used by one operator. While the first is used there are 16
bytes, as the second is on its way; while the second is used 8. In backward it is the other way
round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from shardwright.compiler.cost.fake.fake_rank import FakeRank
from shardwright.compiler.cost.local_calls import local_bytes
from shardwright.compiler.cost.memory.footprint import TensorForm
from shardwright.compiler.cost.memory.ledger import ACTIVATION, Ledger
from shardwright.compiler.ir.value import IRValue, ValueKind
from shardwright.compiler.plan.program import Adapt, Instruction, Program, gathers_at, joins

Direction = Literal["forward", "backward"]


@dataclass(eq=False)
class _Gathered:
    """What one collective gathered in the forward, in the recompute region of this index, if in
    any.
    """

    adapters: Sequence[Adapt]
    region: int | None


class GatheredTensors:
    """What of a program's gathered tensors is on ``rank``, while its walk goes on.

    ``whole``: the storages of those that are there in the forward, by name of the value.
    ``summed_in``: gives the dtype in which the gradient of a weight is summed, from that of the
    weight.
    """

    def __init__(
        self,
        program: Program,
        rank: FakeRank,
        ledger: Ledger,
        summed_in: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        self._rank = rank
        self._mesh, self._ledger, self._summed_in = rank.mesh, ledger, summed_in
        self.whole: dict[str, int] = {}
        # The gathers of one collective, by the names of their results.
        groups = [
            gathers_at(program.body, position)
            for position, i in enumerate(program.body)
            if isinstance(i, Adapt) and not i.joins
        ]
        self._together = {adapter.result.name: group for group in groups for adapter in group}
        # What backward gathers again, by name. An activation may be among it.
        self._again = {
            i.result.name: i for i in program.body if isinstance(i, Adapt) and i.gathers_again
        }
        # The bytes of each collective of weights, in their order. ``_passed`` counts how far
        # forward has come in that list.
        self._on_their_way = [
            self._whole_bytes(group) for group in groups if group[0].gathers_weight
        ]
        self._passed = 0
        # What forward has gathered, in order; the number in that of each collective, by the name of
        # its first result, and of those in each region. ``_regions``: those that backward still
        # comes to. ``_under_way``: what it has on its way, in bytes.
        self._made: list[_Gathered] = []
        self._number: dict[str, int] = {}
        self._inside: dict[int, list[int]] = {}
        self._regions: set[int] = set()
        self._under_way = 0
        # How many operators' backwards will still ask for each tensor, and the storages of those
        # that came for one of them and are held for the others.
        self._asked: dict[str, int] = {}
        self._came: dict[str, int] = {}

    def bytes_of(self, adapter: Adapt) -> int:
        """The bytes of a tensor when it is gathered."""
        return local_bytes(adapter.step.after, adapter.of.dtype, self._mesh)

    # ---------------------------------------------------------------------------------------------
    # forward

    def pass_by(self, instruction: Instruction, region: int | None) -> None:
        """Note that the forward runs an instruction, in the recompute region of this index."""
        if not isinstance(instruction, Adapt) or instruction.joins:
            return
        if instruction.gathers_weight or instruction.gathers_again:
            self._number[instruction.result.name] = number = len(self._made)
            self._made.append(_Gathered(self._together[instruction.result.name], region))
            # What is gathered along a further axis, or is no weight, is not begun ahead there.
            if region is not None and instruction.value.kind is ValueKind.PARAMETER:
                self._inside.setdefault(region, []).append(number)
        self._passed += instruction.gathers_weight

    def comes_to(self, region: int) -> None:
        """Note that backward will run a region again."""
        self._regions.add(region)

    def next_bytes(self) -> int:
        """The bytes of the weights on their way in the forward; 0 if there are none."""
        number = self._passed
        return self._on_their_way[number] if number < len(self._on_their_way) else 0

    def ask_for(self, names: Iterable[str]) -> None:
        """Note that the backward of an operator will need these."""
        for name in names:
            self._asked[name] = self._asked.get(name, 0) + 1

    def drop(self, values: Iterable[IRValue]) -> None:
        """Let go of those of these values that are there."""
        for value in values:
            if value.name in self.whole:
                self._ledger.release(self.whole.pop(value.name))

    def drop_all(self) -> None:
        """Let go of all that are there."""
        for storage in self.whole.values():
            self._ledger.release(storage)
        self.whole.clear()

    # ---------------------------------------------------------------------------------------------
    # backward

    def under_way_bytes(self) -> int:
        """The bytes that are on their way in the backward."""
        return self._under_way

    def run_again(self, instruction: Instruction, region: int) -> None:
        """Note that a backward runs an instruction of a region again."""
        inside = self._inside.get(region, [])
        number = (
            self._number.get(instruction.result.name) if isinstance(instruction, Adapt) else None
        )
        if number not in inside:
            return
        following = inside.index(number) + 1
        if following < len(inside):
            self._under_way = self._whole_bytes(self._made[inside[following]].adapters)
        else:
            self.has_run(region)

    def has_run(self, region: int) -> None:
        """Note that nothing more of a region is gathered."""
        self._regions.discard(region)
        if region in self._inside:
            self._begin_before(self._inside[region][0])

    def come_again(self, names: Sequence[str]) -> None:
        """Hold these for the backward of their operator, and with each what comes in the same
        collective and is asked for as well.
        """
        for name in names:
            if name in self._came:
                continue
            first = self._again[name]
            group = self._together[name] if first.gathers_weight else (first,)
            for adapter in group:
                other = adapter.result.name
                if other == name or (self._asked.get(other, 0) > 0 and other not in self._came):
                    storage = self._ledger.new(self.bytes_of(adapter), ACTIVATION)
                    self._came[other] = self._ledger.hold(storage)
            self._begin_before(self._number.get(group[0].result.name, 0))

    def _begin_before(self, number: int) -> None:
        """Begin with what backward needs next, of what forward gathered before this."""
        self._under_way = 0
        while number:
            number -= 1
            made = self._made[number]
            if made.region is None:
                needed = [a for a in made.adapters if self._asked.get(a.result.name, 0) > 0]
            elif made.region in self._regions and made.region in self._inside:
                needed = list(self._made[self._inside[made.region][0]].adapters)
            else:
                continue
            if needed:
                is_there = any(a.result.name in self._came for a in needed)
                self._under_way = 0 if is_there else self._whole_bytes(needed)
                return

    def _whole_bytes(self, adapters: Iterable[Adapt]) -> int:
        return sum(map(self.bytes_of, adapters))

    def let_go(self, names: Iterable[str]) -> None:
        """Note that the backward of their operator is over."""
        for name in names:
            self._asked[name] = self._asked.get(name, 1) - 1
            if self._asked[name] <= 0 and name in self._came:
                self._ledger.release(self._came.pop(name))

    def close(self) -> None:
        """Let go of all that came for the backward."""
        for storage in self._came.values():
            self._ledger.release(storage)
        self._came.clear()

    # ---------------------------------------------------------------------------------------------
    # what collectives need

    def joining_bytes(self, instruction: Instruction) -> int:
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
        return sum(map(self.bytes_of, others))

    def summing_bytes(self, instruction: Instruction, piece: TensorForm) -> int:
        """The bytes that it takes to sum the gradient of what an instruction gathered, of which
        the rank has ``piece``, beyond the gradients themselves; 0 if it gathers nothing.
        """
        if not isinstance(instruction, Adapt):
            return 0
        return self._joined_bytes(instruction) + self._cast_bytes(instruction, piece)

    def _joined_bytes(self, adapter: Adapt) -> int:
        """The bytes that it takes to sum the gradients of several gathered values in one
        collective, beyond those of one.

        They are there from the first of the gathers whose backward runs, which is the last.
        """
        if not joins(adapter):
            return 0
        group = self._together[adapter.result.name]
        summed = [adapter for adapter in group if adapter.of.takes_gradient]
        # The gradients wait for each other: the collective runs when the last of them is there.
        if adapter is not summed[-1] or adapter.step.backward != "reduce_scatter":
            return 0
        pieces = sum(local_bytes(a.step.before, a.of.dtype, self._mesh) for a in summed[:-1])
        wholes = [self.bytes_of(adapter) for adapter in summed]
        # All whole gradients are there in any case. What one alone takes is counted where its
        # adapter is.
        room = partial(self._rank.summing_bytes, adapter.step)
        alone = room(wholes[-1:])
        if adapter.gathers_weight:
            return pieces + room(wholes) - alone
        # Of activations the ranks' pieces are put into one tensor, which is sent.
        return pieces + sum(wholes[:-1]) + room([sum(wholes)]) - alone

    def _cast_bytes(self, adapter: Adapt, piece: TensorForm) -> int:
        """The bytes that it takes to sum the gradient of a gathered weight in another dtype.

        These are a copy of the whole gradient in that dtype, and what this rank's piece of the sum
        and the room for summing have more than in the weight's dtype.
        """
        if not adapter.gathers_weight:
            return 0
        wide, narrow = self._summed_in(piece.dtype).itemsize, piece.dtype.itemsize
        if wide == narrow:
            return 0
        whole = local_bytes(adapter.step.after, piece.dtype, self._mesh) // narrow
        # In the narrow dtype piece and room are counted elsewhere.
        room, counted = (
            self._rank.summing_bytes(adapter.step, [whole * size]) for size in (wide, narrow)
        )
        return whole * wide + piece.num_bytes // narrow * (wide - narrow) + room - counted

    def sent_bytes(self, adapter: Adapt, direction: Direction) -> int:
        """The bytes that a started reduce-scatter holds until it is waited for: a copy of what is
        summed, and what summing takes; 0 if an adapter does none in this direction.
        """
        step = adapter.step
        kind, whole = {
            "forward": (step.kind, step.before),
            "backward": (step.backward, step.after),
        }[direction]
        if kind != "reduce_scatter":
            return 0
        num_bytes = local_bytes(whole, adapter.of.dtype, self._mesh)
        evenly = self._rank.cuts_evenly(step)
        return num_bytes + self._rank.summing_bytes(step, [num_bytes], evenly=evenly)
