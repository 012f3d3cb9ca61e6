"""Which ranks of a unit read which tensor of a sample, and how it is cut before they get it.

The compiler writes this into the manifest, and loaders of data read it there. An example: a
pipeline of two stages with two ranks each, whose first stage reads the ids and whose last stage
reads the labels.

    input_ids  ranks 0, 1  [8, 128]
    labels     ranks 2, 3  [8, 128]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwright.runtime.atoms import Atom
from shardwright.runtime.layout import Layout, Mesh


@dataclass(frozen=True)
class InputReader:
    """One tensor of a sample, and ranks of a unit that read it.

    ``path``: where it lies among the arguments, such as ``input_ids`` or ``batch.mask``.
    ``ranks``: the unit ranks, in the order of ``mesh``. ``layout``: which piece each of them takes,
    on ``mesh``; sizes that vary between calls are texts.
    """

    path: str
    ranks: tuple[int, ...]
    mesh: Mesh
    layout: Layout

    def to_json(self) -> dict[str, Any]:
        """JSON values; :meth:`from_json` is the inverse."""
        return {
            "path": self.path,
            "ranks": list(self.ranks),
            "mesh": self.mesh.to_json(),
            "layout": plain_sizes(self.layout).to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> InputReader:
        """The reverse of :meth:`to_json`."""
        mesh = Mesh.from_json(data["mesh"])
        layout = Layout.from_json(data["layout"])
        return cls(str(data["path"]), tuple(map(int, data["ranks"])), mesh, layout)


def plain_sizes(layout: Layout) -> Layout:
    """The layout with texts in the places of sizes that are no numbers."""
    return Layout(
        tuple(
            tuple(Atom(tuple(map(_plain, atom.segments)), atom.axes) for atom in dim)
            for dim in layout.dims
        )
    )


def _plain(size: Any) -> int | str:
    return size if type(size) is int else str(size)
