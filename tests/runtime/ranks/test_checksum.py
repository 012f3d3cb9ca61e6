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


def test_every_word_of_a_long_tensor_counts():
    """Long tensors are summed in chunks; their places count, too."""
    x = torch.arange(400_003, dtype=torch.float32)
    swapped, changed = x.clone(), x.clone()
    swapped[:262_144] = x[:262_144].view(2, -1).flip(0).flatten()  # chunks
    changed[-1] = 0
    sums = {int(checksum(other)) for other in (x, swapped, changed, x[:-1], x[1:])}
    assert len(sums) == 5
