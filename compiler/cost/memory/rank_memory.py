"""The peak of one rank, and what it is for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.compiler.cost.memory.ledger import Moment

CATEGORIES = (
    "parameter",
    "buffer",
    "input",
    "optimizer",
    "gradient",
    "activation",
    "temporary",
    "communication",
)
"""``gradient``: of parameters. ``activation``: what autograd and variables hold. ``temporary``: of
an operator while it runs, and gradients on their way. ``communication``: messages of a pipeline.
"""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The peak of one unit rank. ``by_category``: the bytes at that time by :data:`CATEGORIES`;
    ``moment``: what ran (an operator, ``backward of ...``, ``optimizer step``). ``assumed``:
    operators of which everything was taken to be kept, and backwards (``backward of ...``) of which
    only the gradients count.
    """

    rank: int
    by_category: Mapping[str, int] = field(default_factory=dict)
    moment: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return sum(self.by_category.values())

    @property
    def parameter_bytes(self) -> int:
        return self.by_category.get("parameter", 0)

    @property
    def gradient_bytes(self) -> int:
        return self.by_category.get("gradient", 0)

    @property
    def optimizer_bytes(self) -> int:
        return self.by_category.get("optimizer", 0)

    @property
    def activation_bytes(self) -> int:
        """With what is temporary."""
        return self.by_category.get("activation", 0) + self.by_category.get("temporary", 0)

    @property
    def buffer_bytes(self) -> int:
        """Buffers and constants of the model, its inputs, and messages."""
        return sum(self.by_category.get(key, 0) for key in ("buffer", "input", "communication"))

    def at(self, rank: int) -> RankMemory:
        """The same of another rank."""
        return replace(self, rank=rank)

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "peak_bytes": self.peak_bytes,
            "moment": self.moment,
            "by_category": dict(self.by_category),
            "assumed": list(self.assumed),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankMemory:
        return cls(data["rank"], dict(data["by_category"]), data["moment"], tuple(data["assumed"]))

    @classmethod
    def of(cls, rank: int, peak: Moment, assumed: Iterable[str]) -> RankMemory:
        """The peak that the books have found."""
        ordered = {key: peak.by_category[key] for key in CATEGORIES if peak.by_category.get(key)}
        return cls(rank, ordered, peak.name, tuple(sorted(assumed)))
