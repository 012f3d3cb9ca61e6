"""Checkpoints on disk: from any plan into any other, and what a folder holds."""

import copy
import json
from collections import Counter

import checkpoints as c
import pytest
import torch
from covers import spread
from precision import float64_casts
from safetensors.torch import load_file
from torch import nn

import shardwright
from shardwright.runtime import regions
from shardwright.runtime.checkpoint import contents
from shardwright.runtime.checkpoint.checkpoint_index import Index
from shardwright.runtime.checkpoint.holdings import Holdings
from shardwright.runtime.checkpoint.tensor_files import MappedFiles
from shardwright.runtime.errors import CheckpointError, ConfigError
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world

TOLERANCE = 1e-10
GPT2_TOUR = [("dp", 1, 4), ("tp", 2, 4), ("data", 4, 4), ("tp", 4, 4), ("dp", 1, 1)]
"""Copies on 4 ranks, 2 x 2, a batch over 4, all cut over 4, one device."""
RESNET_TOUR = [("data", 2, 2), ("dp", 1, 1), ("data", 3, 3)]
ZERO_TOUR = [
    ("dp+zero3", 1, 2),
    ("tp", 2, 2),
    ("tp+zero3", 2, 4),
    ("data+zero3", 2, 4),
    ("dp", 1, 1),
    ("dp+zero3", 1, 3),
]
"""Into pieces over units, and out of them again."""
STAGES_TOUR = [
    ("dp+zero1", 1, 4),
    ("tp+zero2", 2, 4),
    ("dp+zero3", 1, 2),
    ("data+zero1", 2, 2),
    ("tp", 2, 2),
    ("dp+zero2", 1, 3),
]
"""All stages of ZeRO."""


def saved(name, plan, directory, *, steps=2, more=2, **options):
    """Train, save, train on. What each rank has at the end, and the losses after the save."""

    def rank():
        trainer = c.trainer(name, plan, **options)
        trainer.steps(range(steps))
        shardwright.save_checkpoint(directory, trainer.module, trainer.optimizer, step=steps)
        losses = trainer.steps(range(steps, steps + more))
        return losses, c.state_of(trainer.module), c.optimizer_tensors(trainer.optimizer)

    return c.on(name, plan, rank)


def resumed(name, plan, directory, *, steps=2, more=2, **options):
    def rank():
        trainer = c.trainer(name, plan, **options)
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.fill_(7.0)
        loaded = shardwright.load_checkpoint(directory, trainer.module, trainer.optimizer)
        assert loaded.step == steps
        losses = trainer.steps(range(steps, steps + more))
        return losses, c.state_of(trainer.module), c.optimizer_tensors(trainer.optimizer)

    return c.on(name, plan, rank)


@pytest.mark.parametrize(
    ("name", "plan"),
    spread(
        [
            ("gpt2", ("tp", 2, 4)),
            pytest.param("gpt2-uneven", ("tp", 4, 4), marks=pytest.mark.slow),
            ("resnet", ("data", 2, 2)),
            ("gpt2", ("tp+zero3", 2, 4)),
            pytest.param("gpt2", ("tp+zero2", 2, 4), marks=pytest.mark.slow),
        ],
        2,
    ),
)
def test_resume_is_exact_under_the_same_plan(tmp_path, name, plan):
    expected = saved(name, plan, tmp_path)
    for (losses, state, optimizer), (other_losses, other_state, other_optimizer) in zip(
        resumed(name, plan, tmp_path), expected, strict=True
    ):
        assert losses == other_losses
        c.assert_same(state, other_state)
        c.assert_same(optimizer, other_optimizer)


@pytest.mark.parametrize(
    ("name", "tour"),
    [
        pytest.param("gpt2", GPT2_TOUR, marks=pytest.mark.slow),
        ("resnet-uneven", RESNET_TOUR),
        pytest.param("gpt2-uneven", ZERO_TOUR, marks=pytest.mark.slow),
        pytest.param("gpt2-uneven", STAGES_TOUR, marks=pytest.mark.slow),
    ],
)
def test_a_tour_of_plans_ends_where_one_device_does(tmp_path, name, tour):
    reference = c.original(name)
    with float64_casts():
        losses = [reference.step(number) for number in range(len(tour))]

    def rank(plan, number):
        trainer = c.trainer(name, plan)
        if number:
            assert (
                shardwright.load_checkpoint(tmp_path, trainer.module, trainer.optimizer).step
                == number
            )
        loss = trainer.step(number)
        shardwright.save_checkpoint(tmp_path, trainer.module, trainer.optimizer, step=number + 1)
        return loss

    for number, plan in enumerate(tour):
        for loss in c.on(name, plan, lambda plan=plan, number=number: rank(plan, number)):
            assert abs(loss - losses[number]) <= TOLERANCE * abs(losses[number])
    whole = shardwright.read_checkpoint(tmp_path)
    c.assert_same(dict(whole.module), reference.module.state_dict(), TOLERANCE)


@pytest.mark.parametrize("name", ["llama-tied", "llama-frozen"])
def test_tied_and_frozen_parameters(tmp_path, name):
    expected = saved(name, ("tp", 2, 2), tmp_path)
    (losses, state, _) = resumed(name, ("dp", 1, 1), tmp_path)[0]
    for loss, other in zip(losses, expected[0][0], strict=True):
        assert abs(loss - other) <= TOLERANCE * abs(other)
    original = c.original(name)
    assert state.keys() == original.module.state_dict().keys()
    whole = shardwright.read_checkpoint(tmp_path)
    original.module.load_state_dict(whole.module)
    original.optimizer.load_state_dict(whole.optimizer)
    with float64_casts():
        more = original.steps([2, 3])
    for loss, other in zip(more, losses, strict=True):
        assert abs(loss - other) <= TOLERANCE * abs(other)


def test_parameter_groups_may_be_grouped_otherwise(tmp_path):
    def by_dims(name, parameter):
        return {"weight_decay": 0.0} if parameter.ndim < 2 else {}

    def finer(name, parameter):
        return (
            {**by_dims(name, parameter), "foreach": False}
            if "ln_" in name
            else by_dims(name, parameter)
        )

    saved("gpt2", ("tp", 2, 2), tmp_path, more=0, param_groups=by_dims)

    def rank():
        trainer = c.trainer("gpt2", ("data", 2, 2), param_groups=finer)
        shardwright.load_checkpoint(tmp_path, trainer.module, trainer.optimizer)
        return [
            (group["weight_decay"], group["betas"], len(group["params"]))
            for group in trainer.optimizer.param_groups
        ]

    with pytest.raises(
        CheckpointError, match=r"'transformer.wte.weight' is in the saved optimizer only"
    ):
        c.on("gpt2", ("data", 2, 2), lambda: shardwright.load_checkpoint(tmp_path, *_sgd_of_some()))
    groups = c.on("gpt2", ("data", 2, 2), rank)[0]
    assert [decay for decay, _, _ in groups] == [0.1, 0.0, 0.0] and {
        betas for _, betas, _ in groups
    } == {(0.9, 0.999)}


def _sgd_of_some():
    trainer = c.trainer(
        "gpt2",
        ("data", 2, 2),
        lambda params: torch.optim.SGD([p for p in params if p.ndim < 2], lr=0.1),
    )
    return trainer.module, trainer.optimizer


def test_scheduler_extra_and_random_numbers(tmp_path):
    def schedule(trainer):
        return torch.optim.lr_scheduler.MultiStepLR(trainer.optimizer, [1, 3])

    def save():
        trainer = c.trainer("gpt2", ("tp", 2, 2))
        scheduler = schedule(trainer)
        for number in range(2):
            trainer.step(number)
            scheduler.step()
        extra = {"tokens": torch.arange(3), "name": ("a", 1.5)}
        shardwright.save_checkpoint(
            tmp_path, trainer.module, trainer.optimizer, scheduler=scheduler, extra=extra, step=2
        )
        return (
            trainer.optimizer.param_groups[0]["lr"],
            scheduler.state_dict(),
            trainer.module.rng.to_json(),
        )

    def load():
        trainer = c.trainer("gpt2", ("data", 2, 2))
        scheduler = schedule(trainer)
        loaded = shardwright.load_checkpoint(
            tmp_path, trainer.module, trainer.optimizer, scheduler=scheduler
        )
        assert torch.equal(loaded.extra["tokens"], torch.arange(3)) and loaded.extra["name"] == (
            "a",
            1.5,
        )
        return (
            trainer.optimizer.param_groups[0]["lr"],
            scheduler.state_dict(),
            trainer.module.rng.to_json(),
        )

    saved_states = c.on("gpt2", ("tp", 2, 2), save)
    assert c.on("gpt2", ("data", 2, 2), load) == saved_states


def test_every_distinct_piece_is_stored_once(tmp_path):
    saved("gpt2", ("tp", 2, 4), tmp_path, more=0)
    (folder,) = tmp_path.glob("0*")
    assert (tmp_path / "LATEST").read_text() == "000001-step-2\n" and folder.name == "000001-step-2"
    files = sorted(path.name for path in folder.iterdir())
    # The second unit has copies only.
    assert files == [
        "index.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    stored = Counter()
    for path in folder.glob("*.safetensors"):
        stored.update({key: value.numel() for key, value in load_file(path).items()})
    sizes = {name: parameter.numel() for name, parameter in c.model_of("gpt2").named_parameters()}
    states = {
        f"{name}/{key}": size for name, size in sizes.items() for key in ("exp_avg", "exp_avg_sq")
    }
    assert stored == sizes | states
    json.loads((folder / "index.json").read_text())  # the index is plain JSON


def test_ranks_read_what_they_hold_and_no_more(tmp_path, monkeypatch):
    saved("gpt2", ("tp", 2, 2), tmp_path, more=0)
    read = Counter()

    def counting(target, target_region, source, source_region):
        count = regions.copy_shared(target, target_region, source, source_region)
        read[current_world().rank] += count
        return count

    monkeypatch.setattr(contents, "copy_shared", counting)

    def rank():
        trainer = c.trainer("gpt2", ("tp", 4, 4))
        shardwright.load_checkpoint(tmp_path, trainer.module, verify=False)
        return sum(holding.tensor.numel() for holding in Holdings.of(trainer.module).tensors)

    held = c.on("gpt2", ("tp", 4, 4), rank)
    assert [read[rank] for rank in range(4)] == held and max(held) < sum(
        p.numel() for p in c.model_of("gpt2").parameters()
    )


def test_a_model_that_was_never_compiled(tmp_path):
    saved("gpt2", ("tp", 2, 2), tmp_path)
    trainer = c.original("gpt2")
    shardwright.load_checkpoint(tmp_path, trainer.module, trainer.optimizer)
    c.assert_same(trainer.module.state_dict(), dict(shardwright.read_checkpoint(tmp_path).module))
    shardwright.save_checkpoint(tmp_path / "plain", trainer.module, trainer.optimizer)
    (plain,) = (tmp_path / "plain").glob("0*")
    assert shardwright.read_checkpoint(plain).step is None
    assert losses_after(tmp_path / "plain") == losses_after(tmp_path)


def losses_after(directory):
    def rank():
        trainer = c.trainer("gpt2", ("tp", 2, 2))
        shardwright.load_checkpoint(directory, trainer.module, trainer.optimizer)
        return trainer.steps([2, 3])

    return c.on("gpt2", ("tp", 2, 2), rank)[0]


class Net(nn.Module):
    def __init__(self, width=3, **more):
        super().__init__()
        self.a, self.b = nn.Linear(2, width), nn.Linear(width, 1)
        for name, value in more.items():
            self.register_buffer(name, value)


def message(error):
    return str(error.value)


def test_entries_that_do_not_fit_are_named(tmp_path):
    shardwright.save_checkpoint(tmp_path, Net(left_over=torch.zeros(2), kind=torch.zeros(1)))
    net = Net(width=4, missing=torch.zeros(1), kind=torch.zeros(1, dtype=torch.int64))
    before = c.state_of(net)
    with pytest.raises(CheckpointError) as error:
        shardwright.load_checkpoint(tmp_path, net)
    assert message(error) == (
        f"{tmp_path / '000001'} does not fit Net\n"
        "  why:   'missing' is missing; 'kind' is torch.float32 there and torch.int64 here; "
        "'a.weight' is [3, 2] there and "
        "[4, 2] here; 'a.bias' is [3] there and [4] here; 'b.weight' is [1, 3] there and [1, "
        "4] here"
    )
    c.assert_same(c.state_of(net), before)
    with pytest.raises(
        CheckpointError, match="'left_over' is not in the module; 'kind' is not in the module"
    ):
        shardwright.load_checkpoint(tmp_path, Net())


def test_tied_here_and_apart_there(tmp_path):
    apart, tied = Net(width=2), Net(width=2)
    tied.a.bias = tied.extra = nn.Parameter(torch.zeros(2))
    apart.extra = nn.Parameter(torch.ones(2))
    shardwright.save_checkpoint(tmp_path, apart)
    with pytest.raises(
        CheckpointError, match="'extra' and 'a.bias' are one tensor here and several there"
    ):
        shardwright.load_checkpoint(tmp_path, tied)
    shardwright.save_checkpoint(tmp_path, tied)
    shardwright.load_checkpoint(tmp_path, apart)
    assert torch.equal(apart.a.bias, torch.zeros(2)) and torch.equal(apart.extra, torch.zeros(2))


def test_the_state_of_another_optimizer(tmp_path):
    """torch takes it, and the next step would miss an option."""
    net = Net()
    adamw = torch.optim.AdamW(net.parameters())
    shardwright.save_checkpoint(tmp_path, net, adamw)
    sgd = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    before = copy.deepcopy(sgd.state_dict())
    with pytest.raises(
        CheckpointError,
        match="is that of another optimizer\n  why:   group 0 has no 'momentum', 'dampening' in it",
    ):
        shardwright.load_checkpoint(tmp_path, net, sgd)
    assert sgd.state_dict() == before
    # Options that came with later versions of torch are no reason: the class adds them.
    older = adamw.state_dict()
    del older["param_groups"][0]["fused"], older["param_groups"][0]["decoupled_weight_decay"]
    shardwright.load_merged_state_dicts(net, net.state_dict(), adamw, older)


def test_what_was_not_saved_is_not_loaded(tmp_path):
    net = Net()
    optimizer = torch.optim.SGD(net.parameters())
    shardwright.save_checkpoint(tmp_path, net)
    with pytest.raises(
        CheckpointError,
        match=r"has no state of the optimizer\n  why:   it was saved without optimizer=",
    ):
        shardwright.load_checkpoint(tmp_path, net, optimizer)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        shardwright.load_checkpoint(tmp_path / "elsewhere", net)


def test_what_cannot_be_saved_is_named_on_all_ranks(tmp_path):
    def rank(index):
        shardwright.save_checkpoint(tmp_path, Net(), extra={"f": lambda: 0} if index == 0 else None)

    with pytest.raises(CheckpointError, match=r"extra\['f'\] cannot be saved"):
        run_ranks(2, rank)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state["global"] = {"count": 1}
    with pytest.raises(
        CheckpointError, match="the optimizer keeps state under 'global', which is no parameter"
    ):
        shardwright.save_checkpoint(tmp_path, net, optimizer)


def test_what_modules_keep_beside_tensors(tmp_path):
    class Counting(Net):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    net, other = Counting(), Counting()
    net.calls = 5
    shardwright.save_checkpoint(tmp_path, net)
    shardwright.load_checkpoint(tmp_path, other)
    assert other.calls == 5


def test_older_checkpoints_go(tmp_path):
    for step in range(5):
        shardwright.save_checkpoint(tmp_path, Net(), step=step, keep=3)
    assert sorted(path.name for path in tmp_path.glob("0*")) == [
        "000003-step-2",
        "000004-step-3",
        "000005-step-4",
    ]
    assert shardwright.load_checkpoint(tmp_path / "000004-step-3", Net()).step == 3
    (tmp_path / "000009").mkdir()  # what a killed save leaves
    save = shardwright.save_checkpoint(tmp_path, Net(), keep=1)
    assert [path.name for path in tmp_path.glob("0*")] == [
        "000010"
    ] and save.wait() == tmp_path / "000010"
    for _ in range(2):
        shardwright.save_checkpoint(tmp_path, Net(), keep=None)
    assert len(list(tmp_path.glob("0*"))) == 3
    with pytest.raises(ConfigError, match="keep=0 would delete the checkpoint itself"):
        shardwright.save_checkpoint(tmp_path, Net(), keep=0)


def test_folders_of_other_things_stay(tmp_path):
    shardwright.save_checkpoint(tmp_path, Net())
    for name, file in (
        ("20241121", "notes.txt"),
        ("000001", "notes.txt"),
        ("000002", "rank-00000.safetensors"),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / file).touch()
    assert shardwright.save_checkpoint(tmp_path, Net(), keep=1).folder.name == "20241122"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000001",
        "20241121",
        "20241122",
        "LATEST",
        "OWNER",
    ]


@pytest.mark.parametrize("step", [-1, 3.5, 1000.0, "7"])
def test_a_step_that_is_no_count(tmp_path, step):
    with pytest.raises(ConfigError) as caught:
        shardwright.save_checkpoint(tmp_path / "new", Net(), step=step)
    assert str(caught.value) == (
        f"step={step!r} is no count of steps\n  why:   it is a part of the folder's name\n  "
        "try:   pass an integer from 0 on"
    )
    assert not (tmp_path / "new").exists()
    assert (
        shardwright.save_checkpoint(tmp_path, Net(), step=torch.tensor(7)).folder.name
        == "000001-step-7"
    )


def test_views_of_conjugates(tmp_path):
    net, other = nn.Module(), nn.Module()
    values = torch.randn(3, dtype=torch.complex64)
    for module, x in ((net, values), (other, torch.zeros_like(values))):
        module.weight = nn.Parameter(x.conj())
        module.register_buffer("imag", x.conj().imag)
    shardwright.save_checkpoint(tmp_path, net, extra=values.conj())
    assert torch.equal(shardwright.load_checkpoint(tmp_path, other).extra, values.conj())
    assert torch.equal(other.weight, net.weight) and torch.equal(other.imag, net.imag)


def test_the_index_says_how_to_read_the_files(tmp_path):
    saved("gpt2", ("tp", 2, 2), tmp_path, more=0)
    (folder,) = tmp_path.glob("0*")
    index = Index.read(folder / "index.json")
    name = "transformer.h.0.attn.c_attn.weight"
    whole = torch.zeros(index.tensors[name].shape, dtype=index.tensors[name].dtype)
    with MappedFiles(folder) as files:
        for piece in index.tensors[name].pieces:
            columns = torch.cat([torch.arange(*run) for run in piece.region.runs[1]])
            whole[:, columns] = files.view(piece.file, piece.key)
    assert torch.equal(whole, shardwright.read_checkpoint(tmp_path).module[name])
    assert (
        len(index.tensors[name].pieces) == 2
        and len(index.tensors[name].pieces[0].region.runs[1]) == 3
    )
