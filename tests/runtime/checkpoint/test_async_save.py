"""Saving in the background while training goes on."""

import io
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace

import checkpoints as c
import pytest
import torch
from spawn import run_processes
from torch import nn

import shardwright
from shardwright.runtime.checkpoint import save as saving
from shardwright.runtime.checkpoint import snapshot
from shardwright.runtime.errors import CheckpointError, FileError
from shardwright.runtime.ranks.processes import Process
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import World, current_world
from shardwright.runtime.waiting import Wait

PLAN = ("tp", 2, 4)


@pytest.fixture
def gate(monkeypatch):
    """Files are written when the gate is open only."""
    opened = threading.Event()
    original = saving.write_tensors

    def write(*arguments):
        assert opened.wait(600)
        return original(*arguments)

    monkeypatch.setattr(saving, "write_tensors", write)
    yield opened
    opened.set()


def test_training_goes_on_and_what_is_saved_is_the_moment_of_the_call(tmp_path, gate):
    def train():
        trainer = c.trainer("gpt2", PLAN)
        trainer.steps(range(2))
        save = shardwright.save_checkpoint(
            tmp_path, trainer.module, trainer.optimizer, step=2, async_save=True
        )
        state = c.state_of(trainer.module)
        losses = trainer.steps(range(2, 4))  # nothing has been written yet
        assert not (tmp_path / "LATEST").exists()
        current_world().barrier()
        gate.set()
        assert save.wait() == save.wait() == tmp_path / "000001-step-2"
        assert (tmp_path / "LATEST").exists()
        return state, losses

    def resume():
        trainer = c.trainer("gpt2", PLAN)
        assert shardwright.load_checkpoint(tmp_path, trainer.module, trainer.optimizer).step == 2
        return c.state_of(trainer.module), trainer.steps(range(2, 4))

    for (state, losses), (expected, expected_losses) in zip(
        c.on("gpt2", PLAN, train), c.on("gpt2", PLAN, resume), strict=True
    ):
        c.assert_same(state, expected)
        assert losses == expected_losses


@pytest.mark.parametrize("then", ["save", "load"])
def test_the_next_save_or_load_waits(tmp_path, gate, then):
    net = nn.Linear(2, 2)
    shardwright.save_checkpoint(tmp_path, net, step=1, async_save=True)
    threading.Timer(0.2, gate.set).start()
    if then == "save":
        shardwright.save_checkpoint(tmp_path, net, step=2)
        assert sorted(path.name for path in tmp_path.glob("0*")) == [
            "000001-step-1",
            "000002-step-2",
        ]
    else:
        assert shardwright.load_checkpoint(tmp_path, net).step == 1


@pytest.mark.parametrize("when", ["wait", "next save"])
def test_errors_surface(tmp_path, monkeypatch, when):
    def failing(*arguments):
        raise OSError(28, "No space left on device")

    net = nn.Linear(2, 2)
    monkeypatch.setattr(saving, "write_tensors", failing)
    save = shardwright.save_checkpoint(tmp_path, net, async_save=True)
    with pytest.raises(OSError, match="No space left on device"):
        if when == "wait":
            save.wait()
        else:
            shardwright.save_checkpoint(tmp_path, net)
    with pytest.raises(
        FileError,
        match=r"^a checkpoint cannot be written to .*/000001\n  why:   No space left on device\n",
    ):
        save.wait()
    monkeypatch.undo()
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        FileError, match=r"^a checkpoint cannot be written to .*/file\n  why:   File exists"
    ):
        shardwright.save_checkpoint(tmp_path / "file", net)
    shardwright.save_checkpoint(tmp_path, net, step=3)  # told once, it does not stand in the way
    assert shardwright.read_checkpoint(tmp_path).step == 3


@pytest.mark.parametrize(
    ("known_from", "why"),
    [
        ("nothing", r"for 0.2 s there was no sign of life of ranks \[1\]"),
        ("its file", r"rank 1 \(process \d+ on .*\) is gone, and its part is missing"),
        ("the job", r"rank 1 \(process \d+ on .*\) is gone, and its part is missing"),
    ],
)
def test_a_rank_whose_files_do_not_come(tmp_path, monkeypatch, known_from, why):
    """Where the directory is not shared, or a rank is gone, rank 0 gives up in words; at once where
    it can see that the process has ended, by the file of the rank or by what the job knows of it.
    """
    ended = replace(Process.own(), started=0)
    if known_from == "its file":
        monkeypatch.setattr(saving.Process, "own", lambda: ended)
    elif known_from == "the job":
        monkeypatch.setattr(saving.CheckpointSave, "give_sign", lambda self: None)
        monkeypatch.setattr(World, "process_of", lambda self, rank: ended if rank else None)
    else:
        monkeypatch.setattr(saving, "Wait", lambda what, limit_s=0.2: Wait(what, limit_s))

    def rank():
        trainer = c.trainer("mlp", ("tp", 2, 2))
        if trainer.module.rank == 1:
            monkeypatch.setattr(saving.CheckpointSave, "_write_own", _unless_rank_one)
        current_world().barrier()
        save = shardwright.save_checkpoint(tmp_path, trainer.module, async_save=True)
        for _ in range(2):  # who asks again is told the same, on all ranks
            with pytest.raises(CheckpointError, match=rf"is incomplete\n  why:   {why}"):
                save.wait()
        return True

    original = saving.CheckpointSave._write_own

    def _unless_rank_one(self):
        if self._world.rank == 0:
            original(self)

    assert c.on("mlp", ("tp", 2, 2), rank) == [True, True]


@pytest.mark.parametrize("takes_words", [True, False])
def test_a_rank_whose_disk_is_full(tmp_path, monkeypatch, takes_words):
    """The others are told at once, though there may be no room for a word."""
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT_S", "60")
    original_tensors, original_file = saving.write_tensors, saving.write_file

    def write_tensors(path, sources):
        if path.name != "rank-00001.safetensors":
            return original_tensors(path, sources)
        path.write_bytes(b"as much as there is room for")
        raise OSError(28, "No space left on device")

    def write_file(path, data):
        if not takes_words or path.with_suffix(".safetensors").exists():
            raise OSError(28, "No space left on device")
        original_file(path, data)

    monkeypatch.setattr(saving, "write_tensors", write_tensors)
    monkeypatch.setattr(saving, "write_file", write_file)

    def rank():
        trainer = c.trainer("mlp", ("tp", 2, 2))
        save = shardwright.save_checkpoint(tmp_path, trainer.module, async_save=True)
        with pytest.raises((CheckpointError, FileError)) as error:
            save.wait()
        return str(error.value)

    began = time.monotonic()
    told, own = c.on("mlp", ("tp", 2, 2), rank)
    assert time.monotonic() - began < 30 and "No space left on device" in own
    why = (
        "No space left on device" if takes_words else f"it could not write why; {Process.own()} has"
    )
    assert (
        told.startswith(f"rank 1 could not save its part of {tmp_path / '000001'}\n")
        and why in told
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["OWNER"]


def test_a_rank_that_wakes_up_when_its_save_was_given_up(tmp_path, gate):
    save = shardwright.save_checkpoint(tmp_path, nn.Linear(2, 2), async_save=True)
    shutil.rmtree(save.folder)  # by rank 0, which has waited too long
    gate.set()
    with pytest.raises(CheckpointError) as error:
        save.wait()
    what, why, _ = str(error.value).split("\n")
    assert what == f"{save.folder} was given up before rank 0 had written its part"
    assert why.startswith("  why:   the folder is gone")
    assert not save.folder.exists()


@pytest.mark.parametrize("stage", ["before its tensors", "before its part"])
def test_a_rank_that_wakes_up_leaves_the_folder_of_another_job_alone(tmp_path, monkeypatch, stage):
    """A job that was given up may have left its folder's name to the next job."""
    stopped, goes_on = threading.Event(), threading.Event()

    def stop():
        if not stopped.is_set():
            stopped.set()
            assert goes_on.wait(600)

    def write_own(save):
        stop()
        whole(save)

    def write_tensors(*arguments):
        record = tensors(*arguments)
        stop()
        return record

    whole, tensors = saving.CheckpointSave._write_own, saving.write_tensors
    if stage == "before its tensors":
        monkeypatch.setattr(saving.CheckpointSave, "_write_own", write_own)
    else:
        monkeypatch.setattr(saving, "write_tensors", write_tensors)
    late = shardwright.save_checkpoint(tmp_path, nn.Linear(2, 2), step=5, async_save=True)
    assert stopped.wait(600)
    shutil.rmtree(late.folder)  # by rank 0, which has waited too long
    saving._pending.clear()  # the other job knows nothing of this save
    shardwright.save_checkpoint(tmp_path, nn.Linear(2, 2), step=5)
    before = {path.name: path.read_bytes() for path in late.folder.iterdir()}
    assert set(before) == {"index.json", "rank-00000.safetensors"}
    goes_on.set()
    with pytest.raises(CheckpointError) as error:
        late.wait()
    what, why, _ = str(error.value).split("\n")
    assert what == f"{late.folder} was given up before rank 0 had written its part"
    assert why.startswith("  why:   the folder of that name belongs to a later save")
    assert {path.name: path.read_bytes() for path in late.folder.iterdir()} == before
    shardwright.load_checkpoint(tmp_path, nn.Linear(2, 2))


def test_host_copies_do_not_change():
    value = torch.arange(4.0).view(2, 2).t()
    copy = snapshot._host_copy(value)
    value.zero_()
    assert copy.is_contiguous() and copy.tolist() == [[0, 2], [1, 3]]


@pytest.fixture
def slow_rank(monkeypatch):
    """Rank 1 begins to write when this is set."""
    original, opened = saving.CheckpointSave._write_own, threading.Event()

    def slow(self):
        assert self._world.rank == 0 or opened.wait(600)
        original(self)

    monkeypatch.setattr(saving.CheckpointSave, "_write_own", slow)
    yield opened
    opened.set()


def test_a_rank_that_writes_gives_signs_of_life(tmp_path, monkeypatch, slow_rank):
    monkeypatch.setattr(saving, "_BEAT_S", 0.01)

    def rank(number):
        save = shardwright.save_checkpoint(tmp_path, nn.Linear(2, 2), async_save=True)
        if number == 0:
            signs = set()
            while len(signs) < 5 and save._thread.is_alive():
                signs.add(saving._last_sign(tmp_path / "000001" / "rank-00001.alive"))
            slow_rank.set()
        return save.wait()

    assert run_ranks(2, rank) == [tmp_path / "000001"] * 2


class Clock:
    """Seconds that are counted and not waited for."""

    now = 0


class Ticking(Wait):
    """A wait in which every look takes a second."""

    def __init__(self, what, limit_s=120.0):
        super().__init__(what, limit_s)

    def pause(self, more=""):
        return True

    def passed(self, meant_s, more=""):
        self._silent_s += 1
        return self._silent_s < self.limit_s


@pytest.mark.parametrize(("seconds_between_signs", "is_waited_for"), [(60, True), (300, False)])
def test_who_gives_signs_of_life_is_waited_for(
    tmp_path, monkeypatch, slow_rank, seconds_between_signs, is_waited_for
):
    """Rank 1 begins to write after four times the patience of rank 0."""
    clock = Clock()

    def last_sign(path):
        clock.now += 1
        if clock.now == 480:
            slow_rank.set()
        return clock.now // seconds_between_signs

    monkeypatch.setattr(saving, "_last_sign", last_sign)
    monkeypatch.setattr(saving, "Wait", Ticking)

    def rank(number):
        save = shardwright.save_checkpoint(tmp_path, nn.Linear(2, 2), async_save=True)
        if number == 0:
            save._thread.join()
            slow_rank.set()
        return save.wait()

    if is_waited_for:
        assert run_ranks(2, rank) == [tmp_path / "000001"] * 2 and clock.now >= 480
        return
    with pytest.raises(
        CheckpointError, match=r"for 120 s there was no sign of life of ranks \[1\]"
    ):
        run_ranks(2, rank)


def test_a_failure_that_nobody_waits_for_is_said(tmp_path, monkeypatch, capsys, caplog):
    def failing(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_tensors", failing)
    save = shardwright.save_checkpoint(tmp_path, nn.Linear(2, 2), async_save=True)
    save._thread.join()
    assert "rank 0: the checkpoint" in caplog.text and "No space left on device" in caplog.text
    saving._say_all_at_exit()
    said = capsys.readouterr().err
    assert said.startswith(
        f"shardwright: rank 0 could not save the last checkpoint, {tmp_path / '000001'}; it "
        "was not asked"
    )
    assert (
        f"\na checkpoint cannot be written to {tmp_path / '000001'}\n  why:   No space left "
        "on device\n" in said
    )
    assert not (tmp_path / "000001").exists()
    with pytest.raises(FileError):
        shardwright.save_checkpoint(tmp_path, nn.Linear(2, 2))
    assert save not in saving._unfinished


def test_a_process_that_could_end_says_what_it_waits_for(tmp_path, monkeypatch, gate):
    # Not capsys: what a thread prints while it is read would be lost.
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)

    class Ended:
        def is_alive(self):
            return False

    monkeypatch.setattr(saving, "_BEAT_S", 0.001)
    monkeypatch.setattr(saving.threading, "main_thread", Ended)
    save = shardwright.save_checkpoint(tmp_path, nn.Linear(2, 2), step=1, async_save=True)
    while not said.getvalue().endswith("\n"):
        time.sleep(0.001)
    assert (
        said.getvalue()
        == "shardwright: this process ends when it has written its part of the checkpoint "
        f"{save.folder}\n"
    )
    gate.set()
    assert save.wait() == save.folder


RUN = """
import sys, torch, shardwright
from shardwright.runtime.checkpoint import save as saving
if sys.argv[2] == "fails":
    def failing(*given):
        raise OSError(28, "No space left on device")
    saving.write_tensors = failing
shardwright.save_checkpoint(sys.argv[1], torch.nn.Linear(2, 2), step=1, async_save=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["well", "fails"])
def test_a_process_ends_with_its_save_or_says_why_not(tmp_path, how):
    ended = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), how], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0
    if how == "well":
        assert not ended.stderr and shardwright.read_checkpoint(tmp_path).step == 1
    else:
        assert "shardwright: rank 0 could not save the last checkpoint" in ended.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["OWNER"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_in_the_background_holds_up_no_other(tmp_path, victim):
    """Real processes: the other one ends by itself, long before any limit of this test."""
    with pytest.raises(Exception, match="SIGKILL|terminated"):
        run_processes(2, "checkpoint_jobs:save_in_background_until_killed", str(tmp_path), victim)
    assert (tmp_path / "LATEST").read_text() == "000001-step-1\n"
    shardwright.save_checkpoint(tmp_path, nn.Linear(3, 3), step=3)
    assert sorted(path.name for path in tmp_path.glob("0*")) == ["000001-step-1", "000003-step-3"]
