"""Process groups are gone when the interpreter ends: their threads must not free anything after
that.
"""

import subprocess
import sys

import pytest
import torch

from shardwright.runtime.ranks.process_group import ProcessGroupTransport

LEAVING = """
import atexit
from pathlib import Path

PF_EXITING = 4  # one that has been joined may be listed a moment longer

def threads():
    for task in Path("/proc/self/task").iterdir():
        try:
            stat = (task / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        name, _, fields = stat.partition("(")[2].rpartition(")")
        if not int(fields.split()[6]) & PF_EXITING:
            yield name

@atexit.register  # before all others, so it runs after them
def show_threads():
    print(sorted(threads()))

import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
torch._subclasses.fake_tensor.FakeTensorMode()  # imports torch._dynamo, as tracing does

from shardwright.runtime.ranks.process_group import ProcessGroupTransport, ProcessMessages
from shardwright.runtime.ranks.world import current_world

world = current_world()
transport = ProcessGroupTransport(dist.group.WORLD, torch.device('cpu'))
kept = transport, ProcessMessages(0, {{(0, 1): dist.group.WORLD}})
kept[0].barrier()
dist.destroy_process_group()
show_threads()
"""


@pytest.mark.slow
def test_no_thread_of_a_destroyed_group_sees_the_interpreter_end(tmp_path):
    code = LEAVING.format(store=tmp_path / "store")
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    before, after = done.stdout.splitlines()
    assert "pt_gloo_runloop" in before, (
        "somebody holds the group up to here: else this shows nothing"
    )
    assert "gloo" not in after


class Recorded:
    """A group of one that notes what it is given, and does nothing."""

    def __init__(self):
        self.given = []

    def allreduce(self, tensors, options):
        self.given.append((tensors, options))
        return "work"

    def all_to_all_single(self, result, x, receive_sizes, send_sizes, options):
        self.given.append(([result, x], options))
        return "work"

    alltoall_base = all_to_all_single


def test_the_host_calls_the_group_itself():
    """torch's functions around it look at their arguments in a dozen calls of Python. They also
    make real numbers of complex ones, so that is done here.
    """
    group = Recorded()
    transport = ProcessGroupTransport(group, torch.device("cpu"))
    x, result = torch.ones(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.complex64)
    assert transport.all_reduce_(x, "max") == "work"
    assert transport.all_to_all(x, [3], result, [3]) == "work"
    (((summed,), reduction), ((filled, sent), exchange)) = group.given
    assert reduction.reduceOp == torch.distributed.ReduceOp.MAX
    assert reduction.asyncOp and exchange.asyncOp
    for real, given in ((summed, x), (sent, x), (filled, result)):
        assert real.dtype == torch.float32 and real.data_ptr() == given.data_ptr()
    assert transport.num_calls == 2
