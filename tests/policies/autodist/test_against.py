"""Policy ``autodist`` beside the simple policies, on models of real width: never worse by its own
audited cost.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import plans
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.cost.machine.hardware import Hardware, load_hardware
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.outputs import output_wishes
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.zero import units_of_storage
from shardwright.compiler.trace import trace
from shardwright.policies.autodist.autodist_policy import search
from shardwright.policies.autodist.candidates.mesh_requests import MeshRequest, PlacedModel
from shardwright.policies.autodist.candidates.results import Candidate
from shardwright.policies.autodist.candidates.search_space import SearchSpace
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.search.search import Search
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError

NUM_MICROBATCHES = 8


def ids(batch: int, seq: int) -> Tensor:
    return torch.zeros(batch, seq, dtype=torch.long)


def gpt2() -> nn.Module:
    """GPT-2 medium with 2 layers."""
    return GPT2LMHeadModel(GPT2Config(n_embd=1024, n_head=16, n_layer=2, use_cache=False))


def llama() -> nn.Module:
    """Llama 3 8B with 2 layers."""
    fields = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    return LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=2, vocab_size=128256, use_cache=False, **fields)
    )


def t5() -> nn.Module:
    """T5 large with 1 + 1 layers."""
    fields = {
        "d_model": 1024,
        "d_ff": 4096,
        "d_kv": 64,
        "num_heads": 16,
        "num_layers": 1,
        "num_decoder_layers": 1,
    }
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, use_cache=False, **fields))


def vit() -> nn.Module:
    """ViT large with 2 layers."""
    fields = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
    }
    return ViTForImageClassification(ViTConfig(num_labels=1000, **fields))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "gpt2": (gpt2, {"input_ids": ids(8, 1024), "labels": ids(8, 1024)}),
    "llama": (llama, {"input_ids": ids(2, 4096), "labels": ids(2, 4096)}),
    "t5": (t5, {"input_ids": ids(8, 512), "labels": ids(8, 512)}),
    "vit": (
        vit,
        {
            "pixel_values": torch.zeros(32, 3, 224, 224, dtype=torch.bfloat16),
            "labels": ids(1, 32)[0],
        },
    ),
}


@cache
def graph_of(name: str) -> PlannableGraph:
    make, inputs = MODELS[name]
    with torch.device("meta"):
        model = make().bfloat16()
    return annotate(trace(model, inputs), pass_manager())


def shapes(
    num_ranks: int, schedules: Sequence[str] = ("1f1b", "zb_h1")
) -> dict[str, tuple[str, dict[str, Any]]]:
    """The plans to beat, by name: a policy and its options."""
    found: dict[str, tuple[str, dict[str, Any]]] = {"tp": ("tp", {}), "data": ("data", {})}
    sizes = [size for size in (1, 2, 4, 8) if size <= num_ranks]
    for schedule in schedules:
        options = {"num_microbatches": NUM_MICROBATCHES, "schedule": schedule}
        found[f"pp {schedule}"] = ("pp", options | {"num_stages": num_ranks})
        for stages, tp in itertools.product(sizes[1:], sizes):
            if num_ranks % (stages * tp) == 0 and stages < num_ranks:
                sizes_of_axes = {"num_stages": stages, "dp": num_ranks // (stages * tp), "tp": tp}
                found[f"{sizes_of_axes} {schedule}"] = ("hybrid", options | sizes_of_axes)
    return found


def config_of(num_ranks: int, num_units: int = 1, **options: Any) -> ComputeConfig:
    num_devices = num_ranks * num_units
    return ComputeConfig(
        plan_ngpus=num_ranks,
        runtime_ngpus=num_devices,
        use_end2end=True,
        outputs="loss",
        pas_config=options,
    )


def cost_of(
    graph: PlannableGraph,
    policy: str,
    config: ComputeConfig,
    hardware: Hardware,
    num_microbatches: int = NUM_MICROBATCHES,
) -> PlanCost:
    """The audited cost of a step of all microbatches, as compiled. Raises :class:`PlanError` where
    the policy has no plan.
    """
    made = find_policy(policy).apply(graph, config)
    plan = made if isinstance(made, Plan) else made.plan
    plan = replace(
        plan,
        zero=units_of_storage(config),
        outputs={**output_wishes(graph, config), **plan.outputs},
    )
    return Search(
        graph, config, hardware, SearchSpace(meshes={}, num_microbatches=num_microbatches), refuse
    ).auditor(plan)


def refuse(mesh_request: MeshRequest) -> PlacedModel:
    raise AssertionError("plans are only audited")


def best(name: str, config: ComputeConfig) -> Candidate:
    options = AutodistOptions(num_microbatches=NUM_MICROBATCHES, time_limit_s=3600.0)
    found = search(
        graph_of(name), config, options, load_hardware("a100-80gb", config.runtime_ngpus)
    )
    assert found.best is not None and found.interrupted is None
    return found.best


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), [("gpt2", 4)])
def test_no_simple_policy_is_better(name: str, num_ranks: int) -> None:
    hardware = load_hardware("a100-80gb", num_ranks)
    found, memory = best(name, config_of(num_ranks)), hardware.device.memory_bytes
    beaten = []
    for title, (policy, options) in shapes(num_ranks).items():
        try:
            cost = cost_of(graph_of(name), policy, config_of(num_ranks, **options), hardware)
        except PlanError:
            continue  # more stages than the schedule or the model can have
        if cost.peak_bytes <= memory:
            assert found.step_s <= cost.step_s * (1 + 1e-9), (
                f"{found.title} takes longer than {title}"
            )
            beaten.append(title)
    assert len(beaten) >= len(shapes(num_ranks)) / 2, beaten


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_copies_over_units_are_no_better(name: str) -> None:
    config = config_of(1, num_units=4)
    cost = cost_of(graph_of(name), "dp", config, load_hardware("a100-80gb", 4))
    assert best(name, config).step_s <= cost.step_s * (1 + 1e-9)


ZOO = (
    "gpt2",
    "gpt2-uneven",
    "gpt2-untied",
    "llama",
    "llama-uneven",
    "t5",
    "vit",
    "vit-uneven",
    "unet",
    "resnet",
    "mlp",
)
MACHINES = ("a100-80gb", "h100", "gb200-nvl72", "mi300x", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_no_simple_policy_is_better_on_any_machine_or_in_less_memory(seed: int) -> None:
    """Small models, of which steps are mostly launches and stages a few operators; half of the
    requests leave little memory.
    """
    rng = random.Random(seed)
    graph, num_ranks, num_units = (
        plans.zoo_graph(rng.choice(ZOO)),
        rng.choice([2, 4, 8]),
        rng.choice([1, 2]),
    )
    machine, count = rng.choice(MACHINES), rng.choice([2, 4, 8])
    hardware = load_hardware(machine, num_ranks * num_units)
    zero = rng.choice([0, 1, 2, 3])

    def config(**options: Any) -> ComputeConfig:
        return replace(config_of(num_ranks, num_units, **options), use_zero=zero)

    costs = {}
    for title, (policy, options) in shapes(num_ranks, ("1f1b", "gpipe", "zb_h1", "zb_v")).items():
        own = options | (
            {"num_microbatches": count, "hardware": machine}
            if "num_microbatches" in options
            else {}
        )
        with contextlib.suppress(PlanError):
            costs[title] = cost_of(graph, policy, config(**own), hardware, count)
    peaks = sorted(cost.peak_bytes for cost in costs.values())
    limit = rng.choice([hardware.device.memory_bytes, peaks[len(peaks) // 2]])
    options = AutodistOptions(
        num_microbatches=count, memory_limit_gb=limit / 1e9, time_limit_s=3600.0
    )
    found = search(graph, config(), options, hardware)
    assert (
        found.best is not None
        and found.best.cost is not None
        and found.best.cost.peak_bytes <= limit * (1 + 1e-9)
    )
    for title, cost in costs.items():
        assert cost.peak_bytes > limit or found.best.step_s <= cost.step_s * (1 + 1e-9), title
