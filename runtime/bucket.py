"""Buckets: gradients that are summed over the same ranks, side by side in one buffer, so that one collective does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.communicator import Communicator, Work


@dataclass(frozen=True, slots=True)
class GradientSum:
    """The gradient of ``parameter`` is to be summed over the ranks of ``communicator``.

    ``num_elements``: of the largest piece that any rank holds of the tensor. Buckets are counted in it, so that all ranks
    make the same ones.
    """

    name: str
    parameter: nn.Parameter
    communicator: Communicator
    num_elements: int


class Bucket:
    """The gradients of ``members``, which agree in dtype and ranks. Groups of one rank need no buffer and no collective.

    Behind the gradients the buffer holds one flag per member: whether this rank used the parameter. Their sums tell whether
    any rank did, so that a parameter nobody used keeps the gradient ``None`` everywhere, as on one device.
    """

    def __init__(self, members: Sequence[GradientSum]) -> None:
        self.members = members
        self.communicator = members[0].communicator
        self.arrived: set[int] = set()  # members whose gradient the current backward has brought
        self.started = False
        self._buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self._unused: list[int] = []
        self._work: Work | None = None

    @property
    def is_local(self) -> bool:
        return self.communicator.size == 1

    @property
    def gradients(self) -> Tensor:
        """All gradients, flat [elements], without the flags."""
        buffer = self._allocated()
        return buffer[: buffer.numel() - len(self.members)]

    def take(self, index: int) -> None:
        """Move the gradient of one member into the buffer; ``parameter.grad`` becomes a view of it."""
        parameter = self.members[index].parameter
        gradient = parameter.grad
        if self.is_local or gradient is None:
            return
        self._allocated()
        view = self._views[index]
        if gradient is not view:
            view.copy_(gradient.detach())
            set_reduced(view, False)
            parameter.grad = view

    def start(self, before: Callable[[Tensor], None]) -> None:
        """Begin to sum. ``before`` is called with the flat gradients first."""
        self.started = True
        if self.is_local:
            return
        self._unused = []
        for index, member in enumerate(self.members):
            if member.parameter.grad is None:
                self._unused.append(index)
                self._allocated()
                self._views[index].zero_()
            else:
                self.take(index)
        buffer = self._allocated()
        flags = buffer[self.gradients.numel() :]
        flags.fill_(1)
        if self._unused:
            flags[self._unused] = 0
        before(self.gradients)
        self._work = self.communicator.all_reduce_async(buffer)

    def finish(self, divisor: int, after: Callable[[Tensor], None]) -> None:
        """Wait for the sum, divide it, and give parameters that only other ranks used their gradient."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if divisor > 1:
                self.gradients.div_(divisor)
            after(self.gradients)
        if self._unused:
            flags = self._allocated()[self.gradients.numel() :].tolist()
            for index in self._unused:
                if flags[index]:
                    self.members[index].parameter.grad = self._views[index]
            self._unused = []
        for member in self.members:
            if member.parameter.grad is not None:
                set_reduced(member.parameter.grad, True)

    @property
    def is_reduced(self) -> bool:
        """Whether the gradients have been summed and not cleared since."""
        return any(is_reduced(member.parameter.grad) for member in self.members)

    def _allocated(self) -> Tensor:
        """The buffer, made at first use and again when the parameters have moved to another device."""
        first = self.members[0].parameter
        if self._buffer is None or self._buffer.device != first.device:
            sizes = [member.parameter.numel() for member in self.members]
            self._buffer = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
            pieces = torch.split(self._buffer[: sum(sizes)], sizes)
            self._views = [piece.view(m.parameter.shape) for piece, m in zip(pieces, self.members, strict=True)]
        return self._buffer


# The mark lies on the gradient tensor itself, so that it goes away with it however a user clears gradients.
_REDUCED = "_shardwright_reduced"


def set_reduced(gradient: Tensor, value: bool) -> None:
    setattr(gradient, _REDUCED, value)


def is_reduced(gradient: Tensor | None) -> bool:
    """Whether a gradient is already the sum over all ranks."""
    return bool(getattr(gradient, _REDUCED, False))


def make_buckets(sums: Sequence[GradientSum], cap_bytes: float) -> list[Bucket]:
    """Pack gradients into buckets of at most ``cap_bytes`` (a larger gradient gets one of its own).

    ``sums`` is in the order in which backward is expected to bring the gradients; so are the buckets, by their last member.
    """
    filling: dict[tuple[Any, ...], tuple[list[int], float]] = {}
    packed: list[list[int]] = []
    for index, item in enumerate(sums):
        key = (item.communicator.ranks, item.parameter.dtype)
        num_bytes = item.num_elements * item.parameter.element_size()
        members, filled = filling.get(key, ([], 0.0))
        if not members or filled + num_bytes > cap_bytes:
            members, filled = [], 0.0
            packed.append(members)
        members.append(index)
        filling[key] = (members, filled + num_bytes)
    return [Bucket([sums[index] for index in members]) for members in sorted(packed, key=lambda members: members[-1])]
