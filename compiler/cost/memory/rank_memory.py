"""The peak of one rank, and what it is for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
"""What memory is for.

- ``gradient``: the gradients of parameters.
- ``activation``: what autograd and variables hold.
- ``temporary``: what an operator needs while it runs, and gradients on their way.
- ``communication``: messages of a pipeline.
"""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The peak of one unit rank.

    ``by_category``: the bytes at that time, by the names in :data:`CATEGORIES`. ``moment``: what
    ran then (an operator, ``backward of ...``, ``optimizer step``). ``assumed``: the operators
    whose memory is assumed, as fake tensors could not run them. Of such a forward everything counts
    as kept; of such a backward (``backward of ...``) only the gradients count.
    """

    rank: int
    by_category: Mapping[str, int] = field(default_factory=dict)
    moment: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return sum(self.by_category.values())

    @property
    def operator(self) -> str:
        """The operator that runs at the peak, forward or backward. Where something else does, a
        name that no operator has.
        """
        # In pipelines the action comes first: ``B2: backward of loss``.
        return self.moment.rpartition(": ")[2].removeprefix("backward of ")

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
        """The bytes of activations, those that are temporary included."""
        return self.by_category.get("activation", 0) + self.by_category.get("temporary", 0)

    @property
    def buffer_bytes(self) -> int:
        """Buffers and constants of the model, its inputs, and messages."""
        return sum(self.by_category.get(key, 0) for key in ("buffer", "input", "communication"))

    def at(self, rank: int) -> RankMemory:
        """The peak as that of another rank, which is alike."""
        # Not by ``replace``, which takes ten times as long: a plan may have a million ranks.
        return RankMemory(rank, self.by_category, self.moment, self.assumed)

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
        """The peak that a ledger has found, with its categories in order."""
        ordered = {key: peak.by_category[key] for key in CATEGORIES if peak.by_category.get(key)}
        return cls(rank, ordered, peak.name, tuple(sorted(assumed)))
