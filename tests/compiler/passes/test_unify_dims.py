"""Dims of whole models: which factors are found to be one, how they are refined, and what they are
called.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import expert_models
import plans
import pytest
import torch
import torch.nn.functional as F
import zoo
from covers import spread
from torch import Tensor, nn

from shardwright.compiler.compile import annotate, pass_manager
from shardwright.compiler.ir.dims import ModelDims
from shardwright.compiler.ops.rule import FactorKind
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.trace.entry import trace


class FusedAttention(nn.Module):
    """Query, key and value are one product, cut by slices of unequal size, as in Phi-3:
    ``num_heads`` query heads share ``num_kv_heads`` key and value heads; residual, loss is the
    mean square.
    """

    def __init__(
        self, hidden: int = 12, num_heads: int = 4, num_kv_heads: int = 2, head_size: int = 3
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.qkv_proj = nn.Linear(hidden, (num_heads + 2 * num_kv_heads) * head_size, bias=False)
        self.o_proj = nn.Linear(num_heads * head_size, hidden, bias=False)

    def heads(self, x: Tensor, count: int) -> Tensor:
        """[B, S, count * D] -> [B, count, S, D]."""
        return x.view(x.shape[0], x.shape[1], count, self.head_size).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv_proj(x)
        query_end = self.num_heads * self.head_size
        key_end = query_end + self.num_kv_heads * self.head_size
        query = self.heads(qkv[..., :query_end], self.num_heads)
        key = self.heads(qkv[..., query_end:key_end], self.num_kv_heads)
        value = self.heads(qkv[..., key_end:], self.num_kv_heads)
        repeats = self.num_heads // self.num_kv_heads
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        out = x + self.o_proj(mixed.reshape(x.shape[0], x.shape[1], query_end))
        return out.square().mean()


def fused_attention(**sizes: int) -> FusedAttention:
    """Attention in float64, seeded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FusedAttention(**sizes).double()


def hidden_states(batch: int = 4, seq: int = 5, hidden: int = 12) -> Tensor:
    """[B, S, H] in float64."""
    return torch.randn(
        batch, seq, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def graph_of(model: nn.Module, **inputs: Tensor) -> PlannableGraph:
    return annotate(trace(model, inputs), pass_manager())


def dims_of(graph: PlannableGraph) -> ModelDims:
    assert graph.dims is not None
    return graph.dims


def described(graph: PlannableGraph, fqn: str) -> str:
    """The dims of a parameter, by name."""
    return dims_of(graph).describe(next(v.name for v in graph.parameters if v.fqn == fqn))


def test_dims_of_a_mixture_of_experts() -> None:
    entry = expert_models.get("qwen3_moe")
    graph = graph_of(entry.build(), **entry.inputs())
    layer = "model.layers.0.mlp"
    assert described(graph, f"{layer}.gate.weight") == "[scores, hidden]"
    assert described(graph, f"{layer}.experts.gate_up_proj") == "[experts, gate_up * ffn, hidden]"
    assert described(graph, f"{layer}.experts.down_proj") == "[experts, hidden, ffn]"
    assert {c.size for c in dims_of(graph).named("gate_up")} == {2}


def test_dims_of_gpt2() -> None:
    graph = plans.zoo_graph("gpt2")
    dims = dims_of(graph)
    assert not dims.conflicts
    names = Counter(c.name for c in dims.classes)
    assert names["hidden"] == names["batch"] == names["vocab"] == names["positions"] == 1
    # One for each layer.
    assert names["heads"] == names["head_dim"] == names["qkv"] == names["ffn"] == 2
    assert {c.name: c.size for c in dims.classes if not c.name.startswith("dim")} == {
        "batch": 4, "seq": 8, "vocab": 32, "hidden": 16, "positions": 16, "qkv": 3, "heads": 4,
        "head_dim": 4, "ffn": 64,
    }  # fmt: skip
    assert described(graph, "transformer.wte.weight") == "[vocab, hidden]"
    assert (
        described(graph, "transformer.h.1.attn.c_attn.weight") == "[hidden, qkv * heads * head_dim]"
    )
    assert described(graph, "transformer.h.1.attn.c_attn.bias") == "[qkv * heads * head_dim]"
    assert described(graph, "transformer.h.0.attn.c_proj.weight") == "[heads * head_dim, hidden]"
    assert described(graph, "transformer.h.0.mlp.c_fc.weight") == "[hidden, ffn]"
    assert dims.describe("input_ids") == "[batch, seq]"
    # the residual stream of every layer is [batch, seq, hidden]
    assert {
        dims.describe(op.results[0].name)
        for op in graph.ops
        if op.module_path.endswith(("ln_1", "ln_2", "ln_f"))
    } == {"[batch, seq, hidden]"}


def test_query_heads_that_share_keys_and_values() -> None:
    graph = plans.zoo_graph("llama")
    layer = "model.layers.0.self_attn"
    assert not dims_of(graph).conflicts
    assert (
        described(graph, f"{layer}.q_proj.weight") == "[kv_heads * heads_per_kv * head_dim, hidden]"
    )
    assert described(graph, f"{layer}.k_proj.weight") == "[kv_heads * head_dim, hidden]"
    assert described(graph, f"{layer}.v_proj.weight") == "[kv_heads * value_dim, hidden]"
    assert (
        described(graph, f"{layer}.o_proj.weight")
        == "[hidden, kv_heads * heads_per_kv * value_dim]"
    )
    assert described(graph, "model.layers.1.mlp.down_proj.weight") == "[hidden, ffn]"
    assert (
        described(graph, "lm_head.weight")
        == described(graph, "model.embed_tokens.weight")
        == "[vocab, hidden]"
    )
    embedded, head = (c for c in dims_of(graph).classes if c.name == "vocab")
    # Not tied.
    assert embedded.parameters == ("model.embed_tokens.weight:0",) and head.parameters == (
        "lm_head.weight:0",
    )
    halves = [c for c in dims_of(graph).classes if c.name == "head_dim"]
    assert {c.segments for c in halves} == {(2, 2)}  # rotated by halves


def test_one_key_value_head_leaves_plain_heads() -> None:
    assert (
        described(plans.zoo_graph("llama-mqa"), "model.layers.0.self_attn.q_proj.weight")
        == "[heads * head_dim, hidden]"
    )


@pytest.mark.slow
def test_attention_written_out_has_heads_too() -> None:
    assert (
        described(plans.zoo_graph("gpt2-eager"), "transformer.h.0.attn.c_attn.weight")
        == "[hidden, qkv * heads * head_dim]"
    )
    assert described(plans.zoo_graph("encoder-decoder"), "decoder.0.cross.query.weight").startswith(
        "[heads * "
    )


def test_the_legend_tells_vocabularies_from_small_tables() -> None:
    graph = plans.zoo_graph("bert")
    assert described(graph, "bert.embeddings.word_embeddings.weight") == "[vocab, hidden]"
    assert (
        described(graph, "bert.embeddings.token_type_embeddings.weight")
        == "[token_type_embeddings_dim, hidden]"
    )


def test_kernels_are_no_channels() -> None:
    graph = plans.zoo_graph("resnet")
    assert described(graph, "layer2.conv2.weight") == "[conv2_dim, conv1_dim, kernel, kernel]"


def test_fused_heads_of_unequal_parts() -> None:
    """``qkv_proj`` is (query heads + key heads + value heads) x head size; each part is cut on its
    own.
    """
    graph = plans.annotated(plans.traced(fused_attention(), {"x": hidden_states()}))
    assert not dims_of(graph).conflicts
    assert described(graph, "qkv_proj.weight") == "[qkv_heads * head_dim, qkv_proj_dim]"
    (fused,) = (c for c in dims_of(graph).classes if c.name == "qkv_heads")
    assert fused.segments == (4, 2, 2)
    linear = graph.op("qkv_proj").rule
    assert linear is not None
    assert [f.segments for f in linear.factors if len(f.segments) > 1] == [(4, 2, 2)]


@pytest.mark.parametrize(
    ("sizes", "num_ranks"),
    spread(
        [
            ({}, 2),
            ({"num_heads": 6, "num_kv_heads": 3}, 3),
            ({"num_heads": 6, "num_kv_heads": 3}, 2),  # three key-value heads on two ranks
            ({"num_heads": 6, "num_kv_heads": 2}, 4),
            ({"num_heads": 5, "num_kv_heads": 1}, 3),
        ],
        2,
    ),
    ids=str,
)
def test_fused_heads_of_unequal_parts_are_split(
    sizes: dict[str, int], num_ranks: int, tmp_path: Path
) -> None:
    plans.check_policy(fused_attention(**sizes), {"x": hidden_states()}, "tp", num_ranks, tmp_path)


def test_fused_heads_split_by_whole_heads_need_no_further_communication(tmp_path: Path) -> None:
    compiled, outcome = plans.check_policy(
        fused_attention(), {"x": hidden_states()}, "tp", 2, tmp_path
    )
    assert str(compiled.program.layout_of("qkv_proj.weight")) == "[4+2+2/tp * 3, 12]"
    steps = {
        (key.collective, key.phase): volume.calls for key, volume in outcome.traffic[0].items()
    }
    assert steps == {("all_reduce", "forward"): 1}  # the input needs no gradient


class Pooled(nn.Module):
    """A learned probe that looks at all positions, as SigLIP's head does."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, 32))
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.probe.repeat(len(x), 1, 1), x, x)[0].square().mean()


@pytest.mark.parametrize("num_ranks", spread([2, 4], 2))
def test_queries_beside_keys_and_values_of_something_else(num_ranks: int, tmp_path: Path) -> None:
    """One weight is cut into that of queries, and that of keys and values together: all are split
    by heads.
    """
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 6, 32, dtype=torch.float64)}
    compiled, _ = plans.check_policy(Pooled().double(), inputs, "tp", num_ranks, tmp_path)
    stored = {d.value.fqn: str(d.layout) for d in compiled.program.declarations}
    assert stored["attention.in_proj_weight"] == "[3 * 4/tp * 8, 32]"
    assert stored["attention.out_proj.weight"] == "[32, 4/tp * 8]"
    assert [a.step.kind for a in compiled.program.adapters()] == [
        "grad_all_reduce",
        "keep_one",
        "all_reduce",
    ]


def split_by_kv_heads(graph, config):
    b = graph.builder(mesh={"tp": config.plan_ngpus})
    for dim in ("qkv_heads", "kv_heads"):
        b.split(dim, "tp")
    return b.build()


@pytest.mark.parametrize("num_ranks", spread([2, 3, 4], 2, first=1))
def test_uneven_key_value_heads(num_ranks: int, tmp_path: Path) -> None:
    """Three key-value heads with two query heads each: pieces differ in size, and one rank may hold
    nothing.
    """
    model = fused_attention(num_heads=6, num_kv_heads=3)
    plans.check_policy(model, {"x": hidden_states()}, split_by_kv_heads, num_ranks, tmp_path)


class EqualSizes(nn.Module):
    """Batch, sequence, hidden, ffn, heads * head_dim and classes are all 4."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(4, 4, 3, 2, 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 4, 4))
        return x + self.down(F.relu(self.up(x)))


def test_equal_sizes_do_not_merge_dims() -> None:
    graph = graph_of(EqualSizes(), x=torch.randn(4, 4, 4))
    dims = dims_of(graph)
    batch, seq, hidden = dims.values["x"]
    assert len({batch, seq, hidden}) == 3 and not dims.conflicts
    up = next(dims.values[v.name] for v in graph.parameters if v.fqn == "up.weight")
    assert up[1] == hidden and up[0] not in (batch, seq, hidden)
    heads = next(dims.values[v.name] for v in graph.parameters if v.fqn == "qkv.weight")[0]
    assert [dims.classes[i].size for i in heads] == [3, 2, 2] and len(
        {*heads, *batch, *seq, *hidden}
    ) == 6


class SquareResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)


def test_a_square_residual_has_one_class_twice() -> None:
    graph = graph_of(SquareResidual(), x=torch.randn(4, 6))
    linear = graph.op("mix")
    assert linear.rule is not None
    classes = [dims_of(graph).factors["mix", f.name] for f in linear.rule.factors]
    assert len(linear.rule.factors) == 3 and len(set(classes)) == 2  # batch, and input = output


@pytest.mark.parametrize("side", [0, 1])
def test_either_side_of_a_square_residual_may_be_split(side: int, tmp_path: Path) -> None:
    entry = zoo.get("mlp")

    def policy(graph, config):
        b = graph.builder(mesh={"tp": 2})
        (hidden,) = graph.dims.named("hidden")
        b.split(hidden, "tp", where=lambda op: op.name != "middle")
        factors = [
            f.name
            for f in graph.op("middle").rule.factors
            if graph.dims.of_factor("middle", f.name) is hidden
        ]
        return b.partition("middle", factors[side], "tp").build()

    plans.check_policy(entry.build(), entry.inputs(), policy, 2, tmp_path)


class TwoCuts(nn.Module):
    """One value seen as 6 = 2 x 3 and as 6 = 3 x 2: no product of dims is both."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, 2, 3).sum(1).sum(1) + x.view(4, 3, 2).sum(1).sum(1)


def test_views_that_disagree_are_reported_and_harmless(tmp_path: Path) -> None:
    x = {"x": torch.randn(4, 6, dtype=torch.float64, requires_grad=True)}
    graph = graph_of(TwoCuts(), **x)
    (conflict,) = dims_of(graph).conflicts
    assert conflict == "view_1, dim 1 of x: [2, 3] against [3, 2]"
    entry = zoo.get("mlp")

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.cuts = entry.build().up, TwoCuts()

        def forward(self, x: Tensor) -> Tensor:
            return self.cuts(self.up(x)[:, :6]).square().mean()

    for policy in ("tp", "data"):
        plans.check_policy(Inside(), {"x": entry.inputs()["x"]}, policy, 2, tmp_path / policy)


def test_symbolic_dims_keep_their_names() -> None:
    graph = annotate(
        trace(SquareResidual(), {"x": torch.randn(4, 6)}, dynamic_dims={"x": {0: "rows"}}),
        pass_manager(),
    )
    assert dims_of(graph).describe("x").startswith("[rows, ")


def test_refined_pieces_keep_the_kind_of_their_factor() -> None:
    """The fused output of GPT-2 is three pieces; each may be split, and the norm's hidden dim stays
    whole.
    """
    graph = plans.zoo_graph("gpt2")
    product = next(
        op
        for op in graph.ops
        if op.module_path == "transformer.h.0.attn.c_attn" and op.target == "addmm"
    )
    assert product.rule is not None
    sizes = {f.name: (f.size, f.kind) for f in product.rule.factors}
    assert [size for size, _ in sizes.values()] == [3, 4, 4, 4, 8, 16]
    assert {kind for _, kind in sizes.values()} == {FactorKind.FREE, FactorKind.SUMMED}
    norm = next(op for op in graph.ops if op.module_path == "transformer.ln_f")
    assert norm.rule is not None
    assert [f.kind for f in norm.rule.factors if f.size == 16] == [FactorKind.FROZEN]


def test_a_batch_of_one_is_lost_with_a_warning() -> None:
    graph = trace(SquareResidual(), {"x": torch.randn(1, 6)})
    with pytest.warns(UserWarning) as caught:
        plans.compile_with(graph, lambda graph, config: graph.builder(mesh={"tp": 2}).build(), 2)
    assert str(caught[0].message) == (
        "SquareResidual was traced with one row: no plan can split its batch\n"
        "  why:   the inputs have shapes [(1, 6)], and dims of size 1 are told apart by nothing\n"
        "  try:   dummy arguments with a batch of at least 2"
    )


@pytest.mark.filterwarnings("error")
def test_a_batch_of_one_is_no_matter_for_one_rank() -> None:
    graph = trace(SquareResidual(), {"x": torch.randn(1, 6)})
    plans.compile_with(graph, "dp", 1)


class Alike(nn.Module):
    """Layers that repeat, in which ``x * x`` stands beside ``x * y``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = y * y + x * y
        return x.sum()


def test_layers_share_the_rules_of_calls_that_are_alike() -> None:
    """Later passes work out once for all layers what follows from a rule."""
    graph = plans.annotated(plans.traced(Alike(), {"x": torch.randn(4, 6)}))
    linears = [op.rule for op in graph.ops if op.target == "linear"]
    assert len(linears) == 3
    # The first one reads an input.
    assert linears[1] is linears[2]
    squares, products = (
        [op.rule for op in graph.ops if op.target == "mul" and len({*op.operands}) == count]
        for count in (1, 2)
    )
    assert len(squares) == len(products) == 3
    assert {id(rule) for rule in squares}.isdisjoint(id(rule) for rule in products)
