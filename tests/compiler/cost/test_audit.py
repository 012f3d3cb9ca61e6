"""Costs of whole programs: sums without stages, streams beside each other, simulated schedules."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from covers import spread
from plans import traced, write, zoo_traced
from precision import float64_casts

from shardwright.compiler.compile import Compiled, compile_graph
from shardwright.compiler.cost.audit import PlanCost, audit
from shardwright.compiler.cost.local_calls import local_bytes, local_call
from shardwright.compiler.cost.machine.hardware import Device, Hardware, Tier, load_hardware
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory
from shardwright.compiler.cost.time.adapter_time import reduction_s, step_time
from shardwright.compiler.cost.time.after_backward import all_gradients_bytes
from shardwright.compiler.cost.time.call_times import OperatorTimes, OpTime, call_key
from shardwright.compiler.cost.time.collectives import collective_s
from shardwright.compiler.cost.time.operator_time import op_time, optimizer_s
from shardwright.compiler.ir.value import ValueKind
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.program import Adapt, Program
from shardwright.compiler.schedule.shared_cores import Sharing
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer

RATES = dict.fromkeys(("float64", "float32"), 1e9)
HARDWARE = Hardware("toy", Device("toy", 10**9, RATES, 1e9, 1e-6), (Tier("link", (8,), 1e-5, 1e8),))


def compiled(
    policy: str, plan: int, runtime: int | None = None, **fields: Any
) -> tuple[Compiled, ComputeConfig]:
    recompute = fields.pop("recompute", ())
    config = ComputeConfig(
        plan_ngpus=plan, runtime_ngpus=runtime or plan, use_end2end=True, **fields
    )

    def apply(graph: Any, config: ComputeConfig) -> Plan:
        found = find_policy(policy).apply(graph, config)
        made: Plan = getattr(found, "plan", found)
        return replace(made, recompute=recompute)

    return compile_graph(zoo_traced("gpt2"), apply, config, policy_name=policy), config


def cost_of(
    policy: str, plan: int, runtime: int | None = None, hardware: Hardware = HARDWARE, **fields: Any
) -> PlanCost:
    found, config = compiled(policy, plan, runtime, **fields)
    return audit(found.program, config, hardware)


@pytest.mark.parametrize("schedule", spread(["1f1b", "zb_h1"], 2, first=1))
def test_a_pipeline_for_inference_runs_forwards_only(schedule: str) -> None:
    """Whatever schedule the plan has for training: no backward, no gradients, no optimizer."""
    options = {"num_microbatches": 3, "schedule": schedule}
    trained = cost_of("pp", 2, pas_config=options)
    cost = cost_of("pp", 2, pas_config=options, inference_only=True)
    assert {a.name for a in cost.timeline if a.end_s > a.start_s} == {
        f"{stage}F{i}" for stage in range(2) for i in range(3)
    }
    assert cost.step_s < trained.step_s / 2 and cost.peak_bytes < trained.peak_bytes
    forwards = [a for a in cost.timeline if a.rank == 0 and a.name.startswith("0F")]
    assert sum(a.end_s - a.start_s for a in forwards) == pytest.approx(
        cost.ranks[0].compute_s, rel=1e-12
    )
    assert not any(
        memory.by_category.get(kind) for memory in cost.memory for kind in ("gradient", "optimizer")
    )


@pytest.mark.parametrize(
    ("policy", "plan", "runtime"),
    spread([("dp", 1, 1), ("tp", 2, 2), ("data", 2, 4), ("tp", 2, 4)], 2, first=1),
)
def test_without_stages_the_time_is_a_sum(policy: str, plan: int, runtime: int) -> None:
    found, config = compiled(policy, plan, runtime)
    program = found.program
    assert isinstance(program, Program)
    mesh, ranks, total = program.plan.mesh, tuple(range(plan)), 0.0
    # All gradients that are summed over the same ranks are one message.
    bucket_bytes = Counter[tuple[str, ...]]()
    for held in program.declarations:
        if held.value.kind is ValueKind.PARAMETER:
            size = local_bytes(held.layout, held.value.dtype, mesh)
            bucket_bytes[held.layout.grad_partial] += size
    for step in program.body:
        if isinstance(step, Adapt):
            gradient = step.of.requires_grad
            total += step_time(
                step.step, step.of.dtype, mesh, ranks, HARDWARE, differentiable=gradient
            ).total_s
        else:
            total += op_time(step.original, step.assignment, mesh, HARDWARE, ranks=ranks).total_s
    for declaration in program.declarations:
        if declaration.value.kind is ValueKind.PARAMETER:
            layout, dtype = declaration.layout, declaration.value.dtype
            total += reduction_s(
                layout, dtype, mesh, ranks, HARDWARE,
                num_units=config.num_units, bucket_bytes=bucket_bytes[layout.grad_partial],
            )  # fmt: skip
            num_bytes = local_bytes(layout, dtype, mesh)
            total += optimizer_s(num_bytes, 2 * num_bytes, HARDWARE)
    cost = audit(program, config, HARDWARE)
    assert cost.step_s == pytest.approx(total, rel=1e-12)
    assert cost.step_s == pytest.approx(
        cost.ranks[0].compute_s + cost.ranks[0].communication_s, rel=1e-12
    )
    assert (
        [rank.rank for rank in cost.ranks] == [memory.rank for memory in cost.memory] == list(ranks)
    )
    assert cost.timeline[-1].end_s == pytest.approx(cost.step_s)


def test_gradients_of_a_small_model_pay_for_a_whole_message() -> None:
    """They all lie in one bucket, which is far from full."""
    hardware = load_hardware("h100", 512)
    found, config = compiled("dp", 1, 512)
    assert isinstance(found.program, Program)
    num_bytes = all_gradients_bytes(config, found.program.graph.used_parameters)
    message_s = collective_s(hardware, "all_reduce", num_bytes, range(512))
    seconds = audit(found.program, config, hardware).ranks[0].comm_s["units gradients"]
    assert message_s < seconds < message_s + hardware.device.memory_s(4 * num_bytes)


def test_measured_times_count() -> None:
    found, config = compiled("dp", 1)
    plain = audit(found.program, config, HARDWARE)
    assert isinstance(found.program, Program)
    op = next(op for op in found.program.graph.ops if op.target == "cross_entropy")
    mesh = found.program.plan.mesh
    times = OperatorTimes({call_key(local_call(op, {}, mesh)): OpTime(1.0, 2.0)})
    extra = 3.0 - op_time(op, {}, mesh, HARDWARE).total_s
    assert audit(found.program, config, HARDWARE, times=times).step_s == pytest.approx(
        plain.step_s + extra
    )


def test_measured_times_are_those_of_a_core_for_itself() -> None:
    found, _ = compiled("dp", 1)
    program = found.program
    assert isinstance(program, Program)
    step = next(
        step
        for step in program.body
        if not isinstance(step, Adapt) and step.original.target == "linear"
    )
    call = local_call(step.original, step.assignment, program.plan.mesh)
    times = OperatorTimes({call_key(call): OpTime(1.0, 2.0)})
    shared = replace(HARDWARE, device=replace(HARDWARE.device, sharing=Sharing(6, 2)))
    measured = [
        op_time(step.original, step.assignment, program.plan.mesh, each, times)
        for each in (HARDWARE, shared)
    ]
    assert measured == [OpTime(1.0, 2.0), OpTime(3.0, 6.0)]


def test_recomputing_takes_another_forward() -> None:
    plain = cost_of("dp", 1)
    again = cost_of("dp", 1, recompute=("transformer.h.*",))
    forward = plain.timeline[0].end_s
    assert plain.step_s < again.step_s < plain.step_s + forward
    assert again.peak_bytes < plain.peak_bytes


def test_an_asynchronous_reducer_hides_what_backward_covers() -> None:
    blocking = cost_of("dp", 1, 2, reducer_bucket_cap_mb=0.01)
    beside = cost_of("dp", 1, 2, reducer_bucket_cap_mb=0.01, use_async_reducer=True)
    reduction = blocking.ranks[0].communication_s
    assert blocking.step_s - reduction < beside.step_s < blocking.step_s
    # The parts of a rank add up to more than the step, and the text says why.
    told = "the step has only what computing does not hide of it, as idle"
    assert told in str(beside) and "does not hide" not in str(blocking)
    buckets = [part for part in beside.timeline if part.name.startswith("reduce bucket")]
    (backward,) = [part for part in beside.timeline if part.name == "backward"]
    assert len(buckets) > 2
    for first, second in itertools.pairwise(buckets):
        assert first.end_s <= second.start_s + 1e-15  # one after the other
    assert buckets[0].start_s < backward.end_s  # begins while backward runs
    assert sum(part.end_s - part.start_s for part in buckets) == pytest.approx(reduction)


TABLE = {"use_zero": 1, "hardware": replace(HARDWARE, tiers=(Tier("link", (8,), 0.0, 1e6),))}


def table(**options: Any) -> dict[str, Any]:
    return TABLE | {
        "distributed_optimizer": {"bucket_cap_mb": 0.01, "overlap_grad_sync": False} | options
    }


def test_parameters_that_arrive_during_the_next_forward_are_waited_for_where_they_are_read() -> (
    None
):
    blocking, beside = (
        cost_of("dp", 1, 2, **table(overlap_param_sync=overlaps)) for overlaps in (False, True)
    )
    (after,) = [part for part in blocking.timeline if part.name == "gather parameters"]
    assert after.end_s == pytest.approx(blocking.step_s) and blocking.timeline[-1] == after
    forward, *buckets = [
        part for part in beside.timeline if part.name in ("forward",) or "gather" in part.name
    ]
    assert len(buckets) > 2 and buckets[0].start_s == forward.start_s == 0.0
    for first, second in itertools.pairwise(buckets):
        assert first.end_s == second.start_s  # one after the other
    gathered_s = after.end_s - after.start_s
    assert buckets[-1].end_s == pytest.approx(gathered_s)
    alone = blocking.timeline[0].end_s
    # What is left of the forward once the last bucket is there: the layers are read in the order in
    # which they come.
    assert max(alone, gathered_s) < forward.end_s < alone + gathered_s
    assert beside.step_s == pytest.approx(blocking.step_s - gathered_s - alone + forward.end_s)


def test_one_bucket_of_parameters_hides_nothing() -> None:
    """The first operator reads some of it."""
    blocking, beside = (
        cost_of("dp", 1, 2, **table(overlap_param_sync=overlaps, bucket_cap_mb=100))
        for overlaps in (False, True)
    )
    assert beside.step_s == pytest.approx(blocking.step_s, rel=1e-12)


def test_an_adapter_waits_for_parameters_that_are_gathered_on_its_axis() -> None:
    """A plan that splits the batch over an axis sums the loss over it, and that comes after all
    buckets.
    """
    options = table(overlap_param_sync=True)
    found, config = compiled(
        "data", 2, 2, **{name: value for name, value in options.items() if name != "hardware"}
    )
    assert isinstance(found.program, Program)
    cost = audit(found.program, config, options["hardware"])
    arrived = max(part.end_s for part in cost.timeline if part.name.startswith("gather bucket"))
    (forward,) = [part for part in cost.timeline if part.name == "forward"]
    assert {step.step.axis for step in found.program.adapters()} == {
        "dp"
    } and forward.end_s > arrived


@pytest.mark.parametrize("num_stages", spread([1, 2], 2, first=1))
def test_a_stage_begins_when_its_parameters_are_there(num_stages: int) -> None:
    """The first position waits for all of its first stage's, the others gather meanwhile."""
    options = {
        "num_microbatches": 4,
        **({"schedule": "1f1b_interleaved"} if num_stages == 2 else {}),
    }
    blocking, beside = (
        cost_of("pp", 2, 4, pas_config=options, **table(overlap_param_sync=overlaps))
        for overlaps in (False, True)
    )
    assert not any(part.name == "gather parameters" for part in beside.timeline)
    first, *_ = [part for part in beside.timeline if part.rank == 0]
    gathers = [
        part for part in blocking.timeline if part.rank == 0 and part.name == "gather parameters"
    ]
    whole = gathers[0].end_s - gathers[0].start_s
    assert first.start_s == pytest.approx(whole) if num_stages == 1 else 0 < first.start_s < whole
    assert beside.step_s <= blocking.step_s * (1 + 1e-12)
    assert num_stages == 1 or beside.step_s < 0.99 * blocking.step_s


def test_sums_of_zero_2_run_beside_every_backward() -> None:
    """And the gathering of updated parameters beside none."""
    found, config = compiled(
        "dp", 1, 2, reducer_bucket_cap_mb=0.01, use_zero=2, use_async_reducer=True
    )
    one, three = (
        audit(found.program, config, TABLE["hardware"], num_microbatches=number)
        for number in (1, 3)
    )
    assert [part.name for part in one.timeline][-2:] == ["optimizer step", "gather parameters"]
    spans = [
        (part.start_s, part.end_s) for part in three.timeline if part.name == "reduce bucket 0"
    ]
    backwards = [part for part in three.timeline if part.name == "backward"]
    assert len(spans) == len(backwards) == 3
    assert all(
        part.start_s < start < part.end_s for part, (start, _) in zip(backwards, spans, strict=True)
    )


def test_a_link_carries_one_message_at_a_time() -> None:
    """Adapters on the axis that gradients are reduced over wait for the reduction."""
    slow = replace(HARDWARE, tiers=(Tier("link", (8,), 0.0, 1e6),))
    blocking = cost_of("data", 2, hardware=slow)
    beside = cost_of("data", 2, hardware=slow, use_async_reducer=True)
    assert max(part.end_s for part in beside.timeline) <= blocking.step_s * (1 + 1e-9)


def test_an_adapter_waits_for_the_sum_on_its_axis() -> None:
    """The backward is longer by waiting where adapters use the axis that gradients are summed over,
    and nowhere else.
    """
    slow = replace(HARDWARE, tiers=(Tier("link", (8,), 0.0, 1e5),))

    def backward_s(policy: str, runtime: int, *, asynchronous: bool) -> float:
        cost = cost_of(
            policy,
            2,
            runtime,
            hardware=slow,
            reducer_bucket_cap_mb=0.01,
            use_async_reducer=asynchronous,
        )
        (part,) = [part for part in cost.timeline if part.name == "backward"]
        return part.end_s - part.start_s

    alone, beside = (backward_s("tp", 4, asynchronous=found) for found in (False, True))
    # Gradients are summed over units, adapters are inside of one.
    assert beside == pytest.approx(alone)
    alone, beside = (backward_s("data", 2, asynchronous=found) for found in (False, True))
    assert beside > 10 * alone


def test_a_pipeline_is_its_schedule() -> None:
    found, config = compiled("pp", 2, pas_config={"num_microbatches": 4, "schedule": "gpipe"})
    cost = audit(found.program, config, HARDWARE)
    actions = [part for part in cost.timeline if part.name[0].isdigit()]
    assert len(actions) == 2 * 4 * 2
    for rank in (0, 1):
        mine = [part for part in actions if part.rank == rank]
        assert all(a.end_s <= b.start_s + 1e-15 for a, b in itertools.pairwise(mine))
    first, second = (next(p for p in actions if p.name == name) for name in ("0F0", "1F0"))
    assert second.start_s > first.end_s  # the message takes time
    assert 0 < cost.bubble < 1
    for rank in cost.ranks:
        assert rank.compute_s + rank.communication_s + rank.idle_s == pytest.approx(cost.step_s)
    more = cost_of("pp", 2, pas_config={"num_microbatches": 8, "schedule": "gpipe"})
    assert more.bubble < cost.bubble and more.peak_bytes > cost.peak_bytes
    steady = cost_of("pp", 2, pas_config={"num_microbatches": 8, "schedule": "1f1b"})
    assert steady.peak_bytes < more.peak_bytes


def test_ranks_of_a_pipeline_leave_their_cores_to_those_that_compute() -> None:
    device = replace(HARDWARE.device, sharing=Sharing(2, 1))
    shared = replace(HARDWARE, device=device)
    options = {"num_microbatches": 4, "schedule": "gpipe"}
    alone, beside = (
        cost_of("pp", 2, hardware=each, pas_config=options) for each in (HARDWARE, shared)
    )
    assert alone.step_s / 2 < beside.step_s < 0.9 * alone.step_s
    for rank in beside.ranks:
        assert rank.compute_s + rank.communication_s + rank.idle_s == pytest.approx(beside.step_s)
    # Where all ranks compute all the time, nothing changes: rates are those of that case.
    assert cost_of("tp", 2, hardware=shared).step_s == cost_of("tp", 2).step_s


def test_shared_parameters_are_reduced_between_stages() -> None:
    cost = cost_of("pp", 2)
    assert set(cost.ranks[0].comm_s) == set(cost.ranks[1].comm_s) == {"stages gradients"}


def test_zero_moves_more_and_updates_less() -> None:
    plain, one, two, three = (cost_of("dp", 1, 4, use_zero=stage) for stage in (0, 1, 2, 3))
    assert (
        one.ranks[0].communication_s > two.ranks[0].communication_s > plain.ranks[0].communication_s
    )
    assert set(three.ranks[0].comm_s) == {
        "units gradients",
        "zero all_gather",
        "zero reduce_scatter",
    }
    steps = [
        next(part for part in cost.timeline if part.name == "optimizer step")
        for cost in (plain, one, three)
    ]
    optimizers = [part.end_s - part.start_s for part in steps]
    assert optimizers[1] == pytest.approx(optimizers[0] / 4) and optimizers[2] < 0.4 * optimizers[0]


@pytest.mark.parametrize(
    ("policy", "plan", "runtime", "num_microbatches", "fields"),
    spread(
        [
            ("dp", 1, 2, 3, {"use_zero": 2}),
            ("dp", 1, 2, 3, {"distributed_optimizer": {"grad_sync_dtype": "float16"}}),
            ("dp", 1, 4, 2, {"use_zero": 1, "zero_use_reduce_scatter": True, "zero_ngroups": 2}),
            pytest.param(
                "dp",
                1,
                2,
                3,
                {"use_zero": 1, "zero_use_reduce_scatter": True},
                marks=pytest.mark.slow,
            ),
            pytest.param("dp", 1, 2, 3, {"use_zero": 1}, marks=pytest.mark.slow),
            ("pp", 2, 4, 3, {"use_zero": 2}),
            pytest.param("pp", 2, 4, 3, {"use_zero": 1}, marks=pytest.mark.slow),
        ],
        2,
        first=1,
    ),
)
def test_gradients_are_reduced_as_often_as_the_audit_says(
    policy: str,
    plan: int,
    runtime: int,
    num_microbatches: int,
    fields: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Bytes of all collectives. With ZeRO-2 each microbatch is reduced, in a pipeline those of a
    stage together.
    """
    options = {"pas_config": {"num_microbatches": num_microbatches}} if policy == "pp" else {}
    found, config = compiled(policy, plan, runtime, **fields, **options)
    cost = audit(found.program, config, HARDWARE, num_microbatches=num_microbatches)
    entry = zoo.get("gpt2")
    write(tmp_path, found, entry.build())

    def on_rank(rank: int) -> int:
        part = load_class(tmp_path)()
        optimizer = build_optimizer(part, torch.optim.Adam, config)
        samples = [entry.inputs(seed=number) for number in range(num_microbatches)]
        part.train_step(samples)
        optimizer.step()  # compares the copies
        with count_communication() as volume:
            optimizer.zero_grad()
            part.train_step(samples)
            optimizer.step()
        return sum(counted.num_bytes for key, counted in volume.items() if key.phase == "gradients")

    with float64_casts():
        for rank, num_bytes in enumerate(run_ranks(runtime, on_rank)):
            (expected,) = (
                told
                for name, told in cost.ranks[rank % plan].comm_bytes.items()
                if name.endswith("gradients")
            )
            # A flag for each parameter is summed beside, and slices are filled up.
            assert expected <= num_bytes < expected * 1.02, (rank, num_bytes, expected)


def test_parameters_in_pieces_that_stages_share() -> None:
    """The tied table lies on the ranks of two stages, in two units each: of these only the stages
    sum its gradient.
    """
    cost = cost_of("pp", 2, 4, use_zero=3)
    assert set(cost.ranks[0].comm_s) == {
        "stages+units gradients",
        "zero all_gather",
        "zero reduce_scatter",
    }
    whole = cost_of("pp", 2, 4)
    assert (
        cost.ranks[0].comm_s["stages+units gradients"]
        < whole.ranks[0].comm_s["stages+units gradients"]
    )


def test_faster_hardware_is_faster() -> None:
    for policy, plan in (("tp", 2), ("pp", 2)):
        base = cost_of(policy, plan).step_s
        links = replace(HARDWARE, tiers=(Tier("link", (8,), 1e-6, 1e9),))
        device = replace(HARDWARE, device=replace(HARDWARE.device, bytes_per_s=1e10))
        assert cost_of(policy, plan, hardware=links).step_s < base
        assert cost_of(policy, plan, hardware=device).step_s < base


def test_json_and_text() -> None:
    cost = cost_of("pp", 2)
    assert PlanCost.from_json(json.loads(cost.dumps())) == cost
    text = str(cost)
    assert text.startswith("step ") and "bubble" in text and "rank 0: compute" in text
    assert "ranks 0-1: compute" in str(cost_of("tp", 2))


class Placed(torch.nn.Module):
    """Adds the first rows of a table: what they are depends on the length of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = torch.nn.Parameter(torch.zeros(64, 8)), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        return self.inner((x + self.table[:seq]).reshape(batch * seq, 8)).square().sum()


@pytest.mark.parametrize("shape", spread([(6, 8, 8), (4, 48, 8)], 2, first=1, whole=True))
def test_dynamic_sizes_count_as_in_the_dummy_arguments(shape: tuple[int, ...]) -> None:
    inputs, costs = {"x": torch.zeros(shape)}, []
    for dims in ({}, {"x": {0: "batch", 1: "seq"}}):
        graph = traced(Placed(), inputs, dynamic_dims=dims)
        config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
        found = compile_graph(graph, find_policy("data").apply, config, policy_name="data")
        costs.append(audit(found.program, config, HARDWARE))
    static, dynamic = costs
    assert dynamic.compute_s == pytest.approx(static.compute_s)
    assert dynamic.ranks[0].comm_bytes == static.ranks[0].comm_bytes
    assert dynamic.peak_bytes == static.peak_bytes


def test_too_few_devices() -> None:
    found, config = compiled("dp", 1, 16)
    with pytest.raises(ConfigError) as caught:
        audit(found.program, config, HARDWARE)
    assert str(caught.value) == (
        "16 ranks do not fit on hardware 'toy'\n  why:   it has 8 device(s)\n  try:   "
        "load_hardware(..., num_devices=16)"
    )


def added_s(found: Compiled, most_dims: int = 9) -> float:
    """Adding once to all gradients of so many dims at most: reading both, and writing."""
    assert isinstance(found.program, Program)
    declared = [
        d
        for d in found.program.declarations
        if d.value.kind is ValueKind.PARAMETER and len(d.value.shape) <= most_dims
    ]
    num_bytes = sum(local_bytes(d.layout, d.value.dtype, found.program.plan.mesh) for d in declared)
    return 3 * num_bytes / HARDWARE.device.bytes_per_s


def test_a_step_is_all_its_microbatches() -> None:
    """Forward and backward as often as there are samples, gradients added up, one reduction (with
    ZeRO-2 one each), one pass of the optimizer.
    """
    found, config = compiled("dp", 1, 2)
    one, four = (
        audit(found.program, config, HARDWARE, num_microbatches=number) for number in (1, 4)
    )
    forward, backward = (part.end_s - part.start_s for part in one.timeline[:2])
    assert four.step_s == pytest.approx(one.step_s + 3 * (forward + backward + added_s(found)))
    # Where products add, those of biases and norms are left.
    adam = OptimizerMemory(products_add=True)
    inside = audit(found.program, config, HARDWARE, optimizer=adam, num_microbatches=4)
    left_s = 3 * (added_s(found) - added_s(found, most_dims=1))
    assert inside.step_s == pytest.approx(four.step_s - left_s) and left_s > 0
    assert four.timeline[-1].end_s == pytest.approx(four.step_s)
    assert [part.name for part in four.timeline] == ["forward", "backward"] * 4 + [
        "reduce gradients",
        "optimizer step",
    ]
    assert four.communication_s == pytest.approx(one.communication_s)
    split = replace(config, use_zero=2)
    once, often = (
        audit(found.program, split, HARDWARE, num_microbatches=number).communication_s
        for number in (1, 4)
    )
    assert once < often < 4 * once  # the gathering of updates comes once


def test_a_last_backward_hides_the_reduction() -> None:
    found, config = compiled("dp", 1, 2, reducer_bucket_cap_mb=0.01, use_async_reducer=True)
    one, four = (
        audit(found.program, config, HARDWARE, num_microbatches=number) for number in (1, 4)
    )
    forward, backward = (part.end_s - part.start_s for part in one.timeline[:2])
    assert four.step_s == pytest.approx(one.step_s + 3 * (forward + backward + added_s(found)))


def test_a_schedule_fixes_the_number_of_microbatches() -> None:
    found, config = compiled("pp", 2, pas_config={"num_microbatches": 4})
    assert audit(found.program, config, HARDWARE, num_microbatches=4) == audit(
        found.program, config, HARDWARE
    )
    with pytest.raises(ConfigError) as error:
        audit(found.program, config, HARDWARE, num_microbatches=8)
    assert str(error.value) == (
        "a step of 8 microbatches is not what this plan's schedule runs\n"
        "  why:   it is made for 4\n"
        "  try:   leave num_microbatches out, or plan for another number"
    )


@pytest.mark.parametrize("policy", spread(["tp", "pp"], 2))
def test_a_body_takes_no_less_than_its_launches(policy: str) -> None:
    """Only the number of operators counts where the queue of launches is slower than all work:
    a step takes twice as long where a launch does. Before a fast queue only the first launch is
    waited for.
    """

    def step_s(queue_s: float) -> float:
        device = replace(HARDWARE.device, queue_s=(queue_s, queue_s))
        return cost_of(policy, 2, hardware=replace(HARDWARE, device=device)).step_s

    assert step_s(0.0) == cost_of(policy, 2).step_s
    assert step_s(0.0) < step_s(1e-9) < step_s(0.0) + 1e-8
    assert (step_s(20.0) - step_s(10.0)) / 10 == pytest.approx(step_s(20.0) / 20, rel=1e-2)


def test_a_fused_optimizer_moves_everything_once() -> None:
    assert optimizer_s(4e6, 8e6, HARDWARE) == 2.5 * optimizer_s(4e6, 8e6, HARDWARE, fused=True)
    found, config = compiled("dp", 1)
    plain, fused = (
        audit(found.program, config, HARDWARE, optimizer=OptimizerMemory(fused=is_fused))
        for is_fused in (False, True)
    )
    saved_s = plain.step_s - fused.step_s
    own = next(part for part in plain.timeline if part.name == "optimizer step")
    assert saved_s == pytest.approx(0.6 * (own.end_s - own.start_s))
    assert plain.memory == fused.memory
