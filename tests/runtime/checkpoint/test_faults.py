"""Whatever kills a save, the newest complete checkpoint loads; whatever damages one is named."""

import copy
import os
from pathlib import Path

import checkpoints as c
import pytest
import torch
from checkpoint_faults import current_step, killed_at, redigested, save
from checkpoint_fuzz import corruption, kills
from spawn import run_processes

import shardwright
from shardwright.runtime.checkpoint import save as saving
from shardwright.runtime.checkpoint import snapshot
from shardwright.runtime.checkpoint.checkpoint_index import Index
from shardwright.runtime.checkpoint.folders import complete_folders
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(
    ("num_ranks", "asynchronous", "zero"),
    [(2, True, 0), (2, False, 1)],
)
def test_killed_at_any_moment(tmp_path, num_ranks, asynchronous, zero):
    """Every call that touches the directory is tried: while files are written, made current, and
    older ones deleted.
    """
    outcomes = []
    for number in range(1, 200):
        directory = tmp_path / str(number)
        save(directory, 1, keep=None)
        save(directory, 2, keep=None)
        was_killed = killed_at(directory, number, num_ranks, asynchronous, zero)
        outcomes.append(current_step(directory))
        assert outcomes[-1] in (2, 3)
        # Also older ones: one that is half deleted does not look complete.
        for folder in complete_folders(directory):
            current_step(folder)
        save(directory, 4, keep=1)  # the run goes on, and cleans up
        assert current_step(directory) == 4
        assert len(complete_folders(directory)) == 1 and len(list(directory.iterdir())) == 3
        if not was_killed:
            break
    assert not was_killed and outcomes[-1] == 3
    # Before and after it became current.
    assert outcomes.count(2) >= 8 and outcomes.count(3) >= 3, outcomes


@pytest.mark.parametrize(
    ("phase", "failing_rank"),
    [("write", 0), ("write", 1), ("index part", 0), ("index part", 1), ("commit", 0)],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_rank_fails(tmp_path, monkeypatch, phase, failing_rank, asynchronous):
    """An error of one rank is raised on all, and the previous checkpoint stays."""
    save(tmp_path, 1)
    owner, name = {
        "write": (saving, "write_tensors"),
        "index part": (Index, "write"),
        "commit": (saving, "make_current"),
    }[phase]
    original = getattr(owner, name)

    def failing(*arguments):
        if phase == "commit" or f"rank-{failing_rank:05d}" in str(arguments):
            raise OSError(28, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(owner, name, failing)
    plan = ("tp", 2, 2)

    def rank():
        trainer = c.trainer("mlp", plan)
        with pytest.raises((CheckpointError, OSError), match="No space left on device"):
            shardwright.save_checkpoint(
                tmp_path, trainer.module, step=2, async_save=asynchronous
            ).wait()
        return True

    assert c.on("mlp", plan, rank) == [True, True]
    assert (tmp_path / "LATEST").read_text() == "000001-step-1\n"
    # Its own files are gone.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "000001-step-1",
        "LATEST",
        "OWNER",
    ]
    monkeypatch.undo()
    assert current_step(tmp_path) == 1


def damage_cases():
    def flip(path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    return [
        ("rank-00000.safetensors", flip, "rank-00000.safetensors was altered"),
        ("rank-00001.safetensors", flip, "rank-00001.safetensors was altered"),
        (
            "rank-00001.safetensors",
            lambda path: os.truncate(path, 100),
            "rank-00001.safetensors has 100 bytes",
        ),
        ("rank-00001.safetensors", Path.unlink, "rank-00001.safetensors is missing"),
        (
            "index.json",
            lambda path: path.write_text(path.read_text().replace("[16]", "[61]", 1)),
            "index.json was altered",
        ),
        ("index.json", Path.unlink, "LATEST names '000001', which is no complete checkpoint"),
    ]


@pytest.mark.parametrize(("file", "damage", "message"), damage_cases())
def test_damage_is_named_on_all_ranks_and_nothing_changes(tmp_path, file, damage, message):
    plan = ("tp", 2, 2)

    def run():
        trainer = c.trainer("gpt2", plan)
        shardwright.save_checkpoint(tmp_path, trainer.module, trainer.optimizer)

    c.on("gpt2", plan, run)
    damage(tmp_path / "000001" / file)

    def load():
        trainer = c.trainer("gpt2", plan)
        before = c.state_of(trainer.module)
        with pytest.raises(CheckpointError, match=message):
            shardwright.load_checkpoint(tmp_path, trainer.module, trainer.optimizer)
        c.assert_same(c.state_of(trainer.module), before)
        return True

    assert c.on("gpt2", plan, load) == [True, True]
    with pytest.raises(CheckpointError, match=message):
        shardwright.read_checkpoint(tmp_path)


def test_a_pointer_to_elsewhere_is_not_followed(tmp_path):
    save(tmp_path / "run", 1)
    (tmp_path / "run" / "LATEST").write_text("../other\n")
    with pytest.raises(
        CheckpointError, match=r"names '../other', which is no complete checkpoint\n.*000001-step-1"
    ):
        current_step(tmp_path / "run")
    (tmp_path / "run" / "LATEST").write_bytes(b"000001\xff")
    with pytest.raises(
        CheckpointError, match="names '000001\ufffd', which is no complete checkpoint"
    ):
        current_step(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "victim"), [("write", 0), ("write", 1), ("part", 0), ("part", 1), ("commit", 0)]
)
def test_a_killed_process_among_others(tmp_path, victim, phase):
    """Real processes: one of two is killed in a phase of the save; the other one fails, and the
    first checkpoint loads.
    """
    with pytest.raises(Exception, match="SIGKILL|terminated"):
        run_processes(2, "checkpoint_jobs:save_until_killed", str(tmp_path), victim, phase)
    assert (tmp_path / "LATEST").read_text() == "000001-step-1\n"
    assert shardwright.read_checkpoint(tmp_path).step == 1


@pytest.mark.parametrize("trials", [12, pytest.param(250, marks=pytest.mark.slow)])
def test_whatever_is_altered_is_refused_or_loaded_right(tmp_path, trials):
    """And what is refused has changed nothing. More of it: tests/product/checkpoints.py."""
    counts = corruption(trials, 0, tmp_path)
    assert counts["refused"] > trials / 2 and (trials < 100 or counts["loaded"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_runs_that_are_killed_again_and_again(tmp_path):
    counts = kills(30, 0, tmp_path)
    assert min(counts.values()) >= 5


def shift(region):
    """The elements, one row further."""
    region[0] = [[start + 1, stop + 1] for start, stop in region[0]]


def grow(region):
    region[0][-1][1] += 1


def repeat(region):
    region[0] = region[0] + region[0]


PIECES = {
    "shifted": (
        lambda pieces: shift(pieces[0]["region"]),
        "of 'a' 3 of 12 elements are in no piece",
    ),
    "outside": (
        lambda pieces: shift(pieces[1]["region"]),
        r"of 'a' a piece lies outside of \[4, 3\]",
    ),
    "overlapping": (
        lambda pieces: grow(pieces[0]["region"]),
        "of 'a' 3 of 12 elements are in several pieces",
    ),
    "twice and left out": (
        lambda pieces: pieces[1].update(region=pieces[0]["region"]),
        "of 'a' 6 of 12 elements are in no piece",
    ),
    "left out": (lambda pieces: pieces.pop(), "of 'a' 6 of 12 elements are in no piece"),
    "backwards": (
        lambda pieces: repeat(pieces[1]["region"]),
        r"of 'a' a piece lies outside of \[4, 3\]",
    ),
}


@pytest.mark.parametrize("case", PIECES)
def test_pieces_that_do_not_make_the_tensor(tmp_path, case):
    """Counting elements would let some of these pass, and leave the rest of the tensor
    uninitialised.
    """
    net = torch.nn.Module()
    net.a = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
    shardwright.save_checkpoint(tmp_path, net)
    folder = tmp_path / "000001"
    (folder / "rank-00000.safetensors").unlink()
    halves = {
        f"rank-{rank:05d}.safetensors": net.a.detach()[2 * rank : 2 * rank + 2] for rank in range(2)
    }
    alter, problem = PIECES[case]

    def change(content):
        content["files"] = {}
        pieces = content["tensors"]["a"]["pieces"] = []
        for number, (file, half) in enumerate(halves.items()):
            source = {"a": snapshot._source(half)}
            content["files"][file] = saving.write_tensors(folder / file, source).to_json()
            rows = [2 * number, 2 * number + 2]
            pieces.append({"file": file, "key": "a", "region": [[rows], [[0, 3]]]})

    redigested(folder / "index.json", change)
    before = net.a.detach().clone()
    shardwright.load_checkpoint(tmp_path, net)
    assert torch.equal(net.a, before)
    redigested(folder / "index.json", lambda content: alter(content["tensors"]["a"]["pieces"]))
    with torch.no_grad():
        net.a.fill_(7.0)
    for read in (
        lambda: shardwright.read_checkpoint(tmp_path),
        lambda: shardwright.merge_checkpoint(tmp_path, tmp_path / "merged"),
        lambda: shardwright.load_checkpoint(tmp_path, net, verify=False),
        lambda: shardwright.export_pretrained(tmp_path, tmp_path / "exported", {}),
    ):
        with pytest.raises(CheckpointError, match=rf"is incomplete\n  why:   {problem}"):
            read()
    assert bool((net.a == 7.0).all()) and sorted(path.name for path in tmp_path.iterdir()) == [
        "000001",
        "LATEST",
        "OWNER",
    ]


class Stubborn(torch.nn.Linear):
    """Takes no extra state but its own."""

    def get_extra_state(self):
        return {"owner": current_world().rank}

    def set_extra_state(self, state):
        if state["owner"] != current_world().rank:
            raise RuntimeError(f"this is the state of {state['owner']}")


def test_what_one_rank_refuses_no_rank_has_loaded(tmp_path):
    """The optimizer and the scheduler have loaded theirs when the module of rank 1 refuses."""

    def job(number, value):
        net = Stubborn(2, 2)
        torch.nn.init.constant_(net.weight, value)
        optimizer = torch.optim.AdamW(net.parameters(), lr=value)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        net.weight.grad = torch.full((2, 2), value)
        optimizer.step()
        scheduler.step()
        return net, optimizer, scheduler

    def save_it(number):
        net, optimizer, scheduler = job(number, 0.5)
        shardwright.save_checkpoint(tmp_path, net, optimizer, scheduler=scheduler)

    def load(number):
        net, optimizer, scheduler = job(number, 0.25)
        before = copy.deepcopy((c.state_of(net), optimizer.state_dict(), scheduler.state_dict()))
        with pytest.raises(
            CheckpointError, match="a module with an extra state does not take its saved state\n"
        ) as caught:
            shardwright.load_checkpoint(tmp_path, net, optimizer, scheduler=scheduler)
        after = (c.state_of(net), optimizer.state_dict(), scheduler.state_dict())
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        return str(caught.value)

    run_ranks(2, save_it)
    first, second = run_ranks(2, load)
    assert "why:   RuntimeError: this is the state of 0" in second and first.startswith(
        "rank 1: a module with"
    )


def test_what_has_no_extra_state_there(tmp_path):
    """A parallel module has none of its parts. The way that is named takes the tensors."""
    saved, net = torch.nn.Linear(2, 2), Stubborn(2, 2)
    shardwright.save_checkpoint(tmp_path, saved)
    with pytest.raises(CheckpointError, match="(?s)'_extra_state' is missing.*strict=False"):
        shardwright.load_checkpoint(tmp_path, net)
    net.load_state_dict(shardwright.read_checkpoint(tmp_path).module, strict=False)
    torch.testing.assert_close(net.weight, saved.weight, rtol=0, atol=0)


def test_names_that_meet_the_names_of_states(tmp_path):
    """Parameters ``w`` and ``w/exp_avg``: their states and weights have names of their own in every
    file.
    """

    def made(value):
        net = torch.nn.Module()
        for number, name in enumerate(
            ("w", "w/exp_avg", "w/exp_avg/0", "w/exp_avg'", "w/exp_avg/exp_avg")
        ):
            net.register_parameter(name, torch.nn.Parameter(torch.full((3, 2), value + number)))
        optimizer = torch.optim.Adam(net.parameters())
        for number, parameter in enumerate(net.parameters()):
            parameter.grad = torch.full_like(parameter, value + 10 * number)
        optimizer.step()
        return net, optimizer

    net, optimizer = made(1.0)
    shardwright.save_checkpoint(tmp_path / "run", net, optimizer)
    shardwright.merge_checkpoint(tmp_path / "run", tmp_path / "merged")
    for folder in ("run", "merged"):
        other, stepper = made(3.0)
        shardwright.load_checkpoint(tmp_path / folder, other, stepper)
        torch.testing.assert_close(other.state_dict(), net.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(stepper.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
        whole = shardwright.read_checkpoint(tmp_path / folder)
        torch.testing.assert_close(
            whole.optimizer["state"], optimizer.state_dict()["state"], rtol=0, atol=0
        )


def test_extra_states_that_are_tensors(tmp_path):
    class Scaled(torch.nn.Linear):
        amax = torch.zeros(2)

        def get_extra_state(self):
            return self.amax.clone()

        def set_extra_state(self, state):
            self.amax = state

    net, other = Scaled(2, 2), Scaled(2, 2)
    net.amax = torch.tensor([1.0, 2.0])
    shardwright.save_checkpoint(tmp_path, net)
    shardwright.load_checkpoint(tmp_path, other)
    assert torch.equal(other.amax, net.amax)
