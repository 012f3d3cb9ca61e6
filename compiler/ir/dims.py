"""The dims of the whole model: which factors of which operators are one and the same thing.

A **dim class** is a set of factors that unification over the graph found to be the same dim: batch,
sequence, heads, hidden, ffn, vocabulary. It is a view for naming and choosing, not a constraint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compiler.ir.size import Size


@dataclass(frozen=True, slots=True)
class DimClass:
    """One dim of the model. Several ``segments``: a concatenation, such as fused query, key and
    value heads.

    ``name`` is a word for people (``heads``, ``ffn``); classes of different layers may share it.
    ``parameters`` are the parameter dims that have it, as ``fqn:dim``.
    """

    index: int
    name: str
    segments: tuple[Size, ...]
    parameters: tuple[str, ...] = ()

    @property
    def size(self) -> Size:
        """The sum of the segments."""
        return sum(self.segments) if len(self.segments) > 1 else self.segments[0]


@dataclass(frozen=True)
class ModelDims:
    """The classes of a graph. ``factors``: (operator, factor) to class index. ``values``: value
    name to the class indices of each of its dims, outermost first (dims of size 1 have none).
    ``conflicts``: where unification had to give up.
    """

    classes: tuple[DimClass, ...]
    factors: Mapping[tuple[str, str], int]
    values: Mapping[str, tuple[tuple[int, ...], ...]]
    conflicts: tuple[str, ...] = ()

    def of_factor(self, op: str, factor: str) -> DimClass | None:
        """The class of an operator's factor; ``None`` for one without."""
        index = self.factors.get((op, factor))
        return None if index is None else self.classes[index]

    def named(self, name: str) -> tuple[DimClass, ...]:
        """Every class with this name."""
        return tuple(c for c in self.classes if c.name == name)

    def describe(self, value: str) -> str:
        """The names of a value's dims: ``[batch, seq, heads * head_dim]``."""
        dims = self.values.get(value, ())
        return (
            "["
            + ", ".join(" * ".join(self.classes[i].name for i in dim) or "1" for dim in dims)
            + "]"
        )
