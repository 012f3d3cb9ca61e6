"""Where ``pp`` and ``hybrid`` cut models into stages, what crosses between them, and what a step
takes by the audit.

    python benchmarks/pipeline_cuts.py [MODEL ...] [--hardware NAME ...] [--schedule NAME]

Models are traced on meta in bfloat16, stages are cut with the times of the hardware that they are
audited on, and two microbatches for each position make a step. "Inside" counts the stages that
begin inside a repeated layer. "Crossing" is what all ranks receive from other stages in a step,
gradients included. Everything is priced, nothing is run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from models import gpt2_on_meta, llama_on_meta
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.cost.audit import audit
from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.cost.plan_cost import PlanCost
from shardwright.compiler.passes.lower_stages import lower_stages
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.outputs import output_wishes
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.repeated_blocks import container_of
from shardwright.compiler.trace import trace
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig

SHAPES = ((2, 1), (4, 1), (8, 1), (2, 8), (4, 4))
"""Positions, and the ranks of each among which ``tp`` splits it."""


def ids(batch: int, seq: int) -> Tensor:
    return torch.zeros(batch, seq, dtype=torch.long)


def images(batch: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.zeros(batch, 3, 224, 224, dtype=torch.bfloat16),
        "labels": ids(1, batch)[0],
    }


def tokens(batch: int, seq: int) -> dict[str, Tensor]:
    return {"input_ids": ids(batch, seq), "labels": ids(batch, seq)}


def t5() -> nn.Module:
    """T5 large."""
    fields = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 24}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, use_cache=False, **fields))


def vit() -> nn.Module:
    """ViT large."""
    fields = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
    }
    return ViTForImageClassification(ViTConfig(num_labels=1000, **fields))


def bert() -> nn.Module:
    """BERT large."""
    fields = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
    }
    return BertForMaskedLM(BertConfig(**fields))


def mixtral() -> nn.Module:
    """A mixture of eight experts, two for each token, with 16 layers."""
    fields = {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    config = MixtralConfig(num_hidden_layers=16, num_local_experts=8, use_cache=False, **fields)
    return MixtralForCausalLM(config)


def resnet() -> nn.Module:
    """ResNet-50."""
    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "GPT-2 medium": (lambda: gpt2_on_meta(24), tokens(4, 1024)),
    "Llama 7B": (lambda: llama_on_meta(32), tokens(1, 2048)),
    "T5 large": (t5, tokens(8, 512)),
    "ViT large": (vit, images(32)),
    "BERT large": (bert, tokens(8, 512)),
    "Mixtral, 16 layers": (mixtral, tokens(4, 1024)),
    "ResNet-50": (resnet, images(64)),
}


def graph_of(name: str) -> PlannableGraph:
    make, inputs = MODELS[name]
    with torch.device("meta"):
        model = make().bfloat16()
    return annotate(trace(model, inputs), pass_manager())


def planned(
    graph: PlannableGraph, positions: int, tp: int, hardware: str, schedule: str
) -> tuple[Plan, PlanCost]:
    """The plan of ``hybrid``, which is that of ``pp`` where one rank is a position, and its
    cost.
    """
    num_ranks = positions * tp
    options = {"num_stages": positions, "tp": tp, "schedule": schedule, "hardware": hardware}
    config = ComputeConfig(
        plan_ngpus=num_ranks,
        runtime_ngpus=num_ranks,
        use_end2end=True,
        outputs="loss",
        pas_config=options,
    )
    made = find_policy("hybrid").apply(graph, config)
    plan = replace(made, outputs={**output_wishes(graph, config), **made.outputs})
    return plan, audit(lower_stages(graph, plan), config, load_hardware(hardware, num_ranks))


def num_inside(graph: PlannableGraph, plan: Plan) -> int:
    """How many stages begin inside a numbered layer."""
    places = {op.name: index for index, op in enumerate(graph.ops)}
    starts = [places[stage.first_op] for stage in plan.stages[1:]]
    layers = [container_of(op.module_path) for op in graph.ops]
    return sum(layers[start] is not None and layers[start] == layers[start - 1] for start in starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)"
    )
    parser.add_argument("--hardware", nargs="+", default=["a100-80gb", "h100"], metavar="NAME")
    parser.add_argument("--schedule", default="1f1b")
    args = parser.parse_args()
    print(
        "| model | hardware | pp x tp | step, ms | crossing, MB | inside "
        "|\n|---|---|---|---|---|---|"
    )
    for name in args.models or MODELS:
        graph = graph_of(name)
        for hardware in args.hardware:
            for positions, tp in SHAPES:
                plan, cost = planned(graph, positions, tp, hardware, args.schedule)
                crossing = f"{sum(cost.message_bytes.values()) / 1e6:.1f}"
                row = [name, hardware, f"{positions} x {tp}", f"{cost.step_s * 1e3:.2f}", crossing]
                print(f"| {' | '.join(row)} | {num_inside(graph, plan)} |", flush=True)


if __name__ == "__main__":
    main()
