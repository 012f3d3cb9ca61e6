"""The user's optimizer, as far as it must be known before shards are made for it: its kind, and
what it is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.runtime.errors import ConfigError, malformed
from shardwright.runtime.training.gradients import TrainedModel
from shardwright.runtime.training.param_groups import AskedGroup


def made_of(
    optimizer_fn: Callable[..., Optimizer],
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, nn.Parameter],
    groups: Sequence[AskedGroup] | None,
    options: Mapping[str, Any],
) -> Optimizer:
    """What ``optimizer_fn`` makes of ``tensors``: all in order, or the ``groups`` that were asked
    for, empty ones too.

    ``tensors``: by the name of the parameter, what the optimizer sees of it.

    A rank of a pipeline may hold no parameters at all, or none that is trained. Optimizers refuse
    an empty list, and a function may leave out what is not trained. So there it gets one parameter
    more, of no element, which is taken out again.
    """
    if groups:
        asked = [
            {"params": [tensors[name] for name in group.names], **group.options} for group in groups
        ]
        return _made(optimizer_fn, asked, options)
    params = [tensors[name] for name in parameters]
    if any(tensor.requires_grad for tensor in params):
        return _made(optimizer_fn, params, options)
    # Taken out again below: it only keeps the constructor from refusing.
    nothing = nn.Parameter(torch.empty(0))
    optimizer = _made(optimizer_fn, [*params, nothing], options)
    for group in optimizer.param_groups:
        group["params"] = [tensor for tensor in group["params"] if tensor is not nothing]
    optimizer.state.pop(nothing, None)
    return optimizer


def _made(
    optimizer_fn: Callable[..., Optimizer], params: Sequence[Any], options: Mapping[str, Any]
) -> Optimizer:
    title = getattr(optimizer_fn, "__name__", type(optimizer_fn).__name__)
    with malformed(
        ConfigError,
        f"{title} cannot be made with these options",
        hint=f"options: {', '.join(options) or 'none'}",
    ):
        return _checked(optimizer_fn(params, **options))


def made_again(
    made: Optimizer,
    optimizer_fn: Callable[..., Optimizer],
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, nn.Parameter],
    groups: Sequence[AskedGroup] | None,
    options: Mapping[str, Any],
) -> Optimizer:
    """What ``optimizer_fn`` makes of ``tensors``, with the groups and options of ``made``, which it
    has made of the parameters themselves: it may have looked at their shapes, and ``tensors`` have
    others.

    Raises :class:`ConfigError` if it fails, or makes another number of groups.
    """
    try:
        optimizer = made_of(optimizer_fn, parameters, tensors, groups, options)
        problem = f"{len(optimizer.param_groups)} and {len(made.param_groups)} groups"
        is_alike = len(optimizer.param_groups) == len(made.param_groups)
    except Exception as error:
        cause = error.__cause__ or error  # what the function itself has raised
        problem, is_alike = f"{type(cause).__name__}: {cause}", False
    if not is_alike:
        raise ConfigError(
            "optimizer_fn makes something else of the pieces that this rank updates than of "
            "the parameters",
            why=f"{problem}; pieces are flat under ZeRO, whatever the shape of the parameter",
            hint="pass param_groups=fn(fqn, parameter) -> options to build_optimizer, and a class "
            "as optimizer_fn",
        )
    # The groups of the first call, with what stands for each parameter.
    names = updated_names(made, parameters)
    for group, original in zip(optimizer.param_groups, made.param_groups, strict=True):
        members = [tensors[names[id(parameter)]] for parameter in original["params"]]
        if [id(tensor) for tensor in members] != [id(tensor) for tensor in group["params"]]:
            group["params"] = members
        group.update({key: value for key, value in original.items() if key != "params"})
    return optimizer


def updated_names(optimizer: Optimizer, tensors: Mapping[str, nn.Parameter]) -> dict[int, str]:
    """The names of the parameters that the optimizer updates, by the identity of its tensors.

    Raises :class:`ConfigError` if it updates other tensors.
    """
    own = {id(tensor): name for name, tensor in tensors.items()}
    updated = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    foreign = [tensor for tensor in updated if id(tensor) not in own]
    if foreign:
        raise ConfigError(
            "the optimizer updates parameters that the module does not have",
            why=f"{len(foreign)} of them, the first of shape {list(foreign[0].shape)}",
            hint="make it of the parameters that optimizer_fn is called with",
        )
    return {id(tensor): own[id(tensor)] for tensor in updated}


def _checked(optimizer: Any) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            "optimizer_fn did not return an optimizer",
            why=f"it returned a {type(optimizer).__name__}",
            hint="pass a torch.optim class, or a function that takes parameters and returns one "
            "of its objects",
        )
    return optimizer


def kind_of(
    optimizer_fn: Callable[..., Optimizer],
    parameters: Mapping[str, nn.Parameter],
    groups: Sequence[AskedGroup] | None,
    options: Mapping[str, Any],
) -> tuple[type[Optimizer], Collection[str], Optimizer | None]:
    """The class of the optimizer, and the names of what it updates. A function must be called to
    know: then also its result.
    """
    called: Any = optimizer_fn.func if isinstance(optimizer_fn, partial) else optimizer_fn
    if isinstance(called, type) and issubclass(called, Optimizer):
        return called, parameters.keys(), None
    made = made_of(optimizer_fn, parameters, parameters, groups, options)
    return type(made), set(updated_names(made, parameters).values()), made


def check_kind(kind: type[Optimizer], model: TrainedModel, is_elementwise: bool) -> None:
    """Refuse optimizers for which it matters that ranks update different parts of the model. On all
    ranks alike.

    Raises :class:`ConfigError`.
    """
    if is_elementwise or not issubclass(kind, torch.optim.LBFGS):
        return
    why = "its update of a parameter depends on the gradients of all others"
    if model.settings.stage:
        raise ConfigError(
            f"{kind.__name__} cannot be split over ranks by ZeRO",
            why=why,
            hint="leave out use_zero, or use an optimizer that treats each parameter by itself",
        )
    elsewhere = model.part_elsewhere()
    if elsewhere is not None:
        raise ConfigError(
            f"{kind.__name__} cannot train a model of which ranks have different parts",
            why=f"{why}, and {elsewhere}",
            hint="plan with dp, or use an optimizer that treats each parameter by itself",
        )
