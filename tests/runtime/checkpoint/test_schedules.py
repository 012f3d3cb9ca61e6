"""Schedules of learning rates with several parameter groups, resumed under other plans, against one
device.
"""

import functools
import random
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks

NUM_SAMPLES = 4
_folders = []


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(6, 4, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(6))
        self.head = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x):
        x = self.embed(x).tanh()
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x).square().mean()


def groups(name, parameter):
    """Rates that fall with depth, none of them twice in a row; no decay of vectors. On most ranks
    some are missing.
    """
    options = {} if parameter.ndim > 1 else {"weight_decay": 0.0}
    if name.startswith("layers."):
        options["lr"] = 0.02 / (1 + int(name.split(".")[1]) % 3)
    return options | ({"lr": 0.05} if name.startswith("head") else {})


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=0.1)


class Falling:
    """A factor with a state: LambdaLR saves the attributes of objects, by position of the group."""

    def __init__(self, start):
        self.start = start

    def __call__(self, step):
        return self.start / (step + 1)


SCHEDULES = {
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5)
    ),
    "objects": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, [Falling(1 + position) for position in range(len(optimizer.param_groups))]
    ),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [10 * group["lr"] for group in optimizer.param_groups], total_steps=40
    ),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, 20, eta_min=0.001
    ),
}


def sample(step, number):
    return torch.sin(torch.arange(18.0, dtype=torch.float64) * (1 + step) + number).view(3, 6)


@functools.cache
def files_of(policy, plan_ngpus, units, zero):
    folder = tempfile.TemporaryDirectory()
    _folders.append(folder)
    config = {
        "plan_ngpus": plan_ngpus,
        "runtime_ngpus": plan_ngpus * units,
        "use_end2end": True,
        "use_zero": zero,
    }
    model = Stack()
    shardwright.parallelize(
        model, {"x": sample(0, 0)}, policy, config, gen_savedir=folder.name, load_module=False
    )
    return next(path.parent for path in Path(folder.name).rglob("manifest.json"))


PLANS = [
    ("pp", 2, 1, 0), ("pp", 4, 1, 0), ("pp", 2, 2, 1), ("tp", 2, 1, 0), ("tp", 2, 2, 2),
    ("dp", 1, 2, 0), ("dp", 1, 4, 3),
    ("hybrid", 4, 1, 0), ("data", 2, 1, 0), ("dp", 1, 1, 0), ("hybrid", 4, 2, 1), ("pp", 3, 1, 0),
]  # fmt: skip


def leg(directory, plan, schedule, number):
    """Two steps under a plan from the last checkpoint on; the rates of each rank."""
    files = files_of(*plan)

    def rank(_):
        module = load_class(files)()
        optimizer = shardwright.build_optimizer(module, adamw, param_groups=groups)
        scheduler = SCHEDULES[schedule](optimizer)
        if number:
            loaded = shardwright.load_checkpoint(directory, module, optimizer, scheduler=scheduler)
            assert loaded.step == 2 * number and loaded.extra == {"leg": number}
        rates = []
        for step in (2 * number, 2 * number + 1):
            mine = range(module.ranks.unit, NUM_SAMPLES, plan[2])
            samples = [sample(step, position) for position in mine]
            dummies = max(getattr(module, "num_microbatches", 0) - len(samples), 0)
            module.train_step(
                samples + samples[:1] * dummies, [False] * len(samples) + [True] * dummies
            )
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        options = {"scheduler": scheduler, "step": 2 * number + 2, "extra": {"leg": number + 1}}
        shardwright.save_checkpoint(directory, module, optimizer, **options)
        return rates

    return run_ranks(plan[1] * plan[2], rank)


def check_tour(directory, plans, schedule):
    model = Stack()
    optimizer = shardwright.build_optimizer(model, adamw, param_groups=groups)
    scheduler = SCHEDULES[schedule](optimizer)
    for number, plan in enumerate(plans):
        expected = []
        for step in (2 * number, 2 * number + 1):
            optimizer.zero_grad()
            sum(model(sample(step, position)) for position in range(NUM_SAMPLES)).backward()
            expected.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        for rates in leg(directory, plan, schedule, number):
            assert rates == expected, plan
    whole = shardwright.read_checkpoint(directory)
    torch.testing.assert_close(dict(whole.module), model.state_dict(), rtol=1e-10, atol=1e-12)
    # The original optimizer and its schedule go on from the merged state: groups by position,
    # parameters by number.
    plain = Stack()
    names = {id(parameter): name for name, parameter in plain.named_parameters()}
    by_group = [
        [p for p in plain.parameters() if names[id(p)] in members]
        for members in optimizer.group_members
    ]
    other = adamw([{"params": members} for members in by_group])
    resumed = SCHEDULES[schedule](other)
    plain.load_state_dict(whole.module)
    other.load_state_dict(whole.optimizer)
    resumed.load_state_dict(whole.scheduler)
    assert [group["lr"] for group in other.param_groups] == [
        group["lr"] for group in optimizer.param_groups
    ]
    assert resumed.get_last_lr() == scheduler.get_last_lr()


@pytest.mark.parametrize(
    ("seed", "num_legs"),
    [(0, 2), *(pytest.param(seed, 6, marks=pytest.mark.slow) for seed in range(1, 7))],
)
def test_schedules_under_random_changes_of_the_plan(seed, num_legs, tmp_path):
    rng = random.Random(seed)
    pipelines = [plan for plan in PLANS if plan[0] in ("pp", "hybrid")]
    plans = [rng.choice(PLANS if number % 2 else pipelines) for number in range(num_legs)]
    check_tour(tmp_path, plans, list(SCHEDULES)[seed % len(SCHEDULES)])


def test_schedules_of_other_groups_are_refused(tmp_path):
    leg(tmp_path, ("dp", 1, 1, 0), "warm-up", 0)

    def load(param_groups, optimizer=True):
        model = Stack()
        built = shardwright.build_optimizer(model, adamw, param_groups=param_groups)
        scheduler = SCHEDULES["warm-up"](built)
        before = scheduler.state_dict(), [dict(group) for group in built.param_groups]
        try:
            shardwright.load_checkpoint(
                tmp_path, model, built if optimizer else None, scheduler=scheduler
            )
        finally:
            if param_groups is not groups:
                assert (
                    scheduler.state_dict(),
                    [dict(group) for group in built.param_groups],
                ) == before

    def finer(name, parameter):
        return groups(name, parameter) | ({"foreach": False} if name == "layers.0.weight" else {})

    load(groups)
    with pytest.raises(CheckpointError) as caught:
        load(finer)
    assert str(caught.value).splitlines()[0::2] == [
        f"the scheduler in {tmp_path / '000001-step-2'} is of other parameter groups",
        (
            "  try:   group the parameters as in the run that saved it, or load without "
            "scheduler= and make a new one at this step"
        ),
    ]
    with pytest.raises(CheckpointError, match=r"why:   it was saved for \d+ groups, here are 1\n"):
        load(lambda name, parameter: {}, optimizer=False)
