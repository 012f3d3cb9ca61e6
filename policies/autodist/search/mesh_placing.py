"""The fastest placement on a mesh, and what bounds every plan there.

Example: on ``x=4`` the fastest placement takes 2.0 s, and the solver has proved that none takes
less than 1.99 s. Within the memory none takes less than 2.2 s, whatever is computed again. That is
the bound of the mesh, and memory is said to bind.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from shardwright.compiler.cost.time.after_backward import Reduction, all_gradients_bytes
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.program import Declaration
from shardwright.compiler.plan.zero import in_pieces, is_large, units_of_storage
from shardwright.policies.autodist.candidates.mesh_requests import (
    LeastStep,
    PipelineMesh,
    PlacedMesh,
    PlacedModel,
    mesh_requests,
)
from shardwright.policies.autodist.candidates.meshes import position_ranks
from shardwright.policies.autodist.candidates.titles import mesh_title
from shardwright.policies.autodist.search.mesh_pace import MeshPace
from shardwright.policies.autodist.search.search_state import SearchState
from shardwright.policies.autodist.stages.walk import Setting
from shardwright.runtime.layout import Layout, Mesh

BINDS = 1e-3
"""How much of the time of a step the memory must cost at least to be said to bind."""


class MeshPlacing:
    """Places the model on meshes for speed. ``least``: works out what no plan within the memory
    takes less than.
    """

    def __init__(self, state: SearchState, pace: MeshPace, least: LeastStep | None) -> None:
        self._state, self._pace, self._least = state, pace, least

    def __call__(self, where: PipelineMesh) -> PlacedMesh | None:
        """A mesh with the fastest placement on it, and what bounds every plan there; ``None`` if
        nothing can be placed.
        """
        num_positions, mesh, pp_place = where
        ranks = position_ranks(mesh, num_positions, pp_place)[0]
        first, *further = mesh_requests(
            self._state.graph, self._state.space, num_positions, mesh, ranks
        )
        fastest = self._state.placed(first, mesh_title(num_positions, mesh, pp_place), keeps=True)
        self._pace.note_placement(len(mesh.axes))
        if fastest is None:
            return None
        binds, least_s = False, 0.0
        # A bound that heeds the memory takes as long as another placement, so it is only asked for
        # where the mesh may still have the best plan.
        is_worth = (
            not self._pace.is_short and fastest.share_s(num_positions) < self._state.beaten_s()
        )
        if further and self._least is not None and is_worth and not fastest.interrupted:
            try:
                least_s = self._least(further[0])
                binds = least_s > (1 + BINDS) * fastest.bound_s
                fastest = _within_memory(fastest, least_s)
            except KeyboardInterrupt:
                fastest, binds = replace(fastest, interrupted=True), True  # for all that is known
        return PlacedMesh(
            num_positions,
            mesh,
            pp_place,
            self._despite_overlap(fastest, num_positions, ranks),
            first,
            tuple(further),
            memory_binds=binds,
            never_fits=least_s == float("inf"),
        )

    def _despite_overlap(
        self, fastest: PlacedModel, num_positions: int, ranks: tuple[int, ...]
    ) -> PlacedModel:
        """The placement with a bound that also holds where collectives run beside passes."""
        share = self._state.share_despite_overlap(num_positions)
        if share == 1.0:
            return fastest
        bound_s, most_s = share * fastest.bound_s, math.inf
        # No more is hidden than the sums and gatherings that any plan has.
        if num_positions == 1:
            setting = self._state.setting(ranks)
            most_s = most_summed_s(self._state.graph, fastest.plan.mesh, setting)
            bound_s = max(bound_s, fastest.bound_s - most_s)
        proof = (
            f"{fastest.proof}; what passes may hide of sums and gatherings beside them is taken off"
        )
        if fastest.bound_s > 0:
            proof += f", {1 - bound_s / fastest.bound_s:.0%} of the bound"
        if num_positions == 1 and most_s == math.inf:
            proof += " (of ZeRO-3 over units of several ranks no less is known)"
        return replace(fastest, bound_s=bound_s, proof=proof)


def most_summed_s(graph: PlannableGraph, mesh: Mesh, setting: Setting) -> float:
    """The most seconds that all sums and gatherings of a step take, of all plans on a mesh.

    A gradient is summed over the units and some axes of the mesh. Over the same ranks a byte takes
    the same in all plans, and no piece of a parameter has more bytes than the whole. So each
    parameter counts whole, with the axes for which that takes longest.

    Infinite where ZeRO-3 cuts over several units what plans may have cut already. Few elements may
    be left to deal out then, so that a piece is larger than if the whole were dealt out.

    Example: on ``x=2``, in two units, a weight of 8 MB is summed whole over the units, whole over
    all four ranks, or cut over ``x`` and so 4 MB over the units. The second takes longest.
    """
    config = setting.config
    zero = units_of_storage(config)
    names = [axis for axis, size in mesh.axes if size > 1]
    if zero > 1 and names:
        return math.inf
    most_s: dict[str, float] = {}
    for taken in itertools.product((False, True), repeat=len(names)):
        axes = tuple(itertools.compress(names, taken))
        whole = []
        for value in graph.parameters:
            layout = Layout.whole(value.shape, grad_partial=axes)
            is_cut = zero > 1 and is_large(value)
            whole.append(
                Declaration(value, in_pieces(layout, (), mesh, zero) if is_cut else layout)
            )
        found = Reduction.of(
            whole, mesh.over_units(zero), config, setting.hardware, setting.optimizer,
            setting.ranks,
            num_microbatches=setting.num_microbatches,
            model_bytes=all_gradients_bytes(config, graph.used_parameters), alone=True,
        )  # fmt: skip
        for name, sync in found.parameters.items():
            seconds = found.num_sums * sync.sum_s + sync.across_s + sync.gather_s
            most_s[name] = max(most_s.get(name, 0.0), seconds)
    return sum(most_s.values())


def _within_memory(fastest: PlacedModel, least_s: float) -> PlacedModel:
    """The fastest placement with a bound that heeds the memory. Where nothing fits, that is found
    out by trying: then it is said how much is missing.
    """
    if least_s <= fastest.bound_s or least_s == float("inf"):
        return fastest
    proof = fastest.proof
    if least_s > (1 + BINDS) * fastest.bound_s:
        proof = "Lagrange multiplier of the memory, whatever is computed again"
    return replace(fastest, bound_s=least_s, proof=proof)
