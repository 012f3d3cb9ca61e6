"""Cutting one dim of a tensor into the pieces of a group's members, and joining them: pure data
movement, no communication.

A dim of ``cut.length`` elements is ``cut.outer`` repeats of ``cut.segments``, each element of a
segment ``cut.inner`` long. Every segment is cut by :func:`~shardwright.runtime.runs.dealt`; a
member holds its part of every segment of every repeat, in ascending order. Pieces may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shardwright.runtime.layout import Cut, Layout, Mesh
from shardwright.runtime.mesh import Coords


def whole_cut(length: int) -> Cut:
    """A dim of ``length`` elements as one segment."""
    return Cut((length,))


def piece_lengths(cut: Cut, num_pieces: int) -> list[int]:
    """How many elements each member holds."""
    return [cut.local_length(num_pieces, index) for index in range(num_pieces)]


def is_plain(cut: Cut) -> bool:
    """Whether the pieces lie end to end in the whole: one segment, not repeated."""
    return cut.outer == 1 and len(cut.segments) == 1 and not cut.turns and not cut.element


def take_piece(x: Tensor, dim: int, cut: Cut, num_pieces: int, index: int) -> Tensor:
    """Member ``index``'s piece of the whole ``x``, which may be a view of it."""
    assert x.shape[dim] == cut.length, (
        f"dim {dim} has length {x.shape[dim]}, but {cut} has {cut.length}"
    )
    if is_plain(cut):
        ((start, size),) = cut.runs(num_pieces, index)
        return x.narrow(dim, start * cut.inner, size * cut.inner)
    # [.., outer, repeat, inner, ..]: the runs lie in the middle one of the three.
    repeats = torch.unflatten(x, dim, (cut.outer, cut.repeat, cut.inner))
    parts = [repeats.narrow(dim + 1, start, size) for start, size in cut.runs(num_pieces, index)]
    if not parts:
        return x.narrow(dim, 0, 0)
    return torch.cat(parts, dim + 1).flatten(dim, dim + 2)


def take_pieces(x: Tensor, dim: int, cut: Cut, num_pieces: int) -> list[Tensor]:
    """All members' pieces of the whole ``x``, which may be views of it."""
    return [take_piece(x, dim, cut, num_pieces, index) for index in range(num_pieces)]


def join_pieces(pieces: Sequence[Tensor], dim: int, cut: Cut) -> Tensor:
    """The whole, as a new tensor, from the pieces of all members."""
    if is_plain(cut):
        return torch.cat(list(pieces), dim)
    parts: list[tuple[int, Tensor]] = []  # and where each begins
    for index, x in enumerate(pieces):
        runs = cut.runs(len(pieces), index)
        if not runs:
            continue
        sizes = [size for _, size in runs]
        repeats = torch.unflatten(x, dim, (cut.outer, sum(sizes), cut.inner))
        for (start, size), part in zip(runs, torch.split(repeats, sizes, dim + 1), strict=True):
            if size:
                parts.append((start, part))
    if not parts:
        return torch.cat(list(pieces), dim)
    # Parts of the members interleave: all those of the first segment come first.
    parts.sort(key=lambda part: part[0])
    return torch.cat([part for _, part in parts], dim + 1).flatten(dim, dim + 2)


def put_piece(whole: Tensor, x: Tensor, dim: int, cut: Cut, num_pieces: int, index: int) -> None:
    """Write member ``index``'s piece ``x`` to its place in ``whole``, a contiguous tensor."""
    repeats = torch.unflatten(whole, dim, (cut.outer, cut.repeat, cut.inner))
    runs = cut.runs(num_pieces, index)
    sizes = [size for _, size in runs]
    parts = torch.unflatten(x, dim, (cut.outer, sum(sizes), cut.inner))
    for (start, size), part in zip(runs, torch.split(parts, sizes, dim + 1), strict=True):
        repeats.narrow(dim + 1, start, size).copy_(part)


def copy_piece(
    whole: Tensor, dim: int, cut: Cut, num_pieces: int, index: int, into: Tensor
) -> None:
    """Write member ``index``'s piece of ``whole`` into ``into``, a contiguous tensor of its
    shape.
    """
    repeats = torch.unflatten(whole, dim, (cut.outer, cut.repeat, cut.inner))
    runs = cut.runs(num_pieces, index)
    sizes = [size for _, size in runs]
    parts = torch.unflatten(into, dim, (cut.outer, sum(sizes), cut.inner))
    for (start, size), part in zip(runs, torch.split(parts, sizes, dim + 1), strict=True):
        part.copy_(repeats.narrow(dim + 1, start, size))


def pad_piece(x: Tensor, dim: int, cut: Cut, num_pieces: int, index: int) -> Tensor:
    """A new tensor as long as the whole, with zeros everywhere but at member ``index``'s piece
    ``x``.
    """
    if is_plain(cut):
        result = x.new_zeros(*x.shape[:dim], cut.length, *x.shape[dim + 1 :])
        take_piece(result, dim, cut, num_pieces, index).copy_(x)
        return result
    # Pieces in several runs (zigzag, segments) are laid into each other by ``join_pieces``.
    shapes = [
        (*x.shape[:dim], length, *x.shape[dim + 1 :]) for length in piece_lengths(cut, num_pieces)
    ]
    return join_pieces(
        [x if i == index else x.new_zeros(shape) for i, shape in enumerate(shapes)], dim, cut
    )


def local_piece(whole: Tensor, layout: Layout, mesh: Mesh, coords: Coords) -> Tensor:
    """What a rank at ``coords`` holds of a whole tensor that lies as ``layout`` says."""
    for dim in range(whole.ndim):
        if layout.dim_axes(dim):
            parts = [
                whole.narrow(dim, start, stop - start)
                for start, stop in layout.runs(dim, mesh, coords)
            ]
            whole = torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)
    return whole


def _owners(cut: Cut, num_pieces: int) -> Tensor:
    """The member that holds each position of the dim."""
    lengths = enumerate(piece_lengths(cut, num_pieces))
    return join_pieces([torch.full((length,), member) for member, length in lengths], 0, cut)


@lru_cache(maxsize=1024)
def recut_positions(
    cut: Cut, to_cut: Cut, num_pieces: int, index: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """How a dim cut by ``cut`` becomes one cut by ``to_cut``: positions in the old piece to send,
    in the new one to fill.

    Two tuples by member: which elements of ``index``'s old piece go to the member, and which of its
    new piece come from it; both ascending in the whole, so that sender and receiver agree on the
    order.
    """
    assert cut.length == to_cut.length, f"{cut} and {to_cut} are cuts of different lengths"
    # For every position of the dim, which member has it under each cut.
    places = torch.arange(cut.length)
    old_owner, new_owner = _owners(cut, num_pieces), _owners(to_cut, num_pieces)
    # Where the elements of my old piece go, and where those of my new piece come from.
    going_to = new_owner[take_piece(places, 0, cut, num_pieces, index)]
    coming_from = old_owner[take_piece(places, 0, to_cut, num_pieces, index)]
    members = range(num_pieces)
    return tuple((going_to == i).nonzero().view(-1) for i in members), tuple(
        (coming_from == i).nonzero().view(-1) for i in members
    )
