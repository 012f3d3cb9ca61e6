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

**Ahead of time.** While the operators compute with one weight the next one is on its way. In
forward the next one is what followed in the forward before; in backward it is the one that was
gathered before this one. Both are the same on all ranks that share a weight, so their collectives
come in one order.

In a recompute region nothing is saved at all, and its gathers run again with it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.runtime.adapters import Gathering, reduced_piece, sliced_piece, start_gather
from shardwright.runtime.errors import UsageError
from shardwright.runtime.layout import Cut
from shardwright.runtime.pieces import whole_cut
from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.ranks.failures import concerning, name_of
from shardwright.runtime.ranks.groups import AxisGroup


@dataclass(frozen=True, slots=True)
class _Step:
    """One all-gather: along ``axis``, joining ``dim``, which ``cut`` had cut. ``reduces``: the
    gradient is summed.
    """

    axis: AxisGroup
    dim: int
    cut: Cut
    reduces: bool

    def start(self, x: Tensor, phase: Phase) -> Gathering:
        return start_gather(x, self.axis, self.dim, self.cut, phase)


class _Use:
    """A weight gathered once in a forward. ``piece``: what the rank stores. ``grad_dtype``: in
    which its gradient is summed.
    ``steps``: how the whole comes of it.

    ``earlier``: the use before it in the same forward. ``num_saved``: how many tensors are packed
    that need the weight. ``is_kept``: operators save the whole.
    """

    def __init__(
        self,
        piece: Tensor,
        grad_dtype: torch.dtype,
        steps: tuple[_Step, ...],
        earlier: _Use | None,
        is_kept: bool = False,
    ) -> None:
        self.piece = piece.detach()
        self.grad_dtype = grad_dtype
        self.steps = steps
        self.earlier = earlier
        self.is_kept = is_kept
        self.num_saved = 0
        self._version = piece._version
        self._started: Gathering | None = None
        self._whole: Tensor | None = None

    def start(self) -> None:
        """Begin to gather again."""
        if self._started is None and self._whole is None:
            self._check_version()
            with concerning(partial(_gathering, self.piece, "backward")):
                self._started = self.steps[0].start(self.piece, "backward")

    def again(self) -> Tensor:
        """The whole weight, for one of the packed tensors. It is held until the last one of them
        has had it.
        """
        self.start()
        self._start_next()
        if self._whole is None:
            assert self._started is not None
            started, self._started = self._started, None
            with concerning(partial(_gathering, self.piece, "backward")):
                self._whole = started.wait()
                for step in self.steps[1:]:
                    self._whole = step.start(self._whole, "backward").wait()
        whole = self._whole
        self.num_saved -= 1
        if self.num_saved <= 0:
            self._whole = None
        return whole

    def _start_next(self) -> None:
        """Begin with the weight that backward will need after this one."""
        use = self.earlier
        while use is not None and use.num_saved <= 0:
            use = use.earlier
        if use is not None:
            use.start()

    def _check_version(self) -> None:
        if self.piece._version != self._version:
            raise UsageError(
                "a parameter was changed between forward and backward",
                why=f"the backward gathers it again, a piece of shape {list(self.piece.shape)}, "
                "and must find it as it was",
                hint="run backward before optimizer.step() or anything else that writes to "
                "parameters",
            )


class _Handle(NamedTuple):
    """A saved tensor that is a gathered weight, or a view of it."""

    use: _Use
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """Another saved tensor, and its version then: autograd leaves the check to those who set
    hooks.
    """

    x: Tensor
    version: int


class _Ahead(NamedTuple):
    """A gather that was begun before it is asked for."""

    piece: Tensor
    step: _Step
    version: int
    started: Gathering


class WeightGathering:
    """Gathers the weights of one module."""

    def __init__(self) -> None:
        self._uses: dict[
            int, tuple[StorageWeakRef, _Use]
        ] = {}  # by storage, of the weights that are whole now
        self._orders: dict[
            Hashable, list[tuple[Tensor, _Step]]
        ] = {}  # what each kind of forward gathered last time
        self._expected: list[tuple[Tensor, _Step]] = []
        self._seen: list[tuple[Tensor, _Step]] = []
        self._ahead: _Ahead | None = None
        self._latest: _Use | None = None
        self._is_forward = False

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
        self._expected, self._seen, self._latest, self._is_forward = (
            self._orders.get(kind, []),
            [],
            None,
            True,
        )
        hooks: AbstractContextManager[Any] = nullcontext()
        if torch.is_grad_enabled():
            hooks = saved_tensors_hooks(self._pack, self._unpack)
        try:
            with hooks:
                yield
            self._orders[kind] = self._seen
            self._forget_ahead()
        finally:
            self._ahead, self._latest, self._is_forward = None, None, False
            self._forget_freed()

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
            axis, dim, cut or whole_cut(x.shape[dim] * axis.size), backward == "reduce_scatter"
        )
        before = self._use_of(x)
        is_weight = isinstance(x, torch.nn.Parameter)
        move = self._move if before is None and is_weight else _move_now
        if before is not None:
            grad_dtype = before.grad_dtype
        else:
            grad_dtype = (x.grad_dtype if x.is_leaf else None) or x.dtype
        whole = cast(Tensor, _Gather.apply(x, step, grad_dtype, move))  # type: ignore[no-untyped-call]
        assert whole.is_contiguous() and whole.storage_offset() == 0, (
            "views of it could not be told by their strides"
        )
        piece, steps = (x, (step,)) if before is None else (before.piece, (*before.steps, step))
        use = _Use(
            piece, grad_dtype, steps, self._latest if self._is_forward else None, then == "keep"
        )
        if self._is_forward and not use.is_kept:
            self._latest = use
        self._forget_freed()
        storage = whole.untyped_storage()
        self._uses[storage._cdata] = StorageWeakRef(storage), use  # type: ignore[no-untyped-call]
        return whole

    def _forget_freed(self) -> None:
        """Let go of uses, and with them of pieces of activations, that nobody has whole now."""
        self._uses = {key: entry for key, entry in self._uses.items() if not _is_freed(entry[0])}

    def _move(self, x: Tensor, step: _Step) -> Tensor:
        """The whole of a stored piece, which may be on its way already; the next one is sent
        for.
        """
        with concerning(partial(_gathering, x, "forward")):
            return self._moved_ahead(x, step) if self._is_forward else _move_now(x, step)

    def _moved_ahead(self, x: Tensor, step: _Step) -> Tensor:
        position = len(self._seen)
        self._seen.append((x, step))
        ahead, self._ahead = self._ahead, None
        if (
            ahead is not None
            and ahead.piece is x
            and ahead.step == step
            and ahead.version == x._version
        ):
            started = ahead.started
        else:
            if ahead is not None:
                ahead.started.wait()
            started = step.start(x, "forward")
        if position + 1 < len(self._expected):
            piece, following = self._expected[position + 1]
            self._ahead = _Ahead(
                piece, following, piece._version, following.start(piece, "forward")
            )
        return started.wait()

    def _forget_ahead(self) -> None:
        """Finish a gather that this forward had no use for."""
        if self._ahead is not None:
            self._ahead.started.wait()

    def _use_of(self, x: Tensor) -> _Use | None:
        """The use that ``x`` is the weight of, or a view of it."""
        if x.layout is not torch.strided:
            return None
        reference, use = self._uses.get(x.untyped_storage()._cdata, (None, None))
        return None if reference is None or _is_freed(reference) else use

    def _pack(self, x: Tensor) -> _Handle | _Kept:
        use = self._use_of(x)
        if use is None or use.is_kept:
            # Detached: a node that saves its own result would keep itself alive.
            return _Kept(x if x.is_leaf else x.detach(), x._version)
        use.num_saved += 1
        return _Handle(use, x.size(), x.stride(), int(x.storage_offset()))

    def _unpack(self, packed: _Handle | _Kept) -> Tensor:
        if isinstance(packed, _Handle):
            return packed.use.again().as_strided(packed.size, packed.stride, packed.offset)
        if packed.x._version != packed.version:
            raise UsageError(
                f"a tensor of shape {list(packed.x.shape)} that backward needs was changed "
                "in place after the forward",
                hint="change a copy of it, or run backward first",
            )
        return packed.x


def _is_freed(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def _gathering(piece: Tensor, phase: Phase) -> str:
    """What a gather is for, in messages; in forward it may be for the weight after this one."""
    name = name_of(piece)
    return (
        f"gathering the weight {name!r} for {phase}" if name else f"gathering a weight for {phase}"
    )


def _move_now(x: Tensor, step: _Step) -> Tensor:
    return step.start(x, "forward").wait()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        step: _Step,
        grad_dtype: torch.dtype,
        move: Callable[[Tensor, _Step], Tensor],
    ) -> Tensor:
        ctx.step, ctx.grad_dtype = step, grad_dtype
        return move(x, step)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        step = ctx.step
        if not step.reduces:
            return sliced_piece(grad, step.axis, step.dim, step.cut), None, None, None
        # Of several steps only the last one's sum stays in this dtype: autograd rounds what it
        # hands from node to node.
        return (
            reduced_piece(grad.to(ctx.grad_dtype), step.axis, step.dim, step.cut),
            None,
            None,
            None,
        )
