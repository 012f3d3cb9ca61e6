"""The bytes that an audit says are exchanged are those that ranks count when they run."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import plans
import pytest
import torch
import zoo
from covers import spread
from mlp_training import adamw
from precision import float64_casts
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.cost.time.collectives import collective_s
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.atoms import Atom
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer

FOUR = ComputeConfig(plan_ngpus=4, runtime_ngpus=4)


class Net(nn.Module):
    """A table, and products without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = (
            nn.Embedding(16, 8),
            nn.Linear(8, 32, bias=False),
            nn.Linear(32, 8, bias=False),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return (x + self.down(self.up(x).relu())).square().sum()


class Features(nn.Module):
    """A floating input, scaled in front of the first weight: neither it nor the scaled one takes a
    gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        x = features * 0.5
        return (x + self.down(self.up(x).relu())).square().sum()


TOKENS = {"tokens": torch.arange(32).view(8, 4) % 16}
FEATURES = {"features": torch.arange(256, dtype=torch.float64).view(8, 4, 8) / 256}


@pytest.mark.parametrize(
    ("made", "inputs", "seed"),
    spread(
        [(Net, TOKENS, 0), (Net, TOKENS, 1), (Features, FEATURES, 0), (Features, FEATURES, 1)], 3
    ),
)
def test_of_adapters(
    made: type[nn.Module], inputs: dict[str, Tensor], seed: int, tmp_path: Path
) -> None:
    graph = plans.annotated(plans.traced(made().double(), inputs))
    plan = plans.random_plan(graph, Mesh((("x", 2), ("y", 2))), random.Random(seed))
    compiled = compile_graph(graph, lambda graph, config: plan, FOUR)
    plans.write(tmp_path, compiled, made().double())
    counted: Counter[str] = Counter()
    for key, volume in plans.run_once(tmp_path, compiled, inputs).traffic[0].items():
        counted[f"{key.axis} {key.collective}"] += volume.num_bytes
    told = audit(compiled.program, FOUR, load_hardware("cpu", 4)).ranks[0].comm_bytes
    assert {
        name: num_bytes for name, num_bytes in told.items() if not name.endswith(" gradients")
    } == counted


class Biased(nn.Module):
    """What the backward needs, and so gathers again, are the norm, ``down`` and ``head.weight``,
    the frozen one included; not the table, biases of products, nor what multiplies an input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.features = nn.Embedding(16, 8), nn.Linear(4, 8)
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 16)
        self.block[1].weight.requires_grad_(False)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        x = self.embed(tokens) + self.features(features)
        loss: Tensor = self.head(x + self.block(x)).square().sum()
        return loss


@pytest.mark.parametrize("recompute", spread([(), ("block",)], 2, first=1, whole=True))
def test_of_weights_in_pieces(recompute: tuple[str, ...], tmp_path: Path) -> None:
    """Weights that a region gathers are gathered twice like all else in it, and not a third
    time.
    """
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2)
    inputs = {
        "tokens": TOKENS["tokens"],
        "features": torch.arange(128, dtype=torch.float64).view(8, 4, 4) / 128,
    }

    def in_pieces(graph: PlannableGraph, config: ComputeConfig) -> Plan:
        plan = find_policy("data").apply(graph, config).plan
        (axis,) = plan.mesh.names
        stored = {str(v.fqn): Layout.whole(v.shape) for v in graph.parameters}
        stored = {
            fqn: layout.with_dim(0, (Atom(layout.dims[0][0].segments, (axis,)),))
            for fqn, layout in stored.items()
        }
        return replace(plan, stored=stored, recompute=recompute)

    compiled = compile_graph(
        plans.annotated(plans.traced(Biased().double(), inputs)), in_pieces, config
    )
    plans.write(tmp_path, compiled, Biased().double())
    traffic = plans.run_once(tmp_path, compiled, inputs).traffic[0].items()
    counted = Counter(
        {key.phase: found.num_bytes for key, found in traffic if key.collective == "all_gather"}
    )
    told = audit(compiled.program, config, load_hardware("cpu", 2)).ranks[0].comm_bytes
    assert told["dp all_gather"] == counted.total()
    # In the backward: norm and weight of the block, the head's weight.
    block, head = (
        8 * (8 + 8 + 64),
        8 * 16 * 8,
    )
    assert counted["backward"] == (head if recompute else block + head)


def only_latency(num_devices: int) -> Hardware:
    """Links of which each hop takes a second, and bytes nothing."""
    machine = load_hardware("a100-80gb", num_devices)
    tiers = tuple(
        replace(
            tier, latency_s=1.0, bytes_per_s=1e30, kinds={},
            uplink_bytes_per_s=None, fabric_bytes_per_s=None,
        )
        for tier in machine.tiers
    )  # fmt: skip
    device = replace(machine.device, bytes_per_s=1e30)
    return replace(machine, device=device, tiers=tiers, late_s=0.0)


@pytest.mark.parametrize(
    "zero", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))]
)
def test_of_messages_and_gradients(zero: int, tmp_path: Path) -> None:
    """Two stages of two ranks each, two units. Every gradient of a rank lies in one of few
    messages, and the rank waits for each of them.
    """
    options = {"num_microbatches": 2, "tp": 2, "num_stages": 2}
    zeros = {"use_zero": zero, "zero_use_reduce_scatter": True} if zero else {}
    config = ComputeConfig(
        plan_ngpus=4, runtime_ngpus=8, use_end2end=True, pas_config=options, **zeros
    )
    entry = zoo.get("gpt2")
    compiled = compile_graph(
        plans.zoo_traced("gpt2"), find_policy("hybrid").apply, config, policy_name="hybrid"
    )
    plans.write(tmp_path, compiled, entry.build())

    # Beside what is scattered, the flags of what has gradients go to all ranks.
    kinds = ("reduce_scatter", "all_gather") if zero else ("all_reduce",)
    waiting = only_latency(8)

    def on_rank(rank: int) -> tuple[Counter[str], float]:
        module = load_class(tmp_path)()
        optimizer = build_optimizer(module, adamw, config)
        with count_communication() as volume:
            module.train_step([entry.inputs()] * 2)
            optimizer.step()
        counted: Counter[str] = Counter()
        waited_s = 0.0
        for key, found in volume.items():
            counted[f"{key.phase} {key.axis} {key.collective}"] += found.num_bytes
            if key.phase == "gradients" and key.collective in kinds:
                group = range(2 ** len(key.axis.split("+")))  # two ranks along each axis
                waited_s += found.calls * collective_s(waiting, key.collective, 0.0, group)
        return counted, waited_s

    with float64_casts():
        counted, waited = zip(*run_ranks(8, on_rank), strict=True)
    for rank, found in enumerate(audit(compiled.program, config, waiting).ranks):
        sums = {name: s for name, s in found.comm_s.items() if name.endswith(" gradients")}
        assert sum(sums.values()) == pytest.approx(waited[rank], rel=1e-6), rank
    cost = audit(compiled.program, config, load_hardware("cpu", 8))
    told, seen = cost.ranks[0].comm_bytes, counted[0]
    assert told["tp all_reduce"] == seen["forward tp all_reduce"] + seen["backward tp all_reduce"]
    summed = sum(
        seen[f"gradients {over} {kind}"] for over in ("units", "stages+units") for kind in kinds
    )
    # Beside them the flags of what has gradients.
    assert told["stages+units gradients"] == pytest.approx(summed, rel=0.01)
    received = sum(
        counted[rank][f"{phase} stages receive"]
        for rank in range(4)
        for phase in ("forward", "backward")
    )
    assert sum(cost.message_bytes.values()) == received and set(cost.message_bytes) == {
        "stage 0 to 1",
        "stage 1 to 0",
    }


def test_no_gradient_is_sent_of_what_only_inputs_are_made_into(tmp_path: Path) -> None:
    """The scaled input crosses, as the first stage makes it and the second one reads it."""
    config = ComputeConfig(
        plan_ngpus=2, runtime_ngpus=2, use_end2end=True, pas_config={"num_microbatches": 2}
    )
    graph = plans.traced(Features().double(), FEATURES)
    compiled = compile_graph(graph, find_policy("pp").apply, config, policy_name="pp")
    assert isinstance(compiled.program, PipelineProgram)
    crossing = [c.value for c in compiled.program.crossings]
    assert {value.takes_gradient for value in crossing} == {False, True} and all(
        value.requires_grad for value in crossing
    )
    plans.write(tmp_path, compiled, Features().double())

    def on_rank(rank: int) -> tuple[int, int, list[Tensor]]:
        module = load_class(tmp_path)()
        with count_communication() as volume:
            module.train_step([FEATURES["features"]] * 2)
        sent = {
            key.phase: found.num_bytes
            for key, found in volume.items()
            if key.collective == "receive"
        }
        return (
            sent.get("forward", 0),
            sent.get("backward", 0),
            [p.grad for p in module.parameters()],
        )

    (_, back, first), (forth, _, second) = run_ranks(2, on_rank)
    told = audit(compiled.program, config, load_hardware("cpu", 2)).message_bytes
    assert told == {"stage 0 to 1": forth, "stage 1 to 0": back}
    assert 0 < back < forth
    assert all(grad.abs().sum() > 0 for grad in (*first, *second))
