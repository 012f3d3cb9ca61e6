"""Where the pipeline axis stands among the others: tried where the tiers of the machine make it
differ.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zoo
from planning import graph_of, slow_machine, two_nodes
from plans import zoo_graph

from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.frontend.verification.verify import verify
from shardwright.policies.autodist.autodist_policy import apply, search
from shardwright.policies.autodist.candidates.meshes import position_ranks, with_pp
from shardwright.policies.autodist.candidates.results import SearchResult
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.stages.boundaries import tier_groups
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh


def config_of(**fields: Any) -> ComputeConfig:
    return ComputeConfig(plan_ngpus=4, runtime_ngpus=4, use_end2end=True, outputs="loss", **fields)


@functools.cache
def found_between_slow_links() -> SearchResult:
    """A U-Net of much to send and few parameters, as two positions of two ranks."""
    options = AutodistOptions(num_microbatches=16, num_stages=2, schedule="1f1b", time_limit_s=1e3)
    return search(zoo_graph("unet"), config_of(), options, two_nodes(bytes_per_s=2e3))


@pytest.mark.slow
def test_positions_share_nodes_where_messages_cost_more_than_gradients() -> None:
    found = found_between_slow_links()
    assert found.best is not None
    assert found.best.title.startswith("dp=2 x pp=2") and [
        s.ranks for s in found.best.plan.stages
    ] == [(0, 2), (1, 3)]
    (outermost,) = (c for c in found.audited if c.title.startswith("pp=2 x dp=2"))
    assert found.best.step_s < 0.97 * outermost.step_s
    assert found.best.predicted_s == pytest.approx(found.best.step_s, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "often"), [(4, "dp"), pytest.param(256, "tp", marks=pytest.mark.slow)]
)
def test_the_axis_that_sends_most_lies_on_the_fast_links(rows: int, often: str) -> None:
    """Gradients of ``dp`` are as large as the weights, what ``tp`` sends as the rows; wherever the
    fast links are.
    """
    entry, config = zoo.get("mlp"), ComputeConfig(plan_ngpus=4, runtime_ngpus=4)
    graph, options = (
        graph_of(entry.build(), entry.inputs(batch=rows)),
        AutodistOptions(degrees={"dp": 2, "tp": 2}),
    )
    between = two_nodes(bytes_per_s=1e6)
    inner, outer = between.tiers
    inside = replace(
        between, tiers=(replace(inner, bytes_per_s=1e6), replace(outer, bytes_per_s=1e8))
    )
    for hardware, group in ((between, [0, 1]), (inside, [0, 2])):
        best = search(graph, config, options, hardware).best
        assert best is not None
        other = {"dp": "tp", "tp": "dp"}[often]
        assert [rank for rank in range(4) if best.plan.mesh.coords(rank)[other] == 0] == group, (
            best.title
        )


def test_one_tier_leaves_nothing_to_try() -> None:
    options = AutodistOptions(num_microbatches=16, num_stages=2, schedule="1f1b", time_limit_s=1e3)
    found = search(zoo_graph("mlp"), config_of(), options, slow_machine(4))
    assert all(
        "pp=2" not in c.title or c.title.startswith(("pp=2", "2 stages")) for c in found.tried
    )


@pytest.mark.parametrize(("order", "names"), [("pp-dp", ("pp", "dp")), ("dp-pp", ("dp", "pp"))])
def test_the_rank_order_of_the_config_decides(
    order: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "two.json").write_text(two_nodes(bytes_per_s=2e3).dumps())
    options = {"mesh": {"dp": 2}, "num_stages": 2, "num_microbatches": 16, "schedule": "1f1b"}
    plan = apply(
        zoo_graph("mlp"),
        config_of(rank_order=order, pas_config=options | {"hardware": str(tmp_path / "two.json")}),
    )
    assert plan.mesh.names == names


@pytest.mark.slow
def test_positions_that_share_nodes_train_like_one_device(tmp_path: Path) -> None:
    best = found_between_slow_links().best
    assert best is not None and best.plan.mesh.names == ("dp", "pp")
    (tmp_path / "plan.json").write_text(best.plan.dumps())
    entry = zoo.get("unet")
    config = config_of(pas_config={"load_plan": str(tmp_path / "plan.json")})
    report = verify(entry.build(), entry.inputs(), "saved", config, steps=2)
    assert report.ok, str(report)


def test_ranks_of_positions() -> None:
    mesh = Mesh((("x", 2), ("y", 3)))
    assert position_ranks(mesh, 2) == [(0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)]
    assert position_ranks(mesh, 2, 1) == [(0, 1, 2, 6, 7, 8), (3, 4, 5, 9, 10, 11)]
    assert position_ranks(mesh, 2, 2) == [(0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11)]
    assert with_pp(mesh, 2, 1).axes == (("x", 2), ("pp", 2), ("y", 3))


def test_ranks_lie_alike_where_their_tiers_do() -> None:
    hardware = load_hardware("a100-80gb", 24)  # nodes of eight
    assert (
        tier_groups(hardware, (0, 1, 8))
        == tier_groups(hardware, (9, 10, 3))
        != tier_groups(hardware, (0, 8, 1))
    )
    assert (
        tier_groups(hardware, (0, 8))
        == tier_groups(hardware, (16, 1))
        != tier_groups(hardware, (0, 7))
    )
