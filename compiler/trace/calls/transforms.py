"""``torch.vmap`` while tracing.

Under a transform of ``torch.func`` a call sees one element of its operands, and a function mode
sees calls on elements. ``make_fx`` runs the transformed function once below the transform and lists
the operators on whole tensors that torch's batching rules make of it. These run again as ordinary
functions of torch, and are recorded like any others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from shardwright.compiler.trace.calls.call_arguments import tensors_in
from shardwright.compiler.trace.refusals import Refusals


class Modes(Protocol):
    """The function mode under which calls are recorded. ``refusals``: of the running trace."""

    refusals: Refusals

    def unseen(self) -> Any:
        """A context in which calls are run and not recorded."""

    def on_fakes(self, arg: Any) -> Any:
        """An argument with captured tensors as fakes."""

    def untransformed(self, name: str) -> Exception:
        """The error for an operator without a function of torch that means it."""


@contextmanager
def vmap_traced(modes: Modes) -> Iterator[None]:
    """``torch.vmap`` records the operators on whole tensors."""
    original = torch.vmap

    @functools.wraps(original)
    def vmap(func: Callable[..., Any], *settings: Any, **named: Any) -> Callable[..., Any]:
        mapped = original(func, *settings, **named)

        @functools.wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            if any(
                map(torch._C._functorch.is_functorch_wrapped_tensor, tensors_in((args, kwargs)))
            ):
                return mapped(*args, **kwargs)  # inside of another one
            with modes.refusals:
                return _run_whole(modes, mapped, modes.on_fakes(args), kwargs)

        return run

    owners = [owner for owner in (torch, torch.func) if getattr(owner, "vmap", None) is original]
    with ExitStack() as stack:
        for owner in owners:
            setattr(owner, "vmap", vmap)  # noqa: B010
            stack.callback(setattr, owner, "vmap", original)
        yield


def _run_whole(
    modes: Modes, mapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # ``make_fx`` takes tensors alone; the rest is bound.
    places = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> Any:
        given = list(args)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return mapped(*given, **kwargs)

    tensors = [args[place] for place in places]
    with modes.unseen():
        listed = make_fx(of_tensors, _allow_non_fake_inputs=True)(*tensors)
    return _Again(listed, modes).run(*tensors)


class _Again(Interpreter):
    """Runs listed operators as functions of torch."""

    def __init__(self, listed: GraphModule, modes: Modes) -> None:
        with modes.unseen():
            super().__init__(listed)
        self._modes = modes

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """One operator of the list."""
        name = target._opname if isinstance(target, torch._ops.OpOverload) else target.__name__
        if name in _OTHERWISE:
            return _OTHERWISE[name](*args, **kwargs)
        for home in (torch.Tensor, torch, F):
            if isinstance(target, torch._ops.OpOverload) and hasattr(home, name):
                return getattr(home, name)(*args, **kwargs)
        if isinstance(target, torch._ops.OpOverload):
            raise self._modes.untransformed(name)
        return target(*args, **kwargs)


def _indexed(x: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    return x[tuple(slice(None) if index is None else index for index in indices)]


def _copied(x: torch.Tensor, *, dtype: torch.dtype | None = None, **ignored: Any) -> torch.Tensor:
    return x.to(dtype or x.dtype)


def _full(value: Any, *, dtype: torch.dtype | None = None, **ignored: Any) -> torch.Tensor:
    return torch.full((), value, dtype=dtype)


_OTHERWISE: dict[str, Callable[..., Any]] = {
    "index": _indexed,
    "where": torch.where,  # the method takes the condition second
    "_to_copy": _copied,
    "scalar_tensor": _full,
    "lift_fresh_copy": lambda x: x,
    "lift_fresh": lambda x: x,
    "alias": lambda x: x,
    "expand": lambda x, size, implicit=False: x.expand(size),
    "_unsafe_view": lambda x, size: x.reshape(size),
    "view": lambda x, size: x.reshape(size),
}
"""Operators without a function of torch that has their name and their arguments."""
