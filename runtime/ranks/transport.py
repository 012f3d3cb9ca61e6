"""What a communicator runs on: process groups, threads of one process, or one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from shardwright.runtime.ranks.late import Waiting

ReduceOp = Literal["sum", "avg", "max", "min"]
"""How an all-reduce combines. ``"avg"`` is for floating dtypes."""


Shape = Sequence[int]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return once the result is there."""


class Transport(Protocol):
    """What moves the bytes of one group of at least two ranks. Tensors are contiguous and detached.

    Members are named by their index in the group; ``index`` is the caller's. A collective that
    returns a :class:`Work` is complete, and its results are there, once :meth:`finish` returns; one
    that returns ``None`` is complete already.
    """

    def finish(self, work: Work, what: Callable[[], Waiting]) -> None:
        """Wait for a collective under way. ``what`` says who waits in it and for what,
        if that takes long.
        """

    def all_reduce_(self, x: Tensor, op: ReduceOp) -> Work | None: ...

    def start_all_reduce_(self, x: Tensor, op: ReduceOp) -> Work: ...

    def all_gather(self, x: Tensor, result: Tensor) -> Work | None:
        """``x [n]`` of every member into the rows of ``result [size, n]``."""

    def start_all_gather(self, x: Tensor, result: Tensor) -> Work: ...

    def start_all_gathers(self, xs: list[Tensor], results: list[Tensor]) -> Work:
        """Several :meth:`start_all_gather` of one dtype as one collective."""

    def reduce_scatters(self, xs: list[Tensor], results: list[Tensor]) -> Work | None:
        """Several :meth:`reduce_scatter` of one dtype as one collective."""

    def reduce_scatter(self, x: Tensor, result: Tensor) -> Work | None:
        """The sum over the members of row ``index`` of their ``x [size, n]`` into ``result
        [n]``.
        """

    def start_reduce_scatter_(self, x: Tensor, sizes: list[int]) -> Work:
        """The sum over the members of chunk ``index`` of their 1-D ``x``, cut into ``sizes``, into
        that chunk.
        """

    def start_all_gather_(self, x: Tensor, sizes: list[int]) -> Work:
        """Chunk ``i`` of 1-D ``x``, cut into ``sizes``, from member ``i``."""

    def all_to_all(
        self, x: Tensor, send_sizes: list[int], result: Tensor, receive_sizes: list[int]
    ) -> Work | None:
        """Consecutive chunks of ``x`` along its first dim, one to each member; what comes in fills
        ``result`` by sender.

        ``x`` belongs to the transport: the caller does not change it afterwards.
        """

    def start_all_to_all(
        self, x: Tensor, send_sizes: list[int], result: Tensor, receive_sizes: list[int]
    ) -> Work: ...

    def broadcast_(self, x: Tensor, src_index: int) -> Work | None: ...

    def send(self, x: Tensor, dst_index: int) -> None: ...

    def receive_(self, x: Tensor, src_index: int) -> None: ...

    def barrier(self) -> Work | None: ...

    def peers(self) -> str:
        """How the other members are, for messages; empty where nothing is known."""
