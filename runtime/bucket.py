"""Buckets: gradients that are summed over the same ranks, side by side in one buffer, so that one
collective does it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.runtime.dealing import Entry, deal_buckets
from shardwright.runtime.layout import Layout
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.failures import concerning, listed
from shardwright.runtime.ranks.transport import Work

DtypeRule = Callable[[torch.dtype], torch.dtype]

Named = tuple[str, Tensor]
"""The name of a parameter, and a tensor whose ``grad`` is what this rank has of its gradient, or a
part of that.
"""


@dataclass(frozen=True, slots=True)
class GradientSum:
    """The gradient of ``parameter`` is to be summed over the ranks of ``communicator``, which all
    hold copies of it.

    ``num_elements``: of the largest piece that any rank holds of the tensor. Buckets are counted in
    it, so that all ranks make the same ones. ``layout``: of the whole tensor. ``is_counted``: this
    rank counts its piece where every distinct element is counted once. ``is_shared``: several
    pipeline stages hold the parameter.
    """

    name: str
    parameter: nn.Parameter
    communicator: Communicator
    num_elements: int
    layout: Layout
    is_counted: bool = True
    is_shared: bool = False


class Bucket:
    """The gradients of ``members``, which agree in dtype and ranks. Groups of one rank need no
    buffer and no collective: they are local.

    Behind the gradients the buffer holds one flag per member: whether this rank used the parameter.
    Their sums tell whether any rank did, so that a parameter nobody used keeps the gradient
    ``None`` everywhere, as on one device.

    ``dtype``: of the buffer. ``length``: of the part of it that is reduced with the gradients,
    without flags.
    """

    def __init__(self, members: Sequence[GradientSum]) -> None:
        self.members = members
        self.communicator = members[0].communicator
        self.dtype = members[0].parameter.dtype
        self.sizes = [member.parameter.numel() for member in members]
        self.num_elements = self.length = sum(self.sizes)
        self.is_local = self.communicator.size == 1
        self.arrived: set[int] = set()  # members whose gradient the current backward has brought
        self.started = False
        self._buffer: Tensor | None = None
        # Views of the buffer: the gradients, those of each member, and the flags behind them.
        self._flat: Tensor
        self._views: list[Tensor]
        self._flags: Tensor
        self._drop_buffer()
        self._unused: list[int] = []
        self._works: list[Work] = []
        for member in members:
            hold_gradients_in(member.parameter, self.dtype)

    @property
    def parameters(self) -> list[Named]:
        """The parameters of the members, by name."""
        return [(member.name, member.parameter) for member in self.members]

    @property
    def holders(self) -> list[Named]:
        """Tensors whose ``grad``, together, are the reduced gradients, each element once."""
        return self.parameters

    @property
    def counted(self) -> list[Named]:
        """The holders that this rank counts, when every distinct element is to be counted once."""
        return [(member.name, member.parameter) for member in self.members if member.is_counted]

    @property
    def leaves_gradients(self) -> bool:
        """Whether a parameter has its gradient as ``grad`` once that is summed."""
        return True

    @property
    def gradients(self) -> Tensor:
        """All gradients, flat [elements], without the flags."""
        self._allocated()
        return self._flat

    def take(self, index: int) -> None:
        """Called when a member got a gradient, unless the bucket is local: move it into the buffer;
        ``parameter.grad`` becomes a view of it.
        """
        self._pack(index)

    def _pack(self, index: int) -> None:
        parameter = self.members[index].parameter
        gradient = parameter.grad
        assert gradient is not None
        if self._buffer is None or self._buffer.device != gradient.device:
            self._allocated()
        view = self._views[index]
        # Backward accumulates into the view if it is there already, as in the second microbatch.
        if gradient is not view:
            view.copy_(dense(gradient.detach() if gradient.requires_grad else gradient))
            set_reduced(view, False)
            # What the user reads and clips is now the buffer itself, and the gradient that backward
            # made is freed.
            parameter.grad = view

    def start(self, before: Callable[[Tensor], None]) -> None:
        """Begin to sum. ``before`` is called with the flat gradients first."""
        self.started = True
        # Nobody else holds these parameters.
        if self.is_local:
            return
        self._unused = []
        buffer = self._allocated()
        # Every rank sums the whole bucket, so what got no gradient here counts as zero.
        for index, member in enumerate(self.members):
            gradient, view = member.parameter.grad, self._views[index]
            if gradient is None:
                self._unused.append(index)
                view.zero_()
            elif gradient is not view:
                self._pack(index)
        # One flag for each member behind the gradients: did any rank use it?
        flags = self._flags
        flags.fill_(1)
        if self._unused:
            flags[self._unused] = 0
        before(self.gradients)
        with concerning(self._subject):
            self._works = self._launch(buffer)

    def _launch(self, buffer: Tensor) -> list[Work]:
        return [self.communicator.all_reduce_async(buffer)]

    def wait(self) -> None:
        """Return when nothing is under way any more."""
        if self._works:
            with concerning(self._subject):
                for work in self._works:
                    work.wait()
        self._works = []

    def _subject(self) -> str:
        """What the collectives are for, in messages."""
        return f"reducing the gradients of {listed([member.name for member in self.members])}"

    def end_round(self) -> None:
        """Reduce what one of several backward passes has brought; only buckets that free gradients
        have anything to do.
        """

    def finish(self, divisor: int, after: Callable[[Tensor], None]) -> None:
        """Wait for the sum, divide it, and give parameters that only other ranks used their
        gradient.
        """
        if self._works:
            self.wait()
            if divisor > 1:
                self.gradients.div_(divisor)
            after(self.gradients)
        # Stored in pieces over all units: backward has brought the sum.
        elif self.is_local and divisor > 1:
            for member in self.members:
                if member.parameter.grad is not None:
                    member.parameter.grad.detach().div_(divisor)
        if self._unused:
            for index in self._used_elsewhere():
                self.members[index].parameter.grad = self._views[index]
            self._unused = []
        for member in self.members:
            gradient = member.parameter.grad
            if gradient is not None:
                set_reduced(gradient, True)

    def clear(self, set_to_none: bool) -> None:
        """Forget the gradients."""
        for member in self.members:
            gradient = member.parameter.grad
            if gradient is not None:
                if set_to_none:
                    member.parameter.grad = None
                else:
                    gradient.detach().zero_()
                    set_reduced(gradient, False)

    @property
    def is_reduced(self) -> bool:
        """Whether the gradients have been summed and not cleared since."""
        return any(
            self.has_reduced(index, member.parameter.grad)
            for index, member in enumerate(self.members)
        )

    def has_reduced(self, index: int, gradient: Tensor | None) -> bool:
        """Whether the gradient of one member has been summed and not cleared since. ``gradient``:
        that of its parameter.
        """
        return getattr(gradient, _REDUCED, False)

    def _used_elsewhere(self) -> list[int]:
        """The members that this rank did not use, and another one did."""
        if not self._unused:
            return []
        # The sum over ranks of 1 for "used": not zero if any rank used it.
        self._allocated()
        flags = self._flags.tolist()
        return [index for index in self._unused if flags[index]]

    def _allocated(self) -> Tensor:
        """The buffer, made at first use and again when the parameters have moved to another
        device.
        """
        device = self.members[0].parameter.device
        if self._buffer is None or self._buffer.device != device:
            self._buffer = self._new_buffer(self.length + len(self.members), device)
            self._flat = self._buffer[: self.num_elements]
            self._flags = self._buffer[self.length :]
            pieces = torch.split(self._flat, self.sizes)
            self._views = [
                piece.view(m.parameter.shape) for piece, m in zip(pieces, self.members, strict=True)
            ]
        return self._buffer

    def _drop_buffer(self) -> None:
        self._buffer, self._views = None, []
        self._flat = self._flags = torch.empty(0)

    def _new_buffer(self, length: int, device: torch.device) -> Tensor:
        return torch.zeros(length, dtype=self.dtype, device=device)


def dense(gradient: Tensor) -> Tensor:
    """The gradient with an element for each one of the parameter. ``nn.Embedding(sparse=True)``
    makes sparse gradients, which a buffer cannot hold.
    """
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def hold_gradients_in(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Let backward accumulate the gradient of ``parameter`` in ``dtype``. A gradient of another
    dtype is dropped.
    """
    if parameter.grad_dtype != dtype:
        parameter.grad = None
        parameter.grad_dtype = dtype


# The mark lies on the gradient tensor itself, so that it goes away with it however a user clears
# gradients.
_REDUCED = "_shardwright_reduced"


def set_reduced(gradient: Tensor, value: bool) -> None:
    """Note whether a gradient is the sum over all ranks."""
    setattr(gradient, _REDUCED, value)


def is_reduced(gradient: Tensor | None) -> bool:
    """Whether a gradient is already the sum over all ranks."""
    return bool(getattr(gradient, _REDUCED, False))


def pack(
    sums: Sequence[GradientSum],
    cap_bytes: float,
    dtype_of: DtypeRule = lambda dtype: dtype,
    apart: Collection[str] = (),
) -> list[list[GradientSum]]:
    """Deal gradients into buckets of at most ``cap_bytes`` (a larger gradient gets one of its own).

    ``sums`` is in the order in which backward is expected to bring the gradients; so are the
    buckets, by their last member.
    ``dtype_of``: from the dtype of a parameter to that in which its gradient is held. ``apart``:
    names of parameters that share no bucket with others.
    """
    entries = []
    for item in sums:
        dtype = item.parameter.dtype
        num_bytes = item.num_elements * dtype_of(dtype).itemsize
        entries.append(Entry(item.communicator.ranks, dtype, num_bytes, item.name in apart))
    return [[sums[index] for index in members] for members in deal_buckets(entries, cap_bytes)]
