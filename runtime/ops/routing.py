"""Where the rows of experts are: which token each row was made of, and how it came to this rank.

Of 3 tokens that chose the experts (0, 1), (1, 2), (0, 2), sorted by expert, ``token`` is [0, 2, 0,
1, 1, 2] and ``ends`` is [2, 4, 6].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwright.runtime.arguments import shown
from shardwright.runtime.errors import ArgumentError
from shardwright.runtime.ops.axes import Axes
from shardwright.runtime.ranks.groups import AxisGroup

TokenDims = tuple[tuple[int | AxisGroup, ...], ...]
"""The dims that make up the tokens, outermost first. Of each its segments, laid end to end, and the
axes that cut them where tokens are exchanged, major to minor: ``((4, ep), (6,))`` are 4 samples cut
over ``ep``, of 6 positions.
"""


@dataclass(frozen=True, slots=True)
class Leg:
    """How tokens came along one axis, and their sums go back.

    ``received``: how many came from each rank. ``sent``: how many went to each. ``tokens``: which
    of the ``num_tokens`` that this rank had before it sent, by receiver.
    """

    axis: AxisGroup
    received: list[int]
    sent: list[int]
    tokens: Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How rows came from other ranks, and go back: one leg for each axis of ``exchange``.

    ``position [rows]``: which of the tokens that arrived in the end a row was made of.
    ``token_dims``: the tokens that they were cut from.
    """

    exchange: Axes
    token_dims: TokenDims
    position: Tensor
    legs: Sequence[Leg]


@dataclass(frozen=True, slots=True)
class Routing:
    """Which rows a rank holds.

    ``token [rows]``: the token of each row, counted among the ``num_tokens`` that lie on the ranks
    with which this one shares its experts' work. ``ends [experts]``, 32-bit: behind which row those
    of each expert end. ``choice [rows]``: which of all choices, token by token, each row is, if all
    ``top_k`` of every token are here. ``arrivals``: how rows came from other ranks, if they did.
    """

    token: Tensor
    ends: Tensor
    num_tokens: int
    top_k: int
    choice: Tensor | None = None
    arrivals: Arrivals | None = None

    @property
    def counts(self) -> Tensor:
        """The rows of each expert here, ``[experts]``."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))


def checked_routing(routing: Any) -> Routing:
    """``routing``, if it is what :func:`dispatch` returned. Raises :class:`ArgumentError`."""
    if not isinstance(routing, Routing):
        raise ArgumentError(
            "the routing of rows is what dispatch returned",
            why=f"it is {shown(routing)}",
        )
    return routing
