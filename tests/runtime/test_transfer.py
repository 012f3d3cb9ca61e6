"""What crosses between stages: every receiver gets each element of its piece once, from a rank that
has it.
"""

import random
from collections import Counter

import pytest
import torch
from layouts import encode

from shardwright.runtime.atoms import Atom
from shardwright.runtime.layout import Layout, Mesh
from shardwright.runtime.transfer import Holding, pieces

MESHES = [{}, {"tp": 2}, {"tp": 3}, {"tp": 4}, {"dp": 2, "tp": 2}]


def random_holding(rng: random.Random, shape: tuple[int, ...], first_rank: int) -> Holding:
    mesh = Mesh.of(rng.choice(MESHES))
    dims: list[list[str]] = [[] for _ in shape]
    for axis in mesh.names:
        if rng.random() < 0.7:
            rng.choice(dims).append(axis)
    atoms = []
    for size, axes in zip(shape, dims, strict=True):
        if size % 3 == 0 and axes and rng.random() < 0.4:  # as fused query, key and value
            atoms.append((Atom((3,)), Atom((size // 3,), tuple(axes))))
        else:
            atoms.append((Atom((size,), tuple(axes)),))
    return Holding(Layout(tuple(atoms)), mesh, tuple(range(first_rank, first_rank + mesh.size)))


@pytest.mark.parametrize("seed", range(40))
def test_every_element_arrives_once(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice([1, 3, 4, 6, 7]) for _ in range(rng.randint(1, 3)))
    source = random_holding(rng, shape, 0)
    target = random_holding(rng, shape, rng.choice([0, source.mesh.size]))
    value = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    held = dict(zip(source.ranks, encode(value, source.layout, source.mesh), strict=True))
    wanted = dict(zip(target.ranks, encode(value, target.layout, target.mesh), strict=True))
    arrived = {rank: torch.zeros_like(piece) for rank, piece in wanted.items()}
    for (sender, receiver), boxes in pieces(source, target).items():
        for here, there in boxes:
            part = held[sender][tuple(slice(a, b) for a, b in here)]
            arrived[receiver][tuple(slice(a, b) for a, b in there)] += part
    for rank, piece in wanted.items():
        assert torch.equal(arrived[rank], piece)


def test_a_rank_keeps_its_own_copy_and_copies_share_the_work() -> None:
    whole = Layout.whole((4, 6))
    four = Mesh.of({"tp": 4})
    assert {
        s
        for s, r in pieces(Holding(whole, four, (0, 1, 2, 3)), Holding(whole, four, (0, 1, 2, 3)))
        if s != r
    } == set()
    senders = Counter(
        s
        for s, _ in pieces(
            Holding(whole, Mesh.of({"tp": 2}), (0, 1)), Holding(whole, four, (2, 3, 4, 5))
        )
    )
    assert senders == {0: 2, 1: 2}
