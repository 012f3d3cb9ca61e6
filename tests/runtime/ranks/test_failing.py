"""Which calls count as failed, so that a rank waits before it goes on."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from shardwright.runtime.ranks.failing import FailingCalls


class Told:
    """Where ranks tell how they are: what this one has said."""

    def __init__(self):
        self.failures_said = []

    def say_failed(self, failure):
        self.failures_said.append(failure.text)


def test_the_end_of_a_recomputation_is_no_failure():
    """torch ends it by an exception, once it has what backward needs."""
    told, seen = Told(), []
    calls = FailingCalls(told, 0, lambda: {})

    def call(x):
        with calls:
            seen.append("begun")
            y = x.sin().exp()
            seen.append("ended")
            return y

    checkpoint(call, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == ["begun", "ended", "begun"] and not told.failures_said
    with pytest.raises(ValueError, match="no"), calls:
        raise ValueError("no")
    assert told.failures_said == ["ValueError: no"]
