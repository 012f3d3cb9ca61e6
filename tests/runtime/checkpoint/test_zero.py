"""Checkpoints of distributed optimizers: state in flat parts, of whole parameters on their owners,
and masters.
"""

import copy

import checkpoints as c
import pytest
import torch
from covers import spread
from mlp_files import make_batch, make_model, write_files
from mlp_training import Mixed
from torch import nn
from zero_training import OPTIMIZERS

import shardwright
from shardwright.runtime.checkpoint.checkpoint_index import Index
from shardwright.runtime.checkpoint.holdings import Holdings
from shardwright.runtime.checkpoint.state_place import state_places
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.loader import load_class
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.build_optimizer import build_optimizer
from shardwright.runtime.zero.state_masters import MASTER

TOLERANCE = 1e-10
SMALL = {"reducer_bucket_cap_mb": 4e-4}
"""Buckets of a few parameters."""


class Model:
    """The hand-made model on ``dp x tp`` ranks and some units, all of which get the same batch and
    average over the units.
    """

    def __init__(self, folder, dp, tp, units=1, **options):
        self.num_ranks = dp * tp * units
        config = {
            "plan_ngpus": dp * tp,
            "runtime_ngpus": self.num_ranks,
            "grad_reduction": "mean",
            **options,
        }
        self.files = write_files(folder, make_model(), dp, tp, config)

    def trainer(self, optimizer, **options):
        module = load_class(self.files)()
        built = build_optimizer(module, OPTIMIZERS[optimizer], **options)
        return module, built, stepper(module, built)

    def on_ranks(self, fn):
        return run_ranks(self.num_ranks, fn)


def stepper(module, optimizer):
    def step(number):
        optimizer.zero_grad()
        loss = module(*make_batch(number))
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    return step


def reference(optimizer, steps):
    model = make_model()
    built = OPTIMIZERS[optimizer](model.parameters())
    step = stepper(model, built)
    for number in range(steps):
        step(number)
    return model, built


def assert_is_reference(module_state, optimizer_state, optimizer, steps):
    """What was merged is what one device has after ``steps``, and loads there."""
    model, built = reference(optimizer, steps)
    c.assert_same(dict(module_state), model.state_dict(), TOLERANCE)
    other = OPTIMIZERS[optimizer](make_model().parameters())
    other.load_state_dict(optimizer_state)
    # Torch gives some numbers the dtype of the parameters when it loads them.
    built.load_state_dict(built.state_dict())
    c.assert_same(c.optimizer_tensors(other), c.optimizer_tensors(built), TOLERANCE)


PLANS = {
    "flat": {"dp": 1, "tp": 1, "units": 4, "use_zero": 1},
    "small buckets": {"dp": 1, "tp": 2, "units": 2, "use_zero": 2, **SMALL},
    "groups": {"dp": 1, "tp": 2, "units": 4, "use_zero": 1, "zero_ngroups": 2},
    "inside a unit": {"dp": 2, "tp": 2, "use_zero": 1, **SMALL},
    "uneven": {"dp": 1, "tp": 4, "units": 2, "use_zero": 2},
    "owned in groups": {"dp": 1, "tp": 1, "units": 4, "use_zero": 2, "zero_ngroups": 2, **SMALL},
    "more ranks than some parameters have elements": {
        "dp": 1,
        "tp": 1,
        "units": 8,
        "use_zero": 1,
        **SMALL,
    },
    "table": {
        "dp": 2,
        "tp": 1,
        "units": 2,
        "use_zero": 2,
        "distributed_optimizer": {"contiguous_param_buffer": True},
    },
    "plain": {"dp": 2, "tp": 2},
    "one": {"dp": 1, "tp": 1},
}


CUT = ["small buckets", "groups", "inside a unit", "uneven"]
WHOLE = ["flat", "owned in groups", "more ranks than some parameters have elements", "table"]


SLOW = [
    (plan, name)
    for plan in WHOLE
    for name in ("muonlike", "adafactor")
    if plan != "owned in groups"
]
SLOW += [
    *((plan, "adam") for plan in ("uneven", "small buckets", *WHOLE[:3])),
    ("uneven", "muonlike"),
    ("groups", "muonlike"),
    ("inside a unit", "adafactor"),
    ("small buckets", "adafactor"),
    ("plain", "muonlike"),
]


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    spread(
        [(plan, "adam") for plan in ("groups", "inside a unit", "table")]
        + [("owned in groups", name) for name in ("muonlike", "adafactor", "adagrad")]
        + [("inside a unit", "adagrad"), ("uneven", "sgd")]
        + [("plain", "adafactor")]
        + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW],
        2,
    ),
)
def test_merged_equals_one_device(tmp_path, plan, optimizer):
    model = Model(tmp_path / "files", **PLANS[plan])

    def rank(index):
        module, built, step = model.trainer(optimizer)
        step(0), step(1)
        shardwright.save_checkpoint(tmp_path / "run", module, built, async_save=True)
        states = copy.deepcopy(
            (
                module.state_dict(),
                built.state_dict(),
                *shardwright.deduped_state_dict(module, built),
            )
        )
        losses, later = (
            [step(2), step(3)],
            copy.deepcopy((c.state_of(module), c.optimizer_tensors(built))),
        )
        for how in ("deduped", "saved"):
            fresh, other, again = model.trainer(optimizer)
            if how == "deduped":
                shardwright.load_deduped_state_dict(fresh, states[2], other, states[3])
            else:
                shardwright.load_checkpoint(tmp_path / "run", fresh, other)
            assert [again(2), again(3)] == losses
            c.assert_same(c.state_of(fresh), later[0])
            mine = state_places(built, Holdings.of(module))
            names = [name for group in built.param_groups for name in group["param_names"]]
            # A part of no elements may start its count of steps anew.
            empty = [f"{number}." for number, name in enumerate(names) if mine[name].is_empty]
            ours, theirs = (
                {key: x for key, x in found.items() if not key.startswith(tuple(empty))}
                for found in (c.optimizer_tensors(other), later[1])
            )
            c.assert_same(ours, theirs)
        return states

    results = model.on_ranks(rank)
    shardwright.merge_checkpoint(tmp_path / "run", tmp_path / "merged")
    for number in (0, 2):
        parts = [[result[number + part] for result in results] for part in (0, 1)]
        assert_is_reference(*shardwright.merge_state_dicts(*parts), optimizer, 2)
    for folder in ("run", "merged"):
        whole = shardwright.read_checkpoint(tmp_path / folder)
        assert_is_reference(whole.module, whole.optimizer, optimizer, 2)


TOURS = {
    "adamw": [
        "flat",
        "inside a unit",
        "plain",
        "groups",
        "one",
        "uneven",
        "small buckets",
        "one",
        "table",
    ],
    "muonlike": [
        "flat",
        "uneven",
        "one",
        "owned in groups",
        "plain",
        "groups",
        "table",
        "inside a unit",
        "one",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.slow), "muonlike"])
def test_a_tour_through_plans(tmp_path, optimizer):
    """Each goes on from the last one's checkpoint, in turn through files and through merged state
    dicts.
    """
    tour = TOURS[optimizer]
    for number, plan in enumerate(tour):
        model = Model(tmp_path / f"files {number}", **PLANS[plan])

        def rank(index, number=number, model=model):
            module, built, step = model.trainer(optimizer)
            if number % 3 == 2:
                whole = shardwright.read_checkpoint(tmp_path / "run")
                shardwright.load_merged_state_dicts(module, whole.module, built, whole.optimizer)
            elif number:
                shardwright.load_checkpoint(tmp_path / "run", module, built)
            step(number)
            shardwright.save_checkpoint(tmp_path / "run", module, built)

        model.on_ranks(rank)
    whole = shardwright.read_checkpoint(tmp_path / "run")
    assert_is_reference(whole.module, whole.optimizer, optimizer, len(tour))


def test_each_rank_writes_its_part_once(tmp_path):
    model = Model(tmp_path / "files", **PLANS["groups"])

    def rank(index):
        module, built, step = model.trainer("adam")
        step(0)
        shardwright.save_checkpoint(tmp_path / "run", module, built)
        states = shardwright.deduped_state_dict(module, built)
        return sum(
            x.numel() for values in states[1]["state"].values() for x in values.values() if x.ndim
        )

    kept = model.on_ranks(rank)
    (folder,) = (path for path in (tmp_path / "run").iterdir() if path.is_dir())
    index = Index.read(folder / "index.json")
    written = dict.fromkeys(range(8), 0)
    for records in index.optimizer.tensors.values():
        for record in records.values():
            for piece in record.pieces:
                written[int(piece.file[5:10])] += piece.region.num_elements
    trained = sum(p.numel() for p in make_model().parameters() if p.requires_grad)
    assert sum(written.values()) == 3 * trained and list(written.values()) == kept
    assert kept[4:] == [0] * 4, "the second group has copies"
    assert max(kept) < 3 * trained / 2
    assert not any("step" in records for records in index.optimizer.tensors.values())


def test_parameter_groups_and_a_scheduler(tmp_path):
    def groups(name, parameter):
        return {"weight_decay": 0.0} if parameter.ndim < 2 else {}

    def trainer(model):
        module, built, step = model.trainer("adamw", param_groups=groups)
        scheduler = torch.optim.lr_scheduler.StepLR(built, 1, 0.5)

        def both(number):
            loss = step(number)
            scheduler.step()
            return loss

        return module, built, scheduler, both

    model, other = (
        Model(tmp_path / "from", **PLANS["small buckets"]),
        Model(tmp_path / "to", **PLANS["flat"]),
    )

    def save(index):
        module, built, scheduler, step = trainer(model)
        step(0), step(1)
        shardwright.save_checkpoint(tmp_path / "run", module, built, scheduler=scheduler)
        return step(2), step(3), c.state_of(module), copy.deepcopy(built.state_dict())

    def load(to):
        module, built, scheduler, step = trainer(to)
        shardwright.load_checkpoint(tmp_path / "run", module, built, scheduler=scheduler)
        return step(2), step(3), c.state_of(module), copy.deepcopy(built.state_dict())

    expected = model.on_ranks(save)
    for mine, theirs in zip(model.on_ranks(lambda index: load(model)), expected, strict=True):
        assert mine[:2] == theirs[:2] and mine[3]["param_groups"] == theirs[3]["param_groups"]
        c.assert_same(mine[2], theirs[2])
    for mine in other.on_ranks(lambda index: load(other)):
        torch.testing.assert_close(mine[:2], expected[0][:2], rtol=TOLERANCE, atol=0)
        assert [group["lr"] for group in mine[3]["param_groups"]] == [0.05 / 16] * 2


def test_parameters_without_gradients_and_ordinary_parts(tmp_path):
    """Two compiled parts between ordinary layers, one of which is not used."""
    config = {"plan_ngpus": 2, "runtime_ngpus": 4, "grad_reduction": "mean", "use_zero": 2, **SMALL}
    files = write_files(tmp_path / "files", make_model(), 1, 2, config)

    def rank(index):
        module = Mixed(lambda: load_class(files)())
        built = build_optimizer(module, c.adamw)
        step = stepper(module, built)
        step(0), step(1)
        shardwright.save_checkpoint(tmp_path / "run", module, built)
        states = copy.deepcopy(
            (
                module.state_dict(),
                built.state_dict(),
                *shardwright.deduped_state_dict(module, built),
            )
        )
        step(2)
        later = c.state_of(module)
        shardwright.load_deduped_state_dict(module, states[2], built, states[3])
        step(2)
        c.assert_same(c.state_of(module), later)
        shardwright.load_checkpoint(tmp_path / "run", module, built)
        step(2)
        c.assert_same(c.state_of(module), later)
        return states

    results = run_ranks(4, rank)
    model = Mixed(make_model)
    optimizer = c.adamw(model.parameters())
    step = stepper(model, optimizer)
    step(0), step(1)
    whole = shardwright.read_checkpoint(tmp_path / "run")
    merged = [
        shardwright.merge_state_dicts(*([r[i + j] for r in results] for j in (0, 1)))
        for i in (0, 2)
    ]
    for module_state, optimizer_state in [(whole.module, whole.optimizer), *merged]:
        c.assert_same(dict(module_state), model.state_dict(), TOLERANCE)
        fresh = Mixed(make_model)
        other = c.adamw(fresh.parameters())
        other.load_state_dict(optimizer_state)
        c.assert_same(c.optimizer_tensors(other), c.optimizer_tensors(optimizer), TOLERANCE)


def low_model():
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.sin(torch.arange(p.numel(), dtype=torch.float32) + number).view(p.shape))
    return model.bfloat16()


def low_trainer(num_ranks, masters):
    config = {"plan_ngpus": 1, "runtime_ngpus": num_ranks, "grad_reduction": "mean"}
    config |= {"distributed_optimizer": {"bucket_cap_mb": 1e-4}} if masters else {}
    model = low_model()
    return model, build_optimizer(model, torch.optim.AdamW, config, lr=1e-4)


def low_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 5, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()


def test_masters(tmp_path):
    """They move between plans exactly, are left out where there are none, and are the parameters
    where none were saved.
    """

    def save(index):
        model, optimizer = low_trainer(3, masters=True)
        low_step(model, optimizer), low_step(model, optimizer)
        shardwright.save_checkpoint(tmp_path / "low", model, optimizer)
        states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        deduped = copy.deepcopy(shardwright.deduped_state_dict(model, optimizer))
        masters = [shard.tensor.detach().clone() for shard in optimizer.shards]
        fresh, other = low_trainer(3, masters=True)
        shardwright.load_deduped_state_dict(fresh, deduped[0], other, deduped[1])
        for shard, master in zip(other.shards, masters, strict=True):
            assert torch.equal(shard.tensor, master)
        return states

    states = run_ranks(3, save)
    whole = shardwright.read_checkpoint(tmp_path / "low")
    merged = shardwright.merge_state_dicts(*zip(*states, strict=True))
    names = list(low_model().state_dict())
    masters = {names[number]: master for number, master in whole.optimizer["masters"].items()}
    assert sorted(masters) == sorted(names) and all(
        master.dtype == torch.float32 for master in masters.values()
    )
    assert all(
        torch.equal(master.bfloat16(), whole.module[name]) for name, master in masters.items()
    )
    assert not all(
        torch.equal(master, whole.module[name].float()) for name, master in masters.items()
    )
    c.assert_same(merged[1]["masters"], whole.optimizer["masters"])
    torch.optim.AdamW(low_model().parameters()).load_state_dict(whole.optimizer)

    wide = low_model().float()
    shardwright.load_checkpoint(tmp_path / "low", wide)
    c.assert_same(wide.state_dict(), masters)

    def load(index, how, num_ranks=2):
        model, optimizer = low_trainer(num_ranks, masters=True)
        if how == "merged":
            shardwright.load_merged_state_dicts(model, whole.module, optimizer, whole.optimizer)
        else:
            shardwright.load_checkpoint(tmp_path / how, model, optimizer)
        for shard in optimizer.shards:
            expected = masters[shard.name] if how != "plain" else whole.module[shard.name].float()
            assert torch.equal(shard.tensor, expected.view(-1)[shard.start : shard.stop])

    def pass_on(index):
        model, optimizer = low_trainer(2, masters=False)
        shardwright.load_checkpoint(tmp_path / "low", model, optimizer)
        c.assert_same(model.state_dict(), whole.module)
        assert not any(MASTER in state for state in optimizer.state_dict()["state"].values())
        shardwright.save_checkpoint(tmp_path / "plain", model, optimizer)

    run_ranks(2, pass_on)
    for how in ("low", "merged", "plain"):
        run_ranks(2, lambda index, how=how: load(index, how))


def test_missing_ranks(tmp_path):
    model = Model(tmp_path / "files", **PLANS["flat"])

    def rank(index):
        module, built, step = model.trainer("sgd")
        step(0)
        return copy.deepcopy(
            (
                module.state_dict(),
                built.state_dict(),
                *shardwright.deduped_state_dict(module, built),
            )
        )

    results = model.on_ranks(rank)
    with pytest.raises(CheckpointError) as error:
        shardwright.merge_state_dicts([r[0] for r in results[1:]], [r[1] for r in results[1:]])
    text = str(error.value)
    assert "'layers.1.weight/momentum_buffer'" in text
    assert text.startswith("the state dicts do not cover the whole model\n  why:   ")
    assert text.endswith(
        "try:   pass the state dicts of all ranks; under ZeRO the units have different parts "
        "of the state"
    )

    with pytest.raises(CheckpointError, match="the state dicts do not cover the whole model"):
        shardwright.merge_state_dicts([r[2] for r in results[:3]], [r[3] for r in results[:3]])

    def load(index):
        module, built, _ = model.trainer("sgd")
        state = {**results[index][3], "state": {} if index == 1 else results[index][3]["state"]}
        shardwright.load_deduped_state_dict(module, results[index][2], built, state)

    with pytest.raises(
        CheckpointError,
        match=r"no rank was given some state of the optimizer\n  why:   that of '.*' on ranks",
    ):
        model.on_ranks(load)


@pytest.mark.parametrize("which", [0, 2], ids=["full", "deduped"])
def test_the_owner_of_whole_parameters_is_missing(tmp_path, which):
    model = Model(tmp_path / "files", **PLANS["owned in groups"])

    def rank(index):
        module, built, step = model.trainer("muonlike")
        step(0)
        return copy.deepcopy(
            (
                module.state_dict(),
                built.state_dict(),
                *shardwright.deduped_state_dict(module, built),
            )
        )

    results = model.on_ranks(rank)
    # Of full ones, rank 3 has what rank 1 has.
    kept = [results[0], results[2]] if which == 0 else [results[0], *results[2:]]
    with pytest.raises(CheckpointError, match=r"why:   0 of \d+ elements of '"):
        shardwright.merge_state_dicts([r[which] for r in kept], [r[which + 1] for r in kept])
    if which == 0:
        shardwright.merge_state_dicts([r[0] for r in results[2:]], [r[1] for r in results[2:]])
