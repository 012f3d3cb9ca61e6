"""The optimizer of parallel training: the user's own, with gradients summed over the ranks before
its step, and what it updates spread behind it.

:func:`~shardwright.runtime.training.build_optimizer.build_optimizer` makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwright.runtime.arguments import checked
from shardwright.runtime.bucket import Named
from shardwright.runtime.errors import UsageError
from shardwright.runtime.ranks.failures import concerning
from shardwright.runtime.training.clipping import clip_by_norm
from shardwright.runtime.training.gradients import TrainedModel
from shardwright.runtime.training.gradnorm import global_norm, norm_dtype, unscale
from shardwright.runtime.training.param_groups import Members
from shardwright.runtime.training.reducer import Reducer, ReducerHook
from shardwright.runtime.zero.gathering import ParameterGathering
from shardwright.runtime.zero.shards import ParameterShard
from shardwright.runtime.zero.state_masters import load_masters, with_masters, without_masters
from shardwright.runtime.zero.whole_exchange import WholeParameters
from shardwright.runtime.zero.whole_tensors import WholeParameter


class ParallelOptimizer(Optimizer):
    """What :func:`build_optimizer` returns: the user's optimizer, with gradients summed over the
    ranks before each step.

    ``shards``: what this rank updates of each trained parameter whose optimizer state is split over
    ranks; empty without ZeRO. ``wholes``: the cut parameters of which it updates the whole tensor
    or, where another rank owns that, nothing; empty for elementwise optimizers. ``param_groups``
    hold their tensors in the place of those parameters; they are the same groups on all ranks, and
    ``group_members`` are the names of all parameters of each, those on other ranks too.
    """

    shards: tuple[ParameterShard, ...] = ()
    wholes: tuple[WholeParameter, ...] = ()
    group_members: Members = ()
    _model: TrainedModel
    _reducer: Reducer
    _gathering: ParameterGathering
    _exchange: WholeParameters
    # Those parameters that it would update, whose gradients nobody sums.
    _frozen: Mapping[str, Tensor]
    _round: int = -1  # the last one of the reducer whose gradients the owners of whole tensors have
    _has_stepped: bool = False

    @checked
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Synchronise the gradients, then take a step; under ZeRO, gather what the ranks updated.
        Collective: all take it.

        The first step compares the copies of the parameters first, see
        :meth:`TrainedModel.check_copies`.

        With a ``closure``, gradients are synchronised each time it has run, and the loss it returns
        is summed (or averaged) over the units as they are: optimizers that look at it decide alike
        on all ranks.
        """
        # Gradients are summed before the user's own step, and its results spread behind it.
        self._begin_step()
        if closure is None:
            # Without a closure: sums, then the step of the user's class.
            self.sum_gradients()
            result = super().step(*args, **kwargs)
        else:
            result = super().step(self._synchronised(closure), *args, **kwargs)
        # Owners of whole tensors send new values to the ranks that hold pieces of them.
        self._exchange.give_values()
        self._exchange.release()
        # ZeRO: ranks gather what the others have updated, at once or when it is read.
        self._gathering.run()
        for shard in self.shards:
            shard.settle()
        self._reducer.reopen()
        self._model.agreement.note_step()
        for module in self._model.parallel_modules:
            module.finish_step()
        return result

    # torch wraps the step of every class it has not seen, so that its hooks run there; they run in
    # the user's step already.
    step.hooked = True  # type: ignore[attr-defined]

    @checked
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the whole module, also of parameters this optimizer does not
        update.
        """
        self._reducer.clear(set_to_none)
        super().zero_grad(set_to_none)

    def sync_shard_grad(self) -> None:
        """Sum the gradients over the ranks now, to look at them before :meth:`step`. Collective; a
        second call does nothing.

        After it, and until ``zero_grad``, a backward is refused: it would add to gradients that are
        sums already.
        """
        self._check_attached()
        self.sum_gradients()

    def wait_for_parameters(self) -> None:
        """Return when the parameters have the values of the last step.

        Needed with ``overlap_param_sync`` only, before parameters are read otherwise than from
        their modules: forward passes, ``state_dict()`` and ``named_parameters()`` of the module
        wait by themselves.
        """
        self._gathering.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block backward only accumulates, whole gradients. With ``use_async_reducer``,
        ``overlap_grad_sync`` or ``use_zero=2``, all but the last backward belong there.
        """
        return self._reducer.no_sync()

    @checked
    def scale_grads(self, factor: float | Tensor) -> None:
        """Multiply all gradients. Raises :class:`UsageError` before they are synchronised."""
        if not self._reducer.is_synced:
            raise UsageError(
                "scale_grads() was called before the gradients were synchronised",
                why="what the other ranks add would not be scaled",
                hint="call optimizer.sync_shard_grad() first",
            )
        if isinstance(factor, Tensor) and factor.numel() != 1:
            raise UsageError(
                "factor is one number for all gradients",
                why=f"it is a tensor of shape {list(factor.shape)}",
            )
        scale = factor if isinstance(factor, Tensor) else float(factor)
        for _, tensor in self.gradient_holders:
            if tensor.grad is not None:
                tensor.grad.detach().mul_(scale)

    @checked
    def unscale_grads(self, factor: float) -> bool:
        """Multiply all gradients by a number, and tell whether some rank has one that is infinite
        or not a number: the same answer on all ranks. Synchronises the gradients if that has not
        happened. Collective. For :class:`LossScaler`.

        Raises :class:`UsageError` if gradients are float16: what the scale has kept from vanishing
        would vanish here.
        """
        self.sync_shard_grad()
        device = self._model.world.device
        found = unscale(
            [tensor.grad for _, tensor in self.gradient_holders if tensor.grad is not None],
            float(factor),
            device,
        )
        with concerning("whether gradients are finite"):
            # A sum of numbers that are 0 or more: above 0 if one of them is.
            return bool(self._model.world.everyone.all_reduce(found, phase="gradients"))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # The first thing that a step of torch's scaler asks its optimizer.
        raise UsageError(
            "torch.amp.GradScaler cannot scale the losses of an optimizer made by build_optimizer",
            why="it looks for overflow in what this rank holds of the gradients; ranks would "
            "disagree on which steps to skip",
            hint="use shardwright.LossScaler: it has the same methods, and loads the state dict "
            "of torch's",
        )

    @checked
    def clip_gnorm(self, max_norm: float | None = None) -> Tensor:
        """The 2-norm of all gradients together, as a scalar; they are scaled down to ``max_norm``
        if they exceed it.

        Every distinct element is counted once, whichever ranks hold it, so this equals
        ``torch.nn.utils.clip_grad_norm_`` on one device. Synchronises the gradients if that has not
        happened. Collective.
        """
        self.sync_shard_grad()
        world, dtype = self._model.world, norm_dtype(list(self._reducer.parameters))
        norm = global_norm(
            [tensor for _, tensor in self.counted_holders], world.everyone, dtype, world.device
        )
        if max_norm is not None:
            clip_by_norm([tensor for _, tensor in self.gradient_holders], max_norm, norm)
        return norm

    @checked
    def register_reducer_pre_hook(self, hook: ReducerHook) -> RemovableHandle:
        """Call ``hook(reducer, gradients)`` with the flat gradients of each bucket before they are
        summed over ranks.

        Gradients that no other rank adds to are in no bucket.
        """
        return self._reducer.register_pre_hook(hook)

    @checked
    def register_reducer_post_hook(self, hook: ReducerHook) -> RemovableHandle:
        """Call ``hook(reducer, gradients)`` with the flat gradients of each bucket after they were
        summed (or averaged).

        Where they are reduce-scattered, with this rank's slice of them.
        """
        return self._reducer.register_post_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's shards, for :meth:`load_state_dict` on the same rank of the same
        plan.

        Its groups have the names of their parameters as ``param_names`` and, under ZeRO, as
        ``param_shards`` the range of each that is this rank's, see :class:`ParameterShard`, or
        ``"whole"``. Masters of low-precision parameters are saved with the state.
        """
        self._gathering.finish()
        return with_masters(super().state_dict(), self)

    @checked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` gave. Masters that it lacks are taken from the parameters as
        they are.

        Raises :class:`CheckpointError` if it is the state of other shards.
        """
        self.load_all_but_masters(state_dict)
        load_masters(state_dict, self)

    def load_all_but_masters(self, state_dict: dict[str, Any]) -> None:
        """Load what the user's optimizer has made; what is updated stays as it is."""
        self._gathering.finish()
        super().load_state_dict(without_masters(state_dict, self))

    @checked
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: which gradients are summed was settled when the optimizer was built."""
        raise UsageError(
            "parameters cannot be added to an optimizer made by build_optimizer",
            hint="pass param_groups=fn(fqn, parameter) -> options to build_optimizer, or build a "
            "new optimizer",
        )

    def _synchronised(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        has_run = False

        def run() -> Any:
            nonlocal has_run
            if has_run:  # the optimizer may have changed its shards since
                self._exchange.give_values()
                self._gathering.run()
                self._gathering.finish()
            has_run = True
            loss = closure()
            self.sum_gradients()
            return loss if loss is None else self._model.total_loss(loss, self._reducer.divisor)

        return run

    def _begin_step(self) -> None:
        self._check_attached()
        self._gathering.finish()
        for shard in self.shards:
            shard.refresh()
        if not self._has_stepped:
            self._has_stepped = True
            self._model.check_copies()
        self._exchange.take_values()

    def sum_gradients(self) -> None:
        """Sum the gradients, and bring them to the owners of whole tensors, unless that has
        happened. Collective.
        """
        for name, parameter in self._frozen.items():
            if parameter.grad is not None:
                raise UsageError(
                    f"parameter {name!r} has a gradient, and was frozen when the optimizer "
                    "was built",
                    why="which gradients are summed over the ranks was settled then; each rank "
                    "would go its own way",
                    hint="build the optimizer again after changing requires_grad",
                )
        self._gathering.finish()  # of what forward did not read: ranks may compare the values
        self._reducer.sum_gradients()
        if self._round != self._reducer.num_rounds:
            self._exchange.take_gradients()
            self._round = self._reducer.num_rounds

    @property
    def gradient_holders(self) -> list[Named]:
        """Tensors whose ``grad``, together, are all that the optimizer or the user sees of the
        gradients.
        """
        return [
            *self._reducer.gradient_holders,
            *((whole.name, whole.tensor) for whole in self.wholes),
        ]

    @property
    def counted_holders(self) -> list[Named]:
        """Tensors that the optimizer sees: those this rank counts where every distinct element is
        counted once.
        """
        pieces = {id(piece) for piece in self._exchange.pieces}
        counted = [
            (name, tensor)
            for name, tensor in self._reducer.counted_holders
            if id(tensor) not in pieces
        ]
        return counted + [(whole.name, whole.tensor) for whole in self.wholes if whole.is_counted]

    def _check_attached(self) -> None:
        if not self._reducer.is_attached:
            raise UsageError(
                "this optimizer was replaced",
                why="build_optimizer was called again with some of its parameters, and gradients "
                "are summed once",
                hint="use the newer optimizer",
            )
