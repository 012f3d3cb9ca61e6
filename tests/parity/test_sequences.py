"""Split sequences: sequence parallelism of ``tp``, and context parallelism in its modes, against
one device; and what they send, by the runtime's counters.

Elements are those that a rank receives at least; B batch, S sequence, H hidden, L layers.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import zoo
from covers import spread
from precision import float64_casts
from sequence_models import LENGTH, PACKED_POSITIONS, get, verify_sequences
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from shardwright.compiler.compile import Compiled
from shardwright.compiler.plan.program import Compute
from shardwright.frontend.verification.verify import verify
from shardwright.runtime.errors import ConfigError, PlanError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ops import attention_steps
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.runs import dealt

slow = pytest.mark.slow
B, S, H, L = 4, 8, 16, 2
FORWARD_RING = "forward", "all_to_all"
LOSS = 3
"""Numbers per token that the loss over a split vocabulary sums."""


def step(
    name: str, policy: str, num_ranks: int, directory: Path, **options: Any
) -> tuple[Compiled, plans.Outcome]:
    """One step on threads, held to one device."""
    entry = get(name)
    if name in zoo.MODELS:
        graph = plans.zoo_traced(name)
    else:
        graph = plans.traced(entry.build(), entry.inputs())
    compiled = plans.compile_with(graph, policy, num_ranks, outputs="loss", pas_config=options)
    model, inputs = entry.build(), entry.inputs()
    reference = plans.reference_run(model, [inputs], steps=1)
    return compiled, plans.check(model, inputs, compiled, directory, reference)


def received(outcome: plans.Outcome) -> dict[tuple[str, str], float]:
    """The elements that the first rank receives, by phase and collective."""
    found: dict[tuple[str, str], float] = {}
    for key, volume in outcome.traffic[0].items():
        place = key.phase, key.collective
        found[place] = found.get(place, 0.0) + volume.received
    return found


@pytest.mark.parametrize(
    ("name", "policy", "num_ranks", "options"),
    spread(
        [
            ("llama-uneven", "tp", 3, {"sequence_parallel": True}),
            ("gpt2-uneven", "cp", 3, {"cp_mode": "gather"}),
            ("mistral", "cp", 4, {"cp": [2, 2], "cp_mode": ["gather", "ulysses"]}),
            ("vit", "cp", 2, {"cp_mode": "ulysses"}),
            ("llama-uneven", "cp", 3, {"cp_mode": "ring"}),
            ("gemma2-padded", "cp", 3, {"cp_mode": "ring"}),
            ("gpt-oss", "cp", 2, {"cp_mode": "ring"}),
            ("llama-packed", "cp", 2, {"cp_mode": "ring", "cp_turns": 2}),
            ("prefixed", "cp", 3, {"cp_mode": "ring"}),
            ("bloom", "cp", 3, {"cp_mode": "ring"}),
            *(
                pytest.param(*case, marks=slow)
                for case in [
                    ("bert-uneven", "tp", 2, {"sequence_parallel": True}),
                    ("gemma3", "tp", 4, {"sequence_parallel": True}),
                    ("gpt2-eager", "cp", 4, {"cp_mode": "ulysses"}),
                    ("gpt2-eager", "cp", 2, {"cp_mode": "ring"}),
                    ("gemma2-flex", "cp", 3, {"cp_mode": "ring"}),
                    ("gpt2-padded", "cp", 3, {"cp_mode": "gather"}),
                    ("llama-padded", "cp", 2, {"cp_mode": "ulysses"}),
                    ("t5-uneven", "cp", 3, {"cp_mode": "gather"}),
                    ("gemma3", "cp", 3, {"cp_mode": "gather", "cp_turns": 0}),
                    ("gpt2", "cp", 4, {"cp": [2, 2], "cp_mode": ["ring", "ulysses"]}),
                    ("llama-packed", "cp", 3, {"cp_mode": "gather"}),
                    ("llama-packed", "cp", 4, {"cp": [2, 2], "cp_mode": ["ring", "ulysses"]}),
                    ("llama-packed", "tp", 2, {"sequence_parallel": True}),
                    ("llama-packed", "cp", 9, {"cp_mode": "ring"}),  # 11 positions
                    ("llama-padded", "cp", 3, {"cp_mode": "ring"}),
                    (
                        "llama-packed",
                        "cp",
                        4,
                        {"cp": [2, 2], "cp_mode": ["ring", "gather"], "cp_turns": 2},
                    ),
                    ("mistral-uneven", "cp", 2, {"cp_mode": "ring", "cp_turns": 3}),
                    ("gemma2", "cp", 4, {"cp_mode": "ring", "cp_turns": 0}),
                    ("gpt-oss", "tp", 2, {}),
                    ("bloom", "cp", 2, {"cp_mode": "ring", "cp_turns": 0}),
                    ("bloom", "cp", 2, {"cp_mode": "ulysses"}),
                    ("t5-eager", "cp", 2, {"cp_mode": "ring"}),
                    ("encoder-decoder-uneven", "cp", 3, {"cp_mode": "ulysses"}),
                    ("transformer-uneven", "cp", 2, {"cp_mode": "auto"}),
                    ("prefixed", "cp", 4, {"cp_mode": "ring", "cp_turns": 2}),
                    ("whisper", "cp", 3, {"cp_mode": "ring"}),
                    ("mamba", "cp", 3, {"cp_mode": "auto"}),
                    ("unet", "cp", 3, {"sequence": ["dim5"]}),
                ]
            ),
        ],
        2,
    ),
)
def test_split_sequences_compute_what_one_device_does(
    name: str, policy: str, num_ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    compiled, _ = step(name, policy, num_ranks, tmp_path, **options)
    used = {strategy for by_axis in compiled.plan.strategies.values() for strategy in by_axis}
    assert used == set(compiled.plan.mesh.names)


def test_sequence_parallelism_sends_what_tensor_parallelism_sends(tmp_path: Path) -> None:
    """Each all-reduce of [B, S, H] is a gather and a scatter, half of it each; and between layers
    no rank holds all positions.
    """
    activation = (2 * L + 1) * B * S * H / 2
    _, plain = step("llama", "tp", 2, tmp_path / "plain")
    compiled, split = step("llama", "tp", 2, tmp_path / "split", sequence_parallel=True)
    assert received(split) == {
        ("forward", "all_gather"): activation,
        ("forward", "reduce_scatter"): activation,
        ("forward", "all_reduce"): LOSS * B * S,
        ("backward", "all_gather"): activation,
        ("backward", "reduce_scatter"): activation,
    }
    assert sum(received(split).values()) == sum(received(plain).values())
    made = {c.op.name: c.layouts[0] for c in compiled.program.body if isinstance(c, Compute)}
    norms = [layout for name, layout in made.items() if "norm" in name]
    assert norms and all(f"{S}/tp" in str(layout) for layout in norms)


@slow
def test_what_is_gathered_may_be_gathered_again(tmp_path: Path) -> None:
    """Megatron keeps the piece: backward has a gather more for each layer's two products, and the
    head.
    """
    _, again = step("llama", "tp", 2, tmp_path, sequence_parallel=True, gathers_again=True)
    more = (2 * L + 1) * B * S * H / 2
    assert received(again)["backward", "all_gather"] == 2 * more


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_context_parallelism_sends_by_the_formulas(mode: str, tmp_path: Path) -> None:
    """Gathered: (n-1)/n of keys and values. Ulysses: (n-1)/n^2 of queries, keys, values and result.
    Keys have half the heads here. Backward is the same, and the loss sums two numbers.
    """
    n, queries, keys = 2, B * S * H * L, B * S * H * L / 2
    _, outcome = step("llama", "cp", n, tmp_path, cp_mode=mode)
    found = received(outcome)
    assert found.pop(("forward", "all_reduce")) == 2
    if mode == "gather":
        moved = (n - 1) / n * (keys + keys)
        wanted = {("forward", "all_gather"): moved, ("backward", "reduce_scatter"): moved}
    else:
        moved = (n - 1) / n**2 * (2 * queries + 2 * keys)
        wanted = {("forward", "all_to_all"): moved, ("backward", "all_to_all"): moved}
    assert found == wanted


@pytest.mark.parametrize(("turns", "parts"), [(None, [1 / 2, 1 / 4]), (0, [0, 1 / 2])])
def test_a_ring_sends_the_keys_that_are_seen(
    turns: int | None, parts: list[float], tmp_path: Path
) -> None:
    """Dealt in zigzag, the first rank has positions 0, 1, 6, 7, and sees all others; the second has
    2 to 5, and sees 0 and 1. In one piece the first sees only its own.
    """
    options = {} if turns is None else {"cp_turns": turns}
    _, outcome = step("llama", "cp", 2, tmp_path, cp_mode="ring", **options)
    keys_and_values = B * S * H * L
    sent = [
        sum(v.received for k, v in rank.items() if (k.phase, k.collective) == FORWARD_RING)
        for rank in outcome.traffic
    ]
    assert sent == [part * keys_and_values for part in parts]


@pytest.mark.parametrize("num_ranks", spread([2, 4], 2))
def test_documents_do_not_send_what_others_do_not_see(num_ranks: int, tmp_path: Path) -> None:
    """Counts from the mask, pair by pair: a key goes to every other rank that has a later position
    of the same document in the same row.
    """
    _, outcome = step("llama-packed", "cp", num_ranks, tmp_path, cp_mode="ring")
    owner = torch.empty(LENGTH, dtype=torch.long)
    for rank in range(num_ranks):
        for start, size in dealt(LENGTH, num_ranks, rank, turns=1):
            owner[start : start + size] = rank
    wanted = [0] * num_ranks
    for row in PACKED_POSITIONS:
        starts = [i - position for i, position in enumerate(row)]
        for rank in range(num_ranks):
            mine = [q for q in range(LENGTH) if owner[q] == rank]
            seen = {k for q in mine for k in range(starts[q], q + 1)}
            wanted[rank] += sum(int(owner[k]) != rank for k in seen)
    for phase, times in (("forward", 1), ("backward", 2)):
        found = [
            sum(
                v.received for k, v in r.items() if (k.phase, k.collective) == (phase, "all_to_all")
            )
            for r in outcome.traffic
        ]
        # A key and its value, of all groups of heads and layers; backward sends as many gradients
        # home, to the ranks that have the keys.
        assert sum(found) == times * sum(wanted) * H * L
        if phase == "forward":
            assert found == [count * H * L for count in wanted]


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (3, {"cp_mode": "ring"}),
        pytest.param(4, {"cp_mode": "gather", "cp_turns": 0}, marks=slow),
        pytest.param(4, {"cp": [2, 2], "cp_mode": ["gather", "ring"]}, marks=slow),
        pytest.param(4, {"cp": [2, 2], "cp_mode": "gather"}, marks=slow),
    ],
)
def test_queries_of_documents_are_computed_where_there_is_less_to_do(
    num_ranks: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small they are: here a call costs nothing beside the pairs."""
    module = importlib.import_module("shardwright.runtime.ops.split_attention")
    monkeypatch.setitem(module.CALL_FLOP, "cpu", 0)
    moves = []

    def steps_of(*args: Any, **options: Any) -> Any:
        found = attention_steps.steps_of(*args, **options)
        moves.append(found.moves)
        return found

    monkeypatch.setattr(module, "steps_of", steps_of)
    step("llama-packed", "cp", num_ranks, tmp_path, **options)
    assert any(moves)


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_heads_are_repeated_after_they_have_traveled(mode: str, tmp_path: Path) -> None:
    """Mistral repeats keys and values for each query head, as its mask leaves no other kernel."""
    _, outcome = step("mistral", "cp", 2, tmp_path, cp_mode=mode)
    keys = B * S * H * L / 2
    moved = sum(count for (phase, kind), count in received(outcome).items() if kind != "all_reduce")
    assert moved / 2 == (keys if mode == "gather" else (2 * B * S * H * L + 2 * keys) / 4)


@pytest.mark.parametrize(
    ("options", "num_ranks"),
    [
        pytest.param({"num_stages": 2, "tp": 2, "sequence_parallel": True}, 4, marks=slow),
        ({"num_stages": 1, "tp": 2, "cp": 2, "cp_mode": "ulysses", "sequence_parallel": True}, 4),
        pytest.param({"num_stages": 2, "dp": 2, "cp": 2, "cp_mode": "gather"}, 8, marks=slow),
        pytest.param({"num_stages": 2, "tp": 1, "cp": 3, "recompute": ["*.*.*"]}, 6, marks=slow),
        pytest.param({"num_stages": 2, "tp": 2, "cp": 2, "cp_mode": "ring"}, 8, marks=slow),
    ],
)
def test_with_stages_and_other_degrees(options: dict[str, Any], num_ranks: int) -> None:
    """Several steps with an optimizer; ZeRO deals out what is updated."""
    config = {"plan_ngpus": num_ranks, "runtime_ngpus": num_ranks, "use_end2end": True}
    zero = {"use_zero": 1} if num_ranks > 4 else {}
    report = verify_sequences("llama", "hybrid", {**config, **zero, "pas_config": options}, steps=2)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("name", "num_ranks", "turns"),
    [
        pytest.param("gpt2-dropout", 4, 0, marks=slow),
        ("gpt2-dropout", 2, 1),
        pytest.param("gemma2-dropout", 3, 1, marks=slow),
        pytest.param("gpt-oss-dropout", 3, 1, marks=slow),
        pytest.param("gpt-oss-dropout", 2, 0, marks=slow),
        pytest.param("t5-dropout", 2, 1, marks=slow),
        ("packed-dropout", 3, 1),
        pytest.param("window-dropout", 3, 1, marks=slow),
        pytest.param("window-dropout", 2, 2, marks=slow),
    ],
)
def test_rings_drop_the_weights_that_one_rank_drops(name: str, num_ranks: int, turns: int) -> None:
    """Held to the program on one rank, which draws the same numbers."""
    zero = {"runtime_ngpus": 2 * num_ranks, "use_zero": 2} if num_ranks == 2 else {}
    config = {
        "plan_ngpus": num_ranks,
        "runtime_ngpus": num_ranks,
        "pas_config": {"cp_mode": "ring", "cp_turns": turns},
        **zero,
    }
    report = verify_sequences(name, "cp", config, steps=2)
    assert report.ok and "random numbers" in report.compared_with, str(report)


def test_an_output_left_in_pieces_has_the_positions_that_are_dealt(tmp_path: Path) -> None:
    entry = get("llama-uneven")
    outputs = {"logits": "sharded"}
    compiled = plans.compile_with(
        plans.zoo_traced("llama-uneven"), "cp", 3, outputs=outputs, pas_config={"cp_turns": 2}
    )
    plans.write(tmp_path, compiled, entry.build())
    with float64_casts():
        whole = entry.build()(**entry.inputs()).logits.detach()
        found = run_ranks(3, lambda rank: load_class(tmp_path)()(**entry.inputs()).logits)
    for rank, logits in enumerate(found):
        runs = dealt(whole.shape[1], 3, rank, turns=2)
        own = torch.cat([whole[:, start : start + size] for start, size in runs], 1)
        torch.testing.assert_close(logits.detach(), own, rtol=0, atol=1e-12)


class Sums(nn.Module):
    """A scan over the positions, behind causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(2, 7, 12, 4).transpose(1, 2).split(4, 1)
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).flatten(2).cumsum(1).square().mean()


@pytest.mark.parametrize("turns", [0, 1])
def test_scans_are_whole_in_zigzag_and_a_note_says_so(turns: int) -> None:
    graph = plans.traced(Sums(), {"x": torch.randn(2, 7, 16)})
    options = {"cp_mode": "ring", "cp_turns": turns}
    plan = plans.compile_with(graph, "cp", 2, pas_config=options).plan
    reasons = [note.reason for note in plan.notes]
    if turns:
        assert reasons == [
            "cumsum needs a piece of dim seq in one run, and cp deals zigzag; it is gathered "
            "before it"
        ]
    else:
        assert not reasons and plan.strategies["cumsum"]["cp"].startswith("split:")


class Rows(nn.Module):
    """Documents end to end, without a batch, as ``varlen_attn`` has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 32)

    def forward(self, ids: Tensor, labels: Tensor, ends: Tensor) -> Tensor:
        query, key, value = self.qkv(self.embed(ids)).view(-1, 12, 4).split(4, 1)
        rows = varlen_attn(query, key, value, ends, ends, 7, 7, window_size=(-1, 0))
        return nn.functional.cross_entropy(self.out(rows.flatten(1)), labels)


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (3, {"cp_mode": "ring"}),
        pytest.param(4, {"cp_mode": "ring", "cp_turns": 0}, marks=slow),
        pytest.param(2, {"cp_mode": "gather"}, marks=slow),
        pytest.param(2, {"cp_mode": "ulysses"}, marks=slow),
    ],
)
def test_documents_end_to_end(num_ranks: int, options: dict[str, Any]) -> None:
    ids = torch.randint(32, (17,))
    inputs = {"ids": ids, "labels": ids, "ends": torch.tensor([0, 5, 12, 17], dtype=torch.int32)}
    config = {"plan_ngpus": num_ranks, "runtime_ngpus": num_ranks, "pas_config": options}
    report = verify(Rows(), inputs, "cp", config)
    assert report.ok, str(report)


class Masked(nn.Module):
    """Attention whose mask follows from values: to the best three keys, or by a sort along the
    positions.
    """

    def __init__(self, sorts: bool) -> None:
        super().__init__()
        self.sorts, self.qkv = sorts, nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(2, 7, 12, 4).transpose(1, 2).split(4, 1)
        if self.sorts:
            order = x.sum(-1).argsort(-1)
            mask = order[:, None, :, None] >= order[:, None, None, :]
        else:
            scores = query @ key.transpose(-1, -2)
            mask = scores >= scores.topk(3, -1).values[..., -1:]
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return out.square().mean()


@pytest.mark.parametrize("sorts", [False, True])
@pytest.mark.parametrize("mode", ["ring", pytest.param("ulysses", marks=slow)])
def test_masks_that_follow_from_values_are_those_of_one_device(
    sorts: bool, mode: str, tmp_path: Path
) -> None:
    model, inputs = Masked(sorts).double(), {"x": torch.randn(2, 7, 16, dtype=torch.float64)}
    plans.check_policy(model, inputs, "cp", 3, tmp_path, pas_config={"cp_mode": mode})


class Scaled(nn.Module):
    """Attention with any scale, to earlier keys, to later ones, and written out."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.qkv = scale, nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(2, 7, 12, 4).transpose(1, 2).split(4, 1)
        place = torch.arange(7)
        earlier = place[None, :] <= place[:, None]
        out = x.new_zeros(())
        for mask in (earlier, place[None, :] >= place[:, None]):
            attended = nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=self.scale
            )
            out = out + attended.square().mean()
        scores = query @ key.transpose(-1, -2) * self.scale
        return out + (torch.where(earlier, scores, -torch.inf).softmax(-1) @ value).square().mean()


@pytest.mark.parametrize("scale", [-0.7, 0.0])
@pytest.mark.parametrize(("policy", "options"), [("data", {}), ("cp", {"cp_mode": "ring"})])
def test_a_scale_of_zero_or_less_is_that_of_one_device(
    scale: float, policy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model, inputs = Scaled(scale).double(), {"x": torch.randn(2, 7, 16, dtype=torch.float64)}
    plans.check_policy(model, inputs, policy, 2, tmp_path, pas_config=options)


class ByHand(nn.Module):
    """Attention as it is written by hand: scores filled where they are hidden, products by
    ``einsum``.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(16, 48)
        self.sinks = nn.Parameter(torch.randn(4))
        self.register_buffer("earlier", torch.ones(1, 1, 9, 9).tril())
        self.register_buffer("slopes", 0.5 ** torch.arange(1.0, 5.0))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(2, 7, 12, 4).split(4, 2)
        if self.kind == "einsum":
            scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * 0.5
            return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).square().mean()
        place = torch.arange(7)
        hidden, least = place[None, :] > place[:, None], -torch.inf
        if self.kind == "turned einsum":
            scores = torch.einsum("...kd,...qd->...qk", key.transpose(1, 2), query.transpose(1, 2))
            weights = scores.masked_fill(hidden, least).softmax(-1)
            return torch.einsum("bkhd,bhqk->bhqd", value, weights).square().mean()
        query, key, value = (y.transpose(1, 2) for y in (query, key, value))
        scores = query @ key.transpose(-1, -2) / 2
        if self.kind == "zeros":
            hidden = torch.ones(7, 7).tril() == 0
        elif self.kind == "buffer":
            hidden = self.earlier[:, :, :7, :7] == 0
        elif self.kind == "padding":  # which may hide all keys, for all that a compile knows
            hidden = hidden | (documents == 2)[:, None, None, :]
        elif self.kind == "documents":
            others = documents[:, None, :, None] != documents[:, None, None, :]
            hidden, least = hidden | others, torch.finfo(scores.dtype).min
        elif self.kind == "slopes":
            scores, least = scores + self.biases(place), torch.finfo(scores.dtype).min
        elif self.kind == "cap":
            scores, hidden = 3.0 * torch.tanh(scores / 3.0), ~(place[None, :] <= place[:, None])
        elif self.kind == "sinks":
            hidden = hidden | (documents == 0)[:, None, None, :]  # some queries see no key
        elif self.kind.startswith("filled"):  # the first queries of a row see no key
            hidden, least = hidden | (documents == 0)[:, None, None, :], torch.finfo(x.dtype).min
            scores = 3.0 * torch.tanh(scores / 3.0) if "cap" in self.kind else scores
            scores = scores + self.biases(place) if "slopes" in self.kind else scores
        scores = scores.masked_fill(hidden, least)
        if self.kind == "sinks":
            sinks = self.sinks[None, :, None, None].expand(2, 4, 7, 1)
            return (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ value).square().mean()
        return (scores.softmax(-1) @ value).square().mean()

    def biases(self, place: Tensor) -> Tensor:
        """ALiBi."""
        return self.slopes[:, None, None] * (place[None, :] - place[:, None])


@pytest.mark.parametrize(
    "kind",
    [
        *("zeros", "buffer", "padding", "documents", "cap", "sinks", "einsum", "turned einsum"),
        *("filled", "filled cap", "slopes", "filled slopes"),
    ],
)
@pytest.mark.parametrize(
    "mode",
    ["ring", pytest.param("ulysses", marks=slow), pytest.param("gather", marks=slow)],
)
def test_attention_that_is_written_by_hand_goes_round(kind: str, mode: str, tmp_path: Path) -> None:
    inputs = {
        "x": torch.randn(2, 7, 16, dtype=torch.float64),
        "documents": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]]),
    }
    compiled, _ = plans.check_policy(
        ByHand(kind).double(), inputs, "cp", 2, tmp_path, pas_config={"cp_mode": mode}
    )
    assert "softmax" not in compiled.files["gencode0.py"]


class Biased(nn.Module):
    """Attention written out, with a learned bias: behind a cap, or beside sinks and a mask that
    follows from values. ``reads``: the weights are read elsewhere.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(16, 48)
        self.bias, self.sinks = nn.Parameter(torch.randn(4, 7, 7)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(2, 7, 12, 4).transpose(1, 2).split(4, 1)
        scores = query @ key.transpose(-1, -2)
        if self.kind == "cap":
            scores = 3.0 * torch.tanh(scores / 3.0)
        scores = scores + self.bias
        if self.kind == "sinks":
            order = x.sum(-1).argsort(-1)
            seen = (order[:, None, :, None] - order[:, None, None, :]).square() > 1
            seen = seen & (order > 2)[:, None, :, None]  # others see no key
            scores = scores + torch.where(seen, 0.0, torch.finfo(scores.dtype).min)
            sinks = self.sinks.view(1, -1, 1, 1).expand(2, -1, 7, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out = (weights @ value).square().mean()
        return out + weights.square().mean() if self.kind == "reads" else out


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("cap", "ring"),
        ("sinks", "ring"),
        pytest.param("cap", "ulysses", marks=slow),
        pytest.param("sinks", "gather", marks=slow),
    ],
)
def test_masks_that_are_added_beside_a_cap_or_sinks(kind: str, mode: str, tmp_path: Path) -> None:
    model, inputs = Biased(kind).double(), {"x": torch.randn(2, 7, 16, dtype=torch.float64)}
    compiled, _ = plans.check_policy(model, inputs, "cp", 3, tmp_path, pas_config={"cp_mode": mode})
    assert "attention_where(" in compiled.files["gencode0.py"]


def test_what_has_no_ring_is_gathered_unless_a_ring_is_asked_for(tmp_path: Path) -> None:
    model, inputs = Biased("reads").double(), {"x": torch.randn(2, 7, 16, dtype=torch.float64)}
    compiled, _ = plans.check_policy(model, inputs, "cp", 2, tmp_path)
    assert "all_gather(" in compiled.files["gencode0.py"]
    with pytest.raises(
        PlanError, match=r"(?s)'ring' has no ring for weights.*attention written out"
    ):
        plans.compile_with(plans.traced(model, inputs), "cp", 2, pas_config={"cp_mode": "ring"})


class WithoutSoftmax(nn.Module):
    """Attention ``(q @ k.T) @ v``, or with its products the other way round."""

    def __init__(self, is_linear: bool) -> None:
        super().__init__()
        self.is_linear, self.qkv = is_linear, nn.Embedding(32, 48)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(ids).view(*ids.shape, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        keys = k.transpose(-1, -2)
        return (q @ (keys @ v) if self.is_linear else (q @ keys) @ v).square().sum()


@pytest.mark.parametrize("is_linear", [True, False])
def test_attention_without_softmax_is_gathered_or_refused(is_linear: bool, tmp_path: Path) -> None:
    model = WithoutSoftmax(is_linear).double()
    inputs = {"ids": torch.randint(32, (2, 7))}
    plans.check_policy(model, inputs, "cp", 2, tmp_path)
    for mode in ("ring", "ulysses"):
        options = {"cp_mode": mode}
        with pytest.raises(PlanError, match=f"'{mode}' finds no attention, and .* sums over pos"):
            plans.compile_with(plans.traced(model, inputs), "cp", 2, pas_config=options)


REFUSED = [
    ("llama", "cp", 16, {}, PlanError, "cannot split a sequence of 8 over 16 ranks"),
    ("llama", "cp", 4, {"cp_mode": "ulysses"}, PlanError, "the heads are 2 x 2, and every rank"),
    ("mlp", "cp", 2, {}, PlanError, "finds no sequence to split"),
    ("mlp", "tp", 2, {"sequence_parallel": True}, PlanError, "finds no sequence to split"),
    ("mlp", "tp", 2, {"gathers_again": True}, PlanError, "nothing that gathers_again speaks of"),
    ("llama", "cp", 2, {"sequence": ["sequ"]}, PlanError, "finds no dim 'sequ'"),
    ("dit", "cp", 2, {"cp_mode": "ring"}, PlanError, "its positions are a product, such as rows"),
    ("llama", "cp", 2, {"cp_mode": "rings"}, PlanError, "has no cp_mode 'rings'"),
    ("llama", "cp", 4, {"cp": 2}, PlanError, "cannot place cp=2 on 4 ranks"),
    ("llama", "cp", 4, {"cp": [2, 2], "cp_mode": ["gather"]}, PlanError, "1 modes for 2 axes"),
    ("llama", "cp", 4, {"cp": [2, 2], "cp_mode": "ring"}, PlanError, "a ring along one axis alone"),
    ("llama", "cp", 2, {"cp_turns": -1}, PlanError, "cannot deal positions in cp_turns=-1 turns"),
    ("llama", "cp", 2, {"cp_mode": 3}, ConfigError, "option 'cp_mode' of policy 'cp' cannot be 3"),
]


@pytest.mark.parametrize(("name", "policy", "num_ranks", "options", "error", "text"), REFUSED)
def test_what_cannot_be_split_is_refused_in_words(
    name: str,
    policy: str,
    num_ranks: int,
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        plans.compile_with(plans.zoo_traced(name), policy, num_ranks, pas_config=options)
