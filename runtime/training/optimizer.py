"""Optimizers for parallel training: any ``torch.optim`` optimizer, with gradients summed over the
ranks before its step.

:func:`build_optimizer` lets the user's optimizer be made on this rank's parameters, or under ZeRO
on this rank's shards of them, then gives the object a class that derives from
:class:`ParallelOptimizer` and from its own class. So it *is* an
``AdamW``: schedulers, hooks, ``state_dict`` and the user's own attributes work, and no method of
the object or of the user's class is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwright.runtime.arguments import checked
from shardwright.runtime.bucket import Named
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import UsageError
from shardwright.runtime.module.parameter_names import parameter_names
from shardwright.runtime.ranks.failures import concerning
from shardwright.runtime.training.clipping import clip_by_norm
from shardwright.runtime.training.gradients import TrainedModel
from shardwright.runtime.training.gradnorm import global_norm, norm_dtype, unscale
from shardwright.runtime.training.param_groups import Members, agreed_members, asked_groups
from shardwright.runtime.training.reducer import Reducer, ReducerHook
from shardwright.runtime.training.user_optimizer import (
    check_kind,
    kind_of,
    made_again,
    made_of,
    updated_names,
)
from shardwright.runtime.zero.build import shards_of
from shardwright.runtime.zero.gathering import ParameterGathering
from shardwright.runtime.zero.shards import ParameterShard
from shardwright.runtime.zero.state_masters import load_masters, with_masters, without_masters
from shardwright.runtime.zero.update_split import ELEMENTWISE
from shardwright.runtime.zero.whole_exchange import WholeParameters, whole_parameters
from shardwright.runtime.zero.whole_tensors import WHOLE, WholeParameter


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


@checked
def build_optimizer(
    module: nn.Module,
    optimizer_fn: Callable[..., Optimizer],
    compute_config: ComputeConfig | Mapping[str, Any] | None = None,
    *,
    param_groups: Callable[[str, nn.Parameter], Mapping[str, Any]] | None = None,
    elementwise: bool = False,
    **kwargs: Any,
) -> ParallelOptimizer:
    """An optimizer for a module that is, or contains, compiled modules; parts that were not
    compiled are trained too.

    ``optimizer_fn(parameters, **kwargs)`` is an optimizer class or a function that returns an
    optimizer. A function may be called twice, as it must be known what it makes before shards are
    made for it; groups and options are those of the first call. ``param_groups`` gives the options
    of each parameter by name (``lambda name, p: {"weight_decay": 0.0} if p.ndim < 2 else {}``);
    those with equal options form a group. All ranks have the same groups, in the order of their
    first parameters in the original model; a group may be empty on a rank of a pipeline.

    ``elementwise=True`` declares of an optimizer we do not know that its update of an element
    depends on that element alone, so that it may work on shards. Under ZeRO it is given flat pieces
    of the parameters then. Other optimizers get whole parameters: under ZeRO, and of those that the
    plan cuts, each on one rank, and empty tensors in the place of those that other ranks own.

    Gradients are reduced, and optimizer state is split, as the modules were compiled to
    (``grad_reduction``, ``use_async_reducer``, ``reducer_bucket_cap_mb``, ``use_zero`` and the
    options beside it). ``compute_config`` says it where no module was compiled, and is compared
    otherwise.

    Collective. Modules that were not compiled must hold the same values on all ranks, and get the
    same inputs on all ranks of a unit. A second call on the same parameters replaces the first.

    Raises :class:`ConfigError` for a combination that cannot be honoured, and :class:`UsageError`
    where state is split and parameters have gradients already.
    """
    config = None if compute_config is None else ComputeConfig.of(compute_config)
    model = TrainedModel(module, config)
    parameters = dict(module.named_parameters())
    # Shards take the place of parameters: gradients that are there already would be lost.
    if model.settings.makes_shards:
        _check_no_gradients(model, parameters)
    order = parameter_names(module)
    groups = (
        None if param_groups is None else asked_groups(model.world, order, parameters, param_groups)
    )
    # What the user makes of the parameters tells which of them it updates, and of which class it
    # is.
    kind, updated, made = kind_of(optimizer_fn, parameters, groups, kwargs)
    is_elementwise = elementwise or kind in ELEMENTWISE
    check_kind(kind, model, is_elementwise)
    # Pieces are enough for elementwise updates; others need whole tensors of what the plan cuts.
    cut = [] if is_elementwise else [item for item in model.cut if item.name in updated]
    owns_wholes = not is_elementwise if model.settings.makes_shards else None
    reducer = model.make_reducer(owns_wholes, exchanged={item.name for item in cut})
    shards = shards_of(reducer.buckets)
    exchange = (
        WholeParameters()
        if is_elementwise
        else whole_parameters(model.world, cut, shards, model.settings)
    )
    # What the optimizer sees under each name: the parameter, a shard of it, or a whole.
    tensors: Mapping[str, nn.Parameter] = {
        **parameters,
        **{shard.name: shard.tensor for shard in shards},
        **{whole.name: whole.tensor for whole in exchange.members},
    }
    exchange.take_values()
    # A function that was called to look is not called again unless it must see other tensors.
    if made is None:
        optimizer = made_of(optimizer_fn, parameters, tensors, groups, kwargs)
    elif shards or exchange.members:
        optimizer = made_again(made, optimizer_fn, parameters, tensors, groups, kwargs)
    else:
        optimizer = made
    exchange.release()
    names = updated_names(optimizer, tensors)
    members = agreed_members(model.world, order, optimizer, names)
    # The user's object gets a class that derives from ours and from its own.
    user_class = type(optimizer)
    name = f"Parallel{user_class.__name__}"
    optimizer.__class__ = type(
        name, (ParallelOptimizer, user_class), {"__doc__": user_class.__doc__}
    )
    parallel = cast(ParallelOptimizer, optimizer)
    parallel._model, parallel._reducer = model, reducer
    parallel._gathering, parallel.shards = _gathering_of(module, reducer, model), tuple(shards)
    parallel._exchange, parallel.wholes = exchange, exchange.members
    parallel.group_members = members
    parallel._frozen = _frozen_of(model, reducer, parameters, names.values())
    # Which elements a state tensor is for: checkpoints need it to put states together.
    ranges: dict[str, Any] = {
        shard.name: [shard.start, shard.stop] for shard in shards if model.settings.stage
    }
    ranges |= {whole.name: WHOLE if whole.is_owner else [0, 0] for whole in exchange.members}
    for group in parallel.param_groups:
        # Where torch keeps names too: state dicts carry them, and can be merged without the module.
        group["param_names"] = [names[id(tensor)] for tensor in group["params"]]
        if ranges:
            group["param_shards"] = [ranges.get(name) for name in group["param_names"]]
    for shard in shards:
        shard.settle()
    model.agreement.watch(parallel)
    model.gradients.kept_by(
        parallel,
        [
            *((s.name, s.tensor) for s in shards),
            *((whole.name, whole.tensor) for whole in exchange.members),
        ],
    )
    return parallel


def _frozen_of(
    model: TrainedModel,
    reducer: Reducer,
    parameters: Mapping[str, nn.Parameter],
    updated: Collection[str],
) -> dict[str, Tensor]:
    """The ordinary parameters among those named in ``updated`` that are not trained. With several
    units, they would differ between units if they were.

    Compiled modules look after their own.
    """
    if model.ranks.num_units == 1:
        return {}
    compiled = (parameter for part in model.parallel_modules for parameter in part.parameters())
    known = {id(parameter) for parameter in (*reducer.parameters, *compiled)}
    return {name: parameters[name] for name in updated if id(parameters[name]) not in known}


def _check_no_gradients(model: TrainedModel, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse gradients that no bucket has seen: nobody knows whether they are summed already.
    Collective.
    """
    mine = next(
        (name for name, p in parameters.items() if p.grad is not None and p.grad.any()), None
    )
    for name in model.world.all_gather_object(mine):
        if name is not None:
            raise UsageError(
                f"parameter {name!r} has a gradient from before the optimizer was built",
                why="where optimizer state is split, gradients are collected in buffers that are "
                "made with the optimizer",
                hint="build the optimizer before the first backward, or clear the gradients with "
                "zero_grad()",
            )


def _gathering_of(module: nn.Module, reducer: Reducer, model: TrainedModel) -> ParameterGathering:
    return ParameterGathering(module, reducer.buckets, overlaps=model.settings.overlaps_parameters)
