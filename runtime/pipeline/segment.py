"""What a generated class of a pipelined module says about its stages, as data.

    stages = (
        Stage(Mesh((("tp", 2),)), (0, 1)),
        Stage(Mesh((("tp", 2),)), (2, 3)),
    )
    segments = {                                             # of rank 2, which has stage 1 only
        1: Segment(
            reads=("labels",),
            receives=(
                Transfer("hidden", stage=0, shape=(4, 8, 16), dtype=torch.float32,
                         differentiable=True, pieces=((0, ((0, 4), (0, 8), (0, 16))),),
                         grad_pieces=((0, ((0, 4), (0, 8), (0, 16))),)),
            ),
            sends=(),
            outputs=("loss", "logits"),
        ),
    }

Ranks are those of one unit. A value that crosses stages is whole or cut on either side, never a
summand, and so is its gradient: every receiver gets its local tensor in pieces that cover it once,
and every sender its local gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.runtime.layout import Mesh
from shardwright.runtime.transfer import Box


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous piece of the model: its mesh, and the unit ranks it lies on, in the order of the
    mesh. ``joined_axes``: the sets of axes that one adapter goes over.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    joined_axes: tuple[tuple[str, ...], ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value on its way between this rank and another stage, as this rank sees it.

    ``name``: of the value. ``stage``: the one at the other end; a value that several stages use has
    a transfer for each. ``shape``, ``dtype``: of this rank's local tensor. ``differentiable``:
    whether a gradient comes back. ``pieces``: which boxes of the local tensor come from, or go to,
    which unit rank; this rank's own number means a hand-over between its stages. ``grad_pieces``:
    the same for the local gradient, which travels the other way. Where sizes vary between samples,
    ``shape`` and the pieces are worked out for each of them, see
    :mod:`shardwright.runtime.pipeline.sample_sizes`.
    """

    name: str
    stage: int
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    differentiable: bool = True
    pieces: tuple[tuple[int, Box], ...] = ()
    grad_pieces: tuple[tuple[int, Box], ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one stage in the pipeline, on one rank.

    ``reads``: the tensors it takes from the sample, as paths of ``inputs``. ``receives``: values of
    earlier stages. Both, in this order, are the arguments of the method ``stage<number>``.
    ``sends``: values for later stages. ``outputs``: the leaves of the module's result made here, by
    path. These two, in this order, are what the method returns. ``sizes``: those of the sizes that
    vary between samples which the method takes, as keywords.
    """

    reads: tuple[str, ...] = ()
    receives: tuple[Transfer, ...] = ()
    sends: tuple[Transfer, ...] = ()
    outputs: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of the part."""
    return tuple(stop - start for start, stop in box)


def part(x: Tensor, box: Box) -> Tensor:
    """The part of ``x`` in the box, as a view."""
    return x[tuple(slice(start, stop) for start, stop in box)]
