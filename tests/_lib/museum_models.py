"""Small models under plans that people write by hand: what the museum of reduction bugs mutates.

Each program is compiled once and shared, as programs are immutable. Legend: B batch, S sequence, T
tokens, D hidden, F feed-forward, V vocabulary, E experts, C capacity of an expert.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import plans
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.compiler.compile import compile_graph
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.policies.known_policies import find_policy
from shardwright.policies.policy import PolicyFunction
from shardwright.runtime.config import ComputeConfig

BATCH, SEQ, HIDDEN, FFN, VOCABULARY, EXPERTS, CAPACITY = 2, 4, 8, 16, 12, 4, 4


class Decoder(nn.Module):
    """One layer of a decoder: attention whose two heads share one key-value head and are
    normalised, a feed-forward with an adapter beside its second linear, and a vocabulary.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.norm_1, self.norm_2, self.norm_f = (nn.LayerNorm(HIDDEN) for _ in range(3))
        self.q, self.k, self.v = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 4), nn.Linear(HIDDEN, 4)
        self.q_norm, self.k_norm = nn.RMSNorm(4), nn.RMSNorm(4)
        self.o = nn.Linear(8, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.lora_a = nn.Linear(FFN, 2, bias=False)
        self.lora_b = nn.Linear(2, HIDDEN, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)  # [B, S, D]
        h = self.norm_1(x)
        q = self.q_norm(self.q(h).unflatten(-1, (2, 4))).transpose(1, 2)
        k = self.k_norm(self.k(h).unflatten(-1, (1, 4))).transpose(1, 2)
        v = self.v(h).unflatten(-1, (1, 4)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.dropout(self.o(heads.transpose(1, 2).flatten(2)))
        h = F.gelu(self.up(self.norm_2(x)))  # [B, S, F]
        x = x + (self.down(h) + self.lora_b(self.lora_a(h)))
        logits = self.head(self.norm_f(x))  # [B, S, V]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decoder() -> tuple[nn.Module, dict[str, Any]]:
    tokens = torch.randint(VOCABULARY, (2, BATCH, SEQ))
    return Decoder(), {"tokens": tokens[0], "labels": tokens[1]}


class Experts(nn.Module):
    """A layer of experts as GShard writes it: one-hot products carry each token to its expert, up
    to a capacity, and back. A shared expert has a gate; the router has two losses of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.randn(EXPERTS, HIDDEN, FFN))
        self.w_out = nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN))
        self.shared_up = nn.Linear(HIDDEN, FFN, bias=False)
        self.shared_down = nn.Linear(FFN, HIDDEN, bias=False)
        self.shared_gate = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.router(x)  # [T, E]
        probabilities = logits.softmax(-1)
        chosen = F.one_hot(probabilities.argmax(-1), EXPERTS)  # [T, E]
        slots = chosen.cumsum(0) * chosen - 1  # which of its expert's slots a token takes
        places = F.one_hot(slots.clamp(-1, CAPACITY - 1) + 1, CAPACITY + 1)[..., 1:]
        dispatch = places.to(x.dtype)  # [T, E, C]
        sent = torch.einsum("tec,td->ecd", dispatch, x)
        inner = F.gelu(torch.einsum("ecd,edf->ecf", sent, self.w_in))
        done = torch.einsum("ecf,efd->ecd", inner, self.w_out)
        combine = dispatch * probabilities.unsqueeze(-1)
        routed = torch.einsum("tec,ecd->td", combine, done)
        shared = self.shared_down(F.gelu(self.shared_up(x)))
        y = routed + self.shared_gate(x).sigmoid() * shared
        load = chosen.to(x.dtype).mean(0)  # [E], the part of the tokens that each expert gets
        balance = EXPERTS * (load * probabilities.mean(0)).sum()
        z_loss = logits.logsumexp(-1).square().mean()
        return F.mse_loss(y, target) + (0.01 * balance + 0.001 * z_loss)


def experts() -> tuple[nn.Module, dict[str, Any]]:
    x, target = torch.randn(2, 8, HIDDEN, dtype=torch.float64)
    return Experts(), {"x": x, "target": target}


class Rows(nn.Module):
    """A layer that loops over experts, each a module of its own, two for each token: traced as
    dispatch, grouped products and combination.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(HIDDEN, FFN, bias=False), nn.GELU(), nn.Linear(FFN, HIDDEN, bias=False)
            )
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # [T, D] twice
        x = self.first(x)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == index)
            y.index_add_(0, token, expert(x[token]) * weights[token, choice, None])
        return F.mse_loss(x + y, target)


def rows() -> tuple[nn.Module, dict[str, Any]]:
    x, target = torch.randn(2, 8, HIDDEN, dtype=torch.float64)
    return Rows(), {"x": x, "target": target}


class Clipped(nn.Module):
    """Two linears and a norm layer, with the norm of all weights in the loss: a global norm as a
    part of a program.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(self.down(F.gelu(self.up(self.norm(x)))), target)
        replicated = self.norm.weight.square().sum()
        split = self.up.weight.square().sum() + self.down.weight.square().sum()
        return loss + 0.1 * (replicated + split).sqrt()


def clipped() -> tuple[nn.Module, dict[str, Any]]:
    x, target = torch.randn(2, 4, HIDDEN, dtype=torch.float64)
    return Clipped(), {"x": x, "target": target}


class Tied(nn.Module):
    """An embedding that is also the head, with two linears between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = F.gelu(self.first(self.embedding(tokens)))
        x = F.gelu(self.second(x))
        return F.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), labels.flatten())


def tied() -> tuple[nn.Module, dict[str, Any]]:
    tokens = torch.randint(VOCABULARY, (2, BATCH, SEQ))
    return Tied(), {"tokens": tokens[0], "labels": tokens[1]}


# ------------------------------------------------------------------------------------------------
# plans


def on_tokens(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """Context parallelism: everything is split along the sequence, and keys and values are
    gathered.
    """
    return graph.builder({"cp": 2}).split("seq", "cp").build("cp")


BETWEEN = ("norm_1", "dropout", "x", "norm_2", "lora_b", "add", "x_1", "norm_f")
KEYS_AND_VALUES = ("k", "unflatten_1", "k_norm", "k_1", "v", "unflatten_2", "v_1")


def sequence_parallel(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """Megatron's sequence parallelism: tensor parallelism, and what lies between the products is
    split along the sequence on the same axis.
    """
    found = find_policy("tp").apply(graph, config)
    assert isinstance(found, PlannableGraph)
    builder = graph.builder({"tp": 2})
    for op in graph.ops:
        strategy = found.decided.assignment(op.name).get("tp", "R")
        if op.name in KEYS_AND_VALUES:
            strategy = "G"
        elif op.name in BETWEEN:
            assert op.rule is not None
            strategy = f"split:{op.rule.results[0][1][0].factor}"
        builder.strategy(op, "tp", strategy)
    return builder.build("sp")


def by_experts(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """Expert parallelism: tokens are split over both axes, experts over ``ep``, and the slots of
    an expert over ``dp``, along which its weights are copies.
    """
    by_token = ("router", "probabilities", "argmax", "chosen", "dispatch", "unsqueeze", "combine")
    by_token += ("shared_up", "gelu", "shared_down", "shared_gate", "sigmoid", "mul_1", "y", "to")
    by_token += ("logsumexp", "square")
    strategies: dict[str, dict[str, str]] = {}
    for op in graph.ops:
        assert op.rule is not None
        if op.name in by_token:
            token = op.rule.results[0][0][0].factor
            strategies[op.name] = dict.fromkeys(("dp", "ep"), f"split:{token}")
    for name in ("cumsum", "mul", "slots", "clamp", "add", "one_hot", "places"):
        (op,) = (op for op in graph.ops if op.name == name)
        assert op.rule is not None
        strategies[name] = {"ep": f"split:{op.rule.results[0][1][0].factor}"}
    strategies["sent"] = {"dp": "split:t", "ep": "split:t"}
    for name in ("einsum", "done", "routed"):
        strategies[name] = {"dp": "split:c", "ep": "split:e"}
    strategies["inner"] = {"dp": "split:b", "ep": "split:a"}
    for name, factor in (("load", "r0"), ("mean", "r0"), ("z_loss", "r0"), ("mse_loss", "b0")):
        strategies[name] = dict.fromkeys(("dp", "ep"), f"split:{factor}")
    for name in ("mul_4", "add_1", "add_2"):
        strategies[name] = dict.fromkeys(("dp", "ep"), "linear:0")
    builder = graph.builder({"dp": 2, "ep": 2})
    for name, assignment in strategies.items():
        for axis, strategy in assignment.items():
            builder.strategy(name, axis, strategy)
    return builder.build("ep")


def gathered_for_experts(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """Expert parallelism without an exchange: tokens are split outside of experts and gathered for
    them, and the sums of their rows are reduced and scattered.
    """
    found = find_policy("ep").apply(graph, config)
    assert isinstance(found, PlannableGraph)
    builder = graph.builder({"ep": 2})
    for op in graph.ops:
        strategy = found.decided.assignment(op.name).get("ep", "R")
        builder.strategy(op, "ep", "split:e" if strategy.startswith("exchange:") else strategy)
    return builder.build("ep")


def norm_in_sums(graph: PlannableGraph, config: ComputeConfig) -> PlannableGraph:
    """Tensor parallelism, with the sum of all squares as one partial sum."""
    found = find_policy("tp").apply(graph, config)
    assert isinstance(found, PlannableGraph)
    builder = graph.builder({"tp": 2})
    for op in graph.ops:
        builder.strategy(op, "tp", found.decided.assignment(op.name).get("tp", "R"))
    return builder.strategy("add", "tp", "linear:0").build("tp")


@dataclass(frozen=True)
class Case:
    """A model under a plan. ``options``: fields of the config."""

    model: Callable[[], tuple[nn.Module, dict[str, Any]]]
    policy: str | PolicyFunction
    num_ranks: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)


STAGES = {"use_end2end": True, "pas_config": {"num_stages": 2, "num_microbatches": 2}}
CASES = {
    "tp": Case(decoder, "tp"),
    "sp": Case(decoder, sequence_parallel),
    "cp": Case(decoder, on_tokens),
    "fsdp": Case(decoder, "dp", 1, {"runtime_ngpus": 2, "use_zero": 3}),
    "experts": Case(experts, by_experts, 4),
    "experts-tp": Case(experts, "tp"),
    "rows": Case(rows, "ep"),
    "rows-gathered": Case(rows, gathered_for_experts),
    "norm": Case(clipped, norm_in_sums),
    "pipeline": Case(tied, "hybrid", 4, STAGES),
}


@functools.cache
def program_of(name: str) -> Program | PipelineProgram:
    """The program of a case, as the compiler makes and verifies it."""
    case = CASES[name]
    torch.manual_seed(0)
    module, inputs = case.model()
    graph = plans.traced(module.double(), inputs)
    config = ComputeConfig(
        **{"plan_ngpus": case.num_ranks, "runtime_ngpus": case.num_ranks, **case.options}
    )
    policy = find_policy(case.policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny models leave ranks without their part of the work
        return compile_graph(graph, policy.apply, config, policy_name=policy.name).program
