"""What policies communicate, counted while a step runs: Megatron's volumes for tensor parallelism,
and nothing else.

Elements are those of the whole tensor a collective works on; B batch, S sequence, H hidden, L
layers.
"""

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plans
import pytest
import zoo
from covers import spread

from shardwright.compiler.compile import Compiled
from shardwright.compiler.plan.program import Adapt
from shardwright.runtime.ranks.counters import CommunicationKey, CommunicationVolume

B, S, L = 4, 8, 3
LOSS_VECTORS = 3
"""Numbers per token that a loss over a split vocabulary sends: maximum, sum of exponentials, the
target's logit.
"""


@dataclass(frozen=True)
class Model:
    """A model of the zoo with ``L`` layers."""

    name: str
    sizes: dict[str, int]
    hidden: int = 16


MODELS = {
    "gpt2": Model("gpt2", {"n_layer": L}),
    "llama": Model("llama", {"num_hidden_layers": L, "num_key_value_heads": 4}),
}


@functools.cache
def prepared(name: str) -> tuple[Any, ...]:
    entry = zoo.get(MODELS[name].name)
    model, inputs = entry.build(**MODELS[name].sizes), entry.inputs()
    return model, inputs, plans.traced(model, inputs), plans.reference_run(model, [inputs], steps=1)


def step(
    name: str, policy: str, num_ranks: int, directory: Path, **options: Any
) -> tuple[Compiled, plans.Outcome]:
    """One step of a policy, held to one device, and its traffic."""
    model, inputs, graph, reference = prepared(name)
    compiled = plans.compile_with(graph, policy, num_ranks, **options)
    outcome = plans.check(model, inputs, compiled, directory, reference)
    assert all(traffic == outcome.traffic[0] for traffic in outcome.traffic), (
        "ranks send different amounts"
    )
    return compiled, outcome


def calls(traffic: dict[CommunicationKey, CommunicationVolume]) -> dict[tuple[str, str], int]:
    return {(key.phase, key.collective): volume.calls for key, volume in traffic.items()}


def elements(traffic: dict[CommunicationKey, CommunicationVolume], phase: str) -> int:
    return sum(volume.elements for key, volume in traffic.items() if key.phase == phase)


@pytest.mark.parametrize("num_ranks", spread([2, 4], 2))
@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallelism_sends_what_megatron_sends(
    name: str, num_ranks: int, tmp_path: Path
) -> None:
    """Per layer two all-reduces of [B, S, H] each way; one forward for the embedding, one backward
    for the head.

    The loss adds vectors of one number per token.
    """
    hidden = MODELS[name].hidden
    compiled, outcome = step(name, "tp", num_ranks, tmp_path, outputs="loss")
    traffic = outcome.traffic[0]
    activation, tokens = B * S * hidden, B * S
    assert {key.collective for key in traffic} == {"all_reduce"} and {
        key.axis for key in traffic
    } == {"tp"}
    loss_calls = calls(traffic)["forward", "all_reduce"] - (2 * L + 1)
    assert 1 <= loss_calls <= 3
    assert elements(traffic, "forward") == (2 * L + 1) * activation + LOSS_VECTORS * tokens
    assert calls(traffic)["backward", "all_reduce"] == 2 * L + 1
    assert elements(traffic, "backward") == (2 * L + 1) * activation
    kinds = Counter((a.step.kind, a.step.backward) for a in compiled.program.adapters())
    # Biases of row-parallel products.
    assert kinds == {
        ("all_reduce", "identity"): 2 * L + 1,
        ("grad_all_reduce", None): 2 * L + 1,
        **({("keep_one", "identity"): 2 * L} if name == "gpt2" else {}),
    }


def test_every_layer_has_its_adapters(tmp_path: Path) -> None:
    """The adapters of the layers stand where Megatron has them: around attention and around the
    feed-forward.
    """
    compiled, _ = step("gpt2", "tp", 2, tmp_path, outputs="loss")
    for layer in range(L):
        here = [
            a
            for a in compiled.program.adapters()
            if a.module_path.startswith(f"transformer.h.{layer}.")
        ]
        assert [(a.step.kind, a.module_path.rpartition(f"h.{layer}.")[2]) for a in here] == [
            ("grad_all_reduce", "attn.c_attn"),
            ("keep_one", "attn.c_proj"),
            ("all_reduce", "attn.c_proj"),
            ("grad_all_reduce", "mlp.c_fc"),
            ("keep_one", "mlp.c_proj"),
            ("all_reduce", "mlp.c_proj"),
        ]


@pytest.mark.parametrize("name", spread(MODELS, 2, first=1))
def test_whole_logits_cost_one_gather(name: str, tmp_path: Path) -> None:
    _, outcome = step(name, "tp", 2, tmp_path, outputs="all")
    gathered = {
        key.phase: volume
        for key, volume in outcome.traffic[0].items()
        if key.collective == "all_gather"
    }
    assert gathered.keys() == {"forward"}
    assert (gathered["forward"].calls, gathered["forward"].elements) == (1, B * S * 32)


@pytest.mark.parametrize("policy", spread(["tp", "data"], 2))
def test_a_training_step_sends_nothing_for_outputs_beside_the_loss(
    policy: str, tmp_path: Path
) -> None:
    steps = [
        step("llama", policy, 2, tmp_path / word, outputs=word)[1].traffic[0]
        for word in ("auto", "loss")
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("name", MODELS)
def test_a_split_batch_sends_two_numbers_forward_and_gradients_afterwards(
    name: str, tmp_path: Path
) -> None:
    """Two numbers go in the step itself: the sum of losses and the count of tokens are summed;
    gradients are left to one reduction.

    GPT-2's positions are shorter than its table of them: the gradient of what was looked up, [S,
    H], is summed instead.
    """
    compiled, outcome = step(name, "data", 2, tmp_path, outputs="loss")
    traffic, looked_up = outcome.traffic[0], S * MODELS[name].hidden if name == "gpt2" else 0
    assert calls(traffic)["forward", "all_reduce"] == elements(traffic, "forward") == 2
    assert elements(traffic, "backward") == looked_up
    layouts = {
        d.value.fqn: d.layout for d in compiled.program.declarations if d.value.requires_grad
    }
    assert {fqn for fqn, layout in layouts.items() if layout.grad_partial != ("dp",)} == (
        {"transformer.wpe.weight"} if looked_up else set()
    )
    assert not any(layout.cut_axes for layout in layouts.values())


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_sends_nothing(name: str, tmp_path: Path) -> None:
    compiled, outcome = step(name, "dp", 1, tmp_path)
    assert outcome.traffic == [{}]
    assert not [i for i in compiled.program.body if isinstance(i, Adapt)]
