"""Communicators: one group of ranks, seen from one of its members.

Everything generated code and the runtime send goes through this class, so that the same program
runs on process groups (:mod:`shardwright.runtime.ranks.process_group`) and on threads of one
process (:mod:`shardwright.runtime.ranks.threads`), and so that every call is counted. Members of a
group call its methods in the same order. Collectives return new tensors unless their name ends in
``_``; they record no autograd graph, :mod:`shardwright.runtime.adapters` puts them into autograd
functions.

Pieces of one tensor that lie on several ranks differ along one ``dim`` only; ``sizes`` lists their
lengths there by index in the group, uneven and empty ones included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.runtime.errors import ShardwrightError
from shardwright.runtime.ranks.counters import CommunicationCounters, Phase
from shardwright.runtime.ranks.failures import collective_failed, collective_waits
from shardwright.runtime.ranks.pending import (
    Averaging,
    Done,
    PendingPieces,
    PendingRows,
    PendingWholes,
    rows_as,
)
from shardwright.runtime.ranks.transport import ReduceOp, Shape, Transport, Work


class Communicator:
    """One group of ranks, seen from one member.

    ``ranks``: the members, as ranks of the world, ascending. ``size``: how many. ``index``: the
    caller's position among them.
    ``name``: what calls are counted under, as a rule a mesh axis. ``transport`` is ``None`` in a
    group of one, where every collective is a copy and nothing is counted.
    """

    def __init__(
        self,
        transport: Transport | None,
        ranks: tuple[int, ...],
        index: int,
        name: str,
        counters: CommunicationCounters,
    ) -> None:
        assert (transport is None) == (len(ranks) == 1)
        self.transport = transport
        self.ranks = ranks
        self.size = len(ranks)
        self.index = index
        self.name = name
        self.counters = counters

    def __deepcopy__(self, memo: object) -> Communicator:
        """Itself: a copy of a module talks over the same group."""
        return self

    def named(self, name: str) -> Communicator:
        """The group under another name, by which its messages are counted."""
        return Communicator(self.transport, self.ranks, self.index, name, self.counters)

    def all_reduce(self, x: Tensor, op: ReduceOp = "sum", *, phase: Phase = "forward") -> Tensor:
        """The elementwise sum (average, maximum, minimum) over the group, as a new contiguous
        tensor in the dtype of ``x``.
        """
        result = x.detach().clone(memory_format=torch.contiguous_format)
        self._all_reduce_(result, x, op, phase)
        return result

    def all_reduce_(self, x: Tensor, op: ReduceOp = "sum", *, phase: Phase = "forward") -> None:
        """:meth:`all_reduce` in place; ``x`` must be contiguous."""
        self._all_reduce_(x, x, op, phase)

    def _all_reduce_(self, x: Tensor, given: Tensor, op: ReduceOp, phase: Phase) -> None:
        """``given``: what ``x`` was made of."""
        if self.transport is not None:
            self._count_all_reduce(x, op, phase)
            # Threads and gloo know no average; sum and divide is what NCCL does too.
            self._call(
                "all_reduce", given, self.transport.all_reduce_, x, "sum" if op == "avg" else op
            )
            if op == "avg":
                x.div_(self.size)

    def all_reduce_async(
        self, x: Tensor, op: ReduceOp = "sum", *, phase: Phase = "gradients"
    ) -> Work:
        """Begin to reduce contiguous ``x`` in place; it must not be touched until ``wait()`` of the
        result returns.
        """
        if self.transport is None:
            return Done()
        self._count_all_reduce(x, op, phase)
        work = self._start(
            "all_reduce", x, self.transport.start_all_reduce_, x, "sum" if op == "avg" else op
        )
        return Averaging(work, x, self.size) if op == "avg" else work

    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        phase: Phase = "forward",
    ) -> list[Tensor]:
        """Everyone's piece, by index. ``sizes``: their lengths along ``dim`` (default: all as long
        as ``x``).
        """
        pending, flat = self._pending_pieces(x, dim, sizes, phase)
        if self.transport is not None:
            self._call("all_gather", x, self.transport.all_gather, flat, pending.rows)
        return pending.wait()

    def all_gather_async(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        phase: Phase = "forward",
    ) -> PendingPieces:
        """Begin an :meth:`all_gather`; ``x`` must not be changed until ``wait()`` of the result
        returns.
        """
        pending, flat = self._pending_pieces(x, dim, sizes, phase)
        if self.transport is not None:
            pending.work = self._start(
                "all_gather", x, self.transport.start_all_gather, flat, pending.rows
            )
        return pending

    def all_gather_together_async(
        self, xs: Sequence[Tensor], *, phase: Phase = "forward"
    ) -> PendingWholes:
        """Begin to gather several tensors of one dtype in one collective. Each has the same shape
        on all members, and is joined along its first dim without a copy. None of them may be
        changed until ``wait()`` of the result returns.
        """
        assert self.transport is not None, "a group of one has nothing to gather"
        given = [x.detach().contiguous() for x in xs]
        total = sum(x.numel() for x in given)
        self._count(phase, "all_gather", given[0], total * self.size, total * (self.size - 1))
        wholes = [x.new_empty(_with_length(x, 0, x.shape[0] * self.size)) for x in given]
        rows = [whole.view(self.size, -1) for whole in wholes]
        flat = [x.view(-1) for x in given]
        work = self._start("all_gather", xs[0], self.transport.start_all_gathers, flat, rows)
        return PendingWholes(wholes, work)

    def _pending_pieces(
        self, x: Tensor, dim: int, sizes: Sequence[int] | None, phase: Phase
    ) -> tuple[PendingPieces, Tensor]:
        """Room for the pieces of all members, and what this one gives. The call is counted."""
        # Without sizes all pieces are alike.
        if sizes is None:
            sizes = [x.shape[dim]] * self.size
        assert len(sizes) == self.size and sizes[self.index] == x.shape[dim], (
            f"member {self.index} of {self.name} holds {x.shape[dim]} along dim {dim}, but "
            f"the sizes are {list(sizes)}"
        )
        if self.transport is None:
            return PendingPieces(x.detach().reshape(1, -1).clone(), [tuple(x.shape)], dim), x
        shapes = [_with_length(x, dim, size) for size in sizes]
        # Pieces are padded to the longest one, as a gather moves equal rows.
        lengths = [math.prod(shape) for shape in shapes]
        self._count(phase, "all_gather", x, sum(lengths), sum(lengths) - x.numel())
        return PendingPieces(x.new_empty(self.size, max(lengths)), shapes, dim), _padded(
            x.detach(), max(lengths)
        )

    def all_gather_cat(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        phase: Phase = "forward",
    ) -> Tensor:
        """:meth:`all_gather` with the pieces joined along ``dim``; they are copied only where they
        do not lie end to end.
        """
        end_to_end = math.prod(x.shape[:dim]) == 1 and (sizes is None or len(set(sizes)) == 1)
        if self.transport is None or not end_to_end:
            return torch.cat(self.all_gather(x, dim, sizes, phase=phase), dim)
        self._count(phase, "all_gather", x, x.numel() * self.size, x.numel() * (self.size - 1))
        whole = x.new_empty(_with_length(x, dim, x.shape[dim] * self.size))
        flat, rows = x.detach().reshape(-1).contiguous(), whole.view(self.size, x.numel())
        self._call("all_gather", x, self.transport.all_gather, flat, rows)
        return whole

    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        phase: Phase = "forward",
    ) -> Tensor:
        """The caller's piece along ``dim`` of the sum over the group. ``sizes``: the pieces'
        lengths (default: equal).
        """
        if sizes is None:
            assert x.shape[dim] % self.size == 0, (
                f"{x.shape[dim]} does not divide into {self.size} equal pieces"
            )
            sizes = [x.shape[dim] // self.size] * self.size
        # Pieces lie end to end: no copy is needed to make rows of them.
        end_to_end = math.prod(x.shape[:dim]) == 1 and len(set(sizes)) == 1 and x.is_contiguous()
        if self.transport is not None and end_to_end:
            self._count(
                phase, "reduce_scatter", x, x.numel(), x.numel() // self.size * (self.size - 1)
            )
            result = x.new_empty(_with_length(x, dim, sizes[0]))
            # ``[size, elements of a piece]``
            rows = x.detach().view(self.size, result.numel())
            self._call("reduce_scatter", x, self.transport.reduce_scatter, rows, result.view(-1))
            return result
        return self.reduce_scatter_pieces(torch.split(x, list(sizes), dim), phase=phase)

    def reduce_scatter_together(
        self, xs: Sequence[Tensor], *, phase: Phase = "forward"
    ) -> list[Tensor]:
        """The caller's pieces along the first dims of the sums over the group of several tensors of
        one dtype, in one collective. The first dims divide evenly.
        """
        assert self.transport is not None, "a group of one has nothing to sum"
        given = [x.detach().contiguous() for x in xs]
        assert all(x.shape[0] % self.size == 0 for x in given), "pieces of one length"
        total = sum(x.numel() for x in given)
        # A piece of the sum takes a summand from each of the others.
        received = total // self.size * (self.size - 1)
        self._count(phase, "reduce_scatter", given[0], total, received)
        pieces = [x.new_empty(_with_length(x, 0, x.shape[0] // self.size)) for x in given]
        rows = [x.view(self.size, -1) for x in given]
        flat = [piece.view(-1) for piece in pieces]
        self._call("reduce_scatter", xs[0], self.transport.reduce_scatters, rows, flat)
        return pieces

    def reduce_scatter_pieces(
        self, pieces: Sequence[Tensor], *, phase: Phase = "forward"
    ) -> Tensor:
        """The sum over the group of everyone's ``pieces[index]``, where ``pieces`` has one tensor
        per member.
        """
        mine = pieces[self.index]
        if self.transport is None:
            return mine.detach().clone(memory_format=torch.contiguous_format)
        lengths = [piece.numel() for piece in pieces]
        rows = mine.new_empty(self.size, max(lengths))
        for row, piece in zip(rows, pieces, strict=True):
            row[: piece.numel()].view(piece.shape).copy_(piece.detach())
        return self.reduce_scatter_rows(rows, lengths, phase=phase).view(mine.shape)

    def reduce_scatter_rows(
        self, rows: Tensor, lengths: Sequence[int], *, phase: Phase = "forward"
    ) -> Tensor:
        """The sum over the group of everyone's row ``index`` of ``rows [size, longest]``, of which
        the first ``lengths[index]`` elements are meant.
        """
        assert self.transport is not None, "a group of one has nothing to sum"
        mine = lengths[self.index]
        self._count(phase, "reduce_scatter", rows, sum(lengths), (self.size - 1) * mine)
        # What stands behind the shorter ones is summed, and cut off.
        result = rows.new_empty(rows.shape[1])
        self._call("reduce_scatter", rows, self.transport.reduce_scatter, rows, result)
        return result[:mine]

    def reduce_scatter_async_(
        self, x: Tensor, sizes: Sequence[int], *, phase: Phase = "gradients"
    ) -> Work:
        """Begin to sum 1-D contiguous ``x [sum(sizes)]`` over the group; the caller's chunk of it
        becomes that of the sum.

        The other chunks are undefined then. ``x`` must not be touched until ``wait()`` of the
        result returns.
        """
        assert x.is_contiguous() and x.shape == (sum(sizes),), (
            f"{tuple(x.shape)} is not cut into {list(sizes)}"
        )
        if self.transport is None:
            return Done()
        self._count(phase, "reduce_scatter", x, x.numel(), sizes[self.index] * (self.size - 1))
        return self._start(
            "reduce_scatter", x, self.transport.start_reduce_scatter_, x, list(sizes)
        )

    def all_gather_async_(
        self, x: Tensor, sizes: Sequence[int], *, phase: Phase = "gradients"
    ) -> Work:
        """Begin to fill 1-D contiguous ``x [sum(sizes)]``: chunk ``i`` is that of member ``i``, the
        caller's is there already.

        ``x`` must not be touched until ``wait()`` of the result returns.
        """
        assert x.is_contiguous() and x.shape == (sum(sizes),), (
            f"{tuple(x.shape)} is not cut into {list(sizes)}"
        )
        if self.transport is None:
            return Done()
        self._count(phase, "all_gather", x, x.numel(), x.numel() - sizes[self.index])
        return self._start("all_gather", x, self.transport.start_all_gather_, x, list(sizes))

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Shape], *, phase: Phase = "forward"
    ) -> list[Tensor]:
        """Send ``pieces[i]`` to member ``i``; item ``i`` of the result came from it and has
        ``shapes[i]``.
        """
        if self.transport is None:
            return [pieces[0].detach().clone(memory_format=torch.contiguous_format)]
        # In elements, for each member.
        send_sizes, receive_sizes = (
            [piece.numel() for piece in pieces],
            [math.prod(shape) for shape in shapes],
        )
        self._count(
            phase,
            "all_to_all",
            pieces[0],
            sum(send_sizes),
            sum(receive_sizes) - receive_sizes[self.index],
        )
        # One buffer with the pieces end to end, as the transport wants them.
        sent, result = pieces[0].new_empty(sum(send_sizes)), pieces[0].new_empty(sum(receive_sizes))
        for chunk, piece in zip(sent.split_with_sizes(send_sizes), pieces, strict=True):
            chunk.view(piece.shape).copy_(piece.detach())
        self._call(
            "all_to_all",
            pieces[0],
            self.transport.all_to_all,
            sent,
            send_sizes,
            result,
            receive_sizes,
        )
        # Equal pieces are views of one tensor.
        if len(set(map(tuple, shapes))) == 1:
            return rows_as(result.view(self.size, receive_sizes[0]), shapes[0])
        return [
            chunk.view(tuple(shape))
            for chunk, shape in zip(result.split_with_sizes(receive_sizes), shapes, strict=True)
        ]

    def all_to_all_rows(
        self, x: Tensor, send: list[int], receive: list[int], *, phase: Phase = "forward"
    ) -> Tensor:
        """:meth:`all_to_all` of rows that lie end to end: ``send[i]`` rows of ``x`` go to member
        ``i``, and ``receive[i]`` rows of the result come from it. ``x`` must not be changed
        afterwards.
        """
        if self.transport is None:
            return x.detach().clone(memory_format=torch.contiguous_format)
        given, result = self._rows(x, receive, phase)
        self._call("all_to_all", x, self.transport.all_to_all, given, send, result, receive)
        return result

    def all_to_all_rows_async(
        self, x: Tensor, send: list[int], receive: list[int], *, phase: Phase = "forward"
    ) -> PendingRows:
        """Begin an :meth:`all_to_all_rows`; ``x`` must not be changed any more."""
        if self.transport is None:
            return PendingRows(x.detach().clone(memory_format=torch.contiguous_format))
        given, result = self._rows(x, receive, phase)
        begin = self.transport.start_all_to_all
        work = self._start("all_to_all", x, begin, given, send, result, receive)
        return PendingRows(result, work)

    def _rows(self, x: Tensor, receive: Sequence[int], phase: Phase) -> tuple[Tensor, Tensor]:
        """What this member gives of rows ``x``, and room for those that come. The call is
        counted.
        """
        num_rows, row = sum(receive), x.shape[1:]
        # A rank sends nothing to itself.
        received = (num_rows - receive[self.index]) * math.prod(row)
        self._count(phase, "all_to_all", x, x.numel(), received)
        given = x.detach() if x.requires_grad else x
        return given.contiguous(), x.new_empty(num_rows, *row)

    def broadcast(self, x: Tensor, src_index: int, *, phase: Phase = "setup") -> Tensor:
        """The ``x`` of member ``src_index``, as a new tensor. On the others ``x`` tells shape and
        dtype only.
        """
        result = x.detach().clone(memory_format=torch.contiguous_format)
        self.broadcast_(result, src_index, phase=phase)
        return result

    def broadcast_(self, x: Tensor, src_index: int, *, phase: Phase = "setup") -> None:
        """:meth:`broadcast` in place; ``x`` must be contiguous."""
        if self.transport is not None:
            assert x.is_contiguous(), "a collective in place needs a contiguous tensor"
            self._count(
                phase, "broadcast", x, x.numel(), 0 if src_index == self.index else x.numel()
            )
            self._call("broadcast", x, self.transport.broadcast_, x, src_index)

    def send(self, x: Tensor, dst_index: int, *, phase: Phase = "forward") -> None:
        """Send ``x`` to another member, which must :meth:`receive` it. May return before it
        does.
        """
        assert self.transport is not None and dst_index != self.index, "nobody sends to itself"
        self._count(phase, "send", x, x.numel(), 0)
        self._call("send", x, self.transport.send, x.detach().contiguous(), dst_index)

    def receive(
        self,
        shape: Shape,
        dtype: torch.dtype,
        src_index: int,
        *,
        device: torch.device | str = "cpu",
        phase: Phase = "forward",
    ) -> Tensor:
        """The next tensor that another member sent to this one."""
        assert self.transport is not None and src_index != self.index, "nobody receives from itself"
        result = torch.empty(tuple(shape), dtype=dtype, device=device)
        self._count(phase, "receive", result, result.numel(), result.numel())
        self._call("receive", result, self.transport.receive_, result, src_index)
        return result

    def barrier(self) -> None:
        """Return when every member has called it."""
        if self.transport is not None:
            self._call("barrier", None, self.transport.barrier)

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, index {self.index} of ranks {list(self.ranks)})"

    # What a failure is called is worked out when there is one: nothing is kept for it.
    # (torch.compile follows these too.)

    def _call(
        self, collective: str, x: Tensor | None, function: Callable[..., Work | None], *args: Any
    ) -> None:
        """Make a call of the transport. ``x``: what this rank gives, as the caller knows it."""
        try:
            work = function(*args)
            if work is not None:  # never where torch.compile traces: what is called waits there
                started = time.perf_counter()
                self._finish(work, collective, x)
                self.counters.waited_s += time.perf_counter() - started
        except RuntimeError as error:
            raise self.failure(collective, x, error) from error

    def _start(self, collective: str, x: Tensor, function: Callable[..., Work], *args: Any) -> Work:
        """Make a call of the transport that goes on until somebody waits for it."""
        try:
            return _UnderWay(function(*args), self, collective)
        except RuntimeError as error:
            raise self.failure(collective, x, error) from error

    def _finish(self, work: Work, collective: str, x: Tensor | None) -> None:
        assert self.transport is not None
        self.transport.finish(
            work, lambda: collective_waits(collective, self.name, *self._this_and_others(), x)
        )

    def _this_and_others(self) -> tuple[int, list[int]]:
        rank = self.ranks[self.index]
        return rank, [other for other in self.ranks if other != rank]

    def failure(self, collective: str, x: Tensor | None, error: RuntimeError) -> Exception:
        """What to raise for an error of the transport: who waited for whom in what, unless it says
        so itself.
        """
        if isinstance(error, ShardwrightError | torch.OutOfMemoryError) or self.transport is None:
            return error
        return collective_failed(
            collective, self.name, *self._this_and_others(), x, error, self.transport.peers()
        )

    def _count_all_reduce(self, x: Tensor, op: ReduceOp, phase: Phase) -> None:
        assert x.is_contiguous(), "a collective in place needs a contiguous tensor"
        assert op != "avg" or x.is_floating_point(), f"no average of {x.dtype}"
        self._count(phase, "all_reduce", x, x.numel(), 2 * (self.size - 1) / self.size * x.numel())

    def _count(
        self, phase: Phase, collective: str, x: Tensor, elements: int, received: float
    ) -> None:
        # torch.compile would trace the count once for many runs, or break the graph over it.
        if not torch.compiler.is_compiling():
            self.counters.add(phase, collective, self.name, elements, x.element_size(), received)


class _UnderWay:
    """A collective that goes on until somebody waits for it."""

    __slots__ = ("_collective", "_communicator", "_work")

    def __init__(self, work: Work, communicator: Communicator, collective: str) -> None:
        self._work, self._communicator, self._collective = work, communicator, collective

    def wait(self) -> None:
        communicator = self._communicator
        started = 0.0 if torch.compiler.is_compiling() else time.perf_counter()
        try:
            communicator._finish(self._work, self._collective, None)
        except RuntimeError as error:
            raise communicator.failure(self._collective, None, error) from error
        if started:
            communicator.counters.waited_s += time.perf_counter() - started


def _with_length(x: Tensor, dim: int, length: int) -> tuple[int, ...]:
    """The shape of ``x`` with another length along ``dim``."""
    return (*x.shape[:dim], length, *x.shape[dim + 1 :])


def _padded(x: Tensor, length: int) -> Tensor:
    """``x`` flat and contiguous, with undefined elements appended up to ``length``."""
    if x.numel() == length:
        return x.reshape(-1).contiguous()  # every second element of a row is a view too
    result = x.new_empty(length)
    result[: x.numel()].view(x.shape).copy_(x)
    return result
