"""What the exchange of whole tensors takes in a step, against what ranks count when they run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import planning
import plans
import pytest
import torch
from covers import spread
from memory_ranks import measured_peaks
from torch import Tensor, nn

from shardwright.compiler.compile import Compiled, compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.cost.memory.step_memory import program_memory
from shardwright.compiler.cost.memory.trained_parameters import (
    Trained,
    most_state_bytes,
    updated_shares,
)
from shardwright.compiler.cost.optimizers.named_optimizer import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory
from shardwright.compiler.cost.time.exchange_time import WHOLES, Exchange, exchange_of
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.policies.autodist.placement.place import Placement, place
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.zero import whole_exchange as exchange

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Muon": torch.optim.Muon,
    "Adafactor": torch.optim.Adafactor,
}
HARDWARE = load_hardware("a100-80gb", 8)


class Matrices(nn.Module):
    """Parameters that Muon takes, of which some are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.ups = nn.ModuleList(nn.Linear(8, 18, bias=False) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(18, 8, bias=False) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x).relu())
        return (x @ self.embed.weight.T).square().mean()


TOKENS = {"tokens": torch.arange(32).view(8, 4) % 16}


def compiled(policy: str, config: ComputeConfig) -> Compiled:
    graph = plans.traced(Matrices().double(), TOKENS)
    return compile_graph(graph, find_policy(policy).apply, config, policy_name=policy)


def table(**options: Any) -> dict[str, Any]:
    return {"distributed_optimizer": options}


CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("tp", 2, 2, {}),
    ("tp", 4, 4, {"reducer_bucket_cap_mb": 1e-3}),
    ("hybrid", 4, 4, {"pas_config": {"dp": 2, "tp": 2}}),
    ("hybrid", 4, 4, {"pas_config": {"dp": 2, "tp": 2}, "use_zero": 1}),
    ("tp", 2, 4, {}),
    ("tp", 2, 4, {"use_zero": 1}),
    ("tp", 2, 4, {"use_zero": 1, "zero_use_reduce_scatter": True}),
    ("tp", 2, 4, {"use_zero": 2}),
    ("tp", 2, 8, {"use_zero": 2, "zero_ngroups": 2}),
    ("dp", 1, 2, {"use_zero": 3}),
    ("tp", 2, 4, {"use_zero": 3}),
    ("hybrid", 4, 4, {"pas_config": {"dp": 2, "tp": 2}, "use_zero": 3}),
    ("tp", 2, 8, {"use_zero": 3, "zero_ngroups": 2}),
    ("tp", 2, 4, table(dtype="float32", grad_sync_dtype="float32")),
    (
        "hybrid",
        4,
        8,
        {"pas_config": {"num_stages": 2, "tp": 2, "num_microbatches": 2}, "use_zero": 0},
    ),
    ("dp", 1, 2, {"use_zero": 1}),  # nothing is cut
]


@pytest.mark.parametrize(("policy", "plan", "runtime", "fields"), spread(CASES, 3), ids=str)
def test_bytes_are_those_that_ranks_count(
    policy: str, plan: int, runtime: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Bytes are averages over the ranks of a stage: who owns a tensor sends more of it, and its
    copies may have no part in it.
    """
    name = list(OPTIMIZERS)[CASES.index((policy, plan, runtime, fields)) % 2]
    config = ComputeConfig(plan_ngpus=plan, runtime_ngpus=runtime, use_end2end=True, **fields)
    found = compiled(policy, config)
    cost = audit(
        found.program, config, HARDWARE, optimizer=OptimizerMemory(named=NamedOptimizer(name))
    )
    plans.write(tmp_path, found, Matrices().double())

    def on_rank(rank: int) -> int:
        part = load_class(tmp_path)()
        optimizer = build_optimizer(part, OPTIMIZERS[name], config)
        with count_communication() as volume:
            part.train_step([TOKENS] * found.plan.num_microbatches)
            optimizer.step()
        return volume.total(
            phase="gradients", axis=exchange.WHOLES, collective="all_to_all"
        ).num_bytes

    counted = run_ranks(runtime, on_rank)
    assert f"{exchange.WHOLES} all_to_all" == WHOLES
    positions = list(dict.fromkeys(stage.ranks for stage in found.plan.stages)) or [
        tuple(range(plan))
    ]
    for ranks in positions:
        told = [cost.ranks[rank].comm_bytes.get(WHOLES, 0.0) for rank in ranks]
        measured = mean(counted[unit + rank] for unit in range(0, runtime, plan) for rank in ranks)
        assert told == pytest.approx([measured] * len(ranks), rel=1e-12)
    cut = fields != {"use_zero": 1} or policy != "dp"
    assert all((WHOLES in rank.comm_bytes) == (WHOLES in rank.comm_s) == cut for rank in cost.ranks)


def machine(
    num_devices: int, *, latency_s: float = 0.0, memory_bytes_per_s: float = 1e30
) -> Hardware:
    """Links of 1 kB/s, and a memory that takes no time."""
    found = planning.slow_machine(num_devices, bytes_per_s=1e3)
    tiers = tuple(replace(tier, latency_s=latency_s) for tier in found.tiers)
    return replace(found, tiers=tiers, device=replace(found.device, bytes_per_s=memory_bytes_per_s))


def seconds(size: int, batch: int, hardware: Hardware) -> Exchange:
    """Seconds of ``[size]`` over four ranks in float32, ``batch`` elements together."""
    layout, mesh = Layout.parse(f"[{size}/tp]"), Mesh((("tp", 4),))
    return exchange_of(
        layout, torch.float32, torch.bfloat16, mesh, range(4), hardware, num_units=1, unit_size=4,
        num_shards=1,
        bucket_bytes=4.0 * batch,
    )  # fmt: skip


def test_a_large_tensor_waits_for_its_one_owner() -> None:
    """It gets three quarters of 400 numbers, of a gradient and of values, with four flags, and
    gives back as much.
    """
    found = seconds(400, 1, machine(4))
    assert found.gather_s == pytest.approx(3 / 4 * 404 * (4 + 2) / 1e3)
    assert found.scatter_s == pytest.approx(3 / 4 * 400 * 2 / 1e3)
    assert found.num_bytes == 101 * (4 + 2) + 100 * 2


@pytest.mark.parametrize(("together", "most"), [(2, 1), (4, 1), (5, 2), (8, 2)])
def test_a_batch_waits_for_the_rank_that_owns_most_of_it(together: int, most: int) -> None:
    found, alone = seconds(400, 400 * together, machine(4)), seconds(400, 1, machine(4))
    assert found.total_s == pytest.approx(alone.total_s * most / together)
    assert found.num_bytes == alone.num_bytes


def test_latency_is_shared_by_a_batch() -> None:
    slow = (
        seconds(400, 4000, machine(4, latency_s=1.0)).total_s
        - seconds(400, 4000, machine(4)).total_s
    )
    assert slow == pytest.approx(3 * 3 / 10)  # three messages to three others, of ten parameters


def test_all_units_exchange_at_once() -> None:
    """Links that they share are as slow for one of two units as if there were one unit with half of
    them.
    """
    found = machine(4)
    shared = replace(
        found, tiers=tuple(replace(tier, fabric_bytes_per_s=2e3) for tier in found.tiers)
    )

    def taken_s(num_units: int) -> float:
        return exchange_of(
            Layout.parse("[400/tp]"), torch.float32, torch.float32, Mesh((("tp", 2),)), range(2),
            shared,
            num_units=num_units, unit_size=2, num_shards=1, bucket_bytes=1.0,
        ).total_s  # fmt: skip

    assert taken_s(2) == pytest.approx(2 * taken_s(1))


def test_copies_into_messages_and_out_of_them() -> None:
    """A piece of 100 and, as tensors like it are four times as many as ranks, a whole of 400 for
    each rank in four.
    """
    found, free = (
        seconds(400, 400 * 16, machine(4, memory_bytes_per_s=rate)) for rate in (1e3, 1e30)
    )
    assert found.gather_s - free.gather_s == pytest.approx((5 + 3) * 100 * (4 + 2) / 1e3)
    assert found.scatter_s - free.scatter_s == pytest.approx((2 + 4) * 100 * 2 / 1e3)


def test_zero_leaves_a_copy_its_share() -> None:
    """One of two copies of a tensor takes part in the exchange of it, and updates it."""
    adafactor = OptimizerMemory(named=NamedOptimizer("Adafactor"))
    costs = []
    for zero in (0, 1):
        config = ComputeConfig(plan_ngpus=2, runtime_ngpus=4, use_zero=zero)
        costs.append(audit(compiled("tp", config).program, config, HARDWARE, optimizer=adafactor))
    whole, shared = costs
    assert shared.ranks[0].comm_s[WHOLES] == pytest.approx(whole.ranks[0].comm_s[WHOLES] / 2)
    names = [part.name for part in shared.timeline]
    assert names[-5:] == [
        "reduce gradients", "gather whole tensors", "optimizer step", "scatter whole tensors",
        "gather parameters"
    ]  # fmt: skip


@pytest.mark.parametrize("beside", [False, True])
def test_nothing_hides_the_exchange(beside: bool) -> None:
    """All parts of a rank's step add up to it, but for sums beside the backward."""
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=4, use_async_reducer=beside)
    program = compiled("tp", config).program
    cost, plain = (
        audit(program, config, HARDWARE, optimizer=OptimizerMemory(named=NamedOptimizer(name)))
        for name in ("Adafactor", "SGD")
    )
    (rank,) = {rank.comm_s[WHOLES]: rank for rank in cost.ranks}.values()
    step = {part.name: part.end_s - part.start_s for part in cost.timeline}["optimizer step"]
    step -= {part.name: part.end_s - part.start_s for part in plain.timeline}["optimizer step"]
    assert cost.step_s - plain.step_s == pytest.approx(rank.comm_s[WHOLES] + step)
    assert rank.idle_s == pytest.approx(plain.ranks[0].idle_s)


@pytest.mark.parametrize(
    ("plan", "runtime", "zero", "name", "bytes_per_s"),
    spread(
        [
            (2, 2, 0, "Adafactor", 1e5),
            (4, 4, 0, "zero_training:Muonlike", 1e5),
            (4, 8, 1, "Adafactor", 1e8),
            (2, 4, 2, "zero_training:Muonlike", 1e5),
            (2, 4, 2, "Adafactor", 1e5),
            (2, 4, 3, "Adafactor", 1e8),
            (1, 4, 3, "Adafactor", 1e5),
            (1, 4, 3, "zero_training:Muonlike", 1e5),
        ],
        3,
    ),
)
def test_a_search_adds_up_what_the_audit_does(
    plan: int, runtime: int, zero: int, name: str, bytes_per_s: float
) -> None:
    optimizer = OptimizerMemory(named=NamedOptimizer(name))
    config = ComputeConfig(plan_ngpus=plan, runtime_ngpus=runtime, use_zero=zero)
    hardware = planning.slow_machine(runtime, bytes_per_s=bytes_per_s)
    mesh = "2x2" if plan == 4 else str(plan)
    asked = planning.request(
        plans.zoo_graph("mlp"),
        planning.mesh_of(mesh),
        hardware,
        config=config,
        optimizer=optimizer,
        microbatches=3,
    )
    found = place(asked)
    assert isinstance(found, Placement)
    plan_found = replace(found.plan, zero=units_of_storage(config))
    program = lower(asked.graph, plan_found)
    cost = audit(
        program, config, hardware,
        optimizer=optimizer, num_microbatches=3, gathers_ahead=False,
    )  # fmt: skip
    more_s = planning.more_at_end_s(program, asked)
    assert math.isclose(found.cost_s + more_s, cost.step_s, rel_tol=1e-12)


def test_a_search_leaves_whole_what_is_dear_to_bring_together() -> None:
    """Where links are slow, the plan that is best for SGD is not the best one for an optimizer that
    needs whole tensors.
    """
    best = {}
    for name in ("SGD", "Adafactor"):
        asked = planning.request(
            plans.zoo_graph("mlp"), planning.mesh_of("2"),
            planning.slow_machine(2, bytes_per_s=3e4),
            optimizer=OptimizerMemory(named=NamedOptimizer(name)),
        )  # fmt: skip
        best[name] = place(asked), asked
    found, asked = best["Adafactor"]
    other, _ = best["SGD"]
    assert isinstance(found, Placement) and isinstance(other, Placement)
    assert found.cost_s < planning.audited_s(asked.graph, other.plan, asked)


class Wide(nn.Module):
    """Three matrices, of which the ranks of a plan with tp own one and two: more than any
    activation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = (
            nn.Linear(*size, bias=False) for size in ((32, 256), (256, 256), (256, 32))
        )

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(self.mid(self.up(x).relu()).relu()).square().mean()
        return loss


@pytest.mark.parametrize("name", spread(["Muon", "Adafactor"], 2, first=1))
@pytest.mark.parametrize(
    ("runtime", "fields"), [(2, {}), (4, {"use_zero": 1}), (4, {"use_zero": 3})], ids=str
)
def test_wholes_and_their_state_count_on_their_owner(
    name: str, runtime: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs = Wide(), {"x": torch.randn(8, 32)}
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=runtime, use_end2end=True, **fields)
    found = compile_graph(
        plans.traced(model, inputs), find_policy("tp").apply, config, policy_name="tp"
    )
    told = program_memory(found.program, config, OptimizerMemory(named=NamedOptimizer(name)))  # type: ignore[arg-type]
    measured = measured_peaks(tmp_path, found, model, inputs, config, make=OPTIMIZERS[name])
    assert told.peak_bytes == pytest.approx(max(measured), rel=0.01)
    assert told.moment in ("optimizer step", "exchange of whole tensors")
    if name == "Muon" and not fields:
        # Mid; and down, which tp does not cut.
        assert told.by_category["optimizer"] == 4 * (256 * 256 + 256 * 32)


def test_most_state_may_be_elsewhere_than_the_largest_tensors() -> None:
    """One of two copies updates a matrix with short edges for its size, the other one nine thin
    ones, that with longer edges together. No bound of a planner, which counts the mean, is above
    what is counted of state.
    """
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=2, use_zero=1)
    adafactor = OptimizerMemory(named=NamedOptimizer("Adafactor"))

    def trained(name: str, rows: int, columns: int) -> Trained:
        piece, whole = (rows, columns), (2 * rows, columns)
        return Trained(name, piece, torch.float32, 2, 2, "units", whole=whole, cut=(("tp", 2),))

    items = [trained("large", 200, 400), *(trained(f"thin {i}", 10, 800) for i in range(9))]
    shares = updated_shares(items, adafactor, config)
    assert {name for name, share in shares.items() if share} == {"large"}
    thin = 4 * (20 + 800) + 4  # rows, columns and a step of each; five of nine on one of two ranks
    assert most_state_bytes(items, adafactor, config) == 5 * thin
