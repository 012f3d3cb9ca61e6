"""Whose folders these are: what a killed save left goes, what belongs to others stays, and two jobs
do not share one.
"""

import json
import os
import signal

import pytest
from torch import nn

import shardwright
from shardwright.runtime.checkpoint import owner
from shardwright.runtime.checkpoint import save as saving
from shardwright.runtime.errors import CheckpointError


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def save(directory, **options):
    return shardwright.save_checkpoint(directory, nn.Linear(2, 2), **options)


def test_what_killed_saves_left_goes_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path)
    for number in (2, 5):
        (tmp_path / f"00000{number}").mkdir()
        (tmp_path / f"00000{number}" / "rank-00000.safetensors").write_bytes(b"half a file")
    (tmp_path / ".LATEST.new.0123").touch()
    seen = []
    original = saving.write_tensors
    monkeypatch.setattr(
        saving, "write_tensors", lambda *given: seen.append(names(tmp_path)) or original(*given)
    )
    save(tmp_path, keep=None)
    # Its number is new: a process of the job that was killed may still write into the folder of
    # that name.
    assert seen == [["000001", "000006", "LATEST", "OWNER"]]
    assert names(tmp_path) == seen[0]


def test_links_are_read_and_never_deleted(tmp_path):
    archive, run = tmp_path / "archive", tmp_path / "run"
    save(archive, step=1)
    run.mkdir()
    (run / "000001-step-1").symlink_to(archive / "000001-step-1")
    (run / "000002").symlink_to(tmp_path / "nowhere")
    (archive / "unfinished").mkdir()
    (archive / "unfinished" / "rank-00000.safetensors").touch()
    (run / "000003").symlink_to(archive / "unfinished")
    (run / "LATEST").write_text("000001-step-1\n")
    before = {path: path.read_bytes() for path in archive.rglob("*") if path.is_file()}
    assert shardwright.load_checkpoint(run, nn.Linear(2, 2)).step == 1
    for step in range(2, 6):
        save(run, step=step, keep=1)
    assert names(run) == ["000001-step-1", "000002", "000003", "000007-step-5", "LATEST", "OWNER"]
    assert {path: path.read_bytes() for path in archive.rglob("*") if path.is_file()} == before


def in_another_process(act):
    """Run ``act`` in another process. Its text, or that of its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, str(act()).encode())
        except BaseException as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        text = told.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_one_job_saves_into_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "PATIENCE_S", 0.2)
    save(tmp_path, step=1)
    content = json.loads((tmp_path / "OWNER").read_text())
    assert content["pid"] == os.getpid() and set(content) == {"host", "pid", "user", "since"}
    save(tmp_path, step=2)
    assert json.loads((tmp_path / "OWNER").read_text()) == content
    text = in_another_process(lambda: save(tmp_path, step=9))
    assert text.startswith(
        f"another job saves its checkpoints in {tmp_path}\n"
        f"  why:   process {os.getpid()} of {content['user']} on {content['host']}, since "
        f"{content['since']}, holds "
    )
    assert names(tmp_path) == ["000001-step-1", "000002-step-2", "LATEST", "OWNER"]
    assert (
        in_another_process(lambda: shardwright.load_checkpoint(tmp_path, nn.Linear(2, 2)).step)
        == "2"
    )
    save(tmp_path, step=3)  # the lock outlives all that


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_job_that_ended_or_was_killed_locks_nobody_out(tmp_path):
    for how in (signal.SIGKILL, signal.SIGTERM):
        child = os.fork()
        if child == 0:
            owner.claim(tmp_path)
            os.kill(os.getpid(), how)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == how
        assert json.loads((tmp_path / "OWNER").read_text())["pid"] == child
        save(tmp_path)
        assert json.loads((tmp_path / "OWNER").read_text())["pid"] == os.getpid()
        owner.release_all()  # as if this process ended


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_directory_that_was_given_to_another_job(tmp_path, monkeypatch):
    """Somebody deletes OWNER, and another job takes the directory: the first one notices at its
    next save.
    """
    monkeypatch.setattr(owner, "PATIENCE_S", 0.2)
    save(tmp_path, step=1)
    (tmp_path / "OWNER").unlink()
    save(tmp_path, step=2)
    (tmp_path / "OWNER").unlink()
    told, wait = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        owner.claim(tmp_path)
        os.write(told[1], b"!")
        os.read(wait[0], 1)
        os._exit(0)
    os.read(told[0], 1)
    with pytest.raises(
        CheckpointError,
        match=rf"another job saves its checkpoints in .*\n  why:   process {child} of ",
    ):
        save(tmp_path, step=3)
    os.write(wait[1], b"!")
    os.waitpid(child, 0)
    save(tmp_path, step=3)
    assert "000003-step-3" in names(tmp_path)


def test_where_there_are_no_locks_nobody_is_refused(tmp_path, monkeypatch):
    def unsupported(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(owner.fcntl, "flock", unsupported)
    save(tmp_path)
    save(tmp_path)
    assert json.loads((tmp_path / "OWNER").read_text())["pid"] == os.getpid()


def test_few_files_stay_open(tmp_path):
    for number in range(owner._MOST_HELD + 5):
        (tmp_path / str(number)).mkdir()
        owner.claim(tmp_path / str(number))
    assert len(owner._held) == owner._MOST_HELD
    assert (tmp_path / str(number) / "OWNER").resolve() in owner._held
    save(tmp_path / "0")
