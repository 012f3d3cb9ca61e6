"""Optimizers for parallel training: any ``torch.optim`` optimizer, with gradients summed over the ranks before its step.

:func:`build_optimizer` lets the user's optimizer be made on this rank's parameters, then gives the object a class that
derives from :class:`ParallelOptimizer` and from its own class. So it *is* an ``AdamW``: schedulers, hooks, ``state_dict`` and
the user's own attributes work, and no method of the object or of the user's class is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError, UsageError
from shardwright.runtime.gradients import TrainedModel
from shardwright.runtime.gradnorm import global_norm, norm_dtype
from shardwright.runtime.reducer import Reducer, ReducerHook

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop")
)
"""Optimizers whose update of an element depends on that element's gradients only, so that they work on any shard."""


class ParallelOptimizer(Optimizer):
    """What :func:`build_optimizer` returns: the user's optimizer, with gradients summed over the ranks before each step."""

    _model: TrainedModel
    _reducer: Reducer
    _has_stepped: bool = False

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Synchronise the gradients, then take a step. Collective: all ranks take it.

        The first step compares the copies of the parameters first, see :meth:`TrainedModel.check_copies`.

        With a ``closure``, gradients are synchronised each time it has run, and the loss it returns is summed (or averaged)
        over the units as they are: optimizers that look at it decide alike on all ranks.
        """
        self._begin_step()
        if closure is None:
            self._reducer.sync()
            result = super().step(*args, **kwargs)
        else:
            result = super().step(self._synchronised(closure), *args, **kwargs)
        self._reducer.reopen()
        for module in self._model.parallel_modules:
            module.rng.next_step()
        return result

    # torch wraps the step of every class it has not seen, so that its hooks run there; they run in the user's step already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the whole module, also of parameters this optimizer does not update."""
        self._reducer.clear(set_to_none)
        super().zero_grad(set_to_none)

    def sync_shard_grad(self) -> None:
        """Sum the gradients over the ranks now, to look at them before :meth:`step`. Collective; a second call does nothing.

        After it, and until ``zero_grad``, a backward is refused: it would add to gradients that are sums already.
        """
        self._check_attached()
        self._reducer.sync()

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside the block backward only accumulates. With ``use_async_reducer``, all but the last backward belong there."""
        return self._reducer.no_sync()

    def scale_grads(self, factor: float | Tensor) -> None:
        """Multiply all gradients. Raises :class:`UsageError` before they are synchronised."""
        if not self._reducer.is_synced:
            raise UsageError(
                "scale_grads() was called before the gradients were synchronised",
                why="what the other ranks add would not be scaled",
                hint="call optimizer.sync_shard_grad() first",
            )
        for parameter in self._reducer.parameters:
            if parameter.grad is not None:
                parameter.grad.detach().mul_(factor)

    def clip_gnorm(self, max_norm: float | None = None) -> Tensor:
        """The 2-norm of all gradients together, as a scalar; they are scaled down to ``max_norm`` if they exceed it.

        Every distinct element is counted once, whichever ranks hold it, so this equals ``torch.nn.utils.clip_grad_norm_`` on
        one device. Synchronises the gradients if that has not happened. Collective.
        """
        self.sync_shard_grad()
        model, parameters = self._model, list(self._reducer.parameters)
        norm = global_norm(model.counted, model.world.everyone, norm_dtype(parameters), model.world.device)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def register_reducer_pre_hook(self, hook: ReducerHook) -> RemovableHandle:
        """Call ``hook(reducer, gradients)`` with the flat gradients of each bucket before they are summed over ranks.

        Gradients that no other rank adds to are in no bucket.
        """
        return self._reducer.register_pre_hook(hook)

    def register_reducer_post_hook(self, hook: ReducerHook) -> RemovableHandle:
        """Call ``hook(reducer, gradients)`` with the flat gradients of each bucket after they were summed (or averaged)."""
        return self._reducer.register_post_hook(hook)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: which gradients are summed was settled when the optimizer was built."""
        raise UsageError(
            "parameters cannot be added to an optimizer made by build_optimizer",
            hint="pass param_groups=fn(fqn, parameter) -> options to build_optimizer, or build a new optimizer",
        )

    def _synchronised(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            self._reducer.sync()
            return loss if loss is None else self._model.total_loss(loss, self._reducer.divisor)

        return run

    def _begin_step(self) -> None:
        self._check_attached()
        if not self._has_stepped:
            self._has_stepped = True
            self._model.check_copies()

    def _check_attached(self) -> None:
        if not self._reducer.is_attached:
            raise UsageError(
                "this optimizer was replaced",
                why="build_optimizer was called again with some of its parameters, and gradients are summed once",
                hint="use the newer optimizer",
            )


def build_optimizer(
    module: nn.Module,
    optimizer_fn: Callable[..., Optimizer],
    compute_config: ComputeConfig | Mapping[str, Any] | None = None,
    *,
    param_groups: Callable[[str, nn.Parameter], Mapping[str, Any]] | None = None,
    elementwise: bool = False,
    **kwargs: Any,
) -> ParallelOptimizer:
    """An optimizer for a module that is, or contains, compiled modules; parts that were not compiled are trained too.

    ``optimizer_fn(parameters, **kwargs)`` is an optimizer class or a function that returns an optimizer. ``param_groups``
    gives the options of each parameter by name (``lambda name, p: {"weight_decay": 0.0} if p.ndim < 2 else {}``); those with
    equal options form a group. ``elementwise=True`` declares of an optimizer we do not know that its update of an element
    depends on that element alone, so that it may work on shards.

    Gradients are reduced as the modules were compiled to (``grad_reduction``, ``use_async_reducer``,
    ``reducer_bucket_cap_mb``). ``compute_config`` says it where no module was compiled, and is compared otherwise.

    Collective. Modules that were not compiled must hold the same values on all ranks, and get the same inputs on all ranks
    of a unit. A second call on the same parameters replaces the first.

    Raises :class:`ConfigError` for a combination that cannot be honoured.
    """
    config = None if compute_config is None else ComputeConfig.of(compute_config)
    model = TrainedModel(module, config)
    optimizer = optimizer_fn(_parameters(module, param_groups), **kwargs)
    _check_optimizer(optimizer, module)
    if not elementwise:
        _check_elementwise(optimizer, model)
    reducer = model.make_reducer()
    user_class = type(optimizer)
    name = f"Parallel{user_class.__name__}"
    optimizer.__class__ = type(name, (ParallelOptimizer, user_class), {"__doc__": user_class.__doc__})
    parallel = cast(ParallelOptimizer, optimizer)
    parallel._model, parallel._reducer = model, reducer
    # Where torch keeps names too: state dicts carry them, and can be merged without the module.
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for group in parallel.param_groups:
        group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
    return parallel


def _parameters(
    module: nn.Module, param_groups: Callable[[str, nn.Parameter], Mapping[str, Any]] | None
) -> list[nn.Parameter] | list[dict[str, Any]]:
    """What the optimizer is made of: all parameters in order, or groups in the order of their first parameters."""
    if param_groups is None or next(module.parameters(), None) is None:
        # A rank of a pipeline may hold no parameters at all; optimizers refuse an empty list, not an empty group.
        return list(module.parameters()) or [{"params": []}]
    groups: list[dict[str, Any]] = []
    for name, parameter in module.named_parameters():
        options = dict(param_groups(name, parameter))
        for group in groups:
            if {key: value for key, value in group.items() if key != "params"} == options:
                group["params"].append(parameter)
                break
        else:
            groups.append({"params": [parameter], **options})
    return groups


def _check_optimizer(optimizer: Any, module: nn.Module) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "optimizer_fn did not return an optimizer",
            why=f"it returned a {type(optimizer).__name__}",
            hint="pass a torch.optim class, or a function that takes parameters and returns one of its objects",
        )
    own = {id(parameter) for parameter in module.parameters()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise ConfigError(
            "the optimizer updates parameters that the module does not have",
            why=f"{len(foreign)} of them, the first of shape {list(foreign[0].shape)}",
            hint="make it of the parameters that optimizer_fn is called with",
        )


def _check_elementwise(optimizer: Optimizer, model: TrainedModel) -> None:
    if type(optimizer) in ELEMENTWISE:
        return
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter, layout in model.cut_parameters():
        if id(parameter) in updated:
            raise ConfigError(
                f"{type(optimizer).__name__} may need whole tensors, but {name!r} is split over ranks",
                why=f"its layout is {layout}; only optimizers that treat every element by itself work on a piece",
                hint="use one of torch.optim's elementwise optimizers, plan without splitting parameters, or pass "
                "elementwise=True if an element's update depends on nothing but its own gradients",
            )
