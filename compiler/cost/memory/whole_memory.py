"""The whole tensors of parameters that the plan cuts, in the ledger of the rank that owns most.

Some optimizers (Muon) need whole tensors. Then the pieces of each parameter go to one rank, its
owner. Owners and batches are dealt as at run time (``runtime.dealing``). An owner holds the values
of its wholes while the optimizer steps, or masters of them from step to step. It holds the wholes
of its gradients from the moment they are summed until gradients are cleared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.compiler.cost.memory.ledger import Ledger
from shardwright.compiler.cost.memory.trained_parameters import Trained, most_owned
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.dealing import Entry, deal_buckets
from shardwright.runtime.zero.settings import ReductionSettings

EXCHANGE = "exchange of whole tensors"

COMPARED_BYTES = 10
"""The bytes per element that it takes to see whether the values that came are the master, rounded.

They are a rounded copy (2), the 16 bits that it lacks (2), all 32 bits (4), and two flags (2).
"""


class WholeTensors:
    """The exchange of whole tensors, on the rank that owns most of them.

    ``exchanged``: the parameters whose pieces are brought together, in any order. ``owned``: the
    names of those that this rank owns.
    """

    def __init__(self, ledger: Ledger, exchanged: Sequence[Trained], config: ComputeConfig) -> None:
        self._ledger, self._exchanged = ledger, exchanged
        self._settings = ReductionSettings.of(config, config.num_units)
        self.owned, _ = most_owned(
            exchanged, lambda item: item.whole_elements * item.dtype.itemsize
        )
        self._values: list[int] = []

    def gather(self) -> None:
        """Bring values and gradients to their owners."""
        # First the values of the parameters, then their gradients: batch by batch.
        for batch in self._batches():
            dtype = batch[0].dtype
            master = self._settings.state_dtype(dtype)
            # Where masters have another dtype, the values are compared with these, and both are
            # there.
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
        """Send what owners have updated back to all ranks, and let go of the values."""
        for batch in self._batches():
            # An owner has the wholes twice: cut into messages, and as they were updated.
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
        """Run one all-to-all of elements of ``element_bytes``, and return the storages that the
        owner keeps.

        Of each element it keeps ``kept_bytes``. It needs ``beside_bytes`` for a moment, for one
        tensor after the other.
        """
        ledger, owned = self._ledger, self._owned(batch)
        # Behind each piece stands one flag: whether the rank has a gradient of it.
        sent = sum(item.num_elements + 1 for item in batch) * element_bytes
        arrived = ledger.hold(ledger.new(sent + sum(owned) * element_bytes, "temporary"))
        ledger.use(sent, EXCHANGE)  # the pieces are copied end to end once more
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
        """The parameters in batches. Those of a batch have one dtype and are cut by the same axes.
        It is as large as a bucket of gradients, or one parameter that is larger.
        """
        items = sorted(self._exchanged, key=lambda item: item.fqn or item.name)
        sizes = [
            item.whole_elements * self._settings.gradient_dtype(item.dtype).itemsize
            for item in items
        ]
        # The rule of ``runtime/dealing.py``, by which the runtime makes the same batches.
        entries = [
            Entry(item.cut, item.dtype, size) for item, size in zip(items, sizes, strict=True)
        ]
        for indices in deal_buckets(entries, self._settings.bucket_cap_bytes):
            yield [items[index] for index in indices]
