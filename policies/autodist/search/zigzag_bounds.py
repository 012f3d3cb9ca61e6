"""Lower bounds for meshes with an axis that deals positions in zigzag, from the bounds of the same
meshes with one piece for each rank. A search places the model on the latter only.

**Why they hold.** Take any plan in zigzag, and the same plan with one piece for each rank: the same
strategies, layouts, stages, and parts computed again. All pieces are as large, so both hold and
send as much. Only attention takes less in zigzag, where later queries see more keys. Say all of it
takes ``Z`` seconds of a step in zigzag and ``C`` with one piece, and all else takes ``N``. Nothing
of that is cheaper in zigzag: adapters copy pieces once more that do not lie one after the other,
and windows have more edges.

- The search has bounded the plan with one piece: ``N + C >= B``.
- All other operators take at least what they take by their fastest strategies: ``N >= R``.

So for any weight ``w`` from 0 to 1 the plan in zigzag takes at least
``N + Z = w (N + C) + (1 - w) N + (Z - w C) >= w B + (1 - w) R + (Z - w C)``. The last term is a sum
over operators. Each of them has at least the least that any of its strategies makes of it, with its
forward counted once, or twice where it is computed again. The best weight is taken.

Positions of a pipeline share that work, and one of them has at least the average; or an operator,
which one of them has whole.

Example: on ``x=8`` no plan with one piece takes less than 10 s, and all operators but attention
take at least 7 s. Attention takes 2 s with one piece, and 1.2 s in zigzag; or, where the other axis
splits nothing of it, twice that. With ``w = 0.6`` the last term is 0, and the bound
0.6 * 10 + 0.4 * 7 = 8.8 s. With ``w = 0.7`` it is -0.2 or -0.4 s, and the bound 8.7 s.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.compiler.cost.local_calls import Alike
from shardwright.compiler.cost.time.operator_time import op_time
from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.rule import ATTENTION
from shardwright.compiler.ops.strategy import Assignment, allowed, strategies
from shardwright.policies.autodist.candidates.mesh_requests import PlacedMesh
from shardwright.policies.autodist.stages.frontier import Array
from shardwright.policies.autodist.stages.walk import Setting
from shardwright.runtime.layout import Mesh

WEIGHTS = np.linspace(0.0, 1.0, 101)
"""The weights that are tried."""


@dataclass(frozen=True)
class _Work:
    """What operators take on one mesh in zigzag, in seconds of a microbatch.

    ``rest_s``: all but attention, at their fastest; ``more_s``: by weight, ``Z - w C`` of
    attention; ``longest_s``: the longest operator at its fastest.
    """

    rest_s: float
    more_s: Array
    longest_s: float


class ZigzagBounds:
    """The bounds of one search. ``ops``: the operators whose time counts."""

    def __init__(self, ops: Sequence[IROp]) -> None:
        # Layers repeat: each kind of operator is looked at once.
        self._kinds = Counter(map(Alike, ops))
        self._known: dict[tuple[Mesh, tuple[int, ...]], _Work] = {}

    def has(self, mesh: Mesh, setting: Setting) -> bool:
        """Whether what a bound needs is known already."""
        return (mesh, setting.ranks) in self._known

    def bound_s(
        self, mesh: Mesh, in_pieces: PlacedMesh, setting: Setting, share: float = 1.0
    ) -> float:
        """Seconds per step that no plan on ``mesh`` takes less than, which deals in zigzag.

        ``in_pieces``: the same mesh with one piece for each rank. ``setting``: with the ranks that
        it lies on. ``share``: of the time of all work, what a step takes at least, as some may run
        beside the rest; the bound of ``in_pieces`` counts no more.
        """
        key = mesh, setting.ranks
        if key not in self._known:
            self._known[key] = self._work(mesh, setting)
        work, scale = self._known[key], share * setting.num_microbatches
        bounds = WEIGHTS * in_pieces.fastest.bound_s + scale * (
            (1 - WEIGHTS) * work.rest_s + work.more_s
        )
        return max(float(bounds.max()) / in_pieces.num_positions, scale * work.longest_s)

    def _work(self, mesh: Mesh, setting: Setting) -> _Work:
        rest_s, more_s, longest_s = 0.0, np.zeros_like(WEIGHTS), 0.0
        in_pieces = Mesh(mesh.axes)
        for kind, count in self._kinds.items():
            if kind.op.target not in ATTENTION:
                # What the placement with one piece has asked for is known.
                (pieces_s,) = _times(kind.op, [in_pieces], setting)
                least_s = float(pieces_s.sum(axis=1).min())
                longest_s, rest_s = max(longest_s, least_s), rest_s + count * least_s
                continue
            zigzag_s, pieces_s = _times(kind.op, [mesh, in_pieces], setting)
            # ``[weight, assignment, side]``: what each strategy makes of ``Z - w C``.
            each_s = zigzag_s - WEIGHTS[:, None, None] * pieces_s
            # Computed again, a forward counts twice.
            once_s, again_s = each_s.sum(axis=2), each_s[..., 0]
            more_s += count * np.minimum(once_s, once_s + again_s).min(axis=1)
        return _Work(rest_s, more_s, longest_s)


def _times(op: IROp, meshes: Sequence[Mesh], setting: Setting) -> Array:
    """The seconds forward and backward by all strategies on each mesh: ``[mesh, assignment,
    side]``.
    """
    found = [
        [
            op_time(op, assignment, each, setting.hardware, setting.times, ranks=setting.ranks)
            for each in meshes
        ]
        for assignment in _assignments(op, meshes[0])
    ]
    seconds = [[(time.forward_s, time.backward_s) for time in times] for times in found]
    return np.array(seconds).swapaxes(0, 1)


def _assignments(op: IROp, mesh: Mesh) -> Iterator[Assignment]:
    """All strategies of an operator along the axes of a mesh."""
    assert op.rule is not None
    for chosen in itertools.product(strategies(op.rule), repeat=len(mesh.axes)):
        both = zip(mesh.names, chosen, strict=True)
        assignment = {axis: strategy for axis, strategy in both if strategy != "R"}
        if allowed(op.rule, assignment, mesh):
            yield assignment
