"""Whatever kills a save, the newest complete checkpoint loads; whatever damages one is named."""

import itertools
import os
import signal
import sys
from pathlib import Path

import checkpoints as c
import pytest
import torch
from spawn import run_processes
from torch import nn

import shardwright
from shardwright.runtime.checkpoint import save as saving
from shardwright.runtime.checkpoint.folders import complete_folders
from shardwright.runtime.checkpoint.index import Index
from shardwright.runtime.errors import CheckpointError
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.training.optimizer import build_optimizer


class Net(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), float(value)))
        self.bias = nn.Parameter(torch.full((3,), float(value)))


def save(directory, value, zero=0, **options):
    """``zero``: the stage, for two ranks that share the optimizer's state."""
    net = Net(value)
    config = {"plan_ngpus": 1, "runtime_ngpus": 2, "grad_reduction": "mean", "use_zero": zero}
    optimizer = build_optimizer(net, torch.optim.Adam, config) if zero else torch.optim.Adam(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)  # autograd does not survive a fork
    optimizer.step()
    return shardwright.save_checkpoint(directory, net, optimizer, step=value, **options)


def current_step(directory):
    """The step of the current checkpoint, all of it loaded and checked."""
    net = Net(0)
    loaded = shardwright.load_checkpoint(directory, net, torch.optim.Adam(net.parameters()))
    after_one_step = torch.full((4, 3), loaded.step - 0.001)  # Adam's first step is its learning rate
    torch.testing.assert_close(net.weight.detach(), after_one_step, rtol=1e-6, atol=0)  # some roundings of float32
    return loaded.step


TOUCHING = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.listdir", "os.scandir")
"""What Python reports of a process that changes or reads a file system."""


def killed_at(directory: Path, number: int, num_ranks: int, asynchronous: bool, zero: int) -> bool:
    """Save in a process that is killed when it touches ``directory`` for the ``number``-th time. Whether it was."""
    child = os.fork()
    if child == 0:
        count = itertools.count(1)  # threads count too, at once

        def kill(event, arguments):
            relative = event == "os.remove" and arguments[1] != -1  # shutil.rmtree names files by their open folder
            if event in TOUCHING and (relative or str(directory) in str(arguments[0])) and next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        try:
            run_ranks(num_ranks, lambda rank: save(directory, 3, zero, keep=1, async_save=asynchronous).wait())
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(
    ("num_ranks", "asynchronous", "zero"),
    [
        (1, False, 0),
        (2, False, 0),
        (2, True, 0),
        *(pytest.param(2, *case, marks=pytest.mark.slow) for case in ((False, 1), (True, 2))),
    ],
)
def test_killed_at_any_moment(tmp_path, num_ranks, asynchronous, zero):
    """Every call that touches the directory is tried: while files are written, made current, and older ones deleted."""
    outcomes = []
    for number in range(1, 200):
        directory = tmp_path / str(number)
        save(directory, 1, keep=None)
        save(directory, 2, keep=None)
        was_killed = killed_at(directory, number, num_ranks, asynchronous, zero)
        outcomes.append(current_step(directory))
        assert outcomes[-1] in (2, 3)
        for folder in complete_folders(directory):  # also older ones: one that is half deleted does not look complete
            current_step(folder)
        save(directory, 4, keep=1)  # the run goes on, and cleans up
        assert current_step(directory) == 4
        assert len(complete_folders(directory)) == 1 and len(list(directory.iterdir())) == 2
        if not was_killed:
            break
    assert not was_killed and outcomes[-1] == 3
    assert outcomes.count(2) >= 8 and outcomes.count(3) >= 3, outcomes  # before and after it became current


@pytest.mark.parametrize(
    ("phase", "failing_rank"), [("write", 0), ("write", 1), ("index part", 0), ("index part", 1), ("commit", 0)]
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
            shardwright.save_checkpoint(tmp_path, trainer.module, step=2, async_save=asynchronous).wait()
        return True

    assert c.on("mlp", plan, rank) == [True, True]
    assert (tmp_path / "LATEST").read_text() == "000001-step-1\n"
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
        ("rank-00001.safetensors", lambda path: os.truncate(path, 100), "rank-00001.safetensors has 100 bytes"),
        ("rank-00001.safetensors", Path.unlink, "rank-00001.safetensors is missing"),
        ("index.json", lambda path: path.write_text(path.read_text().replace("[16]", "[61]", 1)), "index.json was altered"),
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
    with pytest.raises(CheckpointError, match=r"names '../other', which is no complete checkpoint\n.*000001-step-1"):
        current_step(tmp_path / "run")
    (tmp_path / "run" / "LATEST").write_bytes(b"000001\xff")
    with pytest.raises(CheckpointError, match="names '000001\ufffd', which is no complete checkpoint"):
        current_step(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "victim"), [("write", 0), ("write", 1), ("part", 0), ("part", 1), ("commit", 0)])
def test_a_killed_process_among_others(tmp_path, victim, phase):
    """Real processes: one of two is killed in a phase of the save; the other one fails, and the first checkpoint loads."""
    with pytest.raises(Exception, match="SIGKILL|terminated"):
        run_processes(2, "checkpoint_jobs:save_until_killed", str(tmp_path), victim, phase)
    assert (tmp_path / "LATEST").read_text() == "000001-step-1\n"
    assert shardwright.read_checkpoint(tmp_path).step == 1
