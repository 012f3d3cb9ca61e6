"""Gathered weights: parameters that a rank stores in pieces, and uses whole for a moment only. So
are activations, where the plan says that backward gathers them again.

A generated forward asks for a weight right before the operator that needs it, and drops it right
after:

    up_weight = self.gathered(block.up.weight, dp, dim=0)    # dp: S(0) -> G
    up = linear(x, up_weight, block.up.bias)
    del up_weight

Forward all-gathers, backward reduce-scatters the gradient (``backward="slice"``: takes this rank's
piece of it). In between nothing holds the whole weight: what operators save of it for their
backward, itself or a view, is packed as a **handle**, and gathered again when that backward runs.
Uses that share one gather share the second one too. Gradients are summed in the dtype in which the
parameter holds its gradient (``grad_dtype``), which may be wider than its own.

**Together.** Neighbouring weights that are small beside the largest ones come in one collective
(``gathered_together``; ``compiler/passes/gathers.py`` says which). They are gathered again in one,
and their gradients are summed in one, when the last of them is there.

**Ahead of time.** While the operators compute with one weight the next one is on its way. In
forward the next one is what followed in the forward before; in backward it is the one that was
gathered before this one. Both are the same on all ranks that share a weight, so their collectives
come in one order.

A **recompute region** saves nothing, and its gathers run again with it: in the order of its first
run, each begun while the weight before it is used. Its first weight is begun by what backward does
before, and its last one begins what backward gathers after the region.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.runtime.adapters import (
    Gathering,
    cut_of,
    reduced_piece,
    reduced_pieces,
    sliced_piece,
    start_gather,
    start_gathers,
)
from shardwright.runtime.errors import UsageError
from shardwright.runtime.layout import Cut
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.failures import concerning, name_of
from shardwright.runtime.ranks.groups import AxisGroup
from shardwright.runtime.second_derivatives import differentiable_once


@dataclass(frozen=True, slots=True)
class _Step:
    """One all-gather: along ``axis``, joining ``dim``, which ``cut`` had cut. Without ``cut`` it is
    of weights that come together, whose first dims are cut evenly. ``reduces``: the gradient is
    summed.
    """

    axis: AxisGroup
    dim: int
    cut: Cut | None
    reduces: bool

    def start(self, x: Tensor, phase: Phase) -> Gathering:
        assert self.cut is not None
        return start_gather(x, self.axis, self.dim, self.cut, phase)


class _Batch(NamedTuple):
    """What one all-gather moves: the stored ``pieces`` of one weight, or of several together."""

    pieces: tuple[Tensor, ...]
    step: _Step

    def start(self, phase: Phase) -> _Wholes:
        if self.step.cut is None:
            return start_gathers(self.pieces, self.step.axis, phase)
        return _OneWhole(self.step.start(self.pieces[0], phase))

    def versions(self) -> tuple[int, ...]:
        """Numbers that change when a piece does."""
        return tuple(piece._version for piece in self.pieces)

    def is_of(self, other: _Batch) -> bool:
        """Whether both are of the same tensors."""
        return (
            self.step == other.step
            and len(self.pieces) == len(other.pieces)
            and all(map(is_, self.pieces, other.pieces))
        )


class _Wholes(Protocol):
    def wait(self) -> list[Tensor]: ...


class _Gathers(Protocol):
    """What a backward gathers: what operators have kept of one gather, or what a region does. They
    are a chain: ``earlier`` is what came before in the forward.
    """

    earlier: _Gathers | None

    @property
    def is_needed(self) -> bool:
        """Whether backward will still ask for any of it."""

    def start(self) -> None:
        """Begin with it."""


def _start_next(after: _Gathers) -> None:
    """Begin with what backward will need after this."""
    gathers = after.earlier
    while gathers is not None and not gathers.is_needed:
        gathers = gathers.earlier
    if gathers is not None:
        gathers.start()


@dataclass(frozen=True, slots=True)
class _OneWhole:
    gathering: Gathering

    def wait(self) -> list[Tensor]:
        return [self.gathering.wait()]


class _Use:
    """Weights gathered once in a forward, by one collective. ``batch``: what the rank stores of
    them, and how it is gathered. ``grad_dtypes``: in which their gradients are summed.
    ``steps``: what follows to make the whole, of a weight that is gathered along several axes.

    ``num_saved``: how many tensors are packed that need each weight. ``is_kept``: operators save
    the whole.
    """

    def __init__(
        self,
        batch: _Batch,
        grad_dtypes: tuple[torch.dtype, ...],
        steps: tuple[_Step, ...],
        earlier: _Gathers | None,
        is_kept: bool = False,
    ) -> None:
        self.is_kept = is_kept
        self.batch = _Batch(tuple(piece.detach() for piece in batch.pieces), batch.step)
        self.grad_dtypes = grad_dtypes
        self.steps = steps
        self.earlier = earlier
        self.num_saved = [0] * len(batch.pieces)
        self._versions = batch.versions()
        # What is on its way, and which weights it is; those that have come and are still needed.
        self._started: tuple[_Wholes, tuple[int, ...]] | None = None
        self._wholes: dict[int, Tensor] = {}

    @property
    def is_needed(self) -> bool:
        """Whether a backward will ask for any of the weights."""
        return any(count > 0 for count in self.num_saved)

    def start(self, member: int | None = None) -> None:
        """Begin to gather again what backward needs: of a second backward, which nothing has
        counted, the ``member`` that it asks for.
        """
        if self._started is not None or (self._wholes and member is None):
            return
        if self.batch.versions() != self._versions:
            _refuse_changed(self.batch)
        # Of a group, only what autograd has saved: a weight whose gradient nobody wants stays out.
        needed = tuple(i for i, count in enumerate(self.num_saved) if count > 0)
        needed = needed if member is None or member in needed else (member,)
        batch = _Batch(tuple(self.batch.pieces[i] for i in needed), self.batch.step)
        with concerning(partial(_gathering, batch.pieces, "backward")):
            self._started = batch.start("backward"), needed

    def again(self, member: int) -> Tensor:
        """The whole weight, for one of the packed tensors. It is held until the last one of them
        has had it.
        """
        if member not in self._wholes:
            self.start(member)
        # The next weights are on their way while these are used.
        _start_next(self)
        while member not in self._wholes:
            self._arrive()
            if member not in self._wholes:
                self.start(member)
        whole = self._wholes[member]
        # Every operator that saved the weight asks for it once.
        self.num_saved[member] -= 1
        if self.num_saved[member] <= 0:
            del self._wholes[member]
        return whole

    def _arrive(self) -> None:
        """Wait for what is on its way."""
        assert self._started is not None
        (started, members), self._started = self._started, None
        with concerning(partial(_gathering, self.batch.pieces, "backward")):
            wholes = started.wait()
            for step in self.steps:
                wholes = [step.start(whole, "backward").wait() for whole in wholes]
        self._wholes |= dict(zip(members, wholes, strict=True))


class _Ahead(NamedTuple):
    """A gather that was begun before it is asked for."""

    batch: _Batch
    versions: tuple[int, ...]
    started: _Wholes

    @classmethod
    def of(cls, batch: _Batch) -> _Ahead:
        return cls(batch, batch.versions(), batch.start("forward"))


class _Run:
    """A forward, or the second run of a region: it gathers what is ``expected`` in that order,
    each weight ahead of time. ``ahead``: the first one, if it was begun before. ``then``: begins
    what comes after the last one.

    ``seen``: what it has gathered so far. ``latest``: the end of the chain that backward goes back.
    """

    def __init__(
        self,
        expected: Sequence[_Batch],
        ahead: _Ahead | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self.seen: list[_Batch] = []
        self.latest: _Gathers | None = None
        self._expected, self._ahead, self._then = expected, ahead, then

    def move(self, batch: _Batch) -> list[Tensor]:
        """The wholes of a batch; the next one is sent for."""
        position = len(self.seen)
        self.seen.append(batch)
        ahead, self._ahead = self._ahead, None
        # The weights that were expected: their gathering is under way.
        if ahead is not None and ahead.batch.is_of(batch) and ahead.versions == batch.versions():
            started = ahead.started
        else:
            if ahead is not None:
                ahead.started.wait()
            started = batch.start("forward")
        # Begin with the next ones now.
        if position + 1 < len(self._expected):
            self._ahead = _Ahead.of(self._expected[position + 1])
        elif position + 1 == len(self._expected):
            self._then()
        return started.wait()

    def finish(self) -> None:
        """Wait for a gather that was begun and that this run had no use for."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.started.wait()
        if len(self.seen) < len(self._expected):
            self._then()


class _Region:
    """A part of a forward that backward runs again, and its gathers with it.

    ``batches``: what it gathers. ``is_needed``: backward will come to it.
    """

    def __init__(self, batches: Sequence[_Batch], earlier: _Gathers | None) -> None:
        self.earlier, self.is_needed = earlier, False
        self.batches = batches
        self._versions = [batch.versions() for batch in batches]
        self._ahead: _Ahead | None = None

    def start(self) -> None:
        """Begin with its first weights."""
        if self._ahead is None:
            if self.batches[0].versions() != self._versions[0]:
                _refuse_changed(self.batches[0])
            with concerning(partial(_gathering, self.batches[0].pieces, "backward")):
                self._ahead = _Ahead.of(self.batches[0])

    def second_run(self) -> _Run:
        """The run that a backward makes."""
        ahead, self._ahead, self.is_needed = self._ahead, None, False
        return _Run(self.batches, ahead, partial(_start_next, self))


def _refuse_changed(batch: _Batch) -> None:
    shapes = " and ".join(str(list(piece.shape)) for piece in batch.pieces)
    raise UsageError(
        "a parameter was changed between forward and backward",
        why=f"the backward gathers it again, a piece of shape {shapes}, and must find it as it was",
        hint="run backward before optimizer.step() or anything else that writes to parameters",
    )


class _Handle(NamedTuple):
    """A saved tensor that is a gathered weight, or a view of it."""

    use: _Use
    member: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """Another saved tensor, and its version then: autograd leaves the check to those who set
    hooks.
    """

    x: Tensor
    version: int


class WeightGathering:
    """Gathers the weights of one module."""

    def __init__(self) -> None:
        self._uses: dict[
            int, tuple[StorageWeakRef, _Use, int]
        ] = {}  # by storage, of the weights that are whole now, each a member of a use
        self._orders: dict[
            Hashable, list[_Batch]
        ] = {}  # what each kind of forward gathered last time
        self._run: _Run | None = None  # the forward or second run that goes on now

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightGathering:
        """A fresh one for a copy of the module: what is whole or on its way belongs to the
        original.
        """
        return WeightGathering()

    @contextmanager
    def forward(self, kind: Hashable) -> Iterator[None]:
        """Around a forward. ``kind`` tells those apart that gather different weights, or in another
        order.
        """
        self._run = run = _Run(self._orders.get(kind, []))
        hooks: AbstractContextManager[Any] = nullcontext()
        # Autograd would keep whole weights until backward. The hooks let it keep a note instead,
        # and the weight is gathered again when backward asks for it.
        if torch.is_grad_enabled():
            hooks = saved_tensors_hooks(self._pack, self._unpack)
        try:
            with hooks:
                yield
            # Only a forward that got through says in which order weights are used.
            self._orders[kind] = run.seen
            run.finish()
        finally:
            self._run = None
            self._forget_freed()

    def region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, a part of a forward that runs once in it and once more in a backward."""
        region: _Region | None = None
        weights: dict[int, torch.nn.Parameter] = {}

        def run(*args: Any) -> Any:
            nonlocal region
            if region is not None:
                # Torch hands on aliases of the arguments, which nobody would know as weights.
                known = [weights.get(number, x) for number, x in enumerate(args)]
                return self._run_again(region, function, known)
            outer = self._run
            if outer is None:
                return function(*args)
            start, earlier = len(outer.seen), outer.latest
            weights.update((n, x) for n, x in enumerate(args) if isinstance(x, torch.nn.Parameter))
            result = function(*args)
            region = outer.latest = _Region(outer.seen[start:], earlier)
            region.is_needed = bool(region.batches) and _takes_gradient(result)
            return result

        return run

    def _run_again(self, region: _Region, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        outer, self._run = self._run, region.second_run()
        try:
            return function(*args)
        finally:
            # Torch ends a second run by an exception, once all is there that backward needs.
            self._run.finish()
            self._run = outer

    def gathered(
        self,
        x: Tensor,
        axis: AxisGroup,
        dim: int,
        cut: Cut | None = None,
        backward: Literal["slice", "reduce_scatter"] = "reduce_scatter",
        then: Literal["keep", "again"] = "again",
    ) -> Tensor:
        """S(dim) -> G, or with ``backward="slice"`` S(dim) -> R.

        ``x`` is a parameter, or gathered along another axis, or what another adapter made of a
        parameter; gradients pass that one in the dtype of ``x``. Or it is an activation, which is
        another tensor in each forward, so that it is never gathered ahead of time there. With
        ``then="keep"`` operators save the whole.

        Without ``cut`` the pieces must be equally long.
        """
        if axis.size == 1:
            return x
        dim %= x.ndim
        step = _Step(
            axis, dim, cut_of(axis, cut, x.shape[dim] * axis.size), backward == "reduce_scatter"
        )
        known, is_kept = self._use_of(x), then == "keep"
        # Cut along several axes, a parameter is gathered along one after the other. Backward starts
        # from the innermost pieces, so that what was gathered in between need not be kept.
        if known is not None:
            before, member = known
            grad_dtype = before.grad_dtypes[member]
            whole = _gather(_Batch((x,), step), (grad_dtype,), _move_now)[0]
            batch = _Batch((before.batch.pieces[member],), before.batch.step)
            self._record([whole], batch, (grad_dtype,), (*before.steps, step), is_kept=is_kept)
            return whole
        return self._gathered(_Batch((x,), step), is_kept=is_kept)[0]

    def gathered_together(
        self,
        xs: Sequence[Tensor],
        axis: AxisGroup,
        backward: Literal["slice", "reduce_scatter"] = "reduce_scatter",
    ) -> tuple[Tensor, ...]:
        """Like :meth:`gathered`, of several parameters of one dtype in one collective. Each is cut
        in its first dim, into pieces of one length.
        """
        if axis.size == 1:
            return tuple(xs)
        step = _Step(axis, 0, None, backward == "reduce_scatter")
        return self._gathered(_Batch(tuple(xs), step))

    def _gathered(self, batch: _Batch, *, is_kept: bool = False) -> tuple[Tensor, ...]:
        grad_dtypes = tuple((x.grad_dtype if x.is_leaf else None) or x.dtype for x in batch.pieces)
        # An activation is another tensor in each forward, so none can be expected.
        are_weights = isinstance(batch.pieces[0], torch.nn.Parameter)
        wholes = _gather(batch, grad_dtypes, self._move if are_weights else _move_now)
        self._record(wholes, batch, grad_dtypes, (), is_kept=is_kept)
        return wholes

    def _record(
        self,
        wholes: Sequence[Tensor],
        batch: _Batch,
        grad_dtypes: tuple[torch.dtype, ...],
        steps: tuple[_Step, ...],
        *,
        is_kept: bool,
    ) -> None:
        """Remember that these storages are gathered weights, whoever looks at them."""
        run = self._run
        earlier = None if run is None else run.latest
        use = _Use(batch, grad_dtypes, steps, earlier, is_kept)
        if run is not None and not is_kept:
            run.latest = use
        self._forget_freed()
        for member, whole in enumerate(wholes):
            assert whole.is_contiguous() and whole.storage_offset() == 0, (
                "views of it could not be told by their strides"
            )
            storage = whole.untyped_storage()
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            # By address. The weak reference tells whether the storage at that address is still the
            # same.
            self._uses[storage._cdata] = reference, use, member

    def _forget_freed(self) -> None:
        """Let go of uses, and with them of pieces of activations, that nobody has whole now."""
        self._uses = {key: entry for key, entry in self._uses.items() if not _is_freed(entry[0])}

    def _move(self, batch: _Batch) -> list[Tensor]:
        """The whole of stored pieces, which may be on their way already; the next ones are sent
        for.
        """
        with concerning(partial(_gathering, batch.pieces, "forward")):
            return _move_now(batch) if self._run is None else self._run.move(batch)

    def _use_of(self, x: Tensor) -> tuple[_Use, int] | None:
        """The use that ``x`` is a weight of, or a view of one, and which of its weights."""
        if x.layout is not torch.strided:
            return None
        found = self._uses.get(x.untyped_storage()._cdata)
        return None if found is None or _is_freed(found[0]) else found[1:]

    def _pack(self, x: Tensor) -> _Handle | _Kept:
        found = self._use_of(x)
        if found is None or found[0].is_kept:
            # Detached: a node that saves its own result would keep itself alive.
            return _Kept(x if x.is_leaf else x.detach(), x._version)
        use, member = found
        use.num_saved[member] += 1
        return _Handle(use, member, x.size(), x.stride(), int(x.storage_offset()))

    def _unpack(self, packed: _Handle | _Kept) -> Tensor:
        if isinstance(packed, _Handle):
            whole = packed.use.again(packed.member)
            return whole.as_strided(packed.size, packed.stride, packed.offset)
        if packed.x._version != packed.version:
            raise UsageError(
                f"a tensor of shape {list(packed.x.shape)} that backward needs was changed "
                "in place after the forward",
                hint="change a copy of it, or run backward first",
            )
        return packed.x


def _is_freed(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _gathering(pieces: Sequence[Tensor], phase: Phase) -> str:
    """What a gather is for, in messages; in forward it may be for the weight after this one."""
    names = [repr(name) for piece in pieces if (name := name_of(piece))]
    if len(pieces) > 1:
        return f"gathering the weights {', '.join(names) or 'of a layer'} for {phase}"
    return (
        f"gathering the weight {names[0]} for {phase}"
        if names
        else f"gathering a weight for {phase}"
    )


def _takes_gradient(result: Any) -> bool:
    """Whether a backward may come to a region with this result: a tensor, or several."""
    tensors = result if isinstance(result, tuple | list) else (result,)
    return any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def _move_now(batch: _Batch) -> list[Tensor]:
    return batch.start("forward").wait()


def _gather(
    batch: _Batch,
    grad_dtypes: tuple[torch.dtype, ...],
    move: Callable[[_Batch], list[Tensor]],
) -> tuple[Tensor, ...]:
    """The whole tensors in autograd's graph."""
    found = _Gather.apply(batch.step, grad_dtypes, move, *batch.pieces)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], found)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        step: _Step,
        grad_dtypes: tuple[torch.dtype, ...],
        move: Callable[[_Batch], list[Tensor]],
        *pieces: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.grad_dtypes = step, grad_dtypes
        # A weight without a gradient has none that is zero.
        ctx.set_materialize_grads(False)
        return tuple(move(_Batch(pieces, step)))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        step, needed = ctx.step, ctx.needs_input_grad[3:]
        # Of several steps only the last one's sum stays in this dtype: autograd rounds what it
        # hands from node to node.
        summed = [
            grad.to(dtype) if grad is not None and is_needed and step.reduces else grad
            for grad, dtype, is_needed in zip(grads, ctx.grad_dtypes, needed, strict=True)
        ]
        there = [i for i, grad in enumerate(summed) if grad is not None and needed[i]]
        found: list[Tensor | None] = [None] * len(grads)
        if step.cut is None and step.reduces:
            for dtype in dict.fromkeys(ctx.grad_dtypes[i] for i in there):
                alike = [i for i in there if ctx.grad_dtypes[i] == dtype]
                pieces = reduced_pieces([cast(Tensor, summed[i]) for i in alike], step.axis)
                for i, piece in zip(alike, pieces, strict=True):
                    found[i] = piece
            return None, None, None, *found
        move = reduced_piece if step.reduces else sliced_piece
        for i in there:
            grad = cast(Tensor, summed[i])
            cut = cut_of(step.axis, step.cut, grad.shape[0])
            found[i] = move(grad, step.axis, step.dim, cut)
        return None, None, None, *found
