"""Parameter groups are the same on all ranks: one number, one order, equal options; empty ones
too.
"""

import inspect

import pytest
import torch
from torch import nn

import shardwright
from shardwright.runtime.errors import ConfigError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().sum()


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """Files for two ranks, of which each has two of the layers."""
    directory = tmp_path_factory.mktemp("pipeline")
    config = {"plan_ngpus": 2, "runtime_ngpus": 2, "use_end2end": True}
    x = torch.ones(2, 4, dtype=torch.float64)
    shardwright.parallelize(
        Stack(), {"x": x}, "pp", config, gen_savedir=directory, load_module=False
    )
    (manifest,) = directory.rglob("manifest.json")
    return manifest.parent


def on_ranks(files, param_groups=None, optimizer=torch.optim.AdamW):
    return run_ranks(
        2,
        lambda rank: shardwright.build_optimizer(
            load_class(files)(), optimizer, param_groups=param_groups
        ),
    )


RATES = {
    "layers.1.weight": 0.1,
    "layers.2.bias": 0.2,
    "layers.3.weight": 0.1,
    "layers.0.weight": 0.3,
}


def by_name(name, parameter):
    return {"lr": RATES[name]} if name in RATES else {}


def test_groups_stand_in_the_order_of_the_original_model(pipeline):
    original = shardwright.build_optimizer(Stack(), torch.optim.AdamW, param_groups=by_name)
    expected = [(group["lr"], group["param_names"]) for group in original.param_groups]
    assert [rate for rate, _ in expected] == [0.3, 1e-3, 0.1, 0.2]
    first, second = on_ranks(pipeline, by_name)
    for optimizer in (first, second):
        assert [group["lr"] for group in optimizer.param_groups] == [rate for rate, _ in expected]
        assert [list(names) for names in optimizer.group_members] == [
            names for _, names in expected
        ]
    assert any(
        not group["params"] for optimizer in (first, second) for group in optimizer.param_groups
    )
    for position, (_, names) in enumerate(expected):
        here, there = (
            optimizer.param_groups[position]["param_names"] for optimizer in (first, second)
        )
        assert [*here, *(name for name in there if name not in here)] == names


def test_rates_that_are_tensors_and_options_that_are_objects(pipeline):
    class Own(torch.optim.SGD):
        pass

    def tensors(name, parameter):
        return {"lr": torch.tensor(0.5 if "layers.3" in name else 0.25)}

    for optimizer in on_ranks(pipeline, tensors, Own):
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.5]
    note = object()
    for optimizer in on_ranks(pipeline, lambda name, parameter: {"note": note}, Own):
        assert [group["note"] for group in optimizer.param_groups] == [note]
    with pytest.raises(ConfigError) as caught:
        on_ranks(
            pipeline, lambda name, parameter: {"note": note} if "layers.3" in name else {}, Own
        )
    assert str(caught.value).splitlines()[:3] == [
        (
            "param_groups gives parameters of another rank an option 'note' that this rank "
            "cannot be told"
        ),
        "  why:   it is a object, and all ranks have all groups",
        (
            "  try:   give groups plain values: numbers, strings, lists, tuples, dicts, or "
            "tensors of one element"
        ),
    ]


def test_functions_that_make_other_groups_on_some_ranks_are_refused(pipeline):
    def by_rank(options):
        current = shardwright.runtime.ranks.world.current_world
        return lambda params: torch.optim.SGD(options(current().rank, list(params)), lr=0.1)

    with pytest.raises(ConfigError) as caught:
        on_ranks(
            pipeline,
            optimizer=by_rank(lambda rank, ps: [{"params": ps}, {"params": []}][: 2 - rank]),
        )
    assert str(caught.value).splitlines()[:3] == [
        "optimizer_fn makes another number of parameter groups on some ranks",
        "  why:   rank 0 has 2, rank 1 has 1",
        "  try:   call build_optimizer with the same options on all ranks; with "
        "param_groups=fn(fqn, parameter) -> options, "
        "ranks agree on the groups that it makes",
    ]
    with pytest.raises(ConfigError) as caught:
        on_ranks(
            pipeline, optimizer=by_rank(lambda rank, ps: [{"params": ps, "lr": 0.1 * (rank + 1)}])
        )
    assert str(caught.value).splitlines()[:2] == [
        "optimizer_fn makes group 0 with other options on some ranks",
        "  why:   lr=0.1 on rank 0, lr=0.2 on rank 1",
    ]


def test_one_parameter_in_two_groups_is_refused():
    """This happens where ranks hold pieces of other sizes, and the function looks at sizes."""

    def rank(number):
        shardwright.build_optimizer(
            nn.Linear(2, 2), torch.optim.SGD, param_groups=lambda name, p: {"lr": 0.1 + number}
        )

    with pytest.raises(ConfigError) as caught:
        run_ranks(2, rank)
    assert str(caught.value).splitlines()[:3] == [
        "parameter 'weight' is in different groups on different ranks",
        "  why:   lr=0.1 and lr=1.1",
        (
            "  try:   decide by the name or the number of dims: ranks hold pieces, whose sizes "
            "may differ"
        ),
    ]


CLASSES = [
    cls
    for cls in vars(torch.optim).values()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
]
# LBFGS takes one group.
OPTIMIZERS = [cls for cls in CLASSES if cls not in (torch.optim.Optimizer, torch.optim.LBFGS)]


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_optimizers_and_schedulers_of_torch_take_empty_groups(cls):
    accepted = inspect.signature(cls).parameters
    for options in ({}, {"foreach": True}, {"fused": True}, {"capturable": False}):
        if not options.keys() <= accepted.keys():
            continue
        parameter = nn.Parameter(torch.ones(2, 2))
        optimizer = cls(
            [{"params": []}, {"params": [parameter], "lr": 0.2}, {"params": []}], lr=0.1, **options
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        others = [
            torch.optim.lr_scheduler.StepLR(optimizer, 1),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        ]
        for _ in range(2):
            sparse = cls is torch.optim.SparseAdam
            parameter.grad = torch.ones(2, 2).to_sparse() if sparse else torch.ones(2, 2)
            optimizer.step()
            scheduler.step()
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates[0] == rates[2] and rates[1] == 2 * rates[0]
        optimizer.load_state_dict(optimizer.state_dict())
        for schedule in (scheduler, *others):
            schedule.load_state_dict(schedule.state_dict())
        assert not torch.equal(parameter, torch.ones(2, 2))
