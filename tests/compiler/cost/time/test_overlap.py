"""The buckets that the cost model sums and gathers, against those that ranks make and the sums that
they count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import zoo
from covers import spread
from torch import nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.memory.books import Books
from shardwright.compiler.cost.optimizers.named_optimizer import NamedOptimizer
from shardwright.compiler.cost.optimizers.optimizer_memory import OptimizerMemory
from shardwright.compiler.cost.time import after_backward
from shardwright.compiler.cost.time.after_backward import Reduction
from shardwright.compiler.cost.time.overlap import buckets_of
from shardwright.compiler.plan.program import Declaration, Program
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer

HARDWARE = load_hardware("a100-80gb", 8)

CASES: list[tuple[str, str, int, int, dict[str, Any]]] = [
    ("Adafactor", "tp", 2, 4, {"use_async_reducer": True}),
    (
        "Adafactor",
        "tp",
        2,
        4,
        {"use_zero": 1, "use_async_reducer": True, "reducer_bucket_cap_mb": 0.002},
    ),
    ("AdamW", "tp", 2, 4, {"use_async_reducer": True, "reducer_bucket_cap_mb": 0.002}),
    ("AdamW", "data", 2, 4, {"use_async_reducer": True, "reducer_bucket_cap_mb": 0.002}),
    (
        "AdamW",
        "dp",
        1,
        2,
        {
            "distributed_optimizer": {"bucket_cap_mb": 0.002, "contiguous_grad_buffer": False},
            "use_zero": 0,
        },
    ),
]


def test_parameters_that_are_alike_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=2)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    graph = plans.traced(model, {"input": torch.zeros(4, 8)})
    program = compile_graph(graph, find_policy("dp").apply, config, policy_name="dp").program
    assert isinstance(program, Program)
    priced: list[object] = []

    def update_s(declaration: Declaration, *args: Any) -> float:
        priced.append(declaration.layout)
        return after_backward_update_s(declaration, *args)

    after_backward_update_s = after_backward.update_s
    monkeypatch.setattr(after_backward, "update_s", update_s)

    def of(names: str) -> Reduction:
        declarations = [d for d in program.declarations if (d.value.fqn or "").startswith(names)]
        mesh = program.plan.storage_mesh
        return Reduction.of(
            declarations, mesh, config, HARDWARE, OptimizerMemory(),
            num_microbatches=2, model_bytes=1e6, alone=True,
        )  # fmt: skip

    layer = of("0")
    assert len(priced) == 2  # a weight and a bias
    model_of_three = of("")
    assert len(priced) == 4 and len(model_of_three.parameters) == 6
    for name in ("end_s", "accumulation_s", "total_bytes"):
        assert getattr(model_of_three, name) == pytest.approx(3 * getattr(layer, name))
        assert getattr(layer, name) > 0


@pytest.mark.parametrize(("name", "policy", "plan", "runtime", "fields"), spread(CASES, 2), ids=str)
def test_buckets_are_those_that_ranks_make(
    name: str, policy: str, plan: int, runtime: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    """The members of each; and that a step takes one sum for each."""
    case = zoo.get("mlp")
    config = ComputeConfig(plan_ngpus=plan, runtime_ngpus=runtime, use_end2end=True, **fields)
    model, inputs = case.build(), case.inputs()
    found = compile_graph(
        plans.traced(model, inputs), find_policy(policy).apply, config, policy_name=policy
    )
    assert isinstance(found.program, Program)
    optimizer = OptimizerMemory(named=NamedOptimizer(name))
    plans.write(tmp_path, found, model)

    def on_rank(rank: int) -> tuple[list[list[str]], int]:
        part = load_class(tmp_path)()
        made = build_optimizer(part, getattr(torch.optim, name), config, lr=0.1)
        with count_communication() as volume:
            part.train_step([inputs])
        calls = sum(
            volume.calls(kind, phase="gradients") for kind in ("all_reduce", "reduce_scatter")
        )
        buckets = [bucket for bucket in made._reducer.buckets if not bucket.is_local]
        return [sorted(member.name for member in bucket.members) for bucket in buckets], calls

    (made, calls), *others = run_ranks(runtime, on_rank)
    assert all(names == made for names, _ in others) and len(made) == calls
    fqns = {value.name: value.fqn for value in found.program.graph.parameters}

    def named(buckets: Sequence[Sequence[str]]) -> list[list[str]]:
        return [sorted(fqns[name] or name for name in bucket) for bucket in buckets]

    reduction = Reduction.of(
        found.program.declarations, found.program.plan.storage_mesh, config, HARDWARE, optimizer
    )
    assert named(buckets_of(found.program, reduction)) == made
    books = Books(found.program.plan.storage_mesh, config, optimizer, trains=True)
    books.place(found.program.declarations, {}, [found.program])
    assert named(books.gradients.buckets) == made
    if "use_async_reducer" in fields:
        cost = audit(found.program, config, HARDWARE, optimizer=optimizer)
        assert sum(part.name.startswith("reduce bucket") for part in cost.timeline) == calls


@pytest.mark.parametrize(
    "fields",
    [
        {"use_async_reducer": True, "reducer_bucket_cap_mb": 0.002},
        {
            "distributed_optimizer": {
                "overlap_param_sync": True,
                "overlap_grad_sync": False,
                "bucket_cap_mb": 0.002,
            }
        },
    ],
    ids=["sums", "gatherings"],
)
def test_a_machine_that_hides_less_takes_longer(fields: dict[str, Any]) -> None:
    """A step grows as less is hidden. If nothing is, it is as if each message was waited for."""
    config = ComputeConfig(plan_ngpus=1, runtime_ngpus=8, **fields)
    found = compile_graph(plans.zoo_traced("gpt2"), find_policy("dp").apply, config)
    device = replace(HARDWARE.device, queue_s=(0.0, 0.0))  # nothing waits for the host
    all_hidden, half, none = (
        audit(
            found.program,
            config,
            replace(HARDWARE, device=replace(device, overlap=overlap)),
        ).step_s
        for overlap in (1.0, 0.5, 0.0)
    )
    assert all_hidden < half < none
    if "use_async_reducer" in fields:
        waiting = replace(config, use_async_reducer=False)
        machine = replace(HARDWARE, device=device)
        assert none == pytest.approx(audit(found.program, waiting, machine).step_s, rel=1e-9)
