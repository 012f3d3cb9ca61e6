"""Make the user's optimizer a parallel one: any ``torch.optim`` optimizer.

:func:`build_optimizer` lets the user's optimizer be made on this rank's parameters, or under ZeRO
on this rank's shards of them, then gives the object a class that derives from
:class:`ParallelOptimizer` and from its own class. So it *is* an
``AdamW``: schedulers, hooks, ``state_dict`` and the user's own attributes work, and no method of
the object or of the user's class is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.arguments import checked
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import UsageError
from shardwright.runtime.module.call_checks import check_parameters
from shardwright.runtime.module.compiled import compiled_parts
from shardwright.runtime.module.distributed_checkpoints import watch_distributed_checkpoints
from shardwright.runtime.module.parameter_names import parameter_names
from shardwright.runtime.training.gradients import TrainedModel
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer
from shardwright.runtime.training.param_groups import agreed_members, asked_groups
from shardwright.runtime.training.reducer import Reducer
from shardwright.runtime.training.user_optimizer import (
    check_kind,
    kind_of,
    made_again,
    made_of,
    updated_names,
)
from shardwright.runtime.zero.build import shards_of
from shardwright.runtime.zero.gathering import ParameterGathering
from shardwright.runtime.zero.update_split import ELEMENTWISE
from shardwright.runtime.zero.whole_exchange import WholeParameters, whole_parameters
from shardwright.runtime.zero.whole_tensors import WHOLE


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

    Raises :class:`ConfigError` for a combination that cannot be honoured, :class:`UsageError`
    where state is split and parameters have gradients already, or torch has cut parameters by
    itself, and :class:`InputError` for parameters that were frozen or unfrozen since the module was
    compiled.
    """
    _check_not_cut_by_torch(module)
    config = None if compute_config is None else ComputeConfig.of(compute_config)
    model = TrainedModel(module, config)
    for part in model.parallel_modules:
        check_parameters(part, part.own_parameters())
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
    # What the optimizer sees by name: a shard or a whole in the place of the parameter it is of.
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
    parallel = _as_parallel(optimizer)
    parallel._model, parallel._reducer = model, reducer
    parallel._gathering, parallel.shards = _gathering_of(module, reducer, model), tuple(shards)
    parallel._exchange, parallel.wholes = exchange, exchange.members
    parallel.group_members = members
    parallel._frozen = _frozen_of(model, reducer, parameters, names.values())
    _write_names(parallel, names)
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
    watch_distributed_checkpoints(parallel)
    return parallel


def _as_parallel(optimizer: Optimizer) -> ParallelOptimizer:
    """Give the user's object a class that derives from ours and from its own."""
    user_class = type(optimizer)
    optimizer.__class__ = type(
        f"Parallel{user_class.__name__}",
        (ParallelOptimizer, user_class),
        {"__doc__": user_class.__doc__},
    )
    return cast(ParallelOptimizer, optimizer)


def _write_names(parallel: ParallelOptimizer, names: Mapping[int, str]) -> None:
    """Write into the groups what their tensors are called, and which elements each holds.

    ``names``: by ``id`` of the tensor. State dicts carry both, so that checkpoints can put states
    together without the module.
    """
    ranges: dict[str, Any] = {}
    # Without ZeRO a shard is all of its parameter, and state dicts say no more than torch's.
    if parallel._model.settings.stage:
        ranges |= {shard.name: [shard.start, shard.stop] for shard in parallel.shards}
    ranges |= {whole.name: WHOLE if whole.is_owner else [0, 0] for whole in parallel.wholes}
    for group in parallel.param_groups:
        group["param_names"] = [names[id(tensor)] for tensor in group["params"]]
        if ranges:
            group["param_shards"] = [ranges.get(name) for name in group["param_names"]]


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


def _check_not_cut_by_torch(module: nn.Module) -> None:
    """Refuse parameters that ``fully_shard`` or the like has cut, as around a parallel module whose
    parameters it was told to ignore.
    """
    for name, parameter in module.named_parameters():
        # By its name, as importing the class costs those who have none.
        if any(cls.__name__ == "DTensor" for cls in type(parameter).__mro__):
            parts = ", ".join(path for path in compiled_parts(module) if path)
            alone = f"the parallel part alone ({parts})" if parts else "another module"
            raise UsageError(
                f"build_optimizer cannot take parameter {name!r}, which is a DTensor",
                why="fully_shard, or whoever cut it, sums its gradient over ranks of its own, and "
                "build_optimizer would sum it again",
                hint="leave fully_shard out: build_optimizer sums gradients of ordinary parts, "
                "too, and ComputeConfig(use_zero=1 to 3) splits what it would; or give "
                f"build_optimizer {alone}, and what torch has cut an optimizer of its own",
            )


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
