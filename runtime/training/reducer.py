"""The reducer: sums parameter gradients over the ranks that hold summands of them.

Which ranks those are follows from the plan: the mesh axes on which a parameter's layout is
gradient-partial (G), times the units. Each gradient is summed exactly once between ``zero_grad``
and ``step``.

With ``asynchronous`` the sum of a bucket starts in backward, as soon as all its gradients are there
and all buckets before it have started: the order of collectives is the same on all ranks, whatever
each of them used. What has not started by then starts in :meth:`Reducer.sum_gradients`.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwright.runtime.bucket import Bucket, GradientSum, Named
from shardwright.runtime.errors import UsageError
from shardwright.runtime.training.agreement import TrainingAgreement

ReducerHook = Callable[["Reducer", Tensor], Any]
"""Called with the reducer and the flat gradients [elements] of one bucket, which it may change in
place.
"""

# Handles hold a weak reference to it, which a plain dict does not allow.
Hooks = OrderedDict[int, ReducerHook]


class Reducer:
    """Sums gradients over ranks, in buckets.

    ``buckets``: in the order in which backward is expected to fill them. ``divisor``: the number of
    units where gradients are averaged over them, else 1. ``asynchronous``: buckets are summed while
    backward runs. ``frees_gradients``: they are summed in backward in any case, and freed then.
    ``cause``: the setting that one of these comes from, for messages.
    ``num_rounds``: how often gradients have been asked for anew, after a step or when they were
    cleared. ``agreement`` compares now and then, after a sum, how the ranks train.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        divisor: int = 1,
        asynchronous: bool = False,
        frees_gradients: bool = False,
        cause: str = "use_async_reducer",
    ) -> None:
        self.buckets = buckets
        self.divisor = divisor
        self.asynchronous = asynchronous
        self.frees_gradients = frees_gradients
        self._cause = cause
        self.is_synced = False
        self.num_rounds = 0
        self._next = 0  # the first bucket that has not started
        self._holding = False
        self._is_cleared = True
        self._has_arrived = False  # a gradient, since the last sum or clearing
        self._is_backward_due = False  # since a call that records gradients
        self._has_warned = False
        self.agreement: TrainingAgreement | None = None
        self._pre_hooks: Hooks = OrderedDict()
        self._post_hooks: Hooks = OrderedDict()
        self._handles = []
        for position, bucket in enumerate(self.buckets):
            for index, member in enumerate(bucket.members):
                # Weakly: parameters live longer than the reducer of an optimizer that is thrown
                # away.
                arrived = _arrival(weakref.ref(self), position, index)
                notice = member.parameter.register_post_accumulate_grad_hook
                self._handles.append(notice(arrived))  # type: ignore[no-untyped-call]

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters whose gradients are looked after, bucket by bucket."""
        return (member.parameter for bucket in self.buckets for member in bucket.members)

    @property
    def gradient_holders(self) -> list[Named]:
        """Tensors whose ``grad``, together, are all reduced gradients, each element once."""
        return [named for bucket in self.buckets for named in bucket.holders]

    @property
    def counted_holders(self) -> list[Named]:
        """The holders that this rank counts, when every distinct element is to be counted once."""
        return [named for bucket in self.buckets for named in bucket.counted]

    @property
    def leaves_gradients(self) -> bool:
        """Whether all parameters have their gradients as ``grad`` once these are summed."""
        return all(bucket.leaves_gradients for bucket in self.buckets)

    def note_call(self) -> None:
        """A module has been called, and records gradients."""
        if self._is_backward_due and self.agreement is not None:
            self.agreement.note_unused()
        self._is_backward_due = bool(self.buckets)

    def sum_gradients(self) -> None:
        """Sum every gradient that has not been summed since it was cleared. Collective; a second
        call does nothing.

        Raises :class:`UsageError` inside :meth:`no_sync`.
        """
        if self._holding:
            raise UsageError(
                "gradients cannot be synchronised inside no_sync()",
                why="there they are only accumulated",
                hint="leave the no_sync() block before the last backward",
            )
        if self.is_synced:
            return
        for bucket in self.buckets:
            if not bucket.started and not bucket.is_reduced:
                bucket.start(self._before)
        has_summed = False
        for bucket in self.buckets:
            if bucket.started:
                has_summed = True
                bucket.finish(self.divisor, self._after)
        self.is_synced = True
        self._has_arrived = False
        # A rank without parameters has no buckets that start; it takes part once after each time
        # they are cleared.
        if self.agreement is not None and (has_summed or (not self.buckets and self._is_cleared)):
            self.agreement.check()
        self._is_cleared = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the block only accumulate; the sums are taken with those of the
        first one after it.
        """
        previous, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = previous

    def end_round(self) -> None:
        """After one of several backward passes: reduce and free what it has brought, where
        gradients are freed. Collective.
        """
        if not self.frees_gradients:
            return
        for bucket in self.buckets:
            if not bucket.is_local:
                if not bucket.started:
                    bucket.start(self._before)
                bucket.end_round()
        self._expect()

    def clear(self, set_to_none: bool = True) -> None:
        """Forget all gradients: the next backward begins anew."""
        # A pipeline has summed them in train_step, so its ranks count steps, also those without
        # parameters.
        if self._has_arrived and self.agreement is not None:
            self.agreement.note_dropped()
        self._has_arrived = False
        self.reopen()
        self._is_cleared = True
        for bucket in self.buckets:
            bucket.clear(set_to_none)

    def reopen(self) -> None:
        """Expect new gradients: after a step."""
        if not self.is_synced:
            for bucket in self.buckets:
                # For sums under way that nobody asked for: their buffers must not be touched before
                bucket.wait()
        self.is_synced = False
        self.num_rounds += 1
        self._expect()

    def _expect(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.started = False
            bucket.arrived.clear()

    def register_pre_hook(self, hook: ReducerHook) -> RemovableHandle:
        """Call ``hook(reducer, gradients)`` before each bucket is summed."""
        return _register(self._pre_hooks, hook)

    def register_post_hook(self, hook: ReducerHook) -> RemovableHandle:
        """Call ``hook(reducer, gradients)`` after each bucket was summed (and averaged)."""
        return _register(self._post_hooks, hook)

    def detach(self) -> None:
        """Stop looking after the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def is_attached(self) -> bool:
        """Whether it still sums: none was made for the same parameters since."""
        return bool(self._handles) or not self.buckets

    def _arrive(self, bucket: Bucket, index: int) -> None:
        """Backward has come to a member of a bucket, and accumulated its gradient if it has brought
        one: an autograd Function may return ``None`` for a parameter.
        """
        member = bucket.members[index]
        gradient = member.parameter.grad
        if bucket.has_reduced(index, gradient):
            raise UsageError(
                f"backward reached {member.name!r} after its gradient was synchronised",
                why="each gradient is summed over the ranks once; adding to a sum would count it "
                "again",
                hint="call optimizer.zero_grad() before this backward; to accumulate, synchronise "
                "after the last one",
            )
        # The user cleared the gradients by other means than the optimizer's zero_grad.
        if self.is_synced:
            self.reopen()
        sums_now = (self.asynchronous or self.frees_gradients) and not self._holding
        if sums_now and (bucket.started or index in bucket.arrived):
            self._refuse_second_backward(member)
        if not (bucket.is_local or self._has_warned):
            self._warn_of_hooks(member)
        self._has_arrived, self._is_backward_due = True, False
        if not (gradient is None or bucket.is_local):
            bucket.take(index)
        if sums_now:
            bucket.arrived.add(index)
            if len(bucket.arrived) == len(bucket.members):
                self._start_complete()

    def _warn_of_hooks(self, member: GradientSum) -> None:
        """Warn, once, of hooks on a parameter: they see what is not summed yet."""
        parameter = member.parameter
        # One hook on the accumulated gradient is this reducer's own.
        accumulated = getattr(parameter, "_post_accumulate_grad_hooks", None) or ()
        if not parameter._backward_hooks and len(accumulated) < 2:
            return
        self._has_warned = True
        warnings.warn(
            f"hooks on the parameter {member.name!r} are given this rank's summand of the "
            "gradient, not the gradient of one device\n"
            f"  why:   the summands of {member.communicator.size} ranks are added behind backward\n"
            "  try:   multiplying by a number is right in a hook; for anything else call "
            "optimizer.sync_shard_grad() behind backward and change gradients then, or use "
            "optimizer.register_reducer_post_hook",
            stacklevel=2,
        )

    def _start_complete(self) -> None:
        """Start buckets in order as far as they are complete."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if len(bucket.arrived) < len(bucket.members):
                return
            bucket.start(self._before)
            self._next += 1
            if self.frees_gradients:
                # One bucket may be under way while the next one fills.
                self._free(self._next - 2 if self.asynchronous else self._next - 1)

    def _free(self, index: int) -> None:
        # Other stages reduce what they share at another point of their programs, which may come
        # after what this one does next.
        if index >= 0 and not self.buckets[index].members[0].is_shared:
            self.buckets[index].end_round()

    def _refuse_second_backward(self, member: GradientSum) -> NoReturn:
        raise UsageError(
            f"a second backward reached {member.name!r} before the step",
            why=f"with {self._cause} the first one already started to sum gradients over the ranks",
            hint="run all backward passes but the last inside `with optimizer.no_sync():`, "
            f"or train without {self._cause}",
        )

    def _before(self, gradients: Tensor) -> None:
        self._run_hooks(self._pre_hooks, gradients)

    def _after(self, gradients: Tensor) -> None:
        self._run_hooks(self._post_hooks, gradients)

    def _run_hooks(self, hooks: Hooks, gradients: Tensor) -> None:
        if hooks:
            with torch.no_grad():
                for hook in tuple(hooks.values()):
                    hook(self, gradients)


def _arrival(reducer: weakref.ref[Reducer], position: int, index: int) -> Callable[[Tensor], None]:
    """The hook of member ``index`` of a reducer's bucket ``position``.

    It holds nothing that leads to its parameter: the garbage collector does not see through hooks
    of this kind, and neither would ever be let go.
    """

    def arrive(parameter: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive._arrive(alive.buckets[position], index)

    return arrive


def _register(hooks: Hooks, hook: ReducerHook) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
