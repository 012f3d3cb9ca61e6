"""Messages between ranks: the n-th receive of a channel gets its n-th message, whoever is
earlier.
"""

import pytest
import torch

from shardwright.runtime.errors import DistributedError
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import SoloWorld, count_communication, current_world

EVERYONE = [(a, b) for a in range(3) for b in range(3) if a != b]


def test_receives_get_messages_in_the_order_in_which_they_were_posted():
    def on_rank(rank):
        messages = current_world().connect(EVERYONE)
        if rank == 0:
            for i in range(4):
                messages.send(torch.full((i + 1,), float(i)), 1, f"'{i}'", phase="forward")
            return None
        if rank == 1:
            buffers = [torch.empty(i + 1) for i in range(4)]
            works = [
                messages.receive_(x, 0, f"{i}", phase="forward") for i, x in enumerate(buffers)
            ]
            for work in reversed(works):  # waited for in another order
                work.wait()
            return [x.tolist() for x in buffers]
        return None

    assert run_ranks(3, on_rank)[1] == [[float(i)] * (i + 1) for i in range(4)]


def test_a_tensor_may_change_once_its_message_is_completed():
    def on_rank(rank):
        messages = current_world().connect([(0, 1)])
        x = torch.ones(3)
        if rank == 0:
            sending = messages.send(x, 1, "'x'", phase="forward")
            sending.wait()
            assert sending.is_completed()
            x.zero_()
        else:
            messages.receive_(x.zero_(), 0, "'x'", phase="forward").wait()
            assert x.sum() == 3

    run_ranks(2, on_rank)


def test_messages_are_counted():
    def on_rank(rank):
        messages = current_world().connect([(0, 1)])
        with count_communication() as volume:
            if rank == 0:
                messages.send(torch.ones(3, 2), 1, "'x'", phase="backward")
            else:
                messages.receive_(torch.ones(3, 2), 0, "'x'", phase="backward").wait()
        return volume.elements(axis="stages", phase="backward"), volume.total().received

    assert run_ranks(2, on_rank) == [(6, 0), (6, 6)]


def test_ranks_that_wait_for_each_other_are_named():
    def on_rank(rank):
        messages = current_world().connect([(0, 1), (1, 0)])
        messages.receive_(torch.empty(1), 1 - rank, f"{rank}F0 for 'x'", phase="forward").wait()

    with pytest.raises(DistributedError) as caught:
        run_ranks(2, on_rank)
    assert str(caught.value) == (
        "the ranks wait for each other\n"
        "  why:   rank 0 waits in 0F0 for 'x' from rank 1; rank 1 waits in 1F0 for 'x' from rank 0"
    )


def test_one_rank_alone_has_no_channels():
    SoloWorld().connect([])
