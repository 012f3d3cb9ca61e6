"""What computing parts of a model again saves: as much less as autograd keeps of the real model, in
ways worth having.
"""

from __future__ import annotations

import itertools
import random

import plans
import pytest
import tiny_gpt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.compiler.cost.machine.hardware import load_hardware
from shardwright.compiler.passes.lower import lower
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.policies.autodist.stages.block_costs import (
    BlockCosts,
    Way,
    block_costs,
    useful_ways,
)
from shardwright.policies.autodist.stages.chain import Part, layer_blocks, layer_parts
from shardwright.policies.autodist.stages.frontier import Again
from shardwright.policies.autodist.stages.walk import Setting, Walk
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.layout import Mesh


def gpt() -> nn.Module:
    """Without dropout, whose masks are ours; with a name for the feed-forward."""
    torch.manual_seed(0)
    found = tiny_gpt.GPT()
    for block in found.blocks:
        block.dropout = nn.Identity()
    return found


class DroppedAttention(nn.Module):
    """Attention of ``[B, H, L, E]`` to itself, whose mask has the shape of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).sum()


def kept_bytes(module: nn.Module) -> int:
    """The bytes of all storages that eager torch saves, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = tensor  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(**tiny_gpt.dummy_args())[0]
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


def compute_again(module: nn.Module, path: str) -> None:
    """Run a submodule through torch's checkpoint."""
    child = module.get_submodule(path)
    forward = child.forward
    child.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)  # type: ignore[method-assign]


def costs_of(graph: PlannableGraph) -> BlockCosts:
    starts, layers = layer_blocks(graph)
    setting = Setting(
        load_hardware("a100-80gb", 1), ComputeConfig(plan_ngpus=1, runtime_ngpus=1), (0,)
    )
    parts = layer_parts(graph, starts, layers)
    return block_costs(Walk(lower(graph, Plan(Mesh())), setting), starts, parts)


@pytest.mark.parametrize("inside", ["", ".attention"])
def test_what_is_saved_is_what_autograd_does_not_keep(inside: str) -> None:
    graph = plans.annotated(plans.traced(gpt(), tiny_gpt.dummy_args()))
    costs = costs_of(graph)
    (again,) = {
        way.again
        for ways in costs.ways
        for way in ways
        if [p.path for p in way.parts] == [f"blocks.1{inside}"]
    }
    plain, checkpointed = gpt(), gpt()
    compute_again(checkpointed, f"blocks.1{inside}")
    assert again.saved_bytes == kept_bytes(plain) - kept_bytes(checkpointed)


@pytest.mark.parametrize("seed", range(30))
def test_ways_are_the_modules_and_their_joins_without_the_dominated(seed: int) -> None:
    rng = random.Random(seed)
    spans = [(0, 12), (0, 4), (4, 8), (5, 7), (8, 12)][: rng.randint(1, 5)]
    single = [
        Way((Part(f"l.{i}", "l.*", start, stop),), Again(rng.randint(1, 9), rng.randint(-3, 9)))
        for i, (start, stop) in enumerate(spans)
    ]
    found = useful_ways(single)
    for way in found:
        assert not any(
            a.start < b.stop and b.start < a.stop for a, b in itertools.combinations(way.parts, 2)
        )
        own = [s.again for s in single if s.parts[0] in way.parts]
        assert way.again == Again(sum(a.time_s for a in own), sum(a.saved_bytes for a in own))
    for way in single:
        if way.again.saved_bytes > 0:
            assert any(
                f.again.time_s <= way.again.time_s and f.again.saved_bytes >= way.again.saved_bytes
                for f in found
            )
    assert [w.again.time_s for w in found] == sorted({w.again.time_s for w in found})
    assert [w.again.saved_bytes for w in found] == sorted({w.again.saved_bytes for w in found})


def test_masks_are_kept_as_the_program_draws_them() -> None:
    """They are float32, or bools where all plans draw the same."""
    graph = plans.annotated(plans.traced(DroppedAttention(), {"x": torch.zeros(2, 2, 64, 4)}))
    program, kept = lower(graph, Plan(Mesh())), list[int]()
    for rng in ("fast", "plan_independent"):
        config = ComputeConfig(plan_ngpus=1, runtime_ngpus=1, rng=rng)
        walk = Walk(program, Setting(load_hardware("a100-80gb", 1), config, (0,)))
        kept.append(walk.kept.first(0, len(graph.ops)))
    assert kept[0] - kept[1] == 2 * 2 * 64 * 64 * (4 - 1)
