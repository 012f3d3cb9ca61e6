"""Where memory binds: plans that are fast and too large, with the loss computed in pieces.

Logits of a long sequence over a large vocabulary may take more memory than all layers. Computed in
pieces they are never whole, for one more forward of the last product
(``policies/piece_loops.py``). That is often less than what recomputed layers, or a placement for
less memory, take.

Example: a plan of 2.0 s needs 90 GB of the 80 GB there are, and one that fits takes 2.3 s. In 4
pieces the first needs 78 GB and 2.05 s: it is the answer. In 4 pieces it might need 82 GB; then 16
are tried.

Of a longer sequence the fastest plans need 250 GB, and 120 GB in pieces. Nothing fits. The one with
all layers computed again needs 210 GB, and 40 GB in pieces: where nothing fits it is tried first.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardwright.compiler.cost.local_calls import estimated_size
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.ir.graph import IRGraph
from shardwright.compiler.ir.size import product
from shardwright.compiler.plan.amounts import amount
from shardwright.compiler.plan.plan import Note
from shardwright.policies.autodist.candidates.results import Candidate
from shardwright.policies.autodist.search.auditing import Audits
from shardwright.policies.autodist.search.search_state import AUDIT, SearchState
from shardwright.policies.piece_loops import LOSS, PieceOptions, in_pieces, losses
from shardwright.runtime.errors import PlanError

COUNTS = (4, 16, 64)
"""The numbers of pieces that are tried, until a plan fits."""

COPIES = 4
"""How many tensors as large as the logits a step holds at most: in a wide dtype, their softmax and
gradient.
"""

MOST = 4
"""The most plans for which it is tried."""


@dataclass(frozen=True)
class LossPieces:
    """The part of a search that comes where plans were too large: those of the search, and later
    those of simple policies. ``tried``: what was tried before.
    """

    state: SearchState
    audits: Audits
    tried: list[Candidate] = field(default_factory=list)

    def run(self) -> None:
        """Try plans that are predicted to be faster than the best one, the fastest first. Where
        nothing has fitted, what needs least comes before them.
        """
        for candidate, cost in self._in_order(most_saved_bytes(self.state.graph)):
            has_plan, clock = bool(self.state.result.audited), self.state.clock
            # Each try is an audit, which must be able to end in time; without a plan, in overtime.
            is_late = has_plan and clock.spent(clock.longest_s(AUDIT)) > 1.0
            if clock.is_over or is_late:
                return self.state.end_by_time()
            if not has_plan or cost.step_s < self.state.best_s():
                self.tried.append(candidate)
                self._try(candidate, cost)
        return None

    def _in_order(self, saved_bytes: float) -> list[tuple[Candidate, PlanCost]]:
        """The plans that are tried, as far as they are wanted then. Pieces save what whole logits
        take, with their gradients, and nothing more than that.
        """
        tried = set(map(id, self.tried))
        most_bytes = self.state.space.memory_bytes + saved_bytes
        found = [
            (candidate, cost)
            for candidate, cost in self.audits.too_large
            if id(candidate) not in tried and cost.peak_bytes < most_bytes
        ]
        found.sort(key=lambda item: item[1].step_s)
        if not found or self.state.result.audited:
            return found[:MOST]
        leanest = min(found, key=lambda item: item[1].peak_bytes)
        return [leanest, *(item for item in found[:MOST] if item is not leanest)]

    def _try(self, candidate: Candidate, cost: PlanCost) -> None:
        """Audit the plan in more and more pieces, until it fits, or no number of pieces does."""
        for count in COUNTS:
            try:
                options = PieceOptions(loss_pieces=count)
                plan = in_pieces(
                    self.state.graph, candidate.plan, options, self.state.config, "autodist"
                )
            except PlanError:
                return  # no dim of the loss is that long
            note = _note(self.state, count, cost.peak_bytes)
            made = replace(
                candidate,
                title=f"{candidate.title}, loss in {count} pieces",
                plan=replace(plan, notes=(*plan.notes, *note)),
                cut_request=None,
            )
            found = self.audits.audit(made)
            if found is None or found.peak_bytes <= self.state.space.memory_bytes:
                return
            # All but a part of ``1 / count`` of what pieces may save is saved now.
            saved_bytes = cost.peak_bytes - found.peak_bytes
            if cost.peak_bytes - saved_bytes * count / (count - 1) > self.state.space.memory_bytes:
                return


def most_saved_bytes(graph: IRGraph) -> float:
    """The bytes that the loss in pieces saves at most, on all ranks together: copies of the largest
    values that a loss makes on the way from the last product.
    """
    made = (v for ops in losses(graph) for op in ops for v in op.results)
    sizes = (product(map(estimated_size, v.shape)) * max(4, v.dtype.itemsize) for v in made)
    return COPIES * float(max(sizes, default=0.0))


def _note(state: SearchState, count: int, needed_bytes: float) -> list[Note]:
    """What a person may want to know of it."""
    (first, *_), *_ = losses(state.graph)
    limit = amount(state.space.memory_bytes, "B")
    return [
        Note(
            first.name,
            first.module_path,
            first.source.portable if first.source else "",
            LOSS,
            f"the loss runs in {count} pieces: whole, the plan needs "
            f"{amount(needed_bytes, 'B')} of {limit}",
        )
    ]
