"""Experts that a folder has one by one, and a module in one tensor.

Transformers keeps the matrices of all experts in one tensor since its version 5, and still writes
what was published before, a tensor for each expert:

    ...mlp.experts.gate_up_proj [128, 2 * 768, 2048]    of the module
    ...mlp.experts.0.gate_proj.weight [768, 2048]       of the folder: the first half of expert 0
    ...mlp.experts.0.up_proj.weight [768, 2048]         the second half
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwright.runtime.regions import Region

PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3"), ("fc1", "fc3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",), ("fc2",)),
}
"""The names of an expert's parts, one below the other, by the last name of a stacked tensor."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the folder, and the region of the stacked tensor that it is."""

    name: str
    region: Region


def parts_of(
    name: str,
    shape: Sequence[int],
    rename: Callable[[str], str | None],
    shape_of: Callable[[str], Sequence[int] | None],
) -> tuple[Part, ...] | None:
    """The parts that make up a tensor, called ``name`` in the module, if the folder has them all
    and they fill it.

    ``rename``: what the folder calls a tensor. ``shape_of``: the shape of a tensor of the folder;
    ``None`` if it has none of that name.
    """
    experts, _, last = name.rpartition(".")
    if len(shape) != 3 or not experts.endswith("experts"):
        return None
    for group in PARTS.get(last, ()):
        found = [
            _parts_of_expert(index, [f"{experts}.{index}.{part}.weight" for part in group], shape,
                             rename, shape_of)
            for index in range(shape[0])
        ]  # fmt: skip
        if all(found):
            return tuple(part for parts in found for part in parts)
    return None


def _parts_of_expert(
    index: int,
    names: Sequence[str],
    shape: Sequence[int],
    rename: Callable[[str], str | None],
    shape_of: Callable[[str], Sequence[int] | None],
) -> list[Part]:
    """The parts of one expert; none if one is missing or they do not fill its matrix."""
    parts, start = [], 0
    for name in names:
        there = rename(name)
        size = None if there is None else shape_of(there)
        if there is None or size is None or len(size) != 2 or size[1] != shape[2]:
            return []
        rows = (start, start + size[0])
        parts.append(Part(there, Region((((index, index + 1),), (rows,), ((0, size[1]),)))))
        start = rows[1]
    return parts if start == shape[1] else []
