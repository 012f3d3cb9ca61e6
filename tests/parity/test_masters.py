"""Low-precision parameters with float32 masters, under every kind of plan: error, gradients, and
what is held.
"""

import copy
from typing import Any

import pytest
import torch
from covers import spread
from low_precision import (
    STEPS,
    Case,
    adamw,
    compiled,
    eager,
    error,
    exact,
    merged_masters,
    model_of,
    train,
)
from torch import Tensor, nn

import shardwright
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import count_communication
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.training.parallel_optimizer import ParallelOptimizer
from shardwright.runtime.zero.gathering import gathered_gradients
from shardwright.runtime.zero.remainders import is_rounded

REMAINDERS = {"distributed_optimizer": {"store_param_remainders": True}}
QUICK = [
    Case("gpt2", "dp", 1, 2),
    Case("llama", "data", 2, 2, {"use_zero": 3}),
    Case("gpt2", "pp", 2, 1, {"use_zero": 3, **REMAINDERS}),
    Case("llama", "tp", 2, 2, {"use_zero": 2, **REMAINDERS}),
    Case("llama", "cp", 3, 2, {"use_zero": 2, "pas_config": {"cp_mode": "ring"}}),
]
MODELS = ("gpt2", "llama")
DATA_PARALLEL = (("dp", 1, 2), ("dp", 1, 4), ("data", 2, 2))
PLANS = (
    *DATA_PARALLEL,
    ("tp", 2, 2),
    ("tp", 4, 1),
    ("pp", 2, 2),
    ("hybrid", 4, 1),
    ("hybrid", 4, 2),
)
REST = [
    case
    for number, (policy, plan_ngpus, units) in enumerate(PLANS)
    for stage in range(4)
    if (case := Case(MODELS[(number + stage) % 2], policy, plan_ngpus, units, {"use_zero": stage}))
    not in QUICK
]
REST += [
    Case("llama", policy, plan, units, {"use_zero": n % 4, **REMAINDERS})
    for n, (policy, plan, units) in enumerate(PLANS)
]
REST += [
    Case("gpt2", "cp", 2, 2, {"use_zero": 3, "pas_config": {"cp_mode": "ring"}}),
    Case("llama", "cp", 2, 1, {"pas_config": {"cp_mode": "ulysses"}}),
]
HALF = [
    Case("gpt2", "dp", 1, 2, {}, torch.float16),
    Case("llama", "tp", 2, 2, {"use_zero": 1}, torch.float16),
    Case("gpt2", "data", 2, 2, {"use_zero": 3}, torch.float16),
    Case("gpt2", "cp", 2, 2, {"use_zero": 1, "pas_config": {"cp_mode": "ring"}}, torch.float16),
]


@pytest.mark.parametrize(
    "case",
    spread(
        [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in [*REST, *HALF])],
        2,
        first=1,
        whole=True,
    ),
    ids=str,
)
def test_the_error_is_that_of_one_device(case: Case) -> None:
    """The error is at most twice that of eager training with masters on one device, both against
    float64, in the same norm.
    """
    reference = exact(case)
    ranks = train(case, compiled(case))
    module, optimizer = shardwright.merge_state_dicts(
        [rank.module for rank in ranks], [rank.optimizer for rank in ranks]
    )
    masters = merged_masters(case.name, module, optimizer)
    start = {name: p.detach() for name, p in model_of(case.name, case.dtype).named_parameters()}
    ours, theirs = error(masters, reference), error(eager(case), reference)
    assert ours <= 2 * theirs, f"{ours:.3g} and {theirs:.3g}"
    assert theirs < 0.1 * error(start, reference), "training went further than the errors"
    for name, master in masters.items():
        assert master.dtype == torch.float32 and is_rounded(master, module[name]).all()


# ------------------------------------------------------------------------------------------------
# gradients


class Net(nn.Module):
    """Its weights are fixed: threads share the global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().sum()


def batch(number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).bfloat16()


def net_files(tmp_path: Any, policy: str, plan_ngpus: int, units: int, **options: Any) -> Any:
    options = {"distributed_optimizer": {"overlap_grad_sync": False}, **options}
    config = {"plan_ngpus": plan_ngpus, "runtime_ngpus": plan_ngpus * units, **options}
    shardwright.parallelize(
        Net(), {"x": batch(0)}, policy, config, gen_savedir=tmp_path, load_module=False
    )
    (manifest,) = tmp_path.rglob("manifest.json")
    return manifest.parent


def sums(batches: list[Tensor]) -> dict[str, Tensor]:
    """The float32 sums of the bfloat16 gradients of every batch: exact, as these have few bits."""
    totals: dict[str, Tensor] = {}
    for x in batches:
        model = Net()
        model(x).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            totals[name] = totals.get(name, 0.0) + p.grad.double()
    return {name: total.float() for name, total in totals.items()}


@pytest.mark.parametrize("train", ["no_sync", "train_step"])
@pytest.mark.parametrize("stage", spread([0, 1, 2, 3], 2, first=1))
def test_gradients_are_added_up_and_reduced_in_float32(
    tmp_path: Any, stage: int, train: str
) -> None:
    """Over units and over accumulation: the sums have bits that bfloat16 has not."""
    directory = net_files(tmp_path, "dp", 1, 2, use_zero=stage, use_end2end=train == "train_step")

    def on_rank(rank: int) -> tuple[dict[str, Tensor], float]:
        module = load_class(directory)()
        optimizer = build_optimizer(module, adamw)
        batches = [batch(10 * rank + number) for number in range(3)]
        with count_communication() as volume:
            if train == "train_step":
                module.train_step(batches)
            else:
                for x in batches[:-1]:
                    with optimizer.no_sync():
                        module(x).backward()
                module(batches[-1]).backward()
                optimizer.sync_shard_grad()
        found = gathered_gradients(optimizer._reducer.buckets)
        reduced = [
            volume.total(kind, phase="gradients") for kind in ("all_reduce", "reduce_scatter")
        ]
        reduced.append(volume.total("reduce_scatter", phase="backward"))
        width = sum(total.num_bytes for total in reduced) / sum(total.elements for total in reduced)
        return {
            name: gradient.clone() for name, gradient in found.items() if gradient is not None
        }, width

    expected = sums([batch(10 * rank + number) for rank in range(2) for number in range(3)])
    results = run_ranks(2, on_rank)
    assert not all(torch.equal(total, total.bfloat16().float()) for total in expected.values())
    for rank, (found, width) in enumerate(results):
        assert width == 4 and found.keys() == expected.keys()
        for name, gradient in found.items():
            whole = expected[name]
            if stage == 3 and whole.ndim == 2:
                whole = whole.chunk(2)[rank]
            assert gradient.dtype == torch.float32 and torch.equal(gradient, whole), name


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_of_microbatches_are_added_up_in_float32(tmp_path: Any, stage: int) -> None:
    stages = {"use_end2end": True, "pas_config": {"num_stages": 2, "num_microbatches": 3}}
    directory = net_files(tmp_path, "pp", 2, 2, use_zero=stage, **stages)

    def on_rank(rank: int) -> dict[str, Tensor]:
        module = load_class(directory)()
        optimizer = build_optimizer(module, adamw)
        module.train_step([batch(10 * module.ranks.unit + number) for number in range(3)])
        found = gathered_gradients(optimizer._reducer.buckets)
        return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}

    expected = sums([batch(10 * unit + number) for unit in range(2) for number in range(3)])
    results = run_ranks(4, on_rank)
    assert {name for found in results[:2] for name in found} == expected.keys()
    for found in results:
        assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_stay_as_they_are_if_that_is_asked_for(tmp_path: Any, stage: int) -> None:
    table = {"grad_sync_dtype": "bf16", "contiguous_grad_buffer": stage != 1}
    directory = net_files(tmp_path, "dp", 1, 2, use_zero=stage, distributed_optimizer=table)

    def on_rank(rank: int) -> list[float]:
        module = load_class(directory)()
        optimizer = build_optimizer(module, adamw)
        with count_communication() as volume:
            module(batch(rank)).backward()
            optimizer.sync_shard_grad()
        totals = [total for key, total in volume.items() if key.phase in ("backward", "gradients")]
        assert {shard.tensor.grad.dtype for shard in optimizer.shards if shard.num_elements} == {
            torch.float32
        }
        return [total.num_bytes / total.elements for total in totals]

    for widths in run_ranks(2, on_rank):
        assert set(widths) == {2}


# ------------------------------------------------------------------------------------------------
# what is held


def state_bytes(module: nn.Module, optimizer: ParallelOptimizer) -> dict[str, int]:
    """What a rank keeps between steps, by kind. Single numbers, such as counts of steps, are left
    out.
    """
    moments = [
        x
        for state in optimizer.state.values()
        for x in state.values()
        if isinstance(x, Tensor) and x.ndim
    ]
    masters = [shard for shard in optimizer.shards if not shard.is_view]
    copies = [shard.tensor if shard.remainder is None else shard.remainder.low for shard in masters]
    return {
        "parameters": sum(p.nbytes for p in module.parameters()),
        "moments": sum(x.nbytes for x in moments),
        "masters": sum(x.untyped_storage().nbytes() for x in copies),
    }


@pytest.mark.parametrize(
    ("stage", "remainders"),
    spread([(0, False), (1, False), (2, True), (3, False), (0, True), (3, True)], 2, first=1),
)
def test_bytes_of_state(stage: int, remainders: bool) -> None:
    case = Case(
        "gpt2",
        "dp",
        1,
        4,
        {"use_zero": stage, "distributed_optimizer": {"store_param_remainders": remainders}},
    )
    ranks = train(case, compiled(case), state_bytes, steps=1)
    parameters = list(model_of("gpt2", torch.bfloat16).parameters())
    elements = sum(p.numel() for p in parameters)
    kept = elements if stage == 0 else elements / 4
    slack = 0.0 if stage == 0 else 0.02 * elements  # the end of the last bucket
    if stage == 3:
        vectors = sum(p.numel() for p in parameters if p.ndim == 1)
        kept, slack = (elements - vectors) / 4 + vectors, 0.0
    for rank in ranks:
        assert rank.seen["parameters"] == 2 * (kept if stage == 3 else elements)
        assert abs(rank.seen["moments"] - 8 * kept) <= 8 * slack
        assert rank.seen["masters"] * (4 if remainders else 2) == rank.seen["moments"]


def test_masters_of_a_part_that_was_not_compiled() -> None:
    """``build_optimizer`` alone, told what to do by ``compute_config``: each rank keeps the masters
    of all it has.
    """
    config = {"plan_ngpus": 1, "runtime_ngpus": 2, "use_zero": 0, "distributed_optimizer": {}}
    models = [Net() for _ in range(2)]

    def on_rank(rank: int) -> list[Tensor]:
        optimizer = build_optimizer(models[rank], adamw, config)
        for step in range(STEPS):
            optimizer.zero_grad()
            models[rank](batch(2 * step + rank)).backward()
            optimizer.step()
        assert [tuple(shard.tensor.shape) for shard in optimizer.shards] != []
        assert {tuple(s.tensor.shape) for s in optimizer.shards} == {
            tuple(p.shape) for p in models[rank].parameters()
        }
        assert "param_shards" not in optimizer.param_groups[0]
        return [
            shard.tensor.detach().clone()
            for shard in sorted(optimizer.shards, key=lambda s: s.name)
        ]

    model = Net()
    masters = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
    reference = adamw(list(masters.values()))
    for step in range(STEPS):
        for name, total in zip(masters, sums_of(model, step), strict=True):
            masters[name].grad = total
        reference.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    for found in run_ranks(2, on_rank):
        for tensor, name in zip(found, sorted(masters), strict=True):
            # Roundings of float32.
            torch.testing.assert_close(tensor, masters[name].detach(), rtol=1e-6, atol=1e-7)


def sums_of(model: nn.Module, step: int) -> list[Tensor]:
    totals = []
    for rank in range(2):
        one = copy.deepcopy(model)
        one(batch(2 * step + rank)).backward()
        totals.append([p.grad.float() for p in one.parameters() if p.grad is not None])
    return [a + b for a, b in zip(*totals, strict=True)]
