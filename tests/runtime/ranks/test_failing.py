"""Which calls count as failed, so that a rank waits before it goes on."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardwright.runtime.errors import DistributedError
from shardwright.runtime.ranks.failing import FailingCalls
from shardwright.runtime.ranks.late import Failure


class Told:
    """Where rank ``rank`` tells how it is. ``of_all``: the last that each rank has said."""

    def __init__(self, rank=0, of_all=None):
        self.rank, self.of_all = rank, {} if of_all is None else of_all

    def say_failed(self, failure):
        self.of_all[self.rank] = failure

    def failures(self, ranks):
        return {rank: self.of_all[rank] for rank in ranks if rank in self.of_all}


def test_the_end_of_a_recomputation_is_no_failure():
    """torch ends it by an exception, once it has what backward needs."""
    told, seen = Told(), []
    calls = FailingCalls(told, 0, dict)

    def call(x):
        with calls:
            seen.append("begun")
            y = x.sin().exp()
            seen.append("ended")
            return y

    checkpoint(call, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == ["begun", "ended", "begun"] and not told.of_all
    with pytest.raises(ValueError, match="no"), calls:
        raise ValueError("no")
    assert told.of_all[0].text == "ValueError: no"


def test_a_rank_that_fails_again_before_others_have_read_of_the_first_time():
    """Both ranks fail in a call in which they have communicated, then in the check of the next
    one.
    """
    of_all, begun = {}, [{"0,1": 0}, {"0,1": 0}]
    ranks = [
        FailingCalls(Told(rank, of_all), rank, lambda r=rank: dict(begun[r])) for rank in (0, 1)
    ]

    def fail(rank, collectives):
        with pytest.raises(ValueError, match="no"), ranks[rank]:
            begun[rank]["0,1"] += collectives
            raise ValueError("no")

    fail(0, 2)
    fail(1, 2)
    fail(0, 0)  # rank 0 is ahead
    fail(1, 0)
    for calls in ranks:
        with calls:
            pass
    fail(0, 1)
    of_all[1] = Failure("it missed rank 0", {"0,1": 4})
    with pytest.raises(DistributedError, match="rank 0 cannot go on after an error"), ranks[0]:
        pass
