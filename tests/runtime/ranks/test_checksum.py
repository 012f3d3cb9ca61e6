"""Checksums: equal for equal tensors only."""

import pytest
import torch

from shardwright.runtime.ranks.checksum import checksum, differing
from shardwright.runtime.ranks.threads import run_ranks
from shardwright.runtime.ranks.world import current_world


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64],
)
def test_every_bit_and_place_counts(dtype):
    x = torch.arange(35).view(5, 7).to(dtype)
    assert checksum(x) == checksum(x.clone()) == checksum(x.t().contiguous().t())
    others = [x.flip(0), x.t(), x.reshape(7, 5), x[:4], x.clone().fill_(1)]
    changed = x.clone()
    changed[4, 6] = 0
    assert len({int(checksum(other)) for other in (x, *others, changed)}) == 7


def test_nan_equals_itself_and_empty_tensors_have_shapes():
    x = torch.tensor([1.0, float("nan")])
    assert checksum(x) == checksum(x.clone())
    assert checksum(torch.empty(0, 3)) != checksum(torch.empty(3, 0))
    assert checksum(torch.tensor(2.0)) != checksum(torch.tensor(3.0))


def test_ranks_are_named_by_what_they_agree_on():
    def compare(rank):
        tensors = {"same": torch.ones(2), "other": torch.tensor([0, 1, 0][rank])}
        return differing(tensors, current_world().everyone), differing(
            {"same": torch.ones(2)}, current_world().everyone
        )

    assert run_ranks(3, compare) == [(("other", [[0, 2], [1]]), None)] * 3
