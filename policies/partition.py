"""Cut a model whose placement is known into pipeline stages, for ``pp`` and ``hybrid``, where
nobody says where stages begin.

Stages are cut as in a search (``cutting/cut_stages.py``): by the
seconds of operators and adapters on the stage's own mesh, the messages between stages, and the
schedule, simulated. They begin between repeated layers, unless other cuts are clearly faster. A
stage that begins inside a layer leaves parts of a layer that are like no other layer, so that its
file is harder to read, and mostly it sends more.

Example: 24 layers of 10 ms and a head of 25 ms on two ranks. Between layers, the best stages have
13 layers, and 11 with the head: 130 and 135 ms. A cut inside layer 13 makes both 132.5 ms. That is
1.9 % less, so it is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.time.call_times import OperatorTimes
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.recompute_regions import mark_recompute
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.outputs import training_wishes
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.compiler.schedule.published import SCHEDULES
from shardwright.compiler.schedule.schedule import Schedule
from shardwright.policies.autodist.candidates.mesh_requests import PlacedModel
from shardwright.policies.autodist.candidates.meshes import position_ranks
from shardwright.policies.autodist.candidates.results import CutRequest, LoweredPlacement
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.cutting.cut_bounds import Waits
from shardwright.policies.autodist.cutting.cut_stages import Cutter
from shardwright.policies.autodist.cutting.model_chains import ModelChains
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.policies.stage_places import num_places
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError

CLEARLY = 0.025
"""The share of a step by which other cuts must be faster than those between layers to be taken."""

FINELY = 0.05
"""Where stages do not begin between layers, the most that a stretch which stays whole takes of a
stage of average length.
"""


def stage_starts(
    graph: PlannableGraph,
    whole: Plan,
    schedule: Schedule,
    config: ComputeConfig,
    hardware: Hardware,
    times: OperatorTimes | None = None,
    pp_place: int = 0,
) -> list[str]:
    """The first operator of every stage but the first.

    ``whole``: the plan of the model on the mesh of one position, without stages; the modules in its
    ``recompute`` stay in one stage each. ``pp_place``: before which axis of that mesh the pipeline
    axis stands.

    Raises:
        PlanError: there are fewer places to cut than stages need.
    """
    if schedule.num_stages == 1:
        return []
    # A position's program: the whole model on its mesh, not cut yet.
    marked = with_regions(graph, whole.recompute)
    ranks = position_ranks(whole.mesh, schedule.num_ranks, pp_place)[0]
    setting = Setting(
        hardware,
        config,
        ranks,
        times=times,
        num_microbatches=schedule.num_microbatches,
        counts_kept=False,
    )
    placed = replace(
        whole,
        zero=units_of_storage(config),
        outputs={**training_wishes(graph, config), **whole.outputs},
    )
    return cut(marked, Walk(lower(marked, placed), setting), schedule, pp_place)


def with_regions(graph: PlannableGraph, recompute: Sequence[str]) -> PlannableGraph:
    """The graph, where the modules that are computed again are regions. No stage begins in them,
    and what they compute counts twice.
    """
    modules = [pattern for pattern in recompute if not pattern.startswith("stage:")]
    return replace(graph, ops=mark_recompute(graph, modules).ops) if modules else graph


def cutter_of(
    graph: PlannableGraph,
    num_microbatches: int,
    memory_bytes: float = float("inf"),
    waits: Waits | None = None,
    chains: ModelChains | None = None,
) -> Cutter:
    """The search's own cutter for schedules of so many microbatches. It keeps what the schedules of
    one program have in common. ``memory_bytes``: what its bounds heed; its cuts heed none.
    ``waits``: what is known of schedules, ``chains``: of the graph; shared with other cutters.
    """
    space = SearchSpace(
        meshes={},
        num_microbatches=num_microbatches,
        recompute=(),
        memory_bytes=memory_bytes,
        tolerance=CLEARLY,
        block_share=FINELY,
    )
    return Cutter(graph, space, waits, chains)


def cut(
    graph: PlannableGraph,
    walk: Walk,
    schedule: Schedule,
    pp_place: int = 0,
    cutter: Cutter | None = None,
) -> list[str]:
    """The begins of stages for a program of the whole ``graph`` on the mesh of a position.
    ``cutter``: that of :func:`cutter_of`, where there are several schedules.

    Raises:
        PlanError: there are fewer places to cut than stages need.
    """
    cutter = cutter or cutter_of(graph, schedule.num_microbatches)
    starts = cutter.starts(cut_request_of(walk, schedule, pp_place))
    if starts is None:
        raise PlanError(
            f"the graph cannot be cut into {schedule.num_stages} stages",
            why=f"it has {num_places(graph)} places where a stage may begin",
            hint="ask for fewer stages",
        )
    return [graph.ops[start].name for start in starts]


def cut_request_of(walk: Walk, schedule: Schedule, pp_place: int = 0) -> CutRequest:
    """The request for stages of a program of the whole model on the mesh of a position."""
    # Stages on each position: 2 for an interleaved schedule of 8 stages on 4 ranks.
    named_schedule = NamedSchedule(schedule.name, schedule.num_stages // schedule.num_ranks)
    by_hand = None if schedule.name in SCHEDULES else schedule
    lowered = LoweredPlacement(PlacedModel(walk.program.plan, 0.0, "", ""), walk)
    return CutRequest(
        "stages", (lowered,), schedule.num_ranks, named_schedule, pp_place, by_hand=by_hand
    )
