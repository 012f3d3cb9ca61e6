"""What stages of a placement take is never less than what is said of them before they are known."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import plans
import pytest
from planning import slow_machine

from shardwright.compiler.cost.time.body_time import body_time
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.plan.outputs import training_wishes
from shardwright.policies.autodist.candidates.scheduled_plans import NamedSchedule, staged
from shardwright.policies.autodist.search.simple_rules import Rules
from shardwright.policies.autodist.search.simple_times import SimpleTimes
from shardwright.policies.autodist.stages.walk import ALIKE, Setting, Walk
from shardwright.policies.partition import with_regions
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh


@pytest.mark.parametrize("again", [False, True])
def test_stages_take_at_least_what_boundaries_leave(again: bool) -> None:
    """Adapters take nearly all of the time here, and some boundaries save a few."""
    hardware = slow_machine(4, bytes_per_s=1e3)
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True, outputs="loss")
    rules, num_saved = Rules(plans.zoo_graph("llama"), config), 0
    graph = rules.needed
    recompute = rules.every_layer if again else ()
    marked = with_regions(graph, recompute)
    mesh = Mesh((("x", 2),))
    setting = Setting(hardware, config, (0, 1), num_microbatches=4)
    for way in rules.ways(mesh):
        whole = replace(way.plan(), outputs=training_wishes(graph, config))
        walk = Walk(lower(graph, whole), setting)
        if again:
            alone = Walk(lower(marked, replace(whole, recompute=recompute)), setting)
            walk = walk.recomputing(marked, recompute)
            # What it has of the one without is as if it were worked out anew, but for marks.
            for name in set(ALIKE) - {"kept", "by_place"}:
                assert getattr(walk, name) == getattr(alone, name), name
            for start, stop in itertools.pairwise(range(0, len(graph.ops) + 1, 5)):
                assert walk.kept.first(start, stop) == alone.kept.first(start, stop)
                assert walk.kept.first(0, stop) == alone.kept.first(0, stop)
        times = SimpleTimes(walk)
        ops = graph.ops
        for cut in range(1, len(ops), 3):
            region = marked.ops[cut].region
            if region is not None and region == marked.ops[cut - 1].region:
                continue
            plan = staged(whole, [ops[cut].name], 2, NamedSchedule("1f1b", 1), 4, 0)
            program = lower_stages(marked, replace(plan, recompute=recompute))
            spans = [range(cut), range(cut, len(ops))]
            bodies = [
                body_time(own, hardware, stage.ranks, unit_size=4, gathers_ahead=False)
                for own, stage in zip(program.programs, program.plan.stages, strict=True)
            ]
            for own, body in zip(spans, bodies, strict=True):
                least_s = times.stage(own)
                actual = np.array([body.forward_s, body.backward_s])
                assert (np.array(least_s) <= actual * (1 + 1e-9)).all()
                whole_s = times.seconds[own.start : own.stop].sum(axis=0)
                num_saved += int((whole_s > actual * (1 + 1e-9)).any())
            total_s = sum(body.forward_s + body.backward_s for body in bodies)
            assert times.least_s(2) <= total_s * (1 + 1e-9)
    assert num_saved > 0
