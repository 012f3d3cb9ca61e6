"""Pipelines against one device that accumulates over the same microbatches: loss, gradients,
parameters after AdamW steps.

Every schedule on a tiny module, with twice as many microbatches as stages, and one more; the models
by a cover. Slow tests run more numbers of stages and microbatches, and more of both products,
tests/product/models.py and pipelines.py all.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import plans
import pytest
import torch
import torch.nn.functional as F
from covers import spread
from traces import shared_traces
from verified import verify_zoo
from watched import inputs as watched_inputs
from watched import watched

from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.schedule.published import SCHEDULES
from shardwright.frontend.verification.verify import VerifyReport, verify
from shardwright.policies.known_policies import find_policy
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import PlanError

SIZES: list[dict[str, Any]] = [
    {"policy": "pp", "plan_ngpus": 2, "runtime_ngpus": 2},
    {"policy": "hybrid", "plan_ngpus": 4, "runtime_ngpus": 4},
    {
        "policy": "pp",
        "plan_ngpus": 3,
        "runtime_ngpus": 3,
        "schedule": "gpipe",
        "num_microbatches": 2,
    },
    {"policy": "hybrid", "plan_ngpus": 4, "runtime_ngpus": 8, "schedule": "zb_h1"},
    {
        "policy": "pp",
        "plan_ngpus": 2,
        "runtime_ngpus": 4,
        "schedule": "1f1b_interleaved",
        "chunks": 2,
        "num_microbatches": 4,
    },
    {
        "policy": "hybrid",
        "plan_ngpus": 8,
        "runtime_ngpus": 8,
        "num_stages": 2,
        "dp": 2,
        "tp": 2,
        "num_microbatches": 3,
    },
    {
        "policy": "pp",
        "plan_ngpus": 2,
        "runtime_ngpus": 2,
        "schedule": "zb_v",
        "num_microbatches": 5,
    },
    {"policy": "pp", "plan_ngpus": 4, "runtime_ngpus": 4, "num_microbatches": 9},
    {"policy": "tp", "plan_ngpus": 2, "runtime_ngpus": 4},
    {"policy": "data", "plan_ngpus": 2, "runtime_ngpus": 2},
]
MODELS = ["gpt2", "llama", "t5", "vit", "resnet", "unet", "gpt2-uneven", "bert", "transformer"]


def check(verified: Callable[..., VerifyReport], sizes: dict[str, Any]) -> None:
    """``verified``: verifies some model when it is given a policy and a config."""
    options = dict(sizes)
    policy, plan_ngpus, runtime_ngpus = (
        options.pop(name) for name in ("policy", "plan_ngpus", "runtime_ngpus")
    )
    config = {
        "plan_ngpus": plan_ngpus,
        "runtime_ngpus": runtime_ngpus,
        "use_end2end": True,
        "pas_config": options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verified(policy, config)
    assert report.ok, str(report)


class Deep(torch.nn.Module):
    """Eight layers, enough for four ranks with two stages each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(8))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(x, target), x


TRAINING = [name for name, method in SCHEDULES.items() if method.trains]


def verify_deep(*args: Any) -> VerifyReport:
    with shared_traces("deep"):
        return verify(Deep(), *args)


def check_schedule(schedule: str, num_ranks: int, numbers_of_microbatches: Iterable[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = {name: torch.randn(3, 6, generator=generator) for name in ("x", "target")}
    for num_microbatches in numbers_of_microbatches:
        if SCHEDULES[schedule].whole_rounds and num_microbatches % num_ranks:
            continue
        sizes = {"policy": "pp", "plan_ngpus": num_ranks, "runtime_ngpus": num_ranks}
        check(
            partial(verify_deep, inputs),
            {**sizes, "schedule": schedule, "num_microbatches": num_microbatches},
        )


@pytest.mark.parametrize("schedule", spread(TRAINING, 2, first=1))
def test_every_schedule(schedule: str) -> None:
    check_schedule(schedule, 3, [6, 7])


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_and_number_of_microbatches(schedule: str, num_ranks: int) -> None:
    check_schedule(schedule, num_ranks, [1, 3, 4, 9])


def _cases() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(model, sizes): each model once, gpt2 twice, in all sizes; and the rest."""
    models = [*MODELS, "gpt2"]
    cover = [(name, i) for i, name in enumerate(models)]
    assert len(models) == len(SIZES)
    return cover, [
        (name, i) for name in MODELS for i in range(len(SIZES)) if (name, i) not in cover
    ]


COVER, REST = _cases()


@pytest.mark.parametrize(("name", "index"), spread(COVER, 2))
def test_models(name: str, index: int) -> None:
    check(partial(verify_zoo, name), SIZES[index])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "index"), REST[::12])
def test_models_in_the_rest_of_the_product(name: str, index: int) -> None:
    check(partial(verify_zoo, name), SIZES[index])


@pytest.mark.parametrize(
    ("rank_order", "mesh"),
    spread(
        [
            (None, "pp=2 x tp=2 x tp2=2"),
            ("tp-pp-tp2", "tp=2 x pp=2 x tp2=2"),
            ("tp-pp", "tp=4 x pp=2"),
        ],
        3,
        first=1,
    ),
)
def test_stages_whose_inner_dims_have_two_axes(rank_order: str | None, mesh: str) -> None:
    """2 groups of heads on the 4 ranks of a stage. There is one axis where the order of ranks names
    one.
    """
    sizes: dict[str, Any] = {
        "plan_ngpus": 8,
        "runtime_ngpus": 8,
        "use_end2end": True,
        "pas_config": {"num_stages": 2},
    }
    config = sizes | {"rank_order": rank_order}
    graph = plans.zoo_graph("llama")
    planned = find_policy("hybrid").apply(graph, ComputeConfig(**config))
    assert isinstance(planned, Plan) and str(planned.mesh) == mesh
    report = verify_zoo("llama", "hybrid", config)
    assert report.ok, str(report)


def test_recompute_in_a_pipeline() -> None:
    sizes = {
        "policy": "hybrid",
        "plan_ngpus": 4,
        "runtime_ngpus": 4,
        "recompute": ["transformer.h.*"],
    }
    check(partial(verify_zoo, "gpt2"), sizes)


def test_a_stage_recomputed_as_a_whole() -> None:
    check(
        partial(verify_zoo, "gpt2"),
        {"policy": "pp", "plan_ngpus": 2, "runtime_ngpus": 2, "recompute": ["stage:0"]},
    )


def test_a_schedule_by_hand() -> None:
    inputs = {name: torch.ones(3, 6) for name in ("x", "target")}
    by_hand = {"actions": ["0F0 0F1 0F2 0B2 0B0 0B1", "1F0 1F1 1F2 1B2 1I0 1I1 1W1 1W0"]}
    check(
        partial(verify_deep, inputs),
        {"policy": "pp", "plan_ngpus": 2, "runtime_ngpus": 2, **by_hand},
    )


def test_a_schedule_by_hand_that_waits_in_a_circle() -> None:
    inputs = {name: torch.ones(3, 6) for name in ("x", "target")}
    circle = {"actions": ["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"]}
    with pytest.raises(PlanError) as error:
        check(
            partial(verify_deep, inputs),
            {"policy": "pp", "plan_ngpus": 2, "runtime_ngpus": 2, **circle},
        )
    assert "0B0" in str(error.value) and "1F1" in str(error.value) and "0F1" in str(error.value)


@pytest.mark.parametrize("sizes", spread([SIZES[7], {**SIZES[4], "chunks": 4}, SIZES[1]], 2))
def test_no_stage_begins_at_what_is_not_needed(sizes: dict[str, Any]) -> None:
    """Operators of outputs that are dropped are in no stage."""

    def verified(policy: str, config: dict[str, Any]) -> VerifyReport:
        return verify(watched(), watched_inputs(), policy, {**config, "outputs": "loss"}, steps=2)

    check(verified, sizes)
