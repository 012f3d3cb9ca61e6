"""Bounds where sums of gradients run beside the backward, and gatherings beside the next forward:
no audit is below them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import planning
import pytest
import torch
from covers import spread
from torch import Tensor, nn

from shardwright.compiler.ir.value import IRValue
from shardwright.compiler.plan.builder import PlannableGraph
from shardwright.policies.autodist.autodist_policy import search
from shardwright.policies.autodist.candidates.lower_bounds import share_despite_overlap
from shardwright.policies.autodist.candidates.results import SearchResult
from shardwright.policies.autodist.options import AutodistOptions
from shardwright.policies.autodist.search.certificate import certificate
from shardwright.runtime.config import ComputeConfig


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64, bias=False)
        self.down = nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@functools.cache
def stack() -> PlannableGraph:
    return planning.graph_of(Stack(), {"x": torch.randn(8, 4, 16)})


def whole_weight(weight: IRValue) -> str:
    return f"[{', '.join(map(str, weight.shape))}] G(dp)"


def searched(
    num_ranks: int, bytes_per_s: float, fields: dict[str, Any], **options: Any
) -> tuple[SearchResult, str]:
    """Only the batch may be split, and weights are whole, so that every gradient is summed over
    ``dp`` and nothing is gathered.
    """
    assert stack().dims is not None
    forbid = {dim.name: ("dp",) for dim in stack().dims.classes if dim.name != "batch"}
    stored = {str(weight.fqn): whole_weight(weight) for weight in stack().parameters}
    chosen = AutodistOptions(
        mesh={"dp": 2}, forbid=forbid, stored=stored, time_limit_s=1e3, **options
    )
    config = ComputeConfig(
        plan_ngpus=num_ranks, runtime_ngpus=num_ranks, use_end2end=True, outputs="loss", **fields
    )  # fmt: skip
    machine = planning.slow_machine(num_ranks, bytes_per_s=bytes_per_s)
    found = search(stack(), config, chosen, machine)
    assert found.best is not None
    return found, str(certificate(found, found.best, machine))


def reducer(*, beside: bool) -> dict[str, Any]:
    return {"use_async_reducer": beside, "reducer_bucket_cap_mb": 0.005}


def optimizer(*, beside: bool, **fields: Any) -> dict[str, Any]:
    """Parameters are gathered during the next forward."""
    return {
        "distributed_optimizer": {
            "overlap_param_sync": beside,
            "overlap_grad_sync": False,
            "bucket_cap_mb": 0.005,
        },
        **fields,
    }


def both(*, beside: bool) -> dict[str, Any]:
    """Both under ZeRO-2, where every backward is reduced."""
    table = {"overlap_param_sync": beside, "overlap_grad_sync": beside, "bucket_cap_mb": 0.005}
    return {"distributed_optimizer": table, "use_zero": 2}


Overlap = Callable[..., dict[str, Any]]

HIDDEN = "what passes may hide of sums and gatherings beside them is taken off"


@pytest.mark.parametrize(
    ("bytes_per_s", "overlap"),
    spread(
        [
            pytest.param(rate, kind, marks=() if i == k else pytest.mark.slow)
            for i, rate in enumerate((1e3, 1e4, 1e5))
            for k, kind in enumerate((reducer, optimizer, both))
        ],
        3,
        first=2,
    ),
)
def test_one_position_hides_no_more_than_its_passes(overlap: Overlap, bytes_per_s: float) -> None:
    beside, proof = searched(2, bytes_per_s, overlap(beside=True))
    after, exact = searched(2, bytes_per_s, overlap(beside=False))
    assert beside.best is not None and after.best is not None
    assert beside.bound_s <= beside.best.step_s < after.bound_s == pytest.approx(after.best.step_s)
    assert HIDDEN in proof and HIDDEN not in exact


@pytest.mark.parametrize(
    ("overlap", "chunks"),
    spread(
        [
            (reducer, 1),
            (optimizer, 4),
            *(
                pytest.param(*case, marks=pytest.mark.slow)
                for case in ((reducer, 4), (optimizer, 1))
            ),
        ],
        2,
    ),
)
def test_a_pipeline_hides_sums_only_where_positions_have_several_stages(
    overlap: Overlap, chunks: int
) -> None:
    schedule = "1f1b" if chunks == 1 else "1f1b_interleaved"
    options: dict[str, Any] = {
        "num_microbatches": 8,
        "num_stages": 2,
        "schedule": schedule,
        "chunks": chunks,
    }
    beside, proof = searched(4, 2e2, overlap(beside=True), **options)
    after, exact = searched(4, 2e2, overlap(beside=False), **options)
    assert beside.best is not None and after.best is not None and HIDDEN not in exact
    assert beside.best.bound_s <= beside.best.step_s
    if chunks == 1 and overlap is reducer:
        assert (
            beside.best.step_s == after.best.step_s
            and beside.bound_s == after.bound_s
            and HIDDEN not in proof
        )
    elif chunks == 1:
        # Added up in another order, the same seconds may be rounded otherwise.
        assert beside.best.step_s <= (1 + 1e-12) * after.best.step_s and HIDDEN in proof
    else:
        assert beside.best.step_s < after.best.step_s and HIDDEN in proof


@pytest.mark.parametrize("zero", [0, 2])
def test_units_of_one_rank_hide_no_more_than_their_sums(zero: int) -> None:
    """These are the same in all plans: less than half of a step here."""
    machine, found = planning.slow_machine(4, bytes_per_s=1e6), {}
    for beside in (False, True):
        config = ComputeConfig(
            plan_ngpus=1, runtime_ngpus=4, use_zero=zero, outputs="loss", **reducer(beside=beside)
        )
        found[beside] = search(stack(), config, AutodistOptions(), machine)
    best, after = found[True].best, found[False].best
    assert best is not None and best.cost is not None and after is not None
    (sums_s,) = {rank.comm_s["units gradients"] for rank in best.cost.ranks}
    assert found[True].bound_s == pytest.approx(after.step_s - sums_s)
    assert after.step_s / 2 < found[True].bound_s <= best.step_s < after.step_s


def test_the_share_that_is_left() -> None:
    def config(fields: dict[str, Any]) -> ComputeConfig:
        return ComputeConfig(plan_ngpus=4, runtime_ngpus=4, **fields)

    for overlap in (reducer, optimizer):
        beside, after = (config(overlap(beside=found)) for found in (True, False))
        assert [share_despite_overlap(beside, 1, 1, count) for count in (1, 3)] == [0.5, 0.75]
        assert [share_despite_overlap(beside, 2, chunks, 8) for chunks in (1, 2)] == [
            1.0 if overlap is reducer else 0.5,
            0.5,
        ]
        assert share_despite_overlap(after, 1, 1, 1) == share_despite_overlap(after, 2, 4, 1) == 1.0
    assert share_despite_overlap(config(both(beside=True)), 1, 1, 8) == 0.5
