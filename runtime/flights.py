"""What is under way between ranks, and how autograd knows of it.

A :class:`Flight` begins to move tensors, and is waited for later. In autograd it is two functions,
joined by a token: a number without a value, which says that the one follows the other.

    token = leave(flight, tensors)        # forward: begins;  backward: waits
    ...
    tensors = arrive(flight, token)       # forward: waits;   backward: begins

So what the program computes between the two runs while the message is under way, and so does what
lies between them in the backward, which goes the other way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor
from torch.autograd import Function

from shardwright.runtime.ranks.counters import Phase
from shardwright.runtime.second_derivatives import differentiable_once

Finish = Callable[[], Sequence[Tensor]]
"""A function that waits for a message, and returns what it brought."""

Movement = Callable[[Sequence[Tensor], Phase], Finish]
"""A function that begins to move tensors."""


@dataclass(slots=True)
class Flight:
    """What moves: ``there`` in forward, ``back`` in backward, which has gradients of real numbers
    alone.

    ``finish``: waits for what is under way. ``weights``: those whose gradients are computed while
    the gradients are under way, and ``products`` the functions that do so, by the number of the
    weight.
    """

    there: Movement
    back: Movement
    finish: Finish | None = None
    weights: tuple[Tensor, ...] = ()
    products: dict[int, Callable[[], Tensor]] = field(default_factory=dict)

    def arrived(self) -> tuple[Tensor, ...]:
        """What was under way."""
        assert self.finish is not None, "nothing is under way"
        finish, self.finish = self.finish, None
        return tuple(finish())

    def number_of(self, weight: Tensor) -> int | None:
        """The number of a weight among those whose gradients are computed beside."""
        return next((i for i, known in enumerate(self.weights) if known is weight), None)


def leave(flight: Flight, tensors: Sequence[Tensor]) -> Tensor:
    """Begin to move ``tensors``, which must not be changed until :func:`arrive`. Returns the token
    for it.
    """
    return cast(Tensor, _Leave.apply(flight, *tensors))  # type: ignore[no-untyped-call]


def arrive(flight: Flight, token: Tensor, beside: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """Wait for what is under way. ``beside``: weights whose gradients are computed in between, in
    the backward.
    """
    if not token.requires_grad:
        # Without a gradient nothing comes back beside which anything could be computed.
        return flight.arrived()
    flight.weights = tuple(beside)
    return cast(
        tuple[Tensor, ...],
        _Arrive.apply(flight, token, *beside),  # type: ignore[no-untyped-call]
    )


def flight_of(x: Tensor) -> Flight | None:
    """The flight that brought ``x``, or what ``x`` is a view of."""
    kind: Any = _Arrive._backward_cls
    node: Any = x.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None or isinstance(node, kind):
            break
        above = [function for function, _ in node.next_functions if function is not None]
        node = above[0] if len(above) == 1 else None
    return cast(Flight, node.flight) if isinstance(node, kind) else None


_MOST_VIEWS = 4
"""How many views there may be between a product and what came for it."""


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: Tensor) -> Tensor:
        ctx.flight, ctx.real = flight, [x.is_floating_point() for x in tensors]
        flight.finish = flight.there(tensors, "forward")
        return next(itertools.compress(tensors, ctx.real), tensors[0]).new_zeros(())

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        back = iter(ctx.flight.arrived())
        return None, *(next(back) if one else None for one in ctx.real)


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, token: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        came = flight.arrived()
        ctx.flight, ctx.real = flight, [x.is_floating_point() for x in came]
        ctx.mark_non_differentiable(*itertools.compress(came, (not one for one in ctx.real)))
        return came

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flight: Flight = ctx.flight
        flight.finish = flight.back(list(itertools.compress(grads, ctx.real)), "backward")
        # The message is under way: now the products.
        products = [flight.products.pop(number, None) for number in range(len(flight.weights))]
        of_weights = [None if product is None else product() for product in products]
        return None, grads[0].new_zeros(()), *of_weights
