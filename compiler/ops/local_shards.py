"""What the ranks of a mesh hold of a tensor under a layout, made from the whole tensor and put
together again.

This is the meaning of the four placements, spelled out for all ranks at once; the prover compares
operators against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.mesh import Coords


class DisagreementError(Exception):
    """Ranks that must hold the same copy hold different ones, or pieces of the wrong shape."""


def dual(layout: Layout) -> Layout:
    """The layout of the gradients of a tensor with this layout: ``P`` and ``G`` change places."""
    return replace(layout, partial=layout.grad_partial, grad_partial=layout.partial)


def _index(layout: Layout, dim: int, mesh: Mesh, coords: Coords) -> Tensor:
    """The global positions along ``dim`` of what a rank holds, ascending."""
    runs = [torch.arange(start, stop) for start, stop in layout.runs(dim, mesh, coords)]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.long)


def shards(x: Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator) -> list[Tensor]:
    """What each rank holds of ``x``, by rank; summands along ``P`` axes are random."""
    summands = _summands(x, [mesh.axis_size(axis) for axis in layout.partial], generator)
    pieces = []
    # The rank's number among those that hold summands, counted along the ``P`` axes in turn.
    for coords in mesh.all_coords():
        number = 0
        for axis in layout.partial:
            number = number * mesh.axis_size(axis) + coords[axis]
        piece = summands[number]
        for dim in range(x.ndim):
            if layout.dim_axes(dim):
                piece = piece.index_select(dim, _index(layout, dim, mesh, coords))
        pieces.append(piece.clone())
    return pieces


def _summands(x: Tensor, sizes: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """Random tensors that sum to ``x``, one per rank of the axes with these sizes."""
    count = int(torch.tensor([1, *sizes]).prod())
    if is_continuous(x):
        parts = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(count - 1)]
    else:
        parts = [
            torch.randint(-3, 4, x.shape, generator=generator).to(x.dtype) for _ in range(count - 1)
        ]
    return [*parts, x - sum(parts) if parts else x]


def joined(pieces: Sequence[Tensor], layout: Layout, mesh: Mesh, tolerance: float) -> Tensor:
    """The whole tensor from what the ranks hold.

    Raises :class:`DisagreementError` if a piece has the wrong shape, or copies differ by more than
    ``tolerance``.
    """
    whole: dict[
        tuple[int, ...], Tensor
    ] = {}  # by the coordinates along the axes on which ranks hold copies
    copied = [
        axis for axis in mesh.names if axis not in layout.cut_axes and axis not in layout.partial
    ]
    for rank, (coords, piece) in enumerate(zip(mesh.all_coords(), pieces, strict=True)):
        expected = layout.local_shape(mesh, coords)
        if tuple(piece.shape) != expected:
            raise DisagreementError(
                f"rank {rank} holds {list(piece.shape)} where its piece has the shape "
                f"{list(expected)}"
            )
        total = whole.setdefault(
            tuple(coords[axis] for axis in copied), piece.new_zeros(layout.shape)
        )
        # A dim that nothing cuts is whole: most are, and asking for their runs takes longest here.
        places = [
            _index(layout, dim, mesh, coords) if layout.dim_axes(dim) else torch.arange(size)
            for dim, size in enumerate(piece.shape)
        ]
        here = torch.meshgrid(*places, indexing="ij") if places else ()
        # Summands add up, pieces of copies lie beside each other: both are a sum into zeros.
        total[here] = total[here] | piece if piece.dtype == torch.bool else total[here] + piece
    first, *others = whole.values()
    for other in others:
        if (error := largest_difference(other, first)) > tolerance:
            raise DisagreementError(f"copies that must be equal differ by {error:.1e}")
    return first


def is_continuous(x: Tensor) -> bool:
    """Whether ``x`` holds real or complex numbers, and may have a gradient."""
    return x.is_floating_point() or x.is_complex()


def accepted(x: Tensor) -> float:
    """The largest difference taken for rounding: 1e-10 in float64, a thousand units of rounding in
    float32. In 16 bits it is 20 units: a thousand would be as large as the values.
    """
    if x.dtype in (torch.float64, torch.complex128) or not is_continuous(x):
        return 1e-10
    return (20 if x.dtype in (torch.float16, torch.bfloat16) else 1000) * torch.finfo(x.dtype).eps


def largest_difference(x: Tensor, reference: Tensor) -> float:
    """``max |x - reference|`` over ``max(1, max |reference|)``; NaN and infinities must stand in
    the same places.
    """
    if x.numel() == 0:
        return 0.0
    if not is_continuous(x):
        return float((x != reference).any())
    # The usual case first, as it needs no copies.
    finite = reference.isfinite()
    if finite.all():
        difference = float((x - reference).abs().max())
        scale = max(1.0, float(reference.abs().max()))
        return difference / scale if math.isfinite(difference) else math.inf
    if not torch.equal(x.isfinite(), finite) or not torch.equal(
        x[~finite].nan_to_num(), reference[~finite].nan_to_num()
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(
        (x[finite] - reference[finite]).abs().max() / reference[finite].abs().max().clamp(min=1.0)
    )
