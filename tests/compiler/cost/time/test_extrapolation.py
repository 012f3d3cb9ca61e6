"""Nothing is extrapolated silently: an audit names what lies outside the tables of a
calibration.
"""

from __future__ import annotations

from dataclasses import replace

import plans
import pytest
import torch
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.efficiency import BandwidthTable, EfficiencyTable
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.cost.optimizers.named_optimizer import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.cost.time.extrapolation import OPTIMIZER_PASS, largest_message
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.program import Program
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).sum()


def program() -> Program:
    graph = plans.annotated(plans.traced(Net(), {"x": torch.ones(8, 16)}))
    builder = graph.builder({"tp": 2})
    builder.partition(graph.ops[0].name, "n", "tp")
    plan = builder.build().plan
    assert plan is not None
    return lower(graph, plan)


def measured(sizes: tuple[int, ...], most_bytes: int) -> Hardware:
    hardware = load_hardware("cpu", 2)
    table = EfficiencyTable(sizes, sizes, sizes, (0.5,) * len(sizes) ** 3)
    streams = BandwidthTable((16, most_bytes), (1e10, 1e10))
    return replace(
        hardware,
        device=replace(hardware.device, matmul_efficiency={"float32": table}, streams=streams),
    )


CONFIG = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)


def test_an_audit_says_what_was_not_measured() -> None:
    cost = audit(program(), CONFIG, measured((8, 32), 2000))
    # up is [8, 16] x [16, 32] on each rank, down [8, 64] x [64, 16]: only the second leaves the
    # grid, and so do its gradients
    products = [
        f"product {size} in float32" for size in ("8 x 16 x 64", "64 x 8 x 16", "8 x 64 x 16")
    ]
    # the products of down's backward read 512 B each, the 6208 B of its operands, and write the
    # gradients of these
    memory = "13.4 kB read and written at once (measured: 2 kB)"
    optimizer = "the optimizer's pass, whatever its size (by the rate of memory)"
    assert cost.extrapolated == (*products, memory, optimizer)
    assert f"  beyond what was measured: {', '.join(products)} and 2 more" in str(cost)
    assert PlanCost.from_json(cost.to_json()) == cost


def test_nothing_is_said_inside_the_tables_and_without_any() -> None:
    inference = replace(CONFIG, inference_only=True)
    for hardware, config in (
        (measured((8, 64), 10**9), inference),
        (load_hardware("cpu", 2), CONFIG),
    ):
        cost = audit(program(), config, hardware)
        assert cost.extrapolated == () and "measured" not in str(cost)


def test_the_pass_of_the_optimizer_is_never_measured() -> None:
    assert audit(program(), CONFIG, measured((8, 64), 10**9)).extrapolated == (OPTIMIZER_PASS,)


@pytest.mark.parametrize(
    ("measured_bytes", "beyond"), [(1000, ("a message of 2.05 kB (measured: 1 kB)",)), (2048, ())]
)
def test_messages_larger_than_those_measured_are_named(
    measured_bytes: int, beyond: tuple[str, ...]
) -> None:
    hardware = replace(
        load_hardware("cpu", 2), measurements={"links": [{"bytes": measured_bytes}, {"bytes": 256}]}
    )
    cost = audit(program(), CONFIG, hardware)  # [8, 64] of float32 are gathered for down
    assert cost.extrapolated == beyond


def test_messages_between_stages_and_of_gradients_count() -> None:
    graph = plans.annotated(plans.traced(Net(), {"x": torch.ones(8, 16)}))
    config = ComputeConfig(
        plan_ngpus=2, runtime_ngpus=4, use_end2end=True, pas_config={"num_microbatches": 2}
    )
    compiled = compile_graph(graph, find_policy("pp").apply, config, policy_name="pp")
    units = 4 * (64 * 16 + 64)
    assert largest_message(compiled.program, config) == units  # of a stage: up, and its bias
    # What crosses.
    assert (
        largest_message(compiled.program, replace(config, reducer_bucket_cap_mb=0.001))
        == 4 * 8 * 64
    )
    (first, _) = compiled.program.programs  # type: ignore[union-attr]
    assert largest_message(first, replace(config, runtime_ngpus=2)) == 0


@pytest.mark.parametrize(
    ("cap_mb", "expected"), [(None, 4 * (2 * 1026 + 66)), (1e-6, 4 * 1026), (5e-3, 4 * 1026)]
)
def test_messages_of_whole_tensors_count(cap_mb: float | None, expected: int) -> None:
    """A batch is no larger than all that is cut: up, its bias, and down; a matrix alone goes to one
    owner.
    """
    graph = plans.annotated(plans.traced(Net(), {"x": torch.ones(8, 16)}))
    config = replace(CONFIG, reducer_bucket_cap_mb=cap_mb)
    compiled = compile_graph(graph, find_policy("tp").apply, config, policy_name="tp")
    adafactor = OptimizerMemory(named=NamedOptimizer("Adafactor"))
    cut = [d for d in compiled.program.declarations if d.layout.cut_axes]  # type: ignore[union-attr]
    assert [str(d.layout) for d in cut] == ["[64/tp, 16]", "[64/tp]", "[16, 64/tp]"]
    assert largest_message(compiled.program, config, adafactor) == expected
    assert largest_message(compiled.program, config) < expected  # SGD and its like need none of it


def test_products_of_the_optimizer_count() -> None:
    """Muon has [16, 64] of the first matrix times itself, in a dtype of which nothing was
    measured.
    """
    muon = OptimizerMemory(named=NamedOptimizer("own_optimizers:muon_for_matrices"))
    found = audit(program(), CONFIG, measured((8, 64), 10**9), optimizer=muon).extrapolated
    products = [
        f"product {size} in bfloat16" for size in ("16 x 64 x 16", "16 x 16 x 16", "16 x 16 x 64")
    ]
    assert found == (*products, OPTIMIZER_PASS)


def test_watching_does_not_change_the_cost() -> None:
    inside, outside = measured((8, 64), 10**9), measured((8, 32), 2000)
    assert audit(program(), CONFIG, inside).step_s == audit(program(), CONFIG, outside).step_s
