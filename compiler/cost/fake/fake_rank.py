"""A rank whose tensors are fake: its operators and adapters run as generated code runs them, but
nothing is computed or sent.

So torch itself says what autograd keeps of a call, which results are views, and how much memory the
call takes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.compiler.cost.fake.fake_kernels import FakeKernels
from shardwright.compiler.cost.machine.backend import MOST_MEMORY, Backend, reduce_scatter_bytes
from shardwright.compiler.ir.identifier import axis_variable
from shardwright.compiler.ir.op import IROp, leaves
from shardwright.compiler.ir.size import Size, dynamic_sizes, to_python
from shardwright.compiler.ops.render import call_source, imports_of
from shardwright.compiler.plan.conversion import AdapterStep, CutSizes
from shardwright.compiler.plan.program import Adapt, Loop
from shardwright.runtime import adapters
from shardwright.runtime.config import RngMode
from shardwright.runtime.in_pieces import (
    TOTAL,
    Gather,
    Joined,
    Once,
    Operand,
    Piece,
    in_pieces,
    piece_of,
)
from shardwright.runtime.layout import Cut, Mesh
from shardwright.runtime.ops.random import RngState
from shardwright.runtime.pieces import piece_lengths
from shardwright.runtime.ranks.communicator import Communicator
from shardwright.runtime.ranks.counters import CommunicationCounters
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.ranks.transport import ReduceOp, Work

REFUSALS = (RuntimeError, ValueError, TypeError, IndexError)
"""The exceptions of a call that cannot run without numbers. Torch's own for fake tensors are
RuntimeErrors; functions that find zeros where they expect something else raise the others. Any
other exception is an error of this package.
"""


class FakeRank:
    """The rank at index 0 of every axis of a mesh.

    ``rng``: how it draws random numbers, as ``ComputeConfig.rng``. ``zeros``: its tensors are real
    ones, filled with zeros, for the few functions that look at numbers. ``device``: where its
    operators make tensors. ``backend``: what it communicates through, as far as that needs memory.

    Dynamic sizes are those of the dummy arguments. Tensors are on the CPU, so torch chooses the
    kernels of that device.
    """

    def __init__(
        self,
        mesh: Mesh,
        rng: RngMode = "fast",
        *,
        zeros: bool = False,
        device: str = "cpu",
        backend: Backend = MOST_MEMORY,
    ) -> None:
        self.backend: Backend = backend
        self.mesh, self.coords = mesh, dict.fromkeys(mesh.names, 0)
        # Fake tensors have shapes and no memory; real zeros are for measuring.
        self.mode = nullcontext() if zeros else FakeTensorMode(allow_non_fake_inputs=True)
        self._counters = CommunicationCounters()
        self.axes: dict[str, AxisGroup | Piece] = {
            axis_variable(name): self._group(name, size, 0) for name, size in mesh.axes
        }
        self._rng = RngState(0, rng, mesh, self.coords)
        self._module = SimpleNamespace(
            training=True, device=torch.device(device), draw=self._rng.draw
        )

    def _group(self, name: str, size: int, index: int) -> AxisGroup:
        transport = _Silence(self.backend, size) if size > 1 else None
        return AxisGroup(
            name, Communicator(transport, tuple(range(size)), index, name, self._counters)
        )

    def tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        strides: Sequence[int] | None = None,
        requires_grad: bool = False,
    ) -> Tensor:
        """A new tensor, contiguous unless ``strides`` say something else."""
        with self.mode:
            if strides is None:
                return torch.zeros(
                    tuple(shape), dtype=dtype, device="cpu", requires_grad=requires_grad
                )
            made = torch.empty_strided(
                tuple(shape), tuple(strides), dtype=dtype, device="cpu"
            ).zero_()
            return made.requires_grad_(requires_grad)

    def run(self, op: IROp, operands: Sequence[Tensor]) -> list[Tensor]:
        """The results of a local call.

        Raises whatever torch raises for a call that needs the numbers, not just the shapes.
        """
        with self.mode, FakeKernels(), _quiet():
            return self.prepare(op, operands)()

    def prepare(self, op: IROp, operands: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """A function that makes a local call, as often as it is called."""
        # As emission has it: ranks that may draw what they please draw for their pieces.
        if self._rng.mode == "fast":
            op = op.drawing_pieces
        # The names that generated code has: operands, axes, imports, sizes.
        names: dict[str, str] = {}
        scope: dict[str, Any] = {
            "torch": torch,
            "F": torch.nn.functional,
            "math": math,
            "self": self._module,
            **self.axes,
        }
        for index, (value, tensor) in enumerate(zip(op.operands, operands, strict=True)):
            names[value.name] = f"operand_{index}"
            scope[names[value.name]] = tensor
        for statement in imports_of(op):
            exec(statement, scope)
        scope.update(sizes_read(op))
        # Compiled once, as the call is measured many times.
        code = compile(call_source(op, lambda value: names[value.name], to_python), op.name, "eval")

        def call() -> list[Tensor]:
            cast = (
                nullcontext()
                if op.autocast is None
                else torch.autocast(self._module.device.type, dtype=op.autocast)
            )
            with cast, torch.set_grad_enabled(op.grad_enabled and torch.is_grad_enabled()):
                found = _tensors(eval(code, scope))
            # A call with more results than the graph knows would be given wrong footprints in
            # silence.
            if len(found) != len(op.results):
                raise TypeError(f"{op.target} gives {len(found)} tensors, not {len(op.results)}")
            return found

        return call

    def adapt(self, step: AdapterStep, x: Tensor) -> Tensor:
        """The result of an adapter step. If one rank of the axes keeps ``x`` and the others make
        zeros, it is the result of one of these others, which needs more memory.
        """
        # The group of a fake rank answers at once, with tensors of the right shape.
        size = self.mesh.num_ranks(step.axes)
        # Rank 0 is the one that keeps its tensor. The last rank makes zeros, which takes memory.
        keeps_one = "keep_one" in (step.kind, step.backward) or step.kind == "grad_keep_one"
        words: list[Any] = [x, self._group("+".join(step.axes), size, size - 1 if keeps_one else 0)]
        # The arguments stand in the order of generated code: tensor, group, dim and cut before, dim
        # and cut after.
        if step.dim is not None:
            assert step.cut is not None
            words += [step.dim, self._cut(step.cut)]
        if step.to_dim is not None and step.to_cut is not None:
            words += [step.to_dim, self._cut(step.to_cut)]
        adapter = getattr(adapters, step.kind)
        # Adapters whose gradient may come back in several ways are told which one is meant.
        has_backward = (
            step.kind in ("all_gather", "narrow", "all_reduce", "keep_one")
            and step.backward is not None
        )
        with self.mode:
            result: Tensor = adapter(
                *words, **({"backward": step.backward} if has_backward else {})
            )
            return result

    def run_loop(self, loop: Loop, operands: Sequence[Tensor]) -> list[Tensor]:
        """The results of a loop in a training step, run by the runtime's own function. Where a step
        makes none it is a tensor without elements.
        """
        known = {value.name: x for value, x in zip(loop.operands, operands, strict=True)}
        # The function gets what is gathered of a piece, which is gathered before it runs.
        gathered = {name: gather.result.name for name, gather in loop.ahead.items()}
        arguments = [gathered.get(take.result.name, take.result.name) for take in loop.takes]
        inside = [step for step in loop.body if step not in loop.ahead.values()]

        def run_piece(piece: Piece, *parts: Tensor) -> tuple[Tensor, ...]:
            values = {**known, **dict(zip(arguments, parts, strict=True))}
            # Sizes inside the loop ask the axis of time for its place, as those outside ask an axis
            # of ranks. Afterwards nothing may ask for it.
            self.axes[axis_variable(loop.axis)] = piece
            try:
                for step in inside:
                    if isinstance(step, Adapt):
                        values[step.result.name] = self.adapt(step.step, values[step.value.name])
                        continue
                    found = self.run(step.op, [values[value.name] for value in step.op.operands])
                    values |= {v.name: x for v, x in zip(step.op.results, found, strict=True)}
            finally:
                del self.axes[axis_variable(loop.axis)]
            return tuple(values[give.value.name] for give in loop.gives)

        def cut(step: AdapterStep) -> tuple[int, Cut]:
            assert step.dim is not None and step.cut is not None
            return step.dim, self._cut(step.cut)

        def door(take: Adapt) -> Operand:
            x, gather = known[take.value.name], loop.ahead.get(take.result.name)
            if take.step.kind == "keep_one":
                return Once(x)
            if take.step.dim is None:
                return x
            return piece_of(x, *cut(take.step), None if gather is None else self._ahead(gather))

        takes = [door(take) for take in loop.takes]
        gives = [
            TOTAL if g.step.dim is None else Joined(*cut(g.step), g.result.name not in loop.late)
            for g in loop.gives
        ]
        with self.mode:
            found = in_pieces(run_piece, loop.axis, loop.count, takes, gives, rng=self._rng)
            results = found if isinstance(found, tuple) else (found,)
            return [torch.empty(0) if x is None else x for x in results]

    def _ahead(self, gather: Adapt) -> Gather:
        step = gather.step
        assert step.dim is not None and step.cut is not None
        backward: Any = step.backward
        group = self._group(step.axis, self.mesh.axis_size(step.axis), 0)
        return Gather(group, step.dim, backward, self._cut(step.cut))

    def number(self, size: Size) -> int:
        """A size expression as this rank sees it."""
        return (
            size
            if isinstance(size, int)
            else int(eval(to_python(size), {**self.axes, **_sizes(size)}))
        )

    def summing_bytes(self, step: AdapterStep, sizes: Sequence[int], *, evenly: bool = True) -> int:
        """What :func:`reduce_scatter_bytes` says of a reduce-scatter over the ranks of a step."""
        num_ranks = self.mesh.num_ranks(step.axes)
        return reduce_scatter_bytes(sizes, num_ranks, self.backend, evenly=evenly)

    def cuts_evenly(self, step: AdapterStep) -> bool:
        """Whether the pieces of an adapter step are as large as each other."""
        assert step.cut is not None
        return len(set(piece_lengths(self._cut(step.cut), self.mesh.num_ranks(step.axes)))) == 1

    def _cut(self, cut: CutSizes) -> Cut:
        return Cut(
            tuple(map(self.number, cut.segments)),
            self.number(cut.outer),
            self.number(cut.inner),
            tuple(map(self.number, cut.element)),
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch logs of a call that fake tensors cannot make, as the caller has another
    way to make it.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled = logger.disabled
    logger.disabled = True  # setting its level would empty what all loggers know
    try:
        yield
    finally:
        logger.disabled = disabled


def sizes_read(op: IROp) -> tuple[tuple[str, int], ...]:
    """The dynamic sizes that a call reads, with their values. The source of the call has only their
    names.
    """
    found: dict[str, int] = {}
    for _, arg in op.args:
        for leaf in leaves(arg):
            found |= _sizes(leaf)
    return tuple(sorted(found.items()))


def _sizes(size: Any) -> dict[str, int]:
    """The values of the dynamic sizes in an expression."""
    return {str(symbol): symbol.example for symbol in dynamic_sizes(size)}


def _tensors(result: Any) -> list[Tensor]:
    """The tensors of a call's result, in order."""
    if isinstance(result, Tensor):
        return [result]
    return (
        [tensor for item in result for tensor in _tensors(item)]
        if isinstance(result, tuple | list)
        else []
    )


class _Silence:
    """The transport of a group that sends nothing: what arrives has a shape, but no numbers. It
    takes the memory that the backend needs.
    """

    def __init__(self, backend: Backend, size: int) -> None:
        self._backend: Backend = backend
        self._size = size

    def all_reduce_(self, x: Tensor, op: ReduceOp) -> None: ...

    def start_all_reduce_(self, x: Tensor, op: ReduceOp) -> Work:
        return _Done()

    def all_gather(self, x: Tensor, result: Tensor) -> None: ...

    def start_all_gather(self, x: Tensor, result: Tensor) -> Work:
        return _Done()

    def start_all_gathers(self, xs: list[Tensor], results: list[Tensor]) -> Work:
        return _Done()

    def reduce_scatters(self, xs: list[Tensor], results: list[Tensor]) -> None:
        self._use(xs)

    def start_all_gather_(self, x: Tensor, sizes: list[int]) -> Work:
        return _Done()

    def reduce_scatter(self, x: Tensor, result: Tensor) -> None:
        self._use([x])

    def start_reduce_scatter_(self, x: Tensor, sizes: list[int]) -> Work:
        return _Done()

    def all_to_all(
        self, x: Tensor, send_sizes: list[int], result: Tensor, receive_sizes: list[int]
    ) -> None: ...

    def start_all_to_all(
        self, x: Tensor, send_sizes: list[int], result: Tensor, receive_sizes: list[int]
    ) -> Work:
        return _Done()

    def broadcast_(self, x: Tensor, src_index: int) -> None: ...

    def send(self, x: Tensor, dst_index: int) -> None: ...

    def receive_(self, x: Tensor, src_index: int) -> None: ...

    def _use(self, summed: list[Tensor]) -> None:
        """Make for a moment what a reduce-scatter of these needs beside them."""
        sizes = [x.nbytes for x in summed]
        num_bytes = reduce_scatter_bytes(sizes, self._size, self._backend)
        torch.empty(num_bytes, dtype=torch.uint8)

    def barrier(self) -> None: ...

    def finish(self, work: Work, what: Callable[[], object]) -> None: ...

    def peers(self) -> str:
        return ""


class _Done:
    def wait(self) -> None:
        return None
