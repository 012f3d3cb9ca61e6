"""The lock of a directory of generated files."""

import subprocess
import sys
import threading
import time

from shardwright.compiler.locks import directory_lock


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
from shardwright.compiler.locks import directory_lock
with directory_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_process_that_died_is_free(tmp_path, caplog):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "net")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"

    def kill_when_somebody_waits():
        while not caplog.messages:
            time.sleep(0.01)
        holder.kill()

    with caplog.at_level("INFO"):
        threading.Thread(target=kill_when_somebody_waits, daemon=True).start()
        with directory_lock(tmp_path / "net"):
            assert holder.wait() != 0
    assert caplog.messages == [f"another process is compiling into {tmp_path / 'net'}: waiting for it"]


def test_the_lock_is_free_after_an_error(tmp_path):
    for _ in range(2):
        try:
            with directory_lock(tmp_path / "net"):
                raise ValueError
        except ValueError:
            pass
