"""What one process can see of another."""

import os
import signal
import subprocess
import time
from dataclasses import replace

import pytest

from shardwright.runtime.ranks import processes
from shardwright.runtime.ranks.processes import Process, described

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")


def test_a_process_runs_is_stopped_and_is_gone():
    child = subprocess.Popen(["sleep", "600"])
    started = processes._status(child.pid)[1]
    process = Process.from_json(replace(Process.own(), pid=child.pid, started=started).to_json())
    try:
        assert process.state() == "runs"
        child.send_signal(signal.SIGSTOP)
        until(lambda: process.state() == "is stopped")
        assert described(2, process) == f"rank 2 (process {child.pid} on {process.host}) is stopped"
        # The number was used again.
        assert replace(process, started=process.started - 1).state() == "is gone"
    finally:
        child.kill()
    until(lambda: process.state() == "is gone")  # before anybody has asked for its exit status
    child.wait()
    assert process.state() == "is gone"


def test_of_other_machines_nothing_is_known():
    elsewhere = replace(Process.own(), machine="another one", host="node7", pid=12)
    assert elsewhere.state() is None
    assert (
        described(1, elsewhere)
        == "rank 1 (process 12 on node7) is on another machine, which nothing is known of"
    )
    assert described(1, None) == "rank 1 has not come so far"


def until(is_so):
    while not is_so():
        time.sleep(0.01)
