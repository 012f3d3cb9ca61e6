"""The whole tensors of parameters that the plan cuts, in the books of the rank that owns most of
them.

Owners and batches are dealt as at run time (``runtime.dealing``). While the optimizer steps an
owner holds the values of its wholes (masters from step to step), and from the sums of the gradients
until these are cleared the wholes of its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.compiler.cost.memory.ledger import Ledger
from shardwright.compiler.cost.memory.trained import Trained, most_owned
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.dealing import Entry, deal_buckets
from shardwright.runtime.zero.settings import ReductionSettings

EXCHANGE = "exchange of whole tensors"

COMPARED_BYTES = 10
"""Of an element of a master, what finds out whether the values that come are just that, rounded: a
rounded copy, the 16 bits that this lacks, all 32, and two flags.
"""


class WholeTensors:
    """``exchanged``: the parameters of which this rank's copies of the pieces are brought together,
    in any order. ``owned``: by name, those that the rank with most of them owns.
    """

    def __init__(self, ledger: Ledger, exchanged: Sequence[Trained], config: ComputeConfig) -> None:
        self._ledger, self._exchanged = ledger, exchanged
        self._settings = ReductionSettings.of(config, config.num_units)
        self.owned, _ = most_owned(
            exchanged, lambda item: item.whole_elements * item.dtype.itemsize
        )
        self._values: list[int] = []

    def gather(self) -> None:
        """Values and gradients come to their owners."""
        for batch in self._batches():
            dtype = batch[0].dtype
            master = self._settings.state_dtype(dtype)
            if master == dtype:
                self._values += self._bring(batch, dtype.itemsize, "temporary", dtype.itemsize)
            else:
                self._values += self._bring(
                    batch,
                    dtype.itemsize,
                    "temporary",
                    0,
                    dtype.itemsize + master.itemsize + COMPARED_BYTES,
                )
        for batch in self._batches():
            master, summed = (
                find(batch[0].dtype)
                for find in (self._settings.state_dtype, self._settings.gradient_dtype)
            )
            self._bring(
                batch,
                summed.itemsize,
                "gradient",
                master.itemsize,
                0 if summed == master else summed.itemsize,
            )

    def scatter(self) -> None:
        """What the owners have updated goes back to all ranks, who let go of values."""
        for batch in self._batches():
            pieces, owned = sum(item.num_elements for item in batch), sum(self._owned(batch))
            self._ledger.use((pieces + 2 * owned) * batch[0].dtype.itemsize, EXCHANGE)
        while self._values:
            self._ledger.release(self._values.pop())

    def _bring(
        self,
        batch: Sequence[Trained],
        element_bytes: int,
        category: str,
        kept_bytes: int,
        beside_bytes: int = 0,
    ) -> list[int]:
        """One all-to-all of elements of ``element_bytes``, of which owners keep ``kept_bytes``
        each, and need ``beside_bytes`` for a moment, one tensor after the other. What they keep.
        """
        ledger, owned = self._ledger, self._owned(batch)
        sent = sum(item.num_elements + 1 for item in batch) * element_bytes  # with a flag for each
        arrived = ledger.hold(ledger.new(sent + sum(owned) * element_bytes, "temporary"))
        ledger.use(sent, EXCHANGE)  # end to end once more
        kept = []
        for size in owned:
            kept.append(ledger.hold(ledger.new(size * kept_bytes, category)))
            ledger.use(size * beside_bytes, EXCHANGE)
        ledger.release(arrived)
        return kept

    def _owned(self, batch: Sequence[Trained]) -> list[int]:
        """The elements of each whole tensor that this rank owns."""
        return [item.whole_elements for item in batch if item.name in self.owned]

    def _batches(self) -> Iterator[Sequence[Trained]]:
        """Of one dtype, cut by the same axes, as large as a bucket of gradients, or a larger one
        alone.
        """
        items = sorted(self._exchanged, key=lambda item: item.fqn or item.name)
        sizes = [
            item.whole_elements * self._settings.gradient_dtype(item.dtype).itemsize
            for item in items
        ]
        entries = [
            Entry(item.cut, item.dtype, size) for item, size in zip(items, sizes, strict=True)
        ]
        for indices in deal_buckets(entries, self._settings.bucket_cap_bytes):
            yield [items[index] for index in indices]
