"""Limits over time on networks too large for one moment after another: a price for every moment,
all at once.

Passes of message passing (message_passing.py) alternate with steps of the moments' prices along the
excess of the choice that the messages point at (a subgradient, with Polyak's step length). What a
span costs is the sum of the prices of its moments, so a step takes time in the number of spans and
moments, not of their product. Choices are read off the messages node by node and brought within the
limits by moves (node_moves.py).
"""

from __future__ import annotations

import numpy as np

from shardwright.policies.autodist.solver.message_passing import Messages
from shardwright.policies.autodist.solver.network import Network
from shardwright.policies.autodist.solver.node_moves import Moves
from shardwright.policies.autodist.solver.problem import Array
from shardwright.policies.autodist.solver.progress import Progress

PROOF = "message passing and prices of moments"

PATIENCE = 20
"""Passes without a better bound after which the steps get shorter."""

MIN_STEP = 1e-4
"""The step length, relative to Polyak's, at which the prices are as good as they get."""

FIRST_PROPOSAL = 40
"""Passes before the first choice is read off; then every twenty passes, later every eighth of
all.
"""


class PricedMessages:
    """Message passing for the bound at given prices, and moves for choices.

    Attributes:
        messages, moves: of the network.
        prices: of moments; 0 in the beginning.
    """

    def __init__(self, network: Network) -> None:
        self.messages, self.moves = Messages(network), Moves(network)
        firsts = [self.messages.start[node] for node in self.moves.span_nodes]
        self._places = self.moves.spread(np.array(firsts, dtype=np.intp))
        self.prices = np.zeros(len(network.moments))

    def move_to(self, prices: Array) -> None:
        """Change the prices; the messages stay, and any messages are a bound."""
        self.messages.price(self._places, self.moves.span_costs(prices - self.prices))
        self.prices = prices.copy()


def search_priced(network: Network, progress: Progress, seconds: float) -> PricedMessages:
    """Raise the bound and propose choices until steps are short, the gap is closed or the seconds
    are over. Ends at the prices of the best bound.
    """
    priced = PricedMessages(network)
    messages, moves, move_to = priced.messages, priced.moves, priced.move_to
    room = network.moments.room
    best_prices = priced.prices
    best, step, since, next_proposal = -np.inf, 0.1, 0, FIRST_PROPOSAL
    direction: Array | None = None
    end_s = progress.left_s - seconds
    count = 0
    # Subgradient ascent: the step is halved whenever the bound has not risen for a while.
    while step >= MIN_STEP and not progress.done and progress.left_s > end_s:
        count += 1
        prices = priced.prices
        messages.forward()
        bound = messages.backward() - float(prices @ room)
        # Patience counts steps without a clear gain.
        since = 0 if bound > best + 1e-5 * abs(best) else since + 1
        if bound > best:
            best, best_prices = bound, prices.copy()
            progress.raise_bound(bound + network.constant, PROOF)
        if count >= next_proposal:
            next_proposal = count + max(FIRST_PROPOSAL // 2, count // 8)
            moves.propose(messages.rounded(), progress, prices)
        if since >= PATIENCE:
            step, since, direction = step / 2, 0, None
            move_to(best_prices)
            continue
        # What the choice uses beyond the room says where prices should rise. It is smoothed, as it
        # jumps.
        excess = moves.used(messages.choice()) - room
        direction = excess if direction is None else 0.7 * direction + 0.3 * excess
        useful = np.where((prices <= 0) & (direction < 0), 0.0, direction)
        length = float(useful @ useful)
        # Polyak's step: as far as the gap to the best choice promises.
        if length > 0:
            target = (
                progress.cost - network.constant
                if progress.choice is not None
                else bound + 0.1 * abs(bound)
            )
            distance = max(target - bound, 1e-4 * abs(bound))
            move_to(np.maximum(0.0, prices + step * distance / length * useful))
        # Sums of many small messages drift.
        if count % 100 == 0:
            messages.refresh()
    move_to(best_prices)
    if not progress.done:
        messages.forward()
        messages.backward()
        moves.propose(messages.rounded(), progress, best_prices)
    return priced
