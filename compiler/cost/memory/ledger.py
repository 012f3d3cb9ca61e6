"""The ledger of memory: which storages live, what for, and when there was most.

Example: ``a = hold(new(100, "activation"))`` counts 100 bytes. A second ``hold(a)``, for a view
say, changes nothing. ``use(30, "mul")`` makes the peak 130, with "mul" as its moment. Two
``release(a)`` bring the total back to 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ACTIVATION, TEMPORARY = "activation", "temporary"
"""The categories of what a forward and a backward hold."""


@dataclass(slots=True)
class _Storage:
    num_bytes: int
    category: str
    holders: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a step: the bytes held in all and by category, while ``name`` ran."""

    num_bytes: int = 0
    by_category: Mapping[str, int] = field(default_factory=dict)
    name: str = ""

    def beyond(self, base: Mapping[str, int]) -> Moment:
        """The moment without the bytes in ``base``, which were there before."""
        rest = {key: value - base.get(key, 0) for key, value in self.by_category.items()}
        return Moment(sum(rest.values()), rest, self.name)


class Ledger:
    """Storages live as long as they are held. ``peak``: the moment with most bytes since the last
    :meth:`restart`.
    """

    def __init__(self) -> None:
        self._storages: dict[int, _Storage] = {}
        self._next = 0
        self.totals: dict[str, int] = {}
        self.now = 0
        self.peak = Moment()
        self.history: list[Moment] | None = None
        """Every moment in order, where somebody asks for them by setting this to a list."""

    def new(self, num_bytes: int, category: str) -> int:
        """A storage that nobody holds yet; it counts from its first holder on."""
        self._next += 1
        self._storages[self._next] = _Storage(num_bytes, category)
        return self._next

    def hold(self, storage: int) -> int:
        """Add a holder to a storage, and return the storage."""
        found = self._storages[storage]
        found.holders += 1
        if found.holders == 1:
            self._add(found.category, found.num_bytes)
        return storage

    def release(self, storage: int) -> None:
        """Take a holder from a storage, which is gone with its last one."""
        found = self._storages[storage]
        found.holders -= 1
        if found.holders == 0:
            self._add(found.category, -found.num_bytes)
            del self._storages[storage]

    def drop_unheld(self, storage: int) -> None:
        """Forget a storage that nobody came to hold."""
        if self._storages[storage].holders == 0:
            del self._storages[storage]

    def is_held(self, storage: int) -> bool:
        """Whether anything holds a storage."""
        return storage in self._storages and self._storages[storage].holders > 0

    def holders(self, storage: int) -> int:
        return self._storages[storage].holders

    def size(self, storage: int) -> int:
        return self._storages[storage].num_bytes

    def use(self, num_bytes: int, name: str) -> None:
        """Note that ``name`` runs, and needs ``num_bytes`` beyond what is held. The peak may be
        here.
        """
        is_peak = self.now + num_bytes > self.peak.num_bytes
        if is_peak or self.history is not None:
            totals = {key: value for key, value in self.totals.items() if value}
            if num_bytes:
                totals[TEMPORARY] = totals.get(TEMPORARY, 0) + num_bytes
            moment = Moment(self.now + num_bytes, totals, name)
            self.peak = moment if is_peak else self.peak
            if self.history is not None:
                self.history.append(moment)

    def restart(self) -> None:
        """Look for the peak from now on."""
        self.peak = Moment(
            self.now, {key: value for key, value in self.totals.items() if value}, ""
        )

    def snapshot(self) -> dict[str, int]:
        """What is held now, by category."""
        return {key: value for key, value in self.totals.items() if value}

    def _add(self, category: str, num_bytes: int) -> None:
        self.totals[category] = self.totals.get(category, 0) + num_bytes
        self.now += num_bytes
