"""What a layout means, by brute force: encode a value into the tensors of all ranks, decode it,
with copies compared.
"""

from __future__ import annotations

import itertools
import random

import torch
from torch import Tensor

from shardwright.runtime.atoms import Atom
from shardwright.runtime.layout import Layout, Mesh


def atom_indices(atom: Atom, mesh: Mesh, coords: dict[str, int]) -> list[int]:
    """The indices of the atom a rank keeps: every segment is dealt out, axis by axis."""
    kept, start = [], 0
    for segment in atom.element[1:] or atom.segments:
        mine = list(range(start, start + segment))
        for axis in atom.axes:
            owners = dealt_to(len(mine), mesh.axis_size(axis), mesh.turns_of(axis))
            mine = [i for i, owner in zip(mine, owners, strict=True) if owner == coords[axis]]
        kept += mine
        start += segment
    if atom.element:  # the one index there is, where this thing is dealt to
        return [0] if atom.element[0] in kept else []
    return kept


def dealt_to(count: int, num_ranks: int, turns: int) -> list[int]:
    """The rank that gets each of ``count`` things: in every second round, ranks in reverse."""
    base, extra = divmod(count, num_ranks)
    num_rounds, owners = max(2 * turns, 1), []
    for number in range(num_rounds):
        for rank in range(num_ranks)[:: -1 if number % 2 else 1]:
            share, longer = divmod(base + (rank < extra), num_rounds)
            owners += [rank] * (share + (number < longer))
    return owners


def dim_indices(layout: Layout, dim: int, mesh: Mesh, coords: dict[str, int]) -> list[int]:
    """The global indices of a rank along a dim."""
    indices = [0]
    for atom in layout.dims[dim]:
        indices = [i * atom.size + j for i in indices for j in atom_indices(atom, mesh, coords)]
    return indices


def in_random_turns(mesh: Mesh, rng: random.Random) -> Mesh:
    """The mesh, with some axes dealing in zigzag."""
    turns = ((axis, rng.choice((1, 1, 2))) for axis in mesh.names if rng.random() < 0.3)
    return Mesh(mesh.axes, tuple(turns))


def encode(value: Tensor, layout: Layout, mesh: Mesh, seed: int = 7) -> list[Tensor]:
    """The local tensor of every rank. Summands of a partial value are random, alike on ranks that
    hold copies.
    """
    generator = torch.Generator().manual_seed(seed)
    terms = list(itertools.product(*(range(mesh.axis_size(axis)) for axis in layout.partial)))
    summands = {
        key: torch.randn(value.shape, dtype=value.dtype, generator=generator) for key in terms[1:]
    }
    summands[terms[0]] = value - sum(summands.values())
    pieces = []
    for coords in mesh.all_coords():
        piece = summands[tuple(coords[axis] for axis in layout.partial)]
        for dim in range(value.ndim):
            piece = piece.index_select(
                dim, torch.tensor(dim_indices(layout, dim, mesh, coords), dtype=torch.long)
            )
        pieces.append(piece)
    return pieces


def decode(pieces: list[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The value; asserts that ranks that should hold copies do."""
    total = torch.zeros(tuple(layout.shape), dtype=pieces[0].dtype)
    copies: dict[tuple[int, ...], Tensor] = {}
    distinct = set(layout.cut_axes) | set(layout.partial)
    for piece, coords in zip(pieces, mesh.all_coords(), strict=True):
        key = tuple(coords[axis] for axis in mesh.names if axis in distinct)
        if key in copies:
            torch.testing.assert_close(piece, copies[key], rtol=0, atol=1e-12, msg="copies differ")
            continue
        copies[key] = piece
        grids = [
            torch.tensor(dim_indices(layout, dim, mesh, coords), dtype=torch.long)
            for dim in range(total.ndim)
        ]
        assert piece.shape == tuple(len(g) for g in grids)
        if total.ndim == 0:
            total += piece
        elif piece.numel():
            total[torch.meshgrid(*grids, indexing="ij")] += piece
    return total
