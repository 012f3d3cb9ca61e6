"""The functions of torch that clip gradients, right for gradients that lie on many ranks.

    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # that of one device

[Note: Why functions of torch are changed] On one rank ``p.grad`` is a piece of a gradient, or all
of it where other ranks have the same, and before the step it is a summand that nobody has summed.
What these functions make of such tensors is wrong, differs between ranks, and looks right. Nothing
about the tensors can prevent that: where ZeRO scatters gradients ``p.grad`` is ``None``, so the
functions see no tensor at all and return 0. So the functions have to know what parameters they were
given.

People reach them by many names: ``torch.nn.utils.clip_grad_norm_``, a name imported before
shardwright was, trainers of other libraries. Replacing one name would miss the others. But each of
these functions is a closure around the function that does the work, and all names lead to that
closure. :func:`watch_clipping` exchanges what is in it, when the first parallel module or optimizer
is made. For parameters that shardwright does not know the original runs with the same arguments.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from shardwright.runtime.errors import UsageError
from shardwright.runtime.training.all_gradients import (
    AllGradients,
    gradients_of,
    live_gradients,
    memory_of,
)

Tensors = Tensor | Iterable[Tensor]

Found = tuple[AllGradients, str | None] | None
"""The gradients that a tensor belongs to, and its name there; ``None`` for one that is this rank's
own.
"""


def watch_clipping() -> None:
    """Let torch's functions that clip gradients look at whose gradients they are. A second call
    does nothing.
    """
    with _lock:
        for name, function in _FUNCTIONS.items():
            cell = _cell_of(name)
            if cell.cell_contents is _ORIGINALS[name]:
                cell.cell_contents = functools.wraps(_ORIGINALS[name])(function)


def note_part(module: nn.Module) -> None:
    """Remember ``module``, whose parameters are each a :class:`PartOfModel`, while it lives.

    A gradient says nothing of the parameter that it belongs to. Where no optimizer of ours looks
    after the gradients of ``module``, this is how :func:`torch.nn.utils.get_total_norm` knows them.
    """
    with _lock:
        _parts.add(module)


def clip_by_norm(
    holders: list[Tensor], max_norm: float, norm: Tensor, foreach: bool | None = None
) -> None:
    """Scale the gradients of ``holders``, tensors of this rank, as
    ``torch.nn.utils.clip_grads_with_norm_`` does.
    """
    with torch.no_grad():
        _ORIGINALS["_clip_grads_with_norm_"](holders, max_norm, norm, foreach)


class _Given:
    """What a function was given: names of gradients that lie on many ranks, and tensors that are
    this rank's own.
    """

    def __init__(self, tensors: Tensors, found_of: Callable[[list[Tensor]], list[Found]]) -> None:
        self.all = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self.ordinary: list[Tensor] = []
        self.parallel: dict[AllGradients, set[str]] = {}
        for tensor, found in zip(self.all, found_of(self.all), strict=True):
            if found is None:
                self.ordinary.append(tensor)
            else:
                gradients, name = found
                names = self.parallel.setdefault(gradients, set())
                if name is not None:
                    names.add(name)
        if not self.all:  # all that a rank of a pipeline has, if its stages train no parameter
            self.parallel = {item: set() for item in live_gradients() if item.is_empty}

    def sync(self) -> None:
        for gradients in self.parallel:
            gradients.sync()

    def norms(self, order: float) -> list[Tensor]:
        return [gradients.norm(names, order) for gradients, names in self.parallel.items()]

    @property
    def holders(self) -> list[Tensor]:
        return [
            tensor
            for gradients, names in self.parallel.items()
            for tensor in gradients.holders(names)
        ]


def _by_parameters(tensors: list[Tensor]) -> list[Found]:
    found: list[Found] = []
    for tensor in tensors:
        gradients = gradients_of(tensor)
        if gradients is None and tensor.requires_grad and hasattr(tensor, PART):
            _refuse_unsummed(getattr(tensor, PART).owner, "clipped")
        found.append(None if gradients is None else (gradients, gradients.name_of(tensor)))
    return found


def _by_gradients(tensors: list[Tensor]) -> list[Found]:
    live = live_gradients()
    # Gradients are with the optimizer's shards, and the call would clip nothing.
    if not tensors and any(
        item.reducer.is_synced and not item.leaves_gradients and not item.is_empty for item in live
    ):
        _refuse_scattered()
    names = [(item, item.names_of_gradients()) for item in live]
    unsummed = _owners_of_unsummed()
    found: list[Found] = []
    for tensor in tensors:
        if tensor is None:  # [p.grad for p in parameters], where a rank's p.grad is no tensor
            if any(not item.leaves_gradients and not item.is_empty for item in live):
                _refuse_scattered()
            found.append(None)  # torch says what it says on one device
            continue
        if gradients_of(tensor) is not None or hasattr(tensor, PART):
            _refuse_values()
        # A gradient is known by its memory: views and copies of the list do not matter.
        place = memory_of(tensor)
        owners = [(item, known[place]) for item, known in names if place in known]
        if owners and not owners[0][0].leaves_gradients:
            _refuse_scattered()
        if not owners and place in unsummed:
            _refuse_unsummed(unsummed[place], "measured")
        found.append(owners[0] if owners else None)
    return found


def _owners_of_unsummed() -> dict[tuple[int, int], str]:
    """The class of the module of each gradient that is there now and that no optimizer of ours
    sums, by its place in memory and its number of elements.
    """
    with _lock:
        parts = list(_parts)
    owners = {}
    for module in parts:
        for scope in module.modules():
            # Not parameters(): that waits for those that an optimizer still gathers.
            for parameter in scope._parameters.values():
                if parameter is None or not hasattr(parameter, PART):
                    continue
                grad = parameter.grad
                if grad is not None and grad.numel() and gradients_of(parameter) is None:
                    owners[memory_of(grad)] = getattr(parameter, PART).owner
    return owners


def _clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    given = _Given(parameters, _by_parameters)
    if not given.all and not given.parallel:
        empty: Tensor = _ORIGINALS["clip_grad_norm_"](
            parameters, max_norm, norm_type, error_if_nonfinite, foreach
        )
        return empty
    given.sync()
    # Parameters of ordinary modules that the caller has put into the same list.
    own = [tensor.grad for tensor in given.ordinary if tensor.grad is not None]
    norm = _total(given, own, norm_type, error_if_nonfinite, foreach)
    clip_by_norm([*given.holders, *given.ordinary], max_norm, norm, foreach)
    return norm


def _get_total_norm(
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    given = _Given(tensors, _by_gradients)
    given.sync()
    return _total(given, given.ordinary, norm_type, error_if_nonfinite, foreach)


def _clip_grads_with_norm_(
    parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    given = _Given(parameters, _by_parameters)
    given.sync()
    clip_by_norm([*given.holders, *given.ordinary], max_norm, total_norm, foreach)


def _clip_grad_value_(parameters: Tensors, clip_value: float, foreach: bool | None = None) -> None:
    given = _Given(parameters, _by_parameters)
    given.sync()
    _ORIGINALS["clip_grad_value_"]([*given.holders, *given.ordinary], clip_value, foreach)


def _total(
    given: _Given, own: list[Tensor], order: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    """The norm of everything: the norm of a norm is itself, so torch's function joins them, and
    checks them as it does.
    """
    norms = given.norms(float(order))
    norm: Tensor = _ORIGINALS["_get_total_norm"]([*norms, *own], order, error_if_nonfinite, foreach)
    return norm


def _refuse_unsummed(owner: str, done: str) -> None:
    raise UsageError(
        f"gradients of {owner} were to be {done}, and nobody sums them over the ranks",
        why="each rank has a piece or a summand of a gradient, and no optimizer was made by "
        "build_optimizer, which sums them",
        hint="optimizer = shardwright.build_optimizer(model, torch.optim.AdamW, lr=...) before "
        "the first backward",
    )


def _refuse_scattered() -> None:
    raise UsageError(
        "the norm of scattered gradients cannot be had from p.grad",
        why="with ZeRO a rank has the sum for the part that it updates, and p.grad of the "
        "parameters is None",
        hint="pass the parameters, torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), "
        "or call optimizer.clip_gnorm(max_norm)",
    )


def _refuse_values() -> None:
    raise UsageError(
        "get_total_norm was given parameters of a parallel module, not gradients",
        why="this rank has pieces of them, and other ranks may have the same pieces",
        hint="pass gradients, or merge the parameters with shardwright.merge_state_dicts and take "
        "their norm there",
    )


def _cell_of(name: str) -> Any:
    """Where a function of torch keeps the function that does its work."""
    function = getattr(clip_grad, name)
    assert function.__code__.co_freevars == ("func",), (
        f"torch.nn.utils.clip_grad.{name} is no closure of one function"
    )
    return function.__closure__[0]


@dataclass(frozen=True, slots=True)
class PartOfModel:
    """The mark of a parameter of a parallel module that runs on several ranks.

    ``owner``: the class of the module. ``name``: of the parameter. ``needs_sum``: when backward is
    done, other ranks have summands of its gradient.
    """

    owner: str
    name: str
    needs_sum: bool


PART = "_shardwright_part"
"""The attribute of a parameter that is a :class:`PartOfModel`."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": _clip_grad_norm_,
    "_get_total_norm": _get_total_norm,
    "_clip_grads_with_norm_": _clip_grads_with_norm_,
    "clip_grad_value_": _clip_grad_value_,
}
_ORIGINALS: dict[str, Callable[..., Any]] = {
    name: _cell_of(name).cell_contents for name in _FUNCTIONS
}
_parts: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_lock = threading.Lock()
