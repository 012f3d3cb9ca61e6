"""What stages and the boundaries between them are priced at is what the audit of the lowered plan
says, to the last term.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import replace

import pytest
from planning import slow_machine, two_nodes
from plans import zoo_graph

from shardwright.compiler.cost.machine.hardware import Hardware
from shardwright.compiler.cost.optimizers.optimizer_memory import ADAM
from shardwright.compiler.cost.time.body_time import body_time
from shardwright.compiler.cost.time.pipeline_time import addition_s, transfer_seconds
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.outputs import output_wishes
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.candidates.meshes import position_ranks
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule, staged
from shardwright.policies.autodist.cutting.join_stages import joined
from shardwright.policies.autodist.placement.place import place
from shardwright.policies.autodist.placement.request import PlacementRequest
from shardwright.policies.autodist.solver.problem import Infeasible
from shardwright.policies.autodist.stages.block_costs import block_costs
from shardwright.policies.autodist.stages.boundaries import Boundary, Messages, View
from shardwright.policies.autodist.stages.chain import block_starts
from shardwright.policies.autodist.stages.stage_costs import StageCosts
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh

RATES = (1e6, 1e8)
"""Bytes/s of links: slow ones are for splitting the batch, fast ones for splitting everything else
too.
"""


@functools.cache
def walks(name: str) -> tuple[Walk, ...]:
    """Placements of a model on several meshes, best for machines of several rates, two of them on
    one mesh.
    """
    found = []
    for sizes, rate in itertools.product(((2,), (3,), (2, 2)), RATES):
        mesh = Mesh(tuple(zip("xy", sizes, strict=False)))
        config = ComputeConfig(plan_ngpus=mesh.size, runtime_ngpus=mesh.size, outputs="loss")
        ranks = tuple(range(mesh.size))
        kept_outputs = output_wishes(graph(name), config)
        placed = place(
            PlacementRequest(
                graph(name),
                mesh,
                ranks,
                machine(rate),
                config,
                microbatches=4,
                outputs=kept_outputs,
            )
        )
        assert not isinstance(placed, Infeasible)
        setting = Setting(
            machine(RATES[-1]),
            ComputeConfig(plan_ngpus=8, runtime_ngpus=8),
            ranks,
            num_microbatches=4,
        )
        found.append(Walk(lower(graph(name), placed.plan), setting))
    return tuple(found)


def machine(rate: float) -> Hardware:
    return slow_machine(8, bytes_per_s=rate)


def graph(name: str) -> PlannableGraph:
    return zoo_graph(name)


SLOW = [
    pytest.param(name, seed, marks=pytest.mark.slow)
    for name in ("gpt2", "t5", "unet")
    for seed in range(2)
]


@pytest.mark.parametrize(("name", "seed"), [("mlp", 0), ("mlp", 1), *SLOW])
def test_stages_and_messages_take_what_the_audit_says(name: str, seed: int) -> None:
    rng = random.Random(seed)
    all_walks = walks(name)
    placements = [rng.randrange(len(all_walks)) for _ in range(2)]
    starts = block_starts(graph(name), [1.0] * len(graph(name).ops), 4)
    cut = rng.randrange(1, len(starts))
    program = lower_stages(
        graph(name), stages_of(name, placements, [graph(name).ops[starts[cut]].name])
    )
    sizes = [lowered.mesh.size for lowered in all_walks]
    messages = Messages(
        all_walks, starts, lambda placement, device: tuple(range(device, device + sizes[placement]))
    )
    boundary = messages.boundary(placements[0], placements[1], sizes[placements[0]])
    check(
        program,
        [all_walks[placement] for placement in placements],
        boundary,
        starts,
        cut,
        machine(RATES[-1]),
    )


@pytest.mark.parametrize("pp_place", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_positions_take_what_the_audit_says_wherever_their_ranks_are(pp_place: int) -> None:
    """Two positions of two ranks in nodes of two: side by side, or one rank of each in every
    node.
    """
    hardware = two_nodes(bytes_per_s=1e3)
    mesh = Mesh((("x", 2),))
    positions = position_ranks(mesh, 2, pp_place)
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, outputs="loss")
    kept_outputs = output_wishes(graph("unet"), config)
    request = PlacementRequest(
        graph("unet"), mesh, positions[0], hardware, config, microbatches=4, outputs=kept_outputs
    )
    placed = place(request)
    assert not isinstance(placed, Infeasible)
    walk = Walk(
        lower(graph("unet"), placed.plan),
        Setting(hardware, config, positions[0], num_microbatches=4),
    )
    starts = block_starts(graph("unet"), [1.0] * len(graph("unet").ops), 4)
    cut = len(starts) // 2
    plan = staged(
        placed.plan, [graph("unet").ops[starts[cut]].name], 2, NamedSchedule("1f1b", 1), 4, pp_place
    )
    assert [stage.ranks for stage in plan.stages] == positions and plan.mesh.names.index(
        "pp"
    ) == pp_place
    messages = Messages([walk], starts, lambda placement, device: positions[device // 2])
    check(
        lower_stages(graph("unet"), plan),
        [walk] * 2,
        messages.boundary(0, 0, 2),
        starts,
        cut,
        hardware,
    )
    # What bounds of schedules count of a message is never more than all of it.
    (_, (there_s, back_s)), equal = messages.crossings(0, 2), 0
    for cut in range(1, len(starts)):
        plan = staged(
            placed.plan,
            [graph("unet").ops[starts[cut]].name],
            2,
            NamedSchedule("1f1b", 1),
            4,
            pp_place,
        )
        transfers = transfer_seconds(lower_stages(graph("unet"), plan), hardware)
        for counted_s, pair in ((there_s, (0, 1)), (back_s, (1, 0))):
            counted, whole = float(counted_s[cut, len(starts)]), transfers.get(pair, 0.0)
            assert counted <= whole * (1 + 1e-9)
            equal += counted > 0.9 * whole > 0
    assert equal, "some boundary is crossed by what its last block has made, and little else"


def check(
    program: PipelineProgram,
    all_walks: list[Walk],
    boundary: Boundary,
    starts: list[int],
    cut: int,
    hardware: Hardware,
) -> None:
    """Two stages and the boundary between them cost what the program does that is emitted for them;
    up to parameters of which a stage on another mesh holds copies, as they may lie there in another
    way.
    """
    spans, size = [(0, cut), (cut, len(starts))], all_walks[0].setting.config.plan_ngpus
    for index, (lowered, (start, stop)) in enumerate(zip(all_walks, spans, strict=True)):
        tables = StageCosts(
            block_costs(lowered, starts, {}).placed(lowered.mesh.size), 4, splits_backward=False
        )
        body = body_time(
            program.programs[index],
            hardware,
            program.plan.stages[index].ranks,
            unit_size=size,
            gathers_ahead=False,
        )
        own = Walk(
            program.programs[index],
            replace(lowered.setting, ranks=program.plan.stages[index].ranks),
        )
        within = 1e-12 if not index or not program.owned else 1e-4
        actual = (
            body.forward_s
            + body.backward_s
            + addition_s(program.programs[index], 4, lowered.setting.config, hardware, ADAM)
        )
        predicted = float(tables.work_s[start, stop])
        predicted += float(
            (boundary.taken_s[cut, stop] if index else boundary.sent_s[cut, len(starts)]).sum()
        )
        assert predicted == pytest.approx(actual, rel=within)
        if not index or not program.owned:
            assert tables.held_bytes[start, stop] == pytest.approx(
                sum(held.held_bytes for held in own.parameters), rel=1e-12
            )
    transfers = transfer_seconds(program, hardware)
    assert float(boundary.there_s[cut, len(starts)]) == pytest.approx(
        transfers.get((0, 1), 0.0), rel=1e-9
    )
    assert float(boundary.back_s[cut, len(starts)]) == pytest.approx(
        transfers.get((1, 0), 0.0), rel=1e-9
    )


def stages_of(name: str, placements: list[int], starts: list[str]) -> Plan:
    return joined(
        graph(name),
        [walks(name)[placement].program.plan for placement in placements],
        starts,
        "1f1b",
        4,
    )


def test_layouts_are_not_hashed_anew_for_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage asks for the copies of all its readers: hundreds, of a mask in a deep model."""
    whole = Layout.whole((4, 4))
    summed = replace(whole, grad_partial=("x",))
    view = View(whole, (summed, *[whole] * 200, summed), ())
    assert view.wanted(0, 2) == (summed, whole)
    asked: list[Layout] = []
    monkeypatch.setattr(Layout, "__hash__", lambda layout: asked.append(layout) or id(layout))
    assert all(view.wanted(first, 202) == (summed, whole) for first in range(201))
    assert view.wanted(201, 202) == (summed,) and view.wanted(1, 201) == (whole,)
    assert not asked


def test_what_arrives_from_another_mesh_is_priced_once_whoever_sends_it() -> None:
    every = walks("mlp")
    meshes = [walk.mesh for walk in every]
    starts = block_starts(graph("mlp"), [1.0] * len(graph("mlp").ops), 4)

    def messages() -> Messages:
        return Messages(every, starts, lambda _, device: tuple(range(device, device + 1)))

    shared = messages()
    for after, own in enumerate(meshes):
        others = [before for before, mesh in enumerate(meshes) if mesh != own]
        taken = [shared._taken(before, after) for before in others]
        assert all(each is taken[0] for each in taken)
        # The last of them, priced by itself, is the same.
        assert (messages()._taken(others[-1], after) == taken[0]).all()
        assert shared._taken(after, after) is not taken[0]
