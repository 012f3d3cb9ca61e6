"""The order in which a search looks at meshes: what is likely good and soon placed comes first.

Example: of eight ranks ``x=8`` lies in one node and takes 1.0 s by the plan of a simple policy; two
positions of ``x=4`` take 1.1 s, and ``x=2 x y=4`` takes 0.9 s. An axis more counts as 1.3 times as
long, so ``x=8`` comes first, then ``x=4``, and ``x=2 x y=4`` last.
"""

from __future__ import annotations

from shardwright.policies.autodist.candidates.mesh_requests import PipelineMesh
from shardwright.policies.autodist.candidates.meshes import divisors
from shardwright.policies.autodist.search.search_state import SearchState
from shardwright.runtime.layout import Mesh

BEYOND_NODE, FURTHER_AXIS = 2.0, 1.3
"""The factors by which a mesh is less likely to be the best that lies on several nodes, and one of
an axis more to be worth its time. They decide what is tried first.
"""


def ordered_meshes(state: SearchState) -> list[PipelineMesh]:
    """All meshes of the space: by what simple policies take on them, then by rule of thumb."""
    num_ranks, node = state.config.plan_ngpus, state.hardware.tiers[0].sizes[0]
    found: list[PipelineMesh] = []
    # Positions of a pipeline, and the meshes that each of them may be.
    for number in divisors(num_ranks):
        if number != (state.space.num_positions or number):
            continue
        if not state.may_have(number) or not state.named_schedules(number):
            continue
        for mesh in state.space.meshes.get(num_ranks // number, ()):
            # Where the pipeline axis stands among the others is tried last.
            pp_place = min(state.space.pp_place or 0, len(mesh.axes)) if number > 1 else 0
            found.append(PipelineMesh(number, mesh, pp_place))

    def further_axes(mesh: Mesh) -> float:
        return FURTHER_AXIS ** max(0, len(mesh.axes) - 1)

    def by_thumb(where: PipelineMesh) -> float:
        on_nodes = BEYOND_NODE if where.mesh.size > node else 1.0
        return on_nodes * further_axes(where.mesh) * state.slower(where.num_positions)

    def by_estimate(where: PipelineMesh) -> float:
        return further_axes(where.mesh) * state.likely_s(where)

    # First by the rule; estimates, which take time, then decide among what is there.
    found.sort(key=by_thumb)
    if len(found) == 1:
        return found
    estimates = dict[PipelineMesh, float]()
    for count, where in enumerate(found, 1):
        state.tell(f"estimate {count} of {len(found)} meshes")
        estimates[where] = by_estimate(where)
    return sorted(found, key=estimates.__getitem__)
