"""Mixtures of experts under every kind of plan against one device: losses, auxiliary losses, every
gradient, parameters after AdamW steps.

The default tests run a pairwise cover of what plans are made of; the slow ones run every family
under several plans. ``tests/product/experts.py`` draws plans at random.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import expert_models
import plans
import pytest
import torch
import torch.nn.functional as F
from covers import spread
from expert_models import BY_HAND, verify_experts
from parity import Reference, assert_close_tree, reference_run, tensors_of
from precision import float64_casts
from torch import Tensor, nn
from traces import shared_traces

from shardwright.compiler.ir.op import IROp
from shardwright.compiler.ops.strategy import allowed, exchange_strategy
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.compiler.plan.plan import Plan
from shardwright.experts import combine, dispatch, grouped_linear, within_capacity
from shardwright.frontend.files.cache import read_plan
from shardwright.frontend.verification.one_device import adamw
from shardwright.frontend.verification.trained_ranks import train_plan
from shardwright.frontend.verification.verify import compile_into, verify
from shardwright.policies.policy import PolicyFunction
from shardwright.runtime.checkpoint.merged import merge_state_dicts
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError
from shardwright.runtime.layout import Mesh
from shardwright.runtime.loader import load_class
from shardwright.runtime.manifest import Manifest
from shardwright.runtime.pieces import local_piece
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def _quiet(recwarn: pytest.WarningsRecorder) -> None:
    """Compiles warn of what stays whole in models this small."""


# ------------------------------------------------------------------------------------------------
# policies


def config_of(plan_ngpus: int, units: int = 1, **fields: Any) -> dict[str, Any]:
    return {"plan_ngpus": plan_ngpus, "runtime_ngpus": plan_ngpus * units, **fields}


def pipeline(plan_ngpus: int, units: int = 1, zero: int = 0, **options: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"use_zero": zero} if zero else {}
    return config_of(plan_ngpus, units, use_end2end=True, pas_config=options, **fields)


def by_ep(
    plan_ngpus: int,
    units: int = 1,
    ep: int | tuple[int, int] | None = None,
    etp: int = 1,
    **fields: Any,
) -> Any:
    options = {"ep": ep, "etp": etp} if ep is not None else {"etp": etp}
    return config_of(plan_ngpus, units, pas_config=options, **fields)


# Messages are under way while shared experts are computed.
EARLY: dict[str, Any] = {"overlap_communication": True}

COVER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "3 unequal shares": (BY_HAND, "ep", by_ep(3)),
    "ep 2 x etp 2, zero 3": (BY_HAND, "ep", by_ep(4, ep=2, etp=2, use_zero=3, **EARLY)),
    "ep 2, 2 units, zero 1": (BY_HAND, "ep", by_ep(2, 2, use_zero=1, grad_reduction="mean")),
    "ep over 2 nodes of 2": (BY_HAND, "ep", by_ep(4, ep=(2, 2), **EARLY)),
    "tp with ep and etp": (BY_HAND, "tp", config_of(4, pas_config={"ep": 2, "etp": 2})),
    "stages of ep, 1f1b, recomputed": (
        BY_HAND,
        "hybrid",
        EARLY
        | pipeline(4, num_stages=2, dp=2, tp=1, ep=2, num_microbatches=3, recompute=["layers.*"]),
    ),
    "stages of dp, tp, ep and etp, zb_h1, zero 1": (
        BY_HAND,
        "hybrid",
        pipeline(
            8, 1, 1, num_stages=2, dp=2, tp=2, ep=2, etp=2, schedule="zb_h1", num_microbatches=2
        ),
    ),
    "2d": (BY_HAND, "tensor", config_of(4, pas_config={"mode": "2d"})),
    "ep over dp and tp": (
        BY_HAND,
        "hybrid",
        EARLY | pipeline(4, 1, num_stages=1, dp=2, tp=2, ep=4, num_microbatches=2),
    ),
}  # fmt: skip
REST: dict[str, tuple[str, str, dict[str, Any]]] = {
    f"{model} {name}": (model, policy, config)
    for index, model in enumerate(expert_models.MODELS)
    for number, (name, policy, config) in enumerate(
        (
            ("ep 2", "ep", by_ep(2, **EARLY)),
            ("ep 2 x etp 2", "ep", by_ep(4, ep=2, etp=2)),
            (
                "tp 2 x ep 2 in 2 units",
                "tp",
                config_of(2, 2, pas_config={"ep": 2}, use_zero=1, **EARLY),
            ),
            (
                "zb_h1",
                "hybrid",
                pipeline(4, num_stages=2, dp=2, tp=1, ep=2, schedule="zb_h1", num_microbatches=2),
            ),
        )
    )
    if number % 2 == index % 2
} | {
    "ep 2, 2 units, zero 3": (BY_HAND, "ep", by_ep(2, 2, use_zero=3)),
    "tp whose ranks hold experts": (BY_HAND, "tp", config_of(2, pas_config={"ep": 2})),
    "ep 2 x edp 2, zero 3": (BY_HAND, "ep", by_ep(4, ep=2, use_zero=3)),
    "4 unequal shares": ("mixtral", "ep", by_ep(4)),
    "stages of 2 nodes of 2": (
        "qwen3_moe",
        "hybrid",
        pipeline(8, num_stages=2, dp=4, tp=1, ep=(2, 2), num_microbatches=2),
    ),
    "8 ranks for 6 experts": (BY_HAND, "ep", by_ep(8)),
    "edp 2 x ep 2 x etp 2": (BY_HAND, "ep", by_ep(8, ep=2, etp=2)),
    "ep over tp alone": (
        BY_HAND,
        "hybrid",
        pipeline(4, num_stages=1, dp=2, tp=2, ep=2, etp=1, num_microbatches=2),
    ),
    "ep over dp and a sequence in zigzag": (
        "qwen3_moe",
        "hybrid",
        pipeline(4, num_stages=1, dp=2, cp=2, tp=1, ep=4, num_microbatches=2),
    ),
    "ep over the sequence, etp over tp": (
        "mixtral",
        "hybrid",
        pipeline(8, num_stages=2, cp=2, tp=2, ep=2, etp=2, cp_mode="ulysses", num_microbatches=2),
    ),
    "ep over dp and sequence parallel tp": (
        "qwen3_moe",
        "hybrid",
        EARLY
        | pipeline(4, num_stages=1, dp=2, tp=2, ep=4, sequence_parallel=True, num_microbatches=2),
    ),
    "ep over the sequence, experts that are modules": (
        "switch",
        "hybrid",
        pipeline(4, num_stages=1, dp=2, cp=2, tp=1, ep=4, num_microbatches=1),
    ),
    "2d in steps": (
        "deepseek_v3",
        "tensor",
        config_of(4, pas_config={"mode": "2d", "gather": "steps"}),
    ),
    "2.5d, zero 3": (
        "qwen3_moe",
        "tensor",
        config_of(4, 2, use_zero=3, pas_config={"mode": "2.5d", "shape": [2, 1, 2]}),
    ),
    "3d": ("gpt_oss", "tensor", config_of(8, pas_config={"mode": "3d"})),
    "interleaved stages": (
        "olmoe",
        "hybrid",
        pipeline(
            4, num_stages=2, dp=2, tp=1, ep=2, schedule="1f1b_interleaved", num_microbatches=2
        ),
    ),
    "zb_v, 2 units, zero 1": (
        "qwen3_moe",
        "hybrid",
        pipeline(4, 2, 1, num_stages=2, dp=2, tp=1, ep=2, schedule="zb_v", num_microbatches=2),
    ),
}


@pytest.mark.parametrize(
    "name", [*spread(COVER, 2, first=1), *(pytest.param(name, marks=slow) for name in [*REST][::2])]
)
def test_a_policy_equals_one_device(name: str) -> None:
    model, policy, config = (COVER | REST)[name]
    report = verify_experts(model, policy, config)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("model", "policy", "config"),
    [
        (BY_HAND, "tp", config_of(4, pas_config={"ep": 4})),
        pytest.param("qwen3_moe", "hybrid", pipeline(4, num_stages=2, tp=2, ep=2), marks=slow),
        pytest.param("qwen3_moe", "hybrid", pipeline(4, cp=2, tp=2, ep=4), marks=slow),
    ],
)
def test_one_sequence_needs_no_batch(model: str, policy: str, config: dict[str, Any]) -> None:
    report = verify_experts(model, policy, config, batch=1)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ({"num_experts": 2, "top_k": 1}, 4),
        pytest.param({"num_experts": 3, "top_k": 3}, 5, marks=slow),
    ],
)
def test_more_ranks_than_experts(sizes: dict[str, int], batch: int) -> None:
    """Some ranks hold no expert, and a rank may have no rows. They take part all the same."""
    report = verify_experts(BY_HAND, "ep", by_ep(4), sizes=sizes, batch=batch)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "config", "axis"),
    [
        ("ep", by_ep(2, units=2, use_zero=3), "ep"),
        ("tp", config_of(4, pas_config={"ep": 2, "etp": 2}), "tp_ep"),
    ],
)
def test_experts_that_are_modules_lie_on_their_ranks(
    policy: str, config: dict[str, Any], axis: str, tmp_path: Path
) -> None:
    report = verify_experts("switch", policy, config, directory=tmp_path)
    assert report.ok, str(report)
    (path,) = tmp_path.rglob("gencode0.py")
    assert f'expert_2.wi.weight", "[2 of 3/{axis} * ' in path.read_text()


class Limited(nn.Module):
    """Four experts of which each keeps few choices of every quarter of the tokens."""

    def __init__(self, drop: Any) -> None:
        super().__init__()
        self.drop, self.router = drop, nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = x.reshape(-1, 8)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        weights = within_capacity(
            chosen, weights, num_experts=4, factor=0.75, drop=self.drop, groups=4
        )
        rows, gains, routing = dispatch(tokens, chosen, weights, num_experts=4)
        rows = grouped_linear(rows, self.up, routing) * gains.unsqueeze(-1)
        return F.mse_loss(combine(rows, routing).reshape(*x.shape[:2], 16), y)


@pytest.mark.parametrize("drop", ["position", pytest.param("probability", marks=slow)])
def test_capacity_by_groups_is_that_of_one_device(drop: str) -> None:
    """The numbers do not depend on the ranks, though there are as many groups as the most."""
    inputs = {"x": torch.randn(8, 3, 8).double(), "y": torch.randn(8, 3, 16).double()}
    for num_ranks in (2, 4):
        report = verify(Limited(drop).double(), inputs, "ep", by_ep(num_ranks))
        assert report.ok, str(report)


class Balanced(nn.Module):
    """Six experts that are chosen by scores with a bias each, and how often each was."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 6, bias=False)
        self.up = nn.Parameter(torch.randn(6, 8, 8))
        self.register_buffer("bias", torch.zeros(6))
        self.register_buffer("load", torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tokens = x.reshape(-1, 8)
        scores = self.router(tokens).sigmoid()
        chosen = (scores + self.bias).topk(2).indices
        if self.training:
            self.load += F.one_hot(chosen, 6).sum((0, 1)).to(self.load.dtype)
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        rows, gains, routing = dispatch(tokens, chosen, weights, num_experts=6)
        rows = grouped_linear(rows, self.up, routing) * gains.unsqueeze(-1)
        return F.mse_loss(combine(rows, routing).reshape(x.shape), y)


def balanced(module: Any, optimizer: Any, batches: list[Tensor]) -> list[Tensor]:
    """Losses, and how often each expert was chosen: of steps between which biases are moved."""
    found = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = module(x, y)
        loss.backward()
        optimizer.step()
        found += [loss.detach(), module.load.clone()]
        with torch.no_grad():
            module.bias += 0.05 * torch.sign(module.load.mean() - module.load)
            module.load.zero_()
    return [*found, module.bias.clone()]


def test_biases_that_are_moved_between_steps_balance_as_on_one_device(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Balanced().double()
    batches = [torch.randn(2, 4, 5, 8).double() for _ in range(4)]
    x, y = batches[0]
    config = ComputeConfig(plan_ngpus=3, runtime_ngpus=3)
    directory = compile_into(tmp_path, model, {"x": x, "y": y}, "ep", config)

    def train(_: int) -> list[Tensor]:
        module = load_class(directory)()
        optimizer = build_optimizer(module, torch.optim.AdamW, config, lr=0.05)
        return balanced(module, optimizer, batches)

    ranks = run_ranks(3, train)
    expected = balanced(model, torch.optim.AdamW(model.parameters(), lr=0.05), batches)
    assert len(expected[-1].unique()) > 1, "biases that moved"
    for found in ranks:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class Joined(nn.Module):
    """Tokens of two sequences end to end, and experts of two tensors, or of one."""

    def __init__(self, *num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.up = nn.ParameterList(torch.randn(number, 8, 8) for number in num_experts)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        joined = torch.cat([x, y], 1)
        tokens = joined.reshape(-1, 8)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        rows, gains, routing = dispatch(tokens, chosen, weights, num_experts=4)
        up = torch.cat(list(self.up)) if len(self.up) > 1 else self.up[0]
        rows = grouped_linear(rows, up, routing) * gains.unsqueeze(-1)
        return combine(rows, routing).reshape(joined.shape).square().mean()


def test_each_sequence_is_cut_where_tokens_are_of_two() -> None:
    def policy(graph: PlannableGraph, config: ComputeConfig) -> Any:
        assert graph.dims is not None
        builder = graph.builder(mesh={"ep": 2})
        (joined,) = graph.dims.values["joined"][1]
        return builder.split(graph.dims.classes[joined], "ep").split("experts", "ep").build()

    inputs = {"x": torch.randn(2, 3, 8).double(), "y": torch.randn(2, 5, 8).double()}
    report = verify(Joined(4).double(), inputs, policy, config_of(2))
    assert report.ok, str(report)
    both = splits({"ep": 2}, ("batch", "ep"), ("experts", "ep"))
    with pytest.raises(PlanError, match="the rows of .* cannot be converted"):
        verify(Joined(2, 2).double(), inputs, both, config_of(2))


def test_one_expert_is_none_to_split() -> None:
    with pytest.raises(PlanError, match="policy 'ep' finds no experts to split"):
        verify_experts(BY_HAND, "ep", by_ep(4), sizes={"num_experts": 1, "top_k": 1})


# ------------------------------------------------------------------------------------------------
# plans by hand


def splits(axes: Mapping[str, int], *dims: tuple[str, str]) -> PolicyFunction:
    """A policy that splits dims over axes."""

    def policy(graph: PlannableGraph, config: ComputeConfig) -> Any:
        builder = graph.builder(mesh=dict(axes))
        for dim, axis in dims:
            builder.split(dim, axis)
        return builder.build()

    return policy


BY_NAME: dict[str, tuple[str, dict[str, int], tuple[tuple[str, str], ...], tuple[str, ...]]] = {
    "batch and experts": (BY_HAND, {"ep": 2}, (("batch", "ep"), ("experts", "ep")), ("ep",)),
    "tokens whole": (BY_HAND, {"ep": 3}, (("experts", "ep"),), ()),
    "sequence and experts": ("qwen3_moe", {"cp": 2}, (("seq", "cp"), ("experts", "cp")), ("cp",)),
    "batch inside of tokens whole": (
        BY_HAND,
        {"a": 2, "b": 2},
        (("batch", "b"), ("experts", "a"), ("experts", "b")),
        ("b",),
    ),
    "sequence exchanged, batch split": (
        "mixtral",
        {"dp": 2, "cp": 2},
        (("batch", "dp"), ("seq", "cp"), ("experts", "cp")),
        ("cp",),
    ),
    "batch exchanged, sequence split": (
        "mixtral",
        {"dp": 2, "cp": 2},
        (("batch", "dp"), ("seq", "cp"), ("experts", "dp")),
        ("dp",),
    ),
    "sequence over 3": ("qwen3_moe", {"cp": 3}, (("seq", "cp"), ("experts", "cp")), ("cp",)),
    "batch over both": (
        BY_HAND,
        {"a": 2, "b": 2},
        (("batch", "a"), ("batch", "b"), ("experts", "a"), ("experts", "b")),
        ("a", "b"),
    ),
    "batch over one, sequence over the other": (
        "mixtral",
        {"dp": 2, "cp": 2},
        (("batch", "dp"), ("seq", "cp"), ("experts", "dp"), ("experts", "cp")),
        ("dp", "cp"),
    ),
}
"""Model, mesh, dims and the axes that split them, and the axes along which tokens are exchanged for
experts.
"""
QUICK = ("tokens whole",)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=slow) for name in BY_NAME if name not in QUICK)]
)
def test_experts_are_split_by_name(name: str, tmp_path: Path) -> None:
    model, axes, dims, exchanged = BY_NAME[name]
    policy = splits(axes, *dims)
    report = verify_experts(model, policy, config_of(math.prod(axes.values())), directory=tmp_path)
    assert report.ok, str(report)
    (directory,) = {path.parent for path in tmp_path.rglob("manifest.json")}
    found = [
        axis
        for assignment in read_plan(directory).strategies.values()
        for axis, strategy in assignment.items()
        if strategy.startswith("exchange:")
    ]
    # Of each of two layers, the dispatch and the combination.
    assert found == list(exchanged) * 4


def test_tokens_that_an_axis_within_cuts_further_do_not_lie_together() -> None:
    def cut_within(graph: PlannableGraph, config: ComputeConfig) -> Any:
        builder = graph.builder(mesh={"a": 2, "b": 2})
        dispatch = next(op for op in graph.ops if op.target == "dispatch")
        builder.strategy(dispatch, "a", "exchange:t.0>e")
        return builder.strategy(dispatch, "b", "split:t.0").build()

    with pytest.raises(PlanError) as caught:
        verify_experts(BY_HAND, cut_within, config_of(4))
    assert caught.value.why == (
        "the tokens that 'a' exchanges do not lie together, as 'b' cuts them further"
    )
    assert caught.value.hint == "a mesh with 'b' before 'a', or an exchange over both"


# ------------------------------------------------------------------------------------------------
# sizes that change, outputs, evaluation, accumulation

DIMS = {name: {0: "batch", 1: "seq"} for name in ("x", "y")}
SIZES = [(4, 6), (1, 2), (5, 3)]
"""The sizes compiled with, tokens for some of four ranks only, and sizes that do not divide."""


def compiled(folder: Path, name: str, policy: Any, **fields: Any) -> Path:
    """The generated files of an entry."""
    entry = expert_models.get(name)
    with float64_casts(), shared_traces(f"experts {name} {{}}"):
        return compile_into(folder, entry.build(), entry.inputs(), policy, ComputeConfig(**fields))


@pytest.mark.slow
def test_dynamic_sizes_and_every_output_in_training_and_evaluation(tmp_path: Path) -> None:
    """Calls of several sizes: the loss, the auxiliary loss and the output in training, gradients,
    and all of them again in evaluation.
    """
    entry = expert_models.get(BY_HAND)
    batches = [entry.inputs(batch=batch, seq=seq) for batch, seq in SIZES]
    fields = {"plan_ngpus": 4, "runtime_ngpus": 4, "dynamic_dims": DIMS, "outputs": "all"}
    directory = compiled(tmp_path, BY_HAND, "ep", pas_config={"ep": 2, "etp": 2}, **fields)
    manifest = Manifest.read(directory)

    def rank(_: int) -> list[tuple[Any, dict[str, Tensor], Any]]:
        module = load_class(directory)()
        optimizer = build_optimizer(module, torch.optim.SGD, lr=0.0)
        found = []
        for batch in batches:
            optimizer.zero_grad()
            result = module.train()(**batch)
            result["loss"].backward()
            optimizer.sync_shard_grad()
            gradients = {name: p.grad.clone() for name, p in module.named_parameters()}
            with torch.no_grad():
                found.append((tensors_of(result), gradients, tensors_of(module.eval()(**batch))))
        return found

    with float64_casts():
        ranks = run_ranks(4, rank)
        for index, batch in enumerate(batches):
            model = entry.build()
            expected = model(**batch)
            expected["loss"].backward()
            for number, results in enumerate(ranks):
                result, gradients, evaluated = results[index]
                wanted = {name: tensor.detach() for name, tensor in expected.items()}
                for outcome in (result, evaluated):
                    assert_close_tree({k: v.detach() for k, v in outcome.items()}, wanted)
                pieces = {
                    name: local_piece(
                        p.grad,
                        manifest.tensors[name].layout,
                        manifest.mesh,
                        manifest.mesh.coords(number),
                    )
                    for name, p in model.named_parameters()
                    if p.grad is not None
                }
                assert_close_tree(gradients, pieces)


@pytest.mark.parametrize(
    ("name", "policy", "options"),
    [
        ("qwen3_moe", "ep", {}),
        pytest.param("mixtral", "tp", {"ep": 2}, marks=slow),
        pytest.param("gpt_oss", "ep", {"ep": 1, "etp": 2}, marks=slow),
        pytest.param("ernie4_5_moe", "ep", {}, marks=slow),
    ],
)
def test_auxiliary_losses_and_router_logits_of_a_family(
    name: str, policy: str, options: dict[str, int], tmp_path: Path
) -> None:
    """The auxiliary loss is over the tokens of the whole batch, wherever they lie."""
    entry = expert_models.get(name)
    config = ComputeConfig(plan_ngpus=2, runtime_ngpus=2, outputs="all", pas_config=options)
    with float64_casts():
        model, inputs = entry.build(), entry.inputs()
        directory = compile_into(tmp_path, model, inputs, policy, config)
        found = train_plan(directory, config, [[inputs]], 1, adamw, True)
        wanted = reference_run(model, [inputs], steps=1)
    (result,), (expected,) = found.outputs, wanted.outputs
    assert expected["aux_loss"] > 0.1 and "router_logits[1]" in expected
    assert_close_tree({k: v.detach() for k, v in tensors_of(result).items()}, expected)


@pytest.mark.parametrize("zero", [1, pytest.param(0, marks=slow), pytest.param(3, marks=slow)])
def test_accumulation_without_sync(zero: int, tmp_path: Path) -> None:
    """Three batches on each of two units, of which the last alone synchronises."""
    entry = expert_models.get(BY_HAND)
    fields = {"plan_ngpus": 2, "runtime_ngpus": 4, "use_zero": zero}
    directory = compiled(tmp_path, BY_HAND, "ep", **fields)
    batches = [[entry.inputs(seed=10 * unit + k) for k in range(3)] for unit in range(2)]

    def rank(_: int) -> list[Any]:
        module = load_class(directory)()
        optimizer = build_optimizer(module, adamw)
        *others, last = batches[module.ranks.unit]
        for batch in others:
            with optimizer.no_sync():
                module(**batch)["loss"].backward()
        module(**last)["loss"].backward()
        optimizer.step()
        return [module.state_dict()]

    with float64_casts():
        found = run_ranks(4, rank)
        wanted = reference_run(entry.build(), batches, steps=1)
        merged, _ = merge_state_dicts([one for (one,) in found])
    assert_close_tree(merged, wanted.parameters | wanted.buffers)


# ------------------------------------------------------------------------------------------------
# low precision


class Cast(nn.Module):
    """A model as a training script in mixed precision runs it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x, y)


def errors(
    out: Tensor, gradients: Mapping[str, Tensor | None], exact: Reference
) -> tuple[float, float]:
    """The 2-norms of what differs in the output, and in all gradients together."""
    each = [
        (found.double() - expected).norm()
        for name, found in gradients.items()
        if found is not None
        and (expected := exact.gradients[name.removeprefix("inner.")]) is not None
    ]
    assert len(each) == len(exact.gradients)
    error = (out.detach().double() - exact.outputs[0]["out"]).norm()
    return error.item(), torch.stack(each).norm().item()


@pytest.mark.parametrize("kind", [pytest.param("parameters", marks=slow), "autocast"])
@pytest.mark.parametrize(
    ("policy", "options"),
    [("ep", {"ep": 2, "etp": 2}), pytest.param("tp", {"ep": 2, "etp": 2}, marks=slow)],
)
def test_low_precision_is_as_near_as_on_one_device(
    kind: str, policy: str, options: dict[str, int], tmp_path: Path
) -> None:
    """Products are in bfloat16, the scores of the router in float32. The error is at most twice
    that of the module itself, which runs a loop over experts.
    """
    entry = expert_models.get(BY_HAND)
    plain, inputs = entry.build(), entry.inputs()
    dtype = torch.bfloat16 if kind == "parameters" else torch.float32
    with float64_casts():
        given = {name: x.to(dtype).double() for name, x in inputs.items()}
        exact = reference_run(entry.build().to(dtype).double(), [given], steps=1)
    for layer in plain.layers:
        layer.experts.config._experts_implementation = "eager"
    model = plain.to(dtype) if kind == "parameters" else Cast(plain.float())
    given = {name: x.to(dtype) for name, x in inputs.items()}
    config = ComputeConfig(plan_ngpus=4, runtime_ngpus=4, pas_config=options, outputs="all")
    directory = compile_into(tmp_path, model, given, policy, config)
    ours = train_plan(directory, config, [[given]], 1, adamw, True)
    result = model(**given)
    result["loss"].backward()
    (made,) = ours.outputs
    assert {k: v.dtype for k, v in made.items()} == {k: v.dtype for k, v in result.items()}
    found = errors(made["out"], ours.gradients, exact)
    alone = errors(result["out"], {n: p.grad for n, p in model.named_parameters()}, exact)
    assert alone[1] > 1e-4, "nothing was computed in bfloat16"
    assert found[0] <= 2 * alone[0] and found[1] <= 2 * alone[1], (found, alone)


# ------------------------------------------------------------------------------------------------
# random plans

MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}]


@functools.cache
def prepared() -> tuple[nn.Module, Any, Any, Reference]:
    """The layer by hand with one mixture, its inputs, its graph, and what one device computes."""
    entry = expert_models.get(BY_HAND)
    model, inputs = entry.build(num_layers=1), entry.inputs()
    reference = plans.reference_run(model, [inputs], steps=1)
    return model, inputs, plans.annotated(plans.traced(model, inputs)), reference


def random_plan(graph: PlannableGraph, mesh: Mesh, rng: random.Random) -> Plan:
    """A random strategy for every operator and a random storage for every parameter. Along an axis
    all operators from dispatch to combine have the same cut of rows, as these cannot be converted.
    """
    plan = plans.random_plan(graph, mesh, rng)
    strategies = dict(plan.strategies)
    rows = [op for op in graph.ops if op.rule is not None and op.rule.densities is not None]
    by_op: dict[str, dict[str, str]] = {op.name: {} for op in rows}
    for axis in mesh.names:
        inside = rng.choice(["tokens", "experts", "exchange", "experts", "exchange", "whole"])
        for op in rows:
            by_op[op.name][axis] = _inside(op, inside, rng)
    for op in rows:
        assert op.rule is not None
        if not allowed(op.rule, by_op[op.name], mesh):
            return random_plan(graph, mesh, rng)
    return replace(plan, strategies={**strategies, **by_op})


def _inside(op: IROp, inside: str, rng: random.Random) -> str:
    """The strategy of an operator on rows, along an axis that cuts them in one way."""
    assert op.rule is not None and op.rule.densities is not None
    if inside == "exchange":
        # Of dispatch and combine each may do it, or find tokens whole.
        if op.rule.exchanges and rng.random() < 0.7:
            return exchange_strategy(rng.choice(op.rule.exchanges).pair)
        inside = "experts"
    side = op.rule.results if op.target != "combine" else op.rule.operands
    # [experts, tokens of two dims], in one dim of a tensor or in two.
    experts, *tokens = [ref.factor for dim in side[0][:1] for ref in dim]
    if inside == "whole":
        return "R"
    return f"split:{experts if inside == 'experts' else tokens[0]}"


@pytest.mark.parametrize(
    "seeds", [range(5, 7), pytest.param(range(7, 19), marks=slow)], ids=["few", "more"]
)
def test_random_plans(seeds: range, tmp_path: Path) -> None:
    """Any strategies outside, any way to run experts inside, any storage: one device's numbers."""
    model, inputs, graph, reference = prepared()
    seen: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(f"experts {seed}")
        mesh = Mesh.of(rng.choice(MESHES))
        plan = random_plan(graph, mesh, rng)
        dispatches = (s for name, s in plan.strategies.items() if name.endswith("experts_rows"))
        seen.update(strategy for s in dispatches for strategy in s.values())
        try:
            compiled_plan = plans.compile_plan(graph, plan)
            plans.check(model, inputs, compiled_plan, tmp_path / str(seed), reference)
        except Exception as error:
            raise AssertionError(f"random plan on {mesh}, seed {seed}") from error
    assert len(seeds) < 12 or {"split:e", "split:t.0", "exchange:t.0>e"} <= seen.keys()


@pytest.mark.parametrize("policy", spread(["tp", "data"], 2))
def test_a_single_expert_is_split_like_a_plain_layer(policy: str) -> None:
    """Its dim has one element, so that the rule has no factor for it."""
    sizes = {"num_experts": 1, "top_k": 1, "num_layers": 1}
    report = verify_experts(BY_HAND, policy, {"plan_ngpus": 2, "runtime_ngpus": 2}, sizes=sizes)
    assert report.ok, str(report)
