"""A process group for fake CUDA tensors that does what NCCL's does, and refuses what NCCL's
refuses.

:func:`start` makes it the backend ``nccl_stand_in``. Values travel through gloo. What is NCCL's:

- tensors are contiguous, on the CUDA device of this rank, and of a type that NCCL has; no tags, no
  object of the CPU;
- the calls of a communicator run one after the other, in the order in which they were made,
  whatever each does;
- a communicator is made in its first call, in which the host waits for all members, asynchronous or
  not; a send or receive makes one for the two ranks that it is between (so it is without
  ``device_id`` in ``init_process_group``);
- results are there after ``wait()``, not before: until then they are not numbers here. What is sent
  must not change until then: here that is an error, on a GPU a race.

Taken from torch's ``ProcessGroupNCCL.cpp`` (``pointToPoint``, ``initNCCLComm``,
``getNcclDataType``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fake_cuda import install
from torch import Tensor

BACKEND = "nccl_stand_in"

TIMEOUT = timedelta(minutes=10)
"""How long a call waits for the other ranks."""

_floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = frozenset({*_floats, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool})
"""What NCCL sends, as torch tells it; bool as bytes."""


def start(local_rank: int) -> str:
    """Give this process fake CUDA devices, of which it uses ``local_rank``, and return the backend
    to initialise.
    """
    install()
    torch.cuda.set_device(local_rank)
    dist.Backend.register_backend(BACKEND, _make, devices=["cuda"])
    return BACKEND


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StandIn:
    return StandIn(store, rank, size, min(timeout, TIMEOUT))


class _Asynchronous:
    """The options of a call that gives back its work at once."""

    asyncOp = True


class StandIn(dist.ProcessGroup):
    """See the top of the file."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._timeout = timeout
        self._gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("values", store), rank, size, timeout
        )
        self._queues: dict[str, ThreadPoolExecutor] = {}

    def getBackendName(self) -> str:
        return BACKEND

    # What torch.distributed calls

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        (x,) = tensors
        if x.dtype == torch.bool and opts.reduceOp == dist.ReduceOp.AVG:
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        return self._collective(
            "all_reduce", [x], [x], lambda given, made: self._gloo.allreduce([made[0]], opts), opts
        )

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        (x,) = tensors
        given = [x] if opts.rootRank == self.rank() else []
        return self._collective(
            "broadcast", given, [x], lambda _, made: self._gloo.broadcast([made[0]], opts), opts
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        if output.numel() != input.numel() * self.size() or output.dtype != input.dtype:
            raise ValueError(
                "output tensor size must be equal to world_size times input tensor size"
            )
        return self._collective(
            "all_gather",
            [input],
            [output],
            lambda given, made: self._gloo._allgather_base(made[0], given[0], opts),
            opts,
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        if input.numel() != output.numel() * self.size() or output.dtype != input.dtype:
            raise ValueError("input tensor must be the same size as output size times world size")
        return self._collective(
            "reduce_scatter",
            [input],
            [output],
            lambda given, made: self._gloo._reduce_scatter_base(made[0], given[0], opts),
            opts,
        )

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        return self._coalesced("all_gather", self._gloo._allgather_base, outputs, inputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        return self._coalesced("reduce_scatter", self._gloo._reduce_scatter_base, outputs, inputs)

    def _coalesced(
        self,
        what: str,
        collective: Callable[[Tensor, Tensor], Any],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> Any:
        """Several collectives as one call, all of which are done when it is waited for."""

        def run(given: list[Tensor], made: list[Tensor]) -> Any:
            works = [collective(y, x) for y, x in zip(made, given, strict=True)]
            for work in works[:-1]:
                work.wait()
            return works[-1]

        return self._collective(what, list(inputs), list(outputs), run, _Asynchronous())

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any,
    ) -> Any:
        def run(given: list[Tensor], made: list[Tensor]) -> Any:
            return self._gloo.alltoall_base(
                made[0], given[0], list(output_sizes), list(input_sizes), opts
            )

        return self._collective("all_to_all", [input], [output], run, opts)

    def barrier(self, opts: Any) -> Any:
        self._connect("everyone", self.size())
        if opts.device is None or opts.device.type != "cuda":
            raise RuntimeError("a barrier of NCCL needs a device")
        return self._queued("everyone", lambda: self._gloo.barrier(), [], [], [], [])

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> Any:
        return self._message(tensors, dst, lambda x: self._gloo.send([x], dst, 0), received=False)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> Any:
        return self._message(tensors, src, lambda x: self._gloo.recv([x], src, 0), received=True)

    # How it goes

    def _collective(
        self,
        what: str,
        given: list[Tensor],
        made: list[Tensor],
        run: Callable[[list[Tensor], list[Tensor]], Any],
        opts: Any,
    ) -> Any:
        for x in (*given, *made):
            _check(what, x)
        self._connect("everyone", self.size())
        inputs, outputs = [_host(x) for x in given], [_host(x) for x in made]
        return self._queued(
            "everyone", lambda: run(inputs, outputs), given, inputs, made, outputs, opts.asyncOp
        )

    def _message(
        self, tensors: Sequence[Tensor], peer: int, run: Callable[[Tensor], Any], *, received: bool
    ) -> Any:
        (x,) = tensors
        _check("receive" if received else "send", x)
        pair = f"{min(peer, self.rank())}:{max(peer, self.rank())}"
        self._connect(pair, 2)
        copy = _host(x)
        given, inputs, made, outputs = ([], [], [x], [copy]) if received else ([x], [copy], [], [])
        return self._queued(pair, lambda: run(copy), given, inputs, made, outputs)

    def _connect(self, communicator: str, num_members: int) -> None:
        """Make a communicator unless it is there: the host waits for its members."""
        if communicator in self._queues:
            return
        self._queues[communicator] = ThreadPoolExecutor(1)
        key = f"connect/{communicator}"
        self._store.add(key, 1)
        end = time.monotonic() + self._timeout.total_seconds()
        while self._store.add(key, 0) < num_members:
            if time.monotonic() > end:
                raise RuntimeError(
                    f"rank {self.rank()} waits for the others of a communicator "
                    f"({communicator}) to make it"
                )
            time.sleep(0.002)

    def _queued(
        self,
        communicator: str,
        start: Callable[[], Any],
        given: list[Tensor],
        inputs: list[Tensor],
        made: list[Tensor],
        outputs: list[Tensor],
        is_async: bool = True,
    ) -> Any:
        # In place, the input is a part of the output.
        written = {x.untyped_storage()._cdata for x in made}
        sent = [
            (x, copy.clone())
            for x, copy in zip(given, inputs, strict=True)
            if x.untyped_storage()._cdata not in written
        ]
        future = self._queues[communicator].submit(lambda: start().wait())
        for x in made if is_async else ():
            _on_host(x).fill_(math.nan if x.is_floating_point() else 113)
        work = _Work(future, sent, made, outputs)
        if not is_async:
            work.wait()
        return work


class _Work:
    """A call that is queued."""

    def __init__(
        self,
        future: Future[Any],
        sent: list[tuple[Tensor, Tensor]],
        made: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        self._future, self._sent, self._made, self._outputs = future, sent, made, outputs
        self._waited = False

    def is_completed(self) -> bool:
        """Whether the device is done; what was received is not seen by other streams before
        ``wait()``.
        """
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.result()
        if not self._waited:
            self._waited = True
            for x, before in self._sent:
                if not torch.equal(_on_host(x).nan_to_num(), before.nan_to_num()):
                    raise RuntimeError("a tensor was changed while it was sent")
            for x, y in zip(self._made, self._outputs, strict=True):
                _on_host(x).copy_(y)
        return True


def _check(what: str, x: Tensor) -> None:
    if not x.is_cuda:
        raise RuntimeError(f"No backend type associated with device type {x.device.type} ({what})")
    if x.device.index != torch.cuda.current_device():
        raise RuntimeError(
            f"{what} of a tensor on {x.device}, but this rank has "
            f"cuda:{torch.cuda.current_device()}"
        )
    if not x.is_contiguous():
        raise ValueError(f"Tensors must be contiguous ({what})")
    if x.dtype not in DTYPES:
        raise TypeError(
            f"Input tensor data type is not supported for NCCL process group: {x.dtype} ({what})"
        )


def _on_host(x: Tensor) -> Tensor:
    """The memory as a tensor of the CPU."""
    result: Tensor = torch.ops.fake_cuda.on_host(x.detach())
    return result


def _host(x: Tensor) -> Tensor:
    return _on_host(x).clone()
