"""Sums over two axes at once, where tensor parallelism has two: as many collectives as with one
axis, each over all ranks.

Elements are those of the whole tensor a collective works on; B batch, S sequence, H hidden, L
layers.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import zoo
from covers import spread

from shardwright.compiler.compile import Compiled
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.runtime import adapters
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.ranks.counters import CommunicationVolume

B, S, H, L = 4, 8, 48, 2
ACTIVATION = B * S * H

MODELS = {
    6: ("tp=3 x tp2=2", {"num_attention_heads": 12, "num_key_value_heads": 3}),
    8: ("tp=4 x tp2=2", {"num_attention_heads": 16, "num_key_value_heads": 4}),
}
"""How ranks are split, and heads of which there are fewer groups, by the number of ranks."""


@functools.cache
def prepared(num_ranks: int) -> tuple[Any, Any, Compiled, Any]:
    mesh, heads = MODELS[num_ranks]
    sizes = {
        **zoo.LLAMA,
        "vocab_size": 256,
        "hidden_size": H,
        "intermediate_size": 192,
        "head_dim": 4,
        **heads,
    }
    entry = zoo.ZooModel(
        "grouped", zoo.hf("LlamaForCausalLM", "LlamaConfig", **sizes), zoo.causal_lm(256)
    )
    model, inputs = entry.build(), entry.inputs(batch=B, seq=S)
    compiled = plans.compile_with(plans.traced(model, inputs), "tp", num_ranks, outputs="loss")
    assert str(compiled.plan.mesh) == mesh
    return model, inputs, compiled, plans.reference_run(model, [inputs], steps=1)


@pytest.mark.parametrize("num_ranks", spread(MODELS, 2))
def test_an_activation_is_summed_once_each_way(num_ranks: int, tmp_path: Path) -> None:
    """Per layer two all-reduces of [B, S, H] each way, one forward for the embedding and one
    backward for the head.
    """
    model, inputs, compiled, reference = prepared(num_ranks)
    outcome = plans.check(model, inputs, compiled, tmp_path, reference)
    assert all(traffic == outcome.traffic[0] for traffic in outcome.traffic), (
        "ranks send different amounts"
    )
    joined = {
        key.phase: volume for key, volume in outcome.traffic[0].items() if key.axis == "tp+tp2"
    }
    elements = (2 * L + 1) * ACTIVATION
    received = 2 * (num_ranks - 1) / num_ranks * elements
    expected = CommunicationVolume(2 * L + 1, elements, 8 * elements, pytest.approx(received))
    assert joined == {"forward": expected, "backward": expected}
    apart = [v for key, v in outcome.traffic[0].items() if key.axis in ("tp", "tp2")]
    assert all(volume.elements < ACTIVATION * volume.calls for volume in apart), (
        "only what is smaller is summed along one axis"
    )
    assert 'tp_tp2 = self.axis("tp", "tp2")' in compiled.files["gencode0.py"]
    assert '    joined_axes = (("tp", "tp2"),)\n' in compiled.files["gencode0.py"]


@pytest.mark.parametrize("num_ranks", spread(MODELS, 2))
def test_a_backward_over_one_of_the_axes_shows_in_gradients_only(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of a gradient over tp alone: what the ranks along tp2 have is missing."""
    model, inputs, compiled, reference = prepared(num_ranks)
    whole = adapters._GradAllReduce.backward

    def over_the_first(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if ctx.axis.name != "tp+tp2":
            return whole(ctx, grad)
        pieces = ctx.axis.communicator.all_gather(grad.contiguous()[None], 0, phase="backward")
        return torch.cat(pieces[ctx.axis.index % 2 :: 2]).sum(0), None

    monkeypatch.setattr(adapters._GradAllReduce, "backward", staticmethod(over_the_first))
    with pytest.raises(AssertionError) as failure:
        plans.check(model, inputs, compiled, tmp_path, reference)
    assert "loss" not in str(failure.value).splitlines()[0]


def test_an_axis_named_like_two_others(tmp_path: Path) -> None:
    """The variable of the two has another name; the sum of the loss goes over all ranks but those
    along ``a_b``.
    """
    entry = zoo.get("mlp")

    def policy(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
        builder = graph.builder(mesh={"a": 2, "a_b": 2, "b": 2}).split("batch", "a_b")
        return builder.split("hidden", "a").split("hidden", "b").build()

    compiled, outcome = plans.check_policy(entry.build(), entry.inputs(), policy, 8, tmp_path)
    assert 'a_b_ = self.axis("a", "b")' in compiled.files["gencode0.py"]
    assert "a+b" in {key.axis for key in outcome.traffic[0]}
