"""All gradients of a model together, as this rank sees them: their names, their sum over the ranks,
their norm.

A tensor that somebody holds in hand, a parameter or what an optimizer of ours has in its place,
leads here by :func:`gradients_of`. That is how functions that were not written for many ranks are
served (see :mod:`shardwright.runtime.training.clipping`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from shardwright.runtime.bucket import Named
from shardwright.runtime.errors import UsageError
from shardwright.runtime.ranks.world import World, current_world
from shardwright.runtime.training.gradnorm import global_norm, norm_dtype
from shardwright.runtime.training.reducer import Reducer


class GradientKeeper(Protocol):
    """What has the gradients of a model: its optimizer, or a reducer where there is no
    optimizer.
    """

    @property
    def gradient_holders(self) -> list[Named]:
        """Tensors whose ``grad``, together, are all that this rank has of the reduced gradients."""

    @property
    def counted_holders(self) -> list[Named]:
        """The holders that this rank counts where every distinct element is counted once."""

    def sum_gradients(self) -> None:
        """Sum every gradient that has not been summed yet. Collective."""


class AllGradients:
    """The gradients that one reducer looks after.

    ``is_staged``: ranks have different parameters, as they run different stages of a pipeline.
    ``keeper`` is held weakly beside the reducer: an optimizer that nobody needs any more leaves the
    reducer behind.
    """

    def __init__(self, world: World, reducer: Reducer, *, is_staged: bool) -> None:
        self.world = world
        self.reducer = reducer
        self.is_staged = is_staged
        self._keeper: weakref.ref[GradientKeeper] | None = None
        self._names = {id(p): name for bucket in reducer.buckets for name, p in bucket.parameters}
        for bucket in reducer.buckets:
            for _, parameter in bucket.parameters:
                setattr(parameter, _GRADIENTS, self)
        _note_live(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: parameters lead here, and nothing of this belongs into a file."""
        raise UsageError(
            "parameters that an optimizer of build_optimizer updates cannot be pickled",
            why="they know the optimizer, and the ranks that their gradients are summed over",
            hint="save the state_dict() of the module, or parameter.detach()",
        )

    def kept_by(self, keeper: GradientKeeper, tensors: Sequence[Named]) -> None:
        """Let ``keeper`` have the gradients from now on, and ``tensors`` stand for the parameters
        they are named by.
        """
        self._keeper = weakref.ref(keeper)
        for name, tensor in tensors:
            self._names[id(tensor)] = name
            setattr(tensor, _GRADIENTS, self)

    def note_copy(self, parameter: Tensor) -> None:
        """``parameter`` is a copy of one of another rank, which gets its gradient."""
        setattr(parameter, _GRADIENTS, self)

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of the parameter that ``tensor`` is or stands for; ``None`` for one of another
        pipeline stage.
        """
        return self._names.get(id(tensor))

    def names_of_gradients(self) -> dict[tuple[int, int], str]:
        """The name of each gradient that is there now, by its place in memory and its number of
        elements.
        """
        named = [
            *((name, p) for bucket in self.reducer.buckets for name, p in bucket.parameters),
            *self._kept.gradient_holders,
        ]
        return {
            memory_of(tensor.grad): name
            for name, tensor in named
            if tensor.grad is not None and tensor.grad.numel()
        }

    @property
    def is_attached(self) -> bool:
        """Whether the reducer is the one that sums these gradients."""
        return self.reducer.is_attached

    @property
    def leaves_gradients(self) -> bool:
        """Whether all parameters have their gradients as ``grad``, from the backward to the
        step.
        """
        return self.reducer.leaves_gradients and not self.reducer.frees_gradients

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no trained parameter, as a rank of a pipeline may."""
        return not self._names

    def sync(self) -> None:
        """Sum the gradients over the ranks, unless that has happened. Collective.

        Raises :class:`UsageError` if another reducer looks after them by now.
        """
        if not self.is_attached:
            raise UsageError(
                "the optimizer of these gradients was replaced",
                why="build_optimizer was called again with some of its parameters, and gradients "
                "are summed once",
                hint="use the parameters of the newer optimizer's module",
            )
        self._kept.sum_gradients()

    def holders(self, names: Collection[str]) -> list[Tensor]:
        """Tensors whose ``grad`` are all that this rank has of the gradients of these names."""
        return [tensor for name, tensor in self._kept.gradient_holders if name in names]

    def norm(self, names: Collection[str], order: float) -> Tensor:
        """The norm of the gradients of these names, each distinct element counted once; the same on
        all ranks. Collective.

        They have been summed. Raises :class:`UsageError` where ranks would add up norms of
        different parts of the model.
        """
        mine = set(self._names.values())
        if self.is_staged and mine != set(names):
            missing = min(mine - set(names))
            raise UsageError(
                "the norm of some gradients of a pipeline is not known on this rank",
                why=f"rank {self.world.rank} was given {len(set(names))} of its {len(mine)} "
                f"trained parameters, {missing!r} is "
                "not among them, and what the ranks of other stages were given it cannot see",
                hint="pass model.parameters(), or call optimizer.clip_gnorm(max_norm)",
            )
        counted = [tensor for name, tensor in self._kept.counted_holders if name in names]
        dtype = norm_dtype(list(self.reducer.parameters))
        return global_norm(counted, self.world.everyone, dtype, self.world.device, order)

    @property
    def _kept(self) -> GradientKeeper:
        keeper = None if self._keeper is None else self._keeper()
        return self.reducer if keeper is None else keeper


def gradients_of(tensor: Tensor) -> AllGradients | None:
    """The gradients among which that of ``tensor`` is: a parameter, or what an optimizer has in its
    place.
    """
    found: AllGradients | None = getattr(tensor, _GRADIENTS, None)
    return found


def live_gradients() -> list[AllGradients]:
    """The gradients of all models that this rank trains, in the order in which they were made."""
    if not _live:
        return []
    world = current_world()
    found = [item for reference in _live if (item := reference()) is not None]
    return [item for item in found if item.world is world and item.is_attached]


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor lies, and its number of elements: alike for a tensor and what ``detach`` makes
    of it.

    No gradient of ours is of another class than torch's own; tensors of others may have no memory
    to speak of.
    """
    return (tensor.data_ptr(), tensor.numel()) if type(tensor) in (Tensor, nn.Parameter) else (0, 0)


_GRADIENTS = "_shardwright_gradients"
_live: tuple[weakref.ref[AllGradients], ...] = ()
_lock = threading.Lock()  # ranks may be threads


def _note_live(made: AllGradients) -> None:
    global _live
    with _lock:
        _live = (*(reference for reference in _live if reference() is not None), weakref.ref(made))
