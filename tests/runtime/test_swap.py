"""Replacing files and folders: the old one or the new one, never a mixture."""

import os

import pytest
from checkpoint_faults import dies_at

from shardwright.runtime import swap


def tree(folder):
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "deep" / "out"
    with swap.write_folder(target) as fresh:
        (fresh / "a").write_text("1")
        assert not target.exists()
    assert tree(tmp_path) == {"deep/out/a": "1"}
    with swap.write_folder(target) as fresh:
        (fresh / "b").write_text("2")
        assert tree(target) == {"a": "1"}
    assert tree(tmp_path) == {"deep/out/b": "2"}


def test_a_failure_leaves_the_old_folder(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "a").write_text("1")
    with pytest.raises(ValueError, match="no"), swap.write_folder(target) as fresh:
        (fresh / "b").write_text("2")
        raise ValueError("no")
    assert tree(tmp_path) == {"out/a": "1"}


def test_a_failing_rename_leaves_the_old_folder(tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    (target / "a").write_text("1")
    rename, calls = os.rename, []

    def second_fails(source, destination):
        calls.append(destination)
        if len(calls) == 2:
            raise OSError("disk full")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(OSError, match="disk full"), swap.write_folder(target) as fresh:
        (fresh / "b").write_text("2")
    assert tree(tmp_path) == {"out/a": "1"}


def test_a_process_killed_between_the_renames_is_recovered_from(tmp_path):
    target = tmp_path / "out"
    previous = tmp_path / ".out.previous"
    previous.mkdir()
    (previous / "a").write_text("1")
    swap.recover_folder(target)
    assert tree(tmp_path) == {"out/a": "1"}
    previous.mkdir()  # killed after the second rename
    swap.recover_folder(target)
    assert tree(tmp_path) == {"out/a": "1"} and not previous.exists()


def test_a_failure_after_a_kill_leaves_the_old_folder(tmp_path):
    previous = tmp_path / ".out.previous"
    previous.mkdir()
    (previous / "a").write_text("1")
    with pytest.raises(ValueError, match="no"), swap.write_folder(tmp_path / "out"):
        raise ValueError("no")
    assert tree(tmp_path) == {"out/a": "1"}


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "f"
    swap.write_file(path, b"1")
    swap.write_file(path, b"2")
    assert tree(tmp_path) == {"f": "2"}

    def fails(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        swap.write_file(path, b"3")
    assert tree(tmp_path) == {"f": "2"}


def write(target, text):
    with swap.write_folder(target) as fresh:
        (fresh / "a").write_text(text)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_what_killed_writers_leave_goes(tmp_path):
    """A process is killed wherever it touches the folder; the next one sees the old folder or the
    new one, and no other.
    """
    target, states = tmp_path / "out", []
    for number in range(1, 100):
        write(target, "old")
        (tmp_path / ".out.new.mine").touch()  # of others, whatever it is called
        if not dies_at(tmp_path, number, lambda: write(target, "new")):
            break
        swap.recover_folder(target)
        states.append(target.joinpath("a").read_text())
        write(target, "next")
        assert sorted(path.name for path in tmp_path.iterdir()) == [".out.new.mine", "out"]
    assert states.count("old") >= 5 and states.count("new") >= 1 and number < 99


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_folder_that_somebody_still_writes_stays(tmp_path):
    target = tmp_path / "out"
    with swap.write_folder(target) as fresh:
        child = os.fork()
        if child == 0:
            write(target, "theirs")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert fresh.is_dir() and tree(target) == {"a": "theirs"}
        (fresh / "a").write_text("mine")
    assert tree(tmp_path) == {"out/a": "mine"}
    left = tmp_path / ".out.new.00000000"
    left.mkdir()
    swap.remove_unfinished(target, alone=False)
    assert not left.exists()
