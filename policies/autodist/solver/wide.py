"""Networks too wide for elimination: a bound from each part alone, choices by moves of single nodes."""

from __future__ import annotations

import math

import numpy as np

from shardwright.policies.autodist.solver.local import LocalSearch
from shardwright.policies.autodist.solver.network import Network
from shardwright.policies.autodist.solver.progress import Progress


def search_wide(network: Network, progress: Progress) -> None:
    """Bound and choices for a network that elimination cannot take apart."""
    least = {id(array): float(array.min()) for array in (*network.costs.values(), *network.edges.values())}
    parts = (*network.costs.values(), *network.edges.values())
    progress.raise_bound(network.constant + math.fsum(least[id(array)] for array in parts), "the least of every cost alone")
    local = LocalSearch(network)
    choice = np.zeros(len(network.strategies), dtype=np.intp)
    for node, cost in network.costs.items():
        hoped = cost + sum((network.edge(node, other).min(axis=1) for other in network.neighbours[node]), np.zeros(len(cost)))
        choice[node] = int(hoped.argmin())
    local.load(choice)
    local.descend(progress)
    if local.repair(progress):
        local.descend(progress)
        progress.offer(network.expand(dict(enumerate(local.choice.tolist()))))
