"""Which dims tensor parallelism splits, on models of every family, and what the built-in policies
say and refuse.
"""

import math
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plans
import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from torch import Tensor, nn

from shardwright.compiler.ir.dims import DimClass
from shardwright.compiler.ir.value import SourceLocation
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.trace import trace
from shardwright.policies.choice import choose_axes, choose_dims
from shardwright.policies.splits import split_dims
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Layout


def chosen(graph: PlannableGraph, num_ranks: int = 2) -> list[DimClass]:
    assert graph.dims is not None
    return [graph.dims.classes[index] for index in sorted(choose_dims(graph, num_ranks))]


STATUS = Path("/proc/self/status")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's handler, which it does not install where the tests were started in the background of
    a script.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not STATUS.exists(), reason="the kernel says nothing of handlers here")
def test_ctrl_c_stays_pythons(ctrl_c: None) -> None:
    """Python does not see it where a solver gives the signal back to the system, which would end
    the process.
    """

    def is_caught() -> bool:
        (caught,) = re.findall(r"SigCgt:\s*(\w+)", STATUS.read_text())
        return bool(int(caught, 16) >> signal.SIGINT - 1 & 1)

    assert is_caught()
    chosen(plans.zoo_graph("gpt2"))
    assert is_caught()


TRANSFORMERS = zoo.names("hf", exclude=["cache", "padded", "frozen"]) + zoo.names(
    "own", "encoder-decoder"
)
TRANSFORMERS += ["dit", "dit-uneven"]
QUICK = {"gpt2", "llama-mqa", "bert", "t5", "vit-uneven", "encoder-decoder-uneven", "dit"}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TRANSFORMERS]
)
def test_the_hidden_dim_of_a_transformer_is_never_split(name: str) -> None:
    """It is what every norm needs whole and what every product of the model reads or writes."""
    names = [c.name for c in chosen(plans.zoo_graph(name))]
    assert not {"hidden", "batch", "seq", "query_seq", "key_seq"} & set(names)
    assert names.count("ffn") >= 2


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "dit"])
def test_heads_ffn_and_vocabulary_are_split(name: str) -> None:
    names = {c.name for c in chosen(plans.zoo_graph(name))}
    assert (
        names
        == {
            "gpt2": {"heads", "ffn", "vocab"},
            "llama": {"kv_heads", "ffn", "vocab"},
            "bert": {"heads", "ffn", "vocab"},
            "t5": {"heads", "ffn", "vocab"},
            "dit": {"heads", "ffn", "time_dim"},
        }[name]
    )


def test_each_layer_has_its_own_classes() -> None:
    names = [c.name for c in chosen(plans.zoo_graph("gpt2"))]
    assert sorted(names) == ["ffn", "ffn", "heads", "heads", "vocab"]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks", "expected"),
    [
        pytest.param(8, 8, 4, "heads", marks=pytest.mark.slow),
        (8, 4, 4, "kv_heads"),
        pytest.param(8, 2, 2, "kv_heads", marks=pytest.mark.slow),
        (8, 2, 4, "heads_per_kv"),
        (8, 1, 4, "heads"),
    ],
)
def test_heads_that_share_keys_and_values(
    num_heads: int, num_kv_heads: int, num_ranks: int, expected: str
) -> None:
    """Groups of heads where there are enough; else the heads of a group, and keys and values are
    computed by all.
    """
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=352, num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=2, vocab_size=500,
    )  # fmt: skip
    ids = torch.zeros(2, 32, dtype=torch.long)
    graph = plans.annotated(
        plans.traced(transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})
    )
    assert {c.name for c in chosen(graph, num_ranks)} == {expected, "ffn", "vocab"}


def grouped(num_heads: int, num_kv_heads: int, seq: int, **fields: Any) -> PlannableGraph:
    ids = torch.zeros(2, seq, dtype=torch.int64)
    sizes = {
        "hidden_size": 128 * num_heads,
        "intermediate_size": 344 * num_heads,
        "num_hidden_layers": 1,
    }
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    inputs = {"input_ids": ids, "labels": ids}
    return of_real_size(
        "LlamaForCausalLM", "LlamaConfig", inputs, vocab_size=32000, **sizes, **heads, **fields
    )


def test_fewer_groups_of_heads_than_ranks_have_an_axis_of_their_own() -> None:
    """4 groups on 8 ranks. Over one axis the head dim would be split: queries and keys gathered
    before attention, for all heads on every rank, and no kernel for heads of which the values are
    narrower.
    """
    graph = grouped(28, 4, 1024)
    one = (
        {graph.dims.classes[index].name for index in choose_dims(graph, 8)} if graph.dims else set()
    )
    assert one == {"head_dim", "value_dim", "ffn", "vocab"}
    split = plans.compile_with(graph, "tp", 8, outputs="loss")
    assert str(split.plan.mesh) == "tp=4 x tp2=2"
    stored = {d.value.fqn: str(d.layout) for d in split.program.declarations}
    assert stored["model.layers.0.self_attn.k_proj.weight"] == "[4/tp * 128, 3584]"
    assert stored["model.layers.0.mlp.up_proj.weight"] == "[9632/tp/tp2, 3584]"
    assert stored["model.layers.0.self_attn.q_proj.weight"] == "[4/tp * 7/tp2 * 128, 3584]"
    kinds = {a.step.kind for a in split.program.adapters() if len(a.of.shape) > 1}
    assert kinds <= {"all_reduce", "grad_all_reduce", "grad_keep_one", "narrow"}, (
        "nothing is gathered"
    )


def test_a_second_axis_pays_for_what_it_adds_to_a_sum() -> None:
    """Heads of a group are split as well, though not evenly: attention's sum goes over one axis
    anyway.
    """
    graph = grouped(28, 4, 1024)
    assert graph.dims is not None
    first, second = choose_axes(graph, 8)
    assert {graph.dims.classes[index].name for index in first.classes} == {
        "kv_heads",
        "ffn",
        "vocab",
    }
    assert {graph.dims.classes[index].name for index in second.classes} == {
        "heads_per_kv",
        "ffn",
        "vocab",
    }


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks"), [(16, 4, 4), (14, 2, 4), (16, 1, 8), (8, 8, 8)]
)
def test_one_axis_is_enough(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Where groups, or the heads of each, are as many as the ranks."""
    assert [
        axis.axis_size for axis in choose_axes(grouped(num_heads, num_kv_heads, 512), num_ranks)
    ] == [num_ranks]


def test_heads_within_a_group_are_split_over_the_second_axis(tmp_path: Path) -> None:
    """2 groups of 2 heads on 4 ranks: keys and values of a group are computed by both its ranks,
    and their gradients summed.
    """
    entry = zoo.get("mistral")
    compiled, _ = plans.check_policy(entry.build(), entry.inputs(), "tp", 4, tmp_path)
    assert str(compiled.plan.mesh) == "tp=2 x tp2=2"
    assert "heads_per_kv" in {own.get("tp2") for own in compiled.plan.dims.values()}
    stored = {d.value.fqn: str(d.layout) for d in compiled.program.declarations}
    assert stored["model.layers.0.self_attn.q_proj.weight"] == "[2/tp * 2/tp2 * 4, 16]"
    assert stored["model.layers.0.self_attn.k_proj.weight"] == "[2/tp * 4, 16] G(tp2)"


def test_experts_pay_for_one_sum_of_all_that_a_token_meets() -> None:
    """16 of 64 experts whose hidden dim is a quarter of the model's: to sum what each gives would
    cost more than it saves.
    """
    ids = torch.zeros(2, 8192, dtype=torch.int64)
    graph = of_real_size(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"input_ids": ids, "labels": ids},
        vocab_size=32000, hidden_size=1024,
        moe_intermediate_size=256, num_attention_heads=16, num_key_value_heads=16, head_dim=128,
        num_hidden_layers=1,
        num_experts=64, num_experts_per_tok=16,
    )  # fmt: skip
    assert {c.name for c in chosen(graph, 8)} == {"heads", "ffn", "vocab"}
    split = plans.compile_with(graph, "tp", 8, outputs="loss")
    summed = [
        adapter.of for adapter in split.program.adapters() if adapter.step.kind == "all_reduce"
    ]
    assert max(math.prod(value.shape) for value in summed) == ids.numel() * 1024


def test_what_one_axis_has_used_up_is_not_split_over_another() -> None:
    """3 channels over 2 ranks are 2 and 1, and a convolution refuses to have none."""
    model = nn.Sequential(nn.Conv2d(4, 3, 1), nn.ReLU(), nn.Conv2d(3, 4, 1))
    graph = plans.annotated(plans.traced(model, {"input": torch.randn(2, 4, 6, 6)}))
    assert graph.dims is not None
    channels = {found.index for found in graph.dims.classes if "0.weight:0" in found.parameters}
    builder = graph.builder(mesh={"tp": 2, "tp2": 2})
    for axis in ("tp", "tp2"):
        split_dims(builder, axis, channels)
    by_axis = Counter(
        axis
        for own in builder.plan().strategies.values()
        for axis, how in own.items()
        if how.startswith("split")
    )
    assert by_axis == {"tp": 3, "tp2": 1}, "all of it, then the activation alone"


def test_uneven_heads_are_split_rather_than_gathered() -> None:
    """14 heads on 4 ranks: 4, 4, 3 and 3. The head dim would divide evenly, but attention needs it
    whole.
    """
    config = transformers.GPT2Config(
        n_embd=14 * 16, n_head=14, n_layer=2, vocab_size=500, n_positions=64
    )
    ids = torch.zeros(2, 64, dtype=torch.long)
    graph = plans.annotated(
        plans.traced(transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids})
    )
    assert {c.name for c in chosen(graph, 4)} == {"heads", "ffn", "vocab"}


def test_channels_of_a_residual_network_alternate() -> None:
    """Column- then row-parallel convolutions: the inner channels of a block, not those of the
    residual stream.
    """
    split = {parameter for c in chosen(plans.zoo_graph("resnet")) for parameter in c.parameters}
    assert {name for name in split if "conv" in name} == {
        "layer1.conv1.weight:0",
        "layer1.conv2.weight:1",
        "layer2.conv1.weight:0",
        "layer2.conv2.weight:1",
    }
    assert not [name for name in split if name.startswith("stem")]


def of_real_size(
    architecture: str, config: str, inputs: dict[str, Tensor], **fields: Any
) -> PlannableGraph:
    """A model without weights."""
    with torch.device("meta"):
        model = getattr(transformers, architecture)(getattr(transformers, config)(**fields))
    return plans.annotated(trace(model, inputs))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("MixtralForCausalLM", "MixtralConfig"),
        pytest.param("GptOssForCausalLM", "GptOssConfig", marks=pytest.mark.slow),
        pytest.param("Qwen3MoeForCausalLM", "Qwen3MoeConfig", marks=pytest.mark.slow),
    ],
)
def test_many_experts_are_split_and_attention_too(architecture: str, config: str) -> None:
    """Every token is multiplied with the weights of its own experts, not with all, so attention is
    no small part.
    """
    ids = torch.zeros(2, 512, dtype=torch.int64)
    graph = of_real_size(
        architecture, config, {"input_ids": ids, "labels": ids}, num_hidden_layers=1
    )
    assert {c.name for c in chosen(graph, 4)} == {"kv_heads", "ffn", "vocab"}
    split = plans.compile_with(graph, "tp", 4, outputs="loss")
    adapters = [a for a in split.program.adapters() if a.step.kind != "keep_one"]
    # Weights of the chosen experts are as wide as these are many.
    whole = [a for a in adapters if a.of.shape[-1] > 16]
    assert Counter(a.step.kind for a in whole) == {
        "all_reduce": 3,  # the embedding, attention, the experts
        "grad_all_reduce": 3,  # attention, the experts, the head
    }
    assert {math.prod(a.of.shape[:-1]) for a in whole} == {ids.numel()}, (
        "what experts compute is not summed over them first"
    )
    routing = [a.step.kind for a in adapters if a not in whole]
    assert routing == ["grad_all_reduce"]


def test_a_vocabulary_is_looked_up_by_shifted_tokens() -> None:
    """Whisper's decoder writes the labels into zeros, one place later; a long encoder makes its own
    products a small part.
    """
    inputs = {
        "input_features": torch.zeros(2, 80, 3000),
        "labels": torch.zeros(2, 64, dtype=torch.int64),
    }
    sizes = {"d_model": 384, "encoder_attention_heads": 6, "decoder_attention_heads": 6}
    graph = of_real_size(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        inputs,
        encoder_layers=1,
        decoder_layers=1,
        **sizes,
    )
    split = {name for c in chosen(graph) for name in c.parameters}
    whole = [
        f"{part}.weight:0"
        for part in ("encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj")
    ]
    assert {
        "model.decoder.embed_tokens.weight:0",
        *(f"model.decoder.layers.0.{name}" for name in whole),
    } <= split
    assert {c.name for c in chosen(graph)} == {"heads", "ffn", "vocab"}


class Normalised(nn.Module):
    """Linear layers of which the weights are made of parameters: norm and direction, and a
    transposed matrix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(8, 32))
        self.down = nn.Parameter(torch.randn(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(self.up(x)) @ self.down.t()).square().mean()


def test_weights_made_of_parameters_are_weights(tmp_path: Path) -> None:
    inputs = {"x": torch.randn(4, 8, dtype=torch.float64)}
    compiled, _ = plans.check_policy(Normalised().double(), inputs, "tp", 2, tmp_path)
    stored = {d.value.fqn: str(d.layout) for d in compiled.program.declarations}
    assert stored["down"] == "[8, 32/tp]"
    assert stored["up.parametrizations.weight.original1"] == "[32/tp, 8]"


def test_nothing_travels_back_to_what_the_caller_passes_in() -> None:
    """A narrow product of an input: its result would be summed with the rows split, and nothing
    travels with the columns.
    """
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh())
    graph = plans.annotated(plans.traced(model, {"input": torch.randn(4, 64)}))
    assert [c.parameters for c in chosen(graph)] == [("0.weight:0", "0.bias:0")]


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-uneven", "t5", "vit-uneven", "dit", "resnet", "unet"]
)
def test_a_policy_never_splits_two_dims_of_one_product(name: str) -> None:
    graph = plans.zoo_graph(name)
    assert graph.dims is not None
    split = choose_dims(graph, 2)
    for op in graph.ops:
        assert op.rule is not None
        if op.target in ("linear", "addmm", "conv2d"):
            classes = {graph.dims.factors.get((op.name, f.name)) for f in op.rule.factors}
            assert len(classes & split) <= 1, op.name


def test_nothing_to_split_is_no_error() -> None:
    graph = plans.traced(nn.Tanh(), {"input": torch.randn(4, 6)})
    assert plans.compile_with(graph, "tp", 2).plan.strategies == {}


# ------------------------------------------------------------------------------------------------
# notes


class Sorts(nn.Module):
    """A product whose columns are sorted: an operator that needs the split dim whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sort(F.relu(self.up(x)), dim=1).values).square().mean()


def test_a_fallback_is_noted_with_its_reason_and_a_portable_source() -> None:
    graph = plans.traced(Sorts(), {"x": torch.randn(4, 6)})

    def policy(graph, config):
        b = graph.builder(mesh={"tp": 2})
        split_dims(b, "tp", {c.index for c in graph.dims.classes if "up.weight:0" in c.parameters})
        return b.build()

    (note,) = plans.compile_with(graph, policy, 2).plan.notes
    assert (note.op, note.axis, note.module_path) == ("sort", "tp", "")
    assert note.reason == "sort needs dim hidden whole; it is gathered before it"
    assert re.fullmatch(r"test_choice\.py:\d+", note.source)


def test_sources_in_notes_do_not_depend_on_where_packages_lie() -> None:
    module = transformers.models.gpt2.modeling_gpt2
    assert (
        SourceLocation(module.__file__, 273).portable
        == "transformers/models/gpt2/modeling_gpt2.py:273"
    )
    assert SourceLocation("/home/me/train.py", 7).portable == "train.py:7"


# ------------------------------------------------------------------------------------------------
# refusals


def refusal(policy: str, num_ranks: int, module: nn.Module, **inputs: Tensor) -> str:
    with pytest.raises(PlanError) as caught:
        plans.compile_with(plans.traced(module, inputs), policy, num_ranks)
    return str(caught.value)


def test_dp_is_over_units() -> None:
    assert refusal("dp", 2, nn.Linear(4, 4), input=torch.randn(4, 4)) == (
        "policy 'dp' copies the model over units, so a plan has one rank\n"
        "  why:   plan_ngpus=2\n"
        "  try:   plan_ngpus=1 with runtime_ngpus=2, or policy 'data' to split the batch "
        "inside a unit"
    )


@pytest.mark.filterwarnings("ignore:Linear was traced with one row")
def test_data_needs_a_batch() -> None:
    text = (
        "there is no batch to split\n"
        "  why:   the inputs have shapes {}\n"
        "  try:   trace with a batch of at least 2: of one row nothing can be told from the "
        "shapes; policies 'tp' and 'cp' split one row, too"
    )
    assert refusal("data", 2, nn.Linear(4, 4), input=torch.randn(1, 4)) == text.format("[(1, 4)]")


def test_more_ranks_than_kv_heads() -> None:
    """The query heads of each kv head are split; keys and values, small, are computed by every
    rank, and nothing of them travels: two all-reduces each way, as Megatron's, and one for the
    embedding.
    """
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    }
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_hidden_layers=1, vocab_size=32000, **sizes)
        )
    ids = torch.zeros(2, 512, dtype=torch.int64)
    compiled = plans.compile_with(
        trace(model, {"input_ids": ids, "labels": ids}), "tp", 4, outputs="loss"
    )
    assert Counter(
        a.step.kind for a in compiled.program.adapters() if not a.step.kind.startswith("grad_")
    ) == {"all_reduce": 3}
    assert "heads_per_kv" in {
        name for names in compiled.plan.dims.values() for name in names.values()
    }


# ------------------------------------------------------------------------------------------------
# batch


class TwoInputs(nn.Module):
    """Rows of two inputs are paired; the third input is a table with another first dim."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, a: Tensor, b: Tensor, table: Tensor) -> Tensor:
        return ((a * b * self.scale) @ table).square().mean()


def test_data_splits_every_input_with_the_rows_of_the_first(tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    inputs = {"a": a, "b": b, "table": torch.randn(4, 3, dtype=torch.float64, generator=generator)}
    compiled, _ = plans.check_policy(TwoInputs().double(), inputs, "data", 2, tmp_path)
    cut = {a.of.name for a in compiled.program.adapters() if a.step.kind == "narrow"}
    assert cut == {"a", "b"}
    assert compiled.program.input_layouts["a"] == Layout.whole((5, 4))
