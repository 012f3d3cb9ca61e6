"""Pipelines of samples whose sizes vary, and of models whose evaluation runs other operators than
training.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from covers import spread
from parity import assert_close_tree
from precision import float64_casts
from torch import Tensor, nn
from traces import shared_traces

from shardwright.frontend.verification.one_device import adamw, reference_run
from shardwright.frontend.verification.trained_ranks import train_plan
from shardwright.frontend.verification.verify import compile_into
from shardwright.runtime.config import ComputeConfig
from shardwright.runtime.errors import InputError, PlanError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks

DIMS = {name: {0: "batch", 1: "seq"} for name in ("input_ids", "labels")}
SIZES = [(4, 8), (6, 5), (3, 7), (2, 3)]
"""The sizes compiled with, and others."""

PIPELINES: list[dict[str, Any]] = [
    {"policy": "pp", "plan_ngpus": 2, "runtime_ngpus": 2},
    {"policy": "hybrid", "plan_ngpus": 4, "runtime_ngpus": 8, "schedule": "zb_h1"},
    {"policy": "hybrid", "plan_ngpus": 4, "runtime_ngpus": 4, "dp": 2, "tp": 1},
    {"policy": "pp", "plan_ngpus": 2, "runtime_ngpus": 2, "schedule": "zb_v"},
]


def compiled(
    folder: Path,
    model: nn.Module,
    dummy: Mapping[str, Any],
    sizes: Mapping[str, Any],
    **settings: Any,
) -> Any:
    options = dict(sizes)
    policy, plan_ngpus, runtime_ngpus = (
        options.pop(name) for name in ("policy", "plan_ngpus", "runtime_ngpus")
    )
    config = ComputeConfig(
        plan_ngpus=plan_ngpus,
        runtime_ngpus=runtime_ngpus,
        use_end2end=True,
        pas_config=options,
        **settings,
    )
    with float64_casts():
        return compile_into(folder, model, dummy, policy, config), config


def check(
    folder: Path,
    model: nn.Module,
    samples: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, Any],
    **settings: Any,
) -> Path:
    """Train on ``samples`` (the first of them compiled with) in all units, and compare with one
    device.
    """
    directory, config = compiled(
        folder, model, samples[0], {**sizes, "num_microbatches": len(samples)}, **settings
    )
    units = [list(samples)] * (config.runtime_ngpus // config.plan_ngpus)
    reference = reference_run(model, units, adamw, 2)
    with float64_casts():
        ours = train_plan(directory, config, units, 2, adamw, model.training, reference)
    for kind in ("losses", "gradients", "parameters", "buffers"):
        assert_close_tree({kind: getattr(ours, kind)}, {kind: getattr(reference, kind)}, kind)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [PIPELINES[0], *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in PIPELINES[1:])],
    ids=lambda sizes: f"{sizes['policy']}-{sizes.get('schedule', '1f1b')}",
)
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_samples_of_several_sizes_in_one_step(
    tmp_path: Path, name: str, sizes: dict[str, Any]
) -> None:
    entry = zoo.get(name)
    samples = [entry.inputs(batch=batch, seq=seq) for batch, seq in SIZES]
    with shared_traces(name):
        check(tmp_path, entry.build(), samples, sizes, dynamic_dims=DIMS)


class Modes(nn.Module):
    """Evaluation does more than training leaves out: other operators, a weight of its own, a
    further result.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.only_in_eval = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        first = x = self.layers[0](x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        else:
            x = x - self.mean
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x))
        if self.training:
            return F.mse_loss(x, target), x
        # A skip over the stages that training does not have.
        x = F.gelu(self.only_in_eval(x)) * first
        return F.l1_loss(x, target), x, x.sum(-1)


def rows(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = {"dtype": torch.float64, "generator": generator}
    return [{name: torch.randn(4, 6, **draw) for name in ("x", "target")} for _ in range(count)]


MODES: list[dict[str, Any]] = [
    {"policy": "pp", "plan_ngpus": 2, "runtime_ngpus": 4},
    {"policy": "pp", "plan_ngpus": 3, "runtime_ngpus": 3, "schedule": "zb_h1"},
    {
        "policy": "hybrid",
        "plan_ngpus": 4,
        "runtime_ngpus": 4,
        "dp": 2,
        "tp": 1,
        "schedule": "1f1b_interleaved",
        "chunks": 2,
    },
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "sizes",
    spread(MODES, 2),
    ids=lambda sizes: f"{sizes['plan_ngpus']}-{sizes.get('schedule', '1f1b')}",
)
def test_a_step_does_what_the_model_does_in_its_mode(
    tmp_path: Path, sizes: dict[str, Any], training: bool
) -> None:
    model = Modes().double().train(training)
    with shared_traces("modes"):
        check(tmp_path, model, rows(4), sizes)


@pytest.mark.parametrize(
    "sizes",
    spread(MODES, 2),
    ids=lambda sizes: f"{sizes['plan_ngpus']}-{sizes.get('schedule', '1f1b')}",
)
def test_inference_between_steps_of_training(tmp_path: Path, sizes: dict[str, Any]) -> None:
    model, samples = Modes().double(), rows(4)
    with shared_traces("modes"):
        directory, config = compiled(tmp_path, model, samples[0], {**sizes, "num_microbatches": 4})

    def on_rank(_: int) -> list[Any]:
        module = load_class(directory)()
        module.train_step(samples)
        evaluated = module.eval().infer_step(samples)
        module.train().train_step(samples)
        return [evaluated, module.eval().infer_step(samples), module.train().infer_step(samples)]

    expected, alone = [], copy.deepcopy(model)
    for training in (False, False, True):
        with torch.no_grad():
            for sample in samples if len(expected) < 2 else ():
                alone.train()(**sample)
            expected.append([alone.train(training)(**sample) for sample in samples])
    for results in run_ranks(config.runtime_ngpus, on_rank):
        for mine, wanted in zip(results, expected, strict=True):
            assert_close_tree(mine, wanted)


def test_a_buffer_that_changes_has_one_home(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            x = self.norm(self.inner(self.norm(x)))
            return (F.mse_loss(x, target),)

    sizes = {"policy": "pp", "plan_ngpus": 2, "runtime_ngpus": 2, "stage_starts": ("inner",)}
    with pytest.raises(PlanError) as error:
        compiled(tmp_path, Twice().double(), rows(1)[0], sizes)
    assert str(error.value) == (
        "buffer norm.running_mean is updated in stage 1 and used in stages 0, 1\n"
        "  why:   stages run several microbatches at a time, so that no stage would see the "
        "values in their order\n"
        "  try:   begin the stages where all uses of the module are in one"
    )


class Norms(nn.Module):
    """Averages over all samples so far, which a batch norm without momentum keeps with the number
    of these.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pair = (nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None))
        self.layers = nn.ModuleList(
            nn.Sequential(*(copy.deepcopy(part) for part in pair)) for _ in range(3)
        )

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (F.mse_loss(x, target),)


class ByHand(nn.Module):
    """An average that is read before and after it is updated, in evaluation in other places; and a
    buffer that is set to what needs no input.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.zeros(6))

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x)))) - self.mean
        x = torch.tanh(self.layers[2](x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = torch.tanh(self.layers[4](torch.tanh(self.layers[3](x)))) * (1 + self.scale)
        self.scale.copy_(torch.full((6,), 0.5, dtype=x.dtype))
        return (F.mse_loss(x + self.mean, target),)


@pytest.mark.parametrize(
    ("model", "policy"),
    spread(
        [
            (Norms, "pp"),
            (ByHand, "pp"),
            (ByHand, "autodist"),
            pytest.param(Norms, "autodist", marks=pytest.mark.slow),
        ],
        3,
    ),
)
def test_buffers_that_change_are_no_obstacle(
    tmp_path: Path, model: type[nn.Module], policy: str
) -> None:
    """Stages begin where all uses of one are in one stage."""
    sizes: dict[str, Any] = {"policy": policy, "plan_ngpus": 2, "runtime_ngpus": 2}
    sizes |= {"num_stages": 2, "time_limit_s": 3600.0} if policy == "autodist" else {}
    for training in (True, False):
        with shared_traces(model.__name__):
            check(tmp_path / str(training), model().double().train(training), rows(4), sizes)


def test_ranks_must_agree_on_sizes(tmp_path: Path) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            x = self.second(torch.tanh(self.first(x)))
            return (F.mse_loss(x, target), x)

    sizes = {
        "policy": "pp",
        "plan_ngpus": 2,
        "runtime_ngpus": 2,
        "num_microbatches": 2,
        "stage_starts": ("second",),
    }
    dims = {"x": {0: "batch"}, "target": {0: "batch"}}
    directory, _ = compiled(tmp_path, Rows().double(), rows(1)[0], sizes, dynamic_dims=dims)

    def on_rank(rank: int) -> None:
        module = load_class(directory)()
        module.infer_step(rows(2))  # the first step compares values, later ones do not
        module.infer_step([rows(1)[0], {name: x[: 3 - rank] for name, x in rows(1)[0].items()}])

    with pytest.raises(InputError) as error:
        run_ranks(2, on_rank)
    assert str(error.value) == (
        "Rows.infer_step: batch of sample 1 differs between the ranks of a unit\n"
        "  why:   it is 2 on rank 1 and 3 on rank 0\n"
        "  try:   give the 2 ranks of a unit the same samples"
    )


@pytest.mark.slow
def test_an_output_left_sharded_stays_on_its_stage(tmp_path: Path) -> None:
    entry = zoo.get("gpt2")
    sizes = {"policy": "hybrid", "plan_ngpus": 4, "runtime_ngpus": 4, "num_microbatches": 2}
    samples = [entry.inputs(batch=2, seq=seq) for seq in (6, 4)]
    outputs = {"logits": "sharded"}
    directory, _ = compiled(
        tmp_path, entry.build(), samples[0], sizes, outputs=outputs, dynamic_dims=DIMS
    )
    with float64_casts():
        expected = [entry.build()(**sample) for sample in samples]
        found = run_ranks(4, lambda rank: load_class(directory)().infer_step(samples))
    for number, wanted in enumerate(expected):
        for rank, results in enumerate(found):
            assert_close_tree(results[number].loss, wanted.loss.detach())
            assert (results[number].logits is None) == (rank < 2)
        pieces = [results[number].logits for results in found[2:]]
        assert_close_tree(torch.cat(pieces, -1), wanted.logits.detach())
