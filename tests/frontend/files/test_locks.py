"""The lock of a directory of generated files."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from shardwright.frontend.files.locks import directory_lock
from shardwright.runtime.errors import FileError
from shardwright.runtime.ranks import processes
from shardwright.runtime.ranks.processes import Process


def test_threads_take_turns(tmp_path):
    inside, seen = [0], []

    def work():
        with directory_lock(tmp_path / "deep" / "net"):
            inside[0] += 1
            seen.append(inside[0])
            time.sleep(0.02)
            inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1, 1]


HOLDER = """
import sys, time
from pathlib import Path
from shardwright.frontend.files.locks import directory_lock
with directory_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_process_that_died_is_free(tmp_path, caplog):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "net")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"

    def kill_when_somebody_waits():
        while not caplog.messages:
            time.sleep(0.01)
        holder.kill()

    with caplog.at_level("INFO"):
        threading.Thread(target=kill_when_somebody_waits, daemon=True).start()
        with directory_lock(tmp_path / "net"):
            assert holder.wait() != 0
    assert caplog.messages == [
        f"another process is compiling into {tmp_path / 'net'}: waiting for it"
    ]


HOLDING = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
@pytest.mark.parametrize("says_who", [True, False])
def test_a_holder_that_is_stopped_is_given_up_in_words(tmp_path, monkeypatch, caplog, says_who):
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT_S", "0.4")
    monkeypatch.setenv("SHARDWRIGHT_NOTICE_S", "0.1")
    command = [sys.executable, "-c", HOLDING, str(tmp_path / "net.lock")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    process = replace(Process.own(), pid=holder.pid, started=processes._status(holder.pid)[1])
    if says_who:
        (tmp_path / "net.lock.holder").write_text(
            json.dumps({"sign": 3, "process": process.to_json()})
        )
    holder.send_signal(signal.SIGSTOP)
    while process.state() != "is stopped":
        time.sleep(0.01)
    try:
        with pytest.raises(FileError) as caught, directory_lock(tmp_path / "net"):
            pass
    finally:
        holder.kill()
        holder.wait()
    who = f"it is {process}, which is stopped" if says_who else "who it is cannot be read"
    cont = f"`kill -CONT {holder.pid}` lets it go on; " if says_who else ""
    assert str(caught.value) == (
        f"{tmp_path / 'net'} is locked, and whoever compiles into it has given no sign of "
        "life for 0.4 s\n"
        f"  why:   {who}\n"
        f"  try:   {cont}end it, or compile into another gen_savedir (--gen-savedir); "
        "the limit is that of SHARDWRIGHT_TIMEOUT_S, in seconds"
    )
    assert caplog.messages[-1].endswith(f"waiting for it, for 0 s so far; {who}")


@pytest.mark.slow
def test_a_holder_that_works_is_waited_for_beyond_the_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_TIMEOUT_S", "2")
    held = threading.Event()

    def work():
        with directory_lock(tmp_path / "net"):
            held.set()
            time.sleep(3.0)

    thread = threading.Thread(target=work)
    thread.start()
    assert held.wait(600)
    with directory_lock(tmp_path / "net"):
        pass
    thread.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.lock"]


def test_the_lock_is_free_after_an_error(tmp_path):
    for _ in range(2):
        try:
            with directory_lock(tmp_path / "net"):
                raise ValueError
        except ValueError:
            pass
