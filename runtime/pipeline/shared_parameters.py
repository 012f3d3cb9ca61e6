"""Parameters that stages with meshes of different shape use.

The first stage that uses one owns it: it reduces its gradient and updates it like any other. The
other stages hold copies. After the last backward of a step their gradients go to the owner, before
it reduces its own; after each step of the optimizer the new values come back. So the copies cannot
drift apart, whatever the optimizer does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from shardwright.runtime.layout import Layout
from shardwright.runtime.pipeline.segment import Stage, box_shape, part
from shardwright.runtime.ranks.groups import RankMesh
from shardwright.runtime.ranks.messages import Messages
from shardwright.runtime.ranks.transport import Work
from shardwright.runtime.transfer import Box, Holding, pieces


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A parameter between its owner and one stage that has a copy. ``layout``: of the copy.
    ``ranks``: the stage's.

    ``home``: (rank of the copy, rank of the owner) to pairs of boxes, for gradients; ``back``: the
    other way, for values.
    """

    name: str
    owner: Stage
    stage: Stage
    layout: Layout
    ranks: RankMesh
    home: Mapping[tuple[int, int], Sequence[tuple[Box, Box]]]
    back: Mapping[tuple[int, int], Sequence[tuple[Box, Box]]]


class Copies:
    """The copies of parameters between the stages of a unit, as unit rank ``rank`` sees them.

    ``owned``: by name, the layout in each stage that uses the parameter. ``stages``: of the whole
    pipeline; ``ranks``: of each, as this rank sees it. Making it is collective.
    """

    def __init__(
        self,
        rank: int,
        owned: Mapping[str, Mapping[int, str]],
        stages: Sequence[Stage],
        ranks: Sequence[RankMesh],
    ) -> None:
        self._rank = rank
        self._copies: list[_Copy] = []
        for name, texts in sorted(owned.items()):
            layouts = {number: Layout.parse(text) for number, text in sorted(texts.items())}
            # The first stage owns it. Stages on the same ranks and mesh have one copy.
            first = min(layouts)
            for stage in dict.fromkeys(
                stages[number] for number in layouts if stages[number] != stages[first]
            ):
                number = next(number for number in layouts if stages[number] == stage)
                # Groups are made by all ranks, in one order.
                ranks[number].group(layouts[number].grad_partial)
                self._copies.append(
                    _copy(
                        name, stages[first], layouts[first], stage, layouts[number], ranks[number]
                    )
                )

    def __bool__(self) -> bool:
        return bool(self._copies)

    def is_copy(self, name: str) -> bool:
        """Whether this rank holds a copy of a parameter that another stage owns."""
        return any(copy.name == name and self._rank in copy.stage.ranks for copy in self._copies)

    def awaits_gradients(self, stage: Stage) -> bool:
        """Whether a stage owns a parameter of which others have copies."""
        return any(copy.owner == stage for copy in self._copies)

    @property
    def peers(self) -> set[int]:
        """The unit ranks that this one exchanges gradients and values with."""
        pairs = {
            pair for copy in self._copies for pair in (*copy.home, *copy.back) if self._rank in pair
        }
        return {rank for pair in pairs for rank in pair} - {self._rank}

    def bring_gradients_home(
        self,
        parameter: Callable[[str], nn.Parameter],
        messages: Messages,
        to_world: Callable[[int], int],
    ) -> None:
        """Add the gradients of copies to those of the owner, and forget them. ``parameter`` finds
        one by name.
        """
        sending, arriving = [], []
        for copy in self._copies:
            what = f"the gradient of {copy.name!r}"
            # A rank with a copy sends its gradient, and whether there is one.
            if self._rank in copy.stage.ranks:
                gradient, is_used = _whole_gradient(parameter(copy.name), copy)
                for peer, boxes in _outgoing(copy.home, self._rank):
                    x = torch.cat([_packed(gradient, boxes), is_used])
                    sending.append(messages.send(x, to_world(peer), what, phase="gradients"))
            # A rank of the owner receives a part from each of them.
            for peer, boxes in _incoming(copy.home, self._rank):
                own = parameter(copy.name)
                buffer = own.detach().new_empty(_volume(boxes) + 1, dtype=own.grad_dtype)
                work = messages.receive_(
                    buffer, to_world(peer), f"train_step for {what}", phase="gradients"
                )
                arriving.append((work, own, buffer, boxes))
        # All is on its way before anything is waited for.
        for work, own, buffer, boxes in arriving:
            work.wait()
            if buffer[-1]:  # else no backward reached the copy
                own.grad = (
                    torch.zeros_like(own, dtype=own.grad_dtype) if own.grad is None else own.grad
                )
                _unpack(buffer[:-1], own.grad, boxes, add=True)
        for message in sending:
            message.wait()

    def fetch_values(
        self,
        parameter: Callable[[str], nn.Parameter],
        messages: Messages,
        to_world: Callable[[int], int],
    ) -> None:
        """Give the copies the values that their owner has."""
        sending: list[Work] = []
        arriving = []
        # The other direction: from the owner to the copies.
        for copy in self._copies:
            for peer, boxes in _outgoing(copy.back, self._rank):
                x = _packed(parameter(copy.name).detach(), boxes)
                sending.append(
                    messages.send(
                        x, to_world(peer), f"the values of {copy.name!r}", phase="gradients"
                    )
                )
            for peer, boxes in _incoming(copy.back, self._rank):
                own = parameter(copy.name).detach()
                buffer = own.new_empty(_volume(boxes))
                work = messages.receive_(
                    buffer,
                    to_world(peer),
                    f"step for the values of {copy.name!r}",
                    phase="gradients",
                )
                arriving.append((work, own, buffer, boxes))
        for work, own, buffer, boxes in arriving:
            work.wait()
            _unpack(buffer, own, boxes)
        for message in sending:
            message.wait()


def _copy(
    name: str, owner: Stage, layout: Layout, stage: Stage, copy_layout: Layout, ranks: RankMesh
) -> _Copy:
    here = Holding(replace(layout, grad_partial=()), owner.mesh, owner.ranks)
    there = Holding(replace(copy_layout, grad_partial=()), stage.mesh, stage.ranks)
    # Where the owner's ranks have summands of a gradient, what comes in is added to one of them.
    takes = {
        rank
        for index, rank in enumerate(owner.ranks)
        if all(owner.mesh.coords(index)[axis] == 0 for axis in layout.grad_partial)
    }
    home = {pair: boxes for pair, boxes in pieces(there, here).items() if pair[1] in takes}
    return _Copy(name, owner, stage, copy_layout, ranks, home, pieces(here, there))


def _whole_gradient(parameter: nn.Parameter, copy: _Copy) -> tuple[Tensor, Tensor]:
    """The gradient of a copy, summed over its stage, and whether there is one [1]. The parameter
    keeps none.
    """
    flat = parameter.detach().new_zeros(parameter.numel() + 1, dtype=parameter.grad_dtype)
    if parameter.grad is not None:
        flat[:-1] = parameter.grad.reshape(-1)
        flat[-1] = 1
        parameter.grad = None
    copy.ranks.group(copy.layout.grad_partial).all_reduce_(flat, phase="gradients")
    return flat[:-1].view(parameter.shape), (flat[-1:] != 0).to(flat.dtype)


Boxes = list[Box]


def _outgoing(
    route: Mapping[tuple[int, int], Sequence[tuple[Box, Box]]], rank: int
) -> Iterator[tuple[int, Boxes]]:
    """The ranks that ``rank`` sends to, with the boxes of its tensor."""
    return (
        (receiver, [here for here, _ in pairs])
        for (sender, receiver), pairs in sorted(route.items())
        if sender == rank
    )


def _incoming(
    route: Mapping[tuple[int, int], Sequence[tuple[Box, Box]]], rank: int
) -> Iterator[tuple[int, Boxes]]:
    """The ranks that send to ``rank``, with the boxes of its tensor."""
    return (
        (sender, [there for _, there in pairs])
        for (sender, receiver), pairs in sorted(route.items())
        if receiver == rank
    )


def _volume(boxes: Boxes) -> int:
    return sum(prod(box_shape(box)) for box in boxes)


def _packed(x: Tensor, boxes: Boxes) -> Tensor:
    """The parts of ``x`` in the boxes, end to end."""
    return torch.cat([part(x, box).reshape(-1) for box in boxes])


def _unpack(flat: Tensor, x: Tensor, boxes: Boxes, *, add: bool = False) -> None:
    """Write (or add) what :func:`_packed` made into the boxes of ``x``."""
    for box, values in zip(
        boxes, torch.split(flat, [_volume([box]) for box in boxes]), strict=True
    ):
        target = part(x, box)
        values = values.view(target.shape)
        target.copy_(target + values if add else values)
