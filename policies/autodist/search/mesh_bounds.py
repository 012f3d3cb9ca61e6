"""What is known of the meshes of a search that gave no plan: why they were left, and their bounds,
by schedule where the mesh is a pipeline.

Example: no plan on ``pp=4`` takes less than 2.1 s, and the best plan takes 2.2 s when time ends the
search. The mesh is bounded by schedule: 2.3 s by 1F1B, which is no better, and 2.15 s by ``zb_h1``,
whose bound can be raised.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.compiler.plan.amounts import amount
from shardwright.policies.autodist.candidates.mesh_requests import PlacedMesh, PlacedModel
from shardwright.policies.autodist.candidates.meshes import position_ranks
from shardwright.policies.autodist.candidates.results import CutRequest
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule
from shardwright.policies.autodist.candidates.titles import mesh_title, scheduled_title
from shardwright.policies.autodist.search.search_state import SearchState


class MeshBounds:
    """The bounds of meshes that were not tried, or not with everything."""

    def __init__(self, state: SearchState) -> None:
        self._state, self._result, self._clock = state, state.result, state.clock
        self._untried: list[PlacedMesh] = []  # that may have the best plan by their bounds

    def refuse(self, placed_mesh: PlacedMesh) -> None:
        """Note why a mesh is not tried, or not any further."""
        words = f"every plan on it takes at least {amount(placed_mesh.bound_s, 's')}"
        if placed_mesh.bound_s < self._state.best_s():
            self.leave_untried(placed_mesh)
            words = f"there was no time to try it further; {words}"
        self._result.refused.setdefault(title_of(placed_mesh), words)

    def leave_untried(self, placed_mesh: PlacedMesh) -> None:
        """Note a mesh that may have the best plan by its bound: at the end it is raised."""
        self._result.unanswered[title_of(placed_mesh)] = placed_mesh.bound_s
        self._untried.append(placed_mesh)

    def bound_untried(self) -> None:
        """Bound pipelines of meshes that were left untried by schedule, as those are that were
        tried: such bounds can be raised.
        """
        for placed_mesh in sorted(self._untried, key=lambda placed_mesh: placed_mesh.bound_s):
            number, title = placed_mesh.num_positions, title_of(placed_mesh)
            named_schedules = self._state.named_schedules(number)
            is_beaten = placed_mesh.bound_s >= self._state.best_s()
            if number == 1 or not named_schedules or is_beaten or self._clock.left_s <= 0.0:
                continue
            self.bound_schedules(placed_mesh)
            # An interrupt before this leaves a bound too many, and none too few.
            self._result.unanswered.pop(title, None)

    def bound_schedules(self, placed_mesh: PlacedMesh, but: Sequence[NamedSchedule] = ()) -> None:
        """Bound the schedules of a mesh, but for those that are tried."""
        number, pp_place = placed_mesh.num_positions, placed_mesh.pp_place
        rest = [each for each in self._state.named_schedules(number) if each not in but]
        if not rest:
            return
        ranks = position_ranks(placed_mesh.mesh, number, pp_place)[0]
        lowered = self._state.lowered(placed_mesh.fastest, ranks)
        for each in rest:
            name = scheduled_title(title_of(placed_mesh), each)
            cut_request = CutRequest(name, (lowered,), number, each, pp_place)
            self._result.bound(cut_request, placed_mesh.bound_s)

    def bound_unanswered(self, made: Sequence[tuple[PlacedMesh, PlacedModel]]) -> None:
        """Keep the bounds of meshes that were tried and left nothing that fits.

        Without a pipeline such a bound is of all placements, and another one may fit. A pipeline's
        bound is of the placements chosen, no split of which fits: it is said to be in no bound.
        ``made``: the placements that meshes were tried with.
        """
        # Meshes of which something was tried have the bounds of these candidates.
        known = {id(candidate.placed[0]) for candidate in self._result.tried}
        bounded = self._result.bounded.values()
        known |= {id(asked.placements[0].placed) for asked in bounded if len(asked.placements) == 1}
        # A mesh is answered when one of its placements became a candidate that was tried, or has
        # bounds of its own.
        answered = {
            placed_mesh.where
            for placed_mesh, placed in made
            if known & {id(placed), id(placed_mesh.fastest)}
        }
        for placed_mesh, _ in made:
            number, title = placed_mesh.num_positions, title_of(placed_mesh)
            if placed_mesh.never_fits or placed_mesh.where in answered:
                continue
            if not self._state.named_schedules(number):
                continue
            if number == 1:
                # Without stages the bound of the placement is the bound of the mesh. A pipeline's
                # is not, so it is named as not bounded, if it might be better.
                self._result.unanswered[title] = placed_mesh.bound_s
            elif placed_mesh.bound_s < self._state.best_s() and title not in self._result.unbounded:
                self._result.unbounded.append(title)


def title_of(placed_mesh: PlacedMesh) -> str:
    """The mesh in words, its axes named after what the fastest placement splits."""
    mesh = placed_mesh.fastest.plan.mesh
    return mesh_title(placed_mesh.num_positions, mesh, placed_mesh.pp_place)
