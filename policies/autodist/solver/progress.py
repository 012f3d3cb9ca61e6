"""What a search has found so far: the best choice, the best bound, and how much time is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shardwright.policies.autodist.solver.problem import Infeasible, Problem, Solution, evaluate
from shardwright.policies.autodist.solver.stopwatch import Stopwatch

CLOSED = 1e-12
"""Relative distance of cost and bound below which they differ by rounding only."""


class Progress:
    """The state of one call of the solver, that every method reports to.

    Args:
        problem: costs and rows of what is proposed are those of the problem itself, never of a
            simplified form.
        time_limit_s: seconds from now.
        target_gap: a gap that is small enough.
        on_improvement: called with ``(cost, bound)`` whenever one of the two gets better; cost is
            inf before the first choice.
        urgent: whether seconds are the wall's in any case. Else those before the first choice are
            the ones that the process had.
        watch: begins now; for tests.
    """

    def __init__(
        self,
        problem: Problem,
        time_limit_s: float,
        on_improvement: Callable[[float, float], None] | None = None,
        target_gap: float = 0.0,
        *,
        urgent: bool = False,
        watch: Stopwatch | None = None,
    ) -> None:
        self.problem = problem
        self.target_gap = target_gap
        self.cost, self.bound = math.inf, -math.inf
        self.choice: tuple[int, ...] | None = None
        self.proof = "none"
        self.infeasible: Infeasible | None = None
        self._on_improvement = on_improvement
        self._limit_s, self._urgent = time_limit_s, urgent
        self._watch = watch or Stopwatch()

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative when time is over."""
        # A busy machine takes time away from the search. It may cost quality, not the answer.
        is_patient = self.choice is None and not self._urgent
        return self._limit_s - (self._watch.worked_s if is_patient else self._watch.wall_s)

    @property
    def left_wall_s(self) -> float:
        """The wall's seconds in which a library is likely to work as long as is left."""
        is_patient = self.choice is None and not self._urgent
        return self.left_s * (self._watch.slowdown if is_patient else 1.0)

    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.left_s <= 0

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do, or no time to do it."""
        reached = self.choice is not None and self.cost - self.bound <= self.target_gap * abs(
            self.cost
        )
        return reached or self.closed or self.infeasible is not None or self.left_s <= 0

    @property
    def closed(self) -> bool:
        """Whether the best choice is proved optimal."""
        return self.cost - self.bound <= CLOSED * abs(self.cost) and self.choice is not None

    def propose(self, choice: Sequence[int]) -> bool:
        """Keep a choice if it is the best and respects every row; whether it was kept."""
        cost = evaluate(self.problem, choice)
        if cost >= self.cost or not all(row.holds(row.used(choice)) for row in self.problem.rows):
            return False
        self.cost, self.choice = cost, tuple(int(c) for c in choice)
        self._report()
        return True

    def raise_bound(self, bound: float, proof: str) -> None:
        """Keep a lower bound if it is the best."""
        if bound > self.bound:
            self.bound, self.proof = bound, proof
            self._report()

    def prove_infeasible(self, infeasible: Infeasible) -> None:
        """Keep the certificate that no choice is feasible."""
        self.infeasible = infeasible

    def result(self) -> Solution | Infeasible:
        """What the call answers."""
        if self.infeasible is not None:
            return self.infeasible
        if self.choice is None:
            return Infeasible(
                False,
                "no choice that respects every row was found in the time given; there may be one",
            )
        # rounding may put a bound above the cost it was computed for
        proof = f"optimal by {self.proof}" if self.closed else f"bound by {self.proof}"
        return Solution(self.choice, self.cost, self.cost if self.closed else self.bound, proof)

    def _report(self) -> None:
        if self._on_improvement is not None:
            self._on_improvement(self.cost, min(self.bound, self.cost))
