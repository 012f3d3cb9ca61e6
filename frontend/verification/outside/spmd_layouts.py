"""Our layouts as types of ``spmd_types``, on a mesh of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import spmd_types as spmd
import torch
from spmd_types import MeshAxis, PartitionSpec, SpmdType, SpmdTypeError
from spmd_types.rules import NdimWithSpmdType
from torch import Tensor

from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.mesh import ZERO
from shardwright.runtime.ranks.groups import UNITS

Typed: TypeAlias = "Tensor | NdimWithSpmdType"
"""What has a type: a tensor, or a number of dims that stands for one."""


class Refusal(SpmdTypeError):  # type: ignore[misc]
    """What we refuse ourselves, in our words."""


LETTERS = {"R": spmd.I, "G": spmd.R, "P": spmd.P}
"""Our placements in the letters of ``spmd_types``. S is ``S(dim)`` in both."""


@dataclass(frozen=True)
class TypedMesh:
    """The axes of a mesh, major to minor, as ``spmd_types`` knows them. The outermost ones,
    ``outer``, run over units, each of which has samples of its own.
    """

    mesh: Mesh
    outer: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Mesh, num_units: int, zero: int) -> TypedMesh:
        """The mesh of one unit, within ``num_units`` units of which ``zero`` share the storage of
        parameters.
        """
        over = tuple((n, s) for n, s in ((UNITS, num_units // zero), (ZERO, zero)) if s > 1)
        return cls(Mesh((*over, *mesh.axes)), tuple(name for name, _ in over))

    def axes(self) -> dict[str, MeshAxis]:
        """The axes by name, with the strides of ranks."""
        found, stride = {}, 1
        for name, size in reversed(self.mesh.axes):
            found[name] = MeshAxis.of(size, stride)
            stride *= size
        return dict(reversed(found.items()))  # major to minor, as they are asked for

    def type_of(self, layout: Layout, *, of_samples: bool = False) -> SpmdType:
        """The type of a tensor. ``of_samples``: it is another one in each unit, as samples and what
        is computed of them are. Else all units have it, and its gradient is the sum of theirs.
        """
        dims = [self.ordered(layout.dim_axes(dim)) for dim in range(len(layout.dims))]
        local: dict[str, spmd.PerMeshAxisSpmdType] = {}
        for name in self.mesh.names:
            placement = layout.placement(name)
            if name in self.outer and not placement.startswith("S"):
                local[name] = spmd.V if of_samples else spmd.R
            elif not placement.startswith("S"):
                local[name] = LETTERS[placement]
        return SpmdType(local, spec_of(dims))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Axes that have several ranks, major to minor."""
        found = set(axes)
        return tuple(name for name, size in self.mesh.axes if name in found and size > 1)


def spec_of(dims: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """The axes that cut each dim, as ``spmd_types`` writes them."""

    def entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
        if len(axes) > 1:
            return axes
        return axes[0] if axes else None

    return PartitionSpec(*map(entry, dims))


def shard_axes(x: Typed) -> list[tuple[str, ...]]:
    """The names of the axes that cut each dim of a typed tensor, outermost first."""
    spec = spmd.get_partition_spec(x)
    if spec is None:
        return [()] * x.ndim
    names = {axis: name for name, axis in (spmd.current_mesh_names() or {}).items()}
    found = []
    for entry in spec:
        axes = entry if isinstance(entry, tuple) else (entry,)
        found.append(tuple(names[axis] for axis in axes if axis is not None))
    return found


def local_types(x: Typed) -> dict[str, spmd.PerMeshAxisLocalSpmdType]:
    """The letter of a typed tensor on each axis of several ranks, by name."""
    names = {axis: name for name, axis in (spmd.current_mesh_names() or {}).items()}
    return {names[axis]: letter for axis, letter in spmd.get_local_type(x).items() if axis in names}


def stand_in(
    local: dict[str, spmd.PerMeshAxisLocalSpmdType], dims: Sequence[tuple[str, ...]]
) -> NdimWithSpmdType:
    """Something of so many dims that has this type."""
    made = NdimWithSpmdType(len(dims))
    spmd.assert_type(made, local, spec_of(dims))
    return made


def listed(axes: Iterable[str]) -> str:
    """Names of axes as text."""
    return ", ".join(sorted(axes)) or "no axis"


def in_words(x: Typed) -> str:
    """A type as text, in our letters: ``[-, tp] G(dp)``."""
    letters = {theirs: ours for ours, theirs in LETTERS.items()}
    cut = {axis for axes in shard_axes(x) for axis in axes}
    dims = ", ".join("/".join(axes) or "-" for axes in shard_axes(x))
    marks = [
        f"{letters.get(letter, 'S(?)')}({axis})"
        for axis, letter in local_types(x).items()
        if axis not in cut and letter is not spmd.I
    ]
    return " ".join([f"[{dims}]", *marks])


def needs_gradient(x: object) -> bool:
    """Whether gradients flow through a tensor here."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
