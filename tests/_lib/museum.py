"""The museum of reduction bugs: faults that were published of other systems, each written as a
mutation of one of our programs or rules.

``docs/museum.md`` is made of this table: ``pytest tests/museum --update-golden`` writes it. Every
fault has the thread in which it was reported or mended, so that a reader can look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mutations as m
import torch
import torch.nn.functional as F
from museum_models import program_of
from museum_rules import expert, log_probability
from mutations import PipelineMutation, ProgramMutation, RuleMutation

from shardwright.compiler.ir.op import RankDraw
from shardwright.compiler.ops.prover import OperatorCall, ProofReport
from shardwright.compiler.passes.lower_stages import verify_pipeline
from shardwright.compiler.passes.proved_schedule import schedule_of
from shardwright.compiler.passes.verify_program import verify_program
from shardwright.compiler.plan.pipeline import PipelineProgram
from shardwright.compiler.plan.program import Program
from shardwright.compiler.schedule.validate import validate
from shardwright.runtime.errors import ShardwrightError


@dataclass(frozen=True)
class InProgram:
    """A program of ``museum_models.CASES``, mutated."""

    case: str
    mutation: ProgramMutation

    def verdict(self) -> str:
        """What the verifier says, or nothing."""
        program = program_of(self.case)
        assert isinstance(program, Program)
        return _said(lambda: verify_program(self.mutation(program)))


@dataclass(frozen=True)
class InPipeline:
    """The pipeline of ``museum_models.CASES``, mutated."""

    mutation: PipelineMutation

    def verdict(self) -> str:
        """What the verifier of pipelines says, or nothing."""
        program = program_of("pipeline")
        assert isinstance(program, PipelineProgram)
        return _said(lambda: verify_pipeline(self.mutation(program)))


@dataclass(frozen=True)
class InSchedule:
    """The schedule of the pipeline, without some of its actions."""

    lost: tuple[str, ...]

    def verdict(self) -> str:
        """What the check of schedules says, or nothing."""
        program = program_of("pipeline")
        assert isinstance(program, PipelineProgram)
        schedule = schedule_of(program)
        kept = tuple(tuple(a for a in r if str(a) not in self.lost) for r in schedule.actions)
        return _said(lambda: validate(replace(schedule, actions=kept)))


@dataclass(frozen=True)
class InRule:
    """The rule of one call of an operator, mutated; without a mutation it is wrong as it is."""

    operator: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    mutation: RuleMutation | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 2

    def proof(self, *, mutated: bool) -> ProofReport:
        """The proof of the rule, as the tables have it or mutated."""
        torch.manual_seed(0)
        call = OperatorCall.of(self.operator, self.arguments(), dict(self.options), True, 0)
        if mutated and self.mutation is not None:
            rule = self.mutation(call.rule)
            call = replace(call, rule=rule, op=replace(call.op, rule=rule))
        return ProofReport(call.op.target, call.rule, tuple(call.trials((self.num_ranks,))))

    def verdict(self) -> str:
        """What the prover says of the first strategy that is wrong, or nothing."""
        head, *lines = str(self.proof(mutated=True)).splitlines()
        wrong = [line for line in lines if line.startswith("  WRONG")]
        return "\n".join([head.rstrip(), *wrong[:1]]) if wrong else ""


def _said(check: Callable[[], object]) -> str:
    try:
        check()
    except ShardwrightError as error:
        return error.what
    return ""


@dataclass(frozen=True)
class Exhibit:
    """One published fault.

    - ``sources``: ``owner/repository/issues/number`` or ``.../pull/number``.
    - ``happened``: what went wrong there, and what it cost where that is told.
    - ``algebra``: which placement, count or draw is wrong.
    - ``place``: what the error must name.
    """

    title: str
    sources: tuple[str, ...]
    happened: str
    algebra: str
    written: InProgram | InPipeline | InSchedule | InRule
    place: str


@dataclass(frozen=True)
class Room:
    """Exhibits of one kind."""

    title: str
    exhibits: tuple[Exhibit, ...]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def rows_of_unequal_number() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels of which one half has fewer that count."""
    return randn(4, 5), torch.tensor([1, -100, 3, 4])


REPLICATED = Room(
    "Gradients of weights that every rank holds",
    (
        Exhibit(
            "Layer norms under sequence parallelism",
            ("hpcaitech/ColossalAI/pull/4927", "EleutherAI/gpt-neox/pull/1257"),
            "Each rank normalised its own tokens, and nobody summed the gradients of the norm's "
            "weights over the ranks. In GPT-NeoX the loss flattened out near 8.",
            "the weights are G(tp), and were R",
            InProgram("sp", m.stored("norm_2.weight", "[8]")),
            "norm_2",
        ),
        Exhibit(
            "The last layer norm",
            ("NVIDIA/Megatron-LM/issues/1446",),
            "With tensor and sequence parallelism, the gradients of the final norm were seen to "
            "differ between the tensor-parallel ranks before the step.",
            "the weights are G(tp), and were R",
            InProgram("sp", m.stored("norm_f.weight", "[8]")),
            "norm_f",
        ),
        Exhibit(
            "Norms of queries and keys",
            ("NVIDIA-NeMo/RL/issues/3716",),
            "A second way to run a training step left out the sum of such gradients over the "
            "tensor-parallel ranks. Each rank had seen its own heads only.",
            "the weight is G(tp) as heads are split, and was R",
            InProgram("tp", m.stored("q_norm.weight", "[4]")),
            "q_norm",
        ),
        Exhibit(
            "The adapter that every rank has",
            ("modelscope/mcore-bridge/pull/173",),
            "One of LoRA's two factors is whole on every rank and saw a part of the sequence. Each "
            "rank trained a factor of its own; the export saved that of rank 0.",
            "the factor is G(tp), and was R",
            InProgram("sp", m.stored("lora_b.weight", "[8, 2]")),
            "lora_b",
        ),
        Exhibit(
            "Biases of keys and values in multi-query attention",
            ("bigcode-project/Megatron-LM/issues/11",),
            "All heads share one key-value head, which every rank holds. Its weights were reduced, "
            "its biases were forgotten, and so were both with the distributed optimizer.",
            "the bias is G(tp), and was R",
            InProgram("sp", m.stored("k.bias", "[4]")),
            "k_bias",
        ),
        Exhibit(
            "Copies over which nobody sums",
            ("verl-project/verl/issues/7493", "pytorch/pytorch/issues/154888"),
            "With hybrid sharding over groups of one rank, gradients were reduced within these "
            "groups only. The copies trained on their own batches, each for itself, in silence.",
            "a weight that units store together is G over them where it is used; it was R",
            InProgram("fsdp", m.changed("all_gather", "up_weight", backward="slice")),
            "all_gather of up_weight",
        ),
        Exhibit(
            "Summed a second time",
            ("inclusionAI/AReno/pull/496",),
            "The gradients that reach the replicated projections of latent attention were summed "
            "over the ranks on their way. The trainer summed them again: twice as large on two "
            "ranks, and of another direction where only a part had been summed.",
            "the weight is R, and was G(tp)",
            InProgram("tp", m.stored("k.weight", "[4, 8] G(tp)")),
            "k_weight",
        ),
    ),
)

PARTIAL = Room(
    "Partial sums that pass for the whole",
    (
        Exhibit(
            "The bias of a row-parallel linear",
            ("PaddlePaddle/Paddle/pull/35186", "Wenyueh/MinivLLM/issues/80"),
            "Each rank added the bias to its summand, so that the sum had it once for every rank.",
            "the bias is P(tp), on one rank and zero on the others; it was R",
            InProgram("tp", m.without("keep_one", "down_bias")),
            "down_bias",
        ),
        Exhibit(
            "The same, as a rule",
            ("awslabs/slapo/issues/10",),
            "Sharding a linear's inputs and summing the results was offered as a schedule for any "
            "linear. One with a bias got it many times.",
            "where inputs are split, the bias must be P",
            InRule(F.linear, lambda: (randn(3, 4), randn(5, 4), randn(5)), m.not_additive),
            "split:k",
        ),
        Exhibit(
            "The gradient of shared keys and values",
            ("bigcode-project/Megatron-LM/issues/35", "bigcode-project/Megatron-LM/pull/37"),
            "Each rank's heads gave a part of the gradient of the one key-value head, and nobody "
            "summed them. The loss exploded after some thousand steps; after 5,000 it was 3.74 in "
            "the place of 2.64.",
            "keys are G(tp) where heads are split, and were R",
            InProgram("tp", m.without("grad_all_reduce", "k_1")),
            "k_1",
        ),
        Exhibit(
            "The gradient of the chunked loss",
            ("pytorch/torchtitan/pull/3412", "apple/ml-cross-entropy/pull/42"),
            "With the vocabulary split, each rank has a summand of the gradient of the last hidden "
            "state. It was labelled as whole, and the loss stayed well above that of one device.",
            "the head's input is G(tp), and was R",
            InProgram("tp", m.without("grad_all_reduce", "norm_f")),
            "norm_f",
        ),
        Exhibit(
            "The gradient below the experts",
            (
                "pytorch/torchtitan/issues/1805",
                "pytorch/torchtitan/pull/1878",
                "pytorch/torchtitan/pull/4054",
            ),
            "Experts were split over tensor-parallel ranks, so that each gave a summand of their "
            "input's gradient. The sum was missing, and later missing again in another setting; "
            "loss curves looked normal.",
            "the input of the experts is G(tp), and was R",
            InProgram("experts-tp", m.without("grad_all_reduce", "x")),
            "router needs x",
        ),
        Exhibit(
            "An adapter's whole beside a base's partial sum",
            ("NVIDIA-NeMo/Megatron-Bridge/issues/5634",),
            "Where experts leave the sum over ranks to the dispatcher, the base's result is a "
            "summand. The LoRA branch added a whole result to it, which was then counted once for "
            "every rank.",
            "both operands of a sum are P, or both are R",
            InProgram("tp", m.without("all_reduce", "down")),
            "add needs down",
        ),
        Exhibit(
            "The shared expert that nobody reduced",
            ("vllm-project/tpu-inference/pull/3435",),
            "Routed experts were summed over the ranks, the shared one was not: it entered with a "
            "part of its value. Accuracy on gsm8k fell from 96 % to 24 %.",
            "the result is R, and was made of summands",
            InProgram("experts-tp", m.following("y", ("[8, 8]",), tp="R")),
            "y needs routed",
        ),
        Exhibit(
            "A whole value summed over the ranks",
            (
                "hpcaitech/ColossalAI-Examples/issues/155",
                "huggingface/transformers/pull/48167",
                "NovaSky-AI/SkyRL/pull/1420",
            ),
            "Losses were reported that grew with the number of ranks along the sequence. In SkyRL "
            "all ranks had the value in full, and it was summed over them.",
            "an all-reduce goes from P to R; its operand was R",
            InProgram("cp", m.twice("all_reduce", "cross_entropy")),
            "all_reduce of cross_entropy",
        ),
        Exhibit(
            "A slice before the sum",
            ("openxla/xla/issues/42481",),
            "A partitioner took each rank's piece of a partial sum and summed these: rows of "
            "different tokens were added to each other.",
            "a slice goes from R to S; its operand was P",
            InProgram(
                "sp",
                m.changed("reduce_scatter", "embedding", kind="narrow", backward="all_gather"),
            ),
            "narrow of embedding",
        ),
        Exhibit(
            "A maximum of partial sums",
            ("pytorch/pytorch/pull/165962",),
            "DTensor ran max, min and others on summands, and reduced afterwards.",
            "`amax` is not linear: P may not pass",
            InRule(torch.amax, lambda: (randn(4, 3), 1), m.linear_in(0)),
            "linear:0",
        ),
    ),
)

BACKWARD = Room(
    "Backwards of collectives",
    (
        Exhibit(
            "A gather whose backward slices",
            ("pytorch/xla/issues/5784", "NVIDIA-NeMo/Automodel/pull/1260"),
            "Every rank goes on with the gathered tensor in its own way, so the gradients must be "
            "summed. The backward took a slice of the own one. In NeMo Automodel the loss stayed "
            "14 % higher.",
            "the gather goes from S to G, and went from S to R",
            InProgram("sp", m.changed("all_gather", "norm_1", backward="slice")),
            "all_gather of norm_1",
        ),
        Exhibit(
            "The positional part of a key",
            ("NVIDIA/Megatron-LM/issues/1699",),
            "In latent attention one gather brought two tensors. Its backward sliced, which was "
            "right for the one that was reduced elsewhere, and wrong for the other.",
            "the keys are G, and were R",
            InProgram("cp", m.changed("all_gather", "k_1", backward="slice")),
            "all_gather of k_1",
        ),
        Exhibit(
            "A gather whose backward sums",
            ("awslabs/slapo/pull/20",),
            "The other way around: where all ranks go on alike, a reduce-scatter counts the "
            "gradient once for every rank. A schedule language had to learn to tell both apart.",
            "the gather goes from S to R, and went from S to G",
            InProgram(
                "experts-tp", m.changed("all_gather", "probabilities", backward="reduce_scatter")
            ),
            "all_gather of probabilities",
        ),
        Exhibit(
            "An all-reduce whose backward is an all-reduce",
            ("pytorch/torchtitan/pull/2106",),
            "A bias was added to a partial sum. Behind the all-reduce the gradient was whole, was "
            "marked as partial and summed again: larger by the number of ranks.",
            "the all-reduce goes from P to R; this backward belongs to P to G",
            InProgram("tp", m.changed("all_reduce", "down", backward="all_reduce")),
            "all_reduce of down",
        ),
        Exhibit(
            "A sum without a gradient",
            ("modelscope/ms-swift/pull/9947",),
            "Log-probabilities over a split vocabulary were summed by a plain collective. Values "
            "were right; ranks that did not own the token got a wrong gradient.",
            "the function that computes the split operator has another gradient",
            InRule(log_probability, lambda: (randn(4, 6), torch.tensor([0, 2, 3, 5]))),
            "split:c",
        ),
        Exhibit(
            "A mean where a sum belongs",
            ("vllm-project/vllm/pull/33088", "hpcaitech/ColossalAI/issues/3044"),
            "A reduce-scatter of partial products averaged; a backward of ring attention divided "
            "its sum by the number of ranks.",
            "P is a sum; no entry of the table of adapters averages",
            InProgram("sp", m.changed("reduce_scatter", "o", kind="reduce_scatter_mean")),
            "reduce_scatter_mean of o",
        ),
    ),
)

LOSSES = Room(
    "Losses",
    (
        Exhibit(
            "The mean of means",
            ("huggingface/transformers/pull/34191", "huggingface/trl/issues/2175"),
            "Each part of the batch took the mean over its own tokens, and the means were "
            "averaged. Parts with few tokens weighed too much, and runs with gradient accumulation "
            "came out worse.",
            "a mean over rows is not the sum of the pieces' means",
            InRule(F.cross_entropy, rows_of_unequal_number, m.splittable(n="+")),
            "split:n",
        ),
        Exhibit(
            "The mean over a part of the sequence",
            (
                "NVIDIA/Megatron-LM/issues/673",
                "ByteDance-Seed/VeOmni/pull/338",
                "verl-project/verl/issues/2857",
            ),
            "Under context and sequence parallelism each rank has a part of the tokens. By how "
            "many to divide, and whether to multiply by the ranks again, was asked and mended over "
            "and over; in VeOmni losses were 8 times too small on 8 ranks.",
            "the call divides by the tokens of one rank, its strategy asks for those of all",
            InProgram(
                "cp",
                m.called(
                    "cross_entropy", "cross_entropy", row_axes=None, num_classes=None, count=None
                ),
            ),
            "cross_entropy is computed with",
        ),
        Exhibit(
            "The scale of the router's losses",
            (
                "NVIDIA/Megatron-LM/pull/5047",
                "NVIDIA/Megatron-LM/issues/1652",
                "NVIDIA/Megatron-LM/pull/5798",
            ),
            "Auxiliary and z-losses were scaled by the number of a rank's own tokens, so that they "
            "changed with tensor and context parallelism, and with the size of a microbatch.",
            "the count of the mean is that of all ranks, and was that of one",
            InProgram("experts", m.called("z_loss", count=2)),
            "z_loss is computed with",
        ),
        Exhibit(
            "The balance of a part of the batch",
            ("NVIDIA/Megatron-LM/issues/3672", "NVIDIA/Megatron-LM/pull/3769"),
            "The balance loss multiplies two means. One was taken over all ranks, the other "
            "stayed that of a rank: the gradient was too small by the number of ranks.",
            "a factor of a product is R, and was P",
            InProgram("experts", m.without("all_reduce", "mean")),
            "mul_2 needs mean",
        ),
        Exhibit(
            "An auxiliary loss that has no effect",
            ("NVIDIA-NeMo/Automodel/issues/1408",),
            "The function that hangs the loss into the graph returns a tensor. It was thrown away, "
            "and no router ever got that gradient.",
            "the result is another value than the graph returns",
            InProgram("experts", m.bypassing("add_2", "mse_loss")),
            "add_2",
        ),
        Exhibit(
            "An auxiliary loss times the number of ranks",
            ("huggingface/transformers/pull/48706", "NVIDIA-NeMo/Automodel/pull/3359"),
            "The sum of all losses was scaled to undo an average over ranks; the auxiliary one "
            "needed no such scale. Elsewhere it entered every microbatch without its own.",
            "a factor of the call is another than the graph has",
            InProgram("experts", m.called("mul_3", other=0.04)),
            "mul_3 is computed with",
        ),
        Exhibit(
            "Gathered logits in the vocabulary-parallel loss",
            ("NVIDIA/Megatron-LM/issues/7452",),
            "With gathered logits each rank counted all classes, and the sum over ranks counted "
            "them again: the loss was too large by the logarithm of the ranks.",
            "the logits are S over the classes, and were R",
            InProgram("tp", m.gathered("flatten_1", "cross_entropy")),
            "cross_entropy needs flatten_1",
        ),
        Exhibit(
            "Label smoothing over a part of the vocabulary",
            ("NVIDIA/Megatron-LM/pull/5522", "NVIDIA/Megatron-LM/issues/7452"),
            "The smoothing took the classes of one rank for all: ranks had different losses, and "
            "gradients were wrong.",
            "the number of classes is that of all ranks, and was that of one",
            InProgram("tp", m.called("cross_entropy", num_classes=6)),
            "cross_entropy is computed with",
        ),
        Exhibit(
            "Each rank with its own maximum",
            ("bigscience-workshop/Megatron-DeepSpeed/issues/394",),
            "A vocabulary-parallel loss was measured to differ by 1 % from torch's. One way to get "
            "there is to add up exponentials that were scaled by different maxima.",
            "the function that computes the split operator lacks the maximum over ranks",
            InRule(
                F.cross_entropy,
                lambda: (randn(4, 6), torch.tensor([0, 2, 3, 5])),
                m.computed_by("museum_rules.cross_entropy_by_local_maxima", "c"),
            ),
            "split:c",
        ),
    ),
)

EXPERTS = Room(
    "Experts",
    (
        Exhibit(
            "The router's weight",
            ("pytorch/torchtitan/pull/2416",),
            "Scores were split over the ranks, so that each saw the gradient of its own tokens. "
            "The router was taken for replicated, and its copies grew apart.",
            "the weight is used as G(dp, ep), and was R",
            InProgram("experts", m.stored("router.weight", "[4, 8]")),
            "router_weight",
        ),
        Exhibit(
            "The gate of the shared expert",
            ("alibaba/Pai-Megatron-Patch/issues/397",),
            "Every rank has the gate and its own part of the tokens. Nobody summed its gradient.",
            "the weight is used as G(dp, ep), and was R",
            InProgram("experts", m.stored("shared_gate.weight", "[1, 8]")),
            "shared_gate_weight",
        ),
        Exhibit(
            "Copies of an expert",
            ("meta-pytorch/autoparallel/issues/515", "NVIDIA/Megatron-LM/pull/6080"),
            "An expert's weights lie in copies on the ranks of another axis, which have other "
            "tokens. Their gradients were labelled as whole, or summed over other groups.",
            "the weights are G(dp), and were R along it",
            InProgram("experts", m.stored("w_in", "[4/ep, 8, 16]")),
            "w_in",
        ),
        Exhibit(
            "The wrong group of ranks",
            (
                "NVIDIA/Megatron-LM/pull/6080",
                "NVIDIA/Megatron-LM/pull/5916",
                "NVIDIA/Megatron-LM/issues/1628",
            ),
            "With unusual sizes, gradients of different experts were mixed: they were summed over "
            "the ranks that share the dense weights.",
            "the weights are cut over ep and G(dp); they were G(ep)",
            InProgram("experts", m.stored("w_out", "[4/dp, 16, 8] G(ep)")),
            "w_out",
        ),
        Exhibit(
            "Expert gradients that grow with the ranks",
            (
                "deepspeedai/DeepSpeed/issues/5618",
                "deepspeedai/DeepSpeed/pull/5259",
                "pytorch/pytorch/issues/160285",
            ),
            "An expert gets tokens of all ranks, so that its gradient is the sum already. It was "
            "treated like a mean over fewer ranks: 4 times too large on 4 ranks.",
            "the weights are cut over ep, where nothing is left to sum; one more sum does that",
            InProgram("experts", m.stored("w_in", "[4/ep, 8, 16] G(dp, ep)")),
            "'ep' twice",
        ),
        Exhibit(
            "A router cut from its loss",
            ("NVIDIA-NeMo/Automodel/pull/2995",),
            "Routing probabilities went through a gather that knows no gradient. The router was "
            "trained by its auxiliary losses only.",
            "a value of the program has lost its gradient",
            InProgram("experts", m.detached("probabilities")),
            "probabilities",
        ),
        Exhibit(
            "Experts without tokens",
            (
                "NVIDIA-NeMo/Automodel/pull/2995",
                "THUDM/slime/pull/1010",
                "pytorch/pytorch/issues/158719",
            ),
            "On a rank where an expert had no tokens its weights took no part in backward. Their "
            "gradients were missing there, and the other ranks waited for ever, or failed.",
            "a rank with an empty piece gives no gradient, where zeros are due",
            InRule(expert, lambda: (randn(2, 3), randn(3, 4).requires_grad_()), num_ranks=3),
            "no gradient reaches weight",
        ),
        Exhibit(
            "Tokens gathered for experts",
            ("NVIDIA-NeMo/Automodel/pull/1260",),
            "Each rank gathered the tokens of all and ran its own experts on them. Backward gave "
            "each rank its piece of its own gradient, without those of the other ranks' experts: a "
            "loss of 1.6 in the place of 1.4.",
            "the tokens are G(ep), so the gather's backward reduces and scatters; it only sliced",
            InProgram("rows-gathered", m.changed("all_gather", "first", backward="slice")),
            "first",
        ),
        Exhibit(
            "Rows sent home by the routing of others",
            ("vllm-project/vllm/pull/52639",),
            "Tokens went to other ranks, and the sums came back by what had arrived there, not by "
            "what each rank had sent. The more ranks, the more rows were wrong.",
            "dispatch exchanged tokens for experts, so combine must exchange back; it did not",
            InProgram("rows", m.called("index_add_3_1", exchange=None, token_dims=None)),
            "index_add_3",
        ),
        Exhibit(
            "A rank without tokens leaves the backward",
            ("NVIDIA/Megatron-LM/issues/1877", "NVIDIA/Megatron-LM/pull/3626"),
            "Where no token came to a rank, the result of putting rows back hung on no graph. That "
            "rank sent nothing in backward, and the others waited for ever.",
            "what combine gives has lost its gradient",
            InProgram("rows", m.detached("index_add_3_1")),
            "index_add_3",
        ),
        Exhibit(
            "Experts counted from zero on every rank",
            ("KempnerInstitute/KempnerForge/issues/202", "deepspeedai/DeepSpeed/issues/6589"),
            "Experts are modules of their own, and each rank keeps some. Every rank called its own "
            "0, 1, ...: all loaded the first ones, and a checkpoint had those of one rank.",
            "the weight is element 2 of 4, and was declared as element 0",
            InProgram("rows", m.stored("experts.2.0.weight", "[0 of 4/ep * 16, 8]")),
            "experts_2_0_weight",
        ),
    ),
)

NORMS = Room(
    "Norms of gradients, and of activations",
    (
        Exhibit(
            "Replicated weights counted once for every rank",
            (
                "NVIDIA-NeMo/RL/pull/3788",
                "ROCm/TransformerEngine/pull/715",
                "mindspore-ai/hyper-parallel/issues/526",
            ),
            "Squares were summed over all ranks, also those that all ranks have. Norms were 1.36 "
            "to 1.7 times too large, and clipping set in too early.",
            "a sum of squares of an R tensor is R; beside others it must become P on one rank",
            InProgram("norm", m.without("keep_one", "replicated")),
            "replicated",
        ),
        Exhibit(
            "Pieces counted on one rank only",
            ("NVIDIA/Megatron-LM/pull/5916", "NVIDIA/Megatron-LM/pull/6470"),
            "Experts lie on other ranks than their group said, so that the norm left some out: the "
            "square root of 2 in the place of that of 3.",
            "the sum of squares of pieces is P, and was R",
            InProgram("norm", m.without("all_reduce", "add")),
            "sqrt needs add",
        ),
        Exhibit(
            "The norm of a partial sum",
            ("pytorch/pytorch/pull/159856",),
            "DTensor took norms of summands and added them: too large.",
            "a norm is not linear: P may not pass",
            InRule(torch.linalg.vector_norm, lambda: (randn(4, 3),), m.linear_in(0)),
            "linear:0",
        ),
        Exhibit(
            "Clipped before the sum",
            ("mindspore-lab/mindcv/issues/603", "tensorflow/tensorflow/issues/25806"),
            "Each rank clipped its own gradient, and the clipped ones were summed.",
            "clipping is not linear: P may not pass",
            InRule(torch.clamp, lambda: (randn(4, 3), -0.5, 0.5), m.linear_in(0)),
            "linear:0",
        ),
        Exhibit(
            "Statistics of a part of the hidden dim",
            ("axonn-ai/yalis/pull/36", "EleutherAI/gpt-neox/pull/1424"),
            "An RMS norm over a dim that was split took the mean of squares of its piece.",
            "the dim of the mean may not be split without a sum of squares",
            InRule(F.rms_norm, lambda: (randn(3, 4), (4,), randn(4)), m.with_local_shape("h0")),
            "split:h0",
        ),
        Exhibit(
            "A layer norm's gradients taken for pieces",
            ("Oneflow-Inc/oneflow/pull/10561",),
            "The rule of the norm's backward said that gradients of its weights are split; they "
            "are partial sums.",
            "where rows are split, weights are G; the rule said R",
            InRule(
                F.layer_norm,
                lambda: (randn(4, 3), (3,), randn(3), randn(3)),
                m.placed("*0", ("S", "R", "R"), "layer_norm"),
            ),
            "split:*0",
        ),
        Exhibit(
            "Batch norm over the ranks",
            ("PaddlePaddle/Paddle/issues/32464", "pytorch/pytorch/issues/22192"),
            "Statistics over all ranks were averages of the ranks' own, which is wrong where these "
            "have unequal batches.",
            "where the batch is split, sums and counts of all ranks are needed",
            InRule(
                F.batch_norm,
                lambda: (
                    randn(5, 3).requires_grad_(),
                    torch.zeros(3).double(),
                    torch.ones(3).double(),
                ),
                m.splittable(),
                {"training": True},
            ),
            "split:n",
        ),
    ),
)

STAGES = Room(
    "Pipelines",
    (
        Exhibit(
            "Tied embeddings in two stages",
            ("uw-syfi/piper/issues/13",),
            "The first and the last stage had a copy of the weight each. Their gradients were not "
            "summed before the step.",
            "one parameter, two stages, and nobody who knows it",
            InPipeline(m.unshared("embedding.weight")),
            "embedding.weight",
        ),
        Exhibit(
            "Tied embeddings in other pieces",
            ("NVIDIA/Megatron-LM/issues/844", "NVIDIA/Megatron-LM/pull/6500"),
            "Both stages had cut the gradient over the ranks already, at other places. Their sum "
            "added unrelated rows.",
            "both stages must hold the same pieces",
            InPipeline(m.in_stage(1, m.moved("embedding.weight", "[12/tp, 8]"))),
            "embedding.weight",
        ),
        Exhibit(
            "Only the last microbatch trains",
            ("NVIDIA-NeMo/Automodel/pull/3530",),
            "Gradients that had been accumulated were cleared between microbatches. The loss "
            "looked fine, only the norm of the gradients told.",
            "a schedule in which a microbatch has no backward",
            InSchedule(("0B0", "1B0")),
            "0B0",
        ),
    ),
)

DRAWS = Room(
    "Random numbers",
    (
        Exhibit(
            "One mask for different pieces",
            ("InternLM/InternLM/pull/405", "PaddlePaddle/PaddleFleetX/pull/1005"),
            "Ranks with different parts of the sequence had the same seed, and dropped the same "
            "places of each.",
            "the mask of an S(tp) tensor is drawn for each piece, and was drawn for all",
            InProgram("sp", m.called("dropout", draw=RankDraw("dropout"))),
            "dropout is computed with",
        ),
        Exhibit(
            "Different masks for copies",
            ("awslabs/slapo/issues/21", "tenstorrent/tt-metal/issues/55947"),
            "Ranks that hold copies must drop the same elements, those with pieces different ones. "
            "With one setting for all, copies differ from then on.",
            "the mask of an R tensor is drawn alike, and was drawn for each rank",
            InProgram("tp", m.called("dropout", draw=RankDraw("dropout", ("tp",)))),
            "dropout is computed with",
        ),
    ),
)

ROOMS = (REPLICATED, PARTIAL, BACKWARD, LOSSES, EXPERTS, NORMS, STAGES, DRAWS)
EXHIBITS = tuple(exhibit for room in ROOMS for exhibit in room.exhibits)
